"""What push, broadcast and publish share: messages from an argument or from lines, then a flush and an account."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import typer

import iris
from iris.causes import print_causes
from iris.cli import options, output, stdin
from iris.cli.exits import Exit, complain, exit_code, run
from iris.cli.members import takes
from iris.errors import NoMembers, RelayError


def send(
    call: Callable[[iris.Client, Any], Awaitable[None]], payload: str | None, *, lines: bool, pack: bool, timeout: float,
    as_json: bool, relay: str | None, heard: Callable[[iris.Client], Awaitable[int | None]] | None = None, hearers: str = "subscribers",
    unheard: str = "",
) -> None:  # fmt: skip
    """Send one message, or one a line, by `call`; return when the relay has routed them.

    `heard` says how many hear them, or None where that is not known; the report shows it as `hearers`. If it is nobody, `unheard`
    is said. The exit code is that of the last loss which was told; each loss is a line on stderr.
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
        code, sent, lost = Exit.OK, 0, 0
        unserved: set[str] = set()

        def on_loss(loss: iris.Lost) -> None:
            nonlocal code, lost
            lost += loss.count or 1
            code = Exit.CONNECTION if loss.error is None else exit_code(loss.error)
            if isinstance(loss.error, NoMembers):
                unserved.add(loss.name)
            complain(f"{loss.kind} to {loss.name} failed: {loss.cause}")
            if loss.error is not None:
                print_causes(loss.error)

        async with iris.connect(relay) as client:
            client.on_loss = on_loss
            there: int | None = None
            if heard is not None:
                with contextlib.suppress(RelayError):  # it is too old to say
                    there = await heard(client)
            async for message in messages():
                await call(client, message)
                sent += 1
            await client.flush(timeout=timeout)
            for name in unserved:
                if hint := await takes(client, name):
                    complain(hint)
            report = {"sent": sent, "lost": lost}
            if heard is not None and there is not None:
                # Whoever came since, too; who has what it wanted may be gone by now.
                report[hearers] = max(there, await heard(client) or 0)
                if not report[hearers]:
                    complain(unheard)
        if as_json:
            output.write_json(report)
        return code

    run(work)
