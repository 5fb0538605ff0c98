"""The checker of histories notices each way in which a promise can be broken, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from proofs.history.checker import History, judge

CALL = {"what": "call", "id": "c/1", "kind": "request", "idempotent": False}
RAN = {"what": "ran", "kind": "request", "id": "c/1"}
DONE = {"what": "done", "id": "c/1"}
CLOSED = {"what": "closed"}


def failed(call: str = "c/1", ran: str = "no") -> dict[str, Any]:
    return {"what": "failed", "id": call, "error": "NoMembers", "ran": ran}


def of(kind: str, **changed: Any) -> dict[str, Any]:
    return {**CALL, "kind": kind, **changed}


def received(number: int, flow: str = "t.p", what: str = "received") -> dict[str, Any]:
    return {"what": what, "flow": flow, "number": number}


def accepted(*numbers: int, flow: str = "t.p") -> list[dict[str, Any]]:
    return [received(number, flow, "accepted") for number in numbers]


def gap(count: int | None, name: str = "") -> dict[str, Any]:
    return {"what": "gap", "kind": "publish", "name": name, "count": count}


def loss(count: int | None, flow: str = "t.p") -> dict[str, Any]:
    return {"what": "loss", "kind": "publish", "flow": flow, "count": count}


def ready(receives: str) -> dict[str, Any]:
    return {"what": "ready", "receives": receives}


def meant(count: int) -> dict[str, Any]:
    return {"what": "meant", "id": "c/1", "count": count}


def read(offset: int, payload: str, stream: str = "orders", topic: str = "") -> dict[str, Any]:
    return {"what": "read", "stream": stream, "offset": offset, "payload": payload, "topic": topic}


def worked(offset: int) -> dict[str, Any]:
    return {"what": "worked", "id": "c/1", "offset": offset}


def sent(count: int, *, whole: bool) -> dict[str, Any]:
    return {"what": "sent", "id": "c/1", "sent": count, "whole": whole}


def tunnel(got: int, *, whole: bool) -> dict[str, Any]:
    return {"what": "tunnel", "id": "c/1", "got": got, "whole": whole}


def violations(*histories: list[dict[str, Any]]) -> list[str]:
    return judge(History(f"p{n}", events) for n, events in enumerate(histories)).violations


APPEND = of("append")
APPENDED = {"what": "appended", "id": "c/1", "offset": 0}
FINISHED = {"what": "finished", "stream": "recorded"}
HOLE = {"what": "hole", "stream": "recorded", "count": None, "cause": "restart"}


@pytest.mark.parametrize(
    "histories",
    [
        [[CALL, DONE, CLOSED], [RAN]],
        [[CALL, failed(), CLOSED], []],
        [[CALL, failed(ran="maybe"), CLOSED], [RAN]],
        [[of("request", idempotent=True), DONE], [RAN, RAN]],
        [[CALL], [RAN]],  # its caller was killed
        [[of("push"), DONE, CLOSED], []],
        [[of("survey"), DONE, CLOSED], [{**RAN, "kind": "survey"}], [{**RAN, "kind": "survey"}]],
        [[of("tunnel"), sent(3, whole=True), DONE, CLOSED], [tunnel(3, whole=True)]],
        [[of("tunnel"), sent(3, whole=False), failed(ran="maybe")], [tunnel(2, whole=False)]],
        [[*accepted(0, 1, 2), CLOSED], [received(0), received(1), received(2), CLOSED]],
        [[*accepted(0, 1, 2), CLOSED], [received(1), received(2), CLOSED]],  # it came in between
        [[*accepted(0, 1, 2), CLOSED], [received(0), gap(1), received(2), CLOSED]],
        [[*accepted(0, 1, 2), CLOSED], [received(0), gap(None), CLOSED]],
        [accepted(0, 1, 2), [received(0), CLOSED]],  # its publisher was killed
        [[*accepted(0), CLOSED], [received(0, what="shared")], []],
        [[APPEND, APPENDED, DONE, CLOSED], [worked(0)], [read(0, "c/1")]],
        [[APPEND, failed(), CLOSED], []],
        [accepted(5), [read(0, "0", "recorded", "t.p"), HOLE, read(1, "5", "recorded", "t.p")]],
        [
            accepted(0),
            [received(0), received(1)],
        ],  # killed before it wrote that it had sent another
        [[*accepted(0, 2), loss(1), CLOSED], [received(0), received(2)]],
        [[*accepted(0, 2), loss(None), CLOSED], [received(0), received(2)]],
        [[*accepted(0, 1), CLOSED], [received(0), gap(1, "t.p"), CLOSED]],
        [[*accepted(0, 1), CLOSED], [received(0), gap(None, "t.>"), CLOSED]],
        [[*accepted(0, 1), CLOSED], [ready("publish"), gap(None, "t.>"), CLOSED]],
        [[*accepted(0), CLOSED], [ready("broadcast"), CLOSED]],  # it receives something else
        [
            [*accepted(0), CLOSED],
            [ready("shared"), received(0, what="shared"), CLOSED],
            [ready("shared"), CLOSED],
        ],
        [[*accepted(0), CLOSED], [ready("shared"), gap(None, "t.>"), CLOSED]],
        [
            [*accepted(0, flow="broadcast p"), CLOSED],
            [ready("broadcast"), received(0, "broadcast p"), CLOSED],
        ],
        [
            [of("tunnel"), meant(3)],
            [tunnel(3, whole=True)],
        ],  # its caller was killed at the very end
        [[*accepted(0), CLOSED], [read(0, "0", "recorded", "t.p"), FINISHED]],
        [[*accepted(0, 1), CLOSED], [read(0, "0", "recorded", "t.p"), FINISHED, HOLE]],
    ],
)
def test_what_keeps_the_promises_is_not_a_violation(histories: list[list[dict[str, Any]]]) -> None:
    assert violations(*histories) == []


@pytest.mark.parametrize(
    ("histories", "said"),
    [
        ([[CALL, DONE, CLOSED], [RAN], [RAN]], "ran 2 times"),
        ([[of("push"), DONE, CLOSED], [RAN, RAN]], "ran 2 times"),
        ([[CALL, failed(), CLOSED], [RAN]], "said not to have"),
        ([[of("request", idempotent=True), failed(), CLOSED], [RAN]], "said not to have"),
        ([[CALL, CLOSED], []], "has no end"),
        ([[CALL, DONE, CLOSED], []], "nobody ran it"),
        ([[of("survey")], [{**RAN, "kind": "survey"}] * 2], "ran twice"),
        ([[of("tunnel"), sent(3, whole=False)], [tunnel(5, whole=False)]], "came of 3"),
        ([[of("tunnel"), sent(3, whole=False)], [tunnel(2, whole=True)]], "has all"),
        ([[of("tunnel"), sent(3, whole=True)], [tunnel(2, whole=False)]], "says all 3"),
        ([[of("tunnel")], [tunnel(1, whole=False)] * 2], "two other ends"),
        ([[{"what": "wrong", "id": "c/1", "text": "3 came as number 2"}]], "came as number"),
        ([[*accepted(0, 1), CLOSED], [received(1), received(0)]], "after 1"),
        ([[*accepted(0, 1), CLOSED], [received(0), received(0)]], "after 0"),
        ([[*accepted(0, 1, 2), CLOSED], [received(0), received(2)]], "no loss reported"),
        ([[*accepted(0, 1, 2, 3), CLOSED], [received(0), gap(1), received(3)]], "no loss reported"),
        ([[*accepted(0, 1, 2), CLOSED], [gap(9), received(0), received(2)]], "no loss reported"),
        ([[*accepted(0, 1, 2), CLOSED], [received(0), CLOSED]], "no loss reported"),
        ([[received(0, what="shared")], [received(0, what="shared")]], "was received by"),
        ([[received(1, what="shared"), received(0, what="shared")]], "after 1"),
        ([[APPEND, APPENDED, DONE], [worked(0)], [read(1, "c/1")]], "acknowledged at 0"),
        ([[APPEND, APPENDED, DONE], [worked(3)], [read(3, "else")]], "acknowledged at 0"),
        ([[worked(0), worked(1)], [read(0, "c/1"), read(1, "c/1")]], "2 times"),
        ([[APPEND, failed(), worked(0)], [read(0, "c/1")]], "said not to be"),
        ([[read(0, "0", "recorded", "t.p"), read(1, "2", "recorded", "t.p")]], "no hole"),
        ([[read(0, "1", "recorded", "t.p"), read(1, "0", "recorded", "t.p")]], "stands after"),
        ([[read(0, "c/1")]], "never handed"),
        ([[worked(0)], [read(0, "c/1"), read(0, "", "orders.dead")]], "dead letters"),
        # A report to another receiver, of another topic, or of fewer messages does not excuse a loss.
        ([[*accepted(0, 2), CLOSED], [loss(1), received(0), received(2)]], "no loss reported"),
        (
            [
                [*accepted(0, 2), CLOSED],
                [loss(1), received(0), received(2)],
                [received(0), received(2)],
            ],
            "no loss reported",
        ),
        (
            [[*accepted(0, 2), loss(1, "t.q"), CLOSED], [received(0), received(2)]],
            "no loss reported",
        ),
        (
            [[*accepted(0, 2, 4), loss(1), CLOSED], [received(0), received(2), received(4)]],
            "no loss reported",
        ),
        (
            [[*accepted(0, 2), CLOSED], [received(0), gap(1, "t.q"), received(2)]],
            "no loss reported",
        ),
        (
            [[*accepted(0, 2), CLOSED], [received(0), gap(None, "t.q"), received(2)]],
            "no loss reported",
        ),
        ([[*accepted(0, 1, 2), loss(1), CLOSED], [received(0), CLOSED]], "no loss reported"),
        # Nothing at all came.
        ([[*accepted(0), CLOSED], [ready("publish"), CLOSED]], "received nothing of t.p"),
        (
            [[*accepted(0), CLOSED], [ready("publish"), gap(1, "t.q"), CLOSED]],
            "received nothing of t.p",
        ),
        (
            [[*accepted(0, flow="broadcast p"), CLOSED], [ready("broadcast"), CLOSED]],
            "received nothing",
        ),
        (
            [[*accepted(0, 1), CLOSED], [ready("shared"), received(0, what="shared"), CLOSED]],
            "by nobody",
        ),
        ([[*accepted(0), CLOSED], [FINISHED]], "recorded: nothing of t.p"),
        (
            [[*accepted(0, 1), CLOSED], [read(0, "0", "recorded", "t.p"), FINISHED]],
            "ends with 0 of 1",
        ),
        ([[APPEND, APPENDED, DONE, CLOSED], [{**FINISHED, "stream": "orders"}]], "is at []"),
        # What nobody made or sent.
        ([[], [RAN]], "nobody made it"),
        ([[*accepted(0), CLOSED], [received(0), received(1)]], "nobody published"),
        ([accepted(0), [received(0), received(1), received(2)]], "nobody published"),
        ([[*accepted(0), CLOSED], [received(1, what="shared")]], "nobody published"),
        ([[*accepted(0), CLOSED], [read(0, "1", "recorded", "t.p")]], "nobody published"),
        ([[read(0, "c/1")], [worked(0)]], "nobody appended"),
        ([[APPEND], [worked(0)], [read(0, "c/2")]], "was handed c/1 at 0"),
        ([[of("survey"), failed(), CLOSED], [{**RAN, "kind": "survey"}]], "said not to have"),
        # A tunnel whose caller says nothing more, or whose member does not.
        ([[of("tunnel"), meant(3)], [tunnel(2, whole=True)]], "2 of 3 that were meant"),
        ([[of("tunnel"), sent(3, whole=True)], []], "no member has it"),
        ([[of("tunnel"), failed(), CLOSED], [tunnel(0, whole=False)]], "reached a member"),
    ],
)
def test_each_broken_promise_is_noticed(histories: list[list[dict[str, Any]]], said: str) -> None:
    found = violations(*histories)
    assert any(said in text for text in found), found


def test_whoever_was_stopped_before_the_end_misses_what_came_after() -> None:
    histories = [
        History("publisher", [*accepted(0, 1, 2), CLOSED]),
        History("subscriber", [received(0), CLOSED], to_the_end=False),
    ]
    assert judge(histories).violations == []


def test_the_checker_shares_no_code_with_iris() -> None:
    source = Path(__file__).resolve().parents[2] / "proofs" / "history" / "checker.py"
    imports = [
        line for line in source.read_text().splitlines() if line.startswith(("import", "from"))
    ]
    modules = {line.split()[1].split(".")[0] for line in imports}
    assert modules == {"__future__", "collections", "dataclasses", "typing"}
