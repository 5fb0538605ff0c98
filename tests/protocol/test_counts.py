"""A count or a flag of a frame decides nothing before it is validated, whatever becomes of the frame.

Every kind of frame is fed, with every flag and with counts that it cannot hold, to each path that refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from protocol.kit import KEY, Network, Port

from iris.crypto.keys import public_id
from iris.crypto.scopes import Scope
from iris.crypto.tickets import Ticket
from iris.errors import PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.codec import COUNT, COUNT_AT, END, HOP, decode_control, encode_control
from iris.wire.kinds import FLAG_REFUSED, SERVED_KINDS, TUNNEL_KINDS, HopClass, Kind, Refusal
from iris.wire.runs import MAX_RUN, call_run
from relay.core.issuers import Issuer
from relay.core.limits import Limits
from relay.core.neighbor import Neighbor
from relay.core.router import Router
from relay.core.session import Session
from relay.core.tickets import Admission

CASTS = (Kind.PUBLISH, Kind.BROADCAST)
MOST = (1 << 32) - 1
SENDER = b"\x77" * 16
ISSUER = bytes(32)
CALLS = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN, Kind.STREAM)
SENT = (*CASTS, *CALLS, Kind.CALLS)
"""Kinds of data frames that a session sends on its own account."""
DATA = tuple(kind for kind in Kind if kind >= Kind.REQUEST)
ALIAS = {
    kind: number for number, kind in enumerate(kind for kind in DATA if kind not in TUNNEL_KINDS)
}
ALIAS[Kind.CALLS] = ALIAS[Kind.REQUEST]
ALIAS[Kind.ANSWERS] = ALIAS[Kind.REPLY]
RETURNED = [FLAG_REFUSED | reason << 4 for reason in Refusal]
"""The flags of calls that their receiver returns."""
BODY = bytes(12)


class Made:
    """A session with an alias for each kind of data frame, and another one that serves all of them."""

    def __init__(self, **limits: object) -> None:
        self.net = Network(limits=Limits(**limits))  # type: ignore[arg-type]  # the fields of Limits
        self.router: Router = self.net.router
        self.receiver_port, self.receiver = self.session()
        serving = {kind: frames.Serving(1 << 20, 1 << 30) for kind in SERVED_KINDS}
        self.say(self.receiver, frames.Join(1, "db", [KEY.key_id], serving))
        self.say(self.receiver, frames.Subscribe(2, "db", [KEY.key_id], ""))
        self.port, self.sender = self.session()
        for kind, alias in ALIAS.items():
            if kind not in (Kind.CALLS, Kind.ANSWERS):
                self.say(self.sender, frames.Declare(alias, kind, "db", KEY.key_id, SENDER))
        self.receiver_port.out.clear()
        self.port.out.clear()

    def session(self) -> tuple[Port, Session]:
        port = Port()
        session = self.router.session_up(port)
        self.say(session, frames.Hello(1, 8, "raw", 7))
        signature = KEY.sign_proof(
            relay_id=self.router.relay_id,
            session_id=session.session_id,
            challenge=session.challenge,
        )
        self.say(session, frames.Prove(0, KEY.public_key, signature))
        return port, session

    def say(self, neighbor: Neighbor, body: frames.Control) -> None:
        self.feed(neighbor, encode_control(body))

    def feed(self, neighbor: Neighbor, frame: bytes) -> None:
        self.router.frame_in(neighbor, memoryview(bytearray(frame)), 0, len(frame))


def denied() -> Made:
    """A ticket allows nothing of what is sent."""
    made = Made()
    nothing = Scope({})
    ticket = Ticket(public_id(ISSUER), "", "alice", "1", 0, 1 << 20, nothing)
    admission = Admission(
        lambda text, **options: ticket,
        issuers=[Issuer("app", (ISSUER,), nothing)], revoked=(), networks=tuple, required=False,
        accounts=made.router.accounts, clock=lambda: made.router.now_us, stream_names=made.router.stream_names,
    )  # fmt: skip
    made.router.admit_by(admission)
    for alias in set(ALIAS.values()):
        made.router.forget_alias(made.sender, alias)  # they were of another user
    admission.admit(made.sender, "ticket", 0)
    for kind, alias in ALIAS.items():
        if kind not in (Kind.CALLS, Kind.ANSWERS):
            made.say(made.sender, frames.Declare(alias, kind, "db", KEY.key_id, SENDER))
    return made


def rated() -> Made:
    """The session has used up its rate quota."""
    made = Made(session_rate=(1, 0))
    for _ in range(2):
        made.feed(made.sender, data(Kind.PUBLISH, 0, 1))
    made.receiver_port.out.clear()
    made.port.out.clear()
    return made


def unknown() -> Made:
    """The aliases stand for other kinds."""
    made = Made()
    for alias in ALIAS.values():
        kind = Kind.FAULT if alias != ALIAS[Kind.FAULT] else Kind.PUSH
        made.say(made.sender, frames.Declare(alias, kind, "db", KEY.key_id, SENDER))
    return made


def retired() -> Made:
    """The session has released the key of its aliases."""
    made = Made()
    made.say(made.sender, frames.Release(KEY.key_id))
    return made


def draining() -> Made:
    """The relay stops, and its only member has left."""
    made = Made()
    made.router.session_down(made.receiver)
    made.router.drain(1000)
    return made


def unserved() -> Made:
    """Nobody serves the address."""
    made = Made()
    made.router.session_down(made.receiver)
    return made


def crowded() -> Made:
    """The session has as many calls in flight as it may."""
    made = Made(pending=0)
    return made


def served() -> Made:
    """Nothing refuses the frame."""
    return Made()


PATHS: tuple[Callable[[], Made], ...] = (
    denied, rated, unknown, retired, draining, unserved, crowded, served,
)  # fmt: skip


def data(kind: int, flags: int, count: int, *, hop: int = 5) -> bytes:
    """Return a data frame with room for two messages, calls or answers."""
    if kind in TUNNEL_KINDS:
        return HOP.pack(HOP.size - 4, kind, flags, 0, hop, 0)
    if kind == Kind.CALLS:
        frame = bytearray(call_run(ALIAS[kind], flags, hop, 0, END.pack(0, 0, 1, 0), (b"a", b"b")))
        COUNT.pack_into(frame, COUNT_AT, count)
        return bytes(frame)
    size = HOP.size - 4 + END.size + len(BODY)
    return HOP.pack(size, kind, flags, ALIAS[kind], hop, 0) + END.pack(0, 0, count, 0) + BODY


def wrong() -> Iterator[tuple[int, int, int]]:
    """Yield (kind, flags, count) of frames that nobody may accept."""
    for kind in DATA:
        for flags in range(256):
            if flags and not (flags in RETURNED and kind in (*CALLS, Kind.CALLS)):
                yield from ((kind, flags, count) for count in (1, 2, MOST))
        if kind in CASTS:
            yield from ((kind, 0, count) for count in (0, 16, MOST >> 2, MOST))
        elif kind in CALLS:
            for flags in (0, *RETURNED):
                yield from ((kind, flags, count) for count in (0, 2, MAX_RUN, MOST))
        elif kind in (Kind.CALLS, Kind.ANSWERS):
            yield from ((kind, 0, count) for count in (0, 3, MAX_RUN + 1, MOST))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_a_frame_with_a_wrong_count_or_flag_is_a_breach_whatever_else_would_refuse_it(
    path: Callable[[], Made],
) -> None:
    made = path()
    receiver, sender, accounts = made.receiver_port.out, made.port.out, made.router.accounts
    receiver.clear(), sender.clear()
    before = accounts.report(0)
    for kind, flags, count in wrong():
        try:
            made.feed(made.sender, data(kind, flags, count))
        except PeerProtocolError:
            continue
        pytest.fail(f"accepted: {Kind(kind).name} with flags 0x{flags:02x} and count {count}")
    assert not receiver
    assert not sender
    assert accounts.report(0) == before


@pytest.mark.parametrize("path", [denied, rated, crowded], ids=lambda path: path.__name__)
@pytest.mark.parametrize("kind", SENT)
def test_a_frame_is_refused_with_one_answer_for_each_of_its_calls(
    path: Callable[[], Made], kind: int
) -> None:
    made = path()
    if (kind == Kind.STREAM and path is rated) or (kind in CASTS and path is crowded):
        return  # neither quotas nor the limit of calls in flight know these
    made.receiver_port.out.clear(), made.port.out.clear()
    count = 2 if kind == Kind.CALLS else 1
    before = made.router.accounts.in_
    made.feed(made.sender, data(kind, 0, count))
    assert not made.receiver_port.out
    answers = [decode_control(memoryview(each), 0, len(each)) for each in made.port.out]
    if kind in CASTS and path is denied:
        assert not answers  # the sender got UNROUTED when it declared the alias
    elif kind in CASTS:
        assert [(each.kind, each.count) for each in answers] == [(kind, 1)]  # type: ignore[union-attr]  # UNROUTED
    else:
        assert [each.hop for each in answers] == [5, 6][:count]  # type: ignore[union-attr]  # FAIL
    assert made.router.accounts.in_ == before + count
    assert made.router.accounts.balance() == 0


def test_a_relay_is_held_to_the_counts_of_its_frames_too() -> None:
    router = Network().router
    port = Port()
    hello = link_frames.LinkHello(1, 8, b"R" * 16, 0, 1, 1 << 20, 65_536, "", "other", [])
    link = router.link_up(port, hello)
    for kind in SENT:
        if kind != Kind.CALLS:
            declare = frames.Declare(
                ALIAS[kind], kind, "db", KEY.key_id, SENDER, True, [], 0, HopClass.MESH
            )
            frame = memoryview(bytearray(encode_control(declare)))
            router.frame_in(link, frame, 0, len(frame))
    port.out.clear()
    before = router.accounts.report(0)
    for kind, flags, count in wrong():
        if kind in SENT and not flags:
            frame = memoryview(bytearray(data(kind, flags, count)))
            with pytest.raises(PeerProtocolError):
                router.frame_in(link, frame, 0, len(frame))
    assert router.accounts.report(0) == before
    assert not port.out
