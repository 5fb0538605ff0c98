"""`iris dashboard`: a page that shows the network live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from iris.cli import options, output
from iris.cli.exits import Exit, run
from iris.client import connect
from iris.errors import ConfigError

WHAT: Final = "the dashboard"


def dashboard(
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Where the page is served. Port 0: any free one.")
    ] = "127.0.0.1:8080",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Only show figures: nobody can read dead letters or change anything.")
    ] = False,
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with [\\[token]] tables. Default: one token, made now and printed.", show_default=False),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="RELAY", help="Show the totals of this relay, too: its socket, or tls://HOST:PORT. Repeatable.", show_default=False),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show this cluster, even if no relay names it. Repeatable.", show_default=False),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that browsers may use for this service, such as that of a proxy. Repeatable.", show_default=False),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow addresses other than loopback, behind a proxy with TLS.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: options.LogFormat = "text",
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Serve a page that shows the network live: clusters, who is slow and why, drops, links, streams.

    The address that is printed holds the token; open it in a browser. Every
    request for data needs a token, also on this host.

    The page shows the rates of the relay that it uses, and of those that
    --also names. Members describe themselves if this process holds their key.
    It needs the extra 'web'. docs/dashboard.md explains the page.

    \b
    Examples:
      iris dashboard
      iris dashboard --listen 127.0.0.1:0 --read-only
      iris dashboard --also tls://b.example:7431 --tokens /etc/iris/tokens.toml
    """
    from iris.web.server import address_of, check_installed
    from iris.web.server import listen as listen_at
    from iris.web.tokens import Tokens, new_token
    from relay import notify
    from relay.logs import configure
    from relay.process import raise_descriptor_limit, stop_on_signals

    options.check_log_level(log_level)

    async def work() -> int:
        check_installed(WHAT)
        from iris.dashboard.app import EVERYTHING, VERBS
        from iris.dashboard.serving import INTERVAL_S, serve
        from iris.watch import Watch

        configure(log_level, log_format)
        raise_descriptor_limit()
        token = "" if tokens else new_token()
        known = Tokens.load(tokens, VERBS) if tokens else Tokens.single(token, "page", EVERYTHING)
        if not len(known):
            raise ConfigError(f"{tokens}: no tokens; write a [[token]] table")
        watch = Watch(relay, also or (), clusters=cluster or (), interval_s=INTERVAL_S)
        listener = listen_at("--listen", listen, allow_remote=allow_remote)
        stop = stop_on_signals()
        address = f"http://{address_of(listener)}/"
        output.write((f"{address}#token={token}" if token else address).encode() + b"\n")
        notify.ready(os.environ)
        await serve(
            listener,
            watch,
            known,
            stop,
            hosts=host or (),
            connect=None if read_only else lambda: connect(relay),
        )
        return Exit.OK

    run(work)
