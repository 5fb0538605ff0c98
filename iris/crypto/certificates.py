"""X.509 certificates derived from network and site keys: authorities, and the leaves that they sign.

    network key ─┬─ network CA ── relay leaf    one per relay process; serves and dials
                 └─ access CA ─── access leaf   one per access file; dials a relay for a session, never serves
    site key ────── site CA ───── gateway leaf  one per gateway process; serves and dials

A link trusts only the network CA. A relay that accepts remote sessions trusts only the access CA for them, and those
sessions trust only the network CA. So neither kind of leaf is accepted in place of the other. Extended key usage
enforces this again: only relay and gateway leaves may act as a server.

All keys are Ed25519 (RFC 8410), whose signatures are deterministic, and the serial number and dates of an authority are
fixed. So every holder of the network key makes the same authorities, byte for byte.

Other sites pin a site's public key. From it and the site's name they make the site's authority themselves, without the
secret key, so its signature is made with a key that is public. That is safe: nobody, OpenSSL included, checks the
signature of a pinned authority. A leaf of a site CA is valid only under the pinned name, which is part of its issuer.

Leaves are named by a URI: `iris-relay:` or `iris-access:` and 32 hex digits, or `iris-gateway:`, the site, `:` and
32 hex digits. A host name (DNS SAN) would claim an address that nobody checks. A URI shows the kind of name, and `ssl`
returns it unchanged.
"""

from __future__ import annotations

# Two constant dates; no clock is read.
import datetime  # noqa: TID251
import re
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from iris.crypto.keys import (
    PUBLIC_KEY_BYTES,
    RELAY_ID_BYTES,
    SECRET_BYTES,
    NetworkKey,
    SiteKey,
    public_id,
)
from iris.errors import KeyringError, LocalProtocolError
from iris.wire.names import check_site

RELAY_URI: Final = "iris-relay"
ACCESS_URI: Final = "iris-access"
GATEWAY_URI: Final = "iris-gateway"

# Expiry adds no security where every relay holds the authority, and a wrong clock would break links.
# 9999-12-31 23:59:59 is RFC 5280's "no expiration" (§4.1.2.5).
_NOT_BEFORE: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)

# Signs site authorities. It is public, so the signature proves nothing, and nothing depends on it.
_ANYBODYS_KEY: Final = Ed25519PrivateKey.from_private_bytes(
    b"no site authority signs itself".ljust(32)
)

