"""How a journal begins, and how it takes over another: intent, fence, and what stands below it.

A journal takes only journals that began before it. So the fences always lead to the newest one,
and two stores that believe each other gone cannot take each other's streams away.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from iris.errors import IrisError
from relay.store.bucket.history import (
    Beginning,
    End,
    Reader,
    Registration,
    beginning_of,
    end_of,
    registrations,
)
from relay.store.bucket.objects import BucketError, Objects
from relay.store.bucket.sealing import (
    Covered,
    Fence,
    Intent,
    Numbered,
    ObjectDamaged,
    Registered,
    Sealer,
    hash_of,
    journal_key,
    registration_key,
)
from relay.store.bucket.whole import holds

MAX_TRIES: Final = 1000


class Unfenced(IrisError):
    """Journals have no end, but a journal that was read intends to take them.

    Its store may still fence them, however late. They would then be a part of that journal, and so of its successor's,
    which has read it without them. So whoever takes a journal takes these journals, too.
    """

    def __init__(self, victims: list[str]) -> None:
        super().__init__(
            f"journals {', '.join(victims)} have to be taken, too, because a journal that was taken had begun to take them"
        )
        self.victims = victims


async def begin(
    objects: Objects, sealer: Sealer, store: bytes, label: str, now_us: int
) -> tuple[Registration, list[Registration]]:
    """Register a new journal; return it, and all journals that began before it.

    Raises BucketError, ObjectDamaged.
    """
    registered = Registered(secrets.token_hex(16), store, label, now_us)
    earlier = await registrations(objects, sealer)
    for _ in range(MAX_TRIES):
        number = len(earlier) + 1
        key = registration_key(number)
        sealed = sealer.seal(key, registered)
        if await objects.create(key, sealed) or await holds(objects, key, sealed):
            return Registration(number, registered, hash_of(sealed)), earlier
        earlier += await registrations(objects, sealer, number)
    raise AssertionError("unreachable: others cannot register that many journals meanwhile")


async def fence(
    objects: Objects, sealer: Sealer, victim: Registration, journal: str, intent: int
) -> tuple[Fence, End]:
    """End the journal `victim`, unless somebody else was first; return its fence, and the end that this is.

    `intent` is the number of the object of `journal` that says so, which is known to be in the bucket.
    Raises BucketError, after which it may be repeated; ObjectDamaged.
    """
    name = victim.registered.journal
    while True:
        end = await end_of(objects, sealer, victim)
        if end.fence is None:
            key = journal_key(name, end.number + 1)
            await objects.create(key, sealer.seal(key, Fence(end.hash, journal, intent)))
            # Whatever the answer was: what stands there now decides.
            continue
        # A checkpoint behind it was first: the number was free because what had it was deleted.
        if end.number >= (await beginning_of(objects, sealer, victim)).number:
            return end.fence, end


async def steps(
    objects: Objects, sealer: Sealer, journal: str, known: dict[str, Registration], covers: list[Covered],
    *, ended: bool = True, unfenced: dict[str, None] | None = None,
) -> AsyncIterator[tuple[str, int, Numbered]]:  # fmt: skip
    """Yield (journal, number, object) of everything that an ended journal holds, in order: what it took, before
    what it wrote after that.

    A journal that it only intended to take is left out, and so is what its last checkpoint covers. `known` has all
    registrations by journal. Without `ended`, the journal may still grow. Adds to `covers` what the next checkpoint
    will cover, and to `unfenced` the journals that it intended to take and nobody has taken.
    Raises BucketError, ObjectDamaged.
    """
    # Not by recursion: a store that restarts often has a long chain of journals.
    reading = [_Reading(objects, sealer, journal, await beginning_of(objects, sealer, _of(known, journal)))]  # fmt: skip
    while reading:
        one = reading[-1]
        if one.intents:
            victim = _of(known, one.intents.popleft())
            taken = (await end_of(objects, sealer, victim)).fence
            if taken is not None and (taken.by, taken.intent) == (one.journal, one.number):
                name = victim.registered.journal
                beginning = await beginning_of(objects, sealer, victim)
                reading.append(_Reading(objects, sealer, name, beginning))
            elif taken is None and unfenced is not None:
                unfenced[victim.registered.journal] = None
        elif one.content is not None:
            content, one.content = one.content, None
            yield one.journal, one.number, content
        elif not await one.next():
            if one.reader.fence is None and (ended or len(reading) > 1):
                end = await end_of(objects, sealer, _of(known, one.journal))
                first = journal_key(one.journal, one.beginning.number)
                # Whoever deletes what a checkpoint covers deletes the first one before all others.
                if end.number > one.reader.number and await objects.exists(first):
                    key = journal_key(one.journal, one.reader.number)
                    raise ObjectDamaged(
                        f"bucket {objects.url}: object {key} is missing, and later ones of its journal are there; "
                        "restore it from a backup (`iris store check` lists all that are missing)"
                    )
                raise BucketError(
                    f"bucket {objects.url}: journal {one.journal} has not ended; it must be read again"
                )
            covers += one.beginning.covers
            covers.append(Covered(one.journal, one.beginning.number, one.reader.number))
            reading.pop()


class _Reading:
    """A journal that is read, and what the object that was read last intended to take."""

    def __init__(
        self, objects: Objects, sealer: Sealer, journal: str, beginning: Beginning
    ) -> None:
        self.journal = journal
        self.beginning = beginning
        self.reader = Reader(objects, sealer, journal, beginning)
        self.number = 0
        self.content: Numbered | None = None
        """The object that was read last, until it was yielded."""
        self.intents: deque[str] = deque()
        """Journals that it intended to take, which are read before it."""
        self._rest = self.reader.rest()

    async def next(self) -> bool:
        """Read the next object; return whether there was one. Raises BucketError, ObjectDamaged."""
        found = await anext(self._rest, None)
        if found is None:
            return False
        self.number, self.content = found
        self.intents = deque(one.victim for one in self.content.entries if isinstance(one, Intent))
        return True


def _of(known: dict[str, Registration], journal: str) -> Registration:
    try:
        return known[journal]
    except KeyError:
        raise ObjectDamaged(
            f"journal {journal}: another journal names it, but its registration is missing; "
            "restore the objects below journals/ from a backup"
        ) from None
