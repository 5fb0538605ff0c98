"""`iris stream dead` and `iris stream redrive`: look at dead letters, and have their messages delivered again."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import typer

import iris
from iris.cli import options, output
from iris.cli.arguments import WrongUsage
from iris.cli.exits import Exit, complain, run
from iris.cli.stream import texts
from iris.documents import as_bytes, stream_document
from iris.streams import StreamMessage
from iris.wire.names import plural, printable

SHOWN: Final = 60
"""Characters of a payload in the table."""
COLUMNS: Final = ("offset", "consumer", "deliveries", "reason", "payload")


def dead(
    name: texts.Name,
    consumer: Annotated[
        str, typer.Argument(metavar="[CONSUMER]", help="Only the letters of this consumer.", show_default=False)
    ] = "",
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=1, help="Show at most N letters, the oldest first.")
    ] = 100,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 30.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Show the dead letters of a stream: messages that a consumer gave up.

    The column `offset` has the offset of the message in the stream, which
    `iris stream redrive` needs; a partition other than 0 stands before it. With
    --json, `dead.offset` is this offset, and `offset` is that of the letter in
    the stream NAME.dead. The letters are not deleted.

    \b
    Examples:
      iris stream dead orders
      iris stream dead orders billing --json | jq .dead.reason
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            found = await client.streams.dead_letters(
                name, consumer, limit=count, uuid=uuid, timeout=timeout
            )
        if json:
            for letter in found:
                output.write(msgspec.json.encode(stream_document(letter)) + b"\n")
        else:
            texts.print_table(COLUMNS, [_row(letter) for letter in found], right=("deliveries",))
        if not found:
            complain("no dead letters")
        return Exit.OK

    run(work)


def redrive(
    name: texts.Name,
    consumer: texts.Consumer,
    offsets: Annotated[
        list[int] | None, typer.Option("--offset", metavar="OFFSET", min=0, help="The message at this offset of the stream. May be repeated.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All dead letters that exist now.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="At most N dead letters, the oldest first.", show_default=False)
    ] = None,
    partition: texts.Partition = None,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 30.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Deliver dead letters to their consumer again, and delete the letters. Prints what was done.

    The messages count as not delivered yet, so one that still fails becomes a
    dead letter again after `max_deliver` deliveries. No message is lost if the
    store or this command is killed: run it again.

    \b
    Examples:
      iris stream redrive orders billing --all
      iris stream redrive orders billing --limit 10
      iris stream redrive orders billing --offset 17 --offset 23
    """
    if not (offsets or everything or limit):
        raise WrongUsage("say which dead letters: --all, --limit N or --offset OFFSET")

    async def work() -> int:
        async with iris.connect(relay) as client:
            done = await client.streams.redrive(
                name, consumer, offset=offsets or None, limit=limit, partition=partition, uuid=uuid, timeout=timeout
            )  # fmt: skip
        if json:
            output.write_json(done)
        else:
            output.write(f"redrove {plural(done.redriven, 'dead letter')}\n".encode())
        if done.gone:
            complain(
                f"{plural(done.gone, 'dead letter')} not delivered again, because {name} no longer has the message; the limits of "
                f"{name} remove them"
            )
        if done.left:
            complain(
                f"{plural(done.left, 'dead letter')} not delivered again, because consumer {consumer} has too many unsettled messages; "
                "run the command again when its workers have settled some"
            )
        return Exit.OK

    run(work)


def _row(letter: StreamMessage) -> tuple[str, ...]:
    dead = letter.dead
    assert dead is not None
    payload = as_bytes(letter).decode(errors="replace")
    if len(payload) > SHOWN:
        payload = payload[: SHOWN - 1] + "…"
    unreadable = (letter.headers or {}).get("unreadable", "") if not letter.payload else ""
    offset = f"{letter.partition}/{dead.offset}" if letter.partition else str(dead.offset)
    words = (offset, dead.consumer, str(dead.deliveries), dead.reason, unreadable or payload)  # fmt: skip
    return tuple(map(printable, words))
