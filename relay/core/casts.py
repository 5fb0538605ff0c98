"""Publications and broadcasts: one copy for every session, link and site that wants it; only the alias is rewritten.

What comes over a link goes to sessions only, as the delivery set of its alias says: the publisher's relay
has chosen a session, relay or site for every queue group. A gateway chooses again among the relays of its
own site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from iris.core.aliases import Alias
from iris.wire.codec import ALIAS, ALIAS_AT, FIRST, FIRST_AT
from iris.wire.frames import Gap, Share, Unrouted
from iris.wire.kinds import (
    MAX_PARTS,
    NO_MEMBERS,
    UNKNOWN_COUNT,
    HopClass,
    Kind,
)
from relay.core.connection import Delivery
from relay.core.credit import Credits, Flow
from relay.core.heads import cast_head
from relay.core.interest import Interest
from relay.core.leavers import Leavers
from relay.core.link import Link
from relay.core.missed_casts import MissedCasts
from relay.core.neighbor import UNUSED, Neighbor, Route, Subscriber, Target
from relay.core.other_keys import OtherKeys
from relay.core.ports import Accounts
from relay.core.session import Session
from relay.core.site_routes import SiteRoute, Wan
from relay.core.sites import Sites
from relay.core.slow import SlowReceivers

REPORT_EVERY_US: Final = 1_000_000
"""A remote site's losses of one sender and address are reported at this interval at most."""
MAX_GAPS_REPORTED: Final = 4096
"""Limit of entries in `Wan.reported_us`; over it, the table is cleared."""
PARTS_EACH: Final = 2
"""Bundles per turn for each member of a queue group. Two, so that a member skipped as slow still gets a part."""
PART: Final = 32
"""A frame goes to this many receivers at a stretch; to more of them in parts, between which others get their turn."""
SENT_WHILE_DOWN: Final = "sent while a link on the way was down"


