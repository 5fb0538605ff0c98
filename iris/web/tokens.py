"""Bearer tokens, and what each of them allows.

The file of tokens is TOML with mode 0600:

    [[token]]
    name = "shop"                              # of the caller, for logs and counts
    sha256 = "9f86d081884c7d65…"               # of its token; or  token = "the token itself"
    allow.push = ["orders", "mail.*"]          # verb = names, as filters of topics
    allow.publish = ["shop.>"]

What a token does not allow by name is refused. In memory there are only hashes of the tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from iris.errors import ConfigError, InvalidName, KeyringError
from iris.keyfiles import read_secret
from iris.wire.names import check_filter, covers, did_you_mean, listed, matches, split_site

MAX_TOKENS: Final = 4096
MAX_ALLOWED: Final = 1024
"""Names in the allow-lists of one token."""
MIN_CHARACTERS: Final = 32
MAX_CHARACTERS: Final = 1024
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The characters that a token may have in an Authorization header (RFC 6750)."""
_SETTINGS: Final = ("name", "sha256", "token", "allow")


def new_token() -> str:
    """Return a random token of 256 bits."""
    return f"iris_{secrets.token_urlsafe(32)}"


def hash_token(token: str) -> str:
    """Return what a file holds of a token: its SHA-256, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


class Caller:
    """Whoever presents a token: its name, and its allow-lists of names by verb."""

    __slots__ = ("_allow", "name")

    def __init__(self, name: str, allow: Mapping[str, Sequence[str]]) -> None:
        self.name = name
        self._allow = {
            verb: tuple(split_site(pattern) if verb in _SITED else ("", pattern) for pattern in patterns)
            for verb, patterns in allow.items()
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Caller({self.name!r})"

    @property
    def verbs(self) -> list[str]:
        """The verbs that the token allows for some name."""
        return [verb for verb, patterns in self._allow.items() if patterns]

    def may(self, verb: str, name: str) -> bool:
        """Return whether the token allows `verb` for a cluster, stream or topic.

        A name of another site, such as "eu:billing", needs an entry that names the site: "eu:billing" or "eu:>".
        """
        site, bare = split_site(name) if verb in _SITED else ("", name)
        return any(
            wanted in (site, _HERE.get(site)) and matches(pattern, bare)
            for wanted, pattern in self._allow.get(verb, ())
        )

    def may_filter(self, verb: str, filter: str) -> bool:
        """Return whether the token allows `verb` for all topics that match `filter`."""
        return any(covers(pattern, filter) for _, pattern in self._allow.get(verb, ()))


_SITED: Final = frozenset({"request", "push", "broadcast", "survey", "append", "read"})
"""Verbs whose names may name a site; in a topic, ":" is a character like any other."""
_HERE: Final = {".": ""}
"""Site "." is this one, so an entry without a site allows it, too."""


class Tokens:
    """The callers of one application, by their tokens."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        """`callers`: SHA-256 of the token, in hex -> who presents it."""
        self._key = os.urandom(32)  # so that the time of a lookup says nothing about the hashes
        self._callers = {self._mark(digest): caller for digest, caller in callers.items()}

    @classmethod
    def load(cls, path: Path, verbs: Collection[str]) -> Self:
        """Return the tokens in the file `path`, which may allow `verbs`.

        Raises:
            ConfigError: the file is missing, open to other users or malformed. The text has no token.
        """
        try:
            text = read_secret(path)
        except KeyringError as error:
            raise ConfigError(str(error)) from error
        try:
            return cls.parse(text, verbs)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None  # the cause has the same text

    @classmethod
    def parse(cls, text: str, verbs: Collection[str]) -> Self:
        """Return the tokens in the text of a file. Raises ConfigError as `load`."""
        try:
            document = tomllib.loads(text)
        except ValueError as error:
            raise ConfigError(str(error)) from None  # the cause holds the whole file
        return cls(_parse(document, verbs))

    @classmethod
    def single(cls, token: str, name: str, allow: Mapping[str, Sequence[str]]) -> Self:
        """Return one token, such as one that `new_token` made at start."""
        return cls({hash_token(token): Caller(name, allow)})

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, token: str) -> Caller | None:
        """Return who presents `token`; None if it is unknown. The time it takes says nothing about known tokens."""
        if len(token) > MAX_CHARACTERS:
            return None
        return self._callers.get(self._mark(hash_token(token)))

    def _mark(self, digest: str) -> bytes:
        return hmac.digest(self._key, digest.encode(), "sha256")


def _parse(document: Mapping[str, Any], verbs: Collection[str]) -> dict[str, Caller]:
    if unknown := sorted(set(document) - {"token"}):
        raise ConfigError(f"{unknown[0]}: unknown; the file can hold [[token]] entries only")
    entries = document.get("token", [])
    if not isinstance(entries, list) or len(entries) > MAX_TOKENS:
        raise ConfigError(f"token: write [[token]], in double brackets, above each of at most {MAX_TOKENS} entries")  # fmt: skip
    callers: dict[str, Caller] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        try:
            digest, caller = _parse_entry(entry, verbs)
        except ConfigError as error:
            raise ConfigError(f"token {number}: {error}") from None  # the cause has the same text
        if caller.name in names:
            raise ConfigError(f"token {number}: name: {caller.name!r} is used twice; choose another name")  # fmt: skip
        if digest in callers:
            raise ConfigError(f"token {number}: it is the token of {callers[digest].name!r}, too; make another one")  # fmt: skip
        names.add(caller.name)
        callers[digest] = caller
    return callers


def _parse_entry(entry: object, verbs: Collection[str]) -> tuple[str, Caller]:
    if not isinstance(entry, dict):
        raise ConfigError("it is not a table; write [[token]] above it")
    for key in entry:
        if key not in _SETTINGS:
            raise ConfigError(f"{key}: unknown setting{did_you_mean(key, _SETTINGS)}")
    name, digest, token = entry.get("name"), entry.get("sha256"), entry.get("token")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError("name: give it a name of 1 to 64 letters, digits, '_', '-' and '.'")
    if (digest is None) == (token is None):
        raise ConfigError("sha256: give one of sha256 and token, not both or neither")
    if token is not None:
        if not isinstance(token, str) or not _TOKEN.fullmatch(token) or not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS:  # fmt: skip
            raise ConfigError(f"token: use {MIN_CHARACTERS} to {MAX_CHARACTERS} random letters and digits")  # fmt: skip
        digest = hash_token(token)
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigError("sha256: write the SHA-256 of the token as 64 hex digits")
    return digest, Caller(name, _parse_allow(entry.get("allow"), verbs))


def _parse_allow(allow: object, verbs: Collection[str]) -> dict[str, list[str]]:
    if not isinstance(allow, dict) or not allow:
        raise ConfigError(f'allow: say what the token is for, such as allow.{next(iter(verbs))} = ["NAME"]')  # fmt: skip
    for verb, patterns in allow.items():
        if verb not in verbs:
            hint = did_you_mean(verb, verbs) or f"; use {listed(list(verbs), 'or')}"
            raise ConfigError(f"allow.{verb}: there is no such verb{hint}")
        if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
            raise ConfigError(f'allow.{verb}: write a list of names, such as ["orders", "mail.*"]')
        for pattern in patterns:
            try:
                check_filter(split_site(pattern)[1] if verb in _SITED else pattern)
            except InvalidName as error:
                raise ConfigError(f"allow.{verb}: {error}") from error
    if sum(map(len, allow.values())) > MAX_ALLOWED:
        raise ConfigError(f"allow: {sum(map(len, allow.values()))} names are over the limit of {MAX_ALLOWED}")  # fmt: skip
    return allow
