"""The remote sites known to this relay: connections, routes, what may cross, and which route messages take."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from iris.wire import frames
from iris.wire.kinds import HERE, HopClass
from relay.core.interest import MAX_OTHERS
from relay.core.neighbor import Load, Route
from relay.core.policy import Policy
from relay.core.site_routes import SiteRoute, Suspended, Wan, clusters_behind, is_site_local


class Sites:
    """The remote sites as this relay knows them.

    Casts, calls and the mesh read it; `Reach` and `Federation` update it.
    """

    def __init__(self, site: str, policy: Policy) -> None:
        self.site = site
        """Our own site's name; a relay that is not a gateway gets it from one."""
        self.policy = policy
        self.wans: dict[bytes, Wan] = {}
        """Id of the other gateway's relay -> WAN connection."""
        self.site_routes: dict[str, dict[int, SiteRoute]] = {}
        """Site -> number -> site route."""
        self.suspended: dict[str, Suspended] = {}
        """Site whose last route was lost -> its members."""

    def choose(self, route: Route, site_routes: Iterable[SiteRoute]) -> list[SiteRoute]:
        """Return one of `site_routes` for each site that a route's messages may go to, nearest site first.

        The route taken before is kept if it still leads there. If this relay has a WAN connection itself,
        no other gateway is used.
        """
        sites: dict[str, list[SiteRoute]] = {}
        for site_route in site_routes:
            if self._may_take(route, site_route):
                sites.setdefault(site_route.site, []).append(site_route)
        if route.hop_class == HopClass.LOCAL and not route.barred:
            for site in sites:
                route.barred = self.barred(route, site)
        if route.barred:
            return []
        chosen = []
        for site, candidates in sites.items():
            before = route.taken_routes.get(site)
            taken = next(
                (site_route for site_route in candidates if site_route.number == before), None
            )
            if taken is None:
                own = [site_route for site_route in candidates if site_route.own] or candidates
                taken = max(
                    own, key=lambda site_route: site_route.rank(route.name, route.sender_id)
                )
                route.taken_routes[site] = taken.number
            chosen.append(taken)
        return sorted(
            chosen, key=lambda site_route: (self.distance_us(site_route.site), site_route.site)
        )

    def loads(self, route: Route) -> list[Load]:
        """Return one load for each site whose members serve the route's address, nearest first."""
        if route.hop_class == HopClass.LOCAL:
            if is_site_local(route.kind) and route.site in ("", HERE):
                return []
        elif route.hop_class != HopClass.TO_WAN or isinstance(route.neighbor, Wan):
            return []
        address = (route.kind, route.name, route.key_id)
        serving = {
            site_route: load
            for site_routes in self.site_routes.values()
            for site_route in site_routes.values()
            if (load := site_route.load(*address)) is not None
        }
        return [serving[site_route] for site_route in self.choose(route, serving)]

    def _may_take(self, route: Route, site_route: SiteRoute) -> bool:
        if route.hop_class == HopClass.LOCAL:
            return route.site in ("", site_route.site)
        return site_route.own and route.site == site_route.site and not route.barred

    def distance_us(self, site: str) -> int:
        """Return the distance of a site by its nearest route."""
        return min(
            (site_route.distance_us for site_route in self.site_routes.get(site, {}).values()),
            default=0,
        )

    def is_for_this_site(self, route: Route) -> bool:
        """Whether a route's messages may be for members and subscribers of this site."""
        if route.hop_class == HopClass.LOCAL:
            return route.site in ("", HERE, self.site)
        if route.barred:
            return False
        return route.hop_class != HopClass.TO_WAN or isinstance(route.neighbor, Wan)

    def wan_of(self, route: Route) -> Wan | None:
        """Return the WAN connection over which a route's messages for its site went last."""
        site_route = self.site_routes.get(route.site, {}).get(route.taken_routes.get(route.site, 0))
        return (
            site_route.neighbor
            if site_route is not None and isinstance(site_route.neighbor, Wan)
            else None
        )

    def other_keys(self, name: str, key_ids: Iterable[bytes]) -> dict[str, int]:
        """Return how many members of remote sites serve `name` under other keys.

        First 4 bytes of the key id in hex -> count.
        """
        known = set(key_ids)
        found: dict[str, int] = {}
        for site_routes in self.site_routes.values():
            every = (
                key for site_route in site_routes.values() for key in site_route.names.get(name, ())
            )
            keys = dict.fromkeys(islice(every, 2 * MAX_OTHERS + len(known)))
            for key_id in keys:
                count = clusters_behind(site_routes.values(), (name, key_id))[1]
                short = key_id[:4].hex()
                if key_id not in known and count and (short in found or len(found) < MAX_OTHERS):
                    found[short] = found.get(short, 0) + count
        return found

    def members(self, name: str, key_ids: Iterable[bytes]) -> dict[str, int]:
        """Return site -> number of members of a cluster.

        Members under several key ids are counted once as far as possible.
        """
        found: dict[str, int] = {}
        for site, site_routes in sorted(self.site_routes.items()):
            served = (clusters_behind(site_routes.values(), (name, key_id)) for key_id in key_ids)
            count = max((members for _, members in served), default=0)
            if count:
                found[site] = count
        return found

    def might_serve(
        self, kind: int, name: str, key_id: bytes, site: str, settling: bool, now_us: int
    ) -> bool:
        """Whether a site that lost its last route a moment ago may come back with members of an address.

        `settling`: a relay of this site has not been found yet, or has not advertised what it reaches.
        """
        if site in (HERE, self.site) or (is_site_local(kind) and not site):
            return False
        if site and settling:
            return True  # a relay that reaches it may be found in a moment
        if any(
            not wan.replica.known and now_us < wan.settle_us and site in ("", wan.site)
            for wan in self.wans.values()
        ):
            return True
        return any(
            now_us < gone.until_us and site in ("", where) and gone.serves(kind, name, key_id)
            for where, gone in self.suspended.items()
        )

    def own(self, site: str) -> list[SiteRoute]:
        """Return our own connections to a site that has advertised its interest."""
        return [
            site_route
            for site_route in self.site_routes.get(site, {}).values()
            if site_route.own and not site_route.stale
        ]

    def rtt_us(self, site: str) -> int:
        return min((site_route.rtt_us for site_route in self.own(site)), default=0)

    def barred(self, of: frames.Declare | Route, site: str) -> str:
        """Return why messages may not cross to a site, or an empty text. A refusal is counted."""
        rule = self.policy.leaving(of.kind, of.name, of.key_id)
        if rule:
            self.policy.refuse(site, rule)
        return rule
