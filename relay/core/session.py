"""A session as the router knows it: what it proved, declared, serves and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from iris.core.aliases import Alias, AliasTable
from iris.wire.codec import encode_control
from iris.wire.frames import Control, Declare, Gap, Kind
from relay.core.interest import Load, Member, Watch
from relay.core.ports import Held, Port

MAX_GAPS: Final = 65_536
MAX_TARGETS: Final = 1024

Delivery = tuple[int, str, bytes, bytes, bool, tuple[str, ...], int]
"""kind, name, key id, sender id, plain, groups, member: all that an alias towards a session stands for."""


_UNDECLARED: Final = Alias(-1, 0)


class Target:
    """One delivery set at one session, and the alias that stands for it there, declared at its first message."""

    __slots__ = ("alias", "delivery", "port", "session")

    def __init__(self, session: Session, delivery: Delivery) -> None:
        self.session = session
        self.port = session.port
        self.delivery = delivery
        self.alias = _UNDECLARED

    def number(self, tick: int) -> int:
        """Return the alias number, declared anew if it was taken for something else."""
        alias = self.alias if self.alias.number >= 0 else self.declare(tick)
        alias.used = tick
        return alias.number

    def declare(self, tick: int) -> Alias:
        """Return the alias, declared: it is new, or its number was taken for something else."""
        self.alias = self.session.out_alias(self.delivery, tick)
        return self.alias


class Route:
    """An alias that a session declared: where its frames go. What is cached holds for one `version` of the interest."""

    __slots__ = (
        "groups", "key_id", "kind", "loads", "many", "name", "sender_id", "session", "single", "targets", "turn", "version",
    )  # fmt: skip

    def __init__(self, session: Session, declared: Declare) -> None:
        self.session = session
        self.kind = declared.kind
        self.name = declared.name
        self.key_id = declared.key_id
        self.sender_id = declared.sender_id
        self.version = -1
        self.turn = 0
        """Rises with every choice, so that equals take turns."""
        self.single: Target | None = None
        """The only receiver, when there is exactly one and no group to choose for."""
        self.many: Sequence[Target] = ()
        self.groups: Sequence[tuple[str, Sequence[Session]]] = ()
        self.loads: Sequence[Load] = ()
        self.targets: dict[tuple[int, int, bool, tuple[str, ...]], Target] = {}

    def target(
        self, session: Session, member: int, plain: bool = True, groups: tuple[str, ...] = ()
    ) -> Target:
        """Return the target for a delivery at `session`."""
        place = (session.number, member, plain, groups)
        target = self.targets.get(place)
        if target is None:
            if len(self.targets) >= MAX_TARGETS:
                self.targets.clear()
            delivery = (self.kind, self.name, self.key_id, self.sender_id, plain, groups, member)
            target = self.targets[place] = Target(session, delivery)
        return target


class Survey:
    """One survey on the way: who has not answered, and who was lost."""

    __slots__ = ("hop", "lost", "open", "origin", "waits")

    def __init__(self, origin: Session, hop: int) -> None:
        self.origin = origin
        self.hop = hop
        self.open = 0
        self.lost: list[str] = []
        self.waits = True
        """The origin may still wait: this counts in its `pending`."""

    def ended(self) -> None:
        """The origin waits no more."""
        if self.waits:
            self.waits = False
            self.origin.pending -= 1


class Handed:
    """A request, push, survey or tunnel opening that a member was handed and has not finished."""

    __slots__ = (
        "attempts",
        "deadline_us",
        "hop",
        "load",
        "origin",
        "route",
        "size",
        "survey",
        "tried",
        "waits",
    )

    def __init__(self, origin: Session, hop: int, route: Route, size: int) -> None:
        self.origin = origin
        self.hop = hop
        """The origin's hop id."""
        self.route = route
        self.size = size
        self.load: Load
        self.attempts = 0
        self.tried: list[Load] = []
        self.survey: Survey | None = None
        self.deadline_us = 0
        self.waits = True
        """The origin may still wait: this counts in its `pending`."""

    def ended(self) -> None:
        """The origin waits no more."""
        if self.waits:
            self.waits = False
            self.origin.pending -= 1


