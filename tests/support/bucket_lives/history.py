"""What clients of streams in a bucket saw, and the checker, which knows nothing else and shares no code with stores."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Interval:
    """When a call began and when its answer came, on a clock that ticks at each of these events."""

    begun: int
    ended: int


@dataclass(slots=True, frozen=True)
class Acked:
    """An append, or a message of a committed batch, that was acknowledged."""

    stream: str
    writer: str
    number: int
    """The message's number at its writer, which appends its messages in this order."""
    body: bytes
    offset: int | None
    """None if it was acknowledged as a duplicate whose offset is forgotten."""
    when: Interval


@dataclass(slots=True, frozen=True)
class Seen:
    """A message that a reader or a worker received. `worker` is empty for a reader."""

    stream: str
    worker: str
    offset: int
    body: bytes
    when: Interval


@dataclass(slots=True, frozen=True)
class Chunk:
    """An answer to a reader: messages from `start` up to `next`; the stream ended at `end` then."""

    stream: str
    start: int
    next: int
    end: int
    offsets: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Place:
    """A consumer's position that was confirmed."""

    stream: str
    consumer: str
    floor: int
    when: Interval


@dataclass(slots=True)
class History:
    """Everything that clients saw in one life."""

    sent: dict[bytes, tuple[str, str, int]] = field(default_factory=dict)
    """Body -> (stream, writer, number), of everything that a client tried to append. Bodies are unique."""
    acked: list[Acked] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    ends: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    """Stream -> (offset, body) of all that it has at the end."""
    final_places: dict[tuple[str, str], int] = field(default_factory=dict)
    """(stream, consumer) -> its position at the end, read from the store."""
    clock: int = 0

    def tick(self) -> int:
        """Return the time of an event."""
        self.clock += 1
        return self.clock


def judge(history: History) -> list[str]:
    """Return every promise that the history breaks."""
    broken: list[str] = []
    for stream, end in history.ends.items():
        broken += _judge_end(history, stream, end)
    held = {stream: dict(end) for stream, end in history.ends.items()}
    broken += _judge_acked(history, held)
    broken += _judge_seen(history, held)
    broken += _judge_places(history)
    return broken


def _judge_end(history: History, stream: str, end: list[tuple[int, bytes]]) -> list[str]:
    """Check that a stream holds only what was sent to it, each once, in the order of each writer."""
    broken = []
    if [offset for offset, _ in end] != list(range(len(end))):
        broken.append(f"{stream}: its offsets are {[offset for offset, _ in end]}")
    for body, count in Counter(body for _, body in end).items():
        if count > 1:
            broken.append(f"{stream}: {body!r} is stored {count} times")
    last: dict[str, int] = {}
    for offset, body in end:
        sent = history.sent.get(body)
        if sent is None or sent[0] != stream:
            broken.append(f"{stream}: {body!r} at {offset} was never sent to it")
            continue
        _, writer, number = sent
        if number <= last.get(writer, -1):
            broken.append(f"{stream}: {body!r} at {offset} is behind number {last[writer]} of {writer}")  # fmt: skip
        last[writer] = number
    return broken


def _judge_acked(history: History, held: dict[str, dict[int, bytes]]) -> list[str]:
    """Check that what was acknowledged is at its offset, and that offsets are in the order of the acknowledgements."""
    broken = []
    by_stream: defaultdict[str, list[tuple[int, Acked]]] = defaultdict(list)
    places = {
        stream: {body: offset for offset, body in end.items()} for stream, end in held.items()
    }
    for one in history.acked:
        at = places.get(one.stream, {}).get(one.body)
        if at is None:
            broken.append(f"{one.stream}: {one.body!r} was acknowledged at {one.offset} and is lost")  # fmt: skip
        elif one.offset is not None and at != one.offset:
            broken.append(f"{one.stream}: {one.body!r} was acknowledged at {one.offset} and is at {at}")  # fmt: skip
        else:
            by_stream[one.stream].append((at, one))
    for stream, acked in by_stream.items():
        # Walk from the highest offset down: everything seen so far is behind, so none of it may have been
        # acknowledged before this one began.
        earliest = history.clock + 1
        for at, one in sorted(acked, key=lambda pair: -pair[0]):
            if earliest < one.when.begun:
                broken.append(f"{stream}: {one.body!r} at {at} began after one behind it was acknowledged")  # fmt: skip
            earliest = min(earliest, one.when.ended)
    return broken


def _judge_seen(history: History, held: dict[str, dict[int, bytes]]) -> list[str]:
    """Check that readers and workers saw what is in the stream, and that readers missed nothing."""
    broken = []
    for seen in history.seen:
        if held[seen.stream].get(seen.offset) != seen.body:
            who = seen.worker or "a reader"
            broken.append(
                f"{seen.stream}: {who} saw {seen.body!r} at {seen.offset}, where {held[seen.stream].get(seen.offset)!r} is"
            )
    for chunk in history.chunks:
        if list(chunk.offsets) != list(range(chunk.start, chunk.next)):
            broken.append(f"{chunk.stream}: a reader got {chunk.offsets} for {chunk.start} to {chunk.next}")  # fmt: skip
        if chunk.end > len(held[chunk.stream]):
            broken.append(f"{chunk.stream}: a reader saw the end {chunk.end}, it is {len(held[chunk.stream])}")  # fmt: skip
    got: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for seen in history.seen:
        if seen.worker:
            got[seen.stream, seen.worker].add(seen.offset)
    for (stream, consumer), floor in history.final_places.items():
        if missed := sorted(set(range(floor)) - got[stream, consumer]):
            broken.append(f"{stream}: {consumer} is at {floor} and never got {missed}")
    return broken


def _judge_places(history: History) -> list[str]:
    """Check that a consumer's position never goes back behind one that was confirmed before."""
    broken = []
    by_consumer: defaultdict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in history.places:
        by_consumer[place.stream, place.consumer].append(place)
    for (stream, consumer), places in by_consumer.items():
        for place in places:
            before = max(
                (one.floor for one in places if one.when.ended < place.when.begun), default=0
            )
            if place.floor < before:
                broken.append(f"{stream}: {consumer} went back from {before} to {place.floor}")
        final = history.final_places.get((stream, consumer))
        most = max(place.floor for place in places)
        if final is not None and final < most:
            broken.append(f"{stream}: {consumer} is at {final} at the end and was at {most}")
    return broken
