"""Calls that no member serves: whether a relay or store may still come back for them, and the error text if not."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from iris.wire.kinds import HERE, Cause, Kind
from iris.wire.names import plural
from relay.core.interest import Interest
from relay.core.mesh import Mesh
from relay.core.neighbor import Route
from relay.core.session import Session
from relay.core.sites import Sites

_PLURAL: Final[dict[int, str]] = {
    Kind.REQUEST: "requests",
    Kind.PUSH: "pushes",
    Kind.SURVEY: "surveys",
    Kind.TUNNEL_OPEN: "tunnels",
}


def kind_name(kind: int) -> str:
    """Return the name of a frame kind for messages to people."""
    return Kind(kind).name.lower().removesuffix("_open")


class Unserved:
    """What one relay knows about members, stores and sites that are not reachable at the moment."""

    def __init__(self, relay_id: bytes, interest: Interest, sites: Sites, mesh: Mesh) -> None:
        self._relay_id = relay_id
        self._interest = interest
        self._sites = sites
        self._mesh = mesh
        self._awaited = 0
        self._awaited_until_us = 0

    def wait_for(self, members: int, until_us: int) -> None:
        """Wait until `until_us` for the `members` that this relay had before it was restarted."""
        self._awaited, self._awaited_until_us = members, until_us

    def may_be_served(self, route: Route, now_us: int) -> bool:
        """Whether a relay that serves this route's address may come back, or peers have not been found yet."""
        address = (route.kind, route.name, route.key_id)
        if route.member:
            return bool(route.relay_id) and self._mesh.might_have(
                route.relay_id, route.member, now_us
            )
        if self._sites.is_for_this_site(route) and (
            self._mesh.might_serve(*address, now_us) or self._returning(now_us)
        ):
            return True
        return self._sites.might_serve(*address, route.site, self._mesh.settling(now_us), now_us)

    def _returning(self, now_us: int) -> bool:
        """Whether members that this relay had before a restart have not all rejoined."""
        return self._interest.joined < self._awaited and now_us < self._awaited_until_us

    def expiry_text(self, route: Route, now_us: int) -> str:
        """Return the error text for a call that waited until its deadline: what it waited for."""
        if route.kind == Kind.STREAM and (where := self._mesh.starting_stores()):
            return f"no store holds it yet; a store is still starting: {', '.join(where[:4])}{self._mesh.failed_stores()}"
        return f"{self._last_text(route, now_us) or 'members that were here'} did not come back before the deadline"

    def member_failure(self, route: Route, *, leaving: bool) -> tuple[Cause, str]:
        """Return why a call to one member ends: (cause, error text). `leaving`: the member itself said that it leaves.

        If the member is there and serves the kind, it has refused the call because it is full.
        """
        member = f"member {(route.relay_id or self._relay_id).hex()}.{route.member}"
        cluster = f"{route.name} under your key {route.key_id[:4].hex()}…"
        loads = (*route.loads, *route.peers)
        if loads and not leaving:
            free = f"concurrency {loads[0].concurrency}"
            return Cause.OVERLOADED, f"{member} is at capacity or refused it ({free})"
        link = self._mesh.links.get(route.relay_id)
        kinds = self._kinds(route)
        if kinds is not None and not leaving:
            return Cause.NO_MEMBERS, f"{member} does not serve {_PLURAL[route.kind]}"
        if link is None and route.relay_id:
            text = f"{member} has left: no relay of this site has this id; members of other sites cannot be called alone"
            return Cause.NO_MEMBERS, text
        return Cause.NO_MEMBERS, f"{member} has left, or never served {cluster}"

    def _kinds(self, route: Route) -> Container[int] | None:
        """Return the kinds that the one member that a route leads to serves; None if it is not there."""
        if not route.relay_id:
            member = self._interest.member(route.name, route.key_id, route.member)
            return None if member is None else member.loads
        link = self._mesh.links.get(route.relay_id)
        entry = None if link is None else link.copy.members.get(route.member)
        there = entry is not None and entry.name == route.name and route.key_id in entry.key_ids
        return entry.kinds if entry is not None and there else None

    def seen_us(self, route: Route, now_us: int) -> int | None:
        """Return how long ago the last member that served a route's address left; None if that is not known."""
        last = self._interest.seen.last(route.kind, (route.name, route.key_id), now_us)
        return None if last is None else last[1]

    def _last_text(self, route: Route, now_us: int) -> str:
        last = self._interest.seen.last(route.kind, (route.name, route.key_id), now_us)
        if last is None:
            return ""
        where, ago_us = last
        if isinstance(route.neighbor, Session) and route.neighbor.ticket is not None:
            where = "a relay"  # a browser does not learn the names of hosts
        return f"members that were connected to {where} until {max(1, round(ago_us / 1e6))} s ago"

    def failure_text(self, route: Route, now_us: int) -> str:
        """Return the error text for a call that no member serves and that does not wait."""
        if route.kind == Kind.STREAM:
            return f"no store holds it{self._mesh.failed_stores()}"
        if (
            route.site not in ("", HERE, self._sites.site)
            and route.site not in self._sites.site_routes
        ):
            return (
                f"no gateway here is connected to a site {route.site!r}; what stands before ':' names a site, so leave it "
                "out if the cluster is in this one, or add the site on a gateway (`iris relay --peer-site`)"
            )
        text = f"no members serve {_PLURAL[route.kind]}"
        if served := self._served(route):
            return f"{text}; {served}"
        others = self._interest.other_keys(route.name, (route.key_id,))
        for elsewhere in (self._mesh, self._sites):
            for short, more in elsewhere.other_keys(route.name, (route.key_id,)).items():
                others[short] = others.get(short, 0) + more
        there = ", ".join(f"{count} under {key_id}…" for key_id, count in list(others.items())[:4])
        if not there and (last := self._last_text(route, now_us)):
            return f"{last} have left or were lost, and nobody else serves {_PLURAL[route.kind]}"
        if not there:
            return "no members have joined under this name; check its spelling, and that the service runs"
        key = f"{route.key_id[:4].hex()}…"
        return f"{text} under your key {key}; members under other keys: {there}; compare `iris key show`"

    def _served(self, route: Route) -> str:
        """Return what the members of this site under the caller's key serve, or "" if there are none."""
        kinds: dict[int, None] = {}
        count = 0
        for served, listed, _ in self._interest.serving(route.name, route.key_id):
            if listed:
                count += 1
                kinds |= dict.fromkeys(served)
        names = ", ".join(map(kind_name, sorted(kinds))) or "publications"
        return (
            f"{plural(count, 'member')} {'serves' if count == 1 else 'serve'}: {names}"
            if count
            else ""
        )
