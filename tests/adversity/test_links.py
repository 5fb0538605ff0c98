"""Strangers, impostors and floods at the port for links: they are refused, counted and logged once; no link suffers."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

import pytest
from adversity.kit import data_frame
from support.connection import Connection, blind
from support.links import NETWORK, OTHER, hub, start
from support.waiting import PATIENCE_S, eventually

from iris.crypto.certificates import network_authority, relay_leaf
from iris.crypto.keys import NetworkKey
from iris.remote import mutual_context
from iris.wire import frames, link_frames
from iris.wire.codec import END, encode_control
from iris.wire.frames import Control
from iris.wire.kinds import FLAG_MORE, HopClass, Kind
from relay.daemon import Relay
from relay.net.tls import LINK_ALPN, SESSION_ALPN, Credentials, make_access

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    relay = await start(tmp_path / "relay")
    yield relay
    await relay.stop(drain_s=0)


async def still_links(relay: Relay, tmp_path: Path) -> None:
    """Assert that a relay of the network can still link, and that the strangers left no state."""
    friend = await start(tmp_path / "friend", f"127.0.0.1:{hub(relay).port}")
    await eventually(lambda: friend.router.relay_id in relay.router.links)
    await eventually(lambda: len(hub(relay).ports) == 1)
    assert hub(relay).status()["links_half_open"] == 0
    await friend.stop(drain_s=0)


class Stranger(Connection):
    """A connection to the port for links without a key of the network."""

    def __init__(
        self, relay: Relay, context: ssl.SSLContext | None = None, network: NetworkKey = NETWORK
    ) -> None:
        super().__init__(hub(relay).port, context, network.fingerprint.hex())


class Impostor(Stranger):
    """A holder of the network key whose TLS handshake succeeds."""

    def __init__(self, relay: Relay, relay_id: bytes = b"\x42" * 16) -> None:
        super().__init__(relay, Credentials(NETWORK, relay_id).dialling)
        self.relay_id = relay_id

    def hello(self, **changes: object) -> link_frames.LinkHello:
        said: dict[str, object] = {
            "version": 1, "minor": 0, "relay_id": self.relay_id, "dial_us": 5, "mono_us": 5, "message_limit": 1 << 20,
        }  # fmt: skip
        return link_frames.LinkHello(**{**said, **changes})  # type: ignore[arg-type]  # as given

    async def link(self) -> Self:
        await self.say(self.hello())
        await self.receive(link_frames.Interest)
        return self


def showing(pem: str | bytes, tmp_path: Path, alpn: str = LINK_ALPN) -> ssl.SSLContext:
    """Return a context that trusts every peer and shows this certificate."""
    file = tmp_path / "shown.pem"
    file.write_bytes(pem.encode() if isinstance(pem, str) else pem)
    context = blind(alpn)
    context.load_cert_chain(file)
    return context


async def refused(relay: Relay, reason: str, stranger: Stranger, *said: Control | bytes) -> None:
    """Let a stranger connect and send: assert that it is disconnected, and counted once as `reason`."""
    assert reason not in hub(relay).refusals
    try:
        async with stranger:
            await stranger.say(*said)
            await stranger.gone()
    except (ssl.SSLError, ConnectionError):
        pass  # the relay may refuse during TLS or after it
    await eventually(lambda: not hub(relay).ports)
    assert hub(relay).refusals == {reason: 1}
    assert not relay.router.links


# -- strangers ---------------------------------------------------------------------------------------------------


async def test_a_relay_of_another_network_is_refused(relay: Relay, tmp_path: Path) -> None:
    theirs = Credentials(OTHER, b"\x42" * 16).dialling
    await refused(relay, "wrong network", Stranger(relay, theirs, OTHER))
    await still_links(relay, tmp_path)


async def test_a_foreign_certificate_under_our_networks_name_is_refused(
    relay: Relay, tmp_path: Path
) -> None:
    leaf = relay_leaf(OTHER, b"\x42" * 16, os.urandom(32))
    stranger = Stranger(relay, showing(leaf.pem(), tmp_path))
    await refused(relay, "foreign certificate", stranger)
    await still_links(relay, tmp_path)


async def test_an_access_file_is_not_accepted_as_a_relay(relay: Relay, tmp_path: Path) -> None:
    stranger = Stranger(relay, showing(make_access(NETWORK), tmp_path))
    await refused(relay, "foreign certificate", stranger)
    await still_links(relay, tmp_path)


async def test_a_peer_without_a_certificate_is_refused(relay: Relay, tmp_path: Path) -> None:
    await refused(relay, "no certificate", Stranger(relay, blind(LINK_ALPN)))
    await still_links(relay, tmp_path)


async def test_another_protocol_over_tls_is_refused(relay: Relay, tmp_path: Path) -> None:
    leaf = relay_leaf(NETWORK, b"\x42" * 16, os.urandom(32))
    stranger = Stranger(relay, showing(leaf.pem(), tmp_path, SESSION_ALPN))
    await refused(relay, "protocol version", stranger)
    await still_links(relay, tmp_path)


async def test_tls_1_2_is_refused(relay: Relay, tmp_path: Path) -> None:
    context = blind(LINK_ALPN)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    await refused(relay, "TLS version", Stranger(relay, context))
    await still_links(relay, tmp_path)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n",
        encode_control(frames.Hello(1, 0)),
        encode_control(link_frames.LinkHello(1, 0, b"x" * 16, 5, 5, 1 << 20)),
        bytes(1000),
        b"\xff" * 1000,
    ],
)
async def test_what_is_not_tls_is_refused(said: bytes, relay: Relay, tmp_path: Path) -> None:
    await refused(relay, "not TLS", Stranger(relay), said)
    await still_links(relay, tmp_path)


async def test_a_handshake_that_goes_on_and_on_is_cut(relay: Relay, tmp_path: Path) -> None:
    record = b"\x16\x03\x01" + struct.pack(">H", 16_384)
    hello = b"\x01" + (130_000).to_bytes(3, "big")
    said = record + hello + bytes(16_380) + (record + bytes(16_384)) * 4
    await refused(relay, "too long a handshake", Stranger(relay), said)
    await still_links(relay, tmp_path)


async def test_who_says_nothing_or_half_of_something_is_cut(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.hub.HELLO_S", 2.0)  # one of them must complete TLS meanwhile
    hello = Impostor(relay).hello()
    async with Stranger(relay) as silent, Stranger(relay) as begun, Impostor(relay) as shaken:
        await begun.say(b"\x16\x03\x01\x02\x00\x01\x00")
        await shaken.say(encode_control(hello)[:20])
        for stranger in (silent, begun, shaken):
            await stranger.gone()
    assert hub(relay).refusals == {"timeout": 3}
    monkeypatch.undo()
    await still_links(relay, tmp_path)


async def test_who_comes_and_goes_is_counted(relay: Relay, tmp_path: Path) -> None:
    async with Stranger(relay):
        await eventually(lambda: hub(relay).ports)
    await eventually(lambda: not hub(relay).ports)
    assert hub(relay).refusals == {"closed before HELLO": 1}
    await still_links(relay, tmp_path)


async def test_of_too_many_half_open_connections_the_oldest_is_dropped(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.hub.MAX_HALF_OPEN", 8)
    strangers = []
    for number in range(30):
        strangers.append(socket.create_connection(("127.0.0.1", hub(relay).port)))
        await eventually(
            lambda number=number: (
                len(hub(relay).ports) + hub(relay).refusals.get("too many half-open", 0) > number
            )
        )
        assert hub(relay).status()["links_half_open"] <= 8  # type: ignore[operator]  # JSON
    assert hub(relay).refusals == {"too many half-open": 22}
    friend = await start(tmp_path / "friend", f"127.0.0.1:{hub(relay).port}")
    await eventually(lambda: friend.router.links)
    await friend.stop(drain_s=0)
    strangers[0].settimeout(PATIENCE_S)
    assert strangers[0].recv(100) == b""
    for stranger in strangers:
        stranger.close()


# -- impostors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "detail", "hello"),
    [
        ("another relay's id", "another relay", {"relay_id": b"\x43" * 16}),
        ("protocol version", "version 2", {"version": 2}),
        ("protocol error", "both sides dialled, or neither", {"dial_us": 0}),
    ],
)
async def test_an_invalid_hello_is_refused_with_its_reason(
    reason: str, detail: str, hello: dict[str, object], relay: Relay, tmp_path: Path
) -> None:
    async with Impostor(relay) as impostor:
        await impostor.say(impostor.hello(**hello))
        assert detail in (await impostor.receive(frames.Error)).detail
        await impostor.gone()
    assert hub(relay).refusals == {reason: 1}
    await still_links(relay, tmp_path)


async def test_a_relay_that_has_our_own_id_is_nobody_to_link_with(relay: Relay) -> None:
    async with Impostor(relay, relay.router.relay_id) as impostor:
        await impostor.say(impostor.hello())
        await impostor.gone()
    assert not relay.router.links
    assert hub(relay).refusals == {}


@pytest.mark.parametrize(
    "said",
    [
        frames.Beat(1),
        frames.Hello(1, 0),
        data_frame(Kind.REQUEST, b"x"),
        b"\x01\0\0\0\x20",
        (1 << 20).to_bytes(4, "little") + bytes(100),
    ],
)
async def test_the_first_frame_is_hello(
    said: Control | bytes, relay: Relay, tmp_path: Path
) -> None:
    await refused(relay, "protocol error", Impostor(relay), said)
    await still_links(relay, tmp_path)


def pieces(alias: int, count: int, size: int = 65_536) -> bytes:
    return data_frame(Kind.PUBLISH, bytes(size), alias=alias, flags=FLAG_MORE) * count


OFFENCES: dict[str, Callable[[Impostor], list[Control | bytes]]] = {
    "a second hello": lambda wire: [wire.hello()],
    "garbage": lambda wire: [b"\xff" * 5000],
    "a frame of nothing": lambda wire: [bytes(4)],
    "an alias that was not declared": lambda wire: [data_frame(Kind.REQUEST, b"x", alias=9)],
    "a long frame in one": lambda wire: [data_frame(Kind.PUBLISH, bytes(100_000))],
    "a body without end": lambda wire: [pieces(1, 18)],
    "many unfinished bodies": lambda wire: [pieces(alias, 1, 10) for alias in range(65)],
    "many bytes of unfinished bodies": lambda wire: [pieces(alias, 9) for alias in range(64)],
    "another frame of an unfinished alias": lambda wire: [
        pieces(1, 1),
        data_frame(Kind.PUBLISH, b"x", alias=1, hop=3),
    ],
    "control in pieces": lambda wire: [b"\x02\0\0\0\x21\x01"],
}


@pytest.mark.parametrize("offence", OFFENCES)
async def test_a_relay_that_breaks_a_rule_gets_the_reason_and_its_link_ends(
    offence: str, relay: Relay, tmp_path: Path
) -> None:
    async with Impostor(relay) as impostor:
        await impostor.link()
        assert relay.router.links
        await impostor.say(*OFFENCES[offence](impostor))
        assert (await impostor.receive(frames.Error)).detail
        await impostor.gone()
    await eventually(lambda: not hub(relay).ports)
    assert not relay.router.links
    assert hub(relay).protocol_errors == 1
    await still_links(relay, tmp_path)


async def test_of_two_dials_of_one_relay_the_newer_counts_and_the_older_is_not_read_on(
    relay: Relay,
) -> None:
    async with Impostor(relay) as older, Impostor(relay) as newer:
        await older.link()
        await newer.say(newer.hello(dial_us=6))
        await newer.receive(link_frames.Interest)
        await older.say(b"\xff" * 100)  # an offence, if it were read
        await older.gone()
        assert len(relay.router.links) == 1
        assert hub(relay).protocol_errors == 0
        await newer.say(link_frames.AskPeers())
        await newer.receive(frames.Beat)


async def test_an_older_dial_that_comes_late_does_not_replace_a_newer_one(relay: Relay) -> None:
    async with Impostor(relay) as newer, Impostor(relay) as older:
        await newer.say(newer.hello(dial_us=6))
        await newer.receive(link_frames.Interest)
        await older.say(older.hello(dial_us=5))
        # Without BYE, because a peer that already has the link would take it for a drain.
        assert (await older.receive(frames.Error)).detail == "linked already"
        await older.gone()
        await newer.receive(frames.Beat)
        assert len(relay.router.links) == 1


async def test_a_relay_that_drops_a_link_as_one_too_many_does_not_thereby_say_goodbye(
    relay: Relay,
) -> None:
    async with Impostor(relay) as impostor:
        await impostor.link()
        await impostor.say(frames.Error("linked already"))
        await impostor.gone()
    await eventually(lambda: not hub(relay).ports)
    assert hub(relay).protocol_errors == 0
    # It may be linked again soon, so its members are remembered until then.
    assert relay.router.mesh.copies[impostor.relay_id].link is None


async def test_a_relay_that_refuses_our_certificate_after_the_handshake_is_not_a_fault_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In TLS 1.3 the dialler finishes before its peer has checked the certificate."""
    foreign = mutual_context(
        ssl.PROTOCOL_TLS_SERVER,
        alpn=LINK_ALPN,
        leaf=relay_leaf(NETWORK, b"\x42" * 16, os.urandom(32)),
        trusted=network_authority(OTHER),
    )

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = foreign.wrap_bio(incoming, outgoing, server_side=True)
        shaking = True
        while shaking and (data := await reader.read(65_536)):
            incoming.write(data)
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                pass  # more data will follow
            except ssl.SSLError:
                shaking = False
            writer.write(outgoing.read())
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    dialler = await start(tmp_path / "dialler", f"127.0.0.1:{port}")
    await eventually(lambda: hub(dialler).refusals.get("refused our certificate", 0) > 1)
    await dialler.stop(drain_s=0)
    server.close()
    await server.wait_closed()
    assert set(hub(dialler).refusals) == {"refused our certificate"}
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_relay_that_falls_silent_is_given_up(relay: Relay) -> None:
    async with Impostor(relay) as impostor:
        await impostor.link()
        await impostor.gone()
    await eventually(lambda: not hub(relay).ports)
    assert not relay.router.links


