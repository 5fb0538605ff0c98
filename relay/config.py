"""What a relay can be told, and where it is told: file, then environment, then flags; the later wins."""

from __future__ import annotations

import ipaddress
import math
import os
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris import paths
from iris.errors import ConfigError
from relay.discovery.seeds import MAX_JOINS, parse_join
from relay.socketfile import MAX_PATH_BYTES

if TYPE_CHECKING:
    from iris.crypto.keys import NetworkKey

MAX_LISTEN = 16
ENVIRONMENT_PREFIX = "IRIS_RELAY_"
"""`IRIS_RELAY_MAX_SESSIONS=100` sets `max_sessions`. `IRIS_RELAY` itself is the socket's path."""

_MIB = 1 << 20
_MIN_MESSAGE_BYTES = 64 << 10  # a bundle has to fit
_MAX_MESSAGE_BYTES = 64 * _MIB
_MAX_ALIASES = 65_536
_MAX_ADDRESSES = 64
_MAX_NETWORKS = 32  # as many as an advert has room for
_MIN_TIMEOUT_S = 0.001
_MAX_TIMEOUT_S = 86_400.0
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Everything a relay can be told. Start from `lan` or `dev`, and change it with `replace`.

    Raises:
        ConfigError: a value is out of its range; the text begins with the name of the field.
    """

    socket_path: Path
    """Where the sessions of this host connect: an absolute path of at most 106 bytes."""

    socket_group: str | None = None
    """Group whose users may connect as well. None: the relay's own user and root only."""

    socket_mode: int | None = None
    """Permission bits of the socket. None: 0600, or 0660 with a `socket_group`."""

    config_file: Path | None = None
    """The file that these settings were read from, if any."""

    relay_user: str = "iris"
    """User that the relay of a whole host runs as. By the socket's credentials clients trust relays of
    this user, of root and of their own user."""

    message_limit_bytes: int = _MIB
    """Largest body that is routed, 64 KiB to 64 MiB. Larger messages go through a tunnel."""

    port_queue_bytes: int = 64 * _MIB
    """Most that waits to be written to one session or link, at least `message_limit_bytes`. Above it
    each frame meets the answer of its own pattern: refused, or dropped and counted."""

    tunnel_share_bytes: int = 256 * _MIB
    """Most tunnel records that wait at one port. Above it the tunnel that holds most of them is broken:
    relays do not throttle tunnels, their ends do."""

    max_sessions: int = 4096
    """Sessions at once; the next is turned away. Bounds descriptors and receive buffers."""

    max_aliases: int = _MAX_ALIASES
    """Aliases per direction of a session or link, up to 65,536."""

    max_pending_per_session: int = 65_536
    """Requests and surveys of one session that wait for answers; the next is refused."""

    max_subscriptions_per_session: int = 65_536
    """Filters of one session, each counted as its tokens times its key ids: nodes of the topic tree."""

    max_keys_per_session: int = 1024
    """Key ids that one session may prove; each costs the relay one check of a signature."""

    max_joins_per_session: int = 4096
    """Clusters that one session may serve. A store takes up to four for a stream."""

    hello_timeout_s: float = 5.0
    """Seconds in which a connection has to say HELLO, so that silent ones hold no place."""

    frame_timeout_s: float = 30.0
    """Seconds in which a frame that has begun has to end. Between frames a session may be silent."""

    port: int | None = None
    """TCP port that links are accepted on; 0 takes any free one. None: 7430, or any if that is taken."""

    bind: tuple[str, ...] = ("0.0.0.0", "::")
    """IP addresses of this host that links are accepted on, at most 64."""

    join: tuple[str, ...] = ()
    """Relays to link with, where multicast does not reach: HOST:PORT, or dns:NAME:PORT for all addresses of a
    name. One is enough: relays introduce their peers."""

    listen: tuple[str, ...] = ()
    """Where sessions of processes on hosts without a relay are accepted, each tls://HOST:PORT. They show what `iris key access` made."""

    data: Path | None = None
    """Directory of durable streams: the relay starts a store there. None: creating a stream is refused, unless a store is
    started otherwise."""

    mdns: bool = True
    """Whether relays on the same LAN are found, and find this one, by multicast DNS."""

    drain_timeout_s: float = 10.0
    """Seconds that a stopping relay gives to what is queued and running; 0 stops at once."""

    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    network_keys: tuple[NetworkKey, ...] = field(default=(), repr=False)
    """Keys of the networks whose relays are admitted. Kept out of `repr`, so out of logs. Read from key
    files by the caller, never from settings: an environment or a settings file is no place for keys."""

    dev: bool = False
    """True for a relay on a developer's machine."""

    def __post_init__(self) -> None:
        path_bytes = len(os.fsencode(self.socket_path))
        if not self.socket_path.is_absolute() or "\0" in str(self.socket_path):
            raise ConfigError(f"socket_path: {str(self.socket_path)!r} is not an absolute path")
        if path_bytes > MAX_PATH_BYTES:
            raise ConfigError(
                f"socket_path: {path_bytes} bytes, over the {MAX_PATH_BYTES} of a socket"
            )
        if self.socket_group == "":
            raise ConfigError("socket_group: is empty")
        if self.socket_mode is not None and (
            self.socket_mode & ~0o666 or self.socket_mode & 0o600 != 0o600
        ):
            raise ConfigError(f"socket_mode: {self.socket_mode:#o} is not within 0o600 to 0o666")
        if not self.relay_user:
            raise ConfigError("relay_user: is empty")
        self._check_range("message_limit_bytes", _MIN_MESSAGE_BYTES, _MAX_MESSAGE_BYTES)
        self._check_range("port_queue_bytes", self.message_limit_bytes, math.inf)
        self._check_range("max_aliases", 1, _MAX_ALIASES)
        for name in (
            "tunnel_share_bytes",
            "max_sessions",
            "max_pending_per_session",
            "max_subscriptions_per_session",
            "max_keys_per_session",
            "max_joins_per_session",
        ):
            self._check_range(name, 1, math.inf)
        for name in ("hello_timeout_s", "frame_timeout_s"):
            self._check_range(name, _MIN_TIMEOUT_S, _MAX_TIMEOUT_S)
        self._check_range("drain_timeout_s", 0, _MAX_TIMEOUT_S)
        if len(self.network_keys) > _MAX_NETWORKS:
            raise ConfigError(f"network_keys: {len(self.network_keys)} keys, over {_MAX_NETWORKS}")
        if self.port is not None:
            self._check_range("port", 0, 65_535)
        if not 0 < len(self.bind) <= _MAX_ADDRESSES or len(set(self.bind)) < len(self.bind):
            raise ConfigError(f"bind: {', '.join(self.bind)!r} is not 1 to 64 different addresses")
        for address in self.bind:
            try:
                ipaddress.ip_address(address)
            except ValueError as err:
                raise ConfigError(f"bind: {address!r} is not an IP address") from err
        for name in ("join", "listen", "port") if self.dev else ():
            if getattr(self, name) not in ((), None):
                raise ConfigError(
                    f"{name}: a development relay stays alone; make keys with `iris key new`, copy network.toml to the other hosts, and "
                    "leave out --dev"
                )
        if len(self.listen) > MAX_LISTEN:
            raise ConfigError(f"listen: {len(self.listen)} entries, over {MAX_LISTEN}")
        for text in self.listen:
            parse_listen(text)
        if len(self.join) > MAX_JOINS:
            raise ConfigError(f"join: {len(self.join)} entries, over {MAX_JOINS}")
        for join in self.join:
            parse_join(join)
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} is none of {', '.join(_LOG_LEVELS)}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value: float = getattr(self, name)
        if not low <= value <= high:  # written so that NaN fails
            bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise ConfigError(f"{name}: {value} is not {bounds}")


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of `tls://host:port`; raises ConfigError, for a listener without TLS above all."""
    parts = urllib.parse.urlsplit(text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tls":
        raise ConfigError(
            f"listen: {text!r} is not tls://HOST:PORT; there is no listener without TLS: programs of this host use the socket"
        )
    if not host or port is None or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(f"listen: {text!r} is not tls://HOST:PORT")
    return host, port


def lan(socket_path: Path) -> RelayConfig:
    """Return the settings of a relay among others on one network: the defaults."""
    return RelayConfig(socket_path=socket_path)


def dev(socket_path: Path) -> RelayConfig:
    """Return the settings of a relay on a developer's machine.

    It stops within a second, because somebody waits at the keyboard.
    """
    return replace(lan(socket_path), dev=True, drain_timeout_s=1.0)


def load_config(
    argv_overrides: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None,
    *,
    uid: int | None = None,
) -> RelayConfig:
    """Return the settings of `file`, overridden by the environment, overridden by flags.

    `file` is TOML whose keys are the fields of `RelayConfig`; None is the file that
    IRIS_RELAY_CONFIG_FILE names, or none. The environment has IRIS_RELAY_<FIELD>. `argv_overrides`
    maps fields to values or texts; None is a flag that was not given. `dev` chooses the preset under
    all of them. The socket's default is `iris.paths.default_socket` for `uid` (None: this process's).

    Raises:
        ConfigError: the file cannot be read, a setting is unknown, or a value has the wrong type or
            range. The text names file or variable, and the setting.
    """
    if file is None and (named := environ.get(_FILE_VARIABLE)):
        file = Path(named)
    values: dict[str, Any] = {}
    if file is not None:
        for name, value in _read(file).items():
            values[name] = _parse(name, value, f"{file}: {name}")
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable != _FILE_VARIABLE:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[name] = _parse(name, environ[variable], variable)
    for name, value in argv_overrides.items():
        if value is not None:
            given = name in _GIVEN_ONLY
            values[name] = value if given else _parse(name, value, name)
    values["config_file"] = file
    default_path = paths.default_socket(environ, os.geteuid() if uid is None else uid)
    socket_path = values.pop("socket_path", default_path)
    preset = dev if values.get("dev") else lan
    return replace(preset(socket_path), **values)


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _parse(name: str, value: object, where: str) -> object:
    """Return `value` as the type of field `name`; `where` is what an error names."""
    parser = _PARSERS.get(name)
    if parser is None:
        raise ConfigError(f"{where}: is not a setting")
    parsed = parser(value)
    if parsed is None:
        raise ConfigError(f"{where}: {value!r} is not {_WANTED[parser]}")
    return parsed


# Parsers return None for a value that is not of their type.


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _path(value: object) -> Path | None:
    return Path(value) if isinstance(value, str | Path) and str(value) else None


def _whole(value: object) -> int | None:
    if isinstance(value, str):
        # 19 digits are what a signed 64-bit number can have
        return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _port(value: object) -> int | None:
    return _whole(value)


def _texts(value: object) -> tuple[str, ...] | None:
    """A list of texts; in an environment, one text with commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    return None


