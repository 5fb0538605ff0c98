"""A Node process that runs what tests ask of the JavaScript client, and two relays that are linked."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from support.links import Host
from support.waiting import PATIENCE_S, wait_until

import iris
from iris.crypto.keys import ClusterKey

CLIENT: Final = Path(__file__).parents[3] / "clients" / "js"
DRIVER: Final = Path(__file__).parent / "driver.mjs"
KEY: Final = ClusterKey(bytes(range(32)))


class Raised(Exception):
    """The JavaScript code raised: `name`, `message`, and what else the error says, in `fields`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields.get("stack") or f"{fields.get('name')}: {fields.get('message')}")
        self.name: str = fields.get("name") or "Error"
        self.fields = fields


class Node:
    """One Node process for many tests. `page` gives each of them a name for what it keeps there."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [CLIENT / "node", str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "NO_COLOR": "1"},
            text=True,
        )
        self._answers: dict[int, Future[Any]] = {}
        self._number = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def page(self, url: str) -> Page:
        self._number += 1
        return Page(self, str(self._number), url)

    def ask(self, state: str, code: str, args: dict[str, Any]) -> Future[Any]:
        self._number += 1
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # a test that gives up does not stop what runs
        self._answers[self._number] = answer
        asked = {"id": self._number, "state": state, "code": code, "args": args}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            answer = self._answers.pop(said["id"])
            if "error" in said:
                answer.set_exception(Raised(said["error"]))
            else:
                answer.set_result(said["result"])
        for answer in self._answers.values():
            answer.set_exception(AssertionError("Node ended"))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Page:
    """What one test does in JavaScript. `s.client` is connected to the relay after `connect`."""

    def __init__(self, node: Node, state: str, url: str) -> None:
        self._node = node
        self._state = state
        self.url = url

    async def run(self, code: str, **args: Any) -> Any:
        """Run the body of an async function, and return what it returned, as JSON has it. Raises Raised."""
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.wrap_future(self._node.ask(self._state, code, args))

    async def connect(self, options: str = "") -> None:
        await self.run(
            f"""s.losses = [];
            s.client = await iris.connect({{
                relay: args.url, keyring: args.key, onLoss: (lost) => s.losses.push(lost), {options}
            }});""",
            url=self.url,
            key=KEY.reveal(),
        )

    async def close(self) -> None:
        await self.run("await s.client?.close();")


class Relays:
    """Relays in processes of their own, linked to each other, the first one with a store."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        data = str(directory / "data")
        self.hosts = [self._start(directory / "one", "--data", data)]
        self.hosts.append(self._start(directory / "two", "--join", self.hosts[0].address))
        wait_until(lambda: all(host.events("link.up") for host in self.hosts))

    def _start(self, directory: Path, *arguments: str) -> Host:
        host = Host(directory, "--listen", "ws://127.0.0.1:0", *arguments)
        host.daemon.environ["IRIS_RELAY_TICKETS"] = "false"
        host.daemon.start()
        return host

    def url(self, number: int) -> str:
        return str(self.hosts[number].events("web.listening")[-1]["addresses"][0])

    def client(self, number: int) -> iris.Client:
        """Return a Python client of a relay."""
        socket = self.hosts[number].daemon.socket
        return iris.connect(socket, keyring=iris.Keyring.single(KEY))

    def end(self) -> None:
        for host in self.hosts:
            host.daemon.process.kill()
            host.daemon.process.wait()
