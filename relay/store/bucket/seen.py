"""What this store has seen of its bucket, so that it notices a bucket that was rolled back.

The owner of a bucket, or whoever restores it from an older copy, can remove the newest objects. Nothing in the bucket
shows that. So each store keeps, beside its logs, the last registration that it has read and the last object of each
journal that it wrote or took, by number and hash. Before it takes over anything it looks whether they are still there.
What a checkpoint covers may be gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from iris.errors import ConfigError
from relay.store.bucket.history import (
    Beginning,
    End,
    Registration,
    beginning_of,
    end_of,
    registrations,
)
from relay.store.bucket.objects import AT_ONCE, Objects, each_of
from relay.store.bucket.sealing import (
    Checkpoint,
    ObjectDamaged,
    Sealer,
    checkpoint_key,
    hash_of,
    journal_key,
    registration_key,
)
from relay.store.bucket.whole import fetch
from relay.store.bucket.writer import Flying, Writer
from relay.store.errors import LogError
from relay.store.files import read_small, write_beside

log = logging.getLogger(__name__)

SEEN_FILE: Final = "seen.json"
"""File beside the logs with what was seen."""
MAX_JOURNALS: Final = 16
"""Journals that are remembered: the newest. Each costs some requests at a start."""
SAVE_S: Final = 1.0
"""A killed store may have forgotten what it has seen since."""


class RolledBack(ObjectDamaged):
    """The bucket has less than this store has seen there."""


class _Last(Struct):
    """The last object of a journal that was seen."""

    registered: int
    """Number of the journal's registration."""
    number: int
    digest: str


