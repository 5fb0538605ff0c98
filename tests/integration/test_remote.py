"""Processes on hosts without a relay: sessions over TLS, admitted by an access file, with a clock of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from integration.conftest import NETWORK
from support.commands import command
from support.waiting import eventually

import iris
from iris import ClientConfig, Keyring
from iris.crypto.keys import ClusterKey, NetworkKey
from iris.dialling import parse_remotes
from iris.errors import ConfigError, RelayUnavailable
from iris.remote import create_access
from iris.wire import frames
from iris.wire.codec import encode_control
from relay.address_settings import parse_listen
from relay.config import RelayConfig
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)

OTHER = NetworkKey(bytes(range(1, 33)))
KEYS = Keyring({"default": (ClusterKey(bytes(range(32))),)})


def host_and_port(relay: Relay) -> tuple[str, int]:
    assert relay.remote is not None
    return relay.remote.addresses[0]


def far(relay: Relay, access: Path) -> iris.Client:
    host, port = host_and_port(relay)
    config = ClientConfig(relay=f"tls://{host}:{port}", access=access)
    return iris.connect(config=config, keyring=KEYS)


def near(relay: Relay) -> iris.Client:
    return iris.connect(relay.config.socket_path, keyring=KEYS)


def echo() -> iris.Service:
    service = iris.Service("echo")

    @service.on_request
    def answer(payload: bytes) -> bytes:
        return payload

    return service


async def test_a_remote_process_calls_members_of_the_host_and_serves_them(
    relay: Relay, access: Path
) -> None:
    async with near(relay) as here, far(relay, access) as there:
        async with here.serve(echo()):
            assert await there.request("echo", b"from afar", timeout=20) == b"from afar"
        async with there.serve(echo()):
            assert await here.request("echo", b"from here", timeout=20) == b"from here"


async def test_every_pattern_works_from_afar(relay: Relay, access: Path) -> None:
    service = iris.Service("all")
    pushed: asyncio.Queue[bytes] = asyncio.Queue()
    casts: asyncio.Queue[bytes] = asyncio.Queue()

    @service.on_push
    def push(payload: bytes) -> None:
        pushed.put_nowait(payload)

    @service.on_broadcast
    def cast(payload: bytes) -> None:
        casts.put_nowait(payload)

    @service.on_survey
    def survey(payload: bytes) -> bytes:
        return b"counted"

    @service.on_tunnel
    async def tunnel(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message)

    async with far(relay, access) as member, far(relay, access) as caller, member.serve(service):
        await caller.push("all", b"p")
        assert await asyncio.wait_for(pushed.get(), 20) == b"p"
        await caller.broadcast("all", b"b")
        assert await asyncio.wait_for(casts.get(), 20) == b"b"
        found = caller.survey("all", b"?", timeout=20)
        assert [answer.payload async for answer in found] == [b"counted"]
        async with await caller.open_tunnel("all", timeout=20) as end:
            await end.send(b"t" * 300_000)
            assert await end.recv() == b"t" * 300_000
        async with member.subscribe("news.*") as news:
            await caller.publish("news.a", b"n")
            async for message in news:
                assert message.payload == b"n"
                break


@pytest.mark.parametrize("ahead", [False, True])
async def test_deadlines_hold_although_the_clocks_of_the_hosts_differ(
    relay: Relay, access: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The relay's clock is behind, or ahead: an unmapped deadline would have passed, at one end or the other."""
    # As if its host had just started, or an hour earlier: this one may be younger than an hour.
    clock = Clock(3_600_000_000_000 if ahead else -time.monotonic_ns())
    for module in ("relay.net.sessions", "relay.net.ports", "relay.net.turns"):
        monkeypatch.setattr(f"{module}.time", clock)
    async with far(relay, access) as caller, far(relay, access) as member, member.serve(echo()):
        assert await caller.request("echo", b"in time", timeout=50) == b"in time"


class Clock:
    """The `time` module with another CLOCK_MONOTONIC."""

    def __init__(self, offset_ns: int) -> None:
        self._offset_ns = offset_ns

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9


async def test_an_access_file_of_another_network_is_refused_and_counted(
    relay: Relay, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign.pem"
    create_access(foreign, OTHER)
    with pytest.raises(RelayUnavailable):
        async with far(relay, foreign):
            pass
    remote = relay.remote
    assert remote is not None
    await eventually(lambda: sum(remote.refusals.values()) == 1)


async def test_without_a_certificate_nobody_gets_a_session(relay: Relay) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["iris-session/1"])
    reader, writer = await asyncio.open_connection(
        *host_and_port(relay), ssl=context, server_hostname=NETWORK.fingerprint.hex()
    )
    writer.write(encode_control(frames.Hello(1, 0, "x", 1, 1)))
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        assert await reader.read(1) == b""
    writer.close()
    assert not relay.router.sessions


async def test_plain_text_is_refused_and_counted(relay: Relay) -> None:
    reader, writer = await asyncio.open_connection(*host_and_port(relay))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await reader.read()
    writer.close()
    remote = relay.remote
    assert remote is not None
    await eventually(lambda: sum(remote.refusals.values()) == 1)
    assert not relay.router.sessions


