"""Relays that the operator named: `--join HOST:PORT` and `--join dns:NAME[:PORT]`.

`HOST:PORT` is one relay, under all addresses that HOST has: one sighting with them all. `dns:NAME` is
many, one behind each A and AAAA record (a Kubernetes headless service): one sighting each, our own
address perhaps among them. Names are looked up again about every 10 s, by the system's resolver, so
/etc/hosts counts. Numeric addresses are sighted once.

A changed answer is sighted, and addresses that it no longer has are sighted as gone. A lookup that fails
changes nothing: relays are not gone because a name server is. It is repeated after 1, 2, 4 ... 30 s.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from iris.core.backoff import backoff_s
from iris.errors import ConfigError
from relay.discovery import DEFAULT_PORT, Sighting
from relay.discovery.feed import Feed
from relay.logs import Quiet

log = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0
"""Between two lookups of a name, +- 20 %."""

RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
MAX_JOINS: Final = 256
"""Entries of one relay; each name among them holds a thread while it is looked up."""

MAX_ADDRESSES: Final = 1024
"""Addresses that one name may have; further ones are left out and counted."""

_DNS: Final = "dns:"
_LABEL: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_SCOPE: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(name, port) to numeric addresses, best first. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Join:
    """One entry of `--join`."""

    text: str
    kind: Literal["join", "dns"]
    host: str
    """A name, or a numeric address without brackets."""

    port: int
    numeric: bool = False

    @property
    def source(self) -> str:
        """What sightings name as their source."""
        return f"{self.kind}{' ' if self.kind == 'join' else ':'}{shown(self.host, self.port)}"


def shown(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_join(text: str) -> Join:
    """Return what `HOST[:PORT]` or `dns:NAME[:PORT]` says; the port is 7430 unless it is given.

    HOST is a name, an IPv4 address, or an IPv6 address in brackets ("[fe80::1%eth0]:7430").

    Raises:
        ConfigError: it says none of that; the error names the text.
    """
    if "://" in text:
        raise ConfigError(f"join: {text!r} is neither HOST:PORT nor dns:NAME:PORT")
    kind: Literal["join", "dns"] = "dns" if text.startswith(_DNS) else "join"
    rest = text.removeprefix(_DNS) if kind == "dns" else text
    if rest.startswith("["):
        host, bracket, after = rest[1:].partition("]")
        if not bracket or (after and not after.startswith(":")):
            raise ConfigError(f"join: {text!r} has no [ADDRESS]:PORT")
        port_text = after[1:] if after else None
        numeric = _is_ipv6(host)
        if not numeric:
            raise ConfigError(f"join: {text!r} has no IPv6 address in its brackets")
    else:
        if rest.count(":") > 1:
            raise ConfigError(f"join: {text!r} needs brackets around its IPv6 address")
        host, colon, after = rest.partition(":")
        port_text = after if colon else None
        numeric = _is_ipv4(host)
        if not numeric and not _is_name(host):
            raise ConfigError(f"join: {text!r} names no host")
    if numeric and kind == "dns":
        raise ConfigError(f"join: {text!r} has an address where a name belongs; leave out dns:")
    port = DEFAULT_PORT if port_text is None else _port(port_text)
    if port is None:
        raise ConfigError(
            f"join: {text!r} is neither HOST:PORT nor dns:NAME:PORT: {port_text!r} is not a port from 1 to 65535"
        )
    return Join(text, kind, host, port, numeric)


def _port(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    return int(text) if 1 <= int(text) <= 65_535 else None


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    bare, percent, scope = text.partition("%")
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        return False
    return bool(_SCOPE.fullmatch(scope)) if percent else True


def _is_name(text: str) -> bool:
    labels = text.removesuffix(".").split(".")
    return (
        len(text) <= 253
        and all(_LABEL.fullmatch(label) for label in labels)
        # "10.0.0.300" is a mistyped address and no name
        and not labels[-1].isdigit()
    )


async def resolve(name: str, port: int) -> Sequence[str]:
    """Return the numeric addresses of `name` in the system's order of preference (RFC 6724).

    The lookup runs in a daemon thread of its own: it cannot be cancelled and may take half a minute, and
    the loop's own threads are waited for at exit.

    Raises:
        OSError: it has none, or nobody could tell.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str], error: Exception | None) -> None:
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(addresses)
        else:
            answer.set_exception(error)

    def look_up() -> None:
        addresses: list[str] = []
        error: Exception | None = None
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            addresses = [_numeric(each[4]) for each in found]
        except OSError as failed:
            error = failed
        except UnicodeError as failed:  # the idna codec refuses the name
            error = OSError(str(failed))
        try:
            loop.call_soon_threadsafe(settle, addresses, error)
        except RuntimeError:
            # The loop was closed meanwhile: nobody waits for the answer.
            return

    threading.Thread(target=look_up, name=f"resolve {name}", daemon=True).start()
    return await answer


