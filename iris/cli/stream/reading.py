"""`iris stream read` and `iris stream export`: write messages to standard output, and report gaps on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, complain, run, until_stopped
from iris.cli.stream import texts
from iris.documents import as_bytes, stream_document, time_text
from iris.streams import StreamGap, StreamMessage

_encode_line: Final = msgspec.json.Encoder().encode


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of an export. `payload` is base64 in JSON; if `packed`, it is the MessagePack of the object that was
    sent."""

    payload: bytes
    offset: int = 0
    time: str | None = None
    """Time at which the message was stored, ISO 8601."""
    name: str = ""
    headers: dict[str, str] | None = None
    packed: bool = False
    tombstone: bool = False


def read(
    name: texts.Name,
    start: texts.StartAt = "first",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new messages, until Ctrl-C.")
    ] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Stop after N messages.")
    ] = None,
    partition: texts.Partition = None,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 30.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Print the messages of a stream, one per line, up to its present end.

    With --json each message is an object: offset, time (when it was stored),
    sent, name, payload, encoding and, if present, headers and tombstone.
    Missing messages are reported on stderr, one line for each gap. --timeout
    is how long the relay and the store may be away.

    The messages of several partitions are printed as they arrive, those of
    each partition in order. With --json each one names its partition, if it is
    not 0.

    \b
    Examples:
      iris stream read orders
      iris stream read orders --partition 3
      iris stream read orders --start last --follow
      iris stream read orders --start 2026-01-31T12:00:00Z -n 100 --json | jq .
    """

    def shown(message: StreamMessage) -> bytes:
        if json:
            return msgspec.json.encode(stream_document(message)) + b"\n"
        return as_bytes(message) + b"\n"

    async def work() -> int:
        copying = _copy(
            name, start, shown, follow=follow, count=count, partition=partition, uuid=uuid, patience=timeout, relay=relay
        )  # fmt: skip
        if follow:
            await until_stopped(copying)
        else:
            await copying
        return Exit.OK

    run(work)


def export(
    name: texts.Name,
    start: texts.StartAt = "first",
    partition: texts.Partition = None,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 30.0,
    relay: options.RelayPath = None,
) -> None:
    """Write the messages of a stream as JSON lines, which `iris stream import` reads. The messages are NOT sealed.

    Each line is an object: offset, time (when it was stored, ISO 8601), name
    (the topic, cluster or stream it was sent to), headers, packed (true if
    payload is the MessagePack of an object), payload (base64), tombstone.
    Keys, expiry and delivery times are not exported. Missing messages are
    reported on stderr.

    Anyone who can read the file can read the messages, without a key.

    \b
    Examples:
      iris stream export orders > orders.jsonl
      iris stream export orders --start 2026-01-31 | zstd > january.jsonl.zst
    """

    def line(message: StreamMessage) -> bytes:
        time = time_text(message.stored_us)
        found = Line(
            message.payload, message.offset, time, message.name, message.headers, message.packed, message.tombstone
        )  # fmt: skip
        return _encode_line(found) + b"\n"

    async def work() -> int:
        await _copy(
            name, start, line, follow=False, count=None, partition=partition, uuid=uuid, patience=timeout, relay=relay
        )  # fmt: skip
        return Exit.OK

    run(work)


async def _copy(
    name: str, start: Any, line: Callable[[StreamMessage], bytes], *, follow: bool, count: int | None, partition: int | None,
    uuid: str, patience: float, relay: str | None,
) -> None:  # fmt: skip
    """Write messages as lines, those of a fetch at once."""
    left = count
    async with (
        iris.connect(relay) as client,
        client.streams.read(
            name,
            start,
            follow=follow,
            partition=partition,
            uuid=uuid,
            patience=patience,
            on_gap=_report_gap,
        ) as reader,  # fmt: skip
    ):
        async for messages in reader.batches():
            if left is not None:
                messages = messages[:left]
                left -= len(messages)
            output.write(b"".join(map(line, messages)))
            if left == 0:
                return


def _report_gap(gap: StreamGap) -> None:
    complain(texts.gap_text(gap))
