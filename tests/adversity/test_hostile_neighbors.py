"""A hostile relay and a hostile gateway over real TLS, attack by attack: an honest pair beside them is not affected.

`test_hostile` has random attacks in memory; `test_links` and `test_gateways` cover strangers and impostors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from adversity import test_links
from adversity.kit import data_frame
from support import gateways, links
from support.connection import Connection
from support.relays import KEY
from support.waiting import PATIENCE_S, eventually

import iris
from iris.wire import frames, link_frames
from iris.wire.codec import encode_control, tunnel_frame
from iris.wire.kinds import FLAG_MORE, UNKNOWN_COUNT, Cause, HopClass, Kind
from relay.core.link import LINK_HOP
from relay.core.neighbor import Neighbor
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)

EVIL_KEY = b"e" * 16
RELAY = b"\x42" * 16
BOUND = 64
GUESSES = range(1, 200)


class Honest:
    """A caller with an open tunnel at one relay, and its member and subscriber at the other."""

    def __init__(self, relays: tuple[Relay, Relay], caller: iris.Client, member: iris.Client) -> None:  # fmt: skip
        self.relays = relays
        self.caller = caller
        self.member = member
        self.tunnel: iris.Tunnel
        self.said: list[bytes] = []
        self.received: list[bytes] = []
        self.hold = asyncio.Event()
        self.asked = asyncio.Event()
        self.hold.set()

    def service(self) -> iris.Service:
        service = iris.Service("quiet")

        @service.on_request
        async def echo(payload: bytes) -> bytes:
            self.asked.set()
            await self.hold.wait()
            return payload

        @service.on_tunnel
        async def pass_back(tunnel: iris.Tunnel) -> None:
            async for message in tunnel:
                await tunnel.send(message)

        return service

    async def publish(self) -> None:
        self.said.append(b"%d" % len(self.said))
        await self.caller.publish("calm.news", self.said[-1])

    async def check(self) -> None:
        """Check a request, the tunnel, and all publications: once each and in order."""
        text = b"%d" % len(self.said)
        async with asyncio.timeout(PATIENCE_S):
            await self.publish()
            assert await self.caller.request("quiet", text, timeout=PATIENCE_S) == text
            await self.tunnel.send(text)
            assert await self.tunnel.recv() == text
        await eventually(lambda: len(self.received) >= len(self.said))
        assert self.received == self.said


class Hostile:
    """A holder of the network key, or a pinned site. `relays` are the honest ones; the honest pair uses both."""

    def __init__(
        self, relays: tuple[Relay, Relay], connect: Callable[[Relay], Connection], hello: dict[str, Any]
    ) -> None:  # fmt: skip
        self.relays = relays
        self.connect = connect
        self.own = str(hello.get("site", ""))
        self._hello = link_frames.LinkHello(1, 1, RELAY, 5, 5, 1 << 20, **hello)
        self.version = 1000
        self.cut = 0
        """Number of its violations that make a relay end its connection."""

    @asynccontextmanager
    async def at(self, relay: Relay) -> AsyncIterator[Connection]:
        """Return an established connection of its own to a relay."""
        async with self.connect(relay) as wire:
            await wire.say(self._hello)
            await wire.receive(link_frames.Interest)
            await wire.say(link_frames.Interest(0, 1, reset=True))
            yield wire
        await eventually(lambda: self.neighbor(relay) is None)

    def neighbor(self, relay: Relay) -> Neighbor | None:
        """Return a relay's neighbor object for it while it is connected."""
        return (relay.router.wans if self.own else relay.router.links).get(RELAY)

    def origin(self, relay: Relay) -> dict[str, Any]:
        """Return the class of relays that its frames name."""
        if self.own:
            return {"hop_class": int(HopClass.TO_WAN), "site": relay.router.site}
        return {"hop_class": int(HopClass.MESH)}

    def wanting(self, topic: str) -> dict[str, Any]:
        """Return the INTEREST for a subscription of the adversary."""
        if self.own:
            return {"site_topics": [link_frames.SiteTopic(self.own, topic, KEY.key_id, "", 1)]}
        return {"topics": [link_frames.TopicEntry(topic, KEY.key_id, "", 1)]}

    async def received(self, relay: Relay, wire: Connection) -> None:
        """Return when a relay has handled all frames: send a snapshot with a new version as the last one."""
        self.version += 1
        await wire.say(link_frames.Interest(0, self.version, reset=True, **self.wanting("calm.>")))
        await eventually(lambda: self.version_at(relay) == self.version)

    def version_at(self, relay: Relay) -> int:
        """Return the version of the adversary's interest at a relay. Its connection must not have ended."""
        neighbor: Any = self.neighbor(relay)
        assert neighbor is not None, "its connection ended"
        return int(neighbor.replica.version)

    def own_hop(self, relay: Relay, number: int, *, ours: bool) -> int:
        """Return a hop id from the range of the adversary, or of the relay (`ours`)."""
        neighbor = self.neighbor(relay)
        assert neighbor is not None
        theirs = neighbor.own_hop
        return number | (LINK_HOP ^ theirs if ours else theirs)

    def declare(
        self, relay: Relay, alias: int, kind: int, name: str, key_id: bytes = KEY.key_id
    ) -> bytes:
        declared = frames.Declare(alias, kind, name, key_id, b"s" * 16, **self.origin(relay))
        return encode_control(declared)


