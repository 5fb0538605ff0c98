"""Relays on one LAN, by multicast DNS (RFC 6762, 6763): announce ourselves, watch for the others.

Speed. The instance name is this start's random 128-bit relay id, so the probing for its uniqueness, about
1.2 s, is skipped (`cooperating_responders`). The first announcement leaves in the same turn as the
registration, and every relay that runs has heard of us then; our own first question follows after 20 to
120 ms and asks for unicast answers (QU).

Idle traffic, in bytes of payload per interface and IP version, of one relay among n on its LAN (sizes and
times from zeroconf 0.154):

* At start, and when an interface comes: 3 announcements in 0.45 s (PTR, SRV, TXT and addresses: about 280
  bytes with one network and two addresses) and 4 questions, after 0.1, 1, 5 and 14 s. A question has 40
  bytes, and 47 for each relay known already, which therefore does not answer.
* After that one question every 60 s x max(1, n / 16), +- 20 %, in place of zeroconf's own: those end when
  the records ran out, and two halves of a LAN that were parted for long would not meet again. A relay
  answers when the asker heard of it more than 562 s ago (half of its PTR record's lifetime), by
  multicast, so all have it anew: about one answer in 10 minutes.
* Together at most 14 n bytes/s on the whole LAN: 0.2 kB/s with 16 relays, 14 kB/s with 1000.
* At the end 3 goodbyes in 0.25 s.

A crashed relay says no goodbye: it is gone when its PTR runs out, after at most 1125 s (the shortest that
zeroconf accepts), or at once when another relay announces exactly its addresses and port.

Hostile LANs. Every advert has to have our form and its id for a name, or is dropped and counted. We keep
at most 4096 relays, zeroconf at most 10,000 records. A question lists the names heard, so that more than
1024 that are no relays of ours are forgotten before it is asked. The browser remembers each name that
it ever saw: after 50,000 names it is replaced. A flood of 6000 names a second cost 17 % of a core and
20 MB, and held the loop for up to 0.1 s, once in 10 s.
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
from relay.discovery.interfaces import Address, Damper, scan
from relay.discovery.sightings import Sightings
from relay.discovery.zeroconflog import zeroconf_log
from relay.logs import Quiet

log = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""Between two looks at the interfaces."""

CONFIRM_S: Final = 0.5
"""Until the look that has to confirm a change."""

MAX_STRANGERS: Final = 1024
"""Names that zeroconf may hold beside those of our relays when we ask: each is part of the question."""

CLOSE_S: Final = 0.8

_PTR_TTL_S: Final = 1125
_ASK_STEPS_S: Final = (0.0, 1.0, 4.0, 9.0)
_ASK_S: Final = 60.0
_ADVERTS_PER_ASK: Final = 16
_ASKING_S: Final = 0.3  # one question, sent after 20 to 120 ms
_MAX_NAMES: Final = 50_000
_REJOIN_MAX_S: Final = 60.0


