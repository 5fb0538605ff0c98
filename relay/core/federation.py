"""WAN connections to remote sites: what this site advertises over them, and what a gateway advertises to its own site.

    our site's interest ── Summary ──► every Wan            every Wan ── SiteRoute ── Summary per site ──► our links
    Wan down: its SiteRoute is removed; interest of a site without any is remembered for `SUSPENDED_US`

A frame goes from a relay to one gateway, over one WAN connection, and on to the relays of that site.
HopClass says how far it has come, and nothing that came over the WAN goes over it again. A sender's route
is chosen once per address, and again only when that route is lost, so that frames stay in order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Final

from iris.errors import PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.kinds import NEVER_US, Kind
from relay.core.advertiser import GATHER_US, PORTION, Advertiser
from relay.core.casts import Casts
from relay.core.clocks import clock_status
from relay.core.interest import Interest
from relay.core.neighbor import Address, Topic
from relay.core.reach import Reach
from relay.core.replica import Journal, Verdict
from relay.core.site_routes import (
    MAX_WANTED,
    NOBODY,
    Served,
    SiteRoute,
    Wan,
)
from relay.core.sites import Sites
from relay.core.summary import ALL, Room, Summary

WAN_GATHER_US: Final = 50_000
"""Time for which changes are gathered before they are advertised to remote sites."""
MAX_COUNT: Final = (1 << 32) - 1
"""Largest count in a SITE_TOPIC entry."""
SNAPSHOT_US: Final = 1_000_000
"""Shortest time between two snapshots over one WAN connection."""
RTT_STEP_US: Final = 1_000
"""A changed round trip is advertised to relays of this site if it differs by this much, and by a quarter."""


class Federation:
    """The part of the router for WAN connections."""

    def __init__(
        self, interest: Interest, sites: Sites, reach: Reach, advertiser: Advertiser, casts: Casts, next_number: Callable[[], int]
    ) -> None:  # fmt: skip
        self.journal = Journal()
        """Journal of what was advertised to remote sites."""
        self.resyncs = 0
        self._interest = interest
        self._sites = sites
        self._reach = reach
        self._advertiser = advertiser
        self._casts = casts
        self._next_number = next_number
        self.leaving = False
        """Set once this relay stops: remote sites are then sent an empty interest, and calls in flight may finish."""
        self._ours: Summary | None = None
        """Our site's interest as advertised to remote sites; None before the first WAN connection."""
        self._flush_us = NEVER_US
        """When changes are sent; 0: a change was gathered and the time is set by `expire`."""
        self.deadline_us = NEVER_US
        """When `expire` is due."""

    # -- WAN connections -------------------------------------------------------------------------------------

    def wan_up(self, wan: Wan, cost_ms: int, now_us: int) -> None:
        """Add a WAN connection after both gateways have greeted, and send our site's interest.

        The certificate named the other gateway's site.
        """
        if wan.site == self._sites.site:
            raise PeerProtocolError(
                f"the peer's certificate names {wan.site!r}, which is this site; a WAN connection must lead to another site"
            )
        if self._ours is None:
            room = Room(MAX_WANTED)
            self._ours = Summary(
                self._sites.site, self._cluster_here, self._topic_here, room, by_key=True
            )
            self._interest.listen(self._touched, self._touched_topic)
            for address in self._interest.addresses():
                self._ours.touch(address)
            for topic in self._advertiser.topics():
                self._ours.touch_topic(topic)
        self._flush()  # to the others; the new one gets a snapshot
        wan.site_route = site_route = SiteRoute(wan.site, wan, wan.relay_id, self._next_number())
        site_route.cost_ms = cost_ms
        site_route.rtt_us = wan.beats.rtt_us
        self._sites.wans[wan.relay_id] = wan
        self._reach.add(site_route)
        self._snapshot(wan)

    def wan_down(self, wan: Wan, now_us: int, *, silent: bool = False) -> None:
        """Remove a closed WAN connection. `silent`: the other gateway knew that we stop, and sent nothing new."""
        if self._sites.wans.get(wan.relay_id) is wan:
            del self._sites.wans[wan.relay_id]
        if not wan.bye and not silent:
            self._casts.wan_lost(wan)
        self._reach.remove(wan.site_route, now_us, final=wan.bye)
        self._advertise_site(wan.site, now_us)

    def on_interest(self, wan: Wan, change: link_frames.Interest, now_us: int) -> None:
        """Apply an INTEREST frame of a remote site."""
        if change.joined or change.left or change.topics or change.sites:
            raise PeerProtocolError(
                "INTEREST between sites may carry clusters and site_topics only"
            )
        spoken = [entry.site for entry in change.clusters]
        spoken += [entry.site for entry in change.site_topics]
        if any(site != wan.site for site in spoken):
            raise PeerProtocolError(f"INTEREST from site {wan.site!r} describes another site")
        verdict = wan.replica.receive(change)
        if verdict is Verdict.PART:
            wan.site_route.dropped_entries += wan.replica.gather(change, MAX_WANTED)
            if not change.more:
                coming = wan.replica.coming
                if self._reach.replace(wan.site_route, coming.clusters, coming.site_topics):
                    self._advertiser.gather(now_us)
                if wan.replica.whole(change.version):
                    self._advertise_site(wan.site, now_us)
                    self._casts.site_restored(wan.site, connected=True)
        elif verdict is Verdict.CHANGE:
            if self._reach.apply(wan.site_route, change.clusters, change.site_topics):
                self._advertiser.gather(now_us)
        elif verdict is Verdict.MISSING:
            self._request_resync(wan)

    def on_resync(self, wan: Wan, now_us: int) -> None:
        """Send a snapshot to a gateway that missed a change, at most once a second because it is large."""
        if now_us < wan.snapshot_us + SNAPSHOT_US:
            wan.snapshot_due_us = wan.snapshot_us + SNAPSHOT_US
            self.deadline_us = min(self.deadline_us, wan.snapshot_due_us)
            return
        self._flush()
        wan.snapshot_us, wan.snapshot_due_us = now_us, 0
        self._snapshot(wan)

    def beat(self, wan: Wan, version: int, now_us: int) -> None:
        """Handle a beat. `version` is that of the changes sent before it."""
        wan.smooth_rtt()
        # The oldest come first, so a beat looks only at entries that have expired.
        reported = wan.reported_us
        for what in list(takewhile(lambda what: reported[what] <= now_us, reported)):
            del reported[what]
        if not wan.replica.in_step(version):
            self._request_resync(wan)
        entry = self._reach.entries.get(wan.site)
        rtt_us = self._sites.rtt_us(wan.site)
        if entry is not None and abs(rtt_us - entry.rtt_us) > max(RTT_STEP_US, entry.rtt_us // 4):
            self._interest.version += 1
            self._advertise_site(wan.site, now_us)

    def _request_resync(self, wan: Wan) -> None:
        self.resyncs += 1
        wan.control(wan.replica.request_resync())

    # -- our site, to others ---------------------------------------------------------------------------------

    def _cluster_here(self, address: Address) -> Served:
        """Return the members of our site at an address, as exported to remote sites."""
        name, key_id = address
        kinds: dict[int, int] = {}
        members = 0
        for serving, listed, tag in self._interest.serving(name, key_id):
            exported = self._sites.policy.exports(serving, name, key_id, tag)
            members += listed and bool(exported)
            for kind, concurrency in exported.items():
                kinds[kind] = kinds.get(kind, 0) + concurrency
        return (dict(sorted(kinds.items())), members) if kinds else NOBODY

    def _topic_here(self, topic: Topic) -> int:
        """Return the number of subscriptions to a topic in our site, as exported; without a group 1 at most."""
        if not self._sites.policy.imported.may_allow(topic[0]):
            return 0
        count = self._advertiser.subscription_count(topic)
        return min(count, MAX_COUNT) if topic[2] else min(count, 1)

    def _touched(self, address: Address) -> None:
        assert self._ours is not None
        self._ours.touch(address)
        self._due()

    def _touched_topic(self, topic: Topic) -> None:
        assert self._ours is not None
        self._ours.touch_topic(topic)
        self._due()

    def _due(self) -> None:
        if self._flush_us == NEVER_US:
            # The current time is not known here: `expire` starts the wait.
            self._flush_us = 0
            self.deadline_us = 0

    def _flush(self, most: int = ALL) -> None:
        """Advertise our site's changes to remote sites, `most` of them."""
        self._flush_us = NEVER_US
        if self._ours is None or self.leaving:
            return
        clusters, topics = self._ours.changes(most)
        for frame in self.journal.changes(clusters=clusters, site_topics=topics):
            for wan in self._sites.wans.values():
                wan.port.control(frame)

    def _snapshot(self, wan: Wan) -> None:
        assert self._ours is not None
        clusters, topics = ([], []) if self.leaving else self._ours.whole()
        for frame in self.journal.snapshot(clusters=clusters, site_topics=topics):
            wan.port.control(frame)

    def leave(self) -> None:
        """Advertise an empty interest, so that remote sites send nothing new, because this relay is about to stop."""
        self._flush()
        self.leaving = True
        self.journal.version += 1
        for wan in self._sites.wans.values():
            self._snapshot(wan)

    def _advertise_site(self, site: str, now_us: int) -> None:
        """Advertise to the relays of this site whether a remote site is reached through us, and its distance."""
        self._reach.add_summary(site)
        self._advertiser.site_changed(site, now_us)

    def barred(self, declared: frames.Declare, site: str) -> str:
        """Return why messages of a remote site may not enter ours, or an empty text. A refusal is counted."""
        policy = self._sites.policy
        rule = policy.entering(declared.kind, declared.name, declared.key_id)
        if not rule and declared.kind == Kind.STREAM and self._ours is not None:
            reported, _ = self._ours.clusters.get((declared.name, declared.key_id), NOBODY)
            rule = "" if Kind.STREAM in reported else f"{declared.name} is not exported"
        if rule:
            policy.refuse(site, rule)
        return rule

    # -- time ------------------------------------------------------------------------------------------------

    def expire(self, now_us: int) -> None:
        """Do what is due."""
        if self._flush_us == 0:
            self._flush_us = now_us + WAN_GATHER_US
        elif now_us >= self._flush_us:
            self._flush(PORTION)
            if self._ours is not None and self._ours.waiting and not self.leaving:
                self._flush_us = now_us + GATHER_US
        for wan in self._sites.wans.values():
            if wan.snapshot_due_us and now_us >= wan.snapshot_due_us:
                self.on_resync(wan, now_us)
        soonest = [wan.snapshot_due_us for wan in self._sites.wans.values() if wan.snapshot_due_us]
        self.deadline_us = min(self._flush_us, *soonest, NEVER_US)

    def status(self, now_us: int, wall_us: int | None) -> dict[str, object]:
        """Return the remote sites and the refusals, ready for JSON. `wall_us` is our wall clock, if there is one."""
        return {
            "sites": [
                {
                    "site": site,
                    "cost_ms": min(site_route.cost_ms for site_route in site_routes.values()),
                    "rtt_us": min(site_route.rtt_us for site_route in site_routes.values()),
                    "ways": [
                        {
                            "relay": site_route.relay_id.hex(),
                            "own": site_route.own,
                            "rtt_us": site_route.rtt_us,
                            **(
                                clock_status(site_route.neighbor.beats, now_us, wall_us)
                                if isinstance(site_route.neighbor, Wan)
                                else {}
                            ),
                        }
                        for site_route in site_routes.values()
                    ],
                    "clusters": max(
                        len(site_route.clusters) for site_route in site_routes.values()
                    ),
                    "topics": max(len(site_route.topics) for site_route in site_routes.values()),
                    "untaken": sum(
                        site_route.dropped_entries for site_route in site_routes.values()
                    ),
                    "over_share": sum(
                        site_route.neighbor.over_share
                        for site_route in site_routes.values()
                        if site_route.own
                    ),
                    "untold": self._reach.unadvertised(site),
                }
                for site, site_routes in sorted(self._sites.site_routes.items())
            ],
            "sites_untold": self._ours.unadvertised if self._ours is not None else 0,
            "sites_suspended": sorted(self._sites.suspended),
            "sites_refused": dict(self._sites.policy.refused),
        }
