"""The dashboard and the alert rules in deploy/ name only metrics and labels that a running relay has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.pages import Scraped, scrape
from support.relays import Daemon

import iris
import iris.blocking
from relay.metrics.figures import SPECS

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "iris.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "iris.json"
METRIC = re.compile(r"\biris_\w+")
SELECTOR = re.compile(r"\b(iris_\w+)\{([^}]*)\}")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    directory = tmp_path_factory.mktemp("relay")
    with (
        Daemon(directory, "--data", str(directory / "data"), "--metrics", "127.0.0.1:0") as daemon,
        iris.blocking.connect(daemon.socket, keyring=iris.Keyring({})) as asking,
    ):
        yield scrape(asking.status()["metrics"]["address"])


def rules() -> list[dict[str, object]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """Return every expression of both files."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return shown + [str(rule["expr"]) for rule in rules()]


def test_every_metric_that_is_named_is_on_the_page_of_a_running_relay(page: Scraped) -> None:
    named = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(named) > 30
    assert named - page.names == set()


def test_every_label_that_is_named_belongs_to_its_metric() -> None:
    known = {spec.name: set(spec.labels) for spec in SPECS}
    for expression in expressions():
        for name, selector in SELECTOR.findall(expression):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) - {"instance", "job"}
            assert asked <= known.get(name, set()), expression
        there = set().union(*(known.get(name, set()) for name in METRIC.findall(expression)))
        for group in re.findall(r"\b(?:by|without) \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} - {"instance"} <= there, expression


def test_every_alert_has_a_name_of_its_own_a_severity_and_a_sentence() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) > 10
    for rule in found:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")  # type: ignore[index]
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]  # type: ignore[index]


def test_parentheses_of_every_expression_match() -> None:
    for expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & covered, panel["title"]
        covered |= cells
