"""Reads the settings that hold addresses: `listen`, `gateway`, `metrics` and `origins`."""

from __future__ import annotations

import ipaddress
import urllib.parse

from iris.errors import ConfigError

WEB_SCHEMES = ("ws:", "wss:")
"""How entries of `listen` for sessions over WebSocket begin."""


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of `tls://host:port`; raises ConfigError, in particular for a listener without TLS."""
    if not text.startswith("tls:"):
        raise ConfigError(
            f"listen: {text!r} is not tls://HOST:PORT (or wss://HOST:PORT, or ws://127.0.0.1:PORT). Relays accept programs of other hosts only over TLS; "
            "programs on this host use the socket"
        )
    return tls_address("listen", text)


def parse_web_listen(text: str) -> tuple[str, str, int]:
    """Return scheme, IP address and port of `wss://address:port` or `ws://address:port`; raises ConfigError."""
    scheme = text.partition(":")[0]
    try:
        host, port = tls_address("listen", "tls" + text.removeprefix(scheme))
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except (ConfigError, ValueError) as err:
        raise ConfigError(
            f"listen: {text!r} is not {scheme}://ADDRESS:PORT with an IP address of this host"
        ) from err
    if scheme == "ws" and not address.is_loopback:
        raise ConfigError(
            f"listen: {text!r} is not on loopback, and tickets must not cross a network in clear; use wss://, or ws://127.0.0.1:PORT behind a proxy"
        )
    return scheme, str(address), port


def parse_gateway(text: str) -> tuple[str, int]:
    """Return host and port of `tls://host:port`; raises ConfigError."""
    return tls_address("gateway", text)


def tls_address(setting: str, text: str) -> tuple[str, int]:
    """Return host and port of `tls://host:port` in a setting; raises ConfigError."""
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as err:
        raise ConfigError(f"{setting}: {text!r} is not tls://HOST:PORT") from err
    beside = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "tls" or not host or port is None or beside:
        raise ConfigError(f"{setting}: {text!r} is not tls://HOST:PORT")
    return host, port


def parse_metrics(text: str) -> tuple[str, int]:
    """Return the IP address and the port of the setting `metrics`. Raises ConfigError."""
    host, colon, digits = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    port = whole(digits)
    bare = "127.0.0.1" if bare == "localhost" else bare
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        port = None
    if not colon or port is None or port > 65_535:
        raise ConfigError(
            f"metrics: {text!r} is not HOST:PORT with an IP address; write for example 127.0.0.1:9464"
        )
    return bare, port


def check_origin(origin: str) -> None:
    """Raise ConfigError unless `origin` is written as browsers send it: "null", or scheme, host and port alone."""
    try:
        parts = urllib.parse.urlsplit(origin)
        whole_origin = f"{parts.scheme}://{parts.netloc}" == origin and parts.username is None
    except ValueError:
        whole_origin = False
    plain = origin.isascii() and origin == origin.lower() and "*" not in origin
    if origin != "null" and not (whole_origin and plain and parts.scheme and parts.hostname):
        raise ConfigError(
            f"origins: {origin!r} is not an origin; write scheme, host and port as in a browser's address bar, such as https://app.example"
        )


def whole(value: object) -> int | None:
    """Return the value as a whole number; None if it is not one."""
    if isinstance(value, str):
        # a signed 64-bit number has at most 19 digits
        return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
