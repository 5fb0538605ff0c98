"""Typed bodies of the control frames that only relays exchange: links, interest, loads and peers.

Links also carry frames of sessions, which are in `iris.wire.frames`.
"""

# ruff: noqa: RUF012 - msgspec copies the empty list that is a default; ruff does not see that Control is a Struct

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from iris.wire.frames import U16, U32, U63, Control, Id16, KeyIds, Name, SiteText, Text
from iris.wire.kinds import Kind

MAX_ADDRESSES: Final = 16
Address = Annotated[str, Meta(min_length=3, max_length=300)]
MAX_FAILED: Final = 400
"""Most characters of the reason why a store cannot serve."""


class LinkHello(Control, frozen=True):
    """First frame of a link, sent by both sides right after TLS. `relay_id` must be the one in the certificate.

    `dial_us` is the dialler's CLOCK_MONOTONIC when it dialled, 0 from the accepting side. `mono_us` is the
    sender's clock now: the first sample for converting deadlines.
    """

    FRAME = Kind.LINK_HELLO
    version: U16
    minor: U16
    relay_id: Id16
    dial_us: U63
    mono_us: U63
    message_limit: Annotated[int, Meta(ge=64 << 10, le=0xFFFFFFFF)]
    aliases: Annotated[int, Meta(ge=1, le=65_536)] = 65_536
    """Number of aliases that the peer may declare."""
    site: Text = ""
    label: Annotated[str, Meta(max_length=64)] = ""
    """The host's name, for display."""
    addresses: Annotated[list[Address], Meta(max_length=MAX_ADDRESSES)] = []
    """Addresses, host:port, at which the sender accepts links."""


class MemberEntry(Struct, frozen=True, array_like=True):
    """One member of the sending relay. `kinds`: kind served -> concurrent handlers."""

    serial: U63
    name: Name
    key_ids: KeyIds
    kinds: Annotated[dict[int, Annotated[int, Meta(ge=1, le=1 << 20)]], Meta(max_length=8)]
    label: Annotated[str, Meta(max_length=64)] = ""
    tag: Annotated[str, Meta(max_length=255)] = ""
    methods: U16 = 0


class TopicEntry(Struct, frozen=True, array_like=True):
    """Sessions of the sending relay that subscribe to a filter under a key, in one queue group or (empty) in none.

    `count` is their number; 0 removes the entry.
    """

    filter: Name
    key_id: Id16
    group: Annotated[str, Meta(max_length=255)]
    count: U32


class SiteEntry(Struct, frozen=True, array_like=True):
    """A site to which the sending gateway has a WAN connection, or no longer has one if not `up`, and its distance."""

    site: SiteText
    up: bool = True
    cost_ms: U32 = 0
    """Cost configured for the site at the gateway. It is added to the round trip when sites are compared."""
    rtt_us: U63 = 0


class SiteCluster(Struct, frozen=True, array_like=True):
    """All members of an address in one site.

    `kinds`: kind served -> concurrent handlers; empty if no member is left.
    """

    site: SiteText
    name: Name
    key_id: Id16
    kinds: Annotated[dict[int, Annotated[int, Meta(ge=1, le=1 << 40)]], Meta(max_length=8)]
    members: U32 = 0


class SiteTopic(Struct, frozen=True, array_like=True):
    """TopicEntry for all relays of one site together."""

    site: SiteText
    filter: Name
    key_id: Id16
    group: Annotated[str, Meta(max_length=255)]
    count: U32


class Interest(Control, frozen=True):
    """Change of the sending relay's interest, its members and subscriptions, from version `base` to `version`.

    Over a WAN connection, `clusters` and `site_topics` hold the interest of the sender's whole site, and the
    other lists are empty. To the relays of its own network, a gateway advertises remote sites in `sites`,
    `clusters` and `site_topics`.

    A snapshot begins with `reset`: the receiver empties its replica first, whatever its version. With `more`,
    the snapshot continues in the next frame, with the same version. Other long changes are sent as several
    frames, each with a version.
    """

    FRAME = Kind.INTEREST
    base: U63
    version: U63
    joined: list[MemberEntry] = []
    left: list[U63] = []
    topics: list[TopicEntry] = []
    reset: bool = False
    more: bool = False
    sites: list[SiteEntry] = []
    clusters: list[SiteCluster] = []
    site_topics: list[SiteTopic] = []
    starting: bool = False
    """Whether a store of the sending relay is starting, which may hold a stream that no store serves yet."""
    store_failed: Annotated[str, Meta(max_length=MAX_FAILED)] = ""
    """Why the store of the sending relay cannot serve; empty if it can."""


class Resync(Control, frozen=True):
    """Request for a snapshot, because the sender's replica is at `version`, which is not the base of
    the last Interest."""

    FRAME = Kind.RESYNC
    version: U63


class Load(Struct, frozen=True, array_like=True):
    """Messages of one kind in flight at the members of an address, not counting those that the receiver
    of this sent."""

    kind: int
    name: Name
    key_id: Id16
    others: U32


class Loads(Control, frozen=True):
    """Load of the sender's members, for addresses that the receiver has called lately."""

    FRAME = Kind.LOADS
    loads: Annotated[list[Load], Meta(max_length=256)]


class AskPeers(Control, frozen=True):
    """Request for the relays to which the receiver is linked."""

    FRAME = Kind.ASK_PEERS


class PeerEntry(Struct, frozen=True, array_like=True):
    """A relay, and the addresses (host:port) at which it accepts links."""

    relay_id: Id16
    addresses: Annotated[list[Address], Meta(max_length=MAX_ADDRESSES)]


class Peers(Control, frozen=True):
    """Answer to AskPeers, in one or more frames."""

    FRAME = Kind.PEERS
    peers: Annotated[list[PeerEntry], Meta(max_length=256)]


CONTROLS: Final = tuple(Control.__subclasses__())
"""The bodies of all control frames, including those of sessions."""
