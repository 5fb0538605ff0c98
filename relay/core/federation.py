"""Other sites: WAN connections, what our site tells over them, and what a gateway tells the relays of its own site.

    our site's interest ── Summary ──► every Wan            every Wan ── Way ── Summary per site ──► our links
    Wan down: its Way is gone; the last Way of a site is remembered for `SUSPENDED_US`

A frame goes from a relay to one gateway, over one WAN connection, and on to the relays of that site: HopClass says how far it has
come, and nothing that came over the WAN goes over it again. Which way a sender's frames take is chosen once for each address,
and again only when that way is lost, so that they stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final

import msgspec

from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.frames import HERE, HopClass, Kind, SiteCluster, SiteEntry, SiteTopic
from iris.wire.names import check_site
from relay.core.interest import MAX_OTHERS, Interest
from relay.core.link import MAX_COPY, Link, check_named
from relay.core.mesh import NEVER_US, Mesh, cut
from relay.core.neighbor import Address, Load, Route, Topic
from relay.core.policy import Policy
from relay.core.summary import Room, Summary
from relay.core.ways import (
    MAX_WANTED,
    NOBODY,
    Suspended,
    Told,
    Wan,
    Way,
    check_entry,
    clusters_behind,
    is_home_only,
)

if TYPE_CHECKING:
    from relay.core.casts import Casts

WAN_GATHER_US: Final = 50_000
"""Changes are gathered so long before other sites hear of them."""
MAX_SITES: Final = 1024
MAX_COUNT: Final = (1 << 32) - 1
SNAPSHOT_US: Final = 1_000_000
RTT_STEP_US: Final = 1_000
"""Relays of our site hear of a round trip that changed by so much, and by a quarter."""


class Federation:
    """The router's half that deals with other sites."""

    def __init__(
        self, interest: Interest, mesh: Mesh, casts: Casts, policy: Policy, next_number: Callable[[], int], site: str
    ) -> None:  # fmt: skip
        self.site = site
        """Our own name; a relay that is no gateway hears it from one."""
        self.policy = policy
        self.wans: dict[bytes, Wan] = {}
        """By the other gateway's relay id."""
        self.ways: dict[str, dict[int, Way]] = {}
        """Site -> number -> way."""
        self.version = 1
        """Of what other sites were told."""
        self.resyncs = 0
        self._interest = interest
        self._mesh = mesh
        self._casts = casts
        self._next_number = next_number
        self.leaving = False
        """Other sites are told of no interest any more: what runs here may finish."""
        self._behind: dict[int, dict[str, Way]] = {}
        """Number of a link -> site -> the way over that gateway."""
        self._coming: dict[int, frames.Interest] = {}
        """Number of a link -> the part about other sites of the snapshot that is coming in."""
        self._suspended: dict[str, Suspended] = {}
        self._ours: Summary | None = None
        """What other sites are told of ours; None: there was no WAN connection yet."""
        self._theirs: dict[str, Summary] = {}
        """Interest of other sites, as announced to the relays of our site."""
        self._their_room = Room(MAX_COPY)
        """Room for that interest, all sites together."""
        self._entries: dict[str, SiteEntry] = {}
        """Sites as our relays were told."""
        self._flush_us = NEVER_US
        self.deadline_us = NEVER_US
        mesh.abroad = self

    # -- WAN connections -------------------------------------------------------------------------------------

    def wan_up(self, wan: Wan, cost_ms: int, now_us: int) -> None:
        """Both gateways have greeted, and the certificate named the other one's site: send our site's interest."""
        if wan.site == self.site:
            raise PeerProtocolError(f"a WAN connection to our own site, {wan.site}")
        if self._ours is None:
            room = Room(MAX_WANTED)
            self._ours = Summary(self.site, self._cluster_here, self._topic_here, room, by_key=True)
            self._interest.changed = self._touched
            self._interest.changed_topic = self._touched_topic
            for address in self._interest.addresses():
                self._ours.touch(address)
            for place in self._mesh.topics_here():
                self._ours.touch_topic(place)
        self._flush()  # to the others; the new one gets it all
        wan.way = way = Way(wan.site, wan, wan.relay_id, self._next_number())
        way.cost_ms = cost_ms
        way.rtt_us = wan.beats.rtt_us
        self.wans[wan.relay_id] = wan
        self._add(way)
        self._snapshot(wan)

    def wan_down(self, wan: Wan, now_us: int, *, silent: bool = False) -> None:
        """The connection is gone, however it ended. `silent`: the other gateway had heard that we stop, and sent nothing new."""
        if self.wans.get(wan.relay_id) is wan:
            del self.wans[wan.relay_id]
        if not wan.bye and not silent:
            self._casts.wan_lost(wan)
        self._remove(wan.way, now_us, final=wan.bye)
        self._tell_mesh(wan.site, now_us)

    def on_interest(self, wan: Wan, change: frames.Interest, now_us: int) -> None:
        """The other site says what it wants."""
        if change.joined or change.left or change.topics or change.sites:
            raise PeerProtocolError("a site is told as a whole, without its relays and members")
        spoken = [entry.site for entry in change.clusters]
        spoken += [entry.site for entry in change.site_topics]
        if any(site != wan.site for site in spoken):
            raise PeerProtocolError(f"{wan.site} speaks for another site")
        if change.reset:
            wan.waiting = ([], [])
        if wan.waiting is not None:
            clusters, topics = wan.waiting
            wan.way.untaken += _extend(clusters, change.clusters, MAX_WANTED)
            wan.way.untaken += _extend(topics, change.site_topics, MAX_WANTED)
            if not change.more:
                wan.waiting = None
                self._replace(wan.way, clusters, topics, now_us)
                wan.version = change.version
                wan.resyncing = False
                if wan.stale:
                    wan.stale = False
                    self._tell_mesh(wan.site, now_us)
                    self._casts.site_back(wan.site, connected=True)
            return
        if wan.resyncing:
            return  # the snapshot will have it
        if wan.stale or change.base != wan.version:
            self._ask_again(wan)
            return
        self._take(wan.way, change.clusters, change.site_topics, now_us)
        wan.version = change.version

    def on_resync(self, wan: Wan, now_us: int) -> None:
        """A change was lost on the way: all is told again, at most once a second, because it takes a while."""
        if now_us < wan.snapshot_us + SNAPSHOT_US:
            wan.snapshot_due_us = wan.snapshot_us + SNAPSHOT_US
            self.deadline_us = min(self.deadline_us, wan.snapshot_due_us)
            return
        self._flush()
        wan.snapshot_us, wan.snapshot_due_us = now_us, 0
        self._snapshot(wan)

    def beat(self, wan: Wan, version: int, now_us: int) -> None:
        """A beat came; its version is that of the changes sent before it."""
        wan.heard()
        # The oldest come first: however much was told, a beat looks only at what has run out.
        told = wan.told_us
        for what in list(takewhile(lambda what: told[what] <= now_us, told)):
            del told[what]
        in_step = wan.stale or wan.resyncing or wan.waiting or version == wan.version
        if not in_step:
            self._ask_again(wan)
        entry = self._entries.get(wan.site)
        rtt_us = self._rtt_us(wan.site)
        if entry is not None and abs(rtt_us - entry.rtt_us) > max(RTT_STEP_US, entry.rtt_us // 4):
            self._interest.version += 1
            self._tell_mesh(wan.site, now_us)

    def _ask_again(self, wan: Wan) -> None:
        self.resyncs += 1
        wan.resyncs += 1
        wan.resyncing = True
        wan.control(frames.Resync(wan.version))

    def _replace(
        self, way: Way, clusters: Sequence[SiteCluster], topics: Sequence[SiteTopic], now_us: int
    ) -> None:
        """Take a snapshot in the place of what was known: what stays is not touched."""
        there = {(entry.name, entry.key_id) for entry in clusters}
        wanted = {(entry.filter, entry.key_id, entry.group) for entry in topics}
        gone = [SiteCluster(way.site, *a, {}) for a in way.clusters if a not in there]
        ended = [SiteTopic(way.site, *place, 0) for place in way.topics if place not in wanted]
        self._take(way, [*gone, *clusters], [*ended, *topics], now_us)

    def _take(
        self, way: Way, clusters: Iterable[SiteCluster], topics: Iterable[SiteTopic], now_us: int
    ) -> None:
        """A site wants this now; of it only what our site may use counts."""
        summary = self._theirs.get(way.site) if way.own else None
        policy = self.policy
        for cluster in clusters:
            check_entry(cluster)
            if way.own:
                kinds = policy.imports(cluster.kinds, cluster.name, cluster.key_id)
                cluster = msgspec.structs.replace(cluster, kinds=kinds)
            way.take_cluster(cluster, self._interest)
            if summary is not None:
                summary.touch((cluster.name, cluster.key_id))
        for topic in topics:
            check_entry(topic)
            if topic.count and way.own and not policy.exported.may_allow(topic.filter):
                continue
            way.take_topic(topic, self._interest)
            if summary is not None:
                summary.touch_topic((topic.filter, topic.key_id, topic.group))
        if summary is not None:
            self._mesh.gather(now_us)

    # -- our site, to others ---------------------------------------------------------------------------------

    def _cluster_here(self, address: Address) -> Told:
        """Return who serves an address in our site, as others may know."""
        name, key_id = address
        kinds: dict[int, int] = {}
        members = 0
        for serving, listed, tag in self._interest.serving(name, key_id):
            exported = self.policy.exports(serving, name, key_id, tag)
            members += listed and bool(exported)
            for kind, concurrency in exported.items():
                kinds[kind] = kinds.get(kind, 0) + concurrency
        return (dict(sorted(kinds.items())), members) if kinds else NOBODY

    def _topic_here(self, place: Topic) -> int:
        """Return how many of our site want a topic, as others may know: without a group, whether anybody does."""
        if not self.policy.imported.may_allow(place[0]):
            return 0
        count = self._mesh.wanting(place)
        return min(count, MAX_COUNT) if place[2] else min(count, 1)

    def _touched(self, address: Address) -> None:
        assert self._ours is not None
        self._ours.touch(address)
        self._due()

    def _touched_topic(self, place: Topic) -> None:
        assert self._ours is not None
        self._ours.touch_topic(place)
        self._due()

    def _due(self) -> None:
        if self._flush_us == NEVER_US:
            # The clock of the moment is the router's to know: `expire` starts the wait.
            self._flush_us = 0
            self.deadline_us = 0

    def _flush(self) -> None:
        """Tell other sites what changed in ours."""
        self._flush_us = NEVER_US
        if self._ours is None or self.leaving:
            return
        clusters, topics = self._ours.changes()
        for part in cut(clusters=clusters, site_topics=topics):
            frame = encode_control(frames.Interest(self.version, self.version + 1, **part))
            self.version += 1
            for wan in self.wans.values():
                wan.port.control(frame)

    def _snapshot(self, wan: Wan) -> None:
        assert self._ours is not None
        clusters, topics = ([], []) if self.leaving else self._ours.whole()
        parts = list(cut(clusters=clusters, site_topics=topics)) or [{}]
        last = len(parts) - 1
        for index, part in enumerate(parts):
            wan.control(
                frames.Interest(0, self.version, **part, reset=index == 0, more=index < last)
            )

    def leave(self) -> None:
        """This relay is about to stop: other sites send nothing new through it."""
        self._flush()
        self.leaving = True
        self.version += 1
        for wan in self.wans.values():
            self._snapshot(wan)

    # -- other sites, to our relays --------------------------------------------------------------------------

    def _tell_mesh(self, site: str, now_us: int) -> None:
        """Our relays hear whether a site is reached through us, and how far it is."""
        own = self._own(site)
        if own and site not in self._theirs:
            summary = self._theirs[site] = Summary(
                site,
                lambda address: clusters_behind(self._own(site), address),
                lambda place: max((way.topics.get(place, 0) for way in self._own(site)), default=0),
                self._their_room,
                by_key=False,
            )
            for way in own:
                for address in way.clusters:
                    summary.touch(address)
                for place in way.topics:
                    summary.touch_topic(place)
        self._mesh.site_changed(site, now_us)

    def _own(self, site: str) -> list[Way]:
        """Return our own connections to a site that has said what it wants."""
        return [way for way in self.ways.get(site, {}).values() if way.own and not way.stale]

    def _rtt_us(self, site: str) -> int:
        return min((way.rtt_us for way in self._own(site)), default=0)

    def mesh_changes(
        self, sites: Iterable[str]
    ) -> tuple[list[SiteEntry], list[SiteCluster], list[SiteTopic]]:
        """Return what our relays have not been told: of the sites named their distance, and of all what they want."""
        entries, clusters, topics = [], [], []
        for site in sites:
            own = self._own(site)
            if own:
                cost_ms = min(way.cost_ms for way in own)
                entries.append(SiteEntry(site, True, cost_ms, self._rtt_us(site)))
                self._entries[site] = entries[-1]
                continue
            ended = self._theirs.pop(site, None)
            if ended is not None:
                ended.end()
            if self._entries.pop(site, None) is not None:
                entries.append(SiteEntry(site, False))
        for summary in self._theirs.values():
            changed = summary.changes()
            clusters += changed[0]
            topics += changed[1]
        return entries, clusters, topics

    def mesh_snapshot(self) -> tuple[list[SiteEntry], list[SiteCluster], list[SiteTopic]]:
        """Return all that our relays were told of other sites."""
        clusters, topics = [], []
        for summary in self._theirs.values():
            told = summary.whole()
            clusters += told[0]
            topics += told[1]
        return list(self._entries.values()), clusters, topics

    def told_by(self, link: Link, change: frames.Interest, now_us: int) -> None:
        """A gateway of our site tells what it reaches; a snapshot counts once it is whole, and what stays is not touched."""
        if change.reset:
            self._coming[link.number] = frames.Interest(0, 0)
        coming = self._coming.get(link.number)
        if coming is not None:
            link.untaken += _extend(coming.sites, change.sites, MAX_SITES)
            link.untaken += _extend(coming.clusters, change.clusters, MAX_COPY)
            link.untaken += _extend(coming.site_topics, change.site_topics, MAX_COPY)
            if change.more:
                return
            del self._coming[link.number]
        behind = self._behind.setdefault(link.number, {})
        before = set(behind)
        for entry in change.sites if coming is None else coming.sites:
            self._told_site(link, behind, entry, now_us)
        if coming is None:
            self._told_all(link, behind, change.clusters, change.site_topics, now_us)
        else:
            self._told_whole(link, behind, coming, now_us)
        for site in behind.keys() - before:
            self._casts.site_back(site, connected=False)

    def _told_whole(
        self, link: Link, behind: dict[str, Way], coming: frames.Interest, now_us: int
    ) -> None:
        """Take what a gateway's snapshot says of the sites that it reaches."""
        told: dict[str, tuple[list[SiteCluster], list[SiteTopic]]] = {}
        for site in behind:
            told[site] = ([], [])
        for cluster in coming.clusters:
            if self._way_behind(link, behind, cluster.site) is not None:
                told[cluster.site][0].append(cluster)
        for topic in coming.site_topics:
            if self._way_behind(link, behind, topic.site) is not None:
                told[topic.site][1].append(topic)
        reached = {entry.site for entry in coming.sites if entry.up}
        for site, (clusters, topics) in told.items():
            if site in reached:
                self._replace(behind[site], clusters, topics, now_us)
            else:
                self._remove(behind.pop(site), now_us, drained=True)

    def _told_site(self, link: Link, behind: dict[str, Way], entry: SiteEntry, now_us: int) -> None:
        """A gateway reaches a site, or does no more."""
        way = behind.get(entry.site)
        if not entry.up:
            if way is not None:
                self._remove(behind.pop(entry.site), now_us)
            return
        if way is None:
            check_named(check_site, entry.site)
            if entry.site == self.site:
                raise PeerProtocolError(f"a gateway of {self.site} calls it another site")
            if len(behind) >= MAX_SITES:
                link.untaken += 1
                return
            way = Way(entry.site, link, link.relay_id, self._next_number())
            behind[entry.site] = way
            self._add(way)
        way.cost_ms, way.rtt_us = entry.cost_ms, entry.rtt_us
        self._interest.version += 1

    def _told_all(
        self, link: Link, behind: dict[str, Way], clusters: Sequence[SiteCluster], topics: Sequence[SiteTopic], now_us: int
    ) -> None:  # fmt: skip
        for cluster in clusters:
            way = self._way_behind(link, behind, cluster.site)
            if way is not None:
                self._take(way, (cluster,), (), now_us)
        for topic in topics:
            way = self._way_behind(link, behind, topic.site)
            if way is not None:
                self._take(way, (), (topic,), now_us)

    @staticmethod
    def _way_behind(link: Link, behind: dict[str, Way], site: str) -> Way | None:
        """Return the way to a site that a gateway names; None if this site may be one that was dropped for want of room."""
        way = behind.get(site)
        if way is None:
            if not link.untaken:
                raise PeerProtocolError(f"a gateway speaks for {site!r}, which it does not reach")
            link.untaken += 1
        return way

    def forget(self, link: Link, now_us: int) -> None:
        """A link is gone: no way leads over it."""
        self._coming.pop(link.number, None)
        for way in self._behind.pop(link.number, {}).values():
            self._remove(way, now_us, drained=link.bye)

    # -- ways ------------------------------------------------------------------------------------------------

    def _add(self, way: Way) -> None:
        self.ways.setdefault(way.site, {})[way.number] = way
        self._interest.version += 1

    def _remove(self, way: Way, now_us: int, *, final: bool = False, drained: bool = False) -> None:
        """Forget a way. `final`: the other end said goodbye; `drained`: so will a gateway of ours, once all that it has is through."""
        ways = self.ways[way.site]
        del ways[way.number]
        began: list[Route] = []
        if not way.stale and any(not other.stale for other in ways.values()):
            if not (final or drained):
                unsure = self._casts.away.unsure()
                began = [route for route in unsure if route.vias.get(way.site) == way.number]
        elif not way.stale:
            self._casts.away.left(way.site, final=final)
            if not final:
                gone = self._suspended[way.site] = Suspended(way, now_us)
                self.deadline_us = min(self.deadline_us, gone.until_us)
        if not ways:
            del self.ways[way.site]
        summary = self._theirs.get(way.site) if way.own else None
        if summary is not None:
            for address in way.clusters:
                summary.touch(address)
            for place in way.topics:
                summary.touch_topic(place)
        way.empty(self._interest)
        self._casts.way_lost(way, began)

    def takers(self, route: Route, ways: Iterable[Way]) -> list[Way]:
        """Return one of `ways` for each site that a route's messages may go to, nearest first, the way taken before if it still leads there.

        Where this relay has a WAN connection itself, no other gateway is asked.
        """
        sites: dict[str, list[Way]] = {}
        for way in ways:
            if self._may_take(route, way):
                sites.setdefault(way.site, []).append(way)
        if route.hop_class == HopClass.LOCAL and not route.barred:
            for site in sites:
                route.barred = self.barred(route, site, entering=False)
        if route.barred:
            return []
        chosen = []
        for site, candidates in sites.items():
            before = route.vias.get(site)
            taken = next((way for way in candidates if way.number == before), None)
            if taken is None:
                own = [way for way in candidates if way.own] or candidates
                taken = max(own, key=lambda way: way.rank(route.name, route.sender_id))
                route.vias[site] = taken.number
            chosen.append(taken)
        return sorted(chosen, key=lambda way: (self.distance_us(way.site), way.site))

    def loads(self, route: Route) -> list[Load]:
        """Return one load for each site whose members serve the route's address, nearest first."""
        if route.hop_class == HopClass.LOCAL:
            if is_home_only(route.kind) and route.site in ("", HERE):
                return []
        elif route.hop_class != HopClass.TO_WAN or isinstance(route.neighbor, Wan):
            return []
        place = (route.kind, route.name, route.key_id)
        serving = {
            way: load
            for ways in self.ways.values()
            for way in ways.values()
            if (load := way.load(*place)) is not None
        }
        return [serving[way] for way in self.takers(route, serving)]

    def _may_take(self, route: Route, way: Way) -> bool:
        if route.hop_class == HopClass.LOCAL:
            return route.site in ("", way.site)
        return way.own and route.site == way.site and not route.barred

    def distance_us(self, site: str) -> int:
        """Return how far a site is by the nearest way."""
        return min((way.distance_us for way in self.ways.get(site, {}).values()), default=0)

    def comes_home(self, route: Route) -> bool:
        """Whether a route's messages may be for members and subscribers of this site."""
        if route.hop_class == HopClass.LOCAL:
            return route.site in ("", HERE, self.site)
        if route.barred:
            return False
        return route.hop_class != HopClass.TO_WAN or isinstance(route.neighbor, Wan)

    def wan_of(self, route: Route) -> Wan | None:
        """Return the WAN connection over which a route's messages for its site went last."""
        way = self.ways.get(route.site, {}).get(route.vias.get(route.site, 0))
        return way.neighbor if way is not None and isinstance(way.neighbor, Wan) else None

    def others(self, name: str, key_ids: Iterable[bytes]) -> dict[str, int]:
        """Return how many members of other sites serve `name` under other keys: first 4 bytes of the key id in hex -> count."""
        known = set(key_ids)
        found: dict[str, int] = {}
        for ways in self.ways.values():
            every = (key for way in ways.values() for key in way.names.get(name, ()))
            keys = dict.fromkeys(islice(every, 2 * MAX_OTHERS + len(known)))
            for key_id in keys:
                count = clusters_behind(ways.values(), (name, key_id))[1]
                short = key_id[:4].hex()
                if key_id not in known and count and (short in found or len(found) < MAX_OTHERS):
                    found[short] = found.get(short, 0) + count
        return found

    def members(self, name: str, key_ids: Iterable[bytes]) -> dict[str, int]:
        """Return how many members an address has in other sites, those under several key ids once as far as that can be told."""
        found: dict[str, int] = {}
        for site, ways in sorted(self.ways.items()):
            told = (clusters_behind(ways.values(), (name, key_id)) for key_id in key_ids)
            count = max((members for _, members in told), default=0)
            if count:
                found[site] = count
        return found

    def might_serve(self, kind: int, name: str, key_id: bytes, site: str, now_us: int) -> bool:
        """Whether a site to which the last way was lost a moment ago may come back with members of an address."""
        if site in (HERE, self.site) or (is_home_only(kind) and not site):
            return False
        if site and self._mesh.settling(now_us):
            return True  # who reaches it may be found in a moment
        if any(
            wan.stale and now_us < wan.settle_us and site in ("", wan.site)
            for wan in self.wans.values()
        ):
            return True
        return any(
            now_us < gone.until_us and site in ("", where) and gone.serves(kind, name, key_id)
            for where, gone in self._suspended.items()
        )

    def barred(self, of: frames.Declare | Route, site: str, *, entering: bool) -> str:
        """Return why messages may not cross to (or, `entering`, from) a site, or an empty text; a refusal is counted."""
        rule = (self.policy.entering if entering else self.policy.leaving)(
            of.kind, of.name, of.key_id
        )
        if not rule and entering and of.kind == Kind.STREAM and self._ours is not None:
            told, _ = self._ours.clusters.get((of.name, of.key_id), NOBODY)
            rule = "" if Kind.STREAM in told else f"{of.name} is not exported"
        if rule:
            self.policy.refuse(site, rule)
        return rule

    # -- time ------------------------------------------------------------------------------------------------

    def expire(self, now_us: int) -> None:
        """Do what is due."""
        if self._flush_us == 0:
            self._flush_us = now_us + WAN_GATHER_US
        elif now_us >= self._flush_us:
            self._flush()
        for site, gone in list(self._suspended.items()):
            if now_us >= gone.until_us:
                del self._suspended[site]
        for wan in self.wans.values():
            if wan.snapshot_due_us and now_us >= wan.snapshot_due_us:
                self.on_resync(wan, now_us)
        soonest = [gone.until_us for gone in self._suspended.values()]
        soonest += [wan.snapshot_due_us for wan in self.wans.values() if wan.snapshot_due_us]
        self.deadline_us = min(self._flush_us, *soonest, NEVER_US)

    def status(self) -> dict[str, object]:
        """Return the sites and what was refused, ready for JSON."""
        return {
            "sites": [
                {
                    "site": site,
                    "cost_ms": min(way.cost_ms for way in ways.values()),
                    "rtt_us": min(way.rtt_us for way in ways.values()),
                    "ways": [
                        {"relay": way.relay_id.hex(), "own": way.own, "rtt_us": way.rtt_us}
                        for way in ways.values()
                    ],
                    "clusters": max(len(way.clusters) for way in ways.values()),
                    "topics": max(len(way.topics) for way in ways.values()),
                    "untaken": sum(way.untaken for way in ways.values()),
                    "over_share": sum(way.neighbor.over_share for way in ways.values() if way.own),
                    "untold": theirs.untold if (theirs := self._theirs.get(site)) else 0,
                }
                for site, ways in sorted(self.ways.items())
            ],
            "sites_untold": self._ours.untold if self._ours is not None else 0,
            "sites_suspended": sorted(self._suspended),
            "sites_refused": dict(self.policy.refused),
        }


def _extend(known: list[Any], more: Sequence[object], limit: int) -> int:
    """Append as many entries as `limit` allows; return how many were left out."""
    room = max(0, limit - len(known))
    known.extend(more[:room])
    return max(0, len(more) - room)
