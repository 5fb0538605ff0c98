"""docs/protocol.md is correct: its examples decode, encode, seal and open; its tables name every field and limit."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
from typing import Any, Final

import msgspec
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from protocol import make_examples
from protocol.make_examples import BLOCK, DOCUMENT, KEY, MEMBER_EPHEMERAL, OPENER_EPHEMERAL

from iris.config import ClientConfig
from iris.core import bundle, credit, guard, inbound, requests, tunnel, tunnels
from iris.core.aliases import MAX_ALIASES
from iris.core.bundle import (
    decode_bundle,
    decode_keyed,
    decode_single,
    encode_bundle,
    encode_single,
)
from iris.core.direct import DIRECT_AFTER_BYTES
from iris.core.faults import MAX_DETAILS_BYTES
from iris.core.placement import ranked
from iris.core.tunnel import prologue
from iris.crypto import channel, noise, sframe
from iris.crypto.keys import ClusterKey, IssuerKey, public_id, verify_proof
from iris.crypto.noise import Handshake
from iris.crypto.sframe import Opener, Sealer
from iris.crypto.tickets import MAX_TICKET_CHARACTERS, read_ticket
from iris.errors import OpenError
from iris.streams.partitions import Layout
from iris.wire import codec, frames, link_frames, names
from iris.wire.codec import decode_control, encode_control
from iris.wire.kinds import MAX_TROUBLE_NAMES, TUNNEL_KINDS, Cause, Kind, Refusal
from iris.wire.orders import ORDER_FRESH_US, SignedOrder, check_definition, decode_order
from relay.config import lan
from relay.core import calls, control, link, overdue, parking, parts, seen, site_routes
from relay.core import credit as relay_credit
from relay.core import troubles as relay_troubles
from relay.core.direct import MAX_PAIRS_OF_SESSION
from relay.core.limits import WEB_ALIASES, Limits
from relay.net import ports, sessions
from relay.store import channels
from relay.store.authority import Authority

TEXT: Final = DOCUMENT.read_text()
BLOCKS: Final = {(match[1], match[2]): match[3] for match in BLOCK.finditer(TEXT)}
HEX: Final = {name: bytes.fromhex(text) for (kind, name), text in BLOCKS.items() if kind == "hex"}
JSON: Final[dict[str, dict[str, Any]]] = {
    name: json.loads(text) for (kind, name), text in BLOCKS.items() if kind == "json"
}
FRAMES: Final = {name: data for name, data in HEX.items() if not name.startswith("bundle-")}
CONTROLS: Final = [name for name, data in FRAMES.items() if data[4] < Kind.REQUEST]
SEALED: Final = [name for name, said in JSON.items() if "counter" in said]
DATA: Final = [name for name in FRAMES if name not in CONTROLS]
NAMES: Final = {cls.FRAME: cls for cls in link_frames.CONTROLS}


def test_every_kind_of_frame_has_an_example() -> None:
    assert {Kind(data[4]) for data in FRAMES.values()} == set(Kind)


def test_the_file_is_what_its_generator_writes() -> None:
    assert make_examples.fill(TEXT, make_examples.blocks()) == TEXT


@pytest.mark.parametrize("name", FRAMES)
def test_the_length_field_counts_what_follows_it(name: str) -> None:
    assert int.from_bytes(FRAMES[name][:4], "little") == len(FRAMES[name]) - 4


# -- control frames --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_frame_decodes_to_its_fields_and_encodes_to_its_bytes(name: str) -> None:
    data, said = HEX[name], dict(JSON[name])
    body = decode_control(memoryview(data), 0, len(data))
    assert said.pop("frame") == body.FRAME.name
    assert make_examples.readable(body) == said
    assert encode_control(body) == data


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_frame_is_a_plain_messagepack_map(name: str) -> None:
    """Read it without our structs, as other languages do, and with an unknown field."""
    data = HEX[name]
    fields = msgspec.msgpack.decode(data[6:])
    said = {key: value for key, value in JSON[name].items() if key != "frame"}
    assert make_examples.readable(fields) == said
    longer = msgspec.msgpack.encode({"of a later minor": [1], **fields})
    frame = (2 + len(longer)).to_bytes(4, "little") + data[4:6] + longer
    original = decode_control(memoryview(data), 0, len(data))
    assert decode_control(memoryview(frame), 0, len(frame)) == original


def test_the_code_reads_a_partition_and_places_it_and_keys_as_the_example_says() -> None:
    said = JSON["stream-partitions"]
    order = decode_order(bytes.fromhex(said["order_3"]))
    check_definition(order.definition)
    assert make_examples.readable(msgspec.msgpack.decode(bytes.fromhex(said["order_3"]))) == said["partition_3"]  # fmt: skip
    assert (order.definition.parent, order.definition.partition) == (make_examples.STREAM_UUID, 3)
    uuids = (order.definition.parent.hex(), *said["partition_0"]["partitions"])
    layout = Layout("clicks", uuids, make_examples.KEY)
    assert {key: layout.of_key(key.encode()) for key in said["keys"]} == {key: partition for key, (_, partition) in said["keys"].items()}  # fmt: skip
    stores = said["stores"]
    for partition, scores in enumerate(said["scores"]):
        best = stores[scores.index(max(scores))]
        assert ranked("clicks", partition, stores)[0] == best


def test_the_key_of_a_topic_is_derived_as_written() -> None:
    said = JSON["topic-key"]
    info = b"iris-topic-key-1" + said["topic"].encode()
    secret = HKDF(hashes.SHA256(), 32, salt=None, info=info).derive(bytes.fromhex(said["secret"]))
    assert secret.hex() == said["topic_secret"]
    assert ClusterKey(secret).key_id.hex() == said["topic_key_id"]


def test_the_ticket_of_the_example_is_accepted_and_says_its_claims() -> None:
    said = JSON["ticket-claims"]
    public_key = bytes.fromhex(said["public_key"])
    ticket = read_ticket(
        JSON["hello-ticket"]["ticket"], find_key={public_id(public_key): public_key}.get, networks=[said["claims"]["aud"]],
        now_s=said["claims"]["iat"], max_life_s=lambda issuer: 900,
    )  # fmt: skip
    assert IssuerKey(bytes.fromhex(said["issuer_secret"])).public_key == public_key
    assert (ticket.subject, ticket.id, ticket.origin) == ("alice", "7f3a", "https://app.example")
    assert ticket.keys == {KEY.key_id}
    assert ticket.allow.allows("subscribe", "news.today.*")
    assert not ticket.allow.allows("subscribe", "users.*")


def test_a_store_accepts_the_countersigned_order_after_the_first() -> None:
    first = decode_control(memoryview(HEX["grant"]), 0, len(HEX["grant"]))
    assert isinstance(first, frames.Grant)
    created = SignedOrder(first.order, first.public_key, first.signature)
    said = {key: bytes.fromhex(text) for key, text in JSON["countersigned"].items()}
    key = ClusterKey(said.pop("key_secret"))
    order = decode_order(created.order)
    authority = Authority(order.store)
    charter = authority.create(
        authority.read([created], order.uuid),
        bytes.fromhex(JSON["stream"]["salt"]),
        order.issued_us,
    )
    changed = authority.change(charter, [SignedOrder(**said)], order.uuid, order.issued_us)
    assert set(changed.orders) == {KEY.key_id, key.key_id}
    assert f"at most {ORDER_FRESH_US // 1_000_000} s before or after" in TEXT


def _table(title: str) -> dict[str, list[str]]:
    """Return the rows of the first table under a heading that begins with `title`, by the name in the first column."""
    _, _, rest = TEXT.partition(f"#### {title}")
    assert rest, f"no section {title}"
    section = re.split(r"^#{2,4} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {}
    for first, *cells in rows:
        for field in re.findall(r"`(\w+)`", first.partition(" (")[0]):  # "`limit` (in `kinds`)"
            found[field] = [cell.strip() for cell in cells]
    return found


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind not in (Kind.PING, Kind.PONG)])
def test_the_table_of_a_control_frame_has_exactly_its_fields(kind: Kind) -> None:
    table = _table(f"{kind.name} `0x{kind:02x}`")
    fields = {field.name: field for field in msgspec.structs.fields(NAMES[kind])}
    documented = set(table) - {"kinds"} if kind == Kind.JOIN else set(table)
    expected = set(fields) - {"kinds"} if kind == Kind.JOIN else set(fields)
    nested = {"concurrency", "limit_bytes", "cancel"} if kind == Kind.JOIN else set()
    assert documented == expected | nested
    for name, (_, default, *_) in table.items():
        if kind == Kind.GAP or name in nested:
            continue
        required = fields[name].required
        assert required == (default == ""), f"{name}: default {default!r}"


def test_ping_and_pong_carry_an_id_and_a_clock() -> None:
    assert "#### PING `0x17` both ways, PONG `0x18` both ways" in TEXT
    assert set(_table("PING `0x17`")) == {"id", "mono_us"}


def test_the_table_of_data_frames_names_every_kind() -> None:
    rows = dict(re.findall(r"^\| `0x(4[0-9a-f])` \| (\w+) \|", TEXT, re.MULTILINE))
    assert {int(code, 16): name for code, name in rows.items()} == {
        int(kind): kind.name for kind in Kind if kind >= Kind.REQUEST
    }


@pytest.mark.parametrize(("enum", "section"), [(Cause, "5.3"), (Refusal, "10 ")])
def test_every_number_of_a_cause_or_refusal_is_explained(enum: type, section: str) -> None:
    _, _, rest = TEXT.partition(f"## {section}")
    part = rest.partition("\n## ")[0]
    numbers = {int(number) for number in re.findall(r"^\| (\d) \| ", part, re.MULTILINE)}
    assert numbers == {int(value) for value in enum}  # type: ignore[attr-defined]  # an IntEnum


def test_the_example_of_a_proof_holds() -> None:
    said, welcome = JSON["prove"], JSON["welcome"]
    key_id = verify_proof(
        bytes.fromhex(said["public_key"]), bytes.fromhex(said["signature"]),
        relay_id=bytes.fromhex(welcome["relay_id"]), session_id=bytes.fromhex(welcome["session_id"]),
        challenge=bytes.fromhex(welcome["challenge"]),
    )  # fmt: skip
    assert key_id.hex() == JSON["key"]["key_id"]
    message = b"iris-proof-1" + b"".join(
        bytes.fromhex(welcome[name]) for name in ("relay_id", "session_id", "challenge")
    )
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(said["public_key"]))
    public.verify(bytes.fromhex(said["signature"]), message + key_id)
    with pytest.raises(InvalidSignature):
        public.verify(bytes.fromhex(said["signature"]), message)


def test_the_example_of_a_proof_over_tls_holds_for_its_certificate_alone() -> None:
    said, welcome, connection = JSON["prove-bound"], JSON["welcome"], JSON["tls-channel"]
    channel = hashlib.sha256(bytes.fromhex(connection["certificate"])).digest()
    assert channel.hex() == connection["channel"]
    ids = {name: bytes.fromhex(welcome[name]) for name in ("relay_id", "session_id", "challenge")}
    public_key, signature = (bytes.fromhex(said[name]) for name in ("public_key", "signature"))
    key_id = verify_proof(public_key, signature, **ids, channel=channel)
    message = b"iris-proof-2" + b"".join(ids.values()) + key_id + channel
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    for other in (b"", bytes(32)):
        with pytest.raises(OpenError):
            verify_proof(public_key, signature, **ids, channel=other)


# -- keys and seals --------------------------------------------------------------------------------------------


def _hmac(key: bytes, data: bytes, algorithm: hashes.HashAlgorithm) -> bytes:
    mac = HMAC(key, algorithm)
    mac.update(data)
    return mac.finalize()


def _expand(prk: bytes, info: bytes, size: int, algorithm: hashes.HashAlgorithm) -> bytes:
    """Return HKDF-Expand of RFC 5869."""
    out = block = b""
    for number in itertools.count(1):
        if len(out) >= size:
            break
        block = _hmac(prk, block + info + bytes([number]), algorithm)
        out += block
    return out[:size]


def test_the_keys_follow_from_the_secret_as_written() -> None:
    said = JSON["key"]
    prk = _hmac(bytes(32), bytes.fromhex(said["secret"]), hashes.SHA256())
    for name, info in (
        ("sealing_root", b"iris-seal-root-1"),
        ("tunnel_psk", b"iris-tunnel-psk-1"),
        ("key_hash_key", b"iris-key-hash-1"),
    ):
        assert _expand(prk, info, 32, hashes.SHA256()).hex() == said[name]
        assert f"`{info.decode()}`" in TEXT
    digest = hashes.Hash(hashes.SHA256())
    digest.update(bytes.fromhex(said["public_key"]))
    assert digest.finalize()[:16].hex() == said["key_id"] == KEY.key_id.hex()


@pytest.mark.parametrize("name", ["caller", "member"])
def test_a_senders_keys_follow_as_written(name: str) -> None:
    said = JSON["sealing"][name]
    root = bytes.fromhex(JSON["key"]["sealing_root"])
    base_key = _expand(root, b"iris-seal-1" + bytes.fromhex(said["sender_id"]), 32, hashes.SHA256())
    assert base_key.hex() == said["base_key"]
    assert said["kid"] == said["sender_id"][:16]
    secret = _hmac(bytes(64), base_key, hashes.SHA512())
    suffix = bytes.fromhex(said["kid"]) + b"\0\5"
    for label, size, field in ((b"key ", 32, "key"), (b"salt ", 12, "salt")):
        info = b"SFrame 1.0 Secret " + label + suffix
        assert _expand(secret, info, size, hashes.SHA512()).hex() == said[field]


def _fields(data: bytes) -> dict[str, int]:
    """Return the hop and end fields of a data frame, at the offsets of the document."""
    layout = {"alias": (6, 4), "hop": (10, 8), "deadline": (18, 8)}
    if Kind(data[4]) not in TUNNEL_KINDS:
        layout |= {"sent": (26, 8), "timeout": (34, 4), "count": (38, 4), "first": (42, 8)}
    return {"flags": data[5]} | {
        name: int.from_bytes(data[at : at + size], "little") for name, (at, size) in layout.items()
    }


@pytest.mark.parametrize("name", DATA)
def test_the_fields_of_a_data_frame_are_where_the_document_says(name: str) -> None:
    data, said = HEX[name], JSON[name]
    assert Kind[said["frame"]] == data[4]
    assert _fields(data) == {field: said[field] for field in _fields(data)}


def _metadata(said: dict[str, Any]) -> bytes:
    """Encode metadata as §7 describes, without the codec."""
    name: bytes = said["declared"]["name"].encode()
    data = bytes((1, Kind[said["frame"]])) + len(name).to_bytes(2, "little") + name
    data += KEY.key_id + bytes.fromhex(said["declared"]["sender_id"])
    for field, size in (("sent", 8), ("timeout", 4), ("count", 4), ("first", 8)):
        data += said[field].to_bytes(size, "little")
    if "answers" in said:
        data += bytes.fromhex(said["answers"]["sender_id"])
        data += said["answers"]["counter"].to_bytes(8, "little")
    return data


@pytest.mark.parametrize("name", SEALED)
def test_a_sealed_body_is_sealed_and_opened_as_written(name: str) -> None:
    data, said = HEX[name], JSON[name]
    metadata = _metadata(said)
    assert metadata.hex() == said["metadata"]
    sender_id = bytes.fromhex(said["declared"]["sender_id"])
    counter, plain = Opener(KEY, sender_id).open(data[50:], metadata)
    assert counter == said["counter"]
    payloads, headers, packed = decode_bundle(plain)
    assert [payload.decode() for payload in payloads] == said["payloads"]
    assert headers == said.get("headers")
    assert not packed
    sealer = Sealer(KEY, sender_id)
    for _ in range(counter):
        sealer.seal(b"", b"")
    assert sealer.seal(encode_bundle(payloads, headers, packed), metadata) == data[50:]


@pytest.mark.parametrize("name", SEALED)
def test_a_sealed_body_is_aes_gcm_of_the_written_keys(name: str) -> None:
    """Computed from RFC 9605 only: one byte of header, 8 bytes of KID, a counter below 8."""
    data, said = HEX[name], JSON[name]
    sender = next(
        s for s in JSON["sealing"].values() if s["sender_id"] == said["declared"]["sender_id"]
    )
    header = bytes((0xF0 | said["counter"],)) + bytes.fromhex(sender["kid"])
    body = data[50:]
    assert body.startswith(header)
    nonce = (int(sender["salt"], 16) ^ said["counter"]).to_bytes(12, "big")
    cipher = AESGCM(bytes.fromhex(sender["key"]))
    plain = cipher.decrypt(nonce, body[9:], header + _metadata(said))
    assert plain == encode_bundle(
        [p.encode() for p in said["payloads"]], said.get("headers"), False
    )


@pytest.mark.parametrize("name", SEALED)
def test_a_sealed_body_opens_under_no_other_metadata(name: str) -> None:
    data, said = HEX[name], JSON[name]
    opener = Opener(KEY, bytes.fromhex(said["declared"]["sender_id"]))
    for change in ({"first": said["first"] + 1}, {"sent": said["sent"] + 1}, {"timeout": 7}):
        with pytest.raises(OpenError):
            opener.open(data[50:], _metadata({**said, **change}))


@pytest.mark.parametrize("name", ["calls", "answers"])
def test_each_body_of_a_run_is_sealed_as_if_it_were_sent_alone(name: str) -> None:
    data, said = HEX[name], JSON[name]
    each = said["each"]
    at = 50
    if "hops" in said:
        assert data[at : at + 8 * len(each)] == struct.pack(f"<{len(each)}Q", *said["hops"])
        at += 8 * len(each)
    sizes = struct.unpack_from(f"<{len(each)}I", data, at)
    at += 4 * len(each)
    opener = Opener(KEY, bytes.fromhex(said["declared"]["sender_id"]))
    for size, one in zip(sizes, each, strict=True):
        kind = "REPLY" if "answers" in one else "REQUEST"
        metadata = _metadata({**said, **one, "frame": kind, "count": 1})
        assert metadata.hex() == one["metadata"]
        counter, plain = opener.open(data[at : at + size], metadata)
        assert counter == one["counter"]
        assert [payload.decode() for payload in decode_bundle(plain)[0]] == one["payloads"]
        at += size
    assert at == len(data)


def test_an_answer_is_bound_to_the_example_of_its_question() -> None:
    for answer, question in (("reply", "request"), ("fault", "request"), ("answer", "survey")):
        bound = JSON[answer]["answers"]
        assert bound["counter"] == JSON[question]["counter"]
        assert bound["sender_id"] == JSON[question]["declared"]["sender_id"]


def test_a_refused_frame_is_the_request_with_other_flags_and_hop_id() -> None:
    request, refused = HEX["request"], HEX["refused"]
    assert refused[26:] == request[26:]
    assert refused[:5] == request[:5]
    assert refused[5] == 0x02 | 1 << 4
    assert refused[10:18] != request[10:18]


def test_a_bundle_has_its_keys_between_payloads_and_headers() -> None:
    data, said = HEX["bundle-keys"], JSON["bundle-keys"]
    payloads, keys, headers, packed = decode_keyed(data)
    assert keys is not None
    assert {
        "payloads": [payload.decode() for payload in payloads], "keys": [key.decode() for key in keys], "headers": headers,
        "packed": packed,
    } == said  # fmt: skip
    assert encode_bundle(payloads, headers, packed, keys) == data
    assert decode_bundle(data) == (payloads, headers, packed)


def test_a_bundle_of_a_call_ends_with_its_method() -> None:
    data, said = HEX["bundle-method"], JSON["bundle-method"]
    payload, headers, packed, method = decode_single(data)
    assert {
        "payload": payload.decode(), "headers": headers, "packed": packed, "method": method,
    } == said  # fmt: skip
    assert encode_single(payload, headers, packed, method) == data
    assert int.from_bytes(data[4:8], "little") == 16 | 2


@pytest.mark.parametrize("name", ["bundle-one", "bundle-headers", "bundle-refusal"])
def test_a_bundle_has_the_columns_as_written(name: str) -> None:
    data, said = HEX[name], JSON[name]
    payloads, headers, packed = decode_bundle(data)
    assert {
        "payloads": [payload.decode() for payload in payloads], "headers": headers, "packed": packed,
    } == said  # fmt: skip
    assert encode_bundle(payloads, headers, packed) == data
    count, flags = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4))
    assert (count, flags) == (len(payloads), 0 if headers is None else 1)
    offsets = [int.from_bytes(data[8 + 4 * i : 12 + 4 * i], "little") for i in range(count + 1)]
    start = 8 + 4 * (count + 1)
    assert [data[start + a : start + b] for a, b in itertools.pairwise(offsets)] == payloads
    if headers is not None:
        column = start + offsets[-1]
        column += -column % 8
        ends = [
            int.from_bytes(data[column + 4 * i : column + 4 * i + 4], "little")
            for i in range(count + 1)
        ]
        column += 4 * (count + 1)
        entries = [data[column + a : column + b] for a, b in itertools.pairwise(ends)]
        assert [msgspec.msgpack.decode(entry) if entry else None for entry in entries] == headers
        assert column + ends[-1] == len(data)


# -- tunnels ---------------------------------------------------------------------------------------------------


def test_the_tunnel_is_opened_and_used_as_written() -> None:
    said = JSON["tunnel"]
    began = bytes.fromhex(said["prologue"])
    tunnel_id = bytes.fromhex(said["tunnel_id"])
    assert began == b"iris-tunnel-1" + b"\x48" + b"databases" + KEY.key_id + tunnel_id
    assert began == prologue("databases", KEY.key_id, tunnel_id)
    assert JSON["tunnel-open"]["declared"]["sender_id"] == said["tunnel_id"]
    psk = bytes.fromhex(JSON["key"]["tunnel_psk"])
    assert OPENER_EPHEMERAL.hex() == said["opener_ephemeral_secret"]
    assert MEMBER_EPHEMERAL.hex() == said["member_ephemeral_secret"]
    opener = Handshake(True, began, psk, OPENER_EPHEMERAL)
    member = Handshake(False, began, psk, MEMBER_EPHEMERAL)
    assert opener.write_message() == HEX["tunnel-open"][50:]
    assert member.read_message(HEX["tunnel-open"][50:]) == b""
    assert member.write_message() == HEX["tunnel-accept"][26:]
    assert opener.read_message(HEX["tunnel-accept"][26:]) == b""
    (to_member, from_member), (to_opener, from_opener) = opener.split(), member.split()
    for name, send, receive in (
        ("tunnel-data", to_member, from_opener),
        ("tunnel-data-back", to_opener, from_member),
    ):
        plain = bytes.fromhex(JSON[name]["plain"])
        assert send.encrypt(plain) == HEX[name][26:]
        assert receive.decrypt(HEX[name][26:]) == plain
        assert _items(plain) == JSON[name]["items"]


def _items(plain: bytes) -> list[list[Any]]:
    """Decode a record's items as the table of §11 describes."""
    found: list[list[Any]] = []
    while plain:
        kind, size = plain[0], int.from_bytes(plain[1:5], "little")
        data, plain = plain[5 : 5 + size], plain[5 + size :]
        match kind:
            case 0x01:
                found.append(["headers", msgspec.msgpack.decode(data)])
            case 0x02 | 0x12 | 0x22 | 0x32:
                names = {0x02: "part", 0x12: "first", 0x22: "last", 0x32: "message"}
                found.append([names[kind], data.decode()])
            case 0x03:
                found.append(["credit", int.from_bytes(data, "little")])
            case _:
                found.append([{4: "finish", 5: "close", 6: "abort"}[kind]])
    return found


