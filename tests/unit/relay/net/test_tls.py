"""What TLS promises: relays of one network meet, holders of access files get in, and nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.handshake import Meeting, shake

from iris import remote
from iris.crypto import certificates
from iris.crypto.certificates import (
    Leaf,
    access_authority,
    access_leaf,
    network_authority,
    relay_leaf,
)
from iris.crypto.keys import NetworkKey
from iris.errors import ConfigError, KeyringError, LocalProtocolError, PeerProtocolError
from iris.remote import RemoteAccess, bare_context, load_access, mutual_context
from relay.net.tls import (
    LINK_ALPN,
    SESSION_ALPN,
    Credentials,
    check_alpn,
    counting_garbled_names,
    link_server_context,
    make_access,
    peer_access_id,
    peer_relay_id,
    refusal,
    session_server_context,
)

KEY, OTHER = NetworkKey(b"k" * 32), NetworkKey(b"o" * 32)
HERE, THERE = b"\x01" * 16, b"\x02" * 16
SEED = b"s" * 32
CLIENT, SERVER = ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER
NAME = KEY.fingerprint.hex()

US, THEM = Credentials(KEY, HERE), Credentials(KEY, THERE)
STRANGER = Credentials(OTHER, THERE)


def meet(
    client_context: ssl.SSLContext,
    server_context: ssl.SSLContext,
    name: str | None = NAME,
    *,
    session: ssl.SSLSession | None = None,
    rewrite: Callable[[bytes], bytes] = bytes,
) -> Meeting:
    return shake(client_context, server_context, name, session=session, rewrite=rewrite)


def link_client(leaf: Leaf, trusted: x509.Certificate | None = None) -> ssl.SSLContext:
    """Return a link's dialling side with a leaf of our choice."""
    return mutual_context(
        CLIENT, alpn=LINK_ALPN, leaf=leaf, trusted=trusted or network_authority(KEY)
    )


def forged_leaf(*, issuer: x509.Certificate, key: Ed25519PrivateKey) -> Leaf:
    """Return a relay's leaf that claims `issuer` and is signed by `key`."""
    return certificates._leaf(
        key,
        issuer,
        Ed25519PrivateKey.from_private_bytes(SEED),
        name="iris relay",
        uri=f"iris-relay:{THERE.hex()}",
        usages=[
            ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        ],
    )


def renamed_leaf(*uris: str) -> Leaf:
    """Return a leaf of the network's authority with these names and no other."""
    genuine = relay_leaf(KEY, THERE, SEED)
    builder = x509.CertificateBuilder(
        genuine.certificate.issuer,
        genuine.certificate.subject,
        genuine.certificate.public_key(),
        1,
        genuine.certificate.not_valid_before_utc,
        genuine.certificate.not_valid_after_utc,
    )
    for extension in genuine.certificate.extensions:
        if not isinstance(extension.value, x509.SubjectAlternativeName):
            builder = builder.add_extension(extension.value, extension.critical)
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(names, critical=False)
    return Leaf(builder.sign(KEY.ca_key, None), genuine.private_key)


@pytest.fixture
def access(tmp_path: Path) -> RemoteAccess:
    return load_access(access_file(tmp_path, make_access(KEY)))


def access_file(directory: Path, content: bytes, mode: int = 0o600) -> Path:
    path = directory / "access.pem"
    path.write_bytes(content)
    path.chmod(mode)
    return path


# Links


def test_relays_of_one_network_meet_and_know_each_other() -> None:
    met = meet(US.dialling, link_server_context([THEM]))
    assert met.up, met
    assert peer_relay_id(met.client) == THERE
    assert peer_relay_id(met.server) == HERE
    for side in (met.client, met.server):
        check_alpn(side, LINK_ALPN)
        assert side.version() == "TLSv1.3"


def test_a_certificate_until_the_end_of_year_9999_is_taken_and_read() -> None:
    met = meet(US.dialling, link_server_context([THEM]))
    assert met.up, met
    certificate = met.server.getpeercert()
    assert certificate is not None
    assert certificate["notAfter"] == "Dec 31 23:59:59 9999 GMT"


def test_a_dialler_of_another_network_is_refused_by_its_server_name() -> None:
    met = meet(STRANGER.dialling, link_server_context([THEM]), STRANGER.server_name)
    assert met.server_error is not None
    assert met.alert == "TLSV1_UNRECOGNIZED_NAME"


