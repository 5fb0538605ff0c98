"""`iris stream`: create, read and write durable streams.

texts      options and texts that several verbs share
showing    streams as tables and lists
reading    read, export
writing    append, import
mirroring  mirror, promote, handover
consumers  consumer list, change, pause, resume, delete
letters    dead, redrive
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

import iris
from iris.cli import options, output
from iris.cli.arguments import WrongUsage
from iris.cli.exits import Exit, complain, run
from iris.cli.stream import consumers, letters, mirroring, reading, showing, texts, writing
from iris.streams import StreamInfo
from iris.wire.names import plural, printable

app = typer.Typer(
    name="stream", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""Keep messages on disk and read them later: durable streams.

    A stream is a log that a store keeps on disk (iris relay --data DIR). It
    records a topic, or the pushes and broadcasts of a cluster, or holds the
    messages that you append.

    \b
    Examples:
      iris stream create orders
      iris stream create flights --topic 'flights.>' --max-age 7d
      iris stream append orders hello
      iris stream read orders --follow
      iris stream list
    """,
)  # fmt: skip


@app.command()
def create(
    name: texts.Name,
    topic: Annotated[
        str, typer.Option("--topic", metavar="FILTER", help="Record messages published to matching topics.")
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="CLUSTER", help="Record this cluster: the stream is a member, so it gets a share of the pushes, and all broadcasts.")
    ] = "",
    max_bytes: texts.MaxBytes = None,
    max_messages: texts.MaxMessages = None,
    max_age: texts.MaxAge = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Keep only the last message of each key.")
    ] = False,
    dedup_window: texts.DedupWindow = None,
    durability: Annotated[
        str, typer.Option("--durability", metavar="WHERE", help="When a message is acknowledged: 'disk', when the store's disk has it; 'bucket', when its object storage has it.")
    ] = "disk",
    partitions: Annotated[
        int, typer.Option("--partitions", metavar="N", min=1, help="Divide the stream into N logs, spread over the stores of this site. Not with --topic or --cluster.")
    ] = 1,
    timeout: options.Timeout = 10.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Make a stream and print its uuid. When it reaches a limit, its oldest messages are deleted.

    A stream that exists with the same definition is a success; with another
    definition the exit code is 1.

    \b
    Examples:
      iris stream create orders --max-bytes 10GiB --max-age 7d
      iris stream create flights --topic 'flights.>'
      iris stream create prices --compact
      iris stream create clicks --partitions 8
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            info = await client.streams.create(
                name, topic=topic, cluster=cluster, max_bytes=max_bytes or 0, max_messages=max_messages or 0,
                max_age=max_age or 0.0, compact=compact, dedup_window=dedup_window or 0.0, durability=durability,
                partitions=partitions, timeout=timeout,
            )  # fmt: skip
        if json:
            output.write_json(info)
        else:
            output.write(info.uuid.encode() + b"\n")
        return Exit.OK

    run(work)


