"""WAN connections to the gateways of other sites. Their base, for links and WAN connections, is `relay.net.hub`.

    gateway of eu ── TLS: each presents a leaf of its own site's CA and trusts the CA that it pinned ── gateway of us

A gateway's site is the one in its certificate, which must be signed by the key pinned for that name; its HELLO must
name the same site. A gateway connects to every gateway address of another site, whichever side dials. Each address
stands for one gateway; if two addresses lead to the same relay, one connection is kept.

Strangers can come from anywhere. If too many connections are half-open, the oldest one of the host with most of them is
closed. A known site is not trusted either: its gateways cannot use relay ids of this site or of a third one, and it
cannot have more than `MAX_CONNECTIONS`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final, cast

import msgspec

from iris import keyfiles
from iris.accepting import Accepted
from iris.crypto.keys import dump_fingerprint, public_id
from iris.errors import ConfigError, PeerProtocolError
from iris.wire import link_frames
from iris.wire.names import printable
from relay.address_settings import parse_gateway
from relay.config import RelayConfig
from relay.core.neighbor import Neighbor
from relay.core.site_routes import Wan
from relay.discovery.seeds import resolve
from relay.net.addresses import listen_at, show
from relay.net.dialling import LINKED, UP, Address, Outcome, Target
from relay.net.hub import Hub
from relay.net.linkport import LinkPort, Refused
from relay.net.ports import Driver
from relay.net.tls import (
    FOREIGN,
    WAN_ALPN,
    WRONG_NETWORK,
    GatewayCredentials,
    gateway_server_context,
    peer_gateway,
    peer_site_key,
)
from relay.site_settings import peer_sites, site_costs

log = logging.getLogger(__name__)

CONNECT_S: Final = 5.0
MAX_CONNECTIONS: Final = 32
"""Most connections to one site: its gateways, and lost ones that were not noticed yet."""
UNKNOWN_SITE: Final = "unknown site"
NOT_PINNED: Final = "our key is not pinned there"
OTHER_NAME: Final = "our key is pinned there under another name"
_INFO: Final = struct.Struct("=68xI28xI32xI")
"""Fields of Linux's struct tcp_info: smoothed round trip (us), segments retransmitted, segments sent."""


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """A gateway of another site to dial, from the settings. Implements `dialling.Seen`."""

    site: str
    addresses: tuple[Address, ...]
    relay_id: bytes | None = None
    networks: tuple[bytes, ...] = ()
    gone: bool = False

    @property
    def source(self) -> str:
        return f"{self.site}=tls://{show(*self.addresses[0])}"


class GatewayPort(LinkPort):
    """One connection to a gateway of another site or a stranger."""

    alpn: ClassVar[str] = WAN_ALPN

    def __init__(
        self,
        hub: GatewayHub,
        address: str,
        context: ssl.SSLContext,
        *,
        site: str = "",
        credentials: GatewayCredentials | None = None,
        dial_us: int = 0,
    ) -> None:
        """Accept with `context`, or dial a gateway of `site` with `credentials`; the dial began at `dial_us`."""
        super().__init__(hub, address, context, credentials=credentials, dial_us=dial_us)
        self.fingerprint = b""
        self.site = site
        """The remote site; for an accepted connection it is known after the handshake."""
        self._gateways = hub

    def _identify(self, tls: ssl.SSLObject) -> None:
        if not self.dialled:
            self.site = self._gateways.site_of(tls.context)
        try:
            self.relay_id = peer_gateway(tls, self.site)
            self.fingerprint = peer_site_key(tls)
        except PeerProtocolError as err:
            raise Refused("not a gateway", str(err)) from err

    def _tls_reason(self, error: str) -> str:
        reason = super()._tls_reason(error)
        if reason == WRONG_NETWORK:
            return NOT_PINNED if self.dialled else UNKNOWN_SITE
        if self.dialled and error == "TLSV1_ALERT_UNKNOWN_CA":
            # The peer knows this key's name; an authority is made from a key and a site's name.
            return OTHER_NAME
        if not self.dialled and reason == FOREIGN:
            # The same here, but a stranger may name a key that it does not have.
            site = self._gateways.site_of(self._secured.tls.context)
            return f"{FOREIGN} under the key pinned as {site}"
        return reason

    def _hello(self) -> link_frames.LinkHello:
        # Other sites need not know the addresses for links of this site.
        return msgspec.structs.replace(super()._hello(), addresses=[])

    def _checked_hello(self, hello: link_frames.LinkHello) -> link_frames.LinkHello:
        if hello.site != self.site:
            raise Refused(
                "another site's name",
                f"HELLO names site {printable(hello.site)!r}, and the certificate is of site {self.site}",
            )
        return msgspec.structs.replace(hello, addresses=[])

    def log_fields(self) -> dict[str, object]:
        return {"site": self.site, **super().log_fields()}

    def status(self) -> dict[str, object]:
        """Return the state of the connection, ready for JSON; bytes are counted encrypted."""
        return {
            "site": self.site,
            "peer": self.relay_id.hex(),
            "label": self.link.label if self.link is not None else "",
            "address": self.address,
            "dialled": self.dialled,
            "pin": self._gateways.pins.get(self.fingerprint, ""),
            "since_s": round(time.monotonic() - self._up_s, 3),
            "queued_bytes": self.unwritten_bytes,
            "reassembling_bytes": self._parts.held_bytes,
            "in_frames": self.in_frames,
            "out_frames": self.out_frames,
            "in_bytes": self.in_bytes,
            "out_bytes": self._secured.out_bytes,
            **_kernel_view(self._transport.get_extra_info("socket")),
        }


