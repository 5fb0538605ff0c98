"""What TLS promises between sites: gateways meet under the keys that were pinned, each under its own site's name,
and nobody else does.
"""

from __future__ import annotations

import ssl

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.handshake import Meeting, shake

from iris import remote
from iris.crypto import certificates
from iris.crypto.certificates import Leaf, access_leaf, gateway_leaf, relay_leaf, site_authority
from iris.crypto.keys import NetworkKey, SiteKey, public_id
from iris.errors import InvalidName, LocalProtocolError, PeerProtocolError
from iris.remote import bare_context, mutual_context
from relay.net.tls import (
    LINK_ALPN,
    SESSION_ALPN,
    WAN_ALPN,
    Credentials,
    GatewayCredentials,
    check_alpn,
    gateway_server_context,
    link_server_context,
    peer_gateway,
    peer_relay_id,
    peer_site_key,
    session_server_context,
)

SECRET = b"e" * 32
EU, US, AP = SiteKey(SECRET), SiteKey(b"u" * 32), SiteKey(b"a" * 32)
HERE, THERE = b"\x01" * 16, b"\x02" * 16
SEED = b"s" * 32
CLIENT, SERVER = ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER

OURS = GatewayCredentials(EU, "eu", HERE, {"us": [US.public_key], "ap": [AP.public_key]})
THEIRS = GatewayCredentials(US, "us", THERE, {"eu": [EU.public_key]})


def dial(ours: GatewayCredentials, theirs: GatewayCredentials, site: str = "us") -> Meeting:
    """Return how `ours` fares when it dials `theirs`, which it takes for a gateway of `site`."""
    return shake(ours.dialling[site], gateway_server_context(theirs), ours.server_name)


def verdict(error: ssl.SSLError | None) -> str:
    assert error is not None
    return error.reason


def shown_by(leaf: Leaf, *, alpn: str = WAN_ALPN) -> ssl.SSLContext:
    """Return a dialling side with a leaf of our choice, which trusts the gateways of us and eu."""
    context = mutual_context(
        CLIENT, alpn=alpn, leaf=leaf, trusted=site_authority(US.public_key, "us")
    )
    context.load_verify_locations(
        cadata=site_authority(EU.public_key, "eu").public_bytes(Encoding.DER)
    )
    return context


def serving(leaf: Leaf, *, alpn: str = WAN_ALPN) -> ssl.SSLContext:
    """Return an accepting side with a leaf of our choice, which trusts the gateways of eu."""
    authority = site_authority(EU.public_key, "eu")
    return mutual_context(SERVER, alpn=alpn, leaf=leaf, trusted=authority)


# Who meets


def test_gateways_of_two_sites_meet_whoever_dials_and_know_each_other() -> None:
    for met, client, server in (
        (dial(OURS, THEIRS), (EU, "eu", HERE), (US, "us", THERE)),
        (dial(THEIRS, OURS, "eu"), (US, "us", THERE), (EU, "eu", HERE)),
    ):
        assert met.up, met
        for side, (key, site, relay_id) in ((met.client, server), (met.server, client)):
            check_alpn(side, WAN_ALPN)
            assert side.version() == "TLSv1.3"
            assert peer_gateway(side, site) == relay_id
            assert peer_site_key(side) == public_id(key.public_key)


def test_the_acceptor_holds_a_dialler_against_the_authority_of_the_site_that_it_says_it_is() -> (
    None
):
    met = dial(THEIRS, OURS, "eu")
    (pin,) = [pin for pin in OURS.pins if pin.accepting is met.server.context]
    assert (pin.site, pin.fingerprint) == ("us", public_id(US.public_key))


def test_the_trust_anchors_signature_is_nobodys_and_only_what_the_pinned_key_signed_holds() -> None:
    authority = site_authority(US.public_key, "us")
    with pytest.raises(InvalidSignature):
        authority.verify_directly_issued_by(authority)
    gateway_leaf(US, "us", THERE, SEED).certificate.verify_directly_issued_by(authority)
    # OpenSSL, on both sides, does without that signature, and not without the leaf's.
    assert shake(shown_by(gateway_leaf(EU, "eu", HERE, SEED)), serving(gateway_leaf(US, "us", THERE, SEED)), None).up  # fmt: skip
    for forger in (certificates._ANYBODYS_KEY, Ed25519PrivateKey.generate()):
        forged = forge(forger, authority)
        met = shake(OURS.dialling["us"], serving(forged), OURS.server_name)
        assert verdict(met.client_error) == "CERTIFICATE_VERIFY_FAILED"
        met = shake(shown_by(forged), gateway_server_context(OURS), THEIRS.server_name)
        assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"


