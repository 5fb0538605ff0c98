"""Arguments and options that several verbs share, and the functions that parse them."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any, Final, Literal

import typer

from iris.cli.arguments import WrongUsage
from iris.cli.stdin import unreadable
from iris.wire.names import split_site

MAX_PAYLOAD_BYTES: Final = 64 << 20
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

Cluster = Annotated[str, typer.Argument(metavar="CLUSTER", help="Name of the cluster.")]
Scope = Annotated[
    Literal["site", "federation"],  # iris.Scope
    typer.Option(
        "--scope", help="Reach members of this site only, or of all sites.", show_default=True
    ),
]
Payload = Annotated[
    str | None,
    typer.Argument(metavar="PAYLOAD", help="The payload to send. Without it, or with '-': standard input.", show_default=False),
]  # fmt: skip
Timeout = Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds to wait.")]
HeaderList = Annotated[
    list[str] | None,
    typer.Option(
        "--header", "-H", metavar="NAME=VALUE", help="Add a header to the message. Repeatable."
    ),
]
Member = Annotated[
    str | None,
    typer.Option("--member", metavar="ID", help="Send it to this member alone, by its id as `iris members` shows it.", show_default=False),
]  # fmt: skip
Method = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="Call the handler of this name.", show_default=False),
]  # fmt: skip
Pack = Annotated[
    bool,
    typer.Option(
        "--pack", help="Parse the payload as JSON and send it as an object (MessagePack)."
    ),
]
Lines = Annotated[
    bool, typer.Option("--lines", help="Send each line of standard input as a message.")
]
LogFormat = Annotated[
    Literal["json", "text"], typer.Option(help="Log as JSON lines, or as sentences for people.")
]
Metrics = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="Serve metrics and health over HTTP here, such as 127.0.0.1:9465. Needs the extra 'metrics'.", show_default=False),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
RelayPath = Annotated[
    str | None,
    typer.Option("--relay", metavar="PATH", help="Socket of the relay, or tls://HOST:PORT; separate several with commas. Default: $IRIS_RELAY, else a relay started by your user, else the system's.", show_default=False),
]  # fmt: skip


def check_log_level(level: str) -> None:
    """Raise BadParameter if `level` is not a log level of `--log-level`."""
    if level not in LOG_LEVELS:
        raise typer.BadParameter(
            f"{level!r} is not a log level; use {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}",
            param_hint="--log-level",
        )


def note_site(topic: str) -> None:
    """Say on stderr that a topic or filter names no site, if it looks as if it did."""
    site, rest = split_site(topic)
    if site:
        typer.echo(
            f"iris: a topic names no site: {topic!r} is a topic of its own, not {rest!r} in site {site!r}; other sites "
            "receive what they subscribe to",
            err=True,
        )


def parse_headers(texts: list[str] | None) -> dict[str, str] | None:
    """Return the headers given by `--header` options; None if there are none.

    Raises:
        BadParameter: a header is not NAME=VALUE (exit code 2).
    """
    headers: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(
                f"{text!r} is not a header; write NAME=VALUE", param_hint="--header"
            )
        headers[name] = value
    return headers or None


def read_payload(text: str | None, *, pack: bool) -> Any:
    """Return the payload to send: bytes, or with `pack` the object that the JSON text describes.

    If `text` is None or "-", standard input is read to its end, up to 64 MiB.
    """
    if text is None or text == "-":
        try:
            data = sys.stdin.buffer.read(MAX_PAYLOAD_BYTES + 1)
        except OSError as error:
            raise WrongUsage(unreadable(error)) from error
        if len(data) > MAX_PAYLOAD_BYTES:
            raise typer.BadParameter(
                "standard input is larger than 64 MiB; send it with `iris tunnel --raw`",
                param_hint="PAYLOAD",
            )
    else:
        data = os.fsencode(text)  # an argument may hold bytes that are not UTF-8
    return unpack(data) if pack else data


def unpack(data: bytes) -> Any:
    """Return the object that a JSON text describes; raises BadParameter if it is not JSON."""
    try:
        return json.loads(data)
    except ValueError as error:
        where = ""
        if isinstance(error, json.JSONDecodeError):
            where = f" at line {error.lineno}, column {error.colno}"
        shown = data[:40].decode(errors="replace") + ("…" if len(data) > 40 else "")
        raise typer.BadParameter(
            f"the payload {shown!r} is not JSON{where}; write JSON, such as '\"text\"' or '{{\"n\": 1}}', or leave "
            "out --pack to send the text as it is",
            param_hint="--pack",
        ) from error
