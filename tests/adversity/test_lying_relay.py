"""A lying relay can deny service and nothing else: forged messages are never delivered, and no call waits forever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from adversity.liar import SENDER, WELCOME, Liar, Peer, acknowledging, hop_of, silent
from support.relays import KEY
from support.waiting import eventually

import iris
from iris.core.tunnel import prologue
from iris.crypto.noise import Handshake
from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.codec import HOP, RELAY_HOP, encode_control
from iris.wire.frames import Control
from iris.wire.kinds import FLAG_REFUSED, Kind, Refusal

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("nothing_hangs")]


# -- greeting --------------------------------------------------------------------------------------------------

GREETINGS: dict[str, tuple[Control | bytes | None, str]] = {
    "garbage": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a frame declares"),
    "an endless frame": (b"\xff\xff\xff\xff", "a frame declares 4294967295 bytes"),
    "an empty frame": (b"\0\0\0\0", "a frame declares 0 bytes"),
    "an unknown kind": (b"\x02\0\0\0\x3f\0", "frame kind 0x3f is not known"),
    "no MessagePack": (b"\x03\0\0\0\x02\0\xc1", "a WELCOME frame cannot be decoded"),
    "another version": (
        frames.Welcome(2, 0, bytes(16), bytes(8), bytes(32), 1 << 20),
        "speaks protocol version 2",
    ),
    "a short challenge": (
        encode_control(frames.Welcome(1, 0, bytes(16), bytes(8), bytes(31), 1 << 20)),
        "a WELCOME frame cannot be decoded",
    ),
    "an Ack before WELCOME": (frames.Ack(1), "the relay sent Ack,"),
    "a session's frame": (frames.Hello(1, 0), "the relay sent Hello,"),
    "data before WELCOME": (HOP.pack(46, Kind.PUBLISH, 0, 0, 0, 0) + bytes(24), "alias 0"),
    "two WELCOMEs": (encode_control(WELCOME) * 2, "a second WELCOME"),
    "an Error": (frames.Error("not today"), "the relay ended the session: not today"),
    "goodbye": (frames.Bye("no"), "the relay sent Bye,"),
}


@pytest.mark.parametrize("name", GREETINGS)
async def test_a_relay_that_greets_wrongly_is_unavailable(name: str, tmp_path: Path) -> None:
    greeting, reason = GREETINGS[name]
    async with Liar(tmp_path, acknowledging, greeting=greeting) as liar:
        with pytest.raises(iris.RelayUnavailable, match=reason):
            await liar.client().open()


async def test_a_relay_that_hangs_up_is_unavailable(tmp_path: Path) -> None:
    def hang_up(peer: Peer, body: Control | bytes) -> None:
        peer.hang_up()

    async with Liar(tmp_path, hang_up, greeting=None) as liar:
        with pytest.raises(iris.RelayUnavailable, match="closed the connection"):
            await liar.client().open()


async def test_a_relay_that_says_nothing_is_unavailable_in_time(tmp_path: Path) -> None:
    async with Liar(tmp_path, silent, greeting=None) as liar:
        with pytest.raises(iris.RelayUnavailable, match=r"did not answer within 0.2 s"):
            await liar.client(connect_timeout_s=0.2).open()


async def test_no_relay_at_all_says_what_to_do(tmp_path: Path) -> None:
    client = iris.connect(tmp_path / "none.sock", keyring=iris.Keyring.single(KEY))
    with pytest.raises(iris.RelayUnavailable, match=r"no relay at .*none.sock.*iris relay --dev"):
        await client.open()


async def test_a_socket_that_nobody_serves_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    server = await asyncio.start_unix_server(lambda reader, writer: None, path)
    server.close()
    if not path.exists():
        pytest.skip("this Python removes the socket")
    with pytest.raises(iris.RelayUnavailable, match="iris relay --dev"):
        await iris.connect(path, keyring=iris.Keyring.single(KEY)).open()


# -- silence ---------------------------------------------------------------------------------------------------


async def test_every_call_ends_in_time_at_a_relay_that_stopped_answering(tmp_path: Path) -> None:
    service = iris.Service("db")
    service.on_request(lambda payload: payload)

    async def survey(client: iris.Client) -> None:
        survey = client.survey("db", b"", timeout=0.1)
        assert [answer async for answer in survey] == []
        raise iris.RequestTimeout("db", "no answer")

    async def subscribe(client: iris.Client) -> None:
        async with client.subscribe("a.>"):
            raise AssertionError("nobody acknowledged it")

    async def serve(client: iris.Client) -> None:
        async with client.serve(service):
            raise AssertionError("nobody acknowledged it")

    async def tunnel(client: iris.Client) -> None:
        async with client.tunnel("db", timeout=0.1):
            raise AssertionError("nobody accepted it")

    async with Liar(tmp_path, silent) as liar:
        client = liar.client(connect_timeout_s=0.2)
        await client.open()
        for call in (
            client.request("db", b"", timeout=0.1),
            client.request("db", b"", timeout=0.1, idempotent=True),
            client.flush(timeout=0.1),
            client.status(timeout=0.1),
            client.members("db", timeout=0.1),
            client.wait_for_members("db", 1, timeout=0.1),
            survey(client),
            subscribe(client),
            serve(client),
            tunnel(client),
        ):
            with pytest.raises(iris.RequestTimeout):
                await call
        await client.push("db", b"", timeout=0.1)
        await client.publish("a.b", b"")
        await client.broadcast("db", b"")
        await client.close()


async def test_a_member_and_a_subscriber_stop_in_time_at_a_relay_that_stopped_answering(
    tmp_path: Path,
) -> None:
    deaf = False

    def script(peer: Peer, body: Control | bytes) -> None:
        if not deaf:
            acknowledging(peer, body)

    service = iris.Service("db")
    service.on_request(lambda payload: payload)
    async with Liar(tmp_path, script) as liar:
        client = liar.client(connect_timeout_s=0.2)
        await client.open()
        async with client.serve(service), client.subscribe("a.>"):
            deaf = True
        await client.close()


# -- frames that no relay sends --------------------------------------------------------------------------------

WRONG: dict[str, Control | bytes] = {
    "garbage": b"\x02\0\0\0\x00\0",
    "an endless frame": b"\xff\xff\xff\xff",
    "a frame over the limit": ((16 << 20) + 1).to_bytes(4, "little"),
    "an undeclared alias": HOP.pack(46, Kind.PUBLISH, 0, 9, 0, 0) + bytes(24),
    "an alias for control frames": frames.Declare(0, Kind.PING, "a", KEY.key_id, SENDER),
    "a data frame cut short": HOP.pack(22, Kind.REPLY, 0, 0, 0, 0),
    "a publication cut short": HOP.pack(22, Kind.PUBLISH, 0, 0, 0, 0),
    "a tunnel frame cut short": b"\x02\0\0\0" + bytes((Kind.TUNNEL_DATA, 0)),
    "a refusal": HOP.pack(46, Kind.REQUEST, FLAG_REFUSED | Refusal.FULL << 4, 0, 1, 0) + bytes(24),
    "a session's frame": frames.Leave(1, 1),
    "a gap in requests": frames.Gap(Kind.REQUEST, "a", KEY.key_id, SENDER, 0, 1, "x"),
    "an Error": frames.Error("you are wrong"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_relay_that_breaks_the_protocol_loses_its_session(
    name: str, tmp_path: Path
) -> None:
    """Calls in flight end at once; the client connects to a relay again, and works."""

    def script(peer: Peer, body: Control | bytes) -> None:
        if peer.number == 1 and isinstance(body, bytes):
            peer.send(WRONG[name])
        else:
            acknowledging(peer, body)

    async with Liar(tmp_path, script) as liar, liar.client() as client, client.subscribe("a.>"):
        with pytest.raises(iris.ConnectionLost) as caught:
            await client.request("db", b"", timeout=10)
        assert caught.value.may_have_run
        await client.flush()
        assert len(liar.peers) == 2
        assert sum(isinstance(body, frames.Subscribe) for body in liar.last.got) == 1


@pytest.mark.parametrize("answer", ["ack", "report", "pong"])
async def test_an_answer_of_another_type_ends_the_session(answer: str, tmp_path: Path) -> None:
    def script(peer: Peer, body: Control | bytes) -> None:
        match body:
            case frames.Status() | frames.Ping() | frames.Subscribe() if peer.number == 1:
                answers: dict[str, Control] = {
                    "ack": frames.Ack(body.id),
                    "report": frames.Report(body.id, "{}"),
                    "pong": frames.Pong(body.id),
                }
                peer.send(answers[answer])
            case _:
                acknowledging(peer, body)

    async with Liar(tmp_path, script) as liar, liar.client() as client:
        with pytest.raises(iris.ConnectionLost):
            await (client.status() if answer == "pong" else client.flush())
        await client.flush()
        assert len(liar.peers) == 2


@pytest.mark.parametrize("document", ["", "[]", "{", "null"])
async def test_a_status_that_is_not_a_document_is_a_decode_error(
    document: str, tmp_path: Path
) -> None:
    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, frames.Status):
            peer.send(frames.Report(body.id, document))
        else:
            acknowledging(peer, body)

    async with Liar(tmp_path, script) as liar, liar.client() as client:
        with pytest.raises(iris.DecodeError):
            await client.status()


# -- tunnels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", bytes(48), bytes(70_000)])
async def test_a_forged_acceptance_opens_no_tunnel(body: bytes, tmp_path: Path) -> None:
    def script(peer: Peer, frame: Control | bytes) -> None:
        if isinstance(frame, bytes) and frame[4] == Kind.TUNNEL_OPEN:
            head = HOP.pack(22 + len(body), Kind.TUNNEL_ACCEPT, 0, 0, hop_of(frame), 0)
            peer.send(head + body)
        elif not isinstance(frame, bytes):
            acknowledging(peer, frame)

    async with Liar(tmp_path, script) as liar, liar.client() as client:
        with pytest.raises(iris.ConnectionLost) as caught:
            await client.open_tunnel("db", timeout=5)
        assert not caught.value.may_have_run
        await client.flush()
        assert liar.last.count(Kind.TUNNEL_END) == 1
        assert len(liar.peers) == 1


async def test_one_tunnel_opened_twice_at_a_member_ends_the_session(tmp_path: Path) -> None:
    service = iris.Service("db")

    @service.on_tunnel
    async def never(tunnel: iris.Tunnel) -> None:
        raise AssertionError("its opening headers never came")

    opening = Handshake(
        True, prologue("db", KEY.key_id, SENDER), KEY.tunnel_psk, bytes(range(32))
    ).write_message()
    frame = HOP.pack(46 + len(opening), Kind.TUNNEL_OPEN, 0, 0, RELAY_HOP + 1, 0) + bytes(24)
    async with (
        Liar(tmp_path, acknowledging) as liar,
        liar.client() as client,
        client.serve(service),
    ):
        peer = liar.last
        peer.send(peer.declare(0, Kind.TUNNEL_OPEN, "db", member=7), frame + opening)
        await eventually(lambda: peer.count(Kind.TUNNEL_ACCEPT) == 1)
        assert len(liar.peers) == 1
        peer.send(frame + opening)
        await eventually(lambda: len(liar.peers) == 2)
        await client.flush()


def test_what_a_relay_gets_wrong_is_never_blamed_on_the_user() -> None:
    assert issubclass(PeerProtocolError, iris.IrisError)
    assert "PeerProtocolError" not in iris.__all__


# -- losses that a relay hides ---------------------------------------------------------------------------------


class Received:
    """The messages that a subscription or service received, and its reports of losses."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.gaps: list[int | None] = []

    def take(self, message: iris.Message) -> None:
        self.payloads.append(message.payload)

    def gap(self, lost: iris.Loss) -> None:
        self.gaps.append(lost.count)


