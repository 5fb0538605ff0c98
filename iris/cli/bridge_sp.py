"""`iris bridge sp`: connect programs of nanomsg, nng and Mangos to clusters and topics."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from iris.cli import options
from iris.cli.exits import Exit
from iris.cli.exits import run as run_work
from iris.errors import ConfigError
from iris.extras import install_line


def sp(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="TOML file with a [\\[socket]] table for each SP socket.")
    ],
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: options.LogFormat = "json",
    check: Annotated[bool, typer.Option("--check", help="Check the file and exit.")] = False,
    metrics: options.Metrics = "",
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Connect programs of the Scalability Protocols (nanomsg, nng, Mangos): REQ, SURVEYOR, PUB, PUSH, BUS, PAIR.

    SIGTERM or Ctrl-C exits with code 0 when messages in flight are done; a
    second one exits at once. SIGHUP reloads the keyring, SIGUSR1 logs the
    counters of each socket. Logs go to stderr; see --log-format.
    docs/bridges-sp.md shows how to point a program at the bridge.

    \b
    Examples:
      iris bridge sp --config sp.toml
      iris bridge sp --config sp.toml --check
    """
    from relay.bridges.sp.config import load
    from relay.logs import configure

    options.check_log_level(log_level)

    async def work() -> int:
        entries = load(config)
        if check:
            return Exit.OK
        configure(log_level, log_format)
        os.umask(0o077)  # until its permissions are set, an ipc socket is for this user only
        try:
            from relay.bridges.sp.process import serve
        except ModuleNotFoundError as error:
            if error.name != "pynng":
                raise
            raise ConfigError(f"the SP bridge needs pynng: {install_line('sp')}") from error  # fmt: skip
        from relay.metrics.supervisor import check_installed
        from relay.process import raise_descriptor_limit, stop_on_signals

        raise_descriptor_limit()
        stop = stop_on_signals()
        if not metrics:
            await serve(entries, relay, stop)
            return Exit.OK
        check_installed()
        from relay.bridges.sp.metrics import source
        from relay.metrics.bridges import serving

        await serve(entries, relay, stop, lambda bridge: serving(metrics, source(bridge)))
        return Exit.OK

    run_work(work)
