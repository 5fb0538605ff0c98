"""A program on a host that serves, subscribes and calls on command. It uses only the public names of Iris.

Reads a JSON object a line, {"id": 1, "do": "request", …}, and runs each as a separate task. Writes a JSON object
a line: {"id": 1, "value": …}, {"id": 1, "error": "NoMembers", "detail": …, "may_have_run": false}, or {"event":
"holding", …} without a command. Leaves all clusters and ends at the end of its input.

The service answers with its own name and the payload, "b: hello". A request, or a tunnel's message, that begins
with "hold" is held until the command "release".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import iris

Value = Any
"""A JSON value."""
PROBE = "-1"
"""Payload of probes, which show whether a subscription is known yet. They are kept apart from other messages."""


def write(document: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class Received:
    """The received messages of one kind, in order."""

    def __init__(self) -> None:
        self.items: list[Value] = []
        self._changed = asyncio.Event()

    def add(self, item: Value) -> None:
        self.items.append(item)
        self._changed.set()

    async def wait(self, count: int) -> None:
        """Return when there are at least `count` messages."""
        while len(self.items) < count:
            self._changed.clear()
            await self._changed.wait()


class Tally:
    """Counts of the numbers received under one name."""

    def __init__(self) -> None:
        self.count = 0
        self.last = -1
        self.inversions = 0
        """Numbers not above the previous one: late or repeated."""
        self.missing = 0
        """Messages reported as lost with their number."""
        self.unknown = 0
        """Reports of losses without a number."""

    def receive(self, number: int) -> None:
        self.count += 1
        self.inversions += number <= self.last
        self.last = number


class Program:
    """One client and the commands for it."""

    def __init__(self, name: str, client: iris.Client) -> None:
        self.name = name
        self.client = client
        self.received = {
            name: Received()
            for name in (
                "request",
                "push",
                "survey",
                "broadcast",
                "publish",
                "named",
                "probe",
                "gap",
            )
        }
        self.tallies: dict[str, Tally] = {}
        self.flowing: dict[str, asyncio.Event] = {}
        self.released = asyncio.Event()
        self.endings: dict[str, contextlib.AsyncExitStack] = {}
        self.tunnels: dict[str, iris.Tunnel] = {}
        client.on_loss = self.lost

    def lost(self, lost: iris.Loss) -> None:
        self.received["gap"].add(
            {"kind": lost.kind, "name": lost.name, "count": lost.count, "cause": lost.cause}
        )

    async def hold(self, text: str) -> None:
        """Wait for "release" if the text begins with "hold"."""
        if text.startswith("hold"):
            write({"event": "holding", "payload": text})
            await self.released.wait()

    # -- serving -----------------------------------------------------------------------------------------------

    def service(self, cluster: str, limits: iris.Limits) -> iris.Service:
        """Return a service with handlers of all kinds."""
        service = iris.Service(cluster, limits=limits)

        @service.on_request
        async def request(payload: bytes) -> bytes:
            text = payload.decode()
            self.received["request"].add(text)
            await self.hold(text)
            if text == "fail":
                raise ValueError("on purpose")
            return b"" if text == "empty" else f"{self.name}: {text}".encode()

        @service.on_push
        def push(payload: bytes) -> None:
            self.received["push"].add(payload.decode())

        @service.on_survey
        async def survey(payload: bytes) -> bytes:
            text = payload.decode()
            self.received["survey"].add(text)
            await self.hold(text)
            return b"" if text == "empty" else f"{self.name}: {text}".encode()

        @service.on_broadcast
        def broadcast(payload: bytes) -> None:
            self.received["broadcast"].add(payload.decode())

        @service.on_tunnel
        async def tunnel(tunnel: iris.Tunnel) -> None:
            write({"event": "tunnel opened"})
            try:
                async for message in tunnel:
                    if message.startswith(b"hold"):
                        await self.hold(message.decode())
                    await tunnel.send(message)
            except iris.TunnelBroken as broken:
                write({"event": "tunnel broken", "detail": str(broken)})
            else:
                write({"event": "tunnel ended"})

        service.on_loss(self.lost)
        return service

    async def do_serve(
        self, cluster: str, concurrency: int = 8, limit_bytes: int = 64 << 20
    ) -> None:
        """Join a cluster, and return when the relay of this host has confirmed it."""
        stack = contextlib.AsyncExitStack()
        limits = iris.Limits(concurrency=concurrency, queue_bytes=limit_bytes)
        await stack.enter_async_context(self.client.serve(self.service(cluster, limits)))
        self.endings[cluster] = stack

    async def do_leave(self, cluster: str) -> None:
        """Leave a cluster, or end a subscription."""
        await self.endings.pop(cluster).aclose()

    async def do_leave_all(self) -> None:
        """Leave all clusters, and end all subscriptions."""
        self.released.set()
        while self.endings:
            await self.endings.popitem()[1].aclose()
        self.released.clear()

    async def do_release(self) -> None:
        """Release all held messages, and hold none from now on."""
        self.released.set()

    async def do_subscribe(self, pattern: str, group: str = "") -> None:
        """Subscribe, and return when the relay of this host has confirmed it."""

        def receive(message: iris.Message) -> None:
            text = message.payload.decode()
            if text == PROBE:
                self.received["probe"].add(text)
            else:
                self.received["publish"].add(text)
                self.received["named"].add(f"{message.name} {text}")

        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(
            self.client.subscribe(pattern, receive, group=group, on_loss=self.lost)
        )
        self.endings[pattern] = stack

    async def do_tally(self, pattern: str, group: str = "") -> None:
        """Subscribe to numbers, and count them by topic without keeping them."""

        def receive(message: iris.Message) -> None:
            tally = self.tallies.setdefault(message.name, Tally())
            number = int(message.payload)
            if number >= 0:
                tally.receive(number)

        def missed(lost: iris.Loss) -> None:
            tally = self.tallies.setdefault(lost.name, Tally())
            tally.missing += lost.count or 0
            tally.unknown += lost.count is None

        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(
            self.client.subscribe(pattern, receive, group=group, on_loss=missed)
        )
        self.endings[pattern] = stack

    async def do_tallies(self) -> Value:
        """Return the counts so far, by topic."""
        return {name: vars(tally) for name, tally in self.tallies.items()}

    async def do_flow(self, topic: str, at_once: int, pause: float, limit: int = 0) -> int:
        """Publish rising numbers from 0 until `stop_flow` or `limit`; return their count."""
        stop = self.flowing[topic] = asyncio.Event()
        number = 0
        while not stop.is_set() and (not limit or number < limit):
            until = min(number + at_once, limit or number + at_once)
            while number < until:
                await self.client.publish(topic, str(number))
                number += 1
            await asyncio.sleep(pause)
        await self.client.flush(timeout=20.0)
        return number

    async def do_stop_flow(self, topic: str) -> None:
        """End a flow."""
        self.flowing[topic].set()

    async def do_received(self, what: str, count: int = 0, timeout: float = 0.0) -> list[Value]:
        """Return the received messages of one kind when there are `count`, or those after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.received[what].wait(count)
        return self.received[what].items

    async def do_forget(self) -> None:
        """Forget all received messages."""
        for received in self.received.values():
            received.items.clear()

    async def do_forget_probes(self) -> None:
        """Forget the received probes."""
        self.received["probe"].items.clear()

    async def do_await_last(self, what: str, item: Value, timeout: float) -> None:
        """Return when the latest message of one kind is `item`, or after `timeout` seconds."""
        received = self.received[what]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while received.items[-1:] != [item]:
                    await received.wait(len(received.items) + 1)

    # -- calling -----------------------------------------------------------------------------------------------

    async def do_request(
        self, cluster: str, payload: str, timeout: float, idempotent: bool = False
    ) -> str:
        reply: bytes = await self.client.request(
            cluster, payload, timeout=timeout, idempotent=idempotent, type=bytes
        )
        return reply.decode()

    async def do_requests(
        self, cluster: str, count: int, in_flight: int, timeout: float, first: int = 0
    ) -> Value:
        """Send requests numbered from `first`, several at once; return the number of each outcome: answering member, or
        error.
        """
        ended: dict[str, int] = {}
        numbers = iter(range(first, first + count))

        async def caller() -> None:
            for number in numbers:
                try:
                    reply: bytes = await self.client.request(
                        cluster, str(number), timeout=timeout, type=bytes
                    )
                    who, _, text = reply.decode().partition(": ")
                    end = who if text == str(number) else "wrong"
                except iris.RequestError as err:
                    end = type(err).__name__
                ended[end] = ended.get(end, 0) + 1

        await asyncio.gather(*(caller() for _ in range(in_flight)))
        return ended

    async def do_push(self, cluster: str, payloads: list[str]) -> None:
        for payload in payloads:
            await self.client.push(cluster, payload, timeout=20.0)
        await self.client.flush(timeout=20.0)

    async def do_survey(
        self, cluster: str, payload: str, timeout: float, scope: iris.Scope = "federation"
    ) -> Value:
        survey = self.client.survey(cluster, payload, timeout=timeout, type=bytes, scope=scope)
        answers = [answer.decode() async for answer in survey]
        return {"answers": sorted(answers), "missing": survey.missing, "failed": survey.failed}

    async def do_broadcast(
        self, cluster: str, payloads: list[str], scope: iris.Scope = "federation"
    ) -> None:
        for payload in payloads:
            await self.client.broadcast(cluster, payload, scope=scope)
        await self.client.flush(timeout=20.0)

    async def do_publish(self, topic: str, first: int, count: int) -> None:
        """Publish `count` numbers from `first`."""
        for number in range(first, first + count):
            await self.client.publish(topic, str(number))
        await self.client.flush(timeout=20.0)

    async def do_tunnel(self, cluster: str, count: int, size: int, timeout: float) -> Value:
        """Send `count` messages through a tunnel; return how many came back unchanged and in order."""
        right = 0
        async with self.client.tunnel(cluster, timeout=timeout) as tunnel:

            async def send() -> None:
                for number in range(count):
                    await tunnel.send(number.to_bytes(4, "little") * (size // 4))
                await tunnel.finish()

            sending = asyncio.create_task(send())
            async for message in tunnel:
                right += message == right.to_bytes(4, "little") * (size // 4)
            await sending
        return right

    async def do_open_tunnel(self, cluster: str, number: str, timeout: float) -> None:
        self.tunnels[number] = await self.client.open_tunnel(cluster, timeout=timeout)

    async def do_pass(self, number: str, payload: str) -> str:
        """Send one message through an open tunnel and return the answer."""
        tunnel = self.tunnels[number]
        await tunnel.send(payload)
        return (await tunnel.recv()).decode()

    async def do_wait_members(self, cluster: str, count: int, timeout: float) -> list[str]:
        """Return the ids of the members when there are at least `count`."""
        members = await self.client.wait_for_members(cluster, count, timeout=timeout)
        return [member.member for member in members]

    async def do_watch_members(self, cluster: str, count: int, timeout: float) -> int:
        """Return the number of members when it is `count`, or after `timeout` seconds."""
        there = -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                async for members in self.client.watch_members(cluster):
                    there = len(members)
                    if there == count:
                        break
        return there

    async def do_sites(self, cluster: str) -> dict[str, int]:
        """Return the number of members in each remote site."""
        members = await self.client.members(cluster)
        return members.sites

    async def do_record(self, name: str, topic: str) -> None:
        """Create a stream of a topic unless it exists."""
        await self.client.streams.create(name, topic=topic)

    async def do_mirror(self, source: str, name: str) -> int:
        """Mirror a stream up to its end; return the number of messages."""
        async with self.client.streams.mirror(source, name, follow=False) as mirror:
            await mirror.run()
            return mirror.copied

    async def do_read(self, name: str) -> list[str]:
        """Return the payloads in a stream."""
        reader = self.client.streams.read(name, follow=False)
        return [message.payload.decode() async for message in reader]

    async def do_status(self) -> Value:
        return await self.client.status(timeout=20.0)


async def perform(program: Program, command: dict[str, Any]) -> None:
    """Run one command and write its outcome."""
    number = command.pop("id")
    work: Callable[..., Awaitable[Value]] = getattr(program, f"do_{command.pop('do')}")
    try:
        write({"id": number, "value": await work(**command)})
    except iris.IrisError as err:
        may_have_run = err.may_have_run if isinstance(err, iris.RequestError) else None
        write({"id": number, "error": type(err).__name__, "detail": str(err), "may_have_run": may_have_run})  # fmt: skip
    except iris.EndOfTunnel as end:
        write({"id": number, "error": "EndOfTunnel", "detail": str(end), "may_have_run": None})


async def commands() -> AsyncIterator[dict[str, Any]]:
    """Iterate over the commands until the end of the input."""
    reader = asyncio.StreamReader(limit=8 << 20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield json.loads(line)


async def main(name: str) -> None:
    """Run until the input ends. An exception other than an error of Iris ends the program."""
    config = iris.ClientConfig(label=name, drain_timeout_s=1.0, reconnect_max_s=0.2)
    async with iris.connect(config=config) as client, asyncio.TaskGroup() as group:
        program = Program(name, client)
        write({"event": "ready"})
        tasks = []
        async for command in commands():
            tasks.append(group.create_task(perform(program, command)))
        for task in tasks:
            task.cancel()
        for stack in program.endings.values():
            await stack.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