# -- calls of stores ---------------------------------------------------------------------------------------------

CODED: Final = [name for name, said in JSON.items() if "code" in said and "frame" in said]


def test_a_channel_is_opened_as_written() -> None:
    """Check, from §19.9 only, what both ends sign and how the keys are derived."""
    knock, door, opening, opened = (
        JSON[f"stream-{name}"]["body"] for name in ("knock", "door", "open", "opened")
    )
    said, store = JSON["stream-channel"], bytes.fromhex(JSON["stream"]["store_public_key"])
    signed = b"".join(
        bytes.fromhex(part)
        for part in (door["store"], door["uuid"], KEY.key_id.hex(), knock["nonce"], door["nonce"], opening["share"])
    )  # fmt: skip
    assert (opening["nonce"], opening["door"]) == (knock["nonce"], door["nonce"])
    assert bytes.fromhex(door["store"]) == store
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(opening["public_key"]))
    public.verify(bytes.fromhex(opening["signature"]), b"iris-stream-caller-1" + signed)
    whole = signed + bytes.fromhex(opened["share"]) + opened["channel"].to_bytes(8, "little")
    assert whole.hex() == said["transcript"]
    Ed25519PublicKey.from_public_bytes(store).verify(
        bytes.fromhex(opened["signature"]), b"iris-stream-store-1" + whole
    )
    for secret, share in (
        ("caller_share_secret", opened["share"]),
        ("store_share_secret", opening["share"]),
    ):
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(said[secret]))
        both = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(share)))
        assert both.hex() == said["x25519"]
        salt = hashes.Hash(hashes.SHA256())
        salt.update(whole)
        key = _hmac(salt.finalize(), both, hashes.SHA256())
        names = ("call_code_key", "call_hash_key", "answer_code_key", "answer_hash_key")
        keys = "".join(said[name] for name in names)
        assert _expand(key, b"iris-stream-channel-1", 128, hashes.SHA256()).hex() == keys


