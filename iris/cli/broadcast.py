"""`iris broadcast`: a message for every member."""

from __future__ import annotations

from typing import Any

import iris
from iris.cli import options
from iris.cli.sending import send
from iris.wire.kinds import HERE
from iris.wire.names import check_address


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

    Succeeds once the relay has routed it; if no member is there to hear it, it says so.

    \b
    Examples:
      iris broadcast caches "forget user:17"
      iris broadcast caches --lines < forgotten.txt
    """
    headers = options.parse_headers(header)

    async def call(client: iris.Client, body: Any) -> None:
        await client.broadcast(cluster, body, headers=headers, scope=scope)

    async def heard(client: iris.Client) -> int | None:
        site, name = check_address(cluster)
        if site not in ("", HERE):
            return None
        there = await client.members(name, timeout=timeout)
        # What those of other sites serve is not known here.
        return there.serving("broadcast") + (0 if scope == "site" else sum(there.sites.values()))

    send(
        call, payload, lines=lines, pack=pack, timeout=timeout, as_json=json, relay=relay,
        heard=heard, hearers="members", unheard=f"no member of {cluster} serves broadcasts",
    )  # fmt: skip
