"""A client that lets a stream join a bucket, and a store of an earlier version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from iris.errors import StreamError
from iris.streams import definitions
from iris.wire.orders import Definition, Order
from iris.wire.streams import StoreInfo


class OldStore:
    """A store that has a bucket, and knows no order that names it."""

    runtime = SimpleNamespace(keyring=SimpleNamespace(by_id=lambda key_id: None))

    async def describe(self, name: str, uuid: str, **_: Any) -> Any:
        order = Order("keep", bytes(16), bytes(16), bytes(32), 0, Definition(name))
        described = SimpleNamespace(holder=b"", label="db-1", uuid=bytes(16))
        return SimpleNamespace(name=name, order=order, described=described, dead=False)

    async def retry(self, name: str, uuid: str, once: Any, **_: Any) -> StoreInfo:
        return StoreInfo(bytes(32), "db-1", b"g" * 32)

    async def ask_stream(self, name: str, *_: Any, **__: Any) -> Any:
        raise StreamError(name, "the order is for another store")


async def test_a_store_of_an_earlier_version_has_to_be_upgraded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(definitions, "keys_of", lambda stores, definition: [])
    monkeypatch.setattr(definitions, "orders_to_change", lambda *given: asked.append(given[-1]))
    with pytest.raises(StreamError, match="the store on db-1 cannot bring a stream into its bucket; upgrade it"):  # fmt: skip
        await definitions.redefine(
            OldStore(), "orders", "", lambda d: d, 1.0, durability="bucket"  # type: ignore[arg-type]  # a stand-in
        )  # fmt: skip
    assert asked == [b"g" * 32]
