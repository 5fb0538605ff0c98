"""N seconds of random faults among real processes, whose histories `history/checker.py` checks afterwards.

There are two sites of two gateways and one more relay each, on separate hosts (network namespaces), with a store in
the first site and members of all kinds (`history/member.py`) in both. The faults are drawn from the seed: SIGKILL,
SIGTERM and SIGSTOP of relays, gateways, the store and members; cuts of cables and the WAN; and, if libfaketime is
installed, clocks that are set an hour forward and back. Needs root.

After that, N members of a queue group (500 at most) leave under load: see `leaves.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from harness import BenchError
from hosts.kit import Relay
from hosts.sites import Federation
from support.namespaces import Lan, why_not

from proofs import leaves
from proofs.common import Proof
from proofs.history.checker import History, judge

MEMBER: Final = Path(__file__).with_name("history") / "member.py"
STORE: Final = "eu3"
"""The host whose relay has the store."""
HOSTS: Final = {
    "service": ("eu1", "eu3", "us1"),
    "caller": ("eu2", "us2"),
    "publisher": ("eu2", "us3"),
    "subscriber": ("eu1", "eu3", "us2"),
    "sharer": ("eu1", "us1"),
    "appender": ("eu2",),
    "worker": ("eu1", "eu3"),
}
"""Role -> the hosts on which it runs."""
LISTENERS: Final = ("service", "subscriber", "sharer")
MAX_LEAVES: Final = 500
CALM_S: Final = 5.0
"""Pause after the last fault, before any process is stopped."""
END_S: Final = 60.0
"""Limit for the end of a process, or for a relay to serve again, on a busy machine."""
FAKETIME: Final = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
SETTING: Final = "clock"
MAX_SHOWN: Final = 5
KEEP: Final = "IRIS_PROOF_KEEP"
"""Environment variable with the path of a new folder, to which histories with violations are copied, with
the faults.
"""


class Process:
    """A member of the run. Whenever it ends, it is started again under another name."""

    def __init__(self, run: Campaign, role: str, relay: Relay) -> None:
        self.run, self.role, self.relay = run, role, relay
        self.name = ""
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the process with a new history."""
        self.name = f"{self.role}-{self.relay.name}-{next(self.run.numbers)}"
        path = self.run.directory / f"{self.name}.history"
        options = {"name": self.name, "history": str(path), "seed": self.run.rng.getrandbits(32)}
        with (self.run.directory / f"{self.name}.stderr").open("wb") as errors:
            self.process = self.relay.host.start(
                [sys.executable, str(MEMBER), self.role, json.dumps(options)],
                env=self.relay.environ, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            )  # fmt: skip

    def started(self) -> None:
        """Start the process again, unless the end of another fault has done so."""
        if self.process.poll() is not None:
            self.start()

    def began(self, word: bytes = b"") -> None:
        """Return when the process is connected and has written `word` to its history."""
        path = self.run.directory / f"{self.name}.history"
        until_s = time.monotonic() + END_S
        while not (path.exists() and path.stat().st_size and word in path.read_bytes()):
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise BenchError(f"{self.name} did not begin")
            time.sleep(0.02)

    def end(self) -> None:
        """Stop the process and wait for its end. Raises BenchError if it fails."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{self.name} did not end in {END_S:g} s") from None
        if code:
            text = (self.run.directory / f"{self.name}.stderr").read_text()
            raise BenchError(f"{self.name} ended with {code}: {text[-2000:]}")


class Campaign:
    """One run: its processes and its faults."""

    def __init__(self, federation: Federation, directory: Path, seed: int) -> None:
        self.federation = federation
        self.directory = directory
        self.rng = random.Random(seed)
        self.numbers = itertools.count(1)
        self.relays = {relay.name: relay for relay in federation.relays()}
        self.members = [
            Process(self, role, self.relays[host])
            for role, hosts in HOSTS.items()
            for host in hosts
        ]
        self.did: Counter[str] = Counter()
        self.chosen = ""
        """Name of the target of the latest fault, or ""."""
        self.faults: list[dict[str, Any]] = []
        self.clocks = os.path.exists(FAKETIME)

    # -- faults: each returns what undoes it -----------------------------------------------------------------

    def fault(self) -> Callable[[], None]:
        """Cause a random fault, and return the function that ends it."""
        faults: list[tuple[int, Callable[[], Callable[[], None]]]] = [
            (4, self.relay_killed), (4, self.relay_stopped), (3, self.relay_frozen), (3, self.cable_cut), (2, self.wan_cut),
            (2, self.wan_stalled), (2, self.store_killed), (1, self.store_frozen), (4, self.member_killed), (3, self.member_stopped),
            (3, self.member_frozen), (2 * self.clocks, self.clock_set),
        ]  # fmt: skip
        (chosen,) = self.rng.choices([f for _, f in faults], [weight for weight, _ in faults])
        self.did[chosen.__name__] += 1
        began_s, self.chosen = time.monotonic(), ""
        undo = chosen()
        self.faults.append({"at": began_s, "what": chosen.__name__, "of": self.chosen})
        return undo

    def _relay(self) -> Relay:
        relay = self.rng.choice(list(self.relays.values()))
        self.chosen = relay.name
        return relay

    def relay_killed(self) -> Callable[[], None]:
        relay = self._relay()
        relay.kill()
        return lambda: _launched(relay)

    def relay_stopped(self) -> Callable[[], None]:
        relay = self._relay()
        process = relay.process
        process.send_signal(signal.SIGTERM)

        def again() -> None:
            _wait(process, f"the relay of {relay.name}")
            _launched(relay)

        return again

    def relay_frozen(self) -> Callable[[], None]:
        relay = self._relay()
        relay.freeze()
        return relay.thaw

    def cable_cut(self) -> Callable[[], None]:
        nic = self._relay().host.nics["eth0"]
        nic.cut()
        return nic.heal

    def wan_cut(self) -> Callable[[], None]:
        self.federation.cut("eu", "us")
        return _nothing

    def wan_stalled(self) -> Callable[[], None]:
        self.federation.stall("eu", "us")
        return lambda: self.federation.flow("eu", "us")

    def store_killed(self) -> Callable[[], None]:
        for pid in self._stores():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return _nothing

    def store_frozen(self) -> Callable[[], None]:
        pids = self._stores()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

        def thaw() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        return thaw

    def _stores(self) -> list[int]:
        """Return the process ids of the store: the relay's children."""
        path = Path(f"/proc/{self.relays[STORE].process.pid}/task")
        found = []
        with contextlib.suppress(OSError):
            for task in path.iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def _member(self) -> Process:
        member = self.rng.choice(self.members)
        self.chosen = member.name
        return member

    def member_killed(self) -> Callable[[], None]:
        member = self._member()
        member.process.kill()
        member.process.wait(END_S)
        return member.started

    def member_stopped(self) -> Callable[[], None]:
        member = self._member()
        process = member.process
        process.send_signal(signal.SIGTERM)

        def again() -> None:
            _wait(process, member.name)
            member.started()

        return again

    def member_frozen(self) -> Callable[[], None]:
        member = self._member()
        member.process.send_signal(signal.SIGSTOP)
        return lambda: member.process.send_signal(signal.SIGCONT)

    def clock_set(self) -> Callable[[], None]:
        """Set the wall clock of all processes that a host starts, and of those that run there, an hour on or back."""
        relay = self._relay()
        setting = relay.directory / SETTING
        _set_clock(setting, self.rng.choice(("+1h", "-1h", "+30s", "-30s")))
        return lambda: _set_clock(setting, "+0")

    # -- the run ---------------------------------------------------------------------------------------------

    def play(self, seconds: int) -> list[History]:
        """Run for so long; return what everybody wrote down."""
        for member in self.members:
            member.start()
        for member in self.members:
            member.began()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            undo = [self.fault() for _ in range(self.rng.choice((1, 1, 1, 2)))]
            time.sleep(self.rng.uniform(0.2, 3.0))
            for one in undo:
                one()
            time.sleep(self.rng.uniform(0.2, 3.0))
        for relay in self.relays.values():
            relay.serves()
        self.federation.joined()
        for member in self.members:
            if member.role in LISTENERS:
                member.began(b'"ready"')
        time.sleep(CALM_S)
        for roles in (("caller", "publisher", "appender"), ("worker",), tuple(HOSTS)):
            for member in [m for m in self.members if m.role in roles and m.process.poll() is None]:
                member.end()
            time.sleep(1.0)
        last = Process(self, "reader", self.relays[STORE])
        last.start()
        if last.process.wait(END_S):
            text = (self.directory / f"{last.name}.stderr").read_text()
            raise BenchError(f"the reader failed: {text[-2000:]}")
        return list(self._histories())

    def _histories(self) -> Iterator[History]:
        for path in sorted(self.directory.glob("*.history")):
            lines = path.read_text().splitlines()
            there = path.stem in {member.name for member in self.members}
            yield History(path.stem, [json.loads(line) for line in lines], there)


