"""Refusals: codes and details as a handler gives them, and as the caller gets them."""

from __future__ import annotations

import base64
import datetime
import pickle
from typing import Any

import pytest

from iris.core.bundle import check_headers
from iris.core.faults import MAX_DETAILS_BYTES, Refusal, error_of_fault, fault_headers
from iris.core.message import Message
from iris.errors import InvalidName, MessageTooLarge, RemoteError

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
MEMBER = f"{'a' * 32}.{2**63 - 1}"


def carried(refusal: Refusal) -> RemoteError:
    headers = fault_headers(MEMBER, may_have_run=True, code=refusal.code, packed=refusal.packed)
    return error_of_fault("shop", Message(str(refusal).encode(), "shop", check_headers(headers)))


@pytest.mark.parametrize(
    "details",
    [{}, {"sku": "a", "left": 0}, {"raw": b"\xff", "at": NOW}, {"deep": {"list": [1, None, 2.5]}}],
)
def test_code_text_and_details_arrive_as_they_were_given(details: dict[str, Any]) -> None:
    error = carried(Refusal("out_of_stock", "on Monday", **details))
    assert (error.code, error.details, error.may_have_run) == ("out_of_stock", details, True)
    assert str(error).startswith("shop: out_of_stock: on Monday")


def test_the_text_alone_has_the_code_and_the_details() -> None:
    assert str(Refusal("out_of_stock", sku="a", left=0)) == "out_of_stock (sku='a', left=0)"
    assert str(Refusal("closed")) == "closed"


@pytest.mark.parametrize("code", ["", "9", "a b", "-a", "ä", "a" * 65, "a\n", None, 7])
def test_a_code_outside_the_grammar_is_refused_where_it_is_made(code: Any) -> None:
    with pytest.raises(InvalidName, match="is not a code"):
        Refusal(code)


def test_the_longest_code_and_the_largest_details_fit_into_the_headers_of_a_fault() -> None:
    room = MAX_DETAILS_BYTES - len(Refusal("a", text="x" * 300).packed) + 300
    refusal = Refusal("c" * 64, text="x" * room)
    assert len(refusal.packed) == MAX_DETAILS_BYTES
    assert carried(refusal).details == {"text": "x" * room}
    with pytest.raises(MessageTooLarge, match="take 2049 bytes, over the limit of 2048"):
        Refusal("c", text="x" * (room + 1))


def test_details_that_cannot_be_encoded_are_refused_where_they_are_made() -> None:
    with pytest.raises(TypeError, match=r"the details of 'c' cannot be encoded"):
        Refusal("c", what=object())


def test_a_refusal_survives_pickling_as_process_pools_do_it() -> None:
    copy = pickle.loads(pickle.dumps(Refusal("c", "text", left=0)))
    assert (copy.code, copy.text, copy.details) == ("c", "text", {"left": 0})


def test_a_fault_without_a_code_is_an_error_without_one() -> None:
    headers = {"may-have-run": "0", "member": MEMBER}
    error = error_of_fault("shop", Message(b"ValueError: no", "shop", headers))
    assert (error.code, error.details, error.may_have_run) == (None, {}, False)
    assert error_of_fault("shop", Message(b"no", "shop")).may_have_run


@pytest.mark.parametrize(
    "details", ["!", "gQ==", base64.b64encode(b"\x01").decode(), "ä", "\udcff"]
)
def test_details_that_cannot_be_decoded_leave_code_and_text(details: str) -> None:
    error = error_of_fault("shop", Message(b"closed", "shop", {"code": "c", "details": details}))
    assert (error.code, error.details) == ("c", {})
    assert error.detail.startswith("closed (its details cannot be decoded: ")
