"""The data directory of a store: made for one user, used by one process, and the home of the store's key."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from iris import keyfiles
from iris.crypto.keys import SECRET_BYTES, StoreKey
from iris.errors import ConfigError, KeyringError
from iris.keyfiles import sync_directory
from relay.store.catalogue import is_stream
from relay.store.files import write_beside
from relay.supervisor import STREAMS, check_path

KEY_FILE: Final = "store.key"
LOCK_FILE: Final = "store.lock"


class DirectoryBusy(ConfigError):
    """Another process holds the lock of the data directory."""


def load_key(path: Path, entropy: Callable[[int], bytes]) -> StoreKey:
    """Return the key of a data directory; create it at first use.

    Raises ConfigError, KeyringError, LogWriteFailed or OSError.
    """
    if not path.exists():
        streams = path.parent / STREAMS
        if any(is_stream(name) for name in os.listdir(streams)):
            raise ConfigError(
                f"data: {path} is missing, and the streams in {streams} are signed for the store with that key; restore the file "
                f"from a backup. Without it these streams cannot be served again: move {streams} away to start without them"
            )
        write_beside(str(path), StoreKey(entropy(SECRET_BYTES)).reveal().encode() + b"\n")
    return keyfiles.load(path, _parse_key)


def _parse_key(text: str) -> StoreKey:
    try:
        return StoreKey.parse(text.strip())
    except KeyringError as err:
        raise KeyringError(
            f"{err}. Streams are signed for the store with that key, so restore the file from a backup"
        ) from None


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, synced so that their names survive a power cut.

    Raises:
        ConfigError: RocksDB could not open a database in it.
        OSError: it cannot be created.
    """
    check_path(path)
    if not path.is_dir():
        if not path.parent.is_dir():
            make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync_directory(str(path.parent))


def lock(path: Path) -> int:
    """Return a descriptor that holds the lock of a data directory.

    The kernel releases it however this process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except BlockingIOError as err:
        pid = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise DirectoryBusy(
            f"data: another store uses {path.parent}: process {pid or 'unknown'}; stop it first, or the relay that runs it"
        ) from err
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[Path]:
    """Hold the lock of an existing data directory whose store is stopped; yield the directory of its streams.

    Raises:
        ConfigError: a store uses the directory, or it belongs to another user, or RocksDB could not open it.
    """
    streams = directory / STREAMS
    check_path(directory)
    try:
        if not streams.is_dir():
            raise ConfigError(
                f"data: {directory} is not a store's data directory: it has no {STREAMS}/"
            )
        if why := keyfiles.distrust(directory.resolve(), (os.geteuid(),), parent=False):
            raise ConfigError(f"data: {why}; run this as the user that runs the store")
        descriptor = lock(directory / LOCK_FILE)
    except OSError as err:
        raise ConfigError(f"data: {directory}: {err.strerror or err}") from err
    try:
        yield streams
    finally:
        os.close(descriptor)
