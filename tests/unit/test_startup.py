"""When a relay that starts admits sessions, and what it writes down for the next one."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relay import startup
from relay.startup import StartupGate
from relay.supervisor import COMPLETE_FILE, STREAMS, StoreSupervisor

RELAY = bytes(range(16))
FILE = "relay.sock.links"


class Clock:
    """The monotonic clock of `relay.startup`. It stands still, so a busy host cannot let a limit pass unnoticed."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(startup, "time", clock)
    return clock


class Host:
    """A startup gate with a stub of its hub and router; `opened` is set once sessions are read."""

    def __init__(self, directory: Path, *, data: bool = False) -> None:
        self.directory = directory
        self.links: dict[bytes, Any] = {}
        self.wans: dict[bytes, Any] = {}
        self.stores = SimpleNamespace(own_store_is_up=False, own_store_failed=False)
        self.alone, self.relay_id = True, RELAY
        self.held: list[object] | None = None
        self.opened = asyncio.Event()
        self.awaited = 0
        store = StoreSupervisor(directory, directory / "x", "INFO", "json") if data else None
        socket_path = directory / "relay.sock"
        self.gate = StartupGate(self, self, store, socket_path, self.opened.set)  # type: ignore[arg-type]

    def release(self) -> None:
        self.held = None

    def wait_for_links(self, count: int, now_us: int) -> None:
        self.awaited = count

    def link(self, *, known: bool = True) -> None:
        self.alone = False
        self.links[bytes([len(self.links)])] = SimpleNamespace(replica=SimpleNamespace(known=known))
        self.gate.links_changed()

    @property
    def written(self) -> dict[str, object] | None:
        path = self.directory / FILE
        return json.loads(path.read_text()) if path.exists() else None


async def test_nobody_waits_where_nothing_was_and_nothing_is_kept(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.gate.unread
    host.gate.start(linked=True)
    assert host.opened.is_set()
    assert host.held is None
    assert not host.gate.unread
    assert host.written is None


async def test_links_of_the_relay_before_are_waited_for_and_those_of_now_are_kept(
    tmp_path: Path,
) -> None:
    first = Host(tmp_path)
    first.gate.start(linked=True)
    first.link()
    first.link()
    assert first.written == {"links": 2, "relay": ""}
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    first.gate.freeze()
    first.links.clear()
    first.gate.links_changed()  # the links end because the relay stops
    assert first.written == {"links": 2, "relay": ""}

    second = Host(tmp_path)
    second.gate.start(linked=True)
    assert second.held == []
    second.link()
    second.link(known=False)
    await asyncio.sleep(3 * startup.LOOK_S)
    assert not second.opened.is_set()
    assert second.written == {
        "links": 2,
        "relay": "",
    }  # for the next relay, if this one is killed now
    second.links[b"\x01"].replica.known = True
    async with asyncio.timeout(10):
        await second.opened.wait()
    assert second.held is None
    second.links.clear()
    second.gate.links_changed()
    assert second.written is None


@pytest.mark.parametrize("left", ["", RELAY.hex()])
async def test_what_does_not_come_back_is_not_waited_for_any_longer(
    tmp_path: Path, clock: Clock, left: str
) -> None:
    limit_s = (
        startup.WORD_S if left else startup.BACK_S
    )  # only a store that was closed well left its relay's id
    (tmp_path / FILE).write_text(json.dumps({"links": 3, "relay": left}))
    (tmp_path / STREAMS / "one").mkdir(parents=True)
    (tmp_path / COMPLETE_FILE).write_text(json.dumps({"relay": left, "streams": {}}))
    host = Host(tmp_path, data=True)
    host.gate.start(linked=True)
    clock.now_s += limit_s - 0.001
    await asyncio.sleep(3 * startup.LOOK_S)
    assert host.held == []
    clock.now_s += 0.002
    async with asyncio.timeout(10):
        await host.opened.wait()
    assert host.held is None
    # The store will miss messages that are published from now on.
    assert not (tmp_path / COMPLETE_FILE).exists()
    assert host.written == {"links": 0, "relay": RELAY.hex()}
    assert host.awaited == 3  # losses of publications are reported to these relays when they return


async def test_a_store_that_somebody_has_to_mend_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / STREAMS / "one").mkdir(parents=True)
    (tmp_path / COMPLETE_FILE).write_text(json.dumps({"relay": "", "streams": {}}))
    host = Host(tmp_path, data=True)
    host.gate.start(linked=True)
    assert host.held == []
    host.stores.own_store_failed = True
    async with asyncio.timeout(10):  # the clock stands still, so no limit is reached
        await host.opened.wait()
    assert not (tmp_path / COMPLETE_FILE).exists()


async def test_a_relay_that_stops_before_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / STREAMS / "one").mkdir(parents=True)
    host = Host(tmp_path, data=True)
    host.gate.start(linked=False)
    assert host.gate.unread
    host.gate.freeze()
    host.stores.own_store_is_up = True
    await asyncio.sleep(3 * startup.LOOK_S)
    assert not host.opened.is_set()
    assert host.gate.unread
    assert host.written is None
    host.alone = False  # messages may have been published elsewhere that its streams should hold
    assert not host.gate.unread


@pytest.mark.parametrize(
    ("relay", "stays"),
    [
        (None, True),
        (RELAY.hex(), True),
        (bytes(16).hex(), False),
        (3, False),
    ],
)
async def test_what_a_store_left_counts_if_no_other_relay_was_there_since(
    tmp_path: Path, relay: str | int | None, stays: bool
) -> None:
    (tmp_path / COMPLETE_FILE).write_text(json.dumps({"relay": RELAY.hex(), "streams": {}}))
    if relay is not None:
        (tmp_path / FILE).write_text(json.dumps({"links": 0, "relay": relay}))
    Host(tmp_path, data=True).gate.start(linked=False)
    assert (tmp_path / COMPLETE_FILE).exists() == stays


async def test_a_relay_without_a_store_says_that_it_was_there_to_who_had_one(
    tmp_path: Path,
) -> None:
    (tmp_path / FILE).write_text(json.dumps({"links": 0, "relay": bytes(16).hex()}))
    host = Host(tmp_path)
    host.gate.start(linked=False)
    assert host.written == {"links": 0, "relay": RELAY.hex()}


@pytest.mark.parametrize(
    "text", ["", "2\n", "[]", "{}", '{"links": -1, "relay": ""}', '{"links": "2", "relay": 3}', "\x00" * 999],
)  # fmt: skip
async def test_a_file_that_says_nothing_is_not_a_reason_to_wait(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    host = Host(tmp_path)
    host.gate.start(linked=True)
    assert host.opened.is_set()
