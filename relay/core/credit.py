"""Credit for publishers that wait: each may send as much as the slowest of its topic's subscribers allows.

    publisher ── WAIT ──► Flow ── WAIT ──► Credit: one connection that leads to subscribers
              ◄── WINDOW ──     ◄── WINDOW ──

A connection has a credit for each delivery set. For a queue group, one member with credit is enough. A
connection that has had no credit for as long as its publisher waits is left out: messages for a session are
dropped until it gives credit, and a relay does the same for its own sessions.

Flows that have no credit are looked at in rounds (`relay.core.rounds`), so that what one session has set up costs the
others nothing. A session may have `MAX_WAITING` of them: further ones are sent without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from iris.core.aliases import Alias
from iris.core.credit import FIRST_WINDOW
from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.kinds import NEVER_US, UNLIMITED, HopClass, Kind
from relay.core.connection import Delivery
from relay.core.interest import Interest
from relay.core.neighbor import RELEASED, CountedFlow, Neighbor, Route, Target
from relay.core.rounds import Rounds

STEP_BYTES: Final = 32 << 10
"""A publisher is sent a WINDOW when its credit grows by this much, or at all after it had none."""
RENEW_US: Final = 250_000
"""A connection without credit for this long is asked again: the WAIT or WINDOW may have been dropped."""
MAX_CREDITS: Final = 2048
"""Limit of credits of one publisher's topic; over it, the oldest is started again."""
MAX_FLOWS: Final = 32
"""Limit of flows that share a credit; over it, the oldest leaves it until it sends again."""
MAX_WAITING: Final = 4096
"""Limit of one session's topics without credit. Further ones get credit without limit, and are counted."""
PART: Final = 64
"""Connections that are asked at a stretch when a publisher has stalled; more of them are asked in parts."""
CREDITS_PER_WORK: Final = 2
"""Credits of a flow that are one unit of work in `Rounds`."""


class Credit:
    """Credit of one connection for one delivery set of a publisher's topic.

    Several aliases of a publisher may share it.
    """

    __slots__ = (
        "alias", "asked_us", "delivery", "flows", "left_out", "limit", "neighbor", "sent", "serial",
    )  # fmt: skip

    def __init__(self, neighbor: Neighbor, delivery: Delivery) -> None:
        self.flows: dict[Flow, None] = {}
        """The flows that send by this credit."""
        self.neighbor = neighbor
        self.delivery = delivery
        self.alias: Alias | None = None
        """The alias that the last WAIT named."""
        self.serial = 0
        self.asked_us = 0
        """Time of the last WAIT."""
        self.limit = UNLIMITED
        self.sent = 0
        """Bytes sent since the last WAIT, to compare with `limit`."""
        self.left_out = False
        """The connection had no credit for as long as the publisher waits.

        Messages for a session are dropped. A relay still gets all of them, and drops them for its own sessions.
        """

    @property
    def key(self) -> tuple[int, bool, tuple[str, ...]]:
        """(neighbor number, includes subscriptions without a group, groups): distinguishes the credits of one flow."""
        return (self.neighbor.number, self.delivery[4], self.delivery[5])

    @property
    def room(self) -> int:
        """Bytes that may be sent now; 0 while the queue of the connection is crowded."""
        if self.limit == UNLIMITED:
            return UNLIMITED
        return 0 if self.neighbor.port.crowded else self.limit - self.sent


class Flow:
    """One topic of a publisher that waits, attached to the publisher's alias."""

    __slots__ = (
        "_end",
        "alias",
        "by_group",
        "credits",
        "limit",
        "received",
        "review_at",
        "route",
        "serial",
    )

    def __init__(self, route: Route, alias: int, end: Callable[[Flow], None]) -> None:
        """`end` is called when the publisher has left."""
        self._end = end
        self.route = route
        self.alias = alias
        self.serial = 0
        self.received = 0
        """Bytes received since the publisher's latest WAIT."""
        self.limit = 0
        """Bytes since that WAIT that the publisher was allowed to send."""
        self.review_at = 0
        """`received` at which the credit is reviewed."""
        self.credits: dict[tuple[int, bool, tuple[str, ...]], Credit] = {}
        """`Credit.key` -> credit."""
        self.by_group: dict[tuple[int, str], list[Credit]] = {}
        """(neighbor number, group or an empty text) -> the same credits."""

    def ended(self) -> None:
        self._end(self)

    def hold(self, credit: Credit) -> None:
        """Add a credit to this flow."""
        self.credits[credit.key] = credit
        number, plain, groups = credit.key
        for group in ("", *groups) if plain else groups:
            self.by_group.setdefault((number, group), []).append(credit)

    def drop(self, credit: Credit) -> None:
        """Remove a credit, because its connection or alias has ended."""
        del self.credits[credit.key]
        number, plain, groups = credit.key
        for group in ("", *groups) if plain else groups:
            there = self.by_group[(number, group)]
            there.remove(credit)
            if not there:
                del self.by_group[(number, group)]

    def room(self, neighbor: Neighbor, group: str) -> int:
        """Return how many bytes may be sent over a connection to subscribers without a group ("") or in a group.

        Connections that are left out do not limit it.
        """
        there = self.by_group.get((neighbor.number, group))
        if there is None:
            return FIRST_WINDOW
        return min(UNLIMITED if credit.left_out else credit.room for credit in there)

    def has_credit(self, neighbor: Neighbor, group: str) -> bool:
        """Whether the members of a group behind a connection have credit."""
        there = self.by_group.get((neighbor.number, group), ())
        return not any(credit.left_out or credit.room <= 0 for credit in there)


