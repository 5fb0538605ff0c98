"""`iris run`: import services from Python modules and serve them until a signal stops the process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
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
from iris.logs import logger

log = logger(__name__)


def run(
    services: Annotated[
        list[str], typer.Argument(metavar="MODULE[:SERVICE]…", help="Module with an iris.Service, and its name there. Default name: 'service'.")
    ],
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: options.LogFormat = "json",
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Serve one or more services, imported from the current directory or the Python environment.

    SIGTERM or Ctrl-C stops accepting messages, finishes those accepted and
    exits with code 0; a second one exits at once. SIGHUP reloads the keyring
    without losing a message. Logs go to stderr; see --log-format.

    \b
    Examples:
      iris run lookup:service
      iris run shop.orders shop.billing:accounts
    """
    from iris.memory import keep_freed_memory
    from relay.logs import configure

    options.check_log_level(log_level)
    configure(log_level, log_format)
    keep_freed_memory()

    async def work() -> int:
        await serve([find_service(path) for path in services], relay)
        return Exit.OK

    run_work(work)


def find_service(path: str) -> iris.Service:
    """Return the service at "module:name", or at "module:service" for "module". The current directory is searched
    first.

    Raises:
        ConfigError: the module or the name does not exist, importing failed (its last frames are then on stderr),
            the object is not an `iris.Service`, or the service has no handlers. A SystemExit of the module is
            passed on.
    """
    module_name, _, attribute = path.partition(":")
    attribute = attribute or "service"
    module = _import(module_name)
    found: object = module
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, iris.Service):
        known = [name for name, value in vars(module).items() if isinstance(value, iris.Service)]
        hint = (
            f"it has: {', '.join(known)}"
            if known
            else "it has none; define one with iris.Service(CLUSTER)"
        )
        raise ConfigError(f"{module_name} has no iris.Service called {attribute!r}; {hint}")
    if not found.handlers and not found.topics:
        raise ConfigError(
            f"{module_name}:{attribute} has no handlers; decorate a function with @{attribute}.on_request or another @{attribute}.on_…"
        )
    return found


def _import(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    if "/" in name or name.startswith(".") or not name:
        raise ConfigError(
            f"{name!r} is not a module name; write it as in an import statement, such as package.module"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        # Otherwise the module exists, and something that it imports does not.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            hint = (
                f"; leave out the '.py': {name.removesuffix('.py')}" if name.endswith(".py") else ""
            )
            raise ConfigError(
                f"no module {name!r} in {directory} or the Python environment{hint}"
            ) from None
        typer.echo(_own_frames(error), err=True, nl=False)
        hint = "`iris --verbose run …` prints the whole traceback"
        if isinstance(error, RuntimeError) and "event loop" in str(error):
            hint = (
                'if it calls asyncio.run() at import, put that under `if __name__ == "__main__":`'
            )
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"cannot import {name}: {text}; {hint}") from error


def _own_frames(error: BaseException) -> str:
    """Return the last three frames of the user's code, formatted as in a traceback; those of libraries if it has
    none."""
    installed = {
        sysconfig.get_path(path) for path in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    others = ("<frozen ", os.path.dirname(iris.__file__), *installed)
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is in this module
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    lines = traceback.format_list((own or frames)[-3:])
    if isinstance(error, SyntaxError):  # its position is not in a frame
        lines = traceback.format_exception_only(error)[:-1]
    return "".join(lines)


async def serve(services: list[iris.Service], relay: str | None) -> None:
    """Serve until SIGTERM or SIGINT; a second one exits at once. SIGHUP reloads the keys."""
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
    except IrisError as error:  # the old keys remain in use
        log.error("run.keys_not_reloaded", extra={"fields": {"error": str(error)}})
    else:
        log.info("run.keys_reloaded")
