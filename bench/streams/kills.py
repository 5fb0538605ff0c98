"""What a log loses when the process that serves it is killed and its disk deleted, and how long appends wait.

Two stores of Iris with one bucket, or three servers of JetStream with three replicas. Some writers append numbered
messages, each the next when the one before is acknowledged, and repeat what was not acknowledged. In the middle the
process that serves the log gets SIGKILL, and its files are removed. Then the whole log is read: each number that was
acknowledged must be there once. One run is one process: `python -m streams.kills JSON`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import harness
import uvloop
from harness import IrisRelay, Result, Role, Roles
from nats.errors import Error as NatsError
from peers.iris_ import TIMEOUT_S

import iris
from iris.crypto.keys import StoreKey, public_id
from streams import LOG
from streams.iris_ import make_group_key
from streams.nats_ import NatsStreams
from streams.s3 import NAME, environ

WRITERS: Final = 64
BEFORE_S: Final = 1.5
AFTER_S: Final = 1.5
PAUSE_S: Final = 0.02
START_S: Final = 60.0
SIZE: Final = 1024
NUMBER_BYTES: Final = 8


class Victim(ABC):
    """A system whose log is served by one of several processes."""

    @abstractmethod
    async def start(self) -> None:
        """Start everything and create the log, in a state that survives a kill."""

    @abstractmethod
    async def append(self, number: int) -> None:
        """Append a message, as often as it takes; return when it is acknowledged."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the process that serves the log and delete its disk."""

    @abstractmethod
    async def numbers(self) -> Sequence[int]:
        """Read the whole log."""


