"""Stores that share a bucket, as processes at one relay: ways to end them and to lose their disks.

with Group(directory) as group:
    group.start(1)
    group.start(2)
    async with group.rig.client() as client: ...
    group.kill(await group.holder(client, "orders"))
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import iris
from iris.crypto.keys import GroupKey, StoreKey, public_id
from iris.errors import StreamError
from support import warm
from support.stores import PATIENCE_S, Rig


class Group:
    """A relay, a bucket, and stores by number. A context manager that ends all of them."""

    def __init__(self, directory: Path, url: str = "", **environ: str) -> None:
        """`url`: of a bucket that exists; default: a directory. `environ` is for the stores alone."""
        self.directory = directory
        self.bucket = directory / "bucket"
        self.url = url or f"file://{self.bucket}"
        self.key = GroupKey(os.urandom(32))
        self.rig = Rig(directory)
        self.environ = environ
        self._stores: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.bucket.mkdir(exist_ok=True)
        self.rig.__enter__()
        self.rig.start_relay()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        for number in list(self._stores):
            self.signal(number, signal.SIGCONT)
            self.kill(number)
        self.rig.__exit__(kind, error, trace)

    def data(self, number: int) -> Path:
        """The data directory of a store."""
        return self.directory / f"data{number}"

    def log(self, number: int) -> str:
        """What a store has logged."""
        path = self.directory / f"store{number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, number: int, key: GroupKey | None = None, *more: str) -> None:
        """Start a store; `key`: another group key; `more`: further options."""
        data = self.data(number)
        data.mkdir(exist_ok=True)
        file = data / "group.key"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text((key or self.key).reveal())
        command = [
            sys.executable, "-m", "relay.store", "--data", str(data), "--relay", str(self.rig.socket), "--bucket", self.url, *more,
        ]  # fmt: skip
        with (self.directory / f"store{number}.log").open("ab") as log:
            self._stores[number] = warm.Popen(
                command,
                env={**self.rig.environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: int, what: int) -> None:
        """Send a store a signal."""
        if self._stores[number].poll() is None:
            self._stores[number].send_signal(what)

    def kill(self, number: int) -> None:
        """Kill a store."""
        self.signal(number, signal.SIGKILL)
        self._stores.pop(number).wait()

    async def stop(self, number: int) -> int:
        """Stop a store with SIGTERM; return its exit code."""
        self.signal(number, signal.SIGTERM)
        process = self._stores.pop(number)
        return await asyncio.to_thread(process.wait, PATIENCE_S)

    def lose_disk(self, number: int) -> None:
        """Delete everything that a store has."""
        shutil.rmtree(self.data(number))

    async def logged(self, number: int, event: str, times: int = 1) -> None:
        """Wait until a store has logged an event this often."""
        until_s = time.monotonic() + PATIENCE_S
        while self.log(number).count(f'"event": "{event}"') < times:
            if time.monotonic() > until_s:
                raise TimeoutError(f"store {number} did not log {event}: {self.log(number)[-1500:]}")  # fmt: skip
            await asyncio.sleep(0.02)

    async def create(self, client: iris.Client, name: str, **settings: object) -> None:
        """Create a stream in the bucket, as soon as a store can."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                await client.streams.create(name, durability="bucket", **settings)  # type: ignore[arg-type]  # as the caller gave them
                return
            except StreamError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(0.05)

    def id_of(self, number: int) -> str:
        """Return the id of a store."""
        text = (self.data(number) / "store.key").read_text()
        return public_id(StoreKey.parse(text.strip()).public_key).hex()

    async def holder(self, client: iris.Client, name: str) -> int:
        """Return the number of the store that serves a stream."""
        store = (await client.streams.describe(name, timeout=PATIENCE_S)).store
        for number in self._stores:
            if self.id_of(number) == store:
                return number
        raise AssertionError(f"no store of this group is {store}")


async def check(group: Group, number: int, *more: str) -> tuple[int, Any]:
    """Return the exit code of a check, and its report, or what it says on standard error."""
    command = [
        sys.executable, "-m", "relay.store", "check", str(group.data(number)), "--bucket", group.url, "--json", *more,
    ]  # fmt: skip
    environ = {**group.rig.environ, **group.environ}
    done = await asyncio.to_thread(warm.run, command, timeout=PATIENCE_S, env=environ)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr.decode()


async def whole(client: iris.Client, name: str) -> list[bytes]:
    """Return all messages of a stream."""
    async with client.streams.read(name, "first", follow=False) as reader:
        return [bytes(message.payload) async for message in reader]


def numbered(prefix: str, count: int) -> list[bytes]:
    """Return `count` different messages."""
    return [f"{prefix}{number}".encode() for number in range(count)]


async def append_all(
    client: iris.Client, name: str, messages: list[bytes]
) -> list[asyncio.Task[int]]:
    """Begin to append messages, each in a task; return the tasks."""
    tasks = [
        asyncio.create_task(client.streams.append(name, message, timeout=PATIENCE_S))
        for message in messages
    ]
    await asyncio.sleep(0)
    return tasks
