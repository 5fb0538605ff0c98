"""What ends at a relay is freed by its last reference.

The collector of cycles finds nothing of ours, so that it can run seldom (`iris.memory`). The relays run in this process
on the event loop of production, their peers in others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proofs.attacks import ATTACKS
from support import gateways, links
from support.gateways import World
from support.tables import grown, tables
from support.visitors import VERBS
from support.waiting import eventually

from iris.remote import create_access
from relay.core import missed_casts
from relay.daemon import Relay
from relay.process import loop_factory

pytestmark = pytest.mark.timeout(120)
OURS = ("relay.", "iris.")
LISTEN = ("ws://127.0.0.1:0", "tls://127.0.0.1:0")


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let relays forget casts at once that a lost link may not have delivered: they refer to their senders."""
    monkeypatch.setattr(missed_casts, "UNSURE_US", 50_000)
    monkeypatch.setattr(missed_casts, "LOOK_US", 50_000)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect no cycles meanwhile, and keep those from before."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def garbage() -> Counter[str]:
    """Return the types of ours of what only the collector can free, and how many objects there are."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        return Counter(name for name in names if name.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


async def run(program: str, options: dict[str, Any]) -> bytes:
    """Run a program of `tests/support` to its end; return what it printed."""
    path = Path(__file__).parents[1] / "support" / program
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(path), json.dumps(options), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )  # fmt: skip
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return printed


class Scene:
    """Two linked relays of one site, the first with a store and a gateway, and the gateway of another site."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.first: Relay
        self.second: Relay
        self.far: Relay
        self.where: dict[str, str] = {}
        """How attackers reach the first relay."""

    async def start(self) -> None:
        world = self.world
        settings = {"tickets": False, "data": world.directory / "store"}
        config = world.relay("eu", world.peer("us"), **settings).config
        self.first = Relay(replace(config, listen=LISTEN))
        await self.first.start()
        world.relays.append(self.first)
        self.second = await links.start(
            world.directory / "second", links.address(self.first), keys=(world.network("eu"),), site="eu"
        )  # fmt: skip
        world.relays.append(self.second)
        self.far = await world.start("us", world.peer("eu", self.first))
        await self.joined()
        self._look_up()
        await eventually(lambda: self.first.router.stores.own_store_is_up)

    def _look_up(self) -> None:
        access = self.world.directory / "access.pem"
        create_access(access, self.world.network("eu"))
        assert self.first.web is not None
        assert self.first.remote is not None
        self.where = {
            "socket": str(self.first.config.socket_path), "web": self.first.web.addresses[0],
            "tls": "tls://{}:{}".format(*self.first.remote.addresses[0]), "access": str(access),
        }  # fmt: skip

    async def start_one(self) -> None:
        """Start the first relay alone, without a store."""
        self.first = await links.start(
            self.world.directory / "one", keys=(self.world.network("eu"),), tickets=False, listen=LISTEN
        )  # fmt: skip
        self.world.relays.append(self.first)
        self._look_up()

    async def joined(self) -> None:
        """Return when the relays are connected."""
        first = self.first
        await eventually(
            lambda: gateways.joined((first, self.far)) and links.linked(first, self.second)
        )

    async def visit(self, *verbs: str, aborts: bool = False) -> None:
        """Let clients at all relays use these verbs, and leave."""
        relays = self.world.relays[: 2 if "stream" in verbs else 3]  # the far site has no store
        sockets = [str(relay.config.socket_path) for relay in relays]
        options = {
            "sockets": sockets,
            "verbs": verbs,
            "aborts": aborts,
        }
        await run("visitors.py", {**options, "first": 0, "rounds": 2, "at_once": 2})
        await self.settled()

    async def attack(self, names: Sequence[str]) -> None:
        """Let attackers send a little."""
        options = {
            "attacks": names,
            "processes": 1,
            "where": self.where,
            "chunks": 3,
            "deadline_s": 60,
        }
        printed = await run("attacker.py", options)
        assert b'"failed"' not in printed, printed
        await self.settled()

    async def settled(self) -> None:
        """Return when all connections of visitors and attackers have ended, and what they held is taken apart."""
        await eventually(lambda: not any(self._busy(relay) for relay in self.world.relays))

    def _busy(self, relay: Relay) -> bool:
        router, hub = relay.router, relay.hub
        stores = sum(session.stores for session in router.sessions.values())
        web = relay.web.status()["connections"] if relay.web is not None else 0
        recorded = router._casts.missed._sent
        return len(hub.ports) > stores or bool(
            hub.attaching or router.ending or len(router.endings) or web or recorded
        )


