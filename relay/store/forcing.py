"""The calls that make a stream of its copy in the bucket, because its store is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from iris.wire import streams
from iris.wire.orders import MOVE, decode_order
from iris.wire.streams import NO_LOG, LostStream
from relay.store.bucket.forcing import Wish
from relay.store.catalogue import Catalogue
from relay.store.errors import Refuse
from relay.store.session import IncomingCall
from relay.store.stream import Stream

NO_BUCKET = "this store has no bucket; start it with --bucket"


class Forcer(Protocol):
    """Makes streams of copies; see `relay.store.bucket.forcing`."""

    def find(
        self, name: str, key_ids: set[bytes], done: Callable[[list[LostStream] | Refuse], None]
    ) -> None: ...  # fmt: skip
    def force(self, wish: Wish, done: Callable[[bytes | Refuse], None]) -> None: ...


class Forced:
    """Carries out these calls for one store."""

    def __init__(
        self, catalogue: Catalogue, address: str, described: Callable[[Stream], streams.Described]
    ) -> None:  # fmt: skip
        self.forcer: Forcer | None = None
        """None without a bucket."""
        self._catalogue = catalogue
        self._address = address
        self._described = described

    def find(self, incoming: IncomingCall, call: streams.FindLost) -> None:
        """Answer with the copies of streams of one name. Raises Refuse, DecodeError."""
        forcer = self._of(incoming)
        authority, now_us = self._catalogue.authority, self._catalogue.clock.wall_us
        orders = authority.read(call.orders, NO_LOG, action=MOVE)
        authority.check_asked(orders, now_us)
        name = decode_order(call.orders[0].order).definition.name

        def done(found: list[LostStream] | Refuse) -> None:
            if isinstance(found, Refuse):
                incoming.refuse(found.code, str(found))
            elif len(found) > streams.MAX_LISTED:
                incoming.refuse("full", f"the bucket has {len(found)} copies of streams called {name!r}, and an answer can list {streams.MAX_LISTED}")  # fmt: skip
            else:
                incoming.answer(streams.LostStreams(found))

        forcer.find(name, set(orders), done)

    def force(self, incoming: IncomingCall, call: streams.Force) -> None:
        """Make a stream of a copy; answer once it is served here. Raises Refuse, DecodeError."""
        forcer = self._of(incoming)
        lost, made = (decode_order(one[0].order).uuid for one in (call.orders, call.made))

        def done(uuid: bytes | Refuse) -> None:
            stream = None if isinstance(uuid, Refuse) else self._catalogue.streams.get(uuid)
            if isinstance(uuid, Refuse):
                incoming.refuse(uuid.code, str(uuid))
            elif stream is None:
                incoming.refuse("no-stream", "the stream was deleted meanwhile")
            else:
                incoming.answer(self._described(stream))

        forcer.force(Wish(lost, made, call.orders, call.made, call.salt), done)

    def _of(self, incoming: IncomingCall) -> Forcer:
        if incoming.name != self._address:
            raise Refuse("order", "a call that restores a stream from its copy must be addressed to the store itself")  # fmt: skip
        if self.forcer is None:
            raise Refuse("invalid", NO_BUCKET)
        return self.forcer
