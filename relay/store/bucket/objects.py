"""A bucket: objects by key, of which each is created once.

The only agreement that streams in a bucket need is that the second of two creates of a key is
refused. `probe` checks that a service does this before anything is stored there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import secrets
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from iris.core.backoff import Backoff
from iris.errors import ConfigError, IrisError
from iris.keyfiles import sync_directory

if TYPE_CHECKING:
    from obstore.store import ObjectStore

S = TypeVar("S")
T = TypeVar("T")

TIMEOUT_S: Final = 30.0
"""How long a service may take to answer, and no time at all to send."""
LARGE: Final = 64 << 20
"""About the largest object."""
LEAST_RATE: Final = 128 << 10
"""Bytes per second that a service is expected to take or to send at least: a large object gets more time."""
MOST_S: Final = 3600
"""More than any request may take: obstore's own limit, which does not know how large an object is."""
AT_ONCE: Final = 32
"""Things that `each_of` asks about at once."""
TRIES: Final = 8
AGAIN_MIN_S: Final = 0.1
AGAIN_MAX_S: Final = 5.0
"""`Patient` gives up after about 10 seconds."""
THREADS: Final = 16
MOST_WAITING: Final = 256
"""Requests to a directory that may wait for its file system: one that hangs keeps its threads until it goes on."""
SCHEMES: Final = ("s3", "gs", "az", "file")
_TOOK: Final = re.compile(r" in [0-9.]+[nµm]?s\b")
"""The time that a request took, in texts of obstore: an error that is the same should read the same."""
_WHERE: Final = re.compile(r"(https?://[^/\s]+)/\S*")
"""The address of an object, whose key the error names already."""
_DENIED: Final = re.compile(
    r"status code: 40[13]\b|necessary privileges|not authenticated|Unauthenticated", re.I
)
_PAST_THE_END: Final = re.compile(r"status code: 416\b|Wanted range starting at")
"""A range that begins where the object ends, or later: the service refuses it, or obstore misses its bytes."""
_XML: Final = re.compile(r"<(?:\?xml|Error)\b.*", re.DOTALL)
_SAID: Final = re.compile(r"<(?:Code|Message)>([^<\n]{1,200})")
"""What a service says of an error, in XML."""
_NO_BUCKET: Final = re.compile(r"<Code>(?:NoSuchBucket|ContainerNotFound)<")
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]{1,200})"')
"""The system's words in obstore's debug output, such as "Connection refused"."""


class BucketError(IrisError):
    """The bucket did not do what was asked. A create that failed may have been carried out, now or later."""


