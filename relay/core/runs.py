"""Runs of calls: dispatched whole if one member can take them all, otherwise cut; and runs that are refused.

Anything but the plain case (a full queue, no member, another site) is left
to `calls`, one call after the other: a run is nothing but single frames that share a header.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from iris.wire.codec import BODY_AT, DATA_LENGTH, DEADLINE, DEADLINE_AT, END_AT, FLAGS_AT, HOP
from iris.wire.kinds import NEVER_US, Kind, Refusal
from iris.wire.runs import counted, lengths, read_calls, single_calls
from relay.core.balance import pick
from relay.core.calls import COUNTED, MAX_ATTEMPTS, Calls
from relay.core.heads import run_head
from relay.core.leaving import was_told
from relay.core.link import Link
from relay.core.neighbor import Dispatched, DispatchedRun, Load, Neighbor, Route

LOOKED_AT: Final = 32
"""A run is cut among all members if there are at most this many; among more only if there are as many calls."""


class Runs:
    """The part of `Calls` that handles several calls at once."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    # -- out to members --------------------------------------------------------------------------------------

    def called(
        self, neighbor: Neighbor, buf: memoryview, start: int, end: int, now_us: int
    ) -> None:
        """Route a run of requests or pushes, or one that its receiver refused and returned."""
        route, hop, deadline_us, reason, at, sizes = run_head(neighbor, buf, start, end)
        if route is None:
            self._refused(neighbor, buf, start, end, reason, now_us)
            return
        count = len(sizes)
        calls = self._calls
        if deadline_us and neighbor.clock_us:
            deadline_us = max(1, min(deadline_us + neighbor.clock_us, NEVER_US))
        plain = (
            deadline_us > now_us
            and (
                neighbor.pending + count <= neighbor.may_call
                or calls.callers.more(neighbor, calls.limit, now_us, count)
            )
            and calls.is_served(route, now_us)
        )
        if not plain:
            self._handle_singly(neighbor, route, single_calls(buf, start, end, route.kind), now_us)
            return
        calls.accounts.in_ += count
        DEADLINE.pack_into(buf, start + DEADLINE_AT, deadline_us)
        if route.loads and route.hop_class in COUNTED and isinstance(neighbor, Link):
            calls.count_demand(neighbor, route)
        self._dispatch(
            neighbor, _Run(neighbor, route, hop, deadline_us, (), 0, at, sizes, buf, start, end)
        )

    def _handle_singly(
        self, neighbor: Neighbor, route: Route | None, frames: Iterable[bytearray], now_us: int
    ) -> None:
        """Handle the calls of a frame of `neighbor` one by one; in parts if each has to look at many members."""
        work = self._in_parts(neighbor, frames, now_us)
        if route is not None:
            self._calls.resolve(route)  # or it would seem to have no members
        if route is not None and len(route.loads) > LOOKED_AT:
            work = self._in_parts(neighbor, list(frames), now_us)  # of their own
            neighbor.unfinished = work
        else:
            for _ in work:
                pass

    def _in_parts(
        self, neighbor: Neighbor, frames: Iterable[bytearray], now_us: int
    ) -> Iterator[None]:
        for frame in frames:
            self._calls.called(neighbor, memoryview(frame), 0, len(frame), now_us)
            yield

    def _dispatch(self, sender: Neighbor, run: _Run) -> None:
        """Dispatch the calls of one frame of `sender`; in parts if each has to look at many members."""
        if len(run.route.loads) > LOOKED_AT:
            run.own()
            sender.unfinished = self._dispatch_in_parts(run)
        else:
            for _ in self._dispatch_in_parts(run):
                pass

    def _dispatch_in_parts(self, run: _Run) -> Iterator[None]:
        """Dispatch the calls of one frame to members by their free handlers.

        Loads in `tried` have refused them before.
        """
        route, sizes, tried = run.route, run.sizes, run.tried
        first, left = 0, len(sizes)
        left_bytes = BODY_AT * left + sum(sizes)
        shares = _Shares(route, tried)
        while left:
            route.turn += 1
            load = pick(route.loads, route.peers, left_bytes, tried, route.turn)
            if load is None:
                load = next((far for far in route.sites if far not in tried), None)
            count = left if load is None else shares.part(load, left, left_bytes)
            size = sum(sizes[first : first + count])
            if load is None or count == 1 or not self._dispatch_part(run, load, first, count, size):
                # One by one: other members may take some of them.
                yield from self._dispatch_singly(run, load, first, count)
            first += count
            left -= count
            left_bytes -= BODY_AT * count + size
            yield
            if run.origin.closed:
                self._calls.accounts.drop("session lost", left)
                return
            self._calls.resolve(route)

    def _dispatch_part(self, run: _Run, load: Load, first: int, count: int, size: int) -> bool:
        """Dispatch `count` calls from number `first` on, of `size` bytes, to one load.

        Returns False if it has no room for all of them.
        """
        dispatched = DispatchedRun(
            run.origin, run.hop + first, run.route, run.sizes[first : first + count]
        )
        dispatched.deadline_us = run.deadline_us
        dispatched.attempts = run.attempts + 1
        dispatched.tried = [*run.tried]
        if count == len(run.sizes):
            frame, start, end = run.buf, run.start, run.end
        else:
            frame, start = run.part(first, count), 0
            end = len(frame)
        calls = self._calls
        if not calls.send_to(dispatched, load, frame, start, end):
            return False
        calls.accounts.out += count
        run.origin.pending += count
        return True

    def _dispatch_singly(
        self, run: _Run, load: Load | None, first: int, count: int
    ) -> Iterator[None]:
        """Dispatch calls as single frames, to `load` while it has room, and then to any other."""
        calls = self._calls
        for number in range(first, first + count):
            if run.origin.closed:
                calls.accounts.drop("session lost", 1)
                continue
            if load is not None and load.neighbor.closed:
                load = None
            frame = run.part(number, 1)
            dispatched = Dispatched(run.origin, run.hop + number, run.route, len(frame))
            dispatched.deadline_us = run.deadline_us
            dispatched.tried = [*run.tried]
            dispatched.attempts = run.attempts + 1
            if load is not None and calls.send_to(dispatched, load, frame, 0, len(frame)):
                calls.accounts.out += 1
                run.origin.pending += 1
            else:
                load = None
                dispatched.attempts = run.attempts
                calls.dispatch_one(dispatched, frame, 0, len(frame))
            yield

    # -- back from members -----------------------------------------------------------------------------------

    def _refused(
        self, neighbor: Neighbor, buf: memoryview, start: int, end: int, reason: int, now_us: int
    ) -> None:
        """Offer calls that their receiver refused to other members, within the deadline."""
        calls = self._calls
        at, sizes = read_calls(buf, start, end)
        hop = HOP.unpack_from(buf, start)[4]
        dispatched = neighbor.in_flight.get(hop)
        kind = Kind.REQUEST if dispatched is None else dispatched.load.kind
        again = (
            isinstance(dispatched, DispatchedRun)
            and reason in (Refusal.FULL, Refusal.LEAVING)
            and dispatched.same(hop, sizes)
            and all(
                neighbor.in_flight.get(hop + number) is dispatched for number in range(len(sizes))
            )
            and dispatched.deadline_us > now_us
            and not dispatched.origin.closed
            and not any(was_told(dispatched, hop + n) for n in range(len(sizes)))
            and dispatched.attempts < MAX_ATTEMPTS
            and calls.is_served(dispatched.route, now_us)
        )
        if dispatched is None or not again:
            route = None if dispatched is None else dispatched.route
            self._handle_singly(neighbor, route, single_calls(buf, start, end, kind), now_us)
            return
        calls.accounts.in_ += len(sizes)
        for number in range(len(sizes)):
            del neighbor.in_flight[hop + number]
            calls.release(dispatched, hop + number)
        buf[start + FLAGS_AT] = 0
        DEADLINE.pack_into(buf, start + DEADLINE_AT, dispatched.deadline_us)
        tried = [*dispatched.tried, dispatched.load]
        theirs = dispatched.origin_hop(hop)
        self._dispatch(
            neighbor,
            _Run(dispatched.origin, dispatched.route, theirs, dispatched.deadline_us, tried, dispatched.attempts, at, sizes, buf, start, end)
        )  # fmt: skip


