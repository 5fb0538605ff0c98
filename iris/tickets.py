"""Makes tickets for sessions from browsers; for the login handler of an application.

    issuer = iris.tickets.Issuer.load("issuer.toml")
    text = issuer.issue("alice", allow={"subscribe": ["users.alice"]}, life_s=900, origin="https://app.example")

A relay accepts a ticket only while its settings list the issuer's public key, and only for what both allow. `iris key
ticket-issuer` makes the file. Needs the extra [wss].
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from iris import keyfiles
from iris.crypto.keys import KEY_ID_BYTES, SECRET_BYTES, ClusterKey, IssuerKey, dump_public_key
from iris.errors import ConfigError, KeyringError
from iris.extras import install_line


class Issuer:
    """The key of an issuer of tickets, and the network that its tickets are for.

    Safe to use from several threads.
    """

    def __init__(self, key: IssuerKey, network: bytes) -> None:
        """`network` is the fingerprint of the network, 16 bytes.

        Raises:
            ConfigError: the extra [wss] is not installed.
        """
        if importlib.util.find_spec("jwt") is None:
            raise ConfigError(f"tickets need PyJWT: {install_line('wss')}")
        self._key: Final = key
        self.network: Final = network

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the issuer in a file that `create` or `iris key ticket-issuer` wrote.

        Raises:
            KeyringError: the file is missing, malformed, open to other users or owned by another user.
            ConfigError: the extra [wss] is not installed.
        """
        key, network = keyfiles.load(Path(path), _parse)
        return cls(key, network)

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], network: bytes, entropy: Callable[[int], bytes] = os.urandom
    ) -> Self:  # fmt: skip
        """Write the key of a new issuer into the new file `path`, mode 0600, and return the issuer.

        Raises:
            KeyringError: the file exists and was not changed, or the write failed and no file is left.
            ConfigError: the extra [wss] is not installed.
        """
        made = cls(IssuerKey(entropy(SECRET_BYTES)), network)
        head = "# Key of an issuer of Iris tickets: admits browsers, opens no payload. Keep secret."
        text = f'{head}\n\n[issuer]\nkey = "{made._key.reveal()}"\nnetwork = "{network.hex()}"\n'
        keyfiles.create(Path(path), text)
        return made

    @property
    def public_key(self) -> str:
        """The public key as it stands in the settings of relays: 43 characters of base64url."""
        return dump_public_key(self._key.public_key)

    def issue(
        self, subject: str, *, allow: Mapping[str, Sequence[str]], life_s: int, keys: Iterable[ClusterKey | bytes] = (),
        origin: str = "", id: str | None = None, now_s: float | None = None,
    ) -> str:  # fmt: skip
        """Return a ticket for `subject`, which a page shows to a relay.

        Args:
            subject: whom it is for, 1 to 128 characters; shown in logs, and by it tickets are revoked.
            allow: verb -> names and filters: request, push, survey, broadcast, tunnel, members, serve, publish,
                subscribe, read, consume, append.
            life_s: how long it is valid, in seconds. Keep it short: renew it rather than revoke it.
            keys: the keys, or their ids, that the session must prove first; it can use no others. Empty: any.
            origin: the one origin of the pages that may use it. Empty: any.
            id: its name, for revocation, 1 to 64 characters. None: a random one.
            now_s: seconds since 1970. None: the clock of this host.

        Raises:
            ConfigError: a relay would refuse this ticket.
        """
        from iris.crypto.tickets import sign_ticket

        issued_s = int(time.time() if now_s is None else now_s)
        key_ids = [key.key_id if isinstance(key, ClusterKey) else key for key in keys]
        return sign_ticket(
            self._key, network=self.network, subject=subject, id=secrets.token_urlsafe(12) if id is None else id,
            issued_s=issued_s, life_s=life_s, allow=allow, keys=key_ids, origin=origin,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Issuer {self._key!r} of network {self.network.hex()[:8]}…>"


def parse_network(text: str) -> bytes:
    """Return the fingerprint of a network from its 32 hexadecimal digits, which `iris key show` prints.

    Raises:
        ConfigError: the text has another form.
    """
    try:
        network = bytes.fromhex(text)
    except ValueError:
        network = b""
    if len(network) != KEY_ID_BYTES:
        raise ConfigError(
            f"{text[:80]!r} is not the fingerprint of a network; `iris key show` prints its 32 hexadecimal digits"
        )
    return network


def _parse(text: str) -> tuple[IssuerKey, bytes]:
    try:
        table = tomllib.loads(text)["issuer"]
        key, network = IssuerKey.parse(table["key"]), parse_network(table["network"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        # Not chained: the cause of a TOML error holds the whole file.
        why = (
            str(error)
            if isinstance(error, ConfigError)
            else "it must have a table [issuer] with key and network"
        )
        raise KeyringError(f"not the file of an issuer of tickets: {why}") from None
    return key, network
