"""Runs the journals of one store: opens the bucket, takes over what this store held before, brings
every object there, and takes over from stores that are gone.

    probe ─► register a journal ─► intent ─► fence of our last journal ─► load ─► serve ─► PUT ... ─► stop

A store writes one journal for each time that it took over something. While the bucket is away, the
store's other streams go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from iris.core.backoff import Backoff
from iris.crypto.keys import public_id
from iris.errors import ConfigError, IrisError
from relay.store.bucket.checkpointing import Checkpoints
from relay.store.bucket.history import Registration, end_of, registrations
from relay.store.bucket.loading import Loaded, load
from relay.store.bucket.moves import Moves
from relay.store.bucket.objects import BucketError, Objects, probe
from relay.store.bucket.pace import Pace
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import (
    Intent,
    ObjectDamaged,
    Registered,
    Released,
    Sealer,
    Taken,
    journal_key,
)
from relay.store.bucket.seen import RolledBack, Seen
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.succession import Unfenced, begin, fence
from relay.store.bucket.writer import Flying, Writer
from relay.store.database import Database, write_beside
from relay.store.log import Log

log = logging.getLogger(__name__)

STATE_FILE: Final = "journals.json"
"""File beside the logs that names the journals of this store."""
TICK_S: Final = 0.01
LOOK_S: Final = 0.5
"""Pause between two checks whether other stores are gone."""
FAILOVER_S: Final = 5.0
"""How long a store must be gone until its streams are taken over."""
UNSEEN_S: Final = 60.0
"""The same for a store that this one has never seen: after a power cut of the whole site it may be about to start."""
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 5.0
CHECKPOINT_BYTES: Final = 64 << 20
"""A checkpoint is written when a journal has more than this, and more than three times what its streams have."""
CHECK_US: Final = 5_000_000
"""Pause between two checks whether a journal to which nothing is written is still ours."""
INTENT_BYTES: Final = 64
WARN_S: Final = 10.0
"""Pause between two log lines about a bucket that does not answer."""


class Owner(Protocol):
    """The store of a keeper."""

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]]) -> None:
        """Serve the streams that were found: uuid -> their files and copier."""

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


class Lost(IrisError):
    """Another store has taken over this store's streams."""