def payload_of(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little") + bytes(SIZE - NUMBER_BYTES)


class IrisVictim(Victim):
    def __init__(self, roles: Roles, bucket: str, port: int) -> None:
        """`bucket`: "file", or "s3" with a service that runs at `port`."""
        self._roles = roles
        self._relay = IrisRelay(roles)
        self._url = f"s3://{NAME}/{roles.directory.name}" if bucket == "s3" else f"file://{roles.directory}/bucket"  # fmt: skip
        self._env = {**self._relay.env, **(environ(port) if bucket == "s3" else {})}
        self._stores: list[Role] = []
        self._opened = contextlib.AsyncExitStack()

    async def start(self) -> None:
        for number in range(2):
            data = self._data(number)
            make_group_key(data)
            command = [
                "-m", "relay.store", "--data", str(data), "--relay", self._env["IRIS_RELAY"], "--bucket", self._url,
            ]  # fmt: skip
            role = self._roles.start(f"store {number}", command, env=self._env, reports=False)
            self._stores.append(role)
        for role in self._stores:
            # A store that was never seen is taken over after a minute, any other one after 5 seconds.
            await _until(
                lambda role=role: "store.peer_seen" in role.written(), "no store saw the other"
            )  # type: ignore[misc]  # bound at once
        os.environ.update(IRIS_CONFIG=self._env["IRIS_CONFIG"], IRIS_RELAY=self._env["IRIS_RELAY"])
        self._client = await self._opened.enter_async_context(iris.connect())
        until_s = time.monotonic() + START_S
        while True:
            try:
                await self._client.streams.create(LOG, durability="bucket")
                return
            except iris.IrisError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def append(self, number: int) -> None:
        await self._client.streams.append(LOG, payload_of(number), timeout=TIMEOUT_S)

    async def kill(self) -> None:
        info = await self._client.streams.describe(LOG, timeout=TIMEOUT_S)
        for number, role in enumerate(self._stores):
            key = StoreKey.parse((self._data(number) / "store.key").read_text().strip())
            if public_id(key.public_key).hex() == info.store:
                _kill(role, self._data(number))
                return
        raise harness.BenchError(f"no store is {info.store}")

    async def numbers(self) -> Sequence[int]:
        found = []
        async with self._client.streams.read(LOG, "first", follow=False) as reader:
            async for messages in reader.batches():
                found += [_number(bytes(message.payload)) for message in messages]
        await self._opened.aclose()
        return found

    def _data(self, number: int) -> Path:
        return self._roles.directory / f"data{number}"


class NatsVictim(Victim):
    def __init__(self, roles: Roles, sync: str) -> None:
        """`sync`: the server's `sync_interval`; "" for its default."""
        self._peer = NatsStreams(
            {"directory": str(roles.directory), "secured": False, "servers": 3, "sync": sync}
        )
        self._roles = roles
        self._servers: list[Role] = []

    async def start(self) -> None:
        self._peer.prepare()
        for server in self._peer.servers():
            self._servers.append(self._roles.run(server.name, server.command))
        import nats

        async def ignore(err: Exception) -> None:
            """Connections to a killed server fail."""

        urls = [f"nats://127.0.0.1:{self._peer.port(f'client{number}')}" for number in range(3)]
        until_s = time.monotonic() + START_S
        while True:
            try:
                self._client = await nats.connect(
                    urls, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=ignore
                )
                break
            except (NatsError, OSError):
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(PAUSE_S)
        self._jetstream = self._client.jetstream(timeout=2.0)
        # The peer's own connection does not reconnect.
        self._peer._made = self._client.jetstream(timeout=TIMEOUT_S)  # type: ignore[attr-defined]  # made at first use
        await self._peer.create(LOG)

    async def append(self, number: int) -> None:
        # The number is the message's id, so that what is repeated is stored once.
        headers = {"Nats-Msg-Id": str(number)}
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                await self._jetstream.publish(LOG, payload_of(number), timeout=1.0, headers=headers)
                return
            except (NatsError, TimeoutError, OSError):
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def kill(self) -> None:
        info = await self._client.jetstream(timeout=TIMEOUT_S).stream_info(LOG)
        assert info.cluster is not None
        assert info.cluster.leader is not None
        number = int(info.cluster.leader.removeprefix("n"))
        _kill(self._servers[number], self._peer.data_of(number))

    async def numbers(self) -> Sequence[int]:
        found: list[int] = []

        def took(payloads: Sequence[bytes]) -> None:
            found.extend(_number(payload) for payload in payloads)

        await asyncio.wait_for(self._peer.replay(LOG, took), TIMEOUT_S)
        await self._client.close()
        return found


def _number(payload: bytes) -> int:
    return int.from_bytes(payload[:NUMBER_BYTES], "little")


def _kill(role: Role, data: Path) -> None:
    role.process.send_signal(signal.SIGKILL)
    role.process.wait()
    shutil.rmtree(data)


async def _until(holds: Any, what: str) -> None:
    until_s = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > until_s:
            raise harness.BenchError(what)
        await asyncio.sleep(PAUSE_S)


async def run(victim: Victim) -> Result:
    """Kill under load, and account for every message."""
    await victim.start()
    acknowledged: set[int] = set()
    next_number = 0
    stopping = asyncio.Event()

    async def append() -> None:
        nonlocal next_number
        number, next_number = next_number, next_number + 1
        await victim.append(number)
        acknowledged.add(number)

    async def work() -> None:
        while not stopping.is_set():
            await append()

    writers = [asyncio.create_task(work()) for _ in range(WRITERS)]
    await asyncio.sleep(BEFORE_S)
    begin_s = time.monotonic()
    await victim.kill()
    killed_s = time.monotonic()
    await append()
    back_s = time.monotonic() - killed_s
    await asyncio.sleep(AFTER_S)
    stopping.set()
    await asyncio.gather(*writers)
    there = Counter(await victim.numbers())
    return {
        "failover_s": back_s,
        "killing_s": killed_s - begin_s,
        "acknowledged": len(acknowledged),
        "lost": len(acknowledged - there.keys()),
        "doubled": sum(count - 1 for count in there.values()),
        "strangers": len(there.keys() - set(range(next_number))),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    with Roles(4 * TIMEOUT_S) as roles:
        victim: Victim
        if given["system"] == "iris":
            victim = IrisVictim(roles, given["bucket"], given.get("port", 0))
        else:
            victim = NatsVictim(roles, given["sync"])
        result = uvloop.run(run(victim))
    harness.report("kills", result)


if __name__ == "__main__":
    main()
