"""Reads journals: their objects in order, each checked against the hash that the next one names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from relay.store.bucket.objects import BucketError, Objects, each_of, patient
from relay.store.bucket.sealing import (
    WINDOW,
    Checkpoint,
    Content,
    Covered,
    Fence,
    Numbered,
    ObjectDamaged,
    Registered,
    Sealer,
    checkpoint_key,
    hash_of,
    journal_key,
    registration_key,
)
from relay.store.bucket.whole import fetch, fetch_all

AHEAD: Final = 8
"""Objects that are fetched at once."""
MOST_AHEAD: Final = 64
"""The same of a long list of small ones."""


class Registration:
    """A journal of the bucket, as its registration says."""

    __slots__ = ("hash", "number", "registered")

    def __init__(self, number: int, registered: Registered, digest: bytes) -> None:
        self.number = number
        """Journals are numbered in the order in which they began. A journal takes only earlier ones."""
        self.registered = registered
        self.hash = digest
        """Which the journal's first object names."""


async def registrations(objects: Objects, sealer: Sealer, start: int = 1) -> list[Registration]:
    """Return all journals of the bucket from number `start` on. Raises BucketError, ObjectDamaged."""
    found: list[Registration] = []
    number, ahead = start, AHEAD
    while True:
        keys = [registration_key(number + index) for index in range(ahead)]
        if number > start:
            objects, ahead = patient(objects), MOST_AHEAD
        for key, sealed in await fetch_all(objects, sealer, keys):
            if sealed is None:
                return found
            content = sealer.open(key, sealed)
            if not isinstance(content, Registered):
                raise ObjectDamaged(
                    f"object {key}: it is not the registration of a journal; restore it from a backup"
                )
            found.append(Registration(number, content, hash_of(sealed)))
            number += 1


class End:
    """The last object of a journal."""

    __slots__ = ("fence", "hash", "number")

    def __init__(self, number: int, digest: bytes, fence: Fence | None) -> None:
        self.number = number
        """0 if the journal has no object."""
        self.hash = digest
        self.fence = fence


class Beginning:
    """Where a journal is read from: its first object, or its last checkpoint."""

    __slots__ = ("before", "checkpoints", "covers", "number")

    def __init__(self, number: int, before: bytes, checkpoints: int, covers: list[Covered]) -> None:
        self.covers = covers
        """What the checkpoint covers; some of it may still be there."""
        self.number = number
        self.before = before
        """Hash of the object before `number`."""
        self.checkpoints = checkpoints
        """How many checkpoints the journal has."""


async def beginning_of(objects: Objects, sealer: Sealer, journal: Registration) -> Beginning:
    """Return where a journal is read from. Raises BucketError, ObjectDamaged."""
    name = journal.registered.journal
    count = await _last(objects, lambda number: checkpoint_key(name, number))
    if not count:
        return Beginning(1, journal.hash, 0, [])
    key = checkpoint_key(name, count)
    sealed = await fetch(objects, sealer, key)
    if sealed is None:
        raise BucketError(
            f"bucket {objects.url}: {key} existed a moment ago and is gone; another store may have deleted it"
        )
    content = sealer.open(key, sealed)
    if not isinstance(content, Checkpoint):
        raise ObjectDamaged(f"object {key}: it is not a checkpoint; restore it from a backup")
    return Beginning(content.number, content.before, count, content.covers)


async def _last(objects: Objects, key: Callable[[int], str], start: int = 1) -> int:
    """Return the last number from `start` on that has an object; `start` - 1 if none has.

    It is searched, not listed. If there are holes, one number before a hole is returned. Raises BucketError.
    """
    there, step = start - 1, 1
    while await objects.exists(key(there + step)):
        there, step = there + step, 2 * step
    absent = there + step
    while absent - there > 1:
        middle = (there + absent) // 2
        if await objects.exists(key(middle)):
            there = middle
        else:
            absent = middle
    return there


async def end_of(objects: Objects, sealer: Sealer, journal: Registration) -> End:
    """Return the last object of a journal before the first number that is absent, or its fence.

    Behind the first number that is absent there may be a few objects, which a store that was killed or fenced had on
    their way (see `WINDOW`). They are ignored.
    Raises BucketError, ObjectDamaged.
    """
    name = journal.registered.journal
    beginning = await beginning_of(objects, sealer, journal)
    there = await _last(objects, lambda number: journal_key(name, number), beginning.number)
    first = max(beginning.number, there - WINDOW)
    if first > beginning.number and not await objects.exists(journal_key(name, first)):
        # What `_last` found stands behind a fence and another hole, so the end is further down.
        first = beginning.number
    end = End(beginning.number - 1, beginning.before, None)
    for number in range(first, there + 1):
        key = journal_key(name, number)
        sealed = await fetch(objects, sealer, key)
        if sealed is None:
            if number == first:
                raise BucketError(
                    f"bucket {objects.url}: {key} existed a moment ago and is gone; another store may have deleted it"
                )
            break
        content = sealer.open(key, sealed)
        end = End(number, hash_of(sealed), content if isinstance(content, Fence) else None)
        if end.fence is not None:
            break
    return end


async def that_hold(
    objects: Objects, sealer: Sealer, journals: Sequence[Registration]
) -> list[str]:
    """Return the ids of those that nobody has taken and that have objects. Raises BucketError, ObjectDamaged."""
    ends = await each_of(journals, lambda one: end_of(patient(objects), sealer, one))
    return [
        one.registered.journal
        for one, end in zip(journals, ends, strict=True)
        if end.fence is None and end.number
    ]


class Reader:
    """Reads one journal from its beginning on."""

    def __init__(
        self, objects: Objects, sealer: Sealer, journal: str, beginning: Beginning
    ) -> None:
        self.journal = journal
        self.number = beginning.number
        """The next number to read."""
        self.before = beginning.before
        """Hash of the object before `number`."""
        self.fence: Fence | None = None
        """The end of the journal, once it was read."""
        self._objects = objects
        self._sealer = sealer

    async def rest(self) -> AsyncIterator[tuple[int, Numbered]]:
        """Yield the objects from `number` on, up to the fence or the first number that is absent.

        Raises:
            BucketError: the bucket did not answer.
            ObjectDamaged: an object is not what was written, or one before it was taken away.
        """
        while self.fence is None:
            keys = [journal_key(self.journal, self.number + index) for index in range(AHEAD)]
            for key, sealed in await fetch_all(self._objects, self._sealer, keys):
                if sealed is None:
                    return
                content = self._open(key, sealed)
                if isinstance(content, Fence):
                    self.fence = content
                    return
                self.before = hash_of(sealed)
                self.number += 1
                yield self.number - 1, content

    def _open(self, key: str, sealed: bytes) -> Numbered | Fence:
        content: Content = self._sealer.open(key, sealed)
        if not isinstance(content, Numbered | Fence):
            raise ObjectDamaged(
                f"object {key}: it is not an object of a journal; restore it from a backup"
            )
        if content.before != self.before:
            raise ObjectDamaged(
                f"object {key}: it does not follow the object before it, so one of them was replaced; "
                "restore both from a backup"
            )
        return content
