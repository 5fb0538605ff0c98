"""A live network as it is shown: relays, links, sites, clusters, streams, and what is slow in it.

A `Network` is made from two samples. A name ending in `_rate` is a number per second between them, and None in the
first sample or if the counter began again. Names and texts come from other processes: they hold no control characters
and are cut to `MAX_TEXT` characters (errors to `MAX_SENTENCE`), and a page must still escape them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from iris.wire.texts import json_bytes

MAX_TEXT: Final = 128
MAX_SENTENCE: Final = 512
"""Characters of an error or of a problem."""
MAX_RELAYS: Final = 128
MAX_LINKS: Final = 256
MAX_SITES: Final = 64
MAX_CLUSTERS: Final = 64
MAX_MEMBERS: Final = 64
"""Members that are shown of one cluster."""
MAX_HANDLERS: Final = 32
"""Handlers that are shown of one member."""
MAX_PROGRAMS: Final = 128
MAX_STREAMS: Final = 64
MAX_CONSUMERS: Final = 32
"""Consumers that are shown of one stream."""
MAX_DROPS: Final = 64
MAX_TROUBLES: Final = 64
MAX_SLOW: Final = 64


def called(program: str, pid: int) -> str:
    """Return what people call a process."""
    return f"{program} (pid {pid})"


class Relay(Struct, frozen=True, kw_only=True):
    """One relay. Those that were not asked are known by a link, and have no rates."""

    id: str
    """32 hex digits; "" if it has never answered."""
    host: str
    site: str
    address: str = ""
    """What was asked: a socket or tls://…; "" if it is known by a link only."""
    state: str = "up"
    """"up", "draining", "suspended" (its link was lost a moment ago) or "away"."""
    asked: bool = False
    limited: bool = False
    """Whether it gave totals only, because it runs as another user or was asked over TLS."""
    uptime_s: float | None = None
    in_rate: float | None = None
    """Messages that it received; the following are those that it sent, that nobody wanted, that it refused and dropped,
    and that expired."""
    out_rate: float | None = None
    unwanted_rate: float | None = None
    refused_rate: float | None = None
    dropped_rate: float | None = None
    expired_rate: float | None = None
    account: dict[str, int] = {}
    """Its account of messages since it started: in, copied, out, unwanted, refused, dropped, expired and held."""
    held: int | None = None
    """Messages that wait in it."""
    queued_bytes: int | None = None
    queue_limit_bytes: int | None = None
    sessions: int | None = None
    links: int | None = None
    error: str = ""


class Link(Struct, frozen=True, kw_only=True):
    """A connection of a relay to another relay of its site, as `relay` sees it."""

    relay: str
    relay_host: str
    peer: str
    """Id of the other relay; "" if it has never been reached."""
    peer_host: str
    address: str = ""
    site: str = ""
    state: str = "up"
    """"up", "suspended" (lost a moment ago) or "unlinked"."""
    rtt_ms: float | None = None
    in_rate: float | None = None
    """Frames received, and sent."""
    out_rate: float | None = None
    in_bytes_rate: float | None = None
    queued_bytes: int = 0
    held: int = 0
    members: int = 0
    clock_offset_ms: float | None = None
    """The peer's wall clock minus that of `relay`; None if it was not measured."""
    clock_error_ms: float | None = None
    """Limit of the error of the offset: half of the round trip in which it was measured."""
    error: str = ""


class Site(Struct, frozen=True, kw_only=True):
    """A site: the own one, or one that gateways lead to."""

    name: str
    own: bool = False
    state: str = "up"
    """"up", "suspended" (lost a moment ago) or "unlinked"."""
    rtt_ms: float | None = None
    loss: float | None = None
    """Share of TCP segments that were sent again: 0 to 1. Only a gateway knows it."""
    cost_ms: int = 0
    ways: int = 0
    """Connections of gateways that lead there."""
    clusters: int = 0
    topics: int = 0


class HandlerRates(Struct, frozen=True, kw_only=True):
    """One handler of a member. Percentiles are of the calls that were timed in the last 10 s."""

    kind: str
    name: str
    """Name of the method; "" without one."""
    handled_rate: float | None = None
    failed_rate: float | None = None
    refused_rate: float | None = None
    expired_rate: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    """The longest call since the member serves."""


class Member(Struct, frozen=True, kw_only=True):
    """One member of a cluster, as it describes itself."""

    id: str
    host: str
    relay: str
    site: str
    program: str
    service: str = ""
    version: str = ""
    iris: str = ""
    pid: int = 0
    """Process id at its host; 0 if it is not known."""
    serves: list[str] = []
    state: str = "up"
    """"up", "silent" (it did not answer) or "unasked" (not in this sample: its figures are older)."""
    age_s: float | None = None
    running: int = 0
    queued: int = 0
    queued_bytes: int = 0
    queued_for_s: float = 0.0
    """For how long its queue has not been empty in any sample."""
    queued_rate: float | None = None
    """Change of `queued` per second over the last 10 s."""
    handled_rate: float | None = None
    failed_rate: float | None = None
    refused_rate: float | None = None
    expired_rate: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    timed: int = 0
    """Calls in the last 10 s of which the percentiles are."""
    dropped_rates: dict[str, float] = {}
    """Messages that its process drops, per second, by cause."""
    loop_held: int = 0
    """How often one of its handlers held up the event loop in the last minute."""
    handlers: list[HandlerRates] = []
    error: str = ""

    @property
    def called(self) -> str:
        """What people call it: its program, and its process id if that is known."""
        return f"{self.program} {self.pid}" if self.pid else self.program