class Credits:
    """All publishers at one relay that wait, including those behind its links."""

    def __init__(
        self, interest: Interest, resolve: Callable[[Route], None], clock: Callable[[], int]
    ) -> None:
        """`resolve` finds the targets of a route."""
        self._interest = interest
        self._resolve = resolve
        self._clock = clock
        self._serial = 0
        self._credits: dict[int, dict[Delivery, Credit]] = {}
        """Neighbor number -> delivery that its alias stands for -> credit."""
        self._watched: Rounds[Flow] = Rounds(self._look)
        """Flows that have no credit or leave a connection out, by the number of the publisher's connection."""
        self.unlimited = 0
        """How often a publisher got credit without limit, because too many of its session's topics had none."""

    @property
    def deadline_us(self) -> int:
        """When `expire` is due: after a change of the interest, as soon as it has rested."""
        watched = self._watched
        return watched.deadline_us(self._interest.version) if watched.total else NEVER_US

    @property
    def waiting(self) -> int:
        """Number of publishers' topics that have no credit or leave a connection out."""
        return len(self._watched)

    def asked(self, neighbor: Neighbor, wait: frames.Wait) -> None:
        """Start waiting for the subscribers of what a session or relay publishes under an alias; raises
        PeerProtocolError.
        """
        route = neighbor.routes[wait.alias] if wait.alias < len(neighbor.routes) else None
        if route is None or route.kind != Kind.PUBLISH:
            raise PeerProtocolError(f"alias {wait.alias} was not declared for PUBLISH")
        flow = route.flow
        if not isinstance(flow, Flow):
            flow = route.flow = Flow(route, wait.alias, self._ended)
        flow.serial = wait.serial
        flow.received = 0
        if not wait.stalled:
            self.review(flow, answer=True)
            return
        work = self._stalled(flow)
        if len(flow.credits) > PART:
            neighbor.unfinished = work
        else:
            for _ in work:
                pass

    def _stalled(self, flow: Flow) -> Iterator[None]:
        """Leave out the connections that have had no credit for too long, in parts, and answer the publisher."""
        for number, credit in enumerate(list(flow.credits.values()), 1):
            if credit.room <= 0 and flow in credit.flows:
                credit.left_out = True
                # The answer to a new WAIT is correct, whatever was dropped on the way before.
                self._ask(credit, stalled=credit.neighbor.hop_class != HopClass.LOCAL)
            if number % PART == 0:
                yield
        self.review(flow, answer=True)

    def window(self, neighbor: Neighbor, window: frames.Window) -> None:
        """Set the credit that a neighbor gives. A WINDOW for an older WAIT is ignored."""
        delivery = neighbor.aliases.key_of(window.alias)
        credit = self._credits.get(neighbor.number, {}).get(delivery) if delivery else None
        if credit is None or credit.serial != window.serial:
            return
        before = credit.room
        credit.limit = window.limit
        if credit.left_out:
            self._recovered(credit)
        for flow in list(credit.flows):
            granted = max(0, flow.limit - flow.received)
            if min(before, credit.room - 1) <= granted or flow.route.groups:
                self.review(flow)

    def forget(self, neighbor: Neighbor) -> Iterator[int]:
        """Remove the credits of a closed connection, in parts. Nothing is sent by them meanwhile."""
        left = [*reversed(self._credits.get(neighbor.number, {}).values())]
        while left:  # what is freed is freed in its part, and not all at the end
            credit = left.pop()
            credit.left_out = False
            credits = len(credit.flows)
            for flow in list(credit.flows):
                self._leave(flow, credit)
            yield 1 + credits

    def _ended(self, flow: Flow) -> None:
        """Remove a flow whose publisher has left or whose alias was declared again."""
        self._watched.discard(flow.route.neighbor.number, flow)
        for credit in list(flow.credits.values()):
            self._leave(flow, credit)

    def _leave(self, flow: Flow, credit: Credit) -> None:
        """Stop sending a flow by a credit."""
        flow.drop(credit)
        del credit.flows[flow]
        if credit.left_out and credit.neighbor.gaps:
            credit.neighbor.send_gaps()  # no later message would show this loss
        if not credit.flows:
            there = self._credits[credit.neighbor.number]
            del there[credit.delivery]
            if not there:
                del self._credits[credit.neighbor.number]

    def sending(self, flow: CountedFlow, target: Target, size: int) -> bool:
        """Count a frame for a target with a declared alias; False if its messages must be dropped.

        What the connection then refuses is given back by asking again.
        """
        assert isinstance(flow, Flow)  # there is no other implementation
        delivery = target.delivery
        credit = flow.credits.get((target.neighbor.number, delivery[4], delivery[5]))
        if credit is None or credit.alias is not target.alias:
            credit = self._begin(flow, target)
        if credit.left_out and not self._recovered(credit) and not target.neighbor.hop_class:
            return False
        credit.sent += size
        return True

    def review(self, flow: CountedFlow, *, answer: bool = False) -> None:
        """Send a publisher its credit, if it changed enough to be worth a frame or an answer is due."""
        assert isinstance(flow, Flow)  # there is no other implementation
        route = flow.route
        publisher = route.neighbor
        if route.version == RELEASED or publisher.closed:
            self._watched.discard(publisher.number, flow)
            return
        if route.version != self._interest.version:
            self._resolve(route)
        room = self._room(flow)
        if room > 0 and not any(credit.left_out for credit in flow.credits.values()):
            self._watched.discard(publisher.number, flow)
        elif publisher.hop_class or self._watched.count(publisher.number) < MAX_WAITING:
            self._watched.add(publisher.number, flow, self._interest.version, self._clock())
        elif room <= 0 and not self._watched.has(publisher.number, flow):
            self.unlimited += 1
            room = UNLIMITED
        limit = UNLIMITED if room == UNLIMITED else min(flow.received + max(0, room), UNLIMITED - 1)
        before = flow.limit
        # The credit shrinks if a subscriber with a smaller window joined or came back.
        if answer or abs(limit - before) >= STEP_BYTES or before <= flow.received < limit:
            flow.limit = limit
            publisher.control(frames.Window(flow.alias, flow.serial, limit))
        flow.review_at = max(flow.received + 1, flow.limit - STEP_BYTES)

    def expire(self, now_us: int) -> None:
        """Review some flows without credit, and ask again connections that have given none for long."""
        self._watched.step(self._interest.version, now_us)

    def _look(self, flow: Flow, now_us: int) -> int:
        """Review a flow without credit. Return the work: it has up to `MAX_CREDITS` credits."""
        work = (len(flow.credits) + len(flow.route.many)) // CREDITS_PER_WORK
        for credit in list(flow.credits.values()):
            if credit.neighbor.closed:
                continue
            if credit.limit <= credit.sent and now_us - credit.asked_us >= RENEW_US:
                self._ask(credit, stalled=credit.left_out and bool(credit.neighbor.hop_class))
            elif credit.left_out:
                self._recovered(credit)
        self.review(flow)
        return work

    def _room(self, flow: Flow) -> int:
        """Return how many bytes a publisher may send so that all subscribers can take them.

        Remote sites are not waited for.
        """
        route = flow.route
        if not route.groups:
            near = (target.neighbor for target in route.many if not target.delivery[-1])
            return min((flow.room(neighbor, "") for neighbor in near), default=UNLIMITED)
        least = UNLIMITED
        for group, subscribers in route.groups:
            here = dict.fromkeys(
                subscriber.neighbor
                for subscriber in subscribers
                if subscriber.hop_class != HopClass.TO_WAN
            )
            rooms = (flow.room(neighbor, group) for neighbor in here)
            if not group:
                least = min(least, min(rooms, default=UNLIMITED))
            elif len(here) == len(set(subscribers)):
                least = min(least, max(rooms, default=UNLIMITED))
        return least

    def _begin(self, flow: Flow, target: Target) -> Credit:
        """Return the credit of a target whose alias is new."""
        neighbor, (_, _, _, _, plain, groups, _, _, site) = target.neighbor, target.delivery
        key = (neighbor.number, plain, groups)
        credit = flow.credits.get(key)
        if credit is None:
            if len(flow.credits) >= MAX_CREDITS:
                self._leave(flow, next(iter(flow.credits.values())))
            there = self._credits.setdefault(neighbor.number, {})
            credit = there.get(target.delivery)
            if credit is None:
                credit = there[target.delivery] = Credit(neighbor, target.delivery)
            elif len(credit.flows) >= MAX_FLOWS:
                self._leave(next(iter(credit.flows)), credit)
            credit.flows[flow] = None
            flow.hold(credit)
        if credit.alias is not target.alias:
            credit.alias = target.alias
            if not site:
                self._ask(credit)
                credit.limit = FIRST_WINDOW
        return credit

    def _ask(self, credit: Credit, *, stalled: bool = False) -> None:
        """Ask a connection for credit. Bytes count from here, and there is no credit before the answer."""
        if credit.alias is None or credit.alias.number < 0:
            # The next frame goes under another alias, which is asked for itself.
            for flow in list(credit.flows):
                self._leave(flow, credit)
            return
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        credit.serial, credit.asked_us = self._serial, self._clock()
        credit.sent = credit.limit = 0
        credit.neighbor.control(frames.Wait(credit.alias.number, self._serial, stalled))

    def _recovered(self, credit: Credit) -> bool:
        """Whether a connection that was left out has credit again; if so, send it the gaps of what was dropped."""
        if credit.room <= 0:
            return False
        credit.left_out = False
        if credit.neighbor.gaps:
            credit.neighbor.send_gaps()
        return True
