"""Key files on disk: `keyring.toml` and `network.toml`, mode 0600, in the configuration directory, and a site's key file.

The layouts are those of `iris.crypto.keyring`; this module only reads and writes. A file is opened
once and judged by its descriptor, so nobody can swap it between check and read. A file that others
can read, or that another user owns, is refused rather than repaired: its secret may be known already.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping
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


def config_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of the key files: $IRIS_CONFIG, else $XDG_CONFIG_HOME/iris, else ~/.config/iris.

    Empty variables count as unset, and so does a relative $XDG_CONFIG_HOME (XDG Base Directory
    Specification). Nothing is created.
    """
    if own := environ.get("IRIS_CONFIG"):
        return Path(own)
    xdg = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "iris"
    return Path(environ.get("HOME") or Path.home()) / ".config" / "iris"


def has_keys(environ: Mapping[str, str]) -> bool:
    """Whether the configuration directory has a keyring."""
    return os.path.exists(config_directory(environ) / KEYRING_FILE)


def load_keys(environ: Mapping[str, str]) -> Keyring:
    """Return the keyring of the configuration directory, else that of a relay started with --dev.

    Where IRIS_CONFIG names the directory, no other is looked at.

    Raises:
        KeyringError: there is neither (the text says how to make one), or it may not be used.
    """
    directory = config_directory(environ)
    if has_keys(environ):
        return load_keyring(directory / KEYRING_FILE)
    if not environ.get("IRIS_CONFIG"):
        dev = paths.dev_key_directory(environ, os.geteuid()) / KEYRING_FILE
        if os.path.exists(dev):
            return load_keyring(dev)
    raise KeyringError(
        f"no keyring in {directory}; make one with `iris key new`, or "
        + (
            "unset IRIS_CONFIG, which hides the keys of `iris relay --dev`"
            if environ.get("IRIS_CONFIG")
            else "start `iris relay --dev`"
        )
    )


def create_keys(
    directory: Path, entropy: Callable[[int], bytes] = os.urandom
) -> tuple[Keyring, NetworkKey]:
    """Write a new keyring (one default key) and a new network key into `directory`, and return them.

    Creates `directory` with mode 0700, its parents with the usual one.

    Raises:
        KeyringError: one of the two files is there already, others may write to the directory, or
            the disk refused. No file was overwritten, and none that was new is left behind.
    """
    keyring = Keyring.single(ClusterKey(entropy(SECRET_BYTES)))
    network = NetworkKey(entropy(SECRET_BYTES))
    texts = {KEYRING_FILE: keyring.dump(), NETWORK_FILE: dump_network_keys([network])}
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeyringError(f"others may write to {directory}: chmod 700 {directory}")
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
            raise KeyringError(f"{error.filename} exists already and was not changed") from error
        if isinstance(error, OSError):
            raise KeyringError(f"cannot create keys in {directory}: {error.strerror}") from error
        raise
    return keyring, network


def load_keyring(path: Path) -> Keyring:
    """Return the keyring in the file `path`.

    Raises:
        KeyringError: missing, not a plain file, over 1 MiB, open to others, owned by another user,
            or malformed. The text begins with the path and says what to do.
    """
    return load(path, Keyring.parse)


def load_network_keys(path: Path) -> tuple[NetworkKey, ...]:
    """Return the network keys in the file `path`; the first is the one to dial with.

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
        KeyringError: there is such a file, which was left alone, or the disk refused; then none is left.
    """
    key = SiteKey(entropy(SECRET_BYTES))
    create(path, dump_site_key(key))
    return key


def create(path: Path, text: str) -> None:
    """Write a secret into the new file `path`, mode 0600. Raises KeyringError as `create_site_key`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise KeyringError(f"{path} exists already and was not changed") from error
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
    """Replace the file `path`, mode 0600: a reader, or a crash, sees the old keyring or the new one.

    A symbolic link stays one; what it points to is replaced.

    Raises:
        KeyringError: the disk refused; the old file is as it was.
    """
    target = Path(os.path.realpath(path))
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        _write(descriptor, keyring.dump())
        os.replace(temporary, target)
        temporary = None
        sync_directory(target.parent)
    except OSError as error:
        raise KeyringError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):  # already failing; the file holds its secret at 0600
                os.unlink(temporary)


def load(path: Path, parse: Callable[[str], _T]) -> _T:
    """Return the result of `parse` for a secret file. Raises KeyringError as `load_keyring`."""
    text = read_secret(path)
    try:
        return parse(text)
    except KeyringError as error:
        raise KeyringError(f"{path}: {error}") from None  # the cause says the same without the path


def read_secret(path: Path, *, group_reads: bool = False) -> str:
    """Return the text of a secret file, after checking the file that was opened.

    `group_reads`: its group may read it, too, as for Debian's ssl-cert.

    Raises:
        KeyringError: as `load_keyring`, except for malformed content.
    """
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _judge(path, os.fstat(descriptor), 0o037 if group_reads else 0o077)
            with open(descriptor, "rb", closefd=False) as file:
                # The size of the moment is no bound: the file may grow while it is read.
                content = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise KeyringError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise KeyringError(f"{path}: over {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        pass  # raised below: the error holds the whole content, so it is no cause to chain
    raise KeyringError(f"{path}: not UTF-8")


def distrust(directory: Path, owners: Collection[int], *, around: bool = True) -> str:
    """Return why another user than root and `owners` (uids) could put a file into `directory`, or an empty text.

    With `around`, also check whether such a user could replace the directory itself.

    Raises:
        OSError: the directory cannot be read, for example because it does not exist.
    """
    # lstat: in a shared /tmp a link could lead anywhere. If the parent is a link, its owner chose that.
    places = [(directory, directory.lstat())]
    if not stat.S_ISDIR(places[0][1].st_mode):
        return f"{directory} is not a directory"
    if around:
        places.append((directory.parent, directory.parent.stat()))
    for place, status in places:
        if status.st_uid != 0 and status.st_uid not in owners:
            return f"{place} belongs to uid {status.st_uid}"
        # In a sticky directory such as /tmp, only its owner can rename or remove an entry.
        shared = place != directory and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not shared:
            mode = stat.S_IMODE(status.st_mode)
            return f"others may write to {place} (mode {mode:04o}): chmod go-w {place}"
    return ""


def _judge(path: Path, status: os.stat_result, closed: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyringError(f"{path}: not a plain file")
    if status.st_uid not in (0, os.geteuid()):
        raise KeyringError(f"{path}: owned by uid {status.st_uid}, not by us or root")
    if status.st_mode & closed:
        mode = stat.S_IMODE(status.st_mode)
        raise KeyringError(f"{path}: open to others (mode {mode:04o}): chmod 600 {path}")


def _write(descriptor: int, text: str) -> None:
    """Write `text` through to the disk and close `descriptor`."""
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def sync_directory(directory: str | Path) -> None:
    """Make the names in `directory` survive a crash. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
