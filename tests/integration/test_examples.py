"""Every example runs alone, ends by itself and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

EXAMPLES = Path(__file__).parents[2] / "examples"

EXPECTED = {
    "active_worker": [
        "first is active: True", "first books rent", "first books tea", "second is active: True", "second books wages",
        "second books soap", "left: 0",
    ],
    "blocking_streams": [
        "stored at 0",
        "handled 20 orders, each once: True",
        "read again: [15, 16, 17, 18, 19]",
    ],
    "blocking_threads": ["328350", "threads can listen, too"],
    "broadcast": [f"{who} forgets user:{n}" for who in ("first", "second", "third") for n in (17, 42)],
    "cancel": [
        "begin May", "nobody waits for May", "begin July", "report of July", "given up before they began: 1",
    ],
    "deadline": [
        "stock has less than 2 s: True", "7 left",
        "stock has less than 2 s: True", "shop: no reply within 0.2 s", "shop: True",
    ],
    "dead_letters": [
        "invoice for anna", "invoice for bert", "dead: carl, no customer carl", "RedriveInfo(redriven=1, gone=0, left=0)",
        "to do: 1 redriven: 1", "invoice for carl", "left: 0",
    ],
    "deferred_reply": ["a batch of 3", "9", "16", "squares: negative numbers are not for squaring"],
    "errors": [
        "nobody is there   NoMembers, may have run: False",
        "fine              done",
        "the handler fails RemoteError, may have run: True",
        "not a number      RemoteError, may have run: False",
        "three at once     Overloaded, may have run: False",
        "three at once     Overloaded, may have run: False",
        "three at once     done",
        "too slow          RequestTimeout, may have run: True",
    ],
    "faults": [
        "at first: 3",
        "without a member: NoMembers, may have run: False",
        "when it is back: 3",
        "when it is slow: RequestTimeout, may have run: True",
        "after a restart of the relay: 3",
    ],
    "failures": [
        "shrunk to b'0123456789'",
        "RemoteError (may have run: True): thumbnails: ValueError: the photo is empty",
        "lost push nobody: 1 (no members have joined under this name; check its spelling, and that the service runs)",
        "lost broadcast nobody: 1 (no members)",
        "sent 7 messages, 2 losses, 2 failed handlers",
    ],
    "headers": ["report for acme {'content-type': 'text/plain'}"],
    "hello": ["Hello, world!"],
    "http_events": [
        "{'greeting': 'hello, world'}", "{'subscribers': 1}", 'data: {"name":"news.today","payload":"rain","encoding":"utf-8"}',
    ],
    "lifespan": ["the database is open", "3", "7", "the database is closed"],
    "metrics": [
        "Hello, Ada!",
        "Hello, Alan!",
        "refused: empty-name",
        'iris_service_handler_duration_seconds_count{cluster="greeter",method=""} 3.0',
        *(
            f'iris_service_calls_total{{client="greetings",cluster="greeter",kind="request",method="",outcome="{outcome}"}} {count}.0'
            for outcome, count in (("handled", 2), ("failed", 0), ("refused", 1), ("expired", 0))
        ),
        'iris_service_timed_calls_total{client="greetings",cluster="greeter",kind="request",method=""} 2.0',
    ],
    "members": [
        "there are 1", "there are 2", "2 of 2 take requests", "left: 0",
    ],
    "one_member": [
        "anna: 1", "bert: 1", "anna: 2", "carl: 1", "anna: 3", "has left: True may have run: False",
    ],
    "methods": [
        "placed lamp", "cancelled lamp", "cancel: unknown_order, may have run: True", "refund: no_method, may have run: False",
        "noted: all done",
    ],
    "partitions": [
        "anna [0, 1, 2]", "bert [0, 1, 2]", "carl [0, 1, 2]", "dora [0, 1, 2]", "13 clicks, anna's in one partition: True",
        "now there are 6 partitions",
    ],
    "publish_subscribe": [
        "B6 only: flights.JFK.B6 news of flights.JFK.B6",
        "B6 only: flights.EWR.B6 news of flights.EWR.B6",
        "all flights: ['flights.JFK.B6', 'flights.LGA.UA', 'flights.EWR.B6']",
    ],
    "middleware": [
        "hello, world", "again, because NoMembers", "nobody is there", "timed: ['Request of greeter', 'Call of greeter']",
    ],
    "push_workers": ["20 thumbnails", "lost: push to thumbnails failed"],
    "queue_group": ["{'anna': 15, 'audit': 30, 'bert': 15}"],
    "recorded_flights": [
        "27,004 departures recorded",
        "27,004 read from 0 on: True", "18,003 read from 9,001 on: True", "1,000 read from 26,004 on: True",
        "27,004 handled by group delays: True", "27,004 handled by group audit: True",
    ],
    "refusals": [
        "3 is too many, so order 2", "bought 2 lamp, 0 left", "shop: unknown_sku: see the catalogue (sku='sofa')",
    ],
    "request_reply": ["Oslo 4 °C", "Cairo 31 °C", "100 requests at once: {'4 °C'}"],
    "survey": [
        "{'name': 'a', 'entries': 120}", "{'name': 'b', 'entries': 45}", "165 entries in 2 caches",
        "failed: ['OSError: disk on fire']", "missing: 1 (the slow one)",
    ],
    "tagged_union": [
        "order 7 of one lamp", "order 7 is cancelled: too bright", "order 8 is cancelled: none given",
        "refused: a payload of 23 bytes does not decode as __main__.Placed | __main__.Cancelled: Invalid value 'Returned'"
        " - at `$.type`",
    ],
    "threads": ["['report 0', 'report 1', 'report 2', 'report 3']", "4 at once"],
    "tracing": [
        "placed lamp, 6 left", "stock: out_of_stock",
        "request shop/place CLIENT", "  process shop/place SERVER", "    request stock CLIENT", "      process stock SERVER",
        "    publish orders.new PRODUCER", "      process orders.> CONSUMER",
        "request stock CLIENT RemoteError", "  process stock SERVER",
    ],
    "tunnel": [
        *(f"block {n}: {'x' * 20}" for n in range(3)), "then 5,000,000 bytes in one message", "and that was all",
    ],
    "typed_payloads": [
        "[Row(flight='B60', delay_minutes=0), Row(flight='B61', delay_minutes=3)]",
        "[{'flight': 'UA0', 'delay_minutes': 0}, {'flight': 'UA1', 'delay_minutes': 3}]",
        "refused: a payload of 9 bytes does not decode as Query: Expected `str`, got `int` - at `$.origin`",
    ],
    "watch": [
        "orders: 1 member, calls handled: True", "version 2.1, p99 under 5 s: True, queued: 0",
    ],
}  # fmt: skip

ARGUMENTS = {"recorded_flights": ["--january"]}
"""Arguments that make long examples short: name -> arguments."""
ANY_ORDER = {"deadline", "errors", "survey", "members"}
"""Where several tasks print."""


def test_every_example_is_known_here() -> None:
    """An example without an expectation would be an example that nobody runs."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_runs_alone_and_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / f"{name}.py"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
    environ |= {"XDG_CONFIG_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", path, *ARGUMENTS.get(name, [])],
        cwd=tmp_path,
        env=environ | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if name in ANY_ORDER:
        assert sorted(lines) == sorted(EXPECTED[name])
    else:
        assert lines == EXPECTED[name]
    assert "Exception ignored" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_is_short_and_has_one_idea_on_top(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""')


def test_hello_world_has_at_most_twelve_lines_of_code() -> None:
    lines = (EXAMPLES / "hello.py").read_text().splitlines()[1:]
    assert sum(bool(line.strip()) for line in lines) <= 12
