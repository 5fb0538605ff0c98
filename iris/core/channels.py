"""A caller's channels to stores: opened at the first call, used by all later calls of the session (sans-IO).

    first call ─► knock ─► door: is its store named by an order of ours? ─► open ─► signed by that store? ─► channel
                                                                calls that waited meanwhile go out, in order ◄┘

No part of a call leaves before the store has proven who it is. If a store no longer knows a channel, the next call opens another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from iris.core.parties import Waiter
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
from iris.wire.streams import NO_LOG, Door, Knock, Open, Opened, Refused, dead_uuid, encode

MAX_LINES: Final = 4096
"""Channels of one session. When there is one more, the oldest is forgotten, and opened again if it is used."""
OPEN_MS: Final = 10_000
FindKey = Callable[[bytes], ClusterKey | None]
Place = tuple[str, bytes, bool]
"""Address, key id, and whether the store itself is called."""


def own_orders(
    orders: Iterable[SignedOrder], find_key: FindKey, *, uuid: bytes, store: bytes
) -> Iterator[Order]:
    """Yield the orders of our keys under which this store keeps the log `uuid`, or the stream whose dead letters it holds."""
    for signed in orders:
        if find_key(public_id(signed.public_key)) is None:
            continue  # anybody may have made it up: a signature costs more than this
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


def is_called(order: Order, name: str) -> bool:
    """Whether a stream of this order, or its dead letters, has this name (without a site)."""
    return name in (order.definition.name, order.definition.name + DEAD)


class Host(Protocol):
    """The owner of channels: the calls of a session."""

    def find_key(self, key_id: bytes) -> ClusterKey | None: ...
    def entropy(self, size: int) -> bytes: ...
    def plain(
        self, name: str, key: ClusterKey | None, body: bytes, *, timeout_ms: int, waiter: Waiter, shown: str
    ) -> object: ...  # fmt: skip
    def opened(self, line: Line, held: Iterable[Any]) -> None: ...
    def failed_to_open(
        self, line: Line, held: Iterable[Any], failure: Refused | IrisError
    ) -> None: ...


class _Then:
    """A `Waiter` that passes one answer to a function."""

    __slots__ = ("_then",)

    def __init__(self, then: Callable[[object], None]) -> None:
        self._then: Callable[[object], None] | None = then

    def done(self) -> bool:
        return self._then is None

    def set_result(self, result: Any, /) -> None:
        self._tell(result)

    def set_exception(self, exception: BaseException, /) -> None:
        self._tell(exception)

    def _tell(self, heard: object) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(heard)


class Line:
    """A channel to one log, or to a store itself, from the first knock on. `held` are calls that wait for it to open."""

    __slots__ = (
        "_host",
        "_offer",
        "_shown",
        "address",
        "channel",
        "held",
        "holder",
        "own",
        "place",
    )

    def __init__(self, host: Host, name: str, key: ClusterKey, shown: str, *, own: bool) -> None:
        self.place: Place = (name, key.key_id, own)
        self.address = name
        """Address of the channel: its log's uuid, once it is open."""
        self.own = own
        self.channel: Channel | None = None
        self.held: dict[int, Any] = {}
        """By hop; a call that was given up is taken out, its body with it."""
        self._host = host
        self.holder = key
        """The key that we prove to hold. The keyring may have retired it while a call was being prepared."""
        self._shown = shown
        self._offer = Offer(key, host.entropy)

    @property
    def key(self) -> ClusterKey | None:
        """The key that its frames are addressed under; None for NO_KEY."""
        return None if self.own else self.holder

    def knock(self) -> None:
        """Begin to open the channel."""
        self._ask(Knock(self._offer.nonce), self._door)

    def _ask(self, call: Knock | Open, then: Callable[[object], None]) -> None:
        try:
            self._host.plain(
                self.address, self.key, encode(call), timeout_ms=OPEN_MS, waiter=_Then(then), shown=self._shown
            )  # fmt: skip
        except Overloaded as err:
            self._fail(err)

    def _door(self, heard: object) -> None:
        if isinstance(heard, Refused) and heard.code == "invalid":
            detail = f"its store does not support authenticated calls; upgrade the store ({heard.detail})"
            heard = Refused("invalid", detail[:1024])
        if not isinstance(heard, Door):
            self._fail(heard)
            return
        site, name = split_site(self.address)
        if self.own:
            ours = heard.uuid == NO_LOG and public_id(heard.store).hex() == name
        else:
            bare = heard.uuid.hex()
            ours = heard.uuid != NO_LOG and any(
                name == bare or is_called(order, name)
                for order in own_orders(
                    heard.orders, self._find_key, uuid=heard.uuid, store=heard.store
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
        share, signature = self._offer.sign(heard.store, heard.uuid, heard.nonce)
        call = Open(self._offer.nonce, heard.nonce, self.holder.public_key, share, signature)
        self._ask(call, self._opened)

    def _find_key(self, key_id: bytes) -> ClusterKey | None:
        return self.holder if key_id == self.holder.key_id else self._host.find_key(key_id)

    def _opened(self, heard: object) -> None:
        if not isinstance(heard, Opened):
            self._fail(heard)
            return
        try:
            self.channel = self._offer.opened(heard.channel, heard.share, heard.signature)
        except OpenError as err:
            self._fail(err)
            return
        held, self.held = self.held, {}
        self._host.opened(self, held.values())

    def _fail(self, heard: object) -> None:
        """End the waiting calls. None of them was sent."""
        failure: Refused | IrisError
        if isinstance(heard, (NoMembers, Overloaded)) or (
            isinstance(heard, Refused) and heard.code != "channel"
        ):
            failure = heard
        else:
            if isinstance(heard, Refused | RequestError):
                detail = heard.detail
            else:
                detail = (
                    str(heard) if isinstance(heard, OpenError) else "it sent an unexpected answer"
                )
            failure = ConnectionLost(
                self._shown,
                f"its store did not open a channel, so the call was not sent: {detail}",
                may_have_run=False,
            )
        held, self.held = self.held, {}
        self._host.failed_to_open(self, held.values(), failure)