def forge(signer: Ed25519PrivateKey, authority: x509.Certificate, site: str = "us") -> Leaf:
    """Return a leaf that claims `authority`, signed by another key; the key identifier is the claimed one's."""
    genuine = gateway_leaf(US, site, THERE, SEED).certificate
    builder = x509.CertificateBuilder(
        authority.subject, genuine.subject, genuine.public_key(), 1, genuine.not_valid_before_utc, genuine.not_valid_after_utc,
    )  # fmt: skip
    for extension in genuine.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return Leaf(builder.sign(signer, None), Ed25519PrivateKey.from_private_bytes(SEED))


class Chained:
    """A leaf that brings certificates of authorities along."""

    def __init__(self, leaf: Leaf, *others: x509.Certificate) -> None:
        self.leaf = leaf
        self.others = others

    def pem(self) -> str:
        brought = [other.public_bytes(Encoding.PEM).decode() for other in self.others]
        return self.leaf.pem() + "".join(brought)


def test_authorities_that_a_gateway_brings_along_prove_nothing() -> None:
    foreign = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    ours = site_authority(US.public_key, "us")
    namesake = certificates._authority(foreign, ours.subject)
    renamed = site_authority(AP.public_key, "ap")
    for leaf, others in (
        (forge(foreign, ours), (namesake,)),
        (forge(foreign, ours), (namesake, ours)),
        (gateway_leaf(AP, "us", THERE, SEED), (site_authority(AP.public_key, "us"),)),
        (gateway_leaf(AP, "us", THERE, SEED), (site_authority(AP.public_key, "us"), renamed)),
    ):
        context = bare_context(CLIENT, alpn=WAN_ALPN)
        context.load_verify_locations(
            cadata=site_authority(EU.public_key, "eu").public_bytes(Encoding.DER)
        )
        remote._present(context, Chained(leaf, *others))  # type: ignore[arg-type]  # has pem()
        met = shake(context, gateway_server_context(OURS), THEIRS.server_name)
        assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"


# Names


def test_a_site_with_a_key_of_its_own_cannot_show_another_sites_name() -> None:
    """ap's key is pinned as ap: what it signs as us does not hold, and what it signs as ap is not us."""
    posing = GatewayCredentials(AP, "us", THERE, {"eu": [EU.public_key]})
    met = dial(posing, OURS, "eu")  # says that it has ap's key, and shows a leaf of us
    assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"
    met = shake(posing.dialling["eu"], gateway_server_context(OURS), THEIRS.server_name)
    assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"  # says that it has us's key
    met = dial(OURS, posing)  # is dialled as us
    assert verdict(met.client_error) == "CERTIFICATE_VERIFY_FAILED"
    met = dial(OURS, posing, "ap")  # is dialled as ap
    assert verdict(met.client_error) == "CERTIFICATE_VERIFY_FAILED"


