"""`iris stream mirror`, `promote` and `handover`: copy a stream, such as one of another site, make the copy a stream of
its own, and let it take the place of its source."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Final

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, complain, run, until_stopped
from iris.cli.stream import texts
from iris.streams import Mirror

PROGRESS_S: Final = 1.0
"""Shortest time between two lines of --verbose."""
PATIENCE_S: Final = 30.0

Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="The stream to copy; SITE:NAME for a stream of another site.")
]  # fmt: skip


def mirror(
    source: Source,
    name: texts.Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new messages, until Ctrl-C.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Report progress and lag on stderr.")
    ] = False,
    max_bytes: texts.MaxBytes = None,
    max_messages: texts.MaxMessages = None,
    max_age: texts.MaxAge = None,
    compact: Annotated[
        bool | None, typer.Option("--compact/--no-compact", help="Keep only the last message of each key, or all.", show_default=False)
    ] = None,
    uuid: Annotated[
        str, typer.Option("--uuid", metavar="HEX", help="Which source stream, if two stores have one of this name.", show_default=False)
    ] = "",
    durability: Annotated[
        str, typer.Option("--durability", metavar="WHERE", help="Where the copy is created: on the 'disk' of a store, or in a 'bucket'.")
    ] = "disk",
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", min=0.001, help="Seconds that a relay or store may be away. Default: 30, or forever with --follow.", show_default=False)
    ] = None,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Copy a stream, usually of another site, to NAME in this site, in case the source is lost.

    NAME is created if it does not exist. It gets the same messages at the same
    offsets, still sealed, and accepts no others until `iris stream promote`.
    Run the command again to continue where the copy ends. `iris stream info
    NAME` shows the lag: the messages that you would lose with the source now.
    Limits apply to the copy; without limits it keeps every message.

    \b
    Examples:
      iris stream mirror eu:orders orders-eu --follow
      iris stream mirror eu:orders orders-eu --max-age 30d -f -v
      iris stream mirror eu:orders orders-eu && echo up to date
    """

    async def work() -> int:
        patience = timeout or (math.inf if follow else PATIENCE_S)
        async with iris.connect(relay) as client:
            made = client.streams.mirror(
                source, name, follow=follow, max_bytes=max_bytes, max_messages=max_messages, max_age=max_age,
                compact=compact, uuid=uuid, patience=patience, durability=durability,
            )  # fmt: skip
            copying = _copy(made, verbose=verbose)
            if follow:
                await until_stopped(copying)
            else:
                await copying
        return Exit.OK

    run(work)


async def _copy(mirror: Mirror, *, verbose: bool) -> None:
    found = asyncio.Event()
    progress = asyncio.create_task(_report_progress(mirror, found)) if verbose else None
    try:
        async with mirror:
            found.set()
            await mirror.run()
    finally:
        if progress is not None:
            progress.cancel()
            if found.is_set():
                complain(_figures(mirror))


async def _report_progress(mirror: Mirror, found: asyncio.Event) -> None:
    """Print how far the copy is and what it waits for, each time that this changes."""
    printed = ""
    while True:
        parts = [_figures(mirror)] if found.is_set() else []
        parts += [f"{mirror.name}: waiting: {mirror.waiting}"] if mirror.waiting else []
        if parts and (line := "; ".join(parts)) != printed:
            complain(printed := line)
        await asyncio.sleep(PROGRESS_S)


def _figures(mirror: Mirror) -> str:
    return f"{mirror.name}: copied {mirror.copied}, end {mirror.end}, lag {mirror.lag}"


def promote(
    name: texts.Name,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Record the topic or cluster that the source recorded.")
    ] = True,
    place: Annotated[
        str, typer.Option("--as", metavar="[SITE:]SOURCE", help="Take the place of the source, too, under its name.", show_default=False)
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="With --as: the store of the source is lost for good.")
    ] = False,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Turn a copy into a stream of its own, when its source is lost, and print its next offset.

    It continues at that offset, accepts appends, and records in this site what
    its source recorded. Messages that were not copied before cannot be copied
    later. Promoting a stream twice changes nothing.

    With --as it gets the name of its source, so that programs find it there.
    This is refused while the source answers: use `iris stream handover` then.
    If the store of the source comes back after all, it learns of this when
    somebody looks the name up. Until then both accept messages. After that the
    old log can only be read, by its uuid; `iris check` counts what only it has.

    \b
    Examples:
      iris stream promote orders-eu
      iris stream promote orders-copy --as orders --force
      iris stream promote orders-eu --no-record
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            info = await client.streams.promote(
                name, record=record, place=place, force=force, uuid=uuid, timeout=timeout
            )
        output.write(b"%d\n" % (info.replaced_at if place else info.end))
        return Exit.OK

    run(work)


def handover(
    name: Annotated[str, typer.Argument(metavar="OLD", help="The stream.")],
    to: Annotated[
        str, typer.Argument(metavar="NEW", help="The copy that takes its place. It is created if it does not exist.")
    ],
    durability: Annotated[
        str, typer.Option("--durability", metavar="WHERE", help="Where the copy is: in a 'bucket', or on the 'disk' of a store.")
    ] = "bucket",
    uuid: texts.Uuid = "",
    timeout: Annotated[
        float, typer.Option("--timeout", "-t", min=0.001, help="Seconds that a relay or store may be away.")
    ] = PATIENCE_S,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Let a copy take the place of a stream, such as to bring it from a disk into a bucket. Prints the copy's uuid.

    NEW gets the messages of OLD at the same offsets, its consumers, dead
    letters, producers and message ids, and then its name. Nothing is lost or
    stored twice. While the last messages are copied, appends and workers wait.
    Workers and readers of OLD then end with an error; start them again.

    If the command fails or is killed, run it again, or give up with `iris
    stream resume OLD`. OLD is kept: delete it by its uuid when nobody needs it.

    \b
    Examples:
      iris stream handover orders orders-bucket
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            info = await client.streams.handover(
                name, to, durability=durability, uuid=uuid, patience=timeout
            )
        output.write(info.uuid.encode() + b"\n")
        return Exit.OK

    run(work)
