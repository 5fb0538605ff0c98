"""Brings the databases of a journal's streams as far as the bucket."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Final

from iris.errors import IrisError
from iris.wire.stream_items import dead_uuid
from relay.store.batches import Op
from relay.store.bucket.history import Registration
from relay.store.bucket.lineage import Order, Run, among
from relay.store.bucket.moved import Chain, Void, released
from relay.store.bucket.objects import Objects, patient
from relay.store.bucket.replica import Place, move, redo
from relay.store.bucket.sealing import Covered, Ended, Released, Rows, Sealer, Taken
from relay.store.bucket.shelf import Left
from relay.store.bucket.succession import Unfenced, steps
from relay.store.database import Database
from relay.store.errors import LogError
from relay.store.moved import MovedRecords

log = logging.getLogger(__name__)

NO_OFFSET: Final = 0
IDENTITY_ROW: Final = b"i"
"""The row that a new log begins with."""


class InUse(IrisError):
    """A stream of the journals that were read is in use here under another journal.

    That journal has ended, or the stream was released and taken, and this store is about to notice it.
    """


class Loaded:
    """A stream whose database is as far as the bucket."""

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
        """Whether the next writes are not in the database yet."""
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

    def unsent(self, ends: dict[str, int]) -> list[list[Op]]:
        """Return the writes that are in the database, and not in the bucket. Raises LogDamaged."""
        if self.database is None or self.place is None:
            return []
        end = ends.get(self.place.journal)
        if end is None or self.place.number <= end:
            return []
        return redo(self.database, end)

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

    def give_up(self) -> None:
        """Remove a database that was begun, and would be begun again: its disk may be full."""
        self.close()
        if self.place is None:
            shutil.rmtree(self.path, ignore_errors=True)

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
    A database that has more than the bucket keeps it if nobody wrote to the stream meanwhile, and if its journals are
    read in the order in which it moved through them; else it is made again. What the bucket lacks was never
    acknowledged.
    Adds to `unsettled` the moves of streams that somebody has to settle, and to `left` what deleted streams left.
    Raises Unfenced if another journal must be taken first; InUse if that has to be done again; BucketError,
    ObjectDamaged, LogError.
    """
    objects = patient(objects)
    targets = _targets(directory, keep)
    try:
        covers: list[Covered] = []
        moves: list[Released | Taken] = [] if unsettled is None else unsettled
        gone: dict[bytes, Left] = {} if left is None else left
        held, ends = await _replay(objects, sealer, taken, known, directory, targets, keep, covers, moves, gone)  # fmt: skip
        unsent = {uuid: target.unsent(ends) for uuid, target in targets.items()}
        # Its first dead letter was on the disk, and the bucket does not know of their log. The position of the
        # consumer, which is ahead as well, rests on it.
        held |= {
            letters
            for letters in (dead_uuid(uuid) for uuid in tuple(held) if unsent.get(uuid))
            if any(op.key == IDENTITY_ROW for ops in unsent.get(letters, ()) for op in ops)
        }
        loaded = []
        for uuid, target in targets.items():
            if uuid not in held:
                target.close()
                shutil.rmtree(target.path, ignore_errors=True)
                continue
            assert target.database is not None
            if not unsent[uuid]:
                move(target.database, Place(into, 0))
            target.close()
            loaded.append(Loaded(uuid, target.path, unsent[uuid]))
        return loaded, covers
    except BaseException:
        for target in targets.values():
            target.give_up()
        raise
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
    holders: dict[bytes, tuple[str, list[Run]]] = {}
    """Stream -> which of `taken` has it, and which of its entries make it up."""
    order = Order()
    ends: dict[str, int] = {}
    begins: dict[str, int] = {}
    for journal in taken:
        chain = Chain(objects, sealer)
        async for name, number, content in steps(
            objects, sealer, journal, known, covers, unfenced=unfenced
        ):
            begin = begins.setdefault(name, number)
            ends[name] = number
            for target in targets.values():
                place = target.place
                if (
                    place is not None
                    and place.journal == name
                    and begin <= max(place.number, 1) <= number
                ):
                    target.reached = True
            for index, entry in enumerate(content.entries):
                async for effect in chain.effects(name, (number, index), entry):
                    if isinstance(effect, Rows):
                        order.wrote(effect.uuid, name)
                        if effect.uuid in keep:
                            continue  # it moved from here to a journal of ours, or we do not know yet that ours ended
                        if effect.uuid not in targets:
                            path = directory / effect.uuid.hex()
                            targets[effect.uuid] = _Target(path, effect.uuid)
                        target = targets[effect.uuid]
                        if target.reached:
                            target.write(effect.ops)
                        continue
                    uuids = effect.uuids if isinstance(effect, Void) else [effect.uuid]
                    for uuid in uuids:
                        order.restart(uuid)
                        if isinstance(effect, Ended) and uuid in targets:
                            targets[uuid].add_objects(left.setdefault(uuid, Left()))
                    _restart(targets, uuids)
        unsettled += chain.unsettled
        held = chain.lineages.of(journal)
        holders |= {uuid: (journal, runs) for uuid, runs in held.items()}
    if unfenced:
        raise Unfenced(list(unfenced))
    if in_use := keep & holders.keys():
        raise InUse(
            f"streams {', '.join(sorted(uuid.hex() for uuid in in_use))} are in use here; try again"
        )

    def is_ahead(uuid: bytes, runs: list[Run]) -> bool:
        """Return whether a database has all that the bucket has, and more, and nobody went on with the stream."""
        place = targets[uuid].place
        if place is None or place.number <= ends.get(place.journal, place.number):
            return False
        journals = [run.journal for run in runs]
        return place.journal in journals and not any(
            run.written for run in runs[journals.index(place.journal) + 1 :]
        )

    stale = {
        uuid: (journal, runs)
        for uuid, (journal, runs) in holders.items()
        if not order.is_right(uuid, runs)
        or (not targets[uuid].reached and not is_ahead(uuid, runs))
    }
    for uuid in stale:
        targets[uuid].restart()
    for journal in {journal: None for journal, _ in stale.values()}:
        mine = {uuid: runs for uuid, (its, runs) in stale.items() if its == journal}
        chain = Chain(objects, sealer)
        async for name, number, content in steps(objects, sealer, journal, known, []):
            for index, entry in enumerate(content.entries):
                at = number, index
                async for effect in chain.effects(name, at, entry):
                    uuids = effect.uuids if isinstance(effect, Void) else [effect.uuid]
                    uuids = [one for one in uuids if one in mine and among(mine[one], name, at)]
                    if not isinstance(effect, Rows):
                        _restart(targets, uuids)
                    elif uuids:
                        targets[effect.uuid].write(effect.ops)
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
        async for effect in released(patient(objects), sealer, taken):
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
