"""The relay as a process: its start, its stop and its signals.

    start   bind socket -> router -> sessions -> links -> other sites -> READY=1 -> discovery
    stop    STOPPING=1 -> end discovery -> drain -> close -> release

SIGTERM and SIGINT stop it. SIGHUP makes it read its settings and network keys again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

from iris import keyfiles
from iris.crypto.keys import NetworkKey
from iris.errors import ConfigError, IrisError
from iris.memory import collect_seldom, keep_freed_memory, tidy
from iris.program import host_name
from iris.signals import on_signal
from iris.wire.link_frames import MAX_ADDRESSES
from relay import notify, watchdog
from relay.config import RelayConfig
from relay.core.limits import Limits
from relay.core.policy import Policy
from relay.core.router import Router
from relay.discovery import DEFAULT_PORT, Discovery
from relay.discovery.adverts import announced
from relay.discovery.interfaces import scan
from relay.discovery.seeds import SeedDiscovery
from relay.logs import configure
from relay.membercount import MemberCount
from relay.metrics.supervisor import MetricsSupervisor
from relay.net import socketfile
from relay.net.addresses import show
from relay.net.gateways import GatewayHub
from relay.net.hub import Hub
from relay.net.links import LinkHub
from relay.net.ports import Driver
from relay.net.remote import RemoteListener
from relay.net.sessions import SessionHub
from relay.net.tls import counting_garbled_names
from relay.net.web import WebListener
from relay.process import loop_factory, raise_descriptor_limit, stop_on_signals
from relay.rate_settings import parse_address_rates, parse_rate
from relay.settings import load_config
from relay.startup import StartupGate
from relay.stopping import Stopping
from relay.supervisor import StoreSupervisor, check_data

if TYPE_CHECKING:
    from relay.discovery.zeroconf import MulticastDiscovery

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""A relay that looks for peers refuses calls with NoMembers only after this."""
NOTHING_FOUND_S = 3.0
LOOK_AGAIN_S = 10.0
"""Interval at which this host's addresses are read."""
JOIN_HINT = "iris relay --join HOST:PORT"
LIVE = (
    "drain_timeout_s", "frame_timeout_s", "hello_timeout_s", "issuers", "join", "log_format", "log_level", "origins",
    "revoked_tickets",
)  # fmt: skip
"""Settings that SIGHUP applies to a running relay; the others need a restart."""
_WILDCARDS = ("0.0.0.0", "::")
_MAX_SIGHTED = 1024
_NOT_SETTINGS: Final = ("config_file", "network_keys")


def wall_us() -> int:
    """Return the wall clock, in µs since 1970."""
    return time.time_ns() // 1000


def make_router(
    config: RelayConfig,
    entropy: Callable[[int], bytes] = os.urandom,
    wall: Callable[[], int] = wall_us,
) -> Router:
    """Return the router of a relay with a fresh random id."""
    limits = Limits(
        aliases=config.max_aliases,
        joins=config.max_joins_per_session,
        keys=config.max_keys_per_session,
        pending=config.max_pending_per_session,
        subscriptions=config.max_subscriptions_per_session,
        all_members=config.max_members,
        all_subscriptions=config.max_subscriptions,
        direct=config.max_direct_tunnels,
        session_rate=parse_rate("session_rate", config.session_rate),
        address_rates=parse_address_rates(config.address_rate),
    )
    return Router(
        entropy(16),
        entropy=entropy,
        message_limit=config.message_limit_bytes,
        limits=limits,
        site=config.site,
        policy=Policy(config.export, config.import_),
        label=host_name(),
        wall=wall,
    )