class Tunnel:
    """A tunnel's two ends: the opener's session and hop id, the member's session and hop id."""

    __slots__ = ("member", "member_held", "member_hop", "opener", "opener_held", "opener_hop")

    def __init__(self, opener: Session, opener_hop: int, member: Session, member_hop: int) -> None:
        self.opener = opener
        self.opener_hop = opener_hop
        self.member = member
        self.member_hop = member_hop
        self.opener_held = Held()
        self.member_held = Held()


class Session:
    """The router's side of one session."""

    __slots__ = (
        "aliases", "challenge", "closed", "gaps", "greeted", "groups", "handed", "label", "members", "number", "pending",
        "pid", "places", "port", "proofs", "proven", "routes", "session_id", "subscriptions", "swept_us", "tunnels", "watches",
    )  # fmt: skip

    def __init__(self, port: Port, number: int, challenge: bytes, max_aliases: int) -> None:
        self.port = port
        self.number = number
        self.session_id = number.to_bytes(8, "little")
        self.challenge = challenge
        self.greeted = False
        self.closed = False
        self.label = ""
        self.pid = 0
        self.proven: set[bytes] = set()
        self.proofs = 0
        """Signatures checked, those that held before included."""
        self.places = 0
        """Nodes of the topic tree that its subscriptions may take."""
        self.swept_us = 0
        self.routes: list[Route | None] = []
        self.aliases: AliasTable[Delivery] = AliasTable(max_aliases)
        self.members: dict[int, Member] = {}
        self.subscriptions: dict[tuple[str, str], tuple[bytes, ...]] = {}
        """(filter, group) -> key ids."""
        self.groups: dict[str, int] = {}
        """Queue group -> subscriptions in it."""
        self.watches: dict[int, Watch] = {}
        self.handed: dict[int, Handed] = {}
        """By the hop id that we gave: what this session's members run."""
        self.pending = 0
        """What this session waits for."""
        self.tunnels: dict[int, Tunnel] = {}
        self.gaps: dict[Delivery, list[int]] = {}
        """Dropped on the way to this session and not yet told: delivery -> [first sequence, count]."""

    def forget(self) -> None:
        """Its connection is gone: whoever still refers to it keeps little."""
        self.closed = True
        self.routes = []
        self.gaps = {}
        self.aliases = AliasTable(1)

    def control(self, body: Control) -> None:
        """Send it a control frame."""
        self.port.control(encode_control(body))

    def out_alias(self, delivery: Delivery, tick: int) -> Alias:
        """Return the alias for a delivery towards this session, declared if it is new."""
        alias = self.aliases.get(delivery)
        if alias is None:
            alias = self.aliases.add(delivery, tick)
            kind, name, key_id, sender_id, plain, groups, member = delivery
            self.control(
                Declare(alias.number, kind, name, key_id, sender_id, plain, list(groups), member)
            )
        return alias

    def dropped(self, delivery: Delivery, first: int, count: int) -> None:
        """Remember a loss on the way to this session, to be told when there is room.

        The receiver itself sees a loss between what arrives, so of a plain delivery the latest run is remembered. Where
        a run starts is said at once, in order: a receiver that knew nothing of this sender counts from there.
        """
        gap = self.gaps.get(delivery)
        plain = delivery[4]
        if gap is not None and (not plain or gap[0] + gap[1] == first):
            gap[1] += count
        elif gap is not None or len(self.gaps) < MAX_GAPS:
            self.gaps[delivery] = [first, count]
            if plain:
                self._tell(delivery, first, 0, "slow receiver")

    def tell_gaps(self) -> None:
        """Send the losses remembered: there is room again."""
        gaps, self.gaps = self.gaps, {}
        for delivery, (first, count) in gaps.items():
            self._tell(delivery, first, count, "slow receiver")

    def _tell(self, delivery: Delivery, first: int, count: int, cause: str) -> None:
        kind, name, key_id, sender_id, plain, groups, member = delivery
        # `first` is the sender's word, and `count` a sum: they may not fit the fields.
        first, count = min(first, (1 << 63) - 1), min(count, (1 << 32) - 1)
        self.control(
            Gap(kind, name, key_id, sender_id, first, count, cause, plain, list(groups), member)
        )


def kind_name(kind: int) -> str:
    """Return the name of a frame kind for messages to people."""
    return Kind(kind).name.lower().removesuffix("_open")
