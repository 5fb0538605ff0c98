"""The causes of an error, printed under its one line on stderr when the user asked for them with `iris --verbose`."""

from __future__ import annotations

import os
import sys
from typing import Final

from iris.wire.names import printable, visible

VARIABLE: Final = "IRIS_VERBOSE"
"""Environment variable that `iris --verbose` sets, so that the processes it starts (relay, store) print causes, too."""


def print_causes(error: BaseException) -> None:
    """Write the chain of exceptions that led to `error` to stderr, as a Python traceback, if the user asked for it.

    A cause that `raise … from None` hides is printed as well. Nothing is written for an error that was never raised and
    has no cause.
    """
    if not os.environ.get(VARIABLE):
        return
    import traceback

    found = traceback.TracebackException.from_exception(error)
    if not (found.stack or found.__cause__ or found.__context__):
        return
    link: traceback.TracebackException | None = found
    while link is not None:
        link.__suppress_context__ = False
        link = link.__cause__ or link.__context__
    sys.stderr.write(visible("".join(found.format())))
    sys.stderr.flush()


def print_error(command: str, error: BaseException) -> None:
    """Write an error as one line on stderr, after the name of the command, and its causes if the user asked for them.

    Files and other processes choose a part of its text, so control characters are replaced.
    """
    line = printable(" ".join(str(error).split("\n")))
    sys.stderr.write(f"{command}: {line}\n")
    print_causes(error)
