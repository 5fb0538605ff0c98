"""The record of all messages in a network, and the promises that are checked at every step."""

from __future__ import annotations

import struct
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

from iris.wire import frames
from iris.wire.codec import BODY_AT, FLAGS_AT, HOP, KIND_AT, TUNNEL_BODY_AT
from iris.wire.kinds import (
    FLAG_REFUSED,
    HERE,
    TUNNEL_KINDS,
    UNKNOWN_COUNT,
    Cause,
    HopClass,
    Kind,
)
from iris.wire.runs import single_answers, single_calls

if TYPE_CHECKING:
    from support.sim.members import SimCall, SimMember, SimSession, Work
    from support.sim.network import LinkEnd, SimNetwork

NEVER_RAN: Final = frozenset(
    cause.name.lower() for cause in (Cause.NO_MEMBERS, Cause.OVERLOADED, Cause.EXPIRED)
)
KNOWN_US: Final = 1_000_000
"""Interest of this age is known to every relay that is linked and not frozen."""
TOLD_US: Final = 2_000_000
"""Time after which a member knows that a caller has left, if there was no fault."""
ON_ITS_WAY_US: Final = 1_000_000
"""An answer sent within this time before the deadline may arrive too late."""


FORWARD: Final = frozenset(
    {
        Kind.REQUEST,
        Kind.PUSH,
        Kind.SURVEY,
        Kind.BROADCAST,
        Kind.PUBLISH,
        Kind.TUNNEL_OPEN,
        Kind.STREAM,
    }
)
"""Kinds of frames from a sender to members. The others follow the path of the call that they answer."""
CASTS: Final = (Kind.PUBLISH, Kind.BROADCAST)


FAR_US: Final = 1_000_000
"""A call with less time than this may time out on its way to other sites and back."""


TAG: Final = struct.Struct("<4sQ")
MAGIC: Final = b"#sim"
"""Start of the body of each data frame: this mark, then the tag."""


def _alias(frame: bytes) -> int:
    return int(HOP.unpack_from(frame)[3])


def singles(frame: bytes, kind: int) -> list[bytes]:
    """Return the calls of a run, as single frames of `kind`. Any other frame is returned alone."""
    buf = memoryview(frame)
    if frame[KIND_AT] == Kind.CALLS:
        return [bytes(one) for one in single_calls(buf, 0, len(frame), kind)]
    if frame[KIND_AT] == Kind.ANSWERS:
        return [bytes(one) for one in single_answers(buf, 0, len(frame), Kind.REPLY)]
    return [frame]


def tag_of(frame: bytes) -> int:
    """Return the tag of a data frame; 0 for a TUNNEL_END, which has none."""
    at = TUNNEL_BODY_AT if frame[KIND_AT] in TUNNEL_KINDS else BODY_AT
    if len(frame) < at + TAG.size:
        return 0
    magic, tag = TAG.unpack_from(frame, at)
    return int(tag) if magic == MAGIC else 0


class Cast:
    """A bundle in transit: its sender, and the receivers that must get it or a report of its loss."""

    __slots__ = ("address", "count", "first", "receivers", "sender", "sent_us", "tag")

    def __init__(
        self, sender: SimSession, address: tuple[int, str, bytes], tag: int, first: int, count: int
    ) -> None:
        self.sender = sender
        self.address = address
        self.tag = tag
        self.first = first
        self.count = count
        self.sent_us = sender.net.now_us
        self.receivers: list[tuple[SimSession, int]] = []
        """(session, member serial or 0)"""


class KnownSequence:
    """A receiver's view of a sender's sequence for one address: `since` to `until`, without reported losses."""

    __slots__ = ("last", "since", "unknown", "until")

    def __init__(self) -> None:
        self.last = -1
        """The latest number that arrived."""
        self.since = 1 << 64
        self.until = 0
        self.unknown = False
        """Losses of unknown number were reported."""

    def know(self, first: int, count: int) -> None:
        self.since = min(self.since, first)
        self.until = max(self.until, first + count)