# -- what it does ------------------------------------------------------------------------------------------------


async def pieces(hostile: Hostile, honest: Honest) -> None:
    """Send fragments that never end, that are mixed, and that exceed the limits."""

    def piece(alias: int, size: int = 1000, hop: int = 0) -> bytes:
        return data_frame(Kind.PUBLISH, bytes(size), alias=alias, hop=hop, flags=FLAG_MORE)

    for relay in hostile.relays:
        async with hostile.at(relay) as wire:
            await wire.say(*(piece(alias) for alias in range(60)))
            await hostile.received(relay, wire)  # unfinished messages are allowed
            await honest.check()
    offences = {
        "mixed": [piece(1), piece(1, hop=9)],
        "too many": [piece(alias) for alias in range(65)],
        "too long": [piece(1, 65_536) for _ in range(18)],
    }
    for said in offences.values():
        async with hostile.at(hostile.relays[0]) as wire:
            await wire.say(*said)
            assert (await wire.receive(frames.Error)).detail
            await wire.gone()
            hostile.cut += 1
        await honest.check()


async def losses(hostile: Hostile, honest: Honest) -> None:
    """Report false losses of an honest publisher: of the next message, of many, and of past ones."""
    first, second = hostile.relays
    async with hostile.at(first) as here, hostile.at(second) as there:
        publisher = asyncio.create_task(here.receive(frames.Declare))
        await hostile.received(first, here)
        while not publisher.done():
            await honest.check()
        sender_id = publisher.result().sender_id
        number = len(honest.said)
        for begin, count in ((number, 1), (number + 1, 5), (number, 1 << 31), (1 << 62, 7), (0, 1), (0, UNKNOWN_COUNT), (number, 0)):  # fmt: skip
            site = second.router.site if hostile.own else ""
            gap = (Kind.PUBLISH, "calm.news", KEY.key_id, sender_id, begin, count, "lost")
            await there.say(frames.Gap(*gap, site=site))
            await there.say(*(_made_up(number, site) for number in range(BOUND)))
            await hostile.received(second, there)
            await honest.check()
        counts = [lost.count for lost in honest.member.losses]
        assert counts, "no loss was reported: this tests nothing"
        assert not hostile.own or set(counts) == {None}, (
            "the number that a site claims is not taken"
        )


def _made_up(number: int, site: str) -> frames.Gap:
    sender_id = number.to_bytes(16)
    return frames.Gap(Kind.PUBLISH, "calm.news", KEY.key_id, sender_id, 1, 1, "lost", site=site)