_BLOCK: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_ACCESS_BLOCKS: Final = ("CERTIFICATE", "PRIVATE KEY", "CERTIFICATE")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate and its private key."""

    certificate: x509.Certificate
    private_key: Ed25519PrivateKey = field(repr=False)

    def pem(self) -> str:
        """Return certificate and private key (PKCS #8, unencrypted) in PEM, as `load_cert_chain` reads them."""
        return _certificate_pem(self.certificate) + _key_pem(self.private_key)


@dataclass(frozen=True, slots=True)
class Access:
    """Content of an access file: `leaf` authenticates the client to relays, `authority`, the network CA, relays
    to the client.

    `fingerprint` (16 bytes) names the network, `access_id` (16 bytes) the leaf.
    """

    leaf: Leaf
    authority: x509.Certificate
    fingerprint: bytes
    access_id: bytes


def network_authority(key: NetworkKey) -> x509.Certificate:
    """Return the network CA, which signs relay leaves. The same key always gives the same bytes."""
    return _authority(key.ca_key, _network_name(key.fingerprint))


def access_authority(key: NetworkKey) -> x509.Certificate:
    """Return the access CA, which signs access leaves. The same key always gives the same bytes."""
    return _authority(key.access_ca_key, _access_name(key.fingerprint))


def relay_leaf(key: NetworkKey, relay_id: bytes, seed: bytes) -> Leaf:
    """Return the leaf of the relay `relay_id` (16 bytes), with a private key made from `seed`.

    `seed` is 32 random bytes, used for nothing else.

    Raises:
        LocalProtocolError: the id or the seed has another length.
    """
    _check_relay_id(relay_id)
    return _leaf(
        key.ca_key,
        network_authority(key),
        _leaf_key(seed),
        name=f"iris relay {relay_id.hex()}",
        uri=f"{RELAY_URI}:{relay_id.hex()}",
        usages=[ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
    )


def site_authority(public_key: bytes, site: str) -> x509.Certificate:
    """Return the CA of the site `site` with this pinned public key (32 bytes), for use as a trust anchor.

    The same arguments always give the same bytes. Its own signature does not prove anything.

    Raises:
        LocalProtocolError: the key has another length.
        InvalidName: `site` is not a site name.
    """
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise LocalProtocolError(
            f"a public key must be {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}"
        )
    key = Ed25519PublicKey.from_public_bytes(public_key)
    return _signed_authority(key, _site_name(public_key, site), _ANYBODYS_KEY)


def gateway_leaf(key: SiteKey, site: str, relay_id: bytes, seed: bytes) -> Leaf:
    """Return the leaf of the relay `relay_id` (16 bytes) as a gateway of `site`, with a private key made from `seed`.

    `seed` is 32 random bytes, used for nothing else.

    Raises:
        LocalProtocolError: the id or the seed has another length.
        InvalidName: `site` is not a site name.
    """
    _check_relay_id(relay_id)
    return _leaf(
        key.ca_key,
        site_authority(key.public_key, site),
        _leaf_key(seed),
        name=f"iris gateway {relay_id.hex()}",
        uri=f"{GATEWAY_URI}:{site}:{relay_id.hex()}",
        usages=[ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
    )


def access_leaf(key: NetworkKey, seed: bytes) -> Leaf:
    """Return a leaf that admits sessions, with a private key made from `seed` (32 random bytes).

    Its id is the `public_id` of its public key.

    Raises:
        LocalProtocolError: the seed has another length.
    """
    leaf_key = _leaf_key(seed)
    access_id = public_id(leaf_key.public_key().public_bytes_raw()).hex()
    return _leaf(
        key.access_ca_key,
        access_authority(key),
        leaf_key,
        name=f"iris access {access_id}",
        uri=f"{ACCESS_URI}:{access_id}",
        usages=[ExtendedKeyUsageOID.CLIENT_AUTH],
    )


def dump_access(key: NetworkKey, seed: bytes) -> str:
    """Return the text of a new access file: access leaf, its private key, and the network CA, in PEM.

    It admits its holder until the network key changes. It does not contain that key. `seed` is 32 random bytes.
    """
    return access_leaf(key, seed).pem() + _certificate_pem(network_authority(key))


def parse_access(text: str) -> Access:
    """Return the content of a file that `dump_access` wrote. Text around the PEM blocks is allowed.

    Raises:
        KeyringError: the text is not an access file, or its parts do not belong together. The error never
            repeats the text.
    """
    try:
        access = _parsed_access(text)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        access = None
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        access = None
    # Raised outside the handlers, because the causes do not help and may show what was read.
    if access is None:
        raise KeyringError("not an access file; make one with `iris key access FILE`")
    return access


def _parsed_access(text: str) -> Access | None:
    blocks = [(found[1], found[0].encode()) for found in _BLOCK.finditer(text)]
    if tuple(label for label, _ in blocks) != _ACCESS_BLOCKS:
        return None
    certificate = x509.load_pem_x509_certificate(blocks[0][1])
    private_key = serialization.load_pem_private_key(blocks[1][1], password=None)
    authority = x509.load_pem_x509_certificate(blocks[2][1])
    authority_key = authority.public_key()
    if not isinstance(private_key, Ed25519PrivateKey):
        return None
    if not isinstance(authority_key, Ed25519PublicKey):
        return None
    fingerprint = public_id(authority_key.public_bytes_raw())
    access_id = public_id(private_key.public_key().public_bytes_raw())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    belongs = (
        certificate.public_key() == private_key.public_key()
        and names.get_values_for_type(x509.UniformResourceIdentifier)
        == [f"{ACCESS_URI}:{access_id.hex()}"]
        and certificate.issuer == _access_name(fingerprint)
        and authority.subject == _network_name(fingerprint)
    )
    if not belongs:
        return None
    authority.verify_directly_issued_by(authority)
    return Access(Leaf(certificate, private_key), authority, fingerprint, access_id)


def _network_name(fingerprint: bytes) -> x509.Name:
    return _common_name(f"iris network CA {fingerprint.hex()}")


def _access_name(fingerprint: bytes) -> x509.Name:
    return _common_name(f"iris access CA {fingerprint.hex()}")


def _site_name(public_key: bytes, site: str) -> x509.Name:
    # A common name has at most 64 characters, which is too short for both.
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, check_site(site)),
            x509.NameAttribute(NameOID.COMMON_NAME, f"iris site CA {public_id(public_key).hex()}"),
        ]
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _authority(key: Ed25519PrivateKey, name: x509.Name) -> x509.Certificate:
    return _signed_authority(key.public_key(), name, key)


def _signed_authority(
    key: Ed25519PublicKey, name: x509.Name, signer: Ed25519PrivateKey
) -> x509.Certificate:
    builder = _builder(key, subject=name, issuer=name, issuer_key=key)
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(signer, None)
    )


def _leaf(
    authority_key: Ed25519PrivateKey,
    authority: x509.Certificate,
    key: Ed25519PrivateKey,
    *,
    name: str,
    uri: str,
    usages: list[x509.ObjectIdentifier],
) -> Leaf:
    builder = _builder(
        key.public_key(),
        subject=_common_name(name),
        issuer=authority.subject,
        issuer_key=authority_key.public_key(),
    )
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
        )
        .sign(authority_key, None)
    )
    return Leaf(certificate, key)


def _builder(
    public_key: Ed25519PublicKey,
    *,
    subject: x509.Name,
    issuer: x509.Name,
    issuer_key: Ed25519PublicKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        # Each key has one certificate, so the hash of the key is as unique a serial number as a random one.
        .serial_number(int.from_bytes(public_id(public_key.public_bytes_raw())))
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _check_relay_id(relay_id: bytes) -> None:
    if len(relay_id) != RELAY_ID_BYTES:
        raise LocalProtocolError(f"a relay id must be {RELAY_ID_BYTES} bytes, not {len(relay_id)}")


def _leaf_key(seed: bytes) -> Ed25519PrivateKey:
    if len(seed) != SECRET_BYTES:
        raise LocalProtocolError(f"a seed must be {SECRET_BYTES} bytes, not {len(seed)}")
    return Ed25519PrivateKey.from_private_bytes(seed)


def _certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
