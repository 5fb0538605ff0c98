"""Answers to calls in flight, credit for pushes, and failures that another relay reports.

    REPLY, FAULT, ANSWER, CREDIT, FAIL ── hop id ──► `in_flight` of the sender ──► the caller, under the caller's hop id

An answer without a call in flight is counted and dropped. Refused calls are handled in calls.py, because
another member may run them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from iris.errors import PeerProtocolError
from iris.wire.codec import ALIAS, ALIAS_AT, BODY_AT, HOP, REWRITE
from iris.wire.frames import Credit, Fail
from iris.wire.kinds import ANSWER_RUN_KINDS, Cause, Kind
from iris.wire.runs import hop_ids, read_answers, single_answers
from relay.core.heads import answer_head, flags_not_allowed, undeclared
from relay.core.interest import Interest
from relay.core.neighbor import Dispatched, DispatchedRun, Load, Neighbor, Route
from relay.core.ports import Accounts
from relay.core.session import Session
from relay.core.surveys import Surveys
from relay.core.tunnels import Tunnels
from relay.core.unserved import kind_name

UNSTARTED: Final = "the member did not run it: it could not decode the payload (see its log), has no such method, or was stopping"
"""Why a push failed that the member returned unstarted: the wire has no room for the member's own reason."""


class Answers:
    """Ends calls that `Calls` dispatched when their answer, credit or failure arrives."""

    def __init__(
        self, accounts: Accounts, interest: Interest, neighbors: dict[int, Neighbor], tunnels: Tunnels, surveys: Surveys,
        ended: Callable[[Dispatched, int], None], release: Callable[[Dispatched, int], None],
    ) -> None:  # fmt: skip
        self._accounts = accounts
        self._interest = interest
        self._neighbors = neighbors
        self._tunnels = tunnels
        self._surveys = surveys
        self._ended = ended
        self._release = release

    def answered(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        """Forward a reply, fault or answer from a member or link to the caller. It also frees the member's slot."""
        route, hop = answer_head(neighbor, buf, start, end)
        accounts = self._accounts
        dispatched = neighbor.in_flight.get(hop)
        if dispatched is None:
            accounts.in_ += 1
            accounts.drop("late answer", 1)
            return
        asked = dispatched.route
        if (
            route.name != asked.name
            or route.key_id != asked.key_id
            or asked.kind not in _ANSWERS[route.kind]
        ):
            self._misanswered(neighbor, route, dispatched, hop)
            return
        accounts.in_ += 1
        survey = dispatched.survey
        if survey is None:
            del neighbor.in_flight[hop]
            self._ended(dispatched, 1)
        origin = dispatched.origin
        if origin.closed:
            accounts.drop("late answer", 1)
        else:
            taken = origin.port.has_room(end - start)
            if taken:
                number = route.target(origin, 0).number(self._interest.next_tick())
                theirs = dispatched.hop if dispatched.count == 1 else dispatched.origin_hop(hop)
                REWRITE.pack_into(buf, start + ALIAS_AT, number, theirs)
                taken = origin.port.forward(buf, start, end, 1)
            if taken:
                accounts.out += 1
            else:
                accounts.drop("slow receiver", 1)
                if survey is not None:
                    survey.lose(self._surveys.unanswered(dispatched))
                else:
                    detail = "the reply was dropped because the caller read too slowly"
                    origin.control(Fail(dispatched.origin_hop(hop), Cause.LOST, detail, True))
        if survey is not None and dispatched.load.member is not None:
            del neighbor.in_flight[hop]  # over a link, more answers may follow until DONE
            self._surveys.finish_part(dispatched, ())

    def answered_run(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        """Forward the answers of one ANSWERS frame: replies from a member or link, or a member's answers to surveys."""
        _, hops, _ = read_answers(buf, start, end)
        _, _, flags, alias, _, _ = HOP.unpack_from(buf, start)
        if flags:
            raise flags_not_allowed(buf, start)
        try:
            route = neighbor.routes[alias]
        except IndexError:
            route = None
        if route is None or route.kind not in ANSWER_RUN_KINDS:
            raise undeclared(route, alias)
        run = self._run_of(neighbor, route, hops)
        if run is not None:
            count = len(hops)
            self._accounts.in_ += count
            for hop in hops:
                del neighbor.in_flight[hop]
            self._ended(run, count)
            first = run.hop - run.first_hop
            theirs = [first + hop for hop in hops]
            hop_ids(count).pack_into(buf, start + BODY_AT, *theirs)
            self._return_answers(run.origin, route, theirs, buf, start, end)
            return
        calls = self._of_one_origin(neighbor, route, hops)
        if calls is None:
            for frame in single_answers(buf, start, end, route.kind):
                self.answered(neighbor, memoryview(frame), 0, len(frame))
            return
        self._accounts.in_ += len(hops)
        theirs = []
        for hop, dispatched in zip(hops, calls, strict=True):
            theirs.append(dispatched.origin_hop(hop))
            del neighbor.in_flight[hop]
            self._ended(dispatched, 1)
        hop_ids(len(hops)).pack_into(buf, start + BODY_AT, *theirs)
        self._return_answers(calls[0].origin, route, theirs, buf, start, end)

    def _run_of(
        self, neighbor: Neighbor, route: Route, hops: Sequence[int]
    ) -> DispatchedRun | None:
        """Return the run if all these calls belong to it and its caller can take ANSWERS; else None."""
        table = neighbor.in_flight
        dispatched = table.get(hops[0])
        if (
            isinstance(dispatched, DispatchedRun)
            and len(set(hops)) == len(hops)
            and set(map(table.get, hops)) == {dispatched}
            and _answers(route, dispatched.route)
            and not dispatched.origin.closed
        ):
            return dispatched
        return None

    def _of_one_origin(
        self, neighbor: Neighbor, route: Route, hops: Sequence[int]
    ) -> list[Dispatched] | None:
        """Return these calls if they all have one caller; else None."""
        calls: list[Dispatched] = []
        asked: Route | None = None
        for dispatched in map(neighbor.in_flight.get, hops):
            if dispatched is None or dispatched.survey is not None:
                return None
            if dispatched.route is not asked:
                asked = dispatched.route
                if not _answers(route, asked):
                    return None
            calls.append(dispatched)
        origin = calls[0].origin
        if origin.closed or len(set(hops)) != len(hops):
            return None
        return calls if all(dispatched.origin is origin for dispatched in calls) else None

    def _return_answers(
        self, origin: Neighbor, route: Route, hops: Sequence[int], buf: memoryview, start: int, end: int
    ) -> None:  # fmt: skip
        if origin.port.has_room(end - start):
            number = route.target(origin, 0).number(self._interest.next_tick())
            ALIAS.pack_into(buf, start + ALIAS_AT, number)
            if origin.port.forward(buf, start, end, len(hops)):
                self._accounts.out += len(hops)
                return
        self._accounts.drop("slow receiver", len(hops))
        for hop in hops:
            detail = "the reply was dropped because the caller read too slowly"
            origin.control(Fail(hop, Cause.LOST, detail, True))

    def _misanswered(
        self, neighbor: Neighbor, route: Route, dispatched: Dispatched, hop: int
    ) -> None:
        """Drop an answer whose name, key or kind does not match its call, so that the caller gets no alias for it.

        A session that sends one has broken the protocol. A relay may only have forwarded it, so its
        connection stays open.
        """
        asked = dispatched.route
        if not neighbor.hop_class:
            raise PeerProtocolError(
                f"{Kind(route.kind).name} for {route.name} under key {route.key_id[:4].hex()}… cannot answer a "
                f"{kind_name(asked.kind)} for {asked.name} under key {asked.key_id[:4].hex()}…"
            )
        self._accounts.in_ += 1
        self._accounts.drop("misdirected answer", 1)
        if asked.kind not in (Kind.REQUEST, Kind.STREAM):
            return  # a survey ends with DONE, a push with CREDIT, a tunnel with its end
        del neighbor.in_flight[hop]
        self._ended(dispatched, 1)
        if not dispatched.origin.closed:
            detail = "the answer was dropped because its name, key or kind does not match the call"
            dispatched.origin.control(Fail(dispatched.origin_hop(hop), Cause.LOST, detail, True))

    def dropped(self, session: Session, kind: int, hop: int, cause: str, detail: str) -> None:
        """Drop an answer of a member that has no route, and end its call. Raises PeerProtocolError."""
        self._accounts.in_ += 1
        dispatched = session.in_flight.get(hop)
        if dispatched is None:
            self._accounts.drop("late answer", 1)
            return
        answered = ANSWER_RUN_ANSWERED if kind == Kind.ANSWERS else _ANSWERS[kind]
        if dispatched.route.kind not in answered:
            raise PeerProtocolError(
                f"{Kind(kind).name} cannot answer a {kind_name(dispatched.route.kind)}"
            )
        self._accounts.drop(cause, 1)
        del session.in_flight[hop]
        if dispatched.survey is not None:
            dispatched.survey.lose(self._surveys.unanswered(dispatched))
            self._surveys.finish_part(dispatched, ())
            return
        self._ended(dispatched, 1)
        if not dispatched.origin.closed:
            dispatched.origin.control(Fail(dispatched.origin_hop(hop), Cause.LOST, detail, True))

    def credited(self, session: Session, load: Load, credit: Credit, now_us: int) -> None:
        """Remove finished pushes of a member.

        Relays are sent credit for theirs; senders are notified of pushes that did not run.
        """
        distinct = set(credit.hops)
        if len(distinct) < len(credit.hops) or not load.pushes.keys() >= distinct:
            raise PeerProtocolError(
                f"CREDIT for a {kind_name(load.kind)} that was not dispatched to this member, or is listed twice"
            )
        hops = self._ran(session, credit, now_us) if credit.unstarted else credit.hops
        self._credit(session, load.kind, hops)

    def _ran(self, session: Session, credit: Credit, now_us: int) -> list[int]:
        """Report pushes that the member returned unstarted to their senders; return the hop ids of the others."""
        unstarted = set(credit.unstarted)
        ran = [hop for hop in credit.hops if hop not in unstarted]
        if len(ran) + len(credit.unstarted) != len(credit.hops):
            raise PeerProtocolError("CREDIT.unstarted must be distinct hop ids from CREDIT.hops")
        for hop in credit.unstarted:
            dispatched = session.in_flight.pop(hop)
            given_up = dispatched.given_up
            self._release(dispatched, hop)
            if not dispatched.origin.closed and not given_up:
                theirs = dispatched.origin_hop(hop)
                if dispatched.deadline_us and dispatched.deadline_us <= now_us:
                    fail = Fail(
                        theirs, Cause.EXPIRED, "the deadline had passed when it reached the member"
                    )
                else:
                    fail = Fail(theirs, Cause.REFUSED, UNSTARTED)
                dispatched.origin.control(fail)
        return ran

    def credited_by_link(self, link: Neighbor, credit: Credit) -> None:
        """Remove pushes that members behind a link or in a remote site have finished. Unknown hop ids are ignored."""
        hops = [hop for hop in dict.fromkeys(credit.hops) if hop in link.in_flight]
        if any(link.in_flight[hop].load.kind != Kind.PUSH for hop in hops):
            raise PeerProtocolError("CREDIT over a link for a call that is not a push")
        self._credit(link, Kind.PUSH, hops)

    def _credit(self, neighbor: Neighbor, kind: int, hops: Sequence[int]) -> None:
        given_up: dict[int, list[int]] = {}
        for hop in dict.fromkeys(hops):
            dispatched = neighbor.in_flight.pop(hop)
            self._release(dispatched, hop)
            if dispatched.origin.hop_class and not dispatched.origin.closed:
                given_up.setdefault(dispatched.origin.number, []).append(dispatched.origin_hop(hop))
        for number, theirs in given_up.items():
            self._neighbors[number].control(Credit(0, kind, theirs))

    def failed_by_link(self, link: Neighbor, fail: Fail) -> None:
        """Forward a FAIL from the relay behind a link or from a remote site's gateway to the caller."""
        dispatched = link.in_flight.pop(fail.hop, None)
        if dispatched is None:
            return
        if dispatched.survey is not None:
            nobody = fail.cause == Cause.NO_MEMBERS
            self._surveys.finish_part(
                dispatched, () if nobody else self._surveys.unanswered(dispatched)
            )
            return
        self._release(dispatched, fail.hop)
        if dispatched.load.kind == Kind.TUNNEL_OPEN:
            self._tunnels.refused(dispatched, link, fail.hop)
        if not dispatched.origin.closed:
            theirs = dispatched.origin_hop(fail.hop)
            dispatched.origin.control(Fail(theirs, fail.cause, fail.detail, fail.may_have_run))


_ANSWERS: Final[dict[int, tuple[int, ...]]] = {
    Kind.REPLY: (Kind.REQUEST,),
    Kind.FAULT: (Kind.REQUEST, Kind.SURVEY),
    Kind.ANSWER: (Kind.SURVEY,),
    Kind.STREAM_REPLY: (Kind.STREAM,),
}
"""Answer kind -> call kinds that it may answer."""
ANSWER_RUN_ANSWERED: Final = (Kind.REQUEST, Kind.SURVEY)
"""Call kinds that a run of answers may answer."""


def _answers(route: Route, asked: Route) -> bool:
    """Whether a reply under `route` may answer a request under `asked`."""
    return asked.kind == Kind.REQUEST and asked.name == route.name and asked.key_id == route.key_id