def _bits(value: object) -> int | None:
    """Texts are octal, as for chmod; TOML and Python write 0o660 themselves."""
    if isinstance(value, str):
        digits = value.removeprefix("0o")
        return int(digits, 8) if digits and not set(digits) - set("01234567") else None
    return _whole(value)


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _truth(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"1": True, "true": True, "0": False, "false": False}.get(str(value).lower())


_WANTED: dict[Callable[[object], object], str] = {
    _text: "a text",
    _path: "a path",
    _whole: "a whole number",
    _bits: "octal permission bits",
    _port: "a whole number",
    _texts: "a list of texts",
    _seconds: "a number of seconds",
    _truth: "true or false",
}
_BY_ANNOTATION: dict[object, Callable[[object], object]] = {
    "Path": _path,
    "Path | None": _path,
    "str": _text,
    "str | None": _text,
    "int": _whole,
    "int | None": _port,
    "tuple[str, ...]": _texts,
    "float": _seconds,
    "bool": _truth,
}
# Not settings: a flag's code may give these, a file or an environment may not.
_GIVEN_ONLY = ("network_keys",)
_FILE_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG_FILE"
_PARSERS = {
    found.name: _BY_ANNOTATION[found.type]
    for found in fields(RelayConfig)
    if found.name not in (*_GIVEN_ONLY, "config_file")
}
_PARSERS["socket_mode"] = _bits  # no number of the usual kind
