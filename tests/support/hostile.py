"""Adversaries among real relays, in memory: a relay that holds the network key, and a gateway of a pinned site.

    scene = Scene(seed=7, kinds=("relay", "site"))
    for _ in range(1000):
        scene.step()        # one adversary sends something with valid framing
    scene.probe()           # assert that honest sessions still reach each other, with nothing lost or altered

Relays A and B form the site "ams"; C is the gateway of "ber", and a friend of A. The hostile relay has links to A and
B, the hostile site a WAN connection to A. Adversaries may lose their connections and connect again. They may claim
any cluster except "quiet" and "far". They get the calls to clusters that they claim, and need not answer them.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET
from protocol.kit import KEY, LIMIT, OTHER_KEY, Answers, Host, Inbox, Network, Port, Result
from protocol.test_sites import WanEnd

from iris.core.conversation import State
from iris.core.interfaces import Delivery
from iris.core.tunnel import TunnelEnd
from iris.errors import IrisError, PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.codec import HOP, KIND_AT, decode_control, encode_control, tunnel_frame
from iris.wire.kinds import (
    DECLARED_KINDS,
    PROTOCOL_MINOR,
    PROTOCOL_VERSION,
    SERVED_KINDS,
    TUNNEL_KINDS,
    UNKNOWN_COUNT,
    HopClass,
    Kind,
)
from relay.core import casts as casts_module
from relay.core import link as link_module
from relay.core import site_routes as sites_module
from relay.core.limits import Limits
from relay.core.link import LINK_HOP, Link
from relay.core.neighbor import Neighbor
from relay.core.site_routes import Wan

A, B, C = range(3)
HONEST = {"quiet", "far"}
"""Clusters that the adversaries do not claim under KEY."""
CLUSTERS = ("quiet", "far", "contested", "bait", "stores", "x" * 255)
TOPICS = ("calm.news", "calm.>", "calm.*", ">", "other.topic", "a.b.c.d")
ODD_NAMES = ("", "*", "a..b", "\x1b[2J", "é" * 200, " ", ".", "x" * 256, "a.>.b")
HUGE = (0, 1, 2, 255, 65_535, (1 << 31) - 1, (1 << 32) - 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1)
SITES = ("ams", "ber", "evil", "nowhere", "", "here", "x" * 32)
TEXTS = ("", "slow receiver", "stale", "\x1b[31m\n\r\x00", "é" * 1024, "x" * 1024)
ANSWER_KINDS = (Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.STREAM_REPLY)
DATA_KINDS = tuple(kind for kind in Kind if kind >= 0x40)
MAX_SEEN = 64


class Broken(AssertionError):
    """An adversary did something that Iris must prevent."""


class RawPort(Port):
    """The adversary's end of a connection. It keeps some of the frames that the honest relay sent."""

    def __init__(self) -> None:
        super().__init__()
        self.out = deque(maxlen=MAX_SEEN)  # type: ignore[assignment]
        self.hops: deque[tuple[int, int]] = deque(maxlen=MAX_SEEN)
        """Kind and hop id of calls that were dispatched to it."""
        self.declared: dict[int, frames.Declare] = {}
        self.frames: deque[tuple[bytes, frames.Declare | None]] = deque(maxlen=MAX_SEEN)
        """Frames of honest senders, with their senders."""

    def _see(self, frame: bytes) -> None:
        kind = frame[KIND_AT]
        if kind >= 0x40:
            self.frames.append((frame, self.declared.get(HOP.unpack_from(frame)[3])))
            self.hops.append((kind, HOP.unpack_from(frame)[4]))

    def _take(self, frame: bytes, count: int) -> bool:
        if self.room is not None and count > self.room:
            return False
        self._see(frame)
        return True

    def control(self, frame: bytes) -> None:
        # If a frame cannot be decoded, the honest relay that sent it has a bug.
        view = memoryview(bytearray(frame))
        if frame[KIND_AT] >= 0x40:
            return
        body = decode_control(view, 0, len(frame))
        if isinstance(body, frames.Declare):
            self.declared[body.alias] = body


