"""Checks the histories of a run against the promises of Iris, without sharing code with it.

A history is the list of events of one process, in order. If the process was killed, it does not end with "closed".
Each function below checks one promise and yields a text for each violation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """The history of one process."""

    name: str
    events: Sequence[Event]
    to_the_end: bool = True
    """The process was running when the last messages were sent; others were stopped earlier."""

    @property
    def closed(self) -> bool:
        """Whether the process ended by itself; it does not write this event if it is killed."""
        return any(event["what"] == "closed" for event in self.events)

    def all(self, *what: str) -> Iterator[Event]:
        """Iterate over its events of these kinds."""
        return (event for event in self.events if event["what"] in what)


@dataclass
class Judged:
    """The violations, and how many events of each kind were checked."""

    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def judge(histories: Iterable[History]) -> Judged:
    """Check all promises."""
    judged = Judged()
    known = list(histories)
    for promise in (calls, tunnels, flows, groups, appends, recorded, worked):
        judged.violations += [
            f"{promise.__name__}: {text}" for text in promise(known, judged.counts)
        ]
    return judged


def calls(histories: list[History], counts: Counter[str]) -> Iterator[str]:
    """Calls run at most once, `may_have_run` is true to the facts, and each call has an outcome."""
    runs: Counter[str] = Counter()
    surveyed: Counter[str] = Counter()
    asked = {event["id"] for history in histories for event in history.all("call")}
    for history in histories:
        per_member: Counter[str] = Counter()
        for event in history.all("ran"):
            if event["id"] not in asked:
                yield f"{event['kind']} {event['id']} ran at {history.name}, and nobody made it"
            if event["kind"] == "survey":  # every member runs it
                per_member[event["id"]] += 1
                surveyed[event["id"]] += 1
                if per_member[event["id"]] == 2:
                    yield f"survey {event['id']} ran twice at {history.name}"
            else:
                runs[event["id"]] += 1
        yield from (event["text"] for event in history.all("wrong"))
    for history in histories:
        begun = {event["id"]: event for event in history.all("call")}
        ends = {event["id"]: event for event in history.all("done", "failed")}
        for call, event in begun.items():
            kind, end = event["kind"], ends.get(call)
            ran = surveyed[call] if kind == "survey" else runs[call]
            counts[kind] += 1
            if kind in ("request", "push") and ran > 1 and not event["idempotent"]:
                yield f"{kind} {call} ran {ran} times"
            if end is None:
                if history.closed:
                    yield f"{kind} {call} has no end, and its caller closed"
                continue
            if end["what"] == "failed":
                counts[f"{kind}s failed"] += 1
                if end["ran"] == "no" and ran:
                    yield f"{kind} {call} ran, and was said not to have: {end['error']}"
            elif kind == "request" and not ran:
                yield f"request {call} was answered, and nobody ran it"


def tunnels(histories: list[History], counts: Counter[str]) -> Iterator[str]:
    """Each end received a prefix of what the other sent, and all of it if it says so."""
    sent = {event["id"]: event for history in histories for event in history.all("sent")}
    meant = {event["id"]: event["count"] for history in histories for event in history.all("meant")}
    never = {
        event["id"] for history in histories for event in history.all("failed") if event["ran"] == "no"
    }  # fmt: skip
    seen: set[str] = set()
    for history in histories:
        for got in history.all("tunnel"):
            call = got["id"]
            if call in seen:
                yield f"tunnel {call} had two other ends"
            seen.add(call)
            counts["tunnels that reached a member"] += 1
            if call in never:
                yield f"tunnel {call} reached a member, and was said not to have"
            if got["whole"] and got["got"] < meant.get(call, 0):
                yield f"tunnel {call}: its member has all, {got['got']} of {meant[call]} that were meant"
            one = sent.get(call)
            if one is None:
                continue  # its caller was killed
            if got["got"] > one["sent"] + 1:  # a send that was interrupted may have sent one more
                yield f"tunnel {call}: {got['got']} came of {one['sent']}"
            if got["whole"] and got["got"] < one["sent"]:
                yield f"tunnel {call}: its member has all, {got['got']} of {one['sent']}"
            if one["whole"] and not (got["whole"] and got["got"] == one["sent"]):
                yield f"tunnel {call}: its caller says all {one['sent']} arrived, its member has {got['got']}"
    for call, one in sent.items():
        if one["whole"] and call not in seen:
            yield f"tunnel {call}: its caller says all {one['sent']} arrived, and no member has it"


class Published:
    """What publishers wrote: their accepted messages, and the losses reported to them.

    A flow is the messages of one publisher to one topic, or its broadcasts.
    """

    def __init__(self, histories: list[History]) -> None:
        self.count: dict[str, int] = {}
        """Accepted messages: flow -> count."""
        self.whole: set[str] = set()
        """Flows whose publisher ended by itself, so that `count` is exact."""
        self.last: set[str] = set()
        """Flows of `whole` whose latest messages were sent after all faults had ended."""
        self.lost: dict[str, float] = defaultdict(float)
        """Losses reported to the publisher: flow -> count, infinite if the number was unknown."""
        for history in histories:
            own = set()
            for event in history.all("accepted"):
                own.add(event["flow"])
                self.count[event["flow"]] = event["number"] + 1
            if history.closed:
                self.whole |= own
                self.last |= own if history.to_the_end else set()
            # Only losses of its own messages: as a subscriber it gets reports about other publishers, too.
            for event in history.all("loss"):
                flow = event["flow"] if event["kind"] == "publish" else f"broadcast {history.name}"
                if event["kind"] in ("publish", "broadcast") and flow in own:
                    self.lost[flow] += float("inf") if event["count"] is None else event["count"]

    def never(self, flow: str, number: int) -> bool:
        """Return whether this message was certainly not published.

        A message is written after it was sent, so a killed publisher may have sent one more.
        """
        count = self.count.get(flow, 0)
        return number >= count + (flow not in self.whole)


class Account:
    """The position of one receiver in each flow, and the losses reported to it."""

    def __init__(self, published: Published) -> None:
        self._lost = published.lost
        self._gaps: list[tuple[str, int | None]] = []
        self._at: dict[str, tuple[int, int]] = {}
        """The next expected number of a flow, and how many gaps were reported before its latest message."""
        self._silent: Counter[str] = Counter()

    def gap(self, name: str, count: int | None) -> None:
        """Add a reported loss: of a topic, of all topics that match a filter, or, if the name is empty, of any."""
        self._gaps.append((name, count))

    def due(self, flow: str) -> int | None:
        """Return the next expected number; None if nothing of the flow was received."""
        found = self._at.get(flow)
        return None if found is None else found[0]

    def reported(self, flow: str) -> bool:
        """Return whether any loss was reported since the latest message of a flow."""
        after = self._at[flow][1] if flow in self._at else 0
        return any(_names(name, flow) for name, _ in self._gaps[after:])

    def silent(self, flow: str, number: int) -> int:
        """Return how many messages before `number` are missing without a report, here or at the publisher."""
        due, after = self._at[flow]
        missing = number - due
        for name, count in self._gaps[after:]:
            if _names(name, flow):
                if count is None:
                    return 0
                missing -= count
        if missing <= 0:
            return 0
        self._silent[flow] += missing
        return missing if self._silent[flow] > self._lost[flow] else 0

    def received(self, flow: str, number: int) -> None:
        """Note a received message."""
        self._at[flow] = number + 1, len(self._gaps)


def _names(name: str, flow: str) -> bool:
    """Return whether a gap of this name can concern the flow. Gaps of broadcasts name the cluster, not the sender."""
    return not name or name == flow or "*" in name or ">" in name or flow.startswith("broadcast ")


def flows(histories: list[History], counts: Counter[str]) -> Iterator[str]:
    """Order, no duplicate, and sent = received + reported, for each receiver of a whole flow."""
    published = Published(histories)
    for history in histories:
        account = Account(published)
        for event in history.all("received", "gap"):
            if event["what"] == "gap":
                counts["gaps reported"] += 1
                account.gap(event.get("name", ""), event["count"])
                continue
            flow, number = event["flow"], event["number"]
            counts["messages received"] += 1
            if published.never(flow, number):
                yield f"{history.name} received {flow} {number}, which nobody published"
            due = account.due(flow)
            if due is not None:
                if number < due:
                    yield f"{history.name} received {flow} {number} after {due - 1}"
                    continue
                if account.silent(flow, number):
                    yield f"{history.name} received {flow} {number} after {due - 1}, with no loss reported"
            account.received(flow, number)
        if not (history.closed and history.to_the_end):
            continue
        receives = {event["receives"] for event in history.all("ready")}
        for flow, count in published.count.items():
            due = account.due(flow)
            if due is None:
                kind = "broadcast" if flow.startswith("broadcast ") else "publish"
                if flow in published.last and kind in receives and not account.reported(flow):
                    yield f"{history.name} received nothing of {flow}, with no loss reported"
            elif flow in published.whole and due < count and account.silent(flow, count):
                yield f"{history.name} received {flow} to {due - 1} of {count - 1}, with no loss reported"


def groups(histories: list[History], counts: Counter[str]) -> Iterator[str]:
    """Exactly one of a queue group receives a message, and each receives its share in order."""
    by: dict[tuple[str, int], str] = {}
    published = Published(histories)
    there: list[Account] = []
    """Accounts of the receivers that were running to the end."""
    for history in histories:
        last: dict[str, int] = {}
        account = Account(published)
        receives = {event["receives"] for event in history.all("ready")}
        if "shared" in receives and history.closed and history.to_the_end:
            there.append(account)
        for event in history.all("shared", "gap"):
            if event["what"] == "gap":
                account.gap(event.get("name", ""), event["count"])
                continue
            account.received(event["flow"], event["number"])
            message = (event["flow"], event["number"])
            counts["messages shared"] += 1
            if published.never(*message):
                yield f"{history.name} received {message}, which nobody published"
            if message in by:
                yield f"{message} was received by {by[message]} and {history.name}"
            by[message] = history.name
            if event["number"] <= last.get(event["flow"], -1):
                yield f"{history.name} received {message} after {last[event['flow']]}"
            last[event["flow"]] = event["number"]
    for flow in sorted(published.last):
        final = (flow, published.count[flow] - 1)
        if flow.startswith("broadcast ") or final in by or not there:
            continue
        if not published.lost[flow] and not any(account.reported(flow) for account in there):
            yield f"{final}, the last of all, was received by nobody of the group"


def appends(histories: list[History], counts: Counter[str]) -> Iterator[str]:
    """An acknowledged message is stored once, at its offset; one that failed for certain is not stored."""
    offsets_of: dict[str, list[int]] = defaultdict(list)
    asked = {event["id"] for history in histories for event in history.all("call")}
    for history in histories:
        for event in history.all("read"):
            if event["stream"] == "orders":
                offsets_of[event["payload"]].append(event["offset"])
    for call, offsets in offsets_of.items():
        counts["appends read"] += 1
        if call not in asked:
            yield f"{call!r} is there at {offsets}, and nobody appended it"
        if len(offsets) > 1:
            yield f"append {call} is there {len(offsets)} times, at {offsets}"
    for history in histories:
        for event in history.all("appended"):
            if offsets_of[event["id"]][:1] != [event["offset"]]:
                yield f"append {event['id']} was acknowledged at {event['offset']} and is at {offsets_of[event['id']]}"
        kinds = {event["id"]: event["kind"] for event in history.all("call")}
        for event in history.all("failed"):
            if (
                kinds.get(event["id"]) == "append"
                and event["ran"] == "no"
                and offsets_of[event["id"]]
            ):
                yield f"append {event['id']} is there, and was said not to be: {event['error']}"


def recorded(histories: list[History], counts: Counter[str]) -> Iterator[str]:
    """A recorded stream has each flow in order, and a gap for what it lacks."""
    published = Published(histories)
    for history in histories:
        account = Account(published)
        for event in history.all("read", "hole"):
            if event["stream"] != "recorded":
                continue
            if event["what"] == "hole":
                counts["holes reported"] += 1
                account.gap("", event["count"] or None)
                continue
            flow, number = event["topic"], int(event["payload"])
            counts["recorded messages read"] += 1
            if published.never(flow, number):
                yield f"recorded: {flow} {number}, which nobody published"
            due = account.due(flow)
            if due is not None:
                if number < due:
                    yield f"recorded: {flow} {number} stands after {due - 1}"
                    continue
                if account.silent(flow, number):
                    yield f"recorded: {flow} {number} stands after {due - 1}, and no hole tells of the rest"
            account.received(flow, number)
        if not any(event["stream"] == "recorded" for event in history.all("finished")):
            continue
        for flow in sorted(published.last):
            due, count = account.due(flow), published.count[flow]
            if flow.startswith("broadcast "):
                continue
            if due is None:
                if not account.reported(flow):
                    yield f"recorded: nothing of {flow}, and no hole tells why"
            elif due < count and account.silent(flow, count):
                yield f"recorded: {flow} ends with {due - 1} of {count - 1}, and no hole tells of the rest"


def worked(histories: list[History], counts: Counter[str]) -> Iterator[str]:
    """Every message of the stream was worked on, or is a dead letter; good ones were worked on."""
    done: Counter[int] = Counter()
    named: set[tuple[int, str]] = set()
    there: dict[int, str] = {}
    dead = 0
    for history in histories:
        for event in history.all("worked"):
            done[event["offset"]] += 1
            named.add((event["offset"], event["id"]))
        for event in history.all("read"):
            if event["stream"] == "orders":
                there[event["offset"]] = event["payload"]
            elif event["stream"] == "orders.dead":
                dead += 1
    counts["messages worked on"] += len(done)
    counts["worked on again"] += sum(done.values()) - len(done)
    counts["dead letters"] += dead
    for offset, call in sorted(named):
        if there.get(offset) != call:
            yield f"a worker was handed {call} at {offset}, where {there.get(offset)} is"
    for offset, call in there.items():
        if not done[offset] and not dead:
            yield f"{call} at {offset} was never handed to a worker"
    if dead:
        yield f"{dead} good messages are dead letters"
