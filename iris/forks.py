"""What a process inherits from the one that forked it: Iris objects that it must not use, and sockets to let go of.

    os.fork() ── child: let go of the sockets ── _forked() of each object ── os.fork() returns 0

A connection belongs to the process that made it. The child has copies of its descriptors, and of the event loop with
its epoll set, which the kernel shares between both: a child that closed a transport could make the parent deaf to that
connection. So the child calls no loop and no transport. It replaces each socket by one that is not connected, at
the same number. Then nothing that still refers to the number can reach the parent, the relay or another file, and the
connection ends when the parent does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Final, Protocol, TypeVar

FORKED: Final = (
    "belongs to the parent process; after a fork, connect in the child and make another one there"
)
"""Completes the error text "the reader of ... ", for what a child cannot use."""


class Inherited(Protocol):
    """An object that refuses to work in the child of a fork."""

    def _forked(self) -> None:
        """Disable this object in the child of a fork. Other threads, loops and locks of the parent do not exist."""


S = TypeVar("S", bound=socket.socket)

_objects: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()
_sockets: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


generation = 0
"""Number of forks between this process and the one that imported this module."""


def disable_in_child(one: Inherited) -> None:
    """Call `one._forked()` in the child of each fork, while `one` exists."""
    _objects.add(one)


_kept: Final[list[object]] = []


def keep_in_child(one: object) -> None:
    """Keep tasks of the parent for good: in the child they never end, and Python reports pending ones that it frees."""
    _kept.append(one)


def keep_from_child(connection: S) -> S:
    """Return `connection`, which the child of a fork will not have. Close or detach it by its own methods."""
    _sockets.add(connection)
    return connection


def _let_go() -> None:
    """Replace each inherited socket by one that is not connected, with the same descriptor.

    Python sets the descriptor of a socket to -1 before it closes it, so none of these numbers is of another file.
    """
    numbers = [number for one in list(_sockets) if (number := one.fileno()) >= 0]
    _sockets.clear()
    if not numbers:
        return
    try:
        blank = _blank()
    except OSError:  # no descriptor is free: the first of these will be
        os.close(numbers[0])
        try:
            blank = _blank()
        except OSError:  # nor has the system one: close them all, which is what matters most
            for number in numbers[1:]:
                os.close(number)
            return
    for number in numbers:
        os.dup2(blank, number, inheritable=False)
    if blank not in numbers:
        os.close(blank)


def _blank() -> int:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach()


def _in_child() -> None:
    global generation
    generation += 1
    _let_go()
    with contextlib.ExitStack() as all_of_them:  # also if one of them raises
        for one in list(_objects):
            all_of_them.callback(one._forked)


os.register_at_fork(after_in_child=_in_child)
