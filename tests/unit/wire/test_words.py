"""A value that the wire does not allow is reported in the words of whoever set it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from iris.errors import DecodeError
from iris.wire.consumers import ChangeConsumer, Consume
from iris.wire.streams import Fetch, decode_call, encode
from iris.wire.words import in_words

WORKER = bytes(16)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Consume("w", WORKER, 1, 1, ack_timeout_us=5), "ack_timeout must be at least 0.001 s"),
        (Consume("w", WORKER, 1, 1, ack_timeout_us=1 << 50), "ack_timeout must be at most 86400 s"),
        (Consume("w", WORKER, 1, 1, wait_ms=61_000), "wait must be at most 60 s"),
        (Consume("w", WORKER, 0, 1), "max_bytes must be at least 1"),
        (Consume("w", WORKER, 1, 1, shared="yes"), "shared must be true or false, not text"),  # type: ignore[arg-type]  # that is the test
        (Consume("w", bytes(3), 1, 1), "the length of worker must be at least 16"),
        (ChangeConsumer("w", ack_timeout_us=5), "ack_timeout must be at least 0.001 s"),
        (ChangeConsumer("w", max_deliver="9"), "max_deliver must be a whole number or nothing, not text"),  # type: ignore[arg-type]  # that is the test
        (Fetch(-1, 1), "start must be at least 0"),
        (Fetch("x", 1), "start must be a whole number, not text"),  # type: ignore[arg-type]  # that is the test
    ],
)  # fmt: skip
def test_a_call_that_a_store_cannot_read_is_named_in_the_terms_of_its_caller(
    call: Any, text: str
) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_call(encode(call))
    assert str(caught.value) == f"the store cannot read the call: {text}"


def test_an_error_that_is_not_known_keeps_its_text_and_names_the_field() -> None:
    class Settings(msgspec.Struct):
        mode: msgspec.Raw | str = ""

        def __post_init__(self) -> None:
            raise ValueError("give one of them")

    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"inner": {}}, dict[str, Settings])
    assert in_words(caught.value) == "[...]: give one of them"
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert("x", int)
    assert in_words(caught.value) == "the value must be a whole number, not text"
