"""The relay's listening Unix socket as a file that nobody else can take, replace or mistake.

A name in the file system is not a lock: binding fails on a dead relay's leftover, and deleting before
binding (which asyncio's `path=` does) silently takes the name from a live relay. So:

    <socket>.lock   held with flock from before the bind until release; says the pid. The kernel frees
                    it when the holder dies, however it dies. It is never deleted: a deleted lock can
                    be held by one process while another locks a new file of the same name.
    <socket>~       where the socket gets its mode and begins to listen
    <socket>        renamed from `~`: whoever sees the name finds the right mode and a listener
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
from pathlib import Path

from iris.errors import ConfigError, IrisError

BACKLOG = 1024

MAX_PATH_BYTES = 106
"""Longest path of a socket: 108 in `sun_path` (unix(7)), less the NUL and the `~`."""

_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class AlreadyRunning(IrisError):
    """Another relay serves this socket; `pid` is its process, or None when it does not say."""

    def __init__(self, path: Path, pid: int | None) -> None:
        who = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"a relay already serves {path}: {who}; stop it first, or give this one another --socket"
        )
        self.path = path
        self.pid = pid


class SocketFile:
    """A bound, listening socket and its name.

    `listener` is non-blocking and belongs to the caller, who closes it; `release` gives back the name.
    """

    __slots__ = ("_identity", "_lock_fd", "listener", "path")

    def __init__(
        self, path: Path, listener: socket.socket, lock_fd: int, identity: tuple[int, int]
    ) -> None:
        self.path = path
        self.listener = listener
        self._lock_fd: int | None = lock_fd
        self._identity = identity

    def release(self) -> None:
        """Delete the name if it is still ours, then free the lock. Again is harmless.

        A name that something else was put in place of is left alone.
        """
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is None:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                if _identity(self.path) == self._identity:
                    self.path.unlink()
            os.ftruncate(lock_fd, 0)
        finally:
            os.close(lock_fd)


def bind(path: Path, *, mode: int | None = None, group: str | None = None) -> SocketFile:
    """Return the listening socket at `path`, an absolute path of at most `MAX_PATH_BYTES`.

    `mode` is the socket's; None is 0600, or 0660 with a `group`, which the socket and a directory made
    here then belong to. The directory is made if it is missing (0700, or 0750 with a `group`); its
    parent has to exist. A leftover of a relay that died is replaced. Blocks only on the file system.

    Raises:
        AlreadyRunning: a live process holds the lock or answers at the socket; it is not disturbed.
        ConfigError: the directory belongs to somebody else, others may write to it or the group may
            not enter; the name is taken by something that is not a socket; the group is unknown; or
            the system refused. Names the setting, and leaves no lock held.
    """
    gid = None if group is None else _group_id(group)
    try:
        _prepare_directory(path.parent, gid)
        lock_fd = _lock(path)
        try:
            _check_leftover(path)
            listener, identity = _listen(path, _default_mode(gid) if mode is None else mode, gid)
        except BaseException:
            os.close(lock_fd)
            raise
    except OSError as error:
        raise ConfigError(f"socket_path: cannot listen at {path}: {error}") from error
    return SocketFile(path, listener, lock_fd, identity)


def _default_mode(gid: int | None) -> int:
    return 0o600 if gid is None else 0o660


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: this host has no group {group!r}") from None


def _prepare_directory(directory: Path, gid: int | None) -> None:
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        pass
    else:
        if gid is not None:
            os.chown(directory, -1, gid)
            directory.chmod(0o750)
    # lstat: in a shared /tmp a link could lead anywhere
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"socket_path: {directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"socket_path: {directory} belongs to uid {found.st_uid}, not to us (uid {os.geteuid()})"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"socket_path: others may write to {directory} (mode {stat.S_IMODE(found.st_mode):04o}) "
            "and so replace the socket; chmod go-w"
        )
    by_group = found.st_gid == gid and found.st_mode & 0o010
    if gid is not None and not by_group and not found.st_mode & 0o001:
        raise ConfigError(
            f"socket_group: gid {gid} cannot enter {directory} (gid {found.st_gid}, "
            f"mode {stat.S_IMODE(found.st_mode):04o}); chgrp and chmod 0750"
        )


def _lock(path: Path) -> int:
    """Return the descriptor that holds the lock; its file then says our pid."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock_fd = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).strip()
        os.close(lock_fd)
        # Empty between its lock and its write.
        raise AlreadyRunning(path, int(holder) if holder.isdigit() else None) from None
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _check_leftover(path: Path) -> None:
    """Return if the name is free or a dead relay's socket, which the rename will replace.

    We hold the lock, so the relay that made the socket is gone, unless something tidied its lock file
    away (cleaners of /tmp do): the socket itself is asked as well.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"socket_path: {path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(os.fspath(path))
        if answer == errno.ECONNREFUSED:
            return
        if answer in (0, errno.EAGAIN):  # EAGAIN: alive, with a full backlog
            pid: int | None = None
            if answer == 0:
                credentials = probe.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size
                )
                pid = _PEER_CREDENTIALS.unpack(credentials)[0]
            raise AlreadyRunning(path, pid)
    raise OSError(answer, os.strerror(answer))


def _listen(path: Path, mode: int, gid: int | None) -> tuple[socket.socket, tuple[int, int]]:
    unnamed = path.with_name(path.name + "~")
    unnamed.unlink(missing_ok=True)  # ours to delete: we hold the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(os.fspath(unnamed))
        try:
            if gid is not None:
                os.chown(unnamed, -1, gid)
            unnamed.chmod(mode)
            listener.listen(BACKLOG)
            identity = _identity(unnamed)
            unnamed.rename(path)
        except BaseException:
            unnamed.unlink(missing_ok=True)
            raise
    except BaseException:
        listener.close()
        raise
    return listener, identity


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
