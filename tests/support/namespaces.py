"""Hosts as network namespaces, and switches as bridges: real interfaces and real multicast on one kernel.

    with Lan() as lan:
        a, b = lan.host("a"), lan.host("b")
        a.plug(), b.plug()
        process = a.start(["iris", "relay"], env=…)
        b.nics["eth0"].cut()

The bridges are in a separate namespace, so the machine's interfaces are never touched. All hosts share the files, so
two hosts see the same path, also that of a Unix socket. When the block ends, for whatever reason, no process and no
namespace of it is left. When this process is killed, its child processes die with it, and the next `Lan` removes
the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from support import warm

PREFIX = "iris"
"""A namespace is called `iris-<process id>-<number of the Lan>-<name>`."""
NETNS = Path("/run/netns")
ETC = Path("/etc/netns")
"""Files of a namespace's own /etc, which `ip netns exec` lays over the machine's."""
COMMANDS = {"ip": "iproute2", "bridge": "iproute2", "setpriv": "util-linux"}
"""The commands that are run: name -> Debian package."""
WIRES = "wires"
"""The namespace of the bridges."""
END_S = 10.0
"""Limit for each step of a clean-up."""
CLONE_NEWNET = 0x40000000

IPv6 = Literal["full", "link-local", "off"]
"""The IPv6 addresses of an interface: routable and link-local; link-local only; none."""

T = TypeVar("T")
_lans = itertools.count()


class NamespaceError(Exception):
    """A command of `ip` failed; the text is its error output."""


def ip(*arguments: str, batch: str = "") -> str:
    """Run `ip` and return its output. `batch`: commands for `ip -batch`, one a line. Raises NamespaceError."""
    command = ["ip", *arguments, *(["-batch", "-"] if batch else [])]
    done = subprocess.run(command, input=batch, capture_output=True, text=True, timeout=END_S)
    if done.returncode:
        raise NamespaceError(f"{' '.join(command)} {batch!r}: {done.stderr.strip()}")
    return done.stdout


@cache
def why_not() -> str:
    """Return why this process cannot build hosts, or an empty text if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command, package in COMMANDS.items():
        if shutil.which(command) is None:
            return f"{command} is not installed (package {package})"
    try:
        with Lan() as lan:
            lan.host("a").plug()
    except NamespaceError as err:
        return f"this kernel or container allows no network namespaces: {err}"
    return ""


class Lan:
    """Hosts and switches that are separate from those of any other `Lan`. A context manager."""

    def __init__(self) -> None:
        remove_abandoned()
        self.prefix = f"{PREFIX}-{os.getpid()}-{next(_lans)}-"
        self.hosts: dict[str, Host] = {}
        self._switches: list[str] = []
        self._namespaces: list[str] = []
        try:
            self.wires = self.namespace(WIRES)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()

    def namespace(self, name: str) -> str:
        """Create a namespace with a loopback interface; return its name for `ip`."""
        full = self.prefix + name
        self._namespaces.append(
            full
        )  # before it is created, in case of an interrupt right afterwards
        ip("netns", "add", full)
        ip("-n", full, "link", "set", "lo", "up")
        # Switch off duplicate address detection, which takes a second: every address here is unique.
        for scope in ("all", "default"):
            inside(full, partial(_ipv6_setting, scope, "accept_dad", "0"))
        return full

    def host(self, name: str) -> Host:
        """Create a host without a connection to a switch."""
        number = len(self.hosts) + 1
        host = self.hosts[name] = Host(self, name, number, self.namespace(name))
        return host

    def switch(self, name: str) -> int:
        """Create the switch `name` unless it exists; return its number, which is part of the addresses on it."""
        if name not in self._switches:
            self._switches.append(name)
            # Without snooping, multicast goes to every port, as on a simple switch.
            commands = f"link add {name} type bridge mcast_snooping 0\nlink set {name} up\n"
            ip("-n", self.wires, batch=commands)
        return self._switches.index(name) + 1

    def close(self) -> None:
        """Kill every process and remove every namespace. Idempotent."""
        for host in self.hosts.values():
            host.kill_all()
        while self._namespaces:
            remove(self._namespaces[-1])
            self._namespaces.pop()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes and packets that an interface has received and sent since it was created."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int


