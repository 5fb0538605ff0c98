"""`Client.offer` puts most messages into their bundle by itself. It cuts as `Outbound.add` does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import iris
from iris.core.bundle import CUT_BYTES
from iris.core.outbound import Outbound
from iris.crypto.keys import ClusterKey
from iris.wire.codec import END, END_AT, HOP
from iris.wire.kinds import Kind

KEY = ClusterKey(bytes(range(32)))


def make() -> Outbound:
    return Outbound(
        relay_id=bytes(16), session_id=bytes(8), challenge=bytes(32), entropy=lambda n: bytes(n), on_full=lambda: None
    )  # fmt: skip


def counts(out: Outbound) -> list[int]:
    """Return how many messages each bundle that was cut holds."""
    out.flush()
    data, found = b"".join(out.chunks), []
    out.chunks = []
    while data:
        size, kind, *_ = HOP.unpack_from(data.ljust(HOP.size))
        if kind == Kind.PUBLISH:
            found.append(END.unpack_from(data, END_AT)[2])
        data = data[4 + size :]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_offer_cuts_bundles_where_add_does(seed: int) -> None:
    rng = random.Random(seed)
    usual = rng.choice((100, 5_000, 30_000))
    sizes = [rng.choice((0, rng.randrange(usual), usual, CUT_BYTES - 8)) for _ in range(400)]
    offered, added = make(), make()
    flow = added.flow(Kind.PUBLISH, "t", KEY)
    offered.topics["t"] = offered.flow(Kind.PUBLISH, "t", KEY)
    client: Any = SimpleNamespace(
        _attachment=SimpleNamespace(
            blocked=False, out=offered, pump=SimpleNamespace(touch=lambda: None)
        ),
        _runtime=SimpleNamespace(check_size=lambda payload: None),
    )
    for size in sizes:
        assert iris.Client.offer(client, "t", bytes(size))
        added.add(flow, bytes(size), None, False)
        if rng.random() < 0.01:
            assert counts(offered) == counts(added)  # the turn ends
    assert counts(offered) == counts(added)