class _Run:
    """The calls of one frame before they are dispatched: their origin, and where each body lies."""

    __slots__ = (
        "_begins",
        "_end_fields",
        "attempts",
        "buf",
        "deadline_us",
        "end",
        "hop",
        "origin",
        "route",
        "sizes",
        "start",
        "tried",
    )

    def __init__(
        self, origin: Neighbor, route: Route, hop: int, deadline_us: int, tried: Sequence[Load], attempts: int,
        at: int, sizes: Sequence[int], buf: memoryview, start: int, end: int,
    ) -> None:  # fmt: skip
        """`hop` is the origin's for the first call; the bodies, of these `sizes`, begin at `at`.

        `tried` refused them before.
        """
        self.origin = origin
        self.route = route
        self.hop = hop
        self.deadline_us = deadline_us
        self.tried = tried
        self.attempts = attempts
        self.sizes = sizes
        self.buf = buf
        self.start = start
        self.end = end
        self._begins = [*accumulate(sizes, initial=at)]
        self._end_fields = bytes(buf[start + END_AT : start + BODY_AT])

    def own(self) -> None:
        """Copy the frame, which is borrowed, so that its calls can be dispatched later."""
        self.buf = memoryview(bytearray(self.buf[self.start : self.end]))
        self._begins = [begin - self.start for begin in self._begins]
        self.start, self.end = 0, self.end - self.start

    def part(self, first: int, count: int) -> memoryview:
        """Return some of the calls as a frame of its own; one becomes a single call.

        The caller fills in alias and hop ids.
        """
        bodies = self.buf[self._begins[first] : self._begins[first + count]]
        end_fields = counted(self._end_fields, count)
        if count == 1:
            head = HOP.pack(DATA_LENGTH + len(bodies), self.route.kind, 0, 0, 0, self.deadline_us)
            return memoryview(bytearray(b"".join((head, end_fields, bodies))))
        table = lengths(count).pack(*self.sizes[first : first + count])
        size = DATA_LENGTH + len(table) + len(bodies)
        head = HOP.pack(size, Kind.CALLS, 0, 0, 0, self.deadline_us)
        return memoryview(bytearray(b"".join((head, end_fields, table, bodies))))


