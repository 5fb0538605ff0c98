"""`iris broadcast`: send a message to every member."""

from __future__ import annotations

from typing import Any

import iris
from iris.cli import options
from iris.cli.exits import Exit
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

    Succeeds when the relay has routed it. If no member serves broadcasts, a
    line on stderr says so, and the exit code is 3 as with `iris push`.

    \b
    Examples:
      iris broadcast caches "forget user:17"
      iris broadcast caches --lines < forgotten.txt
    """
    headers = options.parse_headers(header)

    async def call(client: iris.Client, body: Any) -> None:
        await client.broadcast(cluster, body, headers=headers, scope=scope)

    async def receivers(client: iris.Client) -> int | None:
        site, name = check_address(cluster)
        if site not in ("", HERE):
            return None
        members = await client.members(name, timeout=timeout)
        # Members of other sites are known only by their number, not by what they serve.
        remote = 0 if scope == "site" else sum(members.sites.values())
        return members.serving("broadcast") + remote

    send(
        call, payload, lines=lines, pack=pack, timeout=timeout, as_json=json, relay=relay,
        receivers=receivers, counted_as="members", none=lambda: f"no member of {cluster} serves broadcasts",
        code_if_none=Exit.NO_MEMBERS,
    )  # fmt: skip
