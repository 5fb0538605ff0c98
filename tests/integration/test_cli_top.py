"""`iris top` in a terminal, before a real relay and services that work: what it shows, and how it leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import commands
from support.commands import Shell, command, end
from support.relays import Daemon
from support.terminal import PseudoTerminal
from support.waiting import wait_until

from iris.cli.top.terminal import ENTER, LEAVE

pytestmark = pytest.mark.timeout(120)

SHOP = r"""
import asyncio
import iris

orders = iris.Service("orders", version="2.1\x1b]0;owned\x07\x1b[31m")

@orders.on_request("place")
async def place(payload: bytes) -> bytes:
    await asyncio.sleep(0.002)
    return payload

@orders.on_request("broken")
async def broken(payload: bytes) -> bytes:
    raise ValueError("broken")
"""
LOAD = """
import asyncio, contextlib
import iris

async def main():
    async with iris.connect() as client:
        await client.streams.create("log")
        await client.streams.append("log", b"x")
        while True:
            for method in ("place", "place", "place", "broken"):
                with contextlib.suppress(iris.RequestError):
                    await client.request("orders", b"x", timeout=5, method=method)

asyncio.run(main())
"""
BROKEN = """
import sys
from iris.cli import main
from iris.cli.top import screen

def broken(*_):
    raise RuntimeError("a bug in the drawing")

