"""A relay's page of metrics, as a scraper sees it."""

from __future__ import annotations

import http.client
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families


def get(
    address: str, path: str = "/metrics", headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Return the status and the body of one request."""
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Scraped:
    """The samples of one page."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in self.families.values():
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    @property
    def names(self) -> set[str]:
        """The names of all metrics on the page, with or without samples."""
        lines = (line.split() for line in self.text.splitlines() if line.startswith("# TYPE "))
        return {line[2] for line in lines}

    def sum(self, metric: str, /, **labels: str) -> float:
        """Return the sum of the samples with these labels; 0 without any."""
        return sum(
            value
            for found, value in self.samples.get(metric, ())
            if labels.items() <= found.items()
        )

    def labels(self, name: str, label: str) -> list[str]:
        return [found[label] for found, _ in self.samples.get(name, ())]

    def account(self) -> float:
        """Return what is unaccounted for, by the formula of docs/monitoring.md."""
        return self._signed(("in", "copied"), "_total") - (
            self._signed(("out", "unwanted", "refused", "dropped", "expired"), "_total") + self._signed(("held",), "")
        )  # fmt: skip

    def _signed(self, words: Iterable[str], end: str) -> float:
        return sum(self.sum(f"iris_relay_messages_{word}{end}") for word in words)


def scrape(address: str) -> Scraped:
    status, text = get(address)
    assert status == 200, text
    return Scraped(text)
