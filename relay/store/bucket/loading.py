"""Brings the databases of a journal's streams to where the bucket says they are."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Final

from iris.errors import IrisError
from relay.store.bucket.history import Registration
from relay.store.bucket.moved import Arrived, Chain, released
from relay.store.bucket.objects import Objects
from relay.store.bucket.replica import Place, move, redo
from relay.store.bucket.sealing import Covered, Ended, Released, Rows, Sealer, Taken
from relay.store.bucket.shelf import Left
from relay.store.bucket.succession import Unfenced, steps
from relay.store.database import Database, Op
from relay.store.errors import LogError
from relay.store.moved import MovedRecords

log = logging.getLogger(__name__)

NO_OFFSET: Final = 0


class InUse(IrisError):
    """A stream of the journals that were read is in use here under another journal.

    That journal has ended, or the stream was released and taken, and this store is about to notice it.
    """


class Loaded:
    """A stream whose database stands where the bucket says."""

    __slots__ = ("path", "unsent", "uuid")

    def __init__(self, uuid: bytes, path: Path, unsent: list[list[Op]]) -> None:
        self.uuid = uuid
        self.path = path
        self.unsent = unsent
        """Writes that are in the database, and not in the bucket yet."""


class _Target:
    """The database of one stream while it is brought forward."""

    def __init__(self, path: Path, uuid: bytes) -> None:
        self.path = path
        self.uuid = uuid
        self.database: Database | None = None
        self.place: Place | None = None
        self.reached = False
        """Whether the writes that come now are not in the database yet."""
        if path.is_dir():
            try:
                self.database = Database.open(str(path))
                self.place = Place.of(self.database)
            except LogError as err:  # the bucket has all of it
                _warn_damaged(path, err)
        if self.place is None:
            self.restart()

    def restart(self) -> None:
        """Begin with an empty database."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        self.database = Database.create(str(self.path))
        self.database.make_mark(self.uuid, NO_OFFSET)
        self.place, self.reached = None, True

    def write(self, ops: list[Op]) -> None:
        """Repeat writes. Repeating those that are there already changes nothing."""
        assert self.database is not None
        batch = self.database.batch()
        batch.apply(ops)
        self.database.write(batch, NO_OFFSET, sync=False)

    def add_objects(self, left: Left) -> None:
        """Add the segment objects that the stream has."""
        assert self.database is not None
        try:
            moved = MovedRecords(self.database)
        except (
            LogError
        ) as err:  # an old copy, since what was read from the bucket has just been written
            _warn_damaged(self.path, err)
            return
        left.add(moved.keys(), moved.intended)

    def close(self) -> None:
        if self.database is not None:
            self.database.close()
            self.database = None


def _warn_damaged(path: Path, err: LogError) -> None:
    log.warning("store.copy_damaged", extra={"fields": {"path": str(path), "error": str(err)}})


async def load(
    objects: Objects, sealer: Sealer, taken: list[str], known: dict[str, Registration], directory: Path, into: str,
    *, keep: Set[bytes] = frozenset(), unsettled: list[Released | Taken] | None = None, left: dict[bytes, Left] | None = None,
) -> tuple[list[Loaded], list[Covered]]:  # fmt: skip
    """Bring the databases below `directory` to what the journals `taken` hold; remove others, except `keep`.

    Their streams go on in journal `into`. Those in `keep` are in use here. Also returns what the first checkpoint of
    that journal will cover.
    A database that has more than the bucket keeps it if nobody wrote to the stream meanwhile; else it is made again.
    Adds to `unsettled` the moves of streams that somebody has to settle, and to `left` what deleted streams left.
    Raises Unfenced if another journal must be taken first; InUse if that has to be done again; BucketError,
    ObjectDamaged, LogError.
    """
    targets = _targets(directory, keep)
    try:
        covers: list[Covered] = []
        moves: list[Released | Taken] = [] if unsettled is None else unsettled
        gone: dict[bytes, Left] = {} if left is None else left
        held, ends = await _replay(objects, sealer, taken, known, directory, targets, keep, covers, moves, gone)  # fmt: skip
        loaded = []
        for uuid, target in targets.items():
            if uuid not in held:
                target.close()
                shutil.rmtree(target.path, ignore_errors=True)
                continue
            assert target.database is not None
            unsent = []
            if target.place is not None and target.place.number > ends[target.place.journal]:
                unsent = redo(target.database, ends[target.place.journal])
            if not unsent:
                move(target.database, Place(into, 0))
            target.close()
            loaded.append(Loaded(uuid, target.path, unsent))
        return loaded, covers
    finally:
        for target in targets.values():
            target.close()


def _targets(directory: Path, keep: Set[bytes]) -> dict[bytes, _Target]:
    """Return the databases that are there and not in use."""
    return {
        bytes.fromhex(path.name): _Target(path, bytes.fromhex(path.name))
        for path in directory.iterdir()
        if path.is_dir() and len(path.name) == 32 and bytes.fromhex(path.name) not in keep
    }