class Adversary:
    """One hostile neighbor of one honest relay."""

    def __init__(self, scene: Scene, kind: str, at: int) -> None:
        self.scene = scene
        self.kind = kind
        self.at = at
        self.router = scene.net.routers[at]
        self.relay_id = (b"R" if kind == "relay" else b"S") * 16
        self.version = 1
        self.serials: list[int] = []
        self.offences: Counter[str] = Counter()
        self.neighbor: Neighbor
        self.port: RawPort
        self.connect()

    def connect(self) -> None:
        """Greet the honest relay again."""
        rng = self.scene.rng
        self.port = RawPort()
        hello = link_frames.LinkHello(
            PROTOCOL_VERSION, rng.choice((PROTOCOL_MINOR, 7)), self.relay_id, 0, rng.choice((*HUGE, self.router.now_us)),
            LIMIT, rng.choice((1, 64, 65_536)), "ams" if self.kind == "relay" else "evil", "liar\x1b[2J",
            ["192.0.2.1:1"],
        )  # fmt: skip
        if self.kind == "relay":
            self.neighbor = self.router.link_up(self.port, hello)
        else:
            self.neighbor = self.router.wan_up(self.port, hello, "evil", 0)
        self.serials = []
        self.say(link_frames.Interest(0, 1, reset=True))
        self.version = 1

    def disconnect(self) -> None:
        if isinstance(self.neighbor, Link):
            self.router.link_down(self.neighbor)
        elif isinstance(self.neighbor, Wan):
            self.router.wan_down(self.neighbor)

    def say(self, body: frames.Control) -> None:
        try:
            frame = encode_control(body)
        except IrisError:
            return  # too long for a frame
        self.send(frame)

    def send(self, frame: bytes) -> None:
        """Deliver a whole frame to the honest relay."""
        if self.neighbor.closed:
            self.connect()
        try:
            self.router.frame_in(self.neighbor, memoryview(bytearray(frame)), 0, len(frame))
        except PeerProtocolError as err:
            self.offences[re.sub(r"[0-9a-f]{8,}|\d+", "#", str(err))[:60]] += 1
            self.disconnect()

    # -- what it says ----------------------------------------------------------------------------------------

    def key_id(self) -> bytes:
        rng = self.scene.rng
        return rng.choice((KEY.key_id, KEY.key_id, OTHER_KEY.key_id, bytes(16), rng.randbytes(16)))

    def sender_id(self) -> bytes:
        rng = self.scene.rng
        return rng.choice((*self.scene.sender_ids, b"e" * 16, rng.randbytes(16)))

    def name(self, names: Sequence[str] = (*CLUSTERS, *TOPICS)) -> str:
        rng = self.scene.rng
        return rng.choice(ODD_NAMES) if rng.random() < 0.005 else rng.choice(names)

    def claimed(self) -> tuple[str, bytes]:
        """Return an address that it claims to serve, except those that the probes need."""
        name, key_id = self.name(CLUSTERS), self.key_id()
        if name in HONEST and key_id == KEY.key_id:
            name = "contested"
        return name, key_id

    def count(self) -> int:
        rng = self.scene.rng
        return rng.choice(HUGE) if rng.random() < 0.3 else rng.randrange(4)

    def hop(self) -> int:
        """Return a hop id: that of a call dispatched to it, one of its own calls, or a guess."""
        rng = self.scene.rng
        way = rng.random()
        if way < 0.6 and self.port.hops:
            return rng.choice(self.port.hops)[1]
        own = LINK_HOP ^ self.neighbor.own_hop
        if way < 0.9:
            return rng.randrange(1, 64) | own
        return rng.choice((*HUGE, rng.getrandbits(64), (1 << 64) - 1))

    def kinds(self) -> dict[int, int]:
        rng = self.scene.rng
        kinds = rng.sample(sorted(SERVED_KINDS), rng.randrange(1, 5))
        if rng.random() < 0.02:
            kinds.append(rng.choice((0, 0x41, 255, 1 << 40)))
        return {int(kind): rng.choice((1, 16, 1 << 20)) for kind in kinds}

    def reached(self) -> str:
        """Return a site, usually one that it claims to reach."""
        rng = self.scene.rng
        reached = [
            site
            for site, ways in self.router.sites.site_routes.items()
            for way in ways.values()
            if way.neighbor is self.neighbor
        ]
        return rng.choice(reached) if reached and rng.random() < 0.98 else rng.choice(SITES)

    def interest(self) -> None:
        """Send INTEREST of any site, with the right version or not."""
        rng = self.scene.rng
        more: dict[str, Any] = {}
        size = 200 if rng.random() < 0.02 else 4
        relay = self.kind == "relay" or rng.random() < 0.02
        if relay and rng.random() < 0.7:
            joined = []
            for _ in range(rng.randrange(size)):
                name, key_id = self.claimed()
                if not name:
                    continue
                keys = [key_id, rng.randbytes(16)][: rng.randrange(1, 3)]
                serial = rng.choice(
                    (
                        rng.randrange(1 << 20),
                        rng.randrange(1 << 40),
                        self.count() if rng.random() < 0.1 else rng.randrange(1 << 50),
                    )
                )
                joined.append(
                    link_frames.MemberEntry(
                        serial, name[:255], keys, self.kinds(), rng.choice(("", "\x1b", "é" * 64))
                    )
                )
                self.serials.append(serial)
            more["joined"] = joined
        if relay and self.serials and rng.random() < 0.3:
            more["left"] = [self.serials.pop(rng.randrange(len(self.serials)))]
        if relay and rng.random() < 0.5:
            more["topics"] = [
                link_frames.TopicEntry(self.name(TOPICS)[:255] or ">", self.key_id(), rng.choice(("", "g", "h")), min(self.count(), (1 << 32) - 1))
                for _ in range(rng.randrange(size))
            ]  # fmt: skip
        own = "evil" if self.kind == "site" and rng.random() < 0.98 else ""
        if relay and rng.random() < 0.3:
            more["sites"] = [
                link_frames.SiteEntry(rng.choice(SITES if rng.random() < 0.02 else SITES[1:4]), rng.random() < 0.8, rng.choice((0, 5, (1 << 32) - 1)), rng.choice((0, 99, (1 << 63) - 1)))
            ]  # fmt: skip
        if rng.random() < (0.7 if own else 0.05):
            clusters = []
            for _ in range(rng.randrange(size)):
                name, key_id = self.claimed()
                kinds = self.kinds() if rng.random() < 0.8 else {}
                if name:
                    clusters.append(
                        link_frames.SiteCluster(
                            own or self.reached(),
                            name[:255],
                            key_id,
                            kinds,
                            min(self.count(), (1 << 32) - 1),
                        )
                    )
            more["clusters"] = clusters
        if rng.random() < (0.5 if own else 0.05):
            more["site_topics"] = [
                link_frames.SiteTopic(own or self.reached(), self.name(TOPICS)[:255] or ">", self.key_id(), rng.choice(("", "g")), min(self.count(), (1 << 32) - 1))
                for _ in range(rng.randrange(size))
            ]  # fmt: skip
        way = rng.random()
        if way < 0.2:
            self.serials = [entry.serial for entry in more.get("joined", ())]
            more["reset"] = True
            self.version = self.count()
        base, version = self.version, self.version + 1
        if way > 0.95:
            base, version = self.count(), self.count()
        elif way < 0.2:
            base = 0
            version = self.version
        version = min(version, (1 << 63) - 1)
        self.version = version
        self.say(link_frames.Interest(base, version, more=rng.random() < 0.1, **more))

    def declare(self) -> None:
        """Send a DECLARE, usually a valid one."""
        rng = self.scene.rng
        relay = self.kind == "relay"
        kind = (
            rng.choice(sorted(DECLARED_KINDS))
            if rng.random() < 0.995
            else rng.choice((0, 1, 0x49, 255, 1 << 30))
        )
        hop_class, site = (HopClass.MESH, "") if relay else (HopClass.TO_WAN, "ams")
        if relay and rng.random() < 0.3:
            hop_class = HopClass.FROM_WAN
        elif relay and rng.random() < 0.4 and kind not in ANSWER_KINDS:
            hop_class, site = HopClass.TO_WAN, rng.choice(("ber", "ber", "evil", "nowhere"))
        if rng.random() < 0.005:
            hop_class, site = rng.choice(list(HopClass)), rng.choice(SITES)
        alias = rng.randrange(16) if rng.random() < 0.99 else rng.choice((63, 64, 1023, 65_535))
        groups = ["g"] * rng.randrange(2) if rng.random() < 0.9 else [str(n) for n in range(256)]
        name = self.name(("calm.news", "other.topic") if kind == Kind.PUBLISH else CLUSTERS)
        if not name:
            return
        self.say(
            frames.Declare(alias, kind, name[:255], self.key_id(), self.sender_id(), rng.random() < 0.7, groups, self.count(), int(hop_class), site)
        )  # fmt: skip

    def data(self) -> None:
        """Send a data frame of any kind under any alias."""
        rng = self.scene.rng
        way = rng.random()
        if way < 0.25 and self.port.frames:
            # Replay a frame of an honest sender.
            said, whose = rng.choice(self.port.frames)
            frame = bytearray(said)
            if whose is not None and rng.random() < 0.9:
                relay = self.kind == "relay"
                hop_class, site = (HopClass.MESH, "") if relay else (HopClass.TO_WAN, "ams")
                self.say(
                    msgspec.structs.replace(
                        whose, alias=17, hop_class=int(hop_class), site=site, member=0
                    )
                )
                frame[6:10] = (17).to_bytes(4, "little")
            elif rng.random() < 0.9:
                frame[6:10] = rng.randrange(16).to_bytes(4, "little")
            if frame[KIND_AT] not in ANSWER_KINDS and rng.random() < 0.5:
                own = LINK_HOP ^ self.neighbor.own_hop
                frame[10:18] = (rng.randrange(1, 1 << 30) | own).to_bytes(8, "little")
            if rng.random() < 0.3:
                frame[rng.randrange(26, len(frame)) if len(frame) > 26 else 5] ^= (
                    1 << rng.randrange(8)
                )
            if rng.random() < 0.1:
                frame[5] = rng.choice((2 | rng.randrange(16) << 4, 1, 2, 4, 128))
            self.send(bytes(frame))
            return
        kind = rng.choice(DATA_KINDS)
        if way > 0.27:
            # Use a sender that the alias stands for, so that the first check passes.
            routes = [(n, r) for n, r in enumerate(self.neighbor.routes[:64]) if r is not None]
            while len(routes) < 2 and rng.random() < 0.97:
                self.declare()
                routes = [(n, r) for n, r in enumerate(self.neighbor.routes[:64]) if r is not None]
            if routes:
                alias, route = rng.choice(routes)
                kind = route.kind
            else:
                alias = 0
        else:
            alias = rng.choice((rng.randrange(20), (1 << 32) - 1))
        flags = 0 if rng.random() < 0.98 else rng.randrange(256)
        deadline = rng.choice((0, 1, self.router.now_us + 1_000_000, (1 << 63) - 1, -1, -(1 << 63)))
        hop = self.hop()
        own = LINK_HOP ^ self.neighbor.own_hop
        if (
            kind in (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN, Kind.STREAM)
            and rng.random() < 0.9
        ):
            hop = rng.randrange(1, 1 << 30) | own
        if kind in TUNNEL_KINDS:
            body = rng.randbytes(rng.choice((0, 1, 1, 30)))
        else:
            count = (
                rng.choice((1, 1, 1, 3)) if rng.random() < 0.98 else rng.choice((0, (1 << 32) - 1))
            )
            end = rng.choice((0, 1, self.scene.net.now_us, (1 << 63) - 1)).to_bytes(8, "little")
            end += rng.choice((0, 1000, (1 << 32) - 1)).to_bytes(4, "little") + count.to_bytes(
                4, "little"
            )
            end += rng.choice((0, 1, 5, (1 << 63) - 1, (1 << 64) - 1)).to_bytes(8, "little")
            body = end + rng.randbytes(rng.choice((13, 60, 60, 200)))
        self.send(HOP.pack(22 + len(body), kind, flags, alias, hop, deadline) + body)

    def answer(self) -> None:
        """Answer a call that was dispatched to it, under the right address or another."""
        rng = self.scene.rng
        handed = list(self.neighbor.in_flight.items())[:32]
        if not handed:
            return
        hop, call = rng.choice(handed)
        kind = rng.choice(ANSWER_KINDS if rng.random() < 0.5 else (Kind.REPLY, Kind.ANSWER))
        name = call.route.name if rng.random() < 0.6 else self.name(CLUSTERS)
        key_id = call.route.key_id if rng.random() < 0.6 else self.key_id()
        if not name:
            return
        relay = self.kind == "relay"
        hop_class, site = (HopClass.MESH, "") if relay else (HopClass.TO_WAN, "ams")
        self.say(
            frames.Declare(
                18, kind, name[:255], key_id, self.sender_id(), hop_class=int(hop_class), site=site
            )
        )
        body = bytes(12) + (1).to_bytes(4, "little") + rng.randbytes(8 + 60)
        self.send(HOP.pack(22 + len(body), kind, 0, 18, hop, 0) + body)

    def misanswer(self) -> None:
        """Attract a call, and answer it under another address or kind; the caller must get an error at once."""
        rng, net = self.scene.rng, self.scene.net
        if self.neighbor.closed:
            self.connect()
        self.port.room = None
        self.router.writable(self.neighbor)
        lure = f"lure.{self.kind}{self.at}"
        kinds = {int(Kind.REQUEST): 1 << 20}
        self.version += 1
        self.serials = [1] if self.kind == "relay" else []
        self.say(
            link_frames.Interest(0, self.version, reset=True, joined=[link_frames.MemberEntry(1, lure, [KEY.key_id], kinds)])
            if self.kind == "relay"
            else link_frames.Interest(0, self.version, reset=True, clusters=[link_frames.SiteCluster("evil", lure, KEY.key_id, kinds, 1)])
        )  # fmt: skip
        before = set(self.neighbor.in_flight)
        call = self.scene.sessions[self.at].request(lure, b"?", timeout_ms=5000)
        net._move()
        hops = [hop for hop in self.neighbor.in_flight if hop not in before and self.neighbor.in_flight[hop].route.name == lure]  # fmt: skip
        if not hops:
            self.scene.calls.append(call)
            return
        stopped = self.router.accounts.dropped.get("misdirected answer", 0)
        way = rng.choice(("name", "key", "kind"))
        kind = rng.choice((Kind.ANSWER, Kind.STREAM_REPLY)) if way == "kind" else Kind.REPLY
        origin: dict[str, Any] = {"hop_class": int(HopClass.MESH)}
        if self.kind == "site":
            origin = {"hop_class": int(HopClass.TO_WAN), "site": "ams"}
        name = "quiet" if way == "name" else lure
        key_id = OTHER_KEY.key_id if way == "key" else KEY.key_id
        self.say(frames.Declare(19, kind, name, key_id, b"e" * 16, **origin))
        body = bytes(12) + (1).to_bytes(4, "little") + rng.randbytes(68)
        self.send(HOP.pack(22 + len(body), kind, 0, 19, hops[0], 0) + body)
        net._move()
        if not call.done() or call.error is None:
            raise Broken(
                f"an answer of another {way}: {call.message}, and the caller heard nothing"
            )
        if self.router.accounts.dropped.get("misdirected answer", 0) != stopped + 1:
            raise Broken(f"an answer of another {way} was left to the caller to find out")
        self.scene.drawn["misanswered"] += 1

    def fill(self) -> None:
        """Declare more of everything than a small table holds."""
        self.version += 1
        key_id, kinds, numbers = OTHER_KEY.key_id, {int(Kind.PUSH): 1}, range(40)
        more: dict[str, Any] = {
            "joined": [link_frames.MemberEntry(n, f"fill.{n}", [key_id], kinds) for n in numbers],
            "topics": [link_frames.TopicEntry(f"fill.{n}", key_id, "", 1) for n in numbers],
        }
        self.serials = [*numbers]
        if self.kind == "site":
            more = {
                "clusters": [link_frames.SiteCluster("evil", f"fill.{n}", key_id, kinds, 1) for n in numbers],
                "site_topics": [link_frames.SiteTopic("evil", f"fill.{n}", key_id, "", 1) for n in numbers],
            }  # fmt: skip
        self.say(link_frames.Interest(0, self.version, reset=True, **more))

    def tunnel(self) -> None:
        rng = self.scene.rng
        hops = [*self.neighbor.tunnels][:16]
        hop = rng.choice(hops) if hops and rng.random() < 0.7 else self.hop()
        self.send(
            tunnel_frame(
                rng.choice(TUNNEL_KINDS), hop, rng.randbytes(rng.choice((0, 1, 1, 16, 500)))
            )
        )

    def gap(self) -> None:
        """Report a loss that never happened, of any sender."""
        rng = self.scene.rng
        name = self.name(("calm.news", "calm.news", "quiet", "other.topic"))
        if not name:
            return
        kind = (
            rng.choice((Kind.PUBLISH, Kind.PUBLISH, Kind.BROADCAST))
            if rng.random() < 0.98
            else rng.randrange(256)
        )
        count = rng.choice((0, 1, 5, UNKNOWN_COUNT, (1 << 32) - 1))
        site = "ams" if self.kind == "site" else rng.choice(("", "", "ber", "evil"))
        self.say(
            frames.Gap(int(kind), name[:255], self.key_id(), self.sender_id(), self.count(), count, rng.choice(TEXTS), rng.random() < 0.8,
                       ["g"] * rng.randrange(2), self.count(), site)
        )  # fmt: skip

    def fail(self) -> None:
        rng = self.scene.rng
        cause = rng.randrange(8) if rng.random() < 0.9 else rng.choice((-1, 255, 1 << 63))
        self.say(frames.Fail(self.hop(), cause, rng.choice(TEXTS), rng.random() < 0.5))

    def roster(self) -> None:
        rng = self.scene.rng
        members = [
            rng.choice(
                ("a.1", "\x1b[2J", "é" * 64, f"{self.scene.net.routers[B].relay_id.hex()}.1")
            )
            for _ in range(rng.choice((0, 1, 3, 3, 500)))
        ]
        self.say(
            (frames.Roster if rng.random() < 0.5 else frames.Done)(
                self.hop() & (1 << 63) - 1, members
            )
        )

    def credit(self) -> None:
        rng = self.scene.rng
        hops = [
            hop
            for kind, hop in self.port.hops
            if kind == Kind.PUSH and hop in self.neighbor.in_flight
        ]
        if rng.random() < 0.03:
            hops = [self.hop()]
        if not hops:
            return
        chosen = [rng.choice(hops) for _ in range(rng.randrange(4))]
        self.say(
            frames.Credit(
                self.count(),
                rng.choice((Kind.PUSH, Kind.REQUEST, 0)),
                chosen,
                chosen[:1] if rng.random() < 0.1 else [],
            )
        )

    def beat(self) -> None:
        rng = self.scene.rng
        version = self.version if rng.random() < 0.8 else self.count()
        self.say(
            frames.Beat(
                rng.choice((self.router.now_us, self.count())),
                self.count(),
                self.count(),
                version,
                rng.choice((UNSET, self.count())),
            )
        )

    def small(self) -> None:
        """Send RESYNC, LOADS, PEERS, and frames that only sessions may send."""
        rng = self.scene.rng
        loads = [
            link_frames.Load(
                rng.choice((0x40, 0, -1)),
                self.name(CLUSTERS)[:255] or "a",
                self.key_id(),
                min(self.count(), (1 << 32) - 1),
            )
            for _ in range(3)
        ]
        bodies: list[frames.Control] = [
            link_frames.Resync(self.count()), link_frames.Resync(0), link_frames.AskPeers(), link_frames.Loads(loads),
            link_frames.Peers([link_frames.PeerEntry(rng.randbytes(16), ["192.0.2.7:9", "localhost:1"])] * rng.randrange(4)),
        ]  # fmt: skip
        if rng.random() < 0.05:
            bodies = [
                frames.Bye("\x1b"), frames.Error("\x1b[2J" * 40), frames.Join(1, "quiet", [KEY.key_id], {0x40: frames.Serving(1, 1)}),
                frames.Members(1, "quiet", [KEY.key_id]), frames.Status(1), frames.Drain(1), frames.Ping(1), frames.Ack(1),
                frames.Membership(1), frames.Hello(1, 1), frames.Unsubscribe(1, "calm.>"),
            ]  # fmt: skip
        self.say(rng.choice(bodies))

    def port_full(self) -> None:
        """Stop reading, or read again."""
        self.port.room = self.scene.rng.choice((None, 0, 3))
        self.router.writable(self.neighbor)

    def flap(self) -> None:
        self.disconnect()
        self.connect()

    def act(self, deed: str = "") -> str:
        """Do one random thing, and return its name."""
        if self.neighbor.closed:
            self.connect()
        if not deed:
            deed = self.scene.rng.choices(DEEDS, _WEIGHTS)[0]
        getattr(self, deed)()
        return deed


