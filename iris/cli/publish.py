"""`iris publish`: a message for every subscriber of a topic."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import iris
from iris.cli import options
from iris.cli.sending import send


def publish(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Dotted name, no wildcards.")],
    payload: options.Payload = None,
    lines: options.Lines = False,
    timeout: options.Timeout = 5.0,
    header: options.HeaderList = None,
    pack: options.Pack = False,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Publish to a topic.

    Succeeds once the relay has routed it; if nobody subscribes, it says so.

    \b
    Examples:
      iris publish flights.JFK.B6 "delayed by 12 minutes"
      tail -f access.log | iris publish logs.web --lines
    """
    headers = options.parse_headers(header)

    async def call(client: iris.Client, body: Any) -> None:
        await client.publish(topic, body, headers=headers)

    async def heard(client: iris.Client) -> int:
        return (await client.audience(topic, timeout=timeout)).subscribers

    send(
        call, payload, lines=lines, pack=pack, timeout=timeout, as_json=json, relay=relay,
        heard=heard, unheard=f"nobody subscribes to {topic}",
    )  # fmt: skip
