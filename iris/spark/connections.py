"""Connections of this process to its relay, one for each `Access`; kept between tasks and dropped on any error.

A Python worker of Spark runs one task after another, so the connection that one task opened serves the next. Workers
are forked from a daemon that has imported this module, so a connection belongs to the process that made it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from iris import blocking
from iris.client import Client
from iris.config import ClientConfig
from iris.errors import IrisError, NoStream
from iris.keyfiles import KEYRING_FILE, config_directory, load_keyring
from iris.spark.errors import TIMEOUT, to_spark_error
from iris.spark.options import Access

MAX_CONNECTIONS: Final = 16
"""Connections that one process keeps open; beyond this the least recently used one is closed."""
LABEL: Final = "spark"
CONNECT_S: Final = 10.0
"""Seconds to wait for a relay that accepts no connections; a relay that restarts is back by then."""
PAUSE_S: Final = 0.2
T = TypeVar("T")

_lock = threading.Lock()
_ConnectionKey = tuple[Access, int]
"""(access, modification time of the key files). With the time, the next task uses a rotated key."""
_connections: dict[_ConnectionKey, Connection] = {}


def _forked() -> None:
    """Forget the connections in the child of a fork: they are the parent's. Another thread of it may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _connections.clear()


os.register_at_fork(after_in_child=_forked)


class Connection:
    """A client for use from threads."""

    def __init__(self, access: Access) -> None:
        self.access = access
        keyring = load_keyring(Path(access.keyring_file)) if access.keyring_file else None
        config = ClientConfig(
            relay=access.relay or None,
            access=Path(access.access_file) if access.access_file else None,
            label=LABEL,
            connect_timeout_s=min(30.0, access.timeout_s),
        )
        self.client = Client(config, keyring)
        self._blocking = blocking.Client(self.client)

    def call(self, work: Callable[[Client], Coroutine[Any, Any, T]], *, writing: bool = False) -> T:
        """Return the result of `work(client)`. Raises SparkError, and then this connection is not used again."""
        return self.result(self.start(work), writing=writing)

    def start(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start `work(client)`; pass the future to `result`."""
        return self._blocking.start(work)

    def result(self, future: Future[T], *, writing: bool = False) -> T:
        """Wait for a future of `start` and return its result. Raises as `call`."""
        try:
            return future.result()
        except (IrisError, TimeoutError, OSError) as err:
            self.drop()
            raise to_spark_error(err, writing=writing) from err
        except BaseException:
            future.cancel()
            self.drop()
            raise

    def drop(self) -> None:
        """Close the connection and forget it, so that the next task opens another. Idempotent."""
        with _lock:
            for key, connection in list(_connections.items()):
                if connection is self:
                    del _connections[key]
        self.close()

    def close(self) -> None:
        """Leave the relay. Idempotent."""
        self._blocking.close()


def connection(access: Access) -> Connection:
    """Return this process's connection, waiting up to 10 s for a relay that restarts.

    Raises SparkError if the relay cannot be reached or the keys cannot be read.
    """
    key = (access, _key_files_written_ns(access))
    with _lock:
        found = _connections.pop(key, None)
        if found is not None:
            _connections[key] = found
            return found
    until_s = time.monotonic() + min(CONNECT_S, access.timeout_s)
    while True:
        try:
            made = Connection(access)
            break
        except (IrisError, TimeoutError, OSError) as err:
            error = to_spark_error(err)
            if error.code != TIMEOUT or time.monotonic() + PAUSE_S > until_s:
                raise error from err
        time.sleep(PAUSE_S)
    surplus: list[Connection] = []
    with _lock:
        found = _connections.setdefault(key, made)
        if found is not made:
            surplus.append(made)
        while len(_connections) > MAX_CONNECTIONS:
            surplus.append(_connections.pop(next(iter(_connections))))
    for one in surplus:
        one.close()
    return found


async def wait_for_stream(find: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Return the result of `find()`, which looks up a stream; retry for `patience_s` while no store holds it.

    A store that restarts comes back, but a client that has not found the stream before does not wait by itself.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return await find()
        except NoStream as err:
            if not err.passing or time.monotonic() + PAUSE_S > until_s:
                raise
        await asyncio.sleep(PAUSE_S)


@atexit.register
def close_all() -> None:
    """Close this process's connections when it ends."""
    with _lock:
        mine = list(_connections.values())
        _connections.clear()
    for made in mine:
        made.close()


def _key_files_written_ns(access: Access) -> int:
    written = 0
    for path in (
        access.keyring_file or config_directory(os.environ) / KEYRING_FILE,
        access.access_file,
    ):
        with contextlib.suppress(OSError):  # opening the file later reports the error
            written += os.stat(path).st_mtime_ns if path else 0
    return written
