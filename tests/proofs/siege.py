"""Attacks from sessions (`proofs.attacks`) against a real relay, beside honest requests over it and over its link.

attackers ── A ── member, caller           compared with as many processes that spin, and with one more: the relay
                                               that attackers keep busy competes for the processors, too
             │
             link, TLS on loopback
             │
             B ── caller

cd tests; ../.venv/bin/python -m proofs.siege NAME... --seconds 3 --attackers 1 8    # some attacks, as a table
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import harness
from adversity.kit import unaccounted
from harness import IrisRelay, Result, Role
from support.waiting import wait_until

import iris
from iris import keyfiles
from iris.keyfiles import NETWORK_FILE, load_network_keys
from iris.remote import create_access
from proofs import ROOT
from proofs.attacks import ATTACKS
from proofs.common import TIMEOUT_S, Cues, Proof, Run, cue, cue_and_wait, start

CLUSTER: Final = "proof-siege"
REQUEST_BYTES: Final = 256
LIMIT: Final = 3.0
"""Largest allowed ratio of p99 with attackers to p99 beside as many busy processes, of which the relay is one."""
STRETCH_MS: Final = 5.0
SHARE_MS: Final = 10.0
"""Most processor time for one connection at a stretch, and in one turn."""
ATTACKERS: Final = (1, 8)
SECONDS: Final = 1.0
ROUNDS: Final = 3
"""Turns without and with attackers, which alternate, because other load on this machine changes between them."""
SPUN: Final = 0
BUSY: Final = 1
ATTACKED: Final = 2
"""Phases of a round."""
CHUNKS: Final = 3
"""Chunks of each attack in tests."""
SETTLE_S: Final = 30.0
PROGRAM: Final = (str(ROOT / "tests" / "support" / "metered_relay.py"),)


# -- roles ---------------------------------------------------------------------------------------------------


async def caller(options: dict[str, Any]) -> Result:
    """Send requests one after the other from one cue to the next; return percentiles of each phase, and failures."""
    cues = Cues()
    phases: list[Result] = []
    failed: list[str] = []
    count = 0

    async def ask(client: iris.Client, samples_ns: list[int]) -> None:
        while True:
            begin_ns = time.perf_counter_ns()
            payload = begin_ns.to_bytes(8, "little").ljust(REQUEST_BYTES, b"x")
            try:
                if await client.request(CLUSTER, payload, timeout=TIMEOUT_S) != payload:
                    failed.append("another answer")
            except iris.IrisError as err:
                failed.append(repr(err))
            finally:  # the request that waits when the phase ends counts with its time so far
                samples_ns.append(time.perf_counter_ns() - begin_ns)

    async with iris.connect() as client:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await client.request(CLUSTER, b"", timeout=TIMEOUT_S)
                    break
                except iris.NoMembers:
                    await asyncio.sleep(0.05)  # the member becomes known a moment after it joined
        harness.say_ready()
        while await cues.next_or_stop():
            samples_ns: list[int] = []
            asking = asyncio.create_task(ask(client, samples_ns))
            harness.say_ready()
            await cues.next()
            asking.cancel()
            await asyncio.wait([asking])
            count += len(samples_ns) - 1
            phases.append({**harness.percentiles_us(samples_ns), "count": len(samples_ns)})
            harness.say_ready()
    return {"phases": phases, "failed": failed[:5], "failures": len(failed), "count": count}


# -- the scene -----------------------------------------------------------------------------------------------


class Scene:
    """Two linked relays with a meter in each, a member, a caller at each relay, and attackers."""

    def __init__(self, roles: Run) -> None:
        self.roles = roles
        path = roles.directory / "relay.toml"
        path.write_text("tickets = false\n")
        arguments = [
            "--config",
            str(path),
            "--listen",
            "ws://127.0.0.1:0",
            "--listen",
            "tls://127.0.0.1:0",
        ]
        self.first = IrisRelay(roles, arguments, links=True, program=PROGRAM)
        self.second = IrisRelay(roles, join=self.first, program=PROGRAM)
        self.relays = (self.first, self.second)
        self.member = start(roles, "common.echo", self.first.env, {"cluster": CLUSTER})
        self.callers = [start(roles, "siege.caller", relay.env, {}) for relay in self.relays]
        access = roles.directory / "access.pem"
        create_access(
            access, load_network_keys(Path(self.first.env["IRIS_CONFIG"]) / NETWORK_FILE)[0]
        )
        (tls,) = self.first.logged("sessions.listening")["addresses"]
        (web,) = self.first.logged("web.listening")["addresses"]
        self.where = {"socket": self.first.env["IRIS_RELAY"], "web": web, "tls": f"tls://{tls}", "access": str(access)}  # fmt: skip
        self._reports = 0

    def attackers(self, names: list[str], processes: int, chunks: int = 0) -> Role:
        """Start attackers, and return when all have begun."""
        options = {
            "attacks": names, "processes": processes, "where": self.where, "chunks": chunks,
            "deadline_s": self.roles.deadline_s,
        }  # fmt: skip
        command = [str(ROOT / "tests" / "support" / "attacker.py"), json.dumps(options)]
        return self.roles.start("attackers", command, env=self.first.env, ready=True)

    def ask(self, seconds: float) -> None:
        """Let both callers send requests for some seconds."""
        cue_and_wait(*self.callers)
        time.sleep(seconds)
        cue_and_wait(*self.callers)

    def meter(self) -> Result:
        """Return what the first relay measured since the last call."""
        path = Path(self.first.env["XDG_RUNTIME_DIR"]) / "meter.json"
        self._reports += 1
        cue(self.first.role)
        wait_until(
            lambda: path.exists() and json.loads(path.read_text())["number"] == self._reports
        )
        report: Result = json.loads(path.read_text())
        return report

    def settled(self) -> Result:
        """Return the status of the first relay when all attackers' sessions have ended, or of the end of the wait."""
        return asyncio.run(self._settled())

    async def _settled(self) -> Result:
        until_s = time.monotonic() + SETTLE_S
        env = self.first.env
        async with iris.connect(env["IRIS_RELAY"], keyring=keyfiles.load_keys(env)) as client:
            while True:
                status: Result = await client.status(timeout=TIMEOUT_S)
                strangers = [s["label"] for s in status["sessions"] if s["label"] == "attacker"]
                if not strangers and not status["accounts"]["held"]:
                    return status
                if time.monotonic() > until_s:
                    return status
                await asyncio.sleep(0.05)

    def links_down(self) -> int:
        """Return how many links went down so far."""
        return sum(relay.role.written().count('"link.down"') for relay in self.relays)

    def faults(self) -> list[str]:
        """Return the lines of the relays' logs that report an internal error, or that they ended."""
        lines = [line for relay in self.relays for line in relay.role.written().splitlines()]
        faults = [line[-300:] for line in lines if "Traceback" in line or '.fault"' in line]
        ended = [relay.role.name for relay in self.relays if relay.role.process.poll() is not None]
        return faults + [f"{name} ended" for name in ended]

    def answers(self) -> list[Result]:
        """Stop the callers, and return what they saw: of the one at A, and of the one at B."""
        return [role.result(stop=True) for role in self.callers]


