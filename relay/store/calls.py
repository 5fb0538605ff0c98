"""Handles the calls that clients send to a store: finds the stream that each call is for, and
carries the call out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from iris.crypto.keys import StoreKey, public_id
from iris.errors import DecodeError
from iris.wire import streams
from iris.wire.consumers import (
    Attend,
    ChangeConsumer,
    Consume,
    Consumers,
    DeleteConsumer,
    DescribeConsumers,
    HandOver,
    RedriveLetters,
    Settle,
)
from iris.wire.kinds import NO_KEY
from iris.wire.orders import ANY_REVISION, END, SignedOrder, decode_order
from iris.wire.stream_items import dead_uuid
from relay.logs import Quiet
from relay.store import moving
from relay.store.authority import Charter, is_promotion, one_definition
from relay.store.bucket.state import bucket_state
from relay.store.catalogue import Catalogue, encode_definition_file
from relay.store.channels import NO_CHANNEL, UNSEALED, Channels
from relay.store.consumer_calls import ConsumerCalls, ConsumerRefused
from relay.store.errors import (
    ChannelRefused,
    ChannelUnknown,
    LogDamaged,
    LogError,
    RecordsAway,
    RecordsUnreachable,
    Refuse,
)
from relay.store.files import write_beside
from relay.store.leases import Leases
from relay.store.line import LineFull
from relay.store.registration import Done
from relay.store.salvage import ORDERS
from relay.store.session import IncomingCall
from relay.store.staged_rows import StagingRefused
from relay.store.stream import Stream, handed_over

log = logging.getLogger(__name__)

LOST: Final = "the stream's store was lost, and its copy ended here"
"""The cause of the gap in a copy that takes the place of a lost stream."""


class Calls:
    """Handles all calls to one store and answers each of them."""

    def __init__(
        self, key: StoreKey, label: str, catalogue: Catalogue, channels: Channels, touch: Callable[[Stream], None]
    ) -> None:  # fmt: skip
        """`touch(stream)` is called when the stream has something to commit."""
        self.refused = 0
        """Calls that were not authenticated, also those whose channel this store does not know."""
        self._key = key
        self._address = public_id(key.public_key).hex()
        self._label = label
        self._catalogue = catalogue
        self.channels = channels
        self._authority = catalogue.authority
        self._registration = catalogue.registration
        self._clock = catalogue.clock
        self._touch = touch
        self._quiet = Quiet()
        self._may_create = b""
        """The uuid of the stream that is being created, once the bucket has decided that it may be."""
        self.leases = Leases(public_id(key.public_key), self._clock)
        """Leases of clients whose workers are active or stand by."""
        self.handlers: dict[type, Callable[[IncomingCall, Any], None]] = {
            streams.FindStore: self._on_find_store,
            streams.Knock: self._on_knock,
            streams.Open: self._on_open,
            streams.Create: self._on_create,
            streams.ListStreams: self._on_list,
            streams.Describe: self._on_describe,
            streams.Change: self._on_change,
            streams.Delete: self._on_delete,
            streams.Move: lambda incoming, call: moving.move(
                catalogue, incoming, self._stream(incoming), call
            ),
            streams.Take: partial(moving.take, catalogue, self._address),
            streams.Append: self._on_append,
            streams.Stage: self._on_stage,
            streams.Commit: self._on_commit,
            streams.Plan: self._on_discard,
            streams.Discard: self._on_discard,
            streams.Copy: self._on_copy,
            streams.FetchState: self._on_fetch_state,
            streams.Carry: self._on_carry,
            streams.Supersede: self._on_supersede,
            streams.Fetch: self._on_fetch,
            streams.Find: self._on_find,
            Consume: self._on_consume,
            Settle: self._on_settle,
            Attend: self._on_attend,
            HandOver: self._on_hand_over,
            DescribeConsumers: self._on_consumers,
            DeleteConsumer: self._on_delete_consumer,
            ChangeConsumer: self._on_change_consumer,
            RedriveLetters: self._on_redrive,
        }

    def unseal(self, incoming: IncomingCall, end: memoryview, body: memoryview) -> memoryview:
        """Return the call inside an authenticated body. Raises ChannelRefused."""
        try:
            return self.channels.unseal(incoming, end, body)
        except ChannelRefused as err:
            self._count_unauthenticated(incoming, err)
            raise

    def call_received(self, incoming: IncomingCall) -> None:
        """Handle one call. Every error becomes a refusal of this call; no exception leaves this method."""
        try:
            if incoming.channel is None and not isinstance(incoming.call, UNSEALED):
                self._count_unauthenticated(
                    incoming, ChannelRefused("the call was not authenticated")
                )
                raise Refuse("invalid", NO_CHANNEL)
            self.handlers[type(incoming.call)](incoming, incoming.call)
        except ChannelRefused as err:
            self._count_unauthenticated(incoming, err)
            incoming.refuse("channel", str(err))
        except (Refuse, StagingRefused) as err:
            incoming.refuse(err.code, str(err))
        except ConsumerRefused as err:
            incoming.refuse("consumer", str(err))
        except LineFull as err:
            incoming.refuse("workers", str(err))
        except DecodeError as err:
            incoming.refuse("invalid", str(err))
        except LogDamaged as err:
            incoming.refuse("damaged", str(err))
        except RecordsAway as away:
            stream = self._catalogue.by_address[incoming.name, incoming.key_id]
            stream.put_off.add(incoming, away, partial(self.call_received, incoming))
        except RecordsUnreachable as err:
            incoming.refuse("leaving", str(err))
        except LogError as err:
            incoming.refuse("disk", str(err))
        except (ValueError, OverflowError) as err:
            incoming.refuse("invalid", str(err))
        except Exception as err:  # a bug in one handler must not affect other calls
            log.exception("store.fault", extra={"fields": {"call": type(incoming.call).__name__}})
            incoming.refuse("failed", f"internal error: {type(err).__name__}")

    def _count_unauthenticated(self, incoming: IncomingCall, why: ChannelRefused) -> None:
        """Count and log a call that was not authenticated."""
        self.refused += 1
        reason = str(why)
        fields = {"address": incoming.name, "key_id": incoming.key_id.hex(), "reason": reason, "refused": self.refused}  # fmt: skip
        if isinstance(why, ChannelUnknown):
            log.debug("store.channel_unknown", extra={"fields": fields})
        else:
            self._quiet.warning(
                log, "store.call_refused", reason, self._clock.elapsed_us / 1e6, fields
            )

    # -- calls of the store ----------------------------------------------------------------------------------

    def _on_find_store(self, incoming: IncomingCall, call: streams.FindStore) -> None:
        shelf = self._catalogue.shelf
        group = shelf.public_key if shelf is not None and not shelf.away else b""
        state = None if shelf is None else bucket_state(shelf, self._catalogue.streams.values())
        incoming.answer(
            streams.StoreInfo(
                self._key.public_key,
                self._label,
                group,
                state,
                *self._kept(),
            )
        )

    def _kept(self) -> tuple[int, int]:
        """Return how many streams are only kept because others superseded them, and offsets that only they have."""
        kept = [
            max(0, stream.log.next - over.next) if stream.log is not None else 0
            for stream in self._catalogue.streams.values()
            if (over := stream.superseded) is not None
        ]
        return len(kept), sum(kept)

    def _on_knock(self, incoming: IncomingCall, call: streams.Knock) -> None:
        uuid, orders = self._addressed_log(incoming)
        key = self._key_of(uuid)
        incoming.answer(
            self.channels.door(incoming, call, uuid, orders, self._clock.elapsed_us, key)
        )

    def _on_open(self, incoming: IncomingCall, call: streams.Open) -> None:
        key_id = public_id(call.public_key)
        uuid, _ = self._addressed_log(incoming)
        if uuid == streams.NO_LOG and not any(
            key_id in s.orders for s in self._catalogue.streams.values()
        ):
            raise Refuse("no-stream", f"this store has no stream under key {key_id.hex()[:8]}")
        if uuid != streams.NO_LOG and key_id != incoming.key_id:
            raise ChannelRefused(
                "the caller signed with another key than the one that the call is addressed to"
            )
        key = self._key_of(uuid)
        incoming.answer(self.channels.open(incoming, call, uuid, self._clock.elapsed_us, key))

    def _key_of(self, uuid: bytes) -> StoreKey:
        """Return the key of the store that the orders of a log name."""
        stream = self._catalogue.streams.get(uuid)
        return self._key if stream is None else self._registration.key_of(stream)

    def _addressed_log(self, incoming: IncomingCall) -> tuple[bytes, list[SignedOrder]]:
        """Return the uuid of the log that a frame is addressed to, and its order under the frame's key.

        For the store itself the uuid is `NO_LOG` and the list is empty."""
        if (incoming.name, incoming.key_id) == (self._address, NO_KEY):
            return streams.NO_LOG, []
        stream = self._stream(incoming)
        return stream.uuid, [stream.orders[incoming.key_id][1]]

    def _on_list(self, incoming: IncomingCall, call: streams.ListStreams) -> None:
        channel = incoming.channel
        if channel is None or channel.uuid != streams.NO_LOG:
            raise Refuse("invalid", "listing streams requires a channel to the store itself")
        found = [
            s
            for s in sorted(self._catalogue.streams.values(), key=_order_of_list)
            if channel.key_id in s.orders and _order_of_list(s) > call.after
        ]
        listed = [self._description(stream) for stream in found[: streams.MAX_LISTED]]
        incoming.answer(streams.Listed(listed, len(found) > streams.MAX_LISTED))

    def _on_create(self, incoming: IncomingCall, call: streams.Create) -> None:
        if incoming.name != self._address:
            raise Refuse(
                "order", "a call that creates a stream must be addressed to the store itself"
            )
        uuid = decode_order(call.orders[0].order).uuid
        orders = self._authority.read(call.orders, uuid)
        definition = one_definition(orders)
        address = uuid.hex() if definition.parent else definition.name
        here = {
            id(s): s
            for key_id in orders
            if (s := self._catalogue.by_address.get((address, key_id)))
        }
        for stream in here.values():
            if stream.uuid == uuid and stream.definition == definition:
                self._describe(incoming, stream)  # a retry
                return
            raise Refuse(
                "exists",
                f"this store already has a stream {definition.name!r}, as log {stream.uuid.hex()}",
            )
        if uuid in self._catalogue.streams:
            raise Refuse(
                "order",
                "another stream of this store has this uuid; create the stream with a new uuid",
            )
        if self._catalogue.was_deleted(uuid):
            raise Refuse(
                "order", "the log with this uuid was deleted; create the stream with a new uuid"
            )
        charter = self._authority.create(orders, call.salt, self._clock.wall_us)
        self._catalogue.check_keys(definition, set(orders))
        self._catalogue.check_room(1)
        shelf = self._catalogue.shelf
        if shelf is not None and charter.store == shelf.public_key and uuid != self._may_create:
            if shelf.creator is None:
                raise Refuse("leaving", shelf.away)
            shelf.creator.create(uuid, partial(self._create_decided, incoming, uuid))
            return
        stream = self._catalogue.make(
            uuid,
            encode_definition_file(charter.definition_file),
            charter,
            self._catalogue.replica_for(charter),
        )
        self._catalogue.add_addresses(stream)

        def served(error: str) -> None:
            if self._order_answered(incoming, stream, error):
                fields = {"stream": stream.name, "uuid": uuid.hex()}
                log.info("store.stream_created", extra={"fields": fields})
            else:
                self._catalogue.remove(stream, error)

        self._catalogue.serve(stream, served)

    def _create_decided(self, incoming: IncomingCall, uuid: bytes, refused: Refuse | None) -> None:
        """It was decided in the bucket whether this store may create a stream with this uuid."""
        if refused is not None:
            incoming.refuse(refused.code, str(refused))
            return
        self._may_create = uuid
        try:
            self.call_received(incoming)
        finally:
            self._may_create = b""

    # -- calls of a stream -----------------------------------------------------------------------------------

    def _stream(self, incoming: IncomingCall) -> Stream:
        stream = self._catalogue.by_address.get((incoming.name, incoming.key_id))
        if stream is None:
            if (incoming.name, incoming.key_id) in self._catalogue.moved:
                raise Refuse("leaving", f"another store serves {incoming.name!r} now; try again")
            raise Refuse(
                "no-stream",
                f"this store has no stream {incoming.name!r} under key {incoming.key_id.hex()[:8]}",
            )
        if stream.why_superseded and not _is_of_the_past(incoming.call):
            raise Refuse("superseded", stream.why_superseded)
        incoming.gate = stream.replica
        return stream

    def _describe(self, incoming: IncomingCall, stream: Stream) -> None:
        incoming.gate = stream.replica
        incoming.answer(self._description(stream))

    def _description(self, stream: Stream) -> streams.Described:
        named = self._key_of(stream.uuid).public_key
        return stream.described(named, self._label, self._key.public_key)

    def _order_answered(self, incoming: IncomingCall, stream: Stream, error: str) -> bool:
        """Answer the call after the relay has accepted or refused the stream's orders; return
        whether it accepted them.
        """
        if error:
            incoming.refuse("order", f"the relay refused the order: {error}")
        else:
            self._describe(incoming, stream)
        return not error

    def _on_describe(self, incoming: IncomingCall, call: streams.Describe) -> None:
        self._describe(incoming, self._stream(incoming))

    def _on_change(self, incoming: IncomingCall, call: streams.Change) -> None:
        stream = self._stream(incoming)
        if stream.dead or stream.log is None:
            raise Refuse(
                "invalid",
                stream.failed or "dead letters cannot be changed on their own; change their stream",
            )
        charter = self._authority.change(
            stream.charter, call.orders, stream.uuid, self._clock.wall_us
        )
        if charter is stream.charter:
            self._describe(incoming, stream)  # a retry
            return
        self._check_change(stream, charter)
        stream.commit(self._clock.wall_us)
        if (successor := charter.definition.successor) and not stream.definition.successor:
            stream.freeze(successor)
        stored = encode_definition_file(charter.definition_file)
        stream.log.define(stored)
        write_beside(stream.path + ORDERS, stored)
        self._put_in_force(stream, charter, partial(self._order_answered, incoming, stream))

    def _check_change(self, stream: Stream, charter: Charter) -> None:
        """Raise Refuse if a change that its signers may make cannot be made now."""
        old, new, catalogue = stream.definition, charter.definition, self._catalogue
        catalogue.check_keys(new, set(charter.orders))
        if new.mirror and new.replaces is not None and old.replaces is None:
            dead = catalogue.streams.get(dead_uuid(stream.uuid))
            if stream.consumer_calls is not None and stream.consumer_calls.described("")[0]:
                raise Refuse("invalid", f"the copy {stream.name!r} has consumers, and would get those of its source; delete them, or use another copy")  # fmt: skip
            if dead is not None:
                raise Refuse("invalid", f"the copy {stream.name!r} has dead letters, and would get those of its source; use another copy")  # fmt: skip
        if old.successor and new.partitions != old.partitions:
            raise Refuse("leaving", handed_over(stream.name, old.successor))
        if new.name == old.name or new.replaces is None or stream.log is None:
            return
        for key_id in charter.orders:
            there = None if new.parent else catalogue.by_address.get((new.name, key_id))
            if there is not None and there is not stream:
                raise Refuse("exists", f"this store already has a stream {new.name!r}, as log {there.uuid.hex()}")  # fmt: skip
        lost, log_end = new.replaces.revision == ANY_REVISION, stream.log.next
        end = stream.log.limit if lost and stream.log.limit is not None else log_end
        if new.replaces.next != end:
            raise Refuse("revision", f"the copy ends at offset {end}, not {new.replaces.next}; stop its mirror")  # fmt: skip

    def _put_in_force(self, stream: Stream, charter: Charter, then: Done) -> None:
        """Put a charter in force that is in the stream's log; then call `then`."""
        old, definition = stream.definition, charter.definition
        promoted = is_promotion(old, definition)
        if definition.partitions and not old.partitions:
            self.channels.close_all(stream.uuid)  # who opens another one learns of the partitions
        same_paused = definition.stopped == old.stopped
        if charter.orders.keys() == stream.orders.keys() and same_paused and not promoted:
            stream.charter = charter
            stream.redefine()
            self._catalogue.add_addresses(stream)
            then("")
            if old.consuming_paused and not definition.consuming_paused:
                stream.wake(self._clock.wall_us)
            return
        self._catalogue.leave(stream)
        self._catalogue.remove_addresses(stream)
        stream.charter = charter
        stream.redefine()
        if promoted:
            if stream.log is not None:
                if definition.replaces is not None and definition.replaces.revision == ANY_REVISION:
                    stream.log.trim()
                stream.log.limit_to(None)
            self._registration.forget_grants(stream)
            fields = {"stream": stream.name, "uuid": stream.uuid.hex(), "source": old.mirror}
            log.info("store.stream_promoted", extra={"fields": fields})
        elif definition.cluster and not old.stopped:
            # Broadcasts may be missed between the two memberships.
            stream.recorder.add_gap(None, "its keys changed")
            self._touch(stream)
        if old.stopped and not definition.stopped and (definition.topic or definition.cluster):
            stream.recorder.add_gap(None, "it was being handed over" if old.successor else "it was paused")  # fmt: skip
            self._touch(stream)
        if promoted and (replaced := definition.replaces) is not None:
            lost = replaced.revision == ANY_REVISION
            if lost or definition.topic or definition.cluster:
                stream.recorder.add_gap(None, LOST if lost else "it was being handed over")
                self._touch(stream)
        self._catalogue.add_addresses(stream)
        self._catalogue.serve(stream, then)

    def _on_delete(self, incoming: IncomingCall, call: streams.Delete) -> None:
        if self._was_deleted(incoming, call):
            incoming.answer(streams.Settled())  # a retry
            return
        stream = self._stream(incoming)
        if stream.dead:
            raise Refuse(
                "invalid", "dead letters cannot be deleted on their own; delete their stream"
            )
        self._authority.end(stream.charter, call.orders, stream.uuid, self._clock.wall_us)
        self._catalogue.end(stream)
        incoming.answer(streams.Settled())
        log.info(
            "store.stream_deleted",
            extra={"fields": {"stream": stream.name, "uuid": stream.uuid.hex()}},
        )

    def _was_deleted(self, incoming: IncomingCall, call: streams.Delete) -> bool:
        """Return whether the stream was deleted here. The answer waits until the bucket knows of it."""
        uuid = decode_order(call.orders[0].order).uuid
        if not self._catalogue.was_deleted(uuid):
            return False
        self._authority.read(call.orders, uuid, action=END)
        shelf = self._catalogue.shelf
        incoming.gate = None if shelf is None else shelf.ending.get(uuid)
        return True

    def _on_append(self, incoming: IncomingCall, call: streams.Append) -> None:
        stream = self._stream(incoming)
        stream.append(incoming, call)
        self._touch(stream)

    def _on_stage(self, incoming: IncomingCall, call: streams.Stage) -> None:
        stream = self._stream(incoming)
        stream.stage(incoming, call, self._clock.wall_us)
        self._touch(stream)

    def _on_commit(self, incoming: IncomingCall, call: streams.Commit) -> None:
        stream = self._stream(incoming)
        stream.commit_or_discard(incoming, call, self._clock.wall_us)
        self._touch(stream)

    def _on_discard(self, incoming: IncomingCall, call: streams.Plan | streams.Discard) -> None:
        self._stream(incoming).commit_or_discard(incoming, call, self._clock.wall_us)

    def _on_copy(self, incoming: IncomingCall, call: streams.Copy) -> None:
        stream = self._stream(incoming)
        stream.copy(incoming, call, self._clock.wall_us)
        self._touch(stream)

    def _on_fetch_state(self, incoming: IncomingCall, call: streams.FetchState) -> None:
        stream = self._stream(incoming)
        found = stream.state(call)
        dead = self._catalogue.streams.get(dead_uuid(stream.uuid))
        if dead is not None and dead.log is None:
            raise Refuse("damaged", dead.failed)
        letters = 0 if dead is None or dead.log is None else dead.log.next
        incoming.answer(streams.StateRows(found.rows, found.more, letters))

    def _on_carry(self, incoming: IncomingCall, call: streams.Carry) -> None:
        stream, catalogue = self._stream(incoming), self._catalogue
        stream.carry(incoming, call, partial(catalogue.letters_of, stream), self._clock.wall_us)

    def _on_supersede(self, incoming: IncomingCall, call: streams.Supersede) -> None:
        stream = self._stream(incoming)
        if stream.dead or stream.log is None:
            raise Refuse("invalid", stream.failed or "dead letters are superseded with their stream")  # fmt: skip
        charter = self._authority.supersede(stream.charter, call.orders, stream.uuid)
        by = stream.charter.by
        if by is not None and charter.by is not None:
            if by.uuid != charter.by.uuid:
                raise Refuse("superseded", stream.why_superseded)
            self._describe(incoming, stream)  # a retry
            return
        self._catalogue.supersede(stream, charter, partial(self._order_answered, incoming, stream))

    def _on_fetch(self, incoming: IncomingCall, call: streams.Fetch) -> None:
        stream = self._stream(incoming)
        if self._registration.leaving and call.wait_ms:
            raise Refuse("leaving", "the relay is stopping")
        stream.readers.fetch(incoming, call, self._clock.wall_us, wait=self._registration.blocked)

    def _on_find(self, incoming: IncomingCall, call: streams.Find) -> None:
        stream = self._stream(incoming)
        if stream.log is None:
            raise Refuse("damaged", stream.failed)
        incoming.answer(streams.Found(stream.log.find(call.time_us)))

    # -- calls of consumers ----------------------------------------------------------------------------------

    def _consumer_calls(self, incoming: IncomingCall) -> ConsumerCalls:
        stream = self._stream(incoming)
        definition = stream.definition
        if not isinstance(incoming.call, DescribeConsumers):
            if definition.successor:
                raise Refuse("leaving", handed_over(stream.name, definition.successor))
            if definition.mirror and definition.replaces is not None:
                raise Refuse("consumer", f"the copy {stream.name!r} is to take the place of its source, and gets its consumers; use it when it has the name {definition.origins[-1].name!r}")  # fmt: skip
        if stream.consumer_calls is None or stream.log is None:
            raise Refuse("damaged", stream.failed)
        if stream.log.failed:
            raise Refuse("disk", stream.log.failed)
        return stream.consumer_calls

    def _on_consume(self, incoming: IncomingCall, call: Consume) -> None:
        consumers = self._consumer_calls(incoming)
        if self._registration.leaving and call.wait_ms:
            raise Refuse("leaving", "the relay is stopping")
        lease = None if call.shared else self.leases.renewed(call.lease or call.worker)
        consumers.take(
            incoming, call, self._clock.elapsed_us, lease=lease, wait=self._registration.blocked
        )

    def _on_attend(self, incoming: IncomingCall, call: Attend) -> None:
        self._consumer_calls(incoming)
        incoming.gate = None  # a place is not in the bucket
        self.leases.attend(incoming, call, wait=not self._registration.leaving)

    def _on_hand_over(self, incoming: IncomingCall, call: HandOver) -> None:
        consumers = self._consumer_calls(incoming)
        incoming.answer(Consumers([consumers.hand_over(call, self._clock.elapsed_us)]))

    def _on_settle(self, incoming: IncomingCall, call: Settle) -> None:
        self._consumer_calls(incoming).settle(incoming, call, self._clock.elapsed_us)

    def _on_consumers(self, incoming: IncomingCall, call: DescribeConsumers) -> None:
        found = self._consumer_calls(incoming).described(call.after, workers=call.workers)
        incoming.answer(Consumers(*found))

    def _on_delete_consumer(self, incoming: IncomingCall, call: DeleteConsumer) -> None:
        if not self._consumer_calls(incoming).delete(call.consumer):
            raise Refuse("consumer", f"the stream has no consumer {call.consumer!r}")
        incoming.answer(streams.Settled(1))

    def _on_change_consumer(self, incoming: IncomingCall, call: ChangeConsumer) -> None:
        consumers = self._consumer_calls(incoming)
        incoming.answer(Consumers([consumers.change(call, self._clock.elapsed_us)]))

    def _on_redrive(self, incoming: IncomingCall, call: RedriveLetters) -> None:
        consumers, stream = self._consumer_calls(incoming), self._stream(incoming)
        dead = self._catalogue.streams.get(dead_uuid(stream.uuid))
        if dead is None or dead.log is None:
            detail = dead.failed if dead else f"stream {stream.name!r} has no dead letters"
            raise Refuse("damaged" if dead else "invalid", detail)
        if dead.log.failed:
            raise Refuse("disk", dead.log.failed)
        incoming.answer(consumers.redrive(call, dead.log, self._clock.elapsed_us))


def _is_of_the_past(call: streams.Call) -> bool:
    """Return whether a call may be made to a stream whose place another one has taken: it is read once, or deleted."""
    if isinstance(call, streams.Fetch):
        return not call.wait_ms
    return isinstance(call, streams.Knock | streams.Open | streams.Describe | streams.Find | streams.Delete | streams.Supersede | DescribeConsumers)  # fmt: skip


def _order_of_list(stream: Stream) -> str:
    return f"{stream.name} {stream.uuid.hex()}"