class Objects(Protocol):
    """The objects of one bucket, below one prefix."""

    url: str

    async def create(self, key: str, data: bytes) -> bool:
        """Create an object; return False if the key exists. Raises BucketError."""

    async def get(self, key: str) -> bytes | None:
        """Return an object's content; None if it does not exist. Raises BucketError."""

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Return the bytes of an object from `start` until `end`, fewer if it ends before; None if it does not exist.

        Raises BucketError.
        """

    async def exists(self, key: str) -> bool:
        """Return whether an object exists. Raises BucketError."""

    async def delete(self, key: str) -> None:
        """Delete an object if it exists. Raises BucketError."""


class Patient:
    """A bucket whose requests are repeated for a while if they fail: for work that needs so many requests that some do,
    and that would have to begin again. Creates are not repeated, because one that failed may have been carried out.
    """

    def __init__(self, objects: Objects) -> None:
        self.url = objects.url
        self._objects = objects

    async def create(self, key: str, data: bytes) -> bool:
        return await self._objects.create(key, data)

    async def get(self, key: str) -> bytes | None:
        return await _often(lambda: self._objects.get(key))

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return await _often(lambda: self._objects.get_range(key, start, end))

    async def exists(self, key: str) -> bool:
        return await _often(lambda: self._objects.exists(key))

    async def delete(self, key: str) -> None:
        await _often(lambda: self._objects.delete(key))


def patient(objects: Objects) -> Objects:
    """Return this bucket, whose requests are repeated."""
    return objects if isinstance(objects, Patient) else Patient(objects)


async def _often(request: Callable[[], Awaitable[T]]) -> T:
    """Return what a request returns, which is made up to `TRIES` times. Raises BucketError."""
    backoff = Backoff(AGAIN_MIN_S, AGAIN_MAX_S, random.random)
    while True:
        try:
            return await request()
        except BucketError:
            pause_s = backoff.failed()
            if backoff.failures == TRIES:
                raise
        await asyncio.sleep(pause_s)


class Directory:
    """A bucket in a directory, which several hosts may share.

    A new object is written beside its place, synced, and linked into it; `link` fails if the place
    is taken. NFS and CIFS support this between clients, too.

    A client of NFS remembers for up to a minute that a name was absent, and notices that the directory has changed when
    it is opened. So what seems to be missing is looked for again after that.
    """

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}"
        self._root = root
        self._used = False
        """Whether an object was found or created. From then on, a directory that is missing or empty is an error: its
        file system is not mounted any more, or somebody has removed it."""
        self._threads = ThreadPoolExecutor(THREADS, "iris-bucket")
        self._slots = threading.BoundedSemaphore(MOST_WAITING)

    async def create(self, key: str, data: bytes) -> bool:
        return await self._do(key, len(data), lambda: self._create(key, data))

    async def get(self, key: str) -> bytes | None:
        return await self._do(key, LARGE, lambda: self._get(key))

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return await self._do(key, end - start, lambda: self._get_range(key, start, end))

    async def exists(self, key: str) -> bool:
        return await self._do(key, 0, lambda: self._exists(key))

    async def delete(self, key: str) -> None:
        await self._do(key, 0, lambda: self._delete(key))

    async def _do(self, key: str, size: int, work: Callable[[], T]) -> T:
        """Return what work of about `size` bytes returns, which is done in a thread. Raises BucketError.

        If the file system hangs, as NFS does while its server is away, the thread waits for it and the caller does not.
        """
        if not self._slots.acquire(blocking=False):
            raise BucketError(
                f"bucket {self.url}: {key}: {MOST_WAITING} requests wait for its file system, which does not answer"
            )
        run = _Run(work, self._slots)
        try:
            async with _time_for(size):
                return await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except TimeoutError as err:
            raise BucketError(f"bucket {self.url}: {key}: {err}") from err
        finally:
            run.give_up()

    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """Raise errors of the system as BucketError."""
        try:
            yield
        except OSError as err:
            raise BucketError(f"bucket {self.url}: {key}: {err.strerror or err}") from err

    def _check_present(self) -> None:
        """Raise BucketError if the directory, in which there were objects, is missing or empty; OSError."""
        if not self._used:
            return
        try:
            with os.scandir(self._root) as found:
                if next(found, None) is not None:
                    return
        except FileNotFoundError:
            why = "the directory is missing"
        else:
            why = "the directory is empty"
        raise BucketError(
            f"bucket {self.url}: {why}, although there were objects in it; mount its file system, or put the directory back"
        )

    def _create(self, key: str, data: bytes) -> bool:
        path = self._root / key
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with self._failing(key):
            if not path.parent.is_dir():
                self._check_present()
                _make_directory(path.parent)
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            made = True
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(beside, path)
            except FileExistsError:
                made = path.samefile(beside)  # a file server repeats a link whose answer was lost
            finally:
                with contextlib.suppress(FileNotFoundError):
                    beside.unlink()
            # Also of an object that was there: whoever made it may have failed to do this, or was killed before.
            sync_directory(str(path.parent))
        self._used = True
        return made

    def _get(self, key: str) -> bytes | None:
        return self._read(key, 0, -1)

    def _get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._read(key, start, max(0, end - start))

    def _read(self, key: str, start: int, size: int) -> bytes | None:
        def read() -> bytes:
            with (self._root / key).open("rb") as file:
                file.seek(start)
                return file.read(size)

        return self._at(key, read)

    def _exists(self, key: str) -> bool:
        return self._at(key, (self._root / key).stat) is not None

    def _delete(self, key: str) -> None:
        def remove() -> bool:
            (self._root / key).unlink()
            return True

        self._at(key, remove)

    def _at(self, key: str, work: Callable[[], T]) -> T | None:
        """Return what `work` returns, which is done with an object; None if there is none. Raises BucketError."""
        with self._failing(key):
            try:
                try:
                    found = work()
                except FileNotFoundError:
                    self._look(key)
                    found = work()
            except FileNotFoundError:
                self._check_present()
                return None
        self._used = True
        return found

    def _look(self, key: str) -> None:
        """Open the directories that lead to an object. A client of NFS then asks the server whether they have changed.

        Raises OSError.
        """
        depth = len(Path(key).parts)
        for directory in reversed((self._root / key).parents[:depth]):
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class _Run(Generic[T]):
    """Work of a thread, which holds a slot from before its begin to its end."""

    def __init__(self, work: Callable[[], T], slots: threading.BoundedSemaphore) -> None:
        self._work = work
        self._slots = slots
        self._lock = threading.Lock()
        self._taken = False
        """Whether a thread has begun, or nobody wants it any more."""

    def __call__(self) -> T:
        if not self._take():
            raise TimeoutError("given up")  # which nobody receives
        try:
            return self._work()
        finally:
            self._slots.release()

    def give_up(self) -> None:
        """Do not begin any more."""
        if self._take():
            self._slots.release()

    def _take(self) -> bool:
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken


def _make_directory(directory: Path) -> None:
    """Make a directory, and those above it that are missing, so that they survive a crash. Raises OSError."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


