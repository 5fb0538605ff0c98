"""Moves streams between two stores that both run: releases them here, or takes them here.

    client ── order ──► old store: closes the streams, writes Released ── ticket ──► client
    client ── ticket ─► new store: writes Taken, decides yes, reads the streams, serves them ──► client
                        then writes all of them into its journal, and says that the move is settled
    old store: asks what was decided; after `PATIENCE_S` without a decision it decides no, and serves the streams again

What is in the bucket, and what it means for stores that succeed one of the two, is in `moved`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from iris.errors import IrisError
from relay.store.bucket.checkpointing import write_parts
from relay.store.bucket.errands import ASK_MIN_S, Errands
from relay.store.bucket.loading import receive
from relay.store.bucket.moved import NO, decide, decided, settle, settled
from relay.store.bucket.objects import Objects
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import ObjectDamaged, Released, Sealer, Taken, Ticket
from relay.store.bucket.shelf import Leaving, Shelf
from relay.store.bucket.writer import Output, Writer
from relay.store.errors import Refuse
from relay.store.log import Log

log = logging.getLogger(__name__)

TICKET_KEY: Final = "ticket"
"""In the place of an object's key, for what is not in the bucket."""
PATIENCE_S: Final = 15.0
"""How long a stream is not served while its next store does not take it."""
ENTRY_BYTES: Final = 128
SPARE_BYTES: Final = 64 << 20
"""Room on the disk that a stream which arrives leaves free."""

STOPPING: Final = "the store is stopping; try again"
TAKEN_BACK: Final = "the stream was not moved: this store took too long, so the other store serves it again; try again"

Done = Callable[[Refuse | None], None]
"""Called once a move has ended: with None if the stream is here, else with why it is not."""


class Owner(Protocol):
    """The store whose streams move."""

    def adopt(
        self, found: Mapping[bytes, tuple[Path, Replica]], *, moved: bool = False
    ) -> None: ...
    def check_arrival(self, name: str, key_ids: list[bytes], count: int) -> None:
        """Return if a stream of `count` logs can be served under this name and these keys. Raises Refuse."""

    def release(self, uuid: bytes) -> dict[bytes, Path]:
        """Stop serving a stream and its dead letters; return uuid -> files, which are closed. Raises LogError."""

    def logs(self, writer: Writer) -> dict[bytes, Log]: ...
    def flush(self) -> None: ...


