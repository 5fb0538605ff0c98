"""`iris bridge sp`: programs of nanomsg, nng and Mangos in clusters and topics."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from iris.cli import options
from iris.cli.exits import Exit
from iris.cli.exits import run as run_work
from iris.errors import ConfigError


def sp(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="TOML with a [\\[socket]] for each SP socket.")
    ],
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: options.LogFormat = "json",
    check: Annotated[bool, typer.Option("--check", help="Check the file and leave.")] = False,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Bridge Scalability Protocols: REQ, SURVEYOR, PUB, PUSH, BUS and PAIR programs in clusters and topics.

    SIGTERM or Ctrl-C ends it with exit code 0; a second one ends it at once.
    SIGHUP takes up a changed keyring, SIGUSR1 logs what each socket has done.
    Logs are JSON lines on stderr.
    docs/bridges-sp.md says how to point a program at it.

    \b
    Examples:
      iris bridge sp --config sp.toml
      iris bridge sp --config sp.toml --check
    """
    from relay.bridges.sp.config import load
    from relay.logs import configure

    if log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise typer.BadParameter(
            f"{log_level!r} is not a log level; use debug, info, warning or error",
            param_hint="--log-level",
        )

    async def work() -> int:
        entries = load(config)
        if check:
            return Exit.OK
        configure(log_level, log_format)
        os.umask(0o077)  # an ipc socket is ours alone before its permissions are set
        try:
            from relay.bridges.sp.process import serve
        except ModuleNotFoundError as error:
            if error.name != "pynng":
                raise
            raise ConfigError("the SP bridge needs pynng: pip install 'iris-messaging[sp]'") from error  # fmt: skip
        from relay.process import raise_descriptor_limit, stop_on_signals

        raise_descriptor_limit()
        await serve(entries, relay, stop_on_signals(asyncio.get_running_loop()))
        return Exit.OK

    run_work(work)
