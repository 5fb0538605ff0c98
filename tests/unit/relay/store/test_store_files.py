"""A store uses only a key and a directory that nobody else can read or replace."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from iris.errors import ConfigError, KeyringError
from relay.store.process import StoreProcess


async def nowhere(factory: object) -> NoReturn:
    raise OSError("no relay")


async def public_key(directory: Path) -> bytes:
    process = StoreProcess(directory, nowhere)
    process.open()
    try:
        return process.store.key.public_key
    finally:
        await process.close()


async def test_a_store_makes_its_key_for_itself_alone_and_keeps_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    before = os.umask(0)
    try:
        made = await public_key(data)
    finally:
        os.umask(before)
    assert stat.S_IMODE((data / "store.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert await public_key(data) == made


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o666])
async def test_a_key_that_others_can_read_or_replace_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever has read the key can act as this store."""
    data = tmp_path / "data"
    made = await public_key(data)
    (data / "store.key").chmod(mode)
    with pytest.raises(KeyringError, match=f"chmod 600 {data}/store.key"):
        StoreProcess(data, nowhere).open()
    (data / "store.key").chmod(0o600)
    assert await public_key(data) == made


async def test_a_key_in_which_a_bit_has_flipped_is_named_and_no_other_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = await public_key(data)
    path = data / "store.key"
    text = path.read_bytes()
    for at in range(48):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(
            KeyringError, match=f"{path}: a store key .* so restore the file from a backup"
        ):
            StoreProcess(data, nowhere).open()
    path.write_bytes(text)
    assert await public_key(data) == made


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("what", ["store.key", "."])
async def test_what_belongs_to_another_user_is_refused(tmp_path: Path, what: str) -> None:
    data = tmp_path / "data"
    await public_key(data)
    os.chown(data / what, 65534, 65534)
    with pytest.raises((KeyringError, ConfigError), match="uid 65534"):
        StoreProcess(data, nowhere).open()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
async def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    with pytest.raises(ConfigError, match=f"data: other users may write to .*chmod go-w {data}"):
        StoreProcess(data, nowhere).open()
    assert list(data.iterdir()) == []


async def test_a_directory_that_others_may_only_read_is_accepted(tmp_path: Path) -> None:
    """A directory as systemd makes it; the files inside are private."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    assert await public_key(data)


def test_the_process_says_what_to_do_about_an_open_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "store.key").write_text("A" * 48)
    (data / "store.key").chmod(0o644)
    done = subprocess.run(
        [sys.executable, "-m", "relay.store", "--data", data, "--relay", tmp_path / "relay.sock"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert (
        f"{data}/store.key: open to other users (mode 0644); run `chmod 600 {data}/store.key`"
        in done.stderr
    )
    assert "AAAA" not in done.stderr
