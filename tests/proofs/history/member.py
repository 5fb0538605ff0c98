"""One process of the proof of histories: it writes what it does and what Iris reports, and uses only public names.

    python member.py ROLE '{"name": …, "history": …}'

Each line of the history is a JSON object, written with one write(2), so SIGKILL loses no line that was written. A
call is written before it is made, so the last line may be of a call that never happened. At SIGTERM the process
finishes its work and writes "closed".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import iris

TIMEOUT_S = 5.0
PAUSE_S = 0.03
"""Mean pause between two actions of a caller or publisher."""
CLUSTER, TOPICS, STREAM, RECORDED = "work", "t", "orders", "recorded"


class History:
    """The file of one process's events."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, what: str, **fields: Any) -> None:
        """Write one event, with the time of the monotonic clock, which all processes share."""
        os.write(
            self._file,
            (json.dumps({"what": what, **fields, "at": time.monotonic()}) + "\n").encode(),
        )


class Member:
    """The state that every role has: a unique name, a history, and the event to stop."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.name: str = options["name"]
        self.rng = random.Random(options["seed"])
        self.history = History(options["history"])
        self.stopping = asyncio.Event()
        self._count = 0

    def next_id(self) -> str:
        """Return an id that no other call has."""
        self._count += 1
        return f"{self.name}/{self._count}"

    async def pause(self, seconds: float = PAUSE_S) -> None:
        """Wait for about `seconds`, or until the process is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * self.rng.uniform(0.5, 1.5)):
                await self.stopping.wait()


def ended(member: Member, call: str, error: BaseException | None) -> None:
    """Write the outcome of a call."""
    if error is None:
        member.history.write("done", id=call)
    else:
        sure = getattr(error, "may_have_run", True) is False
        member.history.write("failed", id=call, error=f"{type(error).__name__}: {error}", ran="no" if sure else "maybe")  # fmt: skip


async def service(member: Member, client: iris.Client) -> None:
    """Serve the cluster: requests, pushes, surveys, broadcasts, tunnels."""
    made = iris.Service(CLUSTER, limits=iris.Limits(concurrency=8))

    def ran(kind: str) -> Callable[[bytes], Awaitable[bytes]]:
        async def run(payload: bytes) -> bytes:
            member.history.write("ran", kind=kind, id=payload.decode())
            if member.rng.random() < 0.2:
                await asyncio.sleep(member.rng.uniform(0, 0.2))
            return payload

        return run

    made.on_request(ran("request"))
    made.on_push(ran("push"))
    made.on_survey(ran("survey"))

    @made.on_broadcast
    def receive(payload: bytes) -> None:
        source, _, number = payload.decode().rpartition(" ")
        member.history.write("received", flow=f"broadcast {source}", number=int(number))

    made.on_loss(
        lambda lost: member.history.write("gap", kind="broadcast", name=lost.name, count=lost.count)
    )

    @made.on_tunnel
    async def tunnel(end: iris.Tunnel) -> None:
        call = (await end.recv()).decode()
        got = 0
        try:
            async for message in end:
                if int(message) != got:
                    member.history.write("wrong", id=call, text=f"{int(message)} came as number {got}")  # fmt: skip
                got += 1
        except iris.TunnelBroken as broken:
            member.history.write("tunnel", id=call, got=got, whole=False, error=str(broken))
        else:
            member.history.write("tunnel", id=call, got=got, whole=True)
            with contextlib.suppress(iris.TunnelBroken):
                await end.send(str(got))

    async with client.serve(made):
        member.history.write("ready", receives="broadcast")
        await member.stopping.wait()


async def caller(member: Member, client: iris.Client) -> None:
    """Make calls of all kinds, four at a time."""

    async def request(call: str) -> None:
        idempotent = member.rng.random() < 0.3
        member.history.write("call", id=call, kind="request", idempotent=idempotent)
        reply = await client.request(CLUSTER, call, timeout=TIMEOUT_S, idempotent=idempotent)
        if bytes(reply) != call.encode():
            member.history.write("wrong", id=call, text=f"request {call} was answered with {reply!r}")  # fmt: skip

    async def survey(call: str) -> None:
        member.history.write("call", id=call, kind="survey", idempotent=False)
        async for _ in client.survey(CLUSTER, call, timeout=1.0):
            pass

    async def push(call: str) -> None:
        member.history.write("call", id=call, kind="push", idempotent=False)
        await client.push(CLUSTER, call, timeout=TIMEOUT_S)

    async def tunnel(call: str) -> None:
        member.history.write("call", id=call, kind="tunnel", idempotent=False)
        meant = member.rng.randint(1, 40)
        member.history.write("meant", id=call, count=meant)
        sent = 0
        whole = False
        try:
            async with client.tunnel(CLUSTER, timeout=TIMEOUT_S) as end:
                await end.send(call)
                for _ in range(meant):
                    await end.send(str(sent))
                    sent += 1
                    await asyncio.sleep(0.01 if member.rng.random() < 0.2 else 0)
                await end.finish()
                async with asyncio.timeout(TIMEOUT_S):
                    whole = int(await end.recv()) == sent
        finally:
            # Written in any case: the other end is compared with it.
            member.history.write("sent", id=call, sent=sent, whole=whole)

    async def work() -> None:
        while not member.stopping.is_set():
            call = member.next_id()
            verb = member.rng.choices((request, survey, push, tunnel), (70, 5, 15, 10))[0]
            try:
                await verb(call)
            except (iris.IrisError, iris.EndOfTunnel, TimeoutError) as err:
                ended(member, call, err)
                await member.pause(0.1)
            else:
                ended(member, call, None)
            await member.pause()

    await asyncio.gather(*(work() for _ in range(4)))


