"""A relay's side of TLS: its credentials in each network and site, and the contexts that accept connections.

Every connection names a network by its fingerprint (SNI, 32 hex digits). The name selects the credentials, so that an
old and a new network key are served side by side. A connection that names an unknown network is refused with an alert
before any certificate is sent.

    links       both sides present relay leaves and trust only the network CA
    sessions    the relay presents its leaf, the process an access leaf; the relay trusts only the access CA
    WAN         gateways of two sites present gateway leaves; each trusts only the CA of the site that it pinned

Between sites, the SNI names the dialler's site key, so that the acceptor selects the authority to verify it against.

In TLS 1.3 the dialler's handshake ends before the acceptor has verified it, so a link is up only after both HELLOs.
After the handshake, both sides call `check_alpn` and `peer_relay_id`. `iris.crypto.certificates` and `iris.remote` make
the certificates and contexts.

asyncio and uvloop have two peculiarities. `create_server` does not report a failed handshake, while
`connect_accepted_socket` raises its error (`refusal` names it). Neither sends OpenSSL's alert, so the peer sees the
connection end, and only the refusing side knows the reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, cast

from cryptography.hazmat.primitives.serialization import Encoding

from iris.accepting import handshake_failure
from iris.crypto.certificates import (
    GATEWAY_URI,
    access_authority,
    gateway_leaf,
    network_authority,
    relay_leaf,
    site_authority,
)
from iris.crypto.keys import SECRET_BYTES, NetworkKey, SiteKey, public_id
from iris.errors import PeerProtocolError
from iris.remote import (
    SESSION_ALPN,
    bare_context,
    certificate_hash,
    check_alpn,
    make_access,
    mutual_context,
    peer_access_id,
    peer_name,
    peer_relay_id,
)

__all__ = [
    "FOREIGN",
    "LINK_ALPN",
    "SESSION_ALPN",
    "TLS_REASONS",
    "WAN_ALPN",
    "WRONG_NETWORK",
    "Credentials",
    "GatewayCredentials",
    "PeerPin",
    "check_alpn",
    "counting_garbled_names",
    "gateway_server_context",
    "link_server_context",
    "make_access",
    "peer_access_id",
    "peer_gateway",
    "peer_relay_id",
    "peer_site_key",
    "refusal",
    "session_server_context",
]

LINK_ALPN: Final = "iris-link/1"
"""ALPN name of links, with their version: TLS compares it before a frame is read."""
WAN_ALPN: Final = "iris-wan/1"
"""ALPN name of connections between gateways."""

_SITE_CA: Final = re.compile(r"iris site CA ([0-9a-f]{32})")
_GATEWAY: Final = re.compile(r"([a-z][a-z0-9-]{0,31}):([0-9a-f]{32})")

WRONG_NETWORK: Final = "wrong network"
FOREIGN: Final = "foreign certificate"
TLS_REASONS: Final = {
    "CALLBACK_FAILED": WRONG_NETWORK,  # the network named is not served here
    "TLSV1_UNRECOGNIZED_NAME": WRONG_NETWORK,
    "CERTIFICATE_VERIFY_FAILED": FOREIGN,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "refused our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused our certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "refused our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refused our certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "refused our certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "refused our certificate",
    "UNSUPPORTED_PROTOCOL": "TLS version",
    "NO_PROTOCOLS_AVAILABLE": "TLS version",
    "TLSV1_ALERT_PROTOCOL_VERSION": "TLS version",
    "HTTP_REQUEST": "not TLS",
    "HTTPS_PROXY_REQUEST": "not TLS",
    "WRONG_VERSION_NUMBER": "not TLS",
    "UNKNOWN_PROTOCOL": "not TLS",
    "BAD_RECORD_TYPE": "not TLS",
    "RECORD_LAYER_FAILURE": "not TLS",
    "PACKET_LENGTH_TOO_LONG": "not TLS",
}
"""OpenSSL's name of an error -> the reason under which it is counted."""


