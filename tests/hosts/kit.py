"""Relays and programs on the hosts of a `Lan`: start them, cause faults, and wait for the effects."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Self

from support import commands, warm
from support.namespaces import Host, Lan

import iris
from iris import keyfiles

PATIENCE_S = 30.0
"""Limit of every wait. It can make a test fail, but never slows one down."""
MEMBER = Path(__file__).with_name("member.py")


class Failed(Exception):
    """The error of Iris with which a program's command ended."""

    def __init__(self, error: str, detail: str, may_have_run: bool | None) -> None:
        super().__init__(f"{error}: {detail}")
        self.error = error
        self.may_have_run = may_have_run


def received_by(programs: Iterable[Program], what: str, count: int) -> list[Any]:
    """Return the messages of one kind that `programs` received, when they are `count` in total."""
    received: list[Any] = []

    def enough() -> bool:
        received[:] = [item for program in programs for item in program.do("received", what=what)]
        return len(received) >= count

    wait_until(enough, f"{count} x {what} are heard by all together")
    return received


def wait_until(true: Callable[[], object], what: str) -> None:
    """Return when `true()` is true. Fails after `PATIENCE_S` with a text that names `what`."""
    until_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until_s, f"it did not happen in {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)


class Network:
    """One network: its keys, of which every host has a copy, and its relays, which end with its `Lan`."""

    def __init__(self, lan: Lan, directory: Path, name: str = "net") -> None:
        self.lan = lan
        self.directory = directory / name
        self.keys = self.directory / "keys"
        keyfiles.create_keys(self.keys)
        self.keyring = keyfiles.load_keyring(self.keys / keyfiles.KEYRING_FILE)
        self.relays: dict[str, Relay] = {}

    def share_keyring(self, other: Network) -> None:
        """Use the cluster keys of another network, with a separate network key."""
        shutil.copy2(other.keys / keyfiles.KEYRING_FILE, self.keys / keyfiles.KEYRING_FILE)
        self.keyring = other.keyring

    def relay(self, host: Host, *arguments: str, name: str = "") -> Relay:
        """Start a relay on a host, and return when it serves. Restarts use the same arguments.

        A second relay on a host needs a `name`.
        """
        relay = self.relays[name or host.name] = Relay(self, host, arguments, name or host.name)
        return relay.start()

    def relays_on(self, *hosts: Host, arguments: Sequence[str] = ()) -> list[Relay]:
        """Start a relay on each host, all at once."""
        relays = [Relay(self, host, tuple(arguments), host.name) for host in hosts]
        for relay in relays:
            self.relays[relay.host.name] = relay
            relay.launch()
        for relay in relays:
            relay.serves()
        return relays

    def hosts(self, names: str, *, arguments: Sequence[str] = (), **plug: Any) -> list[Relay]:
        """Create a host with a relay for each letter of `names`, on one switch; `plug` is passed to `Host.plug`."""
        hosts = [self.lan.host(name) for name in names]
        for host in hosts:
            host.plug(**plug)
        return self.relays_on(*hosts, arguments=arguments)

    def members(self, *relays: Relay, cluster: str = "echo") -> list[Program]:
        """Start a member of `cluster` on each relay's host, and return when every relay knows all of them."""
        programs = [relay.program() for relay in relays]
        serving = [program.begin("serve", cluster=cluster) for program in programs]
        for command in serving:
            command.result()
        for program in programs:
            program.sees_members(len(programs), cluster)
        return programs

    def access(self, name: str) -> Path:
        """Create an access file, as an operator does, and return its path."""
        path = self.directory / name
        environ = {"PATH": os.environ["PATH"], "IRIS_CONFIG": str(self.keys)}
        command = commands.command("key", "access", str(path))
        warm.run(command, env=environ, timeout=PATIENCE_S).check_returncode()
        return path

    def guest(self, host: Host, address: str, access: Path) -> Program:
        """Start a program on a host without a relay; its relay is at `address`, tls://host:port."""
        directory = self.directory / host.name
        keys = directory / "keys"
        keys.mkdir(mode=0o700, parents=True)
        shutil.copy2(self.keys / keyfiles.KEYRING_FILE, keys)
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "IRIS_CONFIG": str(keys),
            "IRIS_RELAY": address,
            "IRIS_ACCESS": str(access),
        }
        return Program(host, host.name, environ, directory)

    def meshed(self, *relays: Relay) -> None:
        """Return when `relays` (by default all) are linked to each other, and to no other relay."""
        among = relays or tuple(self.relays.values())
        ids = {relay.id for relay in among}
        for relay in among:
            relay.linked_to(*(ids - {relay.id}))