@pytest.mark.parametrize("name", [None, "relay.example", NAME.upper(), NAME[:-1], NAME + "0", "f" * 32])  # fmt: skip
def test_an_unknown_or_absent_server_name_is_refused(name: str | None) -> None:
    for context in (link_server_context([THEM]), session_server_context([THEM])):
        met = meet(US.dialling, context, name)
        assert met.server_error is not None
        assert met.alert == "TLSV1_UNRECOGNIZED_NAME"
        with pytest.raises(ValueError, match="not done"):
            # It was shown no certificate.
            met.client.getpeercert()


def test_a_dialler_that_names_the_network_but_is_not_of_it_is_refused_by_the_acceptor() -> None:
    outsider = link_client(relay_leaf(OTHER, THERE, SEED))
    met = meet(outsider, link_server_context([THEM]))
    assert met.server_error is not None
    assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"
    assert met.alert == "TLSV1_ALERT_UNKNOWN_CA"


def test_an_acceptor_of_another_network_is_refused_by_the_dialler() -> None:
    impostor = mutual_context(
        SERVER, alpn=LINK_ALPN, leaf=relay_leaf(OTHER, THERE, SEED), trusted=network_authority(KEY)
    )
    met = meet(US.dialling, impostor)
    assert met.client_error is not None
    assert met.alert == "CERTIFICATE_VERIFY_FAILED"
    assert met.server_error is not None


def test_a_foreign_self_signed_certificate_is_refused_on_both_sides() -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    alone = Leaf(certificates._authority(key, network_authority(KEY).subject), key)
    assert alone.certificate.subject == network_authority(KEY).subject
    for foreign in (alone, forged_leaf(issuer=alone.certificate, key=key)):
        met = meet(link_client(foreign), link_server_context([THEM]))
        assert met.server_error is not None
        assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"
        server = mutual_context(
            SERVER, alpn=LINK_ALPN, leaf=foreign, trusted=network_authority(KEY)
        )
        met = meet(US.dialling, server)
        assert met.client_error is not None
        assert met.client_error.reason == "CERTIFICATE_VERIFY_FAILED"


@dataclass
class Chained:
    """A leaf that brings certificates of authorities along."""

    leaf: Leaf
    others: list[x509.Certificate]

    def pem(self) -> str:
        return self.leaf.pem() + "".join(
            other.public_bytes(Encoding.PEM).decode() for other in self.others
        )


def test_authorities_that_a_peer_brings_along_prove_nothing() -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    namesake = certificates._authority(key, network_authority(KEY).subject)
    for others in ([namesake], [network_authority(KEY)], [namesake, network_authority(KEY)]):
        context = bare_context(CLIENT, alpn=LINK_ALPN)
        context.load_verify_locations(cadata=network_authority(KEY).public_bytes(Encoding.DER))
        remote._present(context, Chained(forged_leaf(issuer=namesake, key=key), others))  # type: ignore[arg-type]  # has pem()
        met = meet(context, link_server_context([THEM]))
        assert met.server_error is not None
        assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"
    # The same way of building it gets in with a genuine leaf: what failed above was the forgery.
    context = bare_context(CLIENT, alpn=LINK_ALPN)
    context.load_verify_locations(cadata=network_authority(KEY).public_bytes(Encoding.DER))
    remote._present(context, Chained(relay_leaf(KEY, HERE, SEED), [network_authority(KEY)]))  # type: ignore[arg-type]  # has pem()
    assert meet(context, link_server_context([THEM])).up


def test_a_leaf_signs_no_further_leaves() -> None:
    ours = relay_leaf(KEY, HERE, b"l" * 32)
    below = forged_leaf(issuer=ours.certificate, key=ours.private_key)
    context = bare_context(CLIENT, alpn=LINK_ALPN)
    context.load_verify_locations(cadata=network_authority(KEY).public_bytes(Encoding.DER))
    remote._present(context, Chained(below, [ours.certificate]))  # type: ignore[arg-type]  # has pem()
    met = meet(context, link_server_context([THEM]))
    assert met.server_error is not None
    assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"


def test_an_access_leaf_does_not_pass_for_a_relay() -> None:
    leaf = access_leaf(KEY, SEED)
    met = meet(link_client(leaf), link_server_context([THEM]))
    assert met.server_error is not None
    assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"
    server = mutual_context(SERVER, alpn=LINK_ALPN, leaf=leaf, trusted=network_authority(KEY))
    met = meet(US.dialling, server)
    assert met.client_error is not None
    assert met.client_error.reason == "CERTIFICATE_VERIFY_FAILED"