def _launched(relay: Relay) -> None:
    """Start a relay again, unless the end of another fault has done so."""
    if relay.process.poll() is not None:
        relay.launch()


def _wait(process: subprocess.Popen[bytes], what: str) -> None:
    """Wait for the end of a process after SIGTERM. Resume it first, as another fault may have frozen it."""
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{what} did not end in {END_S:g} s after SIGTERM") from None


def _set_clock(path: Path, offset: str) -> None:
    """Write the offset of a clock atomically: a process that reads the file sees the old offset or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(offset + "\n")
    fresh.replace(path)


def _nothing() -> None:
    """Do nothing: the fault ends by itself."""


def run(count: int, seed: int) -> Proof:
    """Run it with `count` seconds of faults."""
    if reason := why_not():
        raise BenchError(f"no hosts: {reason}")
    proof = Proof()
    with tempfile.TemporaryDirectory(prefix="iris-proof-") as temporary, Lan() as lan:
        directory = Path(temporary)
        (directory / "histories").mkdir()

        def arguments(host: str) -> list[str]:
            return ["--data", str(directory / "data")] if host == STORE else []

        with Federation(lan, directory, ("eu", "us"), plain=1, arguments=arguments) as federation:
            federation.joined()
            campaign = Campaign(federation, directory / "histories", seed)
            if campaign.clocks:
                _restart_with_clocks(campaign)
            histories = campaign.play(count)
            judged = judge(histories)
            if judged.violations and (kept := os.environ.get(KEEP)):
                shutil.copytree(directory / "histories", kept)
                Path(kept, "faults.json").write_text(json.dumps(campaign.faults))
                for relay in campaign.relays.values():
                    shutil.copy(relay.log, Path(kept, f"{relay.name}.log"))
    faults = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in sorted(campaign.did.items()))
    proof.figures |= {
        "faults": f"{sum(campaign.did.values())}: {faults}",
        "clocks": "set by libfaketime"
        if campaign.clocks
        else "not set: libfaketime is not installed",
        "processes": f"{len(histories)}, of which {sum(not h.closed for h in histories)} were killed",
        **{what: f"{n:,}" for what, n in sorted(judged.counts.items())},
        "violations": str(len(judged.violations)),
    }
    for text in judged.violations[:MAX_SHOWN]:
        proof.promise(text, False)
    for kind in ("request", "push", "survey", "tunnel", "append", "messages received"):
        proof.promise(f"there was something of {kind} to judge", judged.counts[kind] > 0)
    leaves.add(proof, min(count, MAX_LEAVES), seed)
    return proof


def _restart_with_clocks(campaign: Campaign) -> None:
    """Start every relay again under libfaketime, which its child processes and the members of its host inherit."""
    for relay in campaign.relays.values():
        setting = relay.directory / SETTING
        _set_clock(setting, "+0")
        relay.environ |= {
            "LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(setting), "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip
        relay.stop()
    for relay in campaign.relays.values():
        relay.start()
    campaign.federation.joined()
