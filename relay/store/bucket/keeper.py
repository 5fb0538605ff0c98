"""Runs the journals of one store: opens the bucket, takes over what this store held before, brings
every object there, and takes over from stores that are gone.

    probe ─► register a journal ─► intent ─► fence of our last journal ─► load ─► serve ─► PUT ... ─► stop

A store begins a journal at its start, and another one at each takeover. While the bucket is away, the
store's other streams continue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from iris.core.backoff import Backoff
from iris.errors import ConfigError, IrisError
from relay.store.bucket.checkpointing import Checkpoints
from relay.store.bucket.creating import Creations
from relay.store.bucket.history import Registration, end_of, registrations, that_hold
from relay.store.bucket.loading import Loaded, load
from relay.store.bucket.lookout import FAILOVER_S, Lookout
from relay.store.bucket.moves import Moves
from relay.store.bucket.objects import BucketError, Objects, probe
from relay.store.bucket.puts import AGAIN_MAX_S, RETRY_MAX_S, RETRY_MIN_S, Lost, Puts
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import (
    Intent,
    ObjectDamaged,
    Released,
    Sealer,
    Taken,
)
from relay.store.bucket.seen import RolledBack, Seen
from relay.store.bucket.shelf import Left, Shelf
from relay.store.bucket.succession import Unfenced, begin, fence
from relay.store.bucket.writer import FLUSH_US, Flying, Writer
from relay.store.database import Database
from relay.store.files import read_small, write_beside
from relay.store.log import Log

log = logging.getLogger(__name__)

STATE_FILE: Final = "journals.json"
"""File beside the logs that names the journals of this store."""
LOOK_S: Final = 0.5
"""Pause between two checks whether other stores are gone."""
TAKE_MAX_S: Final = 60.0
"""Longest pause between two tries to take over from a store: each reads all that it had."""
CHECKPOINT_BYTES: Final = 64 << 20
"""A checkpoint is written when a journal has more than this, and more than three times what its streams have."""
INTENT_BYTES: Final = 64
WARN_S: Final = 10.0
"""Pause between two log lines about a bucket that does not answer."""


class Owner(Protocol):
    """The store of a keeper."""

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]], *, moved: bool = False) -> None:
        """Serve the streams that were found: uuid -> their files and copier. `moved`: they come from a store that runs,
        or were to go to one."""

    def check_arrival(self, name: str, key_ids: list[bytes], count: int) -> None:
        """Return if a stream of `count` logs can be served under this name and these keys. Raises Refuse."""

    def abandon(self, writer: Writer) -> None:
        """Stop serving the streams of a journal that has ended."""

    def release(self, uuid: bytes) -> dict[bytes, Path]:
        """Stop serving a stream and its dead letters; return uuid -> files, which are closed. Raises LogError."""

    def logs(self, writer: Writer) -> dict[bytes, Log]:
        """Return the open logs of a journal: uuid -> log. Raises LogError if one is not open."""

    def stores(self) -> set[str] | None:
        """Return the addresses of the stores that can be seen; None if nothing is known."""

    def flush(self) -> None:
        """Write answers to the relay."""


class Keeper:
    """The bucket of one store. Call `run` until it is cancelled, then `drain`."""

    def __init__(
        self, shelf: Shelf, objects: Objects, store: bytes, label: str, owner: Owner, *, now_us: Callable[[], int],
        wall_us: Callable[[], int], failover_s: float = FAILOVER_S, checkpoint_bytes: int = CHECKPOINT_BYTES,
        pause_us: int = FLUSH_US, entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        """`store` is this store's public key. `now_us` is never set, `wall_us` is shown to people.

        `pause_us`: longest wait of a write for others that go into the same object.
        """
        self._shelf = shelf
        self._objects = objects
        self._sealer = Sealer(shelf.key, entropy)
        self._seen = Seen(objects, self._sealer, shelf.directory)
        self._store = store
        self._label = label
        self._owner = owner
        self._now_us = now_us
        self._wall_us = wall_us
        self._failover_s = failover_s
        self._pause_us = pause_us
        self._writers: list[Writer] = []
        self._begun: dict[tuple[str, ...], list[tuple[Writer, dict[str, Registration]]]] = {}
        """Journals to take -> journals that were begun for that and are not served yet. The next try uses the last one.
        Those before it have ended, and may already hold a part of what is taken."""
        self._opening = asyncio.Lock()
        """One journal is opened at a time: each removes the databases that nobody has in use."""
        self._own: list[str] | None = None
        """Our last journal for new streams; after a start, the journals of our last run; None until they are read."""
        self._mine: set[str] = set()
        """Journals that this process has begun."""
        self._first = 0
        """Number of the first one."""
        self._intents: dict[str, dict[str, int]] = {}
        """Journal that is not served yet -> journal that it is about to take -> its object that says so."""
        self._taking: dict[bytes, tuple[list[str], Set[bytes]]] = {}
        """Store -> its journals that we are about to take, and the stores that may hold them meanwhile, until that has
        succeeded: after a failure some of them may have our fence already, and nobody else takes them from us."""
        self._tries: dict[bytes, _Tries] = {}
        """Store in `_taking` -> when to try again to take over from it."""
        self._checkpoints: dict[str, Checkpoints] = {}
        """Journal of ours -> its checkpoints, which keep it small."""
        self._checkpoint_bytes = checkpoint_bytes
        self._moves = shelf.mover = Moves(
            objects, self._sealer, store, shelf, owner, self._opening, now_us, self._warn
        )
        self._creations = shelf.creator = Creations(
            objects, self._sealer, shelf, now_us, self._warn, owner.flush
        )
        self._puts = Puts(objects, now_us, self._warn, self._landed, self._lost)
        self._warned_s = 0.0
        self._left = ""
        """Why something could not be taken over at the last try."""
        self._lookout: Lookout | None = None

    @property
    def url(self) -> str:
        """Where the bucket is."""
        return self._objects.url

    def check(self) -> None:
        """Check soon whether our journals are still ours, because this store was away from its relay."""
        self._puts.check(self._writers)

    async def run(self) -> None:
        """Open the bucket, as often as it takes, then bring everything there. Runs until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._again(self._keep_own), name="iris-bucket")
                others = partial(self._succeed_others, group)
                group.create_task(self._again(others), name="iris-bucket-failover")
                group.create_task(self._again(self._seen.keep), name="iris-bucket-seen")
        finally:
            await self._moves.cancel()
            await self._creations.cancel()
            await self._puts.cancel()

    async def _again(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work that never ends. A fault in it is logged, and the work begins again."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("store.fault", extra={"fields": {"stream": f"all of {self.url}"}})
            await asyncio.sleep(RETRY_MAX_S)

    async def drain(self, seconds: float) -> bool:
        """Bring everything that was written to the bucket; return whether that succeeded in time."""
        await self._puts.drain(self._writers, seconds)
        self._seen.save_or_warn()
        self._owner.flush()
        return all(writer.idle or writer.ended for writer in self._writers)

    async def restore(self) -> int:
        """Take all journals of the bucket, whichever store writes them. Return how many streams are on this disk then.

        The store that starts here next serves them. Raises BucketError, ConfigError, ObjectDamaged, LogError, OSError.
        """
        if self._store not in self._taking:
            found = await registrations(self._objects, self._sealer)
            if not found:
                raise ConfigError(f"bucket {self.url}: no store has written to it; check the URL")
            self._taking[self._store] = (
                await that_hold(self._objects, self._sealer, found),
                {one.registered.store for one in found},
            )
        writer, loaded = await self._open(*self._taking[self._store])
        del self._taking[self._store]
        if not await self.drain(FAILOVER_S * 6):
            raise BucketError(
                f"bucket {self.url}: not everything could be written to it in time; run the command again"
            )
        if writer.ended:
            raise BucketError(f"bucket {self.url}: {writer.ended}; stop that store")
        return loaded

    # -- our own streams -------------------------------------------------------------------------------------

    async def _keep_own(self) -> None:
        """Take over what this store held before, and keep a journal for new streams."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
        losses = Backoff(RETRY_MIN_S, AGAIN_MAX_S, random.random)
        while True:
            try:
                if self._own is None:
                    self._own = await self._last_journals()
                writer, _ = await self._open(self._own, {self._store})
            except (IrisError, OSError) as err:
                self._cannot(err)
                await asyncio.sleep(backoff.failed())
                continue
            backoff.succeeded()
            self._own = [writer.journal]
            self._shelf.writer, self._shelf.away = writer, ""
            began_us = self._now_us()
            await self._write(writer)
            # Another store holds what this journal had. Begin a new one for what is created now.
            self._shelf.writer, self._shelf.away = None, writer.ended
            if self._now_us() - began_us > 2 * AGAIN_MAX_S * 1e6:
                losses.succeeded()
            await asyncio.sleep(losses.failed())

    # -- streams of stores that are gone ---------------------------------------------------------------------

    async def _succeed_others(self, group: asyncio.TaskGroup) -> None:
        """Take over from stores of the bucket that cannot be seen any more."""
        lookout = self._lookout = Lookout(
            self._objects, self._sealer, self._seen, self._store, self._failover_s, self._now_us() / 1e6, self._cannot_take
        )  # fmt: skip
        while True:
            await asyncio.sleep(LOOK_S)
            sees = lookout.see(self._owner.stores(), self._now_us() / 1e6)
            self._shelf.succeeding = sees and lookout.missing
            if not sees or not self._shelf.writer:
                continue
            self._left = ""
            try:
                held, stores = await lookout.find()
                for store, journals in held.items():
                    self._taking.setdefault(store, (journals, stores))
                if await self._take_all(group):
                    lookout.taken()
                    self._shelf.succeeding = lookout.missing
            except (IrisError, OSError) as err:
                self._cannot_take(err)
            self._shelf.not_taken = self._left

    async def _take_all(self, group: asyncio.TaskGroup) -> bool:
        """Take what is noted in `_taking`, store by store; return whether that succeeded."""
        for store, (held, stores) in list(self._taking.items()):
            tries = self._tries.setdefault(store, _Tries())
            if self._now_us() < tries.next_us:
                self._left = self._left or tries.why
                continue
            try:
                writer, count = await self._open(held, stores)
            except (IrisError, OSError) as err:
                self._cannot_take(err)
                tries.failed(err, self._now_us())
                continue
            del self._taking[store]
            del self._tries[store]
            fields = {"journals": held, "streams": count, "bucket": self.url}
            log.warning("store.took_over", extra={"fields": fields})
            group.create_task(self._write_taken(writer), name="iris-bucket-taken")
        return not self._taking

    async def _write_taken(self, writer: Writer) -> None:
        """Write a journal that was taken over. After a fault of ours it is taken again."""
        if await self._write(writer):
            self._writers = [one for one in self._writers if one is not writer]
        else:
            journals, _ = self._taking.get(self._store, ([], set()))
            self._taking[self._store] = [*journals, writer.journal], {self._store}

    # -- taking over -----------------------------------------------------------------------------------------

    async def _open(self, victims: Sequence[str], stores: Set[bytes]) -> tuple[Writer, int]:
        """Begin a journal that takes what the journals `victims` hold, and serve it; return how many streams.

        If one of them has passed to a journal of one of these `stores`, that one is taken.
        Raises BucketError, ConfigError, ObjectDamaged, LogError, OSError.
        """
        async with self._opening:
            return await self._open_next(victims, stores)

    async def _open_next(self, victims: Sequence[str], stores: Set[bytes]) -> tuple[Writer, int]:
        shelf = self._shelf
        shelf.make_directory()
        purpose = tuple(victims)
        begun = self._begun.setdefault(purpose, [])
        if not begun or begun[-1][0].ended:
            await probe(self._objects)
            await self._seen.verify(victims)
            mine, earlier = await begin(
                self._objects, self._sealer, self._store, self._label, self._wall_us()
            )
            self._seen.note_begun(mine)
            self._mine.add(mine.registered.journal)
            self._first = self._first or mine.number
            known = {one.registered.journal: one for one in (*earlier, mine)}
            writer = Writer(
                mine.registered.journal, self._sealer, mine.hash, flush_us=self._pause_us
            )
            begun.append((writer, known))
        writer, known = begun[-1]
        if self._writers or len(begun) > 1:
            self._save()  # what is fenced by this journal leads to it, and nothing else does
        taken: dict[str, None] = {}
        # An earlier try may have ended journals for this one that `victims` do not name: see Unfenced.
        for victim in dict.fromkeys((*victims, *self._intents.get(writer.journal, ()))):
            if victim not in known:
                raise ObjectDamaged(
                    f"bucket {self.url}: journal {victim}, which this store wrote, is missing; "
                    "use the bucket that this store had before, or restore its objects from a backup"
                )
            if (held := await self._take(writer, victim, known, stores)) is not None:
                taken[held] = None
        unsettled: list[Released | Taken] = []
        left: dict[bytes, Left] = {}
        while True:
            for one in self._writers:
                if one.ended:
                    self._abandon(one)
            unsettled.clear()
            left.clear()
            try:
                loaded, covers = await load(
                    self._objects, self._sealer, list(taken), known, shelf.directory, writer.journal,
                    keep={uuid for held in shelf.held.values() for uuid in held}, unsettled=unsettled, left=left,
                )  # fmt: skip
                break
            except Unfenced as found:
                for victim in found.victims:
                    for one in self._writers:
                        if one.journal == victim:
                            one.end("the store is opening the stream again; try again")
                    if (held := await self._take(writer, victim, known, stores)) is not None:
                        taken[held] = None
        del self._begun[purpose]
        for one, _ in begun:
            self._intents.pop(one.journal, None)
        before = self._writers
        try:
            self._writers = [one for one in before if one.journal not in {*victims, *taken}] + [
                writer
            ]
            self._serve(writer, loaded)
        except BaseException:
            # Rows that were added to this journal are not in the bucket. The next try finds them in the databases.
            writer.end("the store could not serve its streams, and opens them again; try again")
            self._abandon(writer)
            self._begun[purpose], self._writers = begun, before
            raise
        self._checkpoints[writer.journal] = Checkpoints(
            self._objects, self._sealer, writer, covers, self._checkpoint_bytes,
            lambda: self._owner.logs(writer), self._now_us, self._warn,
        )  # fmt: skip
        # A checkpoint covers what names these objects.
        for each in left.values():
            self._shelf.leave(each)
        self._checkpoints[writer.journal].paused = lambda: (
            self._moves.is_open(writer.journal) or self._shelf.is_leaving
        )
        self._moves.inherit(writer, unsettled)
        fields = {"bucket": self.url, "journal": writer.journal, "streams": len(loaded)}
        log.info("store.bucket_opened", extra={"fields": fields})
        return writer, len(loaded)

    def _serve(self, writer: Writer, loaded: list[Loaded]) -> None:
        """Serve what was loaded for a journal. Raises LogError, OSError."""
        replicas = {one.uuid: self._resume(one, writer) for one in loaded}
        self._shelf.held[writer.journal] = {one.uuid for one in loaded}
        self._save()
        self._owner.adopt({one.uuid: (one.path, replicas[one.uuid]) for one in loaded})

    async def _last_journals(self) -> list[str]:
        """Return the ids of the journals that this store wrote in its last run.

        Raises BucketError, ConfigError, ObjectDamaged.
        """
        path = self._shelf.directory / STATE_FILE
        try:
            return [str(one) for one in json.loads(read_small(path))["journals"]]
        except FileNotFoundError:  # the store is new, or somebody has made room on its disk
            found = await registrations(self._objects, self._sealer)
            ours = [one for one in found if one.registered.store == self._store]
            return await that_hold(self._objects, self._sealer, ours)
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise ConfigError(
                f"data: {path} is damaged: {err}; restore it from a backup, or use `iris store restore` on an empty directory"
            ) from err

    def _save(self) -> None:
        begun = [writer for each in self._begun.values() for writer, _ in each]
        state = json.dumps(
            {"journals": list(dict.fromkeys(one.journal for one in (*self._writers, *begun)))}
        )
        write_beside(str(self._shelf.directory / STATE_FILE), state.encode())
        self._seen.save()

    async def _take(
        self, writer: Writer, victim: str, known: dict[str, Registration], stores: Set[bytes]
    ) -> str | None:  # fmt: skip
        """Take the journal in which the streams of `victim` are now, if one of `stores` wrote it; return it.

        If that store can be seen again, it keeps the journal. Otherwise two stores could end each other's journals for
        ever. Fences are followed past its journals that have ended, because a journal of ours may have ended them.
        """
        while True:
            intents = self._intents.setdefault(writer.journal, {})
            if victim not in intents:  # else it is there from an earlier try
                intents[victim] = writer.add(Intent(victim), INTENT_BYTES, self._now_us())
                writer.close_object()
            await self._puts.land_all(writer)
            made, end = await fence(
                self._objects, self._sealer, known[victim], writer.journal, intents[victim]
            )
            by = made.by
            if by == writer.journal:
                self._seen.note_end(known[victim], end)
                return victim
            if any(by == one.journal and not one.ended for one in self._writers):
                return None  # we hold it already
            successor = known.get(by)
            if successor is not None and self._is_twin(successor):
                fields = {"journal": victim, "by": by, "host": successor.registered.label}
                log.error("store.key_used_twice", extra={"fields": fields})
            if (
                successor is None
                or successor.number >= known[writer.journal].number
                or not (self._may_take(successor.registered.store, stores) or await self._has_ended(successor))
            ):  # fmt: skip
                self._shelf.note_taken()
                fields = {"journal": victim, "by": by}
                log.warning("store.journal_taken", extra={"fields": fields})
                return None
            victim = by

    def _is_twin(self, journal: Registration) -> bool:
        """Return whether another process that runs with our key began a journal."""
        registered = journal.registered
        ours = registered.store == self._store and registered.journal not in self._mine
        return ours and journal.number > self._first

    def _may_take(self, store: bytes, stores: Set[bytes]) -> bool:
        """Return whether a journal of this store may be ended."""
        return store in stores and (self._lookout is None or not self._lookout.sees(store))

    async def _has_ended(self, journal: Registration) -> bool:
        return (await end_of(self._objects, self._sealer, journal)).fence is not None

    def _resume(self, loaded: Loaded, writer: Writer) -> Replica:
        replica = Replica(loaded.uuid, writer, self._now_us, self._shelf.reader)
        if loaded.unsent:
            database = Database.open(str(loaded.path))
            database.copier = replica
            try:
                replica.resume(database, loaded.unsent)
            finally:
                database.close()
        return replica

    # -- writing ---------------------------------------------------------------------------------------------

    async def _write(self, writer: Writer) -> bool:
        """Bring objects to the bucket until the journal ends; return False if that was our own fault."""
        compacting = asyncio.get_running_loop().create_task(
            self._checkpoints[writer.journal].run(), name="iris-bucket-checkpoints"
        )
        ours = False
        try:
            await self._puts.write(writer)
        except Exception:  # whoever called takes this journal again
            log.exception("store.fault", extra={"fields": {"stream": f"all of {self.url}"}})
            writer.end("the store had an internal error, and opens the stream again; try again")
            ours = True
        finally:
            compacting.cancel()
            await asyncio.gather(compacting, return_exceptions=True)
        self._abandon(writer)
        self._owner.flush()
        return not ours

    def _abandon(self, writer: Writer) -> None:
        """Stop serving the streams of an ended journal. Idempotent."""
        self._checkpoints.pop(writer.journal, None)
        if writer.journal in self._shelf.held:
            try:
                self._owner.abandon(writer)
            except Exception:  # the other journals go on
                log.exception("store.fault", extra={"fields": {"stream": f"all of {self.url}"}})
            del self._shelf.held[writer.journal]

    def _landed(self, writer: Writer, flying: Flying) -> None:
        """An object has reached the bucket, and released what waited for it."""
        self._seen.note_landed(writer, flying)
        self._owner.flush()

    # -- the log ---------------------------------------------------------------------------------------------

    def _lost(self, err: Lost) -> None:
        self._shelf.note_taken()
        log.error("store.journal_lost", extra={"fields": {"error": str(err)}})

    def _cannot(self, err: Exception) -> None:
        self._shelf.away = str(err)
        if self._may_warn() and not _log_damage(err):
            log.warning("store.bucket_not_opened", extra={"fields": {"error": str(err)}})

    def _cannot_take(self, err: Exception) -> None:
        if not isinstance(err, BucketError):  # a bucket that is away is reported as such
            self._left = str(err)
        self._warn(err)

    def _warn(self, err: Exception) -> None:
        if not self._may_warn():
            return
        if not _log_damage(err):
            waiting = sum(writer.backlog for writer in self._writers)
            fields = {"error": str(err), "waiting_bytes": waiting}
            away = isinstance(err, BucketError)
            event = "store.bucket_away" if away else "store.bucket_streams_failed"
            log.warning(event, extra={"fields": fields})

    def _may_warn(self) -> bool:
        """Return whether a line may be logged, at most one in `WARN_S`."""
        now_s = self._now_us() / 1e6
        if self._warned_s and now_s < self._warned_s + WARN_S:
            return False
        self._warned_s = now_s
        return True


class _Tries:
    """When to take over from a store, after tries that failed."""

    def __init__(self) -> None:
        self.next_us = 0
        self.why = ""
        """Why this store cannot take over, although the bucket answers."""
        self._backoff = Backoff(LOOK_S, TAKE_MAX_S, random.random)

    def failed(self, err: Exception, now_us: int) -> None:
        """Note that a try has failed. A bucket that was away is tried again soon."""
        away = isinstance(err, BucketError)
        self.why = "" if away else str(err)
        pause_s = self._backoff.failed()
        self.next_us = now_us + int(1e6 * (min(pause_s, RETRY_MAX_S) if away else pause_s))


def _log_damage(err: Exception) -> bool:
    """Log an error of objects that are not as they were written; return False if it is another error."""
    if not isinstance(err, ObjectDamaged):
        return False
    event = "store.bucket_rolled_back" if isinstance(err, RolledBack) else "store.bucket_damaged"
    log.error(event, extra={"fields": {"error": str(err)}})
    return True
