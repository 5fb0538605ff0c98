"""The control frames of the protocol: their typed bodies. No bytes here: see `codec`.

Control frames (kind < 0x40) carry one MessagePack map, decoded into the struct of the same name. Data frames (kind >= 0x40)
carry fixed binary fields and a sealed body.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from iris.wire.kinds import MAX_PARTS, Kind

MAX_CREDIT: Final = 4096
"""Hop ids in one CREDIT."""
Id16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Text = Annotated[str, Meta(max_length=1024)]
MAX_FAILED: Final = 400
"""Characters that say why a store cannot serve."""
U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
U63 = Annotated[int, Meta(ge=0, le=0x7FFFFFFFFFFFFFFF)]
MAX_ADDRESSES: Final = 16
Address = Annotated[str, Meta(min_length=3, max_length=300)]
SiteText = Annotated[str, Meta(max_length=32)]
"""A site's name, or empty."""
MAX_KEY_IDS: Final = 64
"""Key ids of one JOIN, SUBSCRIBE or MEMBERS."""
KeyIds = Annotated[list[Id16], Meta(min_length=1, max_length=MAX_KEY_IDS)]


class Control(Struct, frozen=True):
    """The body of a control frame of the kind `FRAME`. Its subclasses are all control frames that there are."""

    FRAME: ClassVar[Kind]


class Hello(Control, frozen=True):
    """First frame of a session. `label` is shown by status and members, e.g. the program's name."""

    FRAME = Kind.HELLO
    version: U16
    minor: U16
    label: Annotated[str, Meta(max_length=64)] = ""
    pid: U32 = 0
    mono_us: U63 = 0
    """Over TLS: the session's CLOCK_MONOTONIC. On one host both sides have the same."""


class Welcome(Control, frozen=True):
    """The relay's answer to Hello: what proofs must sign, and the limits that hold here."""

    FRAME = Kind.WELCOME
    version: U16
    minor: U16
    relay_id: Id16
    session_id: Annotated[bytes, Meta(min_length=8, max_length=8)]
    challenge: Annotated[bytes, Meta(min_length=32, max_length=32)]
    message_limit: Annotated[int, Meta(ge=64 << 10, le=0xFFFFFFFF)]
    site: Text = ""
    aliases: Annotated[int, Meta(ge=1, le=65_536)] = 65_536
    """Aliases that the session may declare."""
    mono_us: U63 = 0
    """Over TLS: the relay's CLOCK_MONOTONIC."""


class Error(Control, frozen=True):
    """Last frame before the connection is cut: the protocol rule that was broken."""

    FRAME = Kind.ERROR
    detail: Text


class Bye(Control, frozen=True):
    """Nothing follows. Answered with Bye when all that came before it has been routed."""

    FRAME = Kind.BYE
    reason: Text = ""
    complete: bool = False
    """To a store, from a relay that stops: nothing that the store records was lost, or can be sent before another relay starts."""


class Drain(Control, frozen=True):
    """The relay is stopping: send nothing new, finish what runs, say goodbye, and look for another."""

    FRAME = Kind.DRAIN
    grace_ms: U32


class Ack(Control, frozen=True):
    """Answer to the control frame that carried `id`. `error` is empty on success."""

    FRAME = Kind.ACK
    id: U63
    error: Text = ""
    member: U63 = 0
    fresh: bool = False
    """Of JOIN and SUBSCRIBE: this relay had routed no publication and no broadcast before, and was never joined to another."""


