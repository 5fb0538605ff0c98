"""What a session has to say: bundles, aliases, sealers and who may seal."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from iris.core import outbound as module
from iris.core.bundle import CUT_BYTES, decode_bundle
from iris.core.outbound import Outbound
from iris.crypto.keys import ClusterKey, verify_proof
from iris.crypto.sframe import SEALS_PER_SENDER, Opener
from iris.errors import LocalProtocolError
from iris.wire import frames
from iris.wire.codec import BODY_AT, END, END_AT, HOP, decode_control, metadata_prefix
from iris.wire.kinds import FIRST_DATA_KIND, Kind

KEY = ClusterKey(bytes(range(32)))
RELAY, SESSION, CHALLENGE = bytes(16), bytes(8), bytes(32)


class Sent:
    """The frames of an Outbound, told apart and opened by who holds the key."""

    def __init__(self, out: Outbound) -> None:
        self.controls: list[frames.Control] = []
        self.bundles: list[tuple[str, bytes, int, list[bytes]]] = []
        """name, sender id, first, payloads"""
        declared: dict[int, frames.Declare] = {}
        data = b"".join(out.chunks)
        out.chunks = []
        pos = 0
        while pos < len(data):
            end = pos + 4 + int.from_bytes(data[pos : pos + 4], "little")
            frame = data[pos:end]
            pos = end
            if frame[4] < FIRST_DATA_KIND:
                body = decode_control(memoryview(frame), 0, len(frame))
                self.controls.append(body)
                if isinstance(body, frames.Declare):
                    declared[body.alias] = body
                continue
            _, kind, _, alias, _, _ = HOP.unpack_from(frame)
            _, _, count, first = END.unpack_from(frame, END_AT)
            flow = declared[alias]
            prefix = metadata_prefix(kind, flow.name, KEY.key_id, flow.sender_id)
            _, plain = Opener(KEY, flow.sender_id).open(
                frame[BODY_AT:], prefix + frame[END_AT:BODY_AT]
            )
            payloads, _, _ = decode_bundle(plain)
            assert len(payloads) == count
            self.bundles.append((flow.name, flow.sender_id, first, payloads))


def make() -> Outbound:
    ids: Iterator[bytes] = (n.to_bytes(16, "big") for n in range(1, 1 << 20))
    return Outbound(
        relay_id=RELAY, session_id=SESSION, challenge=CHALLENGE,
        entropy=lambda size: next(ids), on_full=lambda: None,
    )  # fmt: skip


def put(out: Outbound, name: str, *payloads: bytes, packed: bool = False) -> None:
    flow = out.flow(Kind.PUBLISH, name, KEY)
    flow.parts = 1  # as the relay's first SHARE says
    for payload in payloads:
        out.add(flow, payload, None, packed)


def test_what_a_turn_sends_to_one_address_is_one_bundle() -> None:
    out = make()
    put(out, "a", b"1")
    put(out, "b", b"2")
    put(out, "a", b"3", b"4")
    out.flush()
    put(out, "a", b"5")
    out.flush()
    sent = Sent(out)
    assert [(name, first, payloads) for name, _, first, payloads in sent.bundles] == [
        ("a", 0, [b"1", b"3", b"4"]), ("b", 0, [b"2"]), ("a", 3, [b"5"]),
    ]  # fmt: skip
    assert out.sent_messages == 5
    out.flush()
    assert out.chunks == []


def test_a_bundle_is_cut_before_it_exceeds_64_kib() -> None:
    out = make()
    put(out, "a", *[bytes(1000)] * 200)
    out.flush()
    bundles = Sent(out).bundles
    assert sum(len(payloads) for *_, payloads in bundles) == 200
    assert len(bundles) == 4
    assert all(sum(map(len, payloads)) <= CUT_BYTES for *_, payloads in bundles)


def test_a_message_over_the_cut_travels_alone_and_in_its_place() -> None:
    out = make()
    put(out, "a", b"before", bytes(3 * CUT_BYTES), b"after")
    out.flush()
    assert [len(p) for *_, payloads in Sent(out).bundles for p in payloads] == [6, 3 * CUT_BYTES, 5]


def test_raw_and_packed_messages_never_share_a_bundle() -> None:
    out = make()
    put(out, "a", b"1")
    put(out, "a", b"\x01", packed=True)
    put(out, "a", b"2")
    out.flush()
    assert [payloads for *_, payloads in Sent(out).bundles] == [[b"1"], [b"\x01"], [b"2"]]


def test_headers_begun_late_leave_earlier_messages_without() -> None:
    out = make()
    flow = out.flow(Kind.PUBLISH, "a", KEY)
    out.add(flow, b"1", None, False)
    out.add(flow, b"2", {"h": "v"}, False)
    out.add(flow, b"3", None, False)
    assert flow.headers == [None, {"h": "v"}, None]
    out.flush()
    out.add(flow, b"4", None, False)
    assert flow.headers is None


def test_a_key_is_proven_once_before_its_first_alias() -> None:
    out = make()
    put(out, "a", b"1")
    put(out, "b", b"2")
    out.flush()
    controls = Sent(out).controls
    assert [type(body).__name__ for body in controls] == ["Prove", "Declare", "Declare"]
    prove = controls[0]
    assert isinstance(prove, frames.Prove)
    key_id = verify_proof(
        prove.public_key, prove.signature, relay_id=RELAY, session_id=SESSION, challenge=CHALLENGE
    )
    assert key_id == KEY.key_id


def test_one_sender_id_serves_all_addresses_of_a_key() -> None:
    out = make()
    put(out, "a", b"1")
    put(out, "b", b"2")
    out.flush()
    assert len({sender for _, sender, *_ in Sent(out).bundles}) == 1


def test_after_two_to_the_32_seals_another_sender_starts_another_sequence() -> None:
    out = make()
    put(out, "a", b"1")
    out.flush()
    out._sealers[KEY.key_id, ""][0]._counter = SEALS_PER_SENDER
    put(out, "a", b"2")
    out.flush()
    put(out, "a", b"3")
    out.flush()
    (_, old, first, _), (_, new, second, _), (_, same, third, _) = Sent(out).bundles
    assert old != new
    assert new == same
    assert (first, second, third) == (0, 0, 1)


def test_more_addresses_than_are_remembered_start_over_with_new_senders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_FLOWS", 10)
    out = make()
    for n in range(25):
        put(out, f"t{n % 12}", b"%d" % n)
        out.flush()
    seen: dict[tuple[str, bytes], int] = {}
    for name, sender, first, payloads in Sent(out).bundles:
        assert first == seen.get((name, sender), 0), "a sender never goes back"
        seen[(name, sender)] = first + len(payloads)
    assert len({sender for _, sender in seen}) >= 3


def test_what_no_bundle_took_is_given_back_once() -> None:
    out = make()
    flow = out.flow(Kind.PUBLISH, "a", KEY)
    out.add(flow, b"1", None, False)
    out.add(flow, b"2", {"h": "v"}, False)
    assert out.unsent() == [
        (Kind.PUBLISH, "a", b"1", None, False), (Kind.PUBLISH, "a", b"2", {"h": "v"}, False),
    ]  # fmt: skip
    assert out.unsent() == []
    out.flush()
    assert Sent(out).bundles == []


def test_only_one_thread_seals() -> None:
    out = make()
    put(out, "a", b"1")
    out.flush()
    errors: list[BaseException] = []

    def seal() -> None:
        try:
            put(out, "a", b"2")
            out.flush()
        except LocalProtocolError as err:
            errors.append(err)

    thread = threading.Thread(target=seal)
    thread.start()
    thread.join()
    assert "only by the thread that first sealed" in str(errors[0])
    assert [payloads for *_, payloads in Sent(out).bundles] == [[b"1"]]


def test_a_poisoned_outbound_seals_nothing() -> None:
    out = make()
    put(out, "a", b"1")
    out.flush()
    out.poison()
    put(out, "a", b"2")
    with pytest.raises(LocalProtocolError, match="forked"):
        out.flush()


def test_the_shell_is_notified_when_enough_is_framed() -> None:
    notified: list[int] = []
    out = Outbound(
        relay_id=RELAY, session_id=SESSION, challenge=CHALLENGE, entropy=bytes,
        on_full=lambda: notified.append(1), full_bytes=100_000,
    )  # fmt: skip
    put(out, "a", *[bytes(60_000)] * 4)
    out.flush()
    assert notified
