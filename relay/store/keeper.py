"""The store: which streams there are, who may change them, and which stream a bundle or a question is for.

Under DIR/streams each stream is a directory named by its uuid, with its orders in the log itself. An order is checked when it
comes and again at every start; what no order covers is not served. One damaged or full stream is told and costs no other.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs

from iris.crypto.keys import StoreKey, public_id
from iris.errors import DecodeError, IrisError
from iris.wire import frames, streams
from iris.wire.frames import MAX_KEY_IDS, NO_KEY, Kind, Refusal
from iris.wire.streams import (
    DEAD,
    END,
    Definition,
    SignedOrder,
    dead_uuid,
    decode_order,
)
from relay.logs import Quiet
from relay.store.authority import Authority, Kept, is_promotion, one_definition
from relay.store.channels import UNSEALED, UPGRADE, Channels
from relay.store.clock import Clock
from relay.store.consuming import ConsumerRefused, Consuming
from relay.store.continuity import Continuity
from relay.store.cursor import Dead
from relay.store.database import write_beside
from relay.store.ended import SUFFIX, Ended
from relay.store.errors import ChannelRefused, LogDamaged, LogError, LogWriteFailed, Refuse
from relay.store.log import Log
from relay.store.presence import Presence, Then, told
from relay.store.salvage import ORDERS, finish
from relay.store.session import Bundle, Question, StoreSession
from relay.store.staged import StagingRefused
from relay.store.stream import Stream
from relay.supervisor import STREAMS, WHOLE

log = logging.getLogger(__name__)

MAX_STREAMS: Final = 500
"""What a relay lets one session prove and join is enough for these, with a second key while keys rotate."""
COMMIT_BYTES: Final = 1 << 20
_UUID: Final = re.compile("[0-9a-f]{32}")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_kept: Final = msgspec.msgpack.Decoder(Kept).decode


class Store:
    """All streams of one data directory. `dirty` is called when there is something to commit, `urge` when it should not wait."""

    def __init__(
        self,
        directory: Path,
        key: StoreKey,
        label: str,
        dirty: Callable[[], None],
        urge: Callable[[], None],
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.directory = directory / STREAMS
        self._ended = Ended(self.directory)
        self.key = key
        self.address = public_id(key.public_key).hex()
        self.label = label
        self.clock = Clock()
        self.presence = Presence(key, self.address, self._late, self._refused)
        self.continuity = Continuity()
        self._left = directory / WHOLE
        self.authority = Authority(key.public_key)
        self.leaving = False
        """Our relay is about to stop."""
        self.blocked = False
        """The relay does not read what we answer: readers wait."""
        self.streams: dict[bytes, Stream] = {}
        self._places: dict[tuple[str, bytes], Stream] = {}
        """By (name or uuid, key id)."""
        self._version = 0
        self._dirty: dict[bytes, Stream] = {}
        self._say_dirty = dirty
        self._urge = urge
        self._quiet = Quiet()
        self.channels = Channels(key, entropy)
        self.refused = 0
        """Calls that failed authentication."""
        self._calls: dict[type, Callable[[Question, Any], None]] = {
            streams.FindStore: self._on_find_store,
            streams.Knock: self._on_knock,
            streams.Open: self._on_open,
            streams.Create: self._on_create,
            streams.ListStreams: self._on_list,
            streams.Describe: self._on_describe,
            streams.Change: self._on_change,
            streams.Delete: self._on_delete,
            streams.Append: self._on_append,
            streams.Stage: self._on_stage,
            streams.Commit: self._on_commit,
            streams.Discard: self._on_discard,
            streams.Copy: self._on_copy,
            streams.Fetch: self._on_fetch,
            streams.Find: self._on_find,
            streams.Consume: self._on_consume,
            streams.Settle: self._on_settle,
            streams.DescribeConsumers: self._on_consumers,
            streams.DeleteConsumer: self._on_delete_consumer,
        }

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def now_us(self) -> int:
        """µs since 1970, by a clock that may be set."""
        return self.clock.wall_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self.clock.at(now_us)

    def tell_time(self, wall_us: int, running_us: int) -> None:
        """Look at the clocks: that of the wall, and one that is never set and passes also while the host sleeps."""
        if step_us := self.clock.tell(wall_us, running_us):
            for stream in self.streams.values():
                stream.stepped(step_us)
            fields = {
                "by_s": round(step_us / 1e6, 3),
                "effect": "leases, delays and waits go on as they were; ttl, deliver_at and max_age go by the new time",
            }
            log.warning("store.clock_stepped", extra={"fields": fields})

    # -- start and stop --------------------------------------------------------------------------------------

    def load(self, now_us: int) -> None:
        """Open every stream of the directory; one that cannot be opened is kept aside and told."""
        self.now_us = now_us
        self._ended.load()
        finish(self.directory)
        for ended in self._ended.uuids:
            for uuid in (ended, dead_uuid(ended)):
                self._destroy(str(self.directory / uuid.hex()))
        for path in sorted(self.directory.iterdir()):
            if _UUID.fullmatch(path.name) and path.is_dir():
                self._load(path, bytes.fromhex(path.name))
        self.continuity.take_up(self._left, self.streams.values())
        for stream in list(self.streams.values()):
            if stream.uuid not in self.continuity.whole:
                # Whatever was published meanwhile, nobody counted.
                self._missed(stream, "the store was not running")
        self.commit()
        for stream in self.streams.values():
            self._place(stream)

    def _load(self, path: Path, uuid: bytes) -> None:
        stream = Stream(str(path), uuid, None, clock=self.clock)
        try:
            opened = Log.open(str(path))
        except LogError as err:
            stream.failed = str(err)
            try:  # whose it is, so that it is listed as what it is
                self._take_up(stream, Path(f"{path}{ORDERS}").read_bytes())
            except (OSError, msgspec.DecodeError, IrisError) as unknown:
                stream.failed = f"{err}; and its orders: {unknown}"
            log.error(
                "store.stream_quarantined", extra={"fields": {"path": str(path), "error": str(err)}}
            )
        else:
            stream.opened(opened)
            try:
                if opened.uuid != uuid:
                    raise DecodeError("its directory bears another log's name")
                self._take_up(stream, opened.definition)
            except (msgspec.DecodeError, IrisError) as err:
                stream.failed = f"its orders do not hold: {err}"
                log.error(
                    "store.stream_refused", extra={"fields": {"path": str(path), "error": str(err)}}
                )
        self.streams[uuid] = stream

    def _take_up(self, stream: Stream, data: bytes) -> None:
        """Give a stream the charter that was written to disk. Raises msgspec.DecodeError and Refuse."""
        kept = _decode_kept(data)
        stream.dead = bool(kept.parent)
        if not stream.dead:
            stream.charter = self.authority.load(kept, stream.uuid)
            stream.redefine()

    def close(self) -> None:
        """Commit what has come, and give the files back. Idempotent."""
        self.commit()
        for stream in self.streams.values():
            stream.close()

    # -- the session -----------------------------------------------------------------------------------------

    def attached(self, session: StoreSession, *, first: bool) -> None:
        """A relay welcomed us: show it every order, and serve every stream."""
        self.presence.attach(session)
        self.continuity.begun()
        self.leaving = False
        for stream in self.streams.values():
            if stream.orders and not stream.dead:
                gone_by = not first and stream.uuid not in self.continuity.whole
                if gone_by or stream.log is None:
                    self._missed(stream, "the relay was away")
                self._serve(stream, told(stream.name))

    def registered(self) -> None:
        """The relay has answered all that `attached` said: what is missed from here on, the session tells."""
        self.continuity.registered()

    def _late(self) -> None:
        """The relay had routed something before we were there, which nobody has counted."""
        missing = self.continuity.late()
        for stream in self.streams.values():
            if stream.uuid in missing:
                self._missed(stream, "the store was not there yet")

    def _refused(self, streams: Iterable[Stream]) -> None:
        """The relay sends these nothing of what they record."""
        for stream in streams:
            self._missed(stream, "the relay refused what it records")

    def _missed(self, stream: Stream, cause: str) -> None:
        if not (stream.definition.topic or stream.definition.cluster):
            return
        if stream.log is None:
            stream.unheard = True  # it is noted when there is a log
            return
        stream.recorder.note(None, cause)
        self._touch(stream)

    def detached(self, relay: bytes = b"", *, complete: bool = False) -> None:
        """The session has ended. `complete`: `relay` said so of what it sent."""
        self.channels.clear()
        self.presence.detach()
        for stream in self.streams.values():
            if stream.consuming is not None:
                stream.consuming.detached()
        self.commit()
        self.continuity.ended(self.streams.values(), relay, complete=complete)

    def leave_word(self, *, unread: bool = False) -> None:
        """Tell the next store of this directory which streams miss nothing. Raises LogWriteFailed."""
        self.continuity.leave(self._left, self.streams.values(), unread=unread)

    def _serve(self, stream: Stream, then: Then) -> None:
        dead = self.streams.get(dead_uuid(stream.uuid))
        self.presence.serve(stream, dead, self.streams.values(), then)

    def _leave(self, stream: Stream) -> None:
        others = [other for other in self.streams.values() if other is not stream]
        self.presence.leave(stream, others)

    # -- what comes in ---------------------------------------------------------------------------------------

    def recorded(self, bundle: Bundle) -> None:
        """A publication or broadcast came: every stream that records it takes it."""
        flow = bundle.flow
        if flow.version != self._version:
            flow.found = self._recorders(flow.declared)
            flow.version = self._version
        for stream in flow.found:
            stream.recorder.record(bundle, self.clock.elapsed_us)
            self._touch(stream)

    def _recorders(self, declared: frames.Declare | frames.Gap) -> Sequence[Stream]:
        if declared.kind == Kind.BROADCAST:
            stream = self._sharing(declared)
            return [] if stream is None else [stream]
        return [s for s in self.streams.values() if s.records(declared.name, declared.key_id)]

    def _sharing(self, declared: frames.Declare | frames.Gap) -> Stream | None:
        """Return the stream that records a cluster's messages; None if it records nothing of that address."""
        stream = self.presence.members.get(declared.member)
        if stream is None or not stream.shares(declared.name, declared.key_id):
            return None
        return stream

    def pushed(self, bundle: Bundle) -> None:
        """A push came for the stream that takes a cluster's share."""
        stream = self._sharing(bundle.flow.declared)
        refusal = Refusal.LEAVING if stream is None else stream.recorder.push(bundle)
        if refusal is not None or stream is None:
            bundle.session.refuse(bundle, refusal or Refusal.LEAVING)
        else:
            self._touch(stream)

    def gap(self, gap: frames.Gap) -> None:
        """The relay dropped something on the way here."""
        for stream in self._recorders(gap):
            stream.recorder.gap(gap, self.clock.elapsed_us)
            self._touch(stream)

    def draining(self) -> None:
        """The relay stops: nobody waits here any more."""
        self.leaving = True
        for stream in self.streams.values():
            stream.turn_away("the relay stops")

    def left(self, hops: Set[int]) -> None:
        """Whoever made these calls waits no more, as the relay says."""
        for stream in list(self.streams.values()):
            stream.left(hops, self.now_us)

    def out_full(self) -> None:
        """There is much to write."""
        self._urge()

    def unseal(self, question: Question, end: memoryview, body: memoryview) -> memoryview:
        """Return the call in an authenticated body. Raises ChannelRefused."""
        try:
            return self.channels.unseal(question, end, body)
        except ChannelRefused as err:
            self._unproven(question, str(err))
            raise

    def asked(self, question: Question) -> None:
        """A call came."""
        try:
            if question.channel is None and not isinstance(question.call, UNSEALED):
                self._unproven(question, "it was not authenticated")
                raise Refuse("invalid", UPGRADE)
            self._calls[type(question.call)](question, question.call)
        except ChannelRefused as err:
            self._unproven(question, str(err))
            question.refuse("channel", str(err))
        except (Refuse, StagingRefused) as err:
            question.refuse(err.code, str(err))
        except ConsumerRefused as err:
            question.refuse("consumer", str(err))
        except DecodeError as err:
            question.refuse("invalid", str(err))
        except LogDamaged as err:
            question.refuse("damaged", str(err))
        except LogError as err:
            question.refuse("disk", str(err))
        except (ValueError, OverflowError) as err:
            question.refuse("invalid", str(err))
        except Exception as err:  # a fault of ours costs this call, and nobody else theirs
            log.exception("store.fault", extra={"fields": {"call": type(question.call).__name__}})
            question.refuse("failed", f"internal error: {type(err).__name__}")

    def _unproven(self, question: Question, reason: str) -> None:
        """Count and log a call that failed authentication."""
        self.refused += 1
        fields = {"address": question.name, "key_id": question.key_id.hex(), "reason": reason, "refused": self.refused}  # fmt: skip
        self._quiet.warning(log, "store.call_refused", reason, self.clock.elapsed_us / 1e6, fields)

    def _touch(self, stream: Stream) -> None:
        if not self._dirty:
            self._say_dirty()
        self._dirty[stream.uuid] = stream

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the commit."""
        return sum(stream.recorder.bytes for stream in self._dirty.values())

    def commit(self) -> None:
        """Write what has come to every stream, one sync each."""
        dirty, self._dirty = self._dirty, {}
        for stream in dirty.values():
            try:
                stream.commit(self.now_us)
            except LogError as err:  # told to whom it concerned; the others go on
                self._warn(stream, err)
            except Exception:
                log.exception("store.fault", extra={"fields": {"stream": stream.name}})

    def _warn(self, stream: Stream, err: LogError) -> None:
        fields = {"stream": stream.name, "error": str(err)}
        self._quiet.warning(
            log, "store.stream_failed", stream.uuid, self.clock.elapsed_us / 1e6, fields
        )

    def tend(self) -> None:
        """Do what time brings: readers whose wait is over, ages, compaction, logs that failed."""
        for stream in list(self.streams.values()):
            try:
                if not self.blocked:
                    stream.expire(self.now_us)
                if (
                    stream.orders
                    and stream.reopen_us <= self.clock.elapsed_us
                    and (stream.log is None or stream.log.failed)
                ):
                    was_open = stream.log is not None
                    stream.reopen(self.now_us)
                    if not was_open and not stream.dead and stream.log is not None:
                        # The definition file beside a log may be older than the log's own.
                        self._take_up(stream, stream.log.definition)
                        if stream.unheard or stream.definition.cluster:
                            # Between two memberships broadcasts may pass by.
                            self._missed(stream, "its log could not be opened")
                        stream.unheard = False
                        self._place(stream)
                        self._leave(stream)
                        self._serve(stream, told(stream.name))
                    log.info("store.stream_reopened", extra={"fields": {"stream": stream.name}})
                if dropped := stream.tend(self.now_us):
                    fields = {"stream": stream.name, "records": dropped}
                    log.warning("store.staged_expired", extra={"fields": fields})
            except LogError as err:
                self._warn(stream, err)
            except Exception:
                log.exception("store.fault", extra={"fields": {"stream": stream.name}})

    # -- calls of the store ----------------------------------------------------------------------------------

    def _on_find_store(self, question: Question, call: streams.FindStore) -> None:
        question.answer(streams.StoreInfo(self.key.public_key, self.label))

    def _on_knock(self, question: Question, call: streams.Knock) -> None:
        uuid, orders = self._called(question)
        question.answer(self.channels.door(question, call, uuid, orders, self.clock.elapsed_us))

    def _on_open(self, question: Question, call: streams.Open) -> None:
        key_id = public_id(call.public_key)
        uuid, _ = self._called(question)
        if uuid == streams.NO_LOG and not any(key_id in s.orders for s in self.streams.values()):
            raise Refuse("no-stream", f"this store has no stream under key {key_id.hex()[:8]}")
        if uuid != streams.NO_LOG and key_id != question.key_id:
            raise ChannelRefused("the call is addressed under another key than its caller's")
        question.answer(self.channels.open(question, call, uuid, self.clock.elapsed_us))

    def _called(self, question: Question) -> tuple[bytes, list[SignedOrder]]:
        """Return the log that a frame is addressed to (`NO_LOG` for the store itself), and its order under the frame's key."""
        if (question.name, question.key_id) == (self.address, NO_KEY):
            return streams.NO_LOG, []
        stream = self._stream(question)
        return stream.uuid, [stream.orders[question.key_id][1]]

    def _on_list(self, question: Question, call: streams.ListStreams) -> None:
        channel = question.channel
        if channel is None or channel.uuid != streams.NO_LOG:
            raise Refuse("invalid", "listing streams requires a channel to the store itself")
        found = [
            s
            for s in sorted(self.streams.values(), key=_order_of_list)
            if channel.key_id in s.orders and _order_of_list(s) > call.after
        ]
        told = [
            stream.described(self.key.public_key, self.label)
            for stream in found[: streams.MAX_LISTED]
        ]
        question.answer(streams.Listed(told, len(found) > streams.MAX_LISTED))

    def _on_create(self, question: Question, call: streams.Create) -> None:
        if question.name != self.address:
            raise Refuse("order", "a stream is created at one store, by its own name")
        uuid = decode_order(call.orders[0].order).uuid
        orders = self.authority.read(call.orders, uuid)
        definition = one_definition(orders)
        here = {id(s): s for key_id in orders if (s := self._places.get((definition.name, key_id)))}
        for stream in here.values():
            if stream.uuid == uuid and stream.definition == definition:
                question.answer(stream.described(self.key.public_key, self.label))  # a retry
                return
            raise Refuse(
                "exists", f"stream {definition.name!r} is held here, as log {stream.uuid.hex()}"
            )
        if uuid in self.streams:
            raise Refuse("order", "another stream of this store has this uuid")
        if uuid in self._ended:
            raise Refuse("order", "this log was deleted; create the stream again, with a new uuid")
        if dead_uuid(uuid) in self.streams or any(uuid == dead_uuid(u) for u in self.streams):
            raise Refuse("order", "the dead letters of another stream have this uuid")
        charter = self.authority.create(orders, self.now_us)
        self._check_keys(definition, set(orders))
        if len(self.streams) >= MAX_STREAMS:
            raise Refuse("full", f"this store keeps {MAX_STREAMS} streams already")
        path = str(self.directory / uuid.hex())
        kept = _encode(charter.kept)
        write_beside(path + ORDERS, kept)
        made = Log.create(path, uuid=uuid, definition=kept, created_us=self.now_us)
        stream = self.streams[uuid] = Stream(path, uuid, made, charter, self.clock)
        self._place(stream)

        def served(error: str) -> None:
            if error:
                question.refuse("order", f"the relay does not accept the order: {error}")
                self._remove(stream, error)
            else:
                question.answer(stream.described(self.key.public_key, self.label))
                log.info(
                    "store.stream_created",
                    extra={"fields": {"stream": stream.name, "uuid": uuid.hex()}},
                )

        self._serve(stream, served)

    # -- calls of a stream -----------------------------------------------------------------------------------

    def _stream(self, question: Question) -> Stream:
        stream = self._places.get((question.name, question.key_id))
        if stream is None:
            raise Refuse(
                "no-stream",
                f"no stream {question.name!r} under key {question.key_id.hex()[:8]} here",
            )
        return stream

    def _on_describe(self, question: Question, call: streams.Describe) -> None:
        question.answer(self._stream(question).described(self.key.public_key, self.label))

    def _on_change(self, question: Question, call: streams.Change) -> None:
        stream = self._stream(question)
        if stream.dead or stream.log is None:
            raise Refuse(
                "invalid",
                stream.failed or "dead letters cannot be changed on their own; change their stream",
            )
        charter = self.authority.change(stream.charter, call.orders, stream.uuid, self.now_us)
        if charter is stream.charter:
            question.answer(stream.described(self.key.public_key, self.label))  # a retry
            return
        old, definition = stream.definition, charter.definition
        promoted = is_promotion(old, definition)
        self._check_keys(definition, set(charter.orders))
        stream.commit(self.now_us)
        kept = _encode(charter.kept)
        stream.log.define(kept)
        write_beside(stream.path + ORDERS, kept)
        same_paused = definition.paused == old.paused
        if charter.orders.keys() == stream.orders.keys() and same_paused and not promoted:
            stream.charter = charter
            stream.redefine()
            self._place(stream)
            question.answer(stream.described(self.key.public_key, self.label))
            if old.consuming_paused and not definition.consuming_paused:
                stream.wake(self.now_us)
            return
        self._leave(stream)
        self._displace(stream)
        stream.charter = charter
        stream.redefine()
        if promoted:
            self.presence.show_again(stream)
            fields = {"stream": stream.name, "uuid": stream.uuid.hex(), "source": old.mirror}
            log.info("store.stream_promoted", extra={"fields": fields})
        elif definition.cluster and not old.paused:
            # Between two memberships broadcasts may pass by.
            stream.recorder.note(None, "its keys changed")
            self._touch(stream)
        if old.paused and not definition.paused and (definition.topic or definition.cluster):
            stream.recorder.note(None, "it was paused")
            self._touch(stream)
        self._place(stream)

        def served(error: str) -> None:
            if error:
                question.refuse("order", f"the relay does not accept the order: {error}")
            else:
                question.answer(stream.described(self.key.public_key, self.label))

        self._serve(stream, served)

    def _on_delete(self, question: Question, call: streams.Delete) -> None:
        if self._was_ended(call):
            question.answer(streams.Settled())  # a retry
            return
        stream = self._stream(question)
        if stream.dead:
            raise Refuse(
                "invalid", "dead letters cannot be deleted on their own; delete their stream"
            )
        self.authority.end(stream.charter, call.orders, stream.uuid, self.now_us)
        self._ended.add(stream.uuid, self.now_us)
        self._remove(stream, "the stream was deleted")
        question.answer(streams.Settled())
        log.info(
            "store.stream_deleted",
            extra={"fields": {"stream": stream.name, "uuid": stream.uuid.hex()}},
        )

    def _was_ended(self, call: streams.Delete) -> bool:
        uuid = decode_order(call.orders[0].order).uuid
        if uuid not in self._ended:
            return False
        self.authority.read(call.orders, uuid, action=END)
        return True

    def _on_append(self, question: Question, call: streams.Append) -> None:
        stream = self._stream(question)
        stream.append(question, call)
        self._touch(stream)

    def _on_stage(self, question: Question, call: streams.Stage) -> None:
        stream = self._stream(question)
        stream.stage(question, call, self.now_us)
        self._touch(stream)

    def _on_commit(self, question: Question, call: streams.Commit) -> None:
        stream = self._stream(question)
        stream.show(question, call, self.now_us)
        self._touch(stream)

    def _on_discard(self, question: Question, call: streams.Discard) -> None:
        self._stream(question).show(question, call, self.now_us)

    def _on_copy(self, question: Question, call: streams.Copy) -> None:
        stream = self._stream(question)
        stream.copy(question, call, self.now_us)
        self._touch(stream)

    def _on_fetch(self, question: Question, call: streams.Fetch) -> None:
        stream = self._stream(question)
        if self.leaving and call.wait_ms:
            raise Refuse("leaving", "the relay stops")
        stream.fetch(question, call, self.now_us, wait=self.blocked)

    def _on_find(self, question: Question, call: streams.Find) -> None:
        stream = self._stream(question)
        if stream.log is None:
            raise Refuse("damaged", stream.failed)
        question.answer(streams.Found(stream.log.find(call.time_us)))

    # -- calls of consumers ----------------------------------------------------------------------------------

    def _consuming(self, question: Question) -> Consuming:
        stream = self._stream(question)
        if stream.consuming is None or stream.log is None:
            raise Refuse("damaged", stream.failed)
        if stream.log.failed:
            raise Refuse("disk", stream.log.failed)
        return stream.consuming

    def _on_consume(self, question: Question, call: streams.Consume) -> None:
        consuming = self._consuming(question)
        if self.leaving and call.wait_ms:
            raise Refuse("leaving", "the relay stops")
        consuming.take(question, call, self.clock.elapsed_us, wait=self.blocked)

    def _on_settle(self, question: Question, call: streams.Settle) -> None:
        self._consuming(question).settle(question, call, self.clock.elapsed_us)

    def _on_consumers(self, question: Question, call: streams.DescribeConsumers) -> None:
        question.answer(streams.Consumers(*self._consuming(question).described(call.after)))

    def _on_delete_consumer(self, question: Question, call: streams.DeleteConsumer) -> None:
        if not self._consuming(question).delete(call.consumer):
            raise Refuse("consumer", f"there is no consumer {call.consumer!r}")
        question.answer(streams.Settled(1))

    def _bury(self, stream: Stream, consumer: str, letters: list[Dead]) -> None:
        """Write dead letters to the log of its own, made for the first. Raises LogError."""
        uuid = dead_uuid(stream.uuid)
        grave = self.streams.get(uuid)
        if grave is None:
            path = str(self.directory / uuid.hex())
            kept = _encode(Kept(parent=stream.uuid))
            write_beside(path + ORDERS, kept)
            made = Log.create(path, uuid=uuid, definition=kept, created_us=self.now_us)
            grave = self.streams[uuid] = Stream(path, uuid, made, clock=self.clock)
            grave.dead = True
            self._place(stream)
            self.presence.serve_dead(stream, grave)
        if not grave.dead:
            raise LogWriteFailed(grave.path, "it is not a log of dead letters")
        grave.bury_here(stream, consumer, letters, self.now_us)

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_keys(self, definition: Definition, key_ids: set[bytes]) -> None:
        """Raise Refuse if a stream, or all that record one filter, have more keys than a frame to the relay takes."""
        for stream in self.streams.values():
            if definition.topic and stream.definition.topic == definition.topic:
                key_ids = key_ids | stream.orders.keys()
        if len(key_ids) > MAX_KEY_IDS:
            raise Refuse(
                "full",
                f"{len(key_ids)} keys for {definition.topic or definition.name!r}: over {MAX_KEY_IDS}",
            )

    def _place(self, stream: Stream) -> None:
        if stream.dead:
            return
        stream.bury = partial(self._bury, stream)
        self._version += 1
        for key_id in stream.orders:
            self._places[stream.uuid.hex(), key_id] = stream
            self._places[stream.name, key_id] = stream
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
                consuming_paused=False,
                dedup_window_us=0,
            )
            dead.define(limits)
            for key_id in stream.orders:
                self._places[dead.uuid.hex(), key_id] = dead
                self._places[dead.name, key_id] = dead

    def _displace(self, stream: Stream) -> None:
        self._version += 1
        dead = self.streams.get(dead_uuid(stream.uuid))
        gone = (stream, dead)
        self._places = {place: s for place, s in self._places.items() if s not in gone}
        for other in self.streams.values():  # which it may have stood before, under a key of both
            if other is not stream and other.name == stream.name:
                self._place(other)

    def _destroy(self, path: str) -> None:
        """Remove a log that was deleted; what cannot be removed now is removed at the next start."""
        try:
            if os.path.isdir(path):
                Log.destroy(path)
            Path(path + ORDERS).unlink(missing_ok=True)
        except (OSError, LogError) as err:
            log.warning("store.files_left", extra={"fields": {"path": path, "error": str(err)}})

    def _remove(self, stream: Stream, reason: str) -> None:
        self._leave(stream)
        self._displace(stream)
        for uuid in (stream.uuid, dead_uuid(stream.uuid)):
            gone = self.streams.pop(uuid, None)
            self._dirty.pop(uuid, None)
            if gone is not None:
                gone.end(reason)
                self._destroy(gone.path)


def is_stream(name: str) -> bool:
    """Whether an entry of the directory of streams is a stream, or what was kept of one."""
    return bool(_UUID.fullmatch(name.partition(".")[0])) and not name.endswith(SUFFIX)


def _order_of_list(stream: Stream) -> str:
    return f"{stream.name} {stream.uuid.hex()}"
