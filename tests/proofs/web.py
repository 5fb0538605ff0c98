"""N connections to the port for browsers that say nothing, or only begin to, while browsers work and one does not read.

Every stranger is closed in time, and their number stays within the limit. The browsers lose nothing meanwhile, and new
ones get in. The one that does not read is dropped for and then closed, and the relay's memory stays bounded.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import harness
from harness import IrisRelay, Result
from support.browsers import browser

import iris
from iris import keyfiles
from iris.wire import frames
from iris.wire.codec import encode_control
from proofs.common import TIMEOUT_S, Cues, Proof, Run, cue, deadline_s, memory_mb, show_mb, start
from proofs.connections import allow_descriptors

CLUSTER = "proof-web"
BROWSERS = 4
BULK, BULK_BYTES = 600, 64 << 10
"""Messages to all browsers: more than the queues and sockets of one that does not read hold."""
QUEUE_BYTES = 16 << 20
LIMIT_MB = 64.0
"""Most memory that the relay may need beyond what it had: its queues, and its strangers."""
AT_ONCE = 256
UPGRADE = (
    "GET / HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: iris.1\r\n\r\n"
)
HELLO = encode_control(frames.Hello(1, 8, mono_us=1))
HALF_HELLO = b"\x82" + bytes([0x80 | len(HELLO)]) + bytes(4) + HELLO[:7]
"""The start of a masked frame."""


# -- roles ---------------------------------------------------------------------------------------------------


async def strangers(options: dict[str, Any]) -> Result:
    """Open connections of four kinds, and wait for the end of each."""
    count, where = options["count"], urlsplit(options["url"])
    allow_descriptors(count + 256)
    cues = Cues()
    upgrade = UPGRADE.format(where.netloc).encode()
    says = (b"", upgrade[:60], upgrade, upgrade + HALF_HELLO)
    room = asyncio.Semaphore(AT_ONCE)
    ends: Counter[str] = Counter()
    longest_s = 0.0

    async def one(number: int) -> None:
        nonlocal longest_s
        async with room:
            try:
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
            except OSError:
                ends["not connected"] += 1
                return
        begin_s = time.monotonic()
        writer.write(says[number % len(says)])
        try:
            async with asyncio.timeout(TIMEOUT_S):
                rest = await reader.read()
        except TimeoutError:
            ends["never closed"] += 1
        except OSError:
            ends["reset"] += 1
        else:
            longest_s = max(longest_s, time.monotonic() - begin_s)
            ends["told" if b"\x88" in rest[-128:] else "closed"] += 1
        writer.transport.abort()

    harness.say_ready()
    await cues.next()
    await asyncio.gather(*map(one, range(count)))
    return {"ends": dict(ends), "longest_s": longest_s}


# -- the proof -----------------------------------------------------------------------------------------------


def run(count: int, seed: int) -> Proof:
    """Run it with `count` strangers."""
    return asyncio.run(_run(count))


async def _run(count: int) -> Proof:
    proof = Proof()
    with Run(deadline_s(count) + 60) as roles:
        path = roles.directory / "web.toml"
        path.write_text(f"queue_bytes = {QUEUE_BYTES}\nhello_timeout_s = 2.0\n")
        relay = IrisRelay(roles, ["--config", str(path), "--listen", "ws://127.0.0.1:0"])
        (url,) = relay.logged("web.listening")["addresses"]
        served = start(roles, "common.echo", relay.env, {"cluster": CLUSTER})
        attack = start(roles, "web.strangers", relay.env, {"url": url, "count": count})
        keyring = keyfiles.load_keys(relay.env)
        before = memory_mb(relay.role)
        async with iris.connect(relay.env["IRIS_RELAY"], keyring=keyring) as near:
            pages = [browser(url, keyring, label=f"page {n}") for n in range(BROWSERS)]
            try:
                for page in pages:
                    await page.open()
                figures = await _attacked(proof, near, pages, url, keyring, attack)
            finally:
                for page in pages:
                    await page.close()
        after = memory_mb(relay.role)
        (result,) = (attack.result(),)
        served.result(stop=True)
        cpu_s = relay.stop()
    ends = result["ends"]
    grown = after[0] - before[0]
    proof.figures = {
        "connections that say nothing": f"{count:,}: " + ", ".join(f"{n:,} {why}" for why, n in sorted(ends.items())),
        "the longest of them stayed": f"{result['longest_s']:.1f} s",
        **figures,
        "relay before": show_mb(before),
        "relay after": f"{show_mb(after)} (limit: {LIMIT_MB:.0f} MB more)",
        "relay's processor time": f"{cpu_s:.2f} s, its start included",
    }  # fmt: skip
    proof.promise("every stranger is closed", not ends.get("never closed"))
    proof.promise(f"memory grows by {grown:.0f} MB, under {LIMIT_MB:.0f}", grown < LIMIT_MB)
    return proof


async def _attacked(
    proof: Proof, near: iris.Client, pages: list[iris.Client], url: str, keyring: iris.Keyring, attack: Any
) -> dict[str, str]:  # fmt: skip
    """Let browsers work while strangers come; return figures."""
    got: Counter[int] = Counter()
    most = asked = 0
    stuck = await _stuck(url, keyring)
    subscriptions = [
        page.subscribe("bulk", lambda message, number=number: got.update([number]))
        for number, page in enumerate(pages)
    ]
    for subscription in subscriptions:
        await subscription.__aenter__()
    cue(attack)
    for number in range(BULK):
        if number % 3 == 0:
            page = pages[number % len(pages)]
            reply = await page.request(CLUSTER, b"%d" % number, timeout=TIMEOUT_S)
            proof.promise("a reply is its own", reply == b"%d" % number)
            asked += 1
        await near.publish("bulk", bytes(BULK_BYTES))
        if number % 50 == 0:
            web = (await near.status())["web"]
            most = max(most, web["half_open"])
            async with browser(url, keyring, label="new") as new:
                await new.request(CLUSTER, b"new", timeout=TIMEOUT_S)
    until_s = time.monotonic() + TIMEOUT_S
    while sum(got.values()) < BULK * len(pages) and time.monotonic() < until_s:  # noqa: ASYNC110 - the handlers only count
        await asyncio.sleep(0.05)
    report = await near.status()
    dropped = report["accounts"]["dropped"]
    proof.promise("browsers that read get everything", sum(got.values()) == BULK * len(pages))
    proof.promise("what is dropped is counted", bool(dropped))
    limit = min(1024, 4096 // 4)
    proof.promise(f"at most {limit} have not greeted", most <= limit)
    for subscription in subscriptions:
        await subscription.__aexit__(None, None, None)
    assert stuck._attachment is not None
    assert stuck._attachment.pump is not None
    stuck._attachment.pump.abort("it never reads")
    await stuck.close()
    return {
        "messages to 4 browsers": f"{sum(got.values()):,} of {BULK * len(pages):,}; {asked} requests answered",
        "dropped for the one that does not read": ", ".join(f"{n:,} {why}" for why, n in dropped.items()),
        "had not greeted at once": f"{most:,}, of at most {limit:,}",
        "refused": ", ".join(f"{n:,} {why}" for why, n in report["web"]["refused"].items()),
    }  # fmt: skip


async def _stuck(url: str, keyring: iris.Keyring) -> iris.Client:
    """Return a browser that has subscribed and reads nothing any more."""
    client = browser(url, keyring, label="stuck")
    await client.open()
    await client.subscribe("bulk", lambda message: None).__aenter__()
    attachment = client._attachment
    assert attachment is not None
    assert attachment.pump is not None
    link: Any = attachment.pump._transport
    link._socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link._socket.pause_reading()
    return client
