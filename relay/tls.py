"""A relay's side of TLS: who it is in each of its networks, and whom it lets in.

Every connection names a network by its fingerprint (SNI, 32 hex digits). That picks the credentials, so
that an old and a new network key are served side by side; a connection that names none of ours is
refused with an alert before any certificate is shown.

    links       dialler and acceptor show relay leaves, each trusts the network CA alone
    sessions    the relay shows its leaf, the process an access leaf; the relay trusts the access CA alone

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
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from iris.crypto.certificates import access_authority, network_authority, relay_leaf
from iris.crypto.keys import SECRET_BYTES, NetworkKey
from iris.remote import (
    SESSION_ALPN,
    bare_context,
    check_alpn,
    make_access,
    mutual_context,
    peer_access_id,
    peer_relay_id,
)

__all__ = [
    "LINK_ALPN",
    "SESSION_ALPN",
    "Credentials",
    "check_alpn",
    "garbled_names_told",
    "link_server_context",
    "make_access",
    "peer_access_id",
    "peer_relay_id",
    "refusal",
    "session_server_context",
]

LINK_ALPN: Final = "iris-link/1"
"""Names links and their version in TLS, before a byte of either is read."""

# OpenSSL's names for what is worth telling apart.
_REFUSALS: Final = {
    "CALLBACK_FAILED": "names no network of ours",
    "CERTIFICATE_VERIFY_FAILED": "certificate not of this network and kind",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "UNSUPPORTED_PROTOCOL": "TLS older than 1.3",
    "HTTP_REQUEST": "not TLS",
    "HTTPS_PROXY_REQUEST": "not TLS",
    "WRONG_VERSION_NUMBER": "not TLS",
}


class Credentials:
    """Who one relay is under one network key. Costs some ms to make; keeps no Python object of a secret.

    `dialling` dials links, with `server_hostname=credentials.server_name`; `accepting` and
    `admitting` are what `link_server_context` and `session_server_context` pick from.
    """

    __slots__ = ("accepting", "admitting", "dialling", "fingerprint", "relay_id", "server_name")

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


def link_server_context(credentials: Sequence[Credentials]) -> ssl.SSLContext:
    """Return the context that accepts links of every network in `credentials`.

    The sequence is looked at in each handshake: a network added to or removed from a list counts for
    the connections that come after.
    """
    return _server_context(LINK_ALPN, credentials, lambda chosen: chosen.accepting)


def session_server_context(credentials: Sequence[Credentials]) -> ssl.SSLContext:
    """Return the context that accepts sessions of holders of access files, as `link_server_context`."""
    return _server_context(SESSION_ALPN, credentials, lambda chosen: chosen.admitting)


def refusal(error: BaseException) -> str:
    """Return why a handshake failed on our side: one of eight texts, so that they can be counted by.

    `error` is what `connect_accepted_socket`, `create_connection` or an SSLObject's `do_handshake` raised.
    """
    if isinstance(error, ssl.SSLError):
        return _REFUSALS.get(error.reason or "", "TLS handshake failed")
    if isinstance(error, TimeoutError):
        return "TLS handshake took too long"
    # asyncio's word for a handshake over its time is a ConnectionAbortedError like the others.
    if isinstance(error, ConnectionAbortedError) and "longer than" in str(error):
        return "TLS handshake took too long"
    return "connection ended in the TLS handshake"


@contextlib.contextmanager
def garbled_names_told(told: Callable[[], None]) -> Iterator[None]:
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
    alpn: str, credentials: Sequence[Credentials], side: Callable[[Credentials], ssl.SSLContext]
) -> ssl.SSLContext:
    # OpenSSL keeps this one's versions, verification and tickets for the whole connection, and takes
    # certificate, trusted authorities and ALPN of the one picked. So this one is as strict as the others; it
    # has no certificate and trusts nobody, for a connection that never gets another.
    context = bare_context(ssl.PROTOCOL_TLS_SERVER, alpn=alpn)

    def pick(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        for known in credentials:
            if known.server_name == name:
                connection.context = side(known)
                return None
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context.sni_callback = pick
    return context
