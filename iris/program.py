"""What every program of Iris does first, and the names of this program and its host for others to see.

The library never calls `begin`: its process belongs to somebody else.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from typing import Final

from iris import core_dumps
from iris.wire.names import printable

MAX_NAME: Final = 64
"""Most characters of a name that others are shown."""
_STREAMS: Final = ("stdin", "stdout", "stderr")
"""Names in `sys`, each at the number of its descriptor."""


def begin() -> None:
    """Make this process fit to be a program of Iris. Call it before anything opens a descriptor that stays open.

    It leaves no core dump. Standard descriptors that are closed, as after `>&-` or under some service managers, become
    /dev/null: otherwise a socket would get the number 1, what is printed would go to a peer, and libuv would abort.
    What is printed never fails for a character that the terminal's encoding lacks.

    Raises:
        OSError: there is no /dev/null, or core dumps cannot be forbidden.
    """
    core_dumps.forbid()
    for number, name in enumerate(_STREAMS):
        if not _is_open(number):
            _open_nothing(number)
            mode = "w" if number else "r"
            stream = open(number, mode, closefd=False)  # noqa: SIM115 - until this process ends
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(errors="backslashreplace")


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _open_nothing(descriptor: int) -> None:
    """Let `descriptor`, which is closed, be /dev/null, also for programs that this process starts."""
    opened = os.open(os.devnull, os.O_WRONLY if descriptor else os.O_RDONLY)
    if opened == descriptor:
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(opened, descriptor)
        os.close(opened)


def standard_descriptors_are_open() -> bool:
    """Return whether this process has all of descriptors 0, 1 and 2, which libuv requires to be no sockets."""
    return all(map(_is_open, range(len(_STREAMS))))


def host_name() -> str:
    """Return the name of this host, at most 64 characters. "?" stands for each byte that is not printable UTF-8."""
    return printable(socket.gethostname())[:MAX_NAME]


def program_name() -> str:
    """Return the file name of this program, at most 64 characters. "?" stands for each byte that is not printable
    UTF-8."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return printable(name)[:MAX_NAME] or "python"
