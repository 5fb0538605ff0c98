"""`iris push`: send a message to one member, without a reply."""

from __future__ import annotations

from typing import Any, Final

import iris
from iris.cli import options
from iris.cli.sending import send

REPORT_S: Final = 0.05
"""How long to wait for a member's report that it did not run a push. Success is not reported, so each push waits."""


def push(
    cluster: options.Cluster,
    payload: options.Payload = None,
    lines: options.Lines = False,
    timeout: options.Timeout = 5.0,
    header: options.HeaderList = None,
    member: options.Member = None,
    method: options.Method = None,
    pack: options.Pack = False,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Send a message to one member of a cluster, without waiting for a reply.

    Succeeds when the relay has dispatched it to a member. --timeout is how
    long it may wait for a member with room. The exit code is 1 if the member
    reports within 0.05 s that it did not run it, such as when the payload does
    not decode; what happens later is in the member's log only.

    \b
    Examples:
      iris push mailer "welcome anna@example.org"
      find . -name '*.jpg' | iris push thumbnails --lines
    """
    headers = options.parse_headers(header)

    async def call(client: iris.Client, body: Any) -> None:
        await client.push(
            cluster, body, timeout=timeout, headers=headers, member=member, method=method
        )

    send(
        call,
        payload,
        lines=lines,
        pack=pack,
        timeout=timeout,
        as_json=json,
        relay=relay,
        linger_s=REPORT_S,
    )
