"""What keys promise: distinct derivations, proofs that hold for one session alone, no secret in sight."""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import pickle
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from iris.crypto.keys import (
    ClusterKey,
    GroupKey,
    IssuerKey,
    NetworkKey,
    SiteKey,
    StoreKey,
    dump_fingerprint,
    parse_fingerprint,
    verify_proof,
)
from iris.errors import KeyringError, LocalProtocolError, OpenError

SECRET = bytes(range(32))
RELAY, SESSION, CHALLENGE = b"r" * 16, b"s" * 8, b"c" * 32


def hkdf_sha256(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 with an empty salt and 32 bytes of output, written out apart from the code under test."""
    root = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(root, info + b"\x01", "sha256")


def signature(key: ClusterKey) -> bytes:
    return key.sign_proof(relay_id=RELAY, session_id=SESSION, challenge=CHALLENGE)


def test_each_derived_key_is_hkdf_sha256_under_its_own_info_string() -> None:
    key = ClusterKey(SECRET)
    assert key.sealing_root == hkdf_sha256(SECRET, b"iris-seal-root-1")
    assert key.tunnel_psk == hkdf_sha256(SECRET, b"iris-tunnel-psk-1")
    assert key.key_hash_key == hkdf_sha256(SECRET, b"iris-key-hash-1")
    assert len({SECRET, key.sealing_root, key.tunnel_psk, key.key_hash_key, key.public_key}) == 5


def test_derivations_never_change_between_versions() -> None:
    key, network = ClusterKey(SECRET), NetworkKey(SECRET)
    assert key.key_id.hex() == "9621903fd65450f58455a2f6fbb7cb61"
    assert (
        key.public_key.hex() == "8dec3133300d81c1276c1f005fc12d5b8ac612885f66fa7a4c8526a0a0e69602"
    )
    assert (
        key.sealing_root.hex() == "1ea0175942a66e7f91b4fcb47f2440d4cc63511c9107d168cec33245b9152a21"
    )
    assert (
        key.tunnel_psk.hex() == "1b72158a31ab93a61f752ca53a0fa9ee5f79a61d86da2b24a0e9e2c86699285b"
    )
    assert network.fingerprint.hex() == "870bced9e8f6a78551e04850403fc911"
    # Ed25519 is deterministic (RFC 8032).
    assert (
        hashlib.sha256(signature(key)).hexdigest()
        == "83e5cf6cf4d66434a61e4616d6b278b24614855981ddedd113992dd6c25d786c"
    )


def test_the_key_id_is_the_first_half_of_the_hash_of_the_public_key() -> None:
    key, network = ClusterKey(SECRET), NetworkKey(SECRET)
    assert key.key_id == hashlib.sha256(key.public_key).digest()[:16]
    ca_public = network.ca_key.public_key().public_bytes_raw()
    assert network.fingerprint == hashlib.sha256(ca_public).digest()[:16]
    assert ca_public != key.public_key


def test_a_proof_gives_the_key_id_of_its_signer() -> None:
    key = ClusterKey(SECRET)
    proved = verify_proof(
        key.public_key, signature(key), relay_id=RELAY, session_id=SESSION, challenge=CHALLENGE
    )
    assert proved == key.key_id


def test_the_signed_message_is_exactly_the_documented_one() -> None:
    key = ClusterKey(SECRET)
    message = b"iris-proof-1" + RELAY + SESSION + CHALLENGE + key.key_id
    public = Ed25519PublicKey.from_public_bytes(key.public_key)
    public.verify(signature(key), message)  # raises if it is another
    assert len(signature(key)) == 64


@pytest.mark.parametrize(
    ("relay_id", "session_id", "challenge"),
    [
        (b"R" * 16, SESSION, CHALLENGE),
        (RELAY, b"S" * 8, CHALLENGE),
        (RELAY, SESSION, b"C" * 32),
    ],
    ids=["relay", "session", "challenge"],
)
def test_a_proof_for_another_relay_session_or_challenge_fails(
    relay_id: bytes, session_id: bytes, challenge: bytes
) -> None:
    key = ClusterKey(SECRET)
    with pytest.raises(OpenError):
        verify_proof(
            key.public_key,
            signature(key),
            relay_id=relay_id,
            session_id=session_id,
            challenge=challenge,
        )


def test_a_proof_under_another_public_key_fails() -> None:
    key, other = ClusterKey(SECRET), ClusterKey(bytes(32))
    with pytest.raises(OpenError):
        verify_proof(
            other.public_key,
            signature(key),
            relay_id=RELAY,
            session_id=SESSION,
            challenge=CHALLENGE,
        )


def test_every_flipped_bit_of_a_proof_or_public_key_fails() -> None:
    key = ClusterKey(SECRET)
    whole = key.public_key + signature(key)
    refused = 0
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(OpenError):
            verify_proof(
                bytes(damaged[:32]),
                bytes(damaged[32:]),
                relay_id=RELAY,
                session_id=SESSION,
                challenge=CHALLENGE,
            )
        refused += 1
    assert refused == 96 * 8


@given(public=st.binary(max_size=40), signed=st.binary(max_size=70))
def test_a_malformed_proof_fails_like_a_forged_one(public: bytes, signed: bytes) -> None:
    with pytest.raises(OpenError):
        verify_proof(public, signed, relay_id=RELAY, session_id=SESSION, challenge=CHALLENGE)


@pytest.mark.parametrize(
    ("relay_id", "session_id", "challenge"),
    [(b"", SESSION, CHALLENGE), (RELAY, b"s" * 9, CHALLENGE), (RELAY, SESSION, b"c" * 31)],
)
def test_a_proof_over_fields_of_other_lengths_is_never_signed(
    relay_id: bytes, session_id: bytes, challenge: bytes
) -> None:
    with pytest.raises(LocalProtocolError):
        ClusterKey(SECRET).sign_proof(relay_id=relay_id, session_id=session_id, challenge=challenge)


@pytest.mark.parametrize("kind", [ClusterKey, NetworkKey])
@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_secret_of_another_length_is_refused(
    kind: type[ClusterKey] | type[NetworkKey], length: int
) -> None:
    with pytest.raises(KeyringError, match="32 bytes"):
        kind(bytes(length))


@pytest.mark.parametrize(
    "key", [ClusterKey(SECRET), NetworkKey(SECRET)], ids=["cluster", "network"]
)
def test_a_key_shows_eight_digits_of_its_public_id_and_no_secret(
    key: ClusterKey | NetworkKey,
) -> None:
    public = key.key_id if isinstance(key, ClusterKey) else key.fingerprint
    for shown in (repr(key), str(key), f"{key}", f"{[key]}"):
        assert public.hex()[:8] in shown
        assert public.hex()[:9] not in shown
        assert SECRET.hex()[:8] not in shown
        assert key.reveal()[:8] not in shown
    assert not hasattr(key, "__dict__")


@pytest.mark.parametrize(
    "key", [ClusterKey(SECRET), NetworkKey(SECRET)], ids=["cluster", "network"]
)
def test_a_key_is_never_pickled_or_copied(key: ClusterKey | NetworkKey) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError):
            pickle.dumps(key, protocol)
    with pytest.raises(TypeError):
        copy.copy(key)
    with pytest.raises(TypeError):
        copy.deepcopy(key)


def test_keys_are_equal_by_what_they_are_and_kinds_never_mix() -> None:
    assert ClusterKey(SECRET) == ClusterKey(SECRET)
    assert len({ClusterKey(SECRET), ClusterKey(SECRET), ClusterKey(bytes(32))}) == 2
    assert ClusterKey(SECRET) != NetworkKey(SECRET)


@given(st.binary(min_size=32, max_size=32))
def test_a_revealed_key_parses_to_the_same_key(secret: bytes) -> None:
    key = NetworkKey(secret)
    assert NetworkKey.parse(key.reveal()) == key
    assert len(key.reveal()) == 48


KINDS = (ClusterKey, NetworkKey, SiteKey, StoreKey, GroupKey, IssuerKey)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_file_in_which_one_bit_has_flipped_has_no_other_key(kind: type[Any]) -> None:
    text = kind(SECRET).reveal().encode()
    for at in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(
            KeyringError, match=f"a {kind._kind} (is damaged|must be written)"
        ) as caught:
            kind.parse(flipped.decode("latin-1"))
        assert flipped.decode("latin-1") not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_not_read_as_one_of_another_kind(kind: type[Any]) -> None:
    for other in KINDS:
        if other is not kind:
            with pytest.raises(
                KeyringError, match=f"a {kind._kind} is damaged, or a key of another kind"
            ):
                kind.parse(other(SECRET).reveal())


@given(st.one_of(st.text(), st.integers(), st.none(), st.binary().map(base64.b64encode)))
def test_text_that_is_not_a_key_is_refused_without_being_repeated(text: object) -> None:
    with pytest.raises(KeyringError) as caught:
        ClusterKey.parse(text)
    assert (
        str(caught.value)
        == "a cluster key must be written as 48 characters of base64url (32 bytes and a checksum)"
    )


def test_a_key_has_one_text_only() -> None:
    text = ClusterKey(b"\xff" * 32).reveal()
    assert text[:42] == "_" * 42
    for other in (text.replace("_", "/"), text + "=", text + "==", text + "\n", " " + text):
        with pytest.raises(KeyringError):
            ClusterKey.parse(other)


# Site keys


def test_a_site_keys_authority_is_derived_under_its_own_info_string() -> None:
    key = SiteKey(SECRET)
    assert key.ca_key.private_bytes_raw() == hkdf_sha256(SECRET, b"iris-site-ca-1")
    assert key.public_key == key.ca_key.public_key().public_bytes_raw()
    network = NetworkKey(SECRET)
    others = {network.ca_key.private_bytes_raw(), network.access_ca_key.private_bytes_raw()}
    assert key.ca_key.private_bytes_raw() not in others
    assert (
        key.public_key.hex() == "0a962c8f0c2fb2395e16254c639bc53796bfe013fd6e42732ea5f7c5e82cc83c"
    )


def test_a_sites_fingerprint_is_its_public_key_in_full_and_reads_as_it_was_written() -> None:
    key = SiteKey(SECRET)
    assert len(key.fingerprint) == 43
    assert parse_fingerprint(key.fingerprint) == key.public_key
    assert parse_fingerprint(key.fingerprint + "=") == key.public_key
    assert base64.urlsafe_b64decode(key.fingerprint + "=") == key.public_key
    assert dump_fingerprint(key.public_key) == key.fingerprint


@pytest.mark.parametrize(
    "text", ["", "A" * 42, "A" * 44, "A" * 43 + "==", "A" * 42 + "B", "+" * 43, "/" + "A" * 42, "Ä" * 43, " " + "A" * 42, "A" * 43 + "\n"]
)  # fmt: skip
def test_what_is_not_a_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(KeyringError, match="fingerprint"):
        parse_fingerprint(text)


def test_a_site_key_shows_no_secret_and_is_not_copied() -> None:
    key = SiteKey(SECRET)
    assert key == SiteKey(SECRET)
    assert key != SiteKey(bytes(32))
    assert key.reveal() not in repr(key)
    assert SiteKey.parse(key.reveal()) == key
    with pytest.raises(TypeError):
        copy.deepcopy(key)
    with pytest.raises(KeyringError, match="site key"):
        SiteKey(bytes(31))
