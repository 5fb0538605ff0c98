"""The catalogue of a store's streams: on disk, by address, and at the relay.

Each stream is a directory named by its uuid. Its orders are in the log itself and in a file beside
the directory.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import structs

from iris.crypto.keys import public_id
from iris.errors import DecodeError, IrisError
from iris.wire import frames
from iris.wire.frames import MAX_KEY_IDS
from iris.wire.kinds import Kind
from iris.wire.names import plural, printable
from iris.wire.orders import DEAD, Definition, Order, superseded_text
from iris.wire.stream_items import dead_uuid
from relay.logs import Quiet
from relay.store import displacing, join_notes
from relay.store.authority import NO_CHARTER, Authority, Charter, DefinitionFile
from relay.store.bucket.replica import Replica, forget
from relay.store.bucket.sealing import Forced
from relay.store.bucket.shelf import Left, Shelf
from relay.store.clock import Clock
from relay.store.cursor import Dead
from relay.store.ended import LEFT, MAX_ENDED, SUFFIX, Ended
from relay.store.errors import LogError, LogWriteFailed, Refuse
from relay.store.files import read_small, write_beside
from relay.store.join_notes import Note
from relay.store.log import Log
from relay.store.registration import Done, Registration, log_refusal
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


class Joins(Protocol):
    """A stream that is to join the bucket."""

    replicas: Mapping[bytes, Replica]
    """Uuid of a log -> what copies it, from the switch to the decision."""
    done: int
    """Bytes that were given to the bucket."""


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
        self.left = Ended(directory, MAX_ENDED, LEFT)
        self.streams: dict[bytes, Stream] = {}
        self.by_address: dict[tuple[str, bytes], Stream] = {}
        """(name or uuid, key id) -> stream."""
        self.moved: dict[tuple[str, bytes], None] = {}
        """Addresses of streams that another store of the bucket has taken over: a call may still be on its way here."""
        self.joins: dict[bytes, Joins] = {}
        """Streams that are to join the bucket."""
        self.undecided: dict[bytes, Note] = {}
        """Streams of which only the bucket knows whether they have joined. They are not served until it was asked."""
        self._quiet = Quiet()
        self.version = 0
        """Changes whenever the set of streams or what they record changes."""
        self.authority = authority
        self.registration = registration
        self.clock = clock

    def load(self) -> None:
        """Open every stream of the directory. One that cannot be opened is quarantined and logged."""
        self.ended.load()
        self.left.load()
        finish(self.directory)
        for ended in self.ended.uuids:
            for uuid in (ended, dead_uuid(ended)):
                self._destroy(str(self.directory / uuid.hex()))
        self._find_joined()
        held_back = {one for uuid in self.undecided for one in (uuid, dead_uuid(uuid))}
        for path in sorted(self.directory.iterdir()):
            if _UUID.fullmatch(path.name) and path.is_dir():
                uuid = bytes.fromhex(path.name)
                if uuid not in held_back:
                    self._load(path, uuid)

    def _find_joined(self) -> None:
        """Move the logs of streams that have joined the bucket to the others there, and note those that may have.

        Raises ConfigError, OSError.
        """
        for uuid, note in join_notes.find(self.directory).items():
            if self.shelf is not None and note.joined:
                self.shelf.make_directory()
                join_notes.move_logs(uuid, self.directory, self.shelf.directory)
                self.end_copies(uuid)
                continue
            self.undecided[uuid] = note
            reason = "the store has no bucket now"
            if self.shelf is not None:
                self.shelf.undecided[uuid] = note.token
                self.shelf.copies.of(uuid)  # it stays until it is known whether it still counts
                reason = "the store ended before that was known"
            fields = {"path": str(self.directory / uuid.hex()), "reason": reason}
            log.warning("store.join_undecided", extra={"fields": fields})

    def drop_joined(self, uuid: bytes) -> None:
        """Delete the logs of a stream that has joined the bucket, which has all of it."""
        self.undecided.pop(uuid, None)
        self.end_copies(uuid)
        for one in (dead_uuid(uuid), uuid):
            self._destroy(str(self.directory / one.hex()))

    def open_stayed(self, uuid: bytes) -> list[Stream]:
        """Open a stream that did not join the bucket, and its dead letters. One that cannot be opened is logged."""
        note = self.undecided.pop(uuid)
        path = str(self.directory / uuid.hex())
        try:
            with Log.open(path) as opened:
                if opened.definition != note.before:
                    opened.define(note.before)
            join_notes.remove(path)
        except LogError as err:  # the next start asks again
            log.error(
                "store.stream_quarantined", extra={"fields": {"path": path, "error": str(err)}}
            )
            return []
        there = [one for one in (uuid, dead_uuid(uuid)) if (self.directory / one.hex()).is_dir()]
        for one in there:
            self._load(self.directory / one.hex(), one)
        added = [self.streams[one] for one in there]
        for stream in added:
            self.copy(stream)  # before anything is written
            if stream.bucket_copy is None and not stream.dead:
                self.end_copies(uuid)
        return added

    def make(
        self,
        uuid: bytes,
        stored: bytes,
        charter: Charter = NO_CHARTER,
        replica: Replica | None = None,
    ) -> Stream:
        """Create a stream on disk, and with `replica` in the bucket. Raises LogError."""
        directory = self.directory
        if replica is not None and not replica.joining and self.shelf is not None:
            directory = self.shelf.directory
        path = str(directory / uuid.hex())
        write_beside(path + ORDERS, stored)
        made = Log.create(path, uuid=uuid, definition=stored, created_us=self.clock.wall_us)
        stream = self.streams[uuid] = Stream(path, uuid, made, charter, self.clock)
        if replica is not None:
            stream.replicate(replica, self.grown)
            made.copy_all()
        return stream

    def copy(self, stream: Stream) -> None:
        """Copy a stream of the disk, and its dead letters, to the bucket or not, as its definition says."""
        if stream.replica is not None or stream.dead:
            return
        shelf = self.shelf if stream.definition.copy and stream.orders else None
        for one in (stream, self.streams.get(dead_uuid(stream.uuid))):
            if one is None or (shelf is not None and one.bucket_copy is not None):
                continue
            if shelf is not None:
                one.follow(shelf.copies.of(one.uuid))
                continue
            if one.bucket_copy is not None and self.shelf is not None:
                self.shelf.copies.end(one.uuid)
            one.follow(None)
            try:
                if one.log is not None:
                    forget(one.log.database)  # what is written now is in no copy
            except LogError as err:
                fields = {"error": str(err), "behind_bytes": 0}
                log.warning("store.copies_late", extra={"fields": fields})

    def end_copies(self, uuid: bytes) -> None:
        """End the copies of a stream, and of its dead letters, that is not on the disk any more."""
        if self.shelf is not None:
            for one in (uuid, dead_uuid(uuid)):
                self.shelf.copies.end(one)

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
        stream.displaced = stream.displaced or displacing.read(str(path))
        self.streams[uuid] = stream

    def load_charter(self, stream: Stream, data: bytes) -> None:
        """Set a stream's charter from its definition file. Raises msgspec.DecodeError or Refuse."""
        stored = _decode_definition_file(data)
        stream.dead = bool(stored.parent)
        if not stream.dead:
            stream.charter = self.authority.load(stored, stream.uuid)
            stream.redefine()
            if stream.charter.by is not None:
                stream.displaced = _superseded_text(stream.uuid, stream.charter.by)

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
            joins = self.joins.get(stream.uuid)
            if stream.joining and joins is not None:
                replica = joins.replicas[uuid]
            elif stream.replica is not None and self.shelf is not None:
                replica = self.shelf.replica_beside(uuid, stream.replica)
            stored = encode_definition_file(DefinitionFile(parent=stream.uuid))
            dead_stream = self.make(uuid, stored, replica=replica)
            dead_stream.dead = True
            self.add_addresses(stream)
            self.registration.serve_dead(stream, dead_stream)
        if not dead_stream.dead:
            raise LogWriteFailed(dead_stream.path, "the log with this uuid is not for dead letters")
        return dead_stream

    def check_forced(self, definition: Definition, key_ids: Collection[bytes], uuid: bytes) -> None:
        """Return if a stream that is made of a copy can be served. Raises Refuse."""
        self.check_arrival(definition.name, key_ids, 2)
        self.check_keys(definition, set(key_ids))
        dead = self.streams.get(dead_uuid(uuid))
        if uuid in self.streams or uuid in self.ended or any(uuid == dead_uuid(u) for u in self.streams) or (dead is not None and not dead.dead):  # fmt: skip
            raise Refuse("order", "the store has, or had, another log with this uuid; repeat the order with a new uuid")  # fmt: skip

    def bring(self, uuid: bytes) -> Stream:
        """Open a log that was made of a copy, and its dead letters. One that cannot be opened is quarantined."""
        for one in (dead_uuid(uuid), uuid):
            path = self.directory / one.hex()
            if path.is_dir() and one not in self.streams:
                self._load(path, one)
        self.add_addresses(self.streams[uuid])
        return self.streams[uuid]

    def displace(self, entry: Forced) -> None:
        """Serve a stream of the disk no more, if we have it: another one has taken its place. Its log is kept.

        Idempotent. Raises LogWriteFailed.
        """
        if entry.lost in self.undecided:
            displacing.write(str(self.directory / entry.lost.hex()), entry)
        stream = self.streams.get(entry.lost)
        if stream is None or stream.dead or stream.replica is not None or stream.displaced:
            return
        stream.commit(self.clock.wall_us)
        self._keep_only(stream, displacing.write(stream.path, entry), "leaving")
        fields = {"stream": stream.name, "uuid": stream.uuid.hex(), "by": entry.made.hex(), "store": public_id(entry.store).hex(), "host": entry.label}  # fmt: skip
        log.error("store.stream_displaced", extra={"fields": fields})
        if self.registration.session is not None:
            self.serve(stream, log_refusal(stream.name))

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
        self._keep_only(stream, _superseded_text(stream.uuid, by), "superseded")
        fields = {"stream": stream.name, "uuid": stream.uuid.hex(), "by": by.uuid.hex()}
        log.warning("store.stream_superseded", extra={"fields": fields})
        self.serve(stream, then)

    def _keep_only(self, stream: Stream, text: str, code: str) -> None:
        """Take a stream's name away from it, and refuse those who wait for it. `serve` it after that."""
        self._note_moved(stream)
        self.leave(stream)
        self.remove_addresses(stream)
        stream.displaced = text
        for one in (stream, self.streams.get(dead_uuid(stream.uuid))):
            if one is not None:
                one.refuse_waiting(text, code)
                if one.consumer_calls is not None:
                    one.consumer_calls.clear_lines()
        self.add_addresses(stream)

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
        self.copy(stream)
        stream.write_dead_letters = partial(self._write_dead_letters, stream)
        self.version += 1
        for key_id in stream.orders:
            self._address(stream, key_id, displaced=bool(stream.displaced))
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
            dead.displaced = stream.displaced
            for key_id in stream.orders:
                self._address(dead, key_id, displaced=bool(stream.displaced))

    def _address(self, stream: Stream, key_id: bytes, *, displaced: bool) -> None:
        self.by_address[stream.uuid.hex(), key_id] = stream
        # A partition is found by its uuid alone, and so is a stream whose name another one has.
        if not displaced and not stream.definition.parent:
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
            displacing.remove(path)
            join_notes.remove(path)
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
                if removed.bucket_copy is not None and self.shelf is not None:
                    self.shelf.copies.end(uuid)
                self._destroy(removed.path)


def _superseded_text(uuid: bytes, by: Order) -> str:
    replaced = by.definition.replaces
    return superseded_text(uuid, by.uuid, 0 if replaced is None else replaced.next)


def is_stream(name: str) -> bool:
    """Return whether an entry of the directory of streams is a stream or a remnant of one."""
    return bool(_UUID.fullmatch(name.partition(".")[0])) and not name.endswith((SUFFIX, LEFT))
