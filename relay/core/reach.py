"""The remote sites that this relay reaches, by its own WAN connections or over other gateways.

    every Wan ── SiteRoute ── Summary per site ──► our links          our gateways' links ── SiteRoute ──► interest
    interest of a site that lost its last route is remembered for `SUSPENDED_US`

A sender's route is chosen once per address, and again only when that route is lost, so that frames stay in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from iris.errors import PeerProtocolError
from iris.wire import link_frames
from iris.wire.kinds import NEVER_US
from iris.wire.link_frames import SiteCluster, SiteEntry, SiteTopic
from iris.wire.names import check_site
from relay.core.casts import Casts
from relay.core.interest import Interest
from relay.core.link import MAX_COPY, Link, check_named
from relay.core.neighbor import Route
from relay.core.replica import Stage
from relay.core.site_routes import SiteRoute, Suspended, check_entry, clusters_behind
from relay.core.sites import Sites
from relay.core.summary import Room, Summary

MAX_SITES: Final = 1024
"""Limit of remote sites that one gateway may advertise."""


class Reach:
    """Keeps the routes to remote sites, and what is advertised about these sites to the relays of this one."""

    def __init__(
        self, interest: Interest, sites: Sites, casts: Casts, next_number: Callable[[], int]
    ) -> None:
        self._interest = interest
        self._sites = sites
        self._casts = casts
        self._next_number = next_number
        self._behind: dict[int, dict[str, SiteRoute]] = {}
        """Link number -> site -> the route over that gateway."""
        self._theirs: dict[str, Summary] = {}
        """Site -> its interest as advertised to the relays of our site."""
        self._their_room = Room(MAX_COPY)
        """Limits of that interest, for all sites together."""
        self.entries: dict[str, SiteEntry] = {}
        """Site -> its entry as last advertised to our relays."""
        self.deadline_us = NEVER_US
        """When `expire` is due."""

    # -- what is advertised to our relays ----------------------------------------------------------------------

    def add_summary(self, site: str) -> None:
        """Start to summarise the interest of a site for our relays, if this relay has a WAN connection to it."""
        own = self._sites.own(site)
        if not own or site in self._theirs:
            return
        summary = self._theirs[site] = Summary(
            site,
            lambda address: clusters_behind(self._sites.own(site), address),
            lambda topic: max(
                (site_route.topics.get(topic, 0) for site_route in self._sites.own(site)), default=0
            ),
            self._their_room,
            by_key=False,
        )
        for site_route in own:
            for address in site_route.clusters:
                summary.touch(address)
            for topic in site_route.topics:
                summary.touch_topic(topic)

    def unadvertised(self, site: str) -> int:
        """Return how many entries of a site are not advertised to our relays because the limit is reached."""
        theirs = self._theirs.get(site)
        return theirs.unadvertised if theirs is not None else 0

    def replace(
        self, site_route: SiteRoute, clusters: Sequence[SiteCluster], topics: Sequence[SiteTopic]
    ) -> bool:
        """Replace what is known of a site with a snapshot; entries that stay are not touched.

        Returns what `apply` does.
        """
        there = {(entry.name, entry.key_id) for entry in clusters}
        wanted = {(entry.filter, entry.key_id, entry.group) for entry in topics}
        gone = [SiteCluster(site_route.site, *a, {}) for a in site_route.clusters if a not in there]
        ended = [
            SiteTopic(site_route.site, *topic, 0)
            for topic in site_route.topics
            if topic not in wanted
        ]
        return self.apply(site_route, [*gone, *clusters], [*ended, *topics])

    def apply(
        self, site_route: SiteRoute, clusters: Iterable[SiteCluster], topics: Iterable[SiteTopic]
    ) -> bool:
        """Apply changes of a site's interest, as far as our policy imports or exports it.

        Returns whether to advertise them.
        """
        summary = self._theirs.get(site_route.site) if site_route.own else None
        policy = self._sites.policy
        for cluster in clusters:
            check_entry(cluster)
            if site_route.own:
                kinds = policy.imports(cluster.kinds, cluster.name, cluster.key_id)
                cluster = msgspec.structs.replace(cluster, kinds=kinds)
            site_route.apply_cluster(cluster, self._interest)
            if summary is not None:
                summary.touch((cluster.name, cluster.key_id))
        for topic in topics:
            check_entry(topic)
            if topic.count and site_route.own and not policy.exported.may_allow(topic.filter):
                continue
            site_route.apply_topic(topic, self._interest)
            if summary is not None:
                summary.touch_topic((topic.filter, topic.key_id, topic.group))
        return summary is not None

    def changes(
        self, sites: Iterable[str], most: int
    ) -> tuple[list[SiteEntry], list[SiteCluster], list[SiteTopic]]:
        """Return what has not been advertised yet: named sites' distance, and changed interest of all.

        Of the interest it looks at `most` entries, as many of each site. `waiting` says if more are left.
        """
        entries, clusters, topics = [], [], []
        for site in sites:
            own = self._sites.own(site)
            if own:
                cost_ms = min(site_route.cost_ms for site_route in own)
                entries.append(SiteEntry(site, True, cost_ms, self._sites.rtt_us(site)))
                self.entries[site] = entries[-1]
                continue
            ended = self._theirs.pop(site, None)
            if ended is not None:
                ended.end()
            if self.entries.pop(site, None) is not None:
                entries.append(SiteEntry(site, False))
        for summary in self._theirs.values():
            changed = summary.changes(max(1, most // len(self._theirs)))
            clusters += changed[0]
            topics += changed[1]
        return entries, clusters, topics

    @property
    def waiting(self) -> bool:
        """Whether `changes` has not looked at everything."""
        return any(summary.waiting for summary in self._theirs.values())

    def snapshot(self) -> tuple[list[SiteEntry], list[SiteCluster], list[SiteTopic]]:
        """Return everything that was advertised to our relays about remote sites."""
        clusters, topics = [], []
        for summary in self._theirs.values():
            whole = summary.whole()
            clusters += whole[0]
            topics += whole[1]
        return list(self.entries.values()), clusters, topics

    def advertised_by(self, link: Link, change: link_frames.Interest, now_us: int) -> None:
        """Apply what a gateway of our site advertises of remote sites. A snapshot is applied once it is complete."""
        snapshot = link.replica.stage is Stage.SNAPSHOT
        if snapshot:
            link.dropped_entries += link.replica.gather(change, MAX_COPY, MAX_SITES)
            if change.more:
                return
            change = link.replica.coming
        behind = self._behind.setdefault(link.number, {})
        before = set(behind)
        for entry in change.sites:
            self._apply_site(link, behind, entry, now_us)
        if snapshot:
            self._apply_snapshot(link, behind, change, now_us)
        else:
            self._apply_changes(link, behind, change.clusters, change.site_topics)
        for site in [site for site in behind if site not in before]:
            self._casts.site_restored(site, connected=False)

    def _apply_snapshot(
        self, link: Link, behind: dict[str, SiteRoute], coming: link_frames.Interest, now_us: int
    ) -> None:
        """Apply what a gateway's snapshot says of the sites that it reaches."""
        by_site: dict[str, tuple[list[SiteCluster], list[SiteTopic]]] = {}
        for site in behind:
            by_site[site] = ([], [])
        for cluster in coming.clusters:
            if self._site_route_behind(link, behind, cluster.site) is not None:
                by_site[cluster.site][0].append(cluster)
        for topic in coming.site_topics:
            if self._site_route_behind(link, behind, topic.site) is not None:
                by_site[topic.site][1].append(topic)
        reached = {entry.site for entry in coming.sites if entry.up}
        for site, (clusters, topics) in by_site.items():
            if site in reached:
                self.replace(behind[site], clusters, topics)
            else:
                self.remove(behind.pop(site), now_us, drained=True)

    def _apply_site(
        self, link: Link, behind: dict[str, SiteRoute], entry: SiteEntry, now_us: int
    ) -> None:
        """Add or remove the route to a site over a gateway."""
        site_route = behind.get(entry.site)
        if not entry.up:
            if site_route is not None:
                self.remove(behind.pop(entry.site), now_us)
            return
        if site_route is None:
            check_named(check_site, entry.site)
            if entry.site == self._sites.site:
                raise PeerProtocolError(
                    f"a gateway of site {self._sites.site!r} advertises it as a remote site"
                )
            if len(behind) >= MAX_SITES:
                link.dropped_entries += 1
                return
            site_route = SiteRoute(entry.site, link, link.relay_id, self._next_number())
            behind[entry.site] = site_route
            self.add(site_route)
        site_route.cost_ms, site_route.rtt_us = entry.cost_ms, entry.rtt_us
        self._interest.version += 1

    def _apply_changes(
        self, link: Link, behind: dict[str, SiteRoute], clusters: Sequence[SiteCluster], topics: Sequence[SiteTopic]
    ) -> None:  # fmt: skip
        for cluster in clusters:
            site_route = self._site_route_behind(link, behind, cluster.site)
            if site_route is not None:
                self.apply(site_route, (cluster,), ())
        for topic in topics:
            site_route = self._site_route_behind(link, behind, topic.site)
            if site_route is not None:
                self.apply(site_route, (), (topic,))

    @staticmethod
    def _site_route_behind(link: Link, behind: dict[str, SiteRoute], site: str) -> SiteRoute | None:
        """Return the route to a site that a gateway names; None if this site may have been dropped over the limit."""
        site_route = behind.get(site)
        if site_route is None:
            if not link.dropped_entries:
                raise PeerProtocolError(
                    f"a gateway advertises interest of site {site!r}, which it does not reach"
                )
            link.dropped_entries += 1
        return site_route

    def forget(self, link: Link, now_us: int) -> None:
        """Remove the routes over a closed link."""
        for site_route in self._behind.pop(link.number, {}).values():
            self.remove(site_route, now_us, drained=link.bye)

    def add(self, site_route: SiteRoute) -> None:
        self._sites.site_routes.setdefault(site_route.site, {})[site_route.number] = site_route
        self._interest.version += 1

    def remove(
        self, site_route: SiteRoute, now_us: int, *, final: bool = False, drained: bool = False
    ) -> None:
        """Remove a route to a site.

        `final`: the peer said goodbye. `drained`: a gateway of ours will, once everything it has is through.
        """
        site_routes = self._sites.site_routes[site_route.site]
        del site_routes[site_route.number]
        served = (
            (address, kinds) for address, (kinds, members) in site_route.clusters.items() if members
        )
        self._interest.seen.lost(served, f"site {site_route.site}", now_us)
        unconfirmed: list[Route] = []
        if not site_route.stale and any(not other.stale for other in site_routes.values()):
            if not (final or drained):
                unsure = self._casts.missed.unconfirmed()
                unconfirmed = [
                    route
                    for route in unsure
                    if route.taken_routes.get(site_route.site) == site_route.number
                ]
        elif not site_route.stale:
            self._casts.missed.disconnected(site_route.site, final=final)
            if not final:
                gone = self._sites.suspended[site_route.site] = Suspended(site_route, now_us)
                self.deadline_us = min(self.deadline_us, gone.until_us)
        if not site_routes:
            del self._sites.site_routes[site_route.site]
        summary = self._theirs.get(site_route.site) if site_route.own else None
        if summary is not None:
            for address in site_route.clusters:
                summary.touch(address)
            for topic in site_route.topics:
                summary.touch_topic(topic)
        site_route.empty(self._interest)
        self._casts.site_route_lost(site_route, unconfirmed)

    def expire(self, now_us: int) -> None:
        """Forget suspended sites that did not come back in time."""
        suspended = self._sites.suspended
        for site, gone in list(suspended.items()):
            if now_us >= gone.until_us:
                del suspended[site]
        self.deadline_us = min((gone.until_us for gone in suspended.values()), default=NEVER_US)