class Credentials:
    """The credentials of one relay under one network key.

    They take some ms to make and keep no secret in a Python object. `dialling` dials links, with
    `server_hostname=credentials.server_name`. `link_server_context` selects from `accepting`, and
    `session_server_context` from `admitting`.
    """

    __slots__ = (
        "accepting",
        "admitting",
        "channel",
        "dialling",
        "fingerprint",
        "relay_id",
        "server_name",
    )

    def __init__(
        self,
        network_key: NetworkKey,
        relay_id: bytes,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Make a leaf with a new private key for the relay `relay_id` (16 bytes).

        Raises:
            LocalProtocolError: the id does not have 16 bytes.
            ConfigError: a private key cannot be passed to OpenSSL on this system.
        """
        leaf = relay_leaf(network_key, relay_id, entropy(SECRET_BYTES))
        network, access = network_authority(network_key), access_authority(network_key)
        self.relay_id: Final = relay_id
        self.channel: Final = certificate_hash(leaf.certificate.public_bytes(Encoding.DER))
        """`certificate_hash` of the leaf; proofs of keys over TLS are bound to it."""
        self.fingerprint: Final = network_key.fingerprint
        self.server_name: Final = network_key.fingerprint.hex()
        self.dialling: Final = mutual_context(
            ssl.PROTOCOL_TLS_CLIENT, alpn=LINK_ALPN, leaf=leaf, trusted=network
        )
        self.accepting: Final = mutual_context(
            ssl.PROTOCOL_TLS_SERVER, alpn=LINK_ALPN, leaf=leaf, trusted=network
        )
        self.admitting: Final = mutual_context(
            ssl.PROTOCOL_TLS_SERVER, alpn=SESSION_ALPN, leaf=leaf, trusted=access
        )

    def __repr__(self) -> str:
        return (
            f"<Credentials of relay {self.relay_id.hex()[:8]}… in network {self.server_name[:8]}…>"
        )


class PeerPin:
    """A pinned key of another site: `accepting` presents this gateway's leaf and trusts only what that key signed."""

    __slots__ = ("accepting", "fingerprint", "server_name", "site")

    def __init__(self, site: str, fingerprint: bytes, accepting: ssl.SSLContext) -> None:
        self.site: Final = site
        self.fingerprint: Final = fingerprint
        """Name of the key, 16 bytes: its `public_id`."""
        self.server_name: Final = fingerprint.hex()
        self.accepting: Final = accepting


class GatewayCredentials:
    """The credentials of one gateway under its site's key, and the pinned keys of other sites.

    It keeps no secret in a Python object. Dial with `dialling[site]` and `server_hostname=credentials.server_name`.
    For accepting, `gateway_server_context` selects from `pins`.
    """

    __slots__ = ("dialling", "fingerprint", "pins", "relay_id", "server_name", "site")

    def __init__(
        self,
        site_key: SiteKey,
        site: str,
        relay_id: bytes,
        peers: Mapping[str, Sequence[bytes]],
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Make a leaf for the gateway `relay_id` (16 bytes) of `site`. `peers` maps sites to their pinned public keys.

        Raises:
            LocalProtocolError: the id or a pin has the wrong length.
            InvalidName: a site's name is not valid.
            ConfigError: a private key cannot be passed to OpenSSL on this system.
        """
        leaf = gateway_leaf(site_key, site, relay_id, entropy(SECRET_BYTES))
        self.relay_id: Final = relay_id
        self.site: Final = site
        self.fingerprint: Final = public_id(site_key.public_key)
        self.server_name: Final = self.fingerprint.hex()
        self.pins: Final[list[PeerPin]] = []
        """The pinned keys of all sites."""
        self.dialling: Final[dict[str, ssl.SSLContext]] = {}
        """Contexts for dialling: site -> context that trusts all keys pinned for it."""
        for peer, public_keys in peers.items():
            first, *others = [site_authority(public_key, peer) for public_key in public_keys]
            dialling = mutual_context(
                ssl.PROTOCOL_TLS_CLIENT, alpn=WAN_ALPN, leaf=leaf, trusted=first
            )
            for other in others:
                dialling.load_verify_locations(cadata=other.public_bytes(Encoding.DER))
            self.dialling[peer] = dialling
            for public_key, authority in zip(public_keys, (first, *others), strict=True):
                accepting = mutual_context(
                    ssl.PROTOCOL_TLS_SERVER, alpn=WAN_ALPN, leaf=leaf, trusted=authority
                )
                self.pins.append(PeerPin(peer, public_id(public_key), accepting))

    def __repr__(self) -> str:
        return f"<GatewayCredentials of relay {self.relay_id.hex()[:8]}… in site {self.site}>"


def peer_gateway(tls: ssl.SSLObject | ssl.SSLSocket, site: str) -> bytes:
    """Return the relay id (16 bytes) of the peer, a verified gateway of `site`.

    Raises:
        PeerProtocolError: the certificate is not that of a gateway of `site`.
    """
    found = _GATEWAY.fullmatch(peer_name(tls, GATEWAY_URI))
    if found is None or found[1] != site:
        raise PeerProtocolError(f"the peer's certificate is not that of a gateway of site {site}")
    return bytes.fromhex(found[2])


def peer_site_key(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the name (16 bytes) of the site key that signed the peer gateway's verified certificate.

    Raises:
        PeerProtocolError: the certificate does not name a site key as its issuer.
    """
    certificate = tls.getpeercert() or {}
    # The issuer's name is reliable: the authority is trusted under it and signed the leaf itself. The cast is needed
    # because typeshed has one type for all fields.
    issuer = cast(tuple[tuple[tuple[str, str], ...], ...], certificate.get("issuer", ()))
    for kind, value in (pair for part in issuer for pair in part):
        found = _SITE_CA.fullmatch(value) if kind == "commonName" else None
        if found is not None:
            return bytes.fromhex(found[1])
    raise PeerProtocolError("the peer's certificate does not name a site key as its issuer")


def link_server_context(credentials: Sequence[Credentials]) -> ssl.SSLContext:
    """Return the context that accepts links of every network in `credentials`.

    The sequence is read in each handshake, so that a change of the list applies to later connections.
    """
    return _server_context(LINK_ALPN, lambda: ((c.server_name, c.accepting) for c in credentials))


def session_server_context(credentials: Sequence[Credentials]) -> ssl.SSLContext:
    """Return the context that accepts sessions with access files; see `link_server_context`."""
    return _server_context(
        SESSION_ALPN, lambda: ((c.server_name, c.admitting) for c in credentials)
    )


def gateway_server_context(credentials: GatewayCredentials) -> ssl.SSLContext:
    """Return the context that accepts gateways of every site pinned in `credentials`."""
    return _server_context(
        WAN_ALPN, lambda: ((pin.server_name, pin.accepting) for pin in credentials.pins)
    )


def refusal(error: BaseException) -> str:
    """Return why a handshake failed on this side: one of a few texts, under which refusals are counted.

    `error` was raised by `connect_accepted_socket`, `create_connection` or an SSLObject's `do_handshake`.
    """
    if isinstance(error, ssl.SSLError) and error.reason in TLS_REASONS:
        return TLS_REASONS[error.reason]
    return handshake_failure(error)


@contextlib.contextmanager
def counting_garbled_names(count: Callable[[], None]) -> Iterator[None]:
    """While entered, call `count` for each server name that is not ASCII, instead of the traceback that `ssl` prints.

    Such a handshake is refused in any case, but without this anybody who can connect could fill stderr. It replaces
    `sys.unraisablehook`, so use it in a relay's own process only.
    """
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs, /) -> None:
        # Only `ssl` passes the raw name as the object, when it cannot be decoded.
        if isinstance(unraisable.exc_value, UnicodeDecodeError) and (
            unraisable.object == unraisable.exc_value.object
        ):
            count()
        else:
            previous(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous


def _server_context(
    alpn: str, known: Callable[[], Iterable[tuple[str, ssl.SSLContext]]]
) -> ssl.SSLContext:
    # OpenSSL keeps the versions, verification and tickets of this context for the whole connection, and takes
    # certificate, trusted authorities and ALPN from the selected one. So this context is as strict as the others.
    # It has no certificate and trusts nobody, in case none is selected.
    context = bare_context(ssl.PROTOCOL_TLS_SERVER, alpn=alpn)

    def pick(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        for server_name, context in known():
            if server_name == name:
                connection.context = context
                return None
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context.sni_callback = pick
    return context