class GatewayHub(Hub):
    """All WAN connections of a gateway."""

    kind: ClassVar[str] = "gateway"
    connect_s: ClassVar[float] = CONNECT_S
    far: ClassVar[bool] = True

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        """Read the site's key.

        Raises:
            ConfigError: the key is pinned for another site, or a setting is wrong.
            KeyringError: the key file does not exist or cannot be used.
        """
        super().__init__(driver, config)
        if config.site_key is None:
            raise ConfigError(
                "site_key: a gateway needs the key of its site; make one with `iris federation key FILE` and add --site-key FILE"
            )
        site_key = keyfiles.load_site_key(config.site_key)
        self.peers = peer_sites(config.peer_site)
        for peer in self.peers.values():
            if site_key.public_key in peer.pins:
                raise ConfigError(
                    f"peer_site: {peer.site} has the fingerprint of this site's own key; give the one that `iris federation key` printed at {peer.site}"
                )
        self.fingerprint = site_key.fingerprint
        self.costs = site_costs(config.site_cost)
        self.pins = {
            public_id(pin): dump_fingerprint(pin)
            for peer in self.peers.values()
            for pin in peer.pins
        }
        """Pinned keys: 16-byte name -> fingerprint as text."""
        self._credentials = GatewayCredentials(
            site_key,
            config.site,
            self.router.relay_id,
            {peer.site: peer.pins for peer in self.peers.values()},
        )
        self._context = gateway_server_context(self._credentials)
        self._dialled = {
            seen.source: seen
            for peer in self.peers.values()
            for seen in (GatewayAddress(peer.site, (address,)) for address in peer.addresses)
        }

    def listen(self) -> None:
        """Bind and accept at every address of `gateway`. Raises ConfigError, and then leaves nothing bound."""
        with contextlib.ExitStack() as undo:
            listeners = []
            for text in self.config.gateway:
                try:
                    listener = listen_at("gateway", *parse_gateway(text))
                except OSError as err:
                    raise ConfigError(
                        f"gateway: cannot accept gateways at {text}: {err.strerror}"
                    ) from err
                listeners.append(undo.enter_context(listener))
            undo.pop_all()
        self._listen(listeners)

    def dial(self) -> None:
        """Start to dial every gateway address."""
        for seen in self._dialled.values():
            self._dialler.sighted(seen)

    def site_of(self, context: ssl.SSLContext) -> str:
        """Return the site whose pin the handshake of an accepted connection selected. Raises Refused."""
        for pin in self._credentials.pins:
            if pin.accepting is context:
                return pin.site
        raise Refused(UNKNOWN_SITE)

    def status(self) -> dict[str, object]:
        """Return peers, connections and refusals, ready for JSON."""
        connections = [port.status() for port in self.up]
        targets = {target.source: target for target in self._dialler.targets}
        peers = []
        for peer in self.peers.values():
            linked = sum(connection["site"] == peer.site for connection in connections)
            addresses = [
                self._address_status(
                    address, targets.get(GatewayAddress(peer.site, (address,)).source)
                )
                for address in peer.addresses
            ]
            peers.append(
                {
                    "site": peer.site,
                    "cost_ms": self.costs.get(peer.site, 0),
                    "pins": [dump_fingerprint(pin) for pin in peer.pins],
                    "linked": linked,
                    "addresses": addresses,
                }
            )
        return {
            "site": self.config.site,
            "fingerprint": self.fingerprint,
            "listening": [show(*address) for address in self.addresses],
            "peers": peers,
            "connections": connections,
            "refused": dict(self.refusals),
            "half_open": len(self._places.loose),
            "replaced": self.replaced,
            "protocol_errors": self.protocol_errors,
        }

    def _address_status(self, address: Address, target: Target | None) -> dict[str, object]:
        relay_id = target.relay_id if target is not None else None
        linked = relay_id is not None and self.linked(relay_id)
        return {
            "address": show(*address),
            "linked": linked,
            "peer": relay_id.hex() if relay_id is not None and linked else "",
            "failures": 0 if linked or target is None else target.failures,
            "error": "" if linked or target is None else target.error,
        }

    # -- Hub -------------------------------------------------------------------------------------------------

    def _accepting_port(self, address: str) -> LinkPort:
        return GatewayPort(self, address, self._context)

    def _neighbor(self, relay_id: bytes) -> Wan | None:
        return self.router.wans.get(relay_id)

    def _check_hello(self, port: LinkPort, hello: link_frames.LinkHello) -> None:
        site, relay_id = cast(GatewayPort, port).site, hello.relay_id
        known = self.router.wans.get(relay_id)
        if (known is not None and known.site != site) or relay_id in self.router.mesh.copies:
            raise Refused(
                "another site's relay id", f"relay id {relay_id.hex()} is in use in another site"
            )
        connected = sum(wan.site == site for wan in self.router.wans.values())
        if known is None and connected >= MAX_CONNECTIONS:
            raise Refused(
                "too many gateways",
                f"{site} has {connected} connections here; the limit is {MAX_CONNECTIONS}",
            )

    def _up(self, port: LinkPort, hello: link_frames.LinkHello) -> Wan:
        site = cast(GatewayPort, port).site
        return self.router.wan_up(port, hello, site, self.costs.get(site, 0))

    def _down(self, neighbor: Neighbor) -> None:
        self.router.wan_down(cast(Wan, neighbor))

    def _to_drop(self, strangers: Collection[Accepted]) -> Accepted:
        counts = Counter(_network(each.host) for each in strangers)
        most = counts.most_common(1)[0][0]
        return next(each for each in strangers if _network(each.host) == most)

    async def _dial(self, target: Target, address: Address) -> Outcome:
        """Dial the addresses that a host resolves to, one after the other, until a gateway answers."""
        site = self._dialled[target.source].site
        host, number = address
        try:
            # Without a time limit of its own: lookups given up early would pile up in the resolver.
            hosts = [host] if _is_numeric(host) else await resolve(host, number)
        except OSError as err:
            return Outcome(f"{show(*address)}: {err.strerror or err}")
        outcome = Outcome(f"{show(*address)}: the name has no address")
        for each in dict.fromkeys(hosts):

            def dialling(dial_us: int, each: str = each) -> LinkPort:
                context = self._credentials.dialling[site]
                return GatewayPort(
                    self, show(each, number), context, site=site, credentials=self._credentials, dial_us=dial_us
                )  # fmt: skip

            outcome = await self._try((each, number), dialling)
            if outcome.what in (UP, LINKED):
                break
        return outcome


def _kernel_view(connection: socket.socket | None) -> dict[str, object]:
    """Return the kernel's figures for a connection (round trip, retransmitted segments, loss); empty if it has none."""
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return {}
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return {}
    if len(info) < _INFO.size:
        return {}
    rtt_us, again, sent = _INFO.unpack(info)
    return {"tcp_rtt_us": rtt_us, "retransmitted": again, "loss": round(again / max(1, sent), 6)}


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _network(host: str) -> str:
    """Return what counts as one host: an IPv4 address, or the first 64 bits of an IPv6 address."""
    if ":" not in host:
        return host
    bits = int(ipaddress.IPv6Address(host.partition("%")[0]))
    return hex(bits >> 64)
