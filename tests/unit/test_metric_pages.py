"""Pages of metrics: labels that others choose are bounded, names are escaped, and reports of every length are shown."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from support.pages import Scraped

from iris.metrics.page import KEEP_S, OTHER, Names, Page, Spec
from relay.core.router import Router
from relay.metrics.figures import MAX_CLUSTERS, MAX_PROGRAMS, SPECS, Labels, fill


def shown(page: Page) -> Scraped:
    class Fixed(Collector):
        def collect(self) -> Any:
            return page.families()

    registry = CollectorRegistry()
    registry.register(Fixed())
    return Scraped(generate_latest(registry).decode())


def status(**more: object) -> dict[str, Any]:
    """Return the status of a relay without anything, as it arrives, and `more`."""
    router = Router(bytes(16), entropy=bytes, message_limit=1 << 20)
    router.status_extra = lambda: {
        "protocol_errors": 0, "turned_away": 0, "users": {"held": 0, "limit": 9, "refused": 0},
        "queues": {"bytes": 0, "limit_bytes": 9, "full": 0, "shed": 0}, **more,
    }  # fmt: skip
    return dict(json.loads(json.dumps(router.status())))


def page_of(report: dict[str, Any]) -> Scraped:
    page = Page(SPECS)
    fill(page, report, Labels(), "1")
    return shown(page)


def test_a_label_that_programs_choose_has_a_limit_and_the_rest_is_summed_up_as_other() -> None:
    clusters = {f"c{number}": {"aa": 2} for number in range(MAX_CLUSTERS + 50)}
    found = page_of({**status(), "clusters": clusters})
    assert len(found.samples["iris_relay_cluster_members"]) == MAX_CLUSTERS + 1
    assert found.sum("iris_relay_cluster_members", cluster=OTHER) == 100
    assert found.sum("iris_relay_cluster_members") == 2 * (MAX_CLUSTERS + 50)


def test_a_name_keeps_its_place_while_it_is_used_and_gives_it_up_after_an_hour() -> None:
    now_s = 0.0
    names = Names(2, lambda: now_s)
    assert [names(each) for each in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]
    now_s = KEEP_S - 1
    assert [names("a"), names("c")] == ["a", OTHER]
    now_s = KEEP_S
    assert [names("c"), names("b"), names("a")] == ["c", OTHER, "a"]


def test_long_names_are_cut_and_what_is_not_unicode_is_replaced() -> None:
    names = Names(9)
    assert len(names("x" * 1000)) == 128
    assert names("a\ud800") == "a?"


def test_names_with_odd_characters_stay_one_line_each_and_are_read_back_as_they_were() -> None:
    odd = 'a "quoted"\\name\n# TYPE iris_relay_up gauge\niris_relay_up 7\x1b[31m<b>{}é'
    session = {"label": odd, "running": 1, "waiting": 0, "tunnels": 0, "held": 3}
    found = page_of({**status(), "sessions": [session]})
    assert found.labels("iris_relay_program_messages_held", "program") == [odd]
    assert found.sum("iris_relay_up") == 1
    assert found.sum("iris_relay_program_messages_held") == 3


def test_programs_of_the_same_name_are_added_up() -> None:
    session = {"label": "x", "running": 1, "waiting": 2, "tunnels": 0, "held": 3}
    found = page_of({**status(), "sessions": [session, session]})
    assert found.sum("iris_relay_program_sessions", program="x") == 2
    assert found.sum("iris_relay_program_calls_waiting", program="x") == 4


def test_a_report_of_numbers_alone_still_has_the_account() -> None:
    router = Router(bytes(16), entropy=bytes, message_limit=1 << 20)
    router.accounts.in_ = 5
    router.accounts.unwanted = 5
    found = page_of(router.numbers("too long"))
    assert found.sum("iris_relay_limited") == 1
    assert found.sum("iris_relay_messages_unwanted_total") == 5
    assert found.account() == 0


def test_a_store_that_cannot_serve_is_down() -> None:
    store = {"pid": 1, "starts": 3, "cannot_serve": "disk write failed"}
    assert page_of(status(store=store)).sum("iris_store_up") == 0
    assert page_of(status(store={**store, "cannot_serve": ""})).sum("iris_store_up") == 1
    assert "iris_store_up" not in page_of(status()).samples


def test_every_metric_has_help_and_its_unit_in_its_name() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    for spec in SPECS:
        assert spec.help.endswith("."), spec.name
        assert "_ms" not in spec.name, spec.name
        assert "_us" not in spec.name, spec.name
        for word, unit in (("rtt", "_seconds"), ("Bytes", "_bytes")):
            if word in spec.name or spec.help.startswith(word):
                assert unit in spec.name, spec.name


def test_a_metric_without_values_is_on_the_page() -> None:
    found = shown(Page([Spec("iris_x_total", "Nothing.", ("a",))]))
    assert found.names == {"iris_x_total"}


def test_what_programs_report_is_summed_by_cause_and_by_program_with_limits() -> None:
    programs = {f"p{n}": {"queue full": 2} for n in range(MAX_PROGRAMS + 9)}
    troubles = {
        "totals": {"queue full": 7, "handler failed": 1},
        "programs": programs,
        "latest": [],
    }
    found = page_of({**status(), "troubles": troubles})
    assert found.sum("iris_relay_reported_total", cause="queue full") == 7
    assert found.sum("iris_relay_reported_total", cause="handler failed") == 1
    assert found.sum("iris_relay_program_reported_total", program="p0", cause="queue full") == 2
    assert found.sum("iris_relay_program_reported_total", program=OTHER) == 18
