"""Writes the examples of docs/protocol.md: `python tests/protocol/make_examples.py` fills each ```hex and ```json
block by its name.

All examples follow from fixed keys, ids, clocks and counters, so a run changes the file only after a change of
the wire.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jwt
import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from cryptography.hazmat.primitives.serialization import Encoding

from iris.core.bundle import Headers, encode_bundle, encode_single
from iris.core.faults import Refusal as HandlerRefusal
from iris.core.faults import fault_headers
from iris.core.tunnel import prologue
from iris.crypto.certificates import relay_leaf
from iris.crypto.channel import Channel, Offer, accept_offer
from iris.crypto.keys import (
    ClusterKey,
    IssuerKey,
    NetworkKey,
    StoreKey,
    public_id,
    verify_order,
    verify_store_proof,
)
from iris.crypto.noise import Handshake
from iris.crypto.sframe import Sealer, derive_key_and_salt
from iris.crypto.tickets import sign_ticket
from iris.remote import certificate_hash
from iris.streams.records import RecordOpener
from iris.streams.verified import VerifiedStream
from iris.wire import frames, link_frames, stream_items, streams
from iris.wire.codec import (
    END,
    HOP,
    RELAY_HOP,
    answer_suffix,
    encode_control,
    metadata_prefix,
)
from iris.wire.frames import Control, Serving
from iris.wire.kinds import (
    CLOCK_PING,
    FLAG_REFUSED,
    NO_KEY,
    OTHER_KEYS,
    STORES,
    Cause,
    Kind,
    Refusal,
)
from iris.wire.orders import KEEP, Definition, Order, SignedOrder, decode_order, log_uuid

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "protocol.md"
BLOCK: Final = re.compile(r"^```(hex|json) name=([a-z-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SECRET: Final = bytes(range(32))
KEY: Final = ClusterKey(SECRET)
RELAY_ID: Final = bytes(range(0xA0, 0xB0))
OTHER_RELAY_ID: Final = bytes(range(0xB0, 0xC0))
SESSION_ID: Final = (1).to_bytes(8, "little")
CHALLENGE: Final = bytes(range(0xC0, 0xE0))
CALLER: Final = bytes(range(0x50, 0x60))
MEMBER: Final = bytes(range(0x60, 0x70))
TUNNEL_ID: Final = bytes(range(0x70, 0x80))
OPENER_EPHEMERAL: Final = bytes(range(1, 33))
MEMBER_EPHEMERAL: Final = bytes(range(33, 65))
SENT_US: Final = 1_700_000_000_000_000
DEADLINE_US: Final = 90_000_000_000
MEMBER_ID: Final = f"{RELAY_ID.hex()}.7"
CLUSTER: Final = "databases"
TOPIC: Final = "flights.JFK.AA"
DENIED: Final = "the ticket does not allow request for 'databases'"
APPENDER: Final = bytes(range(0x40, 0x50))
CERTIFICATE: Final = relay_leaf(NetworkKey(SECRET), RELAY_ID, bytes(32)).certificate
TLS_CHANNEL: Final = certificate_hash(CERTIFICATE.public_bytes(Encoding.DER))
STORE_KEY: Final = StoreKey(bytes(range(0x20, 0x40)))
STORE_SENDER: Final = bytes(range(0x30, 0x40))
STREAM: Final = "orders"
SALT: Final = bytes(range(0x80, 0x90))
STREAM_UUID: Final = log_uuid(KEY.key_id, SALT)
COPY_UUID: Final = bytes(range(0xC0, 0xD0))
PRODUCER: Final = bytes(range(0x90, 0xA0))
WRITER: Final = "etl"
BATCH: Final = 7
ATTEMPT: Final = bytes(range(0xB0, 0xC0))
RECORD_KEY: Final = b"AA"
CALLER_SHARE: Final = bytes(range(65, 97))
PAIR_TOKEN: Final = bytes(range(0xE0, 0xF0))
STORE_SHARE: Final = bytes(range(97, 129))
KNOCK_NONCE: Final = bytes(range(0x10, 0x30))
DOOR_NONCE: Final = bytes(range(0xD0, 0xF0))
STREAM_CHANNEL: Final = 4_294_967_303
ORDER: Final = streams.encode(
    Order(
        KEEP, STREAM_UUID, KEY.key_id, STORE_KEY.public_key, SENT_US,
        Definition(STREAM, "orders.>", max_bytes=1 << 30, compact=True),
    )
)  # fmt: skip

NEW_KEY: Final = ClusterKey(bytes(range(1, 33)))
NEXT_ORDER: Final = streams.encode(
    Order(
        KEEP, STREAM_UUID, NEW_KEY.key_id, STORE_KEY.public_key, SENT_US,
        Definition(STREAM, "orders.>", max_bytes=1 << 30, compact=True), revision=1,
    )
)  # fmt: skip
SIGNED: Final = SignedOrder(
    NEXT_ORDER, NEW_KEY.public_key, NEW_KEY.sign_order(NEXT_ORDER),
    KEY.public_key, KEY.countersign_order(NEXT_ORDER),
)  # fmt: skip
REFUSAL: Final = HandlerRefusal("sold_out", left=0)
REFUSED: Final = fault_headers(
    MEMBER_ID, may_have_run=True, code=REFUSAL.code, packed=REFUSAL.packed
)

ISSUER: Final = IssuerKey(bytes(range(2, 34)))
TICKET: Final = sign_ticket(
    ISSUER, network=NetworkKey(SECRET).fingerprint, subject="alice", id="7f3a", issued_s=1_700_000_000, life_s=900,
    allow={"request": ["delays"], "subscribe": ["users.alice", "news.>"]}, keys=[KEY.key_id], origin="https://app.example",
)  # fmt: skip

CONTROLS: Final[dict[str, Control]] = {
    "hello": frames.Hello(1, 0, "billing", 4711),
    "hello-ticket": frames.Hello(1, 0, "board", 0, 1_500_001, TICKET),
    "ticket": frames.Ticket(11, TICKET),
    "release": frames.Release(KEY.key_id),
    "welcome": frames.Welcome(1, 0, RELAY_ID, SESSION_ID, CHALLENGE, 1 << 20, ""),
    "error": frames.Error("alias 7 was not declared for this kind of frame"),
    "bye": frames.Bye("client closed"),
    "drain": frames.Drain(10_000),
    "ping": frames.Ping(9),
    "pong": frames.Pong(9),
    "ping-clock": frames.Ping(CLOCK_PING, 7_200_000_000),
    "pong-clock": frames.Pong(CLOCK_PING, 1_500_001),
    "settle": frames.Settle(10),
    "topic": frames.Topic(11, TOPIC, KEY.key_id, True),
    "audience": frames.Audience(
        11, 3, 40, [frames.SlowEntry("reports@ams1", 40, 2_000_000, 500_000, "ams1", 4711)]
    ),
    "audience-others": frames.Audience(12, 0, others={"9a0b1c2d": 1}),
    "ack": frames.Ack(2, "", 7),
    "prove": frames.Prove(
        0, KEY.public_key, KEY.sign_proof(relay_id=RELAY_ID, session_id=SESSION_ID, challenge=CHALLENGE)
    ),
    "prove-bound": frames.Prove(
        0, KEY.public_key,
        KEY.sign_proof(relay_id=RELAY_ID, session_id=SESSION_ID, challenge=CHALLENGE, channel=TLS_CHANNEL),
    ),
    "grant": frames.Grant(
        1, ORDER, KEY.public_key, KEY.sign_order(ORDER),
        STORE_KEY.sign_proof(ORDER, relay_id=RELAY_ID, session_id=SESSION_ID, challenge=CHALLENGE),
    ),
    "declare": frames.Declare(0, Kind.REQUEST, CLUSTER, KEY.key_id, CALLER),
    "declare-member": frames.Declare(
        5, Kind.REQUEST, CLUSTER, KEY.key_id, CALLER, member=7, relay=OTHER_RELAY_ID
    ),
    "declare-delivery": frames.Declare(3, Kind.PUBLISH, TOPIC, KEY.key_id, CALLER, False, ["archive"]),
    "join": frames.Join(2, CLUSTER, [KEY.key_id], {int(Kind.REQUEST): Serving(8, 64 << 20)}),
    "join-cancel": frames.Join(
        2, CLUSTER, [KEY.key_id], {int(Kind.REQUEST): Serving(8, 64 << 20, True)}
    ),
    "join-methods": frames.Join(
        2, CLUSTER, [KEY.key_id], {int(Kind.REQUEST): Serving(8, 64 << 20)}, methods=3
    ),
    "leave": frames.Leave(3, 7),
    "subscribe": frames.Subscribe(4, "flights.JFK.>", [KEY.key_id], "archive"),
    "unsubscribe": frames.Unsubscribe(5, "flights.JFK.>", "archive"),
    "share": frames.Share(TOPIC, KEY.key_id, 4),
    "wait": frames.Wait(3, 17, True),
    "window": frames.Window(3, 17, 196_608),
    "direct": frames.Direct(6),
    "pair": frames.Pair(6, PAIR_TOKEN),
    "fetch": frames.Fetch(PAIR_TOKEN),
    "carried": frames.Carried(4_098, 268_500_992, 17, 561),
    "trouble": frames.Trouble(
        [
            frames.TroubleEntry("queue full", 412, {"flights.JFK.>": 400, "flights.LGA.>": 12}),
            frames.TroubleEntry("handler failed", 3, {CLUSTER: 3}),
        ]
    ),
    "unrouted": frames.Unrouted(int(Kind.BROADCAST), CLUSTER, KEY.key_id, 3, "no members"),
    "unrouted-others": frames.Unrouted(
        int(Kind.PUBLISH), TOPIC, KEY.key_id, 3, OTHER_KEYS, {"9a0b1c2d": 1}
    ),
    "unrouted-alias": frames.Unrouted(
        int(Kind.REQUEST), CLUSTER, KEY.key_id, 0, DENIED, alias=5, full=False
    ),
    "caller-left": frames.CallerLeft([RELAY_HOP + 2, RELAY_HOP + 5]),
    "credit": frames.Credit(7, Kind.PUSH, [RELAY_HOP + 2, RELAY_HOP + 5], [RELAY_HOP + 5]),
    "members": frames.Members(6, CLUSTER, [KEY.key_id], True),
    "members-succeeding": frames.Members(7, STORES, [NO_KEY], False, True, True),
    "membership": frames.Membership(
        6,
        [frames.MemberInfo(MEMBER_ID, [Kind.REQUEST], [KEY.key_id], RELAY_ID.hex(), "", "billing")],
        [],
        {"9a0b1c2d": 3},
    ),
    "membership-methods": frames.Membership(
        6,
        [frames.MemberInfo(MEMBER_ID, [Kind.REQUEST], [KEY.key_id], RELAY_ID.hex(), "", "billing", "", 3)],
    ),
    "unwatch": frames.Unwatch(6),
    "status": frames.Status(8),
    "report": frames.Report(8, '{"sessions": []}'),
    "gap": frames.Gap(Kind.PUBLISH, TOPIC, KEY.key_id, CALLER, 12, 3, "slow receiver"),
    "fail": frames.Fail(1, Cause.NO_MEMBERS, "nobody serves it", False),
    "roster": frames.Roster(5, [MEMBER_ID]),
    "done": frames.Done(5, []),
    "link-hello": link_frames.LinkHello(
        1, 0, RELAY_ID, 1_000_000, 1_004_000, 1 << 20, 65_536, "", "db-1", ["10.0.0.7:7430"]
    ),
    "beat": frames.Beat(2_004_000, 5_000_000, 998_000, 4),
    "beat-wall": frames.Beat(2_004_000, 5_000_000, 998_000, 4, 1_760_000_000_000_000),
    "interest-snapshot": link_frames.Interest(
        0, 4,
        [link_frames.MemberEntry(7, CLUSTER, [KEY.key_id], {int(Kind.REQUEST): 8}, "billing", "", 3)],
        [],
        [link_frames.TopicEntry("flights.JFK.>", KEY.key_id, "archive", 2)],
        True,
    ),
    "interest": link_frames.Interest(4, 5, [], [7], [link_frames.TopicEntry("flights.JFK.>", KEY.key_id, "archive", 0)]),
    "interest-site": link_frames.Interest(
        2, 3,
        clusters=[link_frames.SiteCluster("eu", CLUSTER, KEY.key_id, {int(Kind.REQUEST): 32, int(Kind.SURVEY): 32}, 4)],
        site_topics=[link_frames.SiteTopic("eu", "flights.JFK.>", KEY.key_id, "archive", 2)],
    ),
    "interest-gateway": link_frames.Interest(
        7, 8,
        sites=[link_frames.SiteEntry("eu", True, 10, 41_300)],
        clusters=[link_frames.SiteCluster("eu", CLUSTER, KEY.key_id, {}, 0)],
    ),
    "resync": link_frames.Resync(3),
    "loads": link_frames.Loads([link_frames.Load(Kind.REQUEST, CLUSTER, KEY.key_id, 5)]),
    "ask-peers": link_frames.AskPeers(),
    "peers": link_frames.Peers([link_frames.PeerEntry(OTHER_RELAY_ID, ["10.0.0.8:7430", "[fd00::8]:7430"])]),
}  # fmt: skip


def readable(value: Any) -> Any:
    """Return a decoded control frame for JSON: bytes in hex, keys of maps as texts."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [readable(one) for one in value]
    if isinstance(value, dict):
        return {str(name): readable(one) for name, one in value.items()}
    if hasattr(value, "__struct_fields__"):
        if value.__struct_config__.array_like:
            return [readable(getattr(value, name)) for name in value.__struct_fields__]
        return {
            field.encode_name: readable(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
            if getattr(value, field.name) is not msgspec.UNSET and not _left_out(value, field)
        }
    return value


def _left_out(value: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    """Return whether a field is not encoded because it has its default."""
    if not value.__struct_config__.omit_defaults or field.required:
        return False
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return bool(getattr(value, field.name) == default)


class Sealing:
    """One sender with its counter, which seals frames."""

    def __init__(self, sender_id: bytes) -> None:
        self.sender_id = sender_id
        self.sealer = Sealer(KEY, sender_id)

    def frame(
        self, kind: Kind, name: str, payloads: list[bytes], *, alias: int = 0, hop: int = 0, flags: int = 0, deadline: int = 0,
        timeout: int = 0, first: int = 0, headers: list[Headers | None] | None = None, answers: tuple[bytes, int] | None = None,
    ) -> tuple[bytes, dict[str, Any]]:  # fmt: skip
        """Return (frame, its fields for JSON)."""
        counter = self.sealer.counter
        plain = encode_bundle(payloads, headers, False)
        end = END.pack(SENT_US, timeout, len(payloads), first)
        metadata = metadata_prefix(kind, name, KEY.key_id, self.sender_id) + end
        if answers is not None:
            metadata += answer_suffix(*answers)
        body = self.sealer.seal(plain, metadata)
        said: dict[str, Any] = {
            "frame": kind.name, "flags": flags, "alias": alias, "hop": hop, "deadline": deadline,
            "sent": SENT_US, "timeout": timeout, "count": len(payloads), "first": first,
            "declared": {"name": name, "sender_id": self.sender_id.hex()},
            "counter": counter, "metadata": metadata.hex(),
            "payloads": [payload.decode() for payload in payloads],
        }  # fmt: skip
        if headers is not None:
            said["headers"] = headers
        if answers is not None:
            said["answers"] = {"sender_id": answers[0].hex(), "counter": answers[1]}
        head = HOP.pack(22 + len(end) + len(body), kind, flags, alias, hop, deadline)
        return head + end + body, said


def sealed() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Return all sealed examples, in the order of sealing."""
    caller, member = Sealing(CALLER), Sealing(MEMBER)
    found = {
        "publish": caller.frame(
            Kind.PUBLISH, TOPIC, [b"one", b"three"], first=12, alias=3,
            headers=[None, {"traceparent": "00-0af7"}],
        ),
        "broadcast": caller.frame(Kind.BROADCAST, CLUSTER, [b"flush"], alias=4),
        "request": caller.frame(
            Kind.REQUEST, CLUSTER, [b"ping"], hop=1, deadline=DEADLINE_US, timeout=1000
        ),
        "push": caller.frame(
            Kind.PUSH, CLUSTER, [b"note"], alias=1, hop=4, deadline=DEADLINE_US, timeout=5000
        ),
        "survey": caller.frame(
            Kind.SURVEY, CLUSTER, [b"count?"], alias=2, hop=5, deadline=DEADLINE_US, timeout=1000
        ),
    }  # fmt: skip
    asked, surveyed = found["request"][1]["counter"], found["survey"][1]["counter"]
    hop = RELAY_HOP + 2
    found["reply"] = member.frame(
        Kind.REPLY, CLUSTER, [b"pong"], alias=0, hop=hop, answers=(CALLER, asked)
    )
    found["fault"] = member.frame(
        Kind.FAULT, CLUSTER, [b"ValueError: no such table"], alias=1, hop=hop, answers=(CALLER, asked),
        headers=[{"may-have-run": "1", "member": MEMBER_ID}],
    )  # fmt: skip
    found["answer"] = member.frame(
        Kind.ANSWER, CLUSTER, [b"42"], alias=2, hop=hop + 1, answers=(CALLER, surveyed),
        headers=[{"iris-member": MEMBER_ID}],
    )  # fmt: skip
    request, said = found["request"]
    flags = FLAG_REFUSED | Refusal.FULL << 4
    _, kind, _, alias, _, deadline = HOP.unpack_from(request)
    sent_back = HOP.pack(len(request) - 4, kind, flags, alias, hop, deadline) + request[26:]
    found["refused"] = sent_back, {**said, "flags": flags, "hop": hop}
    calls = [caller.frame(Kind.REQUEST, CLUSTER, [text], timeout=1000) for text in (b"a", b"bc")]
    counters = [read["counter"] for _, read in calls]
    found["calls"] = run(Kind.CALLS, calls, alias=0, hop=7, deadline=DEADLINE_US)
    answers = [
        member.frame(Kind.REPLY, CLUSTER, [text], answers=(CALLER, counter))
        for text, counter in zip((b"A", b"BC"), counters, strict=True)
    ]
    found["answers"] = run(Kind.ANSWERS, answers, hops=[RELAY_HOP + 9, RELAY_HOP + 8])
    return found


def run(
    kind: Kind, singles: list[tuple[bytes, dict[str, Any]]], *, alias: int = 0, hop: int = 0, deadline: int = 0,
    hops: list[int] | None = None,
) -> tuple[bytes, dict[str, Any]]:  # fmt: skip
    """Return a run of separately sealed frames, and its fields for JSON."""
    said = singles[0][1]
    bodies = [frame[50:] for frame, _ in singles]
    body = b"".join(number.to_bytes(8, "little") for number in hops or [])
    body += b"".join(len(one).to_bytes(4, "little") for one in bodies) + b"".join(bodies)
    end = END.pack(SENT_US, said["timeout"], len(bodies), 0)
    head = HOP.pack(22 + len(end) + len(body), kind, 0, alias, hop, deadline)
    fields = ("sent", "timeout", "first", "declared")
    each = ("counter", "metadata", "payloads", "answers")
    shown: dict[str, Any] = {
        "frame": kind.name, "flags": 0, "alias": alias, "hop": hop, "deadline": deadline, "count": len(bodies),
        **{field: said[field] for field in fields},
    }  # fmt: skip
    if hops is not None:
        shown["hops"] = hops
    shown["each"] = [{name: one[name] for name in each if name in one} for _, one in singles]
    return head + end + body, shown


def tunnel() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Return the frames of a tunnel from both ends."""
    began = prologue(CLUSTER, KEY.key_id, TUNNEL_ID)
    opener = Handshake(True, began, KEY.tunnel_psk, OPENER_EPHEMERAL)
    member = Handshake(False, began, KEY.tunnel_psk, MEMBER_EPHEMERAL)
    first = opener.write_message()
    member.read_message(first)
    second = member.write_message()
    opener.read_message(second)
    to_member, _ = opener.split()
    to_opener, _ = member.split()
    hop, theirs = 6, RELAY_HOP + 4

    def item(kind: int, data: bytes) -> bytes:
        return bytes((kind,)) + len(data).to_bytes(4, "little") + data

    there = item(0x01, b"\x80") + item(0x32, b"hello") + item(0x04, b"")
    back = item(0x03, (65_536).to_bytes(4, "little")) + item(0x12, b"wor") + item(0x22, b"ld")

    def frame(kind: Kind, hop: int, body: bytes, **said: Any) -> tuple[bytes, dict[str, Any]]:
        head = HOP.pack(22 + len(body), kind, 0, 0, hop, 0)
        shown = {"frame": kind.name, "flags": 0, "alias": 0, "hop": hop, "deadline": 0, **said}
        return head + body, shown

    end = END.pack(SENT_US, 1000, 1, 0)
    opening = HOP.pack(46 + len(first), Kind.TUNNEL_OPEN, 0, 5, hop, DEADLINE_US) + end + first
    return {
        "tunnel-open": (
            opening,
            {
                "frame": "TUNNEL_OPEN", "flags": 0, "alias": 5, "hop": hop, "deadline": DEADLINE_US,
                "sent": SENT_US, "timeout": 1000, "count": 1, "first": 0,
                "declared": {"name": CLUSTER, "sender_id": TUNNEL_ID.hex()},
            },
        ),
        "tunnel-accept": frame(Kind.TUNNEL_ACCEPT, theirs, second),
        "tunnel-data": frame(
            Kind.TUNNEL_DATA, hop, to_member.encrypt(there),
            items=[["headers", {}], ["message", "hello"], ["finish"]], plain=there.hex(),
        ),
        "tunnel-data-back": frame(
            Kind.TUNNEL_DATA, theirs, to_opener.encrypt(back),
            items=[["credit", 65_536], ["first", "wor"], ["last", "ld"]], plain=back.hex(),
        ),
        "tunnel-end": frame(Kind.TUNNEL_END, hop, bytes((Cause.BROKEN,)), cause=int(Cause.BROKEN)),
    }  # fmt: skip


def _secret_of(key: ClusterKey) -> str:
    """Return a key's secret in hex."""
    return base64.urlsafe_b64decode(key.reveal())[:32].hex()


def derived() -> dict[str, dict[str, Any]]:
    """Return the blocks without a frame: values derived from the key and its senders."""
    senders = {}
    for name, sender_id in (("caller", CALLER), ("member", MEMBER), ("appender", APPENDER)):
        kid = int.from_bytes(sender_id[:8])
        key, salt = derive_key_and_salt(base_key(sender_id), kid)
        senders[name] = {
            "sender_id": sender_id.hex(), "base_key": base_key(sender_id).hex(), "kid": f"{kid:016x}",
            "key": key.hex(), "salt": salt.hex(),
        }  # fmt: skip
    return {
        "tls-channel": {
            "certificate": CERTIFICATE.public_bytes(Encoding.DER).hex(), "channel": TLS_CHANNEL.hex(),
        },
        "topic-key": {
            "secret": SECRET.hex(), "topic": "users.alice", "topic_secret": _secret_of(KEY.for_topic("users.alice")),
            "topic_key_id": KEY.for_topic("users.alice").key_id.hex(),
        },
        "ticket-claims": {
            "issuer_secret": bytes(range(2, 34)).hex(), "public_key": ISSUER.public_key.hex(),
            "header": jwt.get_unverified_header(TICKET), "claims": jwt.decode(TICKET, options={"verify_signature": False}),
        },
        "key": {
            "secret": SECRET.hex(), "sealing_root": KEY.sealing_root.hex(),
            "public_key": KEY.public_key.hex(), "tunnel_psk": KEY.tunnel_psk.hex(),
            "key_hash_key": KEY.key_hash_key.hex(), "key_id": KEY.key_id.hex(),
        },
        "sealing": senders,
        "tunnel": {
            "tunnel_id": TUNNEL_ID.hex(),
            "prologue": prologue(CLUSTER, KEY.key_id, TUNNEL_ID).hex(),
            "opener_ephemeral_secret": OPENER_EPHEMERAL.hex(),
            "member_ephemeral_secret": MEMBER_EPHEMERAL.hex(),
        },
        "order": readable(msgspec.msgpack.decode(ORDER)),
        "countersigned": {
            "key_secret": bytes(range(1, 33)).hex(), **readable(msgspec.structs.asdict(SIGNED)),
        },
        "stream": {
            "store_secret": bytes(range(0x20, 0x40)).hex(), "store_public_key": STORE_KEY.public_key.hex(),
            "store_id": public_id(STORE_KEY.public_key).hex(), "salt": SALT.hex(), "uuid": STREAM_UUID.hex(),
            "dead_uuid": stream_items.dead_uuid(STREAM_UUID).hex(), "key": RECORD_KEY.decode(), "key_hash": _key_hash().hex(),
        },
        "stream-partitions": partitioned(),
        "stream-channel": Opening(STREAM_UUID).keys(),
        "stream-long": long_code(),
    }  # fmt: skip


def partitioned() -> dict[str, Any]:
    """Return the definitions of a stream with partitions, and where keys and partitions go, from the primitives."""
    uuids = [bytes([0xA0 + number]) * 16 for number in range(1, 4)]
    whole = Definition("clicks", partitions=tuple(uuids))
    part = Definition("clicks/3", parent=STREAM_UUID, partition=3)
    order = Order(KEEP, uuids[2], KEY.key_id, STORE_KEY.public_key, SENT_US, part)
    keys = {}
    for key in ("AA", "BA", "LH"):
        said = b"iris-partition-1" + STREAM_UUID + key.encode()
        digest = hmac.digest(KEY.key_hash_key, said, "sha256")
        keys[key] = [digest[:8].hex(), _jump(int.from_bytes(digest[:8], "little"), 4)]
    stores = [STORE_KEY.public_key, bytes(range(32))]
    ids = [public_id(one).hex() for one in stores]
    scores = [
        [
            hashlib.sha256(f"iris-placement-1 {store} {number} clicks".encode()).hexdigest()[:16]
            for store in ids
        ]
        for number in range(4)
    ]
    return {
        "partition_0": readable(msgspec.msgpack.decode(streams.encode(whole))),
        "partition_3": readable(msgspec.msgpack.decode(streams.encode(order))),
        "order_3": streams.encode(order).hex(),
        "keys": keys,
        "stores": ids,
        "scores": scores,
    }  # fmt: skip


def _jump(key: int, count: int) -> int:
    bucket, after = -1, 0
    while after < count:
        bucket = after
        key = (key * 2862933555777941757 + 1) % (1 << 64)
        after = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket


class Opening:
    """The channel of the examples: the calls that open it, and both of its ends."""

    def __init__(self, uuid: bytes) -> None:
        drawn = iter((KNOCK_NONCE, CALLER_SHARE))
        offer = Offer(KEY, lambda size: next(drawn))
        share, signature = offer.sign(STORE_KEY.public_key, uuid, DOOR_NONCE)
        self.knock = streams.Knock(KNOCK_NONCE)
        signed = SignedOrder(ORDER, KEY.public_key, KEY.sign_order(ORDER))
        self.door = streams.Door(STORE_KEY.public_key, uuid, DOOR_NONCE, [signed])
        self.open = streams.Open(KNOCK_NONCE, DOOR_NONCE, KEY.public_key, share, signature)
        self.store, answer, signed_back = accept_offer(
            STORE_KEY, uuid, STREAM_CHANNEL, nonce=KNOCK_NONCE, door=DOOR_NONCE, public_key=KEY.public_key, share=share,
            signature=signature, secret=STORE_SHARE,
        )  # fmt: skip
        self.opened = streams.Opened(STREAM_CHANNEL, answer, signed_back)
        self.caller = offer.opened(STREAM_CHANNEL, answer, signed_back)

    def keys(self) -> dict[str, str]:
        """Return the secrets of the opening and the keys of the channel, from the primitives rather than from
        `Channel`.
        """
        said = b"".join(
            (STORE_KEY.public_key, STREAM_UUID, KEY.key_id, KNOCK_NONCE, DOOR_NONCE, self.open.share, self.opened.share)
        ) + STREAM_CHANNEL.to_bytes(8, "little")  # fmt: skip
        secret = X25519PrivateKey.from_private_bytes(CALLER_SHARE).exchange(
            X25519PublicKey.from_public_bytes(self.opened.share)
        )
        salt = hashlib.sha256(said).digest()
        keys = HKDF(hashes.SHA256(), 128, salt=salt, info=b"iris-stream-channel-1").derive(secret)
        names = ("call_code_key", "call_hash_key", "answer_code_key", "answer_hash_key")
        shown = {name: keys[32 * n : 32 * n + 32].hex() for n, name in enumerate(names)}
        return {
            "caller_share_secret": CALLER_SHARE.hex(), "store_share_secret": STORE_SHARE.hex(),
            "transcript": said.hex(), "x25519": secret.hex(), **shown,
        }  # fmt: skip


def long_code() -> dict[str, Any]:
    """Return the authentication code of a long body, from the primitives."""
    keys = Opening(STREAM_UUID).keys()
    body, end, counter = b"\x80" * 1500, END.pack(SENT_US, 0, 1, 0), 5
    head = b"\xc1" + STREAM_CHANNEL.to_bytes(8, "little") + counter.to_bytes(8, "little")
    tag = AESGCM(bytes.fromhex(keys["call_hash_key"])).encrypt(counter.to_bytes(12), b"", body)
    said = head + end + len(body).to_bytes(4, "little") + tag
    code = hmac.digest(bytes.fromhex(keys["call_code_key"]), said, "sha256")
    assert Opening(STREAM_UUID).caller.seal(counter, end, body) == head + code
    return {"body": "1500 bytes of 80", "end": end.hex(), "call_counter": counter, "gmac": tag.hex(), "code": code.hex()}  # fmt: skip


def stream() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Return the calls that open a channel, an append of one sealed record, and the answer to a fetch that holds it."""
    prefix = metadata_prefix(Kind.STREAM, STREAM, KEY.key_id, APPENDER)
    end = END.pack(SENT_US, 0, 1, 0)
    body = Sealer(KEY, APPENDER).seal(encode_bundle([b"paid"], None, False), prefix + end)
    new = streams.NewRecord(0, end, body, _key_hash(), expires_us=SENT_US + 86_400_000_000)
    append = streams.Append(APPENDER, [new], PRODUCER, 0)
    record = stream_items.Record(
        7,
        Kind.STREAM,
        STREAM,
        KEY.key_id,
        APPENDER,
        end,
        body,
        SENT_US + 1500,
        new.key_hash,
        False,
        new.expires_us,
    )
    hole = stream_items.Hole(5, 6, 2)
    gap = stream_items.Gap(6, 3, "slow receiver", SENT_US + 1000)
    fetched = streams.Fetched([hole, gap, record], 8, 0, 8, STREAM_UUID)
    opener = RecordOpener(lambda key_id: KEY if key_id == KEY.key_id else None)
    order = decode_order(ORDER)
    described = streams.Described(order.definition, STREAM_UUID, 0, [], bytes(32), "", 0, 0, 8, 8, 0)  # fmt: skip
    opener.stream = VerifiedStream(order, described)
    opened = opener.open(record)
    assert isinstance(opened, list), opened
    grant = CONTROLS["grant"]
    assert isinstance(grant, frames.Grant)
    assert verify_order(grant.public_key, grant.signature, grant.order) == KEY.key_id
    verify_store_proof(
        decode_order(grant.order).store, grant.proof, grant.order,
        relay_id=RELAY_ID, session_id=SESSION_ID, challenge=CHALLENGE,
    )  # fmt: skip

    def frame(
        kind: Kind,
        alias: int,
        hop: int,
        call: bytes,
        timeout: int,
        sender_id: bytes,
        name: bytes = STREAM_UUID,
        channel: Channel | None = None,
        counter: int = 0,
        **said: Any,
    ) -> tuple[bytes, dict[str, Any]]:
        deadline = DEADLINE_US if timeout else 0
        end = END.pack(SENT_US, timeout, 1, 0)
        sealed = channel.seal(counter, end, call) if channel is not None else b""
        if channel is not None:
            said = {
                "channel": STREAM_CHANNEL,
                "call_counter": counter,
                "code": sealed[17:].hex(),
                **said,
            }
        shown = {
            "frame": kind.name, "flags": 0, "alias": alias, "hop": hop, "deadline": deadline,
            "sent": SENT_US, "timeout": timeout, "count": 1, "first": 0,
            "declared": {"name": name.hex(), "sender_id": sender_id.hex()},
            **said, "body": readable(msgspec.msgpack.decode(call)),
        }  # fmt: skip
        head = HOP.pack(46 + len(sealed) + len(call), kind, 0, alias, hop, deadline)
        return head + end + sealed + call, shown

    stage = streams.Stage(WRITER, BATCH, ATTEMPT, APPENDER, [new])
    commit = streams.Commit(WRITER, BATCH, [streams.Attempt(ATTEMPT, 1)])
    plan = streams.Plan(
        WRITER,
        BATCH,
        [
            streams.PlannedPart(0, [streams.Attempt(ATTEMPT, 1)]),
            streams.PlannedPart(3, [streams.Attempt(ATTEMPT, 2)]),
        ],
    )
    copy = streams.Copy(STREAM_UUID, 5, 8, [hole, gap, record], 12)
    call, answer = streams.encode(append), streams.encode(fetched)
    for one in (append, stage, commit, plan, copy):
        assert streams.decode_call(streams.encode(one)) == one
    assert streams.decode_answer(answer) == fetched
    payloads = [message.payload.decode() for message in opened]
    opening = Opening(STREAM_UUID)
    ours = opening.caller
    return {
        "stream-knock": frame(Kind.STREAM, 6, 5, streams.encode(opening.knock), 10_000, CALLER),
        "stream-door": frame(
            Kind.STREAM_REPLY, 3, RELAY_HOP + 3, streams.encode(opening.door), 0, STORE_SENDER
        ),
        "stream-open": frame(Kind.STREAM, 6, 6, streams.encode(opening.open), 10_000, CALLER),
        "stream-opened": frame(
            Kind.STREAM_REPLY, 3, RELAY_HOP + 4, streams.encode(opening.opened), 0, STORE_SENDER
        ),
        "stream-append": frame(Kind.STREAM, 6, 7, call, 10_000, CALLER, channel=ours, counter=0),
        "stream-stage": frame(
            Kind.STREAM, 6, 8, streams.encode(stage), 10_000, CALLER, channel=ours, counter=1
        ),
        "stream-commit": frame(
            Kind.STREAM, 6, 9, streams.encode(commit), 10_000, CALLER, channel=ours, counter=2
        ),
        "stream-plan": frame(
            Kind.STREAM, 6, 11, streams.encode(plan), 10_000, CALLER, channel=ours, counter=3
        ),
        "stream-copy": frame(
            Kind.STREAM, 6, 10, streams.encode(copy), 10_000, CALLER, name=COPY_UUID,
            channel=Opening(COPY_UUID).caller, counter=0,
        ),
        "stream-reply": frame(
            Kind.STREAM_REPLY, 3, RELAY_HOP + 5, answer, 0, STORE_SENDER, channel=opening.store, counter=3,
            record={"metadata": (prefix + end).hex(), "payloads": payloads},
        ),
    }  # fmt: skip


def _key_hash() -> bytes:
    return hmac.digest(KEY.key_hash_key, STREAM_UUID + RECORD_KEY, "sha256")


def base_key(sender_id: bytes) -> bytes:
    """Return a sender's base key (§7), from the primitives rather than from `Sealer`."""
    info = b"iris-seal-1" + sender_id
    return HKDFExpand(hashes.SHA256(), 32, info=info).derive(KEY.sealing_root)


def blocks() -> dict[tuple[str, str], str]:
    """Return (language, name) -> text of every block."""
    found: dict[tuple[str, str], str] = {}
    for name, body in CONTROLS.items():
        found["hex", name] = _hex(encode_control(body))
        found["json", name] = _json({"frame": body.FRAME.name, **readable(body)})
    for name, (frame, said) in {**sealed(), **tunnel(), **stream()}.items():
        found["hex", name] = _hex(frame)
        found["json", name] = _json(said)
    for name, payloads, headers in (
        ("bundle-one", [b"ping"], None),
        ("bundle-headers", [b"one", b"three"], [None, {"traceparent": "00-0af7"}]),
        ("bundle-refusal", [str(REFUSAL).encode()], [REFUSED]),
    ):
        found["hex", name] = _hex(encode_bundle(payloads, headers, False))
        found["json", name] = _json(
            {"payloads": [p.decode() for p in payloads], "headers": headers, "packed": False}
        )
    payloads, keys = [b"one", b"three"], [b"AA", b""]
    found["hex", "bundle-keys"] = _hex(encode_bundle(payloads, None, False, keys))
    found["json", "bundle-keys"] = _json(
        {"payloads": ["one", "three"], "keys": ["AA", ""], "headers": None, "packed": False}
    )
    found["hex", "bundle-method"] = _hex(encode_single(b"7", None, True, "place"))
    found["json", "bundle-method"] = _json(
        {"payload": "7", "headers": None, "packed": True, "method": "place"}
    )
    for name, said in derived().items():
        found["json", name] = _json(said)
    return found


def _hex(data: bytes) -> str:
    rows = [data[at : at + 32].hex(" ", -4) for at in range(0, len(data), 32)]
    return "\n".join(rows) + "\n"


def _json(value: Any) -> str:
    parts = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in value.items()]
    one_line = "{" + ", ".join(parts) + "}\n"
    return one_line if len(one_line) < 120 else "{" + ",\n ".join(parts) + "}\n"


def fill(document: str, found: dict[tuple[str, str], str]) -> str:
    """Return the document with the content of every block replaced by that in `found`."""

    def block(match: re.Match[str]) -> str:
        language, name = match[1], match[2]
        return f"```{language} name={name}\n{found[language, name]}```"

    return BLOCK.sub(block, document)


def main(write: Callable[[str], object] = DOCUMENT.write_text) -> None:
    """Replace the blocks of the document by those of the present code."""
    write(fill(DOCUMENT.read_text(), blocks()))


if __name__ == "__main__":
    main()
