"""A certificate authority for one run and a server certificate for 127.0.0.1, for peers that are measured with TLS."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOURS = 24


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files; `key` is the private key of `cert`."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(directory: Path) -> Certificates:
    """Write the certificate of a new authority, and a server's certificate and key, to `directory`."""
    made = Certificates(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])

    def builder(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=HOURS))
        )

    # Python's default contexts (3.13) require what RFC 5280 requires of an authority.
    ca_usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = (
        builder(issuer, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(ca_usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    cert = (
        builder(subject, key.public_key())
        .add_extension(
            x509.SubjectAlternativeName([address, x509.DNSName("localhost")]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
        )
        .sign(ca_key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    made.ca.write_bytes(ca.public_bytes(encoding))
    made.cert.write_bytes(cert.public_bytes(encoding))
    made.key.touch(mode=0o600)
    made.key.write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made