class Grant(Control, frozen=True):
    """An order to keep a stream (`iris.wire.streams.Order`), in place of a proof for what it names.

    `signature` is the cluster key's over the order, `proof` the store's own over this session and the order.
    """

    FRAME = Kind.GRANT
    id: U63
    order: Annotated[bytes, Meta(max_length=8192)]
    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    proof: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Prove(Control, frozen=True):
    """Proof that the session holds a cluster key; the key id is derived from `public_key`."""

    FRAME = Kind.PROVE
    id: U63
    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Declare(Control, frozen=True):
    """`alias` stands from now on, in this direction, for all that is constant of a sender and an address.

    `plain` and `groups` are the delivery set (relay to session only): the subscriptions without a group are
    meant, and those of the named groups. `member` is the member that is meant (relay to session only).

    `site` of a session says where its messages are to go: empty for wherever they are wanted (calls: at home if anybody is there), HERE, or
    a site. With hop class TO_WAN it is the site that they are on their way to.
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


class Serving(Struct, frozen=True):
    """What a member takes of one kind: handlers at once, and bytes handed to it and not yet finished."""

    concurrency: Annotated[int, Meta(ge=1, le=1 << 20)]
    limit_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]


class Join(Control, frozen=True):
    """Become a member of a cluster, for the kinds named, under every key id at once."""

    FRAME = Kind.JOIN
    id: U63
    name: Name
    key_ids: KeyIds
    kinds: Annotated[dict[int, Serving], Meta(min_length=1, max_length=8)]
    tag: Annotated[str, Meta(max_length=255)] = ""
    """Told with the member: of a stream, which log it is; of a log, what it is called."""


class Leave(Control, frozen=True):
    """Stop being a member; nothing is handed to it after the Ack."""

    FRAME = Kind.LEAVE
    id: U63
    member: U63


class Subscribe(Control, frozen=True):
    """Receive what is published to matching topics under any of the key ids."""

    FRAME = Kind.SUBSCRIBE
    id: U63
    filter: Name
    key_ids: KeyIds
    group: Annotated[str, Meta(max_length=255)] = ""


class Unsubscribe(Control, frozen=True):
    """End the subscription of this filter and group."""

    FRAME = Kind.UNSUBSCRIBE
    id: U63
    filter: Name
    group: Annotated[str, Meta(max_length=255)] = ""


class Credit(Control, frozen=True, omit_defaults=True):
    """The member is done with the pushes that it was handed under these hop ids; `unstarted` are those of them that it did not run."""

    FRAME = Kind.CREDIT
    member: U63
    kind: int
    hops: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_CREDIT)]
    unstarted: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_CREDIT)] = []


class CallerLeft(Control, frozen=True):
    """Whoever made these calls, which were handed over under these hop ids and have not been answered, waits no more."""

    FRAME = Kind.CALLER_LEFT
    hops: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_CREDIT)]


class Share(Control, frozen=True):
    """What the session publishes to this topic goes to queue groups: a turn's messages are to be cut into so many bundles.

    A bundle is the unit of choice, so a burst is spread over the members of a group. 1: nobody needs that any more.
    """

    FRAME = Kind.SHARE
    name: Name
    key_id: Id16
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]


class Wait(Control, frozen=True, omit_defaults=True):
    """What is published under `alias` from here on waits for credit, in bytes of frames counted from this one.

    Answered with Window, and again whenever there is more credit. A later Wait for the same alias counts anew; its `serial` tells the
    answers to it from earlier ones. `stalled`: a publisher has waited for as long as it does; a subscriber without credit is
    dropped for until it has some.
    """

    FRAME = Kind.WAIT
    alias: U16
    serial: U32
    stalled: bool = False


class Window(Control, frozen=True):
    """So many bytes may be sent under `alias` since the Wait with this `serial`; UNLIMITED: nobody there holds a publisher back."""

    FRAME = Kind.WINDOW
    alias: U16
    serial: U32
    limit: U63


class Direct(Control, frozen=True):
    """The opener of a tunnel asks for a socket pair, by which its records pass the relay by. Answered with Pair, or with nothing."""

    FRAME = Kind.DIRECT
    hop: Annotated[int, Meta(ge=0)]


class Pair(Control, frozen=True):
    """A tunnel has a socket pair: `token` gets this end of it, once, by Fetch on a connection of its own."""

    FRAME = Kind.PAIR
    hop: Annotated[int, Meta(ge=0)]
    token: Id16


class Fetch(Control, frozen=True):
    """First and only frame of a connection to a relay of this host; its answer is one byte with the descriptor, and the end."""

    FRAME = Kind.FETCH
    token: Id16


class Carried(Control, frozen=True):
    """What passed by socket pairs of this session since it said so last."""

    FRAME = Kind.CARRIED
    sent_records: U63
    sent_bytes: U63
    received_records: U63
    received_bytes: U63


class Gap(Control, frozen=True):
    """The relay dropped messages on the way to this session: `count` of them from sequence `first` on.

    A `count` of 0 comes before them: a run of losses starts at `first`, of a length that is told when there is room. `UNKNOWN_COUNT`
    (`first` is 0) says that a link or relay on the way was lost, and with it nobody knows what.
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
    """Over a link: the site that they were on the way to."""


class Fail(Control, frozen=True):
    """The relay's own answer to the message with this hop id: it gets no other."""

    FRAME = Kind.FAIL
    hop: Annotated[int, Meta(ge=0)]
    cause: int
    detail: Text = ""
    may_have_run: bool = False


