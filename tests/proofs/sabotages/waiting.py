"""Publishing that waits: what is lost, or waits for good, when credit is counted wrongly."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

WAITING = ("tests/sim/test_waiting.py", "tests/protocol/test_waiting.py")

SABOTAGES = (
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
        "Credits.expire",
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
        "flow.drop(credit)",
        "pass",
        WAITING,
        "a subscriber that was left out and went is looked at for good",
    ),
)  # fmt: skip
