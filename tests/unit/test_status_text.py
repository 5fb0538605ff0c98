"""`iris status` as people read it: what is unknown is left out, one cluster is not "1 clusters"."""

from __future__ import annotations

from typing import Any

import pytest

from iris.cli.status import _print_tables

ACCOUNTS: dict[str, Any] = {
    "in": 0, "copied": 0, "out": 0, "refused": 0, "expired": 0, "held": 0, "dropped": {},
}  # fmt: skip


def text(capsys: pytest.CaptureFixture[str], **report: Any) -> str:
    whole = {"relay": "ab", "draining": False, "sessions": [], "accounts": ACCOUNTS, **report}
    _print_tables(whole, whole)
    return " ".join(capsys.readouterr().out.split())


def test_the_uptime_is_left_out_if_the_relay_does_not_tell_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert text(capsys).startswith("relay ab messages:")
    assert text(capsys, draining=True).startswith("relay ab draining messages:")
    assert "relay ab process 7, up 1 h 1 min messages:" in text(capsys, pid=7, uptime_s=3660.0)


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
