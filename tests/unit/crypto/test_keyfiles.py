"""What key files promise: private, whole, never overwritten by accident."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from iris.crypto.keyring import Keyring, dump_network_keys, dump_site_key
from iris.crypto.keys import ClusterKey, NetworkKey, SiteKey
from iris.errors import KeyringError
from iris.keyfiles import (
    config_directory,
    create_keys,
    create_site_key,
    load_keyring,
    load_network_keys,
    load_site_key,
    save_keyring,
)

A, B = ClusterKey(b"a" * 32), ClusterKey(b"b" * 32)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def private_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


@pytest.fixture
def keyring_path(tmp_path: Path) -> Path:
    return private_file(tmp_path / "keyring.toml", Keyring.single(A).dump().encode())


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"IRIS_CONFIG": "/c", "XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/iris"),
        ({"IRIS_CONFIG": "", "XDG_CONFIG_HOME": "", "HOME": "/h"}, "/h/.config/iris"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}, "/h/.config/iris"),
    ],
)
def test_the_configuration_directory_follows_the_environment(
    environ: dict[str, str], directory: str
) -> None:
    assert config_directory(environ) == Path(directory)


def test_a_user_without_home_and_without_an_entry_in_passwd_has_the_root_as_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_entry(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    home = pwd.getpwuid(os.getuid()).pw_dir
    assert config_directory({}) == Path(home, ".config", "iris")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    assert config_directory({}) == config_directory({"HOME": ""}) == Path("/.config/iris")


# Creating


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_new_keys_are_private_and_load_back(tmp_path: Path, umask: int) -> None:
    directory = tmp_path / "deep" / "iris"
    before = os.umask(umask)
    try:
        keyring, network = create_keys(directory)
    finally:
        os.umask(before)
    assert mode(directory) == 0o700
    assert sorted(path.name for path in directory.iterdir()) == ["keyring.toml", "network.toml"]
    assert all(mode(path) == 0o600 for path in directory.iterdir())
    assert load_keyring(directory / "keyring.toml") == keyring
    assert load_network_keys(directory / "network.toml") == (network,)


def test_cluster_key_and_network_key_are_drawn_apart(tmp_path: Path) -> None:
    drawn: list[int] = []

    def entropy(count: int) -> bytes:
        drawn.append(count)
        return bytes([len(drawn)]) * count

    keyring, network = create_keys(tmp_path, entropy)
    assert drawn == [32, 32]
    assert keyring.for_cluster("any") == (ClusterKey(b"\x01" * 32),)
    assert network.reveal() != ClusterKey(b"\x01" * 32).reveal()


@pytest.mark.parametrize("name", ["keyring.toml", "network.toml"])
def test_creating_keys_overwrites_nothing_and_leaves_nothing_half_made(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(KeyringError, match=f"{name} already exists"):
        create_keys(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_creating_keys_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    (tmp_path / "keyring.toml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyringError, match="already exists"):
        create_keys(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_keys_are_not_created_where_others_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(KeyringError, match=f"chmod 700 {tmp_path}"):
        create_keys(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_key_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyringError, match="No space left"):
        create_keys(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Loading


@pytest.mark.parametrize("others", [0o640, 0o604, 0o620, 0o602, 0o644, 0o610, 0o666])
@pytest.mark.parametrize("load", [load_keyring, load_network_keys])
def test_a_file_open_to_others_is_refused_with_the_command_that_helps(
    keyring_path: Path, others: int, load: Callable[[Path], object]
) -> None:
    keyring_path.chmod(others)
    with pytest.raises(KeyringError, match=f"chmod 600 {keyring_path}"):
        load(keyring_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to a group")
@pytest.mark.parametrize(("mode", "loads"), [(0o640, True), (0o440, True), (0o644, False), (0o660, False), (0o650, False)])  # fmt: skip
def test_a_file_of_root_that_its_group_can_read_loads_for_others_than_root(
    keyring_path: Path, mode: int, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do the files of a Secret in Kubernetes look to a program with an `fsGroup`."""
    keyring_path.chmod(mode)
    with pytest.raises(KeyringError, match="open to other users"):
        load_keyring(keyring_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if loads:
        assert load_keyring(keyring_path) == Keyring.single(A)
    else:
        with pytest.raises(KeyringError, match="open to other users"):
            load_keyring(keyring_path)
    os.chown(keyring_path, 1000, -1)  # a program's own file is for the program alone
    with pytest.raises(KeyringError, match="open to other users"):
        load_keyring(keyring_path)


@pytest.mark.parametrize("own", [0o600, 0o400])
def test_a_file_of_our_own_loads(keyring_path: Path, own: int) -> None:
    keyring_path.chmod(own)
    assert load_keyring(keyring_path) == Keyring.single(A)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(keyring_path: Path) -> None:
    os.chown(keyring_path, 12_345, -1)
    with pytest.raises(KeyringError, match="owned by uid 12345"):
        load_keyring(keyring_path)


def test_a_file_of_root_loads_for_anybody_who_can_read_it(
    keyring_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = keyring_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    if owner == 0:
        assert load_keyring(keyring_path) == Keyring.single(A)
    else:
        with pytest.raises(KeyringError, match=f"owned by uid {owner}"):
            load_keyring(keyring_path)


def test_the_file_that_was_judged_is_the_file_that_is_read(
    keyring_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = private_file(keyring_path.parent / "planted", Keyring.single(B).dump().encode())
    fstat = os.fstat

    def swap_then_judge(descriptor: int) -> os.stat_result:
        if planted.exists():
            planted.replace(keyring_path)
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", swap_then_judge)
    assert load_keyring(keyring_path) == Keyring.single(A)
    assert load_keyring(keyring_path) == Keyring.single(B)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyringError, match=r"absent\.toml: cannot be read: No such file"):
        load_keyring(tmp_path / "absent.toml")


def test_what_is_not_a_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path):
        with pytest.raises(KeyringError, match="not a regular file"):
            load_keyring(path)


def test_an_endless_file_is_read_to_its_bound_and_refused(tmp_path: Path) -> None:
    exact = private_file(tmp_path / "exact", b"#" * (1 << 20))
    assert load_keyring(exact).entries() == {}
    over = private_file(tmp_path / "over", b"#" * ((1 << 20) + 1))
    with pytest.raises(KeyringError, match=r"over .* 1048576 bytes"):
        load_keyring(over)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[default]\nkeys = [1]", b"not toml"])
def test_a_malformed_file_is_refused_by_path(tmp_path: Path, content: bytes) -> None:
    path = private_file(tmp_path / "keyring.toml", content)
    with pytest.raises(KeyringError, match=str(path)):
        load_keyring(path)


# Saving


def test_saving_replaces_the_file_privately(keyring_path: Path) -> None:
    changed = Keyring.single(A).add("databases", B)
    keyring_path.chmod(0o644)
    save_keyring(keyring_path, changed)
    assert mode(keyring_path) == 0o600
    assert load_keyring(keyring_path) == changed
    assert [path.name for path in keyring_path.parent.iterdir()] == ["keyring.toml"]


def test_a_reader_of_the_old_file_keeps_the_old_file(keyring_path: Path) -> None:
    with keyring_path.open() as reader:
        save_keyring(keyring_path, Keyring.single(B))
        assert Keyring.parse(reader.read()) == Keyring.single(A)


def test_saving_through_a_link_replaces_what_it_points_to(keyring_path: Path) -> None:
    link = keyring_path.parent / "link.toml"
    link.symlink_to(keyring_path)
    save_keyring(link, Keyring.single(B))
    assert link.is_symlink()
    assert load_keyring(keyring_path) == Keyring.single(B)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    keyring_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(KeyringError, match="Input/output error"):
        save_keyring(keyring_path, Keyring.single(B))
    monkeypatch.undo()
    assert load_keyring(keyring_path) == Keyring.single(A)
    assert [path.name for path in keyring_path.parent.iterdir()] == ["keyring.toml"]


# Site keys


def test_a_site_key_is_written_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "eu.toml"
    made = create_site_key(path, lambda size: b"e" * size)
    assert made == SiteKey(b"e" * 32)
    assert mode(path) == 0o600
    assert load_site_key(path) == made
    with pytest.raises(KeyringError, match="already exists"):
        create_site_key(path)
    assert load_site_key(path) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no toml",
        dump_network_keys([NetworkKey(bytes(32))]),
        dump_site_key(SiteKey(bytes(32))) + "[network]\n",
        "[site]\nkeys = []\n",
        f'[site]\nkeys = ["{SiteKey(bytes(32)).reveal()}", "{SiteKey(bytes([1]) * 32).reveal()}"]\n',
        '[site]\nkeys = ["short"]\n',
        "[site]\nkey = 1\n",
    ],
)
def test_what_is_not_a_site_key_file_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    path = private_file(tmp_path / "eu.toml", text.encode())
    with pytest.raises(KeyringError) as raised:
        load_site_key(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "A" * 42 not in str(raised.value)


def test_a_site_key_that_the_disk_refuses_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyringError, match="cannot write"):
        create_site_key(tmp_path / "eu.toml")
    assert not (tmp_path / "eu.toml").exists()
