"""A caller's channels to stores: opened at the first call, then used by all later calls of the session (sans-IO).

    first call ─► Knock ─► Door: does an order signed by our key name its store?
               ─► Open ─► Opened: did that store sign it? ─► channel ─► calls that were held are sent, in order

No part of a call is sent before the store has proven who it is. If a store no longer knows a channel, the next call
opens another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from iris.core.interfaces import Waiter
from iris.crypto.channel import Channel, Offer
from iris.crypto.keys import ClusterKey, public_id, verify_order
from iris.errors import (
    ConnectionLost,
    DecodeError,
    IrisError,
    NoMembers,
    OpenError,
    Overloaded,
    RequestError,
)
from iris.wire.names import split_site
from iris.wire.orders import DEAD, KEEP, Order, SignedOrder, decode_order
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import NO_LOG, Door, Knock, Open, Opened, Refused, encode

MAX_CHANNELS: Final = 4096
"""Most channels of one session. Beyond it the oldest is forgotten, and opened again if it is used."""
OPEN_MS: Final = 10_000
FindKey = Callable[[bytes], ClusterKey | None]
ChannelKey = tuple[str, bytes, bool]
"""(address, key id, whether the call is to the store itself rather than to a stream)."""


def trusted_orders(
    orders: Iterable[SignedOrder], find_key: FindKey, *, uuid: bytes, store: bytes
) -> Iterator[Order]:
    """Yield the orders, signed by a key that `find_key` returns, under which `store` keeps the log `uuid`.

    An order for a stream also covers the log of its dead letters.
    """
    for signed in orders:
        if find_key(public_id(signed.public_key)) is None:
            continue  # anybody can make one up; this check is cheaper than verifying a signature
        try:
            key_id = verify_order(signed.public_key, signed.signature, signed.order)
            order = decode_order(signed.order)
        except (OpenError, DecodeError):
            continue
        if (order.key_id, order.action, order.store) == (key_id, KEEP, store) and uuid in (
            order.uuid,
            dead_uuid(order.uuid),
        ):
            yield order


def is_named(order: Order, name: str) -> bool:
    """Return whether the stream of this order, or its dead letters, has this name (without a site)."""
    return name in (order.definition.name, order.definition.name + DEAD)


class ChannelOwner(Protocol):
    """The owner of channels, `StoreCalls`, as a channel sees it."""

    def find_key(self, key_id: bytes) -> ClusterKey | None: ...
    def entropy(self, size: int) -> bytes: ...
    def plain(
        self, name: str, key: ClusterKey | None, body: bytes, *, timeout_ms: int, waiter: Waiter, shown: str
    ) -> object: ...  # fmt: skip
    def opened(self, channel: StoreChannel, held: Iterable[Any]) -> None: ...
    def failed_to_open(
        self, channel: StoreChannel, held: Iterable[Any], failure: Refused | IrisError
    ) -> None: ...


class _Callback:
    """A `Waiter` that passes its result or exception to a function, once."""

    __slots__ = ("_then",)

    def __init__(self, then: Callable[[object], None]) -> None:
        self._then: Callable[[object], None] | None = then

    def done(self) -> bool:
        return self._then is None

    def set_result(self, result: Any, /) -> None:
        self._resolve(result)

    def set_exception(self, exception: BaseException, /) -> None:
        self._resolve(exception)

    def _resolve(self, answer: object) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(answer)


class StoreChannel:
    """A channel to one log, or to a store itself, from the first Knock on."""

    __slots__ = (
        "_offer",
        "_owner",
        "_shown",
        "address",
        "channel_key",
        "cluster_key",
        "held",
        "opened",
        "to_store",
    )

    def __init__(
        self, owner: ChannelOwner, name: str, key: ClusterKey, shown: str, *, to_store: bool
    ) -> None:
        self.channel_key: ChannelKey = (name, key.key_id, to_store)
        self.address = name
        """Address that its calls are sent to. Once the Door has come, it is the log's uuid, with the site."""
        self.to_store = to_store
        self.opened: Channel | None = None
        self.held: dict[int, Any] = {}
        """Calls that wait for the channel to open: hop id -> call. A call that its caller gives up is removed."""
        self._owner = owner
        self.cluster_key = key
        """The key that this session proves to hold. It may have been retired from the keyring since the
        call was prepared."""
        self._shown = shown
        self._offer = Offer(key, owner.entropy)

    @property
    def key(self) -> ClusterKey | None:
        """The key under which its frames are addressed; None for NO_KEY."""
        return None if self.to_store else self.cluster_key

    def knock(self) -> None:
        """Start to open the channel."""
        self._ask(Knock(self._offer.nonce), self._door)

    def _ask(self, call: Knock | Open, then: Callable[[object], None]) -> None:
        try:
            self._owner.plain(
                self.address, self.key, encode(call), timeout_ms=OPEN_MS, waiter=_Callback(then), shown=self._shown
            )  # fmt: skip
        except Overloaded as err:
            self._fail(err)

    def _door(self, answer: object) -> None:
        if not isinstance(answer, Door):
            self._fail(answer)
            return
        site, name = split_site(self.address)
        if self.to_store:
            ours = answer.uuid == NO_LOG and public_id(answer.store).hex() == name
        else:
            bare = answer.uuid.hex()
            ours = answer.uuid != NO_LOG and any(
                name == bare or is_named(order, name)
                for order in trusted_orders(
                    answer.orders, self._find_key, uuid=answer.uuid, store=answer.store
                )
            )
            self.address = f"{site}:{bare}" if site else bare
        if not ours:
            self._fail(
                Refused(
                    "order",
                    "the stream's description is not signed by a key of this keyring; add a key of the stream to the keyring",
                )
            )
            return
        share, signature = self._offer.sign(answer.store, answer.uuid, answer.nonce)
        call = Open(self._offer.nonce, answer.nonce, self.cluster_key.public_key, share, signature)
        self._ask(call, self._opened)

    def _find_key(self, key_id: bytes) -> ClusterKey | None:
        return (
            self.cluster_key if key_id == self.cluster_key.key_id else self._owner.find_key(key_id)
        )

    def _opened(self, answer: object) -> None:
        if not isinstance(answer, Opened):
            self._fail(answer)
            return
        try:
            self.opened = self._offer.opened(answer.channel, answer.share, answer.signature)
        except OpenError as err:
            self._fail(err)
            return
        held, self.held = self.held, {}
        self._owner.opened(self, held.values())

    def _fail(self, answer: object) -> None:
        """End the held calls with an error. None of them was sent."""
        failure: Refused | IrisError
        if isinstance(answer, (NoMembers, Overloaded)) or (
            isinstance(answer, Refused) and answer.code != "channel"
        ):
            failure = answer
        else:
            if isinstance(answer, Refused | RequestError):
                detail = answer.detail
            else:
                detail = (
                    str(answer) if isinstance(answer, OpenError) else "it sent an unexpected answer"
                )
            failure = ConnectionLost(
                self._shown,
                f"its store did not open a channel, so the call was not sent: {detail}",
                may_have_run=False,
            )
        held, self.held = self.held, {}
        self._owner.failed_to_open(self, held.values(), failure)
