"""`iris request`: send a request to one member and print its reply."""

from __future__ import annotations

from typing import Annotated

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, run, whether_it_ran
from iris.cli.members import hint_at_served
from iris.client import connect
from iris.core.message import Message
from iris.documents import as_error
from iris.errors import ConnectionLost, RemoteError, RequestTimeout


def request(
    cluster: options.Cluster,
    payload: options.Payload = None,
    timeout: options.Timeout = 5.0,
    header: options.HeaderList = None,
    idempotent: Annotated[
        bool,
        typer.Option(
            "--idempotent",
            help="The request may run twice: send it to another member if the first is lost.",
        ),
    ] = False,
    member: options.Member = None,
    method: options.Method = None,
    pack: options.Pack = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the bytes of the reply, and no newline after them.")
    ] = False,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Send a request to one member of a cluster and print its reply.

    A reply of bytes is printed as it is, an object as JSON. A newline is added
    if the reply does not end with one; not with --raw. If the handler refuses
    the request, --json also prints its code and details.

    \b
    Examples:
      iris request databases "select 1"
      iris request thumbnails --raw --timeout 30 < photo.jpg > small.jpg
      iris request delays --pack '{"origin": "JFK", "carrier": "B6"}'
    """
    body = options.read_payload(payload, pack=pack)
    headers = options.parse_headers(header)

    async def work() -> int:
        async with connect(relay) as client, hint_at_served(client, cluster):
            try:
                reply: iris.Message = await client.request(
                    cluster, body, timeout=timeout, headers=headers, idempotent=idempotent, type=Message,
                    member=member, method=method,
                )  # fmt: skip
            except (RequestTimeout, ConnectionLost) as err:
                err.args = (f"{err}{whether_it_ran(err)}",)
                raise
            except RemoteError as err:
                if json:
                    output.write_json(as_error(err))
                raise
        output.show(reply, as_json=json, end=b"" if raw else None)
        return Exit.OK

    run(work)
