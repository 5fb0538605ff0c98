"""Reads and writes key files: `keyring.toml`, `network.toml` and a site's key file.

`iris.crypto.keyring` defines their content. All have mode 0600. A file is opened once and checked through its
descriptor, so that nobody can swap it between check and read. A file that other users can read, or that another user
owns, is refused and not repaired, because its secret may be known already. A process that is not root's also accepts a
file of root that its group can read: root decided who is in the group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

from iris import paths
from iris.crypto.keyring import (
    Keyring,
    dump_network_keys,
    dump_site_key,
    parse_network_keys,
    parse_site_key,
)
from iris.crypto.keys import SECRET_BYTES, ClusterKey, NetworkKey, SiteKey
from iris.errors import KeyringError

KEYRING_FILE: Final = "keyring.toml"
NETWORK_FILE: Final = "network.toml"
MAX_FILE_BYTES: Final = 1 << 20

_T = TypeVar("_T")


class NoKeyring(KeyringError):
    """There is no keyring at all; `directory` is where one was looked for."""

    def __init__(self, text: str, directory: Path) -> None:
        super().__init__(text)
        self.directory = directory


def config_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of the key files: $IRIS_CONFIG, else $XDG_CONFIG_HOME/iris, else ~/.config/iris.

    An empty variable counts as unset, and so does a relative $XDG_CONFIG_HOME (XDG Base Directory Specification).
    Without $HOME, the home is that of passwd; a user who has no entry there, as in many containers, has "/", which
    Docker sets, too. The directory need not exist and is not created.
    """
    if named := environ.get("IRIS_CONFIG"):
        return Path(named)
    xdg = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "iris"
    return Path(environ.get("HOME") or _home_of(os.getuid())) / ".config" / "iris"


def _home_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return "/"


def has_keys(environ: Mapping[str, str]) -> bool:
    """Return whether the configuration directory has a keyring."""
    return os.path.exists(config_directory(environ) / KEYRING_FILE)


def load_keys(environ: Mapping[str, str]) -> Keyring:
    """Return the keyring of the configuration directory, else that of a relay started with --dev.

    If IRIS_CONFIG names the directory, only that one is used.

    Raises:
        NoKeyring: there is no keyring; the text says how to make one.
        KeyringError: it cannot be used.
    """
    directory = config_directory(environ)
    if has_keys(environ):
        return load_keyring(directory / KEYRING_FILE)
    if not environ.get("IRIS_CONFIG"):
        dev = paths.dev_key_directory(environ, os.geteuid()) / KEYRING_FILE
        if os.path.exists(dev):
            return load_keyring(dev)
    raise NoKeyring(
        f"no keyring in {directory}; make one with `iris key new`, or "
        + (
            "unset IRIS_CONFIG, which hides the keys of `iris relay --dev`"
            if environ.get("IRIS_CONFIG")
            else "start `iris relay --dev`"
        ),
        directory,
    )


def create_keys(
    directory: Path, entropy: Callable[[int], bytes] = os.urandom
) -> tuple[Keyring, NetworkKey]:
    """Write a new keyring (one default key) and a new network key into `directory`, and return them.

    Creates `directory` with mode 0700, and its parents with the default mode.

    Raises:
        KeyringError: one of the two files exists, other users may write to the directory, or a write failed. No file
            was overwritten, and no new file is left behind.
    """
    keyring = Keyring.single(ClusterKey(entropy(SECRET_BYTES)))
    network = NetworkKey(entropy(SECRET_BYTES))
    texts = {KEYRING_FILE: keyring.dump(), NETWORK_FILE: dump_network_keys([network])}
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeyringError(f"other users may write to {directory}; run `chmod 700 {directory}`")
        for name, text in texts.items():
            path = directory / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            written.append(path)
            _write(descriptor, text)
        sync_directory(directory)
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise KeyringError(f"{error.filename} already exists and was not changed") from error
        if isinstance(error, OSError):
            raise KeyringError(
                f"cannot create keys in {directory}: {error.strerror}; name a directory of yours with IRIS_CONFIG"
            ) from error
        raise
    return keyring, network


def load_keyring(path: Path) -> Keyring:
    """Return the keyring in the file `path`.

    Raises:
        KeyringError: the file is missing, not a regular file, over 1 MiB, open to other users, owned by another user
            or malformed. The text begins with the path and says what to do.
    """
    return load(path, Keyring.parse)


def load_network_keys(path: Path) -> tuple[NetworkKey, ...]:
    """Return the network keys in the file `path`. Links to other relays are dialled with the first one.

    Raises:
        KeyringError: as `load_keyring`.
    """
    return load(path, parse_network_keys)


def load_site_key(path: Path) -> SiteKey:
    """Return the site key in the file `path`.

    Raises:
        KeyringError: as `load_keyring`.
    """
    return load(path, parse_site_key)


