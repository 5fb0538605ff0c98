"""Typed bodies of the control frames of sessions. For their bytes see `iris.wire.codec`.

A control frame (kind < 0x40) carries one MessagePack map, decoded into the struct of the same name. A data frame
(kind >= 0x40) carries fixed binary fields and a sealed body. Frames that only relays exchange are in
`iris.wire.link_frames`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import UNSET, Meta, Struct, UnsetType, field

from iris.wire.kinds import (
    MAX_OTHER_KEYS,
    MAX_PARTS,
    MAX_TROUBLE_NAMES,
    TROUBLES,
    Kind,
    TroubleCause,
)

MAX_CREDIT: Final = 4096
"""Most hop ids in one CREDIT or CALLER_LEFT."""
Id16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Text = Annotated[str, Meta(max_length=1024)]
TicketText = Annotated[str, Meta(min_length=1, max_length=8192)]
U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
U63 = Annotated[int, Meta(ge=0, le=0x7FFFFFFFFFFFFFFF)]
OtherKeys = Annotated[
    dict[Annotated[str, Meta(max_length=8)], U32], Meta(max_length=MAX_OTHER_KEYS)
]
"""Hex of the first 4 bytes of a key id -> count."""
SiteText = Annotated[str, Meta(max_length=32)]
"""A site's name, or empty."""
MAX_KEY_IDS: Final = 64
"""Most key ids in one JOIN, SUBSCRIBE or MEMBERS."""
KeyIds = Annotated[list[Id16], Meta(min_length=1, max_length=MAX_KEY_IDS)]


class Control(Struct, frozen=True):
    """Base of the bodies of control frames, whose kind is `FRAME`. Every direct subclass is a control frame."""

    FRAME: ClassVar[Kind]


class Hello(Control, frozen=True):
    """First frame of a session.

    `label`, for example the program's name, is shown by `iris status` and in member lists.
    """

    FRAME = Kind.HELLO
    version: U16
    minor: U16
    label: Annotated[str, Meta(max_length=64)] = ""
    pid: U32 = 0
    mono_us: U63 = 0
    """The session's CLOCK_MONOTONIC, over TLS and WebSocket only: on one host both sides share a clock."""
    ticket: TicketText | UnsetType = UNSET
    """Over WebSocket: what the session may do (docs/protocol.md, §18.2)."""


class Ticket(Control, frozen=True):
    """A newer ticket of a session over WebSocket. Answered with Ack."""

    FRAME = Kind.TICKET
    id: U63
    ticket: TicketText


class Welcome(Control, frozen=True):
    """The relay's answer to Hello: the values that proofs must sign, and the limits of this session."""

    FRAME = Kind.WELCOME
    version: U16
    minor: U16
    relay_id: Id16
    session_id: Annotated[bytes, Meta(min_length=8, max_length=8)]
    challenge: Annotated[bytes, Meta(min_length=32, max_length=32)]
    message_limit: Annotated[int, Meta(ge=64 << 10, le=0xFFFFFFFF)]
    site: Text = ""
    aliases: Annotated[int, Meta(ge=1, le=65_536)] = 65_536
    """Number of aliases that the session may declare."""
    mono_us: U63 = 0
    """The relay's CLOCK_MONOTONIC, over TLS and WebSocket only."""


class Error(Control, frozen=True):
    """Last frame before the sender closes the connection. `detail` names the protocol rule that the receiver broke."""

    FRAME = Kind.ERROR
    detail: Text


class Bye(Control, frozen=True):
    """Last frame of a side that ends the session.

    The relay answers with Bye once it has routed everything before it.
    """

    FRAME = Kind.BYE
    reason: Text = ""
    complete: bool = False
    """To a store, from a relay that stops: nothing that the store records was lost, and nothing can be
    sent until a relay starts."""


class Drain(Control, frozen=True):
    """The relay is stopping.

    The session must start nothing new, finish what runs, send Bye, and look for another relay.
    """

    FRAME = Kind.DRAIN
    grace_ms: U32


class Ack(Control, frozen=True):
    """Answer to the control frame that carried `id`. `error` is empty on success."""

    FRAME = Kind.ACK
    id: U63
    error: Text = ""
    member: U63 = 0
    fresh: bool = False
    """In answers to JOIN and SUBSCRIBE: this relay has not yet routed a cast, and was never linked to another relay."""