class Cloud:
    """A bucket of Amazon S3, Google Cloud Storage or Azure, or of a service that speaks their protocol."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url = url
        self._store = store

    async def create(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            async with _time_for(len(data)):
                await obstore.put_async(self._store, key, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError) as err:
            # Older versions of obstore raise the latter for Azure. S3 also refuses a create if it meets another request
            # for the object. Nothing was created then, and obstore reports that alike:
            # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
            if await self.exists(key):
                return False
            raise BucketError(
                f"bucket {self.url}: {key}: the service did not create it, because it met another request for it; "
                "it can be repeated"
            ) from err
        except Exception as err:  # obstore raises OSError, TimeoutError and its own, by service
            raise self._failed(key, err) from err
        return True

    async def get(self, key: str) -> bytes | None:
        import obstore

        try:
            async with _time_for(0):
                found = await obstore.get_async(self._store, key)
            async with _time_for(found.meta["size"]):
                return bytes(await found.bytes_async())
        except FileNotFoundError as err:
            self._check_bucket(key, err)
            return None
        except Exception as err:
            raise self._failed(key, err) from err

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        import obstore

        if start >= end:  # which obstore refuses
            return b"" if await self.exists(key) else None
        try:
            async with _time_for(end - start):
                return bytes(await obstore.get_range_async(self._store, key, start=start, end=end))
        except FileNotFoundError as err:
            self._check_bucket(key, err)
            return None
        except Exception as err:
            if _PAST_THE_END.search(str(err)):
                return b""
            raise self._failed(key, err) from err

    async def exists(self, key: str) -> bool:
        # Not by HEAD: its answer has no body, so it does not tell whether the object is missing or the whole bucket.
        return await self.get_range(key, 0, 1) is not None

    async def delete(self, key: str) -> None:
        import obstore

        try:
            async with _time_for(0):
                await obstore.delete_async(self._store, key)
        except FileNotFoundError as err:
            self._check_bucket(key, err)
        except Exception as err:
            raise self._failed(key, err) from err

    def _check_bucket(self, key: str, err: FileNotFoundError) -> None:
        """Raise BucketError if the whole bucket is missing, not only the object."""
        if _NO_BUCKET.search(str(err)):
            raise self._failed(key, err) from err

    def _failed(self, key: str, err: Exception) -> BucketError:
        return BucketError(f"bucket {self.url}: {key}: {error_line(err)}")


@contextlib.asynccontextmanager
async def _time_for(size: int) -> AsyncIterator[None]:
    """Bound a request that sends or gets `size` bytes. Raises TimeoutError."""
    seconds = TIMEOUT_S + size / LEAST_RATE
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as err:
        if limit.expired():
            raise TimeoutError(f"no answer within {seconds:.0f} s") from err
        raise


def error_line(err: Exception) -> str:
    """Return what an error of obstore says, in one line: its first, and the system's words from its debug output.

    Of an answer in XML, only the code and the message are kept.
    """
    text, _, debug = str(err).strip().partition("\n\nDebug source:")
    said = ": ".join(_SAID.findall(text))
    first = _XML.sub(said, text, count=1).partition("\n")[0].rstrip(": ")
    line = _WHERE.sub(r"\1", _TOOK.sub("", first))[:400] or type(err).__name__
    if _DENIED.search(first):
        return f"{line}; check the credentials of this store, and what they may do in the bucket"
    causes = _CAUSE.findall(debug)
    return f"{line} ({causes[-1]})" if causes and causes[-1] not in line else line


def open_bucket(url: str) -> Objects:
    """Return the bucket at `url`, for example `s3://name/prefix` or `file:///shared/iris`.

    Credentials come from the environment, or from the role of the machine. The service is not called yet.

    Raises:
        ConfigError: the URL names no bucket, or `obstore` is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"bucket: {url!r} does not begin with one of {', '.join(f'{one}://' for one in SCHEMES)}"
        )
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(
            "bucket: the URL may have a bucket and a path only; "
            "set credentials and settings in the environment, for example AWS_REGION"
        )
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc or not path.is_absolute():
            raise ConfigError(
                f"bucket: {url!r} is not file:///absolute/path; write three slashes and the absolute path"
            )
        return Directory(path)
    if not parts.netloc:
        raise ConfigError(f"bucket: {url!r} names no bucket; write {parts.scheme}://NAME/PATH")
    try:
        from obstore.exceptions import UnknownConfigurationKeyError
        from obstore.store import from_url
    except ModuleNotFoundError as err:
        if err.name != "obstore":
            raise
        raise ConfigError(
            "bucket: object storage requires obstore; install it with: pip install 'iris-messaging[bucket]'"
        ) from err
    try:
        settings: dict[str, Any] = {
            "client_options": {"timeout": f"{MOST_S}s", "allow_http": True},
            # Retries are ours: obstore would repeat a create whose answer was lost, and call it refused.
            "retry_config": {"max_retries": 0},
        }
        # Not every service with S3's protocol knows the request that deletes many objects, which obstore uses for one.
        single: dict[str, Any] = (
            {"config": {"disable_bulk_delete": "true"}} if parts.scheme == "s3" else {}
        )
        try:
            store = from_url(url, **settings, **single)
        except UnknownConfigurationKeyError:  # older versions of obstore
            store = from_url(url, **settings)
    except Exception as err:
        raise ConfigError(
            f"bucket: {url}: {error_line(err)}; set it in the environment, for example AZURE_STORAGE_ACCOUNT_NAME"
        ) from err
    return Cloud(url, store)