async def answers(hostile: Hostile, honest: Honest) -> None:
    """Answer, fail and end calls that were not dispatched to it, while a call between the relays is in flight."""
    honest.hold.clear()
    honest.asked.clear()
    asking = asyncio.create_task(honest.caller.request("quiet", b"held", timeout=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        await honest.asked.wait()
    for relay in hostile.relays:
        async with hostile.at(relay) as wire:
            kinds = (Kind.REPLY, Kind.FAULT, Kind.ANSWER)
            await wire.say(*(hostile.declare(relay, n, kind, "quiet") for n, kind in enumerate(kinds)))  # fmt: skip
            for ours in (False, True):
                for number in GUESSES:
                    hop = hostile.own_hop(relay, number, ours=ours)
                    await wire.say(*(data_frame(kind, bytes(60), alias=n, hop=hop) for n, kind in enumerate(kinds)))  # fmt: skip
                    await wire.say(
                        frames.Fail(hop, Cause.LOST, "lost", True), frames.Done(hop),
                        frames.Roster(hop, ["a.1"]),
                        frames.Credit(1, Kind.PUSH, [hop]), tunnel_frame(Kind.TUNNEL_END, hop, b"\1"),
                        tunnel_frame(Kind.TUNNEL_DATA, hop, bytes(40)),
                    )  # fmt: skip
            await hostile.received(relay, wire)
            await honest.tunnel.send(b"still there")
            async with asyncio.timeout(PATIENCE_S):
                assert await honest.tunnel.recv() == b"still there"
            assert not asking.done()
    assert not asking.done()
    honest.hold.set()
    assert await asking == b"held"


async def interest(hostile: Hostile, honest: Honest) -> None:
    """Advertise members and topics beyond the limits, by changes and by a snapshot: they are counted and dropped."""
    count = 2 * BOUND
    for relay in hostile.relays:
        async with hostile.at(relay) as wire:
            kinds = {int(Kind.REQUEST): 1}
            if hostile.own:
                more: dict[str, Any] = {
                    "clusters": [link_frames.SiteCluster(hostile.own, f"c{n}", EVIL_KEY, kinds, 1) for n in range(count)],
                    "site_topics": [link_frames.SiteTopic(hostile.own, f"t{n}", EVIL_KEY, "", 1) for n in range(count)],
                }  # fmt: skip
            else:
                more = {
                    "joined": [link_frames.MemberEntry(n, f"c{n}", [EVIL_KEY], kinds) for n in range(count)],
                    "topics": [link_frames.TopicEntry(f"t{n}", EVIL_KEY, "", 1) for n in range(count)],
                }  # fmt: skip
            for version in (2, 9):
                reset = version == 9
                await wire.say(
                    link_frames.Interest(0 if reset else 1, version, reset=reset, **more)
                )
                await eventually(lambda: hostile.version_at(relay) == version)  # noqa: B023
                assert _taken(hostile, relay) == (BOUND, BOUND)
                await honest.check()


def _taken(hostile: Hostile, relay: Relay) -> tuple[int, int]:
    """Return how many members and topics of the adversary a relay holds."""
    neighbor: Any = hostile.neighbor(relay)
    if hostile.own:
        return len(neighbor.site_route.clusters), len(neighbor.site_route.topics)
    return neighbor.copy.keyed, len(neighbor.topics)


DEEDS: list[Callable[[Hostile, Honest], Awaitable[None]]] = [pieces, losses, answers, interest]


# -- among whom --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def hostile_relay(directory: Path) -> AsyncIterator[Hostile]:
    """Two relays of one network, and a hostile one that also has its key."""
    async with AsyncExitStack() as stack:
        one = await links.start(directory / "one")
        stack.push_async_callback(one.stop, drain_s=0)
        two = await links.start(directory / "two", f"127.0.0.1:{links.hub(one).port}")
        stack.push_async_callback(two.stop, drain_s=0)
        await eventually(lambda: len(one.router.links) == len(two.router.links) == 1)
        yield Hostile((one, two), lambda relay: test_links.Impostor(relay, RELAY), {})


@asynccontextmanager
async def hostile_site(directory: Path) -> AsyncIterator[Hostile]:
    """Two sites, and a hostile one that both have pinned."""
    world = gateways.World(directory)
    async with AsyncExitStack() as stack:
        eu = await world.start("eu", world.peer("us"), world.peer("evil"))
        stack.push_async_callback(eu.stop, drain_s=0)
        us = await world.start("us", world.peer("eu", eu), world.peer("evil"))
        stack.push_async_callback(us.stop, drain_s=0)
        await eventually(lambda: gateways.joined((eu, us)))
        yield Hostile(
            (eu, us), lambda relay: gateways.Impostor(world, relay, "evil", RELAY), {"site": "evil"}
        )  # fmt: skip


@asynccontextmanager
async def honest_pair(one: Relay, two: Relay) -> AsyncIterator[Honest]:
    """A caller and publisher at `one`, with its member and subscriber at `two`."""
    ring = iris.Keyring.single(KEY)
    async with (
        iris.connect(one.config.socket_path, keyring=ring) as caller,
        iris.connect(two.config.socket_path, keyring=ring) as member,
    ):
        honest = Honest((one, two), caller, member)

        def receive(message: iris.Message) -> None:
            honest.received.append(message.payload)

        async with member.serve(honest.service()), member.subscribe("calm.news", receive):
            async with asyncio.timeout(PATIENCE_S):
                while not honest.received:
                    with contextlib.suppress(
                        iris.NoMembers
                    ):  # its relay does not know the member yet
                        await caller.request("quiet", b"", timeout=PATIENCE_S)
                        await honest.publish()
                    await asyncio.sleep(0.01)
            honest.said = honest.said[-len(honest.received) :]
            async with caller.tunnel("quiet", timeout=PATIENCE_S) as honest.tunnel:
                await honest.check()
                yield honest
                await honest.check()


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
@pytest.mark.parametrize("adversary", [hostile_relay, hostile_site])
async def test_an_honest_pair_goes_on(
    adversary: Callable[[Path], contextlib.AbstractAsyncContextManager[Hostile]],
    deed: Callable[[Hostile, Honest], Awaitable[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for bound in (
        "link.MAX_COPY",
        "peer_interest.MAX_COPY",
        "site_routes.MAX_WANTED",
        "federation.MAX_WANTED",
    ):
        monkeypatch.setattr(f"relay.core.{bound}", BOUND)
    async with adversary(tmp_path) as hostile:
        one, two = hostile.relays
        async with honest_pair(one, two) as honest:
            up = [neighbors(relay) for relay in hostile.relays]
            sessions = [list(relay.router.sessions) for relay in hostile.relays]
            await deed(hostile, honest)
            await honest.check()
            for relay in hostile.relays:
                await eventually(lambda: hostile.neighbor(relay) is None)  # noqa: B023
            assert [neighbors(relay) for relay in hostile.relays] == up
            assert [list(relay.router.sessions) for relay in hostile.relays] == sessions
    hubs = [gateways.hub(r) if hostile.own else links.hub(r) for r in hostile.relays]
    assert sum(hub.protocol_errors for hub in hubs) == hostile.cut
    assert one.router.accounts.balance() == two.router.accounts.balance() == 0


def neighbors(relay: Relay) -> dict[bytes, Neighbor]:
    """Return the honest links and WAN connections of a relay."""
    return {**relay.router.links, **relay.router.wans}