def test_an_access_leaf_never_serves_even_where_its_authority_is_trusted() -> None:
    server = mutual_context(
        SERVER, alpn=LINK_ALPN, leaf=access_leaf(KEY, SEED), trusted=network_authority(KEY)
    )
    met = meet(link_client(relay_leaf(KEY, HERE, SEED), trusted=access_authority(KEY)), server)
    assert isinstance(met.client_error, ssl.SSLCertVerificationError)
    assert "purpose" in met.client_error.verify_message


def test_tls_1_2_is_refused_by_either_side() -> None:
    old_client = mutual_context(
        CLIENT, alpn=LINK_ALPN, leaf=relay_leaf(KEY, HERE, SEED), trusted=network_authority(KEY)
    )
    old_server = mutual_context(
        SERVER, alpn=LINK_ALPN, leaf=relay_leaf(KEY, THERE, SEED), trusted=network_authority(KEY)
    )
    for context in (old_client, old_server):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert meet(old_client, old_server).up
    met = meet(old_client, link_server_context([THEM]))
    assert met.server_error is not None
    assert refusal(met.server_error) == "TLS version"
    assert met.alert == "TLSV1_ALERT_PROTOCOL_VERSION"
    assert not meet(US.dialling, old_server).up


@pytest.mark.parametrize("build", [link_server_context, session_server_context])
def test_a_client_without_a_certificate_is_refused(
    build: Callable[[list[Credentials]], ssl.SSLContext],
) -> None:
    context = bare_context(CLIENT, alpn=LINK_ALPN)
    context.load_verify_locations(cadata=network_authority(KEY).public_bytes(Encoding.DER))
    met = meet(context, build([THEM]))
    assert met.server_error is not None
    assert refusal(met.server_error) == "no certificate"
    assert met.alert == "TLSV13_ALERT_CERTIFICATE_REQUIRED"


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\x10\x00\x00\x00\x01hello, relay"]
)
def test_plain_text_is_refused(sent: bytes) -> None:
    met = meet(US.dialling, link_server_context([THEM]), rewrite=lambda data: sent)
    assert met.server_error is not None
    assert refusal(met.server_error) == "not TLS"


