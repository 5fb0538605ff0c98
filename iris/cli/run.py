"""`iris run`: serve services until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import sysconfig
import traceback
from types import ModuleType
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
    log_format: options.LogFormat = "json",
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
        raise typer.BadParameter(
            f"{log_level!r} is not a log level; use debug, info, warning or error",
            param_hint="--log-level",
        )
    configure(log_level, log_format)
    keep_freed_memory()

    async def work() -> int:
        await serve([find_service(place) for place in services], relay)
        return Exit.OK

    run_work(work)


def find_service(place: str) -> iris.Service:
    """Return the service at "module:name" or "module", importing from the current directory first.

    What the module raises is told as a ConfigError, after its own frames on stderr; its SystemExit passes.

    Raises:
        ConfigError: there is no such module or name, it is not an `iris.Service`, or that has no handler.
    """
    module_name, _, path = place.partition(":")
    path = path or "service"
    module = _import(module_name)
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, iris.Service):
        there = [name for name, value in vars(module).items() if isinstance(value, iris.Service)]
        hint = f"it has: {', '.join(there)}" if there else "it has none at all"
        raise ConfigError(f"{module_name} has no iris.Service called {path!r}; {hint}")
    if not found.handlers and not found.topics:
        raise ConfigError(
            f"{module_name}:{path} has no handlers, so it would serve nothing. Decorate a function with `@{path}.on_request`, or another on_…"
        )
    return found


def _import(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    if "/" in name or name.startswith(".") or not name:
        raise ConfigError(
            f"{name!r} is not a module name; write it as in an import statement: package.module"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        # If what is missing is not a part of `name`, the module was found, and something that it imports was not.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            hint = (
                f"; leave out the '.py': {name.removesuffix('.py')}" if name.endswith(".py") else ""
            )
            raise ConfigError(
                f"no module {name!r} in {directory} or the environment{hint}"
            ) from None
        typer.echo(_own_frames(error), err=True, nl=False)
        hint = f"`python -c 'import {name}'` shows the whole traceback"
        if isinstance(error, RuntimeError) and "event loop" in str(error):
            hint = 'does it call asyncio.run() when imported? Put that under `if __name__ == "__main__":`'
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"cannot import {name}: {text}; {hint}") from error


def _own_frames(error: BaseException) -> str:
    """Return the last three frames of the user's own code, as a traceback shows them; of libraries if there are none."""
    places = {sysconfig.get_path(path) for path in ("stdlib", "platstdlib", "purelib", "platlib")}
    others = ("<frozen ", os.path.dirname(iris.__file__), *places)
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    lines = traceback.format_list((own or frames)[-3:])
    if isinstance(error, SyntaxError):  # its place is in no frame
        lines = traceback.format_exception_only(error)[:-1]
    return "".join(lines)


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