class Moves:
    """The moves of one store."""

    def __init__(
        self, objects: Objects, sealer: Sealer, store: bytes, shelf: Shelf, owner: Owner, opening: asyncio.Lock,
        now_us: Callable[[], int], warn: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """`opening` is held while databases of the bucket are made or removed."""
        self._objects = objects
        self._sealer = sealer
        self._store = store
        self._shelf = shelf
        self._owner = owner
        self._opening = opening
        self._now_us = now_us
        self._open: dict[str, dict[str, frozenset[bytes]]] = {}
        """Journal of ours -> moves that it takes part in and that are not settled -> their streams."""
        self._leaving: set[bytes] = set()
        """Streams that were released here and whose move is not decided."""
        self._taking: dict[str, list[Done]] = {}
        """Moves of which somebody waits for the end."""
        self._errands = Errands("iris-stream-move", "a stream that moves", warn)

    def is_open(self, journal: str) -> bool:
        """Whether a move of this journal is not settled. Until then no checkpoint may cover it."""
        return bool(self._open.get(journal))

    def inherit(self, writer: Writer, unsettled: Iterable[Released | Taken]) -> None:
        """Complete moves that took place, and that were begun by journals which this one took."""
        for one in unsettled:
            self._begin(writer, one.token, one.uuids)
            work = self._settle if isinstance(one, Taken) else self._until_settled
            self._errands.start(work(writer, one.token, one.uuids))

    def release(
        self, replica: Replica, target: bytes, leaving: Leaving, answer: Callable[[bytes], Output]
    ) -> None:
        """Release a stream to the store with the key `target`; what `answer` returns for the ticket leaves once the
        bucket knows of it.

        Raises Refuse, LogError.
        """
        if self._errands.stopping:
            raise Refuse("leaving", STOPPING)
        writer = replica.writer
        if writer.ended or any(replica.uuid in one for one in self._open.get(writer.journal, {}).values()):  # fmt: skip
            raise Refuse(
                "leaving",
                "the stream has just arrived at this store, which is still writing it to its journal; try again",
            )
        paths = self._owner.release(replica.uuid)
        token = secrets.token_hex(16)
        number = writer.add(Released(token, list(paths)), ENTRY_BYTES, self._now_us())
        writer.close_object()
        self._begin(writer, token, paths)
        self._leaving.update(paths)
        ticket = Ticket(
            token, list(paths), writer.journal, target, leaving.size_bytes, leaving.name, leaving.key_ids
        )  # fmt: skip
        writer.hold(number, answer(self._sealer.seal(TICKET_KEY, ticket)))
        self._errands.start(self._released(writer, token, number, paths))

    def take(self, sealed: bytes, done: Done) -> None:
        """Take the streams of a ticket, and then call `done`. It may be repeated. Raises Refuse."""
        if self._errands.stopping:
            raise Refuse("leaving", STOPPING)
        try:
            ticket = self._sealer.open(TICKET_KEY, sealed)
        except ObjectDamaged as err:
            raise Refuse("order", "the move was not prepared by a store of this store's bucket") from err  # fmt: skip
        if not isinstance(ticket, Ticket) or ticket.target != self._store:
            raise Refuse("order", "the move was prepared for another store")
        if ticket.token in self._taking:
            self._taking[ticket.token].append(done)
            return
        self._taking[ticket.token] = [done]
        self._errands.start(self._take(ticket))

    async def cancel(self) -> None:
        """End all work, and begin none. What was begun is brought to its end at the next start."""
        await self._errands.cancel()

    # -- from here -------------------------------------------------------------------------------------------

    async def _released(
        self, writer: Writer, token: str, number: int, paths: Mapping[bytes, Path]
    ) -> None:
        """See what becomes of streams that were released."""
        try:
            if not await _known(writer, number):
                return  # whoever took the journal decides
            until_s = self._now_us() / 1e6 + PATIENCE_S

            async def ask() -> str | None:
                if self._now_us() / 1e6 >= until_s:
                    return await decide(self._objects, self._sealer, token, NO)
                return await decided(self._objects, self._sealer, token)

            gone = await self._errands.until(ask, lambda: writer.ended)
            async with self._opening:
                if gone is None or writer.ended:
                    return
                if gone:
                    for uuid, path in paths.items():
                        self._shelf.forget(Replica(uuid, writer, self._now_us))
                        shutil.rmtree(path, ignore_errors=True)
                else:
                    self._end(writer, token)
                    self._adopt(writer, paths)
            fields = {"journal": writer.journal, "streams": [uuid.hex() for uuid in paths]}
            log.info("store.stream_left" if gone else "store.stream_kept", extra={"fields": fields})
        finally:
            self._leaving.difference_update(paths)
        if gone:
            await self._until_settled(writer, token, list(paths))

    async def _until_settled(self, writer: Writer, token: str, uuids: list[bytes]) -> None:
        """Keep what was released until the new store has all of it."""

        async def ask() -> bool | None:
            return await settled(self._objects, self._sealer, token) or None

        await self._errands.until(ask, lambda: writer.ended)
        self._end(writer, token)

    # -- to here ---------------------------------------------------------------------------------------------

    async def _take(self, ticket: Ticket) -> None:
        refused: Refuse | None = Refuse("leaving", STOPPING)
        writer = None
        try:
            writer, refused = await self._taken(ticket)
        finally:
            for done in self._taking.pop(ticket.token, ()):
                done(refused)
            self._owner.flush()
        if refused is None and writer is not None:
            await self._settle(writer, ticket.token, ticket.uuids)

    async def _taken(self, ticket: Ticket) -> tuple[Writer | None, Refuse | None]:
        """Take streams; return the journal that has them now, or why none of ours has."""
        writer, token = self._shelf.writer, ticket.token
        while self._leaving.intersection(ticket.uuids):  # noqa: ASYNC110 - they are just leaving from here
            await asyncio.sleep(ASK_MIN_S)
        if writer is None or writer.ended:
            return None, Refuse("leaving", self._shelf.away or "the store lost its journal; try again")  # fmt: skip
        # A repeated call, which began after the move was decided, changes nothing.
        try:
            before = await decided(self._objects, self._sealer, token)
        except IrisError as err:
            return None, Refuse("leaving", str(err))
        if before is not None:
            here = self._shelf.held.get(before, set()).issuperset(ticket.uuids)
            return None, None if here else Refuse("failed", TAKEN_BACK)
        try:
            self._owner.check_arrival(ticket.name, ticket.key_ids, len(ticket.uuids))
            self._check_disk(ticket.size_bytes)
        except Refuse as err:
            await self._errands.until(
                lambda: decide(self._objects, self._sealer, token, NO), lambda: writer.ended
            )
            return None, err
        taken = Taken(token, ticket.uuids, ticket.source)
        number = writer.add(taken, ENTRY_BYTES, self._now_us())
        writer.close_object()
        self._begin(writer, token, ticket.uuids)
        lost = Refuse("moved", "another store has taken over from this one meanwhile")
        if not await _known(writer, number):
            return None, lost
        mine = writer.journal
        by = await self._errands.until(
            lambda: decide(self._objects, self._sealer, token, mine), lambda: writer.ended
        )
        if by is None:
            return None, lost
        if by != mine:
            self._end(writer, token)
            return None, Refuse("failed", TAKEN_BACK)

        async def arrive() -> bool | None:
            async with self._opening:
                if writer.ended or self._is_in_use(taken.uuids, writer):
                    return None
                found = await receive(
                    self._objects, self._sealer, taken, self._shelf.directory, writer.journal
                )
                if writer.ended:
                    return None
                self._adopt(writer, found)
            return True

        if await self._errands.until(arrive, lambda: writer.ended) is None:
            return None, lost
        fields = {"journal": writer.journal, "from": taken.source, "streams": [one.hex() for one in taken.uuids]}  # fmt: skip
        log.info("store.stream_arrived", extra={"fields": fields})
        return writer, None

    def _is_in_use(self, uuids: Iterable[bytes], writer: Writer) -> bool:
        """Return whether another journal of ours has these streams: it has ended, and we are about to notice it."""
        return any(
            journal != writer.journal and not held.isdisjoint(uuids)
            for journal, held in self._shelf.held.items()
        )

    def _check_disk(self, size_bytes: int) -> None:
        """Raises Refuse."""
        free = shutil.disk_usage(self._shelf.directory).free
        if free < size_bytes + SPARE_BYTES:
            raise Refuse(
                "full",
                f"the stream has {size_bytes:,} bytes, and the store's disk has {free:,} left; make room there, "
                "or move the stream to another store",
            )

    async def _settle(self, writer: Writer, token: str, uuids: list[bytes]) -> None:
        """Write streams that arrived into our journal, so that the store that had them need not keep them."""

        async def copy() -> bool | None:
            logs = self._owner.logs(writer)
            parts = {uuid: logs[uuid].copied() for uuid in uuids if uuid in logs}
            await write_parts(writer, parts, self._now_us)
            if writer.ended:
                return None
            await settle(self._objects, self._sealer, token)
            return True

        await self._errands.until(copy, lambda: writer.ended)
        self._end(writer, token)

    # -- both ------------------------------------------------------------------------------------------------

    def _adopt(self, writer: Writer, paths: Mapping[bytes, Path]) -> None:
        self._owner.adopt(
            {uuid: (path, self._shelf.replica_in(uuid, writer)) for uuid, path in paths.items()},
            moved=True,
        )

    def _begin(self, writer: Writer, token: str, uuids: Iterable[bytes]) -> None:
        self._open.setdefault(writer.journal, {})[token] = frozenset(uuids)

    def _end(self, writer: Writer, token: str) -> None:
        self._open.get(writer.journal, {}).pop(token, None)


class _Known:
    """Waits until an object is known to be in the bucket."""

    def __init__(self, future: asyncio.Future[bool]) -> None:
        self._future = future

    def release(self) -> None:
        if not self._future.done():
            self._future.set_result(True)

    def withdraw(self, reason: str) -> None:
        if not self._future.done():
            self._future.set_result(False)


async def _known(writer: Writer, number: int) -> bool:
    """Return whether an object of a journal reached the bucket before the journal ended."""
    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    writer.hold(number, _Known(future))
    return await future