@dataclass
class Outcome:
    """What one attack by some attackers did."""

    name: str
    attackers: int
    callers: list[list[Result]] = field(default_factory=list)
    """Percentiles of the caller at A and of that at B: by turns beside as many processes that spin, beside one more,
    and beside attackers."""
    meter: Result = field(default_factory=dict)
    links_down: int = 0
    failures: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    closed: Counter[str] = field(default_factory=Counter)
    sent_mb_s: float = 0.0
    unaccounted: int = 0
    left: int = 0
    """Sessions of attackers that had not ended in time."""

    def add(self, results: list[Result], took_s: float) -> None:
        """Add what the attackers of one turn did."""
        for result in results:
            if "failed" in result:
                self.failures.append(f"an attacker: {result['failed']}")
                continue
            one = result[self.name]
            self.closed.update(one["closed"])
            self.sent_mb_s += one["bytes"] / 1e6 / took_s

    def judge(self, before: Counter[str], status: Result, meters: list[Result]) -> None:
        """Add what the relay counted since `before`, and the longest times of several reports of its meter."""
        after = _counts(status)
        self.counted = {name: n - before[name] for name, n in after.items() if n != before[name]}
        self.unaccounted = unaccounted(status)
        self.left = sum(session["label"] == "attacker" for session in status["sessions"])
        for meter in meters:
            for name, value in meter.items():
                if isinstance(value, dict):
                    longest = self.meter.setdefault(name, {})
                    longest.update({k: max(v, longest.get(k, 0.0)) for k, v in value.items()})
                else:
                    self.meter[name] = max(value, self.meter.get(name, 0))

    @property
    def ratio(self) -> float:
        """The larger of the ratios of p99 at A and at B, to that beside as many busy processes."""
        return self._ratio(BUSY)

    def _ratio(self, than: int) -> float:
        ratios = (
            [
                b["p99_us"] / a["p99_us"]
                for a, b in zip(phases[than::3], phases[ATTACKED::3], strict=True)
            ]
            for phases in self.callers
        )
        return float(max(map(statistics.median, ratios)))

    def _median_ms(self, key: str, when: int) -> str:
        return "/".join(
            f"{statistics.median(phase[key] for phase in phases[when::3]) / 1000:.1f}"
            for phases in self.callers
        )

    @property
    def stretch(self) -> tuple[str, float]:
        """The longest stretch, without that of all connections that wait for their turn together."""
        return self._longest("stretches_ms")

    def _longest(self, what: str) -> tuple[str, float]:
        times = {k: v for k, v in self.meter[what].items() if k != "Turns._turn"}
        return max(times.items(), key=lambda item: item[1], default=("", 0.0))

    def broken(self) -> list[str]:
        """Return the promises that did not hold, those about time included."""
        name, stretch_ms = self.stretch
        broken = outcomes(self)
        if self.ratio > LIMIT:
            broken.append(f"p99 {self.ratio:.1f} x")
        if stretch_ms > STRETCH_MS:
            broken.append(f"{name} {stretch_ms:.1f} ms")
        if self.meter["share_ms"] > SHARE_MS:
            broken.append(f"{self.meter['share_ms']:.1f} ms of a turn")
        return broken

    def row(self) -> str:
        """Return the line of a table."""

        name, stretch_ms = self.stretch
        work, work_ms = self._longest("work_ms")
        frames = ", ".join(
            f"{k} {v:.1f}"
            for k, v in sorted(self.meter["frames_ms"].items(), key=lambda item: -item[1])[:2]
        )
        counted = ", ".join(f"{k} {v:,}" for k, v in self.counted.items())
        closed = "; ".join(f"{n:,} x {why[:60]}" for why, n in self.closed.most_common(2))
        return (
            f"| {self.name} | {self.attackers} | {self._median_ms('p50_us', BUSY)} | {self._median_ms('p50_us', ATTACKED)} | {self._median_ms('p99_us', SPUN)} | {self._median_ms('p99_us', BUSY)} "
            f"| {self._median_ms('p99_us', ATTACKED)} | {self._ratio(SPUN):.1f} | {self.ratio:.1f} | {stretch_ms:.1f} {name} | {self.meter['collection_ms']:.1f} | {work_ms:.1f} {work} | {self.meter['share_ms']:.1f} | {self.meter['turn_ms']:.1f} "
            f"| {frames} | {self.links_down} | {self.sent_mb_s:.2f} | {counted} | {closed} | {'; '.join(self.broken())} |"
        )  # fmt: skip


