"""Logs of `disk` streams that may be lost, and the copies in the bucket from which they can be restored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from iris.crypto.keys import public_id
from iris.wire.streams import LostStream
from relay.store.authority import Authority, Charter, DefinitionFile
from relay.store.bucket.copy_reading import Outline, Outlines
from relay.store.bucket.forced import ForcedList
from relay.store.bucket.joined import has_joined
from relay.store.bucket.objects import Objects
from relay.store.bucket.sealing import Sealer
from relay.store.errors import Refuse

log = logging.getLogger(__name__)


class Lost(Struct, frozen=True):
    """A log that may be lost, and the copy from which it is restored."""

    uuid: bytes
    stored: DefinitionFile
    store: bytes
    label: str
    source: Outline

    @property
    def charter(self) -> Charter:
        """Raises Refuse if its orders are not valid."""
        return Authority(self.store).load(self.stored, self.uuid)

    def check_whole(self) -> None:
        """Raise Refuse if its definition names other logs, or another one names it: they would not know the new one."""
        definition = self.charter.definition
        if definition.partitions or definition.parent:
            raise Refuse("invalid", f"stream {definition.name!r} has several partitions, which list each other by their uuids, so it cannot be restored from copies")  # fmt: skip


class LostLogs:
    """The logs of which one bucket has copies, for one store. Call `read` first, and again to see what is new."""

    def __init__(
        self, objects: Objects, sealer: Sealer, forced: ForcedList, store: bytes, has: Callable[[bytes], bool],
        now_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """`has` returns whether the store, whose public key is `store`, serves a log. `now_s` is never set."""
        self._objects = objects
        self._sealer = sealer
        self._forced = forced
        self._store = store
        self._has = has
        self._outlines = Outlines(objects, sealer, now_s)
        self._copies: dict[bytes, Outline] = {}

    async def read(self, key_ids: Collection[bytes] = ()) -> None:
        """Find out which copies there are, for somebody who has these keys. Raises BucketError, ObjectDamaged."""
        self._copies = await self._outlines.read(key_ids)
        await self._forced.read()  # afterwards, so it has every log that has a copy

    @property
    def copies(self) -> Iterable[Outline]:
        """The copies, also those of logs that were replaced by other logs."""
        return self._copies.values()

    async def has_joined(self, uuid: bytes) -> bool:
        """Return whether the bucket itself has a log, so its copy does not count. Raises BucketError, ObjectDamaged."""
        return await has_joined(self._objects, self._sealer, uuid)

    async def named(self, name: str, key_ids: Collection[bytes]) -> list[LostStream]:
        """Return the streams of this name, under one of these keys, of which there is a copy that counts.

        Raises BucketError, ObjectDamaged.
        """
        found = []
        for uuid in self._copies:  # nothing is awaited meanwhile: the list of forced moves may grow
            try:
                lost = self.head(uuid)
                charter = lost.charter if lost is not None else None
            except Refuse as err:
                log.warning("store.copy_refused", extra={"fields": {"uuid": uuid.hex(), "error": str(err)}})  # fmt: skip
                continue
            if lost is None or charter is None or charter.definition.name != name:
                continue
            if charter.orders.keys() & set(key_ids):
                orders = [signed for _, signed in charter.orders.values()]
                found.append(
                    LostStream(lost.uuid, orders, lost.store, lost.label, lost.source.next)
                )
        return [one for one in found if not await self.has_joined(one.uuid)]

    def head(self, uuid: bytes) -> Lost | None:
        """Return the log to restore from the copy of `uuid`; None if another copy is newer.

        Raises Refuse.
        """
        if self._copies[uuid].stored.parent:
            return None
        entry = self._forced.last_of(uuid)
        if entry is None:
            return self.of(uuid)
        if entry.made in self._copies:
            return None
        if entry.store == self._store and not self._has(entry.made):
            return self.of(entry.lost)  # to be completed
        return self.of(entry.made)

    def of(self, uuid: bytes) -> Lost:
        """Return a log and the newest copy of it, or of the logs that it replaced. Raises Refuse."""
        outline = self._copies.get(uuid)
        if outline is not None:
            return Lost(uuid, outline.stored, outline.store, outline.label, outline)
        entry = made = self._forced.made(uuid)
        while entry is not None and made is not None:
            if (outline := self._copies.get(entry.lost)) is not None:
                roots = [public_id(signed.public_key) for signed in made.orders]
                stored = DefinitionFile(made.orders, b"", roots, [], made.salt)
                return Lost(uuid, stored, made.store, made.label, outline)
            entry = self._forced.made(entry.lost)
        raise Refuse("no-stream", f"the bucket has no copy of log {uuid.hex()}")