class Host:
    """One host. Created by `Lan.host`."""

    def __init__(self, lan: Lan, name: str, number: int, namespace: str) -> None:
        self.lan = lan
        self.name = name
        self.number = number
        self.namespace = namespace
        self.nics: dict[str, Nic] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def plug(self, switch: str = "lan", *, ipv4: bool = True, ipv6: IPv6 = "full") -> Nic:
        """Connect the host to `switch` by its next interface: eth0, eth1, …"""
        network = self.lan.switch(switch)
        nic = Nic(
            self, f"eth{len(self.nics)}", f"{self.name}-{switch}",
            f"10.77.{network}.{self.number}" if ipv4 else "",
            f"fd77:{network}::{self.number}" if ipv6 == "full" else "",
            ipv6,
        )  # fmt: skip
        ip(
            "link", "add", nic.port, "netns", self.lan.wires,
            "type", "veth", "peer", "name", nic.name, "netns", self.namespace,
        )  # fmt: skip
        ip(
            "-n",
            self.lan.wires,
            batch=f"link set {nic.port} master {switch}\nlink set {nic.port} up\n",
        )
        self.nics[nic.name] = nic
        nic.up()
        return nic

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host; `streams` are those of `subprocess.Popen`.

        Its process id is the command's: each wrapper replaces itself with exec. It dies with the thread that starts it.
        If that thread is killed before the process could ask for this, the next `Lan` removes it.
        """
        wrapped = [*warm.ON_A_HOST, self.namespace, *command]
        process = warm.Popen(wrapped, env=dict(env), **streams)
        self._processes.append(process)
        return process

    def names(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Let processes that are started here resolve these names, and no others, from their own hosts file.

        A later call changes what they resolve.
        """
        lines = [f"{address} {name}" for name, given in addresses.items() for address in given]
        path = ETC / self.namespace / "hosts"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write in place: `ip netns exec` has mounted this very file over /etc/hosts of running processes.
        path.write_text("".join(f"{line}\n" for line in ["127.0.0.1 localhost", *lines]))

    def inside(self, function: Callable[[], T]) -> T:
        """Call `function` on this host and return its result. A socket that it creates stays on this host."""
        return inside(self.namespace, function)

    def kill_all(self) -> None:
        """Kill the processes on this host, and wait for their end."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait(END_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    _close(stream)
        self._processes.clear()


@dataclass(slots=True)
class Nic:
    """An interface of a host and its cable to a port of a switch."""

    host: Host
    name: str
    port: str
    ipv4: str
    ipv6: str
    family6: IPv6

    def cut(self) -> None:
        """Disconnect the cable: nothing passes any more, but the host keeps its addresses."""
        ip("-n", self.host.lan.wires, "link", "set", self.port, "down")

    def heal(self) -> None:
        """Connect the cable again."""
        ip("-n", self.host.lan.wires, "link", "set", self.port, "up")

    def down(self) -> None:
        """Switch the interface off: the host loses its IPv6 addresses and its routes."""
        ip("-n", self.host.namespace, "link", "set", self.name, "down")

    def deafen(self) -> None:
        """Stop delivering multicast to the host. Only for hosts without IPv6, which needs multicast."""
        done = subprocess.run(
            ["bridge", "-n", self.host.lan.wires, "link", "set", "dev", self.port, "mcast_flood", "off"],
            capture_output=True, text=True, timeout=END_S,
        )  # fmt: skip
        if done.returncode:
            raise NamespaceError(f"bridge: {done.stderr.strip()}")

    def up(self) -> None:
        """Switch the interface on, with its addresses. The kernel adds the link-local one."""
        off = "1" if self.family6 == "off" else "0"
        self.host.inside(lambda: _ipv6_setting(self.name, "disable_ipv6", off))
        commands = [f"link set {self.name} up"]
        if self.ipv4:
            commands.append(f"address replace {self.ipv4}/24 dev {self.name}")
        if self.ipv6:
            commands.append(f"address replace {self.ipv6}/64 dev {self.name} nodad")
        ip("-n", self.host.namespace, batch="\n".join(commands) + "\n")

    def readdress(self, ipv4: str) -> None:
        """Replace its IPv4 address."""
        ip("-n", self.host.namespace, "address", "del", f"{self.ipv4}/24", "dev", self.name)
        self.ipv4 = ipv4
        ip("-n", self.host.namespace, "address", "add", f"{ipv4}/24", "dev", self.name)

    def unplug(self) -> None:
        """Remove the interface altogether."""
        ip("-n", self.host.namespace, "link", "del", self.name)
        del self.host.nics[self.name]

    def traffic(self) -> Traffic:
        """Return its counters."""
        shown = ip("-n", self.host.namespace, "-s", "-json", "link", "show", "dev", self.name)
        counted = json.loads(shown)[0]["stats64"]
        received, sent = counted["rx"], counted["tx"]
        return Traffic(received["bytes"], received["packets"], sent["bytes"], sent["packets"])


def inside(namespace: str, function: Callable[[], T]) -> T:
    """Call `function` in a namespace and return its result; the calling thread does not change its namespace.

    The function runs in a new thread, which is in that namespace until it ends, so it cannot use the event loop.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            _enter(namespace)
            results.append(function())
        except BaseException as err:
            failures.append(err)

    thread = threading.Thread(target=run, name=f"in {namespace}")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _enter(namespace: str) -> None:
    """Move this thread to a namespace. (`os.setns` exists since Python 3.12 only.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(NETNS / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise NamespaceError(f"setns {namespace}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def _ipv6_setting(scope: str, name: str, value: str) -> None:
    path = Path(f"/proc/sys/net/ipv6/conf/{scope}/{name}")
    if path.exists():  # a kernel without IPv6 has none
        path.write_text(value)


def namespaces() -> list[str]:
    """Return all namespaces that any `Lan` on this machine has created and not removed."""
    if not NETNS.is_dir():
        return []
    return sorted(name for name in os.listdir(NETNS) if re.match(rf"{PREFIX}-\d+-\d+-", name))


def remove(namespace: str) -> None:
    """Kill all processes in a namespace of a `Lan`, and remove it. Does nothing if it does not exist."""
    if (ETC / namespace).exists():
        shutil.rmtree(ETC / namespace)
        with contextlib.suppress(OSError):  # other files are in it
            ETC.rmdir()
    if not (NETNS / namespace).exists():
        return
    # The name is ours, so only processes of `Host.start` that outlived their parent can be in the namespace.
    for pid in ip("netns", "pids", namespace).split():
        _kill(int(pid))
    ip("netns", "del", namespace)


def remove_abandoned() -> None:
    """Remove the namespaces of test processes that were killed before they removed them."""
    for namespace in namespaces():
        if not Path(f"/proc/{namespace.split('-')[1]}").exists():
            try:
                remove(namespace)
            except NamespaceError:
                if (NETNS / namespace).exists():  # else another run removed it first
                    raise


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as err:
        if err.errno != errno.ESRCH:
            raise


def _close(stream: Any) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        return  # unflushed output has no reader any more


def listener(host: Host, port: int = 0, family: int = socket.AF_INET6) -> socket.socket:
    """Return a TCP socket that listens on all addresses of `host`: IPv6 and IPv4, or only those of `family`."""

    def make() -> socket.socket:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        made.listen()
        return made

    return host.inside(make)
