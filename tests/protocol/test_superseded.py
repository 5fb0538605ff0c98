"""A log whose place another one has taken is read and deleted by its uuid, and is not served otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol.stores import (
    KEY,
    NAME,
    NOW_US,
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
from iris.wire.orders import (
    ANY_REVISION,
    END,
    KEEP,
    Definition,
    Order,
    Origin,
    Replaced,
    SignedOrder,
)

MADE, OTHER_UUID = b"m" * 16, founded(KEY, b"o" * 16)


def signed(action: str, uuid: bytes, store: StoreKey, definition: Definition) -> SignedOrder:
    said = streams.encode(
        Order(action, uuid, KEY.key_id, store.public_key, NOW_US, definition, revision=1)
    )
    return SignedOrder(said, KEY.public_key, KEY.sign_order(said))


def supersede(relay: Relay) -> None:
    """Show the store that a copy has taken the place of its stream."""
    definition = Definition(
        NAME, origins=(Origin(UUID, NAME),), replaces=Replaced(UUID, ANY_REVISION, 3, "copy")
    )
    call = streams.Supersede([signed(KEEP, MADE, StoreKey(b"s" * 32), definition)])
    answer = relay.ask(Caller(KEY), call, name=UUID.hex())
    assert isinstance(answer, streams.Described), answer


def refused(relay: Relay, call: Any, name: str = UUID.hex()) -> streams.Refused:
    answer = relay.ask(Caller(KEY), call, name=name)
    assert isinstance(answer, streams.Refused), answer
    return answer


def fetch(relay: Relay, wait_ms: int = 0) -> Any:
    return relay.ask(Caller(KEY), streams.Fetch(0, 1 << 20, wait_ms), name=UUID.hex())


def test_a_superseded_log_is_read_once_and_not_written_or_followed(relay: Relay) -> None:
    caller = Caller(KEY)
    waiting = relay.send(caller, streams.Fetch(3, 1 << 20, 60_000), name=UUID.hex())
    relay.run(caller)
    supersede(relay)
    relay.run(caller)
    for answer in (
        waiting.got,
        refused(relay, append(3)),
        refused(relay, streams.Fetch(0, 1 << 20, 1)),
        refused(relay, consumers.Consume("billing", b"w" * 16, 1 << 20, 1)),
        refused(relay, streams.Change([order()])),
    ):
        assert answer.code == "superseded"
        assert f"was superseded by log {MADE.hex()}" in answer.detail
    assert "another store serves" in refused(relay, streams.Describe(), NAME).detail
    described = relay.ask(Caller(KEY), streams.Describe(), name=UUID.hex())
    assert f"was superseded by log {MADE.hex()}" in described.failed
    assert described.readable
    assert fetch(relay).next == 3
    (stream,) = relay.store.streams.values()
    assert not stream.recording_ids


def test_it_stays_superseded_when_its_store_starts_again_until_an_order_deletes_it(
    relay: Relay, tmp_path: Path
) -> None:
    supersede(relay)
    relay.store.close()
    store = open_store(tmp_path)
    try:
        relay = Relay(store)
        assert "was superseded by" in refused(relay, append(3)).detail
        assert fetch(relay).next == 3
        # The name is free, also here.
        made = order(uuid=OTHER_UUID)
        described = relay.ask(Caller(KEY), creation(made), key=None, name=store.address)
        assert isinstance(described, streams.Described), described
        assert relay.ask(Caller(KEY), streams.Describe()).uuid == OTHER_UUID
        delete = streams.Delete([signed(END, UUID, STORE_KEY, Definition(NAME))])
        assert isinstance(relay.ask(Caller(KEY), delete, name=UUID.hex()), streams.Settled)
        assert [path.name for path in (tmp_path / "streams").glob(f"{UUID.hex()}*")] == [
            f"{UUID.hex()}.ended"
        ]
        assert relay.ask(Caller(KEY), streams.Describe()).uuid == OTHER_UUID
    finally:
        store.close()
