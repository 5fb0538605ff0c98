"""A store on its data directory: locks it, loads its key, connects to the relay, and decides when to write to disk.

lock DIR -> key -> open every stream -> relay -> serve ... -> commit -> bye -> close

It runs on one event loop, which stands still during a write to disk. What arrives meanwhile waits
in the socket and becomes the next batch, written with one sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from iris import keyfiles
from iris.config import ClientConfig
from iris.core.backoff import Backoff
from iris.crypto.keys import GroupKey
from iris.errors import ConfigError, IrisError, RelayUnavailable
from iris.program import host_name
from iris.transport import Pump
from iris.wire.codec import MAX_MESSAGE_LIMIT, ReceiveBuffer
from iris.wire.frames import Bye, Ping
from relay.store.bucket.keeper import CHECKPOINT_BYTES, STATE_FILE, Keeper
from relay.store.bucket.lookout import FAILOVER_S
from relay.store.bucket.objects import Objects
from relay.store.bucket.reading import SegmentReader
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.shelf import DIRECTORY, Shelf
from relay.store.bucket.tiers import Tiers
from relay.store.bucket.url import is_directory, open_bucket
from relay.store.bucket.writer import DIRECTORY_FLUSH_US, FLUSH_US, Writer
from relay.store.directory import KEY_FILE, LOCK_FILE, load_key, lock, make_directory
from relay.store.errors import LogError
from relay.store.log import Log
from relay.store.registration import PongWaiter
from relay.store.session import StoreSession
from relay.store.store import COMMIT_BYTES, Store
from relay.supervisor import STREAMS

log = logging.getLogger(__name__)

GROUP_FILE: Final = "group.key"
TICK_S: Final = 0.05
RUNNING: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that is never set. On Linux it also runs while the host sleeps."""
GATHER_S: Final = 0.002
"""Longest wait of a commit for more data. It waits only while data keeps arriving."""
WRITE_HIGH_BYTES: Final = 16 << 20
DRAIN_S: Final = 5.0
RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
DRAIN_WAIT_S: Final = 0.5
"""Time for our relay's DRAIN to arrive after a signal to us, in case the relay received the signal too."""

Connect = Callable[[Callable[[], Pump[StoreSession]]], Awaitable[object]]


class BucketSettings(Struct, frozen=True):
    """Where the bucket of a store is, and its group key (default: `GROUP_FILE` in the data directory)."""

    url: str
    key_file: Path | None = None
    checkpoint_bytes: int = CHECKPOINT_BYTES
    failover_s: float = FAILOVER_S
    disk_limit: int = 0
    """Bytes of records that its streams may have on this disk; older ones are in the bucket alone. 0: no limit."""
    pause_ms: int | None = None
    """Longest wait of a write for others of the same object; None: what fits the kind of bucket."""

    @property
    def pause_us(self) -> int:
        """Longest wait of a write for others of the same object, in µs."""
        if self.pause_ms is not None:
            return 1000 * self.pause_ms
        return DIRECTORY_FLUSH_US if is_directory(self.url) else FLUSH_US


