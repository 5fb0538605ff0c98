"""The other relays of a LAN, from their adverts: which ones are reported, and which adverts are read again later.

An advert that is malformed, or whose name does not match its relay id, is dropped and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Final

from zeroconf import Zeroconf
from zeroconf.asyncio import AsyncServiceInfo

from relay.discovery import Sighting
from relay.discovery.adverts import (
    MAX_ADDRESSES,
    SERVICE_TYPE,
    BadAdvert,
    best_first,
    decode_txt,
    relay_id_in,
)
from relay.discovery.feed import Feed
from relay.discovery.interfaces import Address

MAX_ADVERTS: Final = 4096
MAX_FOLLOW_UPS: Final = 256
_RESOLVE_MS: Final = 3000
_RESOLVE_DELAY_S: Final = 0.2  # the second packet of an advert follows at once
_RESOLVE_BATCH: Final = 16
# Records that an update replaced stay valid for one more second (RFC 6762 section 10.2).
_RECHECK_S: Final = 1.5


class Sightings:
    """The other relays that adverts name.

    `local`: the addresses that this relay advertises; `networks`: those it has keys of.
    """

    def __init__(self, relay_id: bytes, port: int, networks: tuple[bytes, ...], feed: Feed) -> None:
        self.networks = networks
        self.local: frozenset[Address] = frozenset()
        self.known: dict[bytes, Sighting] = {}
        self.dropped: Counter[str] = Counter()
        self._relay_id = relay_id
        self._port = port
        self._feed = feed
        # of relays in `known`: two relays cannot have the same set of (address, port)
        self._by_endpoints: dict[frozenset[tuple[str, int]], bytes] = {}
        self._endpoints_of: dict[bytes, frozenset[tuple[str, int]]] = {}
        # old id -> the id that now has its addresses and port
        self._replaced: dict[bytes, bytes] = {}
        # name -> (when to read its advert again, whether to ask the network if it is not in the cache)
        self._follow_ups: dict[str, tuple[float, bool]] = {}
        self._follow = asyncio.Event()

    def changed(self, zeroconf: Zeroconf, name: str, *, removed: bool) -> None:
        """Handle a service name that the browser saw appear, change or disappear."""
        try:
            relay_id = relay_id_in(name)
        except BadAdvert as error:
            self._drop(error.reason)
            return
        if relay_id == self._relay_id:
            return
        if removed:
            self._replaced.pop(relay_id, None)
            self._forget(relay_id)
        elif not self._consider(zeroconf, name):
            self._follow_later(name, _RESOLVE_DELAY_S, resolve=True)

    def _consider(self, zeroconf: Zeroconf, name: str) -> bool:
        """Evaluate the cached advert of this name; return False if it is incomplete."""
        if not zeroconf.cache.entries_with_name(name):
            return False  # only a name, as in floods: return early because this is cheap
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not info.load_from_cache(zeroconf) or info.port is None:
            return False
        self._evaluate(info)
        return True

    def _evaluate(self, info: AsyncServiceInfo) -> None:
        """Report the relay of an advert if it is well formed, in one of our networks, and new or changed."""
        try:
            relay_id = relay_id_in(info.name)
            advert = decode_txt(info.text)
            if advert.relay_id != relay_id:
                raise BadAdvert("other_id")
            if relay_id in self._replaced:
                raise BadAdvert("replaced")
            if not info.port:
                raise BadAdvert("bad_port")
            if not set(advert.networks) & set(self.networks):
                self._forget(relay_id)
                raise BadAdvert("other_network")
            addresses = best_first(info.parsed_scoped_addresses(), info.port, self.local)
            addresses = tuple(a for a in addresses if not self._is_our_own(*a))
            if not addresses:
                raise BadAdvert("no_address")
            if relay_id not in self.known and len(self.known) >= MAX_ADVERTS:
                raise BadAdvert("table_full")
        except BadAdvert as error:
            self._drop(error.reason)
            return
        sighting = Sighting(addresses, relay_id, advert.networks, "mdns")
        known = self.known.get(relay_id)
        if known == sighting:
            return
        if known is not None:
            self._follow_later(info.name, _RECHECK_S, resolve=False)
            self._forget(relay_id, silently=True)
        # Without scopes, because a link-local address has one only if it was received over IPv6.
        # Bounded, because a forged advert may have a thousand addresses.
        listed = sorted(info.parsed_addresses())[:MAX_ADDRESSES]
        endpoints = frozenset((ip, info.port) for ip in listed)
        replaced = self._by_endpoints.get(endpoints)
        if replaced is not None:
            # Two relays cannot have the same addresses and port, so the old one crashed and restarted under a
            # new id. If the new advert is forged, the same addresses are still dialled.
            self._forget(replaced)
            self._replaced[replaced] = relay_id
            if len(self._replaced) > MAX_ADVERTS:
                del self._replaced[next(iter(self._replaced))]
        self.known[relay_id] = sighting
        self._by_endpoints[endpoints] = relay_id
        self._endpoints_of[relay_id] = endpoints
        self._report(sighting)

    def _is_our_own(self, ip: str, port: int) -> bool:
        return port == self._port and any(
            ip.partition("%")[0] == address.ip for address in self.local
        )

    def _forget(self, relay_id: bytes, *, silently: bool = False) -> None:
        known = self.known.pop(relay_id, None)
        if known is None:
            return
        self._by_endpoints.pop(self._endpoints_of.pop(relay_id), None)
        if not silently:
            # Relays that this one was said to replace are valid again from their next advert on.
            for old in [old for old, new in self._replaced.items() if new == relay_id]:
                del self._replaced[old]
            self._report(
                Sighting(known.addresses, relay_id, known.networks, known.source, gone=True)
            )

    def _report(self, sighting: Sighting) -> None:
        if not self._feed.put(sighting.relay_id, sighting):
            self._drop("reader_lags")

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def _follow_later(self, name: str, after_s: float, *, resolve: bool) -> None:
        planned = self._follow_ups.get(name)
        if planned is not None:
            self._follow_ups[name] = (planned[0], planned[1] or resolve)
            return
        if len(self._follow_ups) >= MAX_FOLLOW_UPS:
            self._drop("incomplete")
            return
        self._follow_ups[name] = (time.monotonic() + after_s, resolve)
        self._follow.set()

    async def follow_up(self, zeroconf: Zeroconf) -> None:
        """Read again adverts that were incomplete, or that still had outdated records. Runs until cancelled."""
        while True:
            if not self._follow_ups:
                self._follow.clear()
                await self._follow.wait()
            now_s = time.monotonic()
            due_s = min(at_s for at_s, _ in self._follow_ups.values())
            if due_s > now_s:
                await asyncio.sleep(due_s - now_s)
                continue
            due = [name for name, (at_s, _) in self._follow_ups.items() if at_s <= now_s]
            asked = []
            for name in due[:_RESOLVE_BATCH]:
                resolve = self._follow_ups.pop(name)[1]
                if not self._consider(zeroconf, name) and resolve:
                    asked.append(self._resolve(zeroconf, name))
            await asyncio.gather(*asked)

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if await info.async_request(zeroconf, _RESOLVE_MS) and info.port is not None:
            self._evaluate(info)
        else:
            self._drop("incomplete")
