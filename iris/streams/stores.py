"""Finds which store holds a stream, and sends calls that survive the loss of a relay or a store."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from iris.core.backoff import Backoff
from iris.core.channels import is_named, trusted_orders
from iris.crypto.keys import ClusterKey
from iris.deadlines import deadline, milliseconds, seconds_left
from iris.errors import (
    AmbiguousStream,
    ConnectionLost,
    KeyringError,
    NoMembers,
    NoStream,
    Overloaded,
    RelayError,
    RequestError,
    RequestTimeout,
    StreamError,
    StreamSuperseded,
    StreamUnavailable,
    ran_before,
)
from iris.runtime import Runtime
from iris.streams.answers import checked
from iris.streams.attendance import Attendance
from iris.streams.holders import Holder, Holders
from iris.streams.verified import VerifiedStream
from iris.wire.kinds import STORES
from iris.wire.names import check_address, check_uuid, split_site
from iris.wire.orders import DEAD, in_force, split_partition, superseded_text
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import Call, Describe, Described, FindStore, StoreInfo, Supersede, encode

MAX_LOCATIONS: Final = 4096
"""Entries in each cache of stream locations; a full cache is cleared."""
LOCATION_S: Final = 10.0
"""Seconds for which a location is used before it is looked up again."""
LOOK_S: Final = 1.0
"""Seconds for the question whether a partition that no store has was replaced."""
PAUSE_MIN_S: Final = 0.02
PAUSE_MAX_S: Final = 1.0
"""Shortest and longest pause between retries of a call."""
SITE_LAG_S: Final = 1.0
"""How long a stream of another site may exist there before this site knows of it. Usually it takes 50 ms."""
BY_TICKET: Final = "the ticket does not allow "
"""How the relay's reason begins when the session's ticket does not name a stream."""
NO_HOLDER: Final = "no store holds it"
"""How a relay's answer begins if no store holds a stream; the reasons of stores that cannot serve may follow."""
_LIST_HINT: Final = (
    "; `iris stream list` shows the existing streams, `iris stream create` creates one"
)
START_HINT: Final = "start one with `iris relay --data DIR` or `iris store --data DIR`"
T = TypeVar("T")


def _hint(name: str) -> str:
    """Return what to do if no store holds the stream `name`, to follow the reason."""
    stream, partition = split_partition(name)
    if not partition:
        return _LIST_HINT
    return (
        f"; its store is away, or it was deleted; `iris stream info {stream}` shows all partitions"
    )


class StreamLocation(msgspec.Struct, frozen=True):
    """The location of a stream: its log's uuid, and a key of this keyring that the stream is kept under."""

    uuid: bytes
    key: ClusterKey
    until_s: float
    """Time on the monotonic clock when it is looked up again, because keys change."""
    site: str = ""
    """The remote site given in the stream's name; empty for a local stream."""

    @property
    def address(self) -> str:
        """The address that calls to the stream are sent to."""
        return f"{self.site}:{self.uuid.hex()}" if self.site else self.uuid.hex()


class KeyUser(Protocol):
    """An object that caches what it derived from keys, such as a `RecordOpener`."""

    def forget_keys(self) -> None:
        """Look up every key again."""


