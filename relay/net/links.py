"""Links to the other relays of this relay's networks. Their base, for links and WAN connections, is `relay.net.hub`."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from typing import ClassVar, Final, cast

from iris.crypto.keys import NetworkKey
from iris.wire import link_frames
from iris.wire.link_frames import MAX_ADDRESSES
from relay.config import RelayConfig
from relay.core.link import Link
from relay.core.neighbor import Neighbor
from relay.net.addresses import bind, parse_addresses, show
from relay.net.dialling import UP, Address, Outcome, Seen, Target
from relay.net.hub import Hub
from relay.net.linkport import LinkPort, Refused
from relay.net.ports import Driver
from relay.net.tls import WRONG_NETWORK, Credentials, link_server_context

log = logging.getLogger(__name__)

CONNECT_S: Final = 2.0


class LinkHub(Hub):
    """All links of a relay."""

    kind: ClassVar[str] = "link"
    connect_s: ClassVar[float] = CONNECT_S
    far: ClassVar[bool] = False

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        super().__init__(driver, config)
        self.credentials: list[Credentials] = []
        """Credentials of the networks served; the list is changed in place when keys rotate."""
        self.reload(config.network_keys)
        self._context = link_server_context(self.credentials)
        self.router.mesh.introduced = self.introduced
        self.router.mesh.connection_status = self._connection_status

    def listen(self) -> None:
        """Bind and accept. Raises ConfigError, and then leaves nothing bound."""
        self._listen(bind(self.config))

    @property
    def port(self) -> int:
        """The TCP port that links are accepted on; 0 before `listen`."""
        return self.addresses[0][1] if self.addresses else 0

    def _accepting_port(self, address: str) -> LinkPort:
        return LinkPort(self, address, self._context, network_of=self.fingerprint_of)

    def _neighbor(self, relay_id: bytes) -> Link | None:
        return self.router.links.get(relay_id)

    def _up(self, port: LinkPort, hello: link_frames.LinkHello) -> Link:
        link = self.router.link_up(port, hello)
        if hello.site and link.copy.site != self.router.site:
            fields = {"peer": link.copy.relay, "its_site": link.copy.site, "ours": self.router.site}
            log.warning("links.two_site_names", extra={"fields": fields})
        return link

    def _down(self, neighbor: Neighbor) -> None:
        self.router.link_down(cast(Link, neighbor))

    # -- dialling --------------------------------------------------------------------------------------------

    def sighted(self, seen: Seen) -> None:
        """Dial a relay that discovery reported, or stop dialling one that left."""
        if seen.networks and not any(c.fingerprint in seen.networks for c in self.credentials):
            return  # it is in another network
        self._dialler.sighted(seen)

    def introduced(self, relay_id: bytes, addresses: Sequence[str]) -> None:
        """Dial a relay that a peer introduced.

        Only numeric addresses are used, so that a peer cannot make this relay resolve names.
        """
        self._dialler.introduced(relay_id, list(parse_addresses(addresses[:MAX_ADDRESSES])))

    async def _dial(self, target: Target, address: Address) -> Outcome:
        outcome = Outcome("it is in another network; compare `iris key show` on both hosts")
        # Try the network of its last link first.
        for credentials in sorted(self.credentials, key=lambda c: c.fingerprint != target.network):
            if target.networks and credentials.fingerprint not in target.networks:
                continue

            def dialling(dial_us: int, credentials: Credentials = credentials) -> LinkPort:
                return LinkPort(
                    self, show(*address), credentials.dialling, credentials=credentials, dial_us=dial_us
                )  # fmt: skip

            outcome = await self._try(address, dialling)
            if outcome.what == UP:
                target.network = credentials.fingerprint
            if outcome.what != WRONG_NETWORK:
                break
        return outcome

    # -- keys ------------------------------------------------------------------------------------------------

    def reload(self, keys: Sequence[NetworkKey]) -> None:
        """Serve exactly these networks from now on; close links of other networks and dial their relays again."""
        before = {credentials.fingerprint: credentials for credentials in self.credentials}
        # In place, because the accepting context reads this list in each handshake.
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
                # Without BYE: this relay does not stop, and the peer keeps its replica until they are linked again.
                port.leave("its network key was removed", goodbye=False)

    def fingerprint_of(self, context: ssl.SSLContext) -> bytes:
        """Return the fingerprint of the network that the handshake of an accepted connection selected.

        Raises Refused.
        """
        for credentials in self.credentials:
            if credentials.accepting is context:
                return credentials.fingerprint
        raise Refused(WRONG_NETWORK)

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """Fingerprints of the networks served."""
        return tuple(credentials.fingerprint for credentials in self.credentials)

    def _connection_status(self, link: Link) -> dict[str, object]:
        """Return the state of the connection of a link, ready for JSON."""
        return link.port.status() if isinstance(link.port, LinkPort) else {}

    def status(self) -> dict[str, object]:
        """Return listeners, refusals and dials, ready for JSON."""
        return {
            "links_listening": [show(*address) for address in self.addresses],
            "links_refused": dict(self.refusals),
            "links_half_open": len(self._places.loose),
            "links_replaced": self.replaced,
            "link_protocol_errors": self.protocol_errors,
            "dialling": self._dialler.status(),
        }