@contextlib.asynccontextmanager
async def scene(directory: Path, *, alone: bool = False) -> AsyncIterator[Scene]:
    made = Scene(World(directory))
    try:
        await (made.start_one() if alone else made.start())
        yield made
    finally:
        await made.world.end()


def on_the_loop_of_production(work: Any) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work)


STRANGE = [
    name
    for name, attack in ATTACKS.items()
    if (attack.breaks or attack.port != "socket")
    and name != "web_without_http"  # the relay waits for more
]
MANY = [
    "flows_that_stall",
    "surveys_of_own_members",
    "watches_of_joins_of_another_session",
    "topics_under_many_keys",
]


def test_sessions_that_use_every_verb_leave_no_cycle(tmp_path: Path) -> None:
    async def work() -> None:
        async with scene(tmp_path) as made:
            with no_collections():
                await made.visit(*VERBS)
                await made.visit(*VERBS[:-1], aborts=True)
                assert garbage() == {}

    on_the_loop_of_production(work())


def test_browsers_and_sessions_that_are_refused_leave_no_cycle(tmp_path: Path) -> None:
    async def work() -> None:
        async with scene(tmp_path) as made:
            with no_collections():
                await made.attack(STRANGE)
                await made.attack(MANY)
                assert garbage() == {}

    on_the_loop_of_production(work())


def test_links_and_gateways_that_are_cut_or_refused_leave_no_cycle(tmp_path: Path) -> None:
    async def work() -> None:
        async with scene(tmp_path) as made:
            with no_collections():
                for _ in range(2):
                    await made.visit("serve", "request", "publish")
                    link, wan = (
                        links.link(made.first, made.second),
                        gateways.port(made.first, made.far),
                    )
                    assert link is not None
                    assert wan is not None
                    link.abort("cut")
                    wan.abort("cut")
                    del link, wan
                    await made.joined()
                ports = [
                    links.hub(made.first).addresses[0][1],
                    gateways.hub(made.first).addresses[0][1],
                ]
                for port in ports:
                    await strange(port, b"")
                    await strange(port, b"no TLS at all" * 100)
                await eventually(lambda: sum(links.hub(made.first).refusals.values()) == 2)
                await made.world.stop(made.second)
                await made.world.stop(made.far)
                del made.second, made.far
                await eventually(lambda: not (made.first.router.links or made.first.router.wans))
                gone = garbage()
                assert gone == {}

    on_the_loop_of_production(work())


async def strange(port: int, data: bytes) -> None:
    """Connect, send something that is not TLS, and go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if data:
        await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


COUNTERS = {
    "Accounts.dropped",
    "Seen._last",
    "Quiet._logged",
    "WebListener.refusals",
    "RemoteListener.refusals",
    "Tally.names",
    "Troubles._programs",
    "Troubles._rows",
    "Troubles.totals",
}
"""A few causes, where members were in the last minutes, the latest lines of the log, and the latest losses that
programs have reported.
"""


def test_no_table_of_a_relay_keeps_anything_of_sessions_that_have_gone(tmp_path: Path) -> None:
    async def work() -> None:
        async with scene(tmp_path, alone=True) as made:
            before = tables(made.first)
            assert len(before) > 100
            await made.visit(*VERBS[:-1], aborts=True)
            await made.attack([*STRANGE, *MANY])
            kept = grown(before, tables(made.first))
            assert {path: n for path, n in kept.items() if path not in COUNTERS} == {}

    on_the_loop_of_production(work())
