"""The settings of an SP bridge: a TOML file with one [[socket]] table for each SP socket."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_type_hints

import msgspec

import iris
from iris import ConfigError, InvalidName
from iris.core.credit import MIN_QUEUE_BYTES

Protocol = Literal[
    "rep", "req", "respondent", "surveyor", "sub", "pub", "pull", "push", "bus", "pair"
]

MAX_SOCKETS: Final = 256
"""Entries in a file. Each has a session with the relay and some threads of nng."""
MAX_TIMEOUT_S: Final = 3600.0
_MIB: Final = 1 << 20
_SCHEMES: Final = ("tcp", "tcp4", "tcp6", "ipc", "ws", "wss", "tls+tcp", "tls+tcp4", "tls+tcp6")
_TLS: Final = ("wss", "tls+tcp", "tls+tcp4", "tls+tcp6")
MAX_IPC_BYTES: Final = 106
_MODE: Final = "write ipc_mode = 0o600, octal and without quotes"

_COMMON_SETTINGS: Final = {
    "protocol", "name", "listen", "dial", "remote", "max_message_bytes", "queue_messages", "max_peers", "ipc_mode",
    "tls_cert", "tls_key", "tls_ca", "tls_server_name",
}  # fmt: skip
_SETTINGS_BY_PROTOCOL: Final[dict[str, set[str]]] = {
    "rep": {"cluster", "timeout_s", "concurrency", "error_reply"},
    "req": {"cluster", "timeout_s", "concurrency", "queue_bytes"},
    "respondent": {"cluster", "timeout_s", "concurrency", "queue_bytes"},
    "surveyor": {"cluster", "timeout_s", "concurrency", "queue_bytes", "answers"},
    "sub": {"topic", "prefixes", "separator", "under", "queue_bytes"},
    "pub": {"topics", "separator", "under", "bare", "group", "queue_bytes", "when_full"},
    "pull": {"cluster", "timeout_s", "queue_bytes"},
    "push": {"cluster", "topics", "group", "concurrency", "queue_bytes"},
    "bus": {"cluster", "direction", "queue_bytes"},
    "pair": {"cluster", "direction", "timeout_s"},
}
"""Settings of each protocol besides the common ones. Any other setting is an error that names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketConfig:
    """One SP socket, and the cluster or topics that it stands for.

    Raises:
        ConfigError: a setting is missing, out of range or not used by this protocol. The text
            begins with its name.
    """

    protocol: Protocol
    """The bridge's side of the pattern: `rep` is for programs that have a REQ socket."""

    name: str = ""
    """Name in logs and in `iris members`. Default: protocol and address."""

    listen: str | None = None
    """nng address to listen on, such as tcp://127.0.0.1:5555 or ipc:///run/app/jobs.ipc.

    Port 0 takes a free port, which is logged.
    """

    dial: str | None = None
    """Address to dial instead, again and again until a peer accepts the connection."""

    remote: bool = False
    """Listen on more than loopback.

    SP has no authentication: whoever reaches the address acts with this bridge's keys.
    """

    cluster: str = ""
    """Cluster that gets the requests, surveys, pushes, broadcasts or tunnels, or that this bridge is a member of."""

    topics: tuple[str, ...] = ()
    """pub: topic filters whose publications are sent. push: the same in place of `cluster`; only
    payloads are sent, each to one peer.
    """

    topic: str = ""
    """sub: the topic to which every message is published whole. If empty, each message begins with its topic."""

    prefixes: tuple[str, ...] = ("",)
    """sub: prefixes that the SP socket subscribes to. The prefix "" selects everything."""

    separator: str = " "
    """sub, pub: text between the topic and the payload of an SP message."""

    under: str = ""
    """sub, pub: prefix that Iris topics have and SP topics do not: with "legacy." the SP topic "a" is
    the topic "legacy.a".
    """

    bare: bool = False
    """pub: send payloads alone, without topic and separator."""

    group: str = ""
    """pub, push: queue group of the subscriptions. Bridges of one group share the publications."""

    when_full: Literal["drop-new", "wait"] = "drop-new"
    """pub: with `wait`, nothing is passed to nng while the slowest peer is half of `queue_messages`
    behind.

    Publishers that wait for subscribers then wait for SP peers as well. A push entry with `topics`
    always waits.
    """

    direction: Literal["both", "in", "out"] = "both"
    """Direction of a bus or pair entry.

    bus: `in` forwards only from SP to the cluster, `out` only from the cluster to SP. pair: `in` (and
    `both`) opens a tunnel for each SP connection, `out` serves tunnels of the cluster.
    """

    answers: Literal["first", "all"] = "first"
    """surveyor: answer with the first response, or with the list of all responses within `timeout_s`."""

    error_reply: str | None = None
    """rep: answer a failed request with this text and the error.

    If None, send no answer, and the client's own timeout applies.
    """

    timeout_s: float = 5.0
    """Time for a request, a survey, the start of a push or the opening of a tunnel."""

    concurrency: int = 64
    """Requests, surveys or pushes in flight. More of them wait at their sender."""

    max_message_bytes: int = _MIB
    """Longest SP message that is received. nng disconnects a peer that announces a longer one."""

    queue_messages: int = 512
    """Messages that nng queues, if the protocol has a queue: for each peer where it sends to all peers."""

    queue_bytes: int = 16 * _MIB
    """Bytes queued in this process for this entry; at least `max_message_bytes`.

    What happens beyond depends on the pattern.
    """

    max_peers: int = 256
    """SP connections at a time. One more is closed."""

    ipc_mode: int = 0o600
    """Permissions of an ipc socket that the bridge listens on."""

    tls_cert: str | None = None
    """PEM file of the bridge's certificate; required to listen with TLS."""

    tls_key: str | None = None
    """PEM file of the key for that certificate."""

    tls_ca: str | None = None
    """PEM file of the authority that peers' certificates are checked with; required to dial with TLS.

    If set when listening, clients need a certificate as well.
    """

    tls_server_name: str | None = None
    """Name in the certificate of the dialled server. Default: the host of `dial`."""

    def __post_init__(self) -> None:
        if (self.listen is None) == (self.dial is None):
            raise ConfigError("listen: give one of listen and dial, not both or neither")
        self._check_url()
        for name, low, high in (
            ("timeout_s", 0.001, MAX_TIMEOUT_S),
            ("concurrency", 1, 4096),
            ("max_message_bytes", 1, 64 * _MIB),
            ("queue_messages", 1, 8192),
            ("queue_bytes", self.max_message_bytes, 1 << 40),
            ("max_peers", 1, 65_536),
        ):
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError(f"{name}: {value} is not from {low} to {high}")
        if not 0 <= self.ipc_mode <= 0o777:
            raise ConfigError(f"ipc_mode: {self.ipc_mode} is not from 0 to 0o777; {_MODE}")
        if len(self.name) > 40:
            raise ConfigError(f"name: {len(self.name)} characters are over the limit of 40")
        own = _SETTINGS_BY_PROTOCOL[self.protocol]
        defaults = {field.name: field.default for field in fields(self)}
        for name, default in defaults.items():
            if name not in own | _COMMON_SETTINGS and getattr(self, name) != default:
                raise ConfigError(f"{name}: not a setting of {self.protocol} entries; remove it")
        if self.protocol == "push" and self.topics:
            if self.cluster:
                raise ConfigError("topics: a push entry has either topics or a cluster")
            self._check_filters()
        elif "cluster" in own:
            _check_cluster(self.cluster, local=self.is_member)
        else:
            self._check_topics()
        if self.waits and self.queue_bytes < MIN_QUEUE_BYTES:
            raise ConfigError(
                f"queue_bytes: {self.queue_bytes} is under {MIN_QUEUE_BYTES}, the minimum if publishers wait for this entry"
            )
        if self.waits and self.protocol == "pub" and not self.counts_written:
            raise ConfigError(
                f"when_full: nng does not report how far a peer is behind over {self.scheme}; use tcp or ipc"
            )

    @property
    def waits(self) -> bool:
        """Whether publishers may wait for the SP peers of this entry."""
        return self.when_full == "wait" or (self.protocol == "push" and bool(self.topics))

    @property
    def address(self) -> str:
        """The address to listen on or to dial."""
        return self.listen or self.dial or ""

    @property
    def scheme(self) -> str:
        """The transport, such as tcp or ipc."""
        return self.address.partition("://")[0]

    @property
    def listen_key(self) -> str:
        """The part of the address that only one entry can listen on; "" if any number can, or if it dials."""
        scheme, _, rest = (self.listen or "").partition("://")
        if scheme == "ipc":
            return os.path.normpath(rest)
        # Over ws, nng serves several paths on one port.
        key = rest if scheme in ("ws", "wss") else rest.partition("/")[0]
        return "" if key.partition("/")[0].endswith(":0") else key

    @property
    def label(self) -> str:
        """Name of the entry in logs."""
        return self.name or f"{self.protocol} {self.address}"[:40]

    @property
    def is_member(self) -> bool:
        """Whether this bridge joins the cluster. If so, the cluster cannot be one of another site."""
        if self.protocol in ("bus", "pair"):
            return self.direction == "out" or (self.protocol == "bus" and self.direction == "both")
        return self.protocol in ("req", "surveyor", "push")

    @property
    def counts_written(self) -> bool:
        """Whether nng counts the messages written to each peer. It does not over ws and wss."""
        return self.scheme not in ("ws", "wss")

    @property
    def uses_tls(self) -> bool:
        """Whether the transport is TLS."""
        return self.scheme in _TLS

    def _check_url(self) -> None:
        field = "listen" if self.listen is not None else "dial"
        scheme, colon, rest = self.address.partition("://")
        if not self.address.isprintable():  # C would end a path at a NUL
            raise ConfigError(
                f"{field}: {self.address!r} contains characters that are not printable; remove them"
            )
        if not colon or scheme not in _SCHEMES:
            raise ConfigError(
                f"{field}: {self.address!r} has an unknown scheme; use one of {', '.join(_SCHEMES)}"
            )
        if scheme == "ipc":
            if not rest.startswith("/") or len(rest.encode()) > MAX_IPC_BYTES:
                raise ConfigError(
                    f"{field}: {rest!r} is not an absolute path of up to {MAX_IPC_BYTES} bytes"
                )
        else:
            try:
                url = urllib.parse.urlsplit(self.address)
                host, port = url.hostname or "", url.port
            except ValueError as err:
                raise ConfigError(f"{field}: {self.address!r}: {err}") from err
            if port is None or not (host or self.listen):
                raise ConfigError(
                    f"{field}: {self.address!r} lacks a host or a port; write {scheme}://HOST:PORT"
                )
            if self.listen and not self.remote and not _is_loopback(host):
                raise ConfigError(
                    f"{field}: {host or '*'} is not a loopback address, and SP has no authentication; set remote = true to allow it"
                )
        self._check_tls(field)

    def _check_tls(self, field: str) -> None:
        given = [
            name
            for name in ("tls_cert", "tls_key", "tls_ca", "tls_server_name")
            if getattr(self, name) is not None
        ]
        if not self.uses_tls:
            if given:
                raise ConfigError(
                    f"{given[0]}: {self.scheme} does not use TLS; remove the setting, or use tls+tcp or wss"
                )
            return
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_key: give tls_cert and tls_key together")
        needed = "tls_cert" if field == "listen" else "tls_ca"
        if needed not in given:
            raise ConfigError(f"{needed}: missing; it is required to {field} with TLS")

    def _check_topics(self) -> None:
        if not self.separator and not self.bare and not self.topic:
            raise ConfigError(
                "separator: empty; messages without a topic need the setting topic (sub) or bare (pub)"
            )
        if len(self.separator.encode()) > 16:
            raise ConfigError(f"separator: {self.separator!r} is longer than 16 bytes")
        if self.under and not self.under.endswith("."):
            raise ConfigError(
                f"under: {self.under!r} does not end with '.'; write {self.under + '.'!r}"
            )
        if self.under:
            _check_name("under", self.under[:-1])
        if self.topic:
            _check_name("topic", self.topic)
        if self.protocol == "sub" and not self.prefixes:
            raise ConfigError(
                "prefixes: empty, so nothing would be received; for all messages remove the setting"
            )
        if self.protocol != "pub":
            return
        if not self.topics:
            raise ConfigError("topics: missing; list the topic filters whose publications are sent")
        self._check_filters()

    def _check_filters(self) -> None:
        probe = iris.Service("bridge")
        for pattern in self.topics:
            try:
                probe.on_publish(pattern, group=self.group)
            except InvalidName as err:
                raise ConfigError(f"topics: {err}") from err
            if not pattern.startswith(self.under):
                raise ConfigError(f"topics: {pattern!r} does not begin with {self.under!r} (under)")


