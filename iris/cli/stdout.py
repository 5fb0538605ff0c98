"""Standard output and standard error of the command when they cannot be written, for every verb in one place."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CANNOT_WRITE = 1
"""Exit code if standard output cannot be written, as on a full disk. `iris --help` documents it."""


class OutputLost(Exception):
    """Standard output cannot be written; its argument is the OSError.

    It is not an OSError itself, so that no verb takes it for an error of a file or connection that it uses, and Typer
    does not exit for it.
    """


class _Output(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            raise OutputLost(error) from error


class _Errors(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError:
            # There is nowhere left to report it. The verb goes on, and its exit code says how it ended.
            return memoryview(data).nbytes


def _reopened(stream: TextIO, raw: io.FileIO) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, stream.errors,
        line_buffering=stream.line_buffering,  # type: ignore[arg-type]  # it is a bool: bpo-20699 left it an int
    )  # fmt: skip


@contextmanager
def guarded() -> Iterator[None]:
    """Run the command inside this block, which ends it in order when standard output cannot be written.

    If the reader has left, as in `iris subscribe ... | head -1`, that is success. Anything else is an error. A verb
    that had already failed keeps its exit code. What cannot be written to standard error is discarded.
    """
    if sys.stderr is not None:  # None: it was closed before the start
        sys.stderr = _reopened(sys.stderr, _Errors(sys.stderr.fileno(), "w", closefd=False))
    if sys.stdout is None:
        yield
        return
    sys.stdout = _reopened(sys.stdout, _Output(sys.stdout.fileno(), "w", closefd=False))
    code: str | int | None = 0
    try:
        try:
            yield
        except SystemExit as asked:
            code = asked.code
        sys.stdout.flush()
    except (OutputLost, BaseExceptionGroup) as error:
        lost = _lost(error)
        if lost is None:
            raise
        code = code or _ended(lost)
    if code:
        raise SystemExit(code)


def _lost(error: BaseException) -> OutputLost | None:
    """Return the error of standard output among those that a verb's tasks raised."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_lost, error.exceptions)), None)
    return error if isinstance(error, OutputLost) else None


def _ended(lost: OutputLost) -> int:
    """Report why standard output was lost, unless its reader has left. Return the exit code."""
    from iris.cli.exits import complain

    cause: OSError = lost.args[0]
    # What is still buffered must go somewhere: Python writes it when it exits, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if cause.errno == errno.EPIPE:
        return 0
    complain(f"cannot write to standard output: {cause.strerror}")
    return CANNOT_WRITE