class Cluster(Struct, frozen=True, kw_only=True):
    """A cluster; rates and queues are the sums of its members in this site."""

    name: str
    keyed: bool
    """Whether a key for it is held. Without one its members are only counted."""
    total: int
    """Members in this site."""
    members: list[Member] = []
    other_members: int = 0
    """Members in this site that are not in `members`, because no key is held or there are too many."""
    other_keys: dict[str, int] = {}
    """Members under keys that are not held: digits of the key id -> number."""
    sites: dict[str, int] = {}
    """Members in other sites."""
    handled_rate: float | None = None
    failed_rate: float | None = None
    refused_rate: float | None = None
    expired_rate: float | None = None
    running: int = 0
    queued: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None


class Program(Struct, frozen=True, kw_only=True):
    """One session of a relay that was asked: a process that is connected to it."""

    relay: str
    host: str
    label: str
    session: int
    pid: int
    user: str
    members: int = 0
    subscriptions: int = 0
    running: int = 0
    waiting: int = 0
    tunnels: int = 0
    held: int = 0
    """Messages that wait in the relay, because the program does not read fast enough."""
    held_for_s: float = 0.0
    """For how long messages have waited in every sample."""
    lost_messages: int = 0
    """Messages that it reports to have lost since it connected."""
    failed: int = 0
    """Calls of its handlers that raised."""

    @property
    def called(self) -> str:
        """What people call it."""
        return called(self.label, self.pid)


class Consumer(Struct, frozen=True, kw_only=True):
    """A consumer of a stream. All counts are messages but `workers`."""

    name: str
    shared: bool
    workers: int
    lag: int
    """Messages that are not settled."""
    pending: int
    redelivering: int
    dead: int
    """Dead letters that are not stored yet."""
    missed: int
    late: int
    paused: bool = False
    lag_rate: float | None = None
    """Change of the lag per second over the last 10 s; over 0 it falls behind."""
    settled_rate: float | None = None


class Stream(Struct, frozen=True, kw_only=True):
    """A stream under a key that is held."""

    name: str
    uuid: str
    host: str
    store: str
    source: str
    """"topic orders.>", "cluster orders", "mirror of orders" or ""."""
    messages: int
    size_bytes: int
    in_rate: float | None = None
    lost_messages: int = 0
    paused: bool = False
    failed: str = ""
    dead_letters: int = 0
    mirror_lag: int | None = None
    lag: int = 0
    """The largest lag of its consumers."""
    consumers: list[Consumer] = []
    other_consumers: int = 0


class Drop(Struct, frozen=True, kw_only=True):
    """Messages that a relay or the process of a member dropped for one cause."""

    where: str
    """"relay HOST", "member ID", or "program NAME (pid PID)" for what a program has reported."""
    host: str
    cause: str
    rate: float | None
    total: int


class Trouble(Struct, frozen=True, kw_only=True):
    """What one program has reported of one cause to a relay that was asked; it may have ended since."""

    host: str
    program: str
    pid: int
    session: int
    cause: str
    """"queue full", "unread", "missing", "uncounted", "not sent" (messages lost) or "handler failed" (calls)."""
    names: dict[str, int] = {}
    """Some of it by cluster, topic or filter."""
    rate: float | None = None
    total: int
    last_s: float
    """Seconds since the last report."""


class Slow(Struct, frozen=True, kw_only=True):
    """Something that is slow, loses messages or fails, or is about to, and the figures that say so."""

    kind: str
    """"member", "program", "link", "relay", "consumer", "stream" or "clock"."""
    who: str
    """Id of a member, and what people call anything else."""
    name: str
    """What people call it: for a member its program and process id."""
    host: str
    where: str
    """Its cluster or stream; "" if it has none."""
    why: list[str]
    """One phrase for each reason, such as "queue of 31 messages, growing by 4 a second"."""
    since_s: float
    """For how long this has been so in every sample."""


class Totals(Struct, frozen=True, kw_only=True):
    """Sums over everything that is known, also what tables leave out. A viewer shows these and adds up nothing."""

    in_rate: float | None = None
    """Messages that the relays that were asked received; the following are those that they sent and refused."""
    out_rate: float | None = None
    refused_rate: float | None = None
    dropped_rate: float | None = None
    """Messages dropped at relays and in programs; `Network.drops` names the causes."""
    unwanted_rate: float | None = None
    """Publications and broadcasts that nobody subscribes to, or no member receives. This is not a fault."""
    handled_rate: float | None = None
    """Calls that members of clusters handled."""


class Network(Struct, frozen=True, kw_only=True):
    """Everything that one watch knows at one time."""

    serial: int
    """1 for the first."""
    time_us: int
    """Wall clock in µs since 1970, to be shown."""
    interval_s: float
    """Seconds between the two samples; 0.0 in the first."""
    totals: Totals = Totals()
    relays: list[Relay] = []
    links: list[Link] = []
    sites: list[Site] = []
    clusters: list[Cluster] = []
    programs: list[Program] = []
    streams: list[Stream] = []
    drops: list[Drop] = []
    troubles: list[Trouble] = []
    slow: list[Slow] = []
    problems: list[str] = []
    """What could not be found out, a sentence each."""
    other: dict[str, int] = {}
    """Table -> rows that are left out, because the table is at its limit."""


def as_json(network: Network) -> bytes:
    """Return a network as one JSON object."""
    return json_bytes(network)


def as_dict(network: Network) -> dict[str, Any]:
    """Return a network as a document."""
    document: dict[str, Any] = msgspec.to_builtins(network)
    return document