def test_what_is_cut_short_or_made_up_is_refused() -> None:
    for sent in (b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00", b"\x16\x03\x01" + b"z" * 30):
        met = meet(US.dialling, link_server_context([THEM]), rewrite=lambda data, sent=sent: sent)  # type: ignore[misc]  # a bound default
        assert met.server_error is not None
        assert refusal(met.server_error) in ("TLS failure", "not TLS")


@pytest.mark.parametrize("alpn", ["iris-link/2", SESSION_ALPN, "h2", None])
def test_a_peer_that_speaks_something_else_is_refused_on_both_sides(alpn: str | None) -> None:
    leaf, trusted = relay_leaf(KEY, HERE, SEED), network_authority(KEY)
    if alpn is None:
        client = ssl.SSLContext(CLIENT)
        client.check_hostname = False
        client.load_verify_locations(cadata=trusted.public_bytes(Encoding.DER))
        remote._present(client, leaf)
    else:
        client = mutual_context(CLIENT, alpn=alpn, leaf=leaf, trusted=trusted)
    met = meet(client, link_server_context([THEM]))
    for side in (met.client, met.server):
        with pytest.raises(PeerProtocolError, match=LINK_ALPN):
            check_alpn(side, LINK_ALPN)


def test_an_old_and_a_new_network_key_are_served_side_by_side() -> None:
    server = link_server_context([THEM, Credentials(OTHER, b"\x04" * 16)])
    old = meet(US.dialling, server)
    new = meet(Credentials(OTHER, b"\x03" * 16).dialling, server, STRANGER.server_name)
    assert old.up, old
    assert new.up, new
    assert (peer_relay_id(old.client), peer_relay_id(old.server)) == (THERE, HERE)
    assert (peer_relay_id(new.client), peer_relay_id(new.server)) == (b"\x04" * 16, b"\x03" * 16)
    for met in (old, new):
        check_alpn(met.server, LINK_ALPN)


def test_a_leaf_of_one_network_does_not_open_another_that_the_relay_serves_too() -> None:
    server = link_server_context([THEM, STRANGER])
    crossed = link_client(relay_leaf(KEY, HERE, SEED), trusted=network_authority(OTHER))
    met = meet(crossed, server, STRANGER.server_name)
    assert met.server_error is not None
    assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"


def test_a_network_added_or_removed_counts_for_the_next_connection() -> None:
    served: list[Credentials] = []
    server = link_server_context(served)
    assert not meet(US.dialling, server).up
    served.append(THEM)
    assert meet(US.dialling, server).up
    served.clear()
    assert meet(US.dialling, server).alert == "TLSV1_UNRECOGNIZED_NAME"


def test_no_connection_resumes_another() -> None:
    server = link_server_context([THEM])
    first = meet(US.dialling, server)
    assert first.up, first
    assert first.client.session is not None
    assert not first.client.session.has_ticket
    again = meet(US.dialling, server, session=first.client.session)
    assert again.up, again
    assert not again.client.session_reused
    assert peer_relay_id(again.server) == HERE


@pytest.mark.parametrize(
    "uris",
    [
        (),
        ("iris-relay:",),
        ("iris-relay:" + "a" * 31,),
        ("iris-relay:" + "A" * 32,),
        ("iris-relay:" + "a" * 32 + "\n",),
        ("iris-access:" + "a" * 32,),
        ("https://iris-relay:" + "a" * 32,),
        ("iris-relay:" + "a" * 32, "iris-relay:" + "b" * 32),
    ],
)
def test_a_certificate_that_does_not_name_one_relay_is_a_protocol_error(
    uris: tuple[str, ...],
) -> None:
    met = meet(link_client(renamed_leaf(*uris)), link_server_context([THEM]))
    assert met.up, met
    with pytest.raises(PeerProtocolError, match="iris-relay"):
        peer_relay_id(met.server)


def test_a_relay_id_of_another_length_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="relay id"):
        Credentials(KEY, b"short")


# What contexts trust and tell


def test_contexts_trust_one_authority_and_nothing_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = tmp_path / "system.pem"
    system.write_bytes(network_authority(OTHER).public_bytes(Encoding.PEM))
    monkeypatch.setenv("SSL_CERT_FILE", str(system))
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys.log"))
    credentials = Credentials(KEY, THERE)
    expected = {
        credentials.dialling: network_authority(KEY),
        credentials.accepting: network_authority(KEY),
        credentials.admitting: access_authority(KEY),
    }
    for context, authority in expected.items():
        assert context.get_ca_certs(binary_form=True) == [authority.public_bytes(Encoding.DER)]
        assert context.keylog_filename is None
    impostor = mutual_context(
        SERVER, alpn=LINK_ALPN, leaf=relay_leaf(OTHER, THERE, SEED), trusted=network_authority(KEY)
    )
    assert meet(credentials.dialling, impostor).alert == "CERTIFICATE_VERIFY_FAILED"
    assert link_server_context([credentials]).get_ca_certs() == []
    assert not (tmp_path / "keys.log").exists()


def test_the_private_key_reaches_openssl_through_memory_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, bool]] = []
    original = ssl.SSLContext.load_cert_chain

    def load(context: ssl.SSLContext, path: str) -> None:
        number = int(path.removeprefix("/proc/self/fd/"))
        taken.append((os.readlink(path), os.get_inheritable(number)))
        original(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load)
    before = set(os.listdir("/proc/self/fd"))
    Credentials(KEY, HERE)
    assert taken == [("/memfd:iris-leaf (deleted)", False)] * 3
    assert set(os.listdir("/proc/self/fd")) == before


def test_without_a_memory_file_the_error_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ConfigError, match="memfd and /proc: Operation not permitted"):
        Credentials(KEY, HERE)


def test_credentials_show_no_secret_and_keep_none() -> None:
    credentials = Credentials(KEY, HERE, entropy=lambda size: SEED)
    shown = repr(credentials)
    assert shown == f"<Credentials of relay 01010101… in network {NAME[:8]}…>"
    kept = [getattr(credentials, name) for name in Credentials.__slots__]
    assert all(isinstance(value, (bytes, str, ssl.SSLContext)) for value in kept)
    assert SEED not in kept


