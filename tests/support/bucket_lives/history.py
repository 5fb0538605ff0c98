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
    begun_s: float = 0.0
    """When it was sent first: it was not stored before."""


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
    removed: tuple[tuple[int, int], ...] = ()
    """(first, next) of what retention has removed, as the answer says."""


@dataclass(slots=True, frozen=True)
class Place:
    """A consumer's position that was confirmed."""

    stream: str
    consumer: str
    floor: int
    when: Interval


@dataclass(slots=True, frozen=True)
class Limits:
    """What a stream may keep; 0: without limit."""

    messages: int = 0
    bytes: int = 0
    age_s: float = 0.0


@dataclass(slots=True, frozen=True)
class End:
    """All that a stream has at the end."""

    oldest: int
    next: int
    items: list[tuple[int, bytes]]
    """(offset, body)."""
    at_s: float = 0.0
    size_bytes: int = 0


@dataclass(slots=True)
class History:
    """Everything that clients saw in one life. Streams are named by their labels, which are never used again."""

    sent: dict[bytes, tuple[str, str, int]] = field(default_factory=dict)
    """Body -> (stream, writer, number), of everything that a client tried to append. Bodies are unique."""
    limits: dict[str, Limits] = field(default_factory=dict)
    acked: list[Acked] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    done: defaultdict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    """(stream, consumer) -> offsets that a worker has reported as finished, whether the report arrived or not."""
    redriven: set[tuple[str, str]] = field(default_factory=set)
    """(stream, consumer) of which dead letters were delivered again: its position may go back."""
    letters: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    """(stream, consumer) -> offsets of the messages that are dead letters at the end."""
    deleted: dict[str, Interval] = field(default_factory=dict)
    """Stream -> when its deletion was asked for, and confirmed."""
    ends: dict[str, End] = field(default_factory=dict)
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
    witnessed = _witnessed(history, broken)
    for stream, end in history.ends.items():
        broken += _judge_end(history, stream, end)
        broken += _judge_removed(history, stream, end)
    broken += _judge_acked(history)
    broken += _judge_seen(history, witnessed)
    broken += _judge_places(history)
    broken += _judge_deleted(history)
    return broken


def judge_older(history: History, clock: int, found: dict[str, End]) -> list[str]:
    """Return what is wrong with the streams that an older copy of the bucket has. It was made at the time `clock`."""
    broken: list[str] = []
    witnessed = _witnessed(history, broken)
    for one in history.acked:
        gone = history.deleted.get(one.stream)
        if one.when.ended > clock or one.offset is None or (gone and gone.begun <= clock):
            continue
        end = found.get(one.stream)
        if end is None or (one.offset >= end.oldest and dict(end.items).get(one.offset) != one.body):  # fmt: skip
            broken.append(f"{one.stream}: an older copy of the bucket does not have {one.body!r} at {one.offset}")  # fmt: skip
    for stream, end in found.items():
        gone = history.deleted.get(stream)
        if gone and gone.ended <= clock:
            broken.append(
                f"{stream}: an older copy of the bucket has it, and it was deleted before"
            )
        for offset, body in end.items:
            if witnessed.get((stream, offset), body) != body:
                broken.append(f"{stream}: an older copy of the bucket has {body!r} at {offset}")
    return broken


def _witnessed(history: History, broken: list[str]) -> dict[tuple[str, int], bytes]:
    """Return what anybody saw at each (stream, offset). It must always have been the same."""
    witnessed: dict[tuple[str, int], bytes] = {}

    def witness(stream: str, offset: int, body: bytes, who: str) -> None:
        there = witnessed.setdefault((stream, offset), body)
        if there != body:
            broken.append(f"{stream}: {who} saw {body!r} at {offset}, where {there!r} is")

    for stream, end in history.ends.items():
        for offset, body in end.items:
            witness(stream, offset, body, "its end")
    for one in history.acked:
        if one.offset is not None:
            witness(one.stream, one.offset, one.body, one.writer)
    for seen in history.seen:
        witness(seen.stream, seen.offset, seen.body, seen.worker or "a reader")
    return witnessed


def _judge_end(history: History, stream: str, end: End) -> list[str]:
    """Check that a stream holds only what was sent to it, each once, in the order of each writer."""
    broken = []
    if [offset for offset, _ in end.items] != list(range(end.oldest, end.next)):
        broken.append(f"{stream}: from {end.oldest} to {end.next} its offsets are {[offset for offset, _ in end.items]}")  # fmt: skip
    for body, count in Counter(body for _, body in end.items).items():
        if count > 1:
            broken.append(f"{stream}: {body!r} is stored {count} times")
    last: dict[str, int] = {}
    for offset, body in end.items:
        sent = history.sent.get(body)
        if sent is None or sent[0] != stream:
            broken.append(f"{stream}: {body!r} at {offset} was never sent to it")
            continue
        _, writer, number = sent
        if number <= last.get(writer, -1):
            broken.append(f"{stream}: {body!r} at {offset} is behind number {last[writer]} of {writer}")  # fmt: skip
        last[writer] = number
    return broken