@pytest.mark.parametrize("member_here", [False, True])
async def test_a_message_that_a_relay_gives_only_to_a_group_is_reported_to_all_other_subscribers(
    member_here: bool, tmp_path: Path
) -> None:
    """The message opens, so it is not forged. It reaches none of its subscribers, so it is lost, even if nothing
    follows.
    """
    every, shared = Received(), Received()
    async with (
        Liar(tmp_path, acknowledging) as liar,
        liar.client() as client,
        client.subscribe("a.>", every.take, on_loss=every.gap),
    ):
        peer = liar.last
        group = "x"
        if member_here:
            await client.subscribe("a.b", shared.take, on_loss=shared.gap, group=group).ready()
        declared = peer.declare(0, Kind.PUBLISH, "a.b")
        peer.send(declared, peer.sealed(Kind.PUBLISH, "a.b", b"0", first=0))
        aside = msgspec.structs.replace(declared, alias=1, plain=False, groups=[group])
        peer.send(aside, peer.sealed(Kind.PUBLISH, "a.b", b"1", alias=1, first=1))
        await client.flush()
        assert every.gaps == [1]
        peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"4", alias=1, first=4))
        await client.flush()
        assert every.gaps == [1, 3]
        peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"5", first=5))
        await client.flush()
        assert (every.payloads, every.gaps) == ([b"0", b"5"], [1, 3])
        assert (shared.payloads, shared.gaps) == ([b"1", b"4"] if member_here else [], [])
        hidden = frames.Gap(Kind.PUBLISH, "a.b", KEY.key_id, SENDER, 6, 2, "hidden", False, [group])
        peer.send(hidden, peer.sealed(Kind.PUBLISH, "a.b", b"8", first=8))
        await client.flush()
        assert (every.payloads, every.gaps) == ([b"0", b"5", b"8"], [1, 3, 2])