DEEDS: Final = (
    "interest", "declare", "data", "answer", "tunnel", "gap", "fail", "roster", "credit", "beat", "small", "port_full", "flap",
    "misanswer", "fill",
)  # fmt: skip
_WEIGHTS: Final = (20, 20, 40, 8, 6, 6, 8, 5, 5, 4, 5, 1, 1, 1, 1)


def pong(delivery: Delivery) -> None:
    """Answer a request or survey, and finish a push."""
    if delivery.flow.kind == Kind.PUSH:
        delivery.finish()
    else:
        delivery.reply(b"pong", None, False)


class Scene:
    """Two relays, a friendly site, their sessions, and the adversaries. The seed determines everything."""

    def __init__(self, seed: int, kinds: Sequence[str] = ("relay", "site")) -> None:
        self.rng = random.Random(seed)
        self.steps = 0
        self.did: Counter[str] = Counter()
        self.full: set[str] = set()
        """Names of the tables that reached their limits."""
        self.drawn: Counter[str] = Counter()
        """Number of the calls that adversaries may have attracted, by result."""
        self.net = net = Network(relays=3, limits=Limits(aliases=1024, pending=256))
        net.now_us += seed % 1000
        for router, site in zip(net.routers, ("ams", "ams", "ber"), strict=True):
            router.sites.site = site
        self.honest = [*net.link(A, B), *self._connect(A, C)]
        self.alice = net.host("alice", relay=A)
        self.bob = net.host("bob", relay=B)
        self.carol = net.host("carol", relay=C)
        self.sessions = (self.alice, self.bob, self.carol)
        self.quiet = self.bob.serve("quiet", pong)
        self.alice.serve("contested", pong)
        self.bob.serve("contested", pong)
        self.carol.serve("far", pong)
        self.inboxes = [host.subscribe("calm.*") for host in self.sessions]
        self.bob.subscribe("calm.*", group="g")
        self.settle()
        self.sent = 0
        for host in self.sessions:
            host.publish("calm.news", b"x")
        self.settle()
        flows = [host.session.out.flow(Kind.PUBLISH, "calm.news", KEY) for host in self.sessions]
        self.sender_ids = [flow.sender_id for flow in flows]
        for inbox in self.inboxes:
            inbox.messages.clear()
        self.calls: deque[Result] = deque()
        self.tunnel = self._open_tunnel()
        self.settle()
        self.adversaries = [Adversary(self, "relay", at) for at in (A, B) if "relay" in kinds]
        if "site" in kinds:
            self.adversaries.append(Adversary(self, "site", A))

    def _connect(self, one: int, other: int) -> tuple[WanEnd, WanEnd]:
        net = self.net
        routers = net.routers[one], net.routers[other]
        ends = WanEnd(net, routers[0]), WanEnd(net, routers[1])
        hellos = routers[0].hello(routers[0].now_us), routers[1].hello(0)
        ends[0].other, ends[1].other = ends[1], ends[0]
        ends[0].link = routers[0].wan_up(ends[0], hellos[1], routers[1].site, 0)
        ends[1].link = routers[1].wan_up(ends[1], hellos[0], routers[0].site, 0)
        net.ends += ends
        return ends

    def _open_tunnel(self) -> TunnelEnd:
        end = self.alice.open_tunnel("quiet")
        self.net.run()
        return end

    def settle(self) -> None:
        for _ in range(8):
            self.net._move()
            self.net._advance(25_000)
        self.net.run()

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, who: int = -1, deed: str = "") -> None:
        """Let one adversary act. Now and then deliver pending frames, and let honest sessions call what it claims."""
        self.steps += 1
        rng = self.rng
        number = rng.randrange(len(self.adversaries)) if who < 0 else who % len(self.adversaries)
        self.did[self.adversaries[number].act(deed)] += 1
        if self.steps % 8 == 0:
            self.net._move()
        if self.steps % 16 == 0:
            self.draw()
        if self.steps % 32 == 0:
            self.net._advance(rng.choice((1_000, 20_000, 200_000)))
            self.net._move()

    def draw(self) -> None:
        """Let honest sessions call addresses that adversaries may have claimed. The calls may fail, but must end."""
        rng = self.rng
        host = rng.choice(self.sessions)
        way = rng.randrange(5)
        if way == 0:
            self.calls.append(host.request(rng.choice(("contested", "bait")), b"?", timeout_ms=500))
        elif way == 1:
            host.push(rng.choice(("contested", "bait")), b"?", timeout_ms=500)
        elif way == 2:
            host.survey(rng.choice(("contested", "bait")), b"?", timeout_ms=500)
        elif way == 3 and rng.random() < 0.3:
            host.open_tunnel("bait")
        else:
            host.publish("other.topic", b"hm")
            host.publish("bait", b"hm", kind=Kind.BROADCAST)

    # -- what must hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that nothing honest ended, all accounts balance, and every table is within its bound."""
        for end in self.honest:
            if end.link.closed or end.why:
                raise Broken(f"an honest connection ended: {end.why!r}")
        for host in self.sessions:
            if host.session.state is not State.UP or host.ended_because or host.peer.closed:
                raise Broken(f"{host.label}'s session ended: {host.ended_because!r}")
        for router in self.net.routers:
            if router.accounts.balance():
                raise Broken(f"an account does not balance: {router.accounts.report(0)}")
            for neighbor in router.neighbors.values():
                self._bounded(neighbor)

    def _bounded(self, neighbor: Neighbor) -> None:
        bounds = {
            "routes": (len(neighbor.routes), 1024),
            "pending": (neighbor.pending, 256 + 64),
            "handed": (len(neighbor.in_flight), 4096),
            "tunnels": (len(neighbor.tunnels), 4096),
            "gaps": (len(neighbor.gaps), 4096),
        }
        if isinstance(neighbor, Link):
            bounds["members"] = (neighbor.copy.keyed, link_module.MAX_COPY)
            bounds["topics"] = (len(neighbor.topics), link_module.MAX_COPY)
        elif isinstance(neighbor, Wan):
            bounds["clusters"] = (len(neighbor.site_route.clusters), sites_module.MAX_WANTED)
            bounds["topics"] = (len(neighbor.site_route.topics), sites_module.MAX_WANTED)
            bounds["reported"] = (len(neighbor.reported_us), casts_module.MAX_GAPS_REPORTED)
        for name, (size, most) in bounds.items():
            if size == most:
                self.full.add(name)
            if not 0 <= size <= most:
                raise Broken(f"{name} of a neighbor: {size}, and the bound is {most}")

    def probe(self) -> None:
        """Check that the honest sessions can talk to each other."""
        self.settle()
        self.check()
        self._sum_up()
        self.sent += 1
        text = b"%d" % self.sent
        if not self.tunnel.open or self.tunnel.ended:
            raise Broken("the tunnel of two honest members ended")
        self.tunnel.write(memoryview(text), 0)
        self.tunnel.flush()
        call = self.alice.request("quiet", text, timeout_ms=5000)
        far = self.alice.request("far", text, timeout_ms=5000)
        survey: Answers = self.alice.survey("quiet", text, timeout_ms=5000)
        self.alice.publish("calm.news", b"a" + text)
        self.bob.publish("calm.news", b"b" + text)
        self.carol.publish("calm.news", b"c" + text)
        self.settle()
        self.check()
        for what, result in (("quiet", call), ("far", far)):
            if result.error is not None:
                raise Broken(f"a request of {what} failed: {result.error!r}")
            if not result.done() or result.value != b"pong":
                raise Broken(f"a request of {what} was not answered")
        if survey.payloads != [b"pong"] or survey.end != ([], None):
            raise Broken(f"a survey: {survey.payloads} {survey.end} {survey.faults}")
        chunk = self.quiet.tunnels[0].next_chunk()
        if chunk is None or bytes(chunk[1]) != text:
            raise Broken(f"a tunnel brought {chunk} and not {text!r}")
        for host, inbox in zip(self.sessions, self.inboxes, strict=True):
            self._heard(host, inbox, text)

    def _sum_up(self) -> None:
        """Count the calls that have ended, by result."""
        waiting: deque[Result] = deque()
        for call in self.calls:
            if not call.done():
                waiting.append(call)
            elif call.error is not None:
                self.drawn["failed"] += 1
            elif call.value == b"pong":
                self.drawn["answered"] += 1
            else:
                raise Broken("an adversary made up an answer")
        self.calls = waiting
        if len(waiting) > 1000:
            raise Broken("calls that an adversary drew to itself do not end")

    def _heard(self, host: Host, inbox: Inbox, text: bytes) -> None:
        received = sorted(payload for payload in inbox.payloads if payload[1:] == text)
        strange = [p for p in inbox.payloads if p[1:] != text]
        if received != [b"a" + text, b"b" + text, b"c" + text] or strange:
            raise Broken(
                f"{host.label} heard {inbox.payloads} of round {text!r}; gaps {inbox.gaps[-3:]}"
            )
        inbox.messages.clear()
        inbox.gaps.clear()

    def rest(self) -> None:
        """Remove the adversaries. Assert that every call ends, and that no state of theirs is left."""
        for adversary in self.adversaries:
            adversary.disconnect()
        self.net.pass_time(12)
        self.probe()
        self._sum_up()
        if self.calls:
            raise Broken("a call that an adversary drew to itself never ended")
