"""Figures of a store are a line of limited length: what has no row of its own is in the sum."""

from __future__ import annotations

import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.pages import Scraped

from iris.metrics.page import OTHER, Page
from relay.metrics.figures import SPECS, Labels, fill_store
from relay.store.figures import (
    LINE_BYTES,
    MAX_NAME,
    MAX_SHOWN,
    BucketRow,
    ConsumerRow,
    Figures,
    StreamRow,
    encode,
)
from relay.supervisor import FIGURES


def page_of(line: bytes) -> Scraped:
    page = Page(SPECS)
    fill_store(page, json.loads(line), Labels())
    registry = CollectorRegistry()

    class Fixed:
        def collect(self) -> object:
            return page.families()

    registry.register(Fixed())  # type: ignore[arg-type]  # has all that is called
    return Scraped(generate_latest(registry).decode())


@pytest.mark.parametrize("name", ["s", "\x01" * (MAX_NAME - 4), "é" * (MAX_NAME - 4)])
def test_a_line_is_never_too_long_and_loses_nothing(name: str) -> None:
    streams = [StreamRow(f"{name}{n}", n, 10, 1, 3 * n, 1, 1, 2, 4) for n in range(500)]
    consumers = [ConsumerRow(f"{name}{n}", f"{name}{n}", n, 1, 2) for n in range(2000)]
    line = encode(Figures(7, 500, streams, consumers, BucketRow(False, 5, 9)))
    assert len(line) <= LINE_BYTES
    assert line.startswith(FIGURES)
    page = page_of(line)
    assert 1 < len(page.samples["iris_store_stream_messages"]) <= MAX_SHOWN + 1
    assert 1 < len(page.samples["iris_store_consumer_workers"]) <= MAX_SHOWN + 1
    assert page.sum("iris_store_streams") == 500
    assert page.sum("iris_store_stream_messages") == sum(range(500))
    assert page.sum("iris_store_stream_appended_messages_total") == 3 * sum(range(500))
    assert page.sum("iris_store_stream_failed") == 500
    assert page.sum("iris_store_stream_dead_letters_total") == 2000
    assert page.sum("iris_store_consumer_lag_messages") == sum(range(2000))
    assert page.sum("iris_store_consumer_lag_messages", stream=OTHER, consumer=OTHER) > 0
    assert OTHER not in page.labels("iris_store_stream_next_offset", "stream")
    assert page.sum("iris_store_bucket_backlog_bytes") == 5
    assert page.sum("iris_store_bucket_up") == 0


def test_a_store_without_streams_has_a_line_too() -> None:
    page = page_of(encode(Figures(7, 0, [], [])))
    assert page.sum("iris_store_streams") == 0
    assert "iris_store_bucket_up" not in page.samples
