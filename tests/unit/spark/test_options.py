"""Options become one dataclass, or an error that names the option."""

from __future__ import annotations

import pickle

import pytest

from iris.errors import ConfigError, InvalidName
from iris.spark.options import (
    APPEND,
    BROADCAST,
    CLUSTER,
    PUBLISH,
    PUSH,
    STREAM,
    TOPIC,
    SinkOptions,
    SourceOptions,
    parse_offsets,
)


def source(streaming: bool = True, **options: str) -> SourceOptions:
    return SourceOptions.parse(options, streaming=streaming)


def sink(streaming: bool = True, **options: str) -> SinkOptions:
    return SinkOptions.parse(options, streaming=streaming)


def test_names_are_those_of_the_kafka_source_whatever_their_case() -> None:
    found = SourceOptions.parse(
        {
            "SUBSCRIBE": "flights.>, delays",
            "groupid": "pipeline",
            "maxoffsetspertrigger": "1000",
            "minOffsetsPerTrigger": "10",
            "maxTriggerDelay": "30s",
            "fetchOffset.numRetries": "7",
            "fetchTimeoutMs": "1500",
            "failOnDataLoss": "FALSE",
        },
        streaming=True,
    )
    assert (found.kind, found.names, found.group) == (TOPIC, ("flights.>", "delays"), "pipeline")
    assert (found.max_offsets, found.min_offsets, found.max_delay_s) == (1000, 10, 30.0)
    assert (found.retries, found.access.timeout_s, found.fail_on_data_loss) == (7, 1.5, False)


