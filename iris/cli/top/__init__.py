"""`iris top`: a live view of the network: members, relays, links, streams, and who is slow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from iris.cli import options, output
from iris.cli.exits import Exit, run, until_stopped

if TYPE_CHECKING:
    from iris.watch import Watch

WIDE = 160
"""Columns of plain text that goes to no terminal."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print all tables once, as text, and exit.")] = False,
    json: options.AsJson = False,
    view: Annotated[
        str, typer.Option("--view", metavar="NAME", help="The view to begin with: members, clusters, relays, links, sites, programs, streams, drops or slow.")
    ] = "members",
    filter: Annotated[str, typer.Option("--filter", metavar="TEXT", help="Show only rows that have this text.")] = "",
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.2, max=3600, help="Seconds between two updates.")] = 2.0,
    also: Annotated[
        list[str] | None, typer.Option("--also", metavar="RELAY", help="Ask this relay for its totals, too: a socket or tls://HOST:PORT. Repeatable.")
    ] = None,
    cluster: Annotated[
        list[str] | None, typer.Option("--cluster", metavar="NAME", help="Also show this cluster: one on other hosts, without a key of its own in the keyring. Repeatable.")
    ] = None,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Watch the network: members, relays, links, streams, drops, and who is slow.

    Members of clusters for which this keyring has keys describe themselves;
    other clusters are only counted. Only a relay itself knows its rates: the
    relay of this host is asked, and those of --also.

    Views are chosen with 1 to 9, sorted with s, and filtered with /; ? shows
    all keys. NO_COLOR turns colours off.

    --json prints one JSON object for each update until Ctrl-C; with --once, a
    single one. docs/monitoring.md explains the figures.

    \b
    Examples:
      iris top
      iris top --view streams --filter billing
      iris top --once
      iris top --once --json | jq '.slow'
      iris top --also tls://relay2.example:7431
    """
    from iris.cli.top.tables import VIEWS

    if view not in VIEWS:
        raise typer.BadParameter(
            f"{view!r} is not a view; use {', '.join([*VIEWS][:-1])} or {[*VIEWS][-1]}",
            param_hint="--view",
        )
    if not once and not json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.BadParameter(
            "the live view needs a terminal; add --once for text, or --json for programs",
            param_hint="iris top",
        )

    async def work() -> int:
        from iris.watch import Watch, as_json

        watch = Watch(relay, also or (), clusters=cluster or (), interval_s=interval)
        if once:
            network = await watch.once(min(1.0, interval))
            if json:
                output.write(as_json(network) + b"\n")
            else:
                from iris.cli.top.screen import as_text

                output.write(as_text(network, _columns(), filter).encode())
            return Exit.OK
        await until_stopped(_lines(watch) if json else _live(watch, view, filter))
        return Exit.OK

    run(work)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or WIDE
    except OSError:
        return WIDE


async def _lines(watch: Watch) -> None:
    from iris.watch import as_json

    async with watch:
        async for network in watch.updates():
            output.write(as_json(network) + b"\n")


async def _live(watch: Watch, view: str, filter: str) -> None:
    from iris.cli.top.screen import Screen
    from iris.cli.top.terminal import Terminal

    screen, shown = Screen(view=view, filter=filter), watch.latest
    done = asyncio.Event()

    def draw() -> None:
        nonlocal shown
        if not screen.paused:
            shown = watch.latest
        terminal.show(screen.draw(shown, *terminal.size()))

    def press(key: str) -> None:
        screen.press(key)
        if screen.quit:
            done.set()
        else:
            draw()

    async def follow() -> None:
        async for _ in watch.updates():
            draw()

    # Warnings of the library, such as a lost connection, would be printed across the screen.
    quiet = logging.NullHandler()
    logging.getLogger("iris").addHandler(quiet)
    terminal = Terminal(press, draw, done.set, os.environ)
    try:
        async with watch:
            with terminal:
                draw()
                tasks = [asyncio.create_task(follow()), asyncio.create_task(done.wait())]
                try:
                    finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.gather(*tasks, return_exceptions=True)
                for task in finished:
                    task.result()
    finally:
        logging.getLogger("iris").removeHandler(quiet)