async def at_once(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of requests that run at the same time. The first error cancels the others and is raised."""
    # Not a TaskGroup: in Python 3.11 one whose task fails leaves a request to cancel in the task that waits for it.
    # `asyncio.timeout` then cancels that task for good instead of raising TimeoutError.
    tasks = [asyncio.ensure_future(each) for each in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def each_of(things: Sequence[S], ask: Callable[[S], Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of `ask` for many things. Up to `AT_ONCE` are asked about at the same time.

    Errors as in `at_once`.
    """
    found: list[T] = []
    for at in range(0, len(things), AT_ONCE):
        found += await at_once(ask(each) for each in things[at : at + AT_ONCE])
    return found


async def probe(objects: Objects) -> None:
    """Return if the service refuses to create an object twice.

    Raises:
        ConfigError: it does not.
        BucketError: it did not answer.
    """
    key = f"probe/{secrets.token_hex(8)}"
    try:
        if not await objects.create(key, b"1"):
            raise ConfigError(
                f"bucket {objects.url}: the service says that an object exists which was never created, so streams would not be safe there; use another service"
            )
        if await objects.create(key, b"2") or await objects.get(key) != b"1":
            raise ConfigError(
                f"bucket {objects.url}: the service overwrites an object that exists, although the request forbids it "
                "(If-None-Match: *), so two stores could write the same stream; use a service that refuses such requests, "
                "such as Amazon S3, Google Cloud Storage, Azure, MinIO or Ceph, or a file:// directory"
            )
    finally:
        with contextlib.suppress(BucketError):
            await objects.delete(key)
