"""The store: its clock, start and stop, its session with a relay, and which streams record a
received bundle.

The streams are in `catalogue`, the calls of clients in `calls`. An order is checked when it is
received and again at every start; a stream without a valid order is not served. A damaged or full
stream is reported and does not affect other streams.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Final

from iris.crypto.keys import StoreKey, public_id
from iris.wire import frames
from iris.wire.kinds import Refusal
from relay.logs import Quiet
from relay.store.authority import Authority
from relay.store.bucket.replica import Replica
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.writer import Writer
from relay.store.calls import Calls
from relay.store.catalogue import Catalogue
from relay.store.channels import Channels
from relay.store.clock import Clock
from relay.store.completeness import Completeness
from relay.store.errors import LogError, LogWriteFailed
from relay.store.log import Log
from relay.store.presence import Presence
from relay.store.registration import Registration, log_refusal
from relay.store.session import Bundle, StoreSession
from relay.store.stream import Stream
from relay.supervisor import COMPLETE_FILE, STREAMS

log = logging.getLogger(__name__)

COMMIT_BYTES: Final = 1 << 20


class Store:
    """All streams of one data directory.

    `dirty` is called when there is something to commit, `urge` when much output is queued and
    should be written now.
    """

    def __init__(
        self,
        directory: Path,
        key: StoreKey,
        label: str,
        dirty: Callable[[], None],
        urge: Callable[[], None],
        entropy: Callable[[int], bytes] = os.urandom,
        shelf: Shelf | None = None,
    ) -> None:
        """`shelf` has the streams that are in a bucket."""
        self.key = key
        self.address = public_id(key.public_key).hex()
        self.clock = Clock()
        self.registration = Registration(key, self.address, self._late, self._refused)
        self.presence = Presence()
        """The other stores; known if this one has a bucket."""
        self.completeness = Completeness()
        self._complete_path = directory / COMPLETE_FILE
        group = b""
        if shelf is not None:
            group, self.registration.group = shelf.public_key, shelf.key
        authority = Authority(key.public_key, group)
        self.catalogue = Catalogue(
            directory / STREAMS, authority, self.registration, self.clock, shelf
        )
        self.catalogue.grown = self._touch
        self.streams = self.catalogue.streams
        self._dirty: dict[bytes, Stream] = {}
        self._on_dirty = dirty
        self._urge = urge
        self._quiet = Quiet()
        channels = Channels(key, entropy)
        self.calls = Calls(key, label, self.catalogue, channels, self._touch)
        self.unseal, self.call_received = self.calls.unseal, self.calls.call_received

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def now_us(self) -> int:
        """The wall clock, in µs since 1970. It may be set forward or back."""
        return self.clock.wall_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self.clock.at(now_us)

    def update_time(self, wall_us: int, running_us: int) -> None:
        """Read both clocks: the wall clock, and one that is never set and also runs while the host sleeps."""
        if step_us := self.clock.update(wall_us, running_us):
            for stream in self.streams.values():
                stream.stepped(step_us)
            fields = {
                "by_s": round(step_us / 1e6, 3),
                "effect": "leases, delays and waits are unchanged; ttl, deliver_at and max_age follow the new time",
            }
            log.warning("store.clock_stepped", extra={"fields": fields})

    # -- start and stop --------------------------------------------------------------------------------------

    def load(self, now_us: int) -> None:
        """Open every stream of the directory. One that cannot be opened is quarantined and logged."""
        self.now_us = now_us
        self.catalogue.load()
        self.completeness.load(self._complete_path, self.streams.values())
        for stream in list(self.streams.values()):
            if stream.uuid not in self.completeness.complete:
                # What was published in the meantime was not counted by anybody.
                self._note_gap(stream, "the store was not running")
        self.commit()
        for stream in self.streams.values():
            self.catalogue.add_addresses(stream)

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]], *, moved: bool = False) -> None:
        """Serve streams that this store holds in its bucket: uuid -> their files and copier. `moved`: in a move."""
        adopted = [
            self.catalogue.adopt(path, uuid, replica) for uuid, (path, replica) in found.items()
        ]
        for stream in adopted:
            if not stream.dead:
                self._note_gap(
                    stream, "the stream was moved" if moved else "the store was not running"
                )
                self.catalogue.add_addresses(stream)
        self.commit()
        for stream in adopted:
            if stream.orders and not stream.dead and self.registration.session is not None:
                self.catalogue.serve(stream, log_refusal(stream.name))

    def logs_of(self, writer: Writer) -> dict[bytes, Log]:
        """Return the logs of a journal: uuid -> log. Raises LogWriteFailed if one cannot be written now."""
        logs = {}
        for stream in self.streams.values():
            if stream.replica is not None and stream.replica.writer is writer:
                if stream.log is None or stream.log.failed:
                    raise LogWriteFailed(stream.path, stream.failed or "an earlier write failed")
                logs[stream.uuid] = stream.log
        return logs

    def in_bucket(self) -> list[Stream]:
        """Return the streams that are in the bucket."""
        return [stream for stream in self.streams.values() if stream.in_bucket]

    def abandon(self, writer: Writer) -> None:
        """Stop serving the streams of a journal that has ended: another store holds them."""
        for stream in list(self.streams.values()):
            replica = stream.replica
            if replica is not None and not stream.dead and replica.writer is writer:
                self.catalogue.hand_over(stream, writer.ended)

    def close(self) -> None:
        """Commit everything received and close all files. Idempotent."""
        self.commit()
        for stream in self.streams.values():
            stream.close()

    # -- the session -----------------------------------------------------------------------------------------

    def attached(self, session: StoreSession, *, first: bool) -> None:
        """Start with a new session: register every order and every stream at the relay."""
        self.registration.attach(session)
        self.calls.leases.attached()
        if self.catalogue.shelf is not None:
            self.presence.attach(session)
        self.completeness.session_began()
        for stream in self.streams.values():
            if stream.orders and not stream.dead:
                gone_by = not first and stream.uuid not in self.completeness.complete
                if gone_by or stream.log is None:
                    self._note_gap(stream, "the relay was away")
                self.catalogue.serve(stream, log_refusal(stream.name))

    def registered(self) -> None:
        """The relay has answered all of `attached`. From here on the session reports every loss."""
        self.completeness.registered()

    def _late(self) -> None:
        """The relay had routed messages before it received our interest; nobody counted them."""
        missing = self.completeness.missed_at_start()
        for stream in self.streams.values():
            if stream.uuid in missing:
                self._note_gap(stream, "the store was not attached yet")

    def _refused(self, streams: Iterable[Stream]) -> None:
        """The relay refused the interest of these streams, so they receive nothing."""
        for stream in streams:
            self._note_gap(stream, "the relay refused what it records")

    def _note_gap(self, stream: Stream, cause: str) -> None:
        if stream.why_superseded or not (stream.definition.topic or stream.definition.cluster):
            return
        if stream.log is None:
            stream.missed_while_closed = True  # the gap is written when the log is open again
            return
        stream.recorder.add_gap(None, cause)
        self._touch(stream)

    def detached(self, relay: bytes = b"", *, complete: bool = False) -> None:
        """The session has ended. `complete`: `relay` confirmed that we received everything we record."""
        self.calls.channels.clear()
        self.calls.leases.detached()
        self.registration.detach()
        self.presence.detach()
        for stream in self.streams.values():
            if stream.consumer_calls is not None:
                stream.consumer_calls.detached()
        self.commit()
        self.completeness.session_ended(self.streams.values(), relay, complete=complete)

    def save_complete(self, *, unread: bool = False) -> None:
        """Write down for the next store of this directory which streams are complete. Raises LogWriteFailed."""
        self.completeness.save(self._complete_path, self.streams.values(), unread=unread)

    # -- what comes in ---------------------------------------------------------------------------------------

    def cast_received(self, bundle: Bundle) -> None:
        """Give a publication or broadcast to every stream that records it."""
        flow = bundle.flow
        if flow.version != self.catalogue.version:
            flow.found = self.catalogue.recorders(flow.declared)
            flow.version = self.catalogue.version
        for stream in flow.found:
            stream.recorder.record(bundle, self.clock.elapsed_us)
            self._touch(stream)

    def push_received(self, bundle: Bundle) -> None:
        """Give a push to the stream that takes this cluster's share; refuse it if no stream does."""
        stream = self.catalogue.cluster_recorder(bundle.flow.declared)
        refusal = Refusal.LEAVING if stream is None else stream.recorder.push(bundle)
        if refusal is not None or stream is None:
            bundle.session.refuse(bundle, refusal or Refusal.LEAVING)
        else:
            self._touch(stream)

    def gap_received(self, gap: frames.Gap) -> None:
        """Record a gap that the relay reported: it dropped messages on the way here."""
        for stream in self.catalogue.recorders(gap):
            stream.recorder.gap(gap, self.clock.elapsed_us)
            self._touch(stream)

    def draining(self) -> None:
        """The relay is stopping: refuse all waiting readers and workers."""
        self.registration.leaving = True
        self.calls.leases.refuse_waiting("the relay is stopping")
        for stream in self.streams.values():
            stream.refuse_waiting("the relay is stopping")

    def callers_left(self, hops: Set[int]) -> None:
        """The relay reports that the callers of these calls, by hop id, no longer wait."""
        self.calls.leases.callers_left(hops)
        for stream in list(self.streams.values()):
            stream.callers_left(hops, self.now_us)

    def out_full(self) -> None:
        """Much output is queued: write it now."""
        self._urge()

    def _touch(self, stream: Stream) -> None:
        if not self._dirty:
            self._on_dirty()
        self._dirty[stream.uuid] = stream

    @property
    def waiting_bytes(self) -> int:
        """Bytes of bodies that wait for the next commit."""
        return sum(stream.recorder.bytes for stream in self._dirty.values())

    def commit(self) -> None:
        """Write what every stream has received, with one sync per stream."""
        dirty, self._dirty = self._dirty, {}
        for stream in dirty.values():
            try:
                stream.commit(self.now_us)
            except LogError as err:  # its callers have their answers; the other streams continue
                self._warn(stream, err)
            except Exception:
                log.exception("store.fault", extra={"fields": {"stream": stream.name}})

    def _warn(self, stream: Stream, err: LogError) -> None:
        fields = {"stream": stream.name, "error": str(err)}
        self._quiet.warning(
            log, "store.stream_failed", stream.uuid, self.clock.elapsed_us / 1e6, fields
        )

    def tend(self) -> None:
        """Do the periodic work: answer readers whose wait is over, enforce ages, compact, reopen
        failed logs.
        """
        self.calls.leases.tend()
        shelf = self.catalogue.shelf
        self.presence.tend(self.clock.elapsed_us, succeeding=shelf is not None and shelf.succeeding)
        for stream in list(self.streams.values()):
            try:
                if not self.registration.blocked:
                    stream.readers.answer_waiting(self.now_us)
                if (
                    stream.orders
                    and stream.reopen_us <= self.clock.elapsed_us
                    and (stream.log is None or stream.log.failed)
                ):
                    was_open = stream.log is not None
                    stream.reopen(self.now_us)
                    if not was_open and not stream.dead and stream.log is not None:
                        # The definition file beside a log may be older than the definition inside the log.
                        self.catalogue.load_charter(stream, stream.log.definition)
                        if stream.missed_while_closed or stream.definition.cluster:
                            # Broadcasts may be missed between two memberships.
                            self._note_gap(stream, "its log could not be opened")
                        stream.missed_while_closed = False
                        self.catalogue.add_addresses(stream)
                        self.catalogue.leave(stream)
                        self.catalogue.serve(stream, log_refusal(stream.name))
                    log.info("store.stream_reopened", extra={"fields": {"stream": stream.name}})
                if stream.why_superseded:
                    continue  # what it has is kept
                if dropped := stream.tend(self.now_us):
                    fields = {"stream": stream.name, "records": dropped}
                    log.warning("store.staged_expired", extra={"fields": fields})
            except LogError as err:
                self._warn(stream, err)
            except Exception:
                log.exception("store.fault", extra={"fields": {"stream": stream.name}})
