"""`iris publish`: publish messages to a topic."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

import iris
from iris.cli import options
from iris.cli.exits import complain
from iris.cli.sending import send
from iris.logs import event_of


def publish(
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="Topic: a dotted name without wildcards.")
    ],
    payload: options.Payload = None,
    lines: options.Lines = False,
    timeout: options.Timeout = 5.0,
    header: options.HeaderList = None,
    pack: options.Pack = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="While a subscriber is full, wait for it instead of dropping, if it subscribed with --wait.",
        ),
    ] = False,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Publish to a topic.

    Succeeds when the relay has routed it. If there is no subscriber, a line on
    stderr says so, and --json shows it; the exit code is 0, because a topic
    may have no subscribers.

    \b
    Examples:
      iris publish flights.JFK.B6 "delayed by 12 minutes"
      tail -f access.log | iris publish logs.web --lines
      zcat access.log.gz | iris publish logs.web --lines --wait
    """
    headers = options.parse_headers(header)
    options.note_site(topic)

    async def call(client: iris.Client, body: Any) -> None:
        await client.publish(topic, body, headers=headers, when_full="wait" if wait else "drop")

    elsewhere = ""

    async def receivers(client: iris.Client) -> int:
        nonlocal elsewhere
        audience = await client.audience(topic, timeout=timeout)
        elsewhere = audience.elsewhere
        return audience.subscribers

    stalls = _Stalls(logging.WARNING)
    logging.getLogger("iris").addHandler(stalls)
    try:
        send(
            call, payload, lines=lines, pack=pack, timeout=timeout, as_json=json, relay=relay,
            receivers=receivers, none=lambda: f"nobody subscribes to {topic}{elsewhere}",
        )  # fmt: skip
    finally:
        logging.getLogger("iris").removeHandler(stalls)


class _Stalls(logging.Handler):
    """Print a line when a subscriber is full for too long; pass other log events on unchanged.

    Subscribers under other keys are named in the line that says that nobody subscribes.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if event_of(record) == "client.publish_stalled":
            fields = record.__dict__["fields"]
            complain(
                f"a subscriber of {fields['topic']} was full for {fields['stall_s']:g} s; "
                "its messages are dropped until it has room"
            )
        elif event_of(record) != "client.other_keys" and logging.lastResort is not None:
            logging.lastResort.handle(record)
