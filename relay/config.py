"""The settings of a relay, with their defaults and bounds.

`relay.settings` reads them from files, variables and flags.
"""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from iris.errors import ConfigError
from relay.address_settings import (
    WEB_SCHEMES,
    check_origin,
    parse_gateway,
    parse_listen,
    parse_metrics,
    parse_web_listen,
)
from relay.core.issuers import Issuer
from relay.discovery.seeds import MAX_JOINS, parse_join
from relay.net.socketfile import MAX_PATH_BYTES
from relay.rate_settings import parse_address_rates, parse_rate
from relay.site_settings import check_site_name, parse_pattern, peer_sites, site_costs

if TYPE_CHECKING:
    from iris.crypto.keys import NetworkKey

MAX_LISTEN = 16
MAX_ORIGINS = 64
MAX_PATTERNS = 1024
ENVIRONMENT_PREFIX = "IRIS_RELAY_"
"""`IRIS_RELAY_MAX_SESSIONS=100` sets `max_sessions`. `IRIS_RELAY` itself is the socket's path."""

_MIB = 1 << 20
_MIN_MESSAGE_BYTES = 64 << 10  # a bundle must fit
_MAX_MESSAGE_BYTES = 64 * _MIB
_MAX_ALIASES = 65_536
_MAX_ADDRESSES = 64
_MAX_ADVERTISED = 1 << 20  # other relays keep at most this many of one relay
_MAX_NETWORKS = 32  # an advert has room for no more
_MIN_TIMEOUT_S = 0.001
_MAX_TIMEOUT_S = 86_400.0
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LOG_FORMATS = ("json", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """All settings of a relay. Start from `lan` or `dev`, and change them with `dataclasses.replace`.

    Raises:
        ConfigError: a value is out of range; the message begins with the name of the field.
    """

    socket_path: Path
    """Path of the socket for sessions of this host: absolute, at most 106 bytes."""

    socket_group: str | None = None
    """Group whose users may also connect. None: only the relay's user and root."""

    socket_mode: int | None = None
    """Permission bits of the socket. None: 0600, or 0660 with a `socket_group`."""

    config_file: Path | None = None
    """The file that these settings were read from, if any."""

    trusted_user: str = "iris"
    """User that the relay of a whole host runs as. Clients trust relays of this user, of root and of their
    own user, by the credentials of the socket."""

    message_limit_bytes: int = _MIB
    """Largest body that is routed, 64 KiB to 64 MiB. Send larger messages through a tunnel."""

    port_queue_bytes: int = 64 * _MIB
    """Most bytes that wait to be written to one session or link, at least `message_limit_bytes`. Beyond it,
    calls are refused and casts are dropped and counted."""

    queue_bytes: int = 128 * _MIB
    """Most bytes that wait to be written to all sessions and links together, at least `message_limit_bytes`.
    Beyond it, the newest publications of the longest queue are dropped and reported."""

    tunnel_share_bytes: int = 256 * _MIB
    """Most bytes of tunnel records that wait at one session or link. Beyond it, the tunnel that holds most of
    them is broken: the ends of a tunnel throttle it, relays do not."""

    max_direct_tunnels: int = 512
    """Most tunnels between two sessions of this host that use a socket pair and so bypass the relay. Each
    costs the relay two descriptors. Further tunnels stay with the relay; with 0 all do."""

    max_sessions: int = 4096
    """Most sessions at once; further ones are refused. Bounds descriptors and receive buffers. One user (or
    one access file) may take at most three quarters of this limit and of the next two."""

    max_members: int = 262_144
    """Most members of all sessions together, each counted once per key id, up to 1,048,576; further ones are
    refused. One session may have a quarter."""

    max_subscriptions: int = 262_144
    """Most subscriptions of all sessions together, up to 1,048,576; further ones are refused. Counted as in
    `max_subscriptions_per_session`."""

    max_aliases: int = _MAX_ALIASES
    """Most aliases per direction of a session or link, up to 65,536."""

    max_pending_per_session: int = 65_536
    """Most requests and surveys of one session, or over one link, that wait for answers; further ones are
    refused. Over a link, one session may have half of them and one user three quarters, so set the same
    value at all relays."""

    max_subscriptions_per_session: int = 65_536
    """Most filters of one session, each counted as its tokens times its key ids (nodes of the topic tree)."""

    max_keys_per_session: int = 1024
    """Most key ids that one session may prove; each costs the relay one signature check."""

    max_joins_per_session: int = 4096
    """Most clusters that one session may serve. A store needs up to four for a stream."""

    session_rate: str = ""
    """What each session may send in a second: MESSAGES or MESSAGES:BYTES, where 0 means no limit. Beyond it,
    calls are refused, and casts are dropped and reported to their sender. Empty: no limit."""

    address_rate: tuple[str, ...] = ()
    """What all sessions of this relay together may send in a second to the topics or clusters that match a
    filter: FILTER=MESSAGES or FILTER=MESSAGES:BYTES. Otherwise as `session_rate`."""

    hello_timeout_s: float = 5.0
    """Seconds within which a connection must send HELLO, so that silent ones do not use up `max_sessions`."""

    frame_timeout_s: float = 30.0
    """Seconds within which a frame that has begun must end. Between frames a session may be silent."""

    port: int | None = None
    """TCP port that links are accepted on; 0 uses any free port. None: 7430, or any free port if it is in use."""

    bind: tuple[str, ...] = ("0.0.0.0", "::")
    """IP addresses of this host that links are accepted on, at most 64."""

    join: tuple[str, ...] = ()
    """Relays to link with where multicast does not reach: HOST:PORT, or dns:NAME:PORT for all addresses of a
    name. One is enough, because relays introduce their peers to each other."""

    listen: tuple[str, ...] = ()
    """Addresses at which sessions of other processes are accepted. tls://HOST:PORT: from hosts without a relay, whose
    processes present an access file (`iris key access`). wss://HOST:PORT: from browsers, over WebSocket.
    ws://127.0.0.1:PORT: the same without TLS, behind a proxy."""

    wss_cert: Path | None = None
    """Web certificate (PEM, with its chain) of the wss:// addresses in `listen`. SIGHUP reads it again."""

    wss_key: Path | None = None
    """Private key of `wss_cert` (PEM). None: it is in the same file."""

    origins: tuple[str, ...] = ()
    """Origins of the web pages that may connect over WebSocket, such as https://app.example. Programs that send no
    Origin, as browsers always do, are not restricted by it. Empty: no page may."""

    tickets: bool = True
    """Whether sessions over WebSocket must show a ticket. False is possible only if all their addresses are on
    loopback."""

    issuers: tuple[Issuer, ...] = ()
    """Who makes tickets for sessions over WebSocket, and what these can allow at most: one table [issuers.NAME] each,
    with public_keys, allow, max_life_s and sessions_per_subject."""

    revoked_tickets: Path | None = None
    """File of tickets that are not accepted any more: a line for each, its id (jti) or "subject NAME". SIGHUP reads
    it again."""

    data: Path | None = None
    """Directory of durable streams: the relay starts a store there. None: creating a stream is refused, unless
    you start a store yourself."""

    bucket: str = ""
    """Object storage of the store, for streams that outlive its disk: s3://NAME/PATH, gs://, az:// or file:///PATH.
    Needs `data`. Empty: no stream can be created with durability "bucket"."""

    bucket_key: Path | None = None
    """Key file of the stores that share the bucket (`iris key store-group`). None: group.key in `data`."""

    disk_limit: int = 0
    """Bytes of records that streams in the bucket may have on the store's disk. The oldest ones are moved to the bucket
    and read from there. 0: no limit."""

    bucket_pause_ms: int | None = None
    """Longest wait of an append for others that go into the same object of the bucket, in ms. None: 5 for a directory,
    100 for a service, which is paid for each object. 0 is for directories only."""

    metrics: str = ""
    """Address HOST:PORT at which metrics and health are served over HTTP. HOST is an IP address or localhost; port 0
    is any free one. Empty: they are not served."""

    mdns: bool = True
    """Whether multicast DNS is used to find relays on the same LAN and to be found by them."""

    drain_timeout_s: float = 10.0
    """Seconds that a stopping relay waits for what is queued and running; 0 stops at once."""

    log_level: str = "INFO"
    """Lowest level that is logged: DEBUG, INFO, WARNING or ERROR."""

    log_format: str = "json"
    """"json": one object a line, for programs; "text": sentences, for people."""

    network_keys: tuple[NetworkKey, ...] = field(default=(), repr=False)
    """Keys of the networks whose relays are admitted. Left out of `repr`, and so out of logs. The caller reads
    them from key files; settings files and environments must not hold keys."""

    site: str = ""
    """Name of the site that this relay is in: 1 to 32 of a-z, 0-9 and -. Empty: the site has no name. All relays
    of a site have the same."""

    gateway: tuple[str, ...] = ()
    """Addresses at which gateways of other sites are accepted, each tls://HOST:PORT. Makes this relay a
    gateway, as does `peer_site`."""

    site_key: Path | None = None
    """File with the key that proves to other sites that a gateway is of this site (`iris federation key`)."""

    peer_site: tuple[str, ...] = ()
    """Other sites: SITE=tls://HOST:PORT,tls://HOST:PORT#FINGERPRINT, with the address of each of their gateways
    and the fingerprint that `iris federation key` printed there. Without an address, that site must dial
    this one. Entries of the same site are combined."""

    site_cost: tuple[str, ...] = ()
    """Cost of sending requests to another site, SITE=MS: milliseconds added to the round trip. Default: 0."""

    export: tuple[str, ...] = ()
    """Clusters and topics of this site that are advertised to other sites: names and filters, with "!" before
    those that are not. Empty: all."""

    import_: tuple[str, ...] = ()
    """Clusters and topics of other sites that this site uses, written as in `export`. The setting is called
    `import`."""

    dev: bool = False
    """True for a relay on a developer's machine."""

    def __post_init__(self) -> None:
        path_bytes = len(os.fsencode(self.socket_path))
        if not self.socket_path.is_absolute() or "\0" in str(self.socket_path):
            raise ConfigError(
                f"socket_path: {str(self.socket_path)!r} is not an absolute path; write it from / on"
            )
        if path_bytes > MAX_PATH_BYTES:
            raise ConfigError(
                f"socket_path: the path has {path_bytes} bytes, and a socket's path may have {MAX_PATH_BYTES}; use a shorter one"
            )
        if self.socket_group == "":
            raise ConfigError("socket_group: is empty; name a group, or leave the setting out")
        if self.socket_mode is not None and (
            self.socket_mode & ~0o666 or self.socket_mode & 0o600 != 0o600
        ):
            raise ConfigError(
                f"socket_mode: {self.socket_mode:#o} is not from 0o600 to 0o666 without execute bits"
            )
        if not self.trusted_user:
            raise ConfigError("trusted_user: is empty; name the user that relays run as")
        self._check_range("message_limit_bytes", _MIN_MESSAGE_BYTES, _MAX_MESSAGE_BYTES)
        self._check_range("port_queue_bytes", self.message_limit_bytes, math.inf)
        self._check_range("queue_bytes", self.message_limit_bytes, math.inf)
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
        self._check_range("max_direct_tunnels", 0, math.inf)
        for name in ("max_members", "max_subscriptions"):
            self._check_range(name, 1, _MAX_ADVERTISED)
        for name in ("hello_timeout_s", "frame_timeout_s"):
            self._check_range(name, _MIN_TIMEOUT_S, _MAX_TIMEOUT_S)
        self._check_range("drain_timeout_s", 0, _MAX_TIMEOUT_S)
        if len(self.network_keys) > _MAX_NETWORKS:
            raise ConfigError(
                f"network_keys: {len(self.network_keys)} keys are over the limit of {_MAX_NETWORKS}; remove old ones"
            )
        if self.port is not None:
            self._check_range("port", 0, 65_535)
        if not 0 < len(self.bind) <= _MAX_ADDRESSES or len(set(self.bind)) < len(self.bind):
            raise ConfigError(
                f"bind: {', '.join(self.bind)!r} is not a list of 1 to {_MAX_ADDRESSES} different addresses"
            )
        for address in self.bind:
            try:
                ipaddress.ip_address(address)
            except ValueError as err:
                raise ConfigError(
                    f"bind: {address!r} is not an IP address; a host name cannot be used here"
                ) from err
        for name in (*_NOT_DEV, "port") if self.dev else ():
            if getattr(self, name) not in ((), None, ""):
                raise ConfigError(
                    f"{SETTINGS.get(name, name)}: a development relay has no peers; make keys with `iris key new`, copy network.toml to the other "
                    "hosts, and start without --dev"
                )
        if len(self.listen) > MAX_LISTEN:
            raise ConfigError(
                f"listen: {len(self.listen)} entries are over the limit of {MAX_LISTEN}"
            )
        self._check_web()
        if len(self.join) > MAX_JOINS:
            raise ConfigError(
                f"join: {len(self.join)} entries are over the limit of {MAX_JOINS}; use dns:NAME for many relays"
            )
        for join in self.join:
            parse_join(join)
        if self.bucket and self.data is None:
            raise ConfigError(
                "bucket: the store that uses a bucket needs a data directory; set data, too"
            )
        if self.bucket_key is not None and not self.bucket:
            raise ConfigError("bucket_key: this key has no use without a bucket; set bucket, too")
        if self.disk_limit and not self.bucket:
            raise ConfigError(
                "disk_limit: only streams in a bucket can have records elsewhere; set bucket, too"
            )
        self._check_range("disk_limit", 0, math.inf)
        if self.bucket_pause_ms is not None:
            if not self.bucket:
                raise ConfigError(
                    "bucket_pause_ms: only objects of a bucket are waited for; set bucket, too"
                )
            self._check_range(
                "bucket_pause_ms", 0 if self.bucket.startswith("file:") else 1, 60_000
            )
        if self.metrics:
            parse_metrics(self.metrics)
        parse_rate("session_rate", self.session_rate)
        parse_address_rates(self.address_rate)
        self._check_federation()
        for name, allowed in (("log_level", _LOG_LEVELS), ("log_format", _LOG_FORMATS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )

    @property
    def is_gateway(self) -> bool:
        """Whether this relay connects to other sites."""
        return bool(self.gateway or self.peer_site)

    @property
    def tls_listen(self) -> tuple[str, ...]:
        """The addresses in `listen` for processes with an access file."""
        return tuple(text for text in self.listen if not text.startswith(WEB_SCHEMES))

    @property
    def web_listen(self) -> tuple[str, ...]:
        """The addresses in `listen` for sessions over WebSocket."""
        return tuple(text for text in self.listen if text.startswith(WEB_SCHEMES))

    def _check_web(self) -> None:
        for text in self.tls_listen:
            parse_listen(text)
            if self.dev:
                raise ConfigError(
                    "listen: a development relay accepts no programs of other hosts, only ws://127.0.0.1:PORT"
                )
        web = [parse_web_listen(text) for text in self.web_listen]
        for scheme, host, _ in web:
            if scheme == "wss" and self.wss_cert is None:
                raise ConfigError(
                    "listen: wss:// needs a web certificate; set wss_cert and wss_key, or use ws:// on loopback behind a proxy"
                )
            if self.tickets and not self.issuers:
                raise ConfigError(
                    "issuers: sessions over WebSocket must show tickets, and no issuer of tickets is set; add [issuers.NAME] to the settings file "
                    "(`iris key ticket-issuer` prints it), or set tickets = false on loopback"
                )
            if not ipaddress.ip_address(host).is_loopback:
                raise ConfigError(
                    f"tickets: only listeners on loopback can do without tickets, and {host} is not; remove tickets = false"
                )
        if self.wss_key is not None and self.wss_cert is None:
            raise ConfigError(
                "wss_key: this key has no use without a certificate; set wss_cert, too"
            )
        if len(self.origins) > MAX_ORIGINS:
            raise ConfigError(
                f"origins: {len(self.origins)} entries are over the limit of {MAX_ORIGINS}"
            )
        for origin in self.origins:
            check_origin(origin)

    def _check_federation(self) -> None:
        if self.site:
            check_site_name("site", self.site)
        if len(self.gateway) > MAX_LISTEN:
            raise ConfigError(
                f"gateway: {len(self.gateway)} entries are over the limit of {MAX_LISTEN}"
            )
        for text in self.gateway:
            parse_gateway(text)
        peers = peer_sites(self.peer_site)
        costs = site_costs(self.site_cost)
        for name in ("export", "import"):
            patterns: tuple[str, ...] = getattr(self, FIELDS.get(name, name))
            if len(patterns) > MAX_PATTERNS:
                raise ConfigError(
                    f"{name}: {len(patterns)} patterns are over the limit of {MAX_PATTERNS}; use filters (orders.>)"
                )
            for text in patterns:
                parse_pattern(name, text)
            if patterns and not self.is_gateway:
                raise ConfigError(
                    f"{name}: works only at gateways, and this relay is not one; add gateway or peer_site, or remove {name}"
                )
        if not self.is_gateway:
            if costs:
                raise ConfigError(
                    f"site_cost: {next(iter(costs))!r} is not listed in peer_site; add it with --peer-site {next(iter(costs))}=…"
                )
            return
        named = "gateway" if self.gateway else "peer_site"
        if not self.site:
            raise ConfigError(
                f"site: a relay with {named} needs the name of its site; add --site NAME"
            )
        if self.site_key is None:
            raise ConfigError(
                f"site_key: a relay with {named} needs the key of its site; make one with `iris federation key FILE` and add --site-key FILE"
            )
        for site, peer in peers.items():
            if site == self.site:
                raise ConfigError(
                    f"peer_site: {site} is this relay's own site; remove the entry, because relays of one site link by themselves"
                )
            if not peer.addresses and not self.gateway:
                raise ConfigError(
                    f"peer_site: {site} has no address, and this relay does not accept gateways; add an address of {site}, or --gateway so that {site} "
                    "can dial this one"
                )
        for site in costs:
            if site not in peers:
                raise ConfigError(
                    f"site_cost: {site!r} is not listed in peer_site; add it with --peer-site {site}=…"
                )

    def _check_range(self, name: str, low: float, high: float) -> None:
        value: float = getattr(self, name)
        if not low <= value <= high:  # written so that NaN fails
            bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise ConfigError(f"{name}: {value} is not {bounds}")


def lan(socket_path: Path) -> RelayConfig:
    """Return the default settings: a relay that links with others of its network."""
    return RelayConfig(socket_path=socket_path)


def dev(socket_path: Path) -> RelayConfig:
    """Return the settings of a relay on a developer's machine.

    It stops within a second, because a developer waits for it.
    """
    return replace(lan(socket_path), dev=True, drain_timeout_s=1.0, tickets=False)


# Settings that a development relay refuses.
_NOT_DEV = (
    "join",
    "site",
    "gateway",
    "site_key",
    "peer_site",
    "site_cost",
    "export",
    "import_",
)
# Settings whose name is a Python keyword -> fields, and the reverse.
FIELDS = {"import": "import_"}
SETTINGS = {name: setting for setting, name in FIELDS.items()}
