"""`iris status` as people read it: what is unknown is left out, one cluster is not "1 clusters"."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import typer

from iris.cli.status import _print_tables, status

ACCOUNTS: dict[str, Any] = {
    "in": 0, "copied": 0, "out": 0, "unwanted": 0, "refused": 0, "expired": 0, "held": 0, "dropped": {},
}  # fmt: skip


def text(capsys: pytest.CaptureFixture[str], **report: Any) -> str:
    whole = {
        "relay": "ab",
        "draining": False,
        "uptime_s": 0.0,
        "sessions": [],
        "accounts": ACCOUNTS,
        **report,
    }
    _print_tables(whole, whole)
    return " ".join(capsys.readouterr().out.split())


def test_the_first_line_says_how_long_the_relay_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert text(capsys, draining=True).startswith("relay ab up 0 min 0 s, draining messages:")
    assert "relay ab process 7, up 1 h 1 min messages:" in text(capsys, pid=7, uptime_s=3660.0)


def test_what_nobody_wants_is_no_drop(capsys: pytest.CaptureFixture[str]) -> None:
    said = text(capsys, accounts={**ACCOUNTS, "in": 29, "unwanted": 29})
    assert (
        "29 in, 0 copied, 0 out, 29 unwanted, 0 refused, 0 expired, 0 held; dropped: none" in said
    )


def test_counts_have_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"sessions": 2, "clusters": 1, "links": 0}
    said = text(capsys, limited="names are for root", counts=counts)
    assert "2 sessions, 1 cluster, 0 links; names are for root" in said


def test_an_address_that_cannot_be_reached_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = {
        "source": "join 127.0.0.1:17999",
        "error": "127.0.0.1:17999: Connection refused",
        "failures": 1,
    }
    said = text(capsys, dialling={"unlinked": [target]})
    assert "not linked: join 127.0.0.1:17999: Connection refused (1 attempt)" in said


EVIL = "pwned\x1b]0;\x07\x9b2J\u202e[bold red]"


def hostile(document: Any) -> Any:
    """Return the document with control characters in every text, as a relay of somebody else may send it."""
    match document:
        case str():
            return document + EVIL
        case list():
            return [hostile(each) for each in document]
        case dict():
            return {key: hostile(value) for key, value in document.items()}
    return document


def test_no_text_of_a_relay_controls_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("members", "subscriptions", "running", "waiting", "tunnels", "held"), 1)
    report = hostile({
        "relay": "ab", "draining": False, "pid": 7, "uptime_s": 60.0, "socket": "s", "limited": "l", "counts": {"sessions": 1},
        "store": {"data": "d", "cannot_serve": "why"}, "sessions": [{"label": "p", "pid": 1, "keys": ["k"], **counts}],
        "dialling": {"unlinked": [{"source": "join x", "error": "no", "failures": 1}]}, "discovery": {"nothing_found": {"tried": ["t"], "try": "j"}},
        "gateways": {"peers": [{"site": "us"}], "refused": {}}, "site": "eu", "suspended": [],
    }) | {"accounts": {**ACCOUNTS, "dropped": {EVIL: 1}}, "clusters": {EVIL: {EVIL: 1}}, "links_refused": {EVIL: 1}}  # fmt: skip

    class Client:
        async def status(self, timeout: float) -> dict[str, Any]:
            return report

    @contextlib.asynccontextmanager
    async def connect(relay: str | None) -> AsyncIterator[Client]:
        yield Client()

    monkeypatch.setattr("iris.cli.status.connect", connect)
    with pytest.raises(typer.Exit):
        status(timeout=1.0, json=False, relay=None)
    said = capsys.readouterr().out
    assert said.count("pwned") > 10
    assert [c for c in said if not c.isprintable() and c != "\n"] == []
    assert "relay ab" in said
    assert "[bold red]" in said.splitlines()[0]  # as it was written
