"""Parses the options of the `iris` format, a dictionary of strings from Spark, into SourceOptions or SinkOptions.

Names and meanings follow Spark's Kafka source. Option names are case-insensitive. No option holds a secret: key
files are given by path.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from iris.core.credit import WhenFull
from iris.errors import ConfigError
from iris.wire.names import check_cluster, check_filter, check_topic
from iris.wire.orders import MAX_PARTITIONS

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
STREAM_AGE_S: Final = 7 * 86_400
"""Default of `streamMaxAge`, for streams that a source creates: 7 days, the retention of a Kafka topic."""
MAX_FETCH_BYTES: Final = 8 << 20
EXACTLY_ONCE: Final = "exactly_once"
AT_LEAST_ONCE: Final = "at_least_once"
APPEND: Final = "append"
PUBLISH: Final = "publish"
PUSH: Final = "push"
BROADCAST: Final = "broadcast"
JSON: Final = "json"
MSGPACK: Final = "msgpack"
PERMISSIVE: Final = "permissive"
FAILFAST: Final = "failfast"
SPARK_OPTIONS: Final = frozenset({"path", "checkpointlocation", "queryname", "outputmode"})
"""Options that Spark itself passes to every format."""

_COMMON: Final = ("stream", "keyringFile", "accessKeyFile", "relay", "fetchTimeoutMs")
_SOURCE: Final = (
    *_COMMON, "subscribe", "subscribePattern", "cluster", "groupId", "groupIdPrefix", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions",
    "maxRecordsPerPartition", "failOnDataLoss", "includeHeaders", "includeMeta", "fetchOffset.numRetries", "fetchBytes", "timestampHeader",
    "valueFormat", "valueSchema", "valueMode", "streamMaxBytes", "streamMaxAge",
)  # fmt: skip
_SINK: Final = (*_COMMON, "topic", "cluster", "sendMode", "delivery", "writerId", "batchId", "keyedRecords", "createStream", "whenFull")  # fmt: skip

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(
    r"(\d{1,9}(?:\.\d{1,3})?) ?(ms|s(?:ec(?:onds?)?)?|m(?:in(?:utes?)?)?|h(?:ours?)?|d(?:ays?)?)?"
)

STREAM: Final = "stream"
TOPIC: Final = "topic"
CLUSTER: Final = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a process reaches its relay and its keys: paths and addresses, the same on every host."""

    keyring_file: str = ""
    """Path of the keyring (mode 0600) on each host. Empty: that of the configuration directory or development relay."""
    access_file: str = ""
    """Path of the file made by `iris key access`, for `relay=tls://…`."""
    relay: str = ""
    timeout_s: float = 120.0
    """Seconds that a store may be away before the task or the query fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Options of `spark.read` and `spark.readStream`."""

    access: Access
    kind: str
    """STREAM: `names` are existing streams. TOPIC or CLUSTER: they are addresses, each recorded in its own stream."""
    names: tuple[str, ...]
    group: str = ""
    group_prefix: str = "spark-iris"
    starting: str = ""
    """EARLIEST, LATEST, or offsets as Kafka's JSON."""
    ending: str = LATEST
    starting_ms: int | None = None
    ending_ms: int | None = None
    max_offsets: int = 0
    """Offsets per trigger, over all streams; 0: no limit."""
    max_bytes: int = 0
    min_offsets: int = 0
    max_delay_s: float = 900.0
    min_partitions: int = 0
    max_records: int = 0
    """Records per partition; 0: no limit."""
    fail_on_data_loss: bool = True
    include_headers: bool = False
    include_meta: bool = False
    retries: int = 3
    fetch_bytes: int = MAX_FETCH_BYTES
    timestamp_header: str = ""
    value_format: str = ""
    value_schema: str = ""
    value_mode: str = PERMISSIVE
    stream_max_bytes: int = 0
    stream_max_age_s: float = STREAM_AGE_S

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None) -> SourceOptions:
        """Return the parsed options; `streaming` is None if not known. Raises ConfigError, which names the option."""
        given = _Given(options, _SOURCE)
        kind, text = given.one_of(
            {"stream": STREAM, "subscribe": TOPIC, "subscribePattern": TOPIC, "cluster": CLUSTER}
        )
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in names:
            (check_filter if kind == TOPIC else check_cluster)(name)
        if not names:
            raise ConfigError(
                "stream, subscribe, cluster: the option is empty; give at least one name"
            )
        starting = given.text("startingOffsets", LATEST if streaming else EARLIEST)
        ending = given.text("endingOffsets", LATEST)
        if streaming and ("endingoffsets" in given or "endingtimestamp" in given):
            raise ConfigError(
                "endingOffsets, endingTimestamp: a streaming query has no end; remove the option"
            )
        if streaming is False and starting == LATEST:
            raise ConfigError(
                "startingOffsets: 'latest' leaves a batch query nothing to read; use 'earliest' or JSON"
            )
        if streaming is False and ending == EARLIEST:
            raise ConfigError(
                "endingOffsets: 'earliest' leaves a batch query nothing to read; use 'latest' or JSON"
            )
        for option, value in (("startingOffsets", starting), ("endingOffsets", ending)):
            if value not in (EARLIEST, LATEST):
                parse_offsets(option, value)
        value_format = given.choice("valueFormat", "", ("", JSON, MSGPACK))
        value_schema = given.text("valueSchema", "")
        if bool(value_format) != bool(value_schema):
            raise ConfigError("valueFormat, valueSchema: give both options or neither")
        parsed = cls(
            access=_access(given),
            kind=kind,
            names=names,
            group=given.text("groupId", ""),
            group_prefix=given.text("groupIdPrefix", "spark-iris"),
            starting=starting,
            ending=ending,
            starting_ms=given.optional("startingTimestamp"),
            ending_ms=given.optional("endingTimestamp"),
            max_offsets=given.number("maxOffsetsPerTrigger", 0),
            max_bytes=given.number("maxBytesPerTrigger", 0),
            min_offsets=given.number("minOffsetsPerTrigger", 0),
            max_delay_s=given.duration("maxTriggerDelay", 900.0),
            min_partitions=given.number("minPartitions", 0),
            max_records=given.number("maxRecordsPerPartition", 0),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            include_headers=given.flag("includeHeaders", False),
            include_meta=given.flag("includeMeta", False),
            retries=given.number("fetchOffset.numRetries", 3),
            fetch_bytes=given.number("fetchBytes", MAX_FETCH_BYTES, 1, MAX_FETCH_BYTES),
            timestamp_header=given.text("timestampHeader", ""),
            value_format=value_format,
            value_schema=value_schema,
            value_mode=given.choice("valueMode", PERMISSIVE, (PERMISSIVE, FAILFAST)),
            stream_max_bytes=given.number("streamMaxBytes", 0),
            stream_max_age_s=given.duration("streamMaxAge", STREAM_AGE_S),
        )
        if parsed.max_offsets and parsed.min_offsets > parsed.max_offsets:
            raise ConfigError(
                f"minOffsetsPerTrigger ({parsed.min_offsets}) is above maxOffsetsPerTrigger ({parsed.max_offsets})"
            )
        if streaming is False and kind != STREAM and not parsed.group:
            raise ConfigError(
                "groupId: a batch read of a topic or cluster requires it; without it each read would create a stream"
            )
        for group in (parsed.group, parsed.group_prefix):
            if group:
                _check_group(group)
        if kind == STREAM and parsed.group:
            raise ConfigError(
                "groupId: the option stream reads a stream by its offsets, not as a group; remove groupId"
            )
        return parsed

    def stream_of(self, name: str, group: str) -> str:
        """Return the stream to read for a name: the stream itself, or the one that records the address for a group."""
        if self.kind == STREAM:
            return name
        digest = hashlib.sha256(f"{self.kind}\0{name}".encode()).hexdigest()[:16]
        return f"spark.{group}.{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Options of `df.write` and `df.writeStream`."""

    access: Access
    send: str
    """APPEND, PUBLISH, PUSH or BROADCAST."""
    stream: str = ""
    name: str = ""
    """Topic or cluster for rows without a column that names one."""
    exactly_once: bool = True
    writer: str = ""
    batch: int | None = None
    """Batch number of a batch job that its scheduler may run again; requires `writer`."""
    keyed_records: bool | None = None
    """Whether each row with a key is its own record, with the key's hash. None: only if the stream is compacted."""
    create_stream: bool = False
    when_full: WhenFull = "wait"
    """Whether publishing waits for slow subscribers that ask for it ("wait") or for none ("drop")."""

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Return the parsed options. Raises ConfigError, which names the option."""
        given = _Given(options, _SINK)
        stream, topic, cluster = (given.text(name, "") for name in ("stream", "topic", "cluster"))
        if sum(map(bool, (stream, topic, cluster))) > 1:
            raise ConfigError("stream, topic, cluster: give only one of these options")
        default = APPEND if stream else PUSH if cluster else PUBLISH
        send = given.choice("sendMode", default, (APPEND, PUBLISH, PUSH, BROADCAST))
        if (send == APPEND) != bool(stream):
            raise ConfigError(
                "sendMode=append requires the option stream"
                if send == APPEND
                else f"sendMode={send} does not write to a stream; give topic or cluster instead of stream"
            )
        if (send == PUBLISH and cluster) or (send in (PUSH, BROADCAST) and topic):
            raise ConfigError(
                f"sendMode={send} requires the option {'topic' if cluster else 'cluster'}, not {'cluster' if cluster else 'topic'}"
            )
        if stream:
            check_cluster(stream)
        if cluster:
            check_cluster(cluster)
        if topic:
            check_topic(topic)
        delivery = given.choice(
            "delivery", EXACTLY_ONCE if stream else AT_LEAST_ONCE, (EXACTLY_ONCE, AT_LEAST_ONCE)
        )
        if delivery == EXACTLY_ONCE and not stream:
            raise ConfigError(
                "delivery=exactly_once requires the option stream; topics and clusters get at_least_once"
            )
        writer = given.text("writerId", "")
        if len(writer.encode()) > 255:
            raise ConfigError(f"writerId: {len(writer.encode())} bytes are over the limit of 255")
        batch = given.optional("batchId")
        if batch is not None and (streaming or not writer):
            raise ConfigError("batchId: use it only in a batch write, and together with writerId")
        if writer and batch is None and not streaming and delivery == EXACTLY_ONCE:
            raise ConfigError(
                "writerId: a batch write also requires batchId; without it a second write would be taken for a replay"
            )
        return cls(
            access=_access(given),
            send=send,
            stream=stream,
            name=topic or cluster,
            exactly_once=delivery == EXACTLY_ONCE,
            writer=writer,
            batch=batch,
            keyed_records=given.flag("keyedRecords", False) if "keyedrecords" in given else None,
            create_stream=given.flag("createStream", False),
            when_full="wait"
            if given.choice("whenFull", "wait", ("wait", "drop")) == "wait"
            else "drop",
        )


def parse_offsets(option: str, text: str) -> dict[str, dict[int, int]]:
    """Return the offsets in JSON like `{"orders": {"0": 23, "1": 7}}` by name and partition; -2 is earliest, -1 latest.

    Raises ConfigError.
    """
    try:
        found = json.loads(text)
        offsets = {
            name: {
                partition_number(partition): offset
                for partition, offset in {"0": positions["0"], **positions}.items()
            }
            for name, positions in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(
            f"{option}: {text[:80]!r} is not 'earliest', 'latest' or JSON like {{\"orders\": {{\"0\": 23}}}}"
        ) from err
    for name, positions in offsets.items():
        for offset in positions.values():
            if type(offset) is not int or not -2 <= offset < 1 << 63:
                raise ConfigError(
                    f"{option}: {offset!r} is not an offset for {name!r}; use a number of at least 0, -1 (latest) or -2 (earliest)"
                )
    return offsets


def partition_number(text: str) -> int:
    """Return the number of a partition as JSON has it. Raises ValueError."""
    number = int(text)
    if str(number) != text or not 0 <= number < MAX_PARTITIONS:
        raise ValueError(f"{text!r} is not the number of a partition")
    return number


class _Given:
    """The given options, looked up without regard to case. Raises ConfigError for an unknown option."""

    def __init__(self, options: Mapping[str, str], known: Iterable[str]) -> None:
        names = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for name, value in options.items():
            lower = name.lower()
            if lower in names:
                self._values[lower] = value
            elif lower not in SPARK_OPTIONS:
                close = difflib.get_close_matches(lower, names, 1)
                what = "reading" if known is _SOURCE else "writing"
                hint = f"; did you mean {names[close[0]]}?" if close else ""
                raise ConfigError(f"{name}: the iris format has no such option for {what}{hint}")

    def __contains__(self, lower: str) -> bool:
        return lower in self._values

    def text(self, name: str, default: str) -> str:
        return self._values.get(name.lower(), default).strip()

    def one_of(self, kinds: Mapping[str, str]) -> tuple[str, str]:
        given = [name for name in kinds if name.lower() in self._values]
        if len(given) != 1:
            raise ConfigError(
                f"give exactly one of the options {', '.join(kinds)}, not {len(given)}"
            )
        return kinds[given[0]], self._values[given[0].lower()]

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(name, default).lower()
        if value not in choices:
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(filter(None, choices))}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name, "true" if default else "false").lower()
        if value not in ("true", "false"):
            raise ConfigError(f"{name}: {value!r} is not true or false")
        return value == "true"

    def number(self, name: str, default: int, least: int = 0, most: int = (1 << 63) - 1) -> int:
        text = self.text(name, str(default))
        if not text.isdecimal() or not text.isascii() or not least <= int(text) <= most:
            raise ConfigError(f"{name}: {text!r} is not a whole number from {least} to {most}")
        return int(text)

    def optional(self, name: str) -> int | None:
        return self.number(name, 0) if name.lower() in self._values else None

    def duration(self, name: str, default_s: float) -> float:
        """Return the seconds of `15m`, `200ms` or `1.5 hours`; a plain number is milliseconds, as in Spark."""
        text = self.text(name, "")
        if not text:
            return default_s
        found = _DURATION.fullmatch(text.lower())
        if found is None:
            raise ConfigError(
                f"{name}: {text!r} is not a duration; write it like 200ms, 30s, 15m, 12h or 7d"
            )
        unit = found[2] or "ms"
        return float(found[1]) * (0.001 if unit == "ms" else _UNITS[unit[0]])


def _access(given: _Given) -> Access:
    access = Access(
        keyring_file=given.text("keyringFile", ""),
        access_file=given.text("accessKeyFile", ""),
        relay=given.text("relay", ""),
        timeout_s=given.number("fetchTimeoutMs", 120_000, 1, 86_400_000) / 1000,
    )
    for name, path in (("keyringFile", access.keyring_file), ("accessKeyFile", access.access_file)):
        if path and not os.path.isabs(path):
            raise ConfigError(
                f"{name}: {path!r} is not an absolute path; give one, because every host opens it"
            )
    return access


def _check_group(group: str) -> None:
    check_cluster(f"spark.{group}.{'0' * 16}")
