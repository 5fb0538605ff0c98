"""`iris stream` as scripts use it: a real relay with a store, pipes, texts and exit codes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import commands, warm
from support.commands import Shell, dev_relay, end
from support.waiting import PATIENCE_S, wait_until
from typer.testing import CliRunner

import iris
from iris import cli, keyfiles
from iris.cli.exits import Exit, exit_code
from iris.cli.stream import showing, texts
from iris.documents import time_text
from iris.errors import (
    AmbiguousStream,
    IrisError,
    NoStream,
    OffsetConflict,
    StreamDamaged,
    StreamExists,
    StreamUnavailable,
)
from iris.streams import ConsumerInfo, StreamGap

pytestmark = pytest.mark.timeout(120)

VERBS = [
    "create", "list", "info", "change", "pause", "resume", "delete", "read", "append", "export", "import", "consumer list",
    "consumer delete", "consumer change", "consumer pause", "consumer resume", "dead", "redrive", "mirror", "promote",
]  # fmt: skip


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory of this module."""
    with commands.short_directory("iris-stream-") as root:
        yield root


@pytest.fixture(scope="module")
def relay(home: Path) -> Iterator[Path]:
    """A relay with throw-away keys and a store that takes streams; gives its socket."""
    with dev_relay(home, "--data", str(home / "data")) as socket:
        shell = Shell(home)
        wait_until(lambda: code_of(shell, "create", "probe") == 0)
        shell("stream", "delete", "probe", "--yes")
        yield socket


@pytest.fixture
def shell(home: Path, relay: Path) -> Iterator[Shell]:
    """A shell in which clients find the relay and its keys."""
    shell = Shell(home)
    yield shell
    shell.finish()


@pytest.fixture
def stream(shell: Shell, request: pytest.FixtureRequest) -> Iterator[str]:
    """A stream of the test's own, for appends; removed at the end."""
    name = f"t{zlib.crc32(request.node.name.encode())}"
    shell("stream", "create", name)
    yield name
    if code_of(shell, "info", name) == 0:
        shell("stream", "delete", name, "--yes")


def code_of(shell: Shell, *arguments: str) -> int:
    return CliRunner().invoke(cli.app, ["stream", *arguments], env=shell.environ).exit_code


def facts(shell: Shell, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shell("stream", "info", name, "--json"))
    return found


def rows(said: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines()]


