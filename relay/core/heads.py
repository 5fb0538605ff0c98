"""The head of a data frame: flags, alias, count and hop ids, validated here before anything branches on them.

    cast_head, call_head, run_head, answer_head    of one kind of frames, for the part of the router that routes them
    made                                           of any frame that a session makes, for what may refuse it first
    unrouted                                       of a frame whose alias stands for nothing

The receiver of a forwarded frame blames this relay for a breach in it, so a head is checked whatever becomes of the
frame. A session sends flags of 0, or `refused` with a reason in a call that it returns. Between relays there is also
`more`, which `relay.net.fragments` removes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from iris.errors import PeerProtocolError
from iris.wire.codec import ANSWER, BODY_AT, CAST, COUNT, COUNT_AT, FLAGS_AT, HOP, KIND_AT
from iris.wire.kinds import FLAG_REFUSED, RUN_KINDS, Kind, Refusal
from iris.wire.runs import read_answers, read_calls
from relay.core.neighbor import Neighbor, Route

CASTS: Final = (Kind.PUBLISH, Kind.BROADCAST)
CALL_KINDS: Final = (
    Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN, Kind.STREAM, Kind.CALLS,
)  # fmt: skip
_CALL: Final = struct.Struct("<4xBBIQq12xI")
"""Fields of a call that a relay reads: kind, flags, alias, hop id, deadline, count."""
_REASONS: Final = {int(reason) for reason in Refusal}


class UndeclaredAlias(PeerProtocolError):
    """The alias of a frame stands for nothing. Only a session that was refused an alias may send such a frame."""


def cast_head(neighbor: Neighbor, buf: memoryview, start: int, end: int) -> tuple[Route, int]:
    """Return (route, number of messages) of a publication or broadcast. Raises PeerProtocolError."""
    if end - start < BODY_AT:
        raise _too_short(start, end)
    kind, alias, count = CAST.unpack_from(buf, start)
    try:
        route = neighbor.routes[alias]
    except IndexError:
        route = None
    if route is None or route.kind != kind:
        raise _not_for(route, alias, buf, start)
    if not 0 < 4 * count < end - start:  # each message has an offset of 4 bytes
        raise PeerProtocolError(f"frame of {end - start} bytes cannot hold {count} messages")
    return route, count


def call_head(
    neighbor: Neighbor, buf: memoryview, start: int, end: int
) -> tuple[Route | None, int, int, int]:
    """Return (route, hop id, deadline in µs of the sender's clock, reason) of a call. Raises PeerProtocolError.

    `reason` is 0, or why its receiver returns it; a call that was returned has no route.
    """
    if end - start < BODY_AT:
        raise _too_short(start, end)
    kind, flags, alias, hop, deadline_us, count = _CALL.unpack_from(buf, start)
    if count != 1:
        raise PeerProtocolError(f"a {Kind(kind).name} frame holds 1 message, not {count}")
    if flags:
        if flags & FLAG_REFUSED:
            return None, hop, deadline_us, _reason(flags)
        raise flags_not_allowed(buf, start)
    try:
        route = neighbor.routes[alias]
    except IndexError:
        route = None
    if route is None or route.kind != kind:
        raise undeclared(route, alias)
    if hop & neighbor.own_hop_mask == neighbor.own_hop:
        raise PeerProtocolError(f"hop id {hop} is in the range reserved for this relay")
    return route, hop, deadline_us, 0


def run_head(
    neighbor: Neighbor, buf: memoryview, start: int, end: int
) -> tuple[Route | None, int, int, int, int, Sequence[int]]:
    """Return the same as `call_head` for a run, then the position of the first body and the length of each."""
    at, sizes = read_calls(buf, start, end)
    _, _, flags, alias, hop, deadline_us = HOP.unpack_from(buf, start)
    if flags:
        if flags & FLAG_REFUSED:
            return None, hop, deadline_us, _reason(flags), at, sizes
        raise flags_not_allowed(buf, start)
    try:
        route = neighbor.routes[alias]
    except IndexError:
        route = None
    if route is None or route.kind not in RUN_KINDS:
        raise undeclared(route, alias)
    mask, own = neighbor.own_hop_mask, neighbor.own_hop
    if hop & mask == own or hop + len(sizes) - 1 & mask == own:
        raise PeerProtocolError(f"hop id {hop} is in the range reserved for this relay")
    return route, hop, deadline_us, 0, at, sizes


def answer_head(neighbor: Neighbor, buf: memoryview, start: int, end: int) -> tuple[Route, int]:
    """Return (route, hop id) of a reply, fault or answer. Raises PeerProtocolError."""
    if end - start < BODY_AT:
        raise _too_short(start, end)
    kind, alias, hop = ANSWER.unpack_from(buf, start)
    try:
        route = neighbor.routes[alias]
    except IndexError:
        route = None
    if route is None or route.kind != kind:
        raise _not_for(route, alias, buf, start)
    return route, hop


def made(
    neighbor: Neighbor, buf: memoryview, start: int, end: int
) -> tuple[Route, int, int] | None:
    """Return (route, number of messages, first hop id) of a cast, a call or a run of calls.

    None: it is a call that the neighbor returns. Raises PeerProtocolError.
    """
    kind = buf[start + KIND_AT]
    if kind in CASTS:
        return (*cast_head(neighbor, buf, start, end), 0)
    if kind == Kind.CALLS:
        route, hop, _, _, _, sizes = run_head(neighbor, buf, start, end)
        return None if route is None else (route, len(sizes), hop)
    route, hop, _, _ = call_head(neighbor, buf, start, end)
    return None if route is None else (route, 1, hop)


def undeclared(route: Route | None, alias: int) -> PeerProtocolError:
    """Return the error of a frame whose alias stands for nothing, or for frames of another kind."""
    error = PeerProtocolError if route is not None else UndeclaredAlias
    return error(f"alias {alias} was not declared for this kind of frame")


def unrouted(
    neighbor: Neighbor, buf: memoryview, start: int, end: int
) -> tuple[int, int, Sequence[int]]:
    """Return (kind, alias, hop ids) of a frame whose alias stands for nothing. Raises PeerProtocolError.

    There is a hop id for each message; those of casts are 0.
    """
    _, kind, flags, alias, hop, _ = HOP.unpack_from(buf, start)
    if flags:
        raise flags_not_allowed(buf, start)
    hops: Sequence[int] = (hop,)
    if kind in CASTS:
        count = COUNT.unpack_from(buf, start + COUNT_AT)[0]
        if not 0 < 4 * count < end - start:
            raise PeerProtocolError(f"frame of {end - start} bytes cannot hold {count} messages")
        hops = (0,) * count
    elif kind == Kind.CALLS:
        hops = range(hop, hop + len(read_calls(buf, start, end)[1]))
    elif kind == Kind.ANSWERS:
        hops = read_answers(buf, start, end)[1]
    if kind in CALL_KINDS and any(
        each & neighbor.own_hop_mask == neighbor.own_hop for each in hops
    ):
        raise PeerProtocolError(f"hop id {hop} is in the range reserved for this relay")
    return kind, alias, hops


def flags_not_allowed(buf: memoryview, start: int) -> PeerProtocolError:
    """Return the error for a frame that has flags and may have none."""
    kind, flags = buf[start + KIND_AT], buf[start + FLAGS_AT]
    return PeerProtocolError(f"flags 0x{flags:02x} are not allowed in a {Kind(kind).name} frame")


def _reason(flags: int) -> int:
    """Return the reason in a refused frame. Raises PeerProtocolError for one that does not exist."""
    reason = flags >> 4
    if flags == FLAG_REFUSED | reason << 4 and reason in _REASONS:
        return reason
    raise PeerProtocolError(f"flags 0x{flags:02x} are not allowed in a refused frame")


def _not_for(route: Route | None, alias: int, buf: memoryview, start: int) -> PeerProtocolError:
    """Return the error of a frame whose alias does not match its kind and flags together."""
    if route is None or route.kind != buf[start + KIND_AT]:
        return undeclared(route, alias)
    return flags_not_allowed(buf, start)


def _too_short(start: int, end: int) -> PeerProtocolError:
    return PeerProtocolError(
        f"data frame of {end - start} bytes is shorter than its {BODY_AT}-byte header"
    )