@pytest.mark.parametrize("name", CODED)
def test_the_code_of_a_call_is_as_written(name: str) -> None:
    if name == "stream-copy":  # to another log, by another channel
        return
    data, said = HEX[name], JSON[name]
    assert data[50] == 0xC1
    assert int.from_bytes(data[51:59], "little") == said["channel"]
    assert int.from_bytes(data[59:67], "little") == said["call_counter"]
    assert data[67:99].hex() == said["code"]
    body = data[99:]
    assert len(body) <= 1024
    which = "answer_code_key" if said["frame"] == "STREAM_REPLY" else "call_code_key"
    covered = data[50:67] + data[26:50] + len(body).to_bytes(4, "little") + body
    code = _hmac(bytes.fromhex(JSON["stream-channel"][which]), covered, hashes.SHA256())
    assert code.hex() == said["code"]


def test_a_tunnel_end_is_one_byte() -> None:
    assert HEX["tunnel-end"][26:] == bytes((JSON["tunnel-end"]["cause"],))


# -- limits ----------------------------------------------------------------------------------------------------

_CONFIG: Final = lan(DOCUMENT)
LIMITS: Final = {
    "message, default": codec.DEFAULT_MESSAGE_LIMIT,
    "message, least and most": (codec.MIN_MESSAGE_LIMIT, codec.MAX_MESSAGE_LIMIT),
    "frame, beyond its message": codec.FRAME_OVERHEAD,
    "frame before the session's first proof": sessions.FIRST_LIMIT_BYTES,
    "WebSocket message before HELLO is accepted": sessions.FIRST_LIMIT_BYTES + codec.LENGTH_BYTES,
    "ticket": MAX_TICKET_CHARACTERS,
    "control frame's map": codec.MAX_CONTROL_BYTES,
    "control frame with a relay's list (MEMBERSHIP, ROSTER, DONE, REPORT)": codec.MAX_REPORT_BYTES,
    "headers of a message": bundle.MAX_HEADERS_BYTES,
    "details of a refusal, before base64": MAX_DETAILS_BYTES,
    "name of a method, code of a refusal": names.MAX_METHOD_BYTES,
    "bundle of more than one message, counted as in §8": bundle.CUT_BYTES,
    "aliases per direction": (MAX_ALIASES, _CONFIG.max_aliases),
    "aliases per direction of a session over WebSocket": WEB_ALIASES,
    "aliases of all sessions of a relay, from session to relay": Limits().all_aliases,
    "keys proven per session at a time": _CONFIG.max_keys_per_session,
    "keys proven in all sessions of a relay": Limits().all_keys,
    "key ids per frame": frames.MAX_KEY_IDS,
    "members per session": _CONFIG.max_joins_per_session,
    "subscriptions per session, in tokens of the filter times key ids": _CONFIG.max_subscriptions_per_session,
    "queue groups per session, and per relay under one key": control.MAX_GROUPS,
    "queue groups per site under one key, as other sites know them": site_routes.MAX_SITE_GROUPS,
    "names of queue groups in the aliases of one connection": (
        parts.MAX_GROUP_BYTES,
        inbound.MAX_GROUP_BYTES,
    ),
    "subscriptions in queue groups that a session leaves at a time": parts.MAX_LEAVING,
    "addresses whose last members a relay remembers, each for 600 s": (seen.MAX_SEEN,),
    "watches per session": control.MAX_WATCHES,
    "members of all sessions of a relay, each counted once per key id": (
        _CONFIG.max_members,
        Limits().all_members,
    ),
    "subscriptions of all sessions of a relay, counted as those of a session": (
        _CONFIG.max_subscriptions,
        Limits().all_subscriptions,
    ),
    "watches of all sessions of a relay, each counted once per key id": Limits().all_watches,
    "calls of all sessions of a relay that wait for another relay to come back": parking.PARKED_BYTES,
    "members (once per key id), and topics, that a relay holds of another relay": link.MAX_COPY,
    "addresses, and topics, that a relay holds of another site": site_routes.MAX_WANTED,
    "calls in flight over a link or WAN connection": _CONFIG.max_pending_per_session,
    "calls in flight at one session": calls.MAX_IN_FLIGHT,
    "longest wait for a call without a deadline": overdue.LIFE_US // 1_000_000,
    "calls of one session that wait for an answer": (
        _CONFIG.max_pending_per_session,
        requests.MAX_PENDING,
    ),
    "calls of all sessions of a relay that wait for an answer, beyond the first 64 of each": Limits().all_pending,
    "calls in flight at all sessions of a relay, beyond the first 64 at each": Limits().all_pending,
    "members tried per call": calls.MAX_ATTEMPTS,
    "sessions per relay": _CONFIG.max_sessions,
    "replay window": sframe.WINDOW_COUNTERS,
    "senders with a replay window at a receiver": guard.MAX_SENDERS,
    "sequences at a receiver": guard.MAX_SEQUENCES,
    "tunnel record": noise.MAX_MESSAGE_BYTES,
    "tunnel window, first": tunnel.FIRST_WINDOW,
    "tunnel window, most": tunnel.MAX_WINDOW,
    "half-open tunnels at a member": tunnels.MAX_HALF_OPEN,
    "tunnels of a relay with a socket pair": (_CONFIG.max_direct_tunnels, Limits().direct),
    "ends of socket pairs per session": MAX_PAIRS_OF_SESSION,
    "window of a subscription that publishers wait for, first": credit.FIRST_WINDOW,
    "credits of one publisher's topic at a relay": relay_credit.MAX_CREDITS,
    "aliases of one publisher's topic that share a credit": relay_credit.MAX_FLOWS,
    "topics of one session that have no credit": relay_credit.MAX_WAITING,
    "causes in TROUBLE that a relay keeps, each of one session": relay_troubles.MAX_ROWS,
    "names of one cause in TROUBLE, and at a relay for one session": MAX_TROUBLE_NAMES,
    "name in TROUBLE": frames.MAX_TROUBLE_NAME,
    "programs with sums of their own at a relay, from TROUBLE": relay_troubles.MAX_PROGRAMS,
    "records that a tunnel carries before it asks for a pair": DIRECT_AFTER_BYTES,
}


