"""How long another store must still be gone until it counts as such, and how its journals are found."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from support.bucket_sim import Scripted, run

from iris.crypto.keys import GroupKey, StoreKey, public_id
from relay.store.bucket.history import Registration
from relay.store.bucket.lookout import EMPTY_MAX_S, FAILOVER_S, UNSEEN_S, Lookout
from relay.store.bucket.sealing import Ended, Sealer
from relay.store.bucket.seen import Seen
from relay.store.bucket.succession import begin, fence
from relay.store.bucket.writer import Writer

OURS, THEIRS = (StoreKey(bytes([number]) * 32).public_key for number in (1, 2))
ADDRESS = public_id(THEIRS).hex()


_NONCE = itertools.count()
SEALER = Sealer(GroupKey(bytes(32)), lambda size: next(_NONCE).to_bytes(size, "big"))
MANY = 200


async def write(objects: Scripted, began: Registration) -> None:
    """Create the first object of a journal."""
    writer = Writer(began.registered.journal, SEALER, began.hash)
    writer.add(Ended(bytes(16)), 10, 0)
    writer.close_object()
    for one in writer.take_off(0):
        await objects.create(one.key, one.sealed)


def ours(objects: Scripted, directory: Path) -> Lookout:
    seen = Seen(objects, SEALER, directory)
    return Lookout(objects, SEALER, seen, OURS, FAILOVER_S, 0.0, lambda err: None)


def test_a_store_that_started_often_is_found_as_soon_as_another(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        for number in range(MANY):
            began, _ = await begin(objects, SEALER, THEIRS, "", 0)
            await write(objects, began)
            if number < MANY - 1:
                await fence(objects, SEALER, began, "f" * 32, 1)

        async def slow(what: str, key: str) -> None:
            await asyncio.sleep(0.03)

        objects.fault = slow
        lookout = ours(objects, tmp_path)
        lookout.see(set(), UNSEEN_S)
        began_s = asyncio.get_running_loop().time()
        held, _ = await lookout.find()
        assert held == {THEIRS: [began.registered.journal]}
        assert asyncio.get_running_loop().time() - began_s < FAILOVER_S

    run(main())


def test_journals_that_are_empty_for_long_are_looked_at_more_and_more_rarely(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects = Scripted()
        for _ in range(MANY):
            began, _ = await begin(objects, SEALER, THEIRS, "", 0)
        asked = []

        async def count(what: str, key: str) -> None:
            asked.append(key)

        objects.fault = count
        lookout = ours(objects, tmp_path)
        for second in range(0, 3600, 5):
            lookout.see(set(), float(second))
            assert (await lookout.find())[0] == {}
        looks = sum(began.registered.journal in key for key in asked)
        assert looks <= 20, f"{looks} requests for one journal in an hour"
        # Its store goes on, and is gone again.
        lookout.see({ADDRESS}, 3600.0)
        await write(objects, began)
        lookout.see(set(), 3600.0 + FAILOVER_S)
        assert (await lookout.find())[0] == {THEIRS: [began.registered.journal]}
        lookout.taken()

    run(main())


def test_a_store_that_no_relay_sees_and_goes_on_is_found_too(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        began, _ = await begin(objects, SEALER, THEIRS, "", 0)
        lookout = ours(objects, tmp_path)
        lookout.see(set(), 4 * 3600.0)
        assert (await lookout.find())[0] == {}
        await write(objects, began)
        lookout.see(set(), 4 * 3600.0 + EMPTY_MAX_S)
        assert (await lookout.find())[0] == {THEIRS: [began.registered.journal]}

    run(main())
