"""Calls to stores: what a session requests of the streams that it reads and writes, until each call ends (sans-IO).

These calls are like requests (`iris.core.requests`), but their bodies are in clear: each record in them is sealed
separately, by its sender for its readers. A channel (`iris.core.channels`) authenticates calls to a stream and their
answers. An answer that a relay forges ends the call as lost; it is never used as the store's answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from iris.core.channels import MAX_CHANNELS, ChannelKey, StoreChannel
from iris.core.interfaces import Waiter
from iris.core.requests import MAX_PENDING, error_of
from iris.core.session_base import SessionBase
from iris.crypto.channel import MARK
from iris.crypto.keys import ClusterKey
from iris.errors import (
    ConnectionLost,
    DecodeError,
    IrisError,
    OpenError,
    Overloaded,
    PeerProtocolError,
    RequestTimeout,
)
from iris.wire import frames
from iris.wire.codec import BODY_AT, END, END_AT, HOP
from iris.wire.kinds import NEVER_US
from iris.wire.streams import Refused, decode_answer

GRACE_US: Final = 1_000_000
"""The relay and the store end a call at its deadline. The caller waits so much longer for their answer."""


@dataclass(slots=True)
class StoreCall:
    """A call that has not ended. `hop` is its hop id, `timeout_ms` the timeout in its frame."""

    name: str
    hop: int
    deadline_us: int
    timeout_ms: int
    waiter: Waiter
    writes: bool
    channel: StoreChannel | None = None
    """The channel that it uses; None for a call without one."""
    counter: int = -1
    """Its counter in that channel; -1 until it is sent."""
    body: bytes = b""
    """Held until the call is sent. If the call changes nothing, held until it is answered or sent again."""
    retried: bool = False
    """Whether this is the second attempt, through a new channel."""

    @property
    def sent(self) -> bool:
        """Whether the call may have reached the store."""
        return self.channel is None or self.counter >= 0


class StoreCalls:
    """Unfinished store calls of one session, and its channels."""

    __slots__ = ("_channels", "_pending", "_session", "writes")

    def __init__(self, session: SessionBase) -> None:
        self._session = session
        self._pending: dict[int, StoreCall] = {}
        self._channels: dict[ChannelKey, StoreChannel] = {}
        self.writes = 0
        """Number of pending calls that write. A session does not end before these have ended."""

    def send(
        self, name: str, key: ClusterKey | None, body: bytes, *, timeout_ms: int, waiter: Waiter, shown: str = "",
        writes: bool = False, to_store: bool = False,
    ) -> StoreCall:  # fmt: skip
        """Send a call to the address `name`; its decoded answer resolves `waiter`. Errors call it `shown`.

        With a `key` the call uses a channel to the stream `name` under that key. If `to_store` is set too, it uses a
        channel to the store whose id is `name`.
        """
        call = self._call(shown or name, timeout_ms, waiter, writes)
        if key is None:
            self._frame(name, None, b"", body, call)
        else:
            call.body = body
            self._route(call, (name, key.key_id, to_store), key)
        return call

    def _route(self, call: StoreCall, channel_key: ChannelKey, key: ClusterKey) -> None:
        """Send a call through the channel of its address, or hold it until the channel is open."""
        channel = self._channels.get(channel_key)
        if channel is None:
            if len(self._channels) >= MAX_CHANNELS:
                del self._channels[next(iter(self._channels))]
            channel = self._channels[channel_key] = StoreChannel(
                self, channel_key[0], key, call.name, to_store=channel_key[2]
            )
            call.channel = channel
            channel.held[call.hop] = call
            channel.knock()
            return
        call.channel = channel
        if channel.opened is None:
            channel.held[call.hop] = call
        else:
            self._seal(channel, call)

    def _call(self, shown: str, timeout_ms: int, waiter: Waiter, writes: bool) -> StoreCall:
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(
                shown,
                f"this client has {MAX_PENDING} store calls in flight, which is the limit; wait for some to end",
            )
        session = self._session
        deadline_us = session.mono_us + 1000 * timeout_ms
        call = StoreCall(shown, session.next_hop(), deadline_us, timeout_ms, waiter, writes)
        self._pending[call.hop] = call
        self.writes += writes
        session.deadline_us = min(session.deadline_us, deadline_us + GRACE_US)
        return call

    def _seal(self, channel: StoreChannel, call: StoreCall) -> None:
        opened = channel.opened
        assert opened is not None
        call.counter = opened.next
        opened.next += 1
        end = END.pack(self._session.out.now_us, call.timeout_ms, 1, 0)
        body = call.body
        if call.writes or call.retried:
            call.body = b""
        head = opened.seal(call.counter, end, body)
        self._session.out.store_call(
            channel.address, channel.key, end, head, body, call.hop, call.deadline_us
        )

    def _frame(
        self, name: str, key: ClusterKey | None, head: bytes, body: bytes, call: StoreCall
    ) -> None:
        out = self._session.out
        end = END.pack(out.now_us, call.timeout_ms, 1, 0)
        out.store_call(name, key, end, head, body, call.hop, call.deadline_us)

    # -- channels --------------------------------------------------------------------------------------------

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return the client's key with this id, or None."""
        return self._session.owner.find_key(key_id)

    def entropy(self, size: int) -> bytes:
        """Return random bytes."""
        return self._session.entropy(size)

    def plain(
        self, name: str, key: ClusterKey | None, body: bytes, *, timeout_ms: int, waiter: Waiter, shown: str
    ) -> StoreCall:  # fmt: skip
        """Send one of the unauthenticated calls that open a channel."""
        call = self._call(shown, timeout_ms, waiter, False)
        self._frame(name, key, b"", body, call)
        return call

    def opened(self, channel: StoreChannel, held: Iterable[StoreCall]) -> None:
        """Send the held calls in order, except those that have ended."""
        for call in held:
            if self._pending.get(call.hop) is call:
                self._seal(channel, call)

    def failed_to_open(
        self, channel: StoreChannel, held: Iterable[StoreCall], failure: Refused | IrisError
    ) -> None:
        """End the held calls with an error. None of them was sent."""
        self._drop_channel(channel)
        for call in held:
            if self._pending.get(call.hop) is call:
                self._pop(call.hop)
                if call.waiter.done():
                    continue
                if isinstance(failure, Refused):
                    call.waiter.set_result(failure)
                else:
                    call.waiter.set_exception(failure)

    def _drop_channel(self, channel: StoreChannel) -> None:
        if self._channels.get(channel.channel_key) is channel:
            del self._channels[channel.channel_key]

    def _unsealed(
        self, call: StoreCall, channel: StoreChannel, end: memoryview, body: memoryview
    ) -> memoryview | None:
        """Return the store's authenticated answer to this call, or None if the call was ended or sent again instead."""
        opened = channel.opened
        if opened is not None and call.counter >= 0 and len(body):
            if body[0] == MARK:
                try:
                    counter, answer = opened.open(end, body)
                except OpenError:
                    counter = -1
                if counter == call.counter:
                    return answer
            elif self._refused(body):
                # The store does not know the channel, or a relay claims so. The call may have been carried out.
                self._drop_channel(channel)
                self._retry(call, channel)
                return None
        self._session.drop("unauthenticated")
        detail = "an answer was dropped because the store did not authenticate it; check whether the call was carried out"
        call.waiter.set_exception(ConnectionLost(call.name, detail, may_have_run=call.sent))
        return None

    def _refused(self, body: memoryview) -> bool:
        try:
            return isinstance(decode_answer(body), Refused)
        except DecodeError:
            return False

    def _retry(self, call: StoreCall, channel: StoreChannel) -> None:
        """Send a call again through a new channel if it changes nothing; otherwise end it, and let its
        caller decide."""
        if not call.body:
            detail = (
                "the store no longer knows the channel, because the store or its relay restarted; "
                "check whether the call was carried out, then repeat it"
            )
            call.waiter.set_exception(ConnectionLost(call.name, detail))
            return
        call.retried, call.counter = True, -1
        call.hop = self._session.next_hop()
        self._pending[call.hop] = call
        self._route(call, channel.channel_key, channel.cluster_key)

    def forget(self, call: StoreCall) -> None:
        """Forget a call whose caller no longer waits. A later answer is dropped and counted."""
        self._pop(call.hop)

    def _pop(self, hop: int) -> StoreCall | None:
        call = self._pending.pop(hop, None)
        if call is not None:
            self.writes -= call.writes
            if call.channel is not None:
                call.channel.held.pop(hop, None)
        return call

    def answered(self, buf: memoryview, start: int, end: int) -> None:
        """Handle STREAM_REPLY, a store's answer."""
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame of {end - start} bytes is shorter than its {BODY_AT} bytes of fixed fields"
            )
        _, _, _, alias, hop, _ = HOP.unpack_from(buf, start)
        if alias not in self._session.replies:
            raise PeerProtocolError(f"alias {alias} was not declared for STREAM_REPLY")
        self._session.received_alone += 1
        call = self._pop(hop)
        if call is None:
            self._session.drop("late answers")
            return
        if call.waiter.done():
            return
        answer = buf[start + BODY_AT : end]
        if call.channel is not None:
            fields = buf[start + END_AT : start + BODY_AT]
            opened = self._unsealed(call, call.channel, fields, answer)
            if opened is None:
                return
            answer = opened
        try:
            call.waiter.set_result(decode_answer(answer))
        except DecodeError as err:
            self._session.drop("unreadable")
            call.waiter.set_exception(ConnectionLost(call.name, str(err)))

    def failed(self, fail: frames.Fail) -> None:
        """Handle FAIL, by which the relay ends a call: no other answer will come."""
        call = self._pop(fail.hop)
        if call is not None and not call.waiter.done():
            call.waiter.set_exception(error_of(call.name, fail))

    def expire(self, mono_us: int) -> int:
        """End calls whose deadline and grace time have passed; return the next such time."""
        late = [h for h, c in self._pending.items() if c.deadline_us + GRACE_US <= mono_us]
        for hop in late:
            if (call := self._pending.get(hop)) is not None:
                self._end(
                    hop, RequestTimeout(call.name, "the store did not answer before the deadline")
                )
        soonest = min((c.deadline_us for c in self._pending.values()), default=NEVER_US)
        return soonest + GRACE_US if self._pending else NEVER_US

    def end(self, reason: str) -> None:
        """End all calls because the connection has ended."""
        for hop, call in list(self._pending.items()):
            self._end(hop, ConnectionLost(call.name, reason, may_have_run=call.sent))

    def _end(self, hop: int, error: IrisError) -> None:
        call = self._pop(hop)
        if call is not None and not call.waiter.done():
            call.waiter.set_exception(error)
