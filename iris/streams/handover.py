"""Lets a copy of a stream take its place: such as a copy in a bucket that of a stream on a disk.

    announce ─► copy ─► stop the stream ─► copy the rest ─► carry its state ─► supersede it ─► promote the copy

Each step can be repeated, and the streams say which ones were done, so a handover that was killed is made again from
the beginning. Nothing is written to the stream once it was stopped, and nothing to the copy before the stream is
superseded. So at no time do both accept messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from msgspec import structs

from iris.deadlines import seconds_left
from iris.errors import NoStream, RequestError, StreamError, StreamExists, StreamUnavailable
from iris.streams.answers import RevisionTaken
from iris.streams.copying import copy_of_partitions
from iris.streams.definitions import (
    CHANGE_TRIES,
    keys_of,
    redefine,
)
from iris.streams.listing import StreamInfo, stream_info
from iris.streams.mirroring import Mirror
from iris.streams.moving import LOOK_S
from iris.streams.partitions import Layout, layout_of
from iris.streams.signed_orders import orders_to_change
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.names import split_site
from iris.wire.orders import ANY_REVISION, DEAD, Definition, Replaced, partition_name
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import (
    Carry,
    Change,
    Copied,
    Copy,
    Described,
    Fetch,
    Fetched,
    FetchState,
    StateRow,
    StateRows,
    Supersede,
)

CLOSE: Final = 10_000
"""The stream is stopped when the copy lacks at most this many messages."""
PASSES: Final = 8
"""Most times that it is copied before that, if producers are faster."""
FETCH_BYTES: Final = 512 << 10
LOST_S: Final = 5.0
"""Seconds for which a stream that is said to be lost is looked for."""


async def hand_over(
    stores: Stores, name: str, to: str, durability: str, uuid: str, patience: float
) -> StreamInfo:
    """Let the copy `to` take the place of a stream; return it under its new name. Raises StreamError."""
    copy = await _known_copy(stores, name, to, uuid, patience)
    found = await stores.describe(
        name, uuid or (copy.order.definition.mirror if copy else ""), timeout=patience
    )
    replaced = found.order.definition.replaces
    if copy is None and replaced is not None and replaced.copy == to:
        return stream_info(found)  # it was done before
    if found.order.definition.mirror or found.order.definition.parent:
        raise StreamError(name, "it is a copy or a partition itself; hand over its source, or the whole stream")  # fmt: skip
    logs = layout_of(stores, name, found)
    if copy is None and len(logs) > 1:
        copy = await copy_of_partitions(stores, to, logs, patience, bucket=durability == "bucket")
    copies = None if copy is None else layout_of(stores, to, copy)
    if copies is not None and len(copies) != len(logs):
        raise StreamError(name, f"it has {len(logs)} partitions, and {to} has {len(copies)}; delete that copy, or use another")  # fmt: skip
    parts = [
        _Handover(
            stores, *logs.log(number), partition_name(to, number), durability, patience, part=len(logs) > 1,
            copy="" if copies is None else copies.uuids[number],
        )
        for number in range(len(logs))
    ]  # fmt: skip
    left = [part for part in parts if not await part.superseded()]
    await gathered(part.copy() for part in left)
    await gathered(part.stop() for part in left)
    await gathered(part.copy_rest() for part in left)
    await gathered(part.carry() for part in left)
    # Programs find the partitions by partition 0, so it comes last.
    await gathered(part.promote() for part in parts[1:])
    await parts[0].promote()
    stores.forget_deleted(to, parts[0].copied_to)
    return await found_by_name(stores, name, parts[0].copied_to, patience)


async def gathered(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run these side by side; if one fails, stop the others and raise its error."""
    tasks = [asyncio.create_task(one, name="iris-handover") for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _known_copy(
    stores: Stores, name: str, to: str, uuid: str, patience: float
) -> VerifiedStream | None:
    """Return the copy if there is one. If the stream was stopped for it, wait until its store is back."""
    try:
        return await stores.describe(to, "", timeout=patience)
    except NoStream:
        successor = (await stores.describe(name, uuid, timeout=patience)).order.definition.successor
        if not successor:
            return None
    stores.expect(to, successor.hex())
    try:
        return await stores.describe(to, successor.hex(), timeout=patience)
    except NoStream as err:
        if err.passing:
            raise
        raise _other_successor(name, successor) from err  # it has another name


def _other_successor(name: str, successor: bytes) -> StreamError:
    return StreamError(
        name,
        f"it is being handed over to log {successor.hex()}; complete that, or give it up with `iris stream resume {name}`",
    )


class _Handover:
    """The handover of one log, called `name`, to its copy. With `part`, both are partitions of streams."""

    def __init__(
        self, stores: Stores, name: str, uuid: str, to: str, durability: str, patience: float, *, part: bool, copy: str
    ) -> None:  # fmt: skip
        """`copy` is the uuid of the copy; empty if it is to be created."""
        self._stores = stores
        self._name = name
        self._to = to
        self._durability = durability
        self._uuid = bytes.fromhex(uuid)
        self._patience = patience
        self._part = part
        self.copied_to = copy
        """The uuid of the copy, in hex; empty until it is known."""

    async def superseded(self) -> bool:
        """Return whether its state was carried before, so that it must only be promoted."""
        over = (await self._old()).described.superseded
        return over is not None and over.uuid.hex() == self.copied_to

    # -- the messages ----------------------------------------------------------------------------------------

    async def copy(self) -> None:
        """Announce the handover to the copy, and copy most messages."""
        for number in range(PASSES):
            async with self._mirror() as mirror:
                if not number:
                    await self._announce()
                await mirror.run()
                if mirror.copied <= CLOSE:
                    break

    async def copy_rest(self) -> None:
        """Copy what is left when the stream was stopped."""
        async with self._mirror() as mirror:
            await mirror.run()
            if self._part:
                await mirror._show_all()
        old, copy = await self._old(), await self._copy()
        if old.described.next != copy.described.next:
            raise StreamError(
                self._name,
                f"it ends at offset {old.described.next}, and its copy {self._to} at {copy.described.next}; hand it over again",
            )

    def _mirror(self) -> Mirror:
        return Mirror(
            self._stores, self._name, self._to, follow=False, limits={}, uuid=self._uuid.hex(),
            patience=self._patience, durability=self._durability, part=self._part,
        )  # fmt: skip

    async def _announce(self) -> None:
        """Let the copy wait for the state of the stream, instead of having consumers of its own."""
        self.copied_to = (await self._copy()).order.uuid.hex()
        old = (await self._old()).order.definition
        fields = {"replaces": Replaced(self._uuid), "dedup_window_us": old.dedup_window_us}

        def announced(definition: Definition) -> Definition | None:
            wanted = structs.replace(definition, **fields)
            return None if wanted == definition else wanted

        await redefine(self._stores, self._to, self.copied_to, announced, self._patience)

    async def stop(self) -> None:
        """Stop the stream: what is appended to it waits."""
        successor = bytes.fromhex(self.copied_to)

        def stopped(definition: Definition) -> Definition | None:
            if definition.successor == successor:
                return None
            if definition.successor:
                raise _other_successor(self._name, definition.successor)
            return structs.replace(definition, successor=successor)

        await redefine(self._stores, self._name, self._uuid.hex(), stopped, self._patience)

    # -- its state -------------------------------------------------------------------------------------------

    async def carry(self) -> None:
        """Give the copy what the stream has besides messages."""
        while not (letters := await self._carry_rows()):
            pass  # the store of the copy has started again meanwhile
        await self._carry_letters(letters - 1)

    async def _carry_rows(self) -> int:
        """Carry all rows; return where the dead letters end, plus 1. Return 0 if it must be done again."""
        after, first = b"", True
        while True:
            found = await self._stores.ask_stream(
                self._name, self._uuid.hex(), FetchState(after), StateRows, timeout=self._patience
            )
            rows: list[StateRow] = found.rows
            after = rows[-1].key if rows else after
            if not (await self._carried(Carry(self._uuid, rows, first, not found.more))).taken:
                return 0
            first = False
            if not found.more:
                return found.letters + 1

    async def _carry_letters(self, end: int) -> None:
        name, uuid = self._name + DEAD, dead_uuid(self._uuid).hex()
        self._stores.expect(name, uuid)
        limit = min(FETCH_BYTES, self._stores.runtime.message_limit)
        at = 0
        while at < end:
            got = await self._stores.ask_stream(
                name, uuid, Fetch(at, limit), Fetched, timeout=self._patience
            )
            call = Carry(self._uuid, letters=got.items, start=at, next=got.next)
            at = (await self._carried(call)).next

    async def _carried(self, call: Carry) -> Copied:
        return await self._stores.ask_stream(
            self._to, self.copied_to, call, Copied, timeout=self._patience, writes=True
        )

    # -- its name --------------------------------------------------------------------------------------------

    async def promote(self) -> None:
        """Supersede the stream, and give its name to the copy."""
        for _ in range(CHANGE_TRIES):
            if await self._promoted_before():
                return
            old, copy = await self._old(), await self._copy()
            definition = self._promoted(old, copy)
            keys = keys_of(self._stores, definition)
            orders = orders_to_change(definition, keys, copy, self._stores.runtime.keyring)
            uuid = copy.order.uuid.hex()
            if old.described.superseded is None:
                if old.order.definition.successor != copy.order.uuid:
                    raise StreamError(self._name, f"it was resumed, so {self._to} does not take its place; hand it over again")  # fmt: skip
                try:
                    await self._change(self._name, self._uuid.hex(), Supersede(orders))
                except RevisionTaken:
                    continue
            try:
                await self._change(self._to, uuid, Change(orders))
            except RevisionTaken:
                continue
            return
        raise StreamError(self._name, f"others changed it during each of {CHANGE_TRIES} attempts; try again")  # fmt: skip

    async def _promoted_before(self) -> bool:
        """Return whether the copy has the name already."""
        try:
            await self._copy()
        except NoStream as err:
            if err.passing:
                raise
            log = await self._stores.describe(self._name, self.copied_to, timeout=self._patience)
            return not log.order.definition.mirror
        return False

    def _promoted(self, old: VerifiedStream, copy: VerifiedStream) -> Definition:
        had, is_now = old.order.definition, copy.order.definition
        end = copy.described.next
        replaces = Replaced(self._uuid, old.revision + 1, end, is_now.name)
        return structs.replace(
            is_now, name=had.name, mirror="", topic=had.topic, cluster=had.cluster, replaces=replaces, max_bytes=had.max_bytes,
            max_messages=had.max_messages, max_age_us=had.max_age_us, compact=had.compact, paused=had.paused,
            consuming_paused=had.consuming_paused, dedup_window_us=had.dedup_window_us,
        )  # fmt: skip

    async def _change(self, name: str, uuid: str, call: Change | Supersede) -> None:
        await self._stores.ask_stream(
            name, uuid, call, Described, timeout=self._patience, writes=True
        )

    async def _old(self) -> VerifiedStream:
        return await self._stores.describe(self._name, self._uuid.hex(), timeout=self._patience)

    async def _copy(self) -> VerifiedStream:
        return await self._stores.describe(self._to, self.copied_to, timeout=self._patience)


async def take_place(
    stores: Stores, name: str, place: str, record: bool, force: bool, uuid: str, timeout: float
) -> StreamInfo:  # fmt: skip
    """Promote a copy under the name of its source, `place`, whose store is lost. Raises StreamError."""
    until_s = time.monotonic() + timeout
    base = split_site(place)[1]
    try:
        copy = await stores.describe(name, uuid, timeout=timeout)
    except NoStream:
        with contextlib.suppress(NoStream):
            found = await stores.describe(base, "", timeout=seconds_left(until_s))
            if (done := found.order.definition.replaces) is not None and done.copy == name:
                return stream_info(found)  # it was done before
        raise
    if not copy.order.definition.mirror:
        raise StreamError(name, "it is not a copy of another stream, so it cannot take the place of one")  # fmt: skip
    source = copy.order.definition.origins[-1]
    if source.name != base:
        raise StreamError(name, f"it is a copy of {source.name!r}, and can take the place of no other stream than that")  # fmt: skip
    logs, cut = layout_of(stores, name, copy), copy.described.cut
    for number in range(len(logs)):
        part = await _part(stores, name, logs, number, base, until_s)
        if part is not None:
            await _check_lost(stores, name, partition_name(place, number), part, force)
    await _check_free(stores, base, {source.uuid, copy.order.uuid}, until_s)
    # Programs find the partitions by partition 0, so it comes last.
    for number in [*range(1, len(logs)), 0]:
        part = await _part(stores, name, logs, number, base, until_s)
        if part is not None:
            shown = cut[number] if cut else None
            await _take(stores, part, partition_name(base, number), record, shown, until_s, timeout)
    stores.forget_deleted(name, logs.uuids[0])
    return await found_by_name(stores, base, logs.uuids[0], seconds_left(until_s))


async def _part(
    stores: Stores, name: str, logs: Layout, number: int, base: str, until_s: float
) -> VerifiedStream | None:
    """Return a partition of a copy; None if it has its source's name already."""
    _, uuid = logs.log(number)
    try:
        return await stores.describe(
            partition_name(name, number), uuid, timeout=seconds_left(until_s)
        )
    except NoStream as err:
        if err.passing:
            raise
        await stores.describe(partition_name(base, number), uuid, timeout=seconds_left(until_s))
        return None


async def _take(
    stores: Stores, copy: VerifiedStream, base: str, record: bool, shown: int | None, until_s: float, asked: float
) -> None:  # fmt: skip
    """Promote one log under the name of its source. `shown`: what its partition 0 says may be shown of it."""
    name, log = copy.order.definition.name, copy.order.uuid.hex()
    source = copy.order.definition.origins[-1]
    topic, cluster = (source.topic, source.cluster) if record else ("", "")
    for _ in range(CHANGE_TRIES):
        end = copy.described.next
        call = Copy(source.uuid, 0, 0, [], copy.described.source_next, shown)
        if shown is not None:
            await stores.ask_stream(
                name, log, call, Copied, timeout=seconds_left(until_s), writes=True
            )
            end = shown
        replaces = Replaced(source.uuid, ANY_REVISION, end, name)
        definition = structs.replace(
            copy.order.definition,
            name=base,
            mirror="",
            topic=topic,
            cluster=cluster,
            replaces=replaces,
        )
        orders = orders_to_change(
            definition, keys_of(stores, definition), copy, stores.runtime.keyring
        )
        try:
            await stores.ask_stream(
                name, log, Change(orders), Described, timeout=seconds_left(until_s), asked=asked, writes=True
            )  # fmt: skip
            return
        except RevisionTaken:  # or it was copied to meanwhile
            copy = await stores.describe(name, log, timeout=seconds_left(until_s), asked=asked)
    raise StreamError(name, f"others changed it during each of {CHANGE_TRIES} attempts; try again")


async def _check_lost(
    stores: Stores, name: str, place: str, copy: VerifiedStream, force: bool
) -> None:
    """Raise StreamError if the source of a copy answers, or if nobody has confirmed that it is lost."""
    uuid = copy.order.definition.mirror
    stores.expect(place, uuid)  # so that it may be away for a moment
    try:
        old = await stores.describe(place, uuid, timeout=LOST_S)
    except (NoStream, StreamUnavailable, RequestError) as err:
        if force:
            return
        raise StreamError(
            place,
            f"no store that answers has its log {uuid}. If its store can come back, wait for it. If it is lost for good, "
            f"use force (`iris stream promote {name} --as {place} --force`): messages that the copy lacks are lost then",
        ) from err
    over = old.described.superseded
    if over is None:
        raise StreamError(
            place,
            f"the store on {old.described.label} has it and answers, so {name} does not take its place; use "
            "`iris stream handover`, or stop that store first if its disk is lost",
        )
    if over.uuid != copy.order.uuid:
        raise StreamError(place, f"log {over.uuid.hex()} has taken its place already")


async def _check_free(stores: Stores, name: str, those: set[bytes], until_s: float) -> None:
    """Raise StreamExists if this site has another stream of this name than `those`."""
    keys = [key.key_id for key in stores.keys(name)]
    for holder in await stores.holders.find(name, keys, timeout=seconds_left(until_s)):
        if bytes.fromhex(holder.uuid) not in those:
            raise StreamExists(name, f"this site has another stream of this name, as log {holder.uuid}; delete it first")  # fmt: skip


async def found_by_name(stores: Stores, name: str, uuid: str, timeout: float) -> StreamInfo:
    """Return a stream as soon as the relay finds this log by the name. Raises StreamError."""
    until_s = time.monotonic() + timeout
    while True:
        stores.forget(name)
        try:
            found = await stores.describe(name, "", timeout=max(0.05, until_s - time.monotonic()))
        except NoStream:
            found = None
        if found is not None and found.order.uuid.hex() == uuid:
            return stream_info(found)
        if time.monotonic() >= until_s:
            raise StreamUnavailable(name, f"log {uuid} has this name now, but the relay does not know that yet; try again")  # fmt: skip
        await asyncio.sleep(LOOK_S)
