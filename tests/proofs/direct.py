"""Breaks N direct tunnels under load: by killing the opener, the member or the relay, or by shutting down the pair.

The remaining ends must get a report within a second, and must have received all earlier messages whole and in order.
The relay must have its descriptors back.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import harness
from harness import IrisRelay, Result, Role

import iris
from proofs.common import TIMEOUT_S, Cues, Proof, Run, start

CLUSTER = "proof-direct"
KINDS = ("opener", "member", "pair", "relay")
"""What is killed, in turn. "pair": one end shuts down the socket pair."""
WITHIN_S = 1.0
MOST_AFTER_S = 0.05
"""Most seconds of load after both directions have moved to the socket pair."""
SIZES = (1, 100, 5_000, 65_536, 70_000, 300_000)
SETTLE_S = 0.2
LOOKS = 500
LOOK_S = 0.01


# -- roles ---------------------------------------------------------------------------------------------------


class Side:
    """One end of a tunnel: sends numbered messages of many sizes, checks those received, and notes when it breaks."""

    def __init__(self, tunnel: iris.Tunnel) -> None:
        self.tunnel = tunnel
        self.received = self.wrong = 0
        self.broken_ns = 0
        self.reason = ""

    async def send(self) -> None:
        """Send until the tunnel breaks."""
        number = 0
        while True:
            size = SIZES[number % len(SIZES)]
            await self.tunnel.send(number.to_bytes(8, "little") + bytes([number % 251]) * size)
            number += 1

    async def receive(self) -> None:
        """Receive until the tunnel breaks."""
        async for message in self.tunnel:
            size = SIZES[self.received % len(SIZES)]
            wanted = self.received.to_bytes(8, "little") + bytes([self.received % 251]) * size
            self.wrong += message != wanted
            self.received += 1

    @property
    def moved(self) -> bool:
        """Whether both directions use the socket pair."""
        direct = self.tunnel._end.direct
        return self.tunnel._end.pair is not None and direct is not None and direct.moved

    async def run(self, cues: Cues) -> Result:
        """Send and receive, say "ready" when both directions have moved, shut the pair down at a cue; return what
        happened.
        """
        both = asyncio.gather(self.send(), self.receive())
        both.add_done_callback(self._ended)
        while not self.moved and not both.done():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        harness.say_ready()
        cut = asyncio.create_task(self._cut(cues))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await both
        except iris.TunnelBroken as err:
            self.reason = str(err)
        except TimeoutError:
            self.reason = "it was never reported"
        cut.cancel()
        return {
            "broken_ns": self.broken_ns, "reason": self.reason, "received": self.received, "wrong": self.wrong,
        }  # fmt: skip

    def _ended(self, _: object) -> None:
        self.broken_ns = time.monotonic_ns()

    async def _cut(self, cues: Cues) -> None:
        await cues.next()
        way: Any = self.tunnel._end.pair
        way._socket.shutdown(2)


async def member(options: dict[str, Any]) -> Result:
    cues = Cues()
    service = iris.Service(CLUSTER)
    outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    @service.on_tunnel
    async def take(tunnel: iris.Tunnel) -> None:
        outcome.set_result(await Side(tunnel).run(cues))

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        return await outcome


async def opener(options: dict[str, Any]) -> Result:
    cues = Cues()
    async with iris.connect() as client:
        await client.wait_for_members(CLUSTER, 1, timeout=TIMEOUT_S)
        return await Side(await client.open_tunnel(CLUSTER, timeout=TIMEOUT_S)).run(cues)


# -- the proof -----------------------------------------------------------------------------------------------


def descriptors(role: Role) -> int:
    return len(os.listdir(f"/proc/{role.process.pid}/fd"))


def at_rest(relay: IrisRelay) -> int:
    """Return a relay's number of descriptors without sessions, after a first one: some are opened once and kept."""
    relay.status()
    time.sleep(SETTLE_S)
    return descriptors(relay.role)


def returned(relay: IrisRelay, least: int) -> bool:
    """Wait a moment, and return whether the relay has as few descriptors as before the tunnel."""
    for _ in range(LOOKS):
        if descriptors(relay.role) <= least:
            return True
        time.sleep(LOOK_S)
    return False


def run(count: int, seed: int) -> Proof:
    """Run it with `count` tunnels."""
    proof = Proof()
    chance = random.Random(seed)
    notified_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    reasons: dict[str, int] = {}
    wrong = received = kept = made = 0
    with Run(60.0 + 4.0 * count) as roles:
        relay = IrisRelay(roles)
        before = at_rest(relay)
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            serving = start(roles, "direct.member", relay.env, {})
            opening = start(roles, "direct.opener", relay.env, {})
            serving.wait_ready()
            time.sleep(chance.uniform(0, MOST_AFTER_S))
            victims = {"opener": [opening], "member": [serving], "relay": [relay.role], "pair": []}
            broken_ns = time.monotonic_ns()
            for victim in victims[kind]:
                victim.process.kill()
            if kind == "pair":
                chance.choice((opening, serving)).cue()
            for role in (opening, serving):
                if role in victims[kind]:
                    role.process.wait()
                    continue
                said = role.result(stop=False)
                notified_s[kind].append((said["broken_ns"] - broken_ns) / 1e9)
                reason = said["reason"].partition(": ")[2] or said["reason"] or "no reason"
                reasons[reason] = reasons.get(reason, 0) + 1
                wrong += said["wrong"]
                received += said["received"]
            made += 1
            if kind == "relay":
                relay.role.process.wait()
                relay = IrisRelay(roles)
                before = at_rest(relay)
            elif not returned(relay, before):
                kept += 1
        status = relay.status()
        relay.stop()
    every = [one for some in notified_s.values() for one in some]
    proof.figures = {
        "broken": f"{made:,}: " + ", ".join(f"{len(notified_s[kind])} of the {kind}" for kind in KINDS),
        **{
            f"reported after, {kind}": f"{sorted(some)[len(some) // 2] * 1000:.1f} ms, at most {max(some) * 1000:.1f} ms"
            for kind, some in notified_s.items()
            if some
        },
        "reported reasons": "; ".join(f"{many} {reason}" for reason, many in reasons.items()),
        "messages received before": f"{received:,}, {wrong} wrong",
        "the relay kept descriptors": f"{kept} times",
    }  # fmt: skip
    proof.promise(f"the other end gets a report within {WITHIN_S:g} s", max(every) < WITHIN_S)
    proof.promise("with a reason", not ({"no reason", "it was never reported"} & set(reasons)))
    proof.promise("what came was whole and in order", not wrong)
    proof.promise("something came", received > 0)
    proof.promise("the relay has its descriptors back", not kept)
    proof.promise("no pair is left", not status["direct"]["open"])
    return proof