class Keeper:
    """The bucket of one store. Call `run` until it is cancelled, then `drain`."""

    def __init__(
        self, shelf: Shelf, objects: Objects, store: bytes, label: str, owner: Owner, *, now_us: Callable[[], int],
        wall_us: Callable[[], int], failover_s: float = FAILOVER_S, checkpoint_bytes: int = CHECKPOINT_BYTES,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        """`store` is this store's public key. `now_us` is never set, `wall_us` is shown to people."""
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
        self._writers: list[Writer] = []
        self._begun: dict[tuple[str, ...], list[tuple[Writer, dict[str, Registration]]]] = {}
        """Journals that are not served yet, by what they are about to take: the last one is for the next try. Those
        before it have ended, and may hold a part of it already."""
        self._opening = asyncio.Lock()
        """One journal is opened at a time: each removes the databases that nobody has in use."""
        self._own: list[str] | None = None
        """The journal that we had last for new streams; those of the last run of this store; None: not read yet."""
        self._taking: dict[bytes, tuple[list[str], Set[bytes]]] = {}
        """Store -> its journals that we are about to take, and the stores that may hold them meanwhile, until that has
        succeeded: after a failure some of them may have our fence already, and nobody else takes them from us."""
        self._checkpoints: dict[str, Checkpoints] = {}
        """Journal of ours -> what keeps it small."""
        self._checkpoint_bytes = checkpoint_bytes
        self._moves = shelf.mover = Moves(
            objects, self._sealer, store, shelf, owner, self._opening, now_us, self._warn
        )
        self._puts: set[asyncio.Task[None]] = set()
        self._checks = 0
        self._warned_s = 0.0

    @property
    def url(self) -> str:
        """Where the bucket is."""
        return self._objects.url

    def check(self) -> None:
        """Check soon whether our journals are still ours, because this store was away from its relay."""
        self._checks += 1
        for writer in self._writers:
            writer.on_change()

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
            await self._cancel_puts()

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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                again = not self._puts
                while any(not writer.idle and not writer.ended for writer in self._writers):
                    for writer in self._writers:
                        writer.close_object()
                        self._put_all(writer, writer.flying if again else ())
                    again = False
                    await asyncio.sleep(TICK_S)
        await self._cancel_puts()
        self._seen.save_or_warn()
        self._owner.flush()
        return all(writer.idle or writer.ended for writer in self._writers)

    async def restore(self) -> int:
        """Take all journals of the bucket, whoever writes them, and bring their streams to this disk; return how many.

        The store that starts here next serves them. Raises BucketError, ConfigError, ObjectDamaged, LogError, OSError.
        """
        if self._store not in self._taking:
            found = await registrations(self._objects, self._sealer)
            if not found:
                raise ConfigError(f"bucket {self.url}: no store has written to it; check the URL")
            self._taking[self._store] = (
                await self._that_hold(found),
                {one.registered.store for one in found},
            )
        writer, loaded = await self._open(*self._taking[self._store])
        del self._taking[self._store]
        if not await self.drain(FAILOVER_S * 6):
            raise BucketError(
                f"bucket {self.url}: it did not take everything in time; run the command again"
            )
        if writer.ended:
            raise BucketError(f"bucket {self.url}: {writer.ended}; stop that store")
        return loaded

    async def _that_hold(self, found: Sequence[Registration]) -> list[str]:
        """Return the ids of those of these journals that may hold something. Raises BucketError, ObjectDamaged."""
        ends = [await end_of(self._objects, self._sealer, one) for one in found]
        return [
            one.registered.journal
            for one, end in zip(found, ends, strict=True)
            if end.fence is None and end.number
        ]

    # -- our own streams -------------------------------------------------------------------------------------

    async def _keep_own(self) -> None:
        """Hold what this store held before, and have a journal for new streams."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
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
            await self._write(writer)
            # Another store holds what this journal had. Begin a new one for what is created now.
            self._shelf.writer, self._shelf.away = None, writer.ended

    # -- streams of stores that are gone ---------------------------------------------------------------------

    async def _succeed_others(self, group: asyncio.TaskGroup) -> None:
        """Take over from stores of the bucket that cannot be seen any more."""
        began_s = looked_s = self._now_us() / 1e6
        seen_s: dict[str, float] = {}
        known: list[Registration] = []
        done: set[str] = set()
        empty: set[str] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = self._now_us() / 1e6
            visible = self._owner.stores()
            if visible is None:
                began_s = now_s  # we have just lost our relay, and see nobody
                seen_s = dict.fromkeys(seen_s, now_s)
                continue
            for address in sorted(visible - seen_s.keys() - {public_id(self._store).hex()}):
                log.info("store.peer_seen", extra={"fields": {"store": address}})
            seen_s |= dict.fromkeys(visible, now_s)
            if self._shelf.writer is None:
                continue
            try:
                late = any(now_s - at_s >= self._failover_s for at_s in seen_s.values())
                if not known or late or now_s - looked_s >= UNSEEN_S:
                    known += await registrations(self._objects, self._sealer, len(known) + 1)
                    self._seen.note_registered(known[-1:])
                    looked_s = now_s
                    empty.clear()  # a store that was not seen for a while may have gone on
            except (IrisError, OSError) as err:
                self._warn(err)
                continue
            gone = [
                one
                for one in known
                if one.registered.journal not in done | empty
                and self._is_gone(one.registered, visible, seen_s, began_s, now_s)
            ]
            stores = {self._store, *(one.registered.store for one in gone)}
            read = await self._find_held(gone, stores, done, empty)
            if await self._take_all(group) and read:
                seen_s = {
                    address: at_s
                    for address, at_s in seen_s.items()
                    if now_s - at_s < self._failover_s
                }

    async def _find_held(
        self, gone: Sequence[Registration], stores: Set[bytes], done: set[str], empty: set[str]
    ) -> bool:
        """Note in `_taking` what journals of these stores hold; return whether all could be read.

        One that cannot be read is not in the way of the others.
        """
        held: dict[bytes, list[str]] = {}
        read = True
        for one in gone:
            try:
                end = await end_of(self._objects, self._sealer, one)
            except (IrisError, OSError) as err:
                self._warn(err)
                read = False
                continue
            if end.fence is not None:
                done.add(one.registered.journal)
            elif not end.number:
                empty.add(one.registered.journal)
            else:
                held.setdefault(one.registered.store, []).append(one.registered.journal)
        for store, journals in held.items():
            self._taking.setdefault(store, (journals, stores))
        return read

    async def _take_all(self, group: asyncio.TaskGroup) -> bool:
        """Take what is noted in `_taking`, store by store; return whether that succeeded."""
        for store, (held, stores) in list(self._taking.items()):
            try:
                writer, count = await self._open(held, stores)
            except (IrisError, OSError) as err:
                self._warn(err)
                continue
            del self._taking[store]
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

    def _is_gone(
        self, registered: Registered, visible: set[str], seen_s: dict[str, float], began_s: float, now_s: float
    ) -> bool:  # fmt: skip
        """Return whether the store of a journal was not seen for long enough."""
        address = public_id(registered.store).hex()
        if registered.store == self._store or address in visible:
            return False
        last_s = seen_s.get(address)
        if last_s is not None:
            return now_s - last_s >= self._failover_s
        return now_s - began_s >= UNSEEN_S

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
            known = {one.registered.journal: one for one in (*earlier, mine)}
            begun.append((Writer(mine.registered.journal, self._sealer, mine.hash), known))
        writer, known = begun[-1]
        if self._writers or len(begun) > 1:
            self._save()  # what is fenced by this journal leads to it, and nothing else does
        taken: dict[str, None] = {}
        for victim in victims:
            if victim not in known:
                raise ObjectDamaged(
                    f"bucket {self.url}: journal {victim}, which this store wrote, is missing; "
                    "use the bucket that this store had before, or restore its objects from a backup"
                )
            if (held := await self._take(writer, victim, known, stores)) is not None:
                taken[held] = None
        unsettled: list[Released | Taken] = []
        while True:
            for one in self._writers:
                if one.ended:
                    self._abandon(one)
            unsettled.clear()
            try:
                loaded, covers = await load(
                    self._objects, self._sealer, list(taken), known, shelf.directory, writer.journal,
                    keep={uuid for held in shelf.held.values() for uuid in held}, unsettled=unsettled,
                )  # fmt: skip
                break
            except Unfenced as found:
                for victim in found.victims:
                    for one in self._writers:
                        if one.journal == victim:
                            one.end(
                                "the store opens the stream again, together with others; try again"
                            )
                    if (held := await self._take(writer, victim, known, stores)) is not None:
                        taken[held] = None
        del self._begun[purpose]
        before = self._writers
        try:
            self._writers = [one for one in before if one.journal not in {*victims, *taken}] + [
                writer
            ]
            self._serve(writer, loaded)
        except BaseException:
            # Rows that were added to this journal are not in the bucket. The next try finds them in the databases.
            writer.end("the store could not serve its streams and opens them again")
            self._abandon(writer)
            self._begun[purpose], self._writers = begun, before
            raise
        self._checkpoints[writer.journal] = Checkpoints(
            self._objects, self._sealer, writer, covers, self._checkpoint_bytes,
            lambda: self._owner.logs(writer), self._now_us, self._warn,
        )  # fmt: skip
        self._checkpoints[writer.journal].paused = partial(self._moves.is_open, writer.journal)
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
            return [str(one) for one in json.loads(path.read_bytes())["journals"]]
        except FileNotFoundError:  # the store is new, or somebody has made room on its disk
            found = await registrations(self._objects, self._sealer)
            return await self._that_hold(
                [one for one in found if one.registered.store == self._store]
            )
        except (ValueError, KeyError, TypeError) as err:
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
        """Take the journal in which the streams of `victim` are now, if one of `stores` wrote it; return it."""
        while True:
            intent = writer.add(Intent(victim), INTENT_BYTES, self._now_us())
            writer.close_object()
            await self._land_all(writer)
            made, end = await fence(
                self._objects, self._sealer, known[victim], writer.journal, intent
            )
            by = made.by
            if by == writer.journal:
                self._seen.note_end(known[victim], end)
                return victim
            if any(by == one.journal and not one.ended for one in self._writers):
                return None  # we hold it already
            successor = known.get(by)
            if (
                successor is None
                or successor.registered.store not in stores
                or successor.number >= known[writer.journal].number
            ):
                fields = {"journal": victim, "by": by}
                log.warning("store.journal_taken", extra={"fields": fields})
                return None
            victim = by

    async def _land_all(self, writer: Writer) -> None:
        """Bring everything to the bucket. Raises BucketError, or Lost, which ends the journal."""
        while not writer.idle:  # after tries that failed, more wait than may fly at once
            writer.take_off(self._now_us())
            for flying in writer.flying:
                try:
                    await self._create(writer, flying)
                except Lost as err:
                    writer.end(str(err))
                    raise

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
        self._put_all(writer, writer.flying)
        compacting = asyncio.get_running_loop().create_task(
            self._checkpoints[writer.journal].run(), name="iris-bucket-checkpoints"
        )
        ours = False
        try:
            await self._write_on(writer)
        except Exception:  # whoever called takes this journal again
            log.exception("store.fault", extra={"fields": {"stream": f"all of {self.url}"}})
            writer.end("the store had an internal error and opens the stream again")
            ours = True
        finally:
            compacting.cancel()
            await asyncio.gather(compacting, return_exceptions=True)
        self._abandon(writer)
        self._owner.flush()
        return not ours

    def _abandon(self, writer: Writer) -> None:
        """Serve the streams of an ended journal no more. Idempotent."""
        self._checkpoints.pop(writer.journal, None)
        if writer.journal in self._shelf.held:
            try:
                self._owner.abandon(writer)
            except Exception:  # the other journals go on
                log.exception("store.fault", extra={"fields": {"stream": f"all of {self.url}"}})
            del self._shelf.held[writer.journal]

    async def _write_on(self, writer: Writer) -> None:
        checked_us, checks = self._now_us(), self._checks
        pace = Pace(writer, self._now_us)
        while not writer.ended:
            self._put_all(writer)
            await pace.wait(checked_us + CHECK_US)
            if not writer.idle:
                checked_us = self._now_us()
            elif checks != self._checks or self._now_us() >= checked_us + CHECK_US:
                checks, checked_us = self._checks, self._now_us()
                await self._check(writer)

    async def _check(self, writer: Writer) -> None:
        """Check whether somebody has ended a journal to which nothing is written now."""
        try:
            taken = await self._objects.exists(journal_key(writer.journal, writer.number))
        except BucketError as err:
            writer.failing = str(err)
            self._warn(err)
            return
        writer.failing = ""
        if taken and writer.idle:
            lost = self._lost(writer)
            log.error("store.journal_lost", extra={"fields": {"error": str(lost)}})
            writer.end(str(lost))

    def _lost(self, writer: Writer) -> Lost:
        return Lost(
            f"another store of the bucket has taken over this store's journal {writer.journal}"
        )

    def _put_all(self, writer: Writer, again: Sequence[Flying] = ()) -> None:
        """Start to create what is due, and `again` what an earlier task left."""
        for flying in (*again, *writer.take_off(self._now_us())):
            put = self._put(writer, flying)
            task = asyncio.get_running_loop().create_task(put, name="iris-put")
            self._puts.add(task)
            task.add_done_callback(self._puts.discard)

    async def _put(self, writer: Writer, flying: Flying) -> None:
        """Create one object, as often as it takes."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
        while not writer.ended:
            try:
                await self._create(writer, flying)
            except BucketError as err:
                writer.failing = str(err)
                self._warn(err)
                await asyncio.sleep(backoff.failed())
            except Lost as err:
                log.error("store.journal_lost", extra={"fields": {"error": str(err)}})
                writer.end(str(err))
            else:
                writer.failing = ""
                self._owner.flush()
                return

    async def _create(self, writer: Writer, flying: Flying) -> None:
        """Create an object, or see that it is there from an earlier try. Raises BucketError or Lost."""
        if not await self._objects.create(flying.key, flying.sealed):
            there = await self._objects.get(flying.key)
            if there is None:
                raise BucketError(f"bucket {self.url}: {flying.key} exists, but cannot be read")
            if there != flying.sealed:
                raise self._lost(writer)
        writer.landed(flying)
        self._seen.note_landed(writer, flying)

    async def _cancel_puts(self) -> None:
        puts = list(self._puts)
        for task in puts:
            task.cancel()
        await asyncio.gather(*puts, return_exceptions=True)
        self._puts.clear()

    # -- the log ---------------------------------------------------------------------------------------------

    def _cannot(self, err: Exception) -> None:
        self._shelf.away = str(err)
        if self._may_warn():
            if isinstance(err, RolledBack):
                log.error("store.bucket_rolled_back", extra={"fields": {"error": str(err)}})
            else:
                log.warning("store.bucket_not_opened", extra={"fields": {"error": str(err)}})

    def _warn(self, err: Exception) -> None:
        if not self._may_warn():
            return
        if isinstance(err, RolledBack):
            log.error("store.bucket_rolled_back", extra={"fields": {"error": str(err)}})
        else:
            waiting = sum(writer.backlog for writer in self._writers)
            fields = {"error": str(err), "waiting_bytes": waiting}
            log.warning("store.bucket_away", extra={"fields": fields})

    def _may_warn(self) -> bool:
        """Return whether a line may be logged, at most one in `WARN_S`."""
        now_s = self._now_us() / 1e6
        if self._warned_s and now_s < self._warned_s + WARN_S:
            return False
        self._warned_s = now_s
        return True