def test_each_start_of_a_relay_has_a_key_of_its_own() -> None:
    server = link_server_context([THEM])
    seen = set()
    for _ in range(2):
        met = meet(Credentials(KEY, HERE).dialling, server)
        certificate = met.server.getpeercert(binary_form=True)
        assert certificate is not None
        seen.add(x509.load_der_x509_certificate(certificate).public_key().public_bytes_raw())  # type: ignore[union-attr]  # Ed25519
    assert len(seen) == 2


# Sessions from elsewhere


def test_a_holder_of_an_access_file_gets_a_session_and_knows_its_relay(
    access: RemoteAccess,
) -> None:
    met = meet(access.context, session_server_context([STRANGER, THEM]), access.server_name)
    assert met.up, met
    assert peer_relay_id(met.client) == THERE
    assert peer_access_id(met.server) == access.access_id
    for side in (met.client, met.server):
        check_alpn(side, SESSION_ALPN)
    with pytest.raises(PeerProtocolError, match="iris-relay"):
        peer_relay_id(met.server)


def test_an_access_file_does_not_open_links(access: RemoteAccess) -> None:
    met = meet(access.context, link_server_context([THEM]), access.server_name)
    assert met.server_error is not None
    assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"


def test_a_relays_leaf_does_not_open_sessions() -> None:
    client = mutual_context(
        CLIENT, alpn=SESSION_ALPN, leaf=relay_leaf(KEY, HERE, SEED), trusted=network_authority(KEY)
    )
    met = meet(client, session_server_context([THEM]))
    assert met.server_error is not None
    assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"


def test_an_access_file_of_another_network_is_refused(tmp_path: Path) -> None:
    foreign = load_access(access_file(tmp_path, make_access(OTHER)))
    server = session_server_context([THEM])
    assert meet(foreign.context, server, foreign.server_name).alert == "TLSV1_UNRECOGNIZED_NAME"
    crossed = mutual_context(
        CLIENT, alpn=SESSION_ALPN, leaf=access_leaf(OTHER, SEED), trusted=network_authority(KEY)
    )
    met = meet(crossed, server)
    assert met.server_error is not None
    assert met.server_error.reason == "CERTIFICATE_VERIFY_FAILED"


def test_another_holder_of_an_access_file_does_not_pass_for_a_relay(access: RemoteAccess) -> None:
    impostor = mutual_context(
        SERVER, alpn=SESSION_ALPN, leaf=access_leaf(KEY, SEED), trusted=access_authority(KEY)
    )
    met = meet(access.context, impostor, access.server_name)
    assert met.alert == "CERTIFICATE_VERIFY_FAILED"


def test_two_access_files_have_two_ids() -> None:
    ids = {certificates.parse_access(make_access(KEY).decode()).access_id for _ in range(2)}
    assert len(ids) == 2


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_an_access_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = access_file(tmp_path, make_access(KEY), mode)
    with pytest.raises(KeyringError, match=f"^{path}: open to other users .*chmod 600 {path}`$"):
        load_access(path)


def test_what_is_not_an_access_file_is_refused_by_name(tmp_path: Path) -> None:
    cases = {
        tmp_path / "missing.pem": "cannot be read",
        tmp_path: "not a regular file",
        access_file(tmp_path, relay_leaf(KEY, HERE, SEED).pem().encode()): "not an access file",
    }
    for path, reason in cases.items():
        with pytest.raises(KeyringError, match=f"^{path}: {reason}") as caught:
            load_access(path)
        assert "BEGIN" not in str(caught.value)


def test_a_loaded_access_file_shows_no_secret(access: RemoteAccess) -> None:
    shown = repr(access)
    assert NAME in shown
    assert "PRIVATE" not in shown
    assert "context" not in shown


# Server names that are not text


def test_a_garbled_server_name_is_refused_and_logged_once_without_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    counted: list[None] = []
    hook = sys.unraisablehook
    with counting_garbled_names(lambda: counted.append(None)):
        met = meet(
            US.dialling,
            link_server_context([THEM]),
            rewrite=lambda data: data.replace(NAME.encode(), b"\xff" * 32),
        )
    assert sys.unraisablehook is hook
    assert met.server_error is not None
    assert len(counted) == 1
    assert capfd.readouterr().err == ""


