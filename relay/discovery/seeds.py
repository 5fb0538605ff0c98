"""Relays that the operator named: `--join HOST:PORT` and `--join dns:NAME[:PORT]`.

`HOST:PORT` is one relay at all addresses of HOST, reported as one sighting. `dns:NAME` is many relays, one at each
A and AAAA record (a Kubernetes headless service), reported as one sighting each; this host's address may be among
them. Names are looked up again about every 10 s by the system's resolver, so /etc/hosts works. Numeric addresses
are reported once.

When an answer changes, the new addresses are reported, and the missing ones are reported as gone. A failed lookup
changes nothing, because a lost name server does not mean that relays left. It is repeated after 1, 2, 4 ... 30 s.
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
"""Interval between two lookups of a name, +- 20 %."""

RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
MAX_JOINS: Final = 256
"""Most entries of one relay; each name needs a thread while it is looked up."""

MAX_ADDRESSES: Final = 1024
"""Most addresses of one name; further ones are left out and counted."""

_DNS: Final = "dns:"
_LABEL: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_SCOPE: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function from (name, port) to numeric addresses, best first. Raises OSError."""


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
        """The source of this entry's sightings."""
        return f"{self.kind}{' ' if self.kind == 'join' else ':'}{shown(self.host, self.port)}"


