"""The simulated hosts: packets arrive, a cable can be disconnected, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts.kit import PATIENCE_S, wait_until
from support.namespaces import Host, Lan, ip, namespaces
from support.proxy import FaultProxy

pytestmark = pytest.mark.timeout(60)
TESTS = Path(__file__).parents[1]
GROUP4, GROUP6, PORT = "239.77.0.1", "ff02::77", 7777


def hears(host: Host, interface: str, *, ipv6: bool) -> socket.socket:
    """Return a socket of `host` that receives multicast of the group."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM)
        number = socket.if_nametoindex(interface)
        if ipv6:
            joined = socket.inet_pton(socket.AF_INET6, GROUP6) + struct.pack("@I", number)
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, joined)
        else:
            joined = socket.inet_aton(GROUP4) + bytes(4) + struct.pack("@i", number)
            made.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
        made.bind(("", PORT))
        made.settimeout(PATIENCE_S)
        return made

    return host.inside(make)


def says(host: Host, interface: str, text: bytes, *, ipv6: bool) -> None:
    """Send a multicast packet to the group from `host`."""

    def send() -> None:
        with socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as made:
            number = socket.if_nametoindex(interface)
            if ipv6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, number)
                made.sendto(text, (GROUP6, PORT))
            else:
                chosen = struct.pack("@4s4si", bytes(4), bytes(4), number)
                made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, chosen)
                made.sendto(text, (GROUP4, PORT))

    host.inside(send)


@pytest.mark.parametrize("ipv6", [False, True])
def test_multicast_reaches_the_other_hosts_of_a_switch_and_no_others(ipv6: bool, lan: Lan) -> None:
    a, b, c = (lan.host(name) for name in "abc")
    a.plug(), b.plug(), c.plug("elsewhere")
    with hears(b, "eth0", ipv6=ipv6) as near, hears(c, "eth0", ipv6=ipv6) as far:
        says(a, "eth0", b"hello", ipv6=ipv6)
        assert near.recv(100) == b"hello"
        says(c, "eth0", b"myself", ipv6=ipv6)
        assert far.recv(100) == b"myself", "the other switch passed something on"


def test_nothing_passes_a_cable_that_is_pulled_until_it_is_put_back(lan: Lan) -> None:
    a, b = lan.host("a"), lan.host("b")
    nic, _ = a.plug(), b.plug()
    with hears(b, "eth0", ipv6=False) as hearing:
        for hurt, mend in ((nic.cut, nic.heal), (nic.down, nic.up)):
            before = b.nics["eth0"].traffic()
            hurt()
            wait_until(
                lambda: "UP" not in ip("-n", a.namespace, "-br", "link").split(), "it is down"
            )
            try:
                says(a, "eth0", b"lost", ipv6=False)
            except OSError:
                assert hurt == nic.down  # a host whose interface is off cannot send
            mend()
            wait_until(lambda: "UP" in ip("-n", a.namespace, "-br", "link").split(), "it is up")
            says(a, "eth0", b"arrives", ipv6=False)
            assert hearing.recv(100) == b"arrives"
            assert b.nics["eth0"].traffic().received_packets > before.received_packets


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "shown"),
    [
        (True, "off", {"10.77.1.1"}),
        (False, "full", {"fd77:1::1", "fe80"}),
        (False, "link-local", {"fe80"}),
        (True, "full", {"10.77.1.1", "fd77:1::1", "fe80"}),
    ],
)
def test_an_interface_has_the_addresses_that_were_asked_for(
    ipv4: bool, ipv6: str, shown: set[str], lan: Lan
) -> None:
    host = lan.host("a")
    nic = host.plug(ipv4=ipv4, ipv6=ipv6)  # type: ignore[arg-type]  # one of the three words

    def addresses() -> set[str]:
        words = ip("-n", host.namespace, "-br", "address", "show", "dev", "eth0").split()[2:]
        return {word.split("/")[0] if "fe80" not in word else "fe80" for word in words}

    assert addresses() == shown
    nic.down()
    nic.up()
    assert addresses() == shown


def test_a_process_runs_on_its_host_under_the_id_that_popen_knows(lan: Lan) -> None:
    host = lan.host("a")
    host.plug()
    process = host.start(
        ["sh", "-c", "echo $$ $(ls /sys/class/net)"], env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE
    )  # fmt: skip
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out.split() == [str(process.pid).encode(), b"eth0", b"lo"]


# -- what is left --------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, pytest
sys.path.insert(0, {tests!r})
from support.namespaces import Lan

def build(lan):
    for name in "ab":
        host = lan.host(name)
        host.plug()
        host.start(["sleep", "600"], env=os.environ)
        (process,) = host._processes
        print()  # what pytest is writing ends
        print(process.pid, flush=True)
    print(lan.prefix, flush=True)
