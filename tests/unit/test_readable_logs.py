"""What the library logs is readable with plain `logging`, and a failure that repeats does not hide another one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from iris.logs import Repeats, error_text, event_of, function_name, logger
from relay.logs import JsonLines, Sentences

log = logger("test.readable")


class Kept(logging.Handler):
    """Keeps the records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def fields(self) -> list[dict[str, Any]]:
        return [record.__dict__["fields"] for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    log.addHandler(handler)
    log.propagate = False
    yield handler
    log.propagate = True
    log.removeHandler(handler)


def test_a_record_is_a_sentence_for_plain_logging_and_a_constant_event_for_programs(
    kept: Kept,
) -> None:
    log.warning("client.disconnected", extra={"fields": {"reason": "the relay ended", "n": 2}})
    (record,) = kept.records
    assert logging.Formatter("%(levelname)s %(message)s").format(record) == (
        "WARNING client.disconnected: The client lost its relay: the relay ended. It looks for one again. n=2"
    )
    assert record.__dict__["event"] == event_of(record) == "client.disconnected"
    line = json.loads(JsonLines().format(record))
    assert {name: line[name] for name in ("event", "reason", "n")} == {
        "event": "client.disconnected",
        "reason": "the relay ended",
        "n": 2,
    }
    assert (
        Sentences()
        .format(record)
        .endswith(
            "WARNING client.disconnected: The client lost its relay: the relay ended. It looks for one again. n=2"
        )
    )


def test_an_event_without_a_sentence_is_shown_with_its_fields(kept: Kept) -> None:
    log.warning("odd.event", extra={"fields": {"why": "two words", "count": 3}})
    log.warning("bare.event")
    assert [record.getMessage() for record in kept.records] == [
        'odd.event why="two words" count=3',
        "bare.event",
    ]


def test_text_of_a_peer_in_a_message_cannot_add_lines(kept: Kept) -> None:
    log.warning("client.disconnected", extra={"fields": {"reason": "x\nERROR:root:forged"}})
    assert "\n" not in kept.records[0].getMessage()


def test_a_record_keeps_its_message_on_the_way_to_another_process(kept: Kept) -> None:
    log.warning("client.disconnected", extra={"fields": {"reason": "gone"}})
    (record,) = kept.records
    again = pickle.loads(pickle.dumps(record))
    assert again.getMessage() == record.getMessage()
    assert again.event == "client.disconnected"


def test_a_record_with_its_own_arguments_stays_as_it_is(kept: Kept) -> None:
    log.warning("%d of %d", 1, 2)
    assert kept.records[0].getMessage() == event_of(kept.records[0]) == "1 of 2"


async def test_each_key_is_logged_at_once_and_repeats_are_counted(kept: Kept) -> None:
    repeats = Repeats(interval_s=1000)
    for n in range(5):
        repeats.error(log, "e", "one", ValueError("x"), {"n": n})
    repeats.error(log, "e", "two", None, {"n": 5})
    repeats.warning(log, "another", "one", None, {"n": 6})
    assert kept.fields() == [{"n": 0}, {"n": 5}, {"n": 6}]
    assert [bool(record.exc_info) for record in kept.records] == [True, False, False]
    repeats.end()
    repeats.end()
    assert kept.fields()[3:] == [{"n": 4, "held_back": 4}]
    assert kept.records[3].levelno == logging.ERROR


async def test_what_was_held_back_is_logged_after_the_interval_without_a_further_event(
    kept: Kept,
) -> None:
    repeats = Repeats(interval_s=0.01)
    written = asyncio.Event()
    emit = kept.emit

    def noticed(record: logging.LogRecord) -> None:
        emit(record)
        if "held_back" in record.__dict__["fields"]:
            written.set()

    kept.emit = noticed  # type: ignore[method-assign]  # to wait for the line
    for n in range(3):
        repeats.warning(log, "e", "key", None, {"n": n})
    await written.wait()
    assert kept.fields() == [{"n": 0}, {"n": 2, "held_back": 2}]
    repeats.end()


async def test_the_table_of_keys_is_bounded_and_what_it_has_no_room_for_is_counted(
    kept: Kept,
) -> None:
    repeats = Repeats(limit=3, interval_s=1000)
    for n in range(10):
        repeats.warning(log, "e", n, None, {"n": n})
    assert len(kept.records) == 3
    repeats.end()
    assert kept.fields()[3:] == [{"n": 9, "held_back": 7}]


def test_the_name_of_a_function_is_found_behind_partials_and_objects() -> None:
    class Callable:
        def __call__(self) -> None: ...

    import functools

    assert function_name(io.StringIO.write).endswith("StringIO.write")
    assert function_name(functools.partial(json.dumps)) == "json.dumps"
    assert function_name(Callable()).endswith("test_the_name_of_a_function_is_found_behind_partials_and_objects.<locals>.Callable")  # fmt: skip
    assert function_name(json.dumps) == "json.dumps"


def test_the_text_of_an_exception_is_short_whatever_it_does() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert error_text(ValueError("x")) == "ValueError: x"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(Broken()) == "Broken: its __str__ raised RuntimeError"
    assert len(error_text(ValueError("x" * 10_000))) == 500
