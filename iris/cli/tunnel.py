"""`iris tunnel`: connect standard input and output to one member."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

import iris
from iris.cli import options, output, stdin
from iris.cli.exits import Exit, run
from iris.cli.members import hint_at_served
from iris.client import connect
from iris.errors import Closed


def tunnel(
    cluster: options.Cluster,
    raw: Annotated[bool, typer.Option("--raw", help="Carry bytes of any size, not lines.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", "-t", min=0.001, help="Seconds to wait for a member to accept the tunnel."
        ),
    ] = 5.0,
    header: options.HeaderList = None,
    member: options.Member = None,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Open a tunnel to one member: send it the lines of standard input, and print what it sends back.

    Each line is a message. At the end of standard input this side finishes,
    and prints what it receives until the member finishes, too. With --raw the
    input is sent in messages of up to 64 KiB, and what comes back is written
    without line ends. A slow reader on either side slows down the other.

    \b
    Examples:
      iris tunnel archive < requests.txt
      tar c photos | iris tunnel backup --raw --header name=photos.tar
    """
    headers = options.parse_headers(header)

    async def work() -> int:
        async with (
            connect(relay) as client,
            hint_at_served(client, cluster),
            client.tunnel(cluster, timeout=timeout, headers=headers, member=member) as line,
        ):
            sending = asyncio.create_task(_send(line, raw=raw))
            try:
                await _receive(line, raw=raw, as_json=json)
                if line.closed:  # the member reads no more, so the rest of stdin is not needed
                    sending.cancel()
                await asyncio.wait((sending,))
                if not sending.cancelled():
                    sending.result()
            finally:
                sending.cancel()
        return Exit.OK

    run(work)


async def _send(line: iris.Tunnel, *, raw: bool) -> None:
    try:
        async for data in stdin.chunks() if raw else stdin.lines():
            await line.send(data)
        await line.finish()
    except Closed:
        return  # the member closed the tunnel


async def _receive(line: iris.Tunnel, *, raw: bool, as_json: bool) -> None:
    if raw and not as_json:
        try:
            while True:
                async for chunk in line.recv_chunks():
                    output.write(chunk)
        except iris.EndOfTunnel:
            return
    async for message in line:
        output.show_bytes(message, as_json=as_json)
