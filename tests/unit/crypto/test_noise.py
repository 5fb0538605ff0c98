"""What tunnels' encryption promises: the bytes of Noise, agreement with another implementation, no repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise.connection import NoiseConnection  # type: ignore[import-untyped]  # ships no types

from iris.crypto.noise import MAX_PLAINTEXT_BYTES, CipherState, Handshake
from iris.errors import LocalProtocolError, OpenError

NAME = "Noise_NNpsk0_25519_AESGCM_SHA256"
VECTORS: list[dict[str, Any]] = [
    vector
    for vector in json.loads(
        (Path(__file__).parents[2] / "vectors" / "noise-cacophony-nnpsk.json").read_text("utf-8")
    )["vectors"]
    if vector["protocol_name"] == NAME
]

PROLOGUE, PSK = b"iris-tunnel-1 test", b"k" * 32
SECRET_A, SECRET_B = b"a" * 32, b"b" * 32


def pair(prologue: bytes = PROLOGUE, psk: bytes = PSK) -> tuple[Handshake, Handshake]:
    return Handshake(True, PROLOGUE, PSK, SECRET_A), Handshake(False, prologue, psk, SECRET_B)


def tunnel() -> tuple[CipherState, CipherState, CipherState, CipherState]:
    """(send, recv) of the initiator, then of the responder."""
    initiator, responder = pair()
    responder.read_message(initiator.write_message())
    initiator.read_message(responder.write_message())
    return *initiator.split(), *responder.split()


def test_there_are_vectors_of_our_protocol() -> None:
    assert len(VECTORS) >= 1


@pytest.mark.parametrize("vector", VECTORS)
def test_the_published_conversation_is_reproduced_byte_for_byte(vector: dict[str, Any]) -> None:
    sides = [
        Handshake(
            role == "init",
            bytes.fromhex(vector[f"{role}_prologue"]),
            bytes.fromhex(vector[f"{role}_psks"][0]),
            bytes.fromhex(vector[f"{role}_ephemeral"]),
        )
        for role in ("init", "resp")
    ]
    messages = [
        (bytes.fromhex(m["payload"]), bytes.fromhex(m["ciphertext"])) for m in vector["messages"]
    ]
    for turn, (payload, ciphertext) in enumerate(messages[:2]):
        assert sides[turn].write_message(payload) == ciphertext
        assert sides[1 - turn].read_message(ciphertext) == payload
    for side in sides:
        assert side.finished
        assert side.handshake_hash.hex() == vector["handshake_hash"]
    ciphers = [side.split() for side in sides]
    for turn, (payload, ciphertext) in enumerate(messages[2:]):
        send, recv = ciphers[turn % 2][0], ciphers[1 - turn % 2][1]
        assert send.encrypt(payload) == ciphertext
        assert recv.decrypt(ciphertext) == payload
    assert len(messages) == 6


@settings(max_examples=25, deadline=None)
@given(
    we_initiate=st.booleans(),
    prologue=st.binary(max_size=60),
    psk=st.binary(min_size=32, max_size=32),
    ephemeral=st.binary(min_size=32, max_size=32),
    payloads=st.tuples(st.binary(max_size=50), st.binary(max_size=50)),
    records=st.lists(st.tuples(st.booleans(), st.binary(max_size=200)), max_size=12),
)
def test_another_implementation_understands_us_in_both_roles(
    we_initiate: bool,
    prologue: bytes,
    psk: bytes,
    ephemeral: bytes,
    payloads: tuple[bytes, bytes],
    records: list[tuple[bool, bytes]],
) -> None:
    ours = Handshake(we_initiate, prologue, psk, ephemeral)
    theirs = NoiseConnection.from_name(NAME.encode())
    theirs.set_as_responder() if we_initiate else theirs.set_as_initiator()
    theirs.set_psks(psk=psk)
    theirs.set_prologue(prologue)
    theirs.start_handshake()
    for turn, payload in enumerate(payloads):
        if we_initiate == (turn == 0):
            assert theirs.read_message(ours.write_message(payload)) == payload
        else:
            assert ours.read_message(bytes(theirs.write_message(payload))) == payload
    assert theirs.handshake_finished
    assert ours.handshake_hash == theirs.get_handshake_hash()
    send, recv = ours.split()
    for we_send, record in records:
        if we_send:
            assert theirs.decrypt(send.encrypt(record)) == record
        else:
            assert recv.decrypt(theirs.encrypt(record)) == record


# The handshake


def test_both_sides_agree_and_each_direction_has_its_own_key() -> None:
    a_send, a_recv, b_send, b_recv = tunnel()
    first, answer = a_send.encrypt(b"same"), b_send.encrypt(b"same")
    assert first != answer
    assert b_recv.decrypt(first) == b"same"
    assert a_recv.decrypt(answer) == b"same"


@pytest.mark.parametrize(
    ("prologue", "psk"), [(b"iris-tunnel-1 other", PSK), (PROLOGUE, b"K" * 32), (b"", PSK)]
)
def test_another_prologue_or_psk_opens_nothing(prologue: bytes, psk: bytes) -> None:
    initiator, responder = pair(prologue, psk)
    with pytest.raises(OpenError):
        responder.read_message(initiator.write_message())


def test_every_flipped_bit_of_a_handshake_fails_and_changes_nothing() -> None:
    initiator, responder = pair()
    for reader, writer in ((responder, initiator), (initiator, responder)):
        message = writer.write_message(b"payload")
        for bit in range(len(message) * 8):
            damaged = bytearray(message)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(OpenError):
                reader.read_message(damaged)
        assert reader.read_message(memoryview(message)) == b"payload"
    assert initiator.handshake_hash == responder.handshake_hash
    send, recv = initiator.split()[0], responder.split()[1]
    assert recv.decrypt(send.encrypt(b"after")) == b"after"


@given(st.binary(max_size=120))
def test_garbage_is_refused_by_the_one_error_and_changes_nothing(garbage: bytes) -> None:
    initiator, responder = pair()
    with pytest.raises(OpenError):
        responder.read_message(garbage)
    assert responder.read_message(initiator.write_message()) == b""


def test_truncated_and_oversized_messages_are_refused() -> None:
    initiator, responder = pair()
    message = initiator.write_message()
    for length in range(len(message)):
        with pytest.raises(OpenError):
            responder.read_message(message[:length])
    with pytest.raises(OpenError):
        responder.read_message(message + bytes(65_536))
    assert responder.read_message(message) == b""


def test_an_ephemeral_key_of_low_order_is_refused_before_an_answer() -> None:
    """A holder of the psk can make a first message that opens; its shared secret would be zero."""
    initiator, responder = pair()

    class LowOrder:
        def public_key(self) -> LowOrder:
            return self

        def public_bytes_raw(self) -> bytes:
            return bytes(32)

    initiator._ephemeral = LowOrder()  # type: ignore[assignment]  # only what writing needs
    with pytest.raises(OpenError):
        responder.read_message(initiator.write_message())
    honest, _ = pair()
    assert responder.read_message(honest.write_message()) == b""


def test_messages_out_of_turn_are_our_error() -> None:
    initiator, responder = pair()
    with pytest.raises(LocalProtocolError):
        responder.write_message()
    with pytest.raises(LocalProtocolError):
        initiator.read_message(bytes(48))
    responder.read_message(initiator.write_message())
    with pytest.raises(LocalProtocolError):  # a second message of one ephemeral key
        initiator.write_message()
    with pytest.raises(LocalProtocolError):
        initiator.split()
    with pytest.raises(LocalProtocolError):
        _ = responder.handshake_hash
    initiator.read_message(responder.write_message())
    for side in (initiator, responder):
        with pytest.raises(LocalProtocolError):
            side.write_message()
        with pytest.raises(LocalProtocolError):
            side.read_message(bytes(48))


def test_a_handshake_splits_once_and_then_holds_no_secret() -> None:
    initiator, responder = pair()
    responder.read_message(initiator.write_message())
    initiator.read_message(responder.write_message())
    for side in (initiator, responder):
        before = side.handshake_hash
        side.split()
        assert side.finished
        assert side.handshake_hash == before
        with pytest.raises(LocalProtocolError):  # two ciphers of one key would repeat nonces
            side.split()
        held = [getattr(side, slot) for slot in Handshake.__slots__]
        assert PSK not in held
        assert not any(type(value).__name__ in ("_Symmetric", "X25519PrivateKey") for value in held)


@pytest.mark.parametrize(("psk", "ephemeral"), [(b"", SECRET_A), (PSK, SECRET_A[:31])])
def test_secrets_of_another_length_are_refused(psk: bytes, ephemeral: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="32 bytes"):
        Handshake(True, PROLOGUE, psk, ephemeral)


def test_a_handshake_message_fits_in_65535_bytes() -> None:
    initiator, responder = pair()
    with pytest.raises(LocalProtocolError):
        initiator.write_message(bytes(65_535 - 47))
    message = initiator.write_message(bytes(65_535 - 48))  # the refused one changed nothing
    assert len(message) == 65_535
    assert responder.read_message(message) == bytes(65_535 - 48)


# Records


def test_a_record_opens_once_in_order_and_unchanged() -> None:
    send, _, _, recv = tunnel()
    records = [send.encrypt(bytes([n])) for n in range(5)]
    for wrong in (records[1], records[4], records[0][:-1], records[0] + b"\0", b"", bytes(65_536)):
        with pytest.raises(OpenError):
            recv.decrypt(wrong)
    for number, record in enumerate(records):
        assert recv.decrypt(record) == bytes([number])
        with pytest.raises(OpenError):
            recv.decrypt(record)


def test_every_flipped_bit_of_a_record_or_its_data_fails() -> None:
    send, _, _, recv = tunnel()
    record = send.encrypt(b"payload", b"data")
    whole = record + b"data"
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(OpenError):
            recv.decrypt(damaged[: len(record)], bytes(damaged[len(record) :]))
    assert recv.decrypt(memoryview(record), b"data") == b"payload"


def test_a_record_is_at_most_65535_bytes() -> None:
    send, _, _, _ = tunnel()
    with pytest.raises(LocalProtocolError, match="65519"):
        send.encrypt(bytes(MAX_PLAINTEXT_BYTES + 1))


def test_the_largest_record_passes() -> None:
    send, _, _, recv = tunnel()
    record = send.encrypt(memoryview(bytes(MAX_PLAINTEXT_BYTES)))
    assert len(record) == 65_535
    assert recv.decrypt(record) == bytes(MAX_PLAINTEXT_BYTES)


def test_a_record_that_fails_to_encrypt_spends_its_nonce() -> None:
    send, _, _, recv = tunnel()
    with pytest.raises(LocalProtocolError):
        send.encrypt(bytes(MAX_PLAINTEXT_BYTES + 1))
    with pytest.raises(OpenError):  # so the tunnel ends rather than repeat one
        recv.decrypt(send.encrypt(b"next"))


def test_the_reserved_nonce_is_never_used() -> None:
    send, recv = CipherState(bytes(32)), CipherState(bytes(32))
    send._nonce = recv._nonce = (1 << 64) - 2
    assert recv.decrypt(send.encrypt(b"last")) == b"last"
    for _ in range(3):
        with pytest.raises(LocalProtocolError, match="open another"):
            send.encrypt(b"one more")
        with pytest.raises(LocalProtocolError, match="open another"):
            recv.decrypt(bytes(32))


def test_a_poisoned_direction_never_encrypts_again() -> None:
    send, _, _, _ = tunnel()
    send.encrypt(b"before")
    send.poison()
    for _ in range(3):
        with pytest.raises(LocalProtocolError, match="forked"):
            send.encrypt(b"after")
