"""Parts of objects: a service and a directory answer alike, also at the end of an object and beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lossy_s3 import Service

from relay.store.bucket.objects import BucketError, Objects, open_bucket

DATA = bytes(range(100))


@pytest.fixture(params=["directory", "service"])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Objects]:
    if request.param == "directory":
        yield open_bucket(f"file://{tmp_path}")
        return
    with Service() as service:
        for name, value in service.environ.items():
            monkeypatch.setenv(name, value)
        yield open_bucket(service.url)


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


async def test_a_range_of_an_object_that_is_missing_is_none(bucket: Objects) -> None:
    assert await bucket.get_range("segment/a", 0, 10) is None
    assert await bucket.get_range("segment/a", 10, 10) is None


async def test_a_service_that_refuses_a_range_is_an_error_that_names_the_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Service() as service:
        for name, value in service.environ.items():
            monkeypatch.setenv(name, value)
        bucket = open_bucket(service.url)
        await bucket.create("segment/a", DATA)
        service.faults = lambda method, path: "denied" if method == "GET" else ""
        with pytest.raises(BucketError, match=r"segment/a: .*check the credentials"):
            await bucket.get_range("segment/a", 0, 10)
