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
from relay.store.bucket.checkpointing import delete, note, remaining, write_all
from relay.store.bucket.history import Registration, end_of, registrations
from relay.store.bucket.loading import Loaded, load
from relay.store.bucket.objects import BucketError, Objects, probe
from relay.store.bucket.replica import Place, Replica
from relay.store.bucket.sealing import (
    Covered,
    Intent,
    ObjectDamaged,
    Registered,
    Sealer,
    journal_key,
)
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.succession import begin, fence
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
OBJECT_BYTES: Final = 64 << 10
"""Assumed size of an object of a journal that was taken."""
COMPACT_S: Final = 1.0
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
        self._store = store
        self._label = label
        self._owner = owner
        self._now_us = now_us
        self._wall_us = wall_us
        self._failover_s = failover_s
        self._writers: list[Writer] = []
        self._begun: dict[tuple[str, ...], tuple[Writer, dict[str, Registration]]] = {}
        """Journals that hold nothing yet, by what they are about to take: for the next try."""
        self._taking: tuple[list[str], set[bytes]] | None = None
        """The journals that we are about to take from other stores, and these stores, until that has succeeded: after a
        failure some of them may have our fence already, and nobody else takes them from us."""
        self._covers: dict[str, list[Covered]] = {}
        """Journal of ours -> what its next checkpoint will cover of the journals that it took."""
        self._checkpoints: dict[str, tuple[int, int]] = {}
        """Journal of ours -> how many checkpoints it has, and the first object of the last one."""
        self._since: dict[str, int] = {}
        """Journal of ours -> bytes that were in it when its last checkpoint began."""
        self._checkpoint_bytes = checkpoint_bytes
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

    async def run(self) -> None:
        """Open the bucket, as often as it takes, then bring everything there. Runs until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._again(self._keep_own), name="iris-bucket")
                others = partial(self._succeed_others, group)
                group.create_task(self._again(others), name="iris-bucket-failover")
        finally:
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
                while any(not writer.idle for writer in self._writers):
                    for writer in self._writers:
                        writer.close_object()
                        self._put_all(writer, writer.flying if not self._puts else ())
                    await asyncio.sleep(TICK_S)
        await self._cancel_puts()
        self._owner.flush()
        return all(writer.idle for writer in self._writers)

    async def restore(self) -> int:
        """Take all journals of the bucket, whoever writes them, and bring their streams to this disk; return how many.

        The store that starts here next serves them. Raises BucketError, ConfigError, ObjectDamaged, LogError, OSError.
        """
        if self._taking is None:
            found = await registrations(self._objects, self._sealer)
            if not found:
                raise ConfigError(f"bucket {self.url}: no store has written to it; check the URL")
            ends = [await end_of(self._objects, self._sealer, one) for one in found]
            held = [
                one.registered.journal
                for one, end in zip(found, ends, strict=True)
                if end.fence is None and end.number
            ]
            self._taking = held, {one.registered.store for one in found}
        _, loaded = await self._open(*self._taking)
        self._taking = None
        if not await self.drain(FAILOVER_S * 6):
            raise BucketError(
                f"bucket {self.url}: it did not take everything in time; run the command again"
            )
        return loaded

    # -- our own streams -------------------------------------------------------------------------------------

    async def _keep_own(self) -> None:
        """Hold what this store held before, and have a journal for new streams."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
        while True:
            try:
                writer, _ = await self._open(self._last_journals(), {self._store})
            except (IrisError, OSError) as err:
                self._cannot(err)
                await asyncio.sleep(backoff.failed())
                continue
            backoff.succeeded()
            self._shelf.writer, self._shelf.away = writer, ""
            await self._write(writer)
            # Another store holds what this journal had. Begin a new one for what is created now.
            self._shelf.writer, self._shelf.away = None, writer.ended

    # -- streams of stores that are gone ---------------------------------------------------------------------

    async def _succeed_others(self, group: asyncio.TaskGroup) -> None:
        """Take over from stores of the bucket that cannot be seen any more."""
        began_s = self._now_us() / 1e6
        seen_s: dict[str, float] = {}
        known: list[Registration] = []
        done: set[str] = set()
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
                if not known or any(now_s - at_s >= self._failover_s for at_s in seen_s.values()):
                    known += await registrations(self._objects, self._sealer, len(known) + 1)
                gone = [
                    one
                    for one in known
                    if one.registered.journal not in done
                    and self._is_gone(one.registered, visible, seen_s, began_s, now_s)
                ]
                held = []
                for one in gone:
                    end = await end_of(self._objects, self._sealer, one)
                    if end.fence is not None or not end.number:
                        done.add(one.registered.journal)
                    else:
                        held.append(one.registered.journal)
                if held and self._taking is None:
                    self._taking = held, {self._store, *(one.registered.store for one in gone)}
                if self._taking is not None:
                    held, stores = self._taking
                    writer, count = await self._open(held, stores)
                    self._taking = None
                    log.warning(
                        "store.took_over",
                        extra={"fields": {"journals": held, "streams": count, "bucket": self.url}},
                    )
                    group.create_task(self._write(writer), name="iris-bucket-taken")
                seen_s = {
                    address: at_s
                    for address, at_s in seen_s.items()
                    if now_s - at_s < self._failover_s
                }
            except (IrisError, OSError) as err:
                self._warn(err)

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
        shelf = self._shelf
        shelf.make_directory()
        purpose = tuple(victims)
        writer, known = self._begun.get(purpose, (None, {}))
        if writer is None or writer.ended:
            await probe(self._objects)
            mine, earlier = await begin(
                self._objects, self._sealer, self._store, self._label, self._wall_us()
            )
            known = {one.registered.journal: one for one in (*earlier, mine)}
            writer = Writer(mine.registered.journal, self._sealer, mine.hash)
            self._begun[purpose] = writer, known
            if self._writers:
                self._save()  # what is fenced by this journal leads to it, and nothing else does
        taken = []
        for victim in victims:
            if victim not in known:
                raise ObjectDamaged(
                    f"bucket {self.url}: journal {victim}, which this store wrote, is missing; "
                    "use the bucket that this store had before, or restore its objects from a backup"
                )
            if (held := await self._take(writer, victim, known, stores)) is not None:
                taken.append(held)
        others = {
            uuid
            for one in self._writers
            if not one.ended
            for uuid in shelf.held.get(one.journal, ())
        }
        loaded, covers = await load(
            self._objects, self._sealer, taken, known, shelf.directory, writer.journal, keep=others
        )
        replicas = {one.uuid: self._resume(one, writer) for one in loaded}
        shelf.held[writer.journal] = {one.uuid for one in loaded}
        self._writers = [one for one in self._writers if not one.ended] + [writer]
        self._save()
        self._covers[writer.journal] = covers
        del self._begun[purpose]
        self._owner.adopt({one.uuid: (one.path, replicas[one.uuid]) for one in loaded})
        fields = {"bucket": self.url, "journal": writer.journal, "streams": len(loaded)}
        log.info("store.bucket_opened", extra={"fields": fields})
        return writer, len(loaded)

    def _last_journals(self) -> list[str]:
        """Return the ids of the journals that this store wrote last. Raises ConfigError."""
        path = self._shelf.directory / STATE_FILE
        live = {writer.journal for writer in self._writers if not writer.ended}
        try:
            journals = json.loads(path.read_bytes())["journals"]
            return [str(one) for one in journals if one not in live]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError(
                f"data: {path} is damaged: {err}; restore it from a backup, or use `iris store restore` on an empty directory"
            ) from err

    def _save(self) -> None:
        writers = [*self._writers, *(writer for writer, _ in self._begun.values())]
        state = json.dumps({"journals": list(dict.fromkeys(one.journal for one in writers))})
        write_beside(str(self._shelf.directory / STATE_FILE), state.encode())

    async def _take(
        self, writer: Writer, victim: str, known: dict[str, Registration], stores: Set[bytes]
    ) -> str | None:  # fmt: skip
        """Take the journal in which the streams of `victim` are now, if one of `stores` wrote it; return it."""
        while True:
            intent = writer.add(Intent(victim), INTENT_BYTES, self._now_us())
            writer.close_object()
            await self._land_all(writer)
            end = await fence(self._objects, self._sealer, known[victim], writer.journal, intent)
            if end.by == writer.journal:
                return victim
            successor = known.get(end.by)
            if (
                successor is None
                or successor.registered.store not in stores
                or successor.number >= known[writer.journal].number
            ):
                fields = {"journal": victim, "by": end.by}
                log.warning("store.journal_taken", extra={"fields": fields})
                return None
            victim = end.by

    async def _land_all(self, writer: Writer) -> None:
        """Bring everything to the bucket. Raises BucketError, or Lost, which ends the journal."""
        writer.take_off(self._now_us())
        for flying in writer.flying:
            try:
                await self._create(writer, flying)
            except Lost as err:
                writer.end(str(err))
                raise

    def _resume(self, loaded: Loaded, writer: Writer) -> Replica:
        replica = Replica(loaded.uuid, writer, self._now_us)
        if loaded.unsent:
            database = Database.open(str(loaded.path))
            database.copier = replica
            try:
                replica.resume(database, loaded.unsent)
            finally:
                database.close()
        return replica

    # -- writing ---------------------------------------------------------------------------------------------

    async def _write(self, writer: Writer) -> None:
        """Bring objects to the bucket until the journal ends."""
        self._put_all(writer, writer.flying)
        compacting = asyncio.get_running_loop().create_task(
            self._compact(writer), name="iris-bucket-checkpoints"
        )
        try:
            await self._write_on(writer)
        except Exception:  # we take our own journal again
            log.exception("store.fault", extra={"fields": {"stream": f"all of {self.url}"}})
            writer.end("the store had an internal error and opens the stream again")
        finally:
            compacting.cancel()
            await asyncio.gather(compacting, return_exceptions=True)
        self._owner.abandon(writer)
        self._shelf.held.pop(writer.journal, None)
        self._owner.flush()

    async def _write_on(self, writer: Writer) -> None:
        checked_us, checks = self._now_us(), self._checks
        while not writer.ended:
            self._put_all(writer)
            await asyncio.sleep(TICK_S)
            if not writer.idle:
                checked_us = self._now_us()
            elif checks != self._checks or self._now_us() >= checked_us + CHECK_US:
                checks, checked_us = self._checks, self._now_us()
                await self._check(writer)

    # -- checkpoints -----------------------------------------------------------------------------------------

    async def _compact(self, writer: Writer) -> None:
        """Write a checkpoint whenever the journal has far more than its streams. Runs until cancelled."""
        backoff = Backoff(COMPACT_S, 60 * COMPACT_S, random.random)
        pause_s = COMPACT_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                logs = self._owner.logs(writer)
                live = sum(each.size_bytes for each in logs.values())
                taken = sum(each.end - each.first for each in self._covers[writer.journal])
                there = writer.written - self._since.get(writer.journal, 0) + taken * OBJECT_BYTES
                if there > max(self._checkpoint_bytes, 3 * live):
                    await self._checkpoint(writer, logs)
            except IrisError as err:  # also a log that was closed or deleted meanwhile
                self._warn(err)
                pause_s = backoff.failed()
            else:
                backoff.succeeded()
                pause_s = COMPACT_S

    async def _checkpoint(self, writer: Writer, logs: dict[bytes, Log]) -> None:
        """Write the journal's streams once more, and delete what that covers.

        Raises BucketError, LogError, ObjectDamaged.
        """
        journal, written = writer.journal, writer.written
        parts = {uuid: each.copied() for uuid, each in logs.items()}
        first = await write_all(writer, parts, self._now_us())
        if writer.ended:
            return
        count, before = self._checkpoints.get(journal, (0, 1))
        taken = await remaining(self._objects, self._covers[journal])
        covers = [*taken, Covered(journal, before, first)]
        await note(
            self._objects, self._sealer, journal, first, writer.before_watched, count + 1, covers
        )
        self._checkpoints[journal], self._since[journal] = (count + 1, first), written
        for uuid, each in self._owner.logs(writer).items():
            if uuid in logs:
                each.note_copied(Place(journal, writer.number).pack())
        await delete(self._objects, covers)
        self._covers[journal] = []
        fields = {"journal": journal, "object": first, "bytes": writer.written - written}
        log.info("store.checkpoint", extra={"fields": fields})

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
            log.warning("store.bucket_not_opened", extra={"fields": {"error": str(err)}})

    def _warn(self, err: Exception) -> None:
        if self._may_warn():
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
