"""`iris request`: one question to one member."""

from __future__ import annotations

from typing import Annotated

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, run
from iris.cli.members import saying_what_they_take


def request(
    cluster: options.Cluster,
    payload: options.Payload = None,
    timeout: options.Timeout = 5.0,
    header: options.HeaderList = None,
    idempotent: Annotated[
        bool, typer.Option("--idempotent", help="It may run again elsewhere if a member is lost.")
    ] = False,
    pack: options.Pack = False,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Ask one member of a cluster and print its reply.

    A raw reply is printed as it came, an object as JSON.

    \b
    Examples:
      iris request databases "select 1"
      iris request thumbnails --timeout 30 < photo.jpg > small.jpg
      iris request delays --pack '{"origin": "JFK", "carrier": "B6"}'
    """
    body = options.read_payload(payload, pack=pack)
    headers = options.parse_headers(header)

    async def work() -> int:
        async with iris.connect(relay) as client, saying_what_they_take(client, cluster):
            reply: iris.Message = await client.request(
                cluster, body, timeout=timeout, headers=headers, idempotent=idempotent, type=iris.Message,
            )  # fmt: skip
        output.show(reply, as_json=json, end=output.line_end(reply.payload))
        return Exit.OK

    run(work)
