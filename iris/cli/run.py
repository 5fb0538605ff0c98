"""`iris run`: import services from Python modules and serve them until a signal stops the process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import sysconfig
import traceback
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Annotated

import typer

import iris
from iris.cli import options
from iris.cli.exits import Exit
from iris.cli.exits import run as run_work
from iris.errors import ConfigError


def run(
    services: Annotated[
        list[str], typer.Argument(metavar="MODULE[:SERVICE]…", help="Module with an iris.Service, and its name there. Default name: 'service'.")
    ],
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, max=1024, metavar="N", help="Processes that serve, each started again if it ends.")
    ] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: start again when a Python file below this directory changes.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Exit with code 2 if no relay runs, instead of waiting for one.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: options.LogFormat = "json",
    relay: options.RelayPath = None,
    status_fd: Annotated[int | None, typer.Option("--status-fd", hidden=True)] = None,
) -> None:  # fmt: skip
    """Serve one or more services, imported from the current directory or the Python environment.

    The current directory is searched last. If no relay runs, it waits for one.
    SIGTERM or Ctrl-C stops accepting messages, finishes those accepted and
    exits with code 0; a second one exits at once, with code 130. Services
    leave in the order in which they are named, each when the handlers of the
    one before have ended, so name callers before what they call. SIGHUP reloads the keyring without losing a message.
    Logs go to stderr; see --log-format. systemd is notified when the services
    are ready (Type=notify-reload).

    \b
    Examples:
      iris run lookup:service
      iris run shop.orders shop.billing:accounts --workers 4
      iris run lookup --reload --log-format text
    """
    from iris.cli.worker import Line, serve
    from iris.memory import keep_freed_memory
    from relay.logs import configure

    options.check_log_level(log_level)
    configure(log_level, log_format)

    async def supervise() -> int:
        from iris.cli.supervisor import Supervisor, python_changes, worker_command

        own = ["--no-wait"] * no_wait + ([f"--relay={relay}"] if relay else [])
        command = worker_command(
            [*services, f"--log-level={log_level}", f"--log-format={log_format}", *own]
        )
        changes = python_changes(os.getcwd()) if reload else None
        return await Supervisor(command, workers, changes=changes).run()

    async def work() -> int:
        line = Line(status_fd)
        found = [find_service(path) for path in services]
        line.loaded()
        label = f"iris run {' '.join(services)}"
        await serve(found, relay, line, wait=not no_wait, label=label)
        return Exit.OK

    if status_fd is None and (reload or workers > 1):
        run_work(supervise)
    else:
        keep_freed_memory()
        try:
            run_work(work)
        finally:
            # A handler's thread may go on, and the interpreter waits for it. uvloop leaves both signals without effect.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: os._exit(Exit.INTERRUPTED))


def find_service(path: str) -> iris.Service:
    """Return the service at "module:name", or at "module:service" for "module". The current directory is searched
    last.

    Raises:
        ConfigError: the module or the name does not exist, another module hides it, importing failed, the object is
            not an `iris.Service`, or the service has no handlers. A SystemExit of the module is passed on.
    """
    module_name, _, attribute = path.partition(":")
    attribute = attribute or "service"
    module = _import(module_name)
    found: object = module
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, iris.Service):
        known = [name for name, value in vars(module).items() if isinstance(value, iris.Service)]
        if not known:
            raise ConfigError(
                f"{module_name} defines no iris.Service; add `{attribute} = iris.Service(CLUSTER)`"
            )
        raise ConfigError(
            f"{module_name} has no iris.Service called {attribute!r}; it has: {', '.join(known)}"
        )
    if not found.handlers and not found.topics:
        raise ConfigError(
            f"{module_name}:{attribute} has no handlers; decorate a function with @{attribute}.on_request or another @{attribute}.on_…"
        )
    return found


def _import(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        # Last, because the process goes on importing. First, a json.py that somebody else puts there would be executed.
        sys.path.append(directory)
    if "/" in name or name.startswith(".") or not name:
        raise ConfigError(
            f"{name!r} is not a module name; write it as in an import statement, such as package.module"
        )
    _check_not_hidden(name.partition(".")[0], directory)
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
        hint = "`iris --verbose run …` prints the whole traceback"
        if isinstance(error, RuntimeError) and "event loop" in str(error):
            hint = (
                'if it calls asyncio.run() at import, put that under `if __name__ == "__main__":`'
            )
        said = error.msg if isinstance(error, SyntaxError) else error
        text = " ".join(f"{type(error).__name__}: {said}".split())
        raise ConfigError(f"cannot import {name}: {_place(error)}: {text}; {hint}") from error


def _check_not_hidden(name: str, directory: str) -> None:
    """Raise ConfigError if the directory has this top-level module, and an import would give another one."""
    own = PathFinder.find_spec(name, [directory])
    if own is None or own.origin is None:
        return
    loaded = sys.modules.get(name)
    found = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    place = (found.origin if found is not None else None) or "the command itself"
    if os.path.realpath(place) != os.path.realpath(own.origin):
        raise ConfigError(
            f"{own.origin} is hidden by {place}: the current directory is searched last; rename the module, "
            "or set PYTHONPATH=. to search this directory first"
        )


def _place(error: BaseException) -> str:
    """Return "file:line" of the last frame of the user's code, or of a syntax error; of a library if it has none."""
    if isinstance(error, SyntaxError) and error.filename:  # its position is not in a frame
        return f"{_relative(error.filename)}:{error.lineno}"
    installed = {
        sysconfig.get_path(path) for path in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    others = ("<frozen ", os.path.dirname(iris.__file__), *installed)
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is in this module
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    last = (own or frames)[-1]
    return f"{_relative(last.filename)}:{last.lineno}"


def _relative(filename: str) -> str:
    """Return the path of a file as seen from the current directory, if it is below it."""
    return filename.removeprefix(os.path.join(os.getcwd(), ""))
