"""Restores `disk` streams, whose stores are gone, from their copies; notices if streams of this store were restored.

    order ─► outline of all copies ─► is the order valid, is the store gone? ─► read the copy ─► remake it
          ─► entry in the bucket's list, which decides ─► move it to the other streams ─► serve it

The entry names the new log and the store that has it. If that store is killed before it serves the log, the order is
repeated, and it makes the log of the entry. The store of the lost log looks into the list at its start, when it
attaches to its relay, and every `CHECK_S`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from iris.crypto.keyring import Keyring
from iris.crypto.keys import GroupKey, public_id
from iris.errors import IrisError
from iris.keyfiles import sync_directory
from iris.wire.orders import KEEP, Definition, Order, SignedOrder, log_uuid
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import LostStream
from relay.store.authority import Authority, DefinitionFile, one_definition
from relay.store.bucket.copy_reading import Outline, read_copies
from relay.store.bucket.forced import ForcedList
from relay.store.bucket.joined import prevent
from relay.store.bucket.lost import Lost, LostLogs
from relay.store.bucket.objects import BucketError, Objects
from relay.store.bucket.remaking import make_dead, remake, remake_dead
from relay.store.bucket.sealing import Forced, ObjectDamaged, Sealer
from relay.store.errors import LogDamaged, LogError, Refuse
from relay.store.files import write_beside
from relay.store.salvage import ORDERS

log = logging.getLogger(__name__)

T = TypeVar("T")
DIRECTORY: Final = "forced"
"""Subdirectory of the data directory where copies are read to."""
CHECK_S: Final = 10.0
FIRST_CHECK_S: Final = 5.0
"""How long a store that starts waits for the list. Then it serves what it has, and asks again."""
MAX_ORDERS: Final = 16
"""Most orders that a store carries out or lets wait: each reads all copies of the bucket."""
VISIBLE_S: Final = 0.25
VISIBLE_LOOKS: Final = 8
"""How often, and with which pause, a store looks again whether another one can be seen."""
SPARE_BYTES: Final = 64 << 20
CAUSE: Final = "the stream's store was lost, and its copy in the bucket ended here"
JOINED: Final = (
    "the stream has joined the bucket, so its copy does not count any more; a store that shares the bucket serves the "
    "stream when it has taken over from the one that is gone"
)
STOPPING: Final = "the store is stopping; try again"
_encode: Final = msgspec.msgpack.Encoder().encode


class Owner(Protocol):
    """The store that makes streams of copies."""

    def check_forced(self, definition: Definition, key_ids: Collection[bytes], uuid: bytes) -> None:
        """Return if a stream with this uuid and its dead letters can be served. Raises Refuse."""

    def has(self, uuid: bytes) -> bool:
        """Return whether the store serves this log."""

    def bring(self, uuid: bytes, then: Callable[[str], None]) -> None:
        """Serve a log that was made in the directory of streams, with its dead letters; call `then` with the relay's
        error, or "" if it serves."""

    def displace(self, entry: Forced) -> None:
        """Stop serving a log of ours, if we have it, because another log has taken its place. Idempotent.

        Raises LogWriteFailed.
        """

    def flush(self) -> None:
        """Write answers to the relay."""


class Wish(Struct, frozen=True):
    """An order to restore a stream from its copy."""

    lost: bytes
    made: bytes
    orders: Sequence[SignedOrder]
    """Orders that move the lost stream to this store."""
    making: Sequence[SignedOrder]
    """Orders that create the new stream."""
    salt: bytes
    """What the uuid of the new stream was made of."""


class Left(Struct, frozen=True):
    """A copy that was not restored."""

    name: str
    """Name of the stream; empty if its orders are not valid."""
    uuid: str
    host: str
    """Host of the store that wrote it."""
    why: str


class Forcing:
    """The lost streams of one store's bucket. Call `first_check`, then `run` until it is cancelled."""

    def __init__(
        self, objects: Objects, key: GroupKey, store: bytes, label: str, data: Path, streams: Path, owner: Owner, *,
        wait_s: Callable[[bytes], float | None], wall_us: Callable[[], int], verify: Callable[[], Awaitable[None]] | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        """`store` is this store's public key, `data` its directory, and `streams` that of its streams.

        `wait_s(store)` returns how many more seconds another store must be gone until it counts as gone; None if it can
        be seen. `verify` raises if the bucket has less than this store has seen.
        """
        self._objects = objects
        self._key = key
        self._sealer = Sealer(key, entropy)
        self._list = ForcedList(objects, self._sealer)
        self._lost = LostLogs(objects, self._sealer, self._list, store, owner.has, time.monotonic)
        self._store = store
        self._label = label
        self._directory = data / DIRECTORY
        self._streams = streams
        self._owner = owner
        self._wait_s = wait_s
        self._wall_us = wall_us
        self._verify = verify
        self._entropy = entropy
        self._one_at_a_time = asyncio.Lock()
        self._read: dict[bytes, Path] | None = None
        """Copies that were read already, while all of them are restored."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._check_now = asyncio.Event()
        self._warned = ""

    # -- what became of our own streams ----------------------------------------------------------------------

    async def first_check(self) -> None:
        """Find out what became of our streams, before they are served; give up after `FIRST_CHECK_S`."""
        await asyncio.to_thread(
            shutil.rmtree, self._directory, ignore_errors=True
        )  # of an order of the last run
        try:
            async with asyncio.timeout(FIRST_CHECK_S):
                await self._check()
        except TimeoutError:
            self._warn(f"no answer within {FIRST_CHECK_S:g} s")
        except (IrisError, OSError) as err:
            self._warn(str(err))

    def check(self) -> None:
        """Check soon what became of our streams, because this store was away from its relay."""
        self._check_now.set()

    async def run(self) -> None:
        """Check again and again. Runs until cancelled."""
        try:
            while True:
                self._check_now.clear()
                try:
                    await self._check()
                    self._warned = ""
                except (IrisError, OSError) as err:
                    self._warn(str(err))
                except Exception:
                    log.exception("store.fault", extra={"fields": {"stream": "streams moved by force"}})  # fmt: skip
                try:
                    async with asyncio.timeout(CHECK_S):
                        await self._check_now.wait()
                except TimeoutError:
                    pass
        finally:
            await self.cancel()

    async def _check(self) -> None:
        await self._list.read()
        for entry in self._list.entries:
            self._owner.displace(entry)

    def _warn(self, why: str) -> None:
        if why != self._warned:
            self._warned = why
            log.warning("store.forced_unknown", extra={"fields": {"error": why}})

    # -- orders ----------------------------------------------------------------------------------------------

    def find(
        self, name: str, key_ids: Collection[bytes], done: Callable[[list[LostStream] | Refuse], None]
    ) -> None:  # fmt: skip
        """Call `done` with the copies of streams of this name under one of these keys. Raises Refuse."""

        async def work() -> list[LostStream]:
            async with self._one_at_a_time:
                await self._lost.read(key_ids)
                return await self._lost.named(name, key_ids)

        self._start(work, done)

    def force(self, wish: Wish, done: Callable[[bytes | Refuse], None]) -> None:
        """Restore a stream from its copy and call `done` with its uuid, also if that was done before. Raises Refuse."""

        async def work() -> bytes:
            async with self._one_at_a_time:
                return await self._force(wish)

        self._start(work, done)

    def _start(self, work: Callable[[], Awaitable[T]], done: Callable[[T | Refuse], None]) -> None:
        if self._stopping:
            raise Refuse("leaving", STOPPING)
        if len(self._tasks) >= MAX_ORDERS:
            raise Refuse("leaving", f"the store already carries out {MAX_ORDERS} orders that read copies in the bucket, which is the limit; try again")  # fmt: skip

        async def run() -> None:
            result: T | Refuse = Refuse("leaving", STOPPING)
            try:
                result = await work()
            except Refuse as err:
                result = err
            except BucketError as err:
                result = Refuse("leaving", str(err))
            except (ObjectDamaged, LogDamaged) as err:
                result = Refuse("damaged", str(err))
            except (LogError, OSError) as err:
                result = Refuse("disk", str(err))
            except (IrisError, ValueError) as err:
                result = Refuse("invalid", str(err))
            except Exception as err:
                log.exception(
                    "store.fault", extra={"fields": {"stream": "a stream moved by force"}}
                )
                result = Refuse("failed", f"internal error: {type(err).__name__}")
            finally:
                done(result)
                self._owner.flush()

        task = asyncio.get_running_loop().create_task(run(), name="iris-stream-force")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Cancel all orders, and begin none. An order that is sent again later is completed."""
        self._stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- all of them -----------------------------------------------------------------------------------------

    async def restore(self, keyring: Keyring) -> tuple[list[str], list[Left]]:
        """Restore all streams from copies of which `keyring` has a key, wherever their stores are. No other work runs.

        Return the names of those that were restored, and the others.
        Raises BucketError, ObjectDamaged, LogError, OSError.
        """
        await self._lost.read()
        names: list[str] = []
        left: list[Left] = []
        try:
            self._read = await self._read_copies(())
            for copy in self._lost.copies:
                name = ""
                try:
                    lost = self._lost.head(copy.uuid)
                    if lost is None or lost.store == self._store:
                        continue
                    if await self._lost.has_joined(lost.uuid):
                        continue  # it was restored from the bucket
                    name = lost.charter.definition.name
                    lost.check_whole()
                    made = self._created(lost, keyring)
                    await self._make(lost, made[1], made[0], self._list.of(lost.uuid))
                    names.append(name)
                except (Refuse, LogError, OSError) as err:
                    left.append(Left(name, copy.uuid.hex(), copy.label, str(err)))
        finally:
            self._read = None
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        return sorted(names), left

    def _created(self, lost: Lost, keyring: Keyring) -> tuple[bytes, DefinitionFile]:
        """Return the uuid and the definition file of a new stream in the place of a lost one. Raises Refuse."""
        charter, salt, now_us = lost.charter, self._entropy(16), self._wall_us()
        keys = [key for key_id in charter.orders if (key := keyring.by_id(key_id)) is not None]
        if not keys:
            raise Refuse("order", "the keyring has no key of this stream")
        uuid = log_uuid(keys[0].key_id, salt)
        definition = charter.definition.made_again(lost.uuid)
        orders = {}
        for key in keys:
            order = Order(
                KEEP, uuid, key.key_id, self._store, now_us, definition, definition.order_version
            )
            said = _encode(order)
            orders[key.key_id] = SignedOrder(said, key.public_key, key.sign_order(said))
        return uuid, DefinitionFile(list(orders.values()), b"", list(orders), [], salt)

    # -- making ----------------------------------------------------------------------------------------------

    async def _force(self, wish: Wish) -> bytes:
        """Raises Refuse, BucketError, ObjectDamaged, LogError, OSError, DecodeError."""
        if self._verify is not None:
            await self._verify()
        await self._lost.read([public_id(signed.public_key) for signed in wish.orders])
        lost = self._lost.of(wish.lost)
        if lost.stored.parent:
            raise Refuse("invalid", "dead letters cannot be moved on their own; move their stream")
        lost.check_whole()
        made = self._checked(wish, lost)
        entry = self._list.of(wish.lost)
        if lost.store == self._store:
            if self._owner.has(lost.uuid):
                return lost.uuid  # nothing is left to do
        elif entry is None:
            await self._check_gone(lost)
        try:
            return await self._make(lost, made, wish.made, entry)
        finally:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _make(
        self, lost: Lost, made: DefinitionFile, uuid: bytes, entry: Forced | None
    ) -> bytes:
        """Make the log `uuid` with this definition file, or that of `entry`, which was decided before; return which.

        Raises as `_force`.
        """
        if entry is not None:
            uuid, made = self._ours(entry)
            if self._owner.has(uuid):
                return uuid
        definition = Authority(self._store).load(made, uuid).definition
        key_ids = [public_id(signed.public_key) for signed in made.orders]
        self._owner.check_forced(definition, key_ids, uuid)
        self._check_disk(lost.source)
        parts = await self._copy(lost.source, made, uuid, mirror=bool(definition.mirror))
        if entry is None:
            if not await prevent(self._objects, self._sealer, lost.uuid):
                raise Refuse("exists", JOINED)
            wanted = Forced(
                lost.uuid, uuid, self._store, self._label, self._wall_us(), made.orders, made.salt
            )
            decided, _ = self._ours(await self._list.decide(wanted))
            if decided != uuid:
                raise Refuse(
                    "leaving", "another order restored this stream at the same time; try again"
                )
        await asyncio.to_thread(self._install, parts)
        fields = {
            "stream": definition.name, "lost": lost.uuid.hex(), "uuid": uuid.hex(), "host": lost.label,
            "store": public_id(lost.store).hex(), "next": lost.source.next,
        }  # fmt: skip
        log.warning("store.stream_forced", extra={"fields": fields})
        served: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._owner.bring(uuid, lambda error: None if served.done() else served.set_result(error))
        if error := await served:
            raise Refuse("leaving", f"the stream was restored, but the relay refuses to serve it: {error}")  # fmt: skip
        return uuid

    def _ours(self, entry: Forced) -> tuple[bytes, DefinitionFile]:
        """Return the log and the definition file of an entry. Raises Refuse if another store has the log."""
        if entry.store != self._store:
            raise Refuse(
                "exists",
                f"the store {public_id(entry.store).hex()[:8]} on {entry.label} was ordered to restore this stream, as "
                f"log {entry.made.hex()}; if that store does not serve it, repeat the order with the id of that store",
            )
        roots = [public_id(signed.public_key) for signed in entry.orders]
        return entry.made, DefinitionFile(entry.orders, b"", roots, [], entry.salt)

    def _checked(self, wish: Wish, lost: Lost) -> DefinitionFile:
        """Return the definition file of the new stream. Raises Refuse if the orders do not allow it."""
        now_us, charter = self._wall_us(), lost.charter
        target = Authority(lost.store).move(charter, wish.orders, lost.uuid, now_us)
        if target != self._store:
            raise Refuse("order", "the order names another store as the new one; send it there")
        ours = Authority(self._store)
        orders = ours.read(wish.making, wish.made)
        if one_definition(orders) != charter.definition.made_again(lost.uuid):
            raise Refuse("order", "the new stream must have the same definition as the lost one")
        for key_id in orders:
            if key_id not in charter.orders:
                raise Refuse("order", f"key {key_id.hex()[:8]} is not a key of the lost stream; leave it out, and add it with `iris stream keys` afterwards")  # fmt: skip
        return ours.create(orders, wish.salt, now_us).definition_file

    async def _check_gone(self, lost: Lost) -> None:
        """Return if the store of a log is gone. Raises Refuse."""
        where = f"the store {public_id(lost.store).hex()[:8]} on {lost.label}"
        for _ in range(VISIBLE_LOOKS):
            if (wait_s := self._wait_s(lost.store)) is not None:
                break
            await asyncio.sleep(VISIBLE_S)  # what our relay said last may be older than its end
        else:
            raise Refuse("invalid", f"{where} has the stream and is running; if its disk is lost or cannot be used, stop that store first")  # fmt: skip
        if wait_s:
            raise Refuse("leaving", f"{where} has the stream and was seen too recently; try again in {wait_s:.0f} s")  # fmt: skip

    def _check_disk(self, source: Outline) -> None:
        free = shutil.disk_usage(self._streams).free
        if free < source.size_bytes + SPARE_BYTES:
            raise Refuse(
                "full",
                f"the copy has up to {source.size_bytes:,} bytes, and the store's disk has {free:,} left; make room there, "
                "or move the stream to another store",
            )

    async def _copy(
        self, source: Outline, made: DefinitionFile, uuid: bytes, *, mirror: bool
    ) -> dict[bytes, tuple[Path, bytes]]:
        """Make the new log, and one of its dead letters; return uuid -> files and definition file."""
        dead, its_dead = dead_uuid(source.uuid), dead_uuid(uuid)
        paths = self._read
        if paths is None:
            paths = await self._read_copies({source.uuid, dead})
        if source.uuid not in paths:
            raise Refuse("leaving", "the copy was replaced while it was read; try again")
        stored, cause = _encode(made), "" if mirror else CAUSE
        now_us = self._wall_us()
        remade = await asyncio.to_thread(remake, paths[source.uuid], uuid, stored, cause, now_us)
        parts = {uuid: (paths[source.uuid], stored)}
        stored = _encode(DefinitionFile(parent=uuid))
        its_path = paths.get(dead)
        if its_path is not None:
            await asyncio.to_thread(
                remake_dead, its_path, its_dead, stored, uuid, remade.torn, cause, now_us
            )
        elif cause and remade.has_consumers:
            its_path = self._directory / its_dead.hex()
            await asyncio.to_thread(make_dead, its_path, its_dead, stored, cause, now_us)
        if its_path is not None:
            parts = {its_dead: (its_path, stored), **parts}  # no stream is there without them
        return parts

    async def _read_copies(self, only: Collection[bytes]) -> dict[bytes, Path]:
        found = await read_copies(self._objects, self._key, self._directory, only)
        return {one.uuid: one.path for one in found}

    def _install(self, parts: dict[bytes, tuple[Path, bytes]]) -> None:
        """Move new logs to the other streams. What a killed store has left of an earlier try is replaced."""
        for uuid, (made, stored) in parts.items():
            path = self._streams / uuid.hex()
            if self._owner.has(uuid):
                continue  # dead letters, which were found when the store started
            write_beside(f"{path}{ORDERS}", stored)
            shutil.rmtree(path, ignore_errors=True)
            os.rename(made, path)
        sync_directory(str(self._streams))