class Stores:
    """Finds streams and calls their stores, for one client."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.holders = Holders(runtime)
        self.attendance = Attendance(self)
        """Keeps the places of this client's workers of consumers that are not shared."""
        self.openers: weakref.WeakSet[KeyUser] = weakref.WeakSet()
        """Objects that cache keys and must drop them when the keyring changes."""
        self._locations: dict[tuple[str, str], StreamLocation] = {}
        self._seen: set[tuple[str, str]] = set()
        """(name, uuid) of streams that have been found before; when missing, they may come back."""
        self._key_uuids: dict[bytes, bytes] = {}
        """Log uuid -> uuid that its key hashes are made with, which never changes."""
        self._dedup_logs: set[bytes] = set()
        """Logs with a dedup window. If a window is removed later, the store refuses message ids."""

    # -- asking ----------------------------------------------------------------------------------------------

    async def ask(
        self, address: str, key: ClusterKey | None, call: Call, answer: type[T], *, timeout: float, shown: str, writes: bool = False,
        own: bool = False,
    ) -> T:  # fmt: skip
        """Send one call and return its answer.

        With a `key`, the call uses a channel that only the store and holders of the key can use. `own` means that the
        address is a store's id and that the call asks what the store has under the key.

        Raises:
            StreamError: the store refused, or no store was found.
            RequestError: the call did not reach the store, or its answer was lost.
        """
        until_s = time.monotonic() + timeout
        pump, session = await self.runtime.ready(shown, timeout)
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        left_ms = milliseconds(seconds_left(until_s))
        called = session.store_calls.send(
            address,
            key,
            encode(call),
            timeout_ms=left_ms,
            waiter=waiter,
            shown=shown,
            writes=writes,
            to_store=own,
        )
        pump.touch()
        try:
            got = await waiter
        except NoMembers as err:
            # For a session with a ticket there are no other streams than those that the ticket names.
            if err.detail.startswith(BY_TICKET):
                raise NoStream(shown, err.detail) from err
            why = err.detail.removeprefix(NO_HOLDER)  # which stores cannot serve
            if why in ("", err.detail):
                why = "" if address == STORES else _hint(shown)
            missing = NoStream(shown, f"no store holds it under your keys{why}")
            missing.passing = True  # only this relay's view, which may be behind
            raise missing from err
        except RelayError as err:
            if err.may_have_run:
                raise
            # The relay refuses it for good, such as for a ticket that does not allow it. No key holder said that.
            refused = StreamError(shown, err.detail)
            refused.may_have_run = writes
            raise refused from err
        finally:
            if not waiter.done() or waiter.cancelled():
                session.store_calls.forget(called)
        return checked(got, answer, shown)

    async def ask_stream(
        self, name: str, uuid: str, call: Call, answer: type[T], *, timeout: float, patience: float | None = None, writes: bool = False,
        asked: float | None = None,
    ) -> T:  # fmt: skip
        """Send a stream a call that may be repeated; retry until it is answered. Raises as `retry`."""

        async def once(left_s: float) -> T:
            location = await self.find(name, uuid, timeout=left_s)
            return await self.ask(
                location.address,
                location.key,
                call,
                answer,
                timeout=left_s,
                shown=name,
                writes=writes,
            )

        return await self.retry(name, uuid, once, timeout=timeout, patience=patience, asked=asked)

    async def retry(
        self, name: str, uuid: str, once: Callable[[float], Awaitable[T]], *, timeout: float, patience: float | None = None,
        asked: float | None = None,
    ) -> T:  # fmt: skip
        """Call `once(seconds left)` and return its result; retry while the relay or the store is away.

        If given, `patience` limits the retries, in seconds from the first failure. A stream that has never been found
        raises NoStream at once, and one of another site after `SITE_LAG_S`. `asked` is the timeout that the caller
        gave, if `timeout` is what is left of it.

        Raises:
            StreamError: the store refused; StreamUnavailable if it did not answer in time.
        """
        until_s = asked_until_s = deadline(timeout)
        asked = timeout if asked is None else asked
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        trying = lost = False
        far = bool(split_site(name)[0])
        known_until_s = 0.0  # when a stream of another site that exists is known here
        while True:
            left_s = until_s - time.monotonic()
            try:
                return await once(max(0.05, left_s))
            except (ConnectionLost, Overloaded, StreamError) as err:
                # An earlier try may have run, and only its answer was lost.
                lost = lost or err.may_have_run
                if isinstance(err, StreamSuperseded):
                    err.passing = not uuid  # the name is that of another log now
                if isinstance(err, StreamError) and not err.passing:
                    if lost:
                        ran_before(err)
                    raise
                self.forget(name, uuid)
                unseen = isinstance(err, NoStream) and (name, uuid) not in self._seen
                if unseen and far:
                    known_until_s = known_until_s or time.monotonic() + SITE_LAG_S
                    unseen = time.monotonic() >= known_until_s
                if isinstance(err, NoStream) and unseen:
                    missing: NoStream = err
                    in_this_site = name != STORES and not far
                    if (
                        in_this_site
                        and err.detail.endswith(_LIST_HINT)
                        and not await self.holders.may_exist()
                    ):
                        missing = NoStream(name, f"the network has no store; {START_HINT}")
                        missing.passing = err.passing
                    if lost:
                        ran_before(missing)
                    raise missing from err.__cause__
                if not trying and patience is not None:
                    until_s = min(until_s, time.monotonic() + patience)
                trying = True
                pause_s = backoff.failed()
                if time.monotonic() + pause_s >= until_s:
                    if isinstance(err, StreamError):
                        if lost:
                            ran_before(err)
                        raise
                    self.runtime.name_timeout(err, asked, asked_until_s)
                    detail = f"{err.detail}{self.holders.starting_hint}"
                    raise StreamUnavailable(name, detail, may_have_run=True) from err
            except RequestTimeout as err:
                cause = self.runtime.away_text(asked, asked_until_s)
                detail = f"no answer within {asked:g} s{cause}{self.holders.starting_hint}"
                raise StreamUnavailable(name, detail, may_have_run=True) from err
            except RequestError as err:
                if lost:
                    ran_before(err)
                raise
            await asyncio.sleep(pause_s)

    async def describe(
        self,
        name: str,
        uuid: str,
        *,
        timeout: float,
        patience: float | None = None,
        asked: float | None = None,
    ) -> VerifiedStream:
        """Return a stream's description. Raises StreamError, also if no key of this keyring signed the description."""
        check_address(name)
        until_s = deadline(timeout)
        described = await self.ask_stream(
            name, uuid, Describe(), Described, timeout=timeout, patience=patience, asked=asked
        )
        if described.superseded is not None and not uuid:
            self.forget(name)  # the name is that of another log now
            left_s = seconds_left(until_s)
            described = await self.ask_stream(
                name, uuid, Describe(), Described, timeout=left_s, patience=patience, asked=asked
            )
        return self.verified(name, described)

    def verified(self, name: str, described: Described) -> VerifiedStream:
        """Return a description with the latest order that a key of this keyring signed.

        Raises StreamError without one.
        """
        name = split_site(name)[1]
        find_key = self.runtime.keyring.by_id
        ours = list(
            trusted_orders(described.orders, find_key, uuid=described.uuid, store=described.store)
        )
        latest = in_force(order for order in ours if is_named(order, name))
        if latest is None and (other := in_force(ours)) is not None:
            self.forget(name)
            uuid = other.uuid.hex()
            raise NoStream(name, f"log {uuid} has the name {other.definition.name!r} now")
        if latest is None:
            raise StreamError(
                name,
                "the stream's description is not signed by a key of this keyring; add a key of the stream to the keyring",
            )
        return VerifiedStream(latest, described)

    # -- locating --------------------------------------------------------------------------------------------

    def keys(self, name: str) -> tuple[ClusterKey, ...]:
        """Return this keyring's keys for a stream, or for a partition of one. Raises KeyringError without any."""
        base = check_address(name)[1].removesuffix(DEAD)
        for_cluster = self.runtime.keyring.for_cluster
        of, number = split_partition(base)
        keys = for_cluster(of if number else base)
        if number:  # an older stream may be named like a partition, and have keys of its own
            own = for_cluster(base)
            keys = own + keys if base in self.runtime.keyring.entries() else keys + own
            keys = tuple(dict.fromkeys(keys))
        if not keys:
            raise KeyringError(
                f"the keyring has no key for stream {name!r} and no default key; run `iris key add {of}`"
            )
        return keys

    async def find(self, name: str, uuid: str, *, timeout: float) -> StreamLocation:
        """Return the location of a stream; `uuid` is in hex, or "" if there is only one of its name.

        Raises:
            NoStream: no store holds it.
            AmbiguousStream: several stores hold one of this name.
        """
        location = self._locations.get((name, uuid))
        if (
            location is None
            or location.until_s < time.monotonic()
            or self.runtime.keyring.by_id(location.key.key_id) is None  # the key was retired
        ):
            until_s, asked_uuid = time.monotonic() + timeout, uuid
            uuid = check_uuid(uuid)
            keys = {key.key_id: key for key in self.keys(name)}
            site = split_site(name)[0]
            uuid, holders = await self._look_up(name, uuid, list(keys), timeout)
            others = sorted({holder.uuid for holder in holders} - {uuid}) if uuid else []
            if uuid and uuid in (named := {holder.uuid for holder in holders}) and others:
                await self._meet(name, sorted(named), next(iter(keys.values())), until_s)
            if uuid:
                holders = [holder for holder in holders if holder.uuid == uuid]
            uuids = sorted({holder.uuid for holder in holders})
            if len(uuids) > 1:
                uuids = await self._meet(name, uuids, next(iter(keys.values())), until_s)
            if len(uuids) > 1:
                raise AmbiguousStream(
                    name,
                    f"{len(uuids)} stores hold a stream of this name; choose uuid={' or uuid='.join(uuids)}",
                )
            if uuids:
                key = next(
                    (key for key_id, key in keys.items() if key_id in holders[0].key_ids),
                    next(iter(keys.values())),
                )
                location = StreamLocation(
                    bytes.fromhex(uuids[0]), key, time.monotonic() + LOCATION_S
                )
            else:  # perhaps not advertised yet: the relay knows how long to wait for a returning store
                key = next(iter(keys.values()))
                address = f"{site}:{uuid}" if site and uuid else uuid or name
                left_s = seconds_left(until_s)
                of, number = split_partition(name.removesuffix(DEAD))
                if asked_uuid and number and not site:  # a partition is not served by its name
                    now = await self._partition(of, number, name, min(left_s, LOOK_S))
                    others = [now] if now not in ("", uuid) else []
                if others and not await self.holders.find(uuid, list(keys), timeout=left_s):
                    await self._check_replaced(name, uuid, others, key, until_s)
                try:
                    found = await self.ask(
                        address, key, Describe(), Described, timeout=left_s, shown=name
                    )
                except (NoStream, RequestTimeout) as err:
                    if not others:
                        raise
                    # It was deleted and created again.
                    missing = NoStream(
                        name,
                        f"no store holds its log {uuid}; the stream of this name is log {' or '.join(others)} now",
                    )
                    missing.passing = True
                    raise missing from err
                location = StreamLocation(found.uuid, key, time.monotonic() + LOCATION_S, site)
            self.holders.found()
            if len(self._locations) >= MAX_LOCATIONS or len(self._seen) >= MAX_LOCATIONS:
                self._locations.clear()
                self._seen.clear()
            self._locations[name, asked_uuid] = location
            # A reader looks it up by name, and from then on by uuid: it is the same stream.
            self._seen |= {(name, asked_uuid), (name, location.uuid.hex())}
        return location

    async def _meet(
        self, name: str, uuids: list[str], key: ClusterKey, until_s: float
    ) -> list[str]:
        """Return the uuids of those of several streams of a name that are in use. If one of them was promoted in the
        place of another, whose store was gone, show that store the order: it then keeps the old one to be read.
        """
        left = dict.fromkeys(uuids)
        for uuid in uuids:
            # A store that does not answer, or refuses, leaves two streams of the name, as the caller then says.
            with contextlib.suppress(StreamError):
                stream = await self._described(name, uuid, key, until_s)
                definition = stream.order.definition
                replaced = definition.replaces
                if not definition.mirror and replaced is not None and replaced.uuid.hex() in left:
                    await self.ask(
                        replaced.uuid.hex(), key, Supersede(stream.described.orders), Described,
                        timeout=seconds_left(until_s), shown=name, writes=True,
                    )  # fmt: skip
                    del left[replaced.uuid.hex()]
        return list(left)

    async def _check_replaced(
        self, name: str, uuid: str, others: list[str], key: ClusterKey, until_s: float
    ) -> None:
        """Raise StreamSuperseded if one of the logs `others`, which have the name now, took the place of log `uuid`."""
        for other in others:
            stream = await self._described(name, other, key, until_s)
            replaced = stream.order.definition.replaces
            if replaced is not None and replaced.uuid.hex() == uuid:
                raise StreamSuperseded(
                    name, superseded_text(replaced.uuid, stream.order.uuid, replaced.next)
                )

    async def _described(
        self, name: str, uuid: str, key: ClusterKey, until_s: float
    ) -> VerifiedStream:
        described = await self.ask(
            uuid, key, Describe(), Described, timeout=seconds_left(until_s), shown=name
        )
        return self.verified(name, described)

    async def _look_up(
        self, name: str, uuid: str, key_ids: list[bytes], timeout: float
    ) -> tuple[str, list[Holder]]:
        """Return the uuid of a partition (of another stream `uuid`), and the stores that the relay knows to hold it."""
        until_s = time.monotonic() + timeout
        of, number = split_partition(name.removesuffix(DEAD))
        local = not split_site(name)[0]  # the local relay knows only the stores of its own site
        holders: list[Holder] = []
        if local and not (number and uuid):
            holders = await self.holders.find(name, key_ids, timeout=timeout)
        if number and not holders:
            if not uuid:
                uuid = await self._partition(of, number, name, seconds_left(until_s))
            if uuid and local:  # a partition is served by its uuid alone
                holders = await self.holders.find(uuid, key_ids, timeout=seconds_left(until_s))
        return uuid, holders

    async def _partition(self, of: str, number: int, name: str, timeout: float) -> str:
        """Return the uuid of a partition, or of its dead letters; "" if the stream has no such partition."""
        try:
            definition = (await self.describe(of, "", timeout=timeout)).order.definition
        except (StreamError, KeyringError):
            return ""
        if number > len(definition.partitions):
            return ""
        uuid = definition.partitions[number - 1]
        return (dead_uuid(uuid) if name.endswith(DEAD) else uuid).hex()

    async def locate(self, name: str, uuid: str, *, timeout: float) -> StreamLocation:
        """Return the location of a stream; retry while its store is away. Raises as `retry`."""

        async def once(left_s: float) -> StreamLocation:
            return await self.find(name, uuid, timeout=left_s)

        return await self.retry(name, uuid, once, timeout=timeout)

    async def key_hash_source(
        self, name: str, uuid: str, *, timeout: float
    ) -> tuple[ClusterKey, bytes]:
        """Return the (key, uuid) that the stream's key hashes are made with. Raises as `describe`."""
        until_s = deadline(timeout)
        location = await self.locate(name, uuid, timeout=timeout)
        of = self._key_uuids.get(location.uuid)
        if of is None:
            stream = await self.describe(name, location.uuid.hex(), timeout=seconds_left(until_s))
            of = stream.order.definition.key_uuid(stream.order.uuid)
            if len(self._key_uuids) >= MAX_LOCATIONS:
                self._key_uuids.clear()
            self._key_uuids[location.uuid] = of
        return location.key, of

    async def id_hash_source(
        self, name: str, uuid: str, *, timeout: float
    ) -> tuple[ClusterKey, bytes]:
        """Return the (key, uuid) for hashes of message ids.

        Raises StreamError without a dedup window, and as `describe`.
        """
        until_s = deadline(timeout)
        location = await self.locate(name, uuid, timeout=timeout)
        if location.uuid not in self._dedup_logs:
            stream = await self.describe(name, location.uuid.hex(), timeout=seconds_left(until_s))
            if not stream.order.definition.dedup_window_us:
                raise StreamError(
                    name,
                    f"it does not remember message ids; set its dedup_window (`iris stream change {name} --dedup-window 1d`)",
                )
            if len(self._dedup_logs) >= MAX_LOCATIONS:
                self._dedup_logs.clear()
            self._dedup_logs.add(location.uuid)
        return await self.key_hash_source(name, uuid, timeout=seconds_left(until_s))

    def forget(self, name: str, uuid: str = "") -> None:
        """Drop the cached location, so that the next call looks the stream up again."""
        self._locations.pop((name, uuid), None)

    def keys_changed(self) -> None:
        """Drop everything cached from the old keyring: the locations, and the keys that openers hold."""
        self._locations.clear()
        for opener in self.openers:
            opener.forget_keys()

    def expect(self, name: str, uuid: str) -> None:
        """Note that a log exists, so that a call to it waits while its store is away."""
        if len(self._seen) >= MAX_LOCATIONS:
            self._seen.clear()
        self._seen.add((name, uuid))

    def note_created(self, name: str) -> None:
        """Note that a stream was created, even if the local relay does not know it yet."""
        self.forget(name)
        self._seen.add((name, ""))

    def forget_deleted(self, name: str, uuid: str) -> None:
        """Forget a deleted stream, which will not come back."""
        for which in ((name, ""), (name, uuid)):
            self._locations.pop(which, None)
            self._seen.discard(which)

    async def find_store(
        self, name: str, *, timeout: float, bucket: bool = False, besides: bytes = b""
    ) -> StoreInfo:
        """Return a store for the new stream `name`, preferably the local relay's own; with `bucket`, one that has
        a bucket; and not the one with the public key `besides`, if there is another.

        Raises StreamUnavailable.
        """

        async def once(left_s: float) -> StoreInfo:
            found = await self.ask(STORES, None, FindStore(), StoreInfo, timeout=left_s, shown=name)
            if (found.group or not bucket) and found.key != besides:
                return found
            for address in sorted({one.uuid for one in await self.holders.every(timeout=left_s)}):  # fmt: skip
                other = await self.ask(address, None, FindStore(), StoreInfo, timeout=left_s, shown=name)  # fmt: skip
                if (other.group or not bucket) and other.key != besides:
                    return other
                if bucket and other.group:
                    found = other
            return found

        try:
            found = await self.retry(STORES, "", once, timeout=timeout)
        except NoStream as err:
            why = err.detail.partition("; ")[2] or START_HINT
            raise StreamUnavailable(name, f"the network has no store; {why}") from err
        except StreamUnavailable as err:  # `retry` does not know for which stream a store is sought
            raise StreamUnavailable(
                name, f"no store answered: {err.detail}", may_have_run=err.may_have_run
            ) from err
        if bucket and not found.group:
            raise StreamUnavailable(
                name,
                "no store can write to a bucket now; start one with `iris relay --data DIR --bucket URL`, "
                "or look into the log of a store that has one",
            )
        return found
