"""Notices the end of the process at the other end of a Unix socket, even if others still have its connection.

A process that another one has forked has the descriptors of both. While it lives, the kernel does not end the
connections of the one that was killed, and what is sent there waits for ever. So the relay holds a pidfd of the process
that connected, which becomes readable when that process has ended.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from collections.abc import Callable
from typing import Final

_SO_PEERPIDFD: Final = 77
"""Linux 6.5: the kernel opens a pidfd of the process that connected, also if its id is not visible here."""
_NONE_FREE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class PeerProcess:
    """The process that connected a Unix socket. `close` it."""

    __slots__ = ("_descriptor", "_loop")

    def __init__(self, descriptor: int) -> None:
        """Own `descriptor`, a pidfd."""
        self._descriptor = descriptor
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` when the process has ended. Then, or before, `close` this."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, ended)

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        if self._descriptor < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1


def peer_process(connection: socket.socket, pid: int) -> PeerProcess | None:
    """Return the process that connected the Unix socket `connection`; `pid` is its id, or 0 if not visible here.

    Return None if that is this process, or if the kernel has no means to watch it: neither SO_PEERPIDFD (Linux 6.5),
    nor pidfd_open (5.3) and a visible id. Then only the end of the connection is noticed.

    Call it soon after the connection was accepted. Without SO_PEERPIDFD, the process may have ended, and its id may
    belong to another by now.

    Raises:
        ProcessLookupError: the process has ended.
        OSError: no descriptor is free.
    """
    if pid == os.getpid():
        return None
    try:
        if peer_pidfd_is_known():
            return PeerProcess(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        if pid > 0 and hasattr(os, "pidfd_open"):
            return PeerProcess(os.pidfd_open(pid))
    except ProcessLookupError:
        raise
    except OSError as err:
        if err.errno in _NONE_FREE:
            raise
        if err.errno == errno.EINVAL:  # Linux up to 6.15, of a process that has ended
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from err
    return None  # ENOSYS: an older kernel; EPERM: a sandbox


def peer_pidfd_is_known() -> bool:
    """Return whether the kernel opens pidfds of peers."""
    global _known
    if _known is None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
            except OSError as err:
                if err.errno in _NONE_FREE:
                    raise
                _known = False
            else:
                _known = True
    return _known


_known: bool | None = None


def end_connection(connection: socket.socket) -> bool:
    """End the connection of a process that has ended, unless the kernel has; return whether it was still open.

    What the process wrote can still be read, and then the end, as when nobody else has the connection.
    """
    poll = select.poll()
    poll.register(connection, 0)
    if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
        return False
    connection.shutdown(socket.SHUT_RDWR)
    return True