async def _replay(
    objects: Objects, sealer: Sealer, taken: list[str], known: dict[str, Registration], directory: Path,
    targets: dict[bytes, _Target], keep: Set[bytes], covers: list[Covered], unsettled: list[Released | Taken],
    left: dict[bytes, Left],
) -> tuple[set[bytes], dict[str, int]]:  # fmt: skip
    """Write what is missing into each database; return the uuids that are held, and the end of each journal.

    Raises Unfenced, InUse.
    """
    unfenced: dict[str, None] = {}
    held: dict[bytes, set[str]] = {}
    named: dict[bytes, set[str]] = {}
    ends: dict[str, int] = {}
    begins: dict[str, int] = {}
    read = 0
    read_last: dict[str, int] = {}
    """Journal -> when its last object was read."""
    written_last: dict[bytes, int] = {}
    """Stream -> when its last write was read."""
    for journal in taken:
        chain = Chain(objects, sealer)
        async for name, number, content in steps(
            objects, sealer, journal, known, covers, unfenced=unfenced
        ):
            begin = begins.setdefault(name, number)
            ends[name] = number
            read += 1
            read_last[name] = read
            for target in targets.values():
                place = target.place
                if (
                    place is not None
                    and place.journal == name
                    and begin <= max(place.number, 1) <= number
                ):
                    target.reached = True
            for entry in content.entries:
                async for effect in chain.effects(name, entry):
                    if isinstance(effect, Rows):
                        held.setdefault(effect.uuid, set()).add(journal)
                        named.setdefault(effect.uuid, set()).add(journal)
                        written_last[effect.uuid] = read
                        if effect.uuid in keep:
                            continue  # it moved from here to a journal of ours, or we do not know yet that ours ended
                        if effect.uuid not in targets:
                            path = directory / effect.uuid.hex()
                            targets[effect.uuid] = _Target(path, effect.uuid)
                        target = targets[effect.uuid]
                        if target.reached:
                            target.write(effect.ops)
                    elif isinstance(effect, Ended):
                        if effect is entry and effect.uuid in targets:  # else it moved
                            targets[effect.uuid].add_objects(left.setdefault(effect.uuid, Left()))
                        held.get(effect.uuid, set()).discard(journal)
                        _restart(targets, [effect.uuid])
                    else:
                        _restart(targets, effect.uuids)
        unsettled += chain.unsettled
    if unfenced:
        raise Unfenced(list(unfenced))

    def is_ahead(uuid: bytes) -> bool:
        """Return whether a database has all that the bucket has, and more, and nobody went on with the stream."""
        place = targets[uuid].place
        return (
            place is not None
            and place.number > ends.get(place.journal, place.number)
            and written_last[uuid] <= read_last[place.journal]
        )

    holders = {uuid: journals for uuid, journals in held.items() if journals}
    if in_use := keep & holders.keys():
        raise InUse(
            f"streams {', '.join(sorted(uuid.hex() for uuid in in_use))} are in use here; try again"
        )
    stale = {
        uuid
        for uuid in holders
        # A stream that moved from one of these journals to another was written in the wrong order.
        if len(named[uuid]) > 1 or (not targets[uuid].reached and not is_ahead(uuid))
    }
    for uuid in stale:
        targets[uuid].restart()
    if stale:
        for journal in taken:
            chain = Chain(objects, sealer)
            mine = {uuid for uuid in stale if journal in holders[uuid]}
            async for name, _, content in steps(objects, sealer, journal, known, []):
                for entry in content.entries:
                    async for effect in chain.effects(name, entry):
                        if isinstance(effect, Rows):
                            if effect.uuid in mine:
                                targets[effect.uuid].write(effect.ops)
                        elif isinstance(effect, Arrived):
                            _restart(targets, mine.intersection(effect.uuids))
    return set(holders), ends


def _restart(targets: dict[bytes, _Target], uuids: Iterable[bytes]) -> None:
    """Forget what was written for these streams up to here."""
    for uuid in uuids:
        target = targets.get(uuid)
        if target is not None and target.reached:
            target.restart()


async def receive(
    objects: Objects, sealer: Sealer, taken: Taken, directory: Path, into: str
) -> dict[bytes, Path]:
    """Bring the streams of a move that took place to new databases below `directory`; return uuid -> path.

    They go on in journal `into`. Raises BucketError, ObjectDamaged, LogError.
    """
    targets: dict[bytes, _Target] = {}
    try:
        async for effect in released(objects, sealer, taken):
            if isinstance(effect, Rows):
                if effect.uuid not in targets:
                    path = directory / effect.uuid.hex()
                    targets[effect.uuid] = _Target(path, effect.uuid)
                    targets[effect.uuid].restart()
                targets[effect.uuid].write(effect.ops)
            else:
                _restart(targets, effect.uuids)
        for target in targets.values():
            assert target.database is not None
            move(target.database, Place(into, 0))
        return {uuid: target.path for uuid, target in targets.items()}
    finally:
        for target in targets.values():
            target.close()
