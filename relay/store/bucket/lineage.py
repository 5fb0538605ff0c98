"""Which of the journals that were read together has a stream, and which of their entries make it up.

A journal has what was written to it, and what the journals had that it took. They are read before it, but in no other
order. So what is read last need not be newest: a stream that moved from one of them to another may be read there
first, and then where it was before. Therefore each journal is looked at by itself: it has a stream from its first
write, or from the entry with which the stream arrived, until the stream leaves or is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

At = tuple[int, int]
"""A place in a journal: number of an object, and index of an entry in it."""


class Run:
    """The entries of one stream in a journal, from a place on."""

    __slots__ = ("journal", "start", "written")

    def __init__(self, journal: str, start: At, *, written: bool) -> None:
        self.journal = journal
        self.start: Final = start
        self.written = written
        """Whether the journal has such entries. Otherwise it only took the stream with another journal."""


class Lineages:
    """The streams of journals that are read one after the other."""

    def __init__(self) -> None:
        self._journals: dict[str, dict[bytes, list[Run]]] = {}
        self._away: set[tuple[str, bytes]] = set()
        """(journal, stream that left it)."""

    def took(self, journal: str, at: At, victim: str) -> None:
        """Note that a journal is about to take another one, which was read before if that succeeded."""
        ours = self._journals.setdefault(journal, {})
        for uuid, runs in self._journals.pop(victim, {}).items():
            ours.setdefault(uuid, [*runs, Run(journal, at, written=False)])

    def wrote(self, journal: str, at: At, uuid: bytes) -> bool:
        """Note a write to a stream; return whether it counts. It does not count after the stream has left."""
        if (journal, uuid) in self._away:
            return False
        runs = self._journals.setdefault(journal, {}).setdefault(uuid, [])
        if not runs or runs[-1].journal != journal:
            runs.append(Run(journal, at, written=True))
        runs[-1].written = True
        return True

    def arrived(self, journal: str, at: At, uuids: Iterable[bytes]) -> None:
        """Note that streams have arrived in a journal: earlier entries of theirs do not count."""
        ours = self._journals.setdefault(journal, {})
        for uuid in uuids:
            self._away.discard((journal, uuid))
            ours[uuid] = [Run(journal, at, written=True)]

    def left(self, journal: str, uuids: Iterable[bytes]) -> None:
        """Note that streams have left a journal for another one."""
        for uuid in uuids:
            self._away.add((journal, uuid))
            self.ended(journal, uuid)

    def ended(self, journal: str, uuid: bytes) -> None:
        """Note that a journal no longer has a stream."""
        self._journals.get(journal, {}).pop(uuid, None)

    def of(self, journal: str) -> Mapping[bytes, list[Run]]:
        """Return what a journal has now: stream -> its entries, oldest first."""
        return self._journals.get(journal, {})


class Order:
    """The order in which entries of streams were written to their databases."""

    def __init__(self) -> None:
        self._journals: dict[bytes, list[str]] = {}

    def wrote(self, uuid: bytes, journal: str) -> None:
        """Note that an entry of this journal was written."""
        order = self._journals.setdefault(uuid, [])
        if not order or order[-1] != journal:
            order.append(journal)

    def restart(self, uuid: bytes) -> None:
        """Forget everything that was written to a stream."""
        self._journals.pop(uuid, None)

    def is_right(self, uuid: bytes, runs: list[Run]) -> bool:
        """Return whether exactly these entries were written, in this order."""
        return self._journals.get(uuid, []) == [run.journal for run in runs if run.written]


def among(runs: Iterable[Run], journal: str, at: At) -> bool:
    """Return whether an entry of a journal is among these."""
    return any(run.journal == journal and at >= run.start for run in runs)
