"""What a scope allows, by verb and name."""

from __future__ import annotations

import pytest

from iris.crypto.scopes import Scope
from iris.errors import ConfigError


def test_a_scope_may_name_the_consumers_of_a_stream() -> None:
    scope = Scope({"consume": ["orders#page-*", "a.*#x", "all", "some.>#*"], "read": ["raw#1"]})
    assert all(scope.allows("consume", name) for name in ("orders", "a.b", "all", "some.b"))
    assert not scope.allows("consume", "orders#page-*")
    assert scope.allows("read", "raw#1")
    assert not scope.allows("read", "raw")
    allowed = [
        (stream, consumer)
        for stream in ("orders", "a.b", "all", "some.b", "other", "raw")
        for consumer in ("page-", "page-1", "page", "x", "xy", "")
        if scope.consumes(stream, consumer)
    ]
    every = ["page-", "page-1", "page", "x", "xy", ""]
    assert allowed == [
        ("orders", "page-"), ("orders", "page-1"), ("a.b", "x"),
        *(("all", each) for each in every), *(("some.b", each) for each in every),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("orders#", "must have the name of a consumer"),
        ("orders#a*b", "as the last character only"),
        ("orders#**", "as the last character only"),
        ("orders#a b", "without spaces"),
        ("orders#a\x00", "without spaces"),
        ("orders#" + "x" * 256, "up to 255 bytes"),
        ("#page", "is not a topic filter"),
    ],
)
def test_a_pattern_of_consumers_outside_the_grammar_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Scope({"consume": [pattern]})
    with pytest.raises(ConfigError):
        Scope.parse({"consume": [pattern]})
