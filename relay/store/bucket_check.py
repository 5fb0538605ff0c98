"""What `iris store check` does in a bucket of the store of a data directory."""

from __future__ import annotations

import os
from pathlib import Path

from iris import keyfiles
from iris.crypto.keys import GroupKey
from iris.errors import ConfigError
from relay.store.bucket.checking import Check, Report
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.shelf import DIRECTORY
from relay.store.bucket.url import open_bucket
from relay.store.directory import DirectoryBusy, locked
from relay.store.process import GROUP_FILE


async def check_bucket(directory: Path, url: str, key_file: Path | None) -> Report:
    """Return what is in the bucket at `url`, and how the databases below `directory` compare with it.

    Raises:
        ConfigError: the bucket is empty or cannot be used, or the group key is missing.
        KeyringError: the group key is damaged.
        BucketError: the bucket does not answer.
    """
    path = key_file or directory / GROUP_FILE
    if not path.exists():
        raise ConfigError(
            f"bucket: {path}, the key of the stores that share the bucket, is missing; name it with --bucket-key"
        )
    key = keyfiles.load(path, lambda text: GroupKey.parse(text.strip()))
    objects, sealer = open_bucket(url), Sealer(key, os.urandom)
    one = Check(objects, sealer)
    await one.bucket()
    if one.report.damage:
        # A store that runs may have deleted what its checkpoint covers while it was read.
        one = Check(objects, sealer)
        await one.bucket()
    if not one.report.journals and not one.report.damage:
        raise ConfigError(
            f"bucket {url}: no store has written to it; check the URL, and whether its file system is mounted"
        )
    streams = directory / DIRECTORY
    if not streams.is_dir():
        one.report.skipped = f"{directory} has no streams of a bucket"
        return one.report
    await one.seen(streams)
    try:
        with locked(directory):
            await one.disk(streams)
    except DirectoryBusy:
        one.report.skipped = f"the store of {directory} runs, so its streams were not compared; stop it to compare them"  # fmt: skip
    return one.report
