"""What sessions over WebSocket may do: each shows a ticket in HELLO, which narrows what its issuer may allow.

    HELLO, TICKET ── admit, renew ──► session.ticket       who it is, until when, and for which verbs and names
    JOIN, SUBSCRIBE, MEMBERS, DECLARE ── refusal ──► ""    or why not, counted by verb
    calls to stores ── guarded ──► router                  or refused, one by one

A ticket allows something only if its issuer's settings allow it, too. Answers need no permission: they go by the hop id
of what a member was sent. A session without a ticket, where none is required, is not restricted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from iris.errors import DecodeError, PeerProtocolError
from iris.wire import consumers, streams
from iris.wire.codec import BODY_AT
from iris.wire.frames import Fail
from iris.wire.kinds import NO_KEY, Cause, Kind
from relay.core.admitted import Admitted
from relay.core.heads import made
from relay.core.issuers import Issuer, issuers_by_key
from relay.core.ports import Accounts
from relay.core.rates import Entry
from relay.core.session import Session

if TYPE_CHECKING:
    from iris.crypto.tickets import Ticket

NO_TICKET: Final = "no ticket"
REVOKED: Final = "ticket revoked"
OTHER_ORIGIN: Final = "ticket of another origin"
TOO_MANY: Final = "too many sessions of a subject"
VERB_OF: Final = {
    Kind.REQUEST: "request",
    Kind.PUSH: "push",
    Kind.SURVEY: "survey",
    Kind.BROADCAST: "broadcast",
    Kind.TUNNEL_OPEN: "tunnel",
    Kind.PUBLISH: "publish",
}
STREAM_VERBS: Final = ("read", "consume", "append")
_OF_STREAMS: Final[dict[type, Sequence[str]]] = {
    streams.Knock: STREAM_VERBS,
    streams.Open: STREAM_VERBS,
    streams.Describe: STREAM_VERBS,
    streams.Fetch: ("read",),
    streams.Find: ("read",),
    consumers.Consume: ("consume",),
    consumers.Settle: ("consume",),
    consumers.Attend: ("consume",),
    consumers.DescribeConsumers: ("consume",),
    streams.Append: ("append",),
    streams.FindStore: (
        "create",
    ),  # a client asks this before it creates a stream, which no ticket allows
}
"""Call to a store -> verbs, one of which must be allowed. No ticket allows another call."""
_UUID: Final = re.compile(r"[0-9a-f]{32}")
_PARTITION: Final = re.compile(r"/[1-9][0-9]*\Z")
_MARK: Final = 0xC1
_CODE_BYTES: Final = 49
"""Length of the code of a channel before a call (docs/protocol.md, §19.9)."""
MAX_NAMES: Final = 64
"""Limit of cached names of streams of one session."""


class TicketRefused(PeerProtocolError):
    """A session showed no ticket, or one that is not accepted. `reason` is one of few texts, for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Final = reason


class Read(Protocol):
    """`iris.crypto.tickets.read_ticket`, which needs a package that a relay without browsers does without."""

    def __call__(
        self, text: str, *, find_key: Callable[[bytes], bytes | None], networks: Collection[str], now_s: float,
        max_life_s: Callable[[bytes], int],
    ) -> Ticket: ...  # fmt: skip


