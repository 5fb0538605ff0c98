"""The calls that move a stream of a bucket from one store to another."""

from __future__ import annotations

from iris.wire import streams
from relay.store.bucket.shelf import Leaving
from relay.store.catalogue import Catalogue
from relay.store.errors import Refuse
from relay.store.session import HeldAnswer, IncomingCall
from relay.store.stream import Stream


def move(catalogue: Catalogue, incoming: IncomingCall, stream: Stream, call: streams.Move) -> None:
    """Release a stream by an order of a key holder; answer with a ticket for its new store. Raises Refuse, LogError."""
    shelf = catalogue.shelf
    if stream.dead:
        raise Refuse("invalid", "dead letters cannot be moved on their own; move their stream")
    if shelf is None or shelf.mover is None or stream.replica is None:
        raise Refuse(
            "invalid",
            f"stream {stream.name!r} is on the disk of its store; only a stream in a bucket can be moved",
        )
    target = catalogue.authority.move(
        stream.charter, call.orders, stream.uuid, catalogue.clock.wall_us
    )
    size = 0 if stream.log is None else stream.log.local_bytes
    leaving = Leaving(stream.name, list(stream.orders), size)

    def answer(ticket: bytes) -> HeldAnswer:
        return HeldAnswer(incoming, streams.encode(streams.Moving(ticket)))

    shelf.mover.release(stream.replica, target, leaving, answer)


def take(catalogue: Catalogue, address: str, incoming: IncomingCall, call: streams.Take) -> None:
    """Take a stream that another store of the bucket has released; answer once it is served here. Raises Refuse."""
    if incoming.name != address:
        raise Refuse("order", "a call that takes a stream must be addressed to the store itself")
    shelf = catalogue.shelf
    if shelf is None or shelf.mover is None:
        raise Refuse("invalid", "this store has no bucket; start it with --bucket")

    def done(refused: Refuse | None) -> None:
        if refused is None:
            incoming.answer(streams.Settled())
        else:
            incoming.refuse(refused.code, str(refused))

    shelf.mover.take(call.ticket, done)
