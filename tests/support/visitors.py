"""Short-lived clients of relays, which use every verb and leave.

    python tests/support/visitors.py OPTIONS        # JSON: sockets, verbs, first, rounds, at_once, aborts

Each round connects a client to every relay of `sockets`, serves, uses the verbs, and ends all of it with a goodbye.
With `aborts`, the last round's clients have calls, tunnels and surveys under way as this process ends without a word.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import iris
from iris import Client, Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import IrisError

KEY: Final = ClusterKey(bytes(range(32)))
TIMEOUT_S: Final = 20.0
VERBS: Final = (
    "serve", "request", "push", "survey", "broadcast", "publish", "wait", "tunnel", "watch", "refused", "stream",
)  # fmt: skip


def service(name: str, held: asyncio.Event | None = None) -> iris.Service:
    """Return a service with a handler for every kind of call, which waits for `held` before it returns."""
    made = iris.Service(name)

    async def echo(payload: bytes) -> bytes:
        if held is not None:
            await held.wait()
        return payload

    made.on_request(echo)
    made.on_survey(echo)
    made.on_push(lambda payload: None)
    made.on_broadcast(lambda payload: None)

    @made.on_tunnel
    async def repeat(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message)

    return made


async def use(verb: str, client: Client, name: str) -> None:
    """Use one verb towards the members of `name`, or a topic that begins with it."""
    if verb == "request":
        await asyncio.gather(*(client.request(name, b"x", timeout=TIMEOUT_S) for _ in range(8)))
    elif verb == "push":
        await client.push(name, b"x")
    elif verb == "survey":
        async for _ in client.survey(name, b"x", timeout=TIMEOUT_S):
            pass
    elif verb == "broadcast":
        await client.broadcast(name, b"x")
    elif verb in ("publish", "wait"):
        how: Any = {"when_full": "wait"} if verb == "wait" else {}
        topic = f"{name}.{verb}"
        async with client.subscribe(topic, **how) as own, client.subscribe(f"{name}.*", group="g"):
            await client.publish(topic, b"x", **how)
            async for _ in own:
                break
    elif verb == "tunnel":
        async with client.tunnel(name, timeout=TIMEOUT_S) as tunnel:
            await tunnel.send(b"x")
            await tunnel.recv()
    elif verb == "watch":
        async for _ in client.watch_members(name):
            break
    elif verb == "stream":
        name = f"{name}.{id(client)}"
        await client.streams.create(name)
        await client.streams.append(name, b"x")
        async for _ in client.streams.read(name, start="first"):
            break
        async with client.streams.consumer(name, "worker") as worker:
            async for message in worker:
                worker.ack(message)
                break
            await worker.flush()
        await client.streams.delete(name)
    elif verb == "refused":
        try:
            await client.request("nobody", b"", timeout=TIMEOUT_S)
        except IrisError:
            return
        raise AssertionError("a call without a member was answered")


async def reaches(client: Client, name: str) -> None:
    """Return once a client's relay knows of a member, in its site or another."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            members = await client.members(name)
            if members or members.sites:
                return
            await asyncio.sleep(0.005)  # members of other sites cannot be watched


async def visit(options: dict[str, Any], number: int, *, aborts: bool = False) -> None:
    """Connect to every relay, serve, use the verbs, and leave."""
    name = f"visited.n{number}"
    verbs: list[str] = options["verbs"]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(iris.connect(path, keyring=Keyring.single(KEY)))
            for path in options["sockets"]
        ]
        if "serve" in verbs:
            await stack.enter_async_context(clients[-1].serve(service(name)))
            for client in clients:
                await reaches(client, name)
        for client in clients:
            for verb in verbs:
                await use(verb, client, name)
        if aborts:
            await leave_without_a_word(clients, name, stack)


async def leave_without_a_word(clients: list[Client], name: str, stack: AsyncExitStack) -> None:
    """Begin what does not end, and end this process."""
    hung = service(f"{name}.hung", asyncio.Event())
    await stack.enter_async_context(clients[-1].serve(hung))
    for client in clients:
        await reaches(client, f"{name}.hung")
        tunnel = await stack.enter_async_context(client.tunnel(f"{name}.hung", timeout=TIMEOUT_S))
        await tunnel.send(b"x")
        await tunnel.recv()  # the relays have it
        await stack.enter_async_context(client.subscribe(f"{name}.>"))
        for _ in range(4):
            asyncio.ensure_future(client.request(f"{name}.hung", b"x", timeout=TIMEOUT_S))  # noqa: RUF006 - never ends
        survey = client.survey(f"{name}.hung", b"x", timeout=TIMEOUT_S)
        asyncio.ensure_future(anext(aiter(survey)))  # noqa: RUF006 - never ends
        await client.push(f"{name}.hung", b"x")
        await client.publish(f"{name}.last", b"x")
        await client.status()  # so it has all of that
    os._exit(0)


async def main() -> None:
    """Make the rounds, some at once."""
    options = json.loads(sys.argv[1])
    rounds = iter(range(options["rounds"]))

    async def visits() -> None:
        for number in rounds:
            await visit(options, options["first"] + number)

    await asyncio.gather(*(visits() for _ in range(options["at_once"])))
    if options["aborts"]:
        await visit(options, options["first"] + options["rounds"], aborts=True)


if __name__ == "__main__":
    asyncio.run(main())
