"""Multicast DNS (RFC 6762, 6763): advertises this relay on the LAN and finds the others there.

Speed. The instance name is the random 128-bit relay id of this start, so probing for its uniqueness, about 1.2 s, is
skipped (`cooperating_responders`). The first announcement is sent in the same turn as the registration, and tells every
running relay of this one. Its own first question follows after 20 to 120 ms and asks for unicast answers (QU).

Idle traffic, in bytes of payload per interface and IP version, of one relay among n on its LAN (sizes and
times from zeroconf 0.154):

* At start, and when an interface appears: 3 announcements in 0.45 s (PTR, SRV, TXT and addresses: about 280 bytes with
  one network and two addresses) and 4 questions, after 0.1, 1, 5 and 14 s. A question has 40 bytes, and 47 for each
  relay already known, which therefore does not answer.
* After that, one question every 60 s x max(1, n / 16), +- 20 %, instead of zeroconf's own questions: those end when the
  records have expired, so two parts of a LAN that were separated for long would not find each other again. A relay
  answers if the asker received its record more than 562 s ago (half of the PTR record's lifetime). It answers by
  multicast, which refreshes the record everywhere: about one answer in 10 minutes.
* In total at most 14 n bytes/s on the whole LAN: 0.2 kB/s with 16 relays, 14 kB/s with 1000.
* At the end, 3 goodbyes in 0.25 s.

A crashed relay does not say goodbye. It is reported as gone when its PTR record expires, after at most 1125 s (the
shortest lifetime that zeroconf accepts), or at once when another relay advertises exactly its addresses and port.

Hostile LANs. An advert that is malformed, or whose name does not match its relay id, is dropped and counted. At most
4096 relays are kept, and zeroconf keeps at most 10,000 records. A question lists the known names, so before each one,
names that are not relays of this network are removed if there are more than 1024. The browser remembers each name that
it ever saw, so it is replaced after 50,000 names. A flood of 6000 names a second cost 17 % of a core and 20 MB, and
blocked the loop for up to 0.1 s, once in 10 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from zeroconf import DNSQuestionType, IPVersion, ServiceStateChange, Zeroconf
from zeroconf import Error as ZeroconfError
from zeroconf._dns import DNSPointer
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from iris.core.backoff import Backoff
from relay.discovery import Sighting
from relay.discovery.adverts import (
    SERVICE_TYPE,
    Advert,
    announced,
    encode_txt,
    instance_name,
)
from relay.discovery.feed import Feed
from relay.discovery.interfaces import Address, Damper, Rank, preferred, scan
from relay.discovery.sightings import Sightings
from relay.discovery.zeroconflog import zeroconf_log
from relay.logs import Quiet

log = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""Interval between two scans of the interfaces."""

CONFIRM_S: Final = 0.5
"""Time until the scan that must confirm a change."""

MAX_STRANGERS: Final = 1024
"""Most names in zeroconf's cache, besides those of known relays, when a question is sent: each is part of it."""

MOST_INTERFACES: Final = 20
"""Most interfaces that are searched: a socket can join on 20 by IPv4 (default of net.ipv4.igmp_max_memberships)."""

CLOSE_S: Final = 0.8

_PTR_TTL_S: Final = 1125
_ASK_STEPS_S: Final = (0.0, 1.0, 4.0, 9.0)
_ASK_S: Final = 60.0
_ADVERTS_PER_ASK: Final = 16
_ASKING_S: Final = 0.3  # one question, sent after 20 to 120 ms
_MAX_NAMES: Final = 50_000
_REJOIN_MAX_S: Final = 60.0


