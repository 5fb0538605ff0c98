"""One end of a tunnel: message chunks in Noise records, byte credit, and three ways to end (sans-IO).

The plain text of a record is a list of items, `u8 type | u32 length | bytes`. Items are packed until the record is full
or the turn of the event loop ends:

    0x01 headers   first record of the initiator; a MessagePack map, may be empty
    0x02 chunk     part of a message; with 0x10 it is the first, with 0x20 the last
    0x03 credit    u32: bytes that the peer may send in addition; a chunk costs its bytes and 64
    0x04 finish    half-close: no message follows
    0x05 close     nothing follows, and this side reads nothing more
    0x06 abort     the unfinished message is discarded; the tunnel continues
    0x07 ready     this side has its end of the tunnel's socket pair, and will read there after `moved`
    0x08 moved     last item in the last record through the relay: the next record comes by the socket pair

Each side may send 64 KiB before the first credit. The receiver grants what it has consumed. While it waits for
the sender it also grows the window, fourfold each time, up to 16 MiB. So a slow reader throttles its sender to
its own pace, and an idle tunnel holds at most 64 KiB. All windows of a session together grow by at most 256
MiB.

A tunnel has ended normally after finish from both sides, or after close. Any other end breaks it.

    through the relay ── 1 MiB carried: the initiator requests a pair ──► granted
    ── this end has its descriptor: `ready` ──► ── the peer is ready, too: `moved` ──► this side sends by
    the socket pair (`iris.core.direct`)
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from iris.core.bundle import Headers
from iris.core.direct import DIRECT_AFTER_BYTES, Direct, PairEnd
from iris.crypto.keys import ClusterKey
from iris.crypto.noise import MAX_PLAINTEXT_BYTES, CipherState, Handshake
from iris.errors import Closed, IrisError, OpenError, PeerProtocolError, TunnelBroken
from iris.wire.codec import tunnel_frame
from iris.wire.kinds import Cause, Kind

FIRST_WINDOW: Final = 64 << 10
MAX_WINDOW: Final = 16 << 20
MAX_GROWN: Final = 256 << 20
"""Bytes by which all windows of one session together may grow. Beyond it windows keep their size until
a tunnel ends."""
GROWTH: Final = 4
"""Factor by which a window grows: four round trips from the first to the largest."""
CHUNK_COST: Final = 64
"""Credit that a chunk costs besides its bytes, so that a queue of tiny chunks is bounded, too."""
_ABORTED: Final = 4
NEVER: Final = 1 << 63
"""More bytes than any tunnel carries."""

_HEADERS, _CHUNK, _CREDIT, _FINISH, _CLOSE, _ABORT, _READY, _MOVED = 1, 2, 3, 4, 5, 6, 7, 8
_FIRST, _LAST = 0x10, 0x20
_AFTER_FINISH: Final = frozenset((_CREDIT, _CLOSE, _READY, _MOVED))
_ITEM: Final = struct.Struct("<BI")
_U32: Final = struct.Struct("<I")
_encode_headers: Final = msgspec.msgpack.Encoder().encode
_decode_headers: Final = msgspec.msgpack.Decoder(dict[str, str]).decode


def prologue(name: str, key_id: bytes, tunnel_id: bytes) -> bytes:
    """Return the Noise prologue, on which both sides must agree before the first message."""
    return b"iris-tunnel-1" + bytes((Kind.TUNNEL_OPEN,)) + name.encode() + key_id + tunnel_id


class Growth:
    """Bytes by which the windows of a session may still grow, shared by all its tunnels."""

    __slots__ = ("left",)

    def __init__(self, left: int = MAX_GROWN) -> None:
        self.left = left


class TunnelEnd:
    """One end of a tunnel. `emit` is called with whole frames, `wake` when a waiting caller should check again.

    The session calls `flush` once per turn for every end that `mark_dirty` named, and `received` for each record.
    """

    __slots__ = (
        "_assembling", "_chunks", "_consumed", "_dry", "_emit", "_filling", "_growth", "_handshake", "_mark_dirty", "_opening", "_plain", "_plain_bytes",
        "_recv", "_send", "_until_direct", "_window", "broken", "buffered", "closed", "credit", "direct", "error", "finished", "headers", "hop",
        "initiator", "name", "pair", "peer_closed", "peer_finished", "wake", "wants_direct",
    )  # fmt: skip

    def __init__(
        self, name: str, key: ClusterKey, tunnel_id: bytes, hop: int, *, initiator: bool, ephemeral: bytes,
        emit: Callable[[bytes], None], mark_dirty: Callable[[TunnelEnd], None], growth: Growth, opening: Headers | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.hop = hop
        self.initiator = initiator
        self.wake: Callable[[], None] = _nobody
        self.headers: Headers | None = None
        """Opening headers; None until the initiator's first record has opened."""
        self.credit = FIRST_WINDOW
        """Bytes that may be sent now."""
        self.buffered = 0
        """Credit cost of the chunks received and not yet consumed."""
        self.finished = self.peer_finished = self.closed = self.peer_closed = False
        self.broken = ""
        """Why the tunnel broke; empty while it has not."""
        self.error: IrisError | None = None
        """Why it could not be opened, if the relay reported that."""
        self._opening = opening or {}
        self._emit = emit
        self._mark_dirty = mark_dirty
        self._handshake: Handshake | None = Handshake(
            initiator, prologue(name, key.key_id, tunnel_id), key.tunnel_psk, ephemeral
        )
        self._send: CipherState | None = None
        self._recv: CipherState | None = None
        self._plain: list[bytes | memoryview] = []
        self._plain_bytes = 0
        self._chunks: deque[tuple[int, bytes | memoryview]] | None = None
        self._assembling = False
        self._filling = False
        self.direct: Direct | None = None
        """State of the tunnel's socket pair; None before the relay has created one."""
        self.pair: PairEnd | None = None
        """The socket pair, once this end sends by it."""
        self.wants_direct = False
        """Whether the tunnel has carried enough to request a socket pair."""
        self._until_direct = DIRECT_AFTER_BYTES
        self._growth = growth
        self._window = FIRST_WINDOW
        self._consumed = 0
        self._dry = False
        """Whether the reader found nothing to read since the last grant."""

    # -- opening ---------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return the first handshake message (initiator)."""
        assert self._handshake is not None
        return self._handshake.write_message()

    def answer(self, message: memoryview) -> bytes:
        """Return the second handshake message (responder). Raises OpenError if the first was made with another key."""
        handshake = self._handshake
        assert handshake is not None
        handshake.read_message(message)
        reply = handshake.write_message()
        self._split()
        return reply

    def accepted(self, message: memoryview) -> None:
        """Finish the handshake with the responder's message (initiator), and send the headers as the first record.

        Raises:
            OpenError: the message does not open.
        """
        handshake = self._handshake
        if handshake is None or not self.initiator:
            raise PeerProtocolError(
                f"tunnel {self.hop} received a TUNNEL_ACCEPT that it does not wait for"
            )
        handshake.read_message(message)
        self._split()
        self.headers = self._opening
        self._item(_HEADERS, _encode_headers(self.headers))
        self.wake()

    def _split(self) -> None:
        assert self._handshake is not None
        self._send, self._recv = self._handshake.split()
        self._handshake = None

    @property
    def open(self) -> bool:
        """Whether messages may be exchanged."""
        return self._send is not None and self.headers is not None and not self.broken

    @property
    def ended(self) -> bool:
        """Whether the tunnel has ended, normally or not."""
        return (
            bool(self.broken)
            or self.closed
            or self.peer_closed
            or (self.finished and self.peer_finished)
        )

    # -- sending ---------------------------------------------------------------------------------------------

    def check_sending(self) -> None:
        """Raise TunnelBroken or Closed if no message can be sent any more."""
        if self.broken:
            raise TunnelBroken(f"tunnel to {self.name}: {self.broken}")
        if self.finished or self.closed:
            raise Closed(f"tunnel to {self.name}: this side has finished sending")
        if self.peer_closed:
            raise Closed(f"tunnel to {self.name}: the peer closed it")

    def write(self, data: memoryview, start: int) -> tuple[int, bool]:
        """Send as much of the message `data` from `start` on as credit allows.

        Return the position where it stopped, and whether the whole message was sent; an empty message stops
        where it starts.

        Each chunk costs `CHUNK_COST` besides its bytes. The view is borrowed until `flush` or until a record
        takes it, so the caller must not change the part that was sent. The rest stays the caller's.
        """
        size = len(data)
        while True:
            room = MAX_PLAINTEXT_BYTES - self._plain_bytes - 5
            take = min(size - start, self.credit - CHUNK_COST, room)
            if take > 0 or (take == 0 and start == size):
                flags = (
                    _CHUNK
                    | (0 if self._filling else _FIRST)
                    | (_LAST if start + take == size else 0)
                )
                if not self._plain:
                    self._mark_dirty(self)
                self._plain.append(_ITEM.pack(flags, take))
                self._plain.append(data[start : start + take])
                self._plain_bytes += 5 + take
                self.credit -= CHUNK_COST + take
                start += take
                self._filling = start < size
                if start == size:
                    if self._plain_bytes > MAX_PLAINTEXT_BYTES - 64:
                        self.flush()
                    return start, True
            if self._plain_bytes >= MAX_PLAINTEXT_BYTES - 5:
                self.flush()
            elif self.credit <= CHUNK_COST:
                return start, False

    @property
    def filling(self) -> bool:
        """Whether a message was begun and its last chunk was not sent."""
        return self._filling

    def abort(self) -> None:
        """Give up the unfinished message; the receiver discards its chunks."""
        if self._filling and not self.ended:
            self._filling = False
            self._item(_ABORT, b"")

    def finish(self) -> None:
        """Half-close: no message follows from this side."""
        self.check_sending()
        self.abort()
        self._item(_FINISH, b"")
        self.finished = True
        self._end_if_done()

    def close(self) -> None:
        """End the tunnel. Messages of the peer that were not read are discarded. Idempotent."""
        if self.ended:
            self.closed = True
            return
        if self._send is None:
            self.broken = "closed before it was open"
            self._emit(tunnel_frame(Kind.TUNNEL_END, self.hop, bytes((Cause.BROKEN,))))
            return
        self._item(_CLOSE, b"")
        self.flush()
        self.closed = True
        self._drop_buffer()
        self._send_end()

    def fail(self, reason: str, *, notify: bool) -> None:
        """Break the tunnel. With `notify`, a TUNNEL_END makes the relay end it at the peer, too."""
        if not self.ended:
            self.broken = reason
            self._drop_buffer()
            if notify:
                self._emit(tunnel_frame(Kind.TUNNEL_END, self.hop, bytes((Cause.BROKEN,))))
            self.wake()

    def _item(self, kind: int, body: bytes) -> None:
        if self._plain_bytes + 5 + len(body) > MAX_PLAINTEXT_BYTES:
            self.flush()
        if not self._plain:
            self._mark_dirty(self)
        self._plain.append(_ITEM.pack(kind, len(body)) + body)
        self._plain_bytes += 5 + len(body)

    def flush(self) -> None:
        """Seal and emit the unfinished record."""
        if self._plain and self._send is not None and not self.broken:
            plain = b"".join(self._plain)
            self._plain = []
            self._plain_bytes = 0
            sealed = self._send.encrypt(plain)
            if self.pair is not None:
                self.pair.send(sealed)
            else:
                self._emit(tunnel_frame(Kind.TUNNEL_DATA, self.hop, sealed))
                self._carried(len(sealed))

    def _end_if_done(self) -> None:
        if self.finished and self.peer_finished:
            self.flush()
            self._send_end()

    def _send_end(self) -> None:
        """Notify the relay that the tunnel has ended normally, once the peer can read everything that was sent."""
        frame = tunnel_frame(Kind.TUNNEL_END, self.hop, bytes((Cause.CLOSED,)))
        if self.pair is None:
            self._emit(frame)
        else:
            self.pair.finish(lambda: self._emit(frame))

    # -- the socket pair -------------------------------------------------------------------------------------

    def _carried(self, size: int) -> None:
        """Count a record that passed through the relay, and request a socket pair if it was enough."""
        self._until_direct -= size
        if self._until_direct <= 0 and self.initiator:
            self._until_direct = NEVER
            self.wants_direct = True
            self._mark_dirty(self)

    def pair_granted(self) -> None:
        """Note that the relay has created a pair for this tunnel, whose end is being fetched.

        Raises PeerProtocolError.
        """
        if self.direct is not None:
            raise PeerProtocolError(f"the relay sent a second PAIR for tunnel {self.hop}")
        self.direct = Direct()

    def attach_pair(self, pair: PairEnd) -> None:
        """Take this end of the pair, and notify the peer with `ready`."""
        direct = self.direct
        if direct is None or self.ended:
            pair.close()
            return
        direct.pair = pair
        self._item(_READY, b"")
        if direct.peer_ready:
            self._move()

    def _move(self) -> None:
        """Send by the pair from now on."""
        assert self.direct is not None
        if self.ended:
            return
        self._item(_MOVED, b"")
        self.flush()
        self.pair = self.direct.pair

    def arrived(self, record: memoryview) -> None:
        """Handle one record from the pair, as `received` does."""
        if self._recv is None or self.ended:
            return
        try:
            self._items(self._recv.decrypt(record))
        except (OpenError, PeerProtocolError) as err:
            self.fail(str(err), notify=True)
        self.wake()

    # -- receiving -------------------------------------------------------------------------------------------

    def received(self, record: memoryview) -> None:
        """Handle one record from the relay.

        A record that is not the next one, or exceeds the credit, breaks the tunnel.
        """
        if self._recv is None or self.ended:
            return
        try:
            if self.direct is not None and self.direct.moved:
                raise PeerProtocolError(
                    "a tunnel record came through the relay after the peer moved to the socket pair"
                )
            self._items(self._recv.decrypt(record))
        except (OpenError, PeerProtocolError) as err:
            self.fail(str(err), notify=True)
        else:
            self._carried(len(record))
        self.wake()

    def poison(self) -> None:
        """Break this end without a word, and fail every later encryption; for the child of a fork, which shares nonces.

        What was received and not read is the parent's.
        """
        if not self.ended:
            self.broken = "it belongs to the parent process; after a fork, connect in the child and open another"
        self._drop_buffer()
        self._handshake = None
        if self._send is not None:
            self._send.poison()

    def ended_by_relay(self, cause: int) -> None:
        """Handle TUNNEL_END: the end is normal after the peer's close or both finishes; otherwise it
        breaks the tunnel."""
        if not self.ended:
            self.fail(_CAUSES.get(cause, "the peer ended it without closing it"), notify=False)

    @property
    def begun(self) -> bool:
        """Whether there is an unfinished record, which `flush` would seal."""
        return bool(self._plain)

    def next_chunk(self) -> tuple[int, bytes | memoryview] | None:
        """Return (flags, data) of the next chunk and grant its bytes to the peer again, or None if there is no chunk.

        Flags: 1 first, 2 last, 4 aborted. The data of a whole message (flags 3) is bytes.
        """
        chunks = self._chunks
        if not chunks:
            self._dry = True
            return None
        flags, data = chunks.popleft()
        if flags != _ABORTED:
            cost = CHUNK_COST + len(data)
            self.buffered -= cost
            self._consumed += cost
        if not self.peer_finished and not self.ended:
            grant = self._consumed
            if grant >= self._window // 4:
                self._consumed = 0
                if self._dry and self._window < MAX_WINDOW:
                    # The reader has found nothing since the last grant, so it waits for the sender.
                    # A long round trip may have one grant only, so growth must take few of them.
                    by = min(
                        (GROWTH - 1) * self._window, MAX_WINDOW - self._window, self._growth.left
                    )
                    self._growth.left -= by
                    self._window += by
                    grant += by
                self._dry = False
                self._item(_CREDIT, _U32.pack(grant))
        return flags, data

    def _items(self, plain: bytes) -> None:
        pos, size = 0, len(plain)
        while pos < size:
            if size - pos < 5:
                raise PeerProtocolError(
                    f"a tunnel record ends with {size - pos} bytes of an item header, which has 5"
                )
            kind, length = _ITEM.unpack_from(plain, pos)
            pos += 5
            if length > size - pos:
                raise PeerProtocolError(
                    f"a tunnel item of {length} bytes does not fit the {size - pos} bytes left of its record"
                )
            if self.peer_finished and kind not in _AFTER_FINISH:
                raise PeerProtocolError(
                    f"a tunnel item of kind 0x{kind:02x} came after the peer finished sending"
                )
            if kind & 0x0F == _CHUNK:
                self._chunk(kind, plain, pos, length)
            else:
                self._control(kind, plain[pos : pos + length])
            pos += length

    def _chunk(self, kind: int, plain: bytes, pos: int, length: int) -> None:
        if (
            self.headers is None
            or kind & ~(_FIRST | _LAST | 0x0F)
            or self._assembling == bool(kind & _FIRST)
        ):
            raise PeerProtocolError(f"a tunnel chunk with flags 0x{kind:02x} is out of order")
        self._assembling = not kind & _LAST
        self.buffered += CHUNK_COST + length
        if self.buffered + self._consumed > self._window:
            raise PeerProtocolError(
                f"the peer sent more tunnel bytes than the window of {self._window} allows"
            )
        if self._chunks is None:
            self._chunks = deque()
        data: bytes | memoryview
        if kind == _CHUNK | _FIRST | _LAST or length < len(plain) // 2:
            data = plain[pos : pos + length]
        else:
            data = memoryview(plain)[pos : pos + length]  # copied once, when its message is whole
        self._chunks.append((kind >> 4, data))

    def _control(self, kind: int, body: bytes) -> None:
        if kind == _CREDIT and len(body) == 4:
            self.credit += int.from_bytes(body, "little")
            if self.credit > MAX_WINDOW + FIRST_WINDOW:
                raise PeerProtocolError(
                    f"the peer granted {self.credit} bytes of tunnel credit; the limit is {MAX_WINDOW + FIRST_WINDOW}"
                )
        elif kind == _HEADERS and self.headers is None and not self.initiator:
            try:
                self.headers = _decode_headers(body)
            except (msgspec.DecodeError, UnicodeDecodeError) as err:
                raise PeerProtocolError(f"tunnel headers cannot be decoded: {err}") from err
        elif kind == _FINISH and not body and not self._assembling:
            self.peer_finished = True
            self._end_if_done()
        elif kind == _CLOSE and not body:
            self.peer_finished = self.peer_closed = True
        elif kind == _ABORT and not body and self._assembling:
            self._assembling = False
            if self._chunks is None:
                self._chunks = deque()
            self._chunks.append((_ABORTED, b""))
        elif kind == _READY and not body and self.direct is not None and not self.direct.peer_ready:
            self.direct.peer_ready = True
            if self.direct.pair is not None:
                self._move()
        elif kind == _MOVED and not body and self.direct is not None and self.direct.may_move:
            self.direct.moved = True
            assert self.direct.pair is not None
            self.direct.pair.read()
        else:
            raise PeerProtocolError(
                f"a tunnel item of kind 0x{kind:02x} with {len(body)} bytes is not allowed in this state"
            )

    def release(self) -> None:
        """Release what this tunnel, which has ended, held: the growth of its window, and its end of the pair."""
        self._growth.left += self._window - FIRST_WINDOW
        self._window = FIRST_WINDOW
        if self.direct is not None and self.direct.pair is not None:
            self.direct.pair.close()

    def _drop_buffer(self) -> None:
        self._chunks = None
        self.buffered = 0
        self._plain = []
        self._plain_bytes = 0


def _nobody() -> None:
    return None


_CAUSES: Final[dict[int, str]] = {
    Cause.NO_MEMBERS: "no member serves tunnels at this address",
    Cause.OVERLOADED: "all members are at capacity",
    Cause.EXPIRED: "no member answered before the deadline",
    Cause.LOST: "the peer's session was lost",
    Cause.REFUSED: "the member refused it",
    Cause.BROKEN: "the peer broke it off",
}