screen.grid = broken
sys.argv = ["iris", "top", "--interval", "0.2"]
main()
"""


class Network:
    """A relay with a store, a service, and a program that calls it all the time."""

    def __init__(self, shell: Shell, relay: Daemon) -> None:
        self.shell, self.relay = shell, relay

    def top(self, *arguments: str, columns: int = 80, lines: int = 24, **environ: str) -> PseudoTerminal:  # fmt: skip
        line = command("top", "--interval", "0.2", *arguments)
        kept = {k: v for k, v in self.shell.environ.items() if k != "NO_COLOR"}
        return PseudoTerminal(line, {**kept, **environ}, columns, lines)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with (
        commands.short_directory("iris-top-") as root,
        Daemon(root, "--data", str(root / "data"), "--no-mdns") as relay,
    ):
        shell = Shell(root)
        (root / "shop.py").write_text(SHOP)
        (root / "load.py").write_text(LOAD)
        service = shell.start("run", "shop:orders")
        wait_until(lambda: shell.run("members", "orders").returncode == 0)
        caller = subprocess.Popen(
            [sys.executable, "load.py"], env=shell.environ, cwd=root, stderr=subprocess.PIPE
        )
        try:
            yield Network(shell, relay)
            assert caller.poll() is None, caller.communicate()
        finally:
            caller.kill()
            caller.communicate()
        service.terminate()
        end(service)
        shell.finish()
        relay.stop()


def left_as_it_was(terminal: PseudoTerminal) -> bool:
    """Return whether the terminal is usable as before, with the screen that it had."""
    end = terminal.written.rfind(LEAVE.encode())
    return (
        terminal.modes == terminal.before
        and end > terminal.written.rfind(ENTER.encode())
        and b"\x1b[" not in terminal.written[end + len(LEAVE) :]
    )


def test_members_that_work_are_shown_with_rates_and_percentiles(network: Network) -> None:
    with network.top() as terminal:
        terminal.shows("orders", "iris top", "q quit")
        row = re.compile(r"orders\s+\S+\s+iris run.*up\s+[\d,.]+\s+[\d.]+\s+[\d.]+ ms\s+[\d.]+ ms")
        terminal.until(lambda: row.search(terminal.text))
        terminal.press("7")
        terminal.shows("STREAM", "log")
        terminal.press("3")
        terminal.until(lambda: re.search(r"up +\S+ +[1-9][\d,.]* +[1-9]", terminal.text))
        terminal.press("q")
        assert terminal.ended() == 0
        assert left_as_it_was(terminal)


def test_the_screen_follows_the_size_of_the_terminal(network: Network) -> None:
    with network.top() as terminal:
        terminal.shows("orders")
        assert "VERSION" not in terminal.text
        terminal.resize(170, 50)
        terminal.shows("VERSION", "1 members", "2.1")
        assert terminal.screen.display[49].startswith("q quit")
        terminal.resize(40, 10)
        terminal.until(lambda: terminal.screen.display[9].startswith("q quit"))
        assert terminal.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_terminal_as_it_was(network: Network, number: int) -> None:
    with network.top() as terminal:
        terminal.shows("orders")
        assert terminal.stop(number) == 0
        assert left_as_it_was(terminal)


def test_an_exception_leaves_the_terminal_as_it_was_and_is_shown(network: Network) -> None:
    with PseudoTerminal([sys.executable, "-c", BROKEN], network.shell.environ) as terminal:
        assert terminal.ended() == 1
        assert left_as_it_was(terminal)
        assert b"a bug in the drawing" in terminal.written.split(LEAVE.encode())[-1]


def test_control_z_gives_the_terminal_back_until_it_goes_on(network: Network) -> None:
    with network.top() as terminal:
        terminal.shows("orders")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(lambda: terminal.stopped() and left_as_it_was(terminal))
        terminal.go_on()
        terminal.until(lambda: terminal.written.count(ENTER.encode()) == 2)
        terminal.shows("orders", "q quit")
        assert terminal.stop(signal.SIGINT) == 0
        assert left_as_it_was(terminal)


def test_a_relay_that_goes_away_is_shown_and_comes_back(network: Network) -> None:
    with network.top("--view", "relays") as terminal:
        terminal.until(lambda: re.search(r"\n\S+ +up ", terminal.text))
        network.relay.stop(signal.SIGKILL)
        terminal.shows("away", "1 away")
        network.relay.start()
        terminal.until(lambda: re.search(r"\n\S+ +up ", terminal.text) and "away" not in terminal.text)  # fmt: skip
        terminal.press("1")
        terminal.shows("orders", "iris run")
        assert terminal.stop(signal.SIGINT) == 0
        assert left_as_it_was(terminal)


def test_names_cannot_write_escapes_to_the_terminal(network: Network) -> None:
    with network.top(columns=200) as terminal:
        terminal.shows("2.1?]0;owned?")
        assert terminal.stop(signal.SIGINT) == 0
        assert b"\x1b]0;" not in terminal.written
        assert b"\x07" not in terminal.written
        assert terminal.screen.title == ""


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_there_are_no_colours_where_they_are_not_wanted(
    network: Network, environ: dict[str, str]
) -> None:
    with network.top(**environ) as terminal:
        terminal.shows("orders", "up")
        assert terminal.stop(signal.SIGINT) == 0
        assert bool(re.search(rb"\x1b\[3\dm", terminal.written)) == (not environ)


def test_filters_and_sorting_work_by_keys(network: Network) -> None:
    with network.top() as terminal:
        terminal.shows("orders")
        terminal.press("/nothing-has-this")
        terminal.shows("no row has this text", "/nothing-has-this")
        terminal.press("\x1b")
        terminal.shows("orders")
        terminal.press("s")
        terminal.shows("HOST▲")
        terminal.press("r")
        terminal.shows("HOST▼")
        terminal.press("?")
        terminal.shows("choose a view")
        terminal.press("q")
        assert terminal.ended() == 0


def test_one_look_is_text_or_json(network: Network) -> None:
    text = network.shell.process("top", "--once", "--interval", "0.3").decode()
    for word in ("iris top", "members\n", "orders", "relays\n", "streams\n", "log"):
        assert word in text, word
    assert "\x1b" not in text
    found = json.loads(network.shell.process("top", "--once", "--json", "--interval", "0.3"))
    assert found["relays"][0]["in_rate"] > 0
    assert [each["name"] for each in found["streams"]] == ["log"]
    assert "log" not in network.shell.process("top", "--once", "--filter", "orders").decode()


def test_json_is_a_line_for_each_look_until_it_is_stopped(network: Network) -> None:
    process = network.shell.start("top", "--json", "--interval", "0.2")
    assert process.stdout is not None
    serials = [json.loads(process.stdout.readline())["serial"] for _ in range(3)]
    assert serials == [1, 2, 3]
    process.send_signal(signal.SIGTERM)
    end(process)


def test_the_live_view_needs_a_terminal_and_says_what_else_there_is(network: Network) -> None:
    done = network.shell.run("top")
    assert done.returncode == 2
    assert b"add --once for text, or --json for programs" in done.stderr
    wrong = network.shell.run("top", "--view", "nodes")
    assert wrong.returncode == 2
    assert b"'nodes' is not a view; use members, clusters," in wrong.stderr
