"""What frames are of and carry besides their bodies: kinds, flags, reasons, and the versions that knew them first."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

PROTOCOL_VERSION: Final = 1
"""Major version: both sides must agree on it. It is the first byte of all sealed metadata."""
PROTOCOL_MINOR: Final = 4
"""Minor version: unknown map keys are ignored, so different minors work together."""
BOUND_PROOF_MINOR: Final = 1
"""From this minor version on, a proof over TLS is bound to the relay's certificate."""


AUDIENCE_MINOR: Final = 2
"""From this minor version on, relays answer SETTLE and TOPIC."""
CLOCK_MINOR: Final = 2
"""From this minor version on, relays take the reason CLOCK."""
RUN_MINOR: Final = 3
"""From this minor version on, members and relays take CALLS and ANSWERS, and sessions SHARE."""
DIRECT_MINOR: Final = 4
"""From this minor version on, sessions and relays take DIRECT, PAIR, FETCH and CARRIED, and tunnels the items `ready` and `moved`."""
WAIT_MINOR: Final = 4
"""From this minor version on, sessions and relays take WAIT and WINDOW."""
MAX_PARTS: Final = 16
"""Parts that SHARE can ask for."""


class Kind(IntEnum):
    """The kind byte of a frame."""

    HELLO = 0x01
    WELCOME = 0x02
    ERROR = 0x03
    BYE = 0x04
    DRAIN = 0x05
    ACK = 0x06
    PROVE = 0x07
    DECLARE = 0x08
    JOIN = 0x09
    LEAVE = 0x0A
    SUBSCRIBE = 0x0B
    UNSUBSCRIBE = 0x0C
    CREDIT = 0x0D
    GAP = 0x0E
    FAIL = 0x0F
    ROSTER = 0x10
    DONE = 0x11
    MEMBERS = 0x12
    MEMBERSHIP = 0x13
    UNWATCH = 0x14
    STATUS = 0x15
    REPORT = 0x16
    PING = 0x17
    PONG = 0x18
    GRANT = 0x19
    SETTLE = 0x1A
    TOPIC = 0x1B
    AUDIENCE = 0x1C
    CALLER_LEFT = 0x1D
    SHARE = 0x1E
    WAIT = 0x1F
    LINK_HELLO = 0x20
    BEAT = 0x21
    INTEREST = 0x22
    RESYNC = 0x23
    LOADS = 0x24
    ASK_PEERS = 0x25
    PEERS = 0x26
    WINDOW = 0x27
    DIRECT = 0x28
    PAIR = 0x29
    FETCH = 0x2A
    CARRIED = 0x2B

    REQUEST = 0x40
    REPLY = 0x41
    FAULT = 0x42
    PUSH = 0x43
    SURVEY = 0x44
    ANSWER = 0x45
    BROADCAST = 0x46
    PUBLISH = 0x47
    TUNNEL_OPEN = 0x48
    TUNNEL_ACCEPT = 0x49
    TUNNEL_DATA = 0x4A
    TUNNEL_END = 0x4B
    STREAM = 0x4C
    STREAM_REPLY = 0x4D
    CALLS = 0x4E
    ANSWERS = 0x4F


FIRST_DATA_KIND: Final = 0x40
TUNNEL_KINDS: Final = (Kind.TUNNEL_ACCEPT, Kind.TUNNEL_DATA, Kind.TUNNEL_END)
"""Data frames that carry hop fields and a body, but no end fields."""
DECLARED_KINDS: Final = frozenset(
    {
        Kind.REQUEST,
        Kind.REPLY,
        Kind.FAULT,
        Kind.PUSH,
        Kind.SURVEY,
        Kind.ANSWER,
        Kind.BROADCAST,
        Kind.PUBLISH,
        Kind.TUNNEL_OPEN,
        Kind.STREAM,
        Kind.STREAM_REPLY,
    }
)
"""Kinds that an alias can stand for."""
RUN_KINDS: Final = frozenset({Kind.REQUEST, Kind.PUSH})
"""Kinds that CALLS can be of."""
ANSWER_RUN_KINDS: Final = frozenset({Kind.REPLY, Kind.ANSWER})
"""Kinds that ANSWERS can be of."""
SERVED_KINDS: Final = frozenset(
    {Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.BROADCAST, Kind.TUNNEL_OPEN, Kind.STREAM}
)
"""Kinds that a member can serve. Who serves STREAM alone is a store, and no member of a cluster of the same name."""
NO_KEY: Final = bytes(16)
"""Key id of calls to stores themselves: their bodies are clear, and orders in them are signed."""
STORES: Final = "stores"
"""Name that every store serves under NO_KEY."""

FLAG_MORE: Final = 0x01
"""The body continues in the next frame of this alias (links only)."""
FLAG_REFUSED: Final = 0x02
"""A member sends the frame back, unopened or not accepted; the reason is in the upper four bits."""


STALE: Final = "stale"
"""Detail of FAIL for a message below its receiver's replay window. It may have run; if idempotent, it may be sent again."""


class Refusal(IntEnum):
    """Why a member sent a message back; upper four bits of the flags."""

    FULL = 1
    """Its queue is at a limit: another member may take it."""
    LEAVING = 2
    """It is leaving: another member may take it."""
    EXPIRED = 3
    """The deadline had passed before the handler started."""
    STALE = 4
    """The counter is below the replay window: nobody can tell whether it ran."""
    REPLAYED = 5
    """The counter was accepted before: it may have run."""
    UNREADABLE = 6
    """It does not open under the declared key. To a relay of a minor version below 2 it stands for CLOCK, too."""
    CLOCK = 7
    """A push, sent too far from the member's clock. Since minor version 2."""


class Cause(IntEnum):
    """Why a relay answers a message itself (FAIL, TUNNEL_END)."""

    CLOSED = 0
    """A tunnel whose two ends agreed to close."""
    NO_MEMBERS = 1
    OVERLOADED = 2
    EXPIRED = 3
    LOST = 4
    """The member's or the caller's session ended."""
    REFUSED = 5
    """The member could not open or would not accept it."""
    BROKEN = 6
    """The tunnel was broken by an end or by the relay's limits."""


class HopClass(IntEnum):
    """Where a frame under an alias came from, in its DECLARE."""

    LOCAL = 0
    """From the session that declares it, or to one."""
    MESH = 1
    """Over a link of one network: on to sessions only."""
    TO_WAN = 2
    """To another site: over a link to a gateway, and from there over the WAN."""
    FROM_WAN = 3
    """From another site, over a link of one network: on to sessions only."""


NEVER_US: Final = (1 << 63) - 1
"""A time that never comes: the largest deadline that a frame can carry."""
UNLIMITED: Final = (1 << 63) - 1
"""In WINDOW: nobody behind it limits what is published."""
HERE: Final = "."
"""In a session's DECLARE: this site alone is meant."""
UNKNOWN_COUNT: Final = 0xFFFFFFFF
"""In GAP: nobody knows how many, because a link was lost."""
REFUSED_ALIAS: Final = 0xFFFFFFFF
"""Stands in the alias field of what goes back refused over a link."""
