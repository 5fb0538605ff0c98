"""Bodies of calls and orders come back as they were, and bad ones are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs

from iris.errors import ConfigError, DecodeError, InvalidName
from iris.wire import streams
from iris.wire.orders import Definition, Order, Origin, Replaced, check_definition, decode_order
from iris.wire.stream_items import Gap, Hole, Record
from iris.wire.streams import Copied, Copy

UUID = bytes(range(16))
ORIGIN = Origin(UUID, "orders", topic="orders.>")
COPY = Definition("orders-eu", max_bytes=7, mirror=UUID.hex(), origins=(ORIGIN,))


@pytest.mark.parametrize("where", ["order", "definition", "origins", "replaces"])
def test_an_order_with_a_field_that_is_not_known_is_refused_and_the_field_is_named(
    where: str,
) -> None:
    copy = structs.replace(COPY, replaces=Replaced(UUID))
    said = msgspec.msgpack.decode(streams.encode(Order("keep", UUID, UUID, bytes(32), 5, copy)))
    definition = said["definition"]
    {
        "order": said, "definition": definition, "origins": definition["origins"][0], "replaces": definition["replaces"],
    }[where]["colour"] = "blue"  # fmt: skip
    with pytest.raises(DecodeError, match="unknown field `colour`"):
        decode_order(msgspec.msgpack.encode(said))


def test_an_order_of_a_copy_comes_back_as_it_was() -> None:
    order = Order("keep", UUID, UUID, bytes(32), 5, COPY)
    assert decode_order(streams.encode(order)) == order
    assert hash(order.definition) == hash(COPY)
    check_definition(COPY)


def test_key_hashes_are_made_with_the_first_log_of_a_line_of_copies() -> None:
    again = Origin(bytes(16), "orders-eu")
    of_a_copy = Definition("third", mirror=again.uuid.hex(), origins=(ORIGIN, again))
    check_definition(of_a_copy)
    assert of_a_copy.key_uuid(b"z" * 16) == UUID
    assert structs.replace(of_a_copy, mirror="").key_uuid(b"z" * 16) == UUID


@pytest.mark.parametrize(
    "changes",
    [
        {"mirror": "no hex"},
        {"mirror": UUID.hex().upper()[:31]},
        {"mirror": bytes(16).hex()},
        {"origins": ()},
        {"topic": "orders.>"},
        {"cluster": "billing"},
        {"origins": (Origin(UUID, "no spaces"),)},
        {"origins": (Origin(UUID, "orders", topic="a..b"),)},
        {"origins": (Origin(UUID, "orders", cluster="*"),)},
        {"origins": (ORIGIN,) * 9},
    ],
)
def test_a_definition_of_a_copy_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, InvalidName)):
        check_definition(structs.replace(COPY, **changes))


def test_more_origins_than_are_allowed_do_not_decode() -> None:
    order = Order("keep", UUID, UUID, bytes(32), 5, structs.replace(COPY, origins=(ORIGIN,) * 9))
    with pytest.raises(DecodeError):
        decode_order(streams.encode(order))


def test_a_copy_and_its_answer_come_back_as_they_were() -> None:
    record = Record(3, 0x4C, "orders", UUID, UUID, bytes(24), b"sealed", 5, b"k" * 32, True, 6, 7)
    call = Copy(UUID, 1, 4, [Hole(1, 2, 1), Gap(2, None, "why", 5), record], 9)
    assert streams.decode_call(streams.encode(call)) == call
    for answer in (Copied(4, True), Copied(0)):
        assert streams.decode_answer(streams.encode(answer)) == answer


@pytest.mark.parametrize(
    "changes",
    [
        {"uuid": b"short"},
        {"start": -1},
        {"next": 1 << 63},
        {"items": [[4, 1, 2]]},
        {"items": [[2, 0, None, "why", 5]] * 4097},
        {"items": [[1, 0, 300, "n", UUID, UUID, bytes(24), b"", 0]]},
        {"items": [[1, 0, 1, "n", UUID, UUID, bytes(23), b"", 0]]},
        {"items": [[1, 0, 1, "n", UUID, UUID, bytes(24), b"", 0, bytes(33)]]},
        {"items": [[1, 0, 1, "n" * 256, UUID, UUID, bytes(24), b"", 0]]},
    ],
)
def test_a_malformed_copy_does_not_decode(changes: dict[str, Any]) -> None:
    body = {"op": "copy", "uuid": UUID, "start": 0, "next": 1, "items": [], "high_water": 0}
    assert streams.decode_call(msgspec.msgpack.encode(body)) == Copy(UUID, 0, 1, [], 0)
    with pytest.raises(DecodeError):
        streams.decode_call(msgspec.msgpack.encode({**body, **changes}))