class Roster(Control, frozen=True):
    """The members that were handed a survey. Answers follow, then Done."""

    FRAME = Kind.ROSTER
    hop: U63
    members: list[Annotated[str, Meta(max_length=64)]]


class Done(Control, frozen=True):
    """No more answers come for a survey: `lost` names members that went away or refused.

    Of a relay that was lost it names all members, also those that have answered: only the surveyor can open the answers.
    """

    FRAME = Kind.DONE
    hop: U63
    lost: list[Annotated[str, Meta(max_length=64)]] = []


class Members(Control, frozen=True):
    """Ask who serves a cluster; with `watch`, hear of changes until Unwatch of the same id.

    With `streams`: which stores hold a stream of this name. That is answered once.
    """

    FRAME = Kind.MEMBERS
    id: U63
    name: Name
    key_ids: KeyIds
    watch: bool = False
    streams: bool = False


class Unwatch(Control, frozen=True):
    """End a watch."""

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


class Membership(Control, frozen=True):
    """Answer to Members: who is there; later, for a watch, who came and went.

    `others` counts members of the same name under key ids that were not asked for, by the hex of the key id's first 4 bytes.
    """

    FRAME = Kind.MEMBERSHIP
    id: U63
    joined: list[MemberInfo] = []
    left: list[Annotated[str, Meta(max_length=64)]] = []
    others: dict[str, int] = {}
    more: bool = False
    """The first answer goes on in the next frame."""
    sites: dict[str, int] = {}
    """Members of the same address in other sites, in the first frame of an answer."""
    starting: list[Annotated[str, Meta(max_length=64)]] = []
    """Of streams, likewise: the relays, by their hosts' names, a store of which is on its way."""


class Status(Control, frozen=True):
    """Ask for the relay's counters and tables."""

    FRAME = Kind.STATUS
    id: U63


class Report(Control, frozen=True):
    """Answer to Status: a JSON document."""

    FRAME = Kind.REPORT
    id: U63
    document: str


class Ping(Control, frozen=True):
    """Answered with Pong of the same id once all that came before it has been routed."""

    FRAME = Kind.PING
    id: U63


class Pong(Control, frozen=True):
    """Answer to Ping."""

    FRAME = Kind.PONG
    id: U63


class Settle(Control, frozen=True):
    """Answered with Ack once the linked relays know what this session asked for before, or after a second at most."""

    FRAME = Kind.SETTLE
    id: U63


class Topic(Control, frozen=True):
    """Ask who subscribes to a topic under a key; with `slow`, also for whom its messages were dropped. Answered with Audience.

    Over a link: what the receiver alone knows.
    """

    FRAME = Kind.TOPIC
    id: U63
    name: Name
    key_id: Id16
    slow: bool = False


class SlowEntry(Struct, frozen=True, array_like=True):
    """A session, or (`link`) another relay, for which messages of the topic were dropped; times are ages."""

    label: Annotated[str, Meta(max_length=64)]
    dropped: U63
    since_us: U63
    last_us: U63
    relay: Annotated[str, Meta(max_length=64)] = ""
    """Of the relay that dropped them: its host's name."""
    pid: U32 = 0
    address: Annotated[str, Meta(max_length=300)] = ""
    link: bool = False


MAX_SLOW_LISTED: Final = 64


class Audience(Control, frozen=True):
    """Answer to Topic: how many subscribe, and what was dropped on the way to them."""

    FRAME = Kind.AUDIENCE
    id: U63
    subscribers: U32
    dropped: U63 = 0
    slow: Annotated[list[SlowEntry], Meta(max_length=MAX_SLOW_LISTED)] = []


class LinkHello(Control, frozen=True):
    """First frame of a link, from both sides at once, after TLS. `relay_id` has to be the one in the certificate.

    `dial_us` is the dialler's CLOCK_MONOTONIC when it dialled, 0 from the side that accepted; `mono_us` is the sender's clock
    now, the first sample for mapping deadlines.
    """

    FRAME = Kind.LINK_HELLO
    version: U16
    minor: U16
    relay_id: Id16
    dial_us: U63
    mono_us: U63
    message_limit: Annotated[int, Meta(ge=64 << 10, le=0xFFFFFFFF)]
    aliases: Annotated[int, Meta(ge=1, le=65_536)] = 65_536
    """Aliases that the peer may declare."""
    site: Text = ""
    label: Annotated[str, Meta(max_length=64)] = ""
    """The host's name, for people."""
    addresses: Annotated[list[Address], Meta(max_length=MAX_ADDRESSES)] = []
    """Where the sender accepts links, host:port."""
    compression: bool = False
    """Gateways of earlier versions could compress frames if both said so. It is ignored, and never said."""


