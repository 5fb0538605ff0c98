"""`iris key access`: the file that lets processes on hosts without a relay in, as an operator makes it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from iris import cli, keyfiles
from iris.cli.exits import Exit
from iris.crypto.keyring import dump_network_keys
from iris.crypto.keys import NetworkKey
from iris.remote import load_access


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "keys"
    keyfiles.create_keys(directory)
    monkeypatch.setenv("IRIS_CONFIG", str(directory))
    return directory


def key_access(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["key", "access", *map(str, arguments)])


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_it_writes_a_private_file_that_clients_load_and_prints_ids_alone(
    keys: Path, tmp_path: Path, umask: int
) -> None:
    path = tmp_path / "batch-host.pem"
    before = os.umask(umask)
    try:
        result = key_access(path)
    finally:
        os.umask(before)
    assert result.exit_code == Exit.OK, result.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    access = load_access(path)
    (network,) = keyfiles.load_network_keys(keys / keyfiles.NETWORK_FILE)
    assert access.server_name == network.fingerprint.hex()
    assert result.stdout == (
        f"{path}: access {access.access_id.hex()} to network {access.server_name}\n"
    )
    assert network.reveal() not in path.read_text()


def test_it_overwrites_nothing_not_even_through_a_link(keys: Path, tmp_path: Path) -> None:
    path, link, target = tmp_path / "access.pem", tmp_path / "link.pem", tmp_path / "target"
    path.write_text("mine")
    link.symlink_to(target)
    for there in (path, link):
        result = key_access(there)
        assert result.exit_code == Exit.USAGE
        assert result.stderr == f"iris: {there} already exists and was not changed\n"
    assert path.read_text() == "mine"
    assert not target.exists()


def test_every_file_is_another_access_to_the_network_that_relays_dial(
    keys: Path, tmp_path: Path
) -> None:
    new, old = NetworkKey(b"n" * 32), NetworkKey(b"o" * 32)
    (keys / keyfiles.NETWORK_FILE).write_text(dump_network_keys([new, old]))
    paths = [tmp_path / "one.pem", tmp_path / "two.pem"]
    for path in paths:
        assert key_access(path).exit_code == Exit.OK
    one, two = (load_access(path) for path in paths)
    assert one.server_name == two.server_name == new.fingerprint.hex()
    assert one.access_id != two.access_id


def test_without_a_network_key_it_says_where_one_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IRIS_CONFIG", str(tmp_path))
    result = key_access(tmp_path / "access.pem")
    assert result.exit_code == Exit.USAGE
    assert result.stderr.startswith(f"iris: no network key at {tmp_path / keyfiles.NETWORK_FILE}")
    assert "iris key new" in result.stderr
    assert not (tmp_path / "access.pem").exists()


def test_where_it_cannot_write_it_says_so_and_leaves_nothing(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = key_access(tmp_path / "nowhere" / "access.pem")
    assert result.exit_code == Exit.USAGE
    assert "cannot create" in result.stderr
    assert "No such file or directory" in result.stderr

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = key_access(tmp_path / "access.pem")
    assert result.exit_code == Exit.USAGE
    assert "No space left on device" in result.stderr
    assert not (tmp_path / "access.pem").exists()


def test_its_help_has_an_example() -> None:
    result = CliRunner().invoke(cli.app, ["key", "access", "--help"])
    assert result.exit_code == Exit.OK
    assert "iris key access" in result.output
    assert "Example" in result.output
