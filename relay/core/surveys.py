"""Surveys: a copy to every member here, one to every relay that has some, and all their answers until the last is done.

The surveyor's relay first sends a ROSTER of the members it dispatched the survey to, and so does each other
relay. Answers follow, and DONE when no more can come. All parts behind a link are kept under one hop id
until that relay's own DONE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from iris.wire.codec import ALIAS_AT, MAX_REPORT_BYTES, REWRITE
from iris.wire.frames import Done, Roster
from relay.core.interest import Interest
from relay.core.neighbor import Dispatched, Load, Neighbor, Route, Survey, Target
from relay.core.ports import Accounts

PART: Final = 32
"""A survey goes to this many members at a stretch; to more of them in parts, between which others get their turn."""
MAX_ROSTER: Final = 1 << 18
"""Limit of members in the rosters of one relay or site; their ids take about 30 MB."""
_LONGEST_NAME: Final = 64 * 4 + 3
"""Largest encoded size of a member's id."""


class Surveys:
    """The surveys of a relay.

    `next_hop` returns hop ids for a neighbor; `ended` is called for each part that has ended.
    """

    def __init__(
        self, relay_id: bytes, accounts: Accounts, interest: Interest, next_hop: Callable[[Neighbor], int],
        ended: Callable[[Dispatched, int], None], may_hold_more: Callable[[Target, Dispatched], bool],
        may_hold_here: Callable[[Neighbor, int], bool],
    ) -> None:  # fmt: skip
        self._relay = relay_id.hex()
        self._accounts = accounts
        self._interest = interest
        self._next_hop = next_hop
        self._ended = ended
        self._may_hold_more = may_hold_more
        self._may_hold_here = may_hold_here

    def start(
        self, origin: Neighbor, route: Route, hop: int, deadline_us: int, until_us: int, buf: memoryview, start: int, end: int
    ) -> None:  # fmt: skip
        """Dispatch a survey to every member that serves surveys and has room: a copy each, under a hop id each."""
        survey = Survey(origin, hop, deadline_us, until_us)
        loads = [*route.loads, *route.peers, *route.sites]
        self._accounts.copied += len(loads) - 1
        origin.pending += 1
        survey.open = 1  # until all have been sent it
        frame = bytearray(buf[start:end])
        work = self._in_parts(survey, route, loads, frame)
        if len(loads) > PART:
            origin.unfinished = work
        else:
            for _ in work:
                pass

    def _in_parts(
        self, survey: Survey, route: Route, loads: Sequence[Load], frame: bytearray
    ) -> Iterator[None]:
        """Send a survey to all; of the members here, name those of each part before any of them can answer."""
        for at in range(0, len(loads), PART):
            part = loads[at : at + PART]
            sent = [load for load in part if self._send(survey, route, load, frame)]
            for load in part:
                if load not in sent:
                    survey.lose(self._members_at(load, route))
            roster = [f"{self._relay}.{load.serial}" for load in sent if load.member is not None]
            if roster or not at:
                survey.origin.control(Roster(survey.hop, roster))
            yield
        self._part_ended(survey)

    def _members_at(self, load: Load, route: Route) -> list[str]:
        return [f"{self._relay}.{load.serial}"] if load.member is not None else _behind(load, route)

    def _send(self, survey: Survey, route: Route, load: Load, frame: bytearray) -> bool:
        neighbor, member = load.neighbor, load.member
        size = len(frame)
        crowded = (
            member is not None
            and len(neighbor.in_flight) >= neighbor.may_hold
            and not self._may_hold_here(neighbor, 1)
        )
        full = (
            member is not None
            and load.messages >= load.concurrency
            and load.bytes + size > load.limit_bytes
            and load.messages > 0
        )
        gone = neighbor.closed or (member is not None and member.left)
        if crowded or full or gone or not neighbor.port.has_room(size):
            self._accounts.refused += 1
            return False
        target = route.target(load.site_route or neighbor, load.serial)
        dispatched = Dispatched(survey.origin, survey.hop, route, size)
        if load.member is None and not self._may_hold_more(target, dispatched):
            self._accounts.refused += 1
            return False
        hop = self._next_hop(neighbor)
        number = target.number(self._interest.next_tick())
        REWRITE.pack_into(frame, ALIAS_AT, number, hop)
        if not neighbor.port.send(bytes(frame), 1):
            self._accounts.refused += 1
            if dispatched.share is not None:
                dispatched.share.remove()
            return False
        self._accounts.out += 1
        dispatched.survey = survey
        dispatched.roster = []
        dispatched.behind = _behind(load, route) if load.site_route is not None else ()
        dispatched.deadline_us = survey.deadline_us
        dispatched.until_us = survey.until_us
        dispatched.load = load
        load.messages += 1
        load.bytes += size
        neighbor.in_flight[hop] = dispatched
        survey.open += 1
        return True

    def roster(self, link: Neighbor, roster: Roster) -> None:
        """Forward the ROSTER of the relay behind a link. A remote site sends one for each of its relays."""
        dispatched = link.in_flight.get(roster.hop)
        if dispatched is not None and dispatched.survey is not None:
            members = roster.members[: max(0, MAX_ROSTER - len(dispatched.roster))]
            link.dropped_entries += len(roster.members) - len(members)
            dispatched.roster += members
            if members and not dispatched.survey.origin.closed:
                for part in _parts(members):
                    dispatched.survey.origin.control(Roster(dispatched.survey.hop, part))

    def done(self, link: Neighbor, done: Done) -> None:
        """End a part of a survey: a link or remote site has no more answers."""
        dispatched = link.in_flight.get(done.hop)
        if dispatched is not None and dispatched.survey is not None:
            del link.in_flight[done.hop]
            self.finish_part(dispatched, done.lost)

    def finish_part(self, dispatched: Dispatched, lost: Sequence[str]) -> None:
        """Note that a part of a survey has ended; `lost` never answered."""
        survey = dispatched.survey
        assert survey is not None
        self._ended(dispatched, 1)
        survey.lose(lost)
        self._part_ended(survey)

    def _part_ended(self, survey: Survey) -> None:
        survey.open -= 1
        if survey.open == 0:
            survey.give_up()
            if not survey.origin.closed:
                # Members that never answered may not all fit. The surveyor knows their names from the roster.
                survey.origin.control(Done(survey.hop, next(_parts(survey.lost))))

    def unanswered(self, dispatched: Dispatched) -> list[str]:
        """Return the ids of members that may not have answered.

        Behind a link, only the surveyor knows which of all did.
        """
        load = dispatched.load
        if load.member is not None:
            return [f"{self._relay}.{load.serial}"]
        if load.site_route is not None:
            # Not all relays of a remote site may have sent their roster: the rest are placeholders.
            return [*dispatched.roster, *dispatched.behind[len(dispatched.roster) :]]
        return list(dispatched.roster) or _behind(load, dispatched.route)


def _behind(load: Load, route: Route) -> list[str]:
    return (
        load.behind.members_behind(route.kind, route.name, route.key_id)
        if load.behind is not None
        else []
    )


def _parts(names: list[str]) -> Iterator[list[str]]:
    """Split names that other relays chose into lists that fit in a frame.

    A received list may be as large as a frame of ours.
    """
    room = MAX_REPORT_BYTES - 64
    if len(names) * _LONGEST_NAME <= room:
        yield names
        return
    part: list[str] = []
    size = 0
    for name in names:
        size += len(name.encode(errors="replace")) + 3
        if size > room:
            yield part
            part, size = [], len(name.encode(errors="replace")) + 3
        part.append(name)
    yield part