HEAD: Final = (
    "| attack | attackers | p50 A/B busy ms | p50 attacked | p99 spun | p99 busy | p99 attacked | ratio to spun | ratio to busy | longest stretch ms | collection ms | without it ms | of a turn ms | turn ms "
    "| longest control frames ms | links down | MB/s | counted | closed | broken |\n|---|" + "---:|" * 14 + "---|---:|---|---|---|"
)  # fmt: skip


def outcomes(outcome: Outcome) -> list[str]:
    """Return the promises about outcomes that did not hold."""
    broken = []
    if outcome.links_down:
        broken.append(f"{outcome.links_down} links went down")
    if outcome.failures:
        broken.append(f"honest requests failed: {outcome.failures[0]}")
    if outcome.unaccounted:
        broken.append(f"{outcome.unaccounted} messages are not accounted for")
    if outcome.left:
        broken.append(f"{outcome.left} sessions of attackers have not ended")
    broken_rules = outcome.counted.get("broken rules", 0)
    if ATTACKS[outcome.name].breaks:
        if not broken_rules:  # an attacker that goes on sending may not see its connection end
            broken.append("no broken rule is counted")
    elif outcome.closed:
        broken.append("closed")
    if sum(outcome.closed.values()) > broken_rules:
        broken.append("what was closed is not counted")
    return broken


def _counts(status: Result) -> Counter[str]:
    account = status["accounts"]
    counts = Counter({f"dropped: {why}": n for why, n in account["dropped"].items()})
    counts.update({name: account[name] for name in ("in", "unwanted", "refused", "expired")})
    refused = [status["web"]["refused"], status["sessions_refused"]]
    counts["broken rules"] = status["protocol_errors"] + sum(sum(why.values()) for why in refused)
    return counts