async def test_a_subscription_that_ended_gets_no_report_of_messages_to_its_group(
    tmp_path: Path,
) -> None:
    """A frame that was in transit when the subscription ended is legitimate."""
    every, shared = Received(), Received()
    async with (
        Liar(tmp_path, acknowledging) as liar,
        liar.client() as client,
        client.subscribe("a.b", shared.take, on_loss=shared.gap, group="x"),
    ):
        peer = liar.last
        both = peer.declare(0, Kind.PUBLISH, "a.b")
        both = msgspec.structs.replace(both, groups=["x"])
        share = msgspec.structs.replace(both, alias=1, plain=False)
        peer.send(both, share)
        first = 0
        for _ in range(2):
            peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"share", alias=1, first=first))
            async with client.subscribe("a.b", every.take, on_loss=every.gap):
                # The publisher's relay does not know it yet.
                peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"share", alias=1, first=first + 2))
                peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"all", first=first + 4))
                await client.flush()
            peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"all", first=first + 5))
            peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"share", alias=1, first=first + 7))
            await client.flush()
            first += 10
        assert every.payloads == [b"all"] * 2
        assert shared.payloads == [b"share", b"share", b"all", b"all", b"share"] * 2
        assert (every.gaps, shared.gaps, list(client.losses)) == ([], [], [])