class Seen:
    """What one store has seen of its bucket."""

    def __init__(self, objects: Objects, sealer: Sealer, directory: Path) -> None:
        self._objects = objects
        self._sealer = sealer
        self._directory = directory
        self._path = directory / SEEN_FILE
        self._registered: tuple[int, str] | None = None
        self._journals: dict[str, _Last] = {}
        self._own: dict[str, _Own] = {}
        self._loaded = False
        self._changed = False
        self._verified = False

    # -- noting ----------------------------------------------------------------------------------------------

    def note_registered(self, found: Sequence[Registration]) -> None:
        """Note registrations that were read."""
        for one in found:
            if self._registered is None or one.number > self._registered[0]:
                self._registered, self._changed = (one.number, one.hash.hex()), True

    def note_begun(self, mine: Registration) -> None:
        """Note a journal that this store is about to write."""
        self.note_registered([mine])
        self._own[mine.registered.journal] = _Own(mine.number)

    def note_landed(self, writer: Writer, flying: Flying) -> None:
        """Note an object of our own, which is in the bucket."""
        own = self._own.get(writer.journal)
        if own is None:
            return  # another journal of ours has taken this one
        own.landed[flying.number] = flying.sealed
        for number in [one for one in own.landed if one <= writer.known]:
            sealed = own.landed.pop(number)
            if number >= own.number:
                own.number, own.sealed, self._changed = number, sealed, True

    def note_end(self, journal: Registration, end: End) -> None:
        """Note the end of a journal that was taken."""
        name = journal.registered.journal
        self._own.pop(name, None)
        self._remember(name, _Last(journal.number, end.number, end.hash.hex()))

    def _remember(self, name: str, last: _Last) -> None:
        self._journals[name] = last
        while len(self._journals) > MAX_JOURNALS:
            del self._journals[min(self._journals, key=lambda one: self._journals[one].registered)]
        self._changed = True

    # -- verifying -------------------------------------------------------------------------------------------

    async def verify(self, victims: Collection[str]) -> None:
        """Return if the bucket has all that was seen: at the first call of everything, later of `victims`.

        Raises RolledBack, BucketError, ObjectDamaged, ConfigError.
        """
        self._load()
        if self._registered is not None:
            number, digest = self._registered
            sealed = await fetch(self._objects, self._sealer, registration_key(number))
            if sealed is None or hash_of(sealed).hex() != digest:
                there = len(await registrations(self._objects, self._sealer))
                raise self._rolled_back(
                    f"it had {number} journals and now has {there}"
                    if there < number
                    else f"its journal {number} is not the one that was there before"
                )
        names = [
            name for name in self._journals if name in victims or not self._verified
        ]  # fmt: skip
        if names:
            known = await registrations(self._objects, self._sealer)
            by_name = {one.registered.journal: one for one in known}
            for name in names:
                if name not in by_name:
                    raise self._rolled_back(f"journal {name} is missing")
                await self._verify(by_name[name], known)
        self._verified = True

    async def _verify(self, journal: Registration, known: list[Registration]) -> None:
        name = journal.registered.journal
        seen = self._journals.get(name)
        if seen is None:
            return  # somebody else, who verifies at the same time, has found it covered
        if (await beginning_of(self._objects, self._sealer, journal)).number > seen.number:
            return  # its own checkpoint covers it
        end = await end_of(self._objects, self._sealer, journal)
        digest = end.hash.hex() if end.number == seen.number else ""
        if end.number > seen.number:
            sealed = await fetch(self._objects, self._sealer, journal_key(name, seen.number))
            digest = "" if sealed is None else hash_of(sealed).hex()
        if digest == seen.digest:
            return
        if await self._is_covered(name, seen.number, known[journal.number :]):
            self._journals.pop(name, None)
            self._changed = True
            return
        raise self._rolled_back(
            f"journal {name} had {seen.number} objects and now has {end.number}"
            if end.number < seen.number
            else f"object {seen.number} of journal {name} is not the one that was there before"
        )

    async def _is_covered(self, name: str, number: int, later: list[Registration]) -> bool:
        """Return whether a checkpoint of a journal that took it covers object `number`."""
        for at in range(0, len(later), AT_ONCE):
            some = later[at : at + AT_ONCE]
            beginnings = await each_of(some, self._beginning_of)
            for one, beginning in zip(some, beginnings, strict=True):
                for count in range(1, beginning.checkpoints + 1):
                    key = checkpoint_key(one.registered.journal, count)
                    sealed = await fetch(self._objects, self._sealer, key)
                    content = None if sealed is None else self._sealer.open(key, sealed)
                    if isinstance(content, Checkpoint) and any(
                        each.journal == name and each.end >= number for each in content.covers
                    ):
                        return True
        return False

    async def _beginning_of(self, journal: Registration) -> Beginning:
        return await beginning_of(self._objects, self._sealer, journal)

    def _rolled_back(self, what: str) -> RolledBack:
        return RolledBack(
            f"bucket {self._objects.url}: {what}. Objects were deleted or hidden, or the bucket was restored from an older copy; "
            f"bring the newer objects back. If they are lost, stop all stores of the bucket, delete {self._directory} on "
            "each host, and start them again: everything that was acknowledged after that copy was made is lost then"
        )

    # -- the file --------------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._loaded:
            return
        try:
            state = json.loads(read_small(self._path))
            if state["registered"] is not None:
                number, digest = state["registered"]
                self._registered = int(number), str(digest)
            self._journals = {
                str(name): _Last(int(registered), int(number), str(digest))
                for name, (registered, number, digest) in state["journals"].items()
            }
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            raise ConfigError(
                f"data: {self._path} is damaged: {err}; delete the file. Then the store cannot notice if the bucket "
                "was replaced with an older copy before this start"
            ) from err
        self._loaded = True

    def _dump(self) -> bytes:
        for name, own in self._own.items():
            if own.number:
                self._remember(name, _Last(own.registered, own.number, hash_of(own.sealed).hex()))
        self._changed = False
        journals = {
            name: (one.registered, one.number, one.digest) for name, one in self._journals.items()
        }
        return json.dumps({"registered": self._registered, "journals": journals}).encode()

    def save(self) -> None:
        """Write the file. Raises LogWriteFailed."""
        if self._changed:
            write_beside(str(self._path), self._dump())

    def save_or_warn(self) -> None:
        """Write the file. If that fails, log it; the next call tries again."""
        try:
            self.save()
        except LogError as err:
            self._changed = True
            fields = {"error": str(err)}
            log.warning("store.bucket_seen_not_written", extra={"fields": fields})

    async def keep(self) -> None:
        """Write the file again and again while something changes. Runs until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            self.save_or_warn()


class _Own:
    """A journal of ours that grows."""

    __slots__ = ("landed", "number", "registered", "sealed")

    def __init__(self, registered: int) -> None:
        self.registered = registered
        self.number = 0
        """The last object that is known to be there, like all before it."""
        self.sealed = b""
        self.landed: dict[int, bytes] = {}
        """Objects that are there, while some before them are not yet."""
