"""Texts with bytes that are not UTF-8: what is sent with them can be decoded, and everything else stays as it is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.wire import frames
from iris.wire.codec import decode_control, encode_control
from iris.wire.texts import cleaned, encodable, json_bytes, sound_json

ODD = "/home/caf\udce9/é\\ud800 \U0001f600"
EVEN = "/home/caf?/é\\ud800 \U0001f600"
ANY = st.text(st.characters(codec=None), max_size=20)
DOCUMENTS = st.recursive(
    ANY | st.integers(-9, 9) | st.none(), lambda of: st.lists(of) | st.dictionaries(ANY, of)
)


def test_a_lone_surrogate_is_a_question_mark_and_the_rest_stays() -> None:
    assert encodable(ODD) == EVEN
    assert json.loads(sound_json(json.dumps({ODD: [ODD]}))) == {EVEN: [EVEN]}
    assert msgspec.json.decode(json_bytes({ODD: [ODD]})) == {EVEN: [EVEN]}
    assert cleaned({"a": ["x\x1b", 7]}) == {"a": ["x?", 7]}


@given(DOCUMENTS)
def test_whatever_is_made_sound_can_be_decoded(document: Any) -> None:
    text = sound_json(json.dumps(document))
    assert text.isascii()
    msgspec.json.decode(text)
    msgspec.json.decode(json_bytes(document))


@given(st.recursive(st.text(max_size=20) | st.integers(-9, 9), st.lists))
def test_what_was_sound_stays_as_it_is(document: Any) -> None:
    assert json.loads(sound_json(json.dumps(document))) == document
    assert json_bytes(document) == msgspec.json.encode(document)


def framed(text: str) -> list[frames.Control]:
    """Return control frames that have a text of a host, each of another shape."""
    member = frames.MemberInfo("00.1", [0x40], [bytes(range(240, 256))], "00", "site", text)
    return [frames.Hello(1, 0, text, 7), frames.Error(text), frames.Membership(1, [member])]


@pytest.mark.parametrize("number", range(3))
def test_a_control_frame_with_such_a_text_is_sent_with_question_marks(number: int) -> None:
    data = encode_control(framed(ODD)[number])
    assert decode_control(memoryview(data), 0, len(data)) == framed(EVEN)[number]