class Relay:
    """One relay. `start` binds and serves, `stop` drains and closes; both are awaited in one event loop.

    It has links if it has network keys and is not a development relay, and connections to other sites if it is a
    gateway.
    """

    def __init__(self, config: RelayConfig, *, wall: Callable[[], int] = wall_us) -> None:
        """`wall` returns the wall clock that other relays are told, in µs since 1970."""
        self.config = config
        self.router = make_router(config, wall=wall)
        self.driver = Driver(self.router, config.queue_bytes)
        self.hub = SessionHub(self.driver, config)
        self.links: LinkHub | None = None
        if config.network_keys and not config.dev:
            self.links = LinkHub(self.driver, config)
        self.remote: RemoteListener | None = None
        if self.links is not None and config.tls_listen:
            self.remote = RemoteListener(self.hub, self.links.credentials)
        self._networks = frozenset(key.fingerprint.hex() for key in config.network_keys)
        self.web: WebListener | None = None
        if config.web_listen:
            self.web = WebListener(self.hub, config)
            self.web.check_tickets(lambda: self._networks)
        self.gateways: GatewayHub | None = None
        if config.is_gateway:
            if self.links is None:
                named = "gateway" if config.gateway else "peer_site"
                raise ConfigError(
                    f"{named}: a gateway needs the network keys of its site's relays; copy network.toml to this host"
                )
            self.gateways = GatewayHub(self.driver, config)
        self._hubs: list[Hub] = [hub for hub in (self.links, self.gateways) if hub is not None]
        self._discoveries: dict[str, Discovery] = {}
        self._multicast: MulticastDiscovery | None = None
        self._sighted: set[object] = set()
        self._store: StoreSupervisor | None = None
        if config.data is not None:
            self._store = store = StoreSupervisor(
                config.data.absolute(), config.socket_path, config.log_level, config.log_format, self._store_cannot,
                bucket=config.bucket, bucket_key=config.bucket_key, disk_limit=config.disk_limit,
                bucket_pause_ms=config.bucket_pause_ms, figures=self._figures if config.metrics else None,
            )  # fmt: skip
            self.hub.store_pid = lambda: store.pid
        self.metrics: MetricsSupervisor | None = None
        self._socket: socketfile.SocketFile | None = None
        self._member_count = MemberCount(config.socket_path, self.router)
        self._startup_gate = StartupGate(
            self.hub, self.router, self._store, config.socket_path, self._opened
        )
        for hub in self._hubs:
            hub.changed = self._startup_gate.links_changed
        self._tasks: list[asyncio.Task[None]] = []
        self._found: asyncio.TimerHandle | None = None
        self._started_s = time.monotonic()
        self.router.status_extra = self._status

    async def start(self) -> None:
        """Accept sessions and links. Raises ConfigError or AlreadyRunning, and then leaves nothing bound."""
        if self.config.data is not None:
            check_data(self.config.data.absolute())
        self._socket = socketfile.bind(
            self.config.socket_path, mode=self.config.socket_mode, group=self.config.socket_group
        )
        try:
            if self.links is not None:
                self.links.listen()
            if self.gateways is not None:
                self.gateways.listen()
            if self.remote is not None:
                self.remote.listen(self.config.tls_listen)
            if self.web is not None:
                self.web.listen(self.config.web_listen)
            if self.config.metrics:
                self.metrics = MetricsSupervisor(self.config)
            self._startup_gate.start(linked=self.links is not None)
        except BaseException:
            for hub in self._hubs:
                hub.stop_listening()
            self._socket.listener.close()
            self._socket.release()
            self._socket = None
            for other in self._outside:
                other.stop_listening()
            if self.metrics is not None:
                self.metrics.close()
            raise
        self.hub.listen(self._socket.listener)
        self._task(self.hub.sweep(), "iris-sweep")
        if self._store is not None:
            self.router.stores.starts_one(time.monotonic_ns() // 1000)
            self._task(self._store.run(), "iris-store")
        if self.metrics is not None:
            self._task(self.metrics.run(), "iris-metrics")
        if self.links is not None:
            if self.config.port is None and self.links.port != DEFAULT_PORT:
                # Relays that join this host at the usual port would reach another process.
                moved = {"port": self.links.port, "taken": DEFAULT_PORT}
                log.warning("links.another_port", extra={"fields": moved})
            self._discover(self.links)
        if self.gateways is not None:
            self.gateways.dial()
        fields = {
            "relay": self.router.relay_id.hex(),
            "socket": str(self.config.socket_path),
            "pid": os.getpid(),
        }
        log.info("relay.started", extra={"fields": fields})
        self._member_count.start()  # in time: sessions are read in later turns of the loop

    @property
    def _outside(self) -> list[RemoteListener | WebListener]:
        """The listeners for sessions that do not come by the socket of this host."""
        return [listener for listener in (self.remote, self.web) if listener is not None]

    def _opened(self) -> None:
        """Accept remote sessions, too: sessions are read from now on."""
        for listener in self._outside:
            listener.accept()
        self._member_count.sessions_admitted()

    async def stop(self, *, drain_s: float | None = None) -> None:
        """Accept no new session or link, let what runs finish within `drain_s`, close.

        Idempotent; if cancelled, it closes at once.
        """
        bound_s = self.config.drain_timeout_s if drain_s is None else drain_s
        if self._store is not None:
            self._store.stop_restarting()
        if self.metrics is not None:
            self.metrics.stop_restarting()
        self._member_count.freeze()
        unread = self._startup_gate.unread
        self._startup_gate.freeze()
        try:
            self.hub.stop_listening()
            if self._socket is not None:
                self._socket.listener.close()
            for listener in self._outside:
                listener.stop_listening()
            for hub in self._hubs:
                hub.stop_listening()
            for hub in self._hubs:
                await hub.stop_dialling()
            await self._stop_discovery()
            await Stopping(self.driver, self.hub, self._hubs).run(bound_s)
            if self._store is not None:
                await self._store.stop(unread=unread)
            if self.metrics is not None:
                await self.metrics.stop()
            await asyncio.gather(*(hub.close() for hub in self._hubs))
        finally:
            if self._store is not None:
                self._store.kill()
            if self.metrics is not None:
                self.metrics.close()
            for task in self._tasks:
                task.cancel()
            self._tasks.clear()
            self._startup_gate.freeze()
            self.hub.end()
            for hub in self._hubs:
                hub.end()
            if self._socket is not None:
                self._socket.release()
                self._socket = None
        if self.web is not None:
            await self.web.close()
        await self.hub.close()
        self.driver.close()
        account = self.router.accounts.report(self.router.held_messages)
        log.info(
            "relay.stopped",
            extra={"fields": {"relay": self.router.relay_id.hex(), "account": account}},
        )

    def count_garbled_name(self) -> None:
        """Count a connection whose TLS server name is not text."""
        if self.links is not None:
            self.links.refusals["garbled name"] = self.links.refusals.get("garbled name", 0) + 1

    def reload_keys(self, keys: Sequence[NetworkKey]) -> None:
        """Serve exactly these networks from now on: close links of removed ones, and look for relays of new ones."""
        self._networks = frozenset(key.fingerprint.hex() for key in keys)
        if self.links is None:
            return
        self.links.reload(keys)
        if self.remote is not None:
            self.remote.keys_changed()
        if self._multicast is not None:
            self._multicast.set_networks(self.links.fingerprints)

    def reload(self, config: RelayConfig) -> None:
        """Apply the changes of `config` to the settings in `LIVE`, and log which changes need a restart."""
        changed = [
            found.name
            for found in fields(config)
            if found.name not in _NOT_SETTINGS
            and getattr(config, found.name) != getattr(self.config, found.name)
        ]
        live = {name: getattr(config, name) for name in changed if name in LIVE}
        joined = "join" in live and self.links is not None
        self.config = self.hub.config = replace(self.config, **live)
        if self.web is not None:
            self.web.reload(self.config)
        if "log_level" in live or "log_format" in live:
            configure(config.log_level, config.log_format)
        if joined and self.links is not None:
            self._task(self._join(self.links), "iris-join")
        outcome = {
            "changed": list(live),
            "needs_restart": [name for name in changed if name not in LIVE],
        }
        log.log(
            logging.WARNING if outcome["needs_restart"] else logging.INFO,
            "relay.settings_read",
            extra={"fields": outcome},
        )

    async def _join(self, links: LinkHub) -> None:
        """Look for the relays in the new `join`, and no longer for those in the old one; links that are up stay."""
        before = self._discoveries.pop("join", None)
        if before is not None:
            await before.close()
        if self.config.join and "join" not in self._discoveries:
            self._discoveries["join"] = found = SeedDiscovery(self.config.join)
            await self._follow(links, found)

    # -- other relays ----------------------------------------------------------------------------------------

    def _discover(self, links: LinkHub) -> None:
        """Look for peers in the background: this relay already serves its host, whatever the network does."""
        config = self.config
        chosen = [address for address in config.bind if address not in _WILDCARDS]
        self._advertise(links, chosen)
        if len(chosen) < len(config.bind):
            self._task(self._look(links, chosen), "iris-addresses")
        if config.mdns:
            # It takes 3 MB, which other relays do without.
            from relay.discovery.zeroconf import MulticastDiscovery

            self._discoveries["mdns"] = self._multicast = MulticastDiscovery(
                self.router.relay_id,
                links.fingerprints,
                links.port,
                self.router.site,
                interfaces=chosen if len(chosen) == len(config.bind) else None,
            )
        if config.join:
            self._discoveries["join"] = SeedDiscovery(config.join)
        if not self._discoveries:
            return  # no peers wanted, until one dials
        self.router.mesh.settle_us = time.monotonic_ns() // 1000 + int(SETTLE_S * 1e6)
        self._found = asyncio.get_running_loop().call_later(NOTHING_FOUND_S, self._check_found)
        for name, discovery in self._discoveries.items():
            self._task(self._follow(links, discovery), f"iris-discovery-{name}")

    async def _follow(self, links: LinkHub, discovery: Discovery) -> None:
        """Pass the sightings of one discovery to the links. An internal error ends this discovery only."""
        try:
            async for sighting in discovery.sightings():
                key = (sighting.relay_id, sighting.addresses, sighting.gone)
                if key not in self._sighted and len(self._sighted) < _MAX_SIGHTED:
                    self._sighted.add(key)
                    fields = {
                        "source": sighting.source,
                        "addresses": [show(*address) for address in sighting.addresses[:16]],
                        "relay": sighting.relay_id.hex() if sighting.relay_id else "",
                        "gone": sighting.gone,
                    }
                    log.info("discovery.sighted", extra={"fields": fields})
                links.sighted(sighting)
        except Exception:
            log.exception("discovery.fault")

    async def _look(self, links: LinkHub, chosen: Sequence[str]) -> None:
        """Read this host's addresses again and again; peers pass them on to other relays."""
        while True:
            try:
                ours = await asyncio.to_thread(scan)
            except (OSError, ValueError) as err:
                log.warning("links.no_addresses", extra={"fields": {"error": str(err)}})
            else:
                versions = {4 if a == "0.0.0.0" else 6 for a in self.config.bind if a in _WILDCARDS}
                usable = (a for a in ours if not a.parsed.is_link_local)
                found = announced(a for a in usable if a.parsed.version in versions)
                self._advertise(links, [*chosen, *found])
            await asyncio.sleep(LOOK_AGAIN_S)

    def _advertise(self, links: LinkHub, hosts: Sequence[str]) -> None:
        # Before the addresses are first read, loopback will do: a connected peer knows an address, but not the port.
        shown = [show(host, links.port) for host in hosts or ("127.0.0.1",)]
        self.router.mesh.addresses = shown[: MAX_ADDRESSES - 1]

    def _tried(self) -> list[str]:
        tried: list[str] = []
        for discovery in self._discoveries.values():
            found = discovery.status().get("tried", [])
            tried += map(str, found) if isinstance(found, list) else []
        return tried

    @property
    def _linked(self) -> bool:
        """Whether any other relay is connected, in this site or another."""
        return bool(self.router.links or self.router.wans)

    def _check_found(self) -> None:
        self._found = None
        if not self._linked:
            fields = {"tried": self._tried(), "try": JOIN_HINT}
            log.warning("discovery.nothing_found", extra={"fields": fields})

    async def _stop_discovery(self) -> None:
        if self._found is not None:
            self._found.cancel()
            self._found = None
        closing = [discovery.close() for discovery in self._discoveries.values()]
        for fault in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(fault, Exception):
                log.error("discovery.fault", extra={"fields": {"error": repr(fault)}})

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    def _store_cannot(self, why: str, final: bool) -> None:
        """Pass on why the store cannot serve; empty: it can."""
        self.driver.turn()
        self.router.stores.set_failure(why, final=final, now_us=self.router.now_us)
        self.driver.settle()

    def _figures(self, line: bytes) -> None:
        """Pass on the figures of the store to the page of metrics."""
        if self.metrics is not None:
            self.metrics.pass_on(line)

    def _status(self) -> dict[str, object]:
        up_s = time.monotonic() - self._started_s
        status: dict[str, object] = {
            "pid": os.getpid(),
            "socket": str(self.config.socket_path),
            "uptime_s": round(up_s, 3),
            "protocol_errors": self.hub.protocol_errors,
            "turned_away": self.hub.refused,
            "users": self.hub.users.status(),
            "queues": self.driver.budget.report(),
        }
        if self._store is not None:
            status["store"] = self._store.status()
        if self.metrics is not None:
            status["metrics"] = self.metrics.status()
        if self.web is not None:
            status["web"] = self.web.status()
        if self.links is None:
            return status
        status.update(self.links.status())
        if self.remote is not None:
            status.update(self.remote.status())
        if self.gateways is not None:
            status["gateways"] = self.gateways.status()
        discovery: dict[str, object] = {
            name: found.status() for name, found in self._discoveries.items()
        }
        if self._discoveries and not self._linked and up_s > NOTHING_FOUND_S:
            discovery["nothing_found"] = {"tried": self._tried(), "try": JOIN_HINT}
        status["discovery"] = discovery
        return status


async def serve(config: RelayConfig, environ: Mapping[str, str]) -> None:
    """Run a relay until SIGTERM or SIGINT. A second signal ends the process at once."""
    stop = stop_on_signals()
    relay = Relay(config)
    on_signal(signal.SIGHUP, read_again, relay, environ)
    with counting_garbled_names(relay.count_garbled_name):
        await relay.start()
        collect_seldom()
        tidying = asyncio.create_task(tidy(), name="iris-memory")
        notify.ready(environ)
        pinging = asyncio.create_task(watchdog.keep_alive(environ), name="iris-watchdog")
        try:
            await stop.wait()
        finally:
            notify.stopping(environ)
            tidying.cancel()
            try:
                await relay.stop()
            finally:
                pinging.cancel()


def read_again(relay: Relay, environ: Mapping[str, str]) -> None:
    """Apply changed settings and network keys. A file that cannot be read changes nothing and is named in the log."""
    try:
        relay.reload(load_config({}, environ, None))
    except ConfigError as err:
        log.error("relay.settings_unreadable", extra={"fields": {"error": str(err)}})
    path = keyfiles.config_directory(environ) / keyfiles.NETWORK_FILE
    if relay.links is None:
        return
    try:
        relay.reload_keys(keyfiles.load_network_keys(path))
    except IrisError as err:
        log.error("links.keys_unreadable", extra={"fields": {"error": str(err)}})


def run(config: RelayConfig, environ: Mapping[str, str]) -> None:
    """Run a relay in this process until a signal stops it: logging, memory settings, event loop."""
    configure(config.log_level, config.log_format)
    raise_descriptor_limit()
    keep_freed_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(config, environ))