def shown(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_join(text: str) -> Join:
    """Parse `HOST[:PORT]` or `dns:NAME[:PORT]`; the default port is 7430.

    HOST is a name, an IPv4 address, or an IPv6 address in brackets ("[fe80::1%eth0]:7430").

    Raises:
        ConfigError: the text has another form; the message quotes it.
    """
    if "://" in text:
        raise ConfigError(
            f"join: {text!r} is neither HOST:PORT nor dns:NAME:PORT; write it without '://'"
        )
    kind: Literal["join", "dns"] = "dns" if text.startswith(_DNS) else "join"
    rest = text.removeprefix(_DNS) if kind == "dns" else text
    if rest.startswith("["):
        host, bracket, after = rest[1:].partition("]")
        if not bracket or (after and not after.startswith(":")):
            raise ConfigError(f"join: {text!r} is not [ADDRESS]:PORT")
        port_text = after[1:] if after else None
        numeric = _is_ipv6(host)
        if not numeric:
            raise ConfigError(
                f"join: {text!r} does not have an IPv6 address in its brackets; write other hosts without brackets"
            )
    else:
        if rest.count(":") > 1:
            raise ConfigError(
                f"join: {text!r} has several colons; write an IPv6 address in brackets, as in [fe80::1%eth0]:7430"
            )
        host, colon, after = rest.partition(":")
        port_text = after if colon else None
        numeric = _is_ipv4(host)
        if not numeric and not _is_name(host):
            raise ConfigError(f"join: {text!r} does not begin with a host name or IP address")
    if numeric and kind == "dns":
        raise ConfigError(f"join: {text!r} has an IP address after dns:; leave out dns:")
    port = DEFAULT_PORT if port_text is None else _port(port_text)
    if port is None:
        raise ConfigError(
            f"join: {text!r} has {port_text!r} for a port; a port is a number from 1 to 65535"
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
        # "10.0.0.300" is a mistyped address, not a name
        and not labels[-1].isdigit()
    )


async def resolve(name: str, port: int) -> Sequence[str]:
    """Return the numeric addresses of `name` in the system's order of preference (RFC 6724).

    The lookup runs in its own daemon thread: it cannot be cancelled and may take half a minute, and Python waits
    for the loop's own threads at exit.

    Raises:
        OSError: it has none, or the lookup failed.
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
        except UnicodeError as failed:  # the idna codec rejects the name
            error = OSError(str(failed))
        try:
            loop.call_soon_threadsafe(settle, addresses, error)
        except RuntimeError:
            # The loop was closed meanwhile, so nothing waits for the answer.
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
    """One entry of `--join` with its addresses. Sans-IO: the caller reports answers, and `due_s` is the next lookup."""

    __slots__ = ("_rng", "addresses", "due_s", "error", "failures", "join", "left_out", "lookups")

    due_s: float | None
    """Time of the next lookup; None: never again."""

    def __init__(self, join: Join, rng: random.Random, now_s: float) -> None:
        self.join = join
        self.addresses: tuple[str, ...] = ()
        self.error: str | None = None
        self.failures = 0
        """Failed lookups since the last successful one."""
        self.lookups = 0
        self.left_out = 0
        self.due_s = now_s
        self._rng = rng

    def answered(
        self, addresses: Sequence[str], now_s: float, *, interval_s: float = INTERVAL_S
    ) -> list[Sighting]:
        """Add an answer of at least one address; return the sightings that it causes."""
        unique = tuple(dict.fromkeys(addresses))
        self.lookups += 1
        self.error = None
        self.failures = 0
        self.left_out = max(0, len(unique) - MAX_ADDRESSES)
        self.due_s = None if self.join.numeric else now_s + interval_s * self._rng.uniform(0.8, 1.2)
        # The order may differ at each lookup. Known addresses are kept first, so that those of a name with too
        # many addresses do not appear and disappear.
        known = set(self.addresses)
        kept = sorted(unique, key=lambda ip: ip not in known)[:MAX_ADDRESSES]
        fresh = tuple(ip for ip in unique if ip in set(kept))
        news = self._difference(fresh)
        self.addresses = fresh
        return news

    def failed(self, error: str, now_s: float) -> bool:
        """Add a failed lookup; return whether it is the first one or has another error than the last."""
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
        """Return the state of the entry, ready for JSON."""
        return {
            "join": self.join.text,
            "addresses": [shown(ip, self.join.port) for ip in self.addresses],
            "error": self.error,
            "failures": self.failures,
            "lookups": self.lookups,
            "left_out": self.left_out,
        }


class SeedDiscovery:
    """Reports the relays that `joins`, entries of `--join`, name.

    Raises:
        ConfigError: an entry is malformed, or there are more than 256.
    """

    def __init__(
        self,
        joins: Sequence[str],
        *,
        resolver: Resolver = resolve,
        interval_s: float = INTERVAL_S,
    ) -> None:
        if len(joins) > MAX_JOINS:
            raise ConfigError(
                f"join: {len(joins)} entries are over the limit of {MAX_JOINS}; use dns:NAME for many relays"
            )
        self._resolver = resolver
        self._interval_s = interval_s
        rng = random.Random()
        unique = dict.fromkeys(parse_join(text) for text in joins)
        self._seeds = [Seed(join, rng, time.monotonic()) for join in unique]
        self._feed = Feed()
        self._quiet = Quiet(limit=MAX_JOINS)
        self._tasks: list[asyncio.Task[None]] = []
        self._dropped = 0
        self._closing = False

    def sightings(self) -> AsyncIterator[Sighting]:
        """Yield sightings; see `Discovery.sightings`."""
        if not self._tasks and not self._closing:
            for seed in self._seeds:
                task = asyncio.create_task(self._follow(seed), name=f"seed {seed.join.text}")
                task.add_done_callback(self._ended)
                self._tasks.append(task)
        return self._feed.read()

    async def close(self) -> None:
        """End `sightings` and the lookups. The thread of a lookup in progress ends by itself."""
        self._closing = True
        self._feed.end()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def status(self) -> dict[str, object]:
        """Return what was tried and found, ready for JSON."""
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
        """Look up one entry whenever it is due."""
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
                    raise OSError("the name has no addresses")
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
        # A numeric address is reported once. The task continues, so that the end of a task always means an error.
        await asyncio.Event().wait()

    def _failed(self, seed: Seed, error: OSError) -> None:
        """Count a failed lookup, and log it if it is the first one or has another error."""
        reason = error.strerror or str(error)
        if seed.failed(reason, time.monotonic()):
            text = seed.join.text
            fields = {"join": text, "reason": reason}
            key = (text, reason)
            self._quiet.warning(log, "discovery.unresolved", key, time.monotonic(), fields)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._feed.end(task.exception() or RuntimeError(f"{task.get_name()} ended"))
