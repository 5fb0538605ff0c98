"""The catalogue of a store's streams: on disk, by address, and at the relay.

Each stream is a directory named by its uuid. Its orders are in the log itself and in a file beside
the directory.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from iris.errors import DecodeError, IrisError
from iris.wire import frames
from iris.wire.frames import MAX_KEY_IDS
from iris.wire.kinds import Kind
from iris.wire.names import plural, printable
from iris.wire.orders import DEAD, Definition, Order, superseded_text
from iris.wire.stream_items import dead_uuid
from relay.logs import Quiet
from relay.store.authority import NO_CHARTER, Authority, Charter, DefinitionFile
from relay.store.bucket.replica import Replica
from relay.store.bucket.shelf import Left, Shelf
from relay.store.clock import Clock
from relay.store.cursor import Dead
from relay.store.ended import SUFFIX, Ended
from relay.store.errors import LogError, LogWriteFailed, Refuse
from relay.store.files import read_small, write_beside
from relay.store.log import Log
from relay.store.registration import Done, Registration
from relay.store.salvage import ORDERS, finish
from relay.store.stream import Stream

log = logging.getLogger(__name__)

DELETED: Final = "the stream was deleted"
MOVING: Final = "the stream moves to another store; try again"
_UUID: Final = re.compile("[0-9a-f]{32}")
MAX_STREAMS: Final = 500
"""Logs that one store serves, those of dead letters among them."""
MAX_MOVED: Final = 4096
"""Addresses that are remembered: two for each key of a stream that left, and two for its dead letters."""
encode_definition_file: Final = msgspec.msgpack.Encoder().encode
_decode_definition_file: Final = msgspec.msgpack.Decoder(DefinitionFile).decode


class Catalogue:
    """The streams of one directory."""

    def __init__(
        self, directory: Path, authority: Authority, registration: Registration, clock: Clock,
        shelf: Shelf | None = None,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.shelf = shelf
        """The streams of this store that are in a bucket, if it has one."""
        self.grown: Callable[[Stream], None] = lambda stream: None
        """Called when readers of a stream in a bucket may be shown more."""
        self.ended = Ended(directory)
        self.streams: dict[bytes, Stream] = {}
        self.by_address: dict[tuple[str, bytes], Stream] = {}
        """(name or uuid, key id) -> stream."""
        self.moved: dict[tuple[str, bytes], None] = {}
        """Addresses of streams that another store of the bucket has taken over: a call may still be on its way here."""
        self._quiet = Quiet()
        self.version = 0
        """Changes whenever the set of streams or what they record changes."""
        self.authority = authority
        self.registration = registration
        self.clock = clock

    def load(self) -> None:
        """Open every stream of the directory. One that cannot be opened is quarantined and logged."""
        self.ended.load()
        finish(self.directory)
        for ended in self.ended.uuids:
            for uuid in (ended, dead_uuid(ended)):
                self._destroy(str(self.directory / uuid.hex()))
        for path in sorted(self.directory.iterdir()):
            if _UUID.fullmatch(path.name) and path.is_dir():
                self._load(path, bytes.fromhex(path.name))

    def make(
        self,
        uuid: bytes,
        stored: bytes,
        charter: Charter = NO_CHARTER,
        replica: Replica | None = None,
    ) -> Stream:
        """Create a stream on disk, and with `replica` in the bucket. Raises LogError."""
        directory = self.directory
        if replica is not None and self.shelf is not None:
            directory = self.shelf.directory
        path = str(directory / uuid.hex())
        write_beside(path + ORDERS, stored)
        made = Log.create(path, uuid=uuid, definition=stored, created_us=self.clock.wall_us)
        stream = self.streams[uuid] = Stream(path, uuid, made, charter, self.clock)
        if replica is not None:
            stream.replicate(replica, self.grown)
            made.copy_all()
        return stream

    def replica_for(self, charter: Charter) -> Replica | None:
        """Return the copier of a new stream; None if its orders name this store alone.

        Raises Refuse while nothing can be written to the bucket.
        """
        order = charter.order
        if self.shelf is None or order is None or order.store != self.shelf.public_key:
            return None
        return self.shelf.replica(order.uuid)

    def adopt(self, path: Path, uuid: bytes, replica: Replica) -> Stream:
        """Open a stream that this store holds in its bucket. One that cannot be opened is quarantined and logged."""
        self._load(path, uuid, replica)
        return self.streams[uuid]

    def _load(self, path: Path, uuid: bytes, replica: Replica | None = None) -> None:
        stream = Stream(str(path), uuid, None, clock=self.clock)
        if replica is not None:
            stream.replicate(replica, self.grown)
        try:
            opened = Log.open(str(path))
        except LogError as err:
            stream.failed = str(err)
            try:  # read its orders, so that it is listed under its name
                self.load_charter(stream, read_small(f"{path}{ORDERS}"))
            except (OSError, msgspec.DecodeError, IrisError) as unknown:
                stream.failed = f"{err}; its orders cannot be read either: {unknown}"
            log.error(
                "store.stream_quarantined", extra={"fields": {"path": str(path), "error": str(err)}}
            )
        else:
            stream.opened(opened)
            try:
                if opened.uuid != uuid:
                    raise DecodeError(
                        f"the log in this directory has another uuid, {opened.uuid.hex()}"
                    )
                self.load_charter(stream, opened.definition)
            except (msgspec.DecodeError, IrisError) as err:
                stream.failed = f"its orders are not valid: {err}"
                log.error(
                    "store.stream_refused", extra={"fields": {"path": str(path), "error": str(err)}}
                )
        self.streams[uuid] = stream

    def load_charter(self, stream: Stream, data: bytes) -> None:
        """Set a stream's charter from its definition file. Raises msgspec.DecodeError or Refuse."""
        stored = _decode_definition_file(data)
        stream.dead = bool(stored.parent)
        if not stream.dead:
            stream.charter = self.authority.load(stored, stream.uuid)
            stream.redefine()
            if stream.charter.by is not None:
                stream.why_superseded = _superseded_text(stream.uuid, stream.charter.by)

    def serve(self, stream: Stream, then: Done) -> None:
        dead = self.streams.get(dead_uuid(stream.uuid))
        self.registration.serve(stream, dead, self.streams.values(), then)

    def leave(self, stream: Stream) -> None:
        others = [other for other in self.streams.values() if other is not stream]
        self.registration.leave(stream, others)

    def recorders(self, declared: frames.Declare | frames.Gap) -> Sequence[Stream]:
        if declared.kind == Kind.BROADCAST:
            stream = self.cluster_recorder(declared)
            return [] if stream is None else [stream]
        return [s for s in self.streams.values() if s.records(declared.name, declared.key_id)]

    def cluster_recorder(self, declared: frames.Declare | frames.Gap) -> Stream | None:
        """Return the stream that takes this cluster's share, or None if it does not record that address."""
        stream = self.registration.members.get(declared.member)
        if stream is None or not stream.shares(declared.name, declared.key_id):
            return None
        return stream

    def _write_dead_letters(self, stream: Stream, consumer: str, letters: list[Dead]) -> None:
        """Write dead letters to the stream's log of dead letters, which the first one creates, and log the first.

        Raises LogError.
        """
        self.letters_of(stream).append_dead_letters(stream, consumer, letters, self.clock.wall_us)
        if not letters:
            return
        first = letters[0]
        fields = {
            "stream": stream.name, "consumer": consumer, "messages": len(letters), "offset": first.offset,
            "deliveries": first.deliveries, "reason": printable(first.reason),
        }  # fmt: skip
        key = (stream.uuid, consumer)
        self._quiet.warning(log, "store.dead_letters", key, self.clock.elapsed_us / 1e6, fields)

    def letters_of(self, stream: Stream) -> Stream:
        """Return the stream of a stream's dead letters, which the first call creates. Raises LogError."""
        uuid = dead_uuid(stream.uuid)
        dead_stream = self.streams.get(uuid)
        if dead_stream is None:
            replica = None
            if stream.replica is not None and self.shelf is not None:
                replica = self.shelf.replica_in(uuid, stream.replica.writer)
            stored = encode_definition_file(DefinitionFile(parent=stream.uuid))
            dead_stream = self.make(uuid, stored, replica=replica)
            dead_stream.dead = True
            self.add_addresses(stream)
            self.registration.serve_dead(stream, dead_stream)
        if not dead_stream.dead:
            raise LogWriteFailed(dead_stream.path, "the log with this uuid is not for dead letters")
        return dead_stream

    def supersede(self, stream: Stream, charter: Charter, then: Done) -> None:
        """Serve a stream by its uuid alone from now on: that of `charter.by` has taken its place. Raises LogError."""
        by = charter.by
        assert by is not None
        assert stream.log is not None
        stream.commit(self.clock.wall_us)
        stored = encode_definition_file(charter.definition_file)
        stream.log.define(stored)
        write_beside(stream.path + ORDERS, stored)
        stream.charter = charter
        self._note_moved(stream)
        self.leave(stream)
        self.remove_addresses(stream)
        stream.why_superseded = _superseded_text(stream.uuid, by)
        for one in (stream, self.streams.get(dead_uuid(stream.uuid))):
            if one is not None:
                one.refuse_waiting(stream.why_superseded, "superseded")
                if one.consumer_calls is not None:
                    one.consumer_calls.clear_lines()
        self.add_addresses(stream)
        fields = {"stream": stream.name, "uuid": stream.uuid.hex(), "by": by.uuid.hex()}
        log.warning("store.stream_superseded", extra={"fields": fields})
        self.serve(stream, then)

    def check_keys(self, definition: Definition, key_ids: set[bytes]) -> None:
        """Raise Refuse if this stream, with all others of the same filter, has more keys than a
        frame to the relay can hold.
        """
        for stream in self.streams.values():
            if definition.topic and stream.definition.topic == definition.topic:
                key_ids = key_ids | stream.orders.keys()
        if len(key_ids) > MAX_KEY_IDS:
            raise Refuse(
                "full",
                f"{len(key_ids)} keys for {definition.topic or definition.name!r}; the limit is {MAX_KEY_IDS}",
            )

    def check_room(self, count: int) -> None:
        """Raise Refuse if this store cannot serve so many logs more."""
        if len(self.streams) + count > MAX_STREAMS:
            raise Refuse(
                "full",
                f"this store has {plural(len(self.streams), 'stream')}, and {MAX_STREAMS} is the limit; delete one, or use "
                "another store",
            )

    def check_arrival(self, name: str, key_ids: Iterable[bytes], count: int) -> None:
        """Return if a stream that moves here can be served. Raises Refuse."""
        self.check_room(count)
        for key_id in key_ids:
            there = self.by_address.get((name, key_id))
            if there is not None:
                raise Refuse(
                    "exists",
                    f"this store already has a stream {name!r}, as log {there.uuid.hex()}; move that one away or delete it first",
                )

    def add_addresses(self, stream: Stream) -> None:
        if stream.dead:
            return
        stream.write_dead_letters = partial(self._write_dead_letters, stream)
        self.version += 1
        for key_id in stream.orders:
            self._address(stream, key_id)
        dead = self.streams.get(dead_uuid(stream.uuid))
        if dead is not None:
            dead.charter = stream.charter
            limits = structs.replace(
                stream.definition,
                name=stream.name + DEAD,
                topic="",
                cluster="",
                mirror="",
                origins=(),
                replaces=None,
                successor=b"",
                consuming_paused=False,
                dedup_window_us=0,
                partitions=(),
            )
            dead.define(limits)
            dead.why_superseded = stream.why_superseded
            for key_id in stream.orders:
                self._address(dead, key_id)

    def _address(self, stream: Stream, key_id: bytes) -> None:
        self.by_address[stream.uuid.hex(), key_id] = stream
        # A partition is found by its uuid alone, and so is a stream whose name another one has.
        if not stream.why_superseded and not stream.definition.parent:
            self.by_address[stream.name, key_id] = stream

    def remove_addresses(self, stream: Stream) -> None:
        self.version += 1
        dead = self.streams.get(dead_uuid(stream.uuid))
        removed = (stream, dead)
        self.by_address = {address: s for address, s in self.by_address.items() if s not in removed}
        for other in (
            self.streams.values()
        ):  # it may have been hidden by this stream, under a key that both have
            if other is not stream and other.name == stream.name:
                self.add_addresses(other)

    def _destroy(self, path: str) -> None:
        """Remove the files of a deleted log. What cannot be removed now is removed at the next start."""
        try:
            if os.path.isdir(path):
                Log.destroy(path)
            Path(path + ORDERS).unlink(missing_ok=True)
        except (OSError, LogError) as err:
            log.warning("store.files_left", extra={"fields": {"path": path, "error": str(err)}})

    def hand_over(self, stream: Stream, reason: str) -> None:
        """Remove a stream that another store of the bucket has taken over."""
        self._note_moved(stream)
        self.remove(stream, reason)

    def _note_moved(self, stream: Stream) -> None:
        both = (stream, self.streams.get(dead_uuid(stream.uuid)))
        self.moved |= {address: None for address, one in self.by_address.items() if one in both}
        while len(self.moved) > MAX_MOVED:
            del self.moved[next(iter(self.moved))]

    def release(self, uuid: bytes) -> dict[bytes, Path]:
        """Stop serving a stream that moves to another store, and close its files and those of its dead letters;
        return uuid -> files. Raises LogError.
        """
        stream = self.streams[uuid]
        stream.commit(self.clock.wall_us)
        parts = [one for each in (uuid, dead_uuid(uuid)) if (one := self.streams.get(each))]
        self._note_moved(stream)
        self.leave(stream)
        self.remove_addresses(stream)
        for one in parts:
            del self.streams[one.uuid]
            one.refuse_waiting(MOVING)
            one.end(MOVING)
        return {one.uuid: Path(one.path) for one in parts}

    def was_deleted(self, uuid: bytes) -> bool:
        """Return whether a stream was deleted here, and is not here again because its bucket never learned of that."""
        ending = self.shelf is not None and uuid in self.shelf.ending
        return ending or (uuid in self.ended and uuid not in self.streams)

    def end(self, stream: Stream) -> None:
        """Delete a stream. Raises Refuse, LogWriteFailed."""
        shelf, replica, uuid = self.shelf, stream.replica, stream.uuid
        now_us = self.clock.wall_us
        if replica is None or shelf is None:
            self.ended.add(uuid, now_us)
            self.remove(stream, DELETED)
            return
        self.ended.make_room(now_us)
        left = Left()
        if stream.log is not None:
            left.add(stream.log.offloading.keys(), stream.log.offloading.intended)
        self.remove(stream, DELETED)

        def known() -> None:
            try:
                self.ended.add(uuid, now_us)
            except (
                LogError,
                Refuse,
            ) as err:  # only somebody who repeats its first order is not refused then
                fields = {"path": stream.path, "error": str(err)}
                log.warning("store.files_left", extra={"fields": fields})

        shelf.end(replica, left, known)

    def remove(self, stream: Stream, reason: str) -> None:
        self.leave(stream)
        self.remove_addresses(stream)
        for uuid in (stream.uuid, dead_uuid(stream.uuid)):
            removed = self.streams.pop(uuid, None)
            if removed is not None:
                removed.end(reason)
                if removed.replica is not None and self.shelf is not None:
                    self.shelf.forget(removed.replica)
                self._destroy(removed.path)


def _superseded_text(uuid: bytes, by: Order) -> str:
    replaced = by.definition.replaces
    return superseded_text(uuid, by.uuid, 0 if replaced is None else replaced.next)


def is_stream(name: str) -> bool:
    """Return whether an entry of the directory of streams is a stream or a remnant of one."""
    return bool(_UUID.fullmatch(name.partition(".")[0])) and not name.endswith(SUFFIX)