class Grant(Control, frozen=True):
    """An order to keep a stream (`iris.wire.orders.Order`), which a store sends instead of a proof of the stream's key.

    The cluster key made `signature` over the order. The store's own key made `proof` over this session and the order.
    """

    FRAME = Kind.GRANT
    id: U63
    order: Annotated[bytes, Meta(max_length=8192)]
    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    proof: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Prove(Control, frozen=True):
    """Proof that the session holds a cluster key. The key id is derived from `public_key`."""

    FRAME = Kind.PROVE
    id: U63
    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Release(Control, frozen=True):
    """Notification that the session uses a proven key no more.

    It has no member, subscription or watch under this key. Its aliases under the key end.
    """

    FRAME = Kind.RELEASE
    key_id: Id16


class Declare(Control, frozen=True):
    """Declaration of `alias`, which from now on, in this direction, replaces the constant fields of a sender
    and an address.

    From relay to session only: `plain` and `groups` select the receivers, which are the subscriptions without a
    group and those of the named groups.

    `member` is the serial of the member addressed. A session that calls one member also names its `relay`. Over a
    link it is a member of the receiving relay.

    From a session, `site` selects the destination: HERE for this site, a site's name, or empty. Empty means
    every site with interest; calls then prefer the local site if a member is there. With hop class TO_WAN,
    `site` is the destination.
    """

    FRAME = Kind.DECLARE
    alias: U16
    kind: int
    name: Name
    key_id: Id16
    sender_id: Id16
    plain: bool = True
    groups: Annotated[list[Name], Meta(max_length=256)] = []
    member: U63 = 0
    hop_class: U16 = 0
    site: SiteText = ""
    relay: Id16 | UnsetType = UNSET
    """From a session that calls one member: the id of that member's relay. Left out in every other case."""


class Serving(Struct, frozen=True, omit_defaults=True):
    """Limits of a member for one kind: concurrent handlers, and bytes in flight at the member."""

    concurrency: Annotated[int, Meta(ge=1, le=1 << 20)]
    limit_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    cancel: bool = False
    """Request for CallerLeft when the caller of a request or survey stops waiting, because its handler ends then."""


class Join(Control, frozen=True):
    """Request to become a member of a cluster, for the given kinds, under all these key ids."""

    FRAME = Kind.JOIN
    id: U63
    name: Name
    key_ids: KeyIds
    kinds: Annotated[dict[int, Serving], Meta(min_length=1, max_length=8)]
    tag: Annotated[str, Meta(max_length=255)] = ""
    """Shown in member lists: for a stream's name the uuid of its log, for a log's uuid the stream's name."""
    methods: U16 | UnsetType = UNSET
    """Number of its methods; left out if it has none. Their names are known to key holders only."""


class Leave(Control, frozen=True):
    """Request to stop being a member. Nothing is dispatched to it after the Ack."""

    FRAME = Kind.LEAVE
    id: U63
    member: U63


class Subscribe(Control, frozen=True):
    """Request to receive publications to matching topics under any of the key ids."""

    FRAME = Kind.SUBSCRIBE
    id: U63
    filter: Name
    key_ids: KeyIds
    group: Annotated[str, Meta(max_length=255)] = ""


class Unsubscribe(Control, frozen=True):
    """Request to end the subscription with this filter and group."""

    FRAME = Kind.UNSUBSCRIBE
    id: U63
    filter: Name
    group: Annotated[str, Meta(max_length=255)] = ""
    stay: bool | UnsetType = UNSET
    """Whether the session still gets what no other member of the queue group there can take, until it ends."""


class Credit(Control, frozen=True, omit_defaults=True):
    """Hop ids of pushes that the member has finished. It did not run those in `unstarted`, which are among them."""

    FRAME = Kind.CREDIT
    member: U63
    kind: int
    hops: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_CREDIT)]
    unstarted: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_CREDIT)] = []


class CallerLeft(Control, frozen=True):
    """Hop ids of unanswered calls whose callers no longer wait.

    A session sends it for its own requests and surveys; a relay passes it on to whoever has them.
    """

    FRAME = Kind.CALLER_LEFT
    hops: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_CREDIT)]


class Share(Control, frozen=True):
    """Request to cut each turn's publications to this topic into `parts` bundles, because queue groups subscribe to it.

    The relay chooses a group's member per bundle, so this spreads a burst over the members. 1 ends it.
    """

    FRAME = Kind.SHARE
    name: Name
    key_id: Id16
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]


class Wait(Control, frozen=True, omit_defaults=True):
    """Request for credit: publications under `alias` wait for it from now on. Frame bytes are counted from this frame.

    Answered with Window, and with another whenever the credit grows. A later Wait for the same alias restarts
    the count; its `serial` distinguishes its answers from earlier ones. `stalled`: a publisher has waited up to
    its timeout, so messages for subscribers without credit are dropped until they grant some.
    """

    FRAME = Kind.WAIT
    alias: U16
    serial: U32
    stalled: bool = False


