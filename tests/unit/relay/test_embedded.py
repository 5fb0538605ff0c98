"""The pipe between a client and a relay in one process."""

from __future__ import annotations

import asyncio

from relay.embedded import MemoryTransport


class Pausing(asyncio.BufferedProtocol):
    """Reads a few bytes at a time, and pauses after each read, as a relay does when its share of a turn is over."""

    def __init__(self) -> None:
        self.transport: MemoryTransport
        self.received = b""
        self.paused = False
        self._buffer = bytearray(4)

    def get_buffer(self, sizehint: int) -> bytearray:
        assert not self.paused, "what it has not handled yet would be overwritten"
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]
        self.paused = True
        self.transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self.paused = False
        self.transport.resume_reading()


async def test_nothing_is_delivered_to_a_protocol_that_has_paused() -> None:
    writer, reader = asyncio.BufferedProtocol(), Pausing()
    ends = MemoryTransport(writer), MemoryTransport(reader)
    ends[0].join(ends[1])
    ends[1].join(ends[0])
    reader.transport = ends[1]
    ends[0].write(b"a long write")
    ends[0].write(b", and another")
    while reader.received != b"a long write, and another":  # noqa: ASYNC110 - it ends, or an assertion fails
        await asyncio.sleep(0)
