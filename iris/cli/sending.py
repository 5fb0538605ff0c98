"""The common part of push, broadcast and publish: read messages, send them, flush, report losses and receivers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import typer

import iris
from iris.causes import print_causes
from iris.cli import options, output, stdin
from iris.cli.exits import Exit, complain, exit_code, run
from iris.cli.members import hint, says_kinds
from iris.client import connect
from iris.errors import NoMembers
from iris.wire.kinds import NO_MEMBERS
from iris.wire.names import plural


def send(
    call: Callable[[iris.Client, Any], Awaitable[None]], payload: str | None, *, lines: bool, pack: bool, timeout: float,
    as_json: bool, relay: str | None, linger_s: float = 0.0, receivers: Callable[[iris.Client], Awaitable[int | None]] | None = None, counted_as: str = "subscribers",
    none: Callable[[], str] = str, code_if_none: Exit = Exit.OK,
) -> None:  # fmt: skip
    """Send one message, or one per line of standard input, with `call`; return when the relay has routed them.

    `receivers` returns how many receive the messages, None if that is not known. `--json` shows the number as
    `counted_as`; if it is 0, the text that `none` returns is printed on stderr, and the exit code is `code_if_none`.
    Each loss is a line on stderr, and the exit code is that of the last loss. After the flush, it waits up
    to `linger_s` for a loss that a member reports.
    """
    if lines and payload not in (None, "-"):
        raise typer.BadParameter(
            "--lines reads standard input; leave PAYLOAD out", param_hint="PAYLOAD"
        )
    single = None if lines else options.read_payload(payload, pack=pack)

    async def messages() -> AsyncIterator[Any]:
        if not lines:
            yield single
            return
        async for line in stdin.lines():
            yield options.unpack(line) if pack else line

    async def work() -> int:
        code, sent, lost, to_nobody = Exit.OK, 0, 0, 0
        unserved: set[str] = set()
        reported = asyncio.Event()

        def on_loss(loss: iris.Loss) -> None:
            nonlocal code, lost, to_nobody
            reported.set()
            lost += loss.count or 1
            if loss.kind == "broadcast" and loss.cause == NO_MEMBERS:  # reported once, below
                code = Exit.NO_MEMBERS
                to_nobody += loss.count or 1
                return
            code = Exit.CONNECTION if loss.error is None else exit_code(loss.error)
            if isinstance(loss.error, NoMembers) and not says_kinds(loss.error.detail):
                unserved.add(loss.name)
            complain(f"{loss.kind} to {loss.name} failed: {loss.cause}")
            if loss.error is not None:
                print_causes(loss.error)

        async with connect(relay) as client:
            client.on_loss = on_loss
            count: int | None = None
            if receivers is not None:
                count = await receivers(client)
            async for message in messages():
                await call(client, message)
                sent += 1
            await client.flush(timeout=timeout)
            if linger_s and not lost:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reported.wait(), linger_s)
            for name in unserved:
                if served := await hint(client, name):
                    complain(served)
            report = {"sent": sent, "lost": lost}
            if receivers is not None and count is not None:
                # The larger number counts: some may have joined meanwhile, others may have received enough and left.
                report[counted_as] = max(count, await receivers(client) or 0)
                if not report[counted_as]:
                    complain(none())
                    code = code_if_none
                    to_nobody = 0
            if to_nobody:
                complain(f"no member served broadcasts when {plural(to_nobody, 'message')} arrived")
        if as_json:
            output.write_json(report)
        return code

    run(work)
