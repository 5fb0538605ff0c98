"""Exit codes, and the function that runs a verb's coroutine and prints its error as one line on stderr."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any, Final, NoReturn

import typer

from iris.causes import print_causes
from iris.errors import (
    AmbiguousStream,
    ConnectionLost,
    DecodeError,
    EncodeError,
    IrisError,
    NoMembers,
    NoStream,
    Overloaded,
    RelayError,
    RemoteError,
    RequestTimeout,
    StreamError,
    StreamUnavailable,
    TunnelBroken,
)
from iris.signals import on_signal
from iris.wire.names import printable


class Exit(IntEnum):
    """Exit codes of `iris`, for scripts; `iris --help` documents them."""

    OK = 0
    ANSWER = 1
    USAGE = 2
    NO_MEMBERS = 3
    OVERLOADED = 4
    TIMEOUT = 5
    CONNECTION = 6
    INTERRUPTED = 130


_BY_ERROR: Final[tuple[tuple[type[IrisError], Exit], ...]] = (
    (RemoteError, Exit.ANSWER),
    (RelayError, Exit.ANSWER),
    (EncodeError, Exit.USAGE),
    (DecodeError, Exit.ANSWER),
    (NoMembers, Exit.NO_MEMBERS),
    (Overloaded, Exit.OVERLOADED),
    (RequestTimeout, Exit.TIMEOUT),
    (ConnectionLost, Exit.CONNECTION),
    (TunnelBroken, Exit.CONNECTION),
    (NoStream, Exit.NO_MEMBERS),
    (AmbiguousStream, Exit.USAGE),
    (StreamError, Exit.ANSWER),
)


_RAISED: Final = re.compile(r"\w*(Error|Exception|Warning|Timeout|Interrupt|Exit|Group)\b(?=:|$)")
"""What the text of a member's error begins with if its handler raised an exception."""


def exit_code(error: IrisError) -> Exit:
    """Return the exit code for an error; USAGE for a mistake on this side: a name, a key, a setting, no relay.

    A store that did not answer in time is a TIMEOUT if the change may have been made, and OVERLOADED if it was not
    made.
    """
    if isinstance(error, StreamUnavailable):
        if isinstance(error.__cause__, NoStream) and not error.may_have_run:
            return Exit.NO_MEMBERS  # there is no store at all
        return Exit.TIMEOUT if error.may_have_run else Exit.OVERLOADED
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.USAGE)


def complain(text: object) -> None:
    """Write one line on stderr, without control characters: others choose a part of some."""
    line = printable(" ".join(str(text).split("\n")))
    typer.echo(f"iris: {line}", err=True)


def report_error(error: IrisError) -> Exit:
    """Write an error as one line on stderr, with its causes below if `iris --verbose` was given; return its exit
    code."""
    complain(explained(error))
    print_causes(error)
    return exit_code(error)


def explained(error: IrisError) -> str:
    """Return the text of an error for people at a terminal, who do not see its type: if a handler raised it, that says
    so and where its traceback is."""
    if (
        isinstance(error, RemoteError)
        and error.may_have_run
        and error.code is None
        and _RAISED.match(error.detail)
    ):
        return f"the handler of {error.cluster} raised {error.detail}; the member's log has the traceback"
    return str(error)


def whether_it_ran(error: RequestTimeout | ConnectionLost) -> str:
    """Return the addition to the text of a call's error that says whether its handler may have run, if the text does
    not."""
    if "may have run" in error.detail or "did not run" in error.detail:
        return ""
    return "; it may have run" if error.may_have_run else "; it did not run"


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Run a verb on uvloop and exit with the code that it returns, or with the code of its error."""
    code: int
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(work())
    except IrisError as error:
        code = report_error(error)
    except BaseExceptionGroup as group:  # of a task group, such as that of a service's lifespan
        if not (errors := _all_ours(group)):
            raise
        code = max(map(report_error, errors))
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = Exit.INTERRUPTED
    raise typer.Exit(int(code))


def _all_ours(group: BaseExceptionGroup[BaseException]) -> list[IrisError]:
    """Return the errors of Iris in a group, one for each text; none if it has an error of another kind as well."""
    ours, others = group.split(IrisError)
    if ours is None or others is not None:
        return []
    found: dict[str, IrisError] = {}
    pending: list[Any] = [ours]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            found.setdefault(str(error), error)
    return list(found.values())


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or a SIGINT or SIGTERM cancels it; both are success. A second signal ends the
    process at once."""
    task = asyncio.ensure_future(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if stopped:
            os._exit(Exit.INTERRUPTED)
        stopped = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        on_signal(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        task.cancel()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop factory; None on Windows, where uvloop does not exist."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
