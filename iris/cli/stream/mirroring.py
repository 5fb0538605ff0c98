"""`iris stream mirror` and `iris stream promote`: a copy of another site's stream, and the day that it is needed."""

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

TELL_S: Final = 1.0
"""Between two lines of --verbose."""
PATIENCE_S: Final = 30.0

Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="The stream to copy: SITE:NAME for that of another site.")
]  # fmt: skip


def mirror(
    source: Source,
    name: texts.Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Tell on stderr what was copied, and the lag.")
    ] = False,
    max_bytes: texts.MaxBytes = None,
    max_messages: texts.MaxMessages = None,
    max_age: texts.MaxAge = None,
    compact: Annotated[
        bool | None, typer.Option("--compact/--no-compact", help="Of the messages with one key keep the last.", show_default=False)
    ] = None,
    uuid: Annotated[
        str, typer.Option("--uuid", metavar="HEX", help="Which log, where two stores hold one of the source's name.", show_default=False)
    ] = "",
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", min=0.001, help="How many seconds a relay or store may be away: 30; with --follow for ever.", show_default=False)
    ] = None,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Copy a stream of another site into NAME, here: for the day the site is lost.

    The copy is made if it is not there, and has the same messages at the same
    offsets, still sealed. It takes nothing else until `iris stream promote`.
    Run again, it goes on where the copy ends. `iris stream info NAME` shows the
    lag, which is what would be lost with the source now. Limits are those of
    the copy; without any it keeps all that it ever got.

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
                compact=compact, uuid=uuid, patience=patience,
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
    telling = asyncio.create_task(_tell(mirror, found)) if verbose else None
    try:
        async with mirror:
            found.set()
            await mirror.run()
    finally:
        if telling is not None:
            telling.cancel()
            if found.is_set():
                complain(_figures(mirror))


async def _tell(mirror: Mirror, found: asyncio.Event) -> None:
    """Tell how far it is, and what it waits for, when that has changed."""
    told = ""
    while True:
        parts = [_figures(mirror)] if found.is_set() else []
        parts += [f"{mirror.name}: waiting: {mirror.waiting}"] if mirror.waiting else []
        if parts and (said := "; ".join(parts)) != told:
            complain(told := said)
        await asyncio.sleep(TELL_S)


def _figures(mirror: Mirror) -> str:
    return f"{mirror.name}: copied {mirror.copied}, next {mirror.next}, lag {mirror.lag}"


def promote(
    name: texts.Name,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Record here what the source recorded: its topic or cluster.")
    ] = True,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Make a copy a stream of its own, and print its next offset: its source is gone.

    It goes on there, takes appends, and records what its source did, in this
    site. What the source had beyond is not in it and cannot come later, and
    the copy takes no more copies. Again it changes nothing.

    \b
    Examples:
      iris stream promote orders-eu
      iris stream promote orders-eu --no-record
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            info = await client.streams.promote(name, record=record, uuid=uuid, timeout=timeout)
        output.write(b"%d\n" % info.next)
        return Exit.OK

    run(work)
