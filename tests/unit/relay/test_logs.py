"""The log is one JSON object a line, and a peer cannot fill it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.log_texts import SENTENCES
from relay.logs import Journal, JsonLines, Quiet, Sentences, configure, is_journal


class Kept(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(JsonLines().format(record)))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


log = logging.getLogger("test.logs")


def test_a_line_has_the_event_and_its_fields_side_by_side(kept: Kept) -> None:
    log.warning("link.dropped", extra={"fields": {"peer": b"\x1f\x2e", "idle_s": 3.5}})
    (line,) = kept.lines
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "logger": "test.logs",
        "event": "link.dropped",
        "peer": "1f2e",
        "idle_s": 3.5,
    }


@pytest.mark.parametrize("event", SENTENCES)
def test_a_warning_says_in_json_what_happened_and_what_to_do(kept: Kept, event: str) -> None:
    texts = SENTENCES[event]
    for text in (texts,) if isinstance(texts, str) else texts:
        fields = {name: "x1" for _, name, _, _ in Formatter().parse(text) if name}
        log.warning(event, extra={"fields": fields})
        log.error(event, extra={"fields": fields})
        log.info(event, extra={"fields": fields})
    for line in kept.lines:
        if line["level"] == "INFO":
            assert "message" not in line
        else:
            assert line["message"].endswith((".", "…"))
            assert "{" not in line["message"]
    levels = [line["level"] for line in kept.lines]
    assert levels.count("WARNING") == levels.count("ERROR") == (1 if isinstance(texts, str) else len(texts))  # fmt: skip


def test_a_field_cannot_hide_the_event_or_the_level(kept: Kept) -> None:
    log.warning("odd", extra={"fields": {"event": "even", "level": 1}})
    (line,) = kept.lines
    assert (line["event"], line["event_"], line["level"], line["level_"]) == (
        "odd",
        "even",
        "WARNING",
        1,
    )


@given(st.text(), st.text(alphabet=st.characters()))
def test_any_text_stays_on_its_one_line(event: str, value: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, event.replace("%", ""), (), None)
    record.fields = {"value": value}
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["value"] == value


def test_an_error_is_a_field_and_not_further_lines() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    line = JsonLines().format(logging.LogRecord("x", logging.ERROR, "", 0, "e", (), info))
    assert "\n" not in line
    assert "ValueError: two\nlines" in json.loads(line)["traceback"]


def line_of(event: str, level: int = logging.WARNING, **fields: object) -> str:
    """Return an event of now as `Sentences` shows it, without its time."""
    record = logging.LogRecord("relay.net.hub", level, "", 0, event, (), None)
    record.created = 1_764_000_000.123
    record.fields = fields
    line = Sentences().format(record)
    assert line.startswith("2025-11-24T16:00:00.123Z ")
    return line.partition(" ")[2]


def test_a_sentence_has_its_fields_and_the_others_follow() -> None:
    line = line_of(
        "link.down", peer=b"\x1f\x2e", address="10.0.0.7:7430", reason="it broke", suppressed=3
    )
    assert (
        line
        == "WARNING link.down: The link to relay 1f2e (10.0.0.7:7430) is down: it broke. suppressed=3"
    )


def test_the_first_sentence_is_used_that_has_all_its_fields() -> None:
    whole = line_of("link.refused", address="a:1", reason="wrong network", detail="of another key")
    assert whole.endswith("A link with a:1 was refused: wrong network (of another key).")
    assert line_of("link.refused", address="a:1", reason="x").endswith("was refused: x.")
    assert (
        line_of("link.refused", address="a:1") == "WARNING relay.net.hub: link.refused address=a:1"
    )


def test_an_event_without_a_sentence_is_shown_with_its_logger_and_fields() -> None:
    line = line_of(
        "orders.placed", logging.INFO, n=2, who="a b", odd='"', none=None, of=["x"], y=""
    )
    assert line == (
        'INFO relay.net.hub: orders.placed n=2 who="a b" odd="\\"" none=null of=["x"] y=""'
    )


def test_values_in_a_sentence_are_words() -> None:
    line = line_of("discovery.sighted", addresses=["a:1", "b:2"], source="", gone=False, relay="")
    assert "at a:1, b:2 (source: -, left: no)." in line
    assert "Changed: none." in line_of("relay.settings_read", changed=[], needs_restart=["port"])


@given(st.text(alphabet=st.characters()), st.text(alphabet=st.characters()))
def test_a_peer_cannot_make_a_line_of_the_text_log(label: str, value: str) -> None:
    sound = {"peer": "1f", "address": "a", "label": label, "dialled": True}
    for line in (
        line_of("link.up", **sound),
        line_of("link.up", other=value),
        line_of("x" + value),
    ):
        assert line.isprintable()


def test_a_traceback_follows_indented() -> None:
    try:
        raise ValueError("two\n2026-11-24T05:20:18.123Z lines")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "port.fault", (), info)
    first, *others = Sentences().format(record).splitlines()
    assert "port.fault: One connection was closed" in first
    assert others
    assert all(line.startswith("    ") for line in others)


def test_the_configured_log_goes_to_stderr_once_however_often_it_is_configured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    level = root.level
    try:
        configure("DEBUG")
        handler = configure("INFO")
        log.info("session.up", extra={"fields": {"session": 7}})
        log.debug("unseen")
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["session.up"]


def test_a_warning_is_repeated_only_after_the_interval_and_counts_what_was_kept_back(
    kept: Kept,
) -> None:
    quiet = Quiet()
    said = [quiet.warning(log, "frame.bad", 1, now_s, {"kind": 9}) for now_s in (0, 1, 9.9, 10, 11)]
    assert said == [True, False, False, True, False]
    assert [line.get("suppressed") for line in kept.lines] == [None, 2]
    assert [line["kind"] for line in kept.lines] == [9, 9]
    assert quiet.suppressed == 3


def test_keys_and_events_are_quieted_apart(kept: Kept) -> None:
    quiet = Quiet()
    assert all(
        quiet.warning(log, event, key, 0.0, {})
        for event, key in [("a", 1), ("a", 2), ("b", 1), ("b", "1")]
    )
    assert len(kept.lines) == 4


def test_a_peer_that_varies_its_key_gets_a_bounded_number_of_lines(kept: Kept) -> None:
    quiet = Quiet(limit=8)
    for key in range(1000):
        quiet.warning(log, "hello.bad", key, 1.0, {})
    assert (len(kept.lines), len(quiet), quiet.suppressed) == (8, 8, 992)
    assert quiet.warning(log, "hello.bad", "later", 11.0, {})
    assert kept.lines[-1]["suppressed_others"] == 992


def test_what_a_forgotten_key_kept_back_is_still_logged(kept: Kept) -> None:
    quiet = Quiet(limit=1)
    assert quiet.warning(log, "e", "first", 0.0, {})
    assert not quiet.warning(log, "e", "first", 5.0, {})
    assert quiet.warning(log, "e", "second", 10.0, {})
    assert kept.lines[-1]["suppressed_others"] == 1


@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0, 8)), max_size=60),
    st.integers(0, 4),
)
def test_every_warning_is_either_a_line_or_counted(
    calls: list[tuple[int, float]], limit: int
) -> None:
    quiet = Quiet(limit=limit)
    handler = Kept()
    silent = logging.getLogger("test.logs.silent")
    silent.handlers = [handler]
    now_s = 0.0
    lines_s: list[tuple[int, float]] = []
    for key, wait_s in calls:
        now_s += wait_s
        if quiet.warning(silent, "e", key, now_s, {}):
            lines_s.append((key, now_s))
        assert len(quiet) <= limit
    assert len(handler.lines) == len(lines_s)
    assert len(lines_s) + quiet.suppressed == len(calls)
    counted = sum(
        line.get("suppressed", 0) + line.get("suppressed_others", 0) for line in handler.lines
    )
    assert counted <= quiet.suppressed
    for key in range(7):
        times_s = [at_s for said, at_s in lines_s if said == key]
        assert all(b - a >= 10.0 for a, b in pairwise(times_s))


# -- the journal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "priority"),
    [(10, 7), (20, 6), (30, 4), (40, 3), (50, 2), (25, 6)],
)
def test_a_line_of_the_journal_begins_with_its_priority(level: int, priority: int) -> None:
    record = log.makeRecord(log.name, level, "", 0, "some.event", (), None)
    line = Journal(JsonLines()).format(record)
    assert line.startswith(f"<{priority}>{{")
    assert json.loads(line[3:])["event"] == "some.event"


def test_every_line_of_a_traceback_has_the_priority_of_its_record() -> None:
    try:
        raise ValueError("odd")
    except ValueError as error:
        record = log.makeRecord(log.name, logging.ERROR, "", 0, "some.fault", (), (type(error), error, None))  # fmt: skip
    lines = Journal(Sentences()).format(record).split("\n")
    assert len(lines) > 1
    assert all(line.startswith("<3>") for line in lines)


def test_only_the_stream_that_systemd_named_is_the_journal(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("wb") as stream, (tmp_path / "redirected").open("wb") as other:
        found = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(environ, stream.fileno())
        assert not is_journal(environ, other.fileno())  # such as `iris relay 2>file` in a unit
        assert not is_journal({}, stream.fileno())
        closed = os.dup(stream.fileno())
        os.close(closed)
        assert not is_journal(environ, closed)