@app.command("list")
def list_streams(
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """List the streams under your keys, by name.

    In a pipe, columns are separated by tabs, below a line of titles: name,
    uuid, what it records, messages, bytes, oldest offset, end, state,
    host, id of the store. Without streams it says so on stderr. A terminal
    shows ids of stores if two stores of one host have streams.

    \b
    Examples:
      iris stream list
      iris stream list | tail -n +2 | cut -f1
      iris stream list --json | jq 'select(.failed != "") | .name'
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            found = await client.streams.list(timeout=timeout)
        if json:
            for info in found:
                output.write_json(info)
            return Exit.OK
        showing.print_streams(found)
        if not found:
            complain("no streams under your keys; `iris stream create` makes one")
        return Exit.OK

    run(work)


@app.command()
def info(
    name: texts.Name,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Show a stream: what it records, its limits and offsets, its state and its store.

    For a copy it also shows the lag: how many messages the copy was behind
    its source when its mirror last reported, and the time of that report.

    In a pipe, each line is a name, a tab and a value, in bytes and seconds.
    A limit of 0 means no limit.

    If the stream has several partitions, the figures are those of partition 0.
    A table of all follows; with --json there is one object for each.

    \b
    Examples:
      iris stream info orders
      iris stream info orders --json | jq .end
    """

    async def work() -> int:
        parts: list[StreamInfo] = []
        async with iris.connect(relay) as client:
            found = await client.streams.describe(name, uuid=uuid, timeout=timeout)
            if found.partitions > 1:
                parts = await client.streams.partitions(name, uuid=found.uuid, timeout=timeout)
        if json:
            for one in parts or [found]:
                output.write_json(one)
            return Exit.OK
        if sys.stdout.isatty():
            showing.print_info(found)
        else:
            rows = [(title, printable(value)) for title, value in showing.facts(found, human=False)]
            texts.print_table((), rows)
        if parts:
            output.write(b"\n")
            showing.print_partitions(parts)
        return Exit.OK

    run(work)


@app.command()
def change(
    name: texts.Name,
    max_bytes: texts.MaxBytes = None,
    max_messages: texts.MaxMessages = None,
    max_age: texts.MaxAge = None,
    compact: Annotated[
        bool | None, typer.Option("--compact/--no-compact", help="Keep only the last message of each key, or all.", show_default=False)
    ] = None,
    dedup_window: texts.DedupWindow = None,
    partitions: Annotated[
        int | None, typer.Option("--partitions", metavar="N", min=1, help="Add partitions until there are N. Some message keys move to the new partitions.", show_default=False)
    ] = None,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Change the limits of a stream. Limits that you do not name stay as they are.

    \b
    Examples:
      iris stream change orders --max-bytes 20GiB
      iris stream change orders --max-age 0
      iris stream change clicks --partitions 12
    """
    given = {"max_bytes": max_bytes, "max_messages": max_messages, "max_age": max_age, "compact": compact, "dedup_window": dedup_window, "partitions": partitions}  # fmt: skip
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if not changes:
        raise WrongUsage("nothing to change; give at least one setting, such as --max-age 7d")
    _do(lambda client: client.streams.change(name, **changes, uuid=uuid, timeout=timeout), relay)


@app.command()
def pause(
    name: texts.Name,
    consumers: Annotated[
        bool,
        typer.Option(
            "--consumers", help="Pause only the consumers; recording continues, so nothing is lost."
        ),
    ] = False,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Pause a stream until `resume`: stop recording, or with --consumers stop only its consumers.

    Without --consumers, messages published meanwhile are LOST to the stream,
    which reports them as a gap. Pushes go to other members, and appends are refused.
    Readers and consumers continue with the messages that are stored.

    With --consumers nothing is lost: the stream records, accepts appends and
    serves readers. Consumers receive the messages after `resume`.

    \b
    Examples:
      iris stream pause orders --consumers
      iris stream pause orders
    """
    _do(
        lambda client: client.streams.pause(name, consumers=consumers, uuid=uuid, timeout=timeout),
        relay,
    )


@app.command()
def resume(
    name: texts.Name,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Resume a paused stream: recording, appends and consumers.

    \b
    Examples:
      iris stream resume orders
    """
    _do(lambda client: client.streams.resume(name, uuid=uuid, timeout=timeout), relay)


@app.command()
def keys(timeout: options.Timeout = 10.0, relay: options.RelayPath = None) -> None:
    """Add the keys of your keyring to every stream that lacks one of them. Prints these streams.

    A stream does not record messages that are sealed with other keys than its
    own. `iris key promote` does this, too, if a relay is running.

    \b
    Examples:
      iris stream keys
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            for info in await client.streams.share_keys(timeout=timeout):
                output.write(
                    f"{info.name}: kept under {plural(len(info.key_ids), 'key')}\n".encode()
                )
        return Exit.OK

    run(work)


@app.command()
def move(
    name: texts.Name,
    to: Annotated[
        str, typer.Option("--to", metavar="STORE", help="The new store: its host, or at least 4 digits of its id.", show_default=False)
    ],
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 60.0,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Move a stream that is in a bucket to another store of the same bucket.

    Nothing is lost or stored twice. Readers, consumers and appends wait while
    the new store reads the stream from the bucket, and continue there.

    A stream on a disk cannot be moved; `iris stream handover` brings it into a
    bucket.

    \b
    Examples:
      iris stream move orders --to db-2
      iris stream move orders --to 3f9c01ab
      iris stream move clicks/3 --to db-2
    """
    _do(lambda client: client.streams.move(name, to=to, uuid=uuid, timeout=timeout), relay)


@app.command()
def balance(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Only this stream.", show_default=False)
    ] = "",
    timeout: options.Timeout = 10.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Say which partitions to move so that the stores have equal shares of each stream. It moves nothing.

    Each line has the partition, the store that has it, the one to move it to,
    its bytes, and the command that moves it. Partitions on a store's disk
    cannot be moved; only those in a bucket can.

    \b
    Examples:
      iris stream balance
      iris stream balance clicks --json
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            found = await client.streams.balance(name, timeout=timeout)
        if json:
            for one in found:
                output.write_json(one)
            return Exit.OK
        human = sys.stdout.isatty()
        rows = []
        for one in found:
            size = texts.size_text(one.size_bytes) if human else str(one.size_bytes)
            command = f"iris stream move {one.name} --to {one.to_store[:8]}"
            words = (one.name, one.host, one.to_host, size, command if one.movable else "on a disk: cannot be moved")  # fmt: skip
            rows.append(tuple(map(printable, words)))
        texts.print_table(("partition", "from", "to", "bytes", "command"), rows, right=("bytes",))
        if not found:
            complain("no partition has to move")
        return Exit.OK

    run(work)


@app.command()
def delete(
    name: texts.Name,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm the deletion.")] = False,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Delete a stream with its messages, dead letters and consumers. This cannot be undone.

    \b
    Examples:
      iris stream delete orders --yes
    """
    if not yes:
        raise WrongUsage(f"this deletes stream {name} with all its messages; confirm with --yes")
    _do(lambda client: client.streams.delete(name, uuid=uuid, timeout=timeout), relay)


app.command("read")(reading.read)
app.command("append")(writing.append)
app.command("export")(reading.export)
app.command("import")(writing.import_)
app.command("dead")(letters.dead)
app.command("redrive")(letters.redrive)
app.command("mirror")(mirroring.mirror)
app.command("promote")(mirroring.promote)
app.command("handover")(mirroring.handover)
app.add_typer(consumers.app)


def _do(call: Callable[[iris.Client], Awaitable[object]], relay: str | None) -> None:
    """Run a call that has nothing to print."""

    async def work() -> int:
        async with iris.connect(relay) as client:
            await call(client)
        return Exit.OK

    run(work)
