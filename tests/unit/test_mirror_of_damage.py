"""A mirror copies what its source lost to damage also into a store that does not know of damage."""

from __future__ import annotations

from typing import Any

import pytest

from iris.errors import StreamError, StreamUnavailable
from iris.streams.mirroring import Mirror
from iris.wire.stream_items import Gap, Hole
from iris.wire.streams import Copied, Copy


class Stub(Mirror):
    """A mirror whose copy is kept by a store that refuses items as told."""

    def __init__(self, refusal: StreamError, *, ever: bool = False) -> None:
        unused: Any = None
        super().__init__(
            unused, "eu:orders", "orders-eu", follow=False, limits={}, uuid="", patience=1.0
        )
        self.calls: list[Copy] = []
        self._refusal = refusal
        self._ever = ever

    async def _ask(
        self, name: str, uuid: bytes, call: Any, answer: Any, *rest: Any, **more: Any
    ) -> Any:
        self.calls.append(call)
        reasons = [item.reason for item in call.items if isinstance(item, Hole)]
        if self._ever or 5 in reasons:
            raise self._refusal
        return Copied(call.next, True)


async def test_a_store_that_refuses_the_reason_gets_one_that_it_knows() -> None:
    mirror = Stub(StreamError("orders-eu", "5 is not a valid Reason"))
    items = [Hole(0, 3, 2), Hole(3, 9, 5), Gap(9, None, "the relay was away", 1)]
    await mirror._write(0, 10, list(items))
    assert mirror.calls[0].items == items
    assert mirror.calls[1].items == [items[0], Hole(3, 9, 1), items[2]]
    assert (len(mirror.calls), mirror.end) == (2, 10)


@pytest.mark.parametrize("refusal", [StreamError("o", "promoted"), StreamUnavailable("o", "away")])
async def test_other_refusals_are_passed_on(refusal: StreamError) -> None:
    mirror = Stub(refusal, ever=True)
    with pytest.raises(type(refusal), match=refusal.detail):
        await mirror._write(0, 3, [Hole(0, 3, 2)])
    assert len(mirror.calls) == 1
    with pytest.raises(type(refusal), match=refusal.detail):
        await mirror._write(0, 3, [Hole(0, 3, 5)])
    assert len(mirror.calls) == (3 if type(refusal) is StreamError else 2)
