"""Reads the copies of `disk` streams in a bucket: all of them to databases, or only which there are."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from iris.crypto.keys import GroupKey, public_id
from relay.store.authority import DefinitionFile
from relay.store.batches import PUT, Op
from relay.store.bucket.history import Registration, end_of, registrations
from relay.store.bucket.objects import Objects, each_of, patient
from relay.store.bucket.sealing import COPIES, Begun, Ended, ObjectDamaged, Rows, Sealer, Whole
from relay.store.bucket.succession import steps
from relay.store.database import Database
from relay.store.identity import Identity
from relay.store.records import KEY

_decode_definition_file = msgspec.msgpack.Decoder(DefinitionFile).decode


STRANGER_S: Final = 60.0


class Found(Struct, frozen=True):
    """The copy of a stream that was read from the bucket."""

    uuid: bytes
    path: Path
    store: bytes
    """Public key of the store that wrote it."""
    label: str
    """Host of that store."""


class Outline(Struct, frozen=True):
    """The stream of a copy in the bucket, and where the copy ends."""

    uuid: bytes
    stored: DefinitionFile
    created_us: int
    next: int
    """Where the copy ends."""
    size_bytes: int
    """Bytes of the entries that were written to it; retention may have removed some."""
    store: bytes
    """Public key of the store that wrote it."""
    label: str
    """Host of that store."""


class _Copy(Protocol):
    """A copy that is read. It may be made again meanwhile, so there are up to two of a stream."""

    def write(self, ops: list[Op]) -> None:
        """Repeat what was written to the stream. Raises LogError."""

    def drop(self) -> None:
        """Forget everything: the copy was ended, or another one has taken its place."""

    def close(self) -> None: ...


C = TypeVar("C", bound=_Copy)


async def copied_in(
    objects: Objects, sealer: Sealer, journal: str, known: dict[str, Registration]
) -> set[bytes]:
    """Return the streams of which a journal has copies, whole or not. Raises BucketError, ObjectDamaged."""
    copied: set[bytes] = set()
    async for _, _, content in steps(objects, sealer, journal, known, [], ended=False):
        for entry in content.entries:
            if isinstance(entry, Rows):
                copied.add(entry.uuid)
            elif isinstance(entry, Ended):
                copied.discard(entry.uuid)
    return copied


async def read_copies(
    objects: Objects, key: GroupKey, directory: Path, only: Collection[bytes] = ()
) -> list[Found]:
    """Write the copies in a bucket to databases in `directory`, which is emptied; `only`: of these streams.

    Stores that run may continue to write: each copy is the stream as it was at some moment.
    Raises BucketError, ObjectDamaged, LogError, OSError.
    """
    await asyncio.to_thread(_empty, directory)
    objects = patient(objects)
    sealer = Sealer(key, os.urandom)
    found: dict[bytes, Found] = {}
    for one, _, known in await _journals(objects, sealer):
        its = _Reading(lambda uuid, number: _OnDisk(directory, uuid, number), only)
        try:
            await its.read(objects, sealer, one, known)
        finally:
            its.close()
        for uuid, copy in its.whole.items():
            kept = directory / uuid.hex()
            shutil.rmtree(kept, ignore_errors=True)
            os.rename(copy.path, kept)
            found[uuid] = Found(uuid, kept, one.registered.store, one.registered.label)
    return list(found.values())


class Outlines:
    """The copies in a bucket. A journal is read again only when it has grown. For a stranger, who has no key of a known
    stream, it is read at most once in `STRANGER_S`.
    """

    def __init__(self, objects: Objects, sealer: Sealer, now_s: Callable[[], float]) -> None:
        """`now_s` is a clock that is never set."""
        self._objects = patient(objects)
        self._sealer = sealer
        self._now_s = now_s
        self._read: dict[str, tuple[int, float, list[Outline]]] = {}
        """Journal -> its last object, when it was read, and what it has."""

    @property
    def by_journal(self) -> dict[str, list[Outline]]:
        """What was read: journal -> its copies."""
        return {name: outlines for name, (_, _, outlines) in self._read.items()}

    async def read(self, key_ids: Collection[bytes]) -> dict[bytes, Outline]:
        """Return uuid -> outline, those of dead letters among them, for somebody who has these keys.

        Raises BucketError, ObjectDamaged.
        """
        known_keys = {
            public_id(signed.public_key)
            for _, _, outlines in self._read.values()
            for outline in outlines
            for signed in outline.stored.orders
        }
        stranger = known_keys.isdisjoint(key_ids)
        read: dict[str, tuple[int, float, list[Outline]]] = {}
        for one, number, known in await _journals(self._objects, self._sealer):
            name = one.registered.journal
            before = self._read.get(name)
            if before is None or (
                before[0] != number and not (stranger and self._now_s() - before[1] < STRANGER_S)
            ):
                before = number, self._now_s(), await self._outlines(one, known)
            read[name] = before
        self._read = read
        return {outline.uuid: outline for _, _, found in read.values() for outline in found}

    async def _outlines(self, one: Registration, known: dict[str, Registration]) -> list[Outline]:
        its = _Reading(lambda uuid, number: _Sketch(), ())
        await its.read(self._objects, self._sealer, one, known)
        return [
            Outline(
                uuid, _stored(uuid, copy.identity), copy.identity.created_us, copy.next, copy.size_bytes,
                one.registered.store, one.registered.label,
            )
            for uuid, copy in its.whole.items()
            if copy.identity is not None
        ]  # fmt: skip


def _stored(uuid: bytes, identity: Identity) -> DefinitionFile:
    try:
        return _decode_definition_file(identity.definition)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ObjectDamaged(
            f"the copy of log {uuid.hex()}: its orders cannot be read: {err}"
        ) from err


async def _journals(
    objects: Objects, sealer: Sealer
) -> list[tuple[Registration, int, dict[str, Registration]]]:
    """Return the journals of copies that nobody has taken, with the last number and all journals of copies by name."""
    registered = await registrations(objects, sealer, folder=COPIES)
    known = {one.registered.journal: one for one in registered}
    ends = await each_of(registered, lambda one: end_of(objects, sealer, one))
    return [
        (one, end.number, known)
        for one, end in zip(registered, ends, strict=True)
        if end.fence is None and end.number
    ]


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)


class _Reading(Generic[C]):
    """The copies of one store while they are read."""

    def __init__(self, make: Callable[[bytes, int], C], only: Collection[bytes]) -> None:
        """`make(uuid, number)` makes an empty copy; `number` is another one each time. It raises LogError."""
        self.whole: dict[bytes, C] = {}
        self._next: dict[bytes, C] = {}
        """Copies that are not whole yet."""
        self._make_copy = make
        self._only = only
        self._made = 0

    async def read(
        self, objects: Objects, sealer: Sealer, journal: Registration, known: dict[str, Registration]
    ) -> None:  # fmt: skip
        """Read a journal of copies to its end. Raises BucketError, ObjectDamaged, LogError."""
        async for _, _, content in steps(objects, sealer, journal.registered.journal, known, [], ended=False):  # fmt: skip
            for entry in content.entries:
                if isinstance(entry, Rows | Begun | Whole | Ended) and (
                    not self._only or entry.uuid in self._only
                ):
                    self._add(entry)

    def _add(self, entry: Rows | Begun | Whole | Ended) -> None:
        uuid = entry.uuid
        match entry:
            case Rows(_, ops):
                copy = self._next.get(uuid) or self.whole.get(uuid)
                if copy is None:  # what a checkpoint covers begins without `Begun`
                    copy = self.whole[uuid] = self._make(uuid)
                copy.write(ops)
            case Begun():
                self._drop(self._next, uuid)
                self._next[uuid] = self._make(uuid)
            case Whole():
                if uuid in self._next:  # else it began before a checkpoint, which has all of it
                    self._drop(self.whole, uuid)
                    self.whole[uuid] = self._next.pop(uuid)
            case Ended():
                self._drop(self.whole, uuid)
                self._drop(self._next, uuid)

    def close(self) -> None:
        """Close all copies, and forget what is not whole. Idempotent."""
        for uuid in list(self._next):
            self._drop(self._next, uuid)
        for copy in self.whole.values():
            copy.close()

    def _make(self, uuid: bytes) -> C:
        self._made += 1
        return self._make_copy(uuid, self._made)

    def _drop(self, among: dict[bytes, C], uuid: bytes) -> None:
        copy = among.pop(uuid, None)
        if copy is not None:
            copy.drop()


class _OnDisk:
    """A copy that becomes a database."""

    def __init__(self, directory: Path, uuid: bytes, number: int) -> None:
        self._database = Database.create(str(directory / f"{uuid.hex()}.{number}"))
        self._database.make_mark(uuid, 0)
        self.path = self._database.path

    def write(self, ops: list[Op]) -> None:
        batch = self._database.batch()
        batch.apply(ops)
        self._database.write(batch, 0, sync=False)

    def drop(self) -> None:
        self._database.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        self._database.close()


class _Sketch:
    """A copy of which only the outline is kept."""

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.next = 0
        self.size_bytes = 0

    def write(self, ops: list[Op]) -> None:
        for op in ops:
            if op.what == PUT and op.key == b"i":
                try:
                    self.identity = Identity.unpack(op.value)
                except ValueError as err:
                    raise ObjectDamaged(f"the copy of a stream: {err}") from err
            elif op.what == PUT and op.key == b"n":
                (self.next,) = KEY.unpack(op.value)
            self.size_bytes += len(op.value)

    def drop(self) -> None:
        pass

    def close(self) -> None:
        pass