class MulticastDiscovery:
    """Advertises this relay on the LAN and reports the relays there that share a network with it.

    `networks` are the fingerprints of its network keys, and `port` is where links are accepted. `interfaces` restricts
    it to these addresses of this host; None: all. `look` lists the addresses of this host and runs in a thread.

    Raises:
        ValueError: there are no networks or over 32, or the site name has over 63 bytes.
    """

    def __init__(
        self,
        relay_id: bytes,
        networks: tuple[bytes, ...],
        port: int,
        site: str = "",
        *,
        interfaces: Sequence[str] | None = None,
        look: Callable[[], frozenset[Address]] = scan,
        poll_s: float = POLL_S,
        confirm_s: float = CONFIRM_S,
        ask_s: float = _ASK_S,
        rng: random.Random | None = None,
    ) -> None:
        self._relay_id = relay_id
        self._port = port
        self._site = site
        encode_txt(Advert(relay_id, networks, site))
        self._only = None if interfaces is None else frozenset(interfaces)
        self._look = look
        self._poll_s = poll_s
        self._confirm_s = confirm_s
        self._ask_s = ask_s
        self._rng = random.Random() if rng is None else rng
        self._feed = Feed()
        self._sightings = Sightings(relay_id, port, networks, self._feed)
        self._damper = Damper()
        self._zeroconf: AsyncZeroconf | None = None
        self._opened = asyncio.Event()
        self._browser: AsyncServiceBrowser | None = None
        self._registered: AsyncServiceInfo | None = None
        self._broadcasts: set[asyncio.Future[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._filtering_log = False
        self._closing = False
        self._closed = asyncio.Event()

        self._wake = asyncio.Event()
        self._stale = False
        self._rejoin = Backoff(poll_s, _REJOIN_MAX_S, self._rng.random)
        self._rejoin_at_s = 0.0
        self._ask_at_s = 0.0
        self._ask_now = asyncio.Event()
        self._asked_since_browse = 0
        self._names_seen = 0
        self._errors: dict[str, str] = {}
        self._left_out: list[str] = []
        self._quiet = Quiet(limit=16)
        self._asked = 0

    def sightings(self) -> AsyncIterator[Sighting]:
        """Yield sightings; see `Discovery.sightings`. A relay's sighting replaces the earlier one with its id."""
        if not self._tasks and not self._closing:
            self._filtering_log = True
            zeroconf_log.begin()
            for work in (self._watch, self._ask, self._follow_up):
                task = asyncio.create_task(work(), name=f"discovery.{work.__name__.strip('_')}")
                task.add_done_callback(self._ended)
                self._tasks.append(task)
        return self._feed.read()

    def set_networks(self, networks: tuple[bytes, ...]) -> None:
        """Advertise these networks from now on. Reported relays stay; relays of new networks are asked for.

        Raises:
            ValueError: there are none or over 32; nothing has changed.
        """
        encode_txt(Advert(self._relay_id, networks, self._site))
        self._sightings.networks = networks
        self._stale = True
        self._wake.set()

    async def close(self) -> None:
        """Say goodbye and end `sightings`, within 1 s."""
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            self._feed.end()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            for broadcast in self._broadcasts:
                broadcast.cancel()
            if self._zeroconf is not None:
                async with asyncio.timeout(CLOSE_S):
                    self._stop_browsing()
                    await self._zeroconf.async_close()
        except TimeoutError:
            self._errors["close"] = f"the goodbye took over {CLOSE_S:g} s"
        finally:
            try:
                if self._zeroconf is not None:
                    # Without the rest of the goodbye, this takes one turn of the loop.
                    self._zeroconf.zeroconf.generate_unregister_all_services()
                    await self._zeroconf.async_close()
            finally:
                if self._filtering_log:
                    zeroconf_log.end()
                self._closed.set()

    def status(self) -> dict[str, object]:
        """Return what was tried and found, ready for JSON."""
        settled = self._damper.settled or frozenset()
        return {
            "kind": "mdns",
            "service": SERVICE_TYPE,
            "tried": [
                str(address)
                for address in sorted(settled)
                if address in self._sightings.local or not address.up
            ],
            "interfaces": [
                {
                    "name": address.interface,
                    "address": address.ip,
                    "up": address.up,
                    "multicast": address.multicast,
                    "used": address in self._sightings.local,
                }
                for address in sorted(settled)
            ],
            "announced": [] if self._registered is None else self._registered.parsed_addresses(),
            "port": self._port,
            "left_out": self._left_out,
            "sighted": len(self._sightings.known),
            "waiting": len(self._feed),
            "asked": self._asked,
            "dropped": dict(sorted(self._sightings.dropped.items())),
            "errors": dict(sorted(self._errors.items())),
        }

    # This host: interfaces, sockets, the advert

    async def _watch(self) -> None:
        while True:
            self._wake.clear()
            changed = await self._look_around()
            now_s = time.monotonic()
            if changed or self._stale or (self._rejoin.failures and now_s >= self._rejoin_at_s):
                await self._apply(changed or self._stale)
            if self._names_seen >= _MAX_NAMES:
                self._purge()
                self._browse(ask=False)
            wait_s = self._confirm_s if self._damper.unsettled else self._poll_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _look_around(self) -> bool:
        """Scan the addresses; return whether the accepted ones have changed."""
        try:
            seen = await asyncio.to_thread(self._look)
        except (OSError, ValueError) as error:
            self._failed("interfaces", str(error))
            return False
        self._errors.pop("interfaces", None)
        if self._only is not None:
            seen = frozenset(address for address in seen if address.ip in self._only)
        return self._damper.look(seen)

    async def _apply(self, changed: bool) -> None:
        """Adapt sockets and advert to the interfaces; what fails is tried again later."""
        self._stale = False
        settled = self._damper.settled or frozenset()
        before = self._sightings.local
        addresses = self._choose(settled)
        choice = _sockets_for(self._sightings.local)
        places = {(a.ip, a.index) for a in self._sightings.local}
        moved = {a.ip for a in before if (a.ip, a.index) not in places} & {ip for ip, _ in places}
        try:
            zeroconf = await self._open()
            if changed:
                # Ask on new interfaces. The question is sent after 20 ms at the earliest, when the sockets
                # are open; the update returns only after 450 ms.
                self._browse(ask=True)
            # The advert first, because the update announces it on new interfaces.
            if self._registered is not None and addresses:
                await self._announce(zeroconf, addresses)
            joined = {sender.interface_key for sender in zeroconf.zeroconf.engine.senders}
            if moved:
                # The same address on another interface, or on one that was made again: zeroconf compares only
                # addresses, and would keep a socket that receives nothing.
                await zeroconf.async_update_interfaces(_sockets_for(before & self._sightings.local))
            await zeroconf.async_update_interfaces(choice)
            senders = {sender.interface_key for sender in zeroconf.zeroconf.engine.senders}
            if self._registered is None and addresses:
                await self._announce(zeroconf, addresses)
        except (OSError, RuntimeError, ZeroconfError) as error:
            self._failed("sockets", f"{type(error).__name__}: {error}")
            self._try_again()
            return
        if senders - joined and not changed:
            self._browse(ask=True)
        missing = len(choice) - len(senders)
        if missing > 0:
            self._failed(
                "sockets",
                f"{missing} of {len(choice)} interfaces could not join the multicast group",
            )
            self._try_again()
        else:
            self._errors.pop("sockets", None)
            self._rejoin.succeeded()

    def _choose(self, settled: frozenset[Address]) -> tuple[str, ...]:
        """Choose what is searched, and return the addresses for the advert. Log what is left out if it changed."""
        live = [address for address in preferred(settled) if address.up]
        live = [address for address in live if not address.parsed.is_loopback] or live
        names = list(dict.fromkeys(address.interface for address in live))
        kept = [address for address in live if address.interface in set(names[:MOST_INTERFACES])]
        addresses = announced(kept)
        local = self._sightings.local = frozenset(a for a in kept if a.ip in addresses)
        used = {address.interface for address in local}
        left_out = [name for name in names if name not in used]
        if left_out and left_out != self._left_out:
            near = any(a.interface in left_out and a.rank < Rank.INNER for a in live)
            fields = {"interfaces": left_out, "used": len(used)}
            log.log(logging.WARNING if near else logging.INFO, "discovery.left_out", extra={"fields": fields})  # fmt: skip
        self._left_out = left_out
        return addresses

    def _failed(self, what: str, error: str) -> None:
        """Show an error in the status until it is over, and log it if it is new."""
        if self._errors.get(what) != error:
            self._errors[what] = error
            fields = {"what": what, "error": error}
            self._quiet.warning(log, "discovery.failed", what, time.monotonic(), fields)

    def _try_again(self) -> None:
        self._rejoin_at_s = time.monotonic() + self._rejoin.failed()

    async def _open(self) -> AsyncZeroconf:
        if self._zeroconf is None:
            # Without interfaces, because the constructor would leak sockets if one of them failed.
            try:
                self._zeroconf = AsyncZeroconf(interfaces=[], ip_version=IPVersion.All)
            except OSError:  # this host does not have IPv6
                self._zeroconf = AsyncZeroconf(interfaces=[], ip_version=IPVersion.V4Only)
            self._opened.set()
        return self._zeroconf

    async def _announce(self, zeroconf: AsyncZeroconf, addresses: tuple[str, ...]) -> None:
        info = AsyncServiceInfo(
            SERVICE_TYPE,
            instance_name(self._relay_id),
            port=self._port,
            properties=encode_txt(Advert(self._relay_id, self._sightings.networks, self._site)),
            server=f"{self._relay_id.hex()}.local.",
            other_ttl=_PTR_TTL_S,
            parsed_addresses=list(addresses),
        )
        if self._registered is None:
            broadcast = await zeroconf.async_register_service(info, cooperating_responders=True)
        elif (info.text, set(addresses)) != (
            self._registered.text,
            set(self._registered.parsed_addresses()),
        ):
            broadcast = await zeroconf.async_update_service(info)
        else:
            return
        self._registered = info
        fields = {"addresses": list(addresses), "port": self._port}
        log.info("discovery.announced", extra={"fields": fields})
        future = asyncio.ensure_future(broadcast)
        self._broadcasts.add(future)
        future.add_done_callback(self._broadcasts.discard)

    def _browse(self, *, ask: bool) -> None:
        """Start a new browser, which reports everything in the cache again, and with `ask` ask the LAN."""
        self._stop_browsing()
        if self._zeroconf is None:
            return
        self._names_seen = 0
        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._on_change]
        )
        # Every 10 s it would ask about each name that is about to expire, in questions that list all known names, so
        # that a flood on the LAN would make this relay flood it, too. `_ask` asks instead.
        sender = self._browser._query_sender_task
        if sender is not None:
            sender.cancel()
        if ask:
            self._asked_since_browse = 0
            self._ask_at_s = time.monotonic()
            self._ask_now.set()

    def _stop_browsing(self) -> None:
        if self._browser is not None:
            self._browser._async_cancel()
            self._browser = None

    async def _ask(self) -> None:
        """Ask for relays, often at first and then rarely. The browser receives the answers."""
        while True:
            wait_s = self._ask_at_s - time.monotonic()
            if wait_s > 0 or self._zeroconf is None or not self._sightings.local:
                self._ask_now.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s if wait_s > 0 else None):
                        await self._ask_now.wait()
                continue
            self._purge()
            self._ask_at_s = time.monotonic() + self._ask_interval_s()
            # Unicast answers (QU) spare the other hosts, but may go to another responder on this host.
            kind = DNSQuestionType.QM if self._asked_since_browse else DNSQuestionType.QU
            self._asked_since_browse += 1
            self._asked += 1
            asking = AsyncServiceBrowser(
                self._zeroconf.zeroconf,
                SERVICE_TYPE,
                handlers=[_answers_go_to_the_browser],
                question_type=kind,
            )
            try:
                await asyncio.sleep(_ASKING_S)
            finally:
                await asking.async_cancel()

    def _ask_interval_s(self) -> float:
        if self._asked_since_browse < len(_ASK_STEPS_S):
            return _ASK_STEPS_S[self._asked_since_browse]
        return (
            self._ask_s
            * max(1.0, len(self._cached_names()) / _ADVERTS_PER_ASK)
            * self._rng.uniform(0.8, 1.2)
        )

    def _cached_names(self) -> list[DNSPointer]:
        """Return the service names in zeroconf's cache."""
        if self._zeroconf is None:
            return []
        records = self._zeroconf.zeroconf.cache.entries_with_name(SERVICE_TYPE)
        return [record for record in records if isinstance(record, DNSPointer)]

    def _purge(self) -> None:
        """Remove names from the cache that are not known relays, if there are more than `MAX_STRANGERS`."""
        cached = self._cached_names()
        if len(cached) - len(self._sightings.known) <= MAX_STRANGERS or self._zeroconf is None:
            return
        known = {instance_name(relay_id) for relay_id in (self._relay_id, *self._sightings.known)}
        strangers = [record for record in cached if record.alias not in known]
        self._zeroconf.zeroconf.cache.async_remove_records(strangers)
        self._sightings.dropped["purged"] += len(strangers)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Only an internal error ends the task: raise it at the reader.
            self._feed.end(task.exception() or RuntimeError(f"{task.get_name()} ended"))

    def _on_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if state_change is ServiceStateChange.Added:
            self._names_seen += 1
        self._sightings.changed(zeroconf, name, removed=state_change is ServiceStateChange.Removed)

    async def _follow_up(self) -> None:
        await self._opened.wait()
        assert self._zeroconf is not None
        await self._sightings.follow_up(self._zeroconf.zeroconf)


def _sockets_for(local: frozenset[Address]) -> list[str | int]:
    """Return what zeroconf should join, per interface: one IPv4 address, and the index for IPv6.

    A second address of an interface cannot join the group again, and IPv6 lacks a multicast route on loopback.
    """
    v4: dict[int, str] = {}
    v6: dict[int, int] = {}
    for address in preferred(local):
        if address.multicast and address.parsed.version == 4:
            v4.setdefault(address.index, address.ip)
        elif address.multicast and not address.parsed.is_loopback:
            v6.setdefault(address.index, address.index)
    return [*v4.values(), *v6.values()]


def _answers_go_to_the_browser(
    zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
) -> None:
    """Do nothing: the other browser receives the answers to the question, too."""
