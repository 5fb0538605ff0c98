"""Streams that moved between two journals: whether a move took place, and what the new journal got.

    old journal: ... Released(token)                   no ─► the old journal goes on
    new journal: ......... Taken(token) ── decision ──┤
                                                      its name ─► the new journal has them ── copies them ── settled

Both entries are in the bucket before the new journal's store decides for it. Whoever succeeds one of the journals
before that decides no. The decision is one object, so there is one answer for all. Until the move is settled the new
journal does not have what the streams held before, so the old one keeps it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, TypeVar

from relay.store.bucket.history import registrations
from relay.store.bucket.objects import BucketError, Objects
from relay.store.bucket.sealing import (
    Content,
    Decision,
    Ended,
    Entry,
    ObjectDamaged,
    Released,
    Rows,
    Sealer,
    Settled,
    Taken,
    decision_key,
    settled_key,
)
from relay.store.bucket.succession import steps

T = TypeVar("T", bound=Content)


NO: Final = ""
"""In the place of a journal: the move does not take place."""


async def decide(objects: Objects, sealer: Sealer, token: str, journal: str) -> str:
    """Decide which journal has the streams of a move, unless that is decided already; return what was decided.

    Raises BucketError, after which it may be repeated; ObjectDamaged.
    """
    key = decision_key(token)
    found = await decided(objects, sealer, token)
    while found is None:
        await objects.create(key, sealer.seal(key, Decision(journal)))
        # Whatever the answer was: what stands there now decides.
        found = await decided(objects, sealer, token)
    return found


async def decided(objects: Objects, sealer: Sealer, token: str) -> str | None:
    """Return which journal has the streams of a move, or `NO`; None if nobody has decided.

    Raises BucketError, ObjectDamaged.
    """
    found = await _get(objects, sealer, decision_key(token), Decision)
    return None if found is None else found.journal


async def settled(objects: Objects, sealer: Sealer, token: str) -> bool:
    """Return whether the new journal has everything. Raises BucketError, ObjectDamaged."""
    return await _get(objects, sealer, settled_key(token), Settled) is not None


async def settle(objects: Objects, sealer: Sealer, token: str) -> None:
    """Say that the new journal has everything. Raises BucketError, after which it may be repeated."""
    key = settled_key(token)
    await objects.create(key, sealer.seal(key, Settled()))


async def _get(objects: Objects, sealer: Sealer, key: str, kind: type[T]) -> T | None:
    sealed = await objects.get(key)
    if sealed is None:
        return None
    content = sealer.open(key, sealed)
    if not isinstance(content, kind):
        raise ObjectDamaged(f"object {key}: it is not what its key says; restore it from a backup")
    return content


class Arrived:
    """From here on the journal holds these streams, and what it said about them before is void."""

    __slots__ = ("uuids",)

    def __init__(self, uuids: list[bytes]) -> None:
        self.uuids = uuids


class Chain:
    """What one journal, with those that it took, says about its streams. For whoever has ended the journal."""

    def __init__(self, objects: Objects, sealer: Sealer) -> None:
        self.away: set[bytes] = set()
        """Streams of which further writes do not count."""
        self.unsettled: list[Released | Taken] = []
        """Moves that took place and are not settled."""
        self._objects = objects
        self._sealer = sealer

    async def effects(self, journal: str, entry: Entry) -> AsyncIterator[Rows | Ended | Arrived]:
        """Yield what an entry of a journal means. A move that is not decided does not take place.

        Raises BucketError, ObjectDamaged.
        """
        if isinstance(entry, Rows):
            if entry.uuid not in self.away:
                yield entry
        elif isinstance(entry, Ended):
            yield entry
        elif isinstance(entry, Released | Taken):
            by = await decide(self._objects, self._sealer, entry.token, NO)
            if by == NO or (isinstance(entry, Taken) and by != journal):
                return
            kept = not await settled(self._objects, self._sealer, entry.token)
            if kept:
                self.unsettled.append(entry)
            if isinstance(entry, Released):
                self.away.update(entry.uuids)
                for uuid in entry.uuids:
                    yield Ended(uuid)
                return
            self.away.difference_update(entry.uuids)
            yield Arrived(entry.uuids)
            if kept:
                async for effect in released(self._objects, self._sealer, entry):
                    yield effect


async def released(objects: Objects, sealer: Sealer, taken: Taken) -> AsyncIterator[Rows | Arrived]:
    """Yield what the streams of a move held when their journal released them. That journal may go on meanwhile.

    Raises BucketError, also if the move was settled meanwhile; ObjectDamaged.
    """
    known = {one.registered.journal: one for one in await registrations(objects, sealer)}
    uuids, here = set(taken.uuids), True
    async for name, _, content in steps(objects, sealer, taken.source, known, []):
        for entry in content.entries:
            if isinstance(entry, Rows):
                if here and entry.uuid in uuids:
                    yield entry
            elif isinstance(entry, Released) and entry.token == taken.token:
                return
            elif (
                isinstance(entry, Released | Taken)
                and uuids.intersection(entry.uuids)
                and (by := await decided(objects, sealer, entry.token))
                and (isinstance(entry, Released) or by == name)
            ):
                # The streams were elsewhere in between, and are here completely since.
                here = isinstance(entry, Taken)
                yield Arrived(taken.uuids)
    raise BucketError(
        f"bucket {objects.url}: journal {taken.source} was read and has no release {taken.token}; it must be read again"
    )
