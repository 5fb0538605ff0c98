"""What sealing promises: the bytes of RFC 9605, no forgery, and no counter used twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given
from hypothesis import strategies as st

from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import (
    MAX_OVERHEAD_BYTES,
    SEALS_PER_SENDER,
    Opener,
    Sealer,
    decode_header,
    derive_key_and_salt,
    encode_header,
)
from iris.errors import LocalProtocolError, OpenError

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "sframe-rfc9605.json").read_text("utf-8")
)
SUITE_5: dict[str, Any] = next(v for v in VECTORS["sframe"] if v["cipher_suite"] == 5)

KEY = ClusterKey(bytes(range(32)))
SENDER = bytes(range(100, 116))
META = b"request databases 0123"

U64 = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.builds(lambda n, d: (1 << n) + d, st.integers(1, 63), st.integers(-1, 1)),
)


def advanced(seals: int, sender: bytes = SENDER) -> Sealer:
    """A sealer that is about to use the counter `seals`."""
    sealer = Sealer(KEY, sender)
    for _ in range(seals):
        sealer.seal(b"", b"")
    return sealer


# The published vectors


def test_every_header_of_the_rfc_is_written_and_read() -> None:
    table = VECTORS["header"]
    for row in table:
        encoded = bytes.fromhex(row["encoded"])
        assert encode_header(row["kid"], row["ctr"]) == encoded
        assert decode_header(encoded) == (row["kid"], row["ctr"], len(encoded))
        assert decode_header(memoryview(encoded + b"rest")) == (
            row["kid"],
            row["ctr"],
            len(encoded),
        )
    assert len(table) == 289


def test_key_and_salt_are_those_of_the_rfc() -> None:
    key, salt = derive_key_and_salt(bytes.fromhex(SUITE_5["base_key"]), SUITE_5["kid"])
    assert (key.hex(), salt.hex()) == (SUITE_5["sframe_key"], SUITE_5["sframe_salt"])


def test_the_sealed_message_of_the_rfc_is_reproduced_and_opened() -> None:
    base_key, kid, ctr = bytes.fromhex(SUITE_5["base_key"]), SUITE_5["kid"], SUITE_5["ctr"]
    plaintext, metadata = bytes.fromhex(SUITE_5["pt"]), bytes.fromhex(SUITE_5["metadata"])
    sealer = Sealer.from_base_key(base_key, kid)
    for _ in range(ctr):  # there is no way to choose a counter but to use those before it
        sealer.seal(b"", b"")
    sealed = sealer.seal(plaintext, metadata)
    assert sealed.hex() == SUITE_5["ct"]
    assert Opener.from_base_key(base_key, kid).open(sealed, metadata) == (ctr, plaintext)


# The keys of a sender


def test_the_base_key_is_hkdf_expand_of_the_sealing_root_over_the_sender_id() -> None:
    info = b"iris-seal-1" + SENDER
    base_key = HKDFExpand(hashes.SHA256(), 32, info=info).derive(KEY.sealing_root)
    twin = Sealer.from_base_key(base_key, int.from_bytes(SENDER[:8]))
    assert Sealer(KEY, SENDER).seal(b"payload", META) == twin.seal(b"payload", META)


def test_the_kid_is_public_the_first_half_of_the_sender_id() -> None:
    kid, ctr, _ = decode_header(Sealer(KEY, SENDER).seal(b"", META))
    assert (kid, ctr) == (int.from_bytes(SENDER[:8]), 0)


def test_senders_that_share_a_kid_do_not_share_a_key() -> None:
    other = SENDER[:8] + bytes(8)
    sealed = Sealer(KEY, SENDER).seal(b"payload", META)
    assert decode_header(sealed) == decode_header(Sealer(KEY, other).seal(b"payload", META))
    with pytest.raises(OpenError):
        Opener(KEY, other).open(sealed, META)


@pytest.mark.parametrize("sender", [b"", SENDER[:15], SENDER + b"\0"])
@pytest.mark.parametrize("side", [Sealer, Opener])
def test_a_sender_id_of_another_length_is_refused(
    side: type[Sealer] | type[Opener], sender: bytes
) -> None:
    with pytest.raises(LocalProtocolError, match="16 bytes"):
        side(KEY, sender)


# What opens and what does not


@given(
    sender=st.one_of(st.binary(min_size=16, max_size=16), st.just(bytes(16))),
    plaintext=st.binary(max_size=300),
    metadata=st.binary(max_size=80),
    form=st.sampled_from([bytes, bytearray, memoryview]),
)
def test_what_is_sealed_opens_whatever_holds_the_bytes(
    sender: bytes, plaintext: bytes, metadata: bytes, form: Callable[[bytes], Any]
) -> None:
    sealed = Sealer(KEY, sender).seal(form(plaintext), metadata)
    assert len(sealed) <= len(plaintext) + MAX_OVERHEAD_BYTES
    assert Opener(KEY, sender).open(form(sealed), metadata) == (0, plaintext)


@pytest.mark.parametrize("sender", [SENDER, bytes(16), bytes(7) + b"\x05" + bytes(8)])
def test_the_header_stays_the_shortest_as_the_counter_grows(sender: bytes) -> None:
    sealer, opener = Sealer(KEY, sender), Opener(KEY, sender)
    kid = int.from_bytes(sender[:8])
    for counter in range(65_540):
        assert sealer.counter == counter
        sealed = sealer.seal(b"", b"")
        if counter < 300 or counter > 65_500:
            assert sealed.startswith(encode_header(kid, counter))
            assert opener.open(sealed, b"") == (counter, b"")


@pytest.mark.parametrize("counter", [0, 7, 8, 300])
def test_every_flipped_bit_of_message_or_metadata_fails(counter: int) -> None:
    opener = Opener(KEY, SENDER)
    sealed = advanced(counter).seal(b"payload", META)
    assert opener.open(sealed, META) == (counter, b"payload")
    whole = sealed + META
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(OpenError):
            opener.open(damaged[: len(sealed)], bytes(damaged[len(sealed) :]))


@pytest.mark.parametrize("counter", [0, 300])
def test_every_truncation_and_extension_fails(counter: int) -> None:
    opener = Opener(KEY, SENDER)
    sealed = advanced(counter).seal(b"payload", META)
    for length in range(len(sealed)):
        for form in (bytes, memoryview):
            with pytest.raises(OpenError):
                opener.open(form(sealed[:length]), META)
    with pytest.raises(OpenError):
        opener.open(sealed + b"\0", META)


def test_a_message_spliced_to_another_address_fails() -> None:
    sealer, opener = Sealer(KEY, SENDER), Opener(KEY, SENDER)
    to_orders, to_audit = sealer.seal(b"1", b"orders"), sealer.seal(b"2", b"audit")
    for sealed, metadata in ((to_orders, b"audit"), (to_audit, b"orders")):
        with pytest.raises(OpenError):
            opener.open(sealed, metadata)
    with pytest.raises(OpenError):  # nor does the body of one fit the header of another
        opener.open(to_orders[:9] + to_audit[9:], b"audit")


def test_bytes_do_not_move_between_message_and_metadata() -> None:
    header, body = (sealed := Sealer(KEY, SENDER).seal(b"", META))[:9], sealed[9:]
    with pytest.raises(OpenError):
        Opener(KEY, SENDER).open(header + META[:1] + body, META[1:])


def test_another_key_does_not_open() -> None:
    sealed = Sealer(KEY, SENDER).seal(b"payload", META)
    with pytest.raises(OpenError):
        Opener(ClusterKey(bytes(32)), SENDER).open(sealed, META)


@pytest.mark.parametrize("sender", [SENDER, bytes(16)])
def test_a_header_longer_than_needed_fails_even_if_its_numbers_are_right(sender: bytes) -> None:
    opener = Opener(KEY, sender)
    kid = int.from_bytes(sender[:8])
    sealed = Sealer(KEY, sender).seal(b"", META)
    _, _, end = decode_header(sealed)
    kid_part = b"\x08" if kid == 0 else bytes((0xF0,))
    padded = bytes((kid_part[0] | 0x08,)) + (b"" if kid == 0 else kid.to_bytes(8)) + b"\0"
    with pytest.raises(OpenError):
        opener.open(padded + sealed[end:], META)


def test_all_failures_give_one_reason() -> None:
    opener = Opener(KEY, SENDER)
    sealed = Sealer(KEY, SENDER).seal(b"payload", META)
    other_kid = Sealer(KEY, bytes(16)).seal(b"payload", META)
    reasons = set()
    for body, metadata in (
        (b"", META),
        (sealed[:4], META),
        (sealed[:-1], META),
        (sealed, b""),
        (other_kid, META),
        (b"\xff" * 60, META),
    ):
        with pytest.raises(OpenError) as caught:
            opener.open(body, metadata)
        reasons.add(str(caught.value))
    assert len(reasons) == 1


@given(body=st.binary(max_size=80), metadata=st.binary(max_size=20))
def test_garbage_is_refused_by_the_one_error(body: bytes, metadata: bytes) -> None:
    with pytest.raises(OpenError):
        Opener(KEY, SENDER).open(body, metadata)


# Headers


@given(kid=U64, ctr=U64, rest=st.binary(max_size=4))
def test_a_header_reads_back_and_nothing_shorter_does(kid: int, ctr: int, rest: bytes) -> None:
    header = encode_header(kid, ctr)
    assert decode_header(header + rest) == (kid, ctr, len(header))
    for length in range(len(header)):
        with pytest.raises(OpenError):
            decode_header(header[:length])


@given(st.binary(max_size=20))
def test_any_bytes_are_the_one_header_of_their_numbers_or_refused(data: bytes) -> None:
    try:
        kid, ctr, length = decode_header(data)
    except OpenError:
        return
    assert encode_header(kid, ctr) == data[:length]


@pytest.mark.parametrize(("kid", "ctr"), [(-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)])
def test_numbers_beyond_64_bits_have_no_header(kid: int, ctr: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_header(kid, ctr)


# A counter is used once


def test_a_seal_that_raises_spends_its_counter() -> None:
    sealer = Sealer(KEY, SENDER)
    with pytest.raises(TypeError):
        sealer.seal("text", META)  # type: ignore[arg-type]  # the mistake under test
    assert sealer.counter == 1
    counter, _ = Opener(KEY, SENDER).open(sealer.seal(b"payload", META), META)
    assert counter == 1


def test_a_cipher_that_fails_after_encrypting_never_sees_its_nonce_again() -> None:
    sealer = Sealer(KEY, SENDER)
    encrypt = sealer._encrypt
    nonces: list[bytes] = []

    def failing(nonce: bytes, plaintext: bytes, aad: bytes) -> bytes:
        nonces.append(nonce)
        encrypt(nonce, plaintext, aad)
        if len(nonces) % 2:
            raise MemoryError
        return b""

    sealer._encrypt = failing  # type: ignore[assignment]  # takes bytes only, and gets no other
    for turn in range(600):
        if turn % 2:
            sealer.seal(b"", b"")
        else:
            with pytest.raises(MemoryError):
                sealer.seal(b"", b"")
    assert len(set(nonces)) == 600


def test_nonces_of_one_sender_are_distinct_across_addresses() -> None:
    sealer, opener = Sealer(KEY, SENDER), Opener(KEY, SENDER)
    addresses = [b"orders", b"audit", b"users"]
    counters = [
        opener.open(sealer.seal(b"x", addresses[n % 3]), addresses[n % 3])[0] for n in range(1_000)
    ]
    assert counters == list(range(1_000))


def test_after_two_to_the_32_seals_a_sender_seals_no_more() -> None:
    sealer, opener = Sealer(KEY, SENDER), Opener(KEY, SENDER)
    sealer._counter = SEALS_PER_SENDER - 1  # as after 4,294,967,295 seals
    last = sealer.seal(b"last", META)
    assert opener.open(last, META) == (SEALS_PER_SENDER - 1, b"last")
    for _ in range(3):
        with pytest.raises(LocalProtocolError, match="draw a new one"):
            sealer.seal(b"one more", META)
    assert sealer.counter == SEALS_PER_SENDER


def test_a_counter_beyond_what_a_sender_may_use_is_refused() -> None:
    key, salt = derive_key_and_salt(bytes(32), 5)
    header = encode_header(5, SEALS_PER_SENDER)
    nonce = (int.from_bytes(salt) ^ SEALS_PER_SENDER).to_bytes(12)
    forged_by_a_holder = header + AESGCM(key).encrypt(nonce, b"payload", header + META)
    with pytest.raises(OpenError):
        Opener.from_base_key(bytes(32), 5).open(forged_by_a_holder, META)


def run_in_thread(call: Callable[[], object]) -> BaseException | None:
    """What `call` raised in a thread of its own."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except LocalProtocolError as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_sealer_belongs_to_the_thread_that_first_sealed() -> None:
    sealer = Sealer(KEY, SENDER)
    sealer.seal(b"mine", META)
    error = run_in_thread(lambda: sealer.seal(b"theirs", META))
    assert isinstance(error, LocalProtocolError)
    assert sealer.counter == 1
    assert Opener(KEY, SENDER).open(sealer.seal(b"mine", META), META) == (1, b"mine")