async def test_what_a_peer_reports_of_others_is_used_as_addresses_only(relay: Relay) -> None:
    async with Impostor(relay) as impostor:
        await impostor.link()
        entry = link_frames.PeerEntry(
            b"\x44" * 16,
            ["relay.example:7430", "127.0.0.1:99999", "nobody", "[::1]:", "127.0.0.1:1"],
        )
        await impostor.say(link_frames.Peers([entry]))
        await eventually(lambda: hub(relay).status()["dialling"]["targets"])  # type: ignore[index]  # JSON
        (target,) = hub(relay).status()["dialling"]["unlinked"]  # type: ignore[index]  # JSON
        assert target["addresses"] == ["127.0.0.1:1"]


async def test_an_address_that_no_host_can_have_costs_a_dial_and_no_more(
    relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    async with Impostor(relay) as impostor:
        await impostor.link()
        entry = link_frames.PeerEntry(b"\x44" * 16, [f"[fe80::1%{'a' * 100}]:7430"])
        await impostor.say(link_frames.Peers([entry]))

        def failures() -> list[int]:
            unlinked = hub(relay).status()["dialling"]["unlinked"]  # type: ignore[index]  # JSON
            return [target["failures"] for target in unlinked]

        await eventually(lambda: failures() and failures()[0] > 1)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_that_a_newer_link_interrupts_is_finished_by_nothing(relay: Relay) -> None:
    """Its first pieces are discarded with the old link; the next frame of that alias is a new one."""
    declared = frames.Declare(1, Kind.PUBLISH, "t", bytes(16), bytes(16), hop_class=HopClass.MESH)
    async with Impostor(relay) as older, Impostor(relay) as newer:
        await older.link()
        await older.say(declared, pieces(1, 3), link_frames.AskPeers())
        await older.receive(frames.Beat)
        await newer.say(newer.hello(dial_us=6))
        await newer.receive(link_frames.Interest)
        await older.gone()
        before = relay.router.accounts.in_
        await newer.say(declared, data_frame(Kind.PUBLISH, b"body of its own", alias=1, end=END.pack(0, 0, 1, 0)))  # fmt: skip
        await eventually(lambda: relay.router.accounts.in_ > before)
        assert (before, relay.router.accounts.in_) == (0, 1)
        assert relay.router.accounts.unwanted == 1
        await newer.receive(frames.Beat)
        assert hub(relay).protocol_errors == 0