class StoreProcess:
    """A store on one data directory. Call `open`, then `run` until it is cancelled, then `close`."""

    def __init__(
        self, directory: Path, connect: Connect, *, label: str = "", entropy: Callable[[int], bytes] = os.urandom,
        supervised: bool = False, bucket: BucketSettings | None = None,
    ) -> None:  # fmt: skip
        """`supervised`: this store exits with its relay, and the next relay starts the next store."""
        self.directory = directory
        self.store: Store
        self.up = asyncio.Event()
        """Set while a relay has received the registration of every stream."""
        self._connect = connect
        self._supervised = supervised
        self._unread = False
        self._label = label or host_name()
        self._entropy = entropy
        self._bucket = bucket
        self._keeper: Keeper | None = None
        self._objects: Objects
        self._reader: SegmentReader | None = None
        self._loop = asyncio.get_running_loop()
        self._buffer = ReceiveBuffer()
        self._pump: Pump[StoreSession] | None = None
        self._lock_fd: int | None = None
        self._committing = False
        self._commit_s = 0.0
        self._seen_bytes = 0

    # -- life ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the directory and open every stream in it.

        Raises:
            DirectoryBusy: another store uses it.
            ConfigError: others may write to the directory, it cannot be used, or the key is missing
                although there are streams.
            KeyringError: the key file belongs to another user, others can read it, or it is
                damaged.
            LogWriteFailed: a new key could not be written to disk.
        """
        try:
            make_directory(self.directory)
            # Anybody who may write to the directory could replace our key. `resolve`, because the
            # path may contain a link.
            if why := keyfiles.distrust(self.directory.resolve(), (os.geteuid(),), parent=False):
                raise ConfigError(f"data: {why}")
            make_directory(self.directory / STREAMS)
            self._lock_fd = lock(self.directory / LOCK_FILE)
            key = load_key(self.directory / KEY_FILE, self._entropy)
            shelf = self._open_shelf()
            self.store = store = Store(
                self.directory, key, self._label, self._dirty, self._urge, self._entropy, shelf
            )
            try:
                store.load(time.time_ns() // 1000)
            except BaseException:
                store.close()
                raise
            self._now()
        except OSError as err:
            self._unlock()
            raise ConfigError(f"data: {self.directory}: {err.strerror or err}") from err
        except BaseException:
            self._unlock()
            raise

    def _open_shelf(self) -> Shelf | None:
        """Return the shelf of the store's bucket, if it has one. Raises ConfigError, KeyringError."""
        if self._bucket is None:
            return None
        objects = open_bucket(self._bucket.url)
        path = self._bucket.key_file or self.directory / GROUP_FILE
        if not path.exists():
            used = (self.directory / DIRECTORY / STATE_FILE).exists()
            advice = (
                "copy it from another store of the bucket or from a backup, or name the file with --bucket-key"
                if used
                else "copy it from another store of the bucket, name the file with --bucket-key, or make the key for "
                f"the first store with `iris key store-group {path}`"
            )
            raise ConfigError(
                f"bucket: {path}, the key of the stores that share the bucket, is missing; {advice}"
            )
        key = keyfiles.load(path, lambda text: GroupKey.parse(text.strip()))
        shelf = Shelf(self.directory / DIRECTORY, key, objects.url, _monotonic_us)
        shelf.reader = self._reader = SegmentReader(objects, Sealer(key, self._entropy))
        self._reader.on_read = self._flush
        self._objects = objects
        return shelf

    def _keep(self, store: Store) -> Keeper | None:
        """Return what runs the bucket of an open store; None without a bucket."""
        shelf = store.catalogue.shelf
        if shelf is None or self._bucket is None:
            return None
        return Keeper(
            shelf, self._objects, store.key.public_key, self._label, self, now_us=_monotonic_us,
            wall_us=lambda: time.time_ns() // 1000, checkpoint_bytes=self._bucket.checkpoint_bytes,
            failover_s=self._bucket.failover_s, pause_us=self._bucket.pause_us, entropy=self._entropy,
        )  # fmt: skip

    def _keep_limit(self, store: Store) -> Tiers | None:
        """Return what keeps the streams of a bucket within the limit of the disk; None without a bucket."""
        shelf = store.catalogue.shelf
        if shelf is None or self._bucket is None:
            return None
        return Tiers(
            self._objects, Sealer(shelf.key, self._entropy), self._bucket.disk_limit, store.in_bucket,
            left=shelf.left, now_s=lambda: _monotonic_us() / 1e6, entropy=self._entropy,
        )  # fmt: skip

    # -- callbacks of the keeper -----------------------------------------------------------------------------

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]], *, moved: bool = False) -> None:
        """Serve streams that are in the bucket."""
        self._now()
        self.store.adopt(found, moved=moved)
        self._flush()

    def check_arrival(self, name: str, key_ids: list[bytes], count: int) -> None:
        """Return if a stream that moves here can be served. Raises Refuse."""
        self.store.catalogue.check_arrival(name, key_ids, count)

    def abandon(self, writer: Writer) -> None:
        """Stop serving the streams of a journal that has ended."""
        self.store.abandon(writer)

    def release(self, uuid: bytes) -> dict[bytes, Path]:
        """Stop serving a stream that moves; return the files of it and of its dead letters. Raises LogError."""
        return self.store.catalogue.release(uuid)

    def logs(self, writer: Writer) -> dict[bytes, Log]:
        """Return the open logs of a journal. Raises LogError if one is not open."""
        return self.store.logs_of(writer)

    def stores(self) -> set[str] | None:
        """Return the addresses of the stores that our relay knows."""
        return self.store.presence.addresses(self.store.clock.elapsed_us)

    def flush(self) -> None:
        """Write answers to the relay."""
        self._flush()

    async def run(self) -> None:
        """Serve the relay, and reconnect whenever the connection is lost. Runs until cancelled."""
        ticking = self._loop.create_task(self._tick(), name="iris-store-tick")
        self._keeper = self._keep(self.store)
        keeping = [
            self._loop.create_task(each.run(), name="iris-store-bucket")
            for each in (self._keeper, self._keep_limit(self.store))
            if each is not None
        ]
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
        first = True
        try:
            while True:
                try:
                    pump = await self._attach()
                except (IrisError, OSError, TimeoutError) as err:
                    log.debug("store.reconnect", extra={"fields": {"error": str(err)}})
                    await asyncio.sleep(backoff.failed())
                    continue
                backoff.succeeded()
                self._update_time(pump)
                self.store.attached(pump.session, first=first)
                if self._keeper is not None:
                    self._keeper.check()
                first = False
                # Its answer comes after all other answers. It also shows a relay that has just
                # started that we have attached.
                pump.session.ask(Ping, PongWaiter(self.store.registered))
                pump.flush()
                self.up.set()
                log.info("store.attached", extra={"fields": {"streams": len(self.store.streams)}})
                await pump.closed.wait()
                self.up.clear()
                reason = "the relay is stopping" if self.store.registration.leaving else pump.reason
                log.info("store.detached", extra={"fields": {"reason": reason}})
        finally:
            ticking.cancel()
            for each in keeping:
                each.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            if self._reader is not None:
                await self._reader.close()

    async def close(self) -> None:
        """Commit what was received, send BYE, and unlock the directory. Idempotent."""
        pump, self._pump = self._pump, None
        if self._lock_fd is None:
            return
        self.store.commit()
        if self._keeper is not None and not await self._keeper.drain(DRAIN_S):
            log.warning("store.bucket_behind", extra={"fields": {"bucket": self._keeper.url}})
        if self._unread and self.store.registration.session is None:
            self._save_complete(unread=True)
        try:
            if pump is not None and pump.connected:
                pump.session.control(Bye("the store is stopping"))
                pump.flush()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        await pump.closed.wait()
                pump.abort("closed")
        finally:
            self.store.close()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def _attach(self) -> Pump[StoreSession]:
        session = StoreSession(
            self.store,
            self._entropy,
            label="iris-store",
            pid=os.getpid(),
            message_limit=MAX_MESSAGE_LIMIT,
        )
        welcomed = session.on_welcome = self._loop.create_future()
        pump = self._pump = Pump(self, session, self._buffer, WRITE_HIGH_BYTES)
        closed = self._loop.create_task(pump.closed.wait())
        try:
            async with asyncio.timeout(ClientConfig().connect_timeout_s):
                await self._connect(lambda: pump)
                await asyncio.wait((closed, welcomed), return_when=asyncio.FIRST_COMPLETED)
                if not welcomed.done():
                    raise RelayUnavailable(pump.reason or "the relay closed the connection")
        except BaseException:
            pump.abort("the session could not be set up")
            raise
        finally:
            closed.cancel()
        return pump

    # -- time, and the disk ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._now()
            self.store.tend()
            self._flush()

    def _now(self) -> None:
        running_us = time.clock_gettime_ns(RUNNING) // 1000
        self.store.update_time(time.time_ns() // 1000, running_us)

    def _update_time(self, pump: Pump[StoreSession]) -> None:
        self._now()
        pump.turn()

    def _dirty(self) -> None:
        """Schedule a commit for after the data that is arriving now."""
        if not self._committing:
            self._committing = True
            self._commit_s = self._loop.time() + GATHER_S
            self._seen_bytes = 0
            self._loop.call_soon(self._commit)

    def _commit(self) -> None:
        waiting = self.store.waiting_bytes
        if (
            waiting > self._seen_bytes
            and waiting < COMMIT_BYTES
            and self._loop.time() < self._commit_s
        ):
            # More data has arrived: wait, so that one sync covers all of it.
            self._seen_bytes = waiting
            self._loop.call_soon(self._commit)
            return
        self._committing = False
        self._now()
        self.store.commit()
        self._flush()

    def _flush(self) -> None:
        pump = self._pump
        if pump is not None and pump.connected:
            pump.flush()

    def _urge(self) -> None:
        pump = self._pump
        if pump is not None:
            pump.write()

    # -- callbacks of the pump -------------------------------------------------------------------------------

    def loop_ended(self) -> None:
        """Nothing is left to do: the loop of a store ends with its process."""

    def writing_paused(self, pump: Pump[StoreSession]) -> None:
        """The relay has stopped reading our answers: hold readers back."""
        self.store.registration.blocked = True

    def writing_resumed(self, pump: Pump[StoreSession]) -> None:
        """The relay reads our answers again."""
        self.store.registration.blocked = False

    def disconnected(self, pump: Pump[StoreSession], reason: str) -> None:
        """The connection to the relay was lost."""
        if pump is self._pump:
            self.store.registration.blocked = False
            # A store that outlives its relay does not know which other relays ran in between.
            complete = self._supervised and pump.session.complete
            self.store.detached(pump.session.relay_id, complete=complete)
            self._save_complete()

    def unread(self) -> None:
        """Our relay stops and accepted no session before ours, so streams that were complete at its
        start still are.
        """
        self._unread = True

    async def wait_for_relay(self, ended: asyncio.Event) -> None:
        """After a signal, keep recording until the relay has `ended`, in case it received the same signal."""
        until_s = self._loop.time() + DRAIN_WAIT_S
        registration = self.store.registration
        while not ended.is_set() and (registration.leaving or self._loop.time() < until_s):  # noqa: ASYNC110 - its DRAIN may come
            await asyncio.sleep(TICK_S)

    def _save_complete(self, *, unread: bool = False) -> None:
        """Write down for the next store of this directory which streams are complete.

        Only a supervised store does.
        """
        if self._supervised:
            try:
                self.store.save_complete(unread=unread)
            except LogError as err:  # the next store then records a gap
                log.warning("store.no_word_left", extra={"fields": {"error": str(err)}})


async def restore(directory: Path, bucket: BucketSettings) -> int:
    """Bring all streams of a bucket to an empty data directory; return how many logs that are.

    Raises:
        ConfigError: the directory has a store already, or the bucket cannot be used.
        KeyringError: the group key is missing or damaged.
        BucketError, ObjectDamaged: the bucket does not answer, or its objects were not written with this group key.
    """
    state = directory / DIRECTORY / STATE_FILE
    if state.exists():
        raise ConfigError(
            f"data: the store in {directory} has used a bucket already; name an empty directory, or start that store"
        )
    key = bucket.key_file or directory / GROUP_FILE
    if not key.exists():
        raise ConfigError(
            f"bucket: {key}, the key of the stores that share the bucket, is missing; copy it from one of them or "
            "from a backup, because no other key opens the bucket"
        )

    async def connect(factory: Callable[[], Pump[StoreSession]]) -> object:
        raise RelayUnavailable("a store that is restored serves no relay")

    process = StoreProcess(directory, connect, bucket=bucket)
    process.open()
    try:
        keeper = process._keep(process.store)
        assert keeper is not None
        return await keeper.restore()
    finally:
        await process.close()


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
