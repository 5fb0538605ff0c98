"""What certificates promise: the same authorities for all holders of a key, and two kinds of leaves that never mix."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st

from iris.crypto import certificates
from iris.crypto.certificates import (
    Leaf,
    access_authority,
    access_leaf,
    dump_access,
    gateway_leaf,
    network_authority,
    parse_access,
    relay_leaf,
    site_authority,
)
from iris.crypto.keys import NetworkKey, SiteKey, public_id
from iris.errors import KeyringError, LocalProtocolError

SECRET = bytes(range(32))
KEY, OTHER = NetworkKey(SECRET), NetworkKey(b"o" * 32)
SITE = SiteKey(SECRET)
RELAY, SEED = b"\xa5" * 16, b"s" * 32
ACCESS = dump_access(KEY, SEED)
CERTIFICATE, PRIVATE, AUTHORITY = re.findall(r"-----BEGIN .*?-----END [A-Z ]+-----\n", ACCESS, re.DOTALL)  # fmt: skip


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def common_name(name: x509.Name) -> str | bytes:
    (attribute,) = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return attribute.value


def raw(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes_raw()


# Authorities


def test_the_access_authority_has_a_key_of_its_own() -> None:
    root = hmac.digest(bytes(32), SECRET, "sha256")
    derived = hmac.digest(root, b"iris-network-access-1\x01", "sha256")
    assert raw(KEY.access_ca_key) == derived
    assert raw(KEY.access_ca_key) != raw(KEY.ca_key)


def test_authorities_never_change_between_versions() -> None:
    # Relays of two versions hold each other's leaves against their own copy of the authority.
    found = [hashlib.sha256(der(make(KEY))).hexdigest() for make in (network_authority, access_authority)]  # fmt: skip
    assert found == [
        "127b86d301d18eb45afe0c96f995c67ac755e5d56df2dae0005e32e8570baec5",
        "9f0c6806b18ad59f69fb5d614b3c031344b556df3e31834de26efc0c7bb93860",
    ]


@pytest.mark.parametrize("make", [network_authority, access_authority])
def test_two_processes_make_the_same_authority_byte_for_byte(
    make: Callable[[NetworkKey], x509.Certificate],
) -> None:
    program = (
        "from iris.crypto import certificates, keys\n"
        "from cryptography.hazmat.primitives.serialization import Encoding\n"
        f"authority = certificates.{make.__name__}(keys.NetworkKey(bytes(range(32))))\n"
        "print(authority.public_bytes(Encoding.DER).hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # fmt: skip
    assert bytes.fromhex(done.stdout) == der(make(KEY)) == der(make(NetworkKey(SECRET)))
    assert der(make(KEY)) != der(make(OTHER))


@pytest.mark.parametrize(
    ("make", "key", "kind"),
    [(network_authority, KEY.ca_key, "network"), (access_authority, KEY.access_ca_key, "access")],
    ids=["network", "access"],
)
def test_an_authority_is_as_strict_verifiers_want_it(
    make: Callable[[NetworkKey], x509.Certificate], key: Ed25519PrivateKey, kind: str
) -> None:
    authority = make(KEY)
    assert common_name(authority.subject) == f"iris {kind} CA {KEY.fingerprint.hex()}"
    assert authority.public_key() == key.public_key()
    authority.verify_directly_issued_by(authority)  # raises if it is not
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value) == (True, x509.BasicConstraints(True, 0))
    usage = authority.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.key_cert_sign
    assert not usage.value.digital_signature
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issuer = authority.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert issuer.key_identifier == own.digest
    assert authority.not_valid_before_utc == datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert authority.not_valid_after_utc.year == 9999


# Leaves


def test_a_relays_leaf_names_it_and_is_signed_by_the_network_authority() -> None:
    leaf = relay_leaf(KEY, RELAY, SEED).certificate
    leaf.verify_directly_issued_by(network_authority(KEY))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier(f"iris-relay:{'a5' * 16}")]
    with pytest.raises(ValueError, match="subject"):
        leaf.verify_directly_issued_by(access_authority(KEY))


def test_an_access_leaf_names_its_own_key_and_is_signed_by_the_access_authority() -> None:
    leaf = access_leaf(KEY, SEED).certificate
    leaf.verify_directly_issued_by(access_authority(KEY))
    own = public_id(Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier(f"iris-access:{own.hex()}")]


@pytest.mark.parametrize(
    ("leaf", "usages"),
    [
        (
            relay_leaf(KEY, RELAY, SEED),
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
        ),
        (access_leaf(KEY, SEED), [ExtendedKeyUsageOID.CLIENT_AUTH]),
        (
            gateway_leaf(SITE, "eu", RELAY, SEED),
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
        ),
    ],
    ids=["relay", "access", "gateway"],
)
def test_an_access_leaf_does_not_serve_and_no_leaf_signs_certificates(
    leaf: Leaf, usages: list[x509.ObjectIdentifier]
) -> None:
    extensions = leaf.certificate.extensions
    extended = extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert (extended.critical, list(extended.value)) == (True, usages)
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca) == (True, False)
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert (usage.critical, usage.value.digital_signature) == (True, True)
    assert not usage.value.key_cert_sign


def test_leaves_of_two_seeds_differ_in_key_and_serial_number() -> None:
    one, two = (relay_leaf(KEY, RELAY, seed).certificate for seed in (SEED, b"t" * 32))
    assert one.public_key() != two.public_key()
    assert one.serial_number != two.serial_number


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_relay_id_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError, match="relay id"):
        relay_leaf(KEY, bytes(size), SEED)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_seed_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError, match="seed"):
        relay_leaf(KEY, RELAY, bytes(size))
    with pytest.raises(LocalProtocolError, match="seed"):
        access_leaf(KEY, bytes(size))


def test_private_keys_are_not_shown() -> None:
    for shown in (repr(relay_leaf(KEY, RELAY, SEED)), repr(parse_access(ACCESS))):
        assert "PRIVATE" not in shown
        assert "private_key" not in shown
        assert SEED.hex() not in shown
        assert repr(SEED)[2:-1] not in shown


# Sites


def test_a_sites_authority_is_made_of_its_public_key_and_name_alone_and_never_changes() -> None:
    authority = site_authority(SITE.public_key, "eu")
    assert (
        hashlib.sha256(der(authority)).hexdigest()
        == "62646c8c7dc5e1e155be5593431b05c5f81049355a8b16b52f69160c5c10fb43"
    )
    (organization,) = authority.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    assert organization.value == "eu"
    assert common_name(authority.subject) == f"iris site CA {public_id(SITE.public_key).hex()}"
    assert authority.issuer == authority.subject
    assert authority.public_key() == SITE.ca_key.public_key()
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value) == (True, x509.BasicConstraints(True, 0))
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issuer = authority.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert issuer.key_identifier == own.digest


def test_a_gateways_leaf_names_site_and_relay_and_is_signed_by_the_sites_authority() -> None:
    leaf = gateway_leaf(SITE, "eu", RELAY, SEED).certificate
    leaf.verify_directly_issued_by(site_authority(SITE.public_key, "eu"))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier(f"iris-gateway:eu:{'a5' * 16}")]
    with pytest.raises(ValueError, match="subject"):
        leaf.verify_directly_issued_by(site_authority(SITE.public_key, "us"))


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_gateway_with_a_relay_id_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError, match="relay id"):
        gateway_leaf(SITE, "eu", bytes(size), SEED)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_public_key_or_seed_of_another_length_makes_no_certificate(size: int) -> None:
    with pytest.raises(LocalProtocolError, match="seed"):
        gateway_leaf(SITE, "eu", RELAY, bytes(size))
    with pytest.raises(LocalProtocolError, match="public key"):
        site_authority(bytes(size), "eu")


# Access files


def test_an_access_file_is_read_as_it_was_written() -> None:
    access = parse_access(ACCESS)
    assert access.fingerprint == KEY.fingerprint
    assert access.leaf.certificate == access_leaf(KEY, SEED).certificate
    assert raw(access.leaf.private_key) == SEED
    assert access.authority == network_authority(KEY)
    names = access.leaf.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert f"iris-access:{access.access_id.hex()}" in str(names.value)


def test_an_access_file_that_was_annotated_or_went_through_windows_is_read() -> None:
    assert parse_access("# batch host, made in May\n" + ACCESS.replace("\n", "\r\n")).fingerprint == KEY.fingerprint  # fmt: skip


def test_an_access_file_holds_nothing_of_the_network_key() -> None:
    content = ACCESS.encode() + b"".join(
        serialization.load_pem_private_key(block.encode(), None).private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        if block is PRIVATE
        else der(x509.load_pem_x509_certificate(block.encode()))
        for block in (CERTIFICATE, PRIVATE, AUTHORITY)
    )
    assert SEED in content  # the search finds what is there
    for secret in (SECRET, raw(KEY.ca_key), raw(KEY.access_ca_key)):
        assert secret not in content
        assert secret.hex().encode() not in content
    assert KEY.reveal().encode() not in content


def other_private_key() -> str:
    return access_leaf(KEY, b"x" * 32).pem().removeprefix(pem(access_leaf(KEY, b"x" * 32).certificate))  # fmt: skip


def private_key_of_another_kind() -> str:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()  # fmt: skip


def authority_by_another_hand() -> str:
    """A certificate with the name and key of the network's authority, signed by somebody else."""
    genuine = network_authority(KEY)
    return pem(
        x509.CertificateBuilder(
            genuine.issuer,
            genuine.subject,
            genuine.public_key(),
            1,
            genuine.not_valid_before_utc,
            genuine.not_valid_after_utc,
        ).sign(Ed25519PrivateKey.from_private_bytes(SEED), None)
    )


