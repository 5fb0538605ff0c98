"""Calls that no member serves: whether a relay or store may still come back for them, and the error text if not."""

from __future__ import annotations

from typing import Final

from iris.wire.kinds import HERE, Kind
from relay.core.interest import Interest
from relay.core.mesh import Mesh
from relay.core.neighbor import Route
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

    def __init__(self, interest: Interest, sites: Sites, mesh: Mesh) -> None:
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
        if self._sites.is_for_this_site(route) and (
            self._mesh.might_serve(*address, now_us) or self._returning(now_us)
        ):
            return True
        return self._sites.might_serve(*address, route.site, self._mesh.settling(now_us), now_us)

    def _returning(self, now_us: int) -> bool:
        """Whether members that this relay had before a restart have not all rejoined."""
        return self._interest.joined < self._awaited and now_us < self._awaited_until_us

    def expiry_text(self, route: Route) -> str:
        """Return the error text for a call that waited until its deadline: what it waited for."""
        if route.kind == Kind.STREAM and (where := self._mesh.starting_stores()):
            return f"no store holds it yet; a store is still starting: {', '.join(where[:4])}{self._mesh.failed_stores()}"
        return "the relay that served it did not come back before the deadline"

    def failure_text(self, route: Route) -> str:
        """Return the error text for a call that no member serves and that does not wait."""
        if route.kind == Kind.STREAM:
            return f"no store holds it{self._mesh.failed_stores()}"
        if (
            route.site not in ("", HERE, self._sites.site)
            and route.site not in self._sites.site_routes
        ):
            return f"no gateway here is connected to site {route.site!r}; check the name, or add it to peer_site on a gateway"
        text = f"no members of {route.name} serve {_PLURAL[route.kind]} under your key {route.key_id[:4].hex()}…"
        others = self._interest.other_keys(route.name, (route.key_id,))
        for elsewhere in (self._mesh, self._sites):
            for short, more in elsewhere.other_keys(route.name, (route.key_id,)).items():
                others[short] = others.get(short, 0) + more
        there = ", ".join(f"{count} under {key_id}…" for key_id, count in list(others.items())[:4])
        return f"{text}; members under other keys: {there}" if there else text
