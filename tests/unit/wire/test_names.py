"""The grammar of names, and what a filter selects."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.errors import InvalidName
from iris.wire.names import (
    MAX_NAME_BYTES,
    MAX_TOKENS,
    check_cluster,
    check_filter,
    check_group,
    check_topic,
    matches,
)

TOKENS = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp"), exclude_characters=".*>"),
    min_size=1,
    max_size=6,
).filter(lambda token: not re.search(r"\s", token))
NAMES = st.lists(TOKENS, min_size=1, max_size=8).map(".".join)
SMALL = st.sampled_from(["a", "b", "c"])
TOPICS = st.lists(SMALL, min_size=1, max_size=5).map(".".join)
FILTERS = (
    st.tuples(st.lists(st.one_of(SMALL, st.just("*")), max_size=5), st.booleans())
    .map(lambda f: [*f[0], *([">"] if f[1] or not f[0] else [])])
    .map(".".join)
)


@given(NAMES)
def test_a_name_of_plain_tokens_is_a_cluster_a_topic_a_group_and_a_filter(name: str) -> None:
    for check in (check_cluster, check_topic, check_group, check_filter):
        assert check(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "a.", ".a", "a..b", "a b", " a", "a\n", "a\tb", "a\x00", "a\x7f", "a\u2028b", "a\u00a0b", "\ud800", "a.*", "*", ">"],
)  # fmt: skip
def test_what_is_outside_the_grammar_is_not_a_cluster_topic_or_group(name: str) -> None:
    for check in (check_cluster, check_topic, check_group):
        with pytest.raises(InvalidName):
            check(name)


@pytest.mark.parametrize("name", ["*", ">", "a.*", "a.>", "*.*.b", "*.>", "a.*.c.>", "a"])
def test_wildcards_stand_for_whole_tokens_in_a_filter(name: str) -> None:
    assert check_filter(name) == name


@pytest.mark.parametrize(
    "name", ["", "a*", "*a", "a.>.b", ">.a", "a>", "**", "a..>", "a b.>", ">>"]
)
def test_a_wildcard_anywhere_else_is_not_a_filter(name: str) -> None:
    with pytest.raises(InvalidName):
        check_filter(name)


def test_a_name_has_at_most_255_bytes_and_32_tokens() -> None:
    assert check_cluster("a" * MAX_NAME_BYTES)
    assert check_cluster(".".join("a" * MAX_TOKENS))
    for name in ("a" * (MAX_NAME_BYTES + 1), "ä" * 128, ".".join("a" * (MAX_TOKENS + 1))):
        with pytest.raises(InvalidName, match="over the limit of 255 bytes or 32 parts"):
            check_cluster(name)


@pytest.mark.parametrize("name", [None, b"a", 7, ["a"]])
def test_a_name_that_is_not_a_str_is_refused_by_its_type(name: object) -> None:
    with pytest.raises(InvalidName, match=f"must be a str, not {type(name).__name__}"):
        check_topic(name)  # type: ignore[arg-type]


def test_an_error_never_repeats_more_than_80_characters_of_the_name() -> None:
    with pytest.raises(InvalidName) as caught:
        check_topic("x" * 10_000 + " ")
    assert len(str(caught.value)) < 300


@given(NAMES)
def test_a_topic_matches_itself_and_the_filter_of_everything(topic: str) -> None:
    assert matches(topic, topic)
    assert matches(">", topic)


@pytest.mark.parametrize(
    ("pattern", "topic", "selected"),
    [
        ("a.*", "a.b", True), ("a.*", "a", False), ("a.*", "a.b.c", False), ("a.>", "a", False), ("a.>", "a.b", True),
        ("a.>", "a.b.c", True), ("*.b", "a.b", True), ("*.b", "a.c", False), ("*", "a", True), ("*", "a.b", False),
        ("*.>", "a", False), ("*.>", "a.b", True), ("a.*.c", "a.b.c", True), ("a.*.>", "a.b", False), ("a", "A", False),
    ],
)  # fmt: skip
def test_a_star_is_one_token_and_a_final_angle_one_or_more(
    pattern: str, topic: str, selected: bool
) -> None:
    assert matches(pattern, topic) is selected


@given(FILTERS, TOPICS)
def test_matching_equals_the_regular_expression_of_the_filter(pattern: str, topic: str) -> None:
    parts = pattern.split(".")
    body = [r"[^.]+" if part == "*" else re.escape(part) for part in parts if part != ">"]
    if parts[-1] == ">":
        body.append(r"[^.]+(?:\.[^.]+)*")
    assert matches(check_filter(pattern), topic) is bool(re.fullmatch(r"\.".join(body), topic))
