"""Errors of Spark queries.

Each begins with a stable code, so that programs that restart queries need not parse prose.
"""

from __future__ import annotations

from typing import Final

from iris.errors import (
    AmbiguousStream,
    ConfigError,
    DecodeError,
    IrisError,
    KeyringError,
    NoStream,
    OpenError,
    StreamDamaged,
    StreamExists,
    StreamSuperseded,
)

DATA_LOSS: Final = "IRIS_DATA_LOSS"
"""Rows that the query should read are lost: removed by retention, in a deleted log, or lost by the disk."""
AUTH: Final = "IRIS_AUTH"
"""The keyring file is missing or readable by others, or lacks the key that the rows are sealed under."""
NO_STREAM: Final = "IRIS_NO_STREAM"
"""No store holds the stream under this keyring's keys, or several do."""
TIMEOUT: Final = "IRIS_TIMEOUT"
"""The relay or the store did not answer in time. A restarted query continues where it was."""
CONFIG: Final = "IRIS_CONFIG"
"""An option or a column is wrong."""
MALFORMED: Final = "IRIS_MALFORMED"
"""A value does not fit `valueSchema`, in `valueMode=failfast`."""
SINK: Final = "IRIS_SINK"
"""The rows were not stored, or not acknowledged in time: the stream is full or paused, or staged rows have expired."""

DECODE_ERRORS: Final = (ValueError, TypeError, AttributeError, NotImplementedError, ArithmeticError, RecursionError)  # fmt: skip
"""Errors that msgspec and pyarrow raise for a value that does not fit its type (their own errors are subclasses)."""


class SparkError(IrisError):
    """A read or write of Spark failed. `code` is one of this module's constants, and begins the text."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


def to_spark_error(err: IrisError | TimeoutError | OSError, *, writing: bool = False) -> SparkError:
    """Return the SparkError for an error of the client."""
    if isinstance(err, SparkError):
        return err
    detail = str(err) or type(err).__name__
    if isinstance(err, (KeyringError, OpenError)):
        return SparkError(AUTH, detail)
    if isinstance(err, (ConfigError, DecodeError, ValueError)):
        return SparkError(CONFIG, detail)
    if isinstance(err, (NoStream, AmbiguousStream)):
        return SparkError(NO_STREAM, detail)
    if isinstance(err, (StreamDamaged, StreamSuperseded)):
        return SparkError(DATA_LOSS, detail)
    if isinstance(err, StreamExists):
        return SparkError(CONFIG, detail)
    return SparkError(SINK if writing else TIMEOUT, detail)