async def test_a_publication_that_is_said_to_be_for_a_member_comes_once(tmp_path: Path) -> None:
    received = Received()
    service = iris.Service("db")
    service.on_broadcast(received.take)
    async with (
        Liar(tmp_path, acknowledging) as liar,
        liar.client() as client,
        client.serve(service),
        client.subscribe("db", received.take),
    ):
        peer = liar.last
        true = peer.sealed(Kind.PUBLISH, "db", b"once", first=0)
        for member in (0, 7, 0, 7):
            peer.send(peer.declare(0, Kind.PUBLISH, "db", member=member), true)
        await client.flush()
        assert received.payloads == [b"once"]


async def test_a_publication_for_a_group_whose_last_member_has_left_ends_nothing(
    tmp_path: Path,
) -> None:
    """Either it was in transit, or the relay lies and no session here was ever in that group."""
    shared = Received()
    async with Liar(tmp_path, acknowledging) as liar, liar.client() as client:
        async with client.subscribe("a.b", shared.take, on_loss=shared.gap, group="x"):
            peer = liar.last
            said = msgspec.structs.replace(
                peer.declare(0, Kind.PUBLISH, "a.b"), plain=False, groups=["x", "y"]
            )
            peer.send(said, peer.sealed(Kind.PUBLISH, "a.b", b"0", first=0))
            await client.flush()
        peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"1", first=1))
        await client.flush()
        assert len(liar.peers) == 1
        assert (shared.payloads, shared.gaps) == ([b"0"], [])


@pytest.mark.parametrize("plain", [True, False])
async def test_a_broadcast_for_no_member_neither_hides_nor_repeats_another(
    plain: bool, tmp_path: Path
) -> None:
    """The relay names a member before it joined, or gives a broadcast to a queue group."""
    received = Received()
    service = iris.Service("db")
    service.on_broadcast(received.take)
    service.on_loss(received.gap)

    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, frames.Join):
            early = peer.declare(0, Kind.BROADCAST, "db", member=7)
            early = msgspec.structs.replace(early, plain=plain)
            peer.send(early, peer.sealed(Kind.BROADCAST, "db", b"0", first=0))
        acknowledging(peer, body)

    async with (
        Liar(tmp_path, script) as liar,
        liar.client() as client,
        client.serve(service),
    ):
        peer = liar.last
        true = peer.sealed(Kind.BROADCAST, "db", b"1", first=1)
        peer.send(true, peer.declare(1, Kind.BROADCAST, "db", member=7))
        peer.send(true[:6] + (1).to_bytes(4, "little") + true[10:])
        await client.flush()
        assert (received.payloads, received.gaps) == ([b"1"], [])
        peer.send(peer.declare(3, Kind.BROADCAST, "db", member=9))
        peer.send(peer.sealed(Kind.BROADCAST, "db", b"2", alias=3, first=2))
        peer.send(peer.sealed(Kind.BROADCAST, "db", b"3", first=3))
        await client.flush()
        assert (received.payloads, received.gaps) == ([b"1", b"3"], [1])
