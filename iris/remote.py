"""TLS as Iris uses it, and sessions over it from processes on hosts without a relay.

TLS 1.3 alone, and either side shows a certificate of the one authority that the other trusts
(`iris.crypto.certificates`). The system's authorities count for nothing, so contexts are made bare.
`relay.net.tls` builds a relay's contexts of the same parts; a client's comes from its access file:

    access = load_access(Path("iris-access.pem"))
    await loop.create_connection(..., ssl=access.context, server_hostname=access.server_name)

A client's handshake ends before the relay has judged its certificate: a refusal comes as an alert, at
the first read. After it, either side calls `check_alpn` and `peer_relay_id`.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from iris import keyfiles
from iris.crypto.certificates import ACCESS_URI, RELAY_URI, Leaf, dump_access, parse_access
from iris.crypto.keys import SECRET_BYTES, NetworkKey
from iris.errors import ConfigError, PeerProtocolError

SESSION_ALPN: Final = "iris-session/1"
"""Names sessions and their version in TLS, before a byte of either is read."""

_ID: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class RemoteAccess:
    """How to reach the relays of one network: pass both to `create_connection`. Shows no secret.

    `server_name` is the network's fingerprint in hex, passed as `server_hostname`; `access_id`
    (16 bytes) names the access file to relays.
    """

    context: ssl.SSLContext = field(repr=False)
    server_name: str
    access_id: bytes


def make_access(network_key: NetworkKey, entropy: Callable[[int], bytes] = os.urandom) -> bytes:
    """Return the content of a new access file: secret, but nothing of the network key is in it."""
    return dump_access(network_key, entropy(SECRET_BYTES)).encode()


def create_access(path: Path, network_key: NetworkKey) -> bytes:
    """Write a new access file, mode 0600, and return its id (16 bytes).

    Raises:
        KeyringError: there is such a file, which was left alone, or the disk refused; then none is left.
    """
    content = make_access(network_key).decode()
    keyfiles.create(path, content)
    return parse_access(content).access_id


def load_access(path: Path) -> RemoteAccess:
    """Return how to reach the network of the access file `path`.

    Raises:
        KeyringError: missing, not a plain file, over 1 MiB, open to others, owned by another user, or
            not an access file. The text begins with the path and says what to do.
        ConfigError: as `mutual_context`.
    """
    access = keyfiles.load(path, parse_access)
    context = mutual_context(
        ssl.PROTOCOL_TLS_CLIENT, alpn=SESSION_ALPN, leaf=access.leaf, trusted=access.authority
    )
    return RemoteAccess(context, access.fingerprint.hex(), access.access_id)


def bare_context(side: int, *, alpn: str) -> ssl.SSLContext:
    """Return a context of one side (ssl.PROTOCOL_TLS_CLIENT or _SERVER) that trusts nobody yet.

    TLS 1.3, a certificate wanted of the peer, nothing of the system's or the environment's taken
    over (no authorities, no SSLKEYLOGFILE), and no session tickets: every connection is judged anew.
    """
    context = ssl.SSLContext(side)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    # The name sent (SNI) is a network's fingerprint, no host name: what proves a peer to be of that
    # network is its authority, the only one trusted, and what names the peer is `peer_relay_id`.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Off by default before Python 3.13. Our certificates are as RFC 5280 wants them.
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.set_alpn_protocols([alpn])
    return context


def mutual_context(
    side: int, *, alpn: str, leaf: Leaf, trusted: x509.Certificate
) -> ssl.SSLContext:
    """Return a context of one side that shows `leaf` and trusts what `trusted` signed, nothing else.

    Raises:
        ConfigError: this system has no memfd or no /proc, through which OpenSSL gets the private key.
    """
    context = bare_context(side, alpn=alpn)
    context.load_verify_locations(cadata=trusted.public_bytes(Encoding.DER))
    _present(context, leaf)
    return context


def check_alpn(tls: ssl.SSLObject | ssl.SSLSocket, expected: str) -> None:
    """Check that both sides speak `expected` on a connection; to be called once its handshake is done.

    Where the two offers have nothing in common, OpenSSL goes on without: nobody else refuses it.

    Raises:
        PeerProtocolError: the peer offered another protocol or none.
    """
    chosen = tls.selected_alpn_protocol()
    if chosen != expected:
        raise PeerProtocolError(
            f"the peer does not speak {expected} here (links and sessions have ports of their own)"
        )


def certificate_hash(certificate: bytes) -> bytes:
    """Return SHA-256 of the relay's certificate (DER), 32 bytes, to which proofs over TLS are bound.

    This is `tls-server-end-point` of RFC 5929. Ed25519 prescribes no hash, so it is always SHA-256. A relay makes
    its leaf at each start, so nobody else has the private key of one, whatever name they put into their own.
    """
    return hashlib.sha256(certificate).digest()


def peer_channel(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return `certificate_hash` of the relay at the other end."""
    certificate = tls.getpeercert(binary_form=True)
    assert certificate is not None, "CERT_REQUIRED"
    return certificate_hash(certificate)


def peer_relay_id(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the id (16 bytes) of the relay at the other end, from the certificate that the handshake verified.

    Raises:
        PeerProtocolError: the certificate names no relay, or more than one.
    """
    return _peer_id(tls, RELAY_URI)


def peer_access_id(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the id (16 bytes) of the access file at the other end of a session, as verified.

    Raises:
        PeerProtocolError: the certificate names no access file, or more than one.
    """
    return _peer_id(tls, ACCESS_URI)


def _peer_id(tls: ssl.SSLObject | ssl.SSLSocket, scheme: str) -> bytes:
    text = peer_name(tls, scheme)
    if not _ID.fullmatch(text):
        raise PeerProtocolError(f"the peer's certificate holds no {scheme}: name")
    return bytes.fromhex(text)


def peer_name(tls: ssl.SSLObject | ssl.SSLSocket, scheme: str) -> str:
    """Return what follows `scheme:` in the one name of the certificate that the handshake verified.

    Raises:
        PeerProtocolError: it names no such thing, or more than one.
    """
    certificate = tls.getpeercert() or {}
    # typeshed gives every field of a certificate the union of all their types.
    names = [name for name in certificate.get("subjectAltName", ()) if isinstance(name, tuple)]
    uris = [str(value) for kind, value in names if kind == "URI"]
    if len(uris) == 1:
        found, _, text = uris[0].partition(":")
        if found == scheme:
            return text
    raise PeerProtocolError(f"the peer's certificate holds no {scheme}: name")


def _present(context: ssl.SSLContext, leaf: Leaf) -> None:
    """Give a context its certificate and private key, which `load_cert_chain` takes from a path alone.

    The path is that of a file in memory: the key is on no disk, and the file is gone when this returns.
    """
    try:
        # Opened to nobody else: it has no name but this process's own, and execve closes it.
        descriptor = os.memfd_create("iris-leaf", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "w", encoding="ascii", closefd=False) as file:
                file.write(leaf.pem())
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"cannot hand a private key to OpenSSL, which takes memfd and /proc: {error.strerror}"
        ) from error