class Relay:
    """A relay daemon on a host, with its own socket and its own copy of the keys."""

    def __init__(self, network: Network, host: Host, arguments: tuple[str, ...], name: str) -> None:
        self.network = network
        self.host = host
        self.name = name
        self.directory = network.directory / name
        self.directory.mkdir(mode=0o700)
        shutil.copytree(network.keys, self.directory / "keys")
        self.socket = self.directory / "relay.sock"
        self.log = self.directory / "relay.log"
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "XDG_RUNTIME_DIR": str(self.directory),
            "IRIS_CONFIG": str(self.directory / "keys"),
            "IRIS_RELAY": str(self.socket),
        }
        self.process: subprocess.Popen[bytes]
        self.id = ""
        """Relay id in hex, which changes with each start."""
        self._arguments = arguments
        self._before = 0

    def start(self) -> Self:
        """Start the relay, also again, and return when it serves."""
        self.launch()
        return self.serves()

    def launch(self) -> None:
        """Start the relay, also again, without waiting."""
        self._before = len(self.lines())
        with self.log.open("ab") as log:
            self.process = self.host.start(
                [sys.executable, "-m", "relay", *self._arguments],
                env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def serves(self) -> Self:
        """Return when the relay that was launched serves."""
        started: list[dict[str, Any]] = []

        def serves() -> bool:
            assert self.process.poll() is None, f"the relay ended: {self.log.read_text()[-2000:]}"
            lines = self.lines()[self._before :]
            started[:] = [line for line in lines if line["event"] == "relay.started"]
            return bool(started)

        wait_until(serves, f"the relay of {self.name} serves")
        self.id = started[0]["relay"]
        return self

    def lines(self, event: str = "") -> list[dict[str, Any]]:
        """Return the log of all its starts so far: all events, or one. Fails if a line is not JSON."""
        if not self.log.exists():
            return []
        text = self.log.read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()
        assert all(line.startswith("{") for line in whole), f"{self.name} logged: {text[-2000:]}"
        lines = [json.loads(line) for line in whole]
        return [line for line in lines if not event or line["event"] == event]

    def says(self, event: str, count: int = 1) -> dict[str, Any]:
        """Return the latest log line of this event when there are `count` of them."""
        wait_until(
            lambda: len(self.lines(event)) >= count,
            f"{event} x {count} in the log of {self.name}",
        )
        return self.lines(event)[-1]

    def status(self) -> dict[str, Any]:
        """Return its status."""

        async def ask() -> dict[str, Any]:
            async with iris.connect(self.socket, keyring=self.network.keyring) as client:
                return await client.status(timeout=PATIENCE_S)

        return asyncio.run(ask())

    def links(self) -> dict[str, dict[str, Any]]:
        """Return its links by the id of the peer."""
        return {link["peer"]: link for link in self.status()["links"]}

    def linked_to(self, *peers: Relay | str) -> None:
        """Return when the relay has links to exactly these relays."""
        ids = {peer if isinstance(peer, str) else peer.id for peer in peers}
        wait_until(lambda: set(self.links()) == ids, f"{self.name} has {len(ids)} links")

    def settled(self) -> dict[str, Any]:
        """Return its status when it holds no message. Its account must balance then."""
        seen: list[dict[str, Any]] = []

        def quiet() -> bool:
            seen[:] = [self.status()]
            return not seen[0]["accounts"]["held"]

        wait_until(quiet, f"the relay of {self.name} holds nothing")
        account = seen[0]["accounts"]
        leaving = [account[name] for name in ("out", "unwanted", "refused", "expired", "held")]
        balance = (
            account["in"] + account["copied"] - sum(leaving) - sum(account["dropped"].values())
        )
        assert balance == 0, (self.name, account)
        return seen[0]

    def kill(self) -> None:
        """Kill the relay without a goodbye, as a power failure does."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def freeze(self) -> None:
        """Freeze the process; its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """Stop the relay as an operator does, and return its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def program(self, name: str = "") -> Program:
        """Start a program on this host. It accepts commands before it is connected."""
        return Program(self.host, name or self.host.name, self.environ, self.directory)

    def member(self, cluster: str = "echo", name: str = "") -> Program:
        """Start a program that serves `cluster` on this host."""
        program = self.program(name)
        program.do("serve", cluster=cluster)
        return program


class Command:
    """A command that a program is running."""

    def __init__(self, program: Program, number: int) -> None:
        self._program = program
        self._number = number

    @property
    def done(self) -> bool:
        """Whether the command has ended."""
        return self._number in self._program.answers

    def result(self) -> Any:
        """Return the command's value. Raises Failed with its error."""
        self._program.wait(lambda: self.done, f"command {self._number} ends")
        answer = self._program.answers[self._number]
        if "error" in answer:
            raise Failed(answer["error"], answer["detail"], answer["may_have_run"])
        return answer["value"]


class Program:
    """A process of `member.py` on a host. That module lists its commands."""

    def __init__(self, host: Host, name: str, environ: dict[str, str], directory: Path) -> None:
        self.name = name
        self.answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._ended = False
        self._errors = directory / f"{name}.stderr"
        with self._errors.open("ab") as errors:
            self.process = host.start(
                [sys.executable, str(MEMBER), name],
                env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        assert self.process.stdout is not None
        output, self.process.stdout = self.process.stdout, None  # the thread owns it, and closes it
        threading.Thread(
            target=self._read, args=(output,), name=f"reader of {name}", daemon=True
        ).start()

    def begin(self, verb: str, /, **arguments: Any) -> Command:
        """Send a command to the program; `result` of the returned object waits for its end."""
        number = next(self._numbers)
        assert self.process.stdin is not None
        line = json.dumps({"id": number, "do": verb, **arguments}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return Command(self, number)

    def do(self, verb: str, /, **arguments: Any) -> Any:
        """Send a command to the program and return its result."""
        return self.begin(verb, **arguments).result()

    def request(self, cluster: str, payload: str, timeout: float = PATIENCE_S, **more: Any) -> str:
        """Return the reply to a request."""
        reply: str = self.do("request", cluster=cluster, payload=payload, timeout=timeout, **more)
        return reply

    def received(self, what: str, count: int) -> list[Any]:
        """Return the received messages of one kind when there are `count`, or those after `PATIENCE_S`."""
        items: list[Any] = self.do("received", what=what, count=count, timeout=PATIENCE_S * 0.8)
        return items

    def sees_members(self, count: int, cluster: str = "echo") -> None:
        """Return when its relay knows exactly `count` members."""
        there = self.do("watch_members", cluster=cluster, count=count, timeout=PATIENCE_S * 0.8)
        assert there == count, f"{self.name} sees {there} members of {cluster}, not {count}"

    def reaches(self, topic: str, *subscribers: Program) -> None:
        """Publish probes until each of `subscribers` has received one: other relays learn of a subscription a little
        later than its own relay."""
        waiting = list(subscribers)

        def all_received() -> bool:
            self.do("publish", topic=topic, first=-1, count=1)
            waiting[:] = [
                s for s in waiting if not s.do("received", what="probe", count=1, timeout=0.05)
            ]
            return not waiting

        wait_until(all_received, f"what is published to {topic} reaches all")

    def event(self, name: str, count: int = 1) -> dict[str, Any]:
        """Return the latest event of this name when there are `count` of them."""

        def found() -> list[dict[str, Any]]:
            return [event for event in self.events if event["event"] == name]

        self.wait(lambda: len(found()) >= count, f"event {name!r} x {count}")
        return found()[-1]

    def wait(self, true: Callable[[], object], what: str) -> None:
        """Return when `true()` is true. Fails if the program ends before, or after `PATIENCE_S`."""
        with self._changed:
            happened = self._changed.wait_for(lambda: self._ended or true(), PATIENCE_S)
        assert happened, f"{self.name}: it did not happen in {PATIENCE_S:g} s: {what}"
        assert true(), f"{self.name} ended before {what}: {self._errors.read_text()[-2000:]}"

    def kill(self) -> None:
        """Kill the program without a goodbye."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def freeze(self) -> None:
        """Freeze the process."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def leave(self) -> int:
        """Let the program end by itself, and return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def _read(self, output: IO[bytes]) -> None:
        try:
            with output:
                for line in output:
                    document = json.loads(line)
                    with self._changed:
                        if "id" in document:
                            self.answers[document["id"]] = document
                        else:
                            self.events.append(document)
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
