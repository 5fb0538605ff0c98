"""`iris stream append` and `iris stream import`: messages from an argument or standard input."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from typing import Annotated, Final

import msgspec
import typer

import iris
from iris.causes import print_causes
from iris.cli import options, output, stdin
from iris.cli.exits import Exit, complain, exit_code, run
from iris.cli.stream import texts
from iris.cli.stream.reading import Line
from iris.core.bundle import Headers, check_headers
from iris.core.message import Message, encode_payload
from iris.errors import ConfigError, DecodeError, IrisError, MessageTooLarge, NoStream
from iris.streams import Offset

BATCH: Final = 1000
BATCH_BYTES: Final = 1 << 20
_decode_line: Final = msgspec.json.Decoder(Line).decode

Message_ = Annotated[
    str | None,
    typer.Argument(metavar="MESSAGE", help="The message to append. Without it, or with '-': standard input.", show_default=False),
]  # fmt: skip


class BadLine(ConfigError):
    """A line of standard input is invalid; the message has its number."""


class Entry(msgspec.Struct, frozen=True):
    """A message to append."""

    data: bytes
    packed: bool
    headers: Headers | None


class Account(msgspec.Struct):
    """Counts of the lines of standard input, and the offsets they got."""

    lines: int = 0
    appended: int = 0
    skipped: int = 0
    first: int | None = None
    last: int | None = None
    spread: bool = False
    """The offsets are of several partitions, so `first` and `last` mean nothing."""
    unsure: int = 0
    """Messages sent to the store and not yet acknowledged."""


def append(
    name: texts.Name,
    message: Message_ = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Key of the message: compaction keeps the last message of each key.", show_default=False)
    ] = None,
    ttl: Annotated[
        float | None, typer.Option("--ttl", metavar="AGE", parser=texts.parse_age, help="Delete the message after this time: 90s, 10m, 7d.", show_default=False)
    ] = None,
    deliver_at: Annotated[
        datetime | None, typer.Option("--deliver-at", metavar="TIME", parser=texts.parse_time, help="Deliver it to consumers at this ISO time, not before.", show_default=False)
    ] = None,
    expect: Annotated[
        int | None, typer.Option("--expect", metavar="OFFSET", min=0, help="Append only if the message gets this offset.", show_default=False)
    ] = None,
    tombstone: Annotated[
        bool, typer.Option("--tombstone", help="Mark --key as deleted; MESSAGE may be absent.")
    ] = False,
    message_id: Annotated[
        str | None, typer.Option("--id", help="Id of the message: within the stream's dedup window it is stored once.", show_default=False)
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", "-l", help="Append each line of standard input as a message.")
    ] = False,
    header: options.HeaderList = None,
    pack: options.Pack = False,
    partition: texts.Partition = None,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 10.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Append a message and print its offset, once it is on the store's disk or in its bucket.

    If the stream has several partitions, the partition is printed, a slash and
    the offset. --lines spreads the lines, so it prints only how many there were.

    Standard input is one message, including its last line end. With --lines,
    the first and the last offset are printed, and --timeout is for each batch
    of up to 1,000 lines.

    \b
    Exit codes:
      1  the message would not get the offset of --expect; it was not stored
      4  refused for now: the message was not stored; try again later
      5  the message may have been stored

    \b
    Examples:
      iris stream append orders '{"id": 7}'
      iris stream append prices 101.5 --key ACME --ttl 10m
      iris stream append prices --key ACME --tombstone
      tail -F access.log | iris stream append access --lines
    """
    headers = options.parse_headers(header)
    if tombstone and key is None:
        raise typer.BadParameter(
            "a tombstone requires a key; add --key KEY", param_hint="--tombstone"
        )
    if lines:
        if message not in (None, "-"):
            raise typer.BadParameter(
                "--lines reads standard input; leave MESSAGE out", param_hint="MESSAGE"
            )
        given = {
            "--key": key,
            "--ttl": ttl,
            "--deliver-at": deliver_at,
            "--expect": expect,
            "--id": message_id,
        }
        if partition is not None:
            given["--partition"] = partition
        alone = [option for option, value in given.items() if value is not None]
        if alone:
            raise typer.BadParameter(
                f"{alone[0]} is for a single message; use it without --lines", param_hint="--lines"
            )

        def entry(line: bytes) -> Entry:
            try:
                data, packed = encode_payload(options.unpack(line) if pack else line)
            except typer.BadParameter as error:
                raise BadLine(str(error.message)) from error
            return Entry(data, packed, headers)

        def report(account: Account) -> None:
            if json:
                span = {"appended": account.appended, "first": account.first, "last": account.last}
                output.write_json(span)
            elif account.spread:
                output.write(b"%d\n" % account.appended)
            elif account.appended:
                output.write(b"%d %d\n" % (account.first or 0, account.last or 0))

        run(
            lambda: _append_lines(name, entry, uuid=uuid, timeout=timeout, relay=relay, done=report)
        )
    nothing = tombstone and message is None
    body = b"" if nothing else options.read_payload(message, pack=pack)

    async def work() -> int:
        async with iris.connect(relay) as client:
            offset = await client.streams.append(
                name, body, headers=headers, key=key, ttl=ttl, deliver_at=deliver_at, expect=expect, tombstone=tombstone, message_id=message_id,
                partition=partition, uuid=uuid, timeout=timeout,
            )  # fmt: skip
        if json and isinstance(offset, Offset):
            output.write_json({"partition": offset.partition, "offset": int(offset)})
        elif json:
            output.write_json({"offset": offset})
        elif isinstance(offset, Offset):
            output.write(b"%d/%d\n" % (offset.partition, offset))
        else:
            output.write(b"%d\n" % offset)
        return Exit.OK

    run(work)


