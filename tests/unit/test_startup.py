"""Who is let in when a relay starts, and what it keeps for the next."""

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


class Place:
    """A startup gate with what it looks at; `open` once sessions are read."""

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
    def kept(self) -> dict[str, object] | None:
        path = self.directory / FILE
        return json.loads(path.read_text()) if path.exists() else None


async def test_nobody_waits_where_nothing_was_and_nothing_is_kept(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.gate.unread
    place.gate.start(linked=True)
    assert place.opened.is_set()
    assert place.held is None
    assert not place.gate.unread
    assert place.kept is None


async def test_links_of_the_relay_before_are_waited_for_and_those_of_now_are_kept(
    tmp_path: Path,
) -> None:
    first = Place(tmp_path)
    first.gate.start(linked=True)
    first.link()
    first.link()
    assert first.kept == {"links": 2, "relay": ""}
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    first.gate.freeze()
    first.links.clear()
    first.gate.links_changed()  # they go because the relay does
    assert first.kept == {"links": 2, "relay": ""}

    second = Place(tmp_path)
    second.gate.start(linked=True)
    assert second.held == []
    second.link()
    second.link(known=False)
    await asyncio.sleep(3 * startup.LOOK_S)
    assert not second.opened.is_set()
    assert second.kept == {"links": 2, "relay": ""}  # if it is killed now
    second.links[b"\x01"].replica.known = True
    async with asyncio.timeout(10):
        await second.opened.wait()
    assert second.held is None
    second.links.clear()
    second.gate.links_changed()
    assert second.kept is None


@pytest.mark.parametrize("left", ["", RELAY.hex()])
async def test_what_does_not_come_back_is_not_waited_for_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr(startup, "BACK_S", 0.02)
    monkeypatch.setattr(startup, "WORD_S", 0.05)
    (tmp_path / FILE).write_text(json.dumps({"links": 3, "relay": left}))
    (tmp_path / STREAMS / "one").mkdir(parents=True)
    (tmp_path / COMPLETE_FILE).write_text(json.dumps({"relay": left, "streams": {}}))
    place = Place(tmp_path, data=True)
    place.gate.start(linked=True)
    assert place.held == []
    async with asyncio.timeout(10):
        await place.opened.wait()
    assert not (
        tmp_path / COMPLETE_FILE
    ).exists()  # its store would not hear of what is published now
    assert place.kept == {"links": 0, "relay": RELAY.hex()}
    assert place.awaited == 3  # what is published from now on is told to them when they are back


async def test_a_store_that_somebody_has_to_mend_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / STREAMS / "one").mkdir(parents=True)
    (tmp_path / COMPLETE_FILE).write_text(json.dumps({"relay": "", "streams": {}}))
    place = Place(tmp_path, data=True)
    place.gate.start(linked=True)
    assert place.held == []
    place.stores.own_store_failed = True
    async with asyncio.timeout(startup.BACK_S / 2):
        await place.opened.wait()
    assert not (tmp_path / COMPLETE_FILE).exists()


async def test_a_relay_that_stops_before_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / STREAMS / "one").mkdir(parents=True)
    place = Place(tmp_path, data=True)
    place.gate.start(linked=False)
    assert place.gate.unread
    place.gate.freeze()
    place.stores.own_store_is_up = True
    await asyncio.sleep(3 * startup.LOOK_S)
    assert not place.opened.is_set()
    assert place.gate.unread
    assert place.kept is None
    place.alone = False  # what was published elsewhere may have been meant for its streams
    assert not place.gate.unread


@pytest.mark.parametrize(
    ("kept", "stays"),
    [
        (None, True),
        (RELAY.hex(), True),
        (bytes(16).hex(), False),
        (3, False),
    ],
)
async def test_what_a_store_left_counts_if_no_other_relay_was_there_since(
    tmp_path: Path, kept: str | int | None, stays: bool
) -> None:
    (tmp_path / COMPLETE_FILE).write_text(json.dumps({"relay": RELAY.hex(), "streams": {}}))
    if kept is not None:
        (tmp_path / FILE).write_text(json.dumps({"links": 0, "relay": kept}))
    Place(tmp_path, data=True).gate.start(linked=False)
    assert (tmp_path / COMPLETE_FILE).exists() == stays


async def test_a_relay_without_a_store_says_that_it_was_there_to_who_had_one(
    tmp_path: Path,
) -> None:
    (tmp_path / FILE).write_text(json.dumps({"links": 0, "relay": bytes(16).hex()}))
    place = Place(tmp_path)
    place.gate.start(linked=False)
    assert place.kept == {"links": 0, "relay": RELAY.hex()}


@pytest.mark.parametrize(
    "text", ["", "2\n", "[]", "{}", '{"links": -1, "relay": ""}', '{"links": "2", "relay": 3}', "\x00" * 999],
)  # fmt: skip
async def test_a_file_that_says_nothing_is_not_a_reason_to_wait(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    place = Place(tmp_path)
    place.gate.start(linked=True)
    assert place.opened.is_set()
