"""A bucket in a directory, which several hosts may share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Generic, TypeVar

from iris.keyfiles import sync_directory
from relay.store.bucket.objects import FIRST_BYTES, BucketError, time_for
from relay.store.bucket.sealing import ObjectDamaged

T = TypeVar("T")

THREADS: Final = 16
MOST_WAITING: Final = 256
"""Requests to a directory that may wait for its file system: one that hangs keeps its threads until it goes on."""


class Directory:
    """A bucket in a directory.

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
        return await self._do(key, FIRST_BYTES, lambda: self._read(key, 0, FIRST_BYTES))

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return await self._do(key, end - start, lambda: self._read(key, start, max(0, end - start)))

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
            async with time_for(size):
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
                # A file server repeats a link whose answer was lost.
                made = os.path.samestat(path.lstat(), beside.lstat())
            finally:
                with contextlib.suppress(FileNotFoundError):
                    beside.unlink()
            # Also of an object that was there: whoever made it may have failed to do this, or was killed before.
            sync_directory(str(path.parent))
        self._used = True
        return made

    def _read(self, key: str, start: int, size: int) -> bytes | None:
        path = self._root / key

        def read() -> bytes:
            # Only stores make objects, and they make files. A link may lead anywhere, and a FIFO would block for ever.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise self._not_a_file(key)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):  # somebody has replaced it meanwhile
                    raise self._not_a_file(key)
                file.seek(start)
                return file.read(min(size, max(0, status.st_size - start)))

        return self._at(key, read)

    def _not_a_file(self, key: str) -> ObjectDamaged:
        return ObjectDamaged(
            f"object {key} of bucket {self.url}: it is not a regular file, so no store has made it; remove it, and restore "
            "the object from a backup"
        )

    def _exists(self, key: str) -> bool:
        return self._at(key, (self._root / key).lstat) is not None

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
