"""TLS contexts, and sessions over TLS from processes on hosts without a relay.

Only TLS 1.3 is used, and both sides present a certificate from the one authority that the other trusts
(`iris.crypto.certificates`). The certificate authorities of the system are not trusted. `relay.net.tls` builds a
relay's contexts from the same functions. A client's context comes from its access file:

    access = load_access(Path("iris-access.pem"))
    await loop.create_connection(..., ssl=access.context, server_hostname=access.server_name)

In TLS 1.3 a client's handshake ends before the relay has checked its certificate, so a refusal arrives as an alert at
the first read. After the handshake, both sides call `check_alpn` and `peer_relay_id`.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.serialization import Encoding

from iris import keyfiles
from iris.crypto.keys import SECRET_BYTES, NetworkKey
from iris.errors import ConfigError, PeerProtocolError

# Only TLS needs certificates. They are imported where they are used, because they take a fifth of the time that a short
# command needs to start.
if TYPE_CHECKING:
    from cryptography import x509

    from iris.crypto.certificates import Leaf

SESSION_ALPN: Final = "iris-session/1"
"""ALPN name of sessions and their version, which TLS agrees on before any frame is sent."""

_ID: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class RemoteAccess:
    """TLS access to the relays of one network. Its repr shows no secret.

    Pass `context` as `ssl` and `server_name`, the network's fingerprint in hex, as `server_hostname` to
    `create_connection`. `access_id` (16 bytes) identifies the access file to relays.
    """

    context: ssl.SSLContext = field(repr=False)
    server_name: str
    access_id: bytes


def make_access(network_key: NetworkKey) -> bytes:
    """Return the content of a new access file. It is secret, but the network key cannot be derived from it."""
    from iris.crypto.certificates import dump_access

    return dump_access(network_key, os.urandom(SECRET_BYTES)).encode()


def create_access(path: Path, network_key: NetworkKey) -> bytes:
    """Write a new access file, mode 0600, and return its id (16 bytes).

    Raises:
        KeyringError: the file exists and was not changed, or the write failed and no file is left.
    """
    from iris.crypto.certificates import parse_access

    content = make_access(network_key).decode()
    keyfiles.create(path, content)
    return parse_access(content).access_id


def load_access(path: Path) -> RemoteAccess:
    """Return the TLS access that the access file `path` gives.

    Raises:
        KeyringError: the file is missing, not a regular file, over 1 MiB, open to other users, owned by another user,
            or not an access file. The text begins with the path and says what to do.
        ConfigError: as `mutual_context`.
    """
    from iris.crypto.certificates import parse_access

    access = keyfiles.load(path, parse_access)
    context = mutual_context(
        ssl.PROTOCOL_TLS_CLIENT, alpn=SESSION_ALPN, leaf=access.leaf, trusted=access.authority
    )
    return RemoteAccess(context, access.fingerprint.hex(), access.access_id)


def bare_context(side: int, *, alpn: str) -> ssl.SSLContext:
    """Return a context for `side` (ssl.PROTOCOL_TLS_CLIENT or _SERVER) that does not trust any authority yet.

    It uses TLS 1.3 only and requires a certificate from the peer. It takes nothing from the system or the environment
    (no authorities, no SSLKEYLOGFILE). Without session tickets, the certificates of every connection are checked.
    """
    context = ssl.SSLContext(side)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    # The SNI is a network's fingerprint and not a host name. The only trusted authority proves that the peer is of
    # that network, and `peer_relay_id` identifies the peer.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Off by default before Python 3.13. Our certificates conform to RFC 5280.
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.set_alpn_protocols([alpn])
    return context


def mutual_context(
    side: int, *, alpn: str, leaf: Leaf, trusted: x509.Certificate
) -> ssl.SSLContext:
    """Return a context for `side` that presents `leaf` and trusts only certificates signed by `trusted`.

    Raises:
        ConfigError: this system has no memfd or /proc, which are needed to give OpenSSL the private key.
    """
    context = bare_context(side, alpn=alpn)
    context.load_verify_locations(cadata=trusted.public_bytes(Encoding.DER))
    _present(context, leaf)
    return context


def check_alpn(tls: ssl.SSLObject | ssl.SSLSocket, expected: str) -> None:
    """Check that both sides agreed on the ALPN protocol `expected`. Call it once the handshake is done.

    If the two offers have nothing in common, OpenSSL continues without ALPN, so this check is the only refusal.

    Raises:
        PeerProtocolError: the peer offered another protocol or none.
    """
    chosen = tls.selected_alpn_protocol()
    if chosen != expected:
        raise PeerProtocolError(
            f"the peer does not speak {expected} on this port; links and sessions use different ports"
        )


def certificate_hash(certificate: bytes) -> bytes:
    """Return the SHA-256 of the relay's certificate (DER), 32 bytes. Key proofs over TLS are bound to it.

    This is `tls-server-end-point` of RFC 5929. Ed25519 prescribes no hash, so it is always SHA-256. A relay creates a
    new leaf at each start, so only that relay has its private key, whatever names other leaves contain.
    """
    return hashlib.sha256(certificate).digest()


def peer_channel(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the `certificate_hash` of the relay at the other end of a connection."""
    certificate = tls.getpeercert(binary_form=True)
    assert certificate is not None, "CERT_REQUIRED"
    return certificate_hash(certificate)


def peer_relay_id(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the id (16 bytes) of the relay at the other end, from the certificate that the handshake verified.

    Raises:
        PeerProtocolError: the certificate does not name exactly one relay.
    """
    from iris.crypto.certificates import RELAY_URI

    return _peer_id(tls, RELAY_URI)


def peer_access_id(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the id (16 bytes) of the access file at the other end of a session, as verified.

    Raises:
        PeerProtocolError: the certificate does not name exactly one access file.
    """
    from iris.crypto.certificates import ACCESS_URI

    return _peer_id(tls, ACCESS_URI)


def _peer_id(tls: ssl.SSLObject | ssl.SSLSocket, scheme: str) -> bytes:
    text = peer_name(tls, scheme)
    if not _ID.fullmatch(text):
        raise PeerProtocolError(
            f"the {scheme}: name in the peer's certificate is not 32 hex digits"
        )
    return bytes.fromhex(text)


def peer_name(tls: ssl.SSLObject | ssl.SSLSocket, scheme: str) -> str:
    """Return the text after `scheme:` in the only URI name of the peer's certificate, which the handshake verified.

    Raises:
        PeerProtocolError: the certificate does not have exactly one URI name, or it has another scheme.
    """
    certificate = tls.getpeercert() or {}
    # typeshed gives every field of a certificate the union of all their types.
    names = [name for name in certificate.get("subjectAltName", ()) if isinstance(name, tuple)]
    uris = [str(value) for kind, value in names if kind == "URI"]
    if len(uris) == 1:
        found, _, text = uris[0].partition(":")
        if found == scheme:
            return text
    raise PeerProtocolError(
        f"the peer's certificate must have exactly one URI name, with the scheme {scheme}:, "
        f"but has {len(uris)} URI names"
    )


def _present(context: ssl.SSLContext, leaf: Leaf) -> None:
    """Load a certificate and its private key into a context.

    `load_cert_chain` accepts only a path, so a file in memory is used. The key is never on a disk, and the file no
    longer exists when this returns.
    """
    try:
        # Other processes cannot open it: it has no name outside this process, and execve closes it.
        descriptor = os.memfd_create("iris-leaf", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "w", encoding="ascii", closefd=False) as file:
                file.write(leaf.pem())
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"cannot give OpenSSL a private key through memfd and /proc: {error.strerror}"
        ) from error