class MulticastDiscovery:
    """Announces this relay on the LAN and yields the relays there that share a network with it.

    `networks` are the fingerprints of the network keys held, `port` is where links are accepted.
    `interfaces` restricts it to these addresses of this host; None: all. `look` lists the addresses of
    this host and runs in a thread.

    Raises:
        ValueError: no network or more than 32, or a site name over 63 bytes.
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
        self._quiet = Quiet(limit=16)
        self._asked = 0

    def sightings(self) -> AsyncIterator[Sighting]:
        """Yield relays as `Discovery` says. A relay's sightings replace each other by its id."""
        if not self._tasks and not self._closing:
            self._filtering_log = True
            zeroconf_log.begin()
            for work in (self._watch, self._ask, self._follow_up):
                task = asyncio.create_task(work(), name=f"discovery.{work.__name__.strip('_')}")
                task.add_done_callback(self._ended)
                self._tasks.append(task)
        return self._feed.read()

    def set_networks(self, networks: tuple[bytes, ...]) -> None:
        """Announce other networks from now on. What was sighted stays; a network new to us is asked for.

        Raises:
            ValueError: none, or more than 32; nothing changed.
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
            self._errors["close"] = "the goodbye took too long"
        finally:
            try:
                if self._zeroconf is not None:
                    # Without what is left of the goodbye, this takes one turn of the loop.
                    self._zeroconf.zeroconf.generate_unregister_all_services()
                    await self._zeroconf.async_close()
            finally:
                if self._filtering_log:
                    zeroconf_log.end()
                self._closed.set()

    def status(self) -> dict[str, object]:
        """Return what was tried and found, as JSON-able facts."""
        settled = self._damper.settled or frozenset()
        return {
            "kind": "mdns",
            "service": SERVICE_TYPE,
            "tried": [
                str(address)
                for address in sorted(settled)
                if address in self._sightings.ours or not address.up
            ],
            "interfaces": [
                {
                    "name": address.interface,
                    "address": address.ip,
                    "up": address.up,
                    "multicast": address.multicast,
                    "used": address in self._sightings.ours,
                }
                for address in sorted(settled)
            ],
            "announced": [] if self._registered is None else self._registered.parsed_addresses(),
            "port": self._port,
            "sighted": len(self._sightings.known),
            "waiting": len(self._feed),
            "asked": self._asked,
            "dropped": dict(sorted(self._sightings.dropped.items())),
            "errors": dict(sorted(self._errors.items())),
        }

    # This host: interfaces, sockets, our own advert

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
        """Return whether the addresses that count have changed."""
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
        """Bring sockets and advert in line with the interfaces; what fails is tried again later."""
        self._stale = False
        settled = self._damper.settled or frozenset()
        addresses = announced(settled)
        before = self._sightings.ours
        self._sightings.ours = frozenset(a for a in settled if a.up and a.ip in addresses)
        choice = _sockets_for(self._sightings.ours)
        moved = {a.ip for a in before - self._sightings.ours} & {
            a.ip for a in self._sightings.ours - before
        }
        try:
            zeroconf = await self._open()
            if changed:
                # Where we come new nobody was asked. The question leaves after 20 ms at the earliest, when
                # the sockets are there; the update returns after 450.
                self._browse(ask=True)
            # The advert first, since interfaces that come are told of it by the update.
            if self._registered is not None and addresses:
                await self._announce(zeroconf, addresses)
            joined = {sender.interface_key for sender in zeroconf.zeroconf.engine.senders}
            if moved:
                # The same address on another interface, or on one that was made anew: zeroconf compares
                # addresses only, and would keep a socket that hears nothing.
                await zeroconf.async_update_interfaces(_sockets_for(before & self._sightings.ours))
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
            self._failed("sockets", f"{missing} of {len(choice)} not joined")
            self._try_again()
        else:
            self._errors.pop("sockets", None)
            self._rejoin.succeeded()

    def _failed(self, what: str, error: str) -> None:
        """Show what does not work until it does, and log it when it is news."""
        if self._errors.get(what) != error:
            self._errors[what] = error
            fields = {"what": what, "error": error}
            self._quiet.warning(log, "discovery.failed", what, time.monotonic(), fields)

    def _try_again(self) -> None:
        self._rejoin_at_s = time.monotonic() + self._rejoin.failed()

    async def _open(self) -> AsyncZeroconf:
        if self._zeroconf is None:
            # Without interfaces: the constructor would leak sockets if one of them failed.
            try:
                self._zeroconf = AsyncZeroconf(interfaces=[], ip_version=IPVersion.All)
            except OSError:  # this host has no IPv6
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
        """Begin anew to watch, hear of everything in the cache again, and `ask` the LAN."""
        self._stop_browsing()
        if self._zeroconf is None:
            return
        self._names_seen = 0
        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._on_change]
        )
        # It would ask again about each name that is about to expire, every 10 s, in questions that list
        # all names heard: whoever floods the LAN would make us do so too. We ask ourselves.
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
        """Ask who is there: often at first, then ever so rarely. The answers come to the browser."""
        while True:
            wait_s = self._ask_at_s - time.monotonic()
            if wait_s > 0 or self._zeroconf is None or not self._sightings.ours:
                self._ask_now.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s if wait_s > 0 else None):
                        await self._ask_now.wait()
                continue
            self._purge()
            self._ask_at_s = time.monotonic() + self._ask_interval_s()
            # Unicast answers spare the others, but may go to another responder on this host.
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
        """Return the names in zeroconf's cache."""
        if self._zeroconf is None:
            return []
        records = self._zeroconf.zeroconf.cache.entries_with_name(SERVICE_TYPE)
        return [record for record in records if isinstance(record, DNSPointer)]

    def _purge(self) -> None:
        """Make the cache forget the names that are no relays of ours, if there are very many."""
        heard = self._cached_names()
        if len(heard) - len(self._sightings.known) <= MAX_STRANGERS or self._zeroconf is None:
            return
        ours = {instance_name(relay_id) for relay_id in (self._relay_id, *self._sightings.known)}
        strangers = [record for record in heard if record.alias not in ours]
        self._zeroconf.zeroconf.cache.async_remove_records(strangers)
        self._sightings.dropped["purged"] += len(strangers)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Nothing but a fault of ours ends the work: whoever reads is told.
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


def _sockets_for(ours: frozenset[Address]) -> list[str | int]:
    """Return what zeroconf is to join: one IPv4 address, and the index for IPv6, per interface.

    A second address of one interface could not join the group again, and IPv6 has no route for multicast
    on loopback.
    """
    v4: dict[int, str] = {}
    v6: dict[int, int] = {}
    for address in sorted(ours):
        if address.multicast and address.parsed.version == 4:
            v4.setdefault(address.index, address.ip)
        elif address.multicast and not address.parsed.is_loopback:
            v6.setdefault(address.index, address.index)
    return [*v4.values(), *v6.values()]


def _answers_go_to_the_browser(
    zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
) -> None:
    """Do nothing: the answers to a question also reach the browser that watches."""
