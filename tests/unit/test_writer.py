"""What a connection is given while nobody reads at the other end."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from iris.transport import SMALL_BYTES, Writer

HIGH_BYTES = 1 << 16


class PauseRecorder(asyncio.Protocol):
    def __init__(self) -> None:
        self.paused = False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("pieces", [1, 4])
def test_a_writer_faster_than_its_reader_is_told_to_pause_and_to_resume(
    new_loop: object, pieces: int
) -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        transport, protocol = await loop.create_connection(PauseRecorder, sock=ours)
        transport.set_write_buffer_limits(HIGH_BYTES, HIGH_BYTES // 4)
        writer = Writer(transport)
        sent = 0
        for _ in range(1000):
            writer.write([bytes(SMALL_BYTES)] * pieces, SMALL_BYTES * pieces)
            sent += SMALL_BYTES * pieces
            await asyncio.sleep(0)
            if protocol.paused:
                break
        assert protocol.paused
        assert transport.get_write_buffer_size() <= HIGH_BYTES + SMALL_BYTES * pieces
        got = 0
        while got < sent:
            got += len(await loop.sock_recv(theirs, 1 << 20))
        assert not protocol.paused
        transport.close()
        theirs.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        runner.run(play())
