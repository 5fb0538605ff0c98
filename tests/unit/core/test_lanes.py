"""What a queue of lanes holds: what waits, and nothing of what handlers have had."""

from __future__ import annotations

import gc
import weakref

from iris.core.message import Message
from iris.lanes import Lanes


class Bundle(list[Message]):
    """A bundle that can be weakly referenced, so that a test sees whether it is still held."""


def bundle(name: str, payload: bytes) -> Bundle:
    return Bundle([Message(payload, name, source=b"p" * 16)])


def test_a_lane_that_stands_still_keeps_nothing_of_what_the_others_have_handled() -> None:
    lanes = Lanes()
    lanes.put(bundle("stuck", b"at its handler"), 1)
    assert lanes.take() is not None
    lanes.put(bundle("stuck", b"waits"), 1)  # the oldest, as long as the handler is not through
    handled = []
    for _ in range(100):
        messages = bundle("moves", b"handled")
        handled.append(weakref.ref(messages))
        lanes.put(messages, 1)
        waiting = lanes.take()
        assert waiting is not None
        lanes.done(waiting)
    del messages, waiting
    gc.collect()
    assert sum(kept() is not None for kept in handled) == 0
    lanes.put(bundle("moves", b"last"), 1)
    dropped = [lanes.drop_oldest(), lanes.drop_oldest(), lanes.drop_oldest()]
    assert [found and found[0][0].payload for found in dropped] == [b"waits", b"last", None]
    assert not lanes
