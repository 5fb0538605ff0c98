"""`iris subscribe`: print what is published."""

from __future__ import annotations

from typing import Annotated

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, complain, run, until_stopped
from iris.errors import RequestTimeout


def subscribe(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="FILTER", help="Topic; '*' stands for one token, a final '>' for the rest."
        ),
    ],
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Stop after so many messages.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", min=0.001, help="Stop after so many seconds.")
    ] = None,
    group: Annotated[
        str, typer.Option("--group", help="Share the messages with the others of this queue group.")
    ] = "",
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Publishers that ask for it wait rather than lose what does not fit."
        ),
    ] = False,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Print what is published to matching topics, one message a line, until Ctrl-C.

    Messages that were lost on the way are told on stderr. Ends with exit code
    5 if --timeout passes before --count messages came.

    \b
    Examples:
      iris subscribe 'flights.*.B6'
      iris subscribe 'logs.>' --json | jq -r .payload
      iris subscribe orders.new --group billing --count 1
    """
    seen = 0

    async def follow() -> None:
        nonlocal seen
        async with (
            iris.connect(relay) as client,
            client.subscribe(
                pattern, group=group, on_gap=_tell, when_full="wait" if wait else "drop"
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
                complain(f"{seen} of {count} messages came within {timeout:g} s")
                return Exit.TIMEOUT
        return Exit.OK

    run(work)


def _tell(loss: iris.Lost) -> None:
    number = "an unknown number of" if loss.count is None else loss.count
    complain(f"lost {number} messages to {loss.name}: {loss.cause}")