class Beat(Control, frozen=True):
    """Sent once a second and answered by nothing: it says that the sender lives, and what its clock shows.

    `heard_us` is the `mono_us` of the last beat heard from the other side, and `held_us` how long ago that was: round trip =
    now - heard - held.
    """

    FRAME = Kind.BEAT
    mono_us: U63
    heard_us: U63 = 0
    held_us: U63 = 0
    version: U63 = 0
    """The version of the sender's interest: the other side's copy has to be there, too."""


class MemberEntry(Struct, frozen=True, array_like=True):
    """One member of the sending relay. `kinds`: kind served -> handlers at once."""

    serial: U63
    name: Name
    key_ids: KeyIds
    kinds: Annotated[dict[int, Annotated[int, Meta(ge=1, le=1 << 20)]], Meta(max_length=8)]
    label: Annotated[str, Meta(max_length=64)] = ""
    tag: Annotated[str, Meta(max_length=255)] = ""


class TopicEntry(Struct, frozen=True, array_like=True):
    """Sessions of the sending relay that want what matches a filter under a key, in one queue group or (empty) in none.

    `count` is how many they are; 0 ends the entry. Before minor version 2 it was 0 or 1 without a group.
    """

    filter: Name
    key_id: Id16
    group: Annotated[str, Meta(max_length=255)]
    count: U32


class SiteEntry(Struct, frozen=True, array_like=True):
    """A site that the sending gateway has a WAN connection to (or, not `up`, has none any more), and how far it is."""

    site: SiteText
    up: bool = True
    cost_ms: U32 = 0
    """What the gateway was told the site costs; added to the round trip where sites are compared."""
    rtt_us: U63 = 0


class SiteCluster(Struct, frozen=True, array_like=True):
    """Members of an address in one site, all together. `kinds`: kind served -> handlers at once; empty: nobody is there any more."""

    site: SiteText
    name: Name
    key_id: Id16
    kinds: Annotated[dict[int, Annotated[int, Meta(ge=1, le=1 << 40)]], Meta(max_length=8)]
    members: U32 = 0


class SiteTopic(Struct, frozen=True, array_like=True):
    """As TopicEntry, for all relays of one site."""

    site: SiteText
    filter: Name
    key_id: Id16
    group: Annotated[str, Meta(max_length=255)]
    count: U32


class Interest(Control, frozen=True):
    """What the sending relay's members and subscribers want: a change from version `base` to `version`.

    Over a WAN connection `clusters` and `site_topics` say the same of the sender's whole site, and nothing else is filled. A gateway tells
    its own network's relays in `sites`, `clusters` and `site_topics` what other sites told it.

    A snapshot begins with `reset`: the copy is emptied first, whatever its version; with `more`, the next frame goes on with it
    and has the same version. Other long changes go in several frames, each with a version of its own.
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
    """A store of the sending relay is on its way: it may hold a stream that nobody serves."""
    store_failed: Annotated[str, Meta(max_length=MAX_FAILED)] = ""
    """Why the store that the sending relay starts cannot serve."""


class Resync(Control, frozen=True):
    """The sender's copy is at `version`, which is not what the last Interest was based on: a snapshot is due."""

    FRAME = Kind.RESYNC
    version: U63


class Load(Struct, frozen=True, array_like=True):
    """Messages that members of an address hold of one kind, handed to them by others than the receiver of this."""

    kind: int
    name: Name
    key_id: Id16
    others: U32


class Loads(Control, frozen=True):
    """How busy the sender's members are, where the receiver has asked for their service lately."""

    FRAME = Kind.LOADS
    loads: Annotated[list[Load], Meta(max_length=256)]


class AskPeers(Control, frozen=True):
    """Ask which relays the receiver is linked to."""

    FRAME = Kind.ASK_PEERS


class PeerEntry(Struct, frozen=True, array_like=True):
    """A relay, and where it accepts links (host:port)."""

    relay_id: Id16
    addresses: Annotated[list[Address], Meta(max_length=MAX_ADDRESSES)]


class Peers(Control, frozen=True):
    """Answer to AskPeers, in as many frames as it takes."""

    FRAME = Kind.PEERS
    peers: Annotated[list[PeerEntry], Meta(max_length=256)]


CONTROLS: Final = tuple(Control.__subclasses__())
