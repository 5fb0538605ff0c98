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
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from iris import keyfiles
from iris.config import ClientConfig
from iris.core.backoff import Backoff
from iris.crypto.keyring import Keyring
from iris.crypto.keys import GroupKey
from iris.errors import ConfigError, IrisError, RelayUnavailable
from iris.program import host_name
from iris.transport import Pump
from iris.wire.codec import MAX_MESSAGE_LIMIT, ReceiveBuffer
from iris.wire.frames import Bye, Ping
from iris.wire.names import plural
from iris.wire.orders import Definition
from iris.wire.stream_items import dead_uuid
from relay.store.bucket.copying import Copying
from relay.store.bucket.forcing import Forcing, Left
from relay.store.bucket.keeper import CHECKPOINT_BYTES, STATE_FILE, Keeper
from relay.store.bucket.lookout import FAILOVER_S
from relay.store.bucket.objects import Objects
from relay.store.bucket.reading import SegmentReader
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import Forced, Sealer
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
        self._copying: Copying | None = None
        self._forcing: Forcing | None = None
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

    def _copy(self, store: Store, keeper: Keeper | None) -> Copying | None:
        """Return what copies streams of the disk to the bucket; None without a bucket."""
        shelf = store.catalogue.shelf
        if shelf is None or self._bucket is None:
            return None
        return Copying(
            shelf.copies, self._objects, shelf.key, store.key.public_key, self._label, shelf.directory, now_us=_monotonic_us,
            wall_us=lambda: time.time_ns() // 1000, checkpoint_bytes=self._bucket.checkpoint_bytes,
            ended=lambda: [each for uuid in store.catalogue.ended.uuids for each in (uuid, dead_uuid(uuid))],
            verify=None if keeper is None else keeper.verify, entropy=self._entropy,
        )  # fmt: skip

    def _force(self, store: Store, keeper: Keeper | None) -> Forcing | None:
        """Return what makes streams of copies; None without a bucket."""
        shelf = store.catalogue.shelf
        if shelf is None or keeper is None:
            return None
        forcing = store.calls.forced.forcer = Forcing(
            self._objects, shelf.key, store.key.public_key, self._label, self.directory, store.catalogue.directory, self,
            wait_s=keeper.wait_s, wall_us=lambda: time.time_ns() // 1000, verify=keeper.verify, entropy=self._entropy,
        )  # fmt: skip
        return forcing

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

    def check_forced(self, definition: Definition, key_ids: Collection[bytes], uuid: bytes) -> None:
        """Return if a stream that is made of a copy can be served. Raises Refuse."""
        self.store.catalogue.check_forced(definition, key_ids, uuid)

    def has(self, uuid: bytes) -> bool:
        """Return whether this store serves a log."""
        return uuid in self.store.streams

    def bring(self, uuid: bytes, then: Callable[[str], None]) -> None:
        """Serve a log that was made of a copy."""
        self._now()
        self.store.bring(uuid, then)
        self._flush()

    def displace(self, entry: Forced) -> None:
        """Serve a log of ours no more, because another one has taken its place. Raises LogWriteFailed."""
        self.store.catalogue.displace(entry)
        self._flush()

    def flush(self) -> None:
        """Write answers to the relay."""
        self._flush()

    async def run(self) -> None:
        """Serve the relay, and reconnect whenever the connection is lost. Runs until cancelled."""
        ticking = self._loop.create_task(self._tick(), name="iris-store-tick")
        self._keeper = self._keep(self.store)
        self._copying = self._copy(self.store, self._keeper)
        self._forcing = self._force(self.store, self._keeper)
        if self._forcing is not None:
            await self._forcing.first_check()
        keeping = [
            self._loop.create_task(each.run(), name="iris-store-bucket")
            for each in (self._keeper, self._copying, self._forcing, self._keep_limit(self.store))
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
                if self._forcing is not None:
                    self._forcing.check()
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
        if self._copying is not None and not await self._copying.drain(DRAIN_S):
            lag = self.store.lag_of_copies
            fields = {
                "bucket": self._bucket.url if self._bucket else "",
                "bytes": lag.bytes if lag else 0,
            }
            log.warning("store.copies_behind", extra={"fields": fields})
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


class Restored(Struct, frozen=True):
    """What a restore has brought to a directory."""

    streams: int
    """Logs that were in the bucket."""
    copies: list[str]
    """Names of streams on disks that were restored from their copies."""
    left: list[Left]


async def restore(directory: Path, bucket: BucketSettings, keyring: Keyring) -> Restored:
    """Bring all streams of a bucket to an empty data directory; restore from copies those of which `keyring` has a key.

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
        store = process.store
        keeper = process._keep(store)
        forcing = process._force(store, keeper)
        assert keeper is not None
        assert forcing is not None
        count = await keeper.restore()
        try:
            return Restored(count, *await forcing.restore(keyring))
        except IrisError as err:
            raise ConfigError(
                f"{plural(count, 'stream')} of the bucket were restored, but not the streams with copies there: {err}; start this "
                "store, and restore them with `iris stream move --force`"
            ) from err
    finally:
        await process.close()


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
