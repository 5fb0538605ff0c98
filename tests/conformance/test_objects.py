"""The rules for every bucket, whichever service keeps it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import PreconditionError
from support.azure import Azurite
from support.gcs import CloudStorage
from support.lossy_s3 import LATE_S, Service, never

from relay.store.bucket import objects
from relay.store.bucket.objects import FIRST_BYTES, BucketError, Objects, probe
from relay.store.bucket.url import open_bucket

pytestmark = pytest.mark.timeout(60)

DATA = bytes(range(100))


Running = Service | Azurite | CloudStorage


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    with Service() as s3, Azurite() as azure, CloudStorage(tmp_path_factory.mktemp("gcs")) as gcs:
        yield {"s3": s3, "azure": azure, "gcs": gcs}


def opened(url: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Objects:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return open_bucket(url)


@pytest.fixture(params=["directory", "s3", "azure", "gcs"])
def bucket(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    services: dict[str, Running],
    monkeypatch: pytest.MonkeyPatch,
) -> Objects:
    """An empty bucket: a part of one that each test has for itself."""
    if request.param == "directory":
        return open_bucket(f"file://{tmp_path}")
    service = services[request.param]
    return opened(f"{service.url}/{secrets.token_hex(4)}", service.environ, monkeypatch)


async def test_the_second_create_is_refused_and_what_is_there_stays(bucket: Objects) -> None:
    await probe(bucket)
    assert await bucket.create("journal/a/000000000001", DATA)
    assert not await bucket.create("journal/a/000000000001", b"another")
    assert await bucket.get("journal/a/000000000001") == DATA
    assert await bucket.exists("journal/a/000000000001")


async def test_of_many_creates_at_once_one_succeeds(bucket: Objects) -> None:
    for number in range(5):
        made = await asyncio.gather(
            *(bucket.create(f"journal/{number}", b"%d" % each) for each in range(8))
        )
        assert made.count(True) == 1
        assert await bucket.get(f"journal/{number}") == b"%d" % made.index(True)


async def test_an_object_that_is_missing_is_none(bucket: Objects) -> None:
    assert await bucket.get("journal/a") is None
    assert not await bucket.exists("journal/a")
    assert await bucket.get_range("segment/a", 0, 10) is None
    assert await bucket.get_range("segment/a", 10, 10) is None


async def test_what_was_deleted_can_be_created_again_and_deleting_it_twice_is_no_error(
    bucket: Objects,
) -> None:
    assert await bucket.create("segment/a", DATA)
    await bucket.delete("segment/a")
    await bucket.delete("segment/a")
    assert not await bucket.exists("segment/a")
    assert await bucket.create("segment/a", b"1")
    assert await bucket.get("segment/a") == b"1"


async def test_a_range_has_the_bytes_that_the_object_has_there(bucket: Objects) -> None:
    await bucket.create("segment/a", DATA)
    for start, end in ((0, 1), (0, 10), (40, 60), (99, 100), (0, 100)):
        assert await bucket.get_range("segment/a", start, end) == DATA[start:end]


async def test_a_range_past_the_end_has_fewer_bytes_or_none(bucket: Objects) -> None:
    await bucket.create("segment/a", DATA)
    await bucket.create("segment/empty", b"")
    assert await bucket.get_range("segment/a", 90, 1000) == DATA[90:]
    for start, end in ((100, 101), (500, 600), (40, 40)):
        assert await bucket.get_range("segment/a", start, end) == b""
    assert await bucket.get_range("segment/empty", 0, 10) == b""


async def test_an_object_of_the_largest_size_is_one_request(bucket: Objects) -> None:
    large = DATA * 90_000
    assert await bucket.create("segment/a", large)
    assert not await bucket.create("segment/a", large)
    assert await bucket.get("segment/a") == large[:FIRST_BYTES]
    assert await bucket.get_range("segment/a", FIRST_BYTES, len(large) + 1) == large[FIRST_BYTES:]


@pytest.mark.parametrize("kind", ["s3", "azure"])
async def test_a_bucket_that_is_missing_is_an_error_and_not_an_empty_bucket(
    services: dict[str, Running], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = services[kind].url
    missing = opened(url.replace("://", "://missing-"), services[kind].environ, monkeypatch)
    for call in (
        missing.create("journal/a", DATA),
        missing.get("journal/a"),
        missing.get_range("journal/a", 0, 1),
        missing.exists("journal/a"),
    ):
        with pytest.raises(BucketError, match=r"journal/a: .* does not exist"):
            await call


async def test_a_service_that_refuses_a_range_is_an_error_that_names_the_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Service() as service:
        bucket = opened(service.url, service.environ, monkeypatch)
        await bucket.create("segment/a", DATA)
        service.faults = lambda method, path: "denied" if method == "GET" else ""
        with pytest.raises(
            BucketError, match=r"segment/a: .*InvalidAccessKeyId; check the credentials"
        ):
            await bucket.get_range("segment/a", 0, 10)


async def test_objects_are_deleted_one_by_one_at_services_that_do_not_know_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Google Cloud Storage and Alibaba Cloud OSS, under S3's protocol, refuse POST ?delete.
    with Service() as service:
        bucket = opened(service.url, service.environ, monkeypatch)
        await bucket.create("segment/a", DATA)
        service.faults = lambda method, path: "denied" if method == "POST" else ""
        await bucket.delete("segment/a")
        assert not await bucket.exists("segment/a")
        service.faults = lambda method, path: "denied" if method == "DELETE" else ""
        with pytest.raises(BucketError, match=r"segment/a: .*check the credentials"):
            await bucket.delete("segment/a")


async def test_a_create_that_met_another_request_is_an_error_and_not_an_object_that_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # S3 then answers 409, and asks to repeat the request. obstore reports this as it reports an object that exists.
    with Service() as service:
        bucket = opened(service.url, service.environ, monkeypatch)
        service.faults = lambda method, path: "refused" if method == "PUT" else ""
        with pytest.raises(BucketError, match=r"journal/a: .* can be repeated"):
            await bucket.create("journal/a", DATA)
        service.faults = never
        assert await bucket.create("journal/a", DATA)
        service.faults = lambda method, path: "refused" if method == "PUT" else ""
        assert not await bucket.create("journal/a", b"another")


async def test_a_large_object_may_take_longer_and_a_service_that_is_silent_is_an_error(
    services: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = services["s3"]
    assert isinstance(s3, Service)
    bucket = opened(f"{s3.url}/slow", s3.environ, monkeypatch)
    monkeypatch.setattr(objects, "TIMEOUT_S", LATE_S / 10)
    monkeypatch.setattr(objects, "LEAST_RATE", 10)
    s3.faults = lambda method, path: "slow"
    try:
        for call in (
            bucket.create("journal/a", b""),
            bucket.exists("journal/b"),
            bucket.delete("journal/b"),
        ):
            with pytest.raises(BucketError, match=r"journal/.: no answer within 0 s"):
                await call
        assert await bucket.create("journal/b", DATA)
        assert await bucket.get_range("journal/b", 0, 50) == DATA[:50]
    finally:
        s3.faults = never


async def test_a_condition_that_failed_is_an_object_that_exists(
    services: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As older versions of obstore report what Azure answers to a second create.
    bucket = opened(services["azure"].url, services["azure"].environ, monkeypatch)
    assert await bucket.create("journal/a", DATA)

    async def put(*_: object, **__: object) -> None:
        raise PreconditionError("412 Precondition Failed")

    monkeypatch.setattr(obstore, "put_async", put)
    assert not await bucket.create("journal/a", b"another")
