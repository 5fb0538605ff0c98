"""Arguments and options that several verbs share, and what their texts mean."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any, Final, Literal

import typer

import iris

MAX_PAYLOAD_BYTES: Final = 64 << 20

Cluster = Annotated[str, typer.Argument(metavar="CLUSTER", help="Name of the cluster.")]
Scope = Annotated[
    iris.Scope,
    typer.Option("--scope", help="Members of this site alone, or of all.", show_default=True),
]
Payload = Annotated[
    str | None,
    typer.Argument(metavar="PAYLOAD", help="What to send. Absent or '-': standard input.", show_default=False),
]  # fmt: skip
Timeout = Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds.")]
HeaderList = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=VALUE", help="Header to send along; repeatable."),
]
Pack = Annotated[
    bool, typer.Option("--pack", help="PAYLOAD is JSON: send it as an object (MessagePack).")
]
Lines = Annotated[
    bool, typer.Option("--lines", help="Every line of standard input is a message of its own.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, one object a line, instead of bytes.")
]
LogFormat = Annotated[
    Literal["json", "text"], typer.Option(help="JSON lines, or sentences for people.")
]
RelayPath = Annotated[
    str | None,
    typer.Option("--relay", metavar="PATH", help="Socket of the relay, or tls://host:port (several: with commas). Default: $IRIS_RELAY, your own, the host's.", show_default=False),
]  # fmt: skip


def parse_headers(texts: list[str] | None) -> dict[str, str] | None:
    """Return the headers of `--header` options; raises BadParameter (exit code 2) for one without a '='."""
    headers: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--header")
        headers[name] = value
    return headers or None


def read_payload(text: str | None, *, pack: bool) -> Any:
    """Return what is to be sent: bytes, or with `pack` the object that the JSON stands for.

    Reads standard input to its end if `text` is None or "-".
    """
    if text is None or text == "-":
        data = sys.stdin.buffer.read(MAX_PAYLOAD_BYTES + 1)
        if len(data) > MAX_PAYLOAD_BYTES:
            raise typer.BadParameter(
                "standard input is over 64 MiB; send it with `iris tunnel --raw`",
                param_hint="PAYLOAD",
            )
    else:
        data = os.fsencode(text)  # arguments need not be UTF-8
    return unpack(data) if pack else data


def unpack(data: bytes) -> Any:
    """Return the object that a JSON text stands for; raises BadParameter."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--pack") from error
