"""Two sites of two gateways and one more relay each: N times one of the four gateways is drained (SIGTERM) under
load and started again.

Calls in flight through it must end well, new calls go over the other gateway, and short tunnels can finish.
Once in `LONG` drains a tunnel stays open: it gets the whole grace, then it breaks, which both its ends report.
Callers and members are at relays that stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
from collections import Counter
from typing import Any

import harness
from harness import Result

import iris
from iris.keyfiles import create_site_key
from proofs.common import TIMEOUT_S, Cues, Proof, Run, cue_and_wait, start
from proofs.restartable import RestartableRelay

CLUSTER = "proof-gateways"
WORKERS = 12
TUNNELS = 3
MESSAGES = 10
SLOW_S = (0.0, 0.25)
"""Range of a handler's time, so that some calls are always in flight."""
GRACE_S = 3.0
LONG = 10
CALL_S = 20.0


# -- roles ---------------------------------------------------------------------------------------------------


async def member(options: dict[str, Any]) -> Result:
    """Answer requests after a while and echo tunnels; report for each tunnel whether it broke."""
    cues = Cues()
    rng = random.Random(1)
    broken = 0
    service = iris.Service(CLUSTER, limits=iris.Limits(concurrency=64))

    @service.on_request
    async def answer(payload: bytes) -> bytes:
        await asyncio.sleep(rng.uniform(*SLOW_S))
        return payload

    @service.on_tunnel
    async def echo(tunnel: iris.Tunnel) -> None:
        nonlocal broken
        try:
            async for message in tunnel:
                await tunnel.send(message)
        except iris.TunnelBroken:
            broken += 1

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        await cues.stop.wait()
    return {"broken": broken}


async def caller(options: dict[str, Any]) -> Result:
    """Make calls and tunnels all the time; after each cue, report when enough calls were answered again."""
    cues = Cues()
    answered = short = 0
    failures: Counter[str] = Counter()
    texts: list[str] = []
    changed = asyncio.Event()

    def failed(what: str, err: Exception) -> None:
        failures[f"{what}: {type(err).__name__}"] += 1
        texts.append(f"{what}: {err}")

    async with iris.connect() as client:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with contextlib.suppress(iris.NoMembers):
                    await client.request(CLUSTER, b"", timeout=CALL_S)
                    break
                await asyncio.sleep(0.05)

        async def ask(worker: int) -> None:
            nonlocal answered
            number = 0
            while not cues.stop.is_set():
                payload = b"%d %d" % (worker, number)
                number += 1
                try:
                    if await client.request(CLUSTER, payload, timeout=CALL_S) != payload:
                        failures["wrong reply"] += 1
                    answered += 1
                    changed.set()
                except iris.IrisError as err:
                    failed("request", err)

        async def talk() -> None:
            nonlocal short
            while not cues.stop.is_set():
                try:
                    async with client.tunnel(CLUSTER, timeout=CALL_S) as tunnel:
                        for number in range(MESSAGES):
                            await tunnel.send(b"%d" % number)
                            if await tunnel.recv() != b"%d" % number:
                                failures["tunnel: wrong message"] += 1
                            await asyncio.sleep(0.02)
                    short += 1
                except iris.IrisError as err:
                    failed("tunnel", err)

        async def follow() -> None:
            while True:
                await cues.next()
                enough = answered + 2 * WORKERS
                while answered < enough:
                    changed.clear()
                    await changed.wait()
                harness.say_ready()

        workers = [asyncio.create_task(ask(number)) for number in range(WORKERS)]
        workers += [asyncio.create_task(talk()) for _ in range(TUNNELS)]
        following = asyncio.create_task(follow())
        harness.say_ready()
        await asyncio.gather(*workers)
        following.cancel()
    return {"answered": answered, "short": short, "failures": failures, "texts": texts[:5]}


