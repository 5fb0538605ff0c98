"""How the window of a tunnel follows its reader, over a way on which nothing comes back before a whole round trip."""

from __future__ import annotations

import pytest

from iris.core.tunnel import FIRST_WINDOW, MAX_WINDOW, Growth, TunnelEnd
from iris.crypto.keys import ClusterKey
from iris.wire.codec import TUNNEL_BODY_AT


class Way:
    """Two ends of one open tunnel, and the frames between them; its reader's session may grow windows by `growth`."""

    def __init__(self, growth: Growth | None = None) -> None:
        key = ClusterKey(bytes(32))
        growth = growth or Growth()
        self.there: list[bytes] = []
        self.back: list[bytes] = []
        self.sender = TunnelEnd(
            "db", key, bytes(16), 1, initiator=True, ephemeral=b"1" * 32, emit=self.there.append, mark_dirty=lambda end: None, growth=Growth()
        )  # fmt: skip
        self.reader = TunnelEnd(
            "db", key, bytes(16), 1, initiator=False, ephemeral=b"2" * 32, emit=self.back.append, mark_dirty=lambda end: None, growth=growth
        )  # fmt: skip
        self.sender.accepted(memoryview(self.reader.answer(memoryview(self.sender.hello()))))
        self.sender.flush()
        self.arrive()

    def arrive(self) -> None:
        """All that is on its way to the reader arrives at once."""
        for frame in self.there:
            self.reader.received(memoryview(frame)[TUNNEL_BODY_AT:])
        self.there.clear()
        assert not self.reader.broken

    def read(self) -> None:
        """The reader takes all that is there, and its credit reaches the sender."""
        while self.reader.next_chunk() is not None:
            pass
        self.reader.flush()
        for frame in self.back:
            self.sender.received(memoryview(frame)[TUNNEL_BODY_AT:])
        self.back.clear()
        assert not self.sender.broken

    def write(self, data: memoryview, start: int) -> int:
        """Send what credit allows; return where it stopped."""
        stop, _ = self.sender.write(data, start)
        self.sender.flush()
        return stop


def test_a_reader_that_waits_gets_the_largest_window_within_four_round_trips() -> None:
    way = Way()
    way.read()  # it looks before anything is there
    data = memoryview(bytes(4 * MAX_WINDOW))
    at = 0
    for _ in range(4):
        at = way.write(data, at)
        way.arrive()
        way.read()
    begun = at
    at = way.write(data, at)
    # All but what it grants in quarters of the window.
    assert at - begun > MAX_WINDOW * 0.7


@pytest.mark.parametrize("trips", [1, 3, 8])
def test_the_window_never_passes_the_largest(trips: int) -> None:
    way = Way()
    data = memoryview(bytes(2 * MAX_WINDOW * trips))
    at = 0
    for _ in range(trips):
        way.read()
        at = way.write(data, at)
        way.arrive()
        assert way.reader.buffered <= MAX_WINDOW
        way.read()
        assert way.sender.credit <= MAX_WINDOW + FIRST_WINDOW


def test_a_reader_that_is_behind_keeps_the_window() -> None:
    way = Way()
    data = memoryview(bytes(MAX_WINDOW))
    at = way.write(data, 0)
    way.arrive()
    for _ in range(20):
        assert way.reader.next_chunk() is not None  # never finds nothing
        way.reader.flush()
        for frame in way.back:
            way.sender.received(memoryview(frame)[TUNNEL_BODY_AT:])
        way.back.clear()
        at = way.write(data, at)
        way.arrive()
        assert way.reader.buffered <= FIRST_WINDOW


def test_the_windows_of_a_session_grow_by_no_more_than_is_left_for_all() -> None:
    growth = Growth(3 * FIRST_WINDOW + 1000)
    ways = [Way(growth) for _ in range(3)]
    at = [0, 0, 0]
    data = memoryview(bytes(MAX_WINDOW))
    for _ in range(4):
        for n, way in enumerate(ways):
            way.read()
            at[n] = way.write(data, at[n])
            way.arrive()
            way.read()
    assert growth.left == 0
    begun = list(at)
    for n, way in enumerate(ways):
        at[n] = way.write(data, at[n])
        way.arrive()
    held = [way.reader.buffered for way in ways]
    assert sum(held) <= 6 * FIRST_WINDOW + 1000
    assert all(stop > start for stop, start in zip(at, begun, strict=True)), "each goes on"
    ways[0].reader.fail("over", notify=True)
    ways[0].reader.release()
    assert growth.left == 3 * FIRST_WINDOW, "and what one had is there for others"
