"""A worker gets each message once, although its store repeats an answer that may have been lost."""

from __future__ import annotations

import weakref
from typing import Any

from iris.core.bundle import encode_bundle
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import Sealer
from iris.errors import RequestTimeout
from iris.streams.consuming import Consumer
from iris.streams.stores import KeyUser
from iris.streams.verified import VerifiedStream
from iris.wire.codec import END, metadata_prefix
from iris.wire.consumers import Consume, Delivered, Handed
from iris.wire.kinds import Kind
from iris.wire.orders import KEEP, Definition, Order
from iris.wire.stream_items import Record
from iris.wire.streams import Described

KEY = ClusterKey(bytes(range(32)))
LOG, SENDER = bytes(16), b"s" * 16
STREAM = Definition("orders")
SEALER = Sealer(KEY, SENDER)


class Stores:
    """A store with scripted answers to calls to consume."""

    def __init__(self, *answers: Delivered | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[Consume] = []
        self.runtime: Any = self
        self.keyring = Keyring({})
        self.openers: weakref.WeakSet[KeyUser] = weakref.WeakSet()
        self.address, self.key = "", KEY

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        return KEY if key_id == KEY.key_id else None

    def expect(self, name: str, uuid: str) -> None:
        """See `iris.streams.stores.Stores`."""

    async def describe(self, name: str, uuid: str, **_: Any) -> VerifiedStream:
        order = Order(KEEP, LOG, bytes(32), KEY.key_id, 0, STREAM)
        return VerifiedStream(order, Described(STREAM, LOG, 0, [], bytes(32), "", 0, 0, 9, 9, 0))

    async def find(self, name: str, uuid: str, **_: Any) -> Stores:
        return self

    def forget(self, name: str, uuid: str) -> None: ...

    async def ask(self, address: str, key: ClusterKey, call: Consume, *_: Any, **__: Any) -> Any:
        self.calls.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def delivered(*offsets: int) -> Delivered:
    prefix = metadata_prefix(Kind.STREAM, "orders", KEY.key_id, SENDER)
    items = []
    for offset in offsets:
        end = END.pack(1, 0, 1, offset)
        body = SEALER.seal(encode_bundle([b"%d" % offset], None, False), prefix + end)
        record = Record(offset, Kind.STREAM, "orders", KEY.key_id, SENDER, end, body, 1)
        items.append(Handed(record, b"\1"))
    return Delivered(items, LOG)


async def test_messages_handed_out_again_after_a_lost_answer_are_given_once() -> None:
    lost = RequestTimeout("orders", "the store did not answer in time")
    stores: Any = Stores(delivered(0, 1), lost, delivered(0, 1, 2, 3))
    worker = Consumer(
        stores, "orders", "billing", "first", shared=True, durable=True, ack_timeout=30.0, max_deliver=5, prefetch=10,
        create=True, uuid="", patience=5.0, on_gap=None,
    )  # fmt: skip
    assert [message.payload for message in await worker.batch()] == [b"0", b"1"]
    assert [message.payload for message in await worker.batch()] == [b"2", b"3"]
    assert [call.again for call in stores.calls] == [False, False, True]
    assert not worker.gaps