async def holder(options: dict[str, Any]) -> Result:
    """At a cue, open a tunnel and keep it until it breaks; report when it is open and when it is broken."""
    cues = Cues()
    opened = broken = 0
    async with iris.connect() as client:
        harness.say_ready()
        stopping = asyncio.create_task(cues.stop.wait())
        while True:
            cued = asyncio.create_task(cues.next())
            await asyncio.wait((cued, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not cued.done():
                cued.cancel()
                break
            tunnel = await client.open_tunnel(CLUSTER, timeout=CALL_S)
            await tunnel.send(b"x")
            await tunnel.recv()
            opened += 1
            harness.say_ready()
            try:
                await tunnel.recv()
            except iris.TunnelBroken:
                broken += 1
            harness.say_ready()
    return {"opened": opened, "broken": broken}


# -- the proof -----------------------------------------------------------------------------------------------


class Sites:
    """The relays of both sites. Callers of `us` call members of `eu`; gateways of `us` dial those of `eu`."""

    def __init__(self, roles: Run) -> None:
        ports = iter(_free_ports(8))
        files = {site: roles.directory / f"{site}.toml" for site in ("eu", "us")}
        pins = {site: create_site_key(path).fingerprint for site, path in files.items()}
        eu_ports = [next(ports), next(ports)]
        dialled = ",".join(f"tls://127.0.0.1:{port}" for port in eu_ports)
        settings = {"IRIS_RELAY_DRAIN_TIMEOUT_S": str(GRACE_S)}
        self.gateways: list[RestartableRelay] = []
        self.plain: dict[str, RestartableRelay] = {}
        for site in ("eu", "us"):
            mesh = [next(ports) for _ in range(3)]
            for number, port in enumerate(mesh):
                arguments = ["--no-mdns", f"--port={port}", "--bind=127.0.0.1"]
                for other in mesh:
                    if other != port:
                        arguments += ["--join", f"127.0.0.1:{other}"]
                if number < 2:
                    arguments += ["--site", site, "--site-key", str(files[site])]
                    if site == "eu":
                        arguments += ["--gateway", f"tls://127.0.0.1:{eu_ports[number]}", "--peer-site", f"us=#{pins['us']}"]  # fmt: skip
                    else:
                        arguments += ["--peer-site", f"eu={dialled}#{pins['eu']}"]
                relay = RestartableRelay(
                    roles, arguments, name=f"{site}{number}", network=site, keyring="" if site == "eu" else "eu",
                    **settings,
                )  # fmt: skip
                if number < 2:
                    self.gateways.append(relay)
                else:
                    self.plain[site] = relay
        for relay in (*self.gateways, *self.plain.values()):
            relay.start()
        for gateway in self.gateways:
            self.joined(gateway)

    def joined(self, gateway: RestartableRelay) -> None:
        """Return when a gateway has both its links, and is connected to both gateways of the other site."""
        gateway.logged("link.up", 2)
        gateway.logged("gateway.up", 2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def run(count: int, seed: int) -> Proof:
    """Run it with `count` drains."""
    proof = Proof()
    rng = random.Random(seed)
    short_s: list[float] = []
    long_s: list[float] = []
    with Run(180.0 + 20 * count) as roles:
        sites = Sites(roles)
        serving = start(roles, "gateway-drains.member", sites.plain["eu"].env, {})
        asking = start(roles, "gateway-drains.caller", sites.plain["us"].env, {})
        holding = start(roles, "gateway-drains.holder", sites.plain["us"].env, {})
        cue_and_wait(asking)

        def drain(gateway: RestartableRelay) -> float:
            cue_and_wait(asking)
            spent_s = gateway.end(signal.SIGTERM)
            if gateway.role.process.returncode:
                raise gateway.role.failed("did not end well")
            cue_and_wait(asking)
            gateway.start()
            sites.joined(gateway)
            return spent_s

        done = 0
        while done < count:
            if done % LONG or count - done < 2:
                short_s.append(drain(rng.choice(sites.gateways)))
                done += 1
                continue
            # The tunnel uses one of the two local gateways.
            cue_and_wait(holding)
            long_s.append(max(drain(gateway) for gateway in sites.gateways[2:]))
            holding.wait_ready()
            done += 2
        result = asking.result(stop=True)
        held = holding.result(stop=True)
        served = serving.result(stop=True)
    failures = result["failures"]
    proof.figures |= {
        "drains": str(done),
        "calls answered": f"{result['answered']:,}",
        "short tunnels": f"{result['short']:,}",
        "calls and short tunnels that failed": str(sum(failures.values())),
        "longest drain": f"{max(short_s, default=0.0):.2f} s of {GRACE_S:g} s",
        "tunnels that stayed open": str(held["opened"]),
        "of these reported as broken, to opener and member": f"{held['broken']}, {served['broken']}",
        "their shortest drain": f"{min(long_s, default=0.0):.2f} s",
    }
    proof.promise(f"no call fails: {failures} {result['texts']}", not failures)
    both = held["opened"] == held["broken"] == served["broken"]
    proof.promise("both ends of a tunnel that stays open get a report that it is broken", both)
    proof.promise("it gets the whole grace", min(long_s, default=GRACE_S) >= GRACE_S)
    return proof
