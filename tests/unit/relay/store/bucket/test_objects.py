"""A bucket refuses the second of two creates, and a service that does not is found out."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bucket_sim import Scripted, run

from iris.crypto.keys import GroupKey
from iris.errors import ConfigError
from relay.store.bucket import directory, objects
from relay.store.bucket.cloud import error_line
from relay.store.bucket.directory import THREADS, Directory
from relay.store.bucket.history import registrations
from relay.store.bucket.objects import TRIES, BucketError, Objects, at_once, patient, probe
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.url import open_bucket


class Overwriting(Directory):
    """A service without conditional writes."""

    def _create(self, key: str, data: bytes) -> bool:
        self._delete(key)
        return super()._create(key, data)


async def test_one_of_many_creates_succeeds_and_its_content_stays(tmp_path: Path) -> None:
    buckets = [open_bucket(f"file://{tmp_path}") for _ in range(8)]
    for number in range(10):
        key = f"journal/{number:012d}"
        made = await asyncio.gather(
            *(bucket.create(key, b"%d" % n) for n, bucket in enumerate(buckets))
        )
        assert made.count(True) == 1
        assert await buckets[0].get(key) == b"%d" % made.index(True)
        assert await buckets[1].exists(key)


async def test_what_was_deleted_is_not_there_and_deleting_it_again_is_no_error(
    tmp_path: Path,
) -> None:
    bucket = open_bucket(f"file://{tmp_path}")
    assert await bucket.create("a/b", b"1")
    await bucket.delete("a/b")
    await bucket.delete("a/b")
    assert await bucket.get("a/b") is None
    assert not await bucket.exists("a/b")


async def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    await probe(open_bucket(f"file://{tmp_path}"))
    assert not os.listdir(tmp_path / "probe")


async def test_a_service_that_overwrites_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}: the service overwrites an object"):
        await probe(Overwriting(tmp_path))


async def test_a_directory_that_cannot_be_written_says_which(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file in the way")
    bucket: Objects = Directory(tmp_path)
    with pytest.raises(BucketError, match=f"bucket file://{tmp_path}: journal/1: "):
        await bucket.create("journal/1", b"")


@pytest.mark.parametrize("loss", ["removed", "empty", "a file", "unreadable"])
async def test_a_directory_that_is_gone_is_an_error_and_not_an_empty_bucket(
    tmp_path: Path, loss: str
) -> None:
    # As when the file system of the bucket is not mounted any more.
    root = tmp_path / "bucket"
    bucket: Objects = Directory(root)
    await probe(bucket)
    assert await bucket.create("journal/a/1", b"1")
    away = root.rename(tmp_path / "away")
    if loss == "empty":
        root.mkdir()
    elif loss == "a file":
        root.write_text("")
    elif loss == "unreadable":
        root.symlink_to(root.name)  # ELOOP, an error for root, too
    for call in (
        bucket.create("journal/a/2", b"2"),
        bucket.create("journal/b/1", b"2"),
        bucket.get("journal/a/1"),
        bucket.get_range("journal/a/1", 0, 1),
        bucket.exists("journal/a/2"),
        bucket.delete("journal/a/1"),
    ):
        with pytest.raises(BucketError, match=f"bucket file://{root}: "):
            await call
    assert loss != "empty" or not os.listdir(root)
    if loss == "empty":
        root.rmdir()
    elif loss != "removed":
        root.unlink()
    away.rename(root)
    assert await bucket.get("journal/a/1") == b"1"
    assert await bucket.create("journal/a/2", b"2")


async def test_a_link_whose_answer_was_lost_made_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NFS repeats a request without an answer, and finds what the first one did.
    bucket: Objects = Directory(tmp_path)
    assert await bucket.create("journal/a", b"1")
    link = os.link

    def unanswered(src: Path, dst: Path) -> None:
        link(src, dst)
        raise FileExistsError(17, "File exists", src, None, dst)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", unanswered)
        assert await bucket.create("journal/b", b"2")
        with pytest.raises(FileExistsError):
            os.link(tmp_path / "journal/b", tmp_path / "journal/a")
        await probe(bucket)
    assert not await bucket.create("journal/b", b"3")
    assert await bucket.get("journal/b") == b"2"


async def test_an_object_is_there_only_when_its_directory_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fails = [True]
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path == f"{tmp_path}/bucket/journal/a" and fails.pop():
            raise OSError(5, "Input/output error")
        synced.append(os.path.relpath(path, tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    bucket: Objects = Directory(tmp_path / "bucket")
    await bucket.create("other", b"")
    fails.append(True)
    synced.clear()
    with pytest.raises(BucketError, match="journal/a/1: Input/output error"):
        await bucket.create("journal/a/1", b"1")
    fails[:] = [False, False]
    assert not await bucket.create("journal/a/1", b"1")
    assert synced[-1] == "bucket/journal/a", "who finds it there may rely on it"
    assert {"bucket", "bucket/journal"} <= set(synced), "new directories are there, too"


class Remembering:
    """The client of a file server, which remembers that a name was absent until it opens the directory of the name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._absent: set[str] = set()
        for name in ("open", "stat", "unlink"):
            patch.setattr(Path, name, self._remembering(getattr(Path, name)))
        self._open = os.open
        patch.setattr(os, "open", self._opened)

    def _remembering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def does(path: Path, *args: Any, **more: Any) -> Any:
            for each in (path, *path.parents):
                if str(each) in self._absent:
                    raise FileNotFoundError(2, "No such file or directory", str(path))
            try:
                return call(path, *args, **more)
            except FileNotFoundError:
                while not os.path.lexists(path.parent):
                    path = path.parent
                self._absent.add(str(path))
                raise

        return does

    def _opened(self, path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECTORY:
            for each in [one for one in self._absent if os.path.dirname(one) == str(path)]:
                self._absent.discard(each)
        return self._open(path, flags, *more)


def write_on_another_host(path: str, data: bytes) -> None:
    """Write a file past `Remembering`."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


async def test_an_object_of_another_host_is_found_by_a_client_of_nfs_that_missed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: Objects = Directory(tmp_path)
    await bucket.create("journal/a/1", b"1")
    Remembering(monkeypatch)
    for key in ("journal/a/2", "checkpoint/a/1", "checkpoint/a/2"):
        assert await bucket.get(key) is None
        assert not await bucket.exists(key)
        assert not (tmp_path / key).exists()
    for key in ("journal/a/2", "checkpoint/a/1", "checkpoint/a/2"):
        write_on_another_host(f"{tmp_path}/{key}", key.encode())
    with pytest.raises(FileNotFoundError):
        (tmp_path / "checkpoint/a/1").stat()
    assert await bucket.exists("checkpoint/a/1")
    assert await bucket.get("checkpoint/a/2") == b"checkpoint/a/2"
    assert await bucket.get("journal/a/2") == b"journal/a/2"
    await bucket.delete("checkpoint/a/2")
    assert os.listdir(tmp_path / "checkpoint/a") == ["1"]


def test_a_request_is_repeated_for_a_while_and_a_create_is_not() -> None:
    async def main() -> None:
        objects = Scripted()
        asked: Counter[str] = Counter()

        async def fails(what: str, key: str) -> None:
            asked[what] += 1
            if key == "never" or asked[what] < TRIES:
                raise BucketError("bucket memory: 503 Slow Down")

        objects.fault = fails
        bucket = patient(objects)
        assert patient(bucket) is bucket, "or tries would multiply"
        for call in (bucket.get("a"), bucket.exists("a"), bucket.delete("a")):
            assert not await call
        assert asked == {"get": TRIES, "exists": TRIES, "delete": TRIES}
        with pytest.raises(BucketError):
            await bucket.get_range("never", 0, 1)
        assert asked["get"] == 2 * TRIES
        with pytest.raises(BucketError):
            await bucket.create("never", b"")
        assert asked["create"] == 1

    run(main())


async def test_a_file_system_that_hangs_is_an_error_and_holds_a_bounded_number_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MOST_WAITING", 20)
    bucket = Directory(tmp_path)
    assert await bucket.create("journal/a", b"1")
    monkeypatch.setattr(objects, "TIMEOUT_S", 0.01)
    goes_on = threading.Event()
    hanging: list[str] = []
    exists = bucket._exists

    def hangs(key: str) -> bool:
        hanging.append(key)
        goes_on.wait()
        return exists(key)

    monkeypatch.setattr(bucket, "_exists", hangs)
    try:
        for _ in range(1000):
            if len(hanging) == THREADS:
                break
            with pytest.raises(BucketError, match=f"{tmp_path}: journal/a: no answer within 0 s"):
                await bucket.exists("journal/a")
        for _ in range(50):  # they have not begun, and are forgotten
            with pytest.raises(BucketError, match="no answer within 0 s"):
                async with asyncio.timeout(5):
                    await bucket.exists("journal/a")
        monkeypatch.setattr(objects, "TIMEOUT_S", 30.0)
        waiting = [asyncio.create_task(bucket.exists("journal/a")) for _ in range(20 - THREADS)]
        await asyncio.sleep(0)
        with pytest.raises(BucketError, match="20 requests wait for its file system"):
            await bucket.exists("journal/a")
        assert await asyncio.to_thread(lambda: 1), "other work goes on"
        assert len(hanging) == THREADS
    finally:
        goes_on.set()
    assert await asyncio.gather(*waiting) == [True] * len(waiting)
    for _ in range(100):
        assert await bucket.exists("journal/a")


async def test_a_bucket_that_fails_for_several_objects_at_once_raises_one_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "journals").write_text("a file in the way")
    bucket: Objects = Directory(tmp_path)
    # Threads read the objects, so any of them may fail first.
    with pytest.raises(
        BucketError, match=rf"^bucket file://{tmp_path}: journals/\d{{12}}: Not a directory"
    ):
        await registrations(bucket, Sealer(GroupKey(bytes(32)), os.urandom))


async def test_calls_at_once_are_all_over_when_the_first_error_is_raised() -> None:
    ended = []

    async def call(number: int) -> int:
        await asyncio.sleep(0)
        ended.append(number)
        if number == 1:
            raise BucketError("1")
        return number

    with pytest.raises(BucketError, match="1"):
        await at_once(map(call, range(4)))
    assert sorted(ended) == [0, 1, 2, 3]
    assert await at_once(map(call, (2, 3))) == [2, 3]


async def test_a_wait_after_calls_that_failed_ends_with_its_timeout() -> None:
    async def call(number: int) -> int:
        await asyncio.sleep(0.001 * number)
        raise BucketError(str(number))

    for _ in range(3):
        with pytest.raises(BucketError, match="0"):
            await at_once(map(call, range(4)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


def test_an_error_of_a_service_is_one_line_with_the_system_s_words() -> None:
    text = (
        "Generic S3 error: Error performing GET http://127.0.0.1:9/b/x in 85.937µs - HTTP error: error sending request\n\n"
        'Debug source:\nGeneric {\n source: Os {\n code: 111,\n message: "Connection refused",\n },\n}'
    )
    assert error_line(OSError(text)) == (
        "Generic S3 error: Error performing GET http://127.0.0.1:9 - HTTP error: error sending request (Connection refused)"
    )
    assert error_line(TimeoutError()) == "TimeoutError"
    denied = f"Generic S3 error: Error performing PUT http://127.0.0.1:9/{'b/' * 100}x in 1ms - Server returned non-2xx status code: 403 Forbidden: "
    for said, kept in (
        ("", ""),
        ("<Error/>", ""),
        ('<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>', ": AccessDenied: Access Denied"),
        ("<Error>\n  <Code>AuthorizationFailure</Code>\n  <Message>Not allowed\nTime: 1</Message>\n</Error>\n\nDebug source:\nx", ": AuthorizationFailure: Not allowed"),
    ):  # fmt: skip
        assert error_line(OSError(denied + said)) == (
            "Generic S3 error: Error performing PUT http://127.0.0.1:9 - Server returned non-2xx status code: 403 Forbidden"
            f"{kept}; check the credentials of this store, and what they may do in the bucket"
        )


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "does not begin with one of s3://"),
        ("http://host/bucket", "does not begin with one of s3://"),
        ("s3:///prefix", "names no bucket"),
        ("file://relative/path", "is not file:///absolute/path"),
        ("s3://bucket/prefix?endpoint=http://x", "set credentials and settings in the environment"),
    ],
)
def test_a_url_that_names_no_bucket_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_bucket(url)


def test_a_secret_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        open_bucket("s3://AKIA:hunter2@bucket/prefix")
    assert "hunter2" not in str(caught.value)
