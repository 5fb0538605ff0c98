"""The stored cursors of a log's consumers, by name. The content is opaque here (see `cursor`)."""

from __future__ import annotations

from typing import Final

from relay.store.chain import Chain
from relay.store.errors import CursorsFull

MAX_CURSORS: Final = 4096
MAX_CURSOR_NAME_BYTES: Final = 1024
MAX_CURSOR_BYTES: Final = 1 << 20


class Cursors:
    """The cursors of one log."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._names = {name.decode() for name, _ in chain.database.rows(b"c")}
        self.listed_us = int.from_bytes(chain.database.get(b"l") or b"", "big")
        """Due times up to this one were listed to consumers, as far as stored cursors show."""

    def put(self, name: str, state: bytes, *, sync: bool = True) -> None:
        """Store `state`, up to 1 MiB, under `name`. Without `sync`, a power cut may restore the previous state.

        Raises:
            ValueError: the name or the state is too long.
            CursorsFull: there are `MAX_CURSORS` others.
            LogWriteFailed: the previous state may still be stored.
        """
        if len(name.encode()) > MAX_CURSOR_NAME_BYTES or len(state) > MAX_CURSOR_BYTES:
            raise ValueError(
                f"cursor {name[:64]!r}: its name has {len(name.encode())} bytes and its state {len(state)}; "
                f"the limits are {MAX_CURSOR_NAME_BYTES} and {MAX_CURSOR_BYTES}"
            )
        if name not in self._names and len(self._names) >= MAX_CURSORS:
            raise CursorsFull(
                self._chain.path,
                f"it has {MAX_CURSORS} durable consumers, which is the limit; delete one",
            )
        batch = self._chain.database.batch()
        if self.listed_us:
            batch.put(b"l", self.listed_us.to_bytes(8, "big"))
        batch.put(b"c" + name.encode(), state)
        self._chain.write(batch, sync=sync)
        self._names.add(name)

    def get(self, name: str) -> bytes | None:
        """Return the state of `name`; None if there is none. Raises LogDamaged."""
        return self._chain.database.get(b"c" + name.encode())

    def names(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self._names)

    def delete(self, name: str) -> bool:
        """Delete `name`, with a sync; return whether it existed. Raises LogWriteFailed."""
        if name not in self._names:
            return False
        batch = self._chain.database.batch()
        batch.delete(b"c" + name.encode())
        self._chain.write(batch, sync=True)
        self._names.discard(name)
        return True

    def listed(self, due_us: int) -> None:
        """Note that a consumer has passed this due time.

        A record that is stored later and due before it is then not deferred. If the clock was set
        back, it may be delivered early.
        """
        self.listed_us = max(self.listed_us, due_us)
