"""Streams as `iris stream list` and `iris stream info` show them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from iris.cli import output
from iris.cli.stream import texts
from iris.documents import time_text
from iris.streams import StreamInfo
from iris.wire.names import printable
from iris.wire.orders import DEAD


def records(info: StreamInfo) -> str:
    if info.parent:
        return f"partition {info.partition}"
    if info.mirror:
        return f"copy of {info.source}"
    if info.topic:
        return f"topic {info.topic}"
    if info.cluster:
        return f"cluster {info.cluster}"
    return "dead letters" if info.name.endswith(DEAD) else "appends"


def state(info: StreamInfo) -> str:
    if info.failed:
        return f"failed: {info.failed}"
    if info.paused:
        return "paused"
    return "consumers paused" if info.consumers_paused else "ok"


def facts(info: StreamInfo, *, human: bool) -> list[tuple[str, str]]:
    """Return the (name, value) lines of `iris stream info`, formatted for people or for scripts."""

    def limit(value: Any, plain: str, shown: Callable[[Any], str]) -> str:
        if not human:
            return plain
        return shown(value) if value else "none"

    def yes(value: bool) -> str:
        return "yes" if value else "no"

    size = str(info.size_bytes)
    if human:
        size = f"{texts.size_text(info.size_bytes)} ({size} B)"
    moved = str(info.moved_bytes)
    if human:
        moved = f"{texts.size_text(info.moved_bytes)} ({moved} B)" if info.moved_bytes else "none"
    return [
        ("name", info.name),
        ("uuid", info.uuid),
        ("records", records(info)),
        *([("partitions", str(info.partitions))] if info.partitions > 1 else []),
        ("messages", str(info.messages)),
        ("oldest", str(info.oldest)),
        ("end", str(info.end)),
        ("bytes", size),
        ("max-bytes", limit(info.max_bytes, str(info.max_bytes), texts.size_text)),
        ("max-messages", limit(info.max_messages, str(info.max_messages), str)),
        (
            "max-age" if human else "max-age-s",
            limit(info.max_age, f"{info.max_age:.15g}", texts.age_text),
        ),
        ("compact", yes(info.compact)),
        ("paused", yes(info.paused)),
        ("consumers-paused", yes(info.consumers_paused)),
        (
            "dedup-window" if human else "dedup-window-s",
            limit(info.dedup_window, f"{info.dedup_window:.15g}", texts.age_text),
        ),
        *copy_facts(info),
        *place_facts(info),
        ("durability", info.durability),
        ("moved-to-bucket", moved),
        ("lost-messages", str(info.lost_messages)),
        ("failed", info.failed or ("no" if human else "")),
        ("keys", " ".join(info.key_ids)),
        ("created", time_text(info.created_us) or str(info.created_us)),
        ("host", info.host),
        ("store", info.store),
        ("epoch", str(info.epoch)),
    ]


def copy_facts(info: StreamInfo) -> list[tuple[str, str]]:
    """Return the lines that only a copy has."""
    if not info.mirror:
        return []
    last_report = time_text(info.heard_us) if info.heard_us else None
    return [
        ("source", info.source),
        ("source-uuid", info.mirror),
        ("lag", "unknown" if info.lag is None else str(info.lag)),
        ("heard", last_report or "not since the store started"),
    ]


def place_facts(info: StreamInfo) -> list[tuple[str, str]]:
    """Return the lines of a stream that takes another one's place, or whose place another one takes."""
    lines = []
    if info.successor:
        lines.append(("handed-over-to", info.successor))
    if info.replaces:
        where = f"{info.replaces} from offset {info.replaced_at} on"
        lines.append(("replaces", info.replaces if info.mirror else where))
    if info.superseded_by:
        lines.append(("superseded-by", f"{info.superseded_by} from offset {info.superseded_at} on"))
    return lines


def print_streams(found: list[StreamInfo]) -> None:
    """Print streams. People see uuids only if two streams have one name, and stores only if two are on one host."""
    human = sys.stdout.isatty()
    named = not human or len({info.name for info in found}) < len(found)
    stores = {(info.host, info.store) for info in found}
    several = not human or len({host for host, _ in stores}) < len(stores)
    rows = []
    for info in found:
        size = texts.size_text(info.size_bytes) if human else str(info.size_bytes)
        figures = (str(info.messages), size, str(info.oldest), str(info.end))
        uuid = (info.uuid,) if named else ()
        words = (info.name, *uuid, records(info), *figures, state(info), info.host)
        if several:
            words += (store_id(info, human),)
        rows.append(tuple(map(printable, words)))
    figures = ("messages", "bytes", "oldest", "end")
    titles = (
        "name",
        *(("uuid",) if named else ()),
        "records",
        *figures,
        "state",
        "host",
        *(("store",) if several else ()),
    )
    texts.print_table(titles, rows, right=figures)


def print_partitions(parts: list[StreamInfo]) -> None:
    """Print the partitions of a stream. People see the beginning of a store's id."""
    human = sys.stdout.isatty()
    rows = []
    for info in parts:
        size = texts.size_text(info.size_bytes) if human else str(info.size_bytes)
        figures = (str(info.messages), size, str(info.oldest), str(info.end))
        words = (str(info.partition), *figures, state(info), info.host, store_id(info, human))
        rows.append(tuple(map(printable, words)))
    figures = ("messages", "bytes", "oldest", "end")
    titles = ("partition", *figures, "state", "host", "store")
    texts.print_table(titles, rows, right=("partition", *figures))


def store_id(info: StreamInfo, human: bool) -> str:
    """Return the id of a stream's store; people see its beginning, by which other commands accept a store."""
    return info.store[:8] if human else info.store


def print_info(info: StreamInfo) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for title, value in facts(info, human=True):
        table.add_row(title, output.cell(value))
    output.console().print(table)
