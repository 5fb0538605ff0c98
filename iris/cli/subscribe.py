"""`iris subscribe`: print the messages that are published to a topic."""

from __future__ import annotations

from typing import Annotated

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, complain, run, until_stopped
from iris.client import connect
from iris.errors import RequestTimeout
from iris.wire.names import plural


def subscribe(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="FILTER",
            help="Topic or filter: '*' matches one part, a final '>' all that follow.",
        ),
    ],
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Stop after N messages.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-t", min=0.001, help="Stop after this many seconds."),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            "--group", help="Queue group: each message goes to one subscriber of the group."
        ),
    ] = "",
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="While this subscriber is full, publishers with --wait wait instead of dropping.",
        ),
    ] = False,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Print messages published to matching topics, one per line, until Ctrl-C.

    Lost messages are reported on stderr. The exit code is 5 if --timeout
    passes before --count messages have arrived.

    \b
    Examples:
      iris subscribe 'flights.*.B6'
      iris subscribe 'logs.>' --json | jq -r .payload
      iris subscribe orders.new --group billing --count 1
    """
    options.note_site(pattern)
    seen = 0

    async def follow() -> None:
        nonlocal seen
        async with (
            connect(relay) as client,
            client.subscribe(
                pattern, group=group, on_loss=_report_loss, when_full="wait" if wait else "drop-new"
            ) as messages,
        ):
            async for message in messages:
                output.show(message, as_json=json)
                seen += 1
                if seen == count:
                    return

    async def work() -> int:
        import asyncio

        try:
            async with asyncio.timeout(timeout):
                await until_stopped(follow())
        except TimeoutError as error:
            if isinstance(error, RequestTimeout):
                raise
            if count is not None:
                complain(f"received {seen} of {plural(count, 'message')} within {timeout:g} s")
                return Exit.TIMEOUT
        return Exit.OK

    run(work)


def _report_loss(loss: iris.Loss) -> None:
    number = (
        "an unknown number of messages" if loss.count is None else plural(loss.count, "message")
    )
    complain(f"lost {number} to {loss.name}: {loss.cause}")
