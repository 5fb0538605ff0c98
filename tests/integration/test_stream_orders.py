"""Who may change and end a stream, seen from another site: its gateway is pinned, its relay does what it likes, and it has no key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from adversity.kit import eventually
from integration.test_gateways import World, joined, world  # noqa: F401 - a fixture
from integration.test_stream_links import created
from msgspec import structs

import iris
from iris.crypto.keys import ClusterKey
from iris.errors import NoMembers
from iris.wire.streams import (
    END,
    KEEP,
    Change,
    Delete,
    Refused,
    SignedOrder,
    decode_order,
    encode,
)

pytestmark = pytest.mark.timeout(60)

OWNER, STRANGER = ClusterKey(b"o" * 32), ClusterKey(b"z" * 32)


class Claimed:
    """Names a key as its own that it does not have."""

    key_id = OWNER.key_id


def foreign(first: SignedOrder, action: str = KEEP, **changes: Any) -> SignedOrder:
    """Return an order of a key that the stream does not have, for the rest as one that was seen on the way."""
    seen = decode_order(first.order)
    smaller = structs.replace(seen.definition, max_messages=1)
    said = encode(
        structs.replace(seen, action=action, key_id=STRANGER.key_id, definition=smaller, **changes)
    )
    return SignedOrder(said, STRANGER.public_key, STRANGER.sign_order(said))


async def test_a_site_without_a_key_takes_no_stream_over_and_ends_none(
    world: World,  # noqa: F811 - a fixture
    tmp_path: Path,
) -> None:
    eu = await world.start("eu", world.peer("us"), data=tmp_path / "data")
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    async with (
        iris.connect(str(eu.config.socket_path), keyring=iris.Keyring.single(OWNER)) as owner,
        iris.connect(str(us.config.socket_path), keyring=iris.Keyring.single(STRANGER)) as other,
    ):
        made = await created(owner, "orders")
        await owner.streams.append_many("orders", [b"%d" % n for n in range(50)])
        known = await owner.streams._stores.describe("orders", "", timeout=5.0)
        (first,) = known.described.orders
        await other.status()
        session = other._attachment.session
        for theirs in us.router.sessions.values():
            theirs.proven.add(OWNER.key_id)  # as a relay of its own would
        session.out._proven.add(OWNER.key_id)

        async def attack(call: Change | Delete) -> Any:
            address = f"eu:{made.uuid}"
            while True:
                waiter = asyncio.get_running_loop().create_future()
                session.calling.send(
                    address, cast(Any, Claimed), encode(call), timeout_ms=5000, waiter=waiter
                )
                other.touch()
                try:
                    return await waiter
                except NoMembers:  # its gateway has not said yet that it is there
                    await asyncio.sleep(0.01)

        for issued_us in (known.order.issued_us + 1, 1 << 62):
            said = await attack(Change([foreign(first, issued_us=issued_us)]))
            assert isinstance(said, Refused), said
            said = await attack(Delete([foreign(first, END, issued_us=issued_us)]))
            assert isinstance(said, Refused), said
        there = await owner.streams.describe("orders")
        assert (there.uuid, there.messages, there.max_messages) == (made.uuid, 50, 0)
        assert there.key_ids == [OWNER.key_id.hex()]
        changed = await owner.streams.change("orders", max_messages=100)
        assert changed.max_messages == 100