class Casts:
    """The part of the router for casts, which expect no answers."""

    def __init__(
        self, accounts: Accounts, interest: Interest, sites: Sites, slow: SlowReceivers, clock: Callable[[], int],
        has_acknowledged: Callable[[Neighbor], bool], last_received_us: Callable[[], int], settling: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`has_acknowledged`: whether this relay stops and that neighbor knows.

        `last_received_us`: see `MissedCasts`. `settling`: whether other relays may not have sent their interest yet.
        """
        self._accounts = accounts
        self._interest = interest
        self._sites = sites
        self._slow = slow
        self.begun = False
        """Whether anything was published or broadcast."""
        self.missed = MissedCasts(clock, last_received_us)
        self.credits = Credits(interest, self._resolve, clock)
        """Publishers that wait for subscribers."""
        self._has_acknowledged = has_acknowledged
        self.other_keys = OtherKeys(interest, clock, settling)
        """Publishers whose topics have subscribers only under other keys."""
        self.leavers = Leavers()
        """Sessions that are leaving a queue group."""

    def cast(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> bool:
        """Send a publication or broadcast to every target. Return whether there are several, or none."""
        route, count = cast_head(neighbor, buf, start, end)
        interest = self._interest
        if route.version != interest.version:
            self._resolve(route)
        accounts = self._accounts
        accounts.in_ += count
        interest.tick = tick = interest.tick + 1
        flow = route.flow
        if flow is not None:
            flow.received += end - start
        target = route.single
        if target is None:
            self._fan_out(route, buf, start, end, count, tick)
        else:
            known = target.alias
            if known.number < 0 and target.port.has_room(end - start):
                known = self._declare(target, tick)
            if known.number < 0 or (
                flow is not None and not self.credits.sending(flow, target, end - start)
            ):
                self._too_slow(target, buf, start, count)
            else:
                known.used = tick
                ALIAS.pack_into(buf, start + ALIAS_AT, known.number)
                if target.port.forward(buf, start, end, count):
                    accounts.out += count
                else:
                    self._too_slow(target, buf, start, count)
        if flow is not None and flow.received >= flow.review_at:
            self.credits.review(flow)
        return target is None

    def _fan_out(
        self, route: Route, buf: memoryview, start: int, end: int, count: int, tick: int
    ) -> None:
        """Send a frame to several targets, one per queue group, or drop it if there are none."""
        accounts = self._accounts
        targets = self._choose(route) if route.groups else route.many
        if not targets:
            if route.barred:
                accounts.drop("not allowed", count)
            else:
                accounts.unwanted += count
            self._nobody(route, count)
            return
        accounts.copied += count * (len(targets) - 1)
        frame = bytearray(buf[start:end])
        if len(targets) <= PART:
            self._send_to(targets, route, frame, count, tick)
        else:
            route.neighbor.unfinished = self._in_parts(targets, route, frame, count)

    def _in_parts(
        self, targets: Sequence[Target], route: Route, frame: bytearray, count: int
    ) -> Iterator[None]:
        """Send a frame to so many targets that others get their turn meanwhile."""
        for at in range(0, len(targets), PART):
            part = [target for target in targets[at : at + PART] if not target.neighbor.closed]
            lost = min(PART, len(targets) - at) - len(part)
            if lost:
                self._accounts.drop("session lost", lost * count)
            self._send_to(part, route, frame, count, self._interest.next_tick())
            yield

    def _send_to(
        self, targets: Sequence[Target], route: Route, frame: bytearray, count: int, tick: int
    ) -> None:
        accounts, flow, buf = self._accounts, route.flow, memoryview(frame)
        for target in targets:
            if not target.port.has_room(len(frame)):
                self._too_slow(target, buf, 0, count)
                continue
            known = target.alias
            if known.number < 0:
                known = self._declare(target, tick)
            if flow is not None and not self.credits.sending(flow, target, len(frame)):
                self._too_slow(target, buf, 0, count)
                continue
            known.used = tick
            ALIAS.pack_into(frame, ALIAS_AT, known.number)
            if target.port.send(bytes(frame), count):
                accounts.out += count
            else:
                self._too_slow(target, buf, 0, count)

    def _nobody(self, route: Route, count: int) -> None:
        """Report to a session that a broadcast has no members, or that only holders of other keys subscribe."""
        sender = route.neighbor
        if sender.hop_class:
            return
        if route.kind == Kind.BROADCAST:
            sender.control(Unrouted(route.kind, route.name, route.key_id, count, NO_MEMBERS))
        elif route.unheard_version != self._interest.version:
            self.other_keys.look(route, count)

    def _declare(self, target: Target, tick: int) -> Alias:
        if target.neighbor.hop_class:
            # If the connection is lost now, the other side does not know this alias.
            self.missed.record(target.route)
        return target.declare(tick)

    def _too_slow(self, target: Target, buf: memoryview, start: int, count: int) -> None:
        self._accounts.drop("slow receiver", count)
        first = FIRST.unpack_from(buf, start + FIRST_AT)[0]
        to_gateway = target.delivery[-1] and target.neighbor.hop_class == HopClass.MESH
        undeclared = to_gateway and target.alias.number < 0
        if undeclared:  # a gateway on the way forwards only for aliases that were declared to it
            self._declare(target, self._interest.tick)
        target.neighbor.dropped(target.delivery, first, count)
        if undeclared:  # the port may be empty again, and not report that it has room
            target.neighbor.send_gaps()
        self._slow.dropped(target.neighbor, target.delivery, count)

    def shed(self, neighbor: Neighbor, delivery: Delivery, count: int) -> None:
        """Count queued messages that a port dropped to make room; the port has put GAPs in their place."""
        self._accounts.out -= count
        self._accounts.drop("slow receiver", count)
        self._slow.dropped(neighbor, delivery, count)

    def _resolve(self, route: Route) -> None:
        """Find the targets of this route's casts; cached until the interest changes."""
        self.begun = True
        if route.version == UNUSED or self.missed:
            self.missed.record(route)
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
                route.many = [route.target(subscriber, 0) for subscriber in plain]
        route.single = route.many[0] if len(route.many) == 1 else None
        route.version = self._interest.version
        if route.flow is not None:
            route.flow.review_at = 0
        self._send_parts(route)

    def _send_parts(self, route: Route) -> None:
        """Notify a publisher into how many bundles it should cut a turn's messages, so that members of queue
        groups share a burst.
        """
        publisher = route.neighbor
        most = max((len(candidates) for name, candidates in route.groups if name), default=0)
        parts = min(MAX_PARTS, PARTS_EACH * most) if most > 1 else 1
        if parts != route.parts and not publisher.hop_class:
            route.parts = parts
            publisher.control(Share(route.name, route.key_id, parts))

    def _members(self, route: Route) -> list[Target]:
        interest = self._interest
        key = (route.name, route.key_id, Kind.BROADCAST)
        targets = []
        if self._sites.is_for_this_site(route):
            loads = interest.loads(*key)
            if self._spreads(route):
                loads += interest.peer_loads(*key)
            targets = [route.target(load.neighbor, load.serial) for load in loads]
        far = (load.site_route for load in self._sites.loads(route))
        return targets + [
            route.target(site_route, 0) for site_route in far if site_route is not None
        ]

    def _subscribers(self, route: Route) -> tuple[list[Subscriber], dict[str, list[Subscriber]]]:
        """Return the subscribers without a group, and the candidates of every group (a link once per session).

        A group with a member in this site has no candidate in remote sites. Of another group only the
        nearest site is a candidate. A session that is leaving counts only if no other is left.
        """
        plain, groups = self._interest.subscribers(route.name, route.key_id)
        here, far = self._apart(route, plain if route.plain else ())
        leaving = self.leavers.groups(route.name, route.key_id) if self.leavers else {}
        named = {**groups, **leaving} if route.hop_class == HopClass.LOCAL else route.only_groups
        apart = {group: self._apart(route, groups.get(group, ())) for group in named}
        # One route for each site, whoever wants it there: a bundle crosses the WAN once.
        every = [*far, *(site_route for _, remote in apart.values() for site_route in remote)]
        taken_routes = {
            site_route.site: site_route
            for site_route in self._sites.choose(route, dict.fromkeys(every))
        }
        chosen: dict[str, list[Subscriber]] = {}
        for group, (near, remote) in apart.items():
            sites = {site_route.site for site_route in remote}
            if near:
                chosen[group] = [
                    candidate
                    for subscriber in near
                    for candidate in [subscriber] * self._weight(route, subscriber, group)
                ]
            elif nearest := [
                site_route for site, site_route in taken_routes.items() if site in sites
            ][:1]:
                chosen[group] = [*nearest]
            elif last := self._apart(route, leaving.get(group, ()))[0]:
                chosen[group] = last
        subscription_count = {site_route.site for site_route in far}
        return [
            *here,
            *(
                site_route
                for site, site_route in taken_routes.items()
                if site in subscription_count
            ),
        ], chosen

    def _apart(
        self, route: Route, subscribers: Iterable[Subscriber]
    ) -> tuple[list[Subscriber], list[SiteRoute]]:
        """Return the subscribers in this site that a route may send to, and the routes to remote sites."""
        home, spreads = self._sites.is_for_this_site(route), self._spreads(route)
        here: list[Subscriber] = []
        far: list[SiteRoute] = []
        for subscriber in subscribers:
            if isinstance(subscriber, SiteRoute):
                far.append(subscriber)
            elif subscriber.neighbor.closed:
                continue  # what it held is still being taken apart
            elif home and (spreads or not subscriber.hop_class):
                here.append(subscriber)
        return here, far

    def _weight(self, route: Route, subscriber: Subscriber, group: str) -> int:
        """Return how many sessions of a group a candidate stands for."""
        return subscriber.weight(route.key_id, group) if isinstance(subscriber, Link) else 1

    def _spreads(self, route: Route) -> bool:
        """Whether a route's messages may go over links: those from a session or a WAN connection."""
        return route.neighbor.hop_class != HopClass.MESH

    def _choose(self, route: Route) -> Sequence[Target]:
        """Choose one session or link per queue group for a bundle; slow ones are skipped."""
        route.turn += 1
        (_, plain), *groups = route.groups
        chosen: dict[int, list[str]] = {subscriber.number: [] for subscriber in plain}
        subscribers = {subscriber.number: subscriber for subscriber in plain}
        for name, candidates in groups:
            first = route.turn % len(candidates)
            order = [*candidates[first:], *candidates[:first]]
            if isinstance(route.flow, Flow):
                flow = route.flow
                order = [t for t in order if flow.has_credit(t.neighbor, name)] or order
            subscriber = next((t for t in order if not t.neighbor.port.held_messages), order[0])
            subscribers[subscriber.number] = subscriber
            chosen.setdefault(subscriber.number, []).append(name)
        alone = {subscriber.number for subscriber in plain}
        return [
            route.target(subscribers[number], 0, number in alone, tuple(names))
            for number, names in chosen.items()
        ]

    # -- losses ----------------------------------------------------------------------------------------------

    def gap_from_link(self, link: Link, gap: Gap) -> None:
        """Report messages that the relay behind a link dropped to their receivers here, or to the site they
        were for.
        """
        if not gap.site:
            self._report_here(gap)
            return
        what = (gap.sender_id, gap.name, gap.kind, gap.key_id, gap.site)
        for route in link.routes:
            if route is not None and what == (
                route.sender_id, route.name, route.kind, route.key_id, route.site,
            ):  # fmt: skip
                self._gap_to_site(route, gap)
                return

    def _gap_to_site(self, route: Route, gap: Gap) -> None:
        """Send a gap to a remote site by the route of the lost messages, so that it does not overtake what was
        sent before.
        """
        # Nothing of it was lost here: it began while its site was disconnected.
        if route.version == UNUSED:
            self._resolve(route)
        wan = self._sites.wan_of(route)
        if wan is not None:
            wan.control(gap)

    def gap_from_wan(self, wan: Wan, gap: Gap, now_us: int) -> None:
        """Report messages that a remote site's gateway dropped to the sessions and relays of this site.

        The count from another site is ignored: it could name a sender of ours, and receivers would wait for
        sequences that never come. The sender's next message shows the exact loss. One gap per second is
        reported for each sender and address.
        """
        gap = msgspec.structs.replace(gap, first=0, count=UNKNOWN_COUNT, site="", member=0)
        key = (gap.kind, gap.name, gap.key_id, gap.sender_id, gap.plain, tuple(gap.groups))
        if now_us < wan.reported_us.get(key, 0):
            return
        wan.reported_us.pop(key, None)  # reinsert it as the youngest
        if len(wan.reported_us) >= MAX_GAPS_REPORTED:
            wan.reported_us.clear()
        wan.reported_us[key] = now_us + REPORT_EVERY_US
        self._spread_gap(gap)

    def _spread_gap(self, gap: Gap) -> None:
        """Report a loss to sessions of this relay and to other relays of this site."""
        self._report_here(gap)
        if gap.kind == Kind.BROADCAST:
            for load in self._interest.peer_loads(gap.name, gap.key_id, Kind.BROADCAST):
                load.neighbor.control(msgspec.structs.replace(gap, groups=[]))
            return
        plain, groups = self._interest.subscribers(gap.name, gap.key_id)
        links = [t.neighbor for t in plain if gap.plain and t.hop_class == HopClass.MESH]
        # Each link is sent only its own groups. Those always fit in a frame; the groups that arrived may not.
        theirs: dict[Neighbor, list[str]] = {link: [] for link in links}
        for group in dict.fromkeys(gap.groups):
            for subscriber in dict.fromkeys(groups.get(group, ())):
                if subscriber.hop_class == HopClass.MESH:
                    theirs.setdefault(subscriber.neighbor, []).append(group)
        for link, named in theirs.items():
            wanted = gap.plain and link in links
            link.control(msgspec.structs.replace(gap, plain=wanted, groups=named))

    def _report_here(self, gap: Gap) -> None:
        """Report a loss to sessions of this relay."""
        if gap.kind == Kind.BROADCAST:
            for load in self._interest.loads(gap.name, gap.key_id, Kind.BROADCAST):
                self._send_gap(load.neighbor, gap, load.serial, ())
            return
        plain, groups = self._interest.subscribers(gap.name, gap.key_id)
        if gap.plain:
            for subscriber in plain:
                if not subscriber.hop_class:
                    self._send_gap(subscriber.neighbor, gap, 0, ())
        for group in gap.groups:
            # Nobody knows whose turn it would have been: report to the oldest member of the group.
            there = (t for t in groups.get(group, ()) if not t.hop_class)
            here = next((t for t in there if not t.neighbor.closed), None)
            if here is not None:
                self._send_gap(here.neighbor, gap, 0, (group,))

    def link_lost(self, link: Link) -> None:
        """Report messages in transit over a lost link as a gap of unknown length."""
        for route, gap in self._gaps(link):
            if route.hop_class != HopClass.TO_WAN:
                self._report_here(gap)
            elif not self._has_acknowledged(link):  # else nothing new came this way
                self._gap_to_site(route, msgspec.structs.replace(gap, site=route.site))

    def unread(self, session: Session) -> None:
        """Report to other relays and sites that an unknown number of a session's casts was not read, because
        this relay stops.
        """
        for route in session.routes:
            if route is None or route.barred or route.kind not in (Kind.PUBLISH, Kind.BROADCAST):
                continue
            for target in self._all_targets(route):
                # A local session's connection ends, which says the same.
                if target.neighbor.hop_class:
                    target.neighbor.send_gap(target.delivery, 0, UNKNOWN_COUNT, "a relay on the way was stopped")  # fmt: skip

    def _all_targets(self, route: Route, alone: Neighbor | None = None) -> list[Target]:
        """Return every target of a route.

        With `alone`, a queue group counts only if all its members are behind that neighbor.
        """
        if route.version != self._interest.version:
            self._resolve(route)
        targets = [*route.many]
        for name, subscribers in route.groups:
            groups = (name,) if name else ()
            if (
                not name
                or alone is None
                or all(subscriber.neighbor is alone for subscriber in subscribers)
            ):
                targets += [
                    route.target(t, 0, not name, groups) for t in dict.fromkeys(subscribers)
                ]
        return targets

    def link_restored(self, link: Link) -> None:
        """Report casts that were sent while a link was down to its relay, once that has advertised its interest."""
        for route in self.missed.reconnected(link.relay_id):
            targets = self._all_targets(route, link)
            self._report_late(route, [target for target in targets if target.neighbor is link])

    def site_restored(self, site: str, *, connected: bool) -> None:
        """Same as `link_restored`, for a remote site. `connected`: this relay is a gateway to it."""
        for route in self.missed.reconnected(site, connected=connected):
            targets = self._all_targets(route)
            self._report_late(route, [target for target in targets if target.delivery[-1] == site])

    def site_route_lost(self, site_route: SiteRoute, unconfirmed: Iterable[Route]) -> None:
        """Report casts that may be lost with one of several routes to a site over another route."""
        for route in unconfirmed:
            targets = self._all_targets(route)
            self._report_late(
                route, [target for target in targets if target.delivery[-1] == site_route.site]
            )

    def _report_late(self, route: Route, targets: Iterable[Target]) -> None:
        for target in targets:
            # A gateway on the way forwards only for aliases that were declared to it.
            if target.delivery[-1]:
                target.number(self._interest.tick)
            target.neighbor.send_gap(target.delivery, 0, UNKNOWN_COUNT, SENT_WHILE_DOWN)
        if route.neighbor.closed:
            route.release()

    def wan_lost(self, wan: Wan) -> None:
        """Same as `link_lost`, for a WAN connection: the relays of this site are notified too."""
        for _, gap in self._gaps(wan):
            self._spread_gap(gap)

    @staticmethod
    def _gaps(neighbor: Neighbor) -> Iterable[tuple[Route, Gap]]:
        for route in neighbor.routes:
            if route is None or route.version < 0 or route.barred:
                continue
            if route.kind in (Kind.PUBLISH, Kind.BROADCAST):
                cause = "a link on the way was lost"
                address = (route.kind, route.name, route.key_id, route.sender_id)
                delivery = (route.plain, list(route.only_groups))
                yield route, Gap(*address, 0, UNKNOWN_COUNT, cause, *delivery)

    def _send_gap(self, neighbor: Neighbor, gap: Gap, member: int, groups: Sequence[str]) -> None:
        address = (gap.kind, gap.name, gap.key_id, gap.sender_id)
        delivery = (not groups, list(groups), member)
        neighbor.control(Gap(*address, gap.first, gap.count, gap.cause, *delivery))