class Window(Control, frozen=True):
    """Credit: `limit` bytes may be sent under `alias`, counted from the Wait with this `serial`.

    It may be UNLIMITED.
    """

    FRAME = Kind.WINDOW
    alias: U16
    serial: U32
    limit: U63


class Unrouted(Control, frozen=True):
    """Report to a sender that its relay dropped casts of this session: `count` messages to one address.

    `cause` says why: a broadcast has no members, a rate quota is used up, or a topic has subscribers only under the
    keys in `others`. `others` is left out in the other cases.

    With `alias`, the relay did not accept the session's latest DECLARE of that number, whatever its `kind`, or accepts
    it no longer. Nothing was routed under it since, and `count` is 0. `full`: the session can have no more aliases for
    now, and must declare a number again that it uses for something else.
    """

    FRAME = Kind.UNROUTED
    kind: int
    name: Name
    key_id: Id16
    count: U32
    cause: Text
    others: OtherKeys | UnsetType = UNSET
    alias: U16 | UnsetType = UNSET
    full: bool | UnsetType = UNSET


class Direct(Control, frozen=True):
    """Request of a tunnel's initiator for a socket pair, by which its records bypass the relay.

    Answered with Pair or nothing.
    """

    FRAME = Kind.DIRECT
    hop: Annotated[int, Meta(ge=0)]


class Pair(Control, frozen=True):
    """Notification that a tunnel has a socket pair.

    `token` is valid once, in Fetch on a separate connection, for this end.
    """

    FRAME = Kind.PAIR
    hop: Annotated[int, Meta(ge=0)]
    token: Id16


class Fetch(Control, frozen=True):
    """First and only frame of a connection to the relay on this host.

    It answers with one byte and the descriptor, and closes.
    """

    FRAME = Kind.FETCH
    token: Id16


class Carried(Control, frozen=True):
    """Records and bytes that passed by socket pairs of this session since its last report."""

    FRAME = Kind.CARRIED
    sent_records: U63
    sent_bytes: U63
    received_records: U63
    received_bytes: U63


MAX_TROUBLE_NAME: Final = 64
"""Most characters of a name in TROUBLE."""


class TroubleEntry(Struct, frozen=True, array_like=True):
    """How often something of one cause happened. `names` has some of that by cluster, topic or filter."""

    cause: TroubleCause
    count: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
    names: Annotated[
        dict[
            Annotated[str, Meta(min_length=1, max_length=MAX_TROUBLE_NAME)],
            Annotated[int, Meta(ge=1, le=0xFFFFFFFF)],
        ],
        Meta(max_length=MAX_TROUBLE_NAMES),
    ] = {}


class Trouble(Control, frozen=True):
    """Losses and failed handlers of this session's client since its last report. The relay shows them to operators."""

    FRAME = Kind.TROUBLE
    entries: Annotated[list[TroubleEntry], Meta(min_length=1, max_length=len(TROUBLES))]


class Gap(Control, frozen=True):
    """Report that the relay dropped messages for this session: `count` of them from sequence `first` on.

    A `count` of 0 announces a run of losses that starts at `first`; its length is reported when there is room. With
    `UNKNOWN_COUNT` (`first` is 0) a link or relay on the route was lost, and it is unknown which messages with it.
    """

    FRAME = Kind.GAP
    kind: int
    name: Name
    key_id: Id16
    sender_id: Id16
    first: U63
    count: U32
    cause: Text
    plain: bool = True
    groups: Annotated[list[Name], Meta(max_length=256)] = []
    member: U63 = 0
    site: SiteText = ""
    """Over a link: the destination site of the messages."""


class Fail(Control, frozen=True):
    """The relay's own, final answer to the call with this hop id."""

    FRAME = Kind.FAIL
    hop: Annotated[int, Meta(ge=0)]
    cause: int
    detail: Text = ""
    may_have_run: bool = False
    seen_ms: U32 | UnsetType = UNSET
    """With the cause `no members`: how long ago the last member left, if that is not long ago."""


class Roster(Control, frozen=True):
    """The members to which a survey was dispatched. Answers follow, then Done."""

    FRAME = Kind.ROSTER
    hop: U63
    members: list[Annotated[str, Meta(max_length=64)]]


class Done(Control, frozen=True):
    """End of a survey's answers. `lost` names the members that were lost or refused it.

    If a relay was lost, `lost` names all its members, even those that have answered, because only the caller
    can open answers.
    """

    FRAME = Kind.DONE
    hop: U63
    lost: list[Annotated[str, Meta(max_length=64)]] = []


