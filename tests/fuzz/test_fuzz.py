"""Random bytes are accepted, or refused with the one documented error. Few examples, the same in each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from fuzz.targets import CLUSTER, DECLARED, KEY, NOW_US, TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iris.wire import streams
from iris.wire.codec import HOP, RELAY_HOP
from iris.wire.kinds import FLAG_REFUSED, SERVED_KINDS, TROUBLES, Kind
from iris.wire.link_frames import CONTROLS

CORPUS = Path(__file__).parent / "corpus"
pytestmark = pytest.mark.timeout(120)
few = settings(max_examples=150, suppress_health_check=list(HealthCheck))

# -- frames that are nearly right ------------------------------------------------------------------------------

ids = st.one_of(st.integers(0, 4), st.integers(0, (1 << 63) - 1))
names = st.sampled_from([CLUSTER, "a", "a.b", "*", ">", "", "a..b", "x" * 256])
key_ids = st.sampled_from([KEY.key_id, bytes(16), b""])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "id": ids,
    "name": names,
    "filter": names,
    "group": st.sampled_from(["", "g", "h.i", "*"]),
    "key_id": key_ids,
    "key_ids": st.lists(key_ids, max_size=3),
    "sender_id": st.binary(min_size=15, max_size=16),
    "member": st.integers(0, 8),
    "hop": st.one_of(st.integers(0, 8), st.integers(RELAY_HOP, RELAY_HOP + 8)),
    "alias": st.one_of(st.integers(0, 12), st.integers(0, 1 << 17)),
    "kind": st.one_of(st.sampled_from(list(Kind)), st.integers(-1, 300)),
    "kinds": st.dictionaries(
        st.one_of(st.sampled_from(sorted(SERVED_KINDS)), st.integers(0, 255)),
        st.fixed_dictionaries(
            {"concurrency": st.integers(0, 3), "limit_bytes": st.integers(0, 1 << 41)}
        ),
        max_size=3,
    ),
    "messages": st.integers(0, 3),
    "serial": st.integers(0, 3),
    "base": st.integers(0, 4),
    "version": st.integers(0, 4),
    "reset": st.booleans(),
    "more": st.booleans(),
    "joined": st.lists(
        st.tuples(
            st.integers(0, 4),
            names,
            st.lists(key_ids, max_size=2),
            st.dictionaries(st.sampled_from(sorted(SERVED_KINDS)), st.integers(0, 3), max_size=2),
            st.text(max_size=3),
            st.text(max_size=3),
            st.sampled_from([0, 1, 0xFFFF, 0x10000]),
        ),
        max_size=3,
    ),
    "methods": st.sampled_from([0, 1, 0xFFFF, 0x10000, -1]),
    "left": st.lists(st.integers(0, 4), max_size=2),
    "topics": st.lists(
        st.tuples(names, key_ids, st.sampled_from(["", "g", "*"]), st.integers(0, 2)), max_size=3
    ),
    "loads": st.lists(
        st.tuples(st.sampled_from(list(Kind)), names, key_ids, st.integers(0, 9)), max_size=3
    ),
    "peers": st.lists(st.tuples(key_ids, st.lists(st.text(max_size=12), max_size=2)), max_size=2),
    "hop_class": st.sampled_from([0, 1, 1, 1, 2]),
    "mono_us": ids,
    "heard_us": ids,
    "held_us": ids,
    "hops": st.lists(st.integers(0, 8), max_size=3),
    "bytes": ids,
    "members": st.lists(st.text(max_size=3), max_size=3),
    "lost": st.lists(st.text(max_size=3), max_size=3),
    "watch": st.booleans(),
    "plain": st.booleans(),
    "groups": st.lists(st.sampled_from(["", "g", "h"]), max_size=3),
    "count": ids,
    "first": ids,
    "cause": st.one_of(st.integers(0, 8), st.text(max_size=3)),
    "detail": st.sampled_from(["", "stale", "x"]),
    "entries": st.lists(
        st.tuples(
            st.sampled_from([*TROUBLES, "x"]),
            st.integers(0, 9),
            st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=3),
        ),
        max_size=3,
    ),
    "others": st.dictionaries(st.text(max_size=9), st.integers(-1, 3), max_size=2),
}
anything = st.one_of(st.none(), st.booleans(), ids, st.floats(), st.binary(max_size=4), st.text(max_size=4))  # fmt: skip


@st.composite
def control_frames(draw: st.DrawFn) -> bytes:
    """Draw a control frame whose fields mostly have the right types."""
    struct = draw(st.sampled_from(CONTROLS))
    body: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if draw(st.integers(0, 9)):
            body[field.encode_name] = draw(VALUES.get(field.name, anything))
    data = msgspec.msgpack.encode(body)
    return _frame(bytes((struct.FRAME, 0)) + data)


@st.composite
def data_frames(draw: st.DrawFn) -> bytes:
    """Draw a data frame with plausible fields."""
    index = draw(st.integers(0, len(DECLARED) + 1))
    kind = DECLARED[index] if index < len(DECLARED) else draw(st.sampled_from(list(Kind)))
    alias = index if draw(st.integers(0, 9)) else draw(VALUES["alias"])
    flags = draw(
        st.sampled_from([0, 0, 0, 1, *(FLAG_REFUSED | reason << 4 for reason in range(8))])
    )
    deadline = draw(st.sampled_from([0, 0, 0, 1, 1 << 62, -1]))
    count = draw(st.sampled_from([1, 1, 1, 2, 0, (1 << 32) - 1])).to_bytes(4, "little")
    end = (
        draw(st.binary(min_size=12, max_size=12)) + count + draw(st.binary(min_size=8, max_size=8))
    )
    body = draw(st.one_of(st.binary(max_size=8), st.binary(min_size=48, max_size=60)))
    hop = draw(VALUES["hop"])
    whole = HOP.pack(0, kind, flags, alias & 0xFFFFFFFF, hop, deadline) + end + body
    cut = draw(st.sampled_from([None, None, None, None, 3, 26, 40]))
    return _frame(whole[4:cut])


def _frame(body: bytes) -> bytes:
    """Return a frame as `targets.split` reads it: with its length, which is truncated to 16 bits there."""
    return len(body).to_bytes(4, "little") + body


nearly_right = st.lists(st.one_of(control_frames(), data_frames()), max_size=25).map(b"".join)
byte = st.integers(0, 255).map(lambda value: bytes((value,)))


@st.composite
def tunnel_items(draw: st.DrawFn) -> bytes:
    """Draw items of a tunnel record, mostly with true lengths."""
    parts = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.one_of(st.sampled_from([1, 2, 3, 4, 5, 6, 0x12, 0x22, 0x32]), st.integers(0, 255)))  # fmt: skip
        body = draw(st.sampled_from([b"", b"\x80", b"\1\0\0\0", b"\xff" * 4, bytes(5000)]))
        size = len(body) if draw(st.integers(0, 9)) else draw(st.integers(0, 1 << 32 - 1))
        parts.append(bytes((kind,)) + size.to_bytes(4, "little") + body)
    return b"".join(parts)


@st.composite
def key_files(draw: st.DrawFn) -> bytes:
    """Draw text that is almost a key file."""
    header = st.sampled_from(
        ["[default]", '[clusters."db"]', '[topics."a.b"]', "[network]", '[topics."a b"]', "[clusters]", "x = 1"]
    )  # fmt: skip
    secret = st.sampled_from(
        [KEY.reveal(), KEY.reveal()[:-1], "é" * 48, "A" * 48, KEY.reveal()[:-1] + "A"]
    )
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        lines += [draw(header), f"keys = {draw(st.lists(secret, max_size=2))}"]
    return "\n".join(lines).encode()


@st.composite
def pieces(draw: st.DrawFn) -> bytes:
    """Draw pieces of a few frames under a few aliases, mostly in order."""
    parts = []
    for _ in range(draw(st.integers(1, 30))):
        more = draw(st.sampled_from([1, 1, 0]))
        kind = draw(st.sampled_from([Kind.PUBLISH, Kind.PUBLISH, Kind.REQUEST, Kind.TUNNEL_DATA]))
        head = HOP.pack(0, kind, more, draw(st.integers(0, 2)), 0, 0)[4:]
        parts.append(_frame(head + bytes(24) + bytes(draw(st.sampled_from([0, 1, 50, 60_000])))))
    return b"".join(parts)


BODIES: dict[str, st.SearchStrategy[Any]] = {
    "orders": st.lists(st.tuples(st.binary(max_size=40), st.binary(min_size=31, max_size=32), st.binary(min_size=64, max_size=64)), max_size=2),
    "records": st.lists(st.tuples(ids, st.binary(min_size=24, max_size=24), st.binary(max_size=30)), max_size=2),
    "items": st.lists(st.one_of(
        st.tuples(st.just(2), ids, st.one_of(st.none(), ids), st.text(max_size=5), ids), st.tuples(st.just(3), ids, ids, st.integers(0, 300)),
    ), max_size=3),
    "outcomes": st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), ids)), max_size=3),
    "uuid": st.binary(min_size=15, max_size=16), "worker": st.binary(min_size=15, max_size=16), "sender_id": st.binary(min_size=15, max_size=16),
    "done": st.lists(st.tuples(ids, ids), max_size=3), "consumer": names, "start": ids, "next": ids, "oldest": ids, "high_water": ids,
    "max_bytes": ids, "max_messages": ids, "prefetch": ids, "lease": st.one_of(st.none(), st.binary(min_size=15, max_size=16)), "wait_ms": st.integers(0, 70_000), "time_us": ids,
}  # fmt: skip


@st.composite
def stream_bodies(draw: st.DrawFn, union: Any) -> bytes:
    """Draw the body of a call or an answer whose fields mostly have the right types."""
    struct = draw(st.sampled_from(get_args(union)))
    body: dict[str, Any] = {"op": struct.__struct_config__.tag}
    for field in msgspec.structs.fields(struct):
        if draw(st.integers(0, 9)):
            body[field.encode_name] = draw(BODIES.get(field.name, anything))
    return msgspec.msgpack.encode(body)


@st.composite
def iris1_said(draw: st.DrawFn) -> bytes:
    """Draw bytes that are almost valid for a client of the first Iris."""
    number = st.one_of(
        st.integers(0, 9),
        st.sampled_from([127, 128, 65_536, 100_001, 1 << 30, (1 << 64) - 1, 1 << 64]),
    )
    name = st.sampled_from(
        [b"c", b"", b"a b", b"a..b", b"\xff", b"x" * 256, b"%", b"eu:db", b"." * 40]
    )
    body = st.sampled_from([b"", b"x", bytes(999), bytes(1001), bytes(65_536), bytes(65_537)])
    fields = {
        "v": number.map(_varint),
        "n": name.map(_blob),
        "p": body.map(_blob),
        "b": st.sampled_from([b"\0", b"\1", b"\2"]),
    }
    layouts = {
        3: "np",
        4: "vnpv",
        5: "vbp",
        6: "n",
        7: "n",
        8: "np",
        9: "vnv",
        10: "vv",
        11: "vv",
        12: "vvp",
        13: "v",
        2: "",
        0: "nnn",
        99: "",
    }
    parts = [
        draw(
            st.sampled_from(
                [b"", b"\x00\x11iris-client-magic\x0bv1.0-draft2\x01c"] * 1
                + [b"\x00\x11iris-client-magic\x0bv1.0-draft2\x01c"] * 4
            )
        )
    ]
    for _ in range(draw(st.integers(0, 20))):
        op = draw(st.sampled_from([*layouts, *[4, 5, 9, 10, 12, 12, 12] * 3]))
        parts.append(bytes([op]) + b"".join(draw(fields[kind]) for kind in layouts[op]))
    return bytes([draw(st.sampled_from([0, 6, 255]))]) + b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def _blob(data: bytes) -> bytes:
    return _varint(len(data)) + data


@st.composite
def claims(draw: st.DrawFn) -> bytes:
    """Draw the claims of a ticket, most of them right."""
    said: dict[str, Any] = {
        "aud": "00" * 16, "sub": "alice", "jti": "1", "iat": NOW_US // 1_000_000, "exp": NOW_US // 1_000_000 + 60, "allow": {"read": ["a.>"]},
        "keys": [KEY.key_id.hex()], "origin": "https://app.example", "nbf": 0,
    }  # fmt: skip
    wrong = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just("x" * 300), st.lists(st.text(max_size=3), max_size=2),
        st.dictionaries(st.sampled_from(["read", "fly", ""]), st.lists(names, max_size=2), max_size=2),
    )  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(said)), max_size=2)):
        said[name] = draw(wrong)
    for name in draw(st.lists(st.sampled_from(sorted(said)), max_size=1)):
        del said[name]
    return json.dumps(said).encode()


INPUTS: dict[str, st.SearchStrategy[bytes]] = {
    "control": st.one_of(
        st.binary(max_size=200), st.tuples(byte, st.binary(max_size=60)).map(lambda p: p[0] + b"\0" + p[1]),
        control_frames().map(lambda frame: frame[4:]),
    ),
    "reader": st.tuples(st.binary(min_size=8, max_size=8), st.one_of(st.binary(max_size=500), nearly_right, st.lists(st.integers(0, 20_000).map(lambda n: _frame(bytes(n))), max_size=6).map(b"".join))).map(b"".join),
    "bundle": st.one_of(
        st.binary(max_size=200),
        st.tuples(st.sampled_from([b"\1", b"\2", b"\3"]), st.just(b"\0\0\0"), st.sampled_from([b"\0", b"\1", b"\2", b"\3", b"\4"]), st.just(b"\0\0\0"), st.lists(st.integers(0, 12).map(lambda n: n.to_bytes(4, "little")), max_size=12).map(b"".join), st.binary(max_size=30)).map(b"".join),
    ),
    "keyring": st.one_of(st.text(max_size=100).map(str.encode), key_files()),
    "tunnel": st.one_of(st.binary(max_size=400), tunnel_items(), st.lists(tunnel_items().map(_frame), max_size=4).map(b"".join)),
    "router": st.tuples(byte, st.one_of(st.binary(max_size=300), nearly_right)).map(b"".join),
    "session": st.tuples(byte, st.one_of(st.binary(max_size=300), nearly_right)).map(b"".join),
    "link": st.tuples(byte, st.one_of(st.binary(max_size=300), nearly_right)).map(b"".join),
    "assembly": st.one_of(st.binary(max_size=300), nearly_right, pieces()),
    "stream_call": st.one_of(st.binary(max_size=100), stream_bodies(streams.Call)),
    "stream_answer": st.one_of(st.binary(max_size=100), stream_bodies(streams.Answer)),
    "iris1": st.one_of(st.binary(max_size=200), iris1_said()),
    "channel": st.binary(max_size=2000),
    "ticket": st.one_of(st.binary(max_size=200), st.text(alphabet="ae.-_09[{", max_size=60).map(str.encode), claims(), st.just(b"[" * 5000)),
    "web": st.tuples(byte, st.one_of(st.binary(max_size=300), nearly_right)).map(b"".join),
    "store": st.tuples(byte, st.one_of(st.binary(max_size=300), nearly_right)).map(b"".join),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_any_input_is_accepted_or_refused_as_documented(name: str) -> None:
    @few
    @given(INPUTS[name])
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_a_kept_input_is_accepted_or_refused_as_documented(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_kept_inputs() -> None:
    assert {path.parent.name for path in CORPUS.glob("*/*")} == set(TARGETS)