def on_a_terminal(shell: Shell, *arguments: str) -> str:
    """Return what a person sees."""
    ours, theirs = pty.openpty()
    try:
        environ = {**shell.environ, "TERM": "dumb"}
        process = warm.Popen(
            commands.command(*arguments), env=environ, cwd=shell.root, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # how a terminal says that nobody writes any more
                break
            if not data:
                break
            seen += data
        assert process.wait() == 0, seen
    finally:
        os.close(ours)
    return seen.decode()


# -- help and texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_streams_has_help_with_an_example(verb: str) -> None:
    result = CliRunner().invoke(cli.app, ["stream", *verb.split(), "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"iris stream {verb}" in result.output


def test_sizes_and_ages_are_read_in_their_units() -> None:
    assert texts.parse_size("10GiB") == 10 << 30
    assert texts.parse_size("1.5kib") == 1536
    assert texts.parse_size("2TiB") == 2 << 40
    assert texts.parse_size("17") == texts.parse_size("17B") == 17
    assert texts.parse_size("0") == texts.parse_size("none") == 0
    assert [texts.parse_age(t) for t in ("90s", "1.5m", "2h", "7d", "0")] == [
        90.0, 90.0, 7200.0, 604800.0, 0.0,
    ]  # fmt: skip
    assert texts.size_text(1536) == "1.5 KiB"
    assert texts.age_text(604800) == "7 d"


def test_a_time_without_a_zone_is_of_this_host() -> None:
    assert texts.parse_start("2026-01-31T12:00:00Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert texts.parse_start("2026-01-31") == datetime(2026, 1, 31).astimezone()
    text = time_text(1_769_860_800_000_001)
    assert text == "2026-01-31T12:00:00.000001Z"
    assert texts.parse_time(text) == datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC)
    assert time_text(2**63 - 1) is None


def test_a_gap_is_reported_in_one_line_without_control_characters() -> None:
    assert texts.gap_text(StreamGap(3, 9, 0, "retention")) == "nothing at offsets 3 to 8: retention"
    text = texts.gap_text(StreamGap(4, 5, None, "two\nlines"))
    assert text.startswith("missing at offset 4: an unknown number of messages: two")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "s", "--max-bytes", "10GB"), "'10GB' is not a size"),
        (("create", "s", "--max-bytes", "-1"), "not a size"),
        (("create", "s", "--max-bytes", "99999999TiB"), "max_bytes"),
        (("create", "s", "--max-age", "30"), "'30' is not a duration"),
        (("create", "s", "--max-messages", "-1"), "--max-messages"),
        (("create", "s", "--topic", "a", "--cluster", "b"), "not both"),
        (("create", "s", "--topic", "a b"), "not a topic filter"),
        (("create", "no such name"), "not a cluster name"),
        (("create", "s.dead"), "dead letters"),
        (("change", "s"), "nothing to change"),
        (("delete", "s"), "--yes"),
        (("consumer", "change", "s", "c"), "nothing to change"),
        (("redrive", "s", "c"), "--all, --limit N or --offset OFFSET"),
        (("redrive", "s", "c", "--limit", "0"), "--limit"),
        (("read", "s", "--start", "soon"), "'soon' is not a start"),
        (("read", "s", "--start", "-1"), "'-1' is not a start"),
        (("read", "s", "-n", "0"), "--count"),
        (("append", "s", "x", "--ttl", "never"), "not a duration"),
        (("append", "s", "x", "--deliver-at", "tomorrow"), "'tomorrow' is not a time"),
        (("append", "s", "x", "--deliver-at", "1066-10-14"), "not a time"),
        (("append", "s", "x", "--tombstone"), "add --key"),
        (("append", "s", "x", "--lines"), "leave MESSAGE out"),
        (("append", "s", "--lines", "--key", "k"), "--key is for a single message"),
        (("append", "s", "x", "-H", "oops"), "NAME=VALUE"),
        (("append", "s", "{", "--pack"), "not JSON"),
        (("append", "s", "x", "--ttl", "0s"), "ttl"),
    ],
)
def test_what_is_written_wrong_is_a_usage_error_that_says_how_to_write_it(
    shell: Shell, arguments: tuple[str, ...], said: str
) -> None:
    shown = " ".join(shell("stream", *arguments, code=2).decode().replace("│", " ").split())
    assert said in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoStream("s", ""), Exit.NO_MEMBERS),
        (AmbiguousStream("s", ""), Exit.USAGE),
        (StreamExists("s", ""), Exit.ANSWER),
        (OffsetConflict("s", "", 7), Exit.ANSWER),
        (StreamDamaged("s", ""), Exit.ANSWER),
        (StreamUnavailable("s", ""), Exit.OVERLOADED),
        (StreamUnavailable("s", "", may_have_run=True), Exit.TIMEOUT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes_tell_whether_a_stream_may_have_changed(error: IrisError, code: Exit) -> None:
    assert exit_code(error) == code


# -- streams ---------------------------------------------------------------------------------------------------


def test_create_prints_the_uuid_and_may_be_said_twice(shell: Shell, stream: str) -> None:
    again = shell("stream", "create", stream)
    assert re.fullmatch(rb"[0-9a-f]{32}\n", again)
    as_json = json.loads(shell("stream", "create", stream, "--json"))
    assert (as_json["name"], as_json["uuid"]) == (stream, again.decode().strip())
    other = shell("stream", "create", stream, "--max-bytes", "1GiB", code=1).decode()
    assert "and differs in max_bytes; change it with `iris stream change`" in other
    assert again.decode().strip() in other
    assert other.count("\n") == 1


def test_info_and_list_tell_the_same_to_scripts_and_to_people(shell: Shell, stream: str) -> None:
    shell("stream", "change", stream, "--max-bytes", "10GiB", "--max-age", "7d", "--max-messages", "1000")  # fmt: skip
    shell("stream", "append", stream, "hello")
    found = facts(shell, stream)
    assert (found["name"], found["max_bytes"], found["max_messages"]) == (stream, 10 << 30, 1000)
    assert (found["max_age"], found["end"], found["messages"]) == (604800, 1, 1)
    plain = dict(line.split("\t") for line in shell("stream", "info", stream).decode().splitlines())
    assert (plain["uuid"], plain["max-bytes"], plain["max-age-s"]) == (
        found["uuid"], str(10 << 30), "604800",
    )  # fmt: skip
    assert plain["keys"] == " ".join(found["key_ids"])
    assert (plain["host"], plain["lost-messages"], plain["failed"], plain["paused"]) == (
        found["host"], "0", "", "no",
    )  # fmt: skip
    titles, *lines = shell("stream", "list").decode().splitlines()
    assert titles == "NAME\tUUID\tRECORDS\tMESSAGES\tBYTES\tOLDEST\tEND\tSTATE\tHOST\tSTORE"
    (row,) = (line.split("\t") for line in lines if line.startswith(f"{stream}\t"))
    assert row == [
        stream, found["uuid"], "appends", "1", row[4], "0", "1", "ok", found["host"], found["store"],
    ]  # fmt: skip
    assert found in rows(shell("stream", "list", "--json"))
    seen = on_a_terminal(shell, "stream", "info", stream)
    assert re.search(r"max-bytes +10 GiB", seen)
    assert re.search(r"max-age +7 d", seen)
    seen = on_a_terminal(shell, "stream", "list")
    assert re.search(r"NAME +RECORDS +MESSAGES", seen)
    assert re.search(rf"{stream} +appends +1 +\d+ B +0 +1 +ok", seen)


def test_a_stream_of_dead_letters_is_listed_as_that() -> None:
    info = SimpleNamespace(name="orders.dead", mirror="", topic="", cluster="", parent="")
    assert showing.records(info) == "dead letters"  # type: ignore[arg-type]  # the fields that it reads
    info.name = "orders"
    assert showing.records(info) == "appends"  # type: ignore[arg-type]  # likewise


def test_a_stream_of_a_topic_records_what_is_published(shell: Shell) -> None:
    shell("stream", "create", "flights", "--topic", "flights.>")
    assert b"\ttopic flights.>\t" in shell("stream", "list")
    shell("publish", "flights.JFK", "delayed", "-H", "gate=7")
    wait_until(lambda: facts(shell, "flights")["end"] == 1)
    (row,) = rows(shell("stream", "read", "flights", "--json"))
    assert (row["offset"], row["name"], row["payload"]) == (0, "flights.JFK", "delayed")
    assert row["headers"] == {"gate": "7"}
    shell("stream", "delete", "flights", "--yes")


def test_a_paused_stream_records_nothing_and_reports_what_it_missed(shell: Shell) -> None:
    shell("stream", "create", "ticks", "--topic", "ticks")
    shell("stream", "pause", "ticks")
    assert facts(shell, "ticks")["paused"] is True
    refused = shell("stream", "append", "ticks", "x", code=1).decode()
    assert "the stream is paused; run `iris stream resume ticks` " in refused
    assert refused.count("\n") == 1
    # Not even the store of a paused stream subscribes, and the command says so.
    assert (
        end(shell.start("publish", "ticks", "missed"))[1] == b"iris: nobody subscribes to ticks\n"
    )
    shell("stream", "resume", "ticks")
    assert facts(shell, "ticks")["paused"] is False
    shell("stream", "append", "ticks", "here")
    out, err = end(shell.start("stream", "read", "ticks"))
    assert out == b"here\n"
    assert err.startswith(b"iris: missing at offset 0: ")
    assert err.count(b"\n") == 1
    shell("stream", "delete", "ticks", "--yes")


def test_a_pause_of_consumers_goes_on_recording_and_both_pauses_are_told_apart(
    shell: Shell, stream: str
) -> None:
    shell("stream", "pause", stream, "--consumers")
    found = facts(shell, stream)
    assert (found["paused"], found["consumers_paused"]) == (False, True)
    assert shell("stream", "append", stream, "kept") == b"0\n"
    assert "consumers paused" in on_a_terminal(shell, "stream", "list")
    shell("stream", "resume", stream)
    found = facts(shell, stream)
    assert (found["paused"], found["consumers_paused"]) == (False, False)
    assert shell("stream", "read", stream) == b"kept\n"
    said = " ".join(shell("stream", "pause", "--help").decode().split())
    assert "LOST" in said
    assert "nothing is lost" in said


def test_a_message_that_a_script_appends_again_under_its_id_is_stored_once(
    shell: Shell, stream: str
) -> None:
    refused = shell("stream", "append", stream, "7", "--id", "order-7", code=1)
    assert b"--dedup-window" in refused
    shell("stream", "change", stream, "--dedup-window", "10m")
    assert facts(shell, stream)["dedup_window"] == 600
    for _ in range(2):
        assert shell("stream", "append", stream, "7", "--id", "order-7") == b"0\n"
    assert shell("stream", "append", stream, "8", "--id", "order-8") == b"1\n"
    assert shell("stream", "read", stream) == b"7\n8\n"
    assert b"--id" in shell("stream", "append", stream, "--lines", "--id", "9", code=2)


def test_change_sets_a_limit_and_lifts_it(shell: Shell, stream: str) -> None:
    shell("stream", "change", stream, "--max-age", "90m", "--compact")
    found = facts(shell, stream)
    assert (found["max_age"], found["compact"], found["max_bytes"]) == (5400, True, 0)
    shell("stream", "change", stream, "--max-age", "none", "--no-compact")
    found = facts(shell, stream)
    assert (found["max_age"], found["compact"]) == (0, False)


def test_delete_wants_a_yes_and_then_removes_it(shell: Shell, stream: str) -> None:
    shell("stream", "append", stream, "x")
    assert b"--yes" in shell("stream", "delete", stream, code=2)
    assert facts(shell, stream)["end"] == 1
    shell("stream", "delete", stream, "--yes")
    assert shell("stream", "info", stream, code=3).count(b"\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("info", "nothing"), ("change", "nothing", "--max-age", "1d"), ("pause", "nothing"), ("resume", "nothing"),
        ("delete", "nothing", "--yes"), ("read", "nothing"), ("read", "nothing", "-f"), ("export", "nothing"),
        ("append", "nothing", "x"),
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_stream_that_is_not_there_is_exit_code_3_at_once(
    shell: Shell, arguments: tuple[str, ...]
) -> None:
    began_s = time.monotonic()
    said = shell("stream", *arguments, code=3).decode()
    assert said.startswith(
        "iris: stream nothing: no store holds it under your keys; `iris stream list`"
    )
    assert said.count("\n") == 1
    assert time.monotonic() - began_s < 12


def test_a_log_is_named_by_its_uuid(shell: Shell, stream: str) -> None:
    uuid = facts(shell, stream)["uuid"]
    assert shell("stream", "append", stream, "x", "--uuid", uuid) == b"0\n"
    assert shell("stream", "read", stream, "--uuid", uuid) == b"x\n"
    shell("stream", "read", stream, "--uuid", "00" * 16, code=3)


def test_without_a_store_create_says_how_to_start_one(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(prefix="iris-alone-"))
    alone = Shell(root)
    process = alone.start("relay", "--dev")
    try:
        wait_until(lambda: (root / "iris" / "relay.sock").exists() or process.poll() is not None)
        said = alone("stream", "create", "orders", "--timeout", "2", code=3).decode()
        assert "iris relay --data DIR" in said
        assert said.count("\n") == 1
        assert said.startswith("iris: stream orders: the network has no store; start one with")
        for arguments in (("append", "orders", "x"), ("read", "orders"), ("info", "orders")):
            assert alone("stream", *arguments, code=3).decode() == said
        listed, noted = alone.printed("stream", "list")
        assert (listed, noted.count(b"\n")) == (b"", 1)
        assert b"no streams under your keys" in noted
        process.terminate()
        end(process)
    finally:
        alone.finish()
        shutil.rmtree(root)


# -- append ----------------------------------------------------------------------------------------------------


def test_append_takes_an_argument_or_all_of_standard_input_and_prints_the_offset(
    shell: Shell, stream: str
) -> None:
    every_byte = bytes(range(256))
    assert shell("stream", "append", stream, "héllo") == b"0\n"
    assert shell.process("stream", "append", stream, stdin=every_byte) == b"1\n"
    assert shell("stream", "append", stream, "-", stdin=b"two\nlines\n") == b"2\n"
    said = shell("stream", "append", stream, '{"n": [1, null]}', "--pack", "--json", "-H", "a=b=c")
    assert json.loads(said) == {"offset": 3}
    assert shell("stream", "read", stream) == (
        "héllo\n".encode() + every_byte + b"\n" + b"two\nlines\n\n" + b'{"n":[1,null]}\n'
    )
    found = rows(shell("stream", "read", stream, "--json"))
    assert [row["encoding"] for row in found] == ["utf-8", "base64", "utf-8", "object"]
    assert [row["offset"] for row in found] == [0, 1, 2, 3]
    assert found[3]["headers"] == {"a": "b=c"}
    assert {row["name"] for row in found} == {stream}


def test_an_append_that_expects_another_offset_stores_nothing(shell: Shell, stream: str) -> None:
    assert shell("stream", "append", stream, "a", "--expect", "0") == b"0\n"
    said = shell("stream", "append", stream, "b", "--expect", "0", code=1)
    assert b"the stream ends at offset 1, not 0" in said
    assert shell("stream", "append", stream, "b", "--expect", "1") == b"1\n"
    assert shell("stream", "read", stream) == b"a\nb\n"


def test_a_message_has_a_key_a_time_to_live_and_a_tombstone(shell: Shell, stream: str) -> None:
    shell("stream", "append", stream, "101.5", "--key", "ACME", "--ttl", "10m")
    due = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    shell("stream", "append", stream, "later", "--deliver-at", due)
    assert shell("stream", "append", stream, "--key", "ACME", "--tombstone") == b"2\n"
    found = rows(shell("stream", "read", stream, "--json"))
    assert [(row["payload"], row.get("tombstone", False)) for row in found] == [
        ("101.5", False), ("later", False), ("", True),
    ]  # fmt: skip


def test_every_line_is_a_message_of_its_own_and_the_last_may_lack_its_end(
    shell: Shell, stream: str
) -> None:
    lines = [b"%d" % number for number in range(2500)]
    said = shell.process("stream", "append", stream, "--lines", stdin=b"\n".join(lines))
    assert said == b"0 2499\n"
    assert shell("stream", "read", stream).splitlines() == lines
    said = shell.process("stream", "append", stream, "-l", "--json", "-H", "k=v", stdin=b"x\n\ny\n")
    assert json.loads(said) == {"appended": 3, "first": 2500, "last": 2502}
    found = rows(shell("stream", "read", stream, "--start", "2500", "--json"))
    assert [(row["payload"], row["headers"]) for row in found] == [
        (payload, {"k": "v"}) for payload in ("x", "", "y")
    ]
    assert shell.process("stream", "append", stream, "--lines", stdin=b"") == b""


def test_a_line_is_stored_while_its_pipe_is_still_open(shell: Shell, stream: str) -> None:
    process = shell.start("stream", "append", stream, "--lines")
    assert process.stdin is not None
    process.stdin.write(b"early\n")
    process.stdin.flush()
    wait_until(lambda: facts(shell, stream)["end"] == 1)
    out, err = process.communicate(b"late\n", timeout=20)
    assert (process.returncode, out, err) == (0, b"0 1\n", b"")


def test_lines_that_end_with_an_interrupt_tell_what_was_stored(shell: Shell, stream: str) -> None:
    process = shell.start("stream", "append", stream, "--lines")
    assert process.stdin is not None
    process.stdin.write(b"a\nb\n")
    process.stdin.flush()
    wait_until(lambda: facts(shell, stream)["end"] == 2)
    process.stdin.write(b"c\nhalf a li")  # goes out when it has heard of a and b
    process.stdin.flush()
    wait_until(lambda: facts(shell, stream)["end"] == 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert process.stdout is not None
    assert process.stdout.read() in (b"0 1\n", b"0 2\n")


def test_a_line_over_the_limit_is_named_and_nothing_after_it_is_stored(
    shell: Shell, stream: str
) -> None:
    process = shell.start("stream", "append", stream, "--lines")
    out, err = process.communicate(b"a\n" + bytes(2 << 20) + b"\nb\n", timeout=20)
    assert (process.returncode, out) == (2, b"0 0\n")
    assert re.match(rb"iris: line 2: .*2097152 bytes .*over the limit .* \(1 appended", err)
    assert err.count(b"\n") == 1
    assert shell("stream", "read", stream) == b"a\n"


def test_lines_for_a_stream_that_is_not_there_are_exit_code_3(shell: Shell) -> None:
    said = shell.process("stream", "append", "nothing", "--lines", stdin=b"a\nb\n", code=3)
    assert b"(0 appended" in said
    assert said.count(b"\n") == 1


# -- read ------------------------------------------------------------------------------------------------------


def test_reading_starts_where_it_is_told(shell: Shell, stream: str) -> None:
    shell.process("stream", "append", stream, "--lines", stdin=b"a\nb\nc\n")
    assert shell("stream", "append", stream, "d") == b"3\n"
    assert shell("stream", "read", stream) == b"a\nb\nc\nd\n"
    assert shell("stream", "read", stream, "--start", "last") == b"d\n"
    assert shell("stream", "read", stream, "--start", "new") == b""
    assert shell("stream", "read", stream, "--start", "1", "-n", "2") == b"b\nc\n"
    time = rows(shell("stream", "read", stream, "--json"))[3]["time"]
    assert shell("stream", "read", stream, "--start", time).endswith(b"d\n")
    assert shell("stream", "read", stream, "--start", "2000-01-01", "--count", "1") == b"a\n"
    assert shell("stream", "read", stream, "--start", "2100-01-01") == b""
    beyond = shell("stream", "read", stream, "--start", "5", code=1)
    assert b"offset 5 is beyond the end, 4" in beyond


def test_an_empty_stream_reads_as_nothing(shell: Shell, stream: str) -> None:
    for start in ("first", "last", "new", "0", "2026-01-01"):
        assert shell("stream", "read", stream, "--start", start) == b""
    assert shell("stream", "export", stream) == b""


def test_following_prints_what_comes_later_until_a_clean_interrupt(
    shell: Shell, stream: str
) -> None:
    shell("stream", "append", stream, "early")
    process = shell.start("stream", "read", stream, "--follow")
    assert process.stdout is not None
    assert process.stdout.readline() == b"early\n"
    shell("stream", "append", stream, "late")
    assert process.stdout.readline() == b"late\n"
    process.send_signal(signal.SIGINT)
    assert end(process) == (b"", b"")


def test_following_ends_after_as_many_as_are_wanted(shell: Shell, stream: str) -> None:
    process = shell.start("stream", "read", stream, "-f", "-n", "1", "--json")
    shell("stream", "append", stream, "only")
    out, err = end(process)
    assert (json.loads(out)["payload"], err) == ("only", b"")


def test_a_reader_whose_pipe_is_closed_ends_without_a_word(shell: Shell, stream: str) -> None:
    line = b"x" * 1000 + b"\n"
    shell.process("stream", "append", stream, "--lines", stdin=line * 3000)
    for verb in ("read", "export"):
        process = shell.start("stream", verb, stream)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


# -- export and import -----------------------------------------------------------------------------------------


def test_what_is_exported_and_imported_is_the_same(shell: Shell, stream: str) -> None:
    shell("stream", "append", stream, "text")
    shell.process("stream", "append", stream, stdin=bytes(range(256)) * 100)
    shell("stream", "append", stream, '{"a": [1, 2.5, "ü"]}', "--pack")
    shell("stream", "append", stream, "", "-H", "k=v", "-H", "ü=ö")
    shell.process("stream", "append", stream, "--lines", stdin=b"many\n" * 2100)
    exported = shell("stream", "export", stream)
    first = json.loads(exported.splitlines()[0])
    assert base64.b64decode(first.pop("payload")) == b"text"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", first.pop("time"))
    assert first == {
        "offset": 0, "name": stream, "headers": None, "packed": False, "tombstone": False,
    }  # fmt: skip
    copy = f"{stream}-copy"
    shell("stream", "create", copy)
    assert shell.process("stream", "import", copy, stdin=exported) == b"2104 appended\n"

    def content(said: bytes) -> list[tuple[Any, ...]]:
        return [
            (row["offset"], row["payload"], row["packed"], row["headers"]) for row in rows(said)
        ]

    assert content(shell("stream", "export", copy)) == content(exported)
    assert shell("stream", "read", copy) == shell("stream", "read", stream)
    said = shell.process("stream", "import", copy, "--json", stdin=exported.splitlines()[0] + b"\n")
    assert json.loads(said) == {"appended": 1, "skipped": 0, "first": 2104, "last": 2104}
    assert shell("stream", "export", copy, "--start", "2104").count(b"\n") == 1
    shell("stream", "delete", copy, "--yes")


GOOD = b'{"payload": "eA=="}\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"no json", "malformed"),
        (b"", "truncated"),
        (b"{}", "payload"),
        (b'{"payload": "x"}', "base64"),
        (b'{"payload": 7}', "payload"),
        (b'{"payload": "eA==", "encoding": "utf-8"}', "encoding"),
        (b'{"payload": "eA==", "headers": {"a": 1}}', "headers"),
        (b'{"payload": "wQ==", "packed": true}', "MessagePack"),
        (b'{"payload": "eA==", "name": "\xff"}', ""),
        (b'{"payload": "' + base64.b64encode(bytes(2 << 20)) + b'"}', "over the limit"),
        (b'{"payload": "eA==", "headers": {"a": "' + b"x" * 70_000 + b'"}}', "over the limit"),
    ],
    ids=["text", "empty", "no-payload", "base64", "number", "field", "header", "packed", "utf8", "big", "headers"],
)  # fmt: skip
def test_a_bad_line_is_named_and_nothing_after_it_is_appended(
    shell: Shell, stream: str, line: bytes, said: str
) -> None:
    process = shell.start("stream", "import", stream)
    out, err = process.communicate(GOOD * 2 + line + b"\n" + GOOD, timeout=20)
    assert (process.returncode, out) == (2, b"2 appended\n"), err
    assert err.startswith(b"iris: line 3: ")
    assert said in err.decode()
    assert b"(2 appended" in err
    assert err.count(b"\n") == 1
    assert facts(shell, stream)["end"] == 2


def test_an_import_leaves_tombstones_out_and_says_so(shell: Shell, stream: str) -> None:
    shell("stream", "append", stream, "a", "--key", "k")
    shell("stream", "append", stream, "--key", "k", "--tombstone")
    exported = shell("stream", "export", stream)
    said = shell.process("stream", "import", stream, stdin=exported)
    assert said == b"1 appended, 1 tombstones skipped\n"
    assert shell("stream", "read", stream) == b"a\n\na\n"


# -- consumers -------------------------------------------------------------------------------------------------


async def test_consumers_of_a_stream_are_listed_and_forgotten(
    shell: Shell, stream: str, home: Path, relay: Path
) -> None:
    async def said(*arguments: str, code: int = 0) -> bytes:
        process = shell.start("stream", "consumer", *arguments)
        out, err = await asyncio.to_thread(end, process, code)
        return out + err

    keyring = keyfiles.load_keyring(home / "iris" / "dev" / "keyring.toml")
    assert await said("list", stream) == b""
    async with iris.connect(relay, keyring=keyring) as client:
        await client.streams.append_many(stream, ["a", "b", "c"])
        async with client.streams.consumer(stream, "billing", shared=True) as work:
            message = await anext(work)
            work.ack(message)
            await work.flush()
            (row,) = rows(await said("list", stream, "--json"))
            assert (row["name"], row["shared"], row["durable"]) == ("billing", True, True)
            assert (row["floor"], row["position"], row["lag"]) == (1, 3, 2)
            assert (row["pending"], row["workers"]) == (2, 1)
            plain = (await said("list", stream)).decode()
            titles, line = plain.splitlines()
            assert titles.split("\t")[:3] == ["NAME", "KIND", "FLOOR"]
            assert line == "billing\tshared\t1\t3\t2\t2\t0\t1\t0\tok"
            assert await said("pause", stream, "billing") == b""
            assert (await said("list", stream)).endswith(b"\tpaused\n")
            assert (
                await said("change", stream, "billing", "--max-deliver", "4", "--ack-timeout", "2m")
                == b""
            )
            assert await said("resume", stream, "billing") == b""
            (row,) = rows(await said("list", stream, "--json"))
            assert (row["paused"], row["max_deliver"], row["ack_timeout_us"]) == (
                False,
                4,
                120_000_000,
            )
    assert "LAG" in await asyncio.to_thread(
        on_a_terminal, shell, "stream", "consumer", "list", stream
    )
    assert await said("delete", stream, "billing") == b""
    assert await said("list", stream) == b""
    assert (await said("delete", stream, "billing", code=1)).count(b"\n") == 1
    assert (await said("list", "nothing", code=3)).count(b"\n") == 1


async def test_who_is_active_and_stands_by_is_shown_and_handed_over_from_a_shell(
    shell: Shell, stream: str, home: Path, relay: Path
) -> None:
    async def said(*arguments: str, code: int = 0) -> str:
        process = shell.start("stream", "consumer", *arguments)
        out, err = await asyncio.to_thread(end, process, code)
        return (out + err).decode()

    keyring = keyfiles.load_keyring(home / "iris" / "dev" / "keyring.toml")
    labels = ["first", "second"]
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for label in labels:
            config = iris.ClientConfig(relay=relay, label=label)
            there = await stack.enter_async_context(iris.connect(keyring=keyring, config=config))
            if label == "first":
                await there.streams.append(stream, "a")
                failed = await said("handover", stream, "ledger", code=1)
                assert "the stream has no consumer 'ledger'" in failed
            worker = there.streams.consumer(stream, "ledger")
            workers.append(asyncio.create_task(anext(worker)))
            stack.push_async_callback(worker.close)
            async with asyncio.timeout(PATIENCE_S):
                listed = await said("list", stream)
                while label not in listed:
                    listed = await said("list", stream)
        one, _, two = listed.partition("\n\n")
        assert one.splitlines()[1].split("\t")[1] == "single"
        titles, *lines = [line.split("\t") for line in two.splitlines()]
        assert titles == ["CONSUMER", "PLACE", "WORKER"]
        assert [line[:2] for line in lines] == [["ledger", "active"], ["ledger", "stands by"]]
        assert [line[2].split(", pid ")[0] for line in lines] == labels
        assert (await workers[0]).offset == 0
        assert await said("handover", stream, "ledger") == ""
        async with asyncio.timeout(PATIENCE_S):
            assert (await workers[1]).offset == 0
        (row,) = rows((await said("list", stream, "--json")).encode())
        assert ([each.split(",")[0] for each in row["active"]], row["standing"]) == (["second"], 1)
    assert await said("delete", stream, "ledger") == ""


async def test_dead_letters_are_shown_and_redriven_from_a_shell(
    shell: Shell, stream: str, home: Path, relay: Path
) -> None:
    async def said(*arguments: str, code: int = 0) -> str:
        process = shell.start("stream", *arguments)
        out, err = await asyncio.to_thread(end, process, code)
        return (out + err).decode()

    assert (await said("dead", stream)).endswith("iris: no dead letters\n")
    keyring = keyfiles.load_keyring(home / "iris" / "dev" / "keyring.toml")
    async with iris.connect(relay, keyring=keyring) as client:
        for payload in ("a" * 100, "b"):
            await client.streams.append(stream, payload)
        async with client.streams.consumer(stream, "billing", max_deliver=1) as work:
            work.nack(await anext(work), await anext(work), reason="no\tcustomer")
            await work.flush()
    titles, first, second = (await said("dead", stream, "billing")).splitlines()
    assert titles.split("\t") == ["OFFSET", "CONSUMER", "DELIVERIES", "REASON", "PAYLOAD"]
    assert first.split("\t")[:3] == ["0", "billing", "1"]
    assert first.endswith("a…")
    assert second.split("\t")[-1] == "b"
    (row,) = rows((await said("dead", stream, "-n", "1", "--json")).encode())
    assert row["dead"] == {"offset": 0, "consumer": "billing", "deliveries": 1, "reason": "no\tcustomer"}  # fmt: skip
    assert await said("redrive", stream, "billing", "--offset", "1") == "redrove 1 dead letter\n"
    assert json.loads(await said("redrive", stream, "billing", "--all", "--json")) == {"redriven": 1, "gone": 0, "left": 0}  # fmt: skip
    assert await said("redrive", stream, "billing", "--all") == "redrove 0 dead letters\n"
    for verb in (("redrive", stream, "biling", "--all"), ("dead", stream, "biling")):
        text = await said(*verb, code=1)
        assert (
            text == f"iris: stream {stream}: the stream has no consumer 'biling'; it has billing\n"
        )


def test_the_page_and_the_help_say_what_every_field_of_a_consumer_means(shell: Shell) -> None:
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text("utf-8")
    shown = shell("stream", "consumer", "list", "--help").decode()
    for field in ConsumerInfo.__struct_fields__:
        if field not in ("name", "shared", "durable"):
            assert f"| `{field}`" in page, field
            assert re.search(rf"\b{field}\b", shown), field
    assert "unstored" in shown


def test_a_stream_with_partitions_is_created_shown_written_and_read(shell: Shell) -> None:
    shell("stream", "create", "clicks", "--partitions", "3")
    first = shell("stream", "append", "clicks", "one", "--key", "AA").decode().strip()
    partition, offset = first.split("/")
    assert offset == "0"
    shell("stream", "append", "clicks", "two", "--partition", "2")
    info = shell("stream", "info", "clicks").decode()
    assert "partitions\t3\n" in info
    table = [line.split("\t") for line in info.partition("\n\n")[2].splitlines()]
    assert [row[0] for row in table] == ["PARTITION", "0", "1", "2"]
    assert sum(int(row[4]) for row in table[1:]) == 2
    found = rows(shell("stream", "read", "clicks", "--json"))
    assert {(row["payload"], row.get("partition", 0)) for row in found} == {
        ("one", int(partition)),
        ("two", 2),
    }
    assert b"two" in shell("stream", "read", "clicks", "--partition", "2")
    shell("stream", "change", "clicks", "--partitions", "4")
    assert b"clicks/3\t" in shell("stream", "list")
    shell("stream", "delete", "clicks", "--yes")
    shell("stream", "info", "clicks/1", code=Exit.NO_MEMBERS)
