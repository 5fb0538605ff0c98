"""Measures how much a flood by a hostile neighbor slows honest requests: p99 with and without it, in real processes.

    caller ── A ── link or WAN, TLS on loopback ── B ── member
              │                                    │
              └── the hostile relay or site ───────┘

The hostile neighbor sends only frames that do not end its connection: INTEREST that keeps changing and is sent
again in full, DECLAREs, GAPs of made-up senders, requests that nobody serves, answers to calls that nobody made,
and beats. All processes share the processors, so the flood's pace is bounded.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import statistics
import time
from pathlib import Path
from typing import Any, Final

import harness
from harness import IrisRelay, Result
from support.connection import Connection

import iris
from iris.keyfiles import NETWORK_FILE, create_site_key, load_network_keys, load_site_key
from iris.wire import frames, link_frames
from iris.wire.codec import END, HOP, encode_control
from iris.wire.kinds import PROTOCOL_MINOR, PROTOCOL_VERSION, HopClass, Kind
from proofs.common import TIMEOUT_S, Cues, Proof, Run, cue_and_wait, start

CLUSTER: Final = "proof-flood"
REQUEST_BYTES: Final = 256
PACE_HZ: Final = 100
"""Bursts per second, to each of the two relays."""
SNAPSHOT_EVERY: Final = 100
"""Bursts between two snapshots."""
SNAPSHOT_ENTRIES: Final = 200
ENTRIES: Final = 4
LIMIT: Final = 2.0
"""Largest allowed ratio of the p99 with the flood to the p99 without."""
TURNS: Final = 9
TURN_S: Final = 1.0
MEASURED_ROUNDS: Final = 3
"""With fewer turns p99 is not judged. The tests run one turn, to see that everything works."""
EVIL_ID: Final = b"\xfe" * 16
OWN_HOP: Final = 1 << 62
"""The relay with the higher id chooses hop ids with this bit."""

# -- roles ---------------------------------------------------------------------------------------------------


async def caller(options: dict[str, Any]) -> Result:
    """At each cue, send requests one after the other for `seconds`; return percentiles and failures."""
    cues = Cues()
    phases: list[Result] = []
    failed: list[str] = []
    async with iris.connect() as client:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await client.request(CLUSTER, b"", timeout=TIMEOUT_S)
                    break
                except iris.NoMembers:
                    await asyncio.sleep(0.05)  # the member becomes known a moment after it joined
        harness.say_ready()
        for _ in range(options["phases"]):
            await cues.next()
            samples_ns: list[int] = []
            end_ns = time.perf_counter_ns() + int(options["seconds"] * 1e9)
            while (begin_ns := time.perf_counter_ns()) < end_ns:
                payload = begin_ns.to_bytes(8, "little").ljust(REQUEST_BYTES, b"x")
                try:
                    if await client.request(CLUSTER, payload, timeout=TIMEOUT_S) != payload:
                        failed.append("another answer")
                except iris.IrisError as err:
                    failed.append(repr(err))
                samples_ns.append(time.perf_counter_ns() - begin_ns)
            phases.append({**harness.percentiles_us(samples_ns), "count": len(samples_ns)})
            harness.say_ready()
    return {"phases": phases, "failed": failed[:5]}


async def hostile(options: dict[str, Any]) -> Result:
    """Flood the relays from one cue to the next; return how much was sent, and which connections ended."""
    cues = Cues()
    flooding = asyncio.Event()
    ended: list[str] = []
    frames_sent = bytes_sent = 0

    async def drain(wire: Connection, site: str) -> None:
        while await wire.reader.read(65_536):
            pass
        ended.append(site or "a link")

    async def flood(port: int, site: str, keys: str) -> None:
        nonlocal frames_sent, bytes_sent
        source = FrameSource(options["site"], site)
        async with Connection(port, *_credentials(Path(keys), options["site"], site)) as wire:
            draining = asyncio.create_task(drain(wire, site))
            await wire.say(source.hello(), *source.snapshot(0))
            due_s = time.monotonic()
            while not cues.stop.is_set():
                if flooding.is_set():
                    burst = source.burst()
                    frames_sent += len(burst)
                    bytes_sent += sum(map(len, burst))
                    await wire.say(b"".join(burst))
                    due_s = max(due_s + 1 / PACE_HZ, time.monotonic())
                else:
                    await wire.say(source.beat())
                    due_s = time.monotonic() + 0.05
                await asyncio.sleep(due_s - time.monotonic())
            draining.cancel()

    async def turn() -> None:
        while True:
            await cues.next()
            (flooding.clear if flooding.is_set() else flooding.set)()
            harness.say_ready()

    turning = asyncio.create_task(turn())
    async with asyncio.TaskGroup() as floods:
        for to in options["to"]:
            floods.create_task(flood(*to))
        harness.say_ready()
    turning.cancel()
    return {"frames": frames_sent, "bytes": bytes_sent, "ended": ended}


def _credentials(keys: Path, own: str, site: str) -> tuple[ssl.SSLContext, str]:
    """Return a TLS context and server name: to dial a relay of the network, or, as site `own`, a gateway of `site`.

    `keys`: the directory of the key files.
    """
    from iris.crypto.certificates import gateway_leaf, site_authority
    from iris.crypto.keys import public_id
    from iris.remote import mutual_context
    from relay.net.tls import WAN_ALPN, Credentials

    if not own:
        credentials = Credentials(load_network_keys(keys / NETWORK_FILE)[0], EVIL_ID)
        return credentials.dialling, credentials.server_name
    key = load_site_key(keys / f"{own}.toml")
    trusted = site_authority(load_site_key(keys / f"{site}.toml").public_key, site)
    leaf = gateway_leaf(key, own, EVIL_ID, os.urandom(32))
    context = mutual_context(ssl.PROTOCOL_TLS_CLIENT, alpn=WAN_ALPN, leaf=leaf, trusted=trusted)
    return context, public_id(key.public_key).hex()


def data_frame(kind: int, body: bytes, *, alias: int, hop: int = 0) -> bytes:
    """Return a data frame of one message."""
    end = END.pack(0, 0, 1, 0)
    return HOP.pack(22 + len(end) + len(body), kind, 0, alias, hop, 0) + end + body


class FrameSource:
    """Makes the frames for one relay, as a relay of its site (`own` is empty) or as a gateway of site `own`."""

    def __init__(self, own: str, site: str) -> None:
        self.own = own
        self.declared: dict[str, Any] = (
            {"hop_class": int(HopClass.TO_WAN), "site": site} if own else {"hop_class": int(HopClass.MESH)}
        )  # fmt: skip
        """Fields of each DECLARE."""
        self.site = site
        self.version = 1
        self.bursts = 0
        self.key_id = os.urandom(16)
        self.calls = 0

    def hello(self) -> bytes:
        """Return a LINK_HELLO, as the side that dials."""
        version = PROTOCOL_VERSION, PROTOCOL_MINOR
        now_us = time.monotonic_ns() // 1000
        return encode_control(
            link_frames.LinkHello(*version, EVIL_ID, now_us, now_us, 1 << 20, site=self.own)
        )

    def entries(self, first: int, count: int, *, there: bool = True) -> dict[str, Any]:
        """Return `count` members and subscriptions that begin (`there`) or end."""
        numbers = range(first, first + count)
        kinds = {int(Kind.REQUEST): 8, int(Kind.BROADCAST): 1}
        if self.own:
            clusters = [
                link_frames.SiteCluster(self.own, f"evil.c{n}", self.key_id, kinds if there else {}, int(there))
                for n in numbers
            ]  # fmt: skip
            topics = [link_frames.SiteTopic(self.own, f"evil.t{n}.>", self.key_id, "", int(there)) for n in numbers]  # fmt: skip
            return {"clusters": clusters, "site_topics": topics}
        wanted = [
            link_frames.TopicEntry(f"evil.t{n}.>", self.key_id, "", int(there)) for n in numbers
        ]
        if not there:
            return {"left": list(numbers), "topics": wanted}
        joined = [link_frames.MemberEntry(n, f"evil.c{n}", [self.key_id], kinds) for n in numbers]
        return {"joined": joined, "topics": wanted}

    def snapshot(self, count: int) -> list[bytes]:
        """Return a complete snapshot of its interest."""
        self.version += 1
        more = self.entries(0, count)
        return [encode_control(link_frames.Interest(0, self.version, reset=True, **more))]

    def change(self, there: bool) -> bytes:
        """Return one change of its interest."""
        self.version += 1
        more = self.entries(SNAPSHOT_ENTRIES, ENTRIES, there=there)
        return encode_control(link_frames.Interest(self.version - 1, self.version, **more))

    def beat(self) -> bytes:
        """Return a beat."""
        return encode_control(frames.Beat(time.monotonic_ns() // 1000, 0, 0, self.version))

    def declare(self, alias: int, kind: int, name: str) -> bytes:
        """Return a DECLARE for a random sender."""
        sender = os.urandom(16)
        return encode_control(
            frames.Declare(alias, kind, name, self.key_id, sender, **self.declared)
        )

    def burst(self) -> list[bytes]:
        """Return the frames of one burst."""
        self.bursts += 1
        out = [self.beat()]
        if self.bursts % SNAPSHOT_EVERY == 1:
            out += self.snapshot(SNAPSHOT_ENTRIES)
        out += [self.change(True), self.change(False)]
        kinds = (Kind.REQUEST, Kind.PUSH, Kind.REPLY, Kind.PUBLISH)
        out += [self.declare(n, kind, "evil.nobody") for n, kind in enumerate(kinds)]
        body = os.urandom(64)
        for _ in range(ENTRIES):
            self.calls += 1
            hop = OWN_HOP | self.calls
            out.append(data_frame(Kind.REQUEST, body, alias=0, hop=hop))  # nobody serves it
            out.append(data_frame(Kind.REPLY, body, alias=2, hop=self.calls))  # nobody asked
            out.append(data_frame(Kind.PUBLISH, body, alias=3))  # nobody wants it
            out.append(encode_control(frames.Fail(1 << 40 | self.calls, 1, "evil")))
            gap = (Kind.PUBLISH, "evil.nobody", self.key_id, os.urandom(16), 7, 9, "evil")
            out.append(encode_control(frames.Gap(*gap, site=self.site)))
        return out


# -- the proof -----------------------------------------------------------------------------------------------


def scene(roles: Run, site: bool, seconds: float, rounds: int) -> Result:
    """Measure the honest pair in turns without and with the flood; return all results."""
    keys = roles.directory
    if site:
        pins = {name: create_site_key(keys / f"{name}.toml").fingerprint for name in ("ams", "ber", "evil")}  # fmt: skip

        def gateway(own: str, *peers: str) -> IrisRelay:
            arguments = ["--site", own, "--site-key", str(keys / f"{own}.toml"), "--gateway", "tls://127.0.0.1:0"]  # fmt: skip
            for peer in (*peers, f"evil=#{pins['evil']}"):
                arguments += ["--peer-site", peer]
            return IrisRelay(roles, arguments, links=True)

        first = gateway("ams", f"ber=#{pins['ber']}")
        (address,) = first.logged("gateways.listening")["addresses"]
        second = gateway("ber", f"ams=tls://{address}#{pins['ams']}")
        second.logged("gateway.up")
    else:
        first, second = harness.iris_relays(roles, 2)
        keys = Path(first.env["IRIS_CONFIG"])
    relays = [first, second]
    listening = "gateways.listening" if site else "links.listening"
    ports = [int(str(r.logged(listening)["addresses"][0]).rpartition(":")[2]) for r in relays]
    names = ("ams", "ber") if site else ("", "")
    start(roles, "common.echo", second.env, {"cluster": CLUSTER})
    asking = start(roles, "flood.caller", first.env, {"seconds": seconds, "phases": 2 * rounds})
    to = [(port, name, str(keys)) for port, name in zip(ports, names, strict=True)]
    evil = start(roles, "flood.hostile", first.env, {"site": "evil" if site else "", "to": to})
    watched = {"the relays": [r.role for r in relays], "the flood": [evil]}
    used = [dict.fromkeys(watched, 0.0), dict.fromkeys(watched, 0.0)]
    for number in range(2 * rounds):
        if number:
            cue_and_wait(evil)
        before = {name: sum(role.cpu_s() for role in some) for name, some in watched.items()}
        cue_and_wait(asking)
        for name, some in watched.items():
            used[number % 2][name] += sum(role.cpu_s() for role in some) - before[name]
    answered, sent = asking.result(), evil.result(stop=True)
    kept = [_kept(relay) for relay in relays]
    return {"phases": answered["phases"], "failed": answered["failed"], **sent, "kept": kept, "cpu_s": used}  # fmt: skip


def _kept(relay: IrisRelay) -> bool:
    """Return whether the relay logged no traceback, and the end of the hostile connection at most."""
    log = relay.role.written()
    ended = [line for line in log.splitlines() if '"link.down"' in line or '"gateway.down"' in line]
    return "Traceback" not in log and all(EVIL_ID.hex() in line for line in ended)


def prove(proof: Proof, seconds: float, rounds: int) -> None:
    """Measure both adversaries, and compare p99 with `LIMIT`."""
    for site, name in ((False, "a hostile relay"), (True, "a hostile site")):
        with Run(60 + 4 * rounds * seconds) as roles:
            result = scene(roles, site, seconds, rounds)
        p99s = [phase["p99_us"] for phase in result["phases"]]
        quiet, flooded = (statistics.median(p99s[n::2]) for n in (0, 1))
        # Compare within each turn, because other load on this machine changes between turns.
        ratio = statistics.median(b / a for a, b in zip(p99s[::2], p99s[1::2], strict=True))
        flood_s = rounds * seconds
        share = [
            ", ".join(f"{part} {cpu_s / flood_s:.0%}" for part, cpu_s in used.items())
            for used in result["cpu_s"]
        ]
        proof.figures[f"p99 of honest requests while {name} floods"] = (
            f"{flooded:,.0f} us, {quiet:,.0f} us without: {ratio:.2f} x"
        )
        proof.figures[f"{name}: measured"] = (
            f"medians of {rounds} turns of {seconds:g} s, {sum(phase['count'] for phase in result['phases']):,} requests"
        )
        proof.figures[f"{name}: sent"] = (
            f"{result['frames'] / flood_s:,.0f} frames/s, {result['bytes'] / flood_s / 1e6:.2f} MB/s"
        )
        proof.figures[f"{name}: processor"] = f"with it: {share[1]}; without: {share[0]}"
        proof.promise(f"{name}: no honest call failed ({result['failed']})", not result["failed"])
        proof.promise(f"{name}: no connection ended", all(result["kept"]) and not result["ended"])
        if rounds >= MEASURED_ROUNDS:
            proof.promise(f"{name}: p99 within {LIMIT:g} x", ratio <= LIMIT)
