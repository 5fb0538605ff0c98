"""Streams that moved between two journals: whether that took place, and what the new journal got.

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

from relay.store.bucket.history import Registration, registrations
from relay.store.bucket.lineage import At, Lineages, Order, Run, among
from relay.store.bucket.objects import BucketError, Objects
from relay.store.bucket.sealing import (
    Content,
    Decision,
    Ended,
    Entry,
    Intent,
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
from relay.store.bucket.whole import fetch

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
    sealed = await fetch(objects, sealer, key)
    if sealed is None:
        return None
    content = sealer.open(key, sealed)
    if not isinstance(content, kind):
        raise ObjectDamaged(f"object {key}: it is not what its key says; restore it from a backup")
    return content


class Void:
    """What was written for these streams up to here does not count: they have left the journal, or arrive in it."""

    __slots__ = ("uuids",)

    def __init__(self, uuids: list[bytes]) -> None:
        self.uuids = uuids


class Chain:
    """What one journal, with those that it took, says about its streams. Use it for a journal that you have ended. For
    one that still grows, pass `looks`: nothing is decided then, and an undecided move has not taken place.
    """

    def __init__(self, objects: Objects, sealer: Sealer, *, looks: bool = False) -> None:
        self.lineages = Lineages()
        self.unsettled: list[Released | Taken] = []
        """Moves that took place and are not settled."""
        self._objects = objects
        self._sealer = sealer
        self._looks = looks

    async def effects(
        self, journal: str, at: At, entry: Entry
    ) -> AsyncIterator[Rows | Ended | Void]:
        """Yield what an entry of a journal means. A move that is not decided does not take place.

        Raises BucketError, ObjectDamaged.
        """
        match entry:
            case Rows(uuid):
                if self.lineages.wrote(journal, at, uuid):
                    yield entry
            case Ended(uuid):
                self.lineages.ended(journal, uuid)
                yield entry
            case Intent(victim):
                self.lineages.took(journal, at, victim)
            case Released(token, uuids):
                if await self._by(token) != NO:
                    await self._note(entry)
                    self.lineages.left(journal, uuids)
                    yield Void(uuids)
            case Taken(token, uuids):
                if await self._by(token) == journal:
                    kept = await self._note(entry)
                    self.lineages.arrived(journal, at, uuids)
                    yield Void(uuids)
                    if kept:
                        async for effect in released(self._objects, self._sealer, entry):
                            yield effect

    async def _by(self, token: str) -> str:
        """Return which journal has the streams of a move, or `NO`."""
        if self._looks:
            return await decided(self._objects, self._sealer, token) or NO
        return await decide(self._objects, self._sealer, token, NO)

    async def _note(self, entry: Released | Taken) -> bool:
        """Return whether a move that took place is not settled."""
        if self._looks or await settled(self._objects, self._sealer, entry.token):
            return False
        self.unsettled.append(entry)
        return True


async def released(objects: Objects, sealer: Sealer, taken: Taken) -> AsyncIterator[Rows | Void]:
    """Yield what the streams of a move held when their journal released them. That journal may go on meanwhile.

    Raises BucketError, also if the move was settled meanwhile; ObjectDamaged.
    """
    known = {one.registered.journal: one for one in await registrations(objects, sealer)}
    wanted, order = set(taken.uuids), Order()
    chain = Chain(objects, sealer, looks=True)
    runs: dict[bytes, list[Run]] | None = None
    async for name, at, entry in _until_released(objects, sealer, taken, known):
        if entry is None:
            runs = {uuid: chain.lineages.of(name).get(uuid, []) for uuid in wanted}
            break
        async for effect in chain.effects(name, at, entry):
            if isinstance(effect, Rows):
                if effect.uuid in wanted:
                    order.wrote(effect.uuid, name)
                    yield effect
                continue
            uuids = [effect.uuid] if isinstance(effect, Ended) else effect.uuids
            if void := [uuid for uuid in uuids if uuid in wanted]:
                for uuid in void:
                    order.restart(uuid)
                yield Void(void)
    if runs is None:
        raise BucketError(
            f"bucket {objects.url}: journal {taken.source} was read and has no release {taken.token}; it must be read again"
        )
    wrong = [uuid for uuid in taken.uuids if not order.is_right(uuid, runs[uuid])]
    if not wrong:
        return
    yield Void(wrong)
    async for name, at, entry in _until_released(objects, sealer, taken, known):
        if entry is None:
            return
        if isinstance(entry, Rows) and entry.uuid in wrong and among(runs[entry.uuid], name, at):
            yield entry


async def _until_released(
    objects: Objects, sealer: Sealer, taken: Taken, known: dict[str, Registration]
) -> AsyncIterator[tuple[str, At, Entry | None]]:
    """Yield (journal, place, entry) of what the source of a move has, until its release: there the entry is None."""
    async for name, number, content in steps(objects, sealer, taken.source, known, []):
        for index, entry in enumerate(content.entries):
            if isinstance(entry, Released) and entry.token == taken.token:
                yield name, (number, index), None
                return
            yield name, (number, index), entry
