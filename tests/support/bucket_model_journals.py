"""The bucket of the model in `bucket_model`, and what can be read of the journals in it."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any, Protocol

NOBODY = ""
"""In the place of a journal: a move does not take place."""
Place = tuple[str, int, int]
"""Where a request stands: journal, number, index."""


class Bucket:
    """Objects by key. `created` has everything that was ever created, also if it was deleted since."""

    def __init__(self, rng: random.Random, broken: str) -> None:
        self.broken = broken
        self.objects: dict[Any, Any] = {}
        self.created: dict[Any, Any] = {}
        self.late: list[tuple[Any, Any]] = []
        self.rng = rng

    def get(self, key: Any) -> Any:
        return self.objects.get(key)

    def create(self, key: Any, value: Any) -> bool | None:
        """True: created. False: exists. None: nobody can say (applied now, later, or never)."""
        fate = self.rng.random()
        if fate < 0.15:
            self.late.append((key, value))
            return None
        made = self._put(key, value)
        return made if fate < 0.85 else None

    def _put(self, key: Any, value: Any) -> bool:
        if key in self.objects:
            return False
        self.objects[key] = value
        self.created.setdefault(key, value)
        return True

    def settle(self) -> None:
        """One of the late PUTs arrives, or is dropped for good."""
        if self.late:
            key, value = self.late.pop(self.rng.randrange(len(self.late)))
            if self.rng.random() < 0.6:
                self._put(key, value)

    def delete(self, key: Any) -> None:
        self.objects.pop(key, None)


class State:
    """A stream: its records, and the last number of each producer (which follows from them)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def last(self, producer: str) -> int:
        return sum(1 for name, _ in self.log if name == producer)


class Holder(Protocol):
    """A journal, or the store that writes one."""

    held: dict[str, State]
    open: dict[Place, str]
    moves: dict[str, tuple[str, str]]


class Journal:
    """What can be read of a journal: the streams it holds, its open requests, and its moves that are not settled."""

    def __init__(self) -> None:
        self.number = 1
        """The first number that was not read."""
        self.held: dict[str, State] = {}
        self.open: dict[Place, str] = {}
        """Journals that it is about to take. A successor takes them, too."""
        self.moves: dict[str, tuple[str, str]] = {}
        """Move that took place and is not settled -> ("release" or "take", stream)."""
        self.left: set[str] = set()
        """Streams that moved away."""
        self.fence: Place | None = None


def last_checkpoint(bucket: Bucket, name: str) -> tuple[int, Journal | None]:
    """Return the end of the last checkpoint of a journal, and its content."""
    at, found = 1, None
    while (value := bucket.get((name, "checkpoint", at))) is not None:
        found, at = value, at + 1
    return (found[0], found[1]) if found else (0, None)


def read(bucket: Bucket, name: str, *, ended: bool = True, until: str = "") -> Journal:
    """Return what a journal holds now, from its last checkpoint on, with what its requests brought.

    If it has `ended`, moves that are not decided are decided: they do not take place. Else they may take place later,
    and it is read up to the release `until`.
    A journal takes only journals that began before it, so this ends.
    """
    end, base = last_checkpoint(bucket, name)
    journal = deepcopy(base) if base else Journal()
    journal.number = end + 1
    while (value := bucket.get((name, journal.number))) is not None:
        if value[0] == "fence":
            journal.fence = value[1]
            break
        for index, entry in enumerate(value[2]):
            if until and entry[:2] == ("release", until):
                return journal
            apply(bucket, journal, (name, journal.number, index), entry, ended=ended)
        journal.number += 1
    for place in list(journal.open) if ended else ():
        there = outcome(bucket, place, journal.open[place])
        if there is not None:
            del journal.open[place]
            merge(bucket, journal, there)
    return journal


def apply(
    bucket: Bucket, journal: Journal, place: Place, entry: tuple[Any, ...], *, ended: bool
) -> None:
    """Apply an entry of a journal."""
    match entry:
        case ("make", stream):
            journal.held[stream] = State()
        case ("append", stream, producer, sequence):
            journal.held[stream].log.append((producer, sequence))
        case ("copy", stream, log):
            journal.held[stream].log = list(log)
        case ("intent", victim):
            journal.open[place] = victim
        case ("took", intent, there):
            journal.open.pop(intent, None)
            merge(bucket, journal, there)
        case ("release", token, stream):
            if decided(bucket, token, decides=ended) not in (None, NOBODY):
                journal.held.pop(stream)
                journal.left.add(stream)
                note_move(bucket, journal, token, ("release", stream))
        case ("take", token, stream, source):
            if decided(bucket, token, decides=ended) == place[0]:
                journal.held[stream] = State()
                journal.left.discard(stream)
                if note_move(bucket, journal, token, ("take", stream)):
                    journal.held[stream] = read(bucket, source, ended=False, until=token).held[
                        stream
                    ]


def note_move(bucket: Bucket, journal: Journal, token: str, move: tuple[str, str]) -> bool:
    """Note a move that took place; return whether it is not settled."""
    if bucket.get(("settled", token)) is not None:
        return False
    journal.moves[token] = move
    return True


def decided(bucket: Bucket, token: str, *, decides: bool) -> str | None:
    """Return which journal has the stream of a move, or NOBODY; None if that is not decided."""
    while decides and bucket.broken != "succeed" and bucket.get(("decision", token)) is None:
        bucket.create(("decision", token), NOBODY)
    found: str | None = bucket.get(("decision", token))
    return found


def merge(bucket: Bucket, journal: Holder, there: Journal) -> None:
    """Add what another journal held, and its requests."""
    for stream in there.left if bucket.broken == "itself" else ():
        journal.held.pop(stream, None)
    journal.held |= deepcopy(there.held)
    journal.open |= there.open
    journal.moves |= there.moves


def outcome(bucket: Bucket, place: Place, victim: str) -> Journal | None:
    """Return what an intent brought, maybe nothing; None if that is not decided."""
    end, _ = last_checkpoint(bucket, victim)
    number = end + 1
    while (value := bucket.get((victim, number))) is not None and value[0] != "fence":
        number += 1
    if value is None:
        return None
    return read(bucket, victim) if value[1] == place else Journal()