class _Shares:
    """The free handlers of the members of an address, while a run is cut among them."""

    __slots__ = ("_assigned", "_busy", "_count", "_free", "_others", "_route", "_tried")

    def __init__(self, route: Route, tried: Sequence[Load]) -> None:
        self._route = route
        self._tried = tried
        self._others = len(route.loads) + len(route.peers)
        """Number of members and relays that are not `tried`."""
        if tried:
            self._others -= sum(one in tried for one in (*route.loads, *route.peers))
        self._assigned: list[Load] = []
        self._count = 0
        """Number of the members of this relay, or else of the other relays."""
        self._free = 0
        """Free handlers of those that have got nothing yet."""
        self._busy = 0
        """Calls in flight at them."""

    def part(self, load: Load, left: int, left_bytes: int) -> int:
        """Return how many of `left` calls `load` gets at once: its part of the free handlers, or all.

        The result is as if calls were dispatched one by one: a load with fewer calls than others gets
        enough to be even with them. But where everybody is busy, it gets at least half of what it has
        already, because dealing calls out one by one would not make a queue fairer.
        """
        if load.site_route is not None:
            return left
        others = self._others
        free = load.concurrency - load.messages - load.others
        if others <= 1:
            fits = (
                load.member is None or left <= free or load.bytes + left_bytes <= load.limit_bytes
            )
            return left if fits else max(1, free)
        if free <= 0:
            return -(-left // others)
        least = min(free, left, max(1, load.messages // 2))
        if others > max(left, LOOKED_AT):
            return least
        if not self._assigned or (self._assigned[0].member is None) != (load.member is None):
            self._look(load)
        if load in self._assigned:
            return least
        self._assigned.append(load)
        even = (self._busy + left) // self._count - load.messages
        most = max(even, -(-left * free // max(free, self._free)))
        self._free -= free
        return max(least, min(free, left, most))

    def _look(self, load: Load) -> None:
        """Count the loads: members of this relay, or for a load behind a link those of the other relays."""
        self._assigned.clear()
        self._count = self._free = self._busy = 0
        for one in self._route.peers if load.member is None else self._route.loads:
            if one not in self._tried:
                self._count += 1
                self._free += max(0, one.concurrency - one.messages - one.others)
                self._busy += one.messages
