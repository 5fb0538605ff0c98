"""Brings streams of the disk into the bucket while they are in use.

    order ─► Joining, whole stream, each write ─► all of it is there ─► switch ─► the last of it is there ─► decided
                                                                           │
    before: the disk acknowledges, and the bucket follows                  └─ from here on: both acknowledge

Until the decision the stream is on the disk, whatever happens. From the switch on nothing leaves the store that is not
on the disk and in the bucket, so both have everything whichever way it is decided. What the decision means for stores
that succeed this one is in `moved`. A store that is killed in between leaves a note beside the files of the stream
(`relay.store.joining`), and asks at its next start. The copy of the disk stays until the stream has joined, because the
disk may be lost before; `joined` says how a store finds out whether that copy still counts.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from iris.core.backoff import Backoff
from iris.crypto.keys import public_id
from iris.errors import Closed
from iris.wire.stream_items import dead_uuid
from relay.store.batches import OP_BYTES, CopiedBatch
from relay.store.bucket.checkpointing import BACKLOG_BYTES, PAUSE_S
from relay.store.bucket.errands import ASK_MAX_S, ASK_MIN_S, Errands
from relay.store.bucket.joined import FORCED, last_try
from relay.store.bucket.moved import NO, decide
from relay.store.bucket.objects import Objects
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import Joining, Rows, Sealer
from relay.store.bucket.shelf import Candidate, Shelf
from relay.store.bucket.writer import Writer
from relay.store.errors import LogError, Refuse
from relay.store.log import Log

ENTRY_BYTES: Final = 96
STOPPING: Final = "the store is stopping; try again"
MAX_CREATING: Final = 64
"""Most logs at a time for which a store asks the bucket whether it may create them."""
CREATE_S: Final = 10.0
"""How long it asks."""
CREATED: Final = (
    "a store of this bucket has, or had, a stream with this uuid, or was killed while it created one; create the stream "
    "with a new uuid"
)
AWAY: Final = "the bucket did not take the whole stream, so the stream stays on the disk; try again when the bucket answers"


DISPLACED: Final = (
    "an order moves the stream by force to another store, so this one cannot join the bucket; repeat that order if it "
    "failed, and use the new stream"
)


class Draft:
    """Copies one log to a journal until it is decided whether its stream joins. Meanwhile the former copier of the log
    continues.
    """

    durable = False

    def __init__(self, uuid: bytes, copied: Log, writer: Writer, now_us: Callable[[], int]) -> None:
        self.uuid = uuid
        self.log = copied
        self._writer = writer
        self._now_us = now_us
        self._missed = False
        self._before = copied.database.copier
        copied.copy_to(self)

    @property
    def whole(self) -> bool:
        """Whether the journal was given everything that was written since."""
        database = self.log.database
        return not (self._missed or self._writer.ended or database.failed) and database.copier is self  # fmt: skip

    def writing(self, batch: CopiedBatch) -> None:
        if self._before is not None:
            self._before.writing(batch)

    def wrote(self, batch: CopiedBatch, next_offset: int) -> None:
        if self._before is not None:
            self._before.wrote(batch, next_offset)
        if self._missed or self._writer.ended or 2 * self._writer.backlog > self._writer.backlog_limit:  # fmt: skip
            self._missed = True  # neither the disk nor other streams of the bucket wait for this
        else:
            self._writer.add(Rows(self.uuid, batch.ops), batch.size, self._now_us())

    def stop(self) -> None:
        """Stop copying. Idempotent."""
        if self.log.database.copier is self:
            self.log.copy_to(self._before)


class Joins:
    """The streams that come into a bucket at one store: those that are created there, and those that join it, one after
    the other.
    """

    def __init__(
        self, objects: Objects, sealer: Sealer, store: bytes, shelf: Shelf, now_us: Callable[[], int],
        warn: Callable[[Exception], None], flush: Callable[[], None],
    ) -> None:  # fmt: skip
        """`store` is this store's public key. `flush` writes answers to the relay."""
        self._objects = objects
        self._sealer = sealer
        self._address = public_id(store).hex()
        self._shelf = shelf
        self._now_us = now_us
        self._warn = warn
        self._flush = flush
        self._turn = asyncio.Lock()
        self._open: set[str] = set()
        """Journals of ours in which a stream is joining. Until that has ended no checkpoint may cover a part of it."""
        self._creating: set[bytes] = set()
        self._begun: set[str] = set()
        """Tokens of tries that a journal of ours names, and that are not decided."""
        self._errands = Errands("iris-stream-join", "a stream that joins", warn)

    def is_open(self, journal: str) -> bool:
        """Whether a stream is joining in this journal."""
        return journal in self._open

    def create(self, uuid: bytes, done: Callable[[Refuse | None], None]) -> None:
        """Find out whether our journal may begin a log with this uuid, and then call `done`. Raises Refuse."""
        writer = self._shelf.writer
        if self._errands.stopping:
            raise Refuse("leaving", STOPPING)
        if writer is None or uuid in self._creating or len(self._creating) >= MAX_CREATING:
            raise Refuse("leaving", self._shelf.away or "the store is already creating this stream, or too many others; try again")  # fmt: skip
        self._creating.add(uuid)
        self._errands.start(self._create(uuid, writer, done))

    def join(self, candidate: Candidate) -> None:
        """Begin to bring a stream into the bucket. The candidate gets the outcome. Raises Refuse."""
        if self._errands.stopping:
            raise Refuse("leaving", STOPPING)
        self._errands.start(self._join(candidate))

    def settle(self) -> None:
        """Find out what was decided about streams that were joining when this store ended."""
        for uuid, token in self._shelf.undecided.items():
            self._errands.start(self._find_out(uuid, token))

    async def cancel(self) -> None:
        """End all work, and begin none. What is not decided is asked at the next start."""
        await self._errands.cancel()

    async def _find_out(self, uuid: bytes, token: str) -> None:
        by = await self._errands.until(
            lambda: decide(self._objects, self._sealer, token, NO), lambda: False
        )
        if self._shelf.undecided.pop(uuid, None) is not None:
            self._shelf.on_decided(uuid, by not in (NO, FORCED))
            self._flush()

    # -- who may begin a log ---------------------------------------------------------------------------------

    async def _create(
        self, uuid: bytes, writer: Writer, done: Callable[[Refuse | None], None]
    ) -> None:
        refused: Refuse | None = Refuse("leaving", STOPPING)
        until_us = self._now_us() + int(CREATE_S * 1e6)
        attempt = secrets.token_hex(16)
        try:
            ours = await self._errands.until(
                lambda: self._claim(uuid, attempt),
                lambda: bool(writer.ended) or self._now_us() >= until_us,
            )
            if ours is None or self._shelf.writer is not writer or writer.ended:
                refused = Refuse("leaving", f"the bucket {self._shelf.url} does not answer, or the store lost its journal there; try again")  # fmt: skip
            else:
                refused = None if ours else Refuse("exists", CREATED)
        finally:
            self._creating.discard(uuid)
            done(refused)
            self._flush()

    async def _claim(self, uuid: bytes, by: str) -> bool:
        """Return whether `by`, one log on a disk or one attempt to create one, alone may bring a log with this uuid to
        the bucket. Raises BucketError, ObjectDamaged.
        """
        return await decide(self._objects, self._sealer, uuid.hex(), by) == by

    # -- one stream ------------------------------------------------------------------------------------------

    async def _join(self, candidate: Candidate) -> None:
        ended: Refuse | None = Refuse("moved", STOPPING)  # the next start finds out whether it has
        try:
            async with self._turn:
                backoff = Backoff(ASK_MIN_S, ASK_MAX_S, random.random)
                while not await self._try(candidate):
                    if not candidate.wanted():
                        raise Refuse("failed", AWAY)
                    await asyncio.sleep(backoff.failed())
            ended = None
        except Refuse as err:
            ended = err
        except (LogError, Closed) as err:
            ended = Refuse("disk", str(err))
        finally:
            candidate.ended(ended)
            self._flush()

    async def _try(self, candidate: Candidate) -> bool:
        """Bring a stream into this store's journal; return False if that did not take place and is worth another try.

        Raises Refuse, LogError, Closed.
        """
        by = f"{candidate.logs()[candidate.uuid].created_us:016x}{self._address[:16]}"
        writer = self._shelf.writer
        if writer is None or writer.ended or writer.failing or writer.backlog > BACKLOG_BYTES:
            return False
        ours = await self._errands.until(
            lambda: self._claim(candidate.uuid, by), lambda: bool(writer.ended) or not candidate.wanted()
        )  # fmt: skip
        if ours is None:
            return False
        if not ours:
            raise Refuse("exists", CREATED)
        found = await self._errands.until(
            lambda: self._new_try(candidate.uuid), lambda: bool(writer.ended) or not candidate.wanted()
        )  # fmt: skip
        if found is None:
            return False
        token, decided = found
        if decided is not None:
            raise Refuse("leaving", DISPLACED) if decided == FORCED else Refuse("exists", CREATED)
        logs = candidate.logs()
        drafts: dict[bytes, Draft] = {}
        self._open.add(writer.journal)
        try:
            both = [candidate.uuid, dead_uuid(candidate.uuid)]
            writer.add(Joining(token, both), ENTRY_BYTES, self._now_us())
            self._begun.add(token)
            while new := {uuid: one for uuid, one in logs.items() if uuid not in drafts}:
                for uuid, one in new.items():
                    drafts[uuid] = Draft(uuid, one, writer, self._now_us)
                for uuid in new:
                    if not await self._copy(drafts[uuid], writer, candidate):
                        return False
                writer.close_object()
                if not await self._land(writer):
                    return False
                logs = candidate.logs()  # the first dead letter may have been written meanwhile
            # Nothing is awaited from here on until the switch.
            candidate.flush()
            if logs != {uuid: each.log for uuid, each in drafts.items() if each.whole}:
                return False
            for draft in drafts.values():
                draft.stop()
            replicas = {uuid: self._replica(uuid, writer) for uuid in both}
            switched = True
            try:
                candidate.switch(token, replicas)
            except LogError as err:
                self._warn(err)
                switched = False
            return await self._decide(candidate, token, writer, replicas, switched)
        finally:
            self._open.discard(writer.journal)
            for draft in drafts.values():
                draft.stop()

    async def _new_try(self, uuid: bytes) -> tuple[str, str | None]:
        """Return the token of a try that no journal names yet; or of one that was decided, and what was decided.

        Raises BucketError, ObjectDamaged.
        """
        while True:
            token, by = await last_try(self._objects, self._sealer, uuid)
            if token not in self._begun:
                return token, by
            if by is None:  # that try ended before the switch
                await decide(self._objects, self._sealer, token, NO)
            self._begun.discard(token)

    def _replica(self, uuid: bytes, writer: Writer) -> Replica:
        replica = Replica(uuid, writer, self._now_us, self._shelf.reader)
        replica.joining = True
        return replica

    async def _copy(self, draft: Draft, writer: Writer, candidate: Candidate) -> bool:
        """Write a whole log to a journal; return whether the journal has all of it. Raises LogDamaged, Closed."""
        for ops in draft.log.copied():
            size = sum(len(op.key) + len(op.value) + OP_BYTES for op in ops)
            writer.add(Rows(draft.uuid, ops), size, self._now_us())
            candidate.copied(size)
            await asyncio.sleep(0)  # appends go first
            while writer.backlog > BACKLOG_BYTES and draft.whole:  # noqa: ASYNC110 - the bucket takes its time
                await asyncio.sleep(PAUSE_S)
            if not draft.whole:
                return False
        return True

    async def _land(self, writer: Writer) -> bool:
        """Return whether everything that was written so far reached the bucket before the journal ended."""
        last = writer.number - 1
        while writer.known < last and not writer.ended:  # noqa: ASYNC110 - the bucket takes its time
            await asyncio.sleep(PAUSE_S)
        return writer.known >= last

    async def _decide(
        self, candidate: Candidate, token: str, writer: Writer, replicas: Mapping[bytes, Replica], switched: bool
    ) -> bool:  # fmt: skip
        """Decide that a stream has joined, if the journal has all of it; return whether it has."""
        writer.close_object()
        by: str | None = None
        if switched and await self._land(writer):
            mine = writer.journal
            by = await self._errands.until(
                lambda: decide(self._objects, self._sealer, token, mine), lambda: writer.ended
            )
        if by is None:  # the journal ended: whoever succeeds it may have decided
            by = await self._errands.until(
                lambda: decide(self._objects, self._sealer, token, NO), lambda: False
            )
        self._begun.discard(token)
        for replica in replicas.values():
            replica.joining = False
        if by in (NO, FORCED):
            candidate.stayed()
        elif writer.ended:
            candidate.lost(writer.ended)
        else:
            self._shelf.hold(candidate.joined(token), writer)
        self._flush()
        if by == FORCED:
            raise Refuse("leaving", DISPLACED)
        return by != NO
