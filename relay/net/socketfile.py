"""Binds the relay's Unix socket so that a second relay cannot take its name and clients never see it half ready.

A name in the file system is not a lock. Binding fails if a dead relay left its socket behind, and deleting
before binding (which asyncio's `path=` does) silently takes the name from a live relay. So:

    <socket>.lock   held with flock from before the bind until release; contains the pid. The kernel frees
                    it when the holder dies, in whatever way. It is never deleted: a deleted lock can be
                    held by one process while another locks a new file of the same name.
    <socket>~       where the socket gets its mode and begins to listen
    <socket>        renamed from `~`, so that it has the right mode and a listener from the beginning
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
    """Another relay serves this socket; `pid` is its process id, or None if unknown."""

    def __init__(self, path: Path, pid: int | None) -> None:
        who = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"a relay already serves {path} ({who}); stop it first, or start this one with another --socket"
        )
        self.path = path
        self.pid = pid


class SocketFile:
    """A bound, listening socket and its name.

    `listener` is non-blocking, and the caller closes it. `release` removes the name.
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
        """Delete the socket's name if it is still this socket, then free the lock. Idempotent."""
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

    `mode` is the socket's; None is 0600, or 0660 with a `group`. The socket, and its directory if that is
    made here, then belong to the group. A missing directory is made (0700, or 0750 with a `group`); its
    parent must exist. The socket of a relay that died is replaced. Blocks only on the file system.

    Raises:
        AlreadyRunning: a live process holds the lock or answers at the socket; it is not disturbed.
        ConfigError: the directory belongs to another user, others may write to it or the group cannot
            enter it; the name exists and is not a socket; the group is unknown; or the system refused.
            The message names the setting. No lock stays held.
    """
    gid = None if group is None else group_id(group)
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


def group_id(group: str) -> int:
    """Return the id of a group of this host; raises ConfigError if there is none of this name."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"socket_group: this host has no group {group!r}; create it, or name another"
        ) from None


def _prepare_directory(directory: Path, gid: int | None) -> None:
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        pass
    else:
        if gid is not None:
            os.chown(directory, -1, gid)
            directory.chmod(0o750)
    # lstat, because in a shared /tmp a symbolic link could lead anywhere
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"socket_path: {directory} is not a directory; remove it, or choose another --socket"
        )
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"socket_path: {directory} belongs to uid {found.st_uid}, and this relay runs as uid {os.geteuid()}; chown it, or choose another --socket"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"socket_path: other users can write to {directory} (mode {stat.S_IMODE(found.st_mode):04o}) "
            "and so replace the socket; run chmod go-w on it"
        )
    by_group = found.st_gid == gid and found.st_mode & 0o010
    if gid is not None and not by_group and not found.st_mode & 0o001:
        raise ConfigError(
            f"socket_group: the group with gid {gid} cannot enter {directory} (gid {found.st_gid}, "
            f"mode {stat.S_IMODE(found.st_mode):04o}); run chgrp {gid} and chmod 0750 on it"
        )


def _lock(path: Path) -> int:
    """Return the descriptor that holds the lock, and write this process's id into its file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock_fd = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).strip()
        os.close(lock_fd)
        # The file is empty between the holder's lock and its write.
        raise AlreadyRunning(path, int(holder) if holder.isdigit() else None) from None
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _check_leftover(path: Path) -> None:
    """Check that the name is free or the socket of a dead relay, which the rename will replace.

    This process holds the lock, so the relay that made the socket has ended, unless its lock file was
    deleted (cleaners of /tmp do that). So the socket itself is probed as well.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(
            f"socket_path: {path} exists and is not a socket; remove it, or choose another --socket"
        )
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
    unnamed.unlink(missing_ok=True)  # safe, because this process holds the lock
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
