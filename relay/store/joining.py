"""A stream of the disk that joins its store's bucket by an order of a key holder: who waits for it, and what changes
when. What is in the bucket is in `relay.store.bucket.joining`, what the next start finds in `join_notes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from iris.wire.orders import SignedOrder
from iris.wire.stream_items import dead_uuid
from relay.store import join_notes
from relay.store.authority import Charter
from relay.store.bucket.replica import Place, Replica, forget
from relay.store.bucket.shelf import Shelf
from relay.store.catalogue import Catalogue, encode_definition_file
from relay.store.errors import LogError, LogWriteFailed, Refuse
from relay.store.files import write_beside
from relay.store.join_notes import Note
from relay.store.log import Log
from relay.store.registration import Done
from relay.store.salvage import ORDERS
from relay.store.session import IncomingCall
from relay.store.stream import Stream

log = logging.getLogger(__name__)

MAX_WAITING: Final = 64
"""Calls that wait for one stream to join."""
BUSY: Final = "the stream is joining the bucket; try again when it has"

PutInForce = Callable[[Stream, Charter, Done], None]
"""Puts a charter in force that is in the log, and then calls the last argument."""
Describe = Callable[[IncomingCall, Stream, str], object]
"""Answers a call with the stream's description, or with the relay's error."""


def join(
    catalogue: Catalogue, incoming: IncomingCall, stream: Stream, orders: Sequence[SignedOrder], put_in_force: PutInForce,
    describe: Describe,
) -> None:  # fmt: skip
    """Begin to bring a stream into the bucket; answer once it is there. Raises Refuse."""
    shelf = catalogue.shelf
    if shelf is None or shelf.joiner is None:
        raise Refuse("leaving", "the store has just started and has not opened its bucket yet; try again")  # fmt: skip
    charter = catalogue.authority.join(stream.charter, orders, stream.uuid, catalogue.clock.wall_us)
    there = catalogue.joins.get(stream.uuid)
    if isinstance(there, Join):
        there.wait(incoming, charter)
        return
    if stream.log is None or stream.log.failed:
        raise Refuse("disk", stream.failed or "an earlier write failed")
    catalogue.check_keys(charter.definition, set(charter.orders))
    if (
        stream.uuid not in catalogue.left
    ):  # its first order names this store, and is void from here on
        catalogue.left.add(stream.uuid, catalogue.clock.wall_us)
    one = Join(catalogue, shelf, stream, charter, put_in_force, describe)
    one.wait(incoming, charter)
    shelf.joiner.join(one)
    catalogue.joins[stream.uuid] = one
    fields = {"stream": stream.name, "uuid": stream.uuid.hex(), "bytes": one.size}
    log.info("store.stream_joins", extra={"fields": fields})


def check_decided(incoming: IncomingCall, stream: Stream) -> None:
    """Raise Refuse while it is being decided whether a stream joins the bucket."""
    if stream.joining:
        incoming.gate = None  # the refusal rests on nothing
        raise Refuse("leaving", BUSY)


class Join:
    """A stream that is to join. It is a `Candidate` of the bucket."""

    def __init__(
        self, catalogue: Catalogue, shelf: Shelf, stream: Stream, charter: Charter, put_in_force: PutInForce, describe: Describe
    ) -> None:  # fmt: skip
        self.uuid = stream.uuid
        self.replicas: Mapping[bytes, Replica] = {}
        """Uuid of a log -> what copies it, from the switch to the decision."""
        self.size = sum(each.log.size_bytes for each in (stream,) if each.log is not None)
        self.done = 0
        """Bytes that were given to the bucket."""
        self._catalogue = catalogue
        self._shelf = shelf
        self._stream = stream
        self._before = stream.charter
        self._charter = charter
        self._put_in_force = put_in_force
        self._describe = describe
        self._waiting: list[IncomingCall] = []

    def wait(self, incoming: IncomingCall, charter: Charter) -> None:
        """Answer this call, too. Raises Refuse if its orders say something else."""
        if charter.definition != self._charter.definition or charter.orders.keys() != self._charter.orders.keys():  # fmt: skip
            raise Refuse("leaving", BUSY)
        if len(self._waiting) >= MAX_WAITING:
            raise Refuse("full", f"{MAX_WAITING} calls already wait for the stream to join the bucket, which is the limit")  # fmt: skip
        self._waiting.append(incoming)

    # -- the candidate ---------------------------------------------------------------------------------------

    def logs(self) -> dict[bytes, Log]:
        if self._catalogue.streams.get(self.uuid) is not self._stream:
            raise Refuse("no-stream", "the stream was deleted meanwhile")
        if self._stream.displaced:
            raise Refuse("leaving", self._stream.displaced)
        if self._stream.charter.orders != self._before.orders:
            raise Refuse(
                "revision", "another client changed the stream meanwhile; read it again and repeat the change"
            )  # fmt: skip
        found: dict[bytes, Log] = {}
        for one in self._both():
            if one.log is None:
                raise LogWriteFailed(one.path, one.failed)
            found[one.uuid] = one.log
        return found

    def flush(self) -> None:
        for one in self._both():
            one.commit(self._catalogue.clock.wall_us)

    def switch(self, token: str, replicas: Mapping[bytes, Replica]) -> None:
        stream = self._stream
        join_notes.write(stream.path, self._note(token))
        self.replicas = replicas
        for one in self._both():
            if one.log is not None:  # the copy does not get what is written from here on
                one.stop_following()
                forget(one.log.database)
            one.refuse_waiting(BUSY)
            one.replicate(replicas[one.uuid], self._catalogue.grown)
        if stream.log is not None:
            stream.log.define(encode_definition_file(self._charter.definition_file))

    def joined(self, token: str) -> list[bytes]:
        stream, both = self._stream, self._both()
        try:
            for one in both:
                if one.replica is None or one.log is None:
                    raise LogWriteFailed(one.path, one.failed)
                writer = one.replica.writer
                one.log.note_copied(Place(writer.journal, writer.number).pack(), sync=True)
            write_beside(
                stream.path + ORDERS, encode_definition_file(self._charter.definition_file)
            )
            join_notes.write(stream.path, self._note(token, joined=True))
        except LogError as err:  # the next start makes the log again from the bucket
            fields = {"stream": stream.name, "error": str(err)}
            log.warning("store.stream_failed", extra={"fields": fields})
        self._catalogue.end_copies(stream.uuid)
        waiting, self._waiting = self._waiting, []

        def answer(error: str) -> None:
            for incoming in waiting:
                self._describe(incoming, stream, error)

        self._put_in_force(stream, self._charter, answer)
        log.info("store.stream_joined", extra={"fields": self._fields()})
        return [one.uuid for one in both]

    def stayed(self) -> None:
        stream = self._stream
        if self._catalogue.streams.get(self.uuid) is not stream:
            return  # it was deleted
        for one in self._both():
            if one.replica is not None:
                one.refuse_waiting(BUSY)
                one.unreplicate()
        before = encode_definition_file(stream.charter.definition_file)
        try:
            if stream.log is not None and not stream.log.failed:
                if stream.log.definition != before:
                    stream.log.define(before)
                join_notes.remove(stream.path)
        except LogError as err:  # the next start asks the bucket, and knows what the definition was
            fields = {"stream": stream.name, "error": str(err)}
            log.warning("store.stream_failed", extra={"fields": fields})
        self._catalogue.copy(stream)
        log.info("store.stream_not_joined", extra={"fields": self._fields()})

    def lost(self, reason: str) -> None:
        self._catalogue.end_copies(self.uuid)
        self._catalogue.hand_over(self._stream, reason)

    def wanted(self) -> bool:
        now_us = self._shelf.copies.now_us()
        return any(incoming.deadline_us > now_us for incoming in self._waiting)

    def copied(self, size: int) -> None:
        self.done += size

    def ended(self, refused: Refuse | None) -> None:
        self._catalogue.joins.pop(self.uuid, None)
        waiting, self._waiting = self._waiting, []
        refused = refused or Refuse("moved", "another store of the bucket serves the stream now")
        for incoming in waiting:
            incoming.gate = None
            incoming.refuse(refused.code, str(refused))

    # -- inside ----------------------------------------------------------------------------------------------

    def _both(self) -> list[Stream]:
        """Return the stream, and its dead letters if it has some."""
        dead = self._catalogue.streams.get(dead_uuid(self.uuid))
        return [self._stream] if dead is None else [self._stream, dead]

    def _note(self, token: str, *, joined: bool = False) -> Note:
        return Note(token, encode_definition_file(self._before.definition_file), joined)

    def _fields(self) -> dict[str, object]:
        return {"stream": self._stream.name, "uuid": self.uuid.hex(), "bucket": self._shelf.url}
