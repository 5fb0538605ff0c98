"""What the rest of a store sees of its bucket: the group key, and a copier for each stream in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from iris.crypto.keys import GroupKey
from relay.store.bucket.replica import Replica
from relay.store.bucket.writer import Output, Writer
from relay.store.errors import Refuse
from relay.store.moved import Reader

DIRECTORY: Final = "bucket"
"""Subdirectory of the data directory with the logs of streams that are in a bucket."""
LEFT_US: Final = 3600_000_000
"""How long checkpoints wait for objects of deleted streams to be deleted: a bucket may refuse that for ever."""


class Leaving(Struct, frozen=True):
    """A stream that is about to leave, as its next store has to know it."""

    name: str
    key_ids: list[bytes]
    size_bytes: int


class Left(Struct):
    """Segment objects of a deleted stream."""

    objects: list[str] = []
    intended: list[str] = []
    """Objects that may not exist: the request to create them failed, or may still arrive."""
    until_us: int = 0
    """Until then no checkpoint covers what names them."""

    def add(self, objects: list[str], intended: list[str]) -> None:
        """Add objects; the `intended` ones may be among them."""
        self.objects += [key for key in objects if key not in intended]
        self.intended += intended


class _Ending:
    """A deletion that the bucket does not have yet."""

    def __init__(self, shelf: Shelf, uuid: bytes, left: Left, known: Callable[[], None]) -> None:
        self._shelf = shelf
        self._uuid = uuid
        self._left = left
        self._known = known

    def release(self) -> None:
        del self._shelf.ending[self._uuid]
        self._shelf.leave(self._left)
        self._known()

    def withdraw(self, reason: str) -> None:
        del self._shelf.ending[self._uuid]


class Mover(Protocol):
    """Moves streams between the stores of a bucket; see `relay.store.bucket.moves`."""

    def release(
        self, replica: Replica, target: bytes, leaving: Leaving, answer: Callable[[bytes], Output]
    ) -> None: ...
    def take(self, sealed: bytes, done: Callable[[Refuse | None], None]) -> None: ...


class Creator(Protocol):
    """Creates streams in the bucket; see `relay.store.bucket.creating`."""

    def create(self, uuid: bytes, done: Callable[[Refuse | None], None]) -> None: ...


class Shelf:
    """The streams of one store that are in a bucket."""

    def __init__(self, directory: Path, key: GroupKey, url: str, now_us: Callable[[], int]) -> None:
        """`now_us` is a clock that is never set."""
        self.directory = directory
        self.key = key
        self.url = url
        self.writer: Writer | None = None
        """This store's journal for new streams; None until it has taken over the journals of its last run."""
        self.held: dict[str, set[bytes]] = {}
        """Journal of this store -> uuids of the streams whose writes go there."""
        self.away = f"the bucket {url} has not been read yet; try again"
        """Why nothing can be written; empty while it can."""
        self.succeeding = False
        """Whether another store is gone, and what it held has not been taken over yet."""
        self.not_taken = ""
        """Why this store cannot take over from stores that are gone, although the bucket answers; empty if it can."""
        self.taken = 0
        """Journals that other stores have taken over from this one since its start."""
        self._taken_us = 0
        self.mover: Mover | None = None
        """Moves streams to other stores; None until the bucket is used."""
        self.creator: Creator | None = None
        """Creates streams in the bucket; None until the bucket is used."""
        self.reader: Reader | None = None
        """Reads what was moved to segment objects."""
        self.ending: dict[bytes, Replica] = {}
        """Deleted stream -> its copier, until the bucket has the deletion or the journal has ended."""
        self.left: list[Left] = []
        """Objects of deleted streams whose deletion is in the bucket."""
        self._now_us = now_us

    @property
    def public_key(self) -> bytes:
        """The group's public key, which orders for streams in the bucket name."""
        return self.key.public_key

    def note_taken(self) -> None:
        """Note that another store has taken over a journal of this store."""
        self.taken += 1
        self._taken_us = self._now_us()

    @property
    def taken_s(self) -> int:
        """Seconds since a journal of this store was taken over; 0 if none was since its start."""
        return (self._now_us() - self._taken_us) // 1_000_000 if self.taken else 0

    def replica(self, uuid: bytes) -> Replica:
        """Return a copier for a stream. Raises Refuse while nothing can be written."""
        if self.writer is None or self.writer.ended:
            raise Refuse(
                "leaving",
                self.away or f"the store lost its journal in the bucket {self.url}; try again",
            )
        return self.replica_in(uuid, self.writer)

    def replica_in(self, uuid: bytes, writer: Writer) -> Replica:
        """Return a copier for a stream that this journal holds already, or that moves together with one of those."""
        self.held.setdefault(writer.journal, set()).add(uuid)
        return Replica(uuid, writer, self._now_us, self.reader)

    def forget(self, replica: Replica) -> None:
        """Forget a stream that was deleted."""
        self.held.get(replica.writer.journal, set()).discard(replica.uuid)

    def end(self, replica: Replica, left: Left, known: Callable[[], None]) -> None:
        """Note the deletion of a stream that leaves these segment objects. Call `known` when the bucket has it.

        If the journal ends before, nobody can say whether the stream still exists.
        """
        replica.ended()
        self.ending[replica.uuid] = replica
        replica.hold(_Ending(self, replica.uuid, left, known))

    def leave(self, left: Left) -> None:
        """A deleted stream has left these objects, as the bucket knows."""
        if left.objects or left.intended:
            left.until_us = self._now_us() + LEFT_US
            self.left.append(left)

    @property
    def is_leaving(self) -> bool:
        """Whether what names objects of deleted streams must stay: a successor of this store deletes them, too."""
        return any(self._now_us() < each.until_us for each in self.left)

    def make_directory(self) -> None:
        """Make the directory of the logs. Raises OSError."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
