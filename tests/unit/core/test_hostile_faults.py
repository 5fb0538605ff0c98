"""A member that holds the key may send any FAULT: its caller gets a RemoteError, at a bounded cost."""

from __future__ import annotations

import base64
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.core.faults import MAX_DETAILS_BYTES, error_of_fault
from iris.core.message import Message
from iris.errors import RemoteError


def error_of(**headers: str) -> RemoteError:
    return error_of_fault("db", Message(b"no", "db", headers))


def encoded(packed: bytes) -> str:
    return base64.b64encode(packed).decode()


def test_details_over_the_limit_are_not_decoded() -> None:
    """Sixteen million empty lists of one byte each would take 900 MB."""
    count = 1 << 24
    details = encoded(b"\x81\xa1a\xdd" + count.to_bytes(4, "big") + b"\x90" * count)
    tracemalloc.start()
    try:
        error = error_of(code="full", details=details)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert (error.code, error.details) == ("full", {})
    assert "over the limit of 2048 bytes" in str(error)


@pytest.mark.parametrize("code", ["\x1b[2J", "two words", "x" * 65, "x" * 1_000_000])
def test_a_code_that_no_refusal_can_have_is_named_and_not_passed_on(code: str) -> None:
    error = error_of(code=code)
    assert error.code is None
    assert "its code is not a code" in error.detail
    assert len(error.detail) < 200
    assert error.detail.isprintable()


@pytest.mark.parametrize(
    "details",
    [
        "not base64!", "é", encoded(b"\xc1"), encoded(msgspec.msgpack.encode(5)),
        encoded(b"\x81\xa1a" + b"\x91" * 2000 + b"\xc0"), encoded(b"\xdf\xff\xff\xff\xff"), encoded(b"\x81\xa1a\x81\x80\x01"),
        encoded(b"\x81\xa1a\xd7\xff" + b"\xff" * 8), encoded(b"\x81\xa1a\xa2\xff\xff"),
    ],
)  # fmt: skip
def test_details_that_cannot_be_decoded_leave_the_rest_of_the_error(details: str) -> None:
    error = error_of(code="full", details=details, **{"may-have-run": "0"})
    assert (error.code, error.details, error.may_have_run) == ("full", {}, False)
    assert error.detail.startswith("no (its details cannot be decoded: ")


@given(
    st.dictionaries(st.sampled_from(["code", "details", "may-have-run", "member"]), st.text()),
    st.binary(),
)
def test_any_fault_is_a_remote_error(headers: dict[str, str], payload: bytes) -> None:
    assert type(error_of_fault("db", Message(payload, "db", headers))) is RemoteError


@given(st.binary(max_size=MAX_DETAILS_BYTES))
def test_any_details_are_a_dict(packed: bytes) -> None:
    assert type(error_of(details=encoded(packed)).details) is dict