def _judge_removed(history: History, stream: str, end: End) -> list[str]:
    """Check that retention removed nothing that the limits have room for."""
    limits = history.limits.get(stream, Limits())
    if not end.oldest:
        return []
    broken = []
    kept = len(end.items)
    if limits.messages:
        if kept < limits.messages:
            broken.append(f"{stream}: {kept} messages are left of at most {limits.messages}")
    elif limits.bytes:
        one = 1.5 * end.size_bytes / kept if kept else 0
        if end.size_bytes + one < limits.bytes:
            broken.append(f"{stream}: {end.size_bytes} bytes are left of at most {limits.bytes}")
    elif limits.age_s:
        broken += [
            f"{stream}: {one.body!r} at {one.offset} was removed, not older than {end.at_s - one.begun_s:.1f} s"
            for one in history.acked
            if one.stream == stream
            and one.offset is not None
            and one.offset < end.oldest
            and end.at_s - one.begun_s < limits.age_s
        ]
    else:
        broken.append(f"{stream}: everything below {end.oldest} was removed, and it has no limit")
    return broken


def _judge_acked(history: History) -> list[str]:
    """Check that what was acknowledged is at its offset, and that offsets are in the order of the acknowledgements."""
    broken = []
    by_stream: defaultdict[str, list[tuple[int, Acked]]] = defaultdict(list)
    places = {
        stream: {body: offset for offset, body in end.items} for stream, end in history.ends.items()
    }
    for one in history.acked:
        end = history.ends.get(one.stream)
        at = places.get(one.stream, {}).get(one.body, one.offset)
        if end is not None and one.body not in places[one.stream]:
            if end.oldest and (at is None or at < end.oldest):
                pass  # removed: see `_judge_removed`
            else:
                broken.append(f"{one.stream}: {one.body!r} was acknowledged at {one.offset} and is lost")  # fmt: skip
                continue
        if at is None:
            continue
        if one.offset is not None and at != one.offset:
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


def _judge_seen(history: History, witnessed: dict[tuple[str, int], bytes]) -> list[str]:
    """Check that readers and workers saw what is in the stream, and that they missed nothing."""
    broken = []
    for seen in history.seen:
        end = history.ends.get(seen.stream)
        if end is not None and end.next <= seen.offset:
            who = seen.worker or "a reader"
            broken.append(f"{seen.stream}: {who} saw {seen.body!r} at {seen.offset}, behind the end {end.next}")  # fmt: skip
    for chunk in history.chunks:
        covered = set(chunk.offsets)
        for first, after in chunk.removed:
            covered.update(range(first, after))
        if covered != set(range(chunk.start, chunk.next)):
            broken.append(f"{chunk.stream}: a reader got {chunk.offsets} and {chunk.removed} for {chunk.start} to {chunk.next}")  # fmt: skip
        end = history.ends.get(chunk.stream)
        if end is None:
            continue
        if chunk.end > end.next:
            broken.append(f"{chunk.stream}: a reader saw the end {chunk.end}, it is {end.next}")
        broken += [
            f"{chunk.stream}: a reader was told that {first} to {after} is removed, it begins at {end.oldest}"
            for first, after in chunk.removed
            if after > end.oldest
        ]
    got: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for seen in history.seen:
        if seen.worker:
            got[seen.stream, seen.worker].add(seen.offset)
    for (stream, consumer), floor in history.final_places.items():
        oldest = history.ends[stream].oldest if stream in history.ends else 0
        letters = history.letters.get((stream, consumer), set())
        wanted = set(range(oldest, floor)) - letters
        if missed := sorted(wanted - got[stream, consumer]):
            broken.append(f"{stream}: {consumer} is at {floor} and never got {missed}")
            continue
        if skipped := sorted(wanted - history.done.get((stream, consumer), set())):
            broken.append(f"{stream}: {consumer} is at {floor}, and nobody has finished {skipped}")
    return broken


def _judge_places(history: History) -> list[str]:
    """Check that a consumer's position never goes back behind one that was confirmed before."""
    broken = []
    by_consumer: defaultdict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in history.places:
        by_consumer[place.stream, place.consumer].append(place)
    for (stream, consumer), places in by_consumer.items():
        if (stream, consumer) in history.redriven:
            continue
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


def _judge_deleted(history: History) -> list[str]:
    """Check that a deleted stream accepts nothing more, and is not there at the end."""
    broken = [
        f"{stream}: it was deleted, and is there at the end"
        for stream in history.deleted
        if stream in history.ends
    ]
    for one in history.acked:
        gone = history.deleted.get(one.stream)
        if gone is not None and one.when.begun > gone.ended:
            broken.append(f"{one.stream}: {one.body!r} was acknowledged after the stream was deleted")  # fmt: skip
    return broken