def test_a_sealer_may_be_made_in_one_thread_and_used_in_another() -> None:
    sealer = Sealer(KEY, SENDER)
    assert run_in_thread(lambda: sealer.seal(b"first", META)) is None
    with pytest.raises(LocalProtocolError, match="thread"):
        sealer.seal(b"second", META)


def test_of_threads_that_seal_first_at_once_one_wins() -> None:
    for _ in range(20):
        sealer = Sealer(KEY, SENDER)
        start = threading.Barrier(4)
        sealed: list[bytes] = []
        refused: list[LocalProtocolError] = []

        def race(
            sealer: Sealer = sealer,
            start: threading.Barrier = start,
            sealed: list[bytes] = sealed,
            refused: list[LocalProtocolError] = refused,
        ) -> None:
            start.wait()
            try:
                for _ in range(50):
                    sealed.append(sealer.seal(b"", b""))
            except LocalProtocolError as error:
                refused.append(error)

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3
        assert len({decode_header(message) for message in sealed}) == len(sealed) == 50


@pytest.mark.parametrize("seals_before", [0, 1, 300])
def test_a_poisoned_sealer_never_seals_again(seals_before: int) -> None:
    sealer = advanced(seals_before)
    sealer.poison()
    for _ in range(300):
        with pytest.raises(LocalProtocolError, match="forked"):
            sealer.seal(b"payload", META)