class Admission:
    """The issuers of one relay, and what it counted of their tickets."""

    def __init__(
        self, read: Read, *, issuers: Sequence[Issuer], revoked: Collection[str], networks: Callable[[], Collection[str]],
        required: bool, accounts: Accounts, clock: Callable[[], int], stream_names: Callable[[str, bytes], Sequence[str]],
    ) -> None:  # fmt: skip
        """`clock` returns the time in µs, `stream_names` the names of the stream of a uuid (in hex) and a key."""
        self._read = read
        self._networks = networks
        self._required = required
        self._accounts = accounts
        self._clock = clock
        self._stream_names = stream_names
        self._holders: dict[tuple[str, str], dict[Session, None]] = {}
        """(issuer, subject) -> sessions, the oldest first. It has no entry without one."""
        self.admitted = 0
        self.renewed = 0
        self.ended: dict[str, int] = {}
        """Sessions that ended because of their tickets: reason -> count."""
        self.denied: dict[str, int] = {}
        """What was refused to sessions: verb -> count."""
        self.on_denied: Callable[[Session, str], None] = lambda session, why: None
        self.on_lost_alias: Callable[[Session, int, str], None] = lambda session, alias, why: None
        """Called with an alias that a session declared and its ticket does not allow any more, and why."""
        self._reloads = 0
        """How often issuers and revoked tickets were read; a session is checked again after each time."""
        self._issuers: dict[bytes, tuple[Issuer, bytes]] = {}
        self.revoked: Collection[str] = ()
        """Ids of revoked tickets, and "subject NAME"."""
        self.reload(issuers, revoked)

    def reload(self, issuers: Sequence[Issuer], revoked: Collection[str]) -> None:
        """Use these issuers and these revoked tickets from now on. See `ended_by`."""
        self._issuers = issuers_by_key(issuers)
        self._reloads += 1
        self.revoked = revoked
        sessions = [session for held in self._holders.values() for session in held]
        self._holders.clear()
        for session in sorted(sessions, key=lambda session: session.number):
            admitted = session.ticket
            assert admitted is not None
            if known := self._issuers.get(admitted.ticket.issuer):
                admitted.issuer = known[0]  # which may have another name now
            held = self._holders.setdefault(admitted.holder, {})
            held[session] = None
            admitted.surplus = len(held) > admitted.issuer.sessions_per_subject

    def ended_by(self, session: Session, now_us: int) -> str:
        """Return why a session that was admitted must end now, or an empty text."""
        admitted = session.ticket
        if admitted is None:
            return ""
        if why := admitted.over(now_us):
            return why
        if admitted.checked == self._reloads:
            return ""
        admitted.checked = self._reloads
        if self._is_revoked(admitted.ticket):
            return "the ticket was revoked"
        if admitted.ticket.issuer not in self._issuers:
            return "the ticket's issuer was removed"
        if admitted.surplus:
            return "the ticket's issuer allows fewer sessions of a subject now"
        if _lost(session, admitted):
            return "the ticket's issuer may allow less now"
        self._judge_routes(session)
        return ""

    def admit(self, session: Session, text: str, wall_us: int) -> None:
        """Admit a session that showed the ticket `text` in HELLO. Raises TicketRefused."""
        if not text:
            if self._required:
                raise TicketRefused(NO_TICKET, "the relay requires one in HELLO")
            return
        admitted = self._accepted(session, text, wall_us)
        held = self._holders.get(admitted.holder, {})
        if len(held) >= admitted.issuer.sessions_per_subject:
            raise TicketRefused(
                TOO_MANY,
                f"{admitted.ticket.subject!r} has {len(held)} sessions, which is the limit",
            )
        self._holders.setdefault(admitted.holder, held)[session] = None
        session.ticket = admitted
        session.user = f"ticket issuer {admitted.issuer.name}"
        self.admitted += 1

    def renew(self, session: Session, text: str, wall_us: int) -> str:
        """Replace the ticket of a session; return why not, or an empty text. The old one stays then.

        Raises TicketRefused: the session has no ticket.
        """
        before = session.ticket
        if before is None:
            raise TicketRefused(
                NO_TICKET, "the session began without a ticket, so there is none to renew"
            )
        try:
            admitted = self._accepted(session, text, wall_us)
        except TicketRefused as refused:
            return str(refused)
        if admitted.holder != before.holder:
            return "the new ticket was made by another issuer or for another subject"
        if error := _lost(session, admitted):
            return error
        admitted.surplus, admitted.workers = before.surplus, before.workers
        session.ticket = admitted
        self._judge_routes(session)
        self.renewed += 1
        return ""

    def forget(self, session: Session) -> None:
        """Free what a session that ended held."""
        admitted, session.ticket = session.ticket, None
        if admitted is None:
            return
        held = self._holders[admitted.holder]
        del held[session]
        if not held:
            del self._holders[admitted.holder]

    def refusal(
        self, session: Session, verbs: Sequence[str], name: str, key_ids: Iterable[bytes]
    ) -> str:
        """Return why a session may not do any of `verbs`, or an empty text. A refusal is counted."""
        admitted = session.ticket
        if admitted is None:
            return ""
        why = admitted.refusal(verbs, name, key_ids, session.proven)
        if why:
            self._count(session, verbs[0], why)
        return why

    def denial(self, session: Session, kind: int, name: str, key_id: bytes) -> str:
        """Return why a session may not send frames of a kind to an address, or an empty text. A refusal is counted.

        Calls to stores are checked one by one.
        """
        verb = VERB_OF.get(Kind(kind))
        return "" if verb is None else self.refusal(session, (verb,), name, (key_id,))

    def members(
        self, session: Session, name: str, key_ids: Sequence[bytes], *, streams: bool
    ) -> str:
        """Return why a session may not ask for members, or with `streams` for the stores of a stream."""
        if session.ticket is None:
            return ""
        if not streams:
            return self.refusal(session, ("members",), name, key_ids)
        if NO_KEY in key_ids:
            return self.refusal(session, ("stores",), name, key_ids)
        # Not counted: this only finds the stores of a stream, and the call that follows is counted.
        names = {self._stream(session.ticket, name, key_id) for key_id in key_ids}
        for each in sorted(names - {name} or names):  # under some keys there may be no such stream
            if why := session.ticket.refusal(STREAM_VERBS, each, key_ids, session.proven):
                return why
        return ""

    def guarded(self, table: Sequence[Entry]) -> list[Entry]:
        """Return the table of handlers of sessions' frames, where calls to stores are checked first."""
        guarded = list(table)
        guarded[Kind.STREAM] = self._checking_store(table[Kind.STREAM])
        return guarded

    def status(self) -> dict[str, object]:
        """Return what was counted, ready for JSON."""
        return {
            "admitted": self.admitted,
            "renewed": self.renewed,
            "ended": dict(self.ended),
            "denied": dict(self.denied),
            "subjects": len(self._holders),
        }

    def _accepted(self, session: Session, text: str, wall_us: int) -> Admitted:
        from iris.crypto.tickets import TicketError

        issuers = self._issuers
        try:
            ticket = self._read(
                text,
                find_key=lambda key_id: issuers[key_id][1] if key_id in issuers else None,
                networks=self._networks(),
                now_s=wall_us / 1e6,
                max_life_s=lambda key_id: issuers[key_id][0].max_life_s,
            )
        except TicketError as error:
            raise TicketRefused(
                error.reason, str(error).removeprefix(f"{error.reason}: ")
            ) from error
        if self._is_revoked(ticket):
            raise TicketRefused(REVOKED)
        if ticket.origin and ticket.origin != session.origin:
            raise TicketRefused(OTHER_ORIGIN, f"it is for {ticket.origin}")
        # The lease runs on the monotonic clock, so a wall clock that is set neither ends nor prolongs it.
        return Admitted(ticket, issuers[ticket.issuer][0], self._clock() - wall_us)

    def _is_revoked(self, ticket: Ticket) -> bool:
        return ticket.id in self.revoked or f"subject {ticket.subject}" in self.revoked

    def _judge_routes(self, session: Session) -> None:
        """Judge again what the session declared."""
        for alias, route in enumerate(session.routes):
            if route is not None and (
                why := self.denial(session, route.kind, route.name, route.key_id)
            ):
                self.on_lost_alias(session, alias, why)

    def _checking_store(self, handle: Entry) -> Entry:
        def frame(session: Session, buf: memoryview, start: int, end: int) -> object:
            head = made(session, buf, start, end)
            if head is None or session.ticket is None:
                return handle(session, buf, start, end)
            route, _, hop = head
            at = start + BODY_AT
            if at < end and buf[at] == _MARK:
                at += _CODE_BYTES
            try:
                call = streams.decode_call(buf[at:end])
                verbs = _OF_STREAMS.get(type(call)) or (str(type(call).__struct_config__.tag),)
            except DecodeError:
                call, verbs = None, ("this call",)
            name = self._stream(session.ticket, route.name, route.key_id)
            why = session.ticket.refusal(verbs, name, (route.key_id,), session.proven)
            why = why or session.ticket.consumer_refusal(call, name)
            if not why:
                return handle(session, buf, start, end)
            self._count(session, "stream" if verbs == STREAM_VERBS else verbs[0], why)
            self._accounts.in_ += 1
            self._accounts.refused += 1
            # A stream that the ticket has nothing to do with is one that does not exist.
            cause = Cause.NO_MEMBERS if verbs == STREAM_VERBS else Cause.REFUSED
            session.control(Fail(hop, cause, why))
            return True

        return frame

    def _stream(self, admitted: Admitted, name: str, key_id: bytes) -> str:
        """Return the name of the stream at an address, which is its name or its uuid in hex."""
        if not _UUID.fullmatch(name):
            return name
        found = admitted.names.get((name, key_id))
        if found is None:
            names = self._stream_names(name, key_id)
            if not names:
                return name
            if len(admitted.names) >= MAX_NAMES:
                admitted.names.clear()
            # A partition counts as its stream (docs/protocol.md, §19.10).
            found = admitted.names[(name, key_id)] = _PARTITION.sub("", names[0])
        return found

    def _count(self, session: Session, verb: str, why: str) -> None:
        self.denied[verb] = self.denied.get(verb, 0) + 1
        self.on_denied(session, why)


def _lost(session: Session, admitted: Admitted) -> str:
    """Return what a session has and a new ticket does not allow, or an empty text."""
    wanted: list[tuple[str, str, Sequence[bytes]]] = [
        ("subscribe", pattern, key_ids) for (pattern, _), key_ids in session.subscriptions.items()
    ]
    wanted += [
        ("serve", each.name, each.key_ids) for each in session.members.values() if not each.left
    ]
    wanted += [("members", each.name, each.key_ids) for each in session.watches.values()]
    for verb, name, key_ids in wanted:
        if why := admitted.refusal((verb,), name, key_ids, session.proven):
            return f"the new ticket does not allow everything that the session uses: {why}"
    return ""
