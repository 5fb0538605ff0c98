"""Sessions: what they have proven, their members and their watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from iris.core.heartbeat import ClockSamples
from iris.wire.frames import Serving
from iris.wire.kinds import Kind
from relay.core.buckets import Bucket
from relay.core.neighbor import Load, Neighbor
from relay.core.ports import Port

if TYPE_CHECKING:
    from relay.core.admitted import Admitted

MAX_SHOWN_KEYS: Final = 64
"""Keys of one session in a status report."""

UNSERVED_BYTES: Final = 1 << 20
"""Bytes in flight at a member of requests to that one member that it does not serve."""

Granted = tuple[str, str, bytes]
"""("stream", "topic" or "cluster"; name or filter; key id)."""


class Session(Neighbor):
    """A process on this host, or (`remote`) over TLS on another, or (`web`, too) over WebSocket."""

    __slots__ = (
        "challenge",
        "channel",
        "granted",
        "groups",
        "had_pairs",
        "keyed",
        "leaving",
        "members",
        "origin",
        "ours",
        "pairs",
        "parked_bytes",
        "pid",
        "proofs",
        "proven",
        "rate",
        "remote",
        "samples",
        "session_id",
        "settling",
        "staying",
        "subscriptions",
        "takes_descriptors",
        "ticket",
        "topic_nodes",
        "watches",
        "web",
    )

    def __init__(
        self, port: Port, number: int, challenge: bytes, max_aliases: int, remote: bool, web: bool, ours: bool, user: str
    ) -> None:  # fmt: skip
        super().__init__(port, number, max_aliases)
        self.user = user
        self.remote = remote
        self.web = web
        self.origin: str | None = None
        """Over WebSocket: the Origin of the page, if the peer named one."""
        self.ticket: Admitted | None = None
        """Over WebSocket: what it may do. None: it is not restricted."""
        self.samples: ClockSamples | None = None
        """Over WebSocket: samples of its clock, in place of heartbeats."""
        self.ours = ours
        """A process of the relay's own user or of root, which may be a store."""
        self.session_id = number.to_bytes(8, "little")
        self.challenge = challenge
        self.channel = b""
        """Over TLS: hash of the relay's certificate, to which proofs of keys are bound."""
        self.pid = 0
        self.proven: set[bytes] = set()
        """Ids of the keys that it has proven."""
        self.proofs = 0
        """Signatures checked, including those of keys that were proven already."""
        self.granted: set[Granted] = set()
        """What a store may do without holding the key."""
        self.topic_nodes = 0
        """Topic tree nodes that its subscriptions may need."""
        self.keyed = 0
        """Its members, each counted once per key id."""
        self.parked_bytes = 0
        """Bytes of its calls that wait for a relay to come back."""
        self.members: dict[int, Member] = {}
        """Serial -> member."""
        self.subscriptions: dict[tuple[str, str], tuple[bytes, ...]] = {}
        """(filter, group) -> key ids."""
        self.groups: dict[str, int] = {}
        """Queue group -> number of subscriptions in it."""
        self.watches: dict[int, Watch] = {}
        """Watch id -> watch."""
        self.rate: Bucket | None = None
        """Its own rate quota, if sessions have one."""
        self.takes_descriptors = False
        """It is connected by a socket of this host, over which it can receive file descriptors."""
        self.pairs = 0
        """Ends of socket pairs that its tunnels have."""
        self.had_pairs = False
        self.settling = 0
        """Its SETTLEs that wait for other relays."""
        self.leaving = 0
        """Its subscriptions that are being left: see `relay.core.leavers`."""

        self.staying: list[Callable[[], None]] = []
        """What ends the subscriptions that it left but for what nobody else takes, when it ends itself."""

    def let_go(self) -> None:
        """Drop its tables, too: a route that others refer to may refer to it."""
        super().let_go()
        self.proven, self.granted = set(), set()
        self.members, self.subscriptions, self.groups, self.watches = {}, {}, {}, {}

    @property
    def stores(self) -> bool:
        """Whether it is a store."""
        return any(Kind.STREAM in member.loads for member in self.members.values())

    @property
    def shown_keys(self) -> list[str]:
        """The keys that it has proven, for operators.

        The first 8 hex digits of each id, then how many are not shown.
        """
        keys = sorted(key_id.hex()[:8] for key_id in self.proven)
        more = len(keys) - MAX_SHOWN_KEYS
        return keys if more <= 0 else [*keys[:MAX_SHOWN_KEYS], f"+{more}"]


class Member:
    """One JOIN of one session."""

    __slots__ = (
        "cancels",
        "key_ids",
        "left",
        "listed",
        "loads",
        "methods",
        "name",
        "serial",
        "session",
        "tag",
        "unserved",
    )

    def __init__(
        self,
        session: Session,
        serial: int,
        name: str,
        key_ids: tuple[bytes, ...],
        kinds: dict[int, Serving],
        tag: str = "",
        methods: int = 0,
    ) -> None:
        self.session = session
        self.serial = serial
        self.name = name
        self.key_ids = key_ids
        self.tag = tag
        self.methods = methods
        """Number of its methods, as its session says."""
        self.listed = is_listed(kinds)
        self.left = False
        """It gets nothing new, and stays known until its calls in flight have ended."""
        self.loads = {
            kind: Load(session, self, kind, serving.concurrency, serving.limit_bytes)
            for kind, serving in sorted(kinds.items())
        }
        self.cancels = frozenset(kind for kind, serving in kinds.items() if serving.cancel)
        """Kinds whose handlers end when their caller leaves, so that it is told of these callers."""
        self.unserved: Load | None = None
        """Requests to exactly this member in flight, if it does not serve requests; its library answers them."""

    def load(self, kind: int) -> Load | None:
        """Return the load for calls of a kind to exactly this member; None if it cannot be sent any.

        A member is sent requests even if it does not serve them: its library answers.
        """
        load = self.loads.get(kind)
        if load is None and kind == Kind.REQUEST and self.listed:
            load = self.unserved
            if load is None:
                load = self.unserved = Load(self.session, self, kind, 1, UNSERVED_BYTES)
        return load

    def forget_if_done(self) -> None:
        """Forget the member once it has left and finished its calls."""
        if self.unserved is not None and self.unserved.messages:
            return
        if self.left and not any(load.messages for load in self.loads.values()):
            self.session.members.pop(self.serial, None)
            self.loads, self.unserved = (
                {},
                None,
            )  # they refer to it, and cycles are collected seldom


def is_listed(kinds: Iterable[int]) -> bool:
    """Whether something that serves these kinds is a member of its cluster; with streams alone it is a
    store of that name.
    """
    return any(kind != Kind.STREAM for kind in kinds)


class Watch:
    """A session that is notified of changes in a cluster. Each of `key_ids` counts as a cluster of its own."""

    __slots__ = ("key_ids", "name", "number", "session", "since")

    def __init__(
        self, session: Session, number: int, name: str, key_ids: tuple[bytes, ...]
    ) -> None:
        self.session = session
        self.number = number
        self.name = name
        self.key_ids = key_ids
        self.since = 0
        """Number of the last change before it: its session knows of that."""
