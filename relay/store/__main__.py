"""`python -m relay.store`, and `iris store`: one data directory, served to the relay of this host."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from iris import paths
from iris.errors import ConfigError, IrisError
from relay.config import load_config


def store(
    data: Annotated[Path, typer.Option(help="Where streams are kept.", file_okay=False)],
    relay: Annotated[
        Path | None, typer.Option(help="The relay's socket. Default: where `iris relay` listens.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised", hidden=True, help="End when standard input ends.")
    ] = False,
) -> None:
    """Keep durable streams for the relay of this host, until SIGTERM or Ctrl-C (a second one ends it at once).

    `iris relay --data DIR` starts one by itself. It holds no cluster key: what it keeps stays sealed.

    \b
    Examples:
      iris store --data /var/lib/iris
    """
    try:
        try:
            from relay.store import process
        except ModuleNotFoundError as err:
            if err.name != "rocksdict":
                raise
            raise ConfigError("streams need RocksDB: pip install 'iris-messaging[store]'") from err
        socket = relay or paths.default_socket(os.environ, os.geteuid())
        chosen = load_config(
            {"socket_path": socket.absolute(), "log_level": log_level}, os.environ, None
        )
        process.run(
            data.absolute(),
            chosen.socket_path,
            chosen.relay_user,
            chosen.log_level,
            supervised=supervised,
        )
    except IrisError as err:
        sys.stderr.write(f"iris store: {err}\n")
        raise typer.Exit(2) from err


def main() -> None:
    """Entry point of `python -m relay.store`."""
    typer.run(store)


if __name__ == "__main__":
    main()