async def publisher(member: Member, client: iris.Client) -> None:
    """Publish and broadcast numbers; the last ones after all faults have ended."""
    topics = {f"{TOPICS}.{member.name}": 0}
    broadcasts = 0

    async def one() -> None:
        nonlocal broadcasts
        for topic, number in topics.items():
            try:
                await client.publish(topic, str(number))
            except iris.ConnectionLost:
                member.history.write("refused", flow=topic, number=number)
            else:
                # Written after it was accepted, and before anybody else runs in this process.
                topics[topic] += 1
                member.history.write("accepted", flow=topic, number=number)
        if member.rng.random() < 0.2:
            try:
                await client.broadcast(CLUSTER, f"{member.name} {broadcasts}")
            except iris.ConnectionLost:
                member.history.write("refused", flow=f"broadcast {member.name}", number=broadcasts)
            else:
                member.history.write("accepted", flow=f"broadcast {member.name}", number=broadcasts)
                broadcasts += 1

    while not member.stopping.is_set():
        for _ in range(member.rng.choice((1, 1, 1, 20))):
            await one()
        await member.pause()
    await client.flush(timeout=TIMEOUT_S)
    await one()
    await client.flush(timeout=TIMEOUT_S)


async def subscriber(member: Member, client: iris.Client, group: str = "") -> None:
    """Write every publication received; in a queue group, this member's share of them."""

    def receive(message: iris.Message) -> None:
        flow, number = message.name, int(message.payload)
        member.history.write("shared" if group else "received", flow=flow, number=number)

    def gap(lost: iris.Loss) -> None:
        member.history.write("gap", kind="publish", name=lost.name, count=lost.count)

    async with client.subscribe(f"{TOPICS}.>", receive, group=group, on_loss=gap):
        member.history.write("ready", receives="shared" if group else "publish")
        await member.stopping.wait()


async def sharer(member: Member, client: iris.Client) -> None:
    """Subscribe as one of a queue group."""
    await subscriber(member, client, "sharers")


async def appender(member: Member, client: iris.Client) -> None:
    """Append to the stream, three messages at a time."""

    async def work() -> None:
        while not member.stopping.is_set():
            call = member.next_id()
            member.history.write("call", id=call, kind="append", idempotent=False)
            try:
                offset = await client.streams.append(STREAM, call, timeout=10.0)
            except iris.IrisError as err:
                ended(member, call, err)
                await member.pause(0.1)
            else:
                member.history.write("appended", id=call, offset=offset)
                ended(member, call, None)
            await member.pause()

    await asyncio.gather(*(work() for _ in range(3)))


async def worker(member: Member, client: iris.Client) -> None:
    """Consume the stream's messages, shared with other workers."""
    while not member.stopping.is_set():
        try:
            async with client.streams.consumer(
                STREAM, "workers", shared=True, ack_timeout=2.0, max_deliver=3
            ) as consumer:
                while not member.stopping.is_set():
                    try:
                        async with asyncio.timeout(1.0):
                            message = await anext(consumer)
                    except TimeoutError:
                        continue
                    member.history.write("worked", id=message.payload.decode(), offset=message.offset)  # fmt: skip
                    consumer.ack(message)
        except iris.IrisError as err:
            member.history.write("trouble", error=f"{type(err).__name__}: {err}")
            await member.pause(0.2)


async def reader(member: Member, client: iris.Client) -> None:
    """Read both streams and the dead letters from their beginning, at the end of the run."""
    for name in (STREAM, RECORDED, f"{STREAM}.dead"):
        gaps: list[Any] = []
        written = 0
        with contextlib.suppress(iris.NoStream):
            async with client.streams.read(
                name, "first", follow=False, on_gap=gaps.append
            ) as messages:
                async for message in messages:
                    for gap in gaps[written:]:
                        if gap.first < message.offset:
                            member.history.write("hole", stream=name, count=gap.count, cause=gap.cause)  # fmt: skip
                            written += 1
                    member.history.write(
                        "read", stream=name, offset=message.offset, topic=message.name, payload=message.payload.decode()
                    )  # fmt: skip
            member.history.write("finished", stream=name)
        for gap in gaps[written:]:
            member.history.write("hole", stream=name, count=gap.count, cause=gap.cause)


ROLES: dict[str, Callable[[Member, iris.Client], Awaitable[None]]] = {
    role.__name__: role
    for role in (service, caller, publisher, subscriber, sharer, appender, worker, reader)
}


async def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    member = Member(options)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, member.stopping.set)
    async with contextlib.AsyncExitStack() as stack:
        client = await _connected(member, stack)
        member.history.write("begun")
        client.on_loss = lambda lost: member.history.write(
            "loss", kind=lost.kind, flow=lost.name, count=lost.count, pushed=lost.kind == "push"
        )
        if role == "appender":
            await _created(client)
        await ROLES[role](member, client)
    member.history.write("closed")


async def _connected(member: Member, stack: contextlib.AsyncExitStack) -> iris.Client:
    """Connect as soon as a relay is available. Exit if the process is stopped before."""
    while True:
        try:
            return await stack.enter_async_context(iris.connect())
        except iris.RelayUnavailable:
            if member.stopping.is_set():
                raise SystemExit(0) from None
            await member.pause(0.2)


async def _created(client: iris.Client) -> None:
    """Create both streams unless they exist."""
    for _ in range(100):
        try:
            await client.streams.create(STREAM)
            await client.streams.create(RECORDED, topic=f"{TOPICS}.>")
            return
        except iris.errors.StreamError:
            await asyncio.sleep(0.2)
    raise SystemExit("the streams could not be made")


if __name__ == "__main__":
    asyncio.run(main())
