"""Publish and broadcast: one copy to every session and link that wants it, each frame as it came but for its alias.

What comes over a link goes to sessions alone, as the delivery set of its alias says: the publisher's relay has chosen for
every queue group which session or which relay gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from iris.errors import PeerProtocolError
from iris.wire.codec import ALIAS, ALIAS_AT, BODY_AT, CAST, END_AT
from iris.wire.frames import UNKNOWN_COUNT, Gap, HopClass, Kind
from relay.core.interest import Interest
from relay.core.ports import Accounts
from relay.core.session import Neighbor, Route, Target

if TYPE_CHECKING:
    from relay.core.link import Link

_FIRST: Final = END_AT + 16


class Casts:
    """The router's half that expects no answers."""

    def __init__(self, accounts: Accounts, interest: Interest) -> None:
        self._accounts = accounts
        self._interest = interest

    def cast(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        """Publish or broadcast: to every target."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        kind, alias, count = CAST.unpack_from(buf, start)
        try:
            route = neighbor.routes[alias]
        except IndexError:
            route = None
        if route is None or route.kind != kind:
            raise PeerProtocolError(f"alias {alias} was not declared for this kind of frame")
        interest = self._interest
        if route.version != interest.version:
            self._resolve(route)
        if not 0 < 4 * count < end - start:  # each message has an offset of 4 bytes
            raise PeerProtocolError(f"{count} messages in a frame of {end - start} bytes")
        accounts = self._accounts
        accounts.in_ += count
        interest.tick = tick = interest.tick + 1
        target = route.single
        if target is not None:
            known = target.alias
            if known.number < 0:
                if not target.port.has_room(end - start):
                    self._too_slow(target, buf, start, count)
                    return
                known = target.declare(tick)
            known.used = tick
            ALIAS.pack_into(buf, start + ALIAS_AT, known.number)
            if target.port.forward(buf, start, end, count):
                accounts.out += count
            else:
                self._too_slow(target, buf, start, count)
            return
        targets = route.many
        if route.groups:
            targets = self._choose(route)
        if not targets:
            accounts.drop("unwanted", count)
            return
        accounts.copied += count * (len(targets) - 1)
        frame = bytearray(buf[start:end])
        for target in targets:
            if not target.port.has_room(len(frame)):
                self._too_slow(target, buf, start, count)
                continue
            ALIAS.pack_into(frame, ALIAS_AT, target.number(tick))
            if target.port.send(bytes(frame), count):
                accounts.out += count
            else:
                self._too_slow(target, buf, start, count)

    def _too_slow(self, target: Target, buf: memoryview, start: int, count: int) -> None:
        self._accounts.drop("slow receiver", count)
        first = int.from_bytes(buf[start + _FIRST : start + _FIRST + 8], "little")
        target.neighbor.dropped(target.delivery, first, count)

    def _resolve(self, route: Route) -> None:
        """Find who gets this route's casts while the interest stays as it is."""
        route.targets.clear()
        route.groups = ()
        if route.kind == Kind.BROADCAST:
            route.many = self._members(route)
        else:
            plain, groups = self._subscribers(route)
            if groups:
                route.many = ()
                route.groups = [("", plain), *groups.items()]
            else:
                route.many = [route.target(neighbor, 0) for neighbor in plain]
        route.single = route.many[0] if len(route.many) == 1 else None
        route.version = self._interest.version

    def _members(self, route: Route) -> list[Target]:
        interest = self._interest
        loads = interest.loads(route.name, route.key_id, Kind.BROADCAST)
        if route.neighbor.hop_class == HopClass.LOCAL:
            loads += interest.peer_loads(route.name, route.key_id, Kind.BROADCAST)
        return [route.target(load.neighbor, load.serial) for load in loads]

    def _subscribers(self, route: Route) -> tuple[list[Neighbor], dict[str, list[Neighbor]]]:
        """Return who wants it without a group, and the candidates of every group: a link once for each of its sessions."""
        plain, groups = self._interest.subscribers(route.name, route.key_id)
        if route.neighbor.hop_class == HopClass.LOCAL:
            for group, candidates in groups.items():
                weighed: list[Neighbor] = []
                for candidate in candidates:
                    link: Link | None = candidate if candidate.hop_class else None  # type: ignore[assignment]
                    weighed += [candidate] * (
                        1 if link is None else link.weight(route.key_id, group)
                    )
                groups[group] = weighed
            return plain, groups
        here = [neighbor for neighbor in plain if not neighbor.hop_class] if route.plain else []
        chosen: dict[str, list[Neighbor]] = {}
        for group in route.only:
            sessions = [n for n in groups.get(group, ()) if not n.hop_class]
            if sessions:
                chosen[group] = sessions
        return here, chosen

    def _choose(self, route: Route) -> Sequence[Target]:
        """Choose one session or link per queue group for a bundle; one that is slow is passed over."""
        route.turn += 1
        (_, plain), *groups = route.groups
        chosen: dict[int, list[str]] = {neighbor.number: [] for neighbor in plain}
        neighbors = {neighbor.number: neighbor for neighbor in plain}
        for name, candidates in groups:
            first = route.turn % len(candidates)
            order = [*candidates[first:], *candidates[:first]]
            neighbor = next((n for n in order if not n.port.held_messages), order[0])
            neighbors[neighbor.number] = neighbor
            chosen.setdefault(neighbor.number, []).append(name)
        alone = {neighbor.number for neighbor in plain}
        return [
            route.target(neighbors[number], 0, number in alone, tuple(names))
            for number, names in chosen.items()
        ]

    # -- losses ----------------------------------------------------------------------------------------------

    def gap_from_link(self, gap: Gap) -> None:
        """The relay behind a link dropped messages on their way here: whoever would have got them hears of it."""
        if gap.kind == Kind.BROADCAST:
            for load in self._interest.loads(gap.name, gap.key_id, Kind.BROADCAST):
                self._tell(load.neighbor, gap, load.serial, ())
            return
        plain, groups = self._interest.subscribers(gap.name, gap.key_id)
        if gap.plain:
            for neighbor in plain:
                if not neighbor.hop_class:
                    self._tell(neighbor, gap, 0, ())
            return
        for group in gap.groups:
            # Whose turn it would have been, nobody knows: the oldest member of the group hears it.
            here = next((n for n in groups.get(group, ()) if not n.hop_class), None)
            if here is not None:
                self._tell(here, gap, 0, (group,))

    def link_lost(self, link: Link) -> None:
        """What was on its way over a lost link is lost, and nobody knows how much."""
        for route in link.routes:
            if route is None or route.version < 0:
                continue
            if route.kind in (Kind.PUBLISH, Kind.BROADCAST):
                cause = "a link on the way was lost"
                address = (route.kind, route.name, route.key_id, route.sender_id)
                delivery = (route.plain, list(route.only))
                self.gap_from_link(Gap(*address, 0, UNKNOWN_COUNT, cause, *delivery))

    def _tell(self, neighbor: Neighbor, gap: Gap, member: int, groups: Sequence[str]) -> None:
        address = (gap.kind, gap.name, gap.key_id, gap.sender_id)
        delivery = (not groups, list(groups), member)
        neighbor.control(Gap(*address, gap.first, gap.count, gap.cause, *delivery))
