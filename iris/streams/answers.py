"""Answers of stores to calls: the type that was expected, or the error that a refusal stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from iris.errors import (
    IrisError,
    NoStream,
    NotActive,
    StagedMissing,
    StreamDamaged,
    StreamError,
    StreamExists,
    StreamSuperseded,
    StreamUnavailable,
    TooManyWorkers,
)
from iris.wire.streams import Refused

T = TypeVar("T")


class RevisionTaken(StreamError):
    """Another client changed the stream first; describe it again and repeat the change."""


def checked(answer: object, wanted: type[T], shown: str) -> T:
    """Return `answer` if it has the type expected; raise the error that a refusal stands for."""
    if isinstance(answer, wanted):
        return answer
    if isinstance(answer, Refused):
        if answer.code == "disk":
            # The write may turn out to be on disk later, unless it was never tried.
            raise StreamUnavailable(shown, answer.detail, may_have_run=not answer.sure)
        if answer.code == "moved":
            # It may be in the bucket, where the stream's next store finds it.
            moved = StreamUnavailable(shown, answer.detail, may_have_run=True)
            moved.passing = True
            raise moved
        if answer.code == "leaving":
            away = StreamUnavailable(shown, answer.detail)
            away.passing = True
            raise away
        raise _ERRORS.get(answer.code, StreamUnavailable)(shown, answer.detail)
    raise StreamUnavailable(
        shown, f"the store sent an answer of the wrong type: {type(answer).__name__}"
    )


_ERRORS: Final[dict[str, Callable[[str, str], IrisError]]] = {
    "no-stream": NoStream,
    "exists": StreamExists,
    "order": StreamError,
    "revision": RevisionTaken,
    "invalid": StreamError,
    "paused": StreamError,
    "consumer": StreamError,
    "offset": StreamError,
    "damaged": StreamDamaged,
    "staged": StagedMissing,
    "superseded": StreamSuperseded,
    "not-active": NotActive,
    "workers": TooManyWorkers,
}
