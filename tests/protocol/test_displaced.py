"""A log whose place another one has taken is read and deleted by its uuid, and is not served otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from protocol.stores import (
    KEY,
    NAME,
    NOW_US,
    OTHER,
    STORE_KEY,
    UUID,
    Caller,
    Relay,
    append,
    open_store,
    order,
)
from support.founded import creation, founded

from iris.crypto.keys import StoreKey
from iris.wire import consumers, streams
from iris.wire.orders import END, KEEP, MOVE, Definition, Order, SignedOrder
from relay.store.bucket.sealing import Forced

MADE, OTHER_UUID = b"m" * 16, founded(KEY, b"o" * 16)
ENTRY = Forced(UUID, MADE, StoreKey(b"s" * 32).public_key, "db-2", NOW_US, [], bytes(16))


def refused(relay: Relay, call: Any, name: str = UUID.hex()) -> streams.Refused:
    answer = relay.ask(Caller(KEY), call, name=name)
    assert isinstance(answer, streams.Refused), answer
    return answer


def fetch(relay: Relay, wait_ms: int = 0) -> Any:
    return relay.ask(Caller(KEY), streams.Fetch(0, 1 << 20, wait_ms), name=UUID.hex())


def test_a_displaced_log_is_read_once_and_not_written_or_followed(relay: Relay) -> None:
    caller = Caller(KEY)
    waiting = relay.send(caller, streams.Fetch(3, 1 << 20, 60_000), name=UUID.hex())
    relay.run(caller)
    relay.store.catalogue.displace(ENTRY)
    relay.run(caller)
    for answer in (
        waiting.got,
        refused(relay, append(3)),
        refused(relay, streams.Fetch(0, 1 << 20, 1)),
        refused(relay, consumers.Consume("billing", b"w" * 16, 1 << 20, 1)),
        refused(relay, streams.Change([order()])),
    ):
        assert answer.code == "leaving"
        assert f"db-2 has log {MADE.hex()} in its place" in answer.detail
    assert "another store serves" in refused(relay, streams.Describe(), NAME).detail
    described = relay.ask(Caller(KEY), streams.Describe(), name=UUID.hex())
    assert f"log {MADE.hex()} in its place" in described.failed
    assert described.readable
    assert fetch(relay).next == 3
    (stream,) = relay.store.streams.values()
    assert not stream.recording_ids
    relay.store.catalogue.displace(ENTRY)  # again, which changes nothing


def test_it_stays_displaced_when_its_store_starts_again_until_an_order_deletes_it(
    relay: Relay, tmp_path: Path
) -> None:
    relay.store.catalogue.displace(ENTRY)
    relay.store.close()
    store = open_store(tmp_path)
    try:
        relay = Relay(store)
        assert "in its place" in refused(relay, append(3)).detail
        assert fetch(relay).next == 3
        # The name is free, also here.
        made = order(uuid=OTHER_UUID)
        described = relay.ask(Caller(KEY), creation(made), key=None, name=store.address)
        assert isinstance(described, streams.Described), described
        assert relay.ask(Caller(KEY), streams.Describe()).uuid == OTHER_UUID
        definition = Definition(NAME)
        end = streams.encode(
            Order(END, UUID, KEY.key_id, STORE_KEY.public_key, NOW_US, definition, revision=1)
        )
        delete = streams.Delete([SignedOrder(end, KEY.public_key, KEY.sign_order(end))])
        assert isinstance(relay.ask(Caller(KEY), delete, name=UUID.hex()), streams.Settled)
        assert [path.name for path in (tmp_path / "streams").glob(f"{UUID.hex()}*")] == [
            f"{UUID.hex()}.ended"
        ]
        assert relay.ask(Caller(KEY), streams.Describe()).uuid == OTHER_UUID
    finally:
        store.close()


def test_a_mark_that_cannot_be_read_displaces_the_log_too(relay: Relay, tmp_path: Path) -> None:
    relay.store.close()
    (tmp_path / "streams" / f"{UUID.hex()}.forced").write_bytes(b"{")
    store = open_store(tmp_path)
    try:
        assert "cannot be read" in refused(Relay(store), append(3)).detail
    finally:
        store.close()


def signed(action: str, uuid: bytes, store: bytes, issued_us: int = NOW_US) -> SignedOrder:
    said = streams.encode(Order(action, uuid, KEY.key_id, store, issued_us, Definition(NAME)))
    return SignedOrder(said, KEY.public_key, KEY.sign_order(said))


@pytest.mark.parametrize(
    ("one", "own", "text"),
    [
        (signed(MOVE, streams.NO_LOG, STORE_KEY.public_key), True, "this store has no bucket"),
        (signed(MOVE, streams.NO_LOG, STORE_KEY.public_key), False, "addressed to the store"),
    ],
)
def test_a_store_without_a_bucket_says_so_and_is_asked_itself(
    relay: Relay, one: SignedOrder, own: bool, text: str
) -> None:
    name = relay.store.address if own else NAME
    for call in (streams.FindLost([one]), streams.Force([one], [one], bytes(16))):
        answer = relay.ask(Caller(KEY), call, key=None if own else KEY, name=name)
        assert isinstance(answer, streams.Refused)
        assert text in answer.detail
    info = relay.ask(Caller(OTHER), streams.FindStore(), key=None, name=relay.store.address)
    assert not info.forces


class Forcer:
    """Answers with nothing."""

    asked = 0

    def find(self, name: str, key_ids: Any, done: Any) -> None:
        self.asked += 1
        done([])

    def force(self, wish: Any, done: Any) -> None:
        raise AssertionError("not asked")


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (signed(MOVE, streams.NO_LOG, b"x" * 32), "for another store"),
        (signed(MOVE, streams.NO_LOG, STORE_KEY.public_key, NOW_US - 10**9), "before the time"),
        (signed(MOVE, UUID, STORE_KEY.public_key), "another key, log or action"),
        (signed(KEEP, streams.NO_LOG, STORE_KEY.public_key), "another key, log or action"),
    ],
)
def test_who_asks_for_lost_streams_signs_that_for_this_store_now(
    relay: Relay, one: SignedOrder, text: str
) -> None:
    forcer = relay.store.calls.forced.forcer = Forcer()
    answer = relay.ask(Caller(KEY), streams.FindLost([one]), key=None, name=relay.store.address)
    assert isinstance(answer, streams.Refused)
    assert text in answer.detail
    fresh = signed(MOVE, streams.NO_LOG, STORE_KEY.public_key)
    assert not forcer.asked
    found = relay.ask(Caller(KEY), streams.FindLost([fresh]), key=None, name=relay.store.address)
    assert found == streams.LostStreams([])
