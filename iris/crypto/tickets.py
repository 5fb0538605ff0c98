"""Tickets: who may hold a session over WebSocket, and for what (docs/protocol.md, §18.2).

A ticket is a JWT (RFC 7519) that an issuer signed with Ed25519 (RFC 8037). PyJWT reads and writes it; this module adds
what a relay requires of it. It is imported only where tickets are used, because PyJWT comes with the extra [wss].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from iris.crypto.keys import KEY_ID_BYTES, IssuerKey, public_id
from iris.crypto.scopes import Scope
from iris.errors import ConfigError, IrisError

MAX_TICKET_CHARACTERS: Final = 8192
MAX_SUBJECT_CHARACTERS: Final = 128
MAX_ID_CHARACTERS: Final = 64
MAX_KEYS: Final = 64
CLOCK_S: Final = 60
"""How far the clock of an issuer may be ahead of that of a relay, in seconds."""
_HEADER: Final = {"alg", "typ", "kid"}
_REQUIRED: Final = ["aud", "sub", "iat", "exp", "jti", "allow"]
_HEX: Final = re.compile(r"[0-9a-f]{32}")

MALFORMED: Final = "ticket malformed"
UNKNOWN_ISSUER: Final = "ticket of an unknown issuer"
FORGED: Final = "ticket forged"
OTHER_NETWORK: Final = "ticket of another network"
EXPIRED: Final = "ticket expired"
NOT_YET: Final = "ticket not valid yet"
TOO_LONG: Final = "ticket valid for too long"


class TicketError(IrisError):
    """A ticket is not valid. `reason` is one of few texts, for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Final = reason


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a ticket says. Times are in seconds since 1970."""

    issuer: bytes
    """Id of the key that signed it, 16 bytes."""
    network: str
    """Fingerprint of the network that it is for, in hex."""
    subject: str
    """Whom it was made out to."""
    id: str
    """Name of this one ticket, for revocation."""
    issued_s: int
    expires_s: int
    allow: Scope
    keys: frozenset[bytes] = frozenset()
    """Ids of the keys that the session must prove, and may use. Empty: any key, no proof beyond the usual."""
    origin: str = ""
    """The one origin that it may be used from. Empty: any."""


def sign_ticket(
    key: IssuerKey, *, network: bytes, subject: str, id: str, issued_s: int, life_s: int,
    allow: Mapping[str, Sequence[str]], keys: Iterable[bytes] = (), origin: str = "",
) -> str:  # fmt: skip
    """Return the text of a ticket that is valid for `life_s` seconds from `issued_s` on (seconds since 1970).

    Raises:
        ConfigError: a relay would refuse it.
    """
    claims: dict[str, Any] = {
        "aud": network.hex(), "sub": subject, "jti": id, "iat": issued_s, "exp": issued_s + life_s,
        "allow": {verb: list(patterns) for verb, patterns in allow.items()},
    }  # fmt: skip
    if wanted := sorted(key.hex() for key in keys):
        claims["keys"] = wanted
    if origin:
        claims["origin"] = origin
    try:
        _read(key.public_key, claims)
    except TicketError as error:
        raise ConfigError(str(error)) from error
    kid = public_id(key.public_key).hex()
    text = jwt.encode(claims, key.signer, algorithm="EdDSA", headers={"kid": kid})
    if len(text) > MAX_TICKET_CHARACTERS:
        raise ConfigError(
            f"the ticket has {len(text)} characters, and the limit is {MAX_TICKET_CHARACTERS}; name fewer addresses, or use filters"
        )
    return text


def read_ticket(
    text: str, *, find_key: Callable[[bytes], bytes | None], networks: Collection[str], now_s: float, max_life_s: Callable[[bytes], int],
) -> Ticket:  # fmt: skip
    """Return the ticket written in `text`, if it is valid at `now_s` (seconds since 1970).

    Args:
        find_key: returns the public key (32 bytes) of an issuer by its id (16 bytes), or None.
        networks: fingerprints in hex, one of which must be the audience.
        max_life_s: returns the longest life that a ticket of this issuer may have, in seconds.

    Raises:
        TicketError: it is not valid.
    """
    if len(text) > MAX_TICKET_CHARACTERS:
        raise TicketError(MALFORMED, f"it has over {MAX_TICKET_CHARACTERS} characters")
    try:
        header = jwt.get_unverified_header(text)
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise TicketError(MALFORMED, "it is not a JWT") from error
    kid = header.get("kid")
    if header.get("alg") != "EdDSA" or not header.keys() <= _HEADER:
        raise TicketError(MALFORMED, "its header must be alg EdDSA, typ and kid")
    if not isinstance(kid, str) or not _HEX.fullmatch(kid):
        raise TicketError(
            MALFORMED, "kid must be the id of the issuer's key, 32 hexadecimal digits"
        )
    public_key = find_key(bytes.fromhex(kid))
    if public_key is None:
        raise TicketError(UNKNOWN_ISSUER, f"no issuer here has the key {kid[:8]}")
    try:
        claims = jwt.decode(
            text, Ed25519PublicKey.from_public_bytes(public_key), algorithms=["EdDSA"],
            options={"verify_aud": False, "verify_exp": False, "verify_nbf": False, "verify_iat": False, "require": _REQUIRED},
        )  # fmt: skip
    except (jwt.InvalidSignatureError, UnsupportedAlgorithm) as error:
        raise TicketError(FORGED, f"key {kid[:8]} did not sign it") from error
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise TicketError(MALFORMED, str(error)) from error
    ticket = _read(public_key, claims)
    if ticket.network not in networks:
        raise TicketError(OTHER_NETWORK, f"it is for network {ticket.network[:8]}")
    if ticket.expires_s <= now_s:
        raise TicketError(EXPIRED, f"it expired {now_s - ticket.expires_s:.0f} s ago")
    if ticket.issued_s > now_s + CLOCK_S or claims.get("nbf", 0) > now_s + CLOCK_S:
        raise TicketError(NOT_YET, "compare the clocks of issuer and relay")
    limit_s = max_life_s(ticket.issuer)
    if ticket.expires_s - ticket.issued_s > limit_s:
        raise TicketError(TOO_LONG, f"tickets of this issuer may be valid for {limit_s} s")
    return ticket


def _read(public_key: bytes, claims: Mapping[str, Any]) -> Ticket:
    """Return the ticket of these claims. Raises TicketError if one of them has another form."""
    network, subject, id = claims["aud"], claims["sub"], claims["jti"]
    issued_s, expires_s = claims["iat"], claims["exp"]
    if not isinstance(network, str) or not _HEX.fullmatch(network):
        raise TicketError(
            MALFORMED, "aud must be the fingerprint of the network, 32 hexadecimal digits"
        )
    if not _is_text(subject, MAX_SUBJECT_CHARACTERS):
        raise TicketError(
            MALFORMED, f"sub must be 1 to {MAX_SUBJECT_CHARACTERS} printable characters"
        )
    if not _is_text(id, MAX_ID_CHARACTERS):
        raise TicketError(MALFORMED, f"jti must be 1 to {MAX_ID_CHARACTERS} printable characters")
    for name, time_s in (("iat", issued_s), ("exp", expires_s), ("nbf", claims.get("nbf", 0))):
        if not isinstance(time_s, int) or isinstance(time_s, bool) or not 0 <= time_s < 1 << 53:
            raise TicketError(MALFORMED, f"{name} must be a whole number of seconds since 1970")
    if expires_s <= issued_s:
        raise TicketError(MALFORMED, "exp must be after iat")
    keys = claims.get("keys", [])
    if not isinstance(keys, list) or len(keys) > MAX_KEYS or not all(
        isinstance(key, str) and _HEX.fullmatch(key) for key in keys
    ):  # fmt: skip
        raise TicketError(
            MALFORMED,
            f"keys must be a list of up to {MAX_KEYS} key ids of {2 * KEY_ID_BYTES} hexadecimal digits",
        )
    origin = claims.get("origin", "")
    if origin != "" and not _is_text(origin, 255):
        raise TicketError(MALFORMED, "origin must be a text of 1 to 255 characters")
    try:
        allow = Scope.parse(claims["allow"])
    except ConfigError as error:
        raise TicketError(MALFORMED, str(error)) from error
    key_ids = frozenset(map(bytes.fromhex, keys))
    return Ticket(
        public_id(public_key), network, subject, id, issued_s, expires_s, allow, key_ids, origin
    )


def _is_text(value: object, limit: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= limit and value.isprintable()
