"""Judges the histories of a run. It knows what Iris promises, and shares no code with it.

A history is the list of events of one process, in its order; `killed` says that it was ended without a word. Each function
below judges one promise and returns what breaks it, in words.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Told:
    """The history of one process."""

    name: str
    events: list[Event]
    to_the_end: bool = True
    """It was there when the last messages came; another one was told to stop before."""

    @property
    def closed(self) -> bool:
        """It ended by itself; whoever was killed says nothing."""
        return any(event["what"] == "closed" for event in self.events)

    def all(self, *what: str) -> Iterator[Event]:
        """Iterate over its events of these kinds."""
        return (event for event in self.events if event["what"] in what)


@dataclass
class Judged:
    """What was judged, and what broke a promise."""

    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def judge(histories: Iterable[Told]) -> Judged:
    """Judge all promises."""
    judged = Judged()
    known = list(histories)
    for promise in (calls, tunnels, flows, groups, appends, recorded, worked):
        judged.violations += [
            f"{promise.__name__}: {text}" for text in promise(known, judged.counts)
        ]
    return judged


def calls(histories: list[Told], counts: Counter[str]) -> Iterator[str]:
    """At most once, the truth of `may_have_run`, an end for each call."""
    runs: Counter[str] = Counter()
    for history in histories:
        per_member: Counter[str] = Counter()
        for event in history.all("ran"):
            if event["kind"] == "survey":  # every member runs it
                per_member[event["id"]] += 1
                if per_member[event["id"]] == 2:
                    yield f"survey {event['id']} ran twice at {history.name}"
            else:
                runs[event["id"]] += 1
        yield from (event["text"] for event in history.all("wrong"))
    for history in histories:
        begun = {event["id"]: event for event in history.all("call")}
        ends = {event["id"]: event for event in history.all("done", "failed")}
        for call, event in begun.items():
            kind, ran, end = event["kind"], runs[call], ends.get(call)
            counts[kind] += 1
            if kind in ("request", "push") and ran > 1 and not event["idempotent"]:
                yield f"{kind} {call} ran {ran} times"
            if end is None:
                if history.closed:
                    yield f"{kind} {call} has no end, and its caller closed"
                continue
            if end["what"] == "failed":
                counts[f"{kind}s failed"] += 1
                if end["ran"] == "no" and ran and kind in ("request", "push"):
                    yield f"{kind} {call} ran, and was said not to have: {end['error']}"
            elif kind == "request" and not ran:
                yield f"request {call} was answered, and nobody ran it"


def tunnels(histories: list[Told], counts: Counter[str]) -> Iterator[str]:
    """What one end got is the beginning of what the other sent; who says that it is all, has all."""
    sent = {event["id"]: event for history in histories for event in history.all("sent")}
    seen: set[str] = set()
    for history in histories:
        for got in history.all("tunnel"):
            call = got["id"]
            if call in seen:
                yield f"tunnel {call} had two other ends"
            seen.add(call)
            counts["tunnels that reached a member"] += 1
            one = sent.get(call)
            if one is None:
                continue  # its caller was killed
            if got["got"] > one["sent"] + 1:  # one more may have gone when its send was cut short
                yield f"tunnel {call}: {got['got']} came of {one['sent']}"
            if got["whole"] and got["got"] < one["sent"]:
                yield f"tunnel {call}: its member has all, {got['got']} of {one['sent']}"
            if one["whole"] and not (got["whole"] and got["got"] == one["sent"]):
                yield f"tunnel {call}: its caller says all {one['sent']} arrived, its member has {got['got']}"


class Account:
    """What one listener was told of losses, and of each flow where it is."""

    def __init__(self) -> None:
        self._unknown = self._known = 0
        self._at: dict[str, tuple[int, int, int]] = {}
        """Of a flow: the number that is due, and the losses told when its latest message came."""

    def gap(self, count: int | None) -> None:
        """A loss is told."""
        if count is None:
            self._unknown += 1
        else:
            self._known += count

    def due(self, flow: str) -> int | None:
        """Return the number that is due; None if nothing of the flow has come."""
        found = self._at.get(flow)
        return None if found is None else found[0]

    def silent(self, flow: str, number: int) -> int:
        """Return how many before `number` are missing that nobody told of."""
        due, unknown, known = self._at[flow]
        missing = number - due
        return missing if self._unknown == unknown and self._known - known < missing else 0

    def heard(self, flow: str, number: int) -> None:
        """A message has come."""
        self._at[flow] = number + 1, self._unknown, self._known


def flows(histories: list[Told], counts: Counter[str]) -> Iterator[str]:
    """Order, no duplicate, and sent = received + told, for everybody who hears all of a flow."""
    accepted: dict[str, int] = {}
    whole: dict[str, bool] = {}
    told_sender: Counter[str] = Counter()
    for history in histories:
        closed = history.closed
        for event in history.all("accepted"):
            accepted[event["flow"]] = event["number"] + 1
            whole[event["flow"]] = closed
        for event in history.all("loss"):
            if event["kind"] in ("publish", "broadcast"):
                told_sender[event["flow"]] += 1
    for history in histories:
        account = Account()
        for event in history.all("heard", "gap"):
            if event["what"] == "gap":
                counts["gaps told"] += 1
                account.gap(event["count"])
                continue
            flow, number = event["flow"], event["number"]
            counts["messages heard"] += 1
            due = account.due(flow)
            if due is not None:
                if number < due:
                    yield f"{history.name} heard {flow} {number} after {due - 1}"
                    continue
                if account.silent(flow, number) and not told_sender[flow]:
                    yield f"{history.name} heard {flow} {number} after {due - 1}, and nobody told of the rest"
            account.heard(flow, number)
        if not (history.closed and history.to_the_end):
            continue
        for flow, count in accepted.items():
            due = account.due(flow)
            if whole[flow] and due is not None and due < count and account.silent(flow, count):
                yield f"{history.name} heard {flow} to {due - 1} of {count - 1}, and nobody told of the rest"


def groups(histories: list[Told], counts: Counter[str]) -> Iterator[str]:
    """One of a queue group hears a message, and each in order."""
    by: dict[tuple[str, int], str] = {}
    for history in histories:
        last: dict[str, int] = {}
        for event in history.all("shared"):
            place = (event["flow"], event["number"])
            counts["messages shared"] += 1
            if place in by:
                yield f"{place} was heard by {by[place]} and {history.name}"
            by[place] = history.name
            if event["number"] <= last.get(event["flow"], -1):
                yield f"{history.name} heard {place} after {last[event['flow']]}"
            last[event["flow"]] = event["number"]


def appends(histories: list[Told], counts: Counter[str]) -> Iterator[str]:
    """What was acknowledged is there, at its offset, once; what is said not to be stored is not there."""
    places: dict[str, list[int]] = defaultdict(list)
    read = False
    for history in histories:
        for event in history.all("read"):
            if event["stream"] == "orders":
                read = True
                places[event["payload"]].append(event["offset"])
    if not read:
        return
    for call, offsets in places.items():
        counts["appends read"] += 1
        if len(offsets) > 1:
            yield f"append {call} is there {len(offsets)} times, at {offsets}"
    for history in histories:
        for event in history.all("appended"):
            if places[event["id"]][:1] != [event["offset"]]:
                yield f"append {event['id']} was acknowledged at {event['offset']} and is at {places[event['id']]}"
        kinds = {event["id"]: event["kind"] for event in history.all("call")}
        for event in history.all("failed"):
            if kinds.get(event["id"]) == "append" and event["ran"] == "no" and places[event["id"]]:
                yield f"append {event['id']} is there, and was said not to be: {event['error']}"


def recorded(histories: list[Told], counts: Counter[str]) -> Iterator[str]:
    """A recorded stream has each flow in order, and tells of what it lacks."""
    for history in histories:
        account = Account()
        for event in history.all("read", "hole"):
            if event["stream"] != "recorded":
                continue
            if event["what"] == "hole":
                counts["holes told"] += 1
                account.gap(event["count"] or None)
                continue
            flow, number = event["topic"], int(event["payload"])
            counts["recorded messages read"] += 1
            due = account.due(flow)
            if due is not None:
                if number < due:
                    yield f"recorded: {flow} {number} stands after {due - 1}"
                    continue
                if account.silent(flow, number):
                    yield f"recorded: {flow} {number} stands after {due - 1}, and no hole tells of the rest"
            account.heard(flow, number)


def worked(histories: list[Told], counts: Counter[str]) -> Iterator[str]:
    """Every message of the stream was worked on, or is a dead letter; good ones are no dead letters."""
    done: Counter[int] = Counter()
    there: dict[int, str] = {}
    dead = 0
    for history in histories:
        for event in history.all("worked"):
            done[event["offset"]] += 1
        for event in history.all("read"):
            if event["stream"] == "orders":
                there[event["offset"]] = event["payload"]
            elif event["stream"] == "orders.dead":
                dead += 1
    counts["messages worked on"] += len(done)
    counts["worked on again"] += sum(done.values()) - len(done)
    counts["dead letters"] += dead
    for offset, call in there.items():
        if not done[offset] and not dead:
            yield f"{call} at {offset} was never handed to a worker"
    if dead:
        yield f"{dead} good messages are dead letters"