async def test_a_session_whose_network_key_is_removed_ends(relay: Relay, access: Path) -> None:
    async with far(relay, access) as client:
        await client.status(timeout=20)
        relay.reload_keys((OTHER,))
        await eventually(lambda: not relay.router.sessions)


async def test_a_remote_session_that_falls_silent_is_ended(relay: Relay, access: Path) -> None:
    async with far(relay, access) as client:
        await client.status(timeout=20)
        (session,) = relay.router.sessions.values()
        assert session.pulse is not None
        session.pulse.last_us -= 3_000_000
        relay.driver.turn()
        relay.router.pulse_us = 0
        relay.router.expire()
        assert session.closed


@pytest.mark.parametrize(
    "text",
    ["tcp://0.0.0.0:1", "0.0.0.0:1", "tls://host", "tls://:1", "tls://h:1/x", "tls://h:99999"],
)
def test_a_listener_without_tls_or_port_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="listen"):
        parse_listen(text)
    with pytest.raises(ConfigError, match="listen"):
        RelayConfig(socket_path=tmp_path / "s", listen=(text,))


@pytest.mark.parametrize(
    "text",
    [
        "tls://",
        "tls://h",
        "tls://h:0",
        "tls://h:1/x",
        "http://h:1",
        "tls://h:1,",
        "tls://h:1,/run/s",
        "tls://dns:h",
    ],
)
def test_a_relay_address_that_is_neither_path_nor_tls_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="relay"):
        parse_remotes(text)


def test_relay_addresses_are_one_or_several_and_all_of_a_name() -> None:
    assert parse_remotes("tls://[::1]:1, tls://h:2,tls://dns:relays.example:3") == (
        ("::1", 1, False), ("h", 2, False), ("relays.example", 3, True),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="17 addresses"):
        parse_remotes(",".join(["tls://h:1"] * 17))


async def test_a_program_goes_to_whichever_of_several_relays_is_there(
    relay: Relay, access: Path
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = nobody.getsockname()[1]
        host, port = host_and_port(relay)
        listed = f"tls://127.0.0.1:{gone},tls://dns:localhost:{port},tls://{host}:{port}"
        for _ in range(8):  # the order is random
            async with iris.connect(
                config=ClientConfig(relay=listed, access=access), keyring=KEYS
            ) as one:
                await one.flush()
        nowhere = ClientConfig(
            relay=f"tls://127.0.0.1:{gone},tls://dns:nobody.invalid:1", access=access
        )
        with pytest.raises(
            RelayUnavailable, match=f"address of nobody.invalid.*no relay at 127.0.0.1:{gone}"
        ):
            await iris.connect(config=nowhere, keyring=KEYS).open()


async def test_a_host_and_port_without_tls_is_named_as_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IRIS_RELAY", "relay.example:7431")
    client = iris.connect(keyring=iris.Keyring.single(iris.ClusterKey(bytes(32))))
    with pytest.raises(ConfigError, match=r"another host write tls://relay\.example:7431"):
        await client.open()


async def test_a_remote_process_sees_numbers_and_no_names_in_the_status(
    relay: Relay, access: Path
) -> None:
    """An access file admits a session, but does not show what others on the host do."""
    config = ClientConfig(relay=relay.config.socket_path, label="payroll")
    service = iris.Service("salaries")
    service.on_request(lambda payload: payload)
    async with (
        iris.connect(config=config, keyring=KEYS) as here, far(relay, access) as there,
        here.serve(service), here.subscribe("secret.topic"),
    ):  # fmt: skip
        full = await here.status(timeout=20)
        status = await there.status(timeout=20)
    assert "payroll" in str(full)
    assert "salaries" in str(full)
    shown = str(status)
    for name in ("payroll", "salaries", "secret", str(os.getpid()), str(relay.config.socket_path)):
        assert name not in shown
    assert status["sessions"] == status["links"] == []
    assert status["counts"] == {"sessions": 2, "clusters": 1, "links": 0, "sites": 0}
    assert 0 < full["uptime_s"] <= status["uptime_s"]
    assert status["accounts"]["held"] == 0
    assert "relay's own user" in status["limited"]


async def test_a_client_that_may_not_see_all_clusters_cannot_promote_the_default_key(
    relay: Relay, access: Path
) -> None:
    """The check that every member holds the new key needs the names of all clusters. Without them it must fail."""
    host, port = host_and_port(relay)
    environ = {
        "PATH": os.environ["PATH"], "IRIS_CONFIG": str(access.parent / "config"),
        "IRIS_RELAY": f"tls://{host}:{port}", "IRIS_ACCESS": str(access),
    }  # fmt: skip

    async def run(*arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *command(*arguments),
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    assert (await run("key", "new"))[0] == 0
    assert (await run("key", "add", "default"))[0] == 0
    code, said = await run("key", "promote", "default")
    assert code != 0, said
    assert "the new key" in said
    assert "--force" in said
    code, said = await run("status")
    assert code == 0, said
    assert "relay's own user" in said
    assert "1 session, 0 clusters" in said
    code, said = await run("federation", "list")
    assert code != 0, said
    assert "relay's own user" in said
