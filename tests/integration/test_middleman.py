"""A relay in the middle of a session over TLS. It has the network key, so it can make any certificate, but no
cluster key.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.conftest import NETWORK

import iris
from iris import ClientConfig, Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import ConnectionLost, RelayUnavailable
from iris.remote import certificate_hash, load_access
from iris.wire import frames
from iris.wire.codec import decode_control, encode_control
from iris.wire.frames import Control
from iris.wire.kinds import Kind
from relay.daemon import Relay
from relay.net.tls import Credentials, session_server_context

pytestmark = pytest.mark.timeout(60)

KEY = ClusterKey(bytes(range(32)))
KEYS = Keyring({"default": (KEY,)})


def unchanged(welcome: frames.Welcome) -> frames.Welcome:
    return welcome


class Middleman:
    """Accepts sessions under its own certificate, which names `relay_id`, and forwards all frames to `relay` and back.

    `rewrite` changes the WELCOME that the client sees.
    """

    def __init__(
        self, relay: Relay, access: Path, relay_id: bytes,
        rewrite: Callable[[frames.Welcome], frames.Welcome] = unchanged,
    ) -> None:  # fmt: skip
        self.proofs = 0
        assert relay.remote is not None
        self._there = relay.remote.addresses[0]
        self._access = load_access(access)
        self._context = session_server_context([Credentials(NETWORK, relay_id)])
        self._rewrite = rewrite
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Middleman:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"tls://{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        relay_reader, relay_writer = await asyncio.open_connection(
            *self._there, ssl=self._access.context, server_hostname=self._access.server_name
        )
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, relay_writer))
                both.create_task(self._pass_on(relay_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(4)
                frame = head + await reader.readexactly(int.from_bytes(head, "little"))
                if frame[4] == Kind.PROVE:
                    self.proofs += 1
                if frame[4] == Kind.WELCOME:
                    welcome = decode_control(memoryview(frame), 0, len(frame))
                    assert isinstance(welcome, frames.Welcome)
                    frame = encode_control(self._rewrite(welcome))
                writer.write(frame)
        writer.close()


def through(middle: Middleman, access: Path) -> iris.Client:
    return iris.connect(config=ClientConfig(relay=middle.address, access=access), keyring=KEYS)


async def test_a_proof_given_to_a_relay_in_the_middle_is_not_valid_at_another(
    relay: Relay, access: Path
) -> None:
    """Its certificate names the relay whose WELCOME it forwards, but is not that relay's certificate."""
    async with (
        Middleman(relay, access, relay.router.relay_id) as middle,
        through(middle, access) as client,
    ):
        with pytest.raises(ConnectionLost):
            await client.request("nobody", b"x", timeout=20)
        assert middle.proofs
        assert not any(session.proven for session in relay.router.sessions.values())


async def test_a_relay_whose_certificate_names_another_is_refused(
    relay: Relay, access: Path
) -> None:
    async with Middleman(relay, access, b"\x11" * 16) as middle:
        with pytest.raises(RelayUnavailable, match="names another relay"):
            async with through(middle, access):
                pass
        assert not middle.proofs


class Far:
    """A hand-made session over TLS."""

    def __init__(self, relay: Relay, access: Path) -> None:
        assert relay.remote is not None
        self._there = relay.remote.addresses[0]
        self._access = load_access(access)
        self.certificate = b""
        self.welcome: frames.Welcome
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Far:
        self._reader, self._writer = await asyncio.open_connection(
            *self._there, ssl=self._access.context, server_hostname=self._access.server_name
        )
        tls = self._writer.get_extra_info("ssl_object")
        self.certificate = tls.getpeercert(binary_form=True)
        await self.send(frames.Hello(1, 0, "far", 1, time.monotonic_ns() // 1000))
        welcome = await self.expect()
        assert isinstance(welcome, frames.Welcome)
        self.welcome = welcome
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.transport.abort()

    async def send(self, *parts: Control) -> None:
        for part in parts:
            self._writer.write(encode_control(part))
        await self._writer.drain()

    async def expect(self) -> Control:
        head = await self._reader.readexactly(4)
        frame = head + await self._reader.readexactly(int.from_bytes(head, "little"))
        return decode_control(memoryview(frame), 0, len(frame))

    async def prove(self, channel: bytes) -> Control:
        """Prove our key over `channel`; return the relay's answers to that and to a PING after it."""
        signature = KEY.sign_proof(
            relay_id=self.welcome.relay_id, session_id=self.welcome.session_id,
            challenge=self.welcome.challenge, channel=channel,
        )  # fmt: skip
        await self.send(frames.Prove(0, KEY.public_key, signature), frames.Ping(1))
        while isinstance(answer := await self.expect(), frames.Beat):
            pass
        return answer


@pytest.mark.parametrize("bound", [False, True])
async def test_over_tls_a_proof_holds_only_if_it_is_bound_to_the_certificate(
    relay: Relay, access: Path, bound: bool
) -> None:
    async with Far(relay, access) as far:
        answer = await far.prove(certificate_hash(far.certificate) if bound else b"")
        assert isinstance(answer, frames.Pong if bound else frames.Error)
        assert any(session.proven for session in relay.router.sessions.values()) is bound