def leaf_named(uri: str, issuer_site: str, key: SiteKey) -> Leaf:
    """Return a leaf that a site's own key signed, under its right issuer, with a name of its choice."""
    return certificates._leaf(
        key.ca_key,
        site_authority(key.public_key, issuer_site),
        Ed25519PrivateKey.from_private_bytes(SEED),
        name="iris gateway",
        uri=uri,
        usages=[ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
    )


@pytest.mark.parametrize(
    "uri",
    [
        f"iris-gateway:us:{THERE.hex()}",
        f"iris-gateway:AP:{THERE.hex()}",
        f"iris-gateway:ap:{THERE.hex()}0",
        f"iris-gateway:ap:{THERE.hex()[:-1]}",
        f"iris-gateway:ap:us:{THERE.hex()}",
        f"iris-gateway::{THERE.hex()}",
        f"iris-gateway:{THERE.hex()}",
        f"iris-relay:{THERE.hex()}",
        f"iris-access:{THERE.hex()}",
    ],
)
def test_a_leaf_that_names_no_gateway_of_the_pinned_site_is_refused_though_its_key_signed_it(
    uri: str,
) -> None:
    leaf = leaf_named(uri, "ap", AP)
    client = mutual_context(
        CLIENT, alpn=WAN_ALPN, leaf=leaf, trusted=site_authority(EU.public_key, "eu")
    )
    met = shake(client, gateway_server_context(OURS), public_id(AP.public_key).hex())
    assert met.up
    with pytest.raises(PeerProtocolError):
        peer_gateway(met.server, "ap")
    met = shake(OURS.dialling["ap"], serving(leaf), OURS.server_name)
    assert met.up
    with pytest.raises(PeerProtocolError):
        peer_gateway(met.client, "ap")


def test_a_site_pinned_under_a_name_that_it_does_not_go_by_is_refused() -> None:
    wrong = GatewayCredentials(EU, "eu", HERE, {"usa": [US.public_key]})
    met = dial(wrong, THEIRS, "usa")
    assert verdict(met.client_error) == "CERTIFICATE_VERIFY_FAILED"
    met = dial(THEIRS, wrong, "eu")
    assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"


@pytest.mark.parametrize("name", ["", "EU", "e u", "eu:us", "1eu", "-eu", "e" * 33, "eu\n", "ü"])
def test_what_is_not_a_sites_name_gets_no_certificate(name: str) -> None:
    with pytest.raises(InvalidName):
        gateway_leaf(EU, name, HERE, SEED)
    with pytest.raises(InvalidName):
        site_authority(EU.public_key, name)


def test_the_longest_name_fits() -> None:
    longest = "a" + "-9z" * 10 + "z"
    ours = GatewayCredentials(EU, longest, HERE, {"us": [US.public_key]})
    theirs = GatewayCredentials(US, "us", THERE, {longest: [EU.public_key]})
    met = dial(ours, theirs)
    assert met.up, met
    assert peer_gateway(met.server, longest) == HERE


# Pins


def test_a_gateway_under_another_key_than_the_pinned_one_is_refused_by_the_dialler() -> None:
    stolen_address = GatewayCredentials(AP, "us", THERE, {"eu": [EU.public_key]})
    met = dial(OURS, stolen_address)
    assert verdict(met.client_error) == "CERTIFICATE_VERIFY_FAILED"
    assert met.server_error is not None


@pytest.mark.parametrize(
    "name", [None, "gw.us.example", THEIRS.server_name.upper(), THEIRS.server_name[:-1], "f" * 32, OURS.server_name]
)  # fmt: skip
def test_a_dialler_whose_key_is_not_pinned_learns_nothing_of_us(name: str | None) -> None:
    met = shake(THEIRS.dialling["eu"], gateway_server_context(OURS), name)
    assert met.server_error is not None
    assert met.alert == "TLSV1_UNRECOGNIZED_NAME"
    with pytest.raises(ValueError, match="not done"):
        met.client.getpeercert()  # it was shown no certificate


def test_a_dialler_under_a_pinned_name_without_its_key_is_refused() -> None:
    met = shake(dialler_of(AP, "ap"), gateway_server_context(OURS), THEIRS.server_name)
    assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"


def dialler_of(key: SiteKey, site: str) -> ssl.SSLContext:
    return GatewayCredentials(key, site, THERE, {"eu": [EU.public_key]}).dialling["eu"]


def test_while_a_site_changes_its_key_both_are_pinned_and_either_serves_and_dials() -> None:
    new = SiteKey(b"n" * 32)
    both = GatewayCredentials(EU, "eu", HERE, {"us": [US.public_key, new.public_key]})
    renewed = GatewayCredentials(new, "us", THERE, {"eu": [EU.public_key]})
    for key, credentials in ((US, THEIRS), (new, renewed)):
        dialled, accepted = dial(both, credentials), dial(credentials, both, "eu")
        for met, seen in ((dialled, dialled.client), (accepted, accepted.server)):
            assert met.up, met
            assert peer_gateway(seen, "us") == THERE
            assert peer_site_key(seen) == public_id(key.public_key)
    old_alone = dial(OURS, renewed)
    assert verdict(old_alone.client_error) == "CERTIFICATE_VERIFY_FAILED"


# Other kinds of certificates, other protocols


def test_leaves_of_a_network_and_of_an_access_file_are_refused_as_a_gateways_and_the_reverse() -> (
    None
):
    """Even where one secret was used for all of them."""
    network = NetworkKey(SECRET)
    relays = Credentials(network, THERE)
    for leaf in (relay_leaf(network, THERE, SEED), access_leaf(network, SEED)):
        met = shake(shown_by(leaf), gateway_server_context(THEIRS), OURS.server_name)
        assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"
        met = shake(THEIRS.dialling["eu"], serving(leaf), THEIRS.server_name)
        assert verdict(met.client_error) == "CERTIFICATE_VERIFY_FAILED"
    ours = gateway_leaf(EU, "eu", HERE, SEED)
    for alpn, server in (
        (LINK_ALPN, link_server_context([relays])),
        (SESSION_ALPN, session_server_context([relays])),
    ):
        client = mutual_context(
            CLIENT, alpn=alpn, leaf=ours, trusted=certificates.network_authority(network)
        )
        met = shake(client, server, relays.server_name)
        assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"
    met = shake(relays.dialling, serving(ours, alpn=LINK_ALPN), relays.server_name)
    assert verdict(met.client_error) == "CERTIFICATE_VERIFY_FAILED"


def test_a_gateways_name_is_refused_for_a_relay_and_a_relays_for_a_gateway() -> None:
    met = dial(OURS, THEIRS)
    for side in (met.client, met.server):
        with pytest.raises(PeerProtocolError, match="iris-relay"):
            peer_relay_id(side)
    relays = Credentials(NetworkKey(SECRET), THERE)
    met = shake(relays.dialling, link_server_context([relays]), relays.server_name)
    with pytest.raises(PeerProtocolError, match="iris-gateway"):
        peer_gateway(met.server, "eu")
    with pytest.raises(PeerProtocolError, match="site key"):
        peer_site_key(met.server)


@pytest.mark.parametrize("alpn", ["iris-wan/2", LINK_ALPN, SESSION_ALPN, "h2"])
def test_a_gateway_that_speaks_something_else_is_refused_on_both_sides(alpn: str) -> None:
    client = shown_by(gateway_leaf(EU, "eu", HERE, SEED), alpn=alpn)
    met = shake(client, gateway_server_context(THEIRS), OURS.server_name)
    for side in (met.client, met.server):
        with pytest.raises(PeerProtocolError, match=WAN_ALPN):
            check_alpn(side, WAN_ALPN)


def test_tls_1_2_and_nobodys_certificate_are_refused() -> None:
    old = shown_by(gateway_leaf(EU, "eu", HERE, SEED))
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    met = shake(old, gateway_server_context(THEIRS), OURS.server_name)
    assert verdict(met.server_error) == "UNSUPPORTED_PROTOCOL"
    bare = bare_context(CLIENT, alpn=WAN_ALPN)
    bare.load_verify_locations(
        cadata=site_authority(US.public_key, "us").public_bytes(Encoding.DER)
    )
    met = shake(bare, gateway_server_context(THEIRS), OURS.server_name)
    assert verdict(met.server_error) == "PEER_DID_NOT_RETURN_A_CERTIFICATE"


def test_a_gateways_leaf_signs_no_further_leaves() -> None:
    above = gateway_leaf(US, "us", THERE, b"l" * 32)
    below = certificates._leaf(
        above.private_key,
        above.certificate,
        Ed25519PrivateKey.from_private_bytes(SEED),
        name="iris gateway",
        uri=f"iris-gateway:us:{HERE.hex()}",
        usages=[ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
    )
    context = bare_context(CLIENT, alpn=WAN_ALPN)
    context.load_verify_locations(
        cadata=site_authority(EU.public_key, "eu").public_bytes(Encoding.DER)
    )
    remote._present(context, Chained(below, above.certificate))  # type: ignore[arg-type]  # has pem()
    met = shake(context, gateway_server_context(OURS), THEIRS.server_name)
    assert verdict(met.server_error) == "CERTIFICATE_VERIFY_FAILED"


def test_nothing_is_trusted_but_the_pins_and_nothing_secret_is_shown() -> None:
    contexts = [*OURS.dialling.values(), *(pin.accepting for pin in OURS.pins)]
    for context in contexts:
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
    assert gateway_server_context(OURS).get_ca_certs() == []
    assert EU.reveal() not in repr(OURS)
    assert SECRET.hex() not in repr(OURS)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_pin_or_a_relay_id_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError, match="public key"):
        GatewayCredentials(EU, "eu", HERE, {"us": [bytes(size)]})
    with pytest.raises(LocalProtocolError, match="relay id"):
        GatewayCredentials(EU, "eu", bytes(size), {})
