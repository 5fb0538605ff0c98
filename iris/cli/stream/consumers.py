"""`iris stream consumer`: list, change, pause, resume, hand over and delete the consumers of a stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import typer

import iris
from iris.cli import options, output
from iris.cli.arguments import WrongUsage
from iris.cli.exits import Exit, run
from iris.cli.stream import texts
from iris.streams import ConsumerInfo
from iris.wire.names import printable

COLUMNS: Final = ("name", "kind", "floor", "position", "lag", "pending", "redelivering", "workers", "dead")  # fmt: skip
TITLES: Final = (*COLUMNS[:-1], "unstored", "state")
"""Titles of the columns: a dead letter counts in `dead` only until it is stored in the stream of dead letters."""

app = typer.Typer(
    name="consumer", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""List, change, pause, hand over and delete the consumers of a stream.

    \b
    Examples:
      iris stream consumer list orders
      iris stream consumer pause orders billing
      iris stream consumer handover orders billing
      iris stream consumer delete orders billing
    """,
)  # fmt: skip


@app.command("list")
def list_consumers(
    name: texts.Name,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """List the consumers of a stream: how far each is, and what its workers hold.

    \b
    Columns, separated by tabs in a pipe:
      floor         every message below this offset is done
      position      next offset to deliver
      lag           messages that are not done
      pending       messages delivered to workers and not done
      redelivering  messages waiting to be delivered again
      workers       workers that hold messages
      unstored      dead letters that are not in the stream NAME.dead yet
      state         paused, if nothing is delivered until it is resumed

    A second table lists the workers of consumers that are not shared: the active
    one, or those of several partitions, and those that stand by, the next one first.

    \b
    With --json, `unstored` is called `dead`, and the workers are in `active` and
    `standing_by`, which lists at most 8 of a partition; `standing` is how many
    there are. There are also `paused`, the settings
    `ack_timeout_us` and `max_deliver`, and counters since the consumer was created:
    `missed` (messages removed or damaged before they were done), `late` (acks of
    messages that were done already) and `redriven` (dead letters that were
    delivered again). `iris stream info NAME.dead` counts the dead letters.

    \b
    Examples:
      iris stream consumer list orders
      iris stream consumer list orders --json | jq 'select(.lag > 1000) | .name'
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            found = await client.streams.consumers(name, uuid=uuid, timeout=timeout)
        if json:
            for consumer in found:
                output.write_json(consumer)
        else:
            texts.print_table(TITLES, [_row(consumer) for consumer in found], right=TITLES[2:-1])
            if workers := [row for consumer in found for row in _workers(consumer)]:
                output.write(b"\n")
                texts.print_table(("consumer", "place", "worker"), workers)
        return Exit.OK

    run(work)


@app.command("change")
def change_consumer(
    name: texts.Name,
    consumer: texts.Consumer,
    ack_timeout: Annotated[
        float | None, typer.Option("--ack-timeout", metavar="AGE", parser=texts.parse_age, help="Deliver a message again if it is not settled after this time: 30s, 10m.", show_default=False)
    ] = None,
    max_deliver: Annotated[
        int | None, typer.Option("--max-deliver", metavar="N", min=0, max=65_535, help="After N deliveries a message becomes a dead letter; 0: never.", show_default=False)
    ] = None,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Change the settings of a consumer. It keeps its position, and its workers continue.

    Programs that still open the consumer with the old settings work, and get
    the new ones. `shared` and `durable` cannot be changed.

    \b
    Examples:
      iris stream consumer change orders billing --max-deliver 10
      iris stream consumer change orders billing --ack-timeout 5m
    """
    if ack_timeout is None and max_deliver is None:
        raise WrongUsage("nothing to change; give --ack-timeout or --max-deliver")
    _do(
        lambda client: client.streams.change_consumer(
            name, consumer, ack_timeout=ack_timeout, max_deliver=max_deliver, uuid=uuid, timeout=timeout
        ),
        relay,
    )  # fmt: skip


@app.command("pause")
def pause_consumer(
    name: texts.Name,
    consumer: texts.Consumer,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Deliver nothing to a consumer until `resume`. Nothing is lost, and its workers may settle what they hold.

    \b
    Examples:
      iris stream consumer pause orders billing
    """
    _do(
        lambda client: client.streams.pause_consumer(name, consumer, uuid=uuid, timeout=timeout),
        relay,
    )


@app.command("resume")
def resume_consumer(
    name: texts.Name,
    consumer: texts.Consumer,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Deliver to a paused consumer again.

    \b
    Examples:
      iris stream consumer resume orders billing
    """
    _do(
        lambda client: client.streams.resume_consumer(name, consumer, uuid=uuid, timeout=timeout),
        relay,
    )


@app.command("handover")
def hand_over(
    name: texts.Name,
    consumer: texts.Consumer,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Let the worker that stands by next be active. The one that was active stands by as the last.

    What it holds is delivered to the next worker, and what it settles is
    refused. In a stream with partitions, each partition is handed over.

    \b
    Examples:
      iris stream consumer handover orders billing
    """
    _do(
        lambda client: client.streams.handover_consumer(name, consumer, uuid=uuid, timeout=timeout),
        relay,
    )


@app.command("delete")
def delete_consumer(
    name: texts.Name,
    consumer: texts.Consumer,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Delete a consumer and its position. Its workers end; a new consumer of that name begins again.

    \b
    Examples:
      iris stream consumer delete orders billing
    """
    _do(
        lambda client: client.streams.delete_consumer(name, consumer, uuid=uuid, timeout=timeout),
        relay,
    )


def _do(call: Callable[[iris.Client], Awaitable[object]], relay: str | None) -> None:
    """Run a call that has nothing to print."""

    async def work() -> int:
        async with iris.connect(relay) as client:
            await call(client)
        return Exit.OK

    run(work)


def _row(consumer: ConsumerInfo) -> tuple[str, ...]:
    kind = "shared" if consumer.shared else "single"
    if not consumer.durable:
        kind += ", until it leaves"
    figures = (str(getattr(consumer, column)) for column in COLUMNS[2:])
    return (printable(consumer.name), kind, *figures, "paused" if consumer.paused else "ok")


def _workers(consumer: ConsumerInfo) -> list[tuple[str, ...]]:
    """Return who is active and who stands by: a row for each."""
    rows = [("active", one) for one in consumer.active]
    rows += [("stands by", one) for one in consumer.standing_by]
    if consumer.standing > len(consumer.standing_by):
        rows.append(("stands by", f"{consumer.standing - len(consumer.standing_by)} more"))
    return [(printable(consumer.name), place, printable(worker)) for place, worker in rows]
