"""Streams in a bucket of a service, through its real protocol. Those of S3 are lost, late, cut and refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.azure import Azurite
from support.buckets import Group, append_all, check, numbered, whole
from support.gcs import CloudStorage
from support.lossy_s3 import Fault, Service, harm, never

import iris

pytestmark = pytest.mark.timeout(180)


AT_ONCE = 10


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as running:
        yield running


class Load:
    """Appends that run in the background, a few at once, so that they go into several objects."""

    def __init__(self, client: iris.Client, messages: list[bytes]) -> None:
        self.offsets: list[int] = []
        """The offsets of what was acknowledged."""
        self._some = asyncio.Event()
        self._client = client
        self._messages = messages
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for first in range(0, len(self._messages), AT_ONCE):
            tasks = await append_all(
                self._client, "orders", self._messages[first : first + AT_ONCE]
            )
            self.offsets += await asyncio.gather(*tasks)
            self._some.set()

    async def some(self) -> None:
        """Return when some was acknowledged, and more is on its way."""
        await self._some.wait()

    async def all(self) -> list[int]:
        """Return all offsets."""
        await self._task
        return self.offsets


@pytest.mark.parametrize("kind", ["s3", "azure", "gcs"])
async def test_what_was_acknowledged_is_read_from_the_bucket_by_another_store(
    tmp_path: Path, kind: str
) -> None:
    bucket = {"s3": Service, "azure": Azurite, "gcs": lambda: CloudStorage(tmp_path)}[kind]()
    with bucket, Group(tmp_path, bucket.url, **bucket.environ) as group:
        group.start(1)
        group.start(2)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            messages = numbered("", 50)
            load = Load(client, messages)
            await load.some()
            first = await group.holder(client, "orders")
            group.kill(first)
            group.lose_disk(first)
            assert sorted(await load.all()) == list(range(len(messages)))
            assert await group.holder(client, "orders") == 3 - first
            assert sorted(await whole(client, "orders")) == sorted(messages)
            assert (await check(group, 3 - first))[0] == 0


@pytest.mark.parametrize("fault", ["lost", "cut", "late", "slow", "refused"])
async def test_nothing_is_lost_or_doubled_when_requests_are(
    tmp_path: Path, service: Service, fault: Fault
) -> None:
    with Group(tmp_path, service.url, **service.environ) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            service.faults = harm(4, fault)
            messages = numbered("", 80)
            load = Load(client, messages)
            await load.some()
            group.kill(1)
            group.start(1)
            assert sorted(await load.all()) == list(range(len(messages)))
            assert sorted(await whole(client, "orders")) == sorted(messages)
            assert service.done[fault]


async def test_a_takeover_holds_while_requests_of_both_stores_are_harmed(
    tmp_path: Path, service: Service
) -> None:
    with Group(tmp_path, service.url, **service.environ) as group:
        group.start(1)
        group.start(2)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            service.faults = harm(4, "lost", "cut", "late", "slow", "refused")
            messages = numbered("", 80)
            load = Load(client, messages)
            await load.some()
            first = await group.holder(client, "orders")
            group.kill(first)
            assert sorted(await load.all()) == list(range(len(messages)))
            service.faults = never
            group.start(first)
            await group.logged(first, "store.journal_taken")
            assert await group.holder(client, "orders") == 3 - first
            assert sorted(await whole(client, "orders")) == sorted(messages)


async def test_a_service_that_overwrites_objects_is_refused_at_start(tmp_path: Path) -> None:
    with (
        Service(strip="If-None-Match") as service,
        Group(tmp_path, service.url, **service.environ) as group,
    ):
        group.start(1)
        await group.logged(1, "store.bucket_not_opened")
        assert "the service overwrites an object that exists" in group.log(1)