def create_site_key(path: Path, entropy: Callable[[int], bytes] = os.urandom) -> SiteKey:
    """Write a new site key into the new file `path`, mode 0600, and return it.

    Raises:
        KeyringError: the file exists and was not changed, or the write failed and no file is left.
    """
    key = SiteKey(entropy(SECRET_BYTES))
    create(path, dump_site_key(key))
    return key


def create(path: Path, text: str) -> None:
    """Write a secret into the new file `path`, mode 0600. Raises KeyringError as `create_site_key`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise KeyringError(f"{path} already exists and was not changed") from error
    except OSError as error:
        raise KeyringError(f"cannot create {path}: {error.strerror}") from error
    try:
        _write(descriptor, text)
        sync_directory(path.parent)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise KeyringError(f"cannot write {path}: {error.strerror}") from error
        raise


def save_keyring(path: Path, keyring: Keyring) -> None:
    """Replace the file `path` as `replace` does."""
    replace(path, keyring.dump())


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the directory of a file while the block runs. Without the lock, two edits at a time would lose one."""
    directory = os.open(
        os.path.dirname(os.path.realpath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    )
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def replace(path: Path, text: str) -> None:
    """Replace the file `path` atomically, mode 0600. Readers, also after a crash, see the old text or the new one.

    If `path` is a symbolic link, the file that it points to is replaced.

    Raises:
        KeyringError: the write failed; the old file is unchanged.
    """
    target = Path(os.path.realpath(path))
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        _write(descriptor, text)
        os.replace(temporary, target)
        temporary = None
        sync_directory(target.parent)
    except OSError as error:
        raise KeyringError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(
                OSError
            ):  # an error is raised already, and the file's mode is 0600
                os.unlink(temporary)


def load(path: Path, parse: Callable[[str], _T]) -> _T:
    """Read a secret file and return what `parse` makes of its text. Raises KeyringError as `load_keyring`."""
    text = read_secret(path)
    try:
        return parse(text)
    except KeyringError as error:
        raise KeyringError(
            f"{path}: {error}"
        ) from None  # the cause has the same text without the path


def read_secret(path: Path, *, group_reads: bool = False) -> str:
    """Return the text of a secret file, after checking its owner, type and mode.

    With `group_reads`, the group may read the file, too, as with Debian's ssl-cert group.

    Raises:
        KeyringError: as `load_keyring`, except for malformed content.
    """
    try:
        # O_NONBLOCK: opening a FIFO without a writer would block forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            given = (
                status.st_uid == 0 != os.geteuid()
            )  # root gave the file to a group, as Kubernetes does
            _check_status(path, status, 0o037 if group_reads or given else 0o077)
            with open(descriptor, "rb", closefd=False) as file:
                # st_size is not a bound, because the file may grow while it is read.
                content = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise KeyringError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise KeyringError(f"{path}: the file is over the limit of {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        pass  # raised below, not chained: a UnicodeDecodeError holds the whole content, which is secret
    raise KeyringError(f"{path}: the file is not UTF-8 text")


def distrust(directory: Path, owners: Collection[int], *, parent: bool = True) -> str:
    """Return the reason why a user other than root and `owners` (uids) could create files in `directory`, or "".

    With `parent`, also check its parent directory, so that no such user could replace the directory itself.

    Raises:
        OSError: the directory cannot be read, for example because it does not exist.
    """
    # lstat: in a shared /tmp a link could lead anywhere. If the parent is a link, its owner chose that.
    checked = [(directory, directory.lstat())]
    if not stat.S_ISDIR(checked[0][1].st_mode):
        return f"{directory} is not a directory"
    if parent:
        checked.append((directory.parent, directory.parent.stat()))
    for path, status in checked:
        if status.st_uid != 0 and status.st_uid not in owners:
            return f"{path} belongs to uid {status.st_uid}"
        # In a sticky directory such as /tmp, only its owner can rename or remove an entry.
        shared = path != directory and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not shared:
            mode = stat.S_IMODE(status.st_mode)
            return f"other users may write to {path} (mode {mode:04o}); run `chmod go-w {path}`"
    return ""


def _check_status(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raise KeyringError unless it is a regular file of this user or root without the `forbidden` mode bits."""
    if not stat.S_ISREG(status.st_mode):
        raise KeyringError(f"{path}: not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise KeyringError(
            f"{path}: owned by uid {status.st_uid}; it must be owned by uid {os.geteuid()} or root"
        )
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise KeyringError(f"{path}: open to other users (mode {mode:04o}); run `chmod 600 {path}`")


def _write(descriptor: int, text: str) -> None:
    """Write `text`, fsync, and close `descriptor`."""
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def sync_directory(directory: str | Path) -> None:
    """Fsync `directory`, so that its entries survive a crash. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
