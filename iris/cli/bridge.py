"""`iris bridge`: processes that connect programs of other protocols to clusters and topics."""

from __future__ import annotations

from typing import Annotated

import typer

from iris.cli import options
from iris.cli.bridge_http import http, http_token
from iris.cli.bridge_sp import sp
from iris.cli.exits import report_error
from iris.errors import IrisError

app = typer.Typer(
    name="bridge", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""Connect programs of other protocols to clusters and topics.

    A bridge is a program with a keyring: it seals what its clients send and
    opens what they receive.

    \b
    Examples:
      iris bridge iris1
      iris bridge sp --config sp.toml
      iris bridge http
    """,
)  # fmt: skip


@app.command()
def iris1(
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS:PORT", help="Address on which clients connect. Repeatable. Default: 127.0.0.1:55555 and [::1]:55555.", show_default=False),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow addresses other than loopback. Clients are not authenticated.")
    ] = False,
    max_clients: Annotated[int, typer.Option(min=1, help="Limit of connections at a time.")] = 1024,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: options.LogFormat = "json",
    metrics: options.Metrics = "",
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Serve programs of the first Iris: iris-go, iris-java, iris-erl (protocol v1.0-draft2).

    They share clusters and topics with programs of this Iris: a Go service and
    a Python service can be members of one cluster. Their protocol has no
    authentication. Every program that can connect acts with the keys of this
    process, so it listens on loopback unless you say otherwise.

    SIGTERM or Ctrl-C finishes what was accepted and exits with code 0; a second
    one exits at once. SIGHUP reloads the keyring. Logs go to stderr; see
    --log-format. docs/bridges.md shows how the protocols map to each other.

    \b
    Examples:
      iris bridge iris1
      iris bridge iris1 --listen 127.0.0.1:55556
    """
    from relay.bridges.iris1.bridge import parse_address
    from relay.bridges.iris1.config import DEFAULT_LISTEN, Iris1Config
    from relay.bridges.iris1.process import run

    options.check_log_level(log_level)
    try:
        config = Iris1Config(
            listen=tuple(map(parse_address, listen)) if listen else DEFAULT_LISTEN,
            allow_remote=allow_remote,
            max_clients=max_clients,
        )
        run(config, relay, log_level, log_format, metrics)
    except IrisError as err:
        raise typer.Exit(int(report_error(err))) from err


app.command("sp")(sp)
app.command("http")(http)
app.command("http-token")(http_token)
