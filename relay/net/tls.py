"""A relay's side of TLS: who it is in each of its networks, and whom it lets in.

Every connection names a network by its fingerprint (SNI, 32 hex digits). That picks the credentials, so
that an old and a new network key are served side by side; a connection that names none of ours is
refused with an alert before any certificate is shown.

    links       dialler and acceptor show relay leaves, each trusts the network CA alone
    sessions    the relay shows its leaf, the process an access leaf; the relay trusts the access CA alone
    WAN         gateways of two sites, dialler and acceptor, show gateway leaves; each trusts the CA of the site that it pinned

Between sites the name is that of the dialler's site key: the acceptor picks the one authority to hold it against.

In TLS 1.3 the dialler's handshake ends before the acceptor has judged it, so a link is up only after both
HELLOs. When a handshake is done, either side calls `check_alpn` and `peer_relay_id`. How certificates
and contexts are made: `iris.crypto.certificates` and `iris.remote`.

Two habits of asyncio and uvloop: `create_server` tells nobody of a handshake that failed, while
`connect_accepted_socket` raises its error (`refusal` names it); and neither sends the alert that OpenSSL
made of it, so the other side sees its connection end and only the refusing side knows why.
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
"""Names links and their version in TLS, before a byte of either is read."""
WAN_ALPN: Final = "iris-wan/1"
"""The same of connections between gateways."""

_SITE_CA: Final = re.compile(r"iris site CA ([0-9a-f]{32})")
_GATEWAY: Final = re.compile(r"([a-z][a-z0-9-]{0,31}):([0-9a-f]{32})")

WRONG_NETWORK: Final = "wrong network"
FOREIGN: Final = "foreign certificate"
TLS_REASONS: Final = {
    "CALLBACK_FAILED": WRONG_NETWORK,  # no network of that name here
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
"""What OpenSSL calls it -> what we count it as."""


class Credentials:
    """Who one relay is under one network key. Costs some ms to make; keeps no Python object of a secret.

    `dialling` dials links, with `server_hostname=credentials.server_name`; `accepting` and
    `admitting` are what `link_server_context` and `session_server_context` pick from.
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
        """Make a leaf for the relay `relay_id` (16 bytes), with a private key of its own.

        Raises:
            LocalProtocolError: the id has another length.
            ConfigError: OpenSSL cannot be given a private key on this system.
        """
        leaf = relay_leaf(network_key, relay_id, entropy(SECRET_BYTES))
        network, access = network_authority(network_key), access_authority(network_key)
        self.relay_id: Final = relay_id
        self.channel: Final = certificate_hash(leaf.certificate.public_bytes(Encoding.DER))
        """What proofs of keys over TLS are bound to: `certificate_hash` of the leaf."""
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
    """A key of another site as one gateway of ours meets it: `accepting` shows our leaf and trusts what that key signed, alone."""

    __slots__ = ("accepting", "fingerprint", "server_name", "site")

    def __init__(self, site: str, fingerprint: bytes, accepting: ssl.SSLContext) -> None:
        self.site: Final = site
        self.fingerprint: Final = fingerprint
        """The name of the key, 16 bytes: `public_id` of it."""
        self.server_name: Final = fingerprint.hex()
        self.accepting: Final = accepting


class GatewayCredentials:
    """Who one gateway is under its site's key, and which sites it knows by theirs. Keeps no Python object of a secret.

    Connections are dialled with `dialling[site]` and `server_hostname=credentials.server_name`, and accepted with what
    `gateway_server_context` picks from `pins`.
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
            LocalProtocolError: the id or a pin has another length.
            InvalidName: a site's name is none.
            ConfigError: OpenSSL cannot be given a private key on this system.
        """
        leaf = gateway_leaf(site_key, site, relay_id, entropy(SECRET_BYTES))
        self.relay_id: Final = relay_id
        self.site: Final = site
        self.fingerprint: Final = public_id(site_key.public_key)
        self.server_name: Final = self.fingerprint.hex()
        self.pins: Final[list[PeerPin]] = []
        """Of all sites."""
        self.dialling: Final[dict[str, ssl.SSLContext]] = {}
        """By site; each trusts all keys that are pinned for it."""
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
    """Return the relay id (16 bytes) of the gateway at the other end, which has to be one of `site`, as verified.

    Raises:
        PeerProtocolError: the certificate is no gateway's, or of another site.
    """
    found = _GATEWAY.fullmatch(peer_name(tls, GATEWAY_URI))
    if found is None or found[1] != site:
        raise PeerProtocolError(f"the peer's certificate is not of a gateway of {site}")
    return bytes.fromhex(found[2])


