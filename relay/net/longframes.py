"""A port that sends long frames in pieces, so that short ones can overtake them."""

from __future__ import annotations

import asyncio
from typing import Final

from iris.wire.codec import ALIAS, ALIAS_AT, KIND_AT
from iris.wire.kinds import TUNNEL_KINDS
from relay.config import RelayConfig
from relay.net.fragments import PIECE_BYTES, WHOLE_BYTES, Lanes
from relay.net.ports import CONTROL_LIMIT_BYTES, ConnectionPort, Driver

BULK_TURN_BYTES: Final = 2 * PIECE_BYTES
"""Bytes of long frames written to a link per turn of the loop."""


class LongFramePort(ConnectionPort):
    """The sending side of a connection between relays."""

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        super().__init__(driver, config)
        self.out_frames = 0
        self._longest_bytes = self._whole_bytes = WHOLE_BYTES
        """Longest frame that the peer accepts, and longest that is sent in one piece."""
        self._lanes = Lanes()
        self._lane_bytes = 0
        """Bytes of the lanes that the relay's budget counts."""
        self._pumped = False
        self._refusing = False

    def resume_writing(self) -> None:
        self._paused = False
        self._write_queue()
        if self._lanes and not self._closed:
            self._pump()
        if not self._closed and self._waiting_bytes() <= self._room_bytes:
            self._has_room_again()
            self._driver.settle()

    def _has_room_again(self) -> None:
        self._room_bytes = self._limit_bytes // 2
        self._refusing = False

    @property
    def waiting_bytes(self) -> int:
        return self._queued_bytes + self._lane_bytes

    def _count_lanes(self) -> None:
        """Update the relay's budget with the change in the lanes' bytes."""
        change = self._lanes.bytes - self._lane_bytes
        self._lane_bytes += change
        if change > 0:
            self._budget.bytes += change
            self._budget.waiting[self] = None
        elif change:
            self._budget.released(-change)
            self._emptied()

    def _lost(self, cause: str) -> None:
        self._count_lanes()
        super()._lost(cause)

    def has_room(self, size: int) -> bool:
        if size > self._longest_bytes:
            return False
        waiting = self._waiting_bytes()
        if not waiting:
            return True
        if waiting + size > self._limit_bytes:
            return False
        budget = self._budget
        return budget.bytes + size <= budget.limit_bytes or self._finds_room(size)

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        self.out_frames += 1
        if end - start > self._whole_bytes or self._lanes:
            alias = self._lane(buf, start, end)
            if alias >= 0:
                return self._put_long(alias, bytes(buf[start:end]), count)
        if super().forward(buf, start, end, count):
            return True
        self._refusing = True
        return False

    def send(self, frame: bytes, count: int) -> bool:
        self.out_frames += 1
        if len(frame) > self._whole_bytes or self._lanes:
            alias = self._lane(frame, 0, len(frame))
            if alias >= 0:
                return self._put_long(alias, frame, count)
        if super().send(frame, count):
            return True
        self._refusing = True
        return False

    def control(self, frame: bytes) -> None:
        if self._closed:
            return
        self.out_frames += 1
        if not self._lanes.control(frame):
            super().control(frame)
            return
        self._count_lanes()
        if self._lanes.bytes > self._limit_bytes + CONTROL_LIMIT_BYTES:
            self.abort("it does not read its control frames")

    @property
    def held_messages(self) -> int:
        return self._held + self._lanes.messages

    @property
    def unwritten_bytes(self) -> int:
        return self._lanes.bytes + super().unwritten_bytes

    def _waiting_bytes(self) -> int:
        run_bytes = self._run_end - self._run_start if self._queue and self._run is not None else 0
        return self._queued_bytes + self._lanes.bytes - self._tunnel_bytes + run_bytes

    def _lane(self, buf: memoryview | bytes, start: int, end: int) -> int:
        """Return the alias of a frame that is long or must stay behind a long one; -1: send it at once."""
        if buf[start + KIND_AT] in TUNNEL_KINDS:
            return -1
        alias: int = ALIAS.unpack_from(buf, start + ALIAS_AT)[0]
        return alias if end - start > self._whole_bytes or alias in self._lanes else -1

    def _put_long(self, alias: int, frame: bytes, count: int) -> bool:
        if not self.has_room(len(frame)):
            self._refusing = True
            return False
        self._lanes.put(alias, frame, count)
        self._count_lanes()
        if not self._dirty:
            self._dirty = True
            self._driver.dirty.append(self)
        return True

    def flush(self) -> None:
        super().flush()
        if self._lanes and not self._pumped and not self._closed:
            self._pump()

    def _pump(self) -> None:
        """Write one turn's share of long frames, after everything that may overtake them."""
        if self._paused or self._queue or self._pumped:
            return
        self._take_run()
        self._write_chunks()
        if self._paused:
            return
        chunks = self._lanes.take(BULK_TURN_BYTES)
        self._count_lanes()
        self._write(chunks)
        if self._lanes:
            self._pumped = True
            asyncio.get_running_loop().call_soon(self._pump_on)
        elif self._finishing and not self._closed:
            self._transport.close()
        if self._refusing and self._waiting_bytes() <= self._room_bytes:
            self._has_room_again()

    def _pump_on(self) -> None:
        self._pumped = False
        if not self._closed:
            if not self._dirty:
                self._dirty = True
                self._driver.dirty.append(self)
            self._driver.settle()

    def _done(self) -> bool:
        return not self._queue and not self._lanes
