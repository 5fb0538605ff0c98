"""A data directory that cannot be is an error when the relay starts, not a line of its log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import warm

from iris.errors import ConfigError
from relay.supervisor import check_data


def a_file(path: Path) -> tuple[Path, str]:
    (path / "file").touch()
    return path / "file", f"Not a directory: {path / 'file'}"


def below_a_file(path: Path) -> tuple[Path, str]:
    (path / "file").touch()
    return path / "file" / "a" / "b", f"Not a directory: {path / 'file'}"


def a_broken_link(path: Path) -> tuple[Path, str]:
    (path / "link").symlink_to(path / "nowhere")
    return path / "link", f"Not a directory: {path / 'link'}"


@pytest.mark.parametrize("wrong", [below_a_file, a_broken_link])
@pytest.mark.parametrize("check", [False, True])
def test_a_relay_does_not_start_with_a_data_directory_that_cannot_be(
    wrong: Callable[[Path], tuple[Path, str]], check: bool, tmp_path: Path
) -> None:
    data, words = wrong(tmp_path)
    environ = {
        "PATH": os.environ["PATH"],
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HOME": str(tmp_path),
    }
    arguments = ["--dev", "--data", str(data), *["--check"] * check]
    command = [sys.executable, "-m", "relay", *arguments]
    ended = warm.run(command, env=environ, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"iris relay: data: cannot keep streams in {data}: {words}; "
        "name a directory that this user can create or write to"
    )
    assert not (tmp_path / "iris" / "relay.sock").exists(), "nothing is left bound"


def test_a_directory_that_the_user_may_not_write_to_is_refused_with_the_systems_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"in {tmp_path}/new: Permission denied: {tmp_path};"):
        check_data(tmp_path / "new")


def test_a_file_is_refused(tmp_path: Path) -> None:
    data, words = a_file(tmp_path)
    with pytest.raises(ConfigError, match=f"in {data}: {words};"):
        check_data(data)


def test_a_directory_that_exists_or_can_be_created_is_accepted_and_not_created(
    tmp_path: Path,
) -> None:
    check_data(tmp_path)
    check_data(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
