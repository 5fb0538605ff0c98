"""A check of a bucket names fences that lead nowhere, and what waits to be deleted."""

from __future__ import annotations

import itertools

import pytest
from support.bucket_sim import KEY, Scripted, run

from relay.store.batches import PUT, Op
from relay.store.bucket.checking import Check, Report
from relay.store.bucket.checkpointing import note, write_all
from relay.store.bucket.history import Registration
from relay.store.bucket.sealing import Covered, Ended, Entry, Intent, Rows, Sealer, registration_key
from relay.store.bucket.succession import begin, fence
from relay.store.bucket.writer import Writer

_NONCE = itertools.count()
SEALER = Sealer(KEY, lambda size: next(_NONCE).to_bytes(size, "big"))
ONE, TWO = bytes(range(16)), bytes(range(16, 32))


def rows(uuid: bytes) -> Rows:
    return Rows(uuid, [Op(PUT, b"x", b"")])


async def journal(objects: Scripted, *entries: Entry) -> tuple[Registration, Writer]:
    """Begin a journal with one object for each entry."""
    began, _ = await begin(objects, SEALER, bytes([1]) * 32, "", 0)
    writer = Writer(began.registered.journal, SEALER, began.hash)
    for entry in entries:
        writer.add(entry, 10, 0)
        writer.close_object()
        for one in writer.take_off(0):
            assert await objects.create(one.key, one.sealed)
            writer.landed(one)
    return began, writer


async def checked(objects: Scripted) -> Report:
    check = Check(objects, SEALER)
    await check.bucket()
    return check.report


def test_streams_are_counted_along_a_chain_of_takeovers() -> None:
    async def main() -> None:
        objects = Scripted()
        first, _ = await journal(objects, rows(ONE), rows(TWO))
        second, _ = await journal(objects, Intent(first.registered.journal), Ended(TWO))
        await fence(objects, SEALER, first, second.registered.journal, 1)
        third, _ = await journal(objects, Intent(second.registered.journal))
        await fence(objects, SEALER, second, third.registered.journal, 1)
        report = await checked(objects)
        assert (report.damage, report.garbage, report.streams) == ([], [], 1)
        assert [one.taken_by for one in report.journals] == [
            second.registered.journal, third.registered.journal, "",
        ]  # fmt: skip

    run(main())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("unknown", "and no such journal is registered"),
        ("earlier", "which is older than it"),
        ("another", "but object 1 of that journal does not say so"),
    ],
)
def test_a_fence_that_leads_nowhere_is_named(wrong: str, says: str) -> None:
    async def main() -> None:
        objects = Scripted()
        earlier, _ = await journal(objects, rows(TWO))
        victim, _ = await journal(objects, rows(ONE))
        later, _ = await journal(objects, Intent(earlier.registered.journal))
        by = {"unknown": "f" * 32, "earlier": earlier.registered.journal, "another": later.registered.journal}  # fmt: skip
        await fence(objects, SEALER, victim, by[wrong], 1)
        (damage,) = (await checked(objects)).damage
        assert damage.startswith(f"journal {victim.registered.journal} was taken by {by[wrong]}")
        assert says in damage

    run(main())


def test_what_a_checkpoint_covers_is_garbage_until_it_is_deleted() -> None:
    async def main() -> None:
        objects = Scripted()
        began, writer = await journal(objects, rows(ONE), rows(ONE))
        name = began.registered.journal
        first = await write_all(writer, {}, 0)
        await note(
            objects, SEALER, name, first, writer.before_watched, 1, [Covered(name, 1, first)]
        )
        report = await checked(objects)
        assert (report.damage, len(report.garbage)) == ([], 1)
        assert f"journal {name}: 2 objects that a checkpoint" in report.garbage[0]

    run(main())


def test_a_registration_that_is_missing_between_others_is_named() -> None:
    async def main() -> None:
        objects = Scripted()
        for _ in range(3):
            await journal(objects, rows(ONE))
        del objects.objects[registration_key(2)]
        (damage,) = (await checked(objects)).damage
        assert damage.startswith(f"object {registration_key(2)}: it is missing")

    run(main())