"""


@contextmanager
def run(script: str, path: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that creates hosts, and kill it at the end of the block."""
    path.write_text(SCRIPT.format(tests=str(TESTS)) + textwrap.dedent(script))
    command = (sys.executable, *command, str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def built(process: subprocess.Popen[bytes]) -> tuple[list[int], str]:
    """Return the process ids and the prefix printed by the program."""
    assert process.stdout is not None
    lines: list[str] = []
    while len(lines) < 3:
        line = process.stdout.readline().decode()
        assert line, "it ended early"
        if line.strip().isdigit() or line.startswith("iris-"):
            lines.append(line.strip())
    return [int(line) for line in lines[:2]], lines[2]


def command_of(pid: int) -> str:
    """Return the name of a process's command, or "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def left(pids: list[int], prefix: str) -> list[str]:
    """Return what is left of a program: its processes and its namespaces."""
    return [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()] + [
        name for name in namespaces() if name.startswith(prefix)
    ]


def test_nothing_is_left_after_a_test_that_failed(tmp_path: Path) -> None:
    script = """
    @pytest.fixture
    def lan():
        with Lan() as lan:
            yield lan

    def test_fails(lan):
        build(lan)
        assert False
    """
    command = (
        "-m",
        "pytest",
        "-s",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    )
    with run(script, tmp_path / "test_it.py", *command) as process:
        pids, prefix = built(process)
        assert process.stdout is not None
        process.stdout.read()
        assert process.wait(PATIENCE_S) == 1
    assert left(pids, prefix) == []


def test_nothing_is_left_after_an_interrupt(tmp_path: Path) -> None:
    # If tests run in the background, SIGINT is ignored, and children inherit this.
    script = """
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Lan() as lan:
        build(lan)
        time.sleep(600)
    """
    with run(script, tmp_path / "it.py") as process:
        pids, prefix = built(process)
        assert len(left(pids, prefix)) == 5
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
    assert left(pids, prefix) == []


def test_the_processes_of_a_run_that_was_killed_die_with_it_and_the_next_run_removes_the_rest(
    tmp_path: Path,
) -> None:
    script = """
    import time
    with Lan() as lan:
        build(lan)
        time.sleep(600)
    """
    with run(script, tmp_path / "it.py") as process:
        pids, prefix = built(process)
        # Before, they may not have requested to die with their parent.
        wait_until(lambda: {command_of(pid) for pid in pids} == {"sleep"}, "they run")
        process.kill()
        process.wait(PATIENCE_S)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its processes end")
    with Lan():
        assert left(pids, prefix) == []


def test_the_machines_own_interfaces_stay_as_they_are() -> None:
    before = ip("-br", "address")
    with Lan() as lan:
        for name in "abc":
            lan.host(name).plug()
        assert ip("-br", "address") == before
    assert ip("-br", "address") == before


# -- the proxy -----------------------------------------------------------------------------------------------------


def test_a_proxy_between_two_hosts_delays_stalls_and_cuts_what_passes(lan: Lan) -> None:
    """The proxy is between two switches without another connection."""
    a, middle, b = lan.host("a"), lan.host("middle"), lan.host("b")
    a.plug("left"), middle.plug("left"), middle.plug("right"), b.plug("right")

    def listen(host: Host, port: int) -> socket.socket:
        def make() -> socket.socket:
            return socket.create_server(("", port))

        return host.inside(make)

    def dial() -> tuple[socket.socket, tuple[str, int]]:
        return middle.inside(socket.socket), (b.nics["eth0"].ipv4, 7000)

    def connect() -> socket.socket:
        made = a.inside(socket.socket)
        made.settimeout(PATIENCE_S)
        made.connect((middle.nics["eth0"].ipv4, 7001))
        return made

    with listen(b, 7000) as server, FaultProxy(listen(middle, 7001), dial) as proxy:
        server.settimeout(PATIENCE_S)
        proxy.loss = 0.5
        proxy.delay_s = 0.01
        with connect() as ours:
            theirs, _ = server.accept()
            with theirs:
                theirs.settimeout(PATIENCE_S)
                sent = os.urandom(300_000)
                ours.sendall(sent)
                ours.shutdown(socket.SHUT_WR)
                came = b""
                while part := theirs.recv(1 << 16):
                    came += part
                assert came == sent
                proxy.stall()
                theirs.sendall(b"held")
                ours.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    ours.recv(100)
                ours.settimeout(PATIENCE_S)
                proxy.flow()
                assert ours.recv(100) == b"held"
        with connect() as ours:
            theirs, _ = server.accept()
            with theirs:
                wait_until(lambda: proxy.accepted == 2, "it is accepted")
                assert proxy.cut() >= 1
                for end in (ours, theirs):
                    end.settimeout(PATIENCE_S)
                    with pytest.raises(ConnectionResetError):
                        end.recv(100)