def import_(
    name: texts.Name,
    uuid: texts.Uuid = "",
    timeout: options.Timeout = 30.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Append the messages that `iris stream export` wrote, in order, from standard input.

    They get new offsets, new times and the name of this stream. Tombstones are
    skipped, because an export does not contain their keys. Importing a file
    twice appends its messages twice. An invalid line ends the import with exit
    code 2: the lines before it were appended, the others were not. The number
    of appended messages is printed in any case.

    Only `payload` (base64) is required in a line; see `iris stream export`.

    \b
    Examples:
      iris stream import orders < orders.jsonl
      iris stream export orders | IRIS_CONFIG=/etc/other iris stream import orders
    """

    def entry(line: bytes) -> Entry | None:
        try:
            found = _decode_line(line)
            if found.packed:
                _ = Message(found.payload, "", packed=True).value
            check_headers(found.headers or {})
        except (msgspec.DecodeError, UnicodeDecodeError, DecodeError, MessageTooLarge) as error:
            raise BadLine(str(error)) from error
        if found.tombstone:
            return None
        return Entry(found.payload, found.packed, found.headers or None)

    def report(account: Account) -> None:
        if json:
            output.write_json(
                {
                    "appended": account.appended,
                    "skipped": account.skipped,
                    "first": account.first,
                    "last": account.last,
                }
            )
        else:
            skipped = f", {account.skipped} tombstones skipped" if account.skipped else ""
            output.write(f"{account.appended} appended{skipped}\n".encode())

    run(lambda: _append_lines(name, entry, uuid=uuid, timeout=timeout, relay=relay, done=report))


# -- lines -----------------------------------------------------------------------------------------------------


async def _append_lines(
    name: str, entry: Callable[[bytes], Entry | None], *, uuid: str, timeout: float, relay: str | None,
    done: Callable[[Account], None],
) -> int:  # fmt: skip
    """Append the entry that `entry` makes of each line. `done` gets the account, also after an error or an
    interrupt."""
    account, code = Account(), Exit.OK
    try:
        async with iris.connect(relay) as client, contextlib.aclosing(_batches()) as batches:
            async for lines in batches:
                await _append_batch(client, name, lines, entry, account, uuid, timeout)
    except IrisError as error:
        code = exit_code(error)
        unsure = 0 if isinstance(error, NoStream) else account.unsure
        more = f", and perhaps some of the next {unsure}" if unsure else ""
        complain(f"{error} ({account.appended} appended before it{more})")
        print_causes(error)
    finally:
        done(account)  # Ctrl-C is how `tail -F … | iris stream append` ends
    return code


async def _append_batch(
    client: iris.Client, name: str, lines: list[bytes], entry: Callable[[bytes], Entry | None], account: Account, uuid: str,
    timeout: float,
) -> None:  # fmt: skip
    """Append lines up to the first invalid one; raises BadLine when those before it are stored."""
    entries: list[Entry] = []
    bad: BadLine | None = None
    for line in lines:
        account.lines += 1
        try:
            made = entry(line)
            if made is None:
                account.skipped += 1
                continue
            if len(made.data) > client.message_limit:
                raise BadLine(
                    f"a message of {len(made.data)} bytes is over the limit of {client.message_limit} bytes"
                )
            entries.append(made)
        except BadLine as error:
            bad = BadLine(f"line {account.lines}: {error}")
            break
    if entries:
        account.unsure = len(entries)
        offsets = await _store(client, name, entries, uuid, timeout)
        account.unsure = 0
        account.appended += len(offsets)
        if isinstance(offsets[0], Offset):
            account.spread = True
        else:
            account.first = offsets[0] if account.first is None else account.first
            account.last = offsets[-1]
    if bad is not None:
        raise bad


async def _store(
    client: iris.Client, name: str, entries: list[Entry], uuid: str, timeout: float
) -> list[int]:
    # A Raw is written unchanged, so an object keeps its bytes.
    bodies = [msgspec.Raw(made.data) if made.packed else made.data for made in entries]
    if not any(made.headers for made in entries):
        return await client.streams.append_many(name, bodies, uuid=uuid, timeout=timeout)
    # The tasks start in this order, and none of them waits for room within a batch.
    return await asyncio.gather(
        *(
            client.streams.append(name, body, headers=made.headers, uuid=uuid, timeout=timeout)
            for made, body in zip(entries, bodies, strict=True)
        )
    )


async def _batches() -> AsyncGenerator[list[bytes], None]:
    """Iterate over batches of lines: those read since the last batch, up to 1,000 lines or 1 MiB and one line."""
    held: list[bytes] = []
    came, room = asyncio.Event(), asyncio.Event()

    async def fill() -> None:
        held_bytes = 0
        try:
            async for line in stdin.lines():
                if not held:
                    held_bytes = 0
                held.append(line)
                held_bytes += len(line)
                came.set()
                if held_bytes >= BATCH_BYTES or len(held) >= BATCH:
                    room.clear()
                    await room.wait()
        finally:
            came.set()

    filling = asyncio.get_running_loop().create_task(fill(), name="iris-lines")
    try:
        while True:
            if held:
                batch = held.copy()
                held.clear()
                room.set()
                yield batch
            elif filling.done():
                filling.result()
                return
            else:
                came.clear()
                await came.wait()
    finally:
        filling.cancel()
