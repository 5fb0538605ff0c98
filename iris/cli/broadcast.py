"""`iris broadcast`: a message for every member."""

from __future__ import annotations

from typing import Any

import iris
from iris.cli import options
from iris.cli.sending import send


def broadcast(
    cluster: options.Cluster,
    payload: options.Payload = None,
    lines: options.Lines = False,
    timeout: options.Timeout = 5.0,
    header: options.HeaderList = None,
    pack: options.Pack = False,
    scope: options.Scope = "federation",
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Send a message to every member of a cluster that serves broadcasts.

    Succeeds once the relay has routed it, also if nobody is there to hear it.

    \b
    Examples:
      iris broadcast caches "forget user:17"
      iris broadcast caches --lines < forgotten.txt
    """
    headers = options.parse_headers(header)

    async def call(client: iris.Client, body: Any) -> None:
        await client.broadcast(cluster, body, headers=headers, scope=scope)

    send(call, payload, lines=lines, pack=pack, timeout=timeout, as_json=json, relay=relay)
