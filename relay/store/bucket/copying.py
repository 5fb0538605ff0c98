"""Brings the copies of a store's `disk` streams to the bucket, and reads them there.

    probe ─► register a journal of copies ─► intent ─► fence of our last one ─► PUT ... ─► stop
                                                                                 │
                        what fell behind is written once more ◄── the bucket answers

A store takes the journals of copies that it wrote itself, and no others: the streams are on its disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from iris.core.backoff import Backoff
from iris.crypto.keys import GroupKey
from iris.errors import ConfigError, IrisError
from relay.store.batches import OP_BYTES
from relay.store.bucket.checkpointing import BACKLOG_BYTES, Checkpoints, remaining
from relay.store.bucket.copies import Copies, Copy, State
from relay.store.bucket.copy_reading import copied_in
from relay.store.bucket.history import Registration, beginning_of, end_of
from relay.store.bucket.objects import Objects, probe
from relay.store.bucket.puts import AGAIN_MAX_S, RETRY_MAX_S, RETRY_MIN_S, Lost, Puts
from relay.store.bucket.sealing import (
    COPIES,
    Covered,
    Intent,
    ObjectDamaged,
    Rows,
    Sealer,
)
from relay.store.bucket.succession import begin, fence
from relay.store.bucket.writer import Writer
from relay.store.errors import LogError
from relay.store.files import read_small, write_beside
from relay.store.log import Log

log = logging.getLogger(__name__)

STATE_FILE: Final = "copies.json"
"""File beside the logs that names the journals of copies of this store."""
CHECK_US: Final = 30_000_000
"""Pause between two checks whether a journal to which nothing is written is still ours."""
CATCH_UP_S: Final = 0.2
CATCH_UP_MAX_S: Final = 60.0
PAUSE_S: Final = 0.02
WARN_S: Final = 10.0


class _Ours(Struct):
    """The file with the journals of this store."""

    journals: list[str]
    covers: list[Covered] = []
    """What may be deleted once the last of them has a checkpoint."""


class Copying:
    """The journal of copies of one store. Call `run` until it is cancelled, then `drain`."""

    def __init__(
        self, copies: Copies, objects: Objects, key: GroupKey, store: bytes, label: str, directory: Path, *,
        now_us: Callable[[], int], wall_us: Callable[[], int], checkpoint_bytes: int,
        ended: Callable[[], Iterable[bytes]] = tuple, verify: Callable[[], Awaitable[None]] | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        """`directory` is for the file with our journals. `ended` returns the uuids of deleted streams."""
        self._copies = copies
        self._objects = objects
        self._sealer = Sealer(key, entropy)
        self._store = store
        self._label = label
        self._directory = directory
        self._now_us = now_us
        self._wall_us = wall_us
        self._checkpoint_bytes = checkpoint_bytes
        self._ended = ended
        self._verify = verify
        self._begun: tuple[Writer, dict[str, Registration]] | None = None
        self._puts = Puts(
            objects, now_us, self._warn, lambda *_: None, self._lost, name="iris-put-copies", check_us=CHECK_US,
            lost_text="another store with the same store.key has ended its journal of copies; give each store a key of its own",
        )  # fmt: skip
        self._warned_us = 0
        copies.on_behind = self._note_behind

    async def run(self) -> None:
        """Bring the copies to the bucket, as often as it takes. Runs until cancelled."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
        losses = Backoff(RETRY_MIN_S, AGAIN_MAX_S, random.random)
        try:
            while True:
                try:
                    writer, covers = await self._open()
                except (IrisError, OSError) as err:
                    self._warn(err)
                    await asyncio.sleep(backoff.failed())
                    continue
                backoff.succeeded()
                began_us = self._now_us()
                try:
                    await self._work(writer, covers)
                except Exception:
                    log.exception("store.fault", extra={"fields": {"stream": "all copies"}})
                    writer.end("the store had an internal error")
                self._copies.lost(writer)
                if self._now_us() - began_us > 2 * AGAIN_MAX_S * 1e6:
                    losses.succeeded()
                await asyncio.sleep(losses.failed())
        finally:
            await self._puts.cancel()

    async def drain(self, seconds: float) -> bool:
        """Bring everything that was written to the bucket; return whether that succeeded in time."""
        writer = self._copies.writer
        if writer is None:
            return not self._copies.lag().bytes
        await self._puts.drain([writer], seconds)
        return writer.idle and not self._copies.lag().behind

    # -- our journal -----------------------------------------------------------------------------------------

    async def _open(self) -> tuple[Writer, list[Covered]]:
        """Begin a journal that takes our last ones; also return what its first checkpoint covers.

        Raises BucketError, ConfigError, ObjectDamaged, LogWriteFailed, OSError.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._begun is None or self._begun[0].ended:
            await probe(self._objects)
            if self._verify is not None:
                await self._verify()
            mine, earlier = await begin(
                self._objects, self._sealer, self._store, self._label, self._wall_us(), COPIES
            )
            known = {one.registered.journal: one for one in (*earlier, mine)}
            self._begun = Writer(mine.registered.journal, self._sealer, mine.hash), known
        writer, known = self._begun
        ours = self._read_ours(known) or _Ours(await self._that_are_here(known))
        if writer.journal not in ours.journals:
            ours.journals.append(writer.journal)
        self._save(ours)  # what is fenced by this journal leads to it, and nothing else does
        ends, covers = {writer.journal: 0}, list(ours.covers)
        fenced: dict[str, str] = {}
        for name in ours.journals:
            if name == writer.journal:
                continue
            journal = known[name]
            end = await end_of(self._objects, self._sealer, journal)
            if end.fence is None and end.number:
                intent = writer.add(Intent(name), 64, self._now_us())
                writer.close_object()
                await self._puts.land_all(writer)
                await fence(self._objects, self._sealer, journal, writer.journal, intent)
                end = await end_of(self._objects, self._sealer, journal)
            if end.fence is not None:
                beginning = await beginning_of(self._objects, self._sealer, journal)
                fenced[name], ends[name] = end.fence.by, end.number - 1
                covers += beginning.covers
                covers.append(Covered(name, beginning.number, end.number))
        ends = {name: end for name, end in ends.items() if _leads_to(name, fenced, writer.journal)}
        covers = await remaining(
            self._objects, list({(each.journal, each.first): each for each in covers}.values())
        )
        self._begun = None
        self._copies.began(writer, ends)
        self._save(_Ours([writer.journal], covers))
        self._copies.ended |= dict.fromkeys(self._ended())
        self._copies.note_ended()
        fields = {"bucket": self._objects.url, "journal": writer.journal, "streams": len(self._copies.all)}  # fmt: skip
        log.info("store.copies_opened", extra={"fields": fields})
        return writer, covers

    def _read_ours(self, known: dict[str, Registration]) -> _Ours | None:
        """Return the journals of our last run; None if that is not known. Raises ObjectDamaged."""
        try:
            ours = msgspec.json.decode(read_small(self._directory / STATE_FILE), type=_Ours)
        except (
            FileNotFoundError
        ):  # the store is new, lost its disk, or somebody has made room there
            return None
        except (OSError, msgspec.DecodeError) as err:
            raise ConfigError(
                f"data: {self._directory / STATE_FILE} is damaged: {err}; delete the file, then the store reads its content from the bucket"
            ) from err
        if missing := [one for one in ours.journals if one not in known]:
            raise ObjectDamaged(
                f"bucket {self._objects.url}: the journal of copies {missing[0]}, which this store wrote, is missing; use the "
                f"bucket that this store used before, or delete {self._directory / STATE_FILE}, then it copies its streams again"
            )
        return ours

    async def _that_are_here(self, known: dict[str, Registration]) -> list[str]:
        """Return the journals with this store's key whose copies are all of streams that it has or has deleted.

        The others are left alone: if its disk was lost, and its key was not, nothing else has these streams.
        Raises BucketError, ObjectDamaged.
        """
        here = {*self._copies.all, *self._copies.ended, *self._ended()}
        fenced: dict[str, str] = {}
        heads: set[str] = set()
        mine = [name for name, one in known.items() if one.registered.store == self._store]
        for name in mine:
            end = await end_of(self._objects, self._sealer, known[name])
            if end.fence is not None:
                fenced[name] = end.fence.by
                continue
            copied = await copied_in(self._objects, self._sealer, name, known)
            if copied <= here:
                heads.add(name)
            else:
                fields = {"journal": name, "streams": [uuid.hex() for uuid in copied - here]}
                log.warning("store.copies_kept", extra={"fields": fields})
        return [name for name in mine if any(_leads_to(name, fenced, head) for head in heads)]

    def _save(self, ours: _Ours) -> None:
        write_beside(
            str(self._directory / STATE_FILE), json.dumps(msgspec.to_builtins(ours)).encode()
        )

    async def _work(self, writer: Writer, covers: list[Covered]) -> None:
        """Bring a journal to the bucket until it has ended."""
        checkpoints = Checkpoints(
            self._objects, self._sealer, writer, covers, self._checkpoint_bytes, self._logs, self._now_us, self._warn,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        helpers = [
            loop.create_task(checkpoints.run(), name="iris-copies-checkpoints"),
            loop.create_task(self._catch_up_all(writer), name="iris-copies-behind"),
        ]
        try:
            await self._puts.write(writer)
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def _logs(self) -> dict[bytes, Log]:
        """Return the logs that are copied. Raises NotFollowing if one is behind: its last copy must stay."""
        found: dict[bytes, Log] = {}
        for uuid, copy in self._copies.all.items():
            if copy.state is not State.FOLLOWING or copy.log is None:
                raise NotFollowing(uuid.hex(), "its copy in the bucket is behind")
            found[uuid] = copy.log
        return found

    # -- what fell behind ------------------------------------------------------------------------------------

    async def _catch_up_all(self, writer: Writer) -> None:
        """Write each stream that is behind to the journal once more, one after the other, while the bucket answers."""
        backoff = Backoff(CATCH_UP_S, CATCH_UP_MAX_S, random.random)
        pause_s = CATCH_UP_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = CATCH_UP_S
            for copy in list(self._copies.all.values()):
                if writer.failing or writer.backlog > BACKLOG_BYTES:
                    break
                if copy.state is not State.BEHIND or copy.log is None or copy.log.failed:
                    continue
                try:
                    whole = await self._catch_up(writer, copy, copy.log)
                except IrisError as err:  # also a log that was closed meanwhile
                    self._warn(err)
                    whole = False
                except Exception:
                    log.exception("store.fault", extra={"fields": {"stream": copy.uuid.hex()}})
                    whole = False
                if not whole:
                    copy.stop()
                    pause_s = backoff.failed()
                    break
                backoff.succeeded()

    async def _catch_up(self, writer: Writer, copy: Copy, whole: Log) -> bool:
        """Write a stream to the journal once more; return whether its copy follows now. Raises LogError, Closed."""
        copy.begin(writer)
        for ops in whole.copied():
            size = sum(len(op.key) + len(op.value) + OP_BYTES for op in ops)
            writer.add(Rows(copy.uuid, ops), size, self._now_us())
            await asyncio.sleep(0)  # appends go first
            while writer.backlog > BACKLOG_BYTES and not writer.ended:  # noqa: ASYNC110 - the bucket takes its time
                await asyncio.sleep(PAUSE_S)
            if copy.state is not State.CATCHING_UP or writer.ended:
                return False
        last = copy.whole()
        writer.close_object()
        while writer.known < last and not writer.ended and copy.state is State.CLOSING:  # noqa: ASYNC110 - the same
            await asyncio.sleep(PAUSE_S)
        if writer.known < last or copy.state is not State.CLOSING:
            return False
        copy.follow()
        return True

    # -- the log ---------------------------------------------------------------------------------------------

    def _lost(self, err: Lost) -> None:
        log.error("store.copies_lost", extra={"fields": {"error": str(err)}})

    def _warn(self, err: Exception) -> None:
        """Log an error, at most one in `WARN_S`."""
        if isinstance(err, NotFollowing):
            return  # it was logged when the copy fell behind, unless that is as it should be: while a stream joins
        if not self._warned_us or self._now_us() >= self._warned_us + WARN_S * 1e6:
            self._warned_us = self._now_us()
            fields = {"error": str(err), "behind_bytes": self._copies.lag().bytes}
            log.warning("store.copies_late", extra={"fields": fields})

    def _note_behind(self, copy: Copy) -> None:
        fields = {"uuid": copy.uuid.hex(), "behind_bytes": copy.lag().bytes}
        log.warning("store.copy_behind", extra={"fields": fields})


class NotFollowing(LogError):
    """A checkpoint of the copies has to wait, because one of them is behind."""


def _leads_to(journal: str, fenced: dict[str, str], last: str) -> bool:
    """Return whether a journal was taken by `last`, or by one that was."""
    for _ in range(len(fenced) + 1):
        if journal == last:
            return True
        if journal not in fenced:
            return False
        journal = fenced[journal]
    return False
