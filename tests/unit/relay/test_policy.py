"""What crosses between sites, and what does not."""

from __future__ import annotations

import pytest

from iris.wire.kinds import NO_KEY, Kind
from relay.core.policy import MAX_REFUSED, Patterns, Policy

KEY_ID = bytes(range(16))
LOG = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("patterns", "allowed", "refused"),
    [
        ([], ["billing", "orders.eu"], []),
        (["billing", "orders.>"], ["billing", "orders.eu", "orders.eu.x"], ["orders", "other"]),
        (["!orders.secret.>"], ["billing", "orders.secret"], ["orders.secret.x"]),
        (["orders.>", "!orders.*.draft"], ["orders.eu"], ["orders.eu.draft", "billing"]),
        ([">"], ["billing", "orders.eu"], []),
        ([">", "!orders.>"], ["billing"], ["orders.eu"]),
        (["!>"], [], ["billing", "orders.eu"]),
    ],
)
def test_a_denied_name_wins_and_nothing_named_is_everything(
    patterns: list[str], allowed: list[str], refused: list[str]
) -> None:
    made = Patterns(patterns)
    assert [name for name in (*allowed, *refused) if made.allow(name)] == allowed


def test_a_filter_is_advertised_if_any_topic_of_it_may_cross() -> None:
    made = Patterns(["news.>", "!news.secret.>"])
    assert [f for f in (">", "news.*", "news.secret.x", "*.secret.*", "other.>") if made.may_allow(f)] == [
        ">", "news.*", "*.secret.*",
    ]  # fmt: skip


def test_clusters_are_exported_by_the_serving_site_and_topics_by_the_publishing_site() -> None:
    policy = Policy(exported=["billing", "news.>"], imported=["search", "prices.>"])
    assert policy.leaving(Kind.REQUEST, "search", KEY_ID) == ""
    assert policy.leaving(Kind.REQUEST, "billing", KEY_ID) == "billing is not imported"
    assert policy.leaving(Kind.PUBLISH, "news.eu", KEY_ID) == ""
    assert policy.leaving(Kind.PUBLISH, "prices.eu", KEY_ID) == "prices.eu is not exported"
    assert policy.entering(Kind.BROADCAST, "billing", KEY_ID) == ""
    assert policy.entering(Kind.BROADCAST, "search", KEY_ID) == "search is not exported"
    assert policy.entering(Kind.PUBLISH, "prices.eu", KEY_ID) == ""
    assert policy.entering(Kind.PUBLISH, "news.eu", KEY_ID) == "news.eu is not imported"


def test_a_log_is_judged_by_its_streams_name() -> None:
    policy = Policy(exported=["orders"])
    kinds = {int(Kind.STREAM): 1, int(Kind.REQUEST): 8}
    assert policy.exports(kinds, "orders", KEY_ID, LOG) == kinds
    # The name of a cluster is not taken for that of a log.
    assert policy.exports(kinds, LOG, KEY_ID, "orders") == {Kind.STREAM: 1}
    assert policy.exports(kinds, LOG, KEY_ID, "audit") == {}
    assert policy.exports(kinds, LOG, KEY_ID, "") == {}
    # Who names one has heard of it from the site that exports it.
    assert Policy(imported=["orders"]).imports(kinds, LOG, KEY_ID) == {Kind.STREAM: 1}
    assert Policy(imported=["orders"]).leaving(Kind.STREAM, LOG, KEY_ID) == ""


def test_the_stores_themselves_are_called_from_their_own_site_alone() -> None:
    policy = Policy()
    assert policy.entering(Kind.STREAM, "stores", NO_KEY)
    assert policy.leaving(Kind.STREAM, LOG, NO_KEY)
    assert policy.exports({int(Kind.STREAM): 1}, "stores", NO_KEY, "") == {}
    assert policy.imports({int(Kind.STREAM): 1}, LOG, NO_KEY) == {}


def test_what_is_refused_is_counted_by_a_bounded_number_of_rules() -> None:
    policy = Policy()
    for number in range(MAX_REFUSED + 10):
        policy.refuse("eu", f"name{number} is not exported")
    assert len(policy.refused) == MAX_REFUSED + 1
    assert policy.refused["others"] == 10
