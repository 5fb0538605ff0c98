"""Finds out which store of a bucket creates a log: whoever creates the object `decision/UUID` first."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from relay.store.bucket.errands import Errands
from relay.store.bucket.moved import decide
from relay.store.bucket.objects import Objects
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.writer import Writer
from relay.store.errors import Refuse

STOPPING: Final = "the store is stopping; try again"
MAX_CREATING: Final = 64
"""Most logs at a time for which a store asks the bucket whether it may create them."""
CREATE_S: Final = 10.0
"""How long it asks."""
CREATED: Final = (
    "a store of this bucket has, or had, a stream with this uuid, or was killed while it created one; create the stream "
    "with a new uuid"
)


class Creations:
    """The streams that one store creates in its bucket."""

    def __init__(
        self, objects: Objects, sealer: Sealer, shelf: Shelf, now_us: Callable[[], int], warn: Callable[[Exception], None],
        flush: Callable[[], None],
    ) -> None:  # fmt: skip
        """`flush` writes answers to the relay."""
        self._objects = objects
        self._sealer = sealer
        self._shelf = shelf
        self._now_us = now_us
        self._flush = flush
        self._creating: set[bytes] = set()
        self._errands = Errands("iris-stream-create", "a stream that is created", warn)

    def create(self, uuid: bytes, done: Callable[[Refuse | None], None]) -> None:
        """Find out whether our journal may begin a log with this uuid, and then call `done`. Raises Refuse."""
        writer = self._shelf.writer
        if self._errands.stopping:
            raise Refuse("leaving", STOPPING)
        if writer is None or uuid in self._creating or len(self._creating) >= MAX_CREATING:
            raise Refuse("leaving", self._shelf.away or "the store is already creating this stream, or too many others; try again")  # fmt: skip
        self._creating.add(uuid)
        self._errands.start(self._create(uuid, writer, done))

    async def cancel(self) -> None:
        """End all work, and begin none."""
        await self._errands.cancel()

    async def _create(
        self, uuid: bytes, writer: Writer, done: Callable[[Refuse | None], None]
    ) -> None:
        refused: Refuse | None = Refuse("leaving", STOPPING)
        until_us = self._now_us() + int(CREATE_S * 1e6)
        attempt = secrets.token_hex(16)

        async def claim() -> bool:
            """Return whether this attempt alone may bring a log with this uuid to the bucket."""
            return await decide(self._objects, self._sealer, uuid.hex(), attempt) == attempt

        try:
            ours = await self._errands.until(
                claim, lambda: bool(writer.ended) or self._now_us() >= until_us
            )
            if ours is None or self._shelf.writer is not writer or writer.ended:
                refused = Refuse("leaving", f"the bucket {self._shelf.url} does not answer, or the store lost its journal there; try again")  # fmt: skip
            else:
                refused = None if ours else Refuse("exists", CREATED)
        finally:
            self._creating.discard(uuid)
            done(refused)
            self._flush()
