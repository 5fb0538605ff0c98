"""The audit of streams in a bucket notices each way in which a promise can be broken, and nothing else."""

from __future__ import annotations

import random
from typing import NoReturn

import pytest
from support.bucket_load import Load, Message

WHOLE: list[Message] = [(0, 0), (1, 0), (0, 1), (2, 0)]


def connect() -> NoReturn:
    raise AssertionError("nothing is sent")


def audit(acked: dict[Message, int], whole: list[Message], *seen: tuple[int, Message]) -> str:
    """Return what the audit says about acknowledgements, and what readers were shown."""
    load = Load(connect, random.Random(0))
    load.acked = acked
    for message, offset in acked.items():
        load.seen.add("a producer", offset, message)
    for offset, message in seen:
        load.seen.add("a reader", offset, message)
    for offset, message in enumerate(whole):
        load.seen.add("the end", offset, message)
    return "; ".join(load.audit(whole))


def test_a_stream_that_has_all_is_not_objected_to() -> None:
    acked = {message: offset for offset, message in enumerate(WHOLE)}
    assert audit(acked, WHOLE, (1, (1, 0))) == ""


@pytest.mark.parametrize(
    ("acked", "whole", "seen", "says"),
    [
        ({(2, 0): 3}, WHOLE[:3], (), "1 acknowledged messages are lost or moved"),
        ({(0, 1): 1}, WHOLE, (), "offset 1 has (0, 1), and was shown with (1, 0) before"),
        ({}, [(0, 0), (0, 0)], (), "1 messages are there twice"),
        ({}, [(0, 1), (0, 0)], (), "messages of producer 0 are out of order"),
        ({}, WHOLE, ((1, (2, 9)),), "offset 1 has (2, 9), and was shown with (1, 0) before"),
        ({}, WHOLE, ((9, (1, 0)),), "(1, 0) is at 1, and was shown at 9 before"),
        ({}, WHOLE, (), "4 messages are there, but nobody was told"),
    ],
)  # fmt: skip
def test_each_broken_promise_is_noticed(
    acked: dict[Message, int], whole: list[Message], seen: tuple[tuple[int, Message], ...], says: str
) -> None:  # fmt: skip
    found = audit(acked, whole, *seen)
    if "shown" in says:
        assert "was shown" in found
    else:
        assert says in found