class Members(Control, frozen=True):
    """Request for the members of a cluster. With `watch`, changes are sent until Unwatch with the same id.

    With `streams`, request for the stores that hold a stream of this name; this is answered once.
    """

    FRAME = Kind.MEMBERS
    id: U63
    name: Name
    key_ids: KeyIds
    watch: bool = False
    streams: bool = False
    succeeding: bool | UnsetType = UNSET
    """From a store: whether another store is gone whose streams it may take over."""


class Unwatch(Control, frozen=True):
    """Request to end a watch."""

    FRAME = Kind.UNWATCH
    id: U63


class MemberInfo(Struct, frozen=True):
    """One member as a relay knows it. `member` is relay id (32 hex digits), '.', serial."""

    member: Annotated[str, Meta(max_length=64)]
    kinds: list[int]
    key_ids: list[Id16]
    relay: Annotated[str, Meta(max_length=32)]
    site: Text = ""
    label: Annotated[str, Meta(max_length=64)] = ""
    tag: Annotated[str, Meta(max_length=255)] = ""
    method_count: U16 | UnsetType = field(default=UNSET, name="methods")

    @property
    def methods(self) -> int:
        """Number of its methods."""
        return 0 if self.method_count is UNSET else self.method_count


class Membership(Control, frozen=True):
    """Answer to Members: all members. For a watch, later frames hold those that joined and left.

    `others` counts members of the same name under other key ids: hex of the key id's first 4 bytes -> count.
    """

    FRAME = Kind.MEMBERSHIP
    id: U63
    joined: list[MemberInfo] = []
    left: list[Annotated[str, Meta(max_length=64)]] = []
    others: dict[str, int] = {}
    more: bool = False
    """Whether the first answer continues in the next frame."""
    sites: dict[str, int] = {}
    """Members of the same address in other sites, in the first frame of an answer: site -> count."""
    starting: list[Annotated[str, Meta(max_length=64)]] = []
    """For streams, in the first frame of an answer: host names of relays whose store is starting."""


class Status(Control, frozen=True):
    """Request for the relay's counters and tables."""

    FRAME = Kind.STATUS
    id: U63


class Report(Control, frozen=True):
    """Answer to Status: a JSON document."""

    FRAME = Kind.REPORT
    id: U63
    document: str


class Ping(Control, frozen=True):
    """Request for Pong with the same id, which is sent once everything before it has been routed."""

    FRAME = Kind.PING
    id: U63
    mono_us: U63 | UnsetType = UNSET
    """The sender's CLOCK_MONOTONIC, over WebSocket only."""


class Pong(Control, frozen=True):
    """Answer to Ping."""

    FRAME = Kind.PONG
    id: U63
    mono_us: U63 | UnsetType = UNSET
    """The sender's CLOCK_MONOTONIC, over WebSocket only."""


class Settle(Control, frozen=True):
    """Request for an Ack once the linked relays know the interest that this session advertised before;
    at most after 1 s."""

    FRAME = Kind.SETTLE
    id: U63


class Topic(Control, frozen=True):
    """Request for the subscribers of a topic under a key; with `slow`, also for those whose messages were dropped.

    Answered with Audience. Over a link, the answer covers the receiving relay only.
    """

    FRAME = Kind.TOPIC
    id: U63
    name: Name
    key_id: Id16
    slow: bool = False


class SlowEntry(Struct, frozen=True, array_like=True):
    """A session, or with `link` another relay, for which messages of the topic were dropped. Times are ages."""

    label: Annotated[str, Meta(max_length=64)]
    dropped: U63
    since_us: U63
    last_us: U63
    relay: Annotated[str, Meta(max_length=64)] = ""
    """Host name of the relay that dropped them."""
    pid: U32 = 0
    address: Annotated[str, Meta(max_length=300)] = ""
    link: bool = False


MAX_SLOW_LISTED: Final = 64


class Audience(Control, frozen=True):
    """Answer to Topic: the number of subscribers, and of messages dropped for them.

    `others` counts subscribers under other key ids. It is left out over links.
    """

    FRAME = Kind.AUDIENCE
    id: U63
    subscribers: U32
    dropped: U63 = 0
    slow: Annotated[list[SlowEntry], Meta(max_length=MAX_SLOW_LISTED)] = []
    others: OtherKeys | UnsetType = UNSET


class Beat(Control, frozen=True):
    """Heartbeat, sent once a second and not answered. `mono_us` is the sender's clock.

    `heard_us` is the `mono_us` of the last beat received from the peer, and `held_us` the time since then:
    round trip = now - heard - held.
    """

    FRAME = Kind.BEAT
    mono_us: U63
    heard_us: U63 = 0
    held_us: U63 = 0
    version: U63 = 0
    """Version of the sender's interest. The peer's replica must be at the same version."""
    wall_us: U63 | UnsetType = UNSET
    """The sender's wall clock, in µs since 1970: between relays."""
