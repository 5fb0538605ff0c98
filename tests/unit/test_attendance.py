"""One loop renews the lease of a client's workers at a store; if it cannot any more, another one does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from iris.errors import StreamError
from iris.streams import attendance
from iris.streams.attendance import Attendance
from iris.wire.consumers import Attend, Attended, Placed

HERE, THERE = b"h" * 16, b"t" * 16


class Worker:
    """A worker whose place is told."""

    def __init__(self, name: str) -> None:
        self.id = name.encode() * 16
        self.stream = self.uuid = name
        self.consumer = "work"
        self.place: int | None = None

    def placed(self, place: int | None) -> None:
        self.place = place


class Stores:
    """Two stores. `where` says which of them has a log; a log that is nowhere is an error."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.where: dict[str, bytes] = {worker.stream: HERE for worker in workers}
        self.asked: list[str] = []

    async def find(self, name: str, uuid: str, *, timeout: float) -> Any:
        return SimpleNamespace(address=name, key=None)

    async def ask(self, address: str, key: Any, call: Attend, answer: Any, *, timeout: float, shown: str) -> Any:  # fmt: skip
        await asyncio.sleep(0)
        self.asked.append(shown)
        if shown not in self.where:
            raise StreamError(shown, "it moves")
        store = self.where[shown]
        there = [worker for worker in self.workers if self.where.get(worker.stream) == store]
        return Attended(store, [Placed(worker.id, 0) for worker in there])


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    monkeypatch.setattr(attendance, "PAUSE_S", 0.0)
    return [Worker(name) for name in "abc"]


async def renewed(stores: Stores) -> set[str]:
    """Return by way of which logs leases are renewed now."""
    for _ in range(50):
        await asyncio.sleep(0)
    stores.asked.clear()
    for _ in range(50):
        await asyncio.sleep(0)
    return set(stores.asked)


async def test_one_log_of_each_store_renews_the_lease_there(workers: list[Worker]) -> None:
    stores = Stores(workers)
    attending = Attendance(stores)  # type: ignore[arg-type]  # it has the calls that are made here
    for worker in workers:
        attending.keep(worker)
    assert len(await renewed(stores)) == 1
    assert [worker.place for worker in workers] == [0, 0, 0]
    attending.end()


@pytest.mark.parametrize("moves", [True, False], ids=["to another store", "and answers errors"])
async def test_when_the_log_that_renews_moves_another_one_renews_for_the_rest(
    workers: list[Worker], moves: bool
) -> None:
    stores = Stores(workers)
    attending = Attendance(stores)  # type: ignore[arg-type]  # it has the calls that are made here
    for worker in workers:
        attending.keep(worker)
    (via,) = await renewed(stores)
    if moves:
        stores.where[via] = THERE
    else:
        del stores.where[via]
    after = await renewed(stores)
    assert via in after  # its own place is there now, or is asked for
    assert len(after - {via}) == 1
    attending.end()
