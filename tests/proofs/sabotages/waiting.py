"""Publishing that waits: wrong counts of credit, which lose messages or block publishers. Deadlines of handlers."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

WAITING = ("tests/sim/test_waiting.py", "tests/protocol/test_waiting.py")

DEADLINES = ("tests/integration/test_deadlines.py",)

SABOTAGES = (
    Sabotage(
        "deadline-kept",
        "iris/serving.py",
        "ServiceBinding._work",
        "HANDLED.pop(task, None)",
        "None",
        DEADLINES,
        "a worker passes on the deadline of an earlier request",
    ),
    Sabotage(
        "deadline-not-inherited",
        "iris/deadlines.py",
        "inherited_s",
        "left_s >= timeout",
        "True",
        DEADLINES,
        "what a handler calls goes on after its caller has stopped waiting",
    ),
    Sabotage(
        "deadline-of-pushes",
        "iris/serving.py",
        "ServiceBinding._work",
        "inbox.answered and delivery.deadline_us",
        "delivery.deadline_us",
        DEADLINES,
        "the handler of a push has only as long as the push might have waited",
    ),
    Sabotage(
        "wait-not-counted",
        "relay/core/credit.py",
        "Credits.sending",
        "credit.sent += size",
        "credit.sent += 0",
        WAITING,
        "a publisher is not held back by what was sent",
    ),
    Sabotage(
        "wait-never-renewed",
        "relay/core/credit.py",
        "Credits._look",
        "now_us - credit.asked_us >= RENEW_US",
        "False",
        WAITING,
        "credit that was lost on the way is never given again",
    ),
    Sabotage(
        "wait-left-out-served",
        "relay/core/credit.py",
        "Flow.room",
        "UNLIMITED if credit.left_out else credit.room",
        "credit.room",
        WAITING,
        "one that handles nothing holds back everybody, a second for each message",
    ),
    Sabotage(
        "wait-most-credit",
        "relay/core/credit.py",
        "Credits._room",
        "return min((flow.room(neighbor, \"\") for neighbor in near), default=UNLIMITED)",
        "return max((flow.room(neighbor, \"\") for neighbor in near), default=UNLIMITED)",
        WAITING,
        "the fastest subscriber decides, and slower ones lose messages",
    ),
    Sabotage(
        "wait-gone-kept",
        "relay/core/credit.py",
        "Credits.forget",
        "self._leave(flow, credit)",
        "pass",
        WAITING,
        "a subscriber that was left out and went is looked at for good",
    ),
)  # fmt: skip
