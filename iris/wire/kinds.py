"""Constants of the protocol: frame kinds, flags and reasons."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Literal, get_args

PROTOCOL_VERSION: Final = 1
"""Major version, which must be equal on both sides. It is the first byte of all sealed metadata."""
PROTOCOL_MINOR: Final = 0
"""Minor version. Different minor versions work together, because unknown map keys are ignored."""


NO_MEMBERS: Final = "no members"
"""Cause in UNROUTED of a broadcast that reached no member."""
OTHER_KEYS: Final = "subscribers have another key"
"""Cause in UNROUTED of publications whose topic has subscribers only under other keys. They are not a loss."""
TroubleCause = Literal["queue full", "unread", "missing", "uncounted", "not sent", "handler failed"]
"""What a client reports in TROUBLE: messages that it lost because its own queue was full, or because it ended before it
handled them; that did not arrive or could not be opened; losses of unknown size, each counted as one; messages that it
sent and nobody gets; and calls of its handlers that raised."""
TROUBLES: Final[tuple[TroubleCause, ...]] = get_args(TroubleCause)
MAX_TROUBLE_NAMES: Final = 8
"""Most names of one cause in TROUBLE, and at a relay for one session and cause."""
MAX_OTHER_KEYS: Final = 64
"""Most other keys that AUDIENCE and UNROUTED name."""
CLOCK_PING: Final = 3
"""Id of the PING by which a relay samples the clock of a session over WebSocket."""
UNREADABLE: Final = "the member could not decrypt it"
"""Detail of FAIL for a call that its member cannot open, or whose contents are not what it expects."""
MAX_PARTS: Final = 16
"""Most parts that SHARE can request."""


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
    UNROUTED = 0x2C
    TICKET = 0x2D
    RELEASE = 0x2E
    TROUBLE = 0x2F

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


REQUEST: Final = int(Kind.REQUEST)
REPLY: Final = int(Kind.REPLY)
FAULT: Final = int(Kind.FAULT)
PUSH: Final = int(Kind.PUSH)
SURVEY: Final = int(Kind.SURVEY)
ANSWER: Final = int(Kind.ANSWER)
TUNNEL_OPEN: Final = int(Kind.TUNNEL_OPEN)
"""Kinds for code that every call passes: looking up a member of an enumeration takes five times as long as a global,
and comparing it is slower than comparing plain numbers."""

FIRST_DATA_KIND: Final = 0x40
TUNNEL_KINDS: Final = (Kind.TUNNEL_ACCEPT, Kind.TUNNEL_DATA, Kind.TUNNEL_END)
"""Kinds of data frames with hop fields and a body, but without end fields."""
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
"""Kinds for which an alias can be declared."""
RUN_KINDS: Final = frozenset({Kind.REQUEST, Kind.PUSH})
"""Kinds of messages that CALLS can carry."""
MEMBER_KINDS: Final = frozenset({Kind.REQUEST, Kind.PUSH, Kind.TUNNEL_OPEN})
"""Kinds of calls that can be addressed to one member."""
ANSWER_RUN_KINDS: Final = frozenset({Kind.REPLY, Kind.ANSWER})
"""Kinds of messages that ANSWERS can carry."""
SERVED_KINDS: Final = frozenset(
    {Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.BROADCAST, Kind.TUNNEL_OPEN, Kind.STREAM}
)
"""Kinds that a member can serve. A member that serves only STREAM is a store, not a member of a cluster
of the same name."""
NO_KEY: Final = bytes(16)
"""Key id in the address of calls to a store itself. Their bodies are in clear, and the orders in them are signed."""
STORES: Final = "stores"
"""Name that every store serves under NO_KEY."""

FLAG_MORE: Final = 0x01
"""The body continues in the next frame of this alias (links only)."""
FLAG_REFUSED: Final = 0x02
"""A member refused the frame and sends it back; the reason (`Refusal`) is in the upper four bits."""


STALE: Final = "stale"
"""Detail of FAIL for a message older than its receiver's replay window. It may have run; if idempotent,
it may be sent again."""


class Refusal(IntEnum):
    """Why a member refused a message; sent in the upper four bits of the flags."""

    FULL = 1
    """The member is at capacity; another member may accept the message."""
    LEAVING = 2
    """The member is leaving; another member may accept the message."""
    EXPIRED = 3
    """The deadline passed before the handler started."""
    STALE = 4
    """The counter is older than the replay window, so the message may have run."""
    REPLAYED = 5
    """The counter was accepted before, so the message may have run."""
    UNREADABLE = 6
    """The message does not open under the declared key."""
    CLOCK = 7
    """A push was sent too far from the member's clock."""


class Cause(IntEnum):
    """Why a relay ends a call or tunnel itself (FAIL, TUNNEL_END)."""

    CLOSED = 0
    """Both ends of a tunnel agreed to close it."""
    NO_MEMBERS = 1
    OVERLOADED = 2
    EXPIRED = 3
    LOST = 4
    """The member's or the caller's session ended."""
    REFUSED = 5
    """The member could not open the message or refused it."""
    BROKEN = 6
    """An end broke the tunnel, or it exceeded the relay's limits."""


class HopClass(IntEnum):
    """Origin of the frames under an alias, in its DECLARE. It limits where a relay may forward them."""

    LOCAL = 0
    """Sent by the session that declares it, or delivered to a session."""
    MESH = 1
    """Sent over a link of one network; delivered to sessions only."""
    TO_WAN = 2
    """Sent to a remote site: over a link to a gateway, and from there over the WAN."""
    FROM_WAN = 3
    """Sent from a remote site over a link of one network; delivered to sessions only."""


NEVER_US: Final = (1 << 63) - 1
"""A time that never comes: the largest deadline that a frame can carry."""
UNLIMITED: Final = (1 << 63) - 1
"""In WINDOW: no subscriber limits the publisher."""
HERE: Final = "."
"""In a session's DECLARE: the local site only."""
UNKNOWN_COUNT: Final = 0xFFFFFFFF
"""In GAP: the number of lost messages is unknown, because a link was lost."""
REFUSED_ALIAS: Final = 0xFFFFFFFF
"""Alias in the frame of a refused message that is sent back over a link."""