def peer_site_key(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the name (16 bytes) of the site key that signed the verified certificate of the gateway at the other end.

    Raises:
        PeerProtocolError: a gateway's certificate does not look so.
    """
    certificate = tls.getpeercert() or {}
    # The authority is trusted under this very name, and has signed the leaf itself. As for names, typeshed has one type for all fields.
    issuer = cast(tuple[tuple[tuple[str, str], ...], ...], certificate.get("issuer", ()))
    for kind, value in (pair for part in issuer for pair in part):
        found = _SITE_CA.fullmatch(value) if kind == "commonName" else None
        if found is not None:
            return bytes.fromhex(found[1])
    raise PeerProtocolError("the peer's certificate names no site key")


def link_server_context(credentials: Sequence[Credentials]) -> ssl.SSLContext:
    """Return the context that accepts links of every network in `credentials`.

    The sequence is looked at in each handshake: a network added to or removed from a list counts for
    the connections that come after.
    """
    return _server_context(LINK_ALPN, lambda: ((c.server_name, c.accepting) for c in credentials))


def session_server_context(credentials: Sequence[Credentials]) -> ssl.SSLContext:
    """Return the context that accepts sessions of holders of access files, as `link_server_context`."""
    return _server_context(
        SESSION_ALPN, lambda: ((c.server_name, c.admitting) for c in credentials)
    )


def gateway_server_context(credentials: GatewayCredentials) -> ssl.SSLContext:
    """Return the context that accepts gateways of every site that is pinned in `credentials`."""
    return _server_context(
        WAN_ALPN, lambda: ((pin.server_name, pin.accepting) for pin in credentials.pins)
    )


def refusal(error: BaseException) -> str:
    """Return why a handshake failed on our side: a text out of few, so that they can be counted by.

    `error` is what `connect_accepted_socket`, `create_connection` or an SSLObject's `do_handshake` raised.
    """
    if isinstance(error, ssl.SSLError):
        return TLS_REASONS.get(error.reason or "", "TLS failure")
    if isinstance(error, TimeoutError):
        return "TLS handshake took too long"
    # asyncio's word for a handshake over its time is a ConnectionAbortedError like the others.
    if isinstance(error, ConnectionAbortedError) and "longer than" in str(error):
        return "TLS handshake took too long"
    return "connection ended in the TLS handshake"


@contextlib.contextmanager
def counting_garbled_names(told: Callable[[], None]) -> Iterator[None]:
    """While entered, call `told` for each server name that is not ASCII, where `ssl` prints a traceback.

    The handshake is refused in any case; without this anybody who connects could fill our stderr. It
    changes `sys.unraisablehook`: for a process that is a relay, not for one that embeds it.
    """
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs, /) -> None:
        # What `ssl` passes when a name does not decode, and nothing else does: the raw name.
        if isinstance(unraisable.exc_value, UnicodeDecodeError) and (
            unraisable.object == unraisable.exc_value.object
        ):
            told()
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
    # OpenSSL keeps this one's versions, verification and tickets for the whole connection, and takes
    # certificate, trusted authorities and ALPN of the one picked. So this one is as strict as the others; it
    # has no certificate and trusts nobody, for a connection that never gets another.
    context = bare_context(ssl.PROTOCOL_TLS_SERVER, alpn=alpn)

    def pick(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        for server_name, context in known():
            if server_name == name:
                connection.context = context
                return None
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context.sni_callback = pick
    return context
