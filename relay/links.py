"""Links to other relays: who is accepted, who is dialled, and which of two connections to one relay stays.

    accept or dial ── TLS ── HELLO both ways ── router.link_up ── frames ── router.link_down

A connection is a stranger's until its certificate and HELLO hold: it may make us keep 64 KiB and do one handshake, within
`HELLO_S`, and there are at most `MAX_HALF_OPEN` of them. What it did wrong is counted by reason and said in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

from iris.crypto.keys import NetworkKey
from iris.wire import frames
from iris.wire.frames import MAX_ADDRESSES
from relay.accepting import Acceptor
from relay.addresses import bind, connect, parse_addresses, prepare, show
from relay.config import RelayConfig
from relay.core.link import Link
from relay.dialling import LINKED, UP, Dialler, Outcome, Seen, Target
from relay.linkport import FINISH_S, WRONG_NETWORK, LinkPort, Refused
from relay.logs import Quiet
from relay.ports import Driver
from relay.tls import Credentials, link_server_context

log = logging.getLogger(__name__)

HELLO_S: Final = 5.0
"""TLS and HELLO together take no longer."""
CONNECT_S: Final = 2.0
MAX_HALF_OPEN: Final = 128
ACCEPTS: Final = 1
ACCEPT_PAUSE_S: Final = 0.001


class LinkHub:
    """All links of a relay: listeners, strangers, dials, and who wins when there are two."""

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        self.driver = driver
        self.router = driver.router
        self.config = config
        self.ports: set[LinkPort] = set()
        self.quiet = Quiet()
        self.refusals: dict[str, int] = {}
        self.replaced = 0
        self.protocol_errors = 0
        self.addresses: list[tuple[str, int]] = []
        """Where links are accepted."""
        self.credentials: list[Credentials] = []
        """Of the networks served; changed in place when keys rotate."""
        self._context: ssl.SSLContext
        self._dialler = Dialler(self.router.relay_id, self._dial, self.linked)
        self._half_open: dict[LinkPort, float] = {}
        """Accepted and not yet up, the oldest first -> when its time is up."""
        self._listeners: list[socket.socket] = []
        self._accepting: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(
            self._accepted, self._starved, per_turn=ACCEPTS, pause_s=ACCEPT_PAUSE_S
        )
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stopping = False
        self.reload(config.network_keys)
        self._context = link_server_context(self.credentials)
        self.router.mesh.introduced = self.introduced

    # -- listening -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Bind and accept. Raises ConfigError; nothing is left behind then."""
        self._loop = asyncio.get_running_loop()
        self._listeners = bind(self.config)
        self.addresses = [listener.getsockname()[:2] for listener in self._listeners]
        self._acceptor.listen(self._listeners)
        shown = [show(*address) for address in self.addresses]
        log.info("links.listening", extra={"fields": {"addresses": shown}})

    @property
    def port(self) -> int:
        """The TCP port that links are accepted on; 0 before `listen`."""
        return self.addresses[0][1] if self.addresses else 0

    def stop_listening(self) -> None:
        """Accept no more. Idempotent."""
        self._acceptor.stop()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _accepted(self, connection: socket.socket, address: Any) -> None:
        if len(self._half_open) + len(self._accepting) >= MAX_HALF_OPEN and self._half_open:
            next(iter(self._half_open)).refuse(Refused("too many half-open"))
        task = self._loop.create_task(self._attach(connection, address), name="iris-accept")
        self._accepting.add(task)
        task.add_done_callback(partial(self._attached, connection))

    def _starved(self, err: OSError) -> None:
        self.quiet.warning(log, "links.no_descriptors", "", time.monotonic(), {"error": str(err)})

    async def _attach(self, connection: socket.socket, address: Any) -> None:
        port = LinkPort(self, show(*address[:2]), self._context)
        try:
            prepare(connection)
            await self._loop.connect_accepted_socket(lambda: port, connection)
        except OSError as err:
            connection.close()
            self.quiet.warning(log, "link.not_attached", "", time.monotonic(), {"error": str(err)})

    def _attached(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._accepting.discard(task)
        if task.cancelled():
            connection.close()

    # -- strangers -------------------------------------------------------------------------------------------

    def half_open(self, port: LinkPort) -> None:
        """An accepted connection is attached: its time runs."""
        self._half_open[port] = self._loop.time() + HELLO_S
        if self._timer is None:
            self._timer = self._loop.call_later(HELLO_S, self._sweep)

    def known(self, port: LinkPort) -> None:
        """A connection is no stranger any more, or gone."""
        self._half_open.pop(port, None)

    def _sweep(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for port, until_s in list(self._half_open.items()):
            if until_s > now_s:
                self._timer = self._loop.call_at(until_s, self._sweep)
                return
            port.refuse(Refused("timeout", f"no link within {HELLO_S:g} s"))

    def refused(self, address: str, reason: str, detail: str) -> None:
        """Count and log a connection that does not become a link."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        fields = {"address": address, "reason": reason}
        if detail != reason:
            fields["detail"] = detail
        host = address.rpartition(":")[0]
        self.quiet.warning(log, "link.refused", (reason, host), time.monotonic(), fields)

    # -- one link per peer -----------------------------------------------------------------------------------

    def linked(self, relay_id: bytes) -> bool:
        """Whether there is a link to this relay now."""
        return self._port_of(relay_id) is not None

    def _port_of(self, relay_id: bytes) -> LinkPort | None:
        link = self.router.links.get(relay_id)
        if link is None or not isinstance(link.port, LinkPort) or link.port.ended:
            return None
        return link.port

    def greeted(self, port: LinkPort, hello: frames.LinkHello) -> Link:
        """Both HELLOs are there and hold: return the link, after taking down an older one. Raises Refused: the older stays.

        Of links dialled by the same side the newer wins, of both sides' dials that of the lower relay id.
        """
        older = self._port_of(hello.relay_id)
        own_id = self.router.relay_id
        if older is not None:
            if port.dialled == older.dialled:
                wins = port.dial_us > older.dial_us
            else:
                wins = port.dialled == (own_id < hello.relay_id)
            if not wins:
                raise Refused(LINKED)
            self.replaced += 1
            fields = {"peer": hello.relay_id.hex(), "old": older.address, "new": port.address}
            log.info("link.replaced", extra={"fields": fields})
            older.abort("replaced")
        before = self.router.links.get(hello.relay_id)
        if before is not None:
            self.router.link_down(before)
        link = self.router.link_up(port, hello)
        self._dialler.up(hello.relay_id)
        told = {
            "peer": hello.relay_id.hex(),
            "label": link.label,
            "address": port.address,
            "dialled": port.dialled,
        }
        log.info("link.up", extra={"fields": told})
        return link

    def link_lost(self, port: LinkPort, relay_id: bytes, lived_s: float) -> None:
        """A link that was up ended."""
        fields = {"peer": relay_id.hex(), "address": port.address, "reason": port.reason}
        log.info("link.down", extra={"fields": fields})
        if not self._stopping and not self.linked(relay_id):
            self._dialler.lost(relay_id, lived_s, port.dialled)

    # -- dialling --------------------------------------------------------------------------------------------

    def sighted(self, seen: Seen) -> None:
        """Discovery saw a relay, or saw it go."""
        if seen.networks and not any(c.fingerprint in seen.networks for c in self.credentials):
            return  # another network's
        self._dialler.sighted(seen)

    def introduced(self, relay_id: bytes, addresses: Sequence[str]) -> None:
        """A peer told of another relay. Only numeric addresses count: a peer does not make us resolve names."""
        self._dialler.introduced(relay_id, list(parse_addresses(addresses[:MAX_ADDRESSES])))

    async def _dial(self, target: Target, address: tuple[str, int]) -> Outcome:
        outcome = Outcome("none of our networks")
        # The network that it was linked under last comes first.
        for credentials in sorted(self.credentials, key=lambda c: c.fingerprint != target.network):
            if target.networks and credentials.fingerprint not in target.networks:
                continue
            outcome = await self._try(address, credentials)
            if outcome.what == UP:
                target.network = credentials.fingerprint
            if outcome.what != WRONG_NETWORK:
                break
        return outcome

    async def _try(self, address: tuple[str, int], credentials: Credentials) -> Outcome:
        port = None
        try:
            family, _, _, _, place = socket.getaddrinfo(
                *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, ValueError) as err:  # ValueError: what cannot be a host's name
            return Outcome(f"{show(*address)}: {getattr(err, 'strerror', None) or err}")
        try:
            prepare(connection)
            dial_us = time.monotonic_ns() // 1000
            async with asyncio.timeout(CONNECT_S):
                await connect(self._loop, connection, place)
            port = LinkPort(
                self, show(*address), credentials.dialling, credentials=credentials, dial_us=dial_us
            )
            async with asyncio.timeout(HELLO_S):
                made = port
                await self._loop.create_connection(lambda: made, sock=connection)
                return await port.outcome
        except TimeoutError:
            if port is not None:
                port.refuse(Refused("timeout", f"no link within {HELLO_S:g} s"))
            return Outcome(f"{show(*address)}: no answer")
        except OSError as err:
            return Outcome(f"{show(*address)}: {err.strerror or err}")
        finally:
            if port is None or not port.made:
                connection.close()
            elif port.link is None and not port.ended:
                port.abort("the dial was given up")

    # -- keys ------------------------------------------------------------------------------------------------

    def reload(self, keys: Sequence[NetworkKey]) -> None:
        """Serve exactly these networks from now on: links made under another are closed, and their relays dialled again."""
        before = {credentials.fingerprint: credentials for credentials in self.credentials}
        # In place: the accepting context looks at this list in each handshake.
        self.credentials[:] = [
            before.get(key.fingerprint) or Credentials(key, self.router.relay_id) for key in keys
        ]
        after = {credentials.fingerprint for credentials in self.credentials}
        if before:
            log.info(
                "links.keys", extra={"fields": {"networks": [name.hex()[:8] for name in after]}}
            )
        for port in list(self.ports):
            if port.fingerprint and port.fingerprint not in after:
                # No goodbye: the other relay stays, and what it knows of us holds until it is linked again.
                port.leave("its network key was removed", goodbye=False)

    def fingerprint_of(self, context: ssl.SSLContext) -> bytes:
        """Return the network that the handshake of an accepted connection picked."""
        for credentials in self.credentials:
            if credentials.accepting is context:
                return credentials.fingerprint
        raise Refused(WRONG_NETWORK)

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """The networks served."""
        return tuple(credentials.fingerprint for credentials in self.credentials)

    # -- the end, and reports --------------------------------------------------------------------------------

    async def stop_dialling(self) -> None:
        """Dial no more. Idempotent."""
        self._stopping = True
        await self._dialler.stop()

    async def close(self, bound_s: float = FINISH_S) -> None:
        """Say goodbye on every link, write what is queued within `bound_s`, and end. Idempotent; cancelled, it ends at once."""
        self.stop_listening()
        self._stopping = True
        try:
            await self._dialler.stop()
            for port in list(self.ports):
                port.leave("the relay stopped")
            self.driver.settle()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(bound_s):
                    while self.ports:  # noqa: ASYNC110 - closes are the peers' to make
                        await asyncio.sleep(0.005)
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self.end()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await asyncio.sleep(0)

    def end(self) -> None:
        """End every connection now, those that are being accepted included. Idempotent."""
        for task in self._accepting:
            task.cancel()
        for port in list(self.ports):
            port.abort("the relay stopped")

    @property
    def idle(self) -> bool:
        """Nothing waits to be written."""
        return not any(port.unwritten_bytes for port in self.ports)

    def status(self) -> dict[str, object]:
        """Return links, refusals and dials, ready for JSON."""
        ports = {port.link.relay_id.hex(): port for port in self.ports if port.link is not None}
        links = []
        for known in cast(
            list[dict[str, object]], self.router.mesh.status(self.router.now_us)["links"]
        ):
            port = ports.get(str(known["peer"]))
            links.append(known | port.status() if port is not None else known)
        return {
            "links": links,
            "links_listening": [show(*address) for address in self.addresses],
            "links_refused": dict(self.refusals),
            "links_half_open": len(self._half_open),
            "links_replaced": self.replaced,
            "link_protocol_errors": self.protocol_errors,
            "dialling": self._dialler.status(),
        }
