"""Reads the issuers of tickets from the settings, and the list of revoked tickets. `relay.core.tickets` applies them.

[issuers.login]
public_keys = ["43 characters of base64url"]      # `iris key ticket-issuer` prints it; two while a key is replaced
allow.subscribe = ["users.*", "news.>"]           # the most that its tickets can allow
max_life_s = 3600
sessions_per_subject = 32
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from iris.crypto.keys import parse_public_key
from iris.crypto.scopes import Scope
from iris.errors import ConfigError, KeyringError
from relay.core.issuers import DEFAULT_LIFE_S, DEFAULT_SESSIONS, Issuer

MAX_ISSUERS: Final = 64
MAX_PUBLIC_KEYS: Final = 8
MAX_LIFE_S: Final = 31_536_000
MAX_REVOKED_BYTES: Final = 16 << 20
"""Longest file of revoked tickets: about 400,000 of them."""
SUBJECT: Final = "subject "
"""How a line that revokes all tickets of a subject begins."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIELDS: Final = ("public_keys", "allow", "max_life_s", "sessions_per_subject")


def parse_issuers(value: object) -> tuple[Issuer, ...] | None:
    """Return the issuers in a table of tables, or in its JSON text; None if it is neither. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            return None
    if value in ([], ()):
        return ()
    if not isinstance(value, dict):
        return None
    if len(value) > MAX_ISSUERS:
        raise ConfigError(f"{len(value)} issuers are over the limit of {MAX_ISSUERS}")
    issuers = tuple(_issuer(name, table) for name, table in value.items())
    owners: dict[bytes, str] = {}
    for issuer in issuers:
        for key in issuer.public_keys:
            owner = owners.setdefault(key, issuer.name)
            if owner != issuer.name:
                raise ConfigError(
                    f"{owner} and {issuer.name} have the same key; each issuer needs its own"
                )
    return issuers


def _issuer(name: str, table: object) -> Issuer:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is not the name of an issuer; use letters, digits, - and _"
        )
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: write a table, [issuers.{name}]")
    if unknown := table.keys() - set(_FIELDS):
        raise ConfigError(
            f"{name}: {sorted(unknown)[0]!r} is not a setting of an issuer; use {', '.join(_FIELDS)}"
        )
    texts = table.get("public_keys")
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_PUBLIC_KEYS:
        raise ConfigError(
            f"{name}: public_keys must be a list of 1 to {MAX_PUBLIC_KEYS} keys; `iris key ticket-issuer` prints one"
        )
    try:
        keys = tuple(map(parse_public_key, texts))
    except KeyringError as error:
        raise ConfigError(f"{name}: public_keys: {error}") from error
    try:
        allow = Scope.parse(table.get("allow"))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    life_s = _whole(name, table, "max_life_s", DEFAULT_LIFE_S, MAX_LIFE_S)
    sessions = _whole(name, table, "sessions_per_subject", DEFAULT_SESSIONS, 1 << 20)
    return Issuer(name, keys, allow, life_s, sessions)


def _whole(issuer: str, table: dict[str, Any], name: str, default: int, most: int) -> int:
    value = table.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{issuer}: {name} must be a whole number from 1 to {most}")
    return value


def load_revoked(path: Path | None) -> frozenset[str]:
    """Return the lines of a list of revoked tickets: ids, and `subject NAME` for all of a subject; None: none.

    Raises ConfigError: the file cannot be read, or is too long.
    """
    if path is None:
        return frozenset()
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_REVOKED_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"revoked_tickets: cannot read {path}: {why}") from error
    if len(text) > MAX_REVOKED_BYTES:
        raise ConfigError(
            f"revoked_tickets: {path} has over {MAX_REVOKED_BYTES} characters; remove tickets that have expired"
        )
    lines = (line.strip() for line in text.splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))
