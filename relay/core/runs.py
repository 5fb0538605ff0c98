"""Runs of calls: handed over whole where one member takes them all, else cut; and their answers.

What is not the plain case (a queue that is full, nobody there, another site, a receiver of an older version) is left to `calls`,
one call after the other: a run is nothing but single frames that share a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from iris.errors import PeerProtocolError
from iris.wire.codec import BODY_AT, DEADLINE, DEADLINE_AT, FLAGS_AT, HOP
from iris.wire.kinds import FLAG_REFUSED, NEVER_US, RUN_KINDS, RUN_MINOR, Kind, Refusal
from iris.wire.runs import (
    LENGTH_BYTES,
    part_of_calls,
    read_calls,
    single_calls,
)
from relay.core.balance import pick
from relay.core.calls import COUNTED, MAX_ATTEMPTS, Calls
from relay.core.flags import clear_flags, refusal_of
from relay.core.link import Link
from relay.core.neighbor import Handed, HandedRun, Load, Neighbor, Route


class Runs:
    """The part of the calls that takes several at once."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    # -- out to members --------------------------------------------------------------------------------------

    def called(
        self, neighbor: Neighbor, buf: memoryview, start: int, end: int, now_us: int
    ) -> None:
        """Requests or pushes came; or such as were refused where they were handed to."""
        _, sizes = read_calls(buf, start, end)
        _, _, flags, alias, hop, deadline_us = HOP.unpack_from(buf, start)
        if flags:
            if flags & FLAG_REFUSED:
                self._refused(neighbor, buf, start, end, refusal_of(neighbor, flags), now_us)
                return
            clear_flags(neighbor, buf, start)
        try:
            route = neighbor.routes[alias]
        except IndexError:
            route = None
        if route is None or route.kind not in RUN_KINDS:
            raise PeerProtocolError(f"alias {alias} was not declared for this kind of frame")
        count = len(sizes)
        mask, own = neighbor.own_hop_mask, neighbor.own_hop
        if hop & mask == own or hop + count - 1 & mask == own:
            raise PeerProtocolError("a hop id of those that this relay chooses")
        calls = self._calls
        if deadline_us and neighbor.clock_us:
            deadline_us = max(1, min(deadline_us + neighbor.clock_us, NEVER_US))
        plain = (
            deadline_us > now_us
            and neighbor.pending + count <= calls.limit
            and calls.is_served(route, now_us)
        )
        if not plain:
            for frame in single_calls(buf, start, end, route.kind):
                calls.called(neighbor, memoryview(frame), 0, len(frame), now_us)
            return
        calls.accounts.in_ += count
        DEADLINE.pack_into(buf, start + DEADLINE_AT, deadline_us)
        if route.loads and route.hop_class in COUNTED and isinstance(neighbor, Link):
            calls.asked(neighbor, route)
        self._hand(neighbor, route, hop, deadline_us, (), 0, sizes, buf, start, end)

    def _hand(
        self, origin: Neighbor, route: Route, hop: int, deadline_us: int, tried: Sequence[Load], attempts: int,
        sizes: Sequence[int], buf: memoryview, start: int, end: int,
    ) -> None:  # fmt: skip
        """Hand the calls of one frame to members by their free handlers; `tried` refused them before."""
        calls = self._calls
        first, left = 0, len(sizes)
        had: list[Load] = []
        while left:
            route.turn += 1
            load = pick(route.loads, route.peers, _bytes(sizes[first:]), tried, route.turn)
            if load is None:
                load = next((far for far in route.sites if far not in tried), None)
            count = left if load is None else _part(route, load, tried, had, sizes[first:])
            if (
                load is None
                or count == 1
                or load.neighbor.minor < RUN_MINOR
                or not self._give(
                    origin,
                    route,
                    hop,
                    deadline_us,
                    tried,
                    attempts,
                    load,
                    first,
                    sizes[first : first + count],
                    buf,
                    start,
                    end,
                )
            ):  # one by one: others may take some of them
                part = memoryview(part_of_calls(buf, start, end, first, count))
                for number, frame in enumerate(single_calls(part, 0, len(part), route.kind)):
                    handed = Handed(origin, hop + first + number, route, len(frame))
                    handed.deadline_us = deadline_us
                    handed.attempts = attempts
                    handed.tried = [*tried]
                    calls.hand_one(handed, memoryview(frame), 0, len(frame))
            if load is not None:
                had.append(load)
            first += count
            left -= count

    def _give(
        self, origin: Neighbor, route: Route, hop: int, deadline_us: int, tried: Sequence[Load], attempts: int, load: Load,
        first: int, sizes: Sequence[int], buf: memoryview, start: int, end: int,
    ) -> bool:  # fmt: skip
        """Give the calls from number `first` on, with these lengths, to one member or relay; False: it has no room for all."""
        count = len(sizes)
        handed = HandedRun(origin, hop + first, route, sizes)
        handed.deadline_us = deadline_us
        handed.attempts = attempts + 1
        handed.tried = [*tried]
        if first or BODY_AT + LENGTH_BYTES * count + sum(sizes) != end - start:
            buf = memoryview(part_of_calls(buf, start, end, first, count))
            start, end = 0, len(buf)
        calls = self._calls
        if not calls.give(handed, load, buf, start, end):
            return False
        calls.accounts.out += count
        origin.pending += count
        return True

    # -- back from members -----------------------------------------------------------------------------------

    def _refused(
        self, neighbor: Neighbor, buf: memoryview, start: int, end: int, reason: int, now_us: int
    ) -> None:
        """Calls came back unopened: others may take them, within the deadline."""
        calls = self._calls
        _, sizes = read_calls(buf, start, end)
        hop = HOP.unpack_from(buf, start)[4]
        handed = neighbor.handed.get(hop)
        kind = Kind.REQUEST if handed is None else handed.load.kind
        again = (
            isinstance(handed, HandedRun)
            and reason in (Refusal.FULL, Refusal.LEAVING)
            and handed.same(hop, sizes)
            and all(neighbor.handed.get(hop + number) is handed for number in range(len(sizes)))
            and handed.deadline_us > now_us
            and not handed.origin.closed
            and handed.attempts < MAX_ATTEMPTS
            and calls.is_served(handed.route, now_us)
        )
        if handed is None or not again:
            for frame in single_calls(buf, start, end, kind):
                calls.called(neighbor, memoryview(frame), 0, len(frame), now_us)
            return
        calls.accounts.in_ += len(sizes)
        for number in range(len(sizes)):
            del neighbor.handed[hop + number]
            calls.release(handed, hop + number)
        buf[start + FLAGS_AT] = 0
        DEADLINE.pack_into(buf, start + DEADLINE_AT, handed.deadline_us)
        tried = [*handed.tried, handed.load]
        theirs = handed.theirs(hop)
        self._hand(
            handed.origin, handed.route, theirs, handed.deadline_us, tried, handed.attempts, sizes, buf, start, end
        )  # fmt: skip


def _part(
    route: Route, load: Load, tried: Sequence[Load], had: Sequence[Load], sizes: Sequence[int]
) -> int:
    """Return how many of these calls `load` gets at once: its part of the free handlers, or all if nobody else is left.

    `had` are those that got their part of this run before.
    """
    left = len(sizes)
    if len(route.loads) + len(route.peers) > left:
        return 1  # one for each, without looking at all of them
    others = [one for one in (*route.loads, *route.peers) if one is not load and one not in tried]
    free = load.concurrency - load.messages - load.others
    if not others:
        fits = load.member is None or left <= free or load.bytes + _bytes(sizes) <= load.limit_bytes
        return left if fits else max(1, free)
    if free <= 0:
        return -(-left // (len(others) + 1))
    # Those of this relay come first: what other relays have free counts only among themselves.
    total = free
    for one in others:
        if (one.member is None) == (load.member is None) and one not in had:
            total += max(0, one.concurrency - one.messages - one.others)
    return max(1, min(free, -(-left * free // total)))


def _bytes(sizes: Sequence[int]) -> int:
    return BODY_AT * len(sizes) + sum(sizes)
