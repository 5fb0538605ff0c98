"""`iris stream consumer`: list and delete the consumers of a stream."""

from __future__ import annotations

from typing import Annotated, Final

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, run
from iris.cli.stream import texts
from iris.streams import ConsumerInfo
from iris.wire.names import printable

COLUMNS: Final = ("name", "kind", "floor", "position", "lag", "pending", "redelivering", "workers", "dead")  # fmt: skip
TITLES: Final = (*COLUMNS[:-1], "unstored")
"""Titles of the columns: a dead letter counts in `dead` only until it is stored in the stream of dead letters."""

app = typer.Typer(
    name="consumer", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""List and delete the consumers of a stream.

    \b
    Examples:
      iris stream consumer list orders
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

    \b
    --json names the last one `dead`, and has two counters since the consumer was
    created: `missed` (messages removed or damaged before they were done) and
    `late` (acks of messages that were done already). Dead letters are counted
    by `iris stream info NAME.dead`.

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
            texts.print_table(TITLES, [_row(consumer) for consumer in found], right=TITLES[2:])
        return Exit.OK

    run(work)


@app.command("delete")
def delete_consumer(
    name: texts.Name,
    consumer: Annotated[str, typer.Argument(metavar="CONSUMER", help="Name of the consumer.")],
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    relay: options.RelayPath = None,
) -> None:
    """Delete a consumer and its position. Its workers end; a new consumer of that name begins again.

    \b
    Examples:
      iris stream consumer delete orders billing
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            await client.streams.delete_consumer(name, consumer, uuid=uuid, timeout=timeout)
        return Exit.OK

    run(work)


def _row(consumer: ConsumerInfo) -> tuple[str, ...]:
    kind = "group" if consumer.group else "single"
    if not consumer.durable:
        kind += ", until it leaves"
    figures = (str(getattr(consumer, column)) for column in COLUMNS[2:])
    return (printable(consumer.name), kind, *figures)
