"""Authenticated channels of callers. Signatures and MACs decide who may call; the store does not
trust the relay (sans-IO).

The store keeps no state for a caller before the caller has signed. The nonce in a door is a MAC
over the call, valid for `DOOR_US`. Each log may use a share of the open channels; when it is full,
the channel that was idle longest is closed and its caller opens another. Shares are per log, not
per key: anybody can make thousands of keys, but a store has at most 500 streams.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from iris.crypto.channel import Channel, accept_offer
from iris.crypto.keys import StoreKey, public_id
from iris.errors import OpenError, SealError
from iris.wire.kinds import NO_KEY
from iris.wire.orders import SignedOrder
from iris.wire.streams import (
    NO_LOG,
    Create,
    Door,
    FindStore,
    Knock,
    Open,
    Opened,
    Take,
)
from relay.store.errors import ChannelRefused, ChannelUnknown
from relay.store.session import IncomingCall

MAX_CHANNELS: Final = 16_384
"""Open channels of one store. Each takes 2 KB, or 5 KB after long bodies in one direction."""
MAX_OF_LOG: Final = 4096
"""Open channels of one log, or of the store itself. One more closes the one that was idle longest."""
MAX_SPENT: Final = 16_384
"""Used doors that a store remembers.

One more closes all doors, and callers that were opening a channel knock again.
"""
DOOR_US: Final = 30_000_000
UNSEALED: Final = (FindStore, Create, Take, Knock, Open)
"""Calls that need no channel: they reveal no secret, or are signed one by one."""
NO_CHANNEL: Final = "this store requires authenticated calls; open a channel first"


class Channels:
    """The open channels of one store, for one session with its relay."""

    def __init__(
        self, key: StoreKey, entropy: Callable[[int], bytes], *, most: int = MAX_CHANNELS, most_of_log: int = MAX_OF_LOG
    ) -> None:  # fmt: skip
        self._key = key
        self._address = public_id(key.public_key).hex()
        self._entropy = entropy
        self._most = most
        self._most_of_log = most_of_log
        self.clear()

    def __len__(self) -> int:
        return len(self._channels)

    def clear(self) -> None:
        """Close every channel and every door."""
        self._secret = self._entropy(32)
        self._next = int.from_bytes(self._entropy(4)) << 24
        """The next channel number.

        Numbers do not repeat soon, so an old channel is unknown rather than mistaken for another.
        """
        self._channels: dict[int, Channel] = {}
        self._of_log: dict[bytes, OrderedDict[int, None]] = {}
        """Log uuid -> its channel numbers, longest idle first."""
        self._spent: OrderedDict[bytes, int] = OrderedDict()
        """Used door -> the time when it closes. A recorded Open cannot be replayed with a used door."""

    def door(
        self, incoming: IncomingCall, call: Knock, uuid: bytes, orders: list[SignedOrder], now_us: int, key: StoreKey | None = None
    ) -> Door:  # fmt: skip
        """Return the answer to a knock. `key` is the key that the log's orders name, if it is not the store's own."""
        nonce = self._door(incoming, call.nonce, uuid, now_us)
        return Door((key or self._key).public_key, uuid, nonce, orders)

    def open(
        self,
        incoming: IncomingCall,
        call: Open,
        uuid: bytes,
        now_us: int,
        key: StoreKey | None = None,
    ) -> Opened:
        """Open a channel for the holder of a key. The calling code has checked that the log has this key.
        The store signs with `key`, which the log's orders name, or with its own.

        Raises:
            ChannelUnknown: the door is not ours, or has closed.
            ChannelRefused: the door was used, or the signature is not of the key's holder.
        """
        shown_us = int.from_bytes(call.door[:8], "little")
        if not 0 <= now_us - shown_us <= DOOR_US or not hmac.compare_digest(
            call.door, self._door(incoming, call.nonce, uuid, shown_us)
        ):
            raise ChannelUnknown("the door is unknown, or older than 30 s; knock again")
        if call.door in self._spent:
            raise ChannelRefused("a channel was already opened through this door; knock again")
        try:
            channel, share, signature = accept_offer(
                key or self._key, uuid, self._next, nonce=call.nonce, door=call.door, public_key=call.public_key,
                share=call.share, signature=call.signature, secret=self._entropy(32),
            )  # fmt: skip
        except OpenError as err:
            raise ChannelRefused(str(err)) from err
        self._next += 1
        self._spend(call.door, now_us)
        self._make_room(uuid)
        self._channels[channel.number] = channel
        self._of_log.setdefault(uuid, OrderedDict())[channel.number] = None
        return Opened(channel.number, share, signature)

    def close_all(self, uuid: bytes) -> None:
        """Close all channels of a log. Their callers open others, so they see its latest orders."""
        for number in self._of_log.pop(uuid, ()):
            del self._channels[number]

    def unseal(self, incoming: IncomingCall, end: memoryview, body: memoryview) -> memoryview:
        """Return the call inside a body and set its channel in `incoming` for the answer. Each call is
        accepted once.

        Raises:
            ChannelUnknown: the channel is not open here.
            ChannelRefused: the channel's holder did not make this call, or it is a repetition or is
                for another address.
        """
        number = int.from_bytes(body[1:9], "little")
        channel = self._channels.get(number)
        if channel is None:
            raise ChannelUnknown("this channel is not open at this store; open another")
        if self._channel_address(channel) != (incoming.name, incoming.key_id):
            raise ChannelRefused("this channel is for another address; open another")
        try:
            counter, call = channel.accept(end, body)
        except SealError as err:
            raise ChannelRefused(str(err)) from err
        self._of_log[channel.uuid].move_to_end(number)
        incoming.channel, incoming.counter = channel, counter
        return call

    def _channel_address(self, channel: Channel) -> tuple[str, bytes]:
        if channel.uuid == NO_LOG:
            return self._address, NO_KEY
        return channel.uuid.hex(), channel.key_id

    def _door(self, incoming: IncomingCall, nonce: bytes, uuid: bytes, now_us: int) -> bytes:
        """Return 32 bytes that only this store can compute and does not have to remember."""
        shown = now_us.to_bytes(8, "little")
        said = shown + uuid + incoming.key_id + nonce
        return shown + hmac.digest(self._secret, said, hashlib.sha256)[:24]

    def _spend(self, door: bytes, now_us: int) -> None:
        spent = self._spent
        while spent and next(iter(spent.values())) < now_us:
            spent.popitem(last=False)
        if (
            len(spent) >= MAX_SPENT
        ):  # forgetting one door would let anybody who recorded its Open use it again
            self._secret = self._entropy(32)
            spent.clear()
        spent[door] = now_us + DOOR_US

    def _make_room(self, uuid: bytes) -> None:
        """Make room for a channel: close the longest idle one of this log, or of the log that has the most."""
        own = self._of_log.get(uuid, ())
        if len(own) < self._most_of_log and len(self._channels) < self._most:
            return
        if len(own) < self._most_of_log:
            uuid = max(self._of_log, key=lambda one: len(self._of_log[one]))
        of_log = self._of_log[uuid]
        number, _ = of_log.popitem(last=False)
        del self._channels[number]
        if not of_log:
            del self._of_log[uuid]
