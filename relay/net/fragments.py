"""Cuts long frames on a link into pieces, so that others can pass, and puts them together again. Sans-IO.

A frame of more than `WHOLE_BYTES` is sent as several frames of the same alias. Each has the whole header and up to
`PIECE_BYTES` of the body; all but the last have the flag MORE. The order of frames while a long one is unfinished:

    casts of a flow, DECLARE, GAP   stay behind a long cast of that flow, whatever their aliases
    other frames and DECLARE        stay behind a long frame of their alias
    DECLARE of an alias in use      stays behind frames of the alias's old meaning, and before those of its new one
    DONE                            stays behind long answers of any alias
    BYE, PING, PONG                 stay behind everything
    all others                      overtake: other flows, other aliases, other control frames, tunnels

A flow has one sequence at the receiver: one kind of cast, name, key and sender. It may have several aliases at
once, one for each delivery set, and a new alias number in place of an old one.

The sender has at most `MAX_OPEN` unfinished frames with `MAX_OPEN_BYTES` together, or a single one of any size that the
receiver accepts. So the receiver needs room for no more than that.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from iris.errors import PeerProtocolError
from iris.wire.codec import (
    ALIAS,
    ALIAS_AT,
    BODY_AT,
    DATA_LENGTH,
    FLAGS_AT,
    KIND_AT,
    LENGTH,
    LENGTH_BYTES,
    PREFIX,
    PREFIX_BYTES,
    decode_control,
)
from iris.wire.frames import Declare, Gap
from iris.wire.kinds import FIRST_DATA_KIND, FLAG_MORE, TUNNEL_KINDS, Kind

WHOLE_BYTES: Final = 72 << 10
"""Longest frame that is sent in one piece."""
PIECE_BYTES: Final = 64 << 10
MAX_OPEN: Final = 64
MAX_OPEN_BYTES: Final = 32 << 20
_FENCES: Final = frozenset({Kind.BYE, Kind.PING, Kind.PONG})
_CASTS: Final = (Kind.PUBLISH, Kind.BROADCAST)
_Flow = tuple[int, str, bytes, bytes]


class _Entry(NamedTuple):
    """A queued frame."""

    frame: bytes
    messages: int
    """Messages in the frame."""
    serial: int
    alias: int
    """-1: the frame has no alias."""
    after: tuple[_Lane, int] | None
    """(lane, serial): this frame must wait until that lane has sent that serial."""

    @property
    def blocked(self) -> bool:
        """Whether this frame must wait for another lane."""
        return self.after is not None and self.after[0].through < self.after[1]


class _Lane:
    """The queue of one flow, or of one alias of other frames. Part of the first frame may have been sent."""

    __slots__ = ("answers", "frames", "key", "offset", "through")

    def __init__(self, key: int | _Flow) -> None:
        self.key = key
        self.frames: deque[_Entry] = deque()
        self.offset = 0
        """Bytes of the first frame's body that were sent."""
        self.through = 0
        """Serial of the last frame that was sent completely."""
        self.answers = False