def _numeric(address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> str:
    """Return a socket address as "ip" or "ip%interface"."""
    ip = str(address[0]).partition("%")[0]
    if len(address) == 4 and address[3] and ipaddress.ip_address(ip).is_link_local:
        try:
            return f"{ip}%{socket.if_indextoname(address[3])}"
        except OSError:
            return f"{ip}%{address[3]}"
    return ip


class Seed:
    """One entry and what is known of it. Sans-IO: it is told of answers, and says when to ask again."""

    __slots__ = ("_rng", "addresses", "due_s", "error", "failures", "join", "left_out", "lookups")

    due_s: float | None
    """When to look it up; None: never again."""

    def __init__(self, join: Join, rng: random.Random, now_s: float) -> None:
        self.join = join
        self.addresses: tuple[str, ...] = ()
        self.error: str | None = None
        self.failures = 0
        """Lookups that failed since one did not."""
        self.lookups = 0
        self.left_out = 0
        self.due_s = now_s
        self._rng = rng

    def answered(
        self, addresses: Sequence[str], now_s: float, *, interval_s: float = INTERVAL_S
    ) -> list[Sighting]:
        """Take an answer of at least one address; return what it changed."""
        unique = tuple(dict.fromkeys(addresses))
        self.lookups += 1
        self.error = None
        self.failures = 0
        self.left_out = max(0, len(unique) - MAX_ADDRESSES)
        self.due_s = None if self.join.numeric else now_s + interval_s * self._rng.uniform(0.8, 1.2)
        # The order may differ at each lookup. Those known stay, so that a name with too many
        # addresses, in another order each time, does not come and go.
        known = set(self.addresses)
        kept = sorted(unique, key=lambda ip: ip not in known)[:MAX_ADDRESSES]
        fresh = tuple(ip for ip in unique if ip in set(kept))
        news = self._difference(fresh)
        self.addresses = fresh
        return news

    def failed(self, error: str, now_s: float) -> bool:
        """Take a failure; True if it is news: the first one, or another error than the last."""
        self.lookups += 1
        news = self.error != error
        self.error = error
        self.due_s = now_s + backoff_s(self.failures, RETRY_MIN_S, RETRY_MAX_S, self._rng.random)
        self.failures += 1
        return news

    def _difference(self, fresh: tuple[str, ...]) -> list[Sighting]:
        now, before = set(fresh), set(self.addresses)
        if now == before:
            return []
        came = [ip for ip in fresh if ip not in before]
        went = [ip for ip in self.addresses if ip not in now]
        if self.join.kind == "dns":
            news = [self._sighting((ip,)) for ip in came]
        else:
            news = [self._sighting(fresh)]
        return news + [self._sighting((ip,), gone=True) for ip in went]

    def _sighting(self, addresses: tuple[str, ...], *, gone: bool = False) -> Sighting:
        port = self.join.port
        return Sighting(tuple((ip, port) for ip in addresses), source=self.join.source, gone=gone)

    def status(self) -> dict[str, object]:
        """Return JSON-able facts."""
        return {
            "join": self.join.text,
            "addresses": [shown(ip, self.join.port) for ip in self.addresses],
            "error": self.error,
            "failures": self.failures,
            "lookups": self.lookups,
            "left_out": self.left_out,
        }


class SeedDiscovery:
    """Yields the relays behind `joins`, entries of `--join`.

    Raises:
        ConfigError: an entry is malformed, or there are more than 256.
    """

    def __init__(
        self,
        joins: Sequence[str],
        *,
        resolver: Resolver = resolve,
        interval_s: float = INTERVAL_S,
        rng: random.Random | None = None,
    ) -> None:
        if len(joins) > MAX_JOINS:
            raise ConfigError(f"join: {len(joins)} entries, over {MAX_JOINS}")
        self._resolver = resolver
        self._interval_s = interval_s
        rng = random.Random() if rng is None else rng
        unique = dict.fromkeys(parse_join(text) for text in joins)
        self._seeds = [Seed(join, rng, time.monotonic()) for join in unique]
        self._feed = Feed()
        self._quiet = Quiet(limit=MAX_JOINS)
        self._tasks: list[asyncio.Task[None]] = []
        self._dropped = 0
        self._closing = False

    def sightings(self) -> AsyncIterator[Sighting]:
        """Yield relays as `Discovery` says."""
        if not self._tasks and not self._closing:
            for seed in self._seeds:
                task = asyncio.create_task(self._follow(seed), name=f"seed {seed.join.text}")
                task.add_done_callback(self._ended)
                self._tasks.append(task)
        return self._feed.read()

    async def close(self) -> None:
        """End `sightings` and the lookups; a thread that still looks up is left to end by itself."""
        self._closing = True
        self._feed.end()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def status(self) -> dict[str, object]:
        """Return what was tried and found, as JSON-able facts."""
        return {
            "kind": "seeds",
            "tried": [
                seed.join.source + (f" ({seed.error})" if seed.error else "")
                for seed in self._seeds
            ],
            "joins": [seed.status() for seed in self._seeds],
            "waiting": len(self._feed),
            "dropped": {"reader_lags": self._dropped} if self._dropped else {},
        }

    async def _follow(self, seed: Seed) -> None:
        """Look one entry up whenever it is due."""
        join = seed.join
        while seed.due_s is not None:
            delay_s = seed.due_s - time.monotonic()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
                continue
            try:
                if join.numeric:
                    addresses: Sequence[str] = (join.host,)
                else:
                    addresses = await self._resolver(join.host, join.port)
                if not addresses:
                    raise OSError("it has no addresses")
            except OSError as error:
                self._failed(seed, error)
                continue
            failed_before = seed.error is not None
            news = seed.answered(addresses, time.monotonic(), interval_s=self._interval_s)
            if failed_before:
                shown_few = [shown(ip, join.port) for ip in seed.addresses[:16]]
                fields = {"join": join.text, "addresses": shown_few}
                log.info("discovery.resolved", extra={"fields": fields})
            for sighting in news:
                key: object = sighting.addresses if join.kind == "dns" or sighting.gone else None
                if not self._feed.put((join.source, key), sighting):
                    self._dropped += 1
        # A numeric address is sighted once; the task stays, so that its end is always a fault.
        await asyncio.Event().wait()

    def _failed(self, seed: Seed, error: OSError) -> None:
        """Count a failed lookup, and say so if it is news."""
        reason = error.strerror or str(error)
        if seed.failed(reason, time.monotonic()):
            text = seed.join.text
            fields = {"join": text, "reason": reason}
            key = (text, reason)
            self._quiet.warning(log, "discovery.unresolved", key, time.monotonic(), fields)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._feed.end(task.exception() or RuntimeError(f"{task.get_name()} ended"))
