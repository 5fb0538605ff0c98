"""Checks that a cluster key can be rotated under load without a failed call or a lost broadcast.

Each process has its own keyring file. A step writes the next keyring into one file and makes that process load it.
Each stage (add, promote, retire) reaches all members and the caller before the next one begins.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
from harness import IrisRelay, Result, Role

import iris
from iris.keyfiles import KEYRING_FILE, load_keyring, save_keyring
from proofs.common import TIMEOUT_S, Cues, Proof, Run, cue_and_wait, deadline_s, start, total

CLUSTER = "proof-rotation"
MEMBERS = 2
WORKERS = 8
NUMBER = struct.Struct("<HQ")


# -- roles ---------------------------------------------------------------------------------------------------


async def follow(client: iris.Client, cues: Cues) -> None:
    """Load the keys from the file at each cue, until cancelled."""
    while True:
        await cues.next()
        await client.reload_keys()
        harness.say_ready()


def mark(reached: Path) -> None:
    """Create the file `reached`, which ends the load."""
    if not reached.exists():
        reached.touch()


async def member(options: dict[str, Any]) -> Result:
    cues = Cues()
    received: Counter[int] = Counter()
    wrong = asked = reported = 0
    service = iris.Service(CLUSTER)

    @service.on_request
    def echo(payload: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return payload

    @service.on_broadcast
    def receive(payload: bytes) -> None:
        nonlocal wrong
        worker, number = NUMBER.unpack(payload)
        wrong += number != received[worker]
        received[worker] += 1

    @service.on_loss
    def gap(lost: iris.Loss) -> None:
        nonlocal reported
        reported += lost.count or 1

    async with iris.connect() as client, client.serve(service):
        following = asyncio.create_task(follow(client, cues))
        harness.say_ready()
        await cues.stop.wait()
        following.cancel()
        await client.flush(timeout=TIMEOUT_S)
    return {"received": received.total(), "wrong": wrong, "asked": asked, "reported": reported}


async def caller(options: dict[str, Any]) -> Result:
    cues = Cues()
    reached = Path(options["reached"])
    requests = broadcasts = 0
    failures: Counter[str] = Counter()
    async with iris.connect() as client:
        await client.wait_for_members(CLUSTER, MEMBERS, timeout=TIMEOUT_S)
        following = asyncio.create_task(follow(client, cues))

        async def work(worker: int) -> None:
            nonlocal requests, broadcasts
            number = 0
            while not cues.stop.is_set():
                payload = NUMBER.pack(worker, number)
                try:
                    if await client.request(CLUSTER, payload, timeout=TIMEOUT_S) != payload:
                        failures["wrong reply"] += 1
                    requests += 1
                    await client.broadcast(CLUSTER, payload)
                    broadcasts += 1
                    number += 1
                except iris.IrisError as err:
                    failures[type(err).__name__] += 1
                if requests >= options["count"] <= broadcasts:
                    mark(reached)

        workers = [asyncio.create_task(work(number)) for number in range(WORKERS)]
        harness.say_ready()
        await asyncio.gather(*workers)
        await client.flush(timeout=TIMEOUT_S)
        following.cancel()
        there = await client.members(CLUSTER)
        key_ids = sorted({key_id.hex() for info in there for key_id in info.key_ids})
    return {
        "requests": requests,
        "broadcasts": broadcasts,
        "failures": failures,
        "key_ids": key_ids,
        "members": len(there),
        "others": there.others,
    }


# -- the proof -----------------------------------------------------------------------------------------------


def run(count: int, seed: int) -> Proof:
    """Run it with at least `count` requests and as many broadcasts."""
    proof = Proof()
    chance = random.Random(seed)
    with Run(deadline_s(count)) as roles:
        relay = IrisRelay(roles)
        keyring = load_keyring(Path(relay.env["IRIS_CONFIG"]) / KEYRING_FILE)
        files: list[Path] = []

        def own_keys(name: str) -> dict[str, str]:
            directory = roles.directory / name
            directory.mkdir(mode=0o700)
            files.append(directory / KEYRING_FILE)
            save_keyring(files[-1], keyring)
            return {**relay.env, "IRIS_CONFIG": str(directory)}

        parties: list[Role] = [
            start(roles, "rotation.member", own_keys(f"member-{number}"), {})
            for number in range(MEMBERS)
        ]
        reached = roles.directory / "reached"
        options = {"count": count, "reached": str(reached)}
        asking = start(roles, "rotation.caller", own_keys("caller"), options)
        parties.append(asking)
        rotations = steps = 0
        slowest_s = 0.0
        begin_s = time.monotonic()
        while not rotations or not reached.exists():
            added = keyring.add("default", iris.ClusterKey(chance.randbytes(32)))
            promoted = added.promote("default")
            keyring = promoted.retire("default")
            for stage in (added, promoted, keyring):
                for party, file in zip(parties, files, strict=True):
                    save_keyring(file, stage)
                    step_s = time.monotonic()
                    cue_and_wait(party)
                    slowest_s = max(slowest_s, time.monotonic() - step_s)
                    steps += 1
            rotations += 1
        spent_s = time.monotonic() - begin_s
        asked = asking.result(stop=True)
        results = [role.result(stop=True) for role in parties[:-1]]
        relay.stop()
    lost = asked["broadcasts"] * MEMBERS - total(results, "received")
    failures = asked["failures"]
    proof.figures = {
        "under load": f"{asked['requests']:,} requests and {asked['broadcasts']:,} broadcasts, {WORKERS} in flight, "
        f"{MEMBERS} members, {spent_s:.2f} s",
        "rotations": f"{rotations}, in {steps} steps; the longest step took {slowest_s * 1000:.0f} ms",
        "lost broadcasts": f"{lost} of {asked['broadcasts'] * MEMBERS:,} deliveries, {total(results, 'reported')} reported as lost",
        "out of order or twice": f"{total(results, 'wrong')}",
        "NoMembers": f"{failures.get('NoMembers', 0)}",
        "other failures": f"{sum(failures.values()) - failures.get('NoMembers', 0)}"
        + (f": {failures}" if failures else ""),
        "requests handled": f"{total(results, 'asked'):,}",
    }
    now = [key.key_id.hex() for key in keyring.for_cluster(CLUSTER)]
    proof.promise("at least N of each", min(asked["requests"], asked["broadcasts"]) >= count)
    proof.promise("no broadcast is lost", lost == 0 and not total(results, "reported"))
    proof.promise("each sender's broadcasts come once and in order", not total(results, "wrong"))
    proof.promise("no request fails", not failures)
    proof.promise("no request runs twice", total(results, "asked") == asked["requests"])
    proof.promise(
        "the new key alone is in use",
        asked["key_ids"] == now and asked["members"] == MEMBERS and not asked["others"],
    )
    return proof
