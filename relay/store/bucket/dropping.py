"""Lists the copies of `disk` streams in a bucket, and deletes the copies of a store that is gone for good.

If that store runs after all, it notices that its journal has ended, and copies its streams once more. So only copies
can be lost.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from iris.crypto.keys import public_id
from iris.errors import ConfigError, DecodeError
from iris.wire.orders import decode_order
from relay.store.bucket.checkpointing import delete
from relay.store.bucket.copy_reading import Outline, Outlines
from relay.store.bucket.forced import ForcedList
from relay.store.bucket.history import Registration, beginning_of, registrations
from relay.store.bucket.joined import has_joined
from relay.store.bucket.objects import Objects, patient
from relay.store.bucket.sealing import COPIES, Covered, Sealer, checkpoint_key
from relay.store.bucket.succession import fence, steps

NOT_MOVED: Final = "it was not moved by force"


class CopiedStream(Struct):
    """A stream of which a journal has the copy."""

    name: str
    """Name of the stream; empty if its orders cannot be read."""
    uuid: str
    next: int
    """Where the copy ends."""
    needed: str
    """Why the copy is needed; empty if the stream has joined the bucket, or if another log has taken the place of this
    one, and that has a copy."""


class CopiesOf(Struct):
    """A journal of copies that nobody has taken."""

    journal: str
    store: str
    """Address of the store that wrote it."""
    label: str
    """Host of that store."""
    streams: list[CopiedStream]


class Dropping:
    """The journals of copies of one bucket. Call `read` first."""

    def __init__(self, objects: Objects, sealer: Sealer) -> None:
        self.found: list[CopiesOf] = []
        self._objects = patient(objects)
        self._sealer = sealer
        self._known: dict[str, Registration] = {}

    async def read(self) -> None:
        """Find out what there is. Raises BucketError, ObjectDamaged."""
        forced = ForcedList(self._objects, self._sealer)
        await forced.read()
        outlines = Outlines(self._objects, self._sealer, time.monotonic)
        await outlines.read(())
        every = await registrations(self._objects, self._sealer, folder=COPIES)
        self._known = {one.registered.journal: one for one in every}
        elsewhere = {each.uuid: name for name, its in outlines.by_journal.items() for each in its}
        self.found = []
        for name, its in outlines.by_journal.items():
            registered = self._known[name].registered
            streams = [each for each in its if not each.stored.parent]
            joined = {each.uuid for each in streams if await has_joined(self._objects, self._sealer, each.uuid)}  # fmt: skip
            copied = [_copied(name, each, forced, elsewhere, joined) for each in streams]
            address = public_id(registered.store).hex()
            self.found.append(CopiesOf(name, address, registered.label, copied))

    def named(self, journal: str) -> CopiesOf:
        """Return the journal whose id begins like this. Raises ConfigError."""
        found = [one for one in self.found if one.journal.startswith(journal)]
        if len(found) != 1:
            there = ", ".join(one.journal for one in found or self.found) or "none"
            raise ConfigError(f"journal: {journal!r} begins the ids of {len(found)} journals of copies; there are: {there}")  # fmt: skip
        return found[0]

    async def drop(self, journal: str) -> None:
        """End a journal, and delete what it has.

        Raises ConfigError if another journal has taken it meanwhile; BucketError; ObjectDamaged.
        """
        one, by = self._known[journal], secrets.token_hex(16)
        made, _ = await fence(self._objects, self._sealer, one, by, 0)
        if made.by != by:
            raise ConfigError(f"journal {journal} was taken by {made.by} a moment ago, so its store runs and keeps the copies itself")  # fmt: skip
        covers: list[Covered] = []
        async for _ in steps(self._objects, self._sealer, journal, self._known, covers):
            pass
        checkpoints = (await beginning_of(self._objects, self._sealer, one)).checkpoints
        # Without its first checkpoint the journal is empty for everybody who reads it.
        for number in range(1, checkpoints + 1):
            await self._objects.delete(checkpoint_key(journal, number))
        await delete(self._objects, covers)


def _copied(
    journal: str, outline: Outline, forced: ForcedList, elsewhere: Mapping[bytes, str], joined: Collection[bytes]
) -> CopiedStream:  # fmt: skip
    try:
        name = decode_order(outline.stored.orders[0].order).definition.name
    except (DecodeError, IndexError):
        name = ""
    needed, last = NOT_MOVED, forced.last_of(outline.uuid)
    if outline.uuid in joined:
        needed = ""
    elif last is not None:
        there = elsewhere.get(last.made, journal)
        made = f"it was moved by force, and is log {last.made.hex()} on {last.label}"
        needed = "" if there != journal else f"{made}, which has no other copy in the bucket"
    return CopiedStream(name, outline.uuid.hex(), outline.next, needed)
