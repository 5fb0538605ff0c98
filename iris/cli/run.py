"""`iris run`: serve services until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
from typing import Annotated

import typer

import iris
from iris.cli import options
from iris.cli.exits import Exit
from iris.cli.exits import run as run_work
from iris.config import ClientConfig
from iris.errors import ConfigError, IrisError

log = logging.getLogger(__name__)


def run(
    services: Annotated[
        list[str], typer.Argument(metavar="MODULE[:SERVICE]…", help="Where the services are. SERVICE defaults to 'service'.")
    ],
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Serve services, found in a module of the current directory or of the environment.

    SIGTERM or Ctrl-C leaves the clusters, finishes what was accepted and ends
    with exit code 0; a second one ends at once. SIGHUP takes up a changed
    keyring without losing a message. Logs are JSON lines on stderr.

    \b
    Examples:
      iris run lookup:service
      iris run shop.orders shop.billing:accounts
    """
    from iris.memory import keep_freed_memory
    from relay.logs import configure

    if log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise typer.BadParameter(f"{log_level!r} is no level", param_hint="--log-level")
    configure(log_level)
    keep_freed_memory()

    async def work() -> int:
        await serve([find_service(place) for place in services], relay)
        return Exit.OK

    run_work(work)


def find_service(place: str) -> iris.Service:
    """Return the service at "module:name" or "module", importing from the current directory first.

    Raises:
        ConfigError: there is no such module or name, or it is not an `iris.Service`. What the module itself raises passes.
    """
    module_name, _, path = place.partition(":")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # it was found, and something that it imports was not
        raise ConfigError(f"no module {module_name!r} in {directory} or the environment") from None
    except RuntimeError as error:
        if "event loop" in str(error):
            hint = 'does it call asyncio.run() when imported? Put that under `if __name__ == "__main__":`'
            raise ConfigError(f"cannot import {module_name}: {error}; {hint}") from error
        raise
    found: object = module
    for name in (path or "service").split("."):
        found = getattr(found, name, None)
    if not isinstance(found, iris.Service):
        raise ConfigError(f"{module_name} has no iris.Service called {path or 'service'!r}")
    return found


async def serve(services: list[iris.Service], relay: str | None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the keys."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    reloads: set[asyncio.Task[None]] = set()

    def on_stop() -> None:
        if stop.is_set():
            os._exit(Exit.INTERRUPTED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop)
    names = [service.name for service in services]
    config = ClientConfig(relay=relay, label=f"iris run {' '.join(names)}"[:64])
    async with iris.connect(config=config) as client, contextlib.AsyncExitStack() as stack:

        def on_hangup() -> None:
            task = loop.create_task(_reload(client), name="iris-reload")
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        for service in services:
            await stack.enter_async_context(client.serve(service))
        log.info("run.serving", extra={"fields": {"clusters": names, "pid": os.getpid()}})
        await stop.wait()
        log.info("run.stopping", extra={"fields": {"clusters": names}})
        if reloads:
            await asyncio.wait(reloads)


async def _reload(client: iris.Client) -> None:
    try:
        await client.reload_keys()
    except IrisError as error:  # the old keys still serve
        log.error("run.keys_not_reloaded", extra={"fields": {"error": str(error)}})
    else:
        log.info("run.keys_reloaded")
