"""Issuers of tickets for sessions over WebSocket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from iris.crypto.keys import public_id
from iris.crypto.scopes import Scope

DEFAULT_LIFE_S: Final = 3600
DEFAULT_SESSIONS: Final = 32


@dataclass(frozen=True, slots=True)
class Issuer:
    """Whose tickets a relay accepts, and what they can allow at most."""

    name: str
    public_keys: tuple[bytes, ...]
    """32 bytes each."""
    allow: Scope
    max_life_s: int = DEFAULT_LIFE_S
    """Longest life of a ticket, in seconds."""
    sessions_per_subject: int = DEFAULT_SESSIONS
    """Most sessions at a time with tickets for one subject."""


def issuers_by_key(issuers: Iterable[Issuer]) -> dict[bytes, tuple[Issuer, bytes]]:
    """Return the issuer and the public key for each key id."""
    return {public_id(key): (issuer, key) for issuer in issuers for key in issuer.public_keys}
