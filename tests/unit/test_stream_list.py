"""`iris stream list` on a terminal names the stores only where a host is not enough."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from msgspec import structs

from iris.cli.stream.showing import print_streams
from iris.streams import StreamInfo

A, B = "9925e90b" + "a" * 24, "1d5410ec" + "b" * 24


def stream(name: str, store: str, host: str) -> StreamInfo:
    fields: dict[str, Any] = {each.name: each.default for each in structs.fields(StreamInfo)}
    fields |= dict.fromkeys(
        ("max_bytes", "max_messages", "oldest", "end", "messages", "size_bytes", "epoch", "created_us", "lost_messages"), 0
    )  # fmt: skip
    fields |= {"max_age": 0.0, "compact": False, "paused": False, "failed": "", "key_ids": []}
    return StreamInfo(
        **{**fields, "name": name, "uuid": name.encode().hex(), "topic": "", "cluster": "", "store": store, "host": host}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stores", "shown"),
    [
        ([(A, "db-1"), (A, "db-1")], False),
        ([(A, "db-1"), (B, "db-2")], False),
        ([(A, "db-1"), (B, "db-1")], True),
    ],
)
def test_people_see_stores_if_two_of_one_host_have_streams(
    stores: list[tuple[str, str]], shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    print_streams([stream(f"s{n}", *each) for n, each in enumerate(stores)])
    out = capsys.readouterr().out
    assert ("STORE" in out) == shown
    assert [each[:8] in out for each, _ in stores] == [shown, shown]
    assert A not in out
