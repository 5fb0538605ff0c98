"""Whether a stream of a disk has joined the bucket, or another log was made of its copy: only one of the two happens.

    first try   no                  the journal of that try ended before it had the whole stream
    second try  name of a journal   the bucket has the stream, and its copy does not count any more
           or   FORCED              another log takes the place of this one, which never joins

Each try is decided by one object. The tries of one stream are numbered and follow each other, so a store that joins a
stream and a store that makes a log of its copy compete for the same object.
"""

from __future__ import annotations

import hashlib
from typing import Final

from relay.store.bucket.moved import NO, decide, decided
from relay.store.bucket.objects import Objects
from relay.store.bucket.sealing import Sealer

FORCED: Final = "forced"
"""In the place of a journal: the stream was restored from its copy, as another log."""


def token_of(uuid: bytes, number: int) -> str:
    """Return the token of a try of the stream `uuid` to join; the first one has number 1."""
    return hashlib.sha256(b"iris-join-1" + uuid + number.to_bytes(8, "big")).hexdigest()[:32]


async def last_try(objects: Objects, sealer: Sealer, uuid: bytes) -> tuple[str, str | None]:
    """Return the token of the first try that did not fail, and what was decided: the name of a journal, `FORCED`, or
    None if it is open. Raises BucketError, ObjectDamaged.
    """
    number = 1
    while (by := await decided(objects, sealer, token := token_of(uuid, number))) == NO:
        number += 1
    return token, by


async def has_joined(objects: Objects, sealer: Sealer, uuid: bytes) -> bool:
    """Return whether the bucket has the stream `uuid`, which was on a disk. Raises BucketError, ObjectDamaged."""
    _, by = await last_try(objects, sealer, uuid)
    return by not in (None, FORCED)


async def prevent(objects: Objects, sealer: Sealer, uuid: bytes) -> bool:
    """Decide that the stream `uuid` never joins the bucket; return False if it has joined.

    Raises BucketError, after which it may be repeated; ObjectDamaged.
    """
    while True:
        token, by = await last_try(objects, sealer, uuid)
        if by is None:
            by = await decide(objects, sealer, token, FORCED)
        if by != NO:
            return by == FORCED