def measure(name: str, attackers: Sequence[int], seconds: float, rounds: int) -> list[Outcome]:
    """Run one attack by each number of attackers, against relays of its own."""
    found = []
    with Run(120 + len(attackers) * rounds * (6 * seconds + SETTLE_S)) as roles:
        scene = Scene(roles)
        for count in attackers:
            outcome = Outcome(name, count)
            found.append(outcome)
            before, down = _counts(scene.settled()), scene.links_down()
            meters = []
            for _ in range(rounds):
                for busy in (count, count + 1):
                    spinning = scene.attackers(["spin"], busy)
                    scene.ask(seconds)
                    spinning.result(stop=True)
                scene.meter()
                evil = scene.attackers([name], count)
                begin_s = time.monotonic()
                scene.ask(seconds)
                results = evil.result(stop=True)["results"]
                outcome.add(results, time.monotonic() - begin_s)
                status = scene.settled()
                meters.append(scene.meter())
            outcome.judge(before, status, meters)
            outcome.sent_mb_s /= rounds
            outcome.links_down = scene.links_down() - down
            outcome.failures += scene.faults()
        for caller in scene.answers():
            for number, outcome in enumerate(found):
                outcome.callers.append(caller["phases"][3 * rounds * number :][: 3 * rounds])
            if caller["failed"]:
                found[-1].failures += caller["failed"]
    return found


def try_all(proof: Proof) -> None:
    """Run a little of each attack, one after the other against the same relays; only outcomes count."""
    with Run(120) as roles:
        scene = Scene(roles)
        cue_and_wait(*scene.callers)
        evil = scene.attackers([*ATTACKS], 1, CHUNKS)
        (result,) = evil.result()["results"]
        cue_and_wait(*scene.callers)
        status = scene.settled()
        if "failed" in result:
            proof.promise(f"attackers can attack ({result['failed']})", False)
            return
        answers = scene.answers()
        closed = sum(sum(one["closed"].values()) for one in result.values())
        broken_rules = _counts(status)["broken rules"]
        proof.promise(
            f"no link goes down in an attack ({scene.links_down()} did)", not scene.links_down()
        )
        proof.promise(f"relays have no fault in an attack {scene.faults()[:1]}", not scene.faults())
        for caller in answers:
            proof.promise(
                f"honest requests are answered in attacks {caller['failed']}", not caller["failed"]
            )
            proof.promise("honest requests are made in attacks", caller["count"] > 0)
        for name, one in result.items():
            promise = "are closed" if ATTACKS[name].breaks else "stay open"
            proof.promise(
                f"{name}: connections {promise} {one['closed']}",
                bool(one["closed"]) == ATTACKS[name].breaks,
            )
        proof.promise(
            f"each closed connection is counted ({closed}, {broken_rules})", closed <= broken_rules
        )
        proof.promise(
            f"the account balances after attacks ({unaccounted(status)})", not unaccounted(status)
        )
        names = [session["label"] for session in status["sessions"]]
        proof.promise("attackers' sessions end", "attacker" not in names)
    proof.figures["attacks from sessions"] = f"{len(ATTACKS)}, each for a moment"


def prove(proof: Proof, names: list[str]) -> None:
    """Measure attacks, and compare with the limits."""
    found = []
    for name in names:
        for outcome in measure(name, ATTACKERS, SECONDS, ROUNDS):
            found.append(outcome)
            broken = outcome.broken()
            proof.promise(f"{name}, {outcome.attackers} attackers: {'; '.join(broken)}", not broken)
            _, stretch_ms = outcome.stretch
            proof.figures[f"{name}, {outcome.attackers} attackers"] = (
                f"p99 {outcome.ratio:.1f} x, {stretch_ms:.1f} ms at a stretch, {outcome.meter['share_ms']:.1f} ms of a turn"
            )
    worst = max(found, key=lambda outcome: outcome.ratio)
    proof.figures["attacks from sessions"] = (
        f"{len(names)}, by {' and '.join(map(str, ATTACKERS))} processes, in {ROUNDS} turns of {SECONDS:g} s; "
        f"highest ratio of p99: {worst.ratio:.1f} ({worst.name}, {worst.attackers})"
    )


def main() -> None:
    """Print a table of some attacks."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*ATTACKS])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--attackers", type=int, nargs="+", default=ATTACKERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    print(HEAD, flush=True)
    for name in args.names:
        try:
            for outcome in measure(name, args.attackers, args.seconds, args.rounds):
                print(outcome.row(), flush=True)
        except (harness.BenchError, AssertionError) as err:
            print(f"| {name} | failed: {err} |", flush=True)


if __name__ == "__main__":
    main()