class Lanes:
    """The sending side: queues long frames and the frames that must stay behind them."""

    __slots__ = (
        "_active", "_behind", "_blocked", "_flows", "_lanes", "_open", "_open_bytes", "_serial", "_tails", "_waiting", "bytes",
        "messages",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lanes: dict[int | _Flow, _Lane] = {}
        """Flow or alias -> lane."""
        self._active: deque[_Lane] = deque()
        """Lanes whose first frame may be sent now; they take turns."""
        self._waiting: deque[_Lane] = deque()
        """Lanes whose first frame is long and would exceed what the receiver must have room for."""
        self._blocked: list[_Lane] = []
        """Lanes whose first frame waits for an older frame of another lane."""
        self._open = 0
        self._open_bytes = 0
        self._serial = 0
        self._behind: deque[tuple[bytes, int, bool]] = deque()
        """Control frames that wait: (frame, serial that it stays behind, whether only behind answers)."""
        self._flows: dict[int, _Flow] = {}
        """Flows of the aliases of casts: alias -> flow; bounded by the receiver's limit of aliases."""
        self._tails: dict[int, tuple[_Lane, int]] = {}
        """Last queued frame of each alias: alias -> (lane, serial)."""
        self.bytes = 0
        """Bytes queued."""
        self.messages = 0
        """Messages queued, those partly sent included."""

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __contains__(self, alias: int) -> bool:
        """Whether frames of `alias` must be queued here."""
        return self._flows.get(alias, alias) in self._lanes

    def put(self, alias: int, frame: bytes, count: int) -> None:
        """Queue a frame of `count` messages that is long or whose alias is queued here."""
        self._put(self._flows.get(alias, alias), alias, frame, count)

    def control(self, frame: bytes) -> bool:
        """Queue a control frame if it must not overtake what is queued here; False: send it now."""
        kind = frame[KIND_AT]
        if kind == Kind.DECLARE:
            return self._declare(frame)
        if not self._lanes:
            return False
        if kind == Kind.GAP:
            gap = decode_control(memoryview(frame), 0, len(frame))
            assert isinstance(gap, Gap)
            flow = _flow(gap)
            if flow not in self._lanes:
                return False
            self._put(flow, -1, frame, 0)
            return True
        if kind in _FENCES or (
            kind == Kind.DONE and any(lane.answers for lane in self._lanes.values())
        ):
            self._behind.append((frame, self._serial, kind == Kind.DONE))
            self.bytes += len(frame)
            return True
        return False

    def take(self, budget: int) -> list[bytes]:
        """Return the chunks to send next: about `budget` bytes, one piece of each lane in turn."""
        chunks: list[bytes] = []
        before = self.bytes
        self._start_more()
        while self._active and before - self.bytes < budget:
            lane = self._active.popleft()
            if len(lane.frames[0].frame) > WHOLE_BYTES:
                through = self._piece(lane, chunks)
            else:
                through = self._short(lane, chunks)
            if not lane.frames:
                del self._lanes[lane.key]
            elif through:
                self._queue_lane(lane)
            else:
                self._active.append(lane)
            if through:
                if self._blocked:
                    blocked, self._blocked = self._blocked, []
                    for waiting in blocked:
                        self._queue_lane(waiting)
                if self._behind:
                    self._release(chunks)
                self._start_more()
        return chunks

    def clear(self) -> None:
        """Drop everything that is queued: the connection is lost."""
        self._lanes.clear()
        self._active.clear()
        self._waiting.clear()
        self._blocked.clear()
        self._behind.clear()
        self._tails.clear()
        self.bytes = self.messages = 0

    def _declare(self, frame: bytes) -> bool:
        """Queue a DECLARE if frames of its alias, or of the flow that it declares, are queued."""
        declared = decode_control(memoryview(frame), 0, len(frame))
        assert isinstance(declared, Declare)
        alias = declared.alias
        if declared.kind in _CASTS:
            self._flows[alias] = _flow(declared)
        else:
            self._flows.pop(alias, None)
        key = self._flows.get(alias, alias)
        tail = self._tails.get(alias)
        if tail is None and key not in self._lanes:
            return False
        if tail is not None and tail[0] is self._lanes.get(key):
            tail = None  # in order anyway
        self._put(key, alias, frame, 0, tail)
        return True

    def _put(
        self,
        key: int | _Flow,
        alias: int,
        frame: bytes,
        count: int,
        after: tuple[_Lane, int] | None = None,
    ) -> None:
        self._serial += 1
        entry = _Entry(frame, count, self._serial, alias, after)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
            lane.frames.append(entry)
            self._queue_lane(lane)
        else:
            lane.frames.append(entry)
        lane.answers = lane.answers or frame[KIND_AT] == Kind.ANSWER
        if alias >= 0:
            self._tails[alias] = (lane, entry.serial)
        self.bytes += len(frame)
        self.messages += count

    def _queue_lane(self, lane: _Lane) -> None:
        """Put a lane into the queue that its first frame, which is unsent, belongs to."""
        first = lane.frames[0]
        if first.blocked:
            self._blocked.append(lane)
        elif len(first.frame) > WHOLE_BYTES:
            self._waiting.append(lane)
        else:
            self._active.append(lane)

    def _start_more(self) -> None:
        while self._waiting:
            size = len(self._waiting[0].frames[0].frame)
            if self._open and (self._open >= MAX_OPEN or self._open_bytes + size > MAX_OPEN_BYTES):
                return
            self._open += 1
            self._open_bytes += size
            self._active.append(self._waiting.popleft())

    def _piece(self, lane: _Lane, chunks: list[bytes]) -> bool:
        """Send one piece of a lane's first frame; return whether it was the last piece."""
        frame = lane.frames[0].frame
        start = BODY_AT + lane.offset
        end = min(start + PIECE_BYTES, len(frame))
        last = end == len(frame)
        length = DATA_LENGTH + end - start
        flags = frame[FLAGS_AT] | (0 if last else FLAG_MORE)
        chunks.append(
            PREFIX.pack(length, frame[KIND_AT], flags)
            + frame[PREFIX_BYTES:BODY_AT]
            + memoryview(frame)[start:end]
        )
        self.bytes -= end - start + (0 if lane.offset else BODY_AT)
        lane.offset += end - start
        if last:
            lane.offset = 0
            self._pop(lane)
            self._open -= 1
            self._open_bytes -= len(frame)
        return last

    def _short(self, lane: _Lane, chunks: list[bytes]) -> bool:
        """Send short frames of a lane, about as many bytes as a piece."""
        size = 0
        frames = lane.frames
        while frames and size < PIECE_BYTES:
            first = frames[0]
            if len(first.frame) > WHOLE_BYTES or first.blocked:
                break
            self._pop(lane)
            chunks.append(first.frame)
            size += len(first.frame)
        self.bytes -= size
        return True

    def _pop(self, lane: _Lane) -> None:
        """Remove a lane's first frame, which was sent."""
        entry = lane.frames.popleft()
        lane.through = entry.serial
        self.messages -= entry.messages
        if self._tails.get(entry.alias) == (lane, entry.serial):
            del self._tails[entry.alias]

    def _release(self, chunks: list[bytes]) -> None:
        """Send the control frames that need not wait any longer."""
        oldest = [(lane.frames[0].serial, lane.answers) for lane in self._lanes.values()]
        while self._behind:
            frame, serial, answers_only = self._behind[0]
            if any(first <= serial and (answers or not answers_only) for first, answers in oldest):
                return
            self._behind.popleft()
            self.bytes -= len(frame)
            chunks.append(frame)


def _flow(body: Declare | Gap) -> _Flow:
    return (body.kind, body.name, body.key_id, body.sender_id)


class _Part:
    """A frame whose last piece was not received yet."""

    __slots__ = ("frame", "header")

    def __init__(self, header: bytes) -> None:
        self.header = header
        """The header from the kind to the end fields, without the flag MORE."""
        self.frame = bytearray(4) + header


class Assembly:
    """The receiving side: puts the pieces of frames together."""

    __slots__ = ("_limit", "_parts", "held_bytes")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        """Longest frame, without its length field."""
        self._parts: dict[int, _Part] = {}
        self.held_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, buf: memoryview, start: int, end: int) -> memoryview | None:
        """Add a frame that is cut, is received while another is unfinished, or is too long to be whole.

        Return the whole frame in memory of its own if `buf[start:end]` is its last piece, None if pieces are missing,
        and `buf` itself if it is a whole frame.

        Raises:
            PeerProtocolError: the frame breaks a rule of this module.
        """
        kind, flags = buf[start + KIND_AT], buf[start + FLAGS_AT]
        if kind < FIRST_DATA_KIND or kind in TUNNEL_KINDS:
            if flags & FLAG_MORE and kind < FIRST_DATA_KIND:
                raise PeerProtocolError(
                    f"a control frame of kind {kind} has the flag MORE; only data frames are cut"
                )
            if kind == Kind.DECLARE and self._parts:
                declared = decode_control(buf, start, end)
                if isinstance(declared, Declare) and declared.alias in self._parts:
                    raise PeerProtocolError(
                        f"DECLARE changes alias {declared.alias} while a frame of it is unfinished"
                    )
            return buf
        size = end - start
        if size > WHOLE_BYTES:
            raise PeerProtocolError(
                f"a frame of {size} bytes is not cut; the limit of one piece is {WHOLE_BYTES}"
            )
        if size < BODY_AT:
            raise PeerProtocolError(
                f"a data frame has {size} bytes, fewer than the {BODY_AT} of its header"
            )
        (alias,) = ALIAS.unpack_from(buf, start + ALIAS_AT)
        header = bytearray(buf[start + KIND_AT : start + BODY_AT])
        header[FLAGS_AT - KIND_AT] &= ~FLAG_MORE & 0xFF
        part = self._parts.get(alias)
        if part is None:
            if not flags & FLAG_MORE:
                return buf
            if len(self._parts) >= MAX_OPEN:
                raise PeerProtocolError(f"more than {MAX_OPEN} frames are unfinished at once")
            part = self._parts[alias] = _Part(bytes(header))
        elif part.header != header:
            raise PeerProtocolError(
                f"a frame of alias {alias} began while another of it is unfinished"
            )
        piece = size - BODY_AT
        self.held_bytes += piece
        if not piece:
            raise PeerProtocolError(f"a piece of a frame of alias {alias} is empty")
        if len(part.frame) - LENGTH_BYTES + piece > self._limit:
            raise PeerProtocolError(
                f"a frame in pieces has over {self._limit} bytes, the limit of this link"
            )
        if self.held_bytes > max(MAX_OPEN_BYTES, self._limit):
            raise PeerProtocolError(
                f"unfinished frames have {self.held_bytes} bytes, over the limit of {max(MAX_OPEN_BYTES, self._limit)}"
            )
        part.frame += buf[start + BODY_AT : end]
        if flags & FLAG_MORE:
            return None
        del self._parts[alias]
        whole = part.frame
        self.held_bytes -= len(whole) - BODY_AT
        LENGTH.pack_into(whole, 0, len(whole) - LENGTH_BYTES)
        return memoryview(whole)
