"""A small file of a store that somebody made huge, or replaced by a pipe, is damage that is named: it is not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from iris.crypto.keys import GroupKey
from iris.errors import ConfigError
from relay.store.bucket.directory import Directory
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.seen import SEEN_FILE, Seen
from relay.store.database import MARK_NAME, read_mark
from relay.store.errors import LogDamaged
from relay.store.files import MAX_SMALL_BYTES, read_small

HUGE: Final = 1 << 40
"""More than any machine has."""


def huge(path: Path) -> str:
    path.touch()
    os.truncate(path, HUGE)
    return f"it has {HUGE} bytes, and such a file has at most {MAX_SMALL_BYTES}"


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "it is not a regular file"


def folder(path: Path) -> str:
    path.mkdir()
    return "it is not a regular file"


Harm = Callable[[Path], str]
HARMS: tuple[Harm, ...] = (huge, pipe, folder)


@pytest.mark.parametrize("harm", HARMS)
def test_it_is_not_read(tmp_path: Path, harm: Harm) -> None:
    (tmp_path / "good").write_bytes(b"good")
    assert read_small(tmp_path / "good") == b"good"
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=harm(tmp_path / "bad")):
        read_small(tmp_path / "bad")
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")


@pytest.mark.parametrize("harm", HARMS)
def test_a_mark_that_cannot_be_read_names_the_file(tmp_path: Path, harm: Harm) -> None:
    said = harm(tmp_path / MARK_NAME)
    with pytest.raises(LogDamaged, match=f"its file {MARK_NAME} cannot be read: {said}"):
        read_mark(str(tmp_path))


@pytest.mark.parametrize("harm", HARMS)
async def test_what_was_seen_of_a_bucket_names_the_file(tmp_path: Path, harm: Harm) -> None:
    said = harm(tmp_path / SEEN_FILE)
    sealer = Sealer(GroupKey(bytes(32)), os.urandom)
    seen = Seen(Directory(tmp_path / "bucket"), sealer, tmp_path)
    with pytest.raises(ConfigError, match=f"data: {tmp_path / SEEN_FILE} is damaged: {said}"):
        await seen.verify(())