def load(path: Path) -> list[SocketConfig]:
    """Return the entries of a file.

    Raises:
        ConfigError: the file cannot be read or is not TOML, an entry is wrong, or the directory of
            its ipc socket is missing. The text begins with the entry and the setting.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror or err}") from err
    except ValueError as err:
        raise ConfigError(f"{path}: {err}") from err
    entries = parse(document)
    for number, entry in enumerate(entries, 1):
        directory = os.path.dirname(entry.address.partition("://")[2])
        if entry.scheme == "ipc" and entry.listen and not os.path.isdir(directory):
            raise ConfigError(
                f"socket {number}: listen: directory {directory} does not exist; create it first"
            )
    return entries


def parse(document: Mapping[str, Any]) -> list[SocketConfig]:
    """Return the entries of a parsed file. Raises as `load`, but does not check directories."""
    if unknown := sorted(set(document) - {"socket"}):
        raise ConfigError(f"{unknown[0]}: unknown; the file can hold [[socket]] entries only")
    entries = document.get("socket")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_SOCKETS:
        raise ConfigError(
            f"socket: write [[socket]], in double brackets, above each of 1 to {MAX_SOCKETS} entries"
        )
    found: list[SocketConfig] = []
    names: dict[str, int] = {}
    listen_keys: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        config = _parse_entry(number, entry)
        listen_key = config.listen_key
        if listen_key and (first := listen_keys.setdefault(listen_key, number)) != number:
            raise ConfigError(
                f"socket {number}: listen: {config.listen} is already the address of socket {first}"
            )
        if (first := names.setdefault(config.label, number)) != number:
            raise ConfigError(
                f"socket {number}: name: {config.label!r} is also the name of socket {first}; set another"
            )
        found.append(config)
    return found


_KNOWN: Final = {field.name for field in fields(SocketConfig)}
_TYPES: Final = get_type_hints(SocketConfig)


def _parse_entry(number: int, entry: object) -> SocketConfig:
    where = f"socket {number}"
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{where}: not a table; write [[socket]] and the settings on the lines below it"
        )
    if unknown := sorted(set(entry) - _KNOWN):
        near = get_close_matches(unknown[0], sorted(_KNOWN), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where}: {unknown[0]}: unknown setting{meant}")
    if "protocol" not in entry:
        raise ConfigError(
            f"{where}: protocol: missing; give one of {', '.join(_SETTINGS_BY_PROTOCOL)}"
        )
    try:
        return msgspec.convert(entry, SocketConfig)
    except msgspec.ValidationError as err:
        text, _, at = str(err).partition(" - at `$.")
        field = re.split(r"[`\[.]", at)[0] or "protocol"
        if text.startswith("Invalid enum value"):
            text = f"{entry[field]!r} is not one of {', '.join(get_args(_TYPES[field]))}"
        elif field == "ipc_mode":
            text += f"; {_MODE}"
        raise ConfigError(f"{where}: {field}: {text}") from err
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from err


def _check_cluster(name: str, *, local: bool) -> None:
    if not name:
        raise ConfigError("cluster: missing; name the cluster that this socket connects to")
    site, colon, rest = name.partition(":")
    bare = rest if not local and colon and re.fullmatch(r"[a-z][a-z0-9-]{0,31}", site) else name
    _check_name("cluster", bare)


def _check_name(field: str, name: str) -> None:
    """Check a cluster or topic name: both have the same grammar."""
    try:
        iris.Service(name)
    except InvalidName as err:
        raise ConfigError(f"{field}: {err}") from err


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