def test_other_errors_that_nobody_can_raise_are_shown_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    counted: list[None] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    decoding = UnicodeDecodeError("ascii", b"\xff", 0, 1, "no ASCII")
    others = [
        SimpleNamespace(exc_value=ValueError("x"), object=None),
        SimpleNamespace(exc_value=decoding, object=print),
    ]
    with counting_garbled_names(lambda: counted.append(None)):
        for other in others:
            sys.unraisablehook(other)
    assert shown == others
    assert counted == []


# Event loops


LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def run(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    work: Callable[[], Coroutine[None, None, None]],
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await work()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


@LOOPS
@pytest.mark.parametrize("kind", ["link", "session"])
def test_event_loops_send_the_fingerprint_as_server_name_and_give_both_names(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], kind: str, access: RemoteAccess
) -> None:
    client_context, server_context = {
        "link": (US.dialling, link_server_context([STRANGER, THEM])),
        "session": (access.context, session_server_context([STRANGER, THEM])),
    }[kind]

    async def work() -> None:
        served: asyncio.Future[ssl.SSLObject] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.set_result(writer.get_extra_info("ssl_object"))
            writer.write((await reader.readexactly(100_000))[::-1])
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client_context, server_hostname=access.server_name
        )
        writer.write(b"a" * 50_000 + b"b" * 50_000)
        assert await reader.read() == b"b" * 50_000 + b"a" * 50_000
        seen = writer.get_extra_info("ssl_object")
        assert peer_relay_id(seen) == THERE
        if kind == "link":
            check_alpn(seen, LINK_ALPN)
            check_alpn(await served, LINK_ALPN)
            assert peer_relay_id(await served) == HERE
        else:
            check_alpn(seen, SESSION_ALPN)
            check_alpn(await served, SESSION_ALPN)
            assert peer_access_id(await served) == access.access_id
        writer.close()
        with contextlib.suppress(
            ssl.SSLError
        ):  # which side's close comes first is the loop's affair
            await writer.wait_closed()
        server.close()
        await server.wait_closed()

    run(loop_factory, work)


REFUSALS = {
    # who errs: dialler, acceptor, server name, who refuses, why
    "wrong name": (US.dialling, link_server_context([THEM]), "f" * 32, "acceptor", "wrong network"),
    # An address is never sent as a server name (RFC 6066 §3).
    "no name": (US.dialling, link_server_context([THEM]), "127.0.0.1", "acceptor", "wrong network"),
    "dialler of another network": (
        link_client(relay_leaf(OTHER, HERE, SEED)),
        link_server_context([THEM]),
        NAME,
        "acceptor",
        "foreign certificate",
    ),
    "acceptor of another network": (
        US.dialling,
        STRANGER.accepting,
        NAME,
        "dialler",
        "foreign certificate",
    ),
}  # fmt: skip


@LOOPS
@pytest.mark.parametrize("case", REFUSALS)
def test_event_loops_tell_the_one_who_refuses_why_and_end_the_other(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], case: str
) -> None:
    client_context, server_context, name, refuser, reason = REFUSALS[case]

    async def accept(listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener)
        await loop.connect_accepted_socket(asyncio.Protocol, connection, ssl=server_context)

    async def dial(port: int) -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client_context, server_hostname=name
        )
        try:
            await reader.readexactly(1)
        finally:
            writer.transport.abort()

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            outcomes = await asyncio.gather(
                accept(listener), dial(listener.getsockname()[1]), return_exceptions=True
            )
        named = dict(zip(("acceptor", "dialler"), outcomes, strict=True))
        error = named.pop(refuser)
        assert isinstance(error, ssl.SSLError)
        assert refusal(error) == reason
        # Neither loop sends the alert that says why.
        (ended,) = named.values()
        assert isinstance(ended, (ConnectionError, EOFError, ssl.SSLError))

    run(loop_factory, work)


@LOOPS
@pytest.mark.parametrize("silent", [True, False], ids=["silent", "leaving"])
def test_event_loops_end_a_handshake_that_does_not_come(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], silent: bool
) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            if not silent:
                theirs.shutdown(socket.SHUT_WR)
            with pytest.raises((OSError, EOFError)) as caught:
                await loop.connect_accepted_socket(
                    asyncio.Protocol,
                    ours,
                    ssl=link_server_context([THEM]),
                    ssl_handshake_timeout=0.05 if silent else 5.0,
                )
        expected = (
            "TLS handshake took too long" if silent else "connection ended in the TLS handshake"
        )
        assert refusal(caught.value) == expected

    run(loop_factory, work)
