"""A reader of a stream detects a store that leaves something out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from iris.crypto.keyring import Keyring
from iris.errors import StreamDamaged
from iris.streams.reading import Reader
from iris.streams.verified import VerifiedStream
from iris.wire.orders import KEEP, Definition, Order
from iris.wire.stream_items import Gap, Hole, Item
from iris.wire.streams import Described, Fetch, Fetched, Find

LOG = bytes(16)
STREAM = Definition("orders")


class Stores:
    """A store with scripted answers."""

    def __init__(self, *answers: tuple[Sequence[Item], int]) -> None:
        self.answers = list(answers)
        self.runtime: Any = self
        self.keyring = Keyring({})
        self.openers: set[object] = set()

    def find_key(self, key_id: bytes) -> None:
        return None

    def expect(self, name: str, uuid: str) -> None:
        assert (name, uuid) == ("orders", LOG.hex())

    async def describe(self, name: str, uuid: str, **_: Any) -> VerifiedStream:
        order = Order(KEEP, LOG, bytes(32), bytes(16), 0, STREAM)
        return VerifiedStream(order, Described(STREAM, LOG, 0, [], bytes(32), "", 0, 0, 9, 9, 0))

    async def ask_stream(self, name: str, uuid: str, call: Fetch | Find, *_: Any, **__: Any) -> Any:
        items, end = self.answers.pop(0)
        return Fetched(list(items), end, 0, 9, LOG)


def reader(*answers: tuple[Sequence[Item], int]) -> Reader:
    stores: Any = Stores(*answers)
    return Reader(
        stores, "orders", "first", follow=False, uuid="", batch_bytes=1 << 20, patience=1.0, on_gap=None
    )  # fmt: skip


async def test_gaps_and_holes_side_by_side_are_reported_and_end_the_read() -> None:
    items = [Hole(0, 4, 1), Gap(4, 7, "slow receiver", 1), Hole(5, 9, 2)]
    async with reader((items, 9)) as messages:
        assert [message async for message in messages] == []
        assert [(gap.first, gap.end, gap.count) for gap in messages.gaps] == [(0, 4, 0), (4, 5, 7), (5, 9, 0)]  # fmt: skip


@pytest.mark.parametrize(
    ("items", "end", "left_out", "at"),
    [
        ([Hole(0, 2, 1), Hole(5, 9, 1)], 9, "offsets 2 to 5", 2),
        ([Hole(3, 9, 1)], 9, "offsets 0 to 3", 0),
        ([Hole(0, 4, 1)], 9, "offsets 4 to 9", 4),
        ([Hole(0, 6, 1)], 5, "offsets 6 to 5", 6),
    ],
    ids=["in the middle", "at the beginning", "at the end", "more than it says"],
)
async def test_a_reader_stops_at_a_store_that_leaves_offsets_out(
    items: list[Item], end: int, left_out: str, at: int
) -> None:
    messages = reader((items, end), (items, end))
    for _ in range(2):
        with pytest.raises(StreamDamaged, match=f"left out {left_out}"):
            await messages.batch()
        assert messages.offset == at
        # What was told before it is not told again.
        assert len(messages.gaps) == (at > 0)
    await messages.close()