class Ledger:
    """All messages, by their tags."""

    def __init__(self, net: SimNetwork) -> None:
        self.net = net
        self.calls: dict[int, SimCall] = {}
        self.run_calls = 0
        """Number of calls that crossed a link as part of a run."""
        self.open: dict[int, SimCall] = {}
        """Calls without an outcome: tag -> call."""
        self.runs: Counter[int] = Counter()
        """Requests and pushes: tag -> how often a handler started."""
        self.works: dict[int, Work] = {}
        """Tag of a call -> its latest dispatch to a member."""
        self.outcomes: Counter[str] = Counter()
        self.aimed_runs = 0
        """Number of calls to one member that ran there."""
        self.cancels = 0
        """Number of handlers that were cancelled, and of messages that did not run, because their callers had left."""
        self._given_up: set[tuple[int, str]] = set()
        """(tag, member) of messages that did not run because their callers had left."""
        self.cast_copies = 0
        self.loops_checked = 0
        self.gaps = 0
        self.stalls = 0
        """How often a publisher waited until it stalled."""
        self.renewals = 0
        """How often a relay asked a session for credit again."""
        self._tag = 0
        self._faults = 0
        self._fault_until_us = 0
        self._surveyed: set[tuple[int, str]] = set()
        self._casts: set[tuple[int, int, int]] = set()
        self._grouped: set[tuple[int, str]] = set()
        self._known: dict[tuple[int, int, int, str, bytes, bytes], KnownSequence] = {}
        """(session, member, kind, name, key, sender) -> sequence."""
        self._sent: list[Cast] = []
        self.audited = 0
        self.reported_lost = 0
        self.late = 0
        """Bundles that arrived after a later one, which a session drops."""
        self.over_wan = 0
        """Data frames sent over WAN connections."""
        self.wan_casts: Counter[tuple[int, str]] = Counter()
        """(tag of a bundle, site) -> how often it was sent there."""
        self.wan_via: dict[tuple[int, str], tuple[int, int]] = {}
        """(tag of a bundle, site) -> the hosts at both ends of the WAN connection."""
        self._origins: dict[int, str] = {}
        """Tag -> site of origin."""
        self._to_wan: set[tuple[bytes, int, str]] = set()
        self._crossed: dict[tuple[bytes, int, int], tuple[int, bool, int]] = {}
        """(relay, kind, tag) -> (host that it came from, whether over a WAN connection, hop class)."""

    def new_tag(self) -> int:
        self._tag += 1
        return self._tag

    # -- what may excuse a timeout ---------------------------------------------------------------------------

    def fault_begins(self) -> None:
        """Note a fault that others do not notice at once."""
        self._faults += 1

    def fault_ends(self) -> None:
        """Note that a fault has ended, or that all have noticed it."""
        self._faults -= 1
        self._fault_until_us = max(self._fault_until_us, self.net.now_us)

    def fault_for(self, duration_us: int) -> None:
        """Note a fault that ends, or is noticed by all, after `duration_us`."""
        self._fault_until_us = max(self._fault_until_us, self.net.now_us + duration_us)

    # -- calls -----------------------------------------------------------------------------------------------

    def comes_from(self, tag: int, site: str) -> None:
        """Note the site of origin of a message."""
        self._origins[tag] = site

    def sent(self, call: SimCall) -> None:
        self.comes_from(call.tag, call.session.relay.site)
        self.calls[call.tag] = self.open[call.tag] = call

    def handed(self, work: Work, session: SimSession) -> None:
        """Note a dispatch to a member's session. Its deadline must be the caller's, except for the time in transit."""
        call = self.calls[work.tag]
        self.works[work.tag] = work
        if not work.deadline_us:
            self.net.violate(f"{call} reached {session} without its deadline")
        late_us = work.deadline_us - session.offset_us - call.deadline_us
        slack_us = (
            0
            if session.relay is call.session.relay
            else self.net.slowest_us(session.relay, call.session.relay)
        )
        if not 0 <= late_us <= slack_us:
            self.net.violate(f"{call} has {late_us} µs more at {session} than its caller gave it")

    def executed(self, work: Work, member: SimMember) -> None:
        """Note that a handler starts."""
        call = self.calls[work.tag]
        here, home = member.session.relay.site, call.session.relay.site
        if call.site and here != (home if call.site == HERE else call.site):
            self.net.violate(f"{call} was for {call.site!r}, and runs in {here}")
        if call.member:
            self.aimed_runs += 1
            if call.member != member.member_id:
                self.net.violate(f"{call} was for {call.member}, and runs on {member.member_id}")
        if (work.tag, member.member_id) in self._given_up:
            self.net.violate(f"{call} runs on {member.member_id}, which had given it up")
        if work.kind == Kind.SURVEY:
            key = (work.tag, member.member_id)
            if key in self._surveyed:
                self.net.violate(f"{call} ran twice on {member.member_id}")
            self._surveyed.add(key)
            return
        self.runs[work.tag] += 1
        self.net.note(f"{call} runs on {member.session}")
        if self.runs[work.tag] > 1:
            self.net.violate(f"{call} ran {self.runs[work.tag]} times")
        if call.outcome in NEVER_RAN and not call.may_have_run:
            self.net.violate(f"{call} runs on {member.session} after it ended as {call.outcome!r}")

    def ended(self, call: SimCall) -> None:
        self.open.pop(call.tag, None)
        self.outcomes[f"{Kind(call.kind).name.lower()} {call.outcome}"] += 1
        if call.outcome == "reply" and self.runs[call.tag] != 1:
            self.net.violate(f"{call} has a reply, and ran {self.runs[call.tag]} times")
        failed = call.outcome not in ("closed", "timeout", "handed", "cancelled")
        if failed and not call.may_have_run and self.runs[call.tag]:
            self.net.violate(
                f"{call} ran, and its caller got a failure that rules this out: {call.outcome}"
            )

    def cancelled(self, work: Work, member: SimMember) -> None:
        """Note that a handler ends because its caller is said to have left: check that it has.

        A caller whose relay is out of reach counts as one that left, before it knows.
        """
        call = self.calls[work.tag]
        self.cancels += 1
        self.net.note(f"{call} is cancelled on {member.session}")
        if not call.outcome and not self._excused(call):
            self.net.violate(f"{call} is cancelled on {member.session}, and its caller waits")
        if call.outcome in NEVER_RAN and not call.may_have_run:
            self.net.violate(
                f"{call} is cancelled on {member.session}, and its caller was told that it did not run: {call.outcome}"
            )

    def given_up(self, work: Work, member: SimMember) -> None:
        """Note that a message does not run because its caller has left."""
        call = self.calls[work.tag]
        self.cancels += 1
        self._given_up.add((work.tag, member.member_id))
        self.net.note(f"{call} is given up on {member.session}")
        if not call.outcome and not self._excused(call):
            self.net.violate(f"{call} is given up on {member.session}, and its caller waits")

    def check_cancelled(self, member: SimMember) -> None:
        """Check that the handlers of a member that asks for callers that left have ended with them."""
        session = member.session
        if not member.cancels or session.stalled or session.closed or session.leaving:
            return
        for work in (*member.running.values(), *member.waiting):
            call = self.calls[work.tag]
            told = call.outcome in ("cancelled", "timeout")
            gone = call.outcome == "closed" and call.session.relay.alive
            if not (told or gone) or call.kind == Kind.PUSH or self._excused(call):
                continue
            if call.done_us + TOLD_US > self.net.now_us:
                continue
            self.net.violate(f"{call} still runs on {session}, and its caller has left")

    def _excused(self, call: SimCall) -> bool:
        """Whether there was a fault since a call was sent."""
        return bool(self._faults) or self._fault_until_us >= call.sent_us

    def survey_done(self, call: SimCall) -> None:
        """Check a finished survey: each member that it was dispatched to has answered, or is named as lost."""
        missing = set(call.roster) - set(call.answers) - set(call.lost)
        if missing:
            self.net.violate(f"{call} is over, without a word of {sorted(missing)}")
        if stray := set(call.answers) - set(call.roster):
            self.net.violate(f"{call} was answered by {sorted(stray)}, who are not on the roster")

    def timed_out(self, call: SimCall) -> None:
        """Check that a call which timed out at its caller had a reason."""
        if self._excused(call) or call.kind == Kind.SURVEY:
            return
        if self.net.federated and call.deadline_us - call.sent_us < FAR_US:
            return
        work = self.works.get(call.tag)
        if work is not None and (
            not work.finished_us or work.finished_us + ON_ITS_WAY_US > self.net.now_us
        ):
            return
        self.net.violate(
            f"{call} timed out while nothing was wrong (handed over: {work is not None})"
        )

    # -- casts -----------------------------------------------------------------------------------------------

    def cast_arrived(
        self, session: SimSession, route: frames.Declare, tag: int, first: int, count: int
    ) -> bool:
        """Check a bundle that arrives at a session: never twice, and in its sender's order.

        A bundle that took the path of another gateway may be overtaken; then the session drops it. Return whether it
        is delivered.
        """
        net = self.net
        self.cast_copies += 1
        what = f"{Kind(route.kind).name.lower()} {tag} to {route.name!r}"
        if (copy := (session.uid, route.member, tag)) in self._casts:
            net.violate(f"{what} reached {session} (member {route.member}) twice")
        self._casts.add(copy)
        for group in route.groups:
            if (tag, group) in self._grouped:
                net.violate(f"{what} reached queue group {group!r} twice")
            self._grouped.add((tag, group))
        known = self._flow(session, route)
        if first <= known.last:
            if self._origins.get(tag, session.relay.site) != session.relay.site:
                self.late += 1
                net.note(f"{what} comes too late to {session}")
                return False
            net.violate(
                f"{what}, messages {first} to {first + count - 1}, reached {session} after {known.last}"
            )
        known.last = first + count - 1
        known.know(first, count)
        return True

    def _flow(self, session: SimSession, of: frames.Declare | frames.Gap) -> KnownSequence:
        flow = (session.uid, of.member, of.kind, of.name, of.key_id, of.sender_id)
        return self._known.setdefault(flow, KnownSequence())

    def gap_received(self, session: SimSession, gap: frames.Gap) -> None:
        """Note the report of a loss to a receiver; without a count, the losses begin with it."""
        self.gaps += 1
        known = self._flow(session, gap)
        if gap.count == UNKNOWN_COUNT:
            known.unknown = True
        else:
            known.know(gap.first, gap.count)

    def cast_sent(self, cast: Cast) -> None:
        """Note a sent bundle, with all receivers whose interest is so old that every relay knows it."""
        kind, name, key = cast.address
        usually_us = self.net.now_us - KNOWN_US
        relay = cast.sender.relay
        if relay.frozen:
            return
        for session in self.net.sessions:
            if session.leaving or session.relay.frozen:
                continue
            before_us = self.net.known_by_us(relay, session.relay, usually_us, KNOWN_US)
            if kind == Kind.PUBLISH:
                if session.wants(name, key, before_us):
                    cast.receivers.append((session, 0))
            else:
                cast.receivers += [
                    (session, member.serial)
                    for member in session.members.values()
                    if (member.name, member.key) == (name, key)
                    and kind in member.kinds
                    and member.joined_us <= before_us
                ]
        if cast.receivers:
            self._sent.append(cast)

    def audit(self) -> None:
        """Check, at rest, that bundles within a site, or over an unbroken path, arrived or were reported lost."""
        for cast in self._sent:
            kind, name, key = cast.address
            if not cast.sender.relay.alive:
                continue
            for session, serial in cast.receivers:
                if session.closed or session.leaving or not session.relay.alive:
                    continue
                if cast.sender.relay.site != session.relay.site and not self._unbroken(cast, session):  # fmt: skip
                    continue
                if serial:
                    if serial not in session.members or session.members[serial].leaving:
                        continue
                elif not session.wants(name, key, cast.sent_us - KNOWN_US):
                    continue
                self.audited += 1
                if (session.uid, serial, cast.tag) in self._casts:
                    continue
                flow = (session.uid, serial, kind, name, key, cast.sender.sender_id)
                known = self._known.get(flow, KnownSequence())
                self.reported_lost += 1
                if (
                    not known.unknown
                    and not known.since <= cast.first < cast.first + cast.count <= known.until
                ):
                    self.net.violate(
                        f"{Kind(kind).name} {cast.tag} of {cast.sender} to {name!r}, {cast.first} + {cast.count}, is lost "
                        f"on its way to {session}, to which no loss was reported: it knows {known.since} to {known.until}"
                    )
        self._sent.clear()

    def _unbroken(self, cast: Cast, session: SimSession) -> bool:
        here, there = cast.sender.relay, session.relay
        before_us = cast.sent_us - KNOWN_US
        if here is there:
            return True
        on_the_way = [here, there]
        if here.site != there.site:
            gateways = (*self.net.gateways[here.site], *self.net.gateways[there.site])
            on_the_way += [self.net.relays[host] for host in gateways]
        if any(relay.awake_us > before_us for relay in on_the_way):
            return False  # changes of interest of this time may not be known
        paths = self.net.paths(here.host, there.host)
        return all(wire.changed_us < before_us for path in paths for wire in path)

    def groups_reached(self, tag: int) -> set[str]:
        """Return the queue groups that a publication reached."""
        return {group for other, group in self._grouped if other == tag}

    # -- links -----------------------------------------------------------------------------------------------

    def over_link(self, end: LinkEnd, frame: bytes) -> None:
        """Check a data frame that a relay sends over a link or WAN connection.

        A frame that came over such a connection never leaves over another one of that kind, and a bundle is sent once.
        So nothing crosses more than one link, one WAN connection and one link.
        """
        for one in singles(frame, Kind.REQUEST):
            self._over_link(end, one, run=frame[KIND_AT] == Kind.CALLS)

    def _over_link(self, end: LinkEnd, frame: bytes, *, run: bool) -> None:
        kind, tag, relay = frame[KIND_AT], tag_of(frame), end.relay
        if not tag:
            return
        if run:
            self.run_calls += 1
            kind = self.calls[tag].kind if tag in self.calls else kind
        self.loops_checked += 1
        self.over_wan += end.wan
        refused = frame[FLAGS_AT] & FLAG_REFUSED
        came = self._crossed.get((relay.relay_id, kind, tag))
        if came is not None and not refused and came[1] is end.wan:
            self.net.violate(
                f"{Kind(kind).name} {tag} came to relay {relay.host} from {came[0]}, and goes on to {end.host}"
            )
        if self.net.federated and not refused:
            self._check_class(end, kind, tag, frame, came)
        if kind in CASTS:
            copy = (tag, *end.said.get(_alias(frame), (0, "")))
            if copy in end.casts:
                self.net.violate(
                    f"two copies of {Kind(kind).name} {tag} go from {relay.host} to {end.host}"
                )
            end.casts.add(copy)

    def _check_class(
        self, end: LinkEnd, kind: int, tag: int, frame: bytes, came: tuple[int, bool, int] | None
    ) -> None:
        """Check that a frame's hop class is true, and that the frame only goes where it is wanted."""
        relay, origin = end.relay, self._origins.get(tag)
        what = f"{Kind(kind).name} {tag} of {origin}, from {relay} to {end.host}:"
        hop_class, site = end.said.get(_alias(frame), (0, ""))
        if kind not in FORWARD:
            if end.wan and kind not in TUNNEL_KINDS and origin != end.site:
                self.net.violate(f"{what} the answer goes to {end.site}")
            return
        if (site != "") is not (hop_class == HopClass.TO_WAN) or site == relay.site:
            self.net.violate(f"{what} it goes to {site!r} with hop class {hop_class}")
        if end.wan:
            if hop_class != HopClass.TO_WAN or site != end.site:
                self.net.violate(f"{what} it is for {site!r} with hop class {hop_class}")
            if origin != relay.site:
                self.net.violate(f"{what} it was not sent in {relay.site}")
            if came is not None and came[2] != HopClass.TO_WAN:
                self.net.violate(f"{what} it came here with hop class {came[2]}")
        elif hop_class == HopClass.FROM_WAN:
            if came is None or not came[1]:
                self.net.violate(f"{what} it did not come from another site")
        elif came is not None:
            self.net.violate(f"{what} it came from {came[0]} with hop class {came[2]}")
        if hop_class == HopClass.TO_WAN and kind in CASTS:
            if end.wan:
                self.wan_casts[(tag, site)] += 1
                self.wan_via[(tag, site)] = (relay.host, end.host)
                if self.wan_casts[(tag, site)] > 1:
                    self.net.violate(f"{what} the second copy for {site}")
            elif (relay.relay_id, tag, site) in self._to_wan:
                self.net.violate(f"{what} a second gateway is to send it to {site}")
            if came is None:
                self._to_wan.add((relay.relay_id, tag, site))

    def from_link(self, end: LinkEnd, frame: bytes) -> None:
        """Note a data frame that arrives over a link or WAN connection."""
        run = frame[KIND_AT] == Kind.CALLS
        for one in singles(frame, Kind.REQUEST):
            if not one[FLAGS_AT] & FLAG_REFUSED and (tag := tag_of(one)):
                hop_class = end.received.get(_alias(one), (0, ""))[0]
                kind = self.calls[tag].kind if run and tag in self.calls else one[KIND_AT]
                self._crossed[(end.relay.relay_id, kind, tag)] = (end.host, end.wan, hop_class)

    # -- at rest ---------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget ended messages, so that a long run stays small. Only while nothing is in transit."""
        for tag in [tag for tag, call in self.calls.items() if call.outcome]:
            del self.calls[tag]
        for table in (
            self._casts,
            self._grouped,
            self._surveyed,
            self._given_up,
            self._crossed,
            self._to_wan,
            self._origins,
            self.wan_casts,
            self.wan_via,
            self.runs,
            self.works,
        ):
            table.clear()


