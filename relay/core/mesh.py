"""The other relays of this site: links, copies of their interest, and introductions.

    link up ── our snapshot ──►        ◄── theirs ── copy ──► interest (addresses, topics -> this link)
            ── changes, loads, beats ──►                `advertiser`, `peer_interest` and `loads` have a module each
    link down: the copy is suspended for `SUSPENDED_US`, then dropped

No relay speaks for a third one, so there is nothing to reconcile: when in doubt, a relay asks for the
snapshot again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

from iris.wire import frames, link_frames
from iris.wire.kinds import NEVER_US, PROTOCOL_MINOR, PROTOCOL_VERSION, Kind
from iris.wire.link_frames import MemberEntry
from iris.wire.names import printable
from relay.core.advertiser import Advertiser
from relay.core.casts import Casts
from relay.core.clocks import clock_status
from relay.core.documents import Part
from relay.core.interest import MAX_OTHERS, Interest
from relay.core.link import SUSPENDED_US, Copy, Link
from relay.core.loads import LoadReports
from relay.core.peer_interest import PeerInterest
from relay.core.ports import Port
from relay.core.reach import Reach
from relay.core.session import Member, is_listed

PEERS_US: Final = 30_000_000
"""Interval at which one peer is asked for its peers, so that all relays find each other once they are linked."""
MAX_COUNTED: Final = 8192
"""Members of other relays that a status counts by cluster, which takes a few ms."""
COUNTED: Final = 64
"""As many of them in each part."""
_FRAME_ENTRIES: Final = 256
_FRAME_BYTES: Final = 32 << 10


class Mesh:
    """The part of the router for links to other relays."""

    def __init__(
        self, relay_id: bytes, label: str, interest: Interest, casts: Casts, reach: Reach, members: Callable[[], Iterable[Member]]
    ) -> None:  # fmt: skip
        """`label` is our host's name, for people; `members` returns all members of this relay."""
        self._relay_id = relay_id
        self._label = label
        self._reach = reach
        self._interest = interest
        self._casts = casts
        self.links: dict[bytes, Link] = {}
        """Relay id -> link, while it is up."""
        self.copies: dict[bytes, Copy] = {}
        """Relay id -> copy; those without a link are suspended."""
        self.introduced: Callable[[bytes, list[str]], None] = _ignore
        self.connection_status: Callable[[Link], Part] = _nothing
        """Returns what is known of the connection of a link, ready for JSON."""
        self.addresses: list[str] = []
        """host:port of our links' listener, as advertised in the greeting."""
        self.settle_us = 0
        """Until then, other relays may not have been found yet."""
        self.advertiser = Advertiser(self.links, interest, reach, members, self._due)
        self.peer_interest = PeerInterest(interest, casts, reach)
        self.loads = LoadReports(self.links, interest, self._due)
        self._peers_us = 0
        """When the next peer is asked for its peers."""
        self._asked_peer = 0
        self.deadline_us = NEVER_US
        """When `expire` is due."""
        casts.missed.on_due = self._due

    # -- links -----------------------------------------------------------------------------------------------

    def link_up(self, port: Port, number: int, hello: link_frames.LinkHello, now_us: int) -> Link:
        """Add a link after both relays have greeted, and send our interest."""
        relay_id = hello.relay_id
        copy = self.copies.get(relay_id)
        if copy is None:
            site, label = printable(hello.site), printable(hello.label)
            copy = self.copies[relay_id] = Copy(relay_id.hex(), site, label)
        self.advertiser.flush()  # to the others; the new one gets the snapshot
        link = Link(port, number, hello, copy, self._relay_id, now_us)
        copy.link = link
        self.links[relay_id] = link
        self.advertiser.send_snapshot(link)
        if not self._peers_us or len(self.links) < 4:
            self._peers_us = now_us + PEERS_US
            link.control(link_frames.AskPeers())
        self._due(now_us)
        return link

    def link_down(self, link: Link, now_us: int) -> None:
        """Remove a closed link. Its copy is kept for a while unless the relay said goodbye."""
        if not link.bye:
            self._casts.link_lost(link)
        self.peer_interest.empty(link)
        self._reach.forget(link, now_us)
        copy = link.copy
        if copy.link is link:
            self._interest.seen.lost(copy.addresses(), copy.host, link.beats.last_us)
            del self.links[link.relay_id]
            copy.link = None
            copy.until_us = now_us if link.bye else now_us + SUSPENDED_US
            self._casts.missed.disconnected(link.relay_id, final=link.bye)
            self._casts.missed.forget(link)
            self._due(copy.until_us)
        self._interest.version += 1

    def controls(self) -> dict[type, Callable[[Link, Any], None]]:
        """Return the handler of each control frame type."""
        return {
            link_frames.Interest: self.peer_interest.on_interest,
            link_frames.Resync: self.advertiser.on_resync,
            link_frames.Loads: self.loads.on_loads,
            link_frames.AskPeers: self._on_ask_peers,
            link_frames.Peers: self._on_peers,
        }

    # -- who is there ----------------------------------------------------------------------------------------

    def infos(
        self, name: str, key_ids: Iterable[bytes], *, streams: bool = False
    ) -> Iterator[frames.MemberInfo]:
        """Yield the members of other relays under any of the key ids, including those of suspended relays.

        With `streams`, yield the stores that hold a stream of the name instead. Changes meanwhile are not seen.
        """
        wanted = dict.fromkeys(key_ids)
        for copy in [*self.copies.values()]:
            there: dict[int, MemberEntry] = {}
            for key_id in wanted:
                there.update(copy.entries(name, key_id))
            for serial in sorted(there):
                entry = there[serial]
                if Kind.STREAM in entry.kinds if streams else is_listed(entry.kinds):
                    yield copy.info(entry)

    def other_keys(self, name: str, key_ids: Iterable[bytes]) -> dict[str, int]:
        """Return how many members of other relays serve `name` under other keys.

        First 4 bytes of the key id in hex -> count.
        """
        known = set(key_ids)
        found: dict[str, int] = {}
        for copy in self.copies.values():
            keys = copy.names.get(name, {})
            for key_id, entries in islice(keys.items(), 2 * MAX_OTHERS + len(known)):
                short = key_id[:4].hex()
                others = entries.listed if key_id not in known else 0
                if others and (short in found or len(found) < MAX_OTHERS):
                    found[short] = found.get(short, 0) + others
        return found

    def might_serve(self, kind: int, name: str, key_id: bytes, now_us: int) -> bool:
        """Whether a relay or store that is suspended, starting or not found yet may serve an address."""
        return (
            self.settling(now_us)
            or (kind == Kind.STREAM and bool(self.starting_stores()))
            or any(copy.link is None and copy.serves(kind, name, key_id) for copy in self.copies.values())
        )  # fmt: skip

    def might_have(self, relay_id: bytes, serial: int, now_us: int) -> bool:
        """Whether a relay that is suspended, not found yet or has not sent its snapshot may have a member."""
        link = self.links.get(relay_id)
        if link is not None:
            return now_us < link.settle_us
        copy = self.copies.get(relay_id)
        return serial in copy.members if copy is not None else now_us < self.settle_us

    def starting_stores(self) -> list[str]:
        """Return the hosts whose stores are starting, with what each waits for; this relay first."""
        stores = self._stores()
        return [f"{who} ({why})"[:64] if why else who for who, starting, why in stores if starting]

    def failed_stores(self) -> str:
        """Return which stores cannot serve, and why: up to two, this relay's first; empty if there are none."""
        failed = [(who, why) for who, _, why in self._stores() if why][:2]
        return "".join(f"; the store on {who} cannot serve: {why}" for who, why in failed)

    def _stores(self) -> list[tuple[str, bool, str]]:
        """Return (host, starting, why its store cannot serve) of every relay, this one first."""
        ours, copies = self.advertiser, self.copies.values()
        there = [
            (copy.label or copy.relay[:8], copy.starting, copy.store_failed) for copy in copies
        ]
        label = self._label or self._relay_id.hex()[:8]
        return [(label, ours.starting, ours.store_failed), *there]

    def settling(self, now_us: int) -> bool:
        """Whether a relay has not been found yet, or a snapshot has not arrived."""
        return now_us < self.settle_us or any(
            now_us < link.settle_us for link in self.links.values()
        )

    # -- introductions ---------------------------------------------------------------------------------------

    def _on_ask_peers(self, link: Link, _: object) -> None:
        peers = [
            link_frames.PeerEntry(other.relay_id, other.hello.addresses)
            for other in self.links.values()
            if other is not link and other.hello.addresses
        ]
        while peers:
            part: list[link_frames.PeerEntry] = []
            size = 0
            while peers and size < _FRAME_BYTES and len(part) < _FRAME_ENTRIES:
                part.append(peers.pop())
                size += 32 + sum(8 + 4 * len(address) for address in part[-1].addresses)
            link.control(link_frames.Peers(part))

    def _on_peers(self, link: Link, introduced: link_frames.Peers) -> None:
        for peer in introduced.peers:
            if peer.relay_id != self._relay_id and peer.relay_id not in self.links:
                self.introduced(peer.relay_id, peer.addresses)

    # -- time ------------------------------------------------------------------------------------------------

    def hello(
        self, dial_us: int, now_us: int, limits: tuple[int, int], site: str, label: str
    ) -> link_frames.LinkHello:
        """Return our greeting."""
        message_limit, aliases = limits
        return link_frames.LinkHello(
            PROTOCOL_VERSION, PROTOCOL_MINOR, self._relay_id, dial_us, now_us, message_limit, aliases, site, label,
            self.addresses,
        )  # fmt: skip

    def expire(self, now_us: int) -> None:
        """Do what is due."""
        if now_us >= self.advertiser.flush_us:
            self.advertiser.expire(now_us)
        if now_us >= self.loads.report_us:
            self.loads.report(now_us)
        soonest = min(self.advertiser.flush_us, self.loads.report_us)
        for relay_id, copy in list(self.copies.items()):
            if copy.link is None:
                if now_us >= copy.until_us:
                    self._drop(relay_id, copy)
                else:
                    soonest = min(soonest, copy.until_us)
        missed = self._casts.missed
        if now_us >= missed.look_us:
            missed.expire()
        soonest = min(soonest, missed.look_us)
        if self.links and now_us >= self._peers_us:
            self._peers_us = now_us + PEERS_US
            self._asked_peer += 1
            links = list(self.links.values())
            links[self._asked_peer % len(links)].control(link_frames.AskPeers())
        if self.links:
            soonest = min(soonest, self._peers_us)
        self.deadline_us = soonest

    def _drop(self, relay_id: bytes, copy: Copy) -> None:
        """Drop the copy of a relay that did not come back, and notify watchers that its members have left."""
        del self.copies[relay_id]
        for serial, entry in copy.members.items():
            self.peer_interest.member_left(entry, copy.member_id(serial))

    def _due(self, at_us: int) -> None:
        if at_us < self.deadline_us:
            self.deadline_us = at_us

    def status(self, now_us: int, wall_us: int | None) -> Iterator[Part]:
        """Yield links and suspended relays, ready for JSON. `wall_us` is our wall clock, if there is one.

        "linked_clusters" counts the members among the first `MAX_COUNTED` entries that other relays advertise.
        """
        yield {"linked_clusters": {}, "links": []}
        entries = chain.from_iterable([copy.members.values() for copy in self.copies.values()])
        counts: dict[str, int] = {}
        for number, entry in enumerate(list(islice(entries, MAX_COUNTED)), 1):
            if is_listed(entry.kinds):
                counts[entry.name] = counts.get(entry.name, 0) + 1
            if not number % COUNTED:
                yield {}
        for name, count in counts.items():
            yield {"linked_clusters": {name: count}}
        for link in list(self.links.values()):
            yield {"links": [self._link_status(link, now_us, wall_us)]}
        yield {
            "suspended": [copy.relay for copy in self.copies.values() if copy.link is None],
            "resyncs": self.peer_interest.resyncs,
            "away": len(self._casts.missed),
            "casts_untold": self._casts.missed.unreported,
        }

    def _link_status(self, link: Link, now_us: int, wall_us: int | None) -> Part:
        return {
            "peer": link.relay_id.hex(),
            "label": link.label,
            "site": link.copy.site,
            "rtt_us": link.rtt_us,
            **clock_status(link.beats, now_us, wall_us),
            "silent_us": now_us - link.beats.last_us,
            "members": len(link.copy.members),
            "topics": len(link.topics),
            "running": len(link.in_flight),
            "waiting": link.pending,
            "tunnels": len(link.tunnels),
            "held": link.port.held_messages,
            "resyncs": link.replica.resyncs,
            "untaken": link.dropped_entries,
            "over_share": link.over_share,
            **self.connection_status(link),
        }


def _ignore(relay_id: bytes, addresses: list[str]) -> None:
    """Default for `introduced`: does not dial."""


def _nothing(link: Link) -> Part:
    """Default for `connection_status`."""
    return {}
