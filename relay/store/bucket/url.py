"""Which bucket a URL names."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from iris.errors import ConfigError
from relay.store.bucket.cloud import open_cloud
from relay.store.bucket.directory import Directory
from relay.store.bucket.objects import Objects

SCHEMES: Final = ("s3", "gs", "az", "file")


def is_directory(url: str) -> bool:
    """Whether the bucket at `url` is a directory, not a service that is paid for each request."""
    return urlsplit(url).scheme == "file"


def open_bucket(url: str) -> Objects:
    """Return the bucket at `url`, for example `s3://name/prefix` or `file:///shared/iris`.

    Credentials come from the environment, or from the role of the machine. The service is not called yet.

    Raises:
        ConfigError: the URL names no bucket, or `obstore` is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"bucket: {url!r} does not begin with one of {', '.join(f'{one}://' for one in SCHEMES)}"
        )
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(
            "bucket: the URL may have a bucket and a path only; "
            "set credentials and settings in the environment, for example AWS_REGION"
        )
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc or not path.is_absolute():
            raise ConfigError(
                f"bucket: {url!r} is not file:///absolute/path; write three slashes and the absolute path"
            )
        return Directory(path)
    if not parts.netloc:
        raise ConfigError(f"bucket: {url!r} names no bucket; write {parts.scheme}://NAME/PATH")
    return open_cloud(url, is_s3=parts.scheme == "s3")