def certificate_of_another_key() -> str:
    """An access certificate that names our key and holds another."""
    other = Ed25519PrivateKey.from_private_bytes(b"x" * 32)
    return pem(
        certificates._leaf(
            KEY.access_ca_key,
            access_authority(KEY),
            other,
            name="iris access",
            uri=f"iris-access:{parse_access(ACCESS).access_id.hex()}",
            usages=[ExtendedKeyUsageOID.CLIENT_AUTH],
        ).certificate
    )


WRONG = {
    "empty": "",
    "another file": "[default]\nkeys = []\n",
    "a relay's": relay_leaf(KEY, RELAY, SEED).pem() + AUTHORITY,
    "without authority": CERTIFICATE + PRIVATE,
    "without key": CERTIFICATE + AUTHORITY,
    "in another order": AUTHORITY + PRIVATE + CERTIFICATE,
    "one block too many": ACCESS + AUTHORITY,
    "another's key": CERTIFICATE + other_private_key() + AUTHORITY,
    "a certificate of another key": certificate_of_another_key() + PRIVATE + AUTHORITY,
    "a key of another kind": CERTIFICATE + private_key_of_another_kind() + AUTHORITY,
    "another network's authority": CERTIFICATE + PRIVATE + pem(network_authority(OTHER)),
    "the access authority": CERTIFICATE + PRIVATE + pem(access_authority(KEY)),
    "an authority by another hand": CERTIFICATE + PRIVATE + authority_by_another_hand(),
    "a bare authority as leaf": AUTHORITY + PRIVATE + AUTHORITY,
    "cut short": ACCESS[:-40],
    "damaged": ACCESS.replace(PRIVATE[40:60], "A" * 20),
    "no base64": ACCESS.replace(CERTIFICATE[40:60], "!" * 20),
    "not ASCII": ACCESS.replace(CERTIFICATE[40:60], "é" * 20),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_access_file_is_refused_without_a_word_of_it(text: str) -> None:
    with pytest.raises(KeyringError) as caught:
        parse_access(text)
    assert str(caught.value) == "not an access file; make one with `iris key access FILE`"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@given(st.integers(0, len(ACCESS) - 1), st.characters(max_codepoint=0x17F))
def test_an_access_file_with_any_character_changed_is_read_or_refused(
    at: int, character: str
) -> None:
    try:
        access = parse_access(ACCESS[:at] + character + ACCESS[at + 1 :])
    except KeyringError:
        return
    # The certificate's own signature is the relay's to check; what is ours still fits together.
    assert access.fingerprint == KEY.fingerprint
    assert raw(access.leaf.private_key) == SEED
