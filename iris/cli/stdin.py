"""Read standard input in an event loop: a terminal, a pipe or a file."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Final

from iris.errors import ConfigError, MessageTooLarge

CHUNK_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 64 << 20
_AHEAD: Final = 8


def unreadable(error: OSError) -> str:
    """Return the text of an error of reading standard input."""
    return f"cannot read standard input: {error.strerror or error}"


async def chunks() -> AsyncIterator[bytes]:
    """Iterate over standard input in chunks of up to 64 KiB, reading at most 512 KiB ahead.

    A thread reads, because an event loop cannot wait for a plain file. It reads the descriptor, not `sys.stdin`: a
    thread that waits inside that object's lock makes the interpreter's exit fail.

    Raises:
        ConfigError: standard input cannot be read.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def read() -> None:
        while True:
            room.acquire()
            found: bytes | OSError
            try:
                found = os.read(0, CHUNK_BYTES)
            except OSError as error:
                found = error
            try:
                loop.call_soon_threadsafe(queue.put_nowait, found)
            except RuntimeError:  # the loop is closed, so nothing reads this any more
                return
            if not found or isinstance(found, OSError):
                return

    threading.Thread(target=read, name="iris-stdin", daemon=True).start()
    while True:
        found = await queue.get()
        if isinstance(found, OSError):
            raise ConfigError(unreadable(found)) from found
        if not found:
            return
        yield found
        room.release()


async def lines() -> AsyncIterator[bytes]:
    """Iterate over the lines of standard input without their line ends; the last line need not have one.

    Raises:
        ConfigError: standard input cannot be read.
        MessageTooLarge: a line is longer than 64 MiB.
    """
    held: list[bytes] = []
    held_bytes = 0
    async for chunk in chunks():
        first, *rest = chunk.split(b"\n")
        held.append(first)
        held_bytes += len(first)
        if held_bytes > MAX_LINE_BYTES:
            raise MessageTooLarge(
                f"a line of standard input is longer than {MAX_LINE_BYTES} bytes; send it with `iris tunnel --raw`"
            )
        if rest:
            yield b"".join(held)
            for line in rest[:-1]:
                yield line
            held, held_bytes = [rest[-1]], len(rest[-1])
    last = b"".join(held)
    if last:
        yield last