def test_a_query_begins_where_kafkas_does() -> None:
    assert source(stream="orders").starting == "latest"
    assert source(False, stream="orders").starting == "earliest"


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"stream": "a"}, STREAM), ({"cluster": "a"}, CLUSTER), ({"subscribePattern": "a.*"}, TOPIC)],
)
def test_each_way_to_name_what_is_read(options: dict[str, str], kind: str) -> None:
    assert source(**options).kind == kind


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "stream, subscribe"),
        ({"stream": "a", "subscribe": "b"}, "not 2"),
        ({"stream": ""}, "at least one name"),
        ({"stream": "a", "groupId": "g"}, "groupId"),
        ({"stream": "a", "endingOffsets": "latest"}, "no end"),
        ({"stream": "a", "endingTimestamp": "5"}, "no end"),
        ({"stream": "a", "startingOffsets": "sometime"}, "startingOffsets"),
        ({"stream": "a", "startingOffsets": '{"a": 3}'}, "startingOffsets"),
        ({"stream": "a", "maxOffsetsPerTrigger": "-1"}, "maxOffsetsPerTrigger"),
        ({"stream": "a", "maxOffsetsPerTrigger": "1e3"}, "maxOffsetsPerTrigger"),
        ({"stream": "a", "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "above"),
        ({"stream": "a", "maxTriggerDelay": "5 months"}, "maxTriggerDelay"),
        ({"stream": "a", "failOnDataLoss": "no"}, "failOnDataLoss"),
        ({"stream": "a", "valueFormat": "json"}, "valueSchema"),
        ({"stream": "a", "valueFormat": "avro", "valueSchema": "a INT"}, "valueFormat"),
        ({"stream": "a", "keyringFile": "keys.toml"}, "keyringFile"),
        ({"stream": "a", "fetchBytes": "99999999"}, "fetchBytes"),
        ({"stream": "a", "startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"stream": "a", "kafka.bootstrap.servers": "x:9092"}, "kafka.bootstrap.servers"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        source(**options)


def test_a_batch_has_to_have_something_between_its_ends() -> None:
    with pytest.raises(ConfigError, match="startingOffsets"):
        source(False, stream="a", startingOffsets="latest")
    with pytest.raises(ConfigError, match="endingOffsets"):
        source(False, stream="a", endingOffsets="earliest")


def test_a_name_outside_the_grammar_is_refused() -> None:
    with pytest.raises(InvalidName):
        source(stream="a b")
    with pytest.raises(InvalidName):
        sink(topic="a.*")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("30s", 30), ("15m", 900), ("15 min", 900), ("1.5 hours", 5400), ("7d", 604_800), ("250", 0.25)],
)  # fmt: skip
def test_durations_are_those_of_spark(text: str, seconds: float) -> None:
    assert source(stream="a", maxTriggerDelay=text).max_delay_s == pytest.approx(seconds)


def test_an_address_has_one_stream_in_a_group_and_another_in_another() -> None:
    options = source(subscribe="flights.>", groupId="pipeline")
    name = options.stream_of("flights.>", "pipeline")
    assert name.startswith("spark.pipeline.")
    assert name == options.stream_of("flights.>", "pipeline")
    assert name != options.stream_of("flights.>", "other")
    assert name != options.stream_of("flights.*", "pipeline")
    cluster = source(cluster="flights", groupId="pipeline")
    topic = source(subscribe="flights", groupId="pipeline")
    assert cluster.stream_of("flights", "g") != topic.stream_of("flights", "g")
    assert source(stream="orders").stream_of("orders", "") == "orders"


def test_kafkas_offsets_are_read() -> None:
    assert parse_offsets("startingOffsets", '{"a": {"0": 23, "1": 7}, "b": {"0": -2}}') == {
        "a": {0: 23, 1: 7},
        "b": {0: -2},
    }
    for text in (
        '{"a": {"0": -3}}', '{"a": {"0": "1"}}', '{"a": {"1": 1}}', '{"a": {"0": 1, "01": 1}}', '{"a": {"0": 1, "256": 1}}', "[]", "3"
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="startingOffsets"):
            parse_offsets("startingOffsets", text)


@pytest.mark.parametrize(
    ("options", "send", "exactly_once"),
    [
        ({"stream": "s"}, APPEND, True),
        ({"stream": "s", "delivery": "at_least_once"}, APPEND, False),
        ({"topic": "t"}, PUBLISH, False),
        ({}, PUBLISH, False),
        ({"cluster": "c"}, PUSH, False),
        ({"cluster": "c", "sendMode": "broadcast"}, BROADCAST, False),
    ],
)
def test_where_rows_go_says_how(options: dict[str, str], send: str, exactly_once: bool) -> None:
    found = sink(**options)
    assert (found.send, found.exactly_once) == (send, exactly_once)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stream": "s", "topic": "t"}, "give only one"),
        ({"stream": "s", "sendMode": "push"}, "sendMode"),
        ({"topic": "t", "sendMode": "push"}, "sendMode"),
        ({"cluster": "c", "sendMode": "publish"}, "sendMode"),
        ({"sendMode": "append"}, "sendMode"),
        ({"topic": "t", "delivery": "exactly_once"}, "delivery"),
        ({"stream": "s", "writerId": "x" * 256}, "writerId"),
        ({"stream": "s", "writerId": "x", "batchId": "3"}, "batchId"),
    ],
)
def test_what_a_sink_cannot_do_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sink(**options)


def test_a_batch_job_may_name_its_batch() -> None:
    found = sink(False, stream="s", writerId="nightly", batchId="20261122")
    assert (found.writer, found.batch) == ("nightly", 20_261_122)


def test_options_travel_to_executors() -> None:
    for options in (source(subscribe="a.>", groupId="g"), sink(topic="a")):
        assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("given", "meant"),
    [({}, "wait"), ({"whenFull": "drop"}, "drop"), ({"whenfull": "WAIT"}, "wait")],
)
def test_rows_that_are_published_wait_unless_configured_otherwise(
    given: dict[str, str], meant: str
) -> None:
    assert sink(topic="t", **given).when_full == meant


def test_a_way_to_be_full_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="whenFull: 'block' is not one of wait, drop"):
        sink(topic="t", whenFull="block")
