"""A client waits for a stream that it has found once, and for no other."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from iris.crypto.keys import ClusterKey
from iris.errors import NoStream
from iris.streams.holders import Holder
from iris.streams.stores import Stores
from iris.wire.streams import Fetch, Fetched

LOG = bytes(range(16))
FETCH = Fetch(0, 1 << 20)


class Network(Stores):
    """A network with one stream, which is held by a store or just on its way to another. Its answers are scripted."""

    def __init__(self, *held: bool) -> None:
        """`held`: whether a store holds the stream, at each look."""
        self.key = ClusterKey(bytes(range(32)))
        keyring = SimpleNamespace(
            for_cluster=lambda name: (self.key,), by_id=lambda key_id: self.key
        )
        runtime: Any = SimpleNamespace(keyring=keyring)
        super().__init__(runtime)
        self.holders.find = self.find_holders
        self.held = list(held)

    async def find_holders(
        self, name: str, key_ids: Sequence[bytes], *, timeout: float
    ) -> list[Holder]:
        return [Holder(LOG.hex(), [self.key.key_id], "store")] if self.held.pop(0) else []

    async def ask(self, address: str, key: Any, call: Any, answer: Any, **_: Any) -> Any:
        if isinstance(call, Fetch):
            return Fetched([], 0, 0, 0, LOG)
        missing = NoStream("orders", "no store holds it under your keys")
        missing.passing = True
        raise missing

    async def fetch(self, uuid: str) -> Fetched:
        return await self.ask_stream("orders", uuid, FETCH, Fetched, timeout=10.0)


async def test_a_stream_that_was_found_by_its_name_is_waited_for_under_its_uuid() -> None:
    network = Network(True, False, False, True)
    await network.locate("orders", "", timeout=1.0)
    assert (await network.fetch(LOG.hex())).uuid == LOG
    assert network.held == []


@pytest.mark.parametrize("uuid", ["", LOG.hex()], ids=["by name", "by uuid"])
async def test_a_stream_that_was_never_found_is_missing_at_once(uuid: str) -> None:
    network = Network(False)
    with pytest.raises(NoStream):
        await network.fetch(uuid)


async def test_another_stream_of_the_name_is_missing_at_once() -> None:
    network = Network(True, True, True)  # the last look is for a log that has replaced it
    await network.locate("orders", "", timeout=1.0)
    with pytest.raises(NoStream):
        await network.fetch(bytes(16).hex())


async def test_a_stream_that_this_client_deleted_is_missing_at_once() -> None:
    network = Network(True, False)
    await network.locate("orders", "", timeout=1.0)
    network.forget_deleted("orders", LOG.hex())
    with pytest.raises(NoStream):
        await network.fetch(LOG.hex())