CACHES: Final = frozenset(
    f"Route.{name}"
    for name in (
        "_declared",
        "demand",
        "groups",
        "loads",
        "many",
        "peers",
        "single",
        "sites",
        "targets",
        "taken_routes",
    )
) | {"PeerInterest._key_ids", "PeerInterest._kinds"}
"""Caches: what an unused route keeps (replaced at its next use, removed with its alias; its declarations are
pruned when their number has doubled), and values that replicas share (bounded).
"""


def table_sizes(router: Any) -> Counter[str]:
    """Return the entries of all tables ("Class.attribute") of a router, except those of ports and caches.

    Tables are found breadth first, so one that several objects refer to always has the same name.
    """
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque([("Router", router)])
    while todo:
        where, thing = todo.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (dict, list, set, tuple)) or type(thing).__name__ == "deque":
            if not isinstance(thing, tuple):
                sizes[where] += len(thing)
            values = [*thing.keys(), *thing.values()] if isinstance(thing, dict) else list(thing)
            todo += [(where, value) for value in values if not isinstance(value, (bytes, str, int))]
            continue
        cls = type(thing)
        if not cls.__module__.startswith(("relay.core", "iris.core")):
            continue
        names = {name for base in cls.__mro__ for name in getattr(base, "__slots__", ())}
        names |= set(getattr(thing, "__dict__", ()))
        slots = {name: f"{cls.__name__}.{name}" for name in sorted(names)}
        todo += [
            (slot, getattr(thing, name, None)) for name, slot in slots.items() if slot not in CACHES
        ]
    return sizes