def test_the_table_of_limits_is_what_the_code_holds_to() -> None:
    _, _, rest = TEXT.partition("## 13 Limits")
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", rest.partition("\n## ")[0], re.MULTILINE)
    written = {name: tuple(_numbers(value)) for name, value in rows if _numbers(value)}
    expected = {
        name: tuple(dict.fromkeys(value)) if isinstance(value, tuple) else (value,)
        for name, value in LIMITS.items()
    }
    assert written == expected


def _numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def test_the_times_and_bounds_in_the_text_are_those_of_the_code() -> None:
    prose = " ".join(TEXT.split())  # lines of prose may break anywhere
    for wanted, value in (
        ("within the relay's frame timeout (30 s)", _CONFIG.frame_timeout_s == 30),
        ("within the hello timeout (5 s)", _CONFIG.hello_timeout_s == 5),
        ("`sent` is 600 s or more", ClientConfig().freshness_s == 600),
        ("within 5 s, and holds at most 1,024 such", tunnels.HALF_OPEN_US == 5_000_000),
        ("beyond the queue for it (64 MiB)", _CONFIG.port_queue_bytes == 64 << 20),
        ("beyond 1 MiB of them", sessions.CONTROL_PAUSE_BYTES == 1 << 20),
        ("beyond 64 MiB it ends the session", ports.CONTROL_LIMIT_BYTES == 64 << 20),
        ("after 2^32 seals", sframe.SEALS_PER_SENDER == 1 << 32),
        ("and 8 bytes; one message alone", bundle.MESSAGE_BYTES == 8),
        (
            "1 to 255 bytes of UTF-8, at most 32 tokens",
            (names.MAX_NAME_BYTES, names.MAX_TOKENS) == (255, 32),
        ),
        ("the last 2^17 counters", sframe.WINDOW_COUNTERS == 1 << 17),
        (
            "of one log and in all | 4,096 and 16,384;",
            (channels.MAX_OF_LOG, channels.MAX_CHANNELS) == (4096, 16_384),
        ),
        ("at most 30 seconds old", channels.DOOR_US == 30_000_000),
        ("below the window of 16,384", channel.WINDOW_CALLS == 16_384),
        ("A map of more than 1,024 bytes", channel.LONG_BYTES == 1024),
    ):
        assert wanted in prose
        assert value, wanted


def test_every_link_within_the_document_leads_somewhere() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors
