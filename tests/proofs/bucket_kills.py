"""Kills and freezes the holder of a stream in a bucket, N times under load, and checks what everybody was told.

Three hosts, each with a relay and a store, share a bucket: in half of the rounds S3's protocol behind a proxy that
loses, delays and refuses requests, in the other half a directory. Clients use a fourth relay. Two producers number
their records and one gives message ids, one reader follows, one reads from anywhere, and a consumer works on every
message. Each fault hits the host that serves the stream at that moment: SIGKILL of the store or of store and relay,
and in every other case the loss of its disk; or SIGSTOP of both or of the store, until some seconds later: the relay
of a store that hangs gives it up. The next fault follows as soon as something was acknowledged again. At the end of a
round every acknowledged message must be there once, at its offset and in the order of its producer, nobody may have
seen anything else, and the consumer must have had all.

Stores take over after 1 s, not 5, so that the proof takes less time.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import uvloop
from harness import BenchError, Result, Role
from support.bucket_load import PATIENCE_S, STREAM, Load
from support.lossy_s3 import Service, harm

import iris
from iris.crypto.keys import GroupKey, StoreKey, public_id
from iris.errors import StreamError
from iris.keyfiles import KEYRING_FILE, load_keyring
from iris.wire.names import plural
from proofs.common import Cues, Proof, Run, shares, start
from proofs.restartable import RestartableRelay

HOSTS = (1, 2, 3)
FAULTS_OF_A_ROUND = 20
MESSAGES_OF_A_FAULT = 5_000
"""Acknowledged messages of a round, for each of its faults."""
FAILOVER_S = 1.0
CHECKPOINT_BYTES = 2_000_000
HARM_EVERY = 12
AWAY_S = (0.0, 2.0)
"""Range of the time after which a killed host starts again."""
FROZEN_S = (1.0, 12.0)
STORE_FROZEN_S = (10.0, 40.0)
RELAY = ["--no-mdns", "--port=0", "--bind=127.0.0.1"]
FAULTS = ("store killed", "store killed, disk lost", "host killed", "host killed, disk lost", "host frozen", "host frozen", "store frozen")  # fmt: skip


async def service(options: dict[str, Any]) -> Result:
    """Serve S3's protocol, and harm every twelfth PUT, until the cue."""
    cues, path = Cues(), Path(options["path"])
    with Service() as running:
        running.faults = harm(HARM_EVERY, "lost", "cut", "late", "slow", "refused")
        await asyncio.to_thread(
            path.write_text, json.dumps({"url": running.url, **running.environ})
        )
        harness.say_ready()
        await cues.next()
        return {"harmed": {fault: times for fault, times in running.done.items() if fault}}


class Host:
    """A relay and a store."""

    def __init__(self, roles: Run, number: int, hub: str, url: str, environ: dict[str, str]) -> None:  # fmt: skip
        self.name = f"host{number}"
        self.busy = False
        """Whether it is killed or frozen."""
        self._roles = roles
        self._data = roles.directory / f"data{number}"
        self._relay = RestartableRelay(roles, [*RELAY, "--join", hub], name=self.name, **environ)
        self._store: Role
        key = roles.directory / "group.key"
        self._command = [
            "-m", "relay.store", "--data", str(self._data), "--relay", str(self._relay.socket), "--bucket", url, "--bucket-key",
            str(key), "--failover-s", str(FAILOVER_S), "--checkpoint-bytes", str(CHECKPOINT_BYTES),
        ]  # fmt: skip

    def start(self, *, relay: bool = True) -> None:
        """Start store and relay, and return when the relay serves."""
        if relay:
            self._relay.start()
        self._store = self._roles.start(
            f"{self.name}-store", self._command, env=self._relay.env, reports=False
        )

    def logged(self, event: str) -> int:
        """Return how often the running store has logged an event."""
        return self._store.written().count(f'"event": "{event}"')

    @property
    def address(self) -> str:
        """The address of its store; empty if it has no key yet."""
        try:
            text = (self._data / "store.key").read_text()
        except FileNotFoundError:
            return ""
        return public_id(StoreKey.parse(text.strip()).public_key).hex() if text else ""

    def signal(self, number: signal.Signals, *, relay: bool) -> None:
        """Send the store a signal, and the relay, too."""
        processes = [self._store.process, *([self._relay.role.process] if relay else [])]
        for process in processes:
            process.send_signal(number)

    async def kill(self, *, relay: bool, disk: bool, away_s: float) -> None:
        """Kill the store, and the relay; delete its disk; start it again later."""
        self.signal(signal.SIGKILL, relay=relay)
        await asyncio.to_thread(self._store.process.wait)
        if relay:
            await asyncio.to_thread(self._relay.role.process.wait)
        if disk:
            await asyncio.to_thread(shutil.rmtree, self._data)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(lambda: self.start(relay=relay))
        self.busy = False

    async def freeze(self, seconds: float, *, relay: bool) -> None:
        """Stop the store where it is, and the relay, for a while."""
        self.signal(signal.SIGSTOP, relay=relay)
        await asyncio.sleep(seconds)
        self.signal(signal.SIGCONT, relay=relay)
        self.busy = False


class Round:
    """One bucket, three hosts, and the faults that hit them."""

    def __init__(
        self, roles: Run, hub: RestartableRelay, hosts: list[Host], rng: random.Random
    ) -> None:
        self.done: Counter[str] = Counter()
        self.stayed = 0
        """Faults after which the same store went on, because it was back in time."""
        self.longest_s = 0.0
        """From a fault to the next acknowledgement of another store."""
        self._hosts = hosts
        self._rng = rng
        keyring = load_keyring(roles.directory / "keys" / KEYRING_FILE)
        config = iris.ClientConfig(relay=hub.socket)
        self._connect = lambda: iris.connect(keyring=keyring, config=config)
        self.load = Load(self._connect, rng)
        self._faults: list[asyncio.Task[None]] = []

    async def run(self, faults: list[str], count: int) -> list[str]:
        """Inject faults, one after the other; return the promises that did not hold."""
        await self._all_see_each_other()
        async with self._connect() as client:
            await self._create(client)
            self.load.start()
            await self.load.more()
            for fault in faults:
                await self._hit(client, fault)
            await self.load.until(count)
            await asyncio.gather(*self._faults)
            whole = await self.load.finish()
        return self.load.audit(whole)

    async def _all_see_each_other(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for host in self._hosts:
                while host.logged("store.peer_seen") < len(HOSTS) - 1:  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(0.05)

    async def _create(self, client: iris.Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await client.streams.create(STREAM, durability="bucket", dedup_window=3600)
                    return
                except StreamError:
                    await asyncio.sleep(0.1)

    async def _hit(self, client: iris.Client, fault: str) -> None:
        """Hit the host that serves the stream; return when something was acknowledged again."""
        host = await self._holder(client)
        rng, began_s = self._rng, time.monotonic()
        host.busy = True
        if "frozen" in fault:
            relay = fault.startswith("host")
            work = host.freeze(rng.uniform(*(FROZEN_S if relay else STORE_FROZEN_S)), relay=relay)
        else:
            work = host.kill(
                relay=fault.startswith("host"), disk="disk" in fault, away_s=rng.uniform(*AWAY_S)
            )
        task = asyncio.get_running_loop().create_task(work)
        self._faults.append(task)
        await asyncio.sleep(0)
        self.done[fault] += 1
        while True:
            holder = await self._holder(client)
            await self.load.more()
            if holder is not host or not host.busy:
                break
        self.stayed += holder is host
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    async def _holder(self, client: iris.Client) -> Host:
        """Return the host that serves the stream."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    store = (await client.streams.describe(STREAM, timeout=3)).store
                except StreamError:
                    await asyncio.sleep(0.05)
                    continue
                for host in self._hosts:
                    if host.address == store:
                        return host
                await asyncio.sleep(0.05)


def play(url: str, faults: list[str], count: int, seed: int, deadline_s: float) -> Result:
    """Run one round at `url`, or at a service of its own; return what happened."""
    with Run(deadline_s) as roles:
        environ: dict[str, str] = {}
        serving = None
        if url == "s3":
            path = roles.directory / "service.json"
            inherited = RestartableRelay(
                roles, [], name="service"
            )  # its environment has no settings of ours
            serving = start(roles, "bucket-kills.service", inherited.env, {"path": str(path)})
            environ = json.loads(path.read_text())
            url = environ.pop("url")
        else:
            (roles.directory / "bucket").mkdir()
            url = f"file://{roles.directory / 'bucket'}"
        key = roles.directory / "group.key"
        key.touch(0o600)
        key.write_text(GroupKey(random.Random(seed).randbytes(32)).reveal())
        hub = RestartableRelay(roles, RELAY, name="hub")
        hub.start()
        hub.logged("links.listening")
        (listening,) = [
            json.loads(line)
            for line in hub.role.written().splitlines()
            if '"links.listening"' in line
        ]
        hosts = [Host(roles, number, listening["addresses"][0], url, environ) for number in HOSTS]
        for host in hosts:
            host.start()
        one = Round(roles, hub, hosts, random.Random(seed))
        began_s = time.monotonic()
        try:
            broken = uvloop.run(one.run(faults, count))
        except (TimeoutError, StreamError) as err:
            said = "".join(host._store.written()[-3000:] for host in hosts)
            raise BenchError(f"{type(err).__name__}: {err}, seed {seed}, {dict(one.done)}: {said}") from err  # fmt: skip
        load = one.load
        harmed: dict[str, int] = {}
        if serving is not None:
            serving.cue()
            harmed = serving.result()["harmed"]
        return {
            "broken": broken, "done": one.done, "stayed": one.stayed, "longest_s": one.longest_s, "harmed": harmed,
            "acked": len(load.acked), "unsure": len(load.unsure), "repeated": load.repeated, "followed": load.followed,
            "looks": load.looks, "looks_failed": load.looks_failed, "consumed": len(load.consumed),
            "delivered": load.delivered, "refusals": load.refusals, "took_s": time.monotonic() - began_s,
        }  # fmt: skip


def run(count: int, seed: int) -> Proof:
    """Hit holders `count` times, in rounds of about `FAULTS_OF_A_ROUND`, every other one over S3's protocol."""
    proof = Proof()
    rng = random.Random(seed)
    rounds = shares(count, max(2, count // FAULTS_OF_A_ROUND))
    kinds = [FAULTS[number % len(FAULTS)] for number in range(count)]
    rng.shuffle(kinds)
    results: dict[str, list[Result]] = {"s3": [], "directory": []}
    for number, size in enumerate(rounds):
        where = ("s3", "directory")[number % 2]
        faults = [kinds.pop() for _ in range(size)]
        result = play(where, faults, size * MESSAGES_OF_A_FAULT, seed + number, 300.0 + 40 * size)
        results[where].append(result)
        for what in result["broken"]:
            proof.promise(f"{where}, seed {seed + number}: {what}", False)
    for where, each in results.items():
        done, harmed = Counter[str](), Counter[str]()
        for one in each:
            done.update(one["done"])
            harmed.update(one["harmed"])

        def total(key: str, each: list[Result] = each) -> int:
            return sum(one[key] for one in each)

        took_s = sum(one["took_s"] for one in each)
        proof.figures |= {
            f"{where}: faults": f"{done.total()} in {plural(len(each), 'round')}: {_listed(done)}; after {total('stayed')} of them the same store went on, because it was back in time",
            f"{where}: acknowledged": f"{total('acked'):,}, {total('acked') / took_s:,.0f}/s with all faults; {total('repeated'):,} appends were repeated with their message id, {total('unsure'):,} messages were refused",
            f"{where}: lost, doubled or moved": str(sum(len(one["broken"]) for one in each)),
            f"{where}: read": f"{total('followed'):,} by a reader who follows, {total('looks'):,} looks from anywhere ({total('looks_failed'):,} found nobody in time)",
            f"{where}: consumed": f"{total('consumed'):,} in {total('delivered'):,} deliveries",
            f"{where}: longest time from a fault to the next acknowledgement": f"{max((one['longest_s'] for one in each), default=0.0):.1f} s",
        }
        if harmed:
            proof.figures[f"{where}: requests harmed"] = _listed(harmed)
        for refusal in sorted({text for one in each for text in one["refusals"]}):
            proof.figures[f"{where}: refused"] = refusal
    return proof


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
