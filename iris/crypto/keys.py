"""The kinds of 32-byte secrets, and the keys derived from them.

Each derived key is HKDF-SHA256 (RFC 5869) of a secret, with an empty salt, 32 bytes of output and its own info string.
So no derived key reveals anything about another:

    cluster key ─┬─ "iris-seal-root-1"   sealing root: the PRK of every sender's base key (`sframe`)
                 ├─ "iris-sign-1"        seed of the Ed25519 key pair (RFC 8032) that proves the key id
                 ├─ "iris-tunnel-psk-1"  pre-shared key of tunnels (`noise`)
                 ├─ "iris-key-hash-1"    HMAC key that hides the keys of stream records
                 └─ "iris-topic-key-1" ‖ topic   cluster key of one topic, for keyrings that derive (`keyring`)
    network key ─┬─ "iris-network-ca-1"  seed of the Ed25519 key of the certificate authority of relays
                 └─ "iris-network-access-1"  the same for sessions from hosts without a relay
    site key ────── "iris-site-ca-1"     the same for a site's gateways
    store key ───── "iris-store-sign-1"  seed of the Ed25519 key pair by which a store proves that an order names it
    group key ─┬─── "iris-store-sign-1"  the same for all stores that share a bucket
               └─── "iris-bucket-1"      AES-256-GCM key of the objects in the bucket
    issuer key ──── "iris-issuer-1"      seed of the Ed25519 key pair that signs tickets of sessions over WebSocket

Key ids and network fingerprints are the first 16 bytes of SHA-256 of the Ed25519 public key. They name a key in
public and reveal nothing about its secret. A site's fingerprint is its whole public key, because other sites
make the authority that they trust from it, before they have seen a certificate.
"""

from __future__ import annotations

import base64
import binascii
from typing import ClassVar, Final, NoReturn, Self, SupportsIndex
from zlib import crc32

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from iris.errors import KeyringError, LocalProtocolError, OpenError

SECRET_BYTES: Final = 32
CHECKSUM_BYTES: Final = 4
TEXT_CHARACTERS: Final = 48
"""Length of a secret and its checksum in base64url, which needs no padding."""
KEY_ID_BYTES: Final = 16
PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
RELAY_ID_BYTES: Final = 16
SESSION_ID_BYTES: Final = 8
CHALLENGE_BYTES: Final = 32
CHANNEL_BYTES: Final = 32

_PROOF: Final = b"iris-proof-1"
_BOUND_PROOF: Final = b"iris-proof-2"
_STORE_PROOF: Final = b"iris-store-proof-1"
_ORDER: Final = b"iris-stream-order-1"
_CALLER: Final = b"iris-stream-caller-1"
_STORE: Final = b"iris-stream-store-1"
_COUNTERSIGNED: Final = b"iris-stream-countersign-1"


class _Secret:
    """32 secret bytes and the public id derived from them.

    Comparison and hash use the public id, so their time does not depend on the secret. `repr` shows 8 hex digits of the
    id. It cannot be pickled or copied: a secret leaves the process only by `reveal`.
    """

    __slots__ = ("_secret",)
    _kind: ClassVar[str]

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise KeyringError(f"a {self._kind} must be {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret: Final = bytes(secret)

    @classmethod
    def parse(cls, text: object) -> Self:
        """Return the key whose `reveal` is `text`.

        Raises:
            KeyringError: the text has another form, or it was changed. The error never repeats it.
        """
        data = _read_text(text, SECRET_BYTES + CHECKSUM_BYTES)
        if data is None:
            raise KeyringError(
                f"a {cls._kind} must be written as {TEXT_CHARACTERS} characters of base64url (32 bytes and a checksum)"
            )
        secret = data[:SECRET_BYTES]
        if data[SECRET_BYTES:] != cls._checksum(secret):
            raise KeyringError(
                f"a {cls._kind} is damaged, or a key of another kind: its checksum is wrong; copy it again from a good file"
            )
        return cls(secret)

    def reveal(self) -> str:
        """Return the secret and a checksum as 48 characters of base64url. Use it only to write a key file."""
        return _as_text(self._secret + self._checksum(self._secret))

    @classmethod
    def _checksum(cls, secret: bytes) -> bytes:
        """Return the checksum of a secret and its kind. Without it, a changed secret would be another valid key."""
        return crc32(cls._kind.encode() + secret).to_bytes(CHECKSUM_BYTES, "big")

    @property
    def _public_id(self) -> bytes:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._public_id == other._public_id

    def __hash__(self) -> int:
        return hash(self._public_id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._public_id.hex()[:8]}…>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {self._kind} cannot be pickled or copied; pass the path of its key file instead"
        )


class ClusterKey(_Secret):
    """The key that the members of a cluster share, and the keys derived from it.

    `key_id` is 16 bytes; `public_key`, `sealing_root`, `tunnel_psk` and `key_hash_key` are 32 bytes each.
    """

    __slots__ = ("_signer", "key_hash_key", "key_id", "public_key", "sealing_root", "tunnel_psk")
    _kind = "cluster key"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.sealing_root: Final = _derive(self._secret, b"iris-seal-root-1")
        self.tunnel_psk: Final = _derive(self._secret, b"iris-tunnel-psk-1")
        self.key_hash_key: Final = _derive(self._secret, b"iris-key-hash-1")
        self._signer: Final = Ed25519PrivateKey.from_private_bytes(
            _derive(self._secret, b"iris-sign-1")
        )
        self.public_key: Final = self._signer.public_key().public_bytes_raw()
        self.key_id: Final = public_id(self.public_key)

    @property
    def _public_id(self) -> bytes:
        return self.key_id

    def for_topic(self, topic: str) -> ClusterKey:
        """Return the key derived from this one for a topic and all below it.

        It reveals nothing about this key, or about that of another topic.
        """
        return ClusterKey(_derive(self._secret, b"iris-topic-key-1" + topic.encode()))

    def sign_proof(
        self, *, relay_id: bytes, session_id: bytes, challenge: bytes, channel: bytes = b""
    ) -> bytes:
        """Return the 64-byte signature that proves to one relay, in one session, that its sender holds this key.

        Args:
            relay_id: 16 bytes; session_id: 8 bytes; challenge: the relay's 32 random bytes.
            channel: over TLS, the 32-byte hash of the relay's certificate (`iris.remote.certificate_hash`);
                otherwise empty.

        Raises:
            LocalProtocolError: an argument has another length.
        """
        return self._signer.sign(_proof(relay_id, session_id, challenge, self.key_id, channel))

    def sign_order(self, order: bytes) -> bytes:
        """Return the 64-byte signature that allows a store to keep a stream under this key, or orders it to end it."""
        return self._signer.sign(_ORDER + order)

    def sign_caller(self, transcript: bytes) -> bytes:
        """Return the 64-byte signature of the caller's side of a channel to a store (`iris.crypto.channel`)."""
        return self._signer.sign(_CALLER + transcript)

    def countersign_order(self, order: bytes) -> bytes:
        """Return the 64-byte signature by which this key of a stream admits the new key that `order` names."""
        return self._signer.sign(_COUNTERSIGNED + order)


class StoreKey(_Secret):
    """A store's own key, which proves that an order names this store.

    It cannot seal or open. `public_key` is 32 bytes.
    """

    __slots__ = ("_signer", "public_key")
    _kind = "store key"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._signer: Final = Ed25519PrivateKey.from_private_bytes(
            _derive(self._secret, b"iris-store-sign-1")
        )
        self.public_key: Final = self._signer.public_key().public_bytes_raw()

    @property
    def _public_id(self) -> bytes:
        return public_id(self.public_key)

    def sign_proof(
        self, order: bytes, *, relay_id: bytes, session_id: bytes, challenge: bytes
    ) -> bytes:
        """Return the 64-byte signature that proves to one relay, in one session, that `order` names this store."""
        return self._signer.sign(
            _STORE_PROOF + _proof(relay_id, session_id, challenge, _digest(order))
        )

    def sign_channel(self, transcript: bytes) -> bytes:
        """Return the 64-byte signature of the store's side of a channel (`iris.crypto.channel`)."""
        return self._signer.sign(_STORE + transcript)


class GroupKey(StoreKey):
    """The key of the stores that share a bucket. Orders for streams in the bucket name it.

    `object_key` is the 32-byte key that encrypts and authenticates the objects in the bucket.
    """

    __slots__ = ("object_key",)
    _kind = "group key"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.object_key: Final = _derive(self._secret, b"iris-bucket-1")


class NetworkKey(_Secret):
    """The key that the relays of one network share. It admits relays, and cannot open payloads.

    `fingerprint` (16 bytes) names the network. `ca_key` signs the certificates of its relays, `access_ca_key` those of
    sessions from hosts without a relay (`iris.crypto.certificates`).
    """

    __slots__ = ("access_ca_key", "ca_key", "fingerprint")
    _kind = "network key"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.ca_key: Final = Ed25519PrivateKey.from_private_bytes(
            _derive(self._secret, b"iris-network-ca-1")
        )
        self.access_ca_key: Final = Ed25519PrivateKey.from_private_bytes(
            _derive(self._secret, b"iris-network-access-1")
        )
        self.fingerprint: Final = public_id(self.ca_key.public_key().public_bytes_raw())

    @property
    def _public_id(self) -> bytes:
        return self.fingerprint


class SiteKey(_Secret):
    """The key that the gateways of one site share. It authenticates them to other sites, and cannot open payloads.

    `ca_key` signs the certificates of its gateways (`iris.crypto.certificates`). Other sites pin `public_key`
    (32 bytes); `fingerprint` is its text.
    """

    __slots__ = ("ca_key", "fingerprint", "public_key")
    _kind = "site key"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.ca_key: Final = Ed25519PrivateKey.from_private_bytes(
            _derive(self._secret, b"iris-site-ca-1")
        )
        self.public_key: Final = self.ca_key.public_key().public_bytes_raw()
        self.fingerprint: Final = dump_fingerprint(self.public_key)

    @property
    def _public_id(self) -> bytes:
        return public_id(self.public_key)


class IssuerKey(_Secret):
    """The key that signs tickets for sessions over WebSocket (`iris.tickets`). It cannot open payloads.

    `signer` signs; `public_key` (32 bytes) stands in the settings of relays.
    """

    __slots__ = ("public_key", "signer")
    _kind = "issuer key"

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.signer: Final = Ed25519PrivateKey.from_private_bytes(
            _derive(self._secret, b"iris-issuer-1")
        )
        self.public_key: Final = self.signer.public_key().public_bytes_raw()

    @property
    def _public_id(self) -> bytes:
        return public_id(self.public_key)


def dump_fingerprint(public_key: bytes) -> str:
    """Return a site's public key (32 bytes) as 43 characters of base64url, the form in which other sites pin it."""
    return _as_text(public_key)


def parse_fingerprint(text: str) -> bytes:
    """Return the public key (32 bytes) that `dump_fingerprint` wrote; one trailing "=" is allowed.

    Raises:
        KeyringError: the text has another form.
    """
    public_key = _read_text(text)
    if public_key is None:
        raise KeyringError(
            "a site's fingerprint must be 43 characters of base64url; `iris federation key FILE` prints it"
        )
    return public_key


def dump_public_key(public_key: bytes) -> str:
    """Return an Ed25519 public key (32 bytes) as 43 characters of base64url."""
    return _as_text(public_key)


def parse_public_key(text: object) -> bytes:
    """Return the Ed25519 public key (32 bytes) written as 43 characters of base64url.

    Raises:
        KeyringError: the text has another form.
    """
    public_key = _read_text(text)
    if public_key is None:
        raise KeyringError("a public key must be written as 43 characters of base64url (32 bytes)")
    return public_key


def public_id(public_key: bytes) -> bytes:
    """Return the 16-byte id of a 32-byte Ed25519 public key: a key id, network fingerprint, or id of a
    site or store key."""
    return _digest(public_key)


def verify_proof(
    public_key: bytes, signature: bytes, *, relay_id: bytes, session_id: bytes, challenge: bytes, channel: bytes = b"",
) -> bytes:  # fmt: skip
    """Return the key id (16 bytes) that `signature` proves for this relay, session, challenge and channel.

    Anybody can make a key pair and prove its id. Proving the id of a cluster's key requires that key, because
    the id is a hash of its public key.

    Raises:
        OpenError: the signature is not this key's over this relay id, session id, challenge and channel, or
            `public_key` (32 bytes) or `signature` (64 bytes) is malformed.
        LocalProtocolError: relay id, session id, challenge or channel has the wrong length.
    """
    key_id = public_id(public_key)
    message = _proof(relay_id, session_id, challenge, key_id, channel)
    _verify(public_key, signature, message, "the proof of the key id is not valid for this session")
    return key_id


def verify_order(public_key: bytes, signature: bytes, order: bytes) -> bytes:
    """Return the id of the cluster key (16 bytes) that signed `order`.

    Raises:
        OpenError: the signature is not this key's over this order, or one of the two is malformed.
    """
    _verify(public_key, signature, _ORDER + order, "the signature of the order is not valid")
    return public_id(public_key)


def verify_countersignature(public_key: bytes, signature: bytes, order: bytes) -> bytes:
    """Return the id of the cluster key (16 bytes) that countersigned `order`.

    Raises:
        OpenError: the signature is not this key's over this order, or one of the two is malformed.
    """
    _verify(
        public_key,
        signature,
        _COUNTERSIGNED + order,
        "the countersignature of the order is not valid",
    )
    return public_id(public_key)


def verify_store_proof(
    public_key: bytes, signature: bytes, order: bytes, *, relay_id: bytes, session_id: bytes, challenge: bytes
) -> None:  # fmt: skip
    """Return if the store of `public_key` signed this order in this session. Raises OpenError otherwise."""
    message = _STORE_PROOF + _proof(relay_id, session_id, challenge, _digest(order))
    _verify(
        public_key, signature, message, "the store's proof is not valid for this session and order"
    )


def verify_caller(public_key: bytes, signature: bytes, transcript: bytes) -> bytes:
    """Return the id of the cluster key (16 bytes) that signed a caller's side of a channel. Raises OpenError."""
    _verify(
        public_key,
        signature,
        _CALLER + transcript,
        "the caller's signature of the channel is not valid",
    )
    return public_id(public_key)


def verify_channel(public_key: bytes, signature: bytes, transcript: bytes) -> None:
    """Return if the store of `public_key` signed its side of a channel. Raises OpenError otherwise."""
    _verify(
        public_key,
        signature,
        _STORE + transcript,
        "the store's signature of the channel is not valid",
    )


def _verify(public_key: bytes, signature: bytes, message: bytes, text: str) -> None:
    if len(public_key) == PUBLIC_KEY_BYTES and len(signature) == SIGNATURE_BYTES:
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
        except (InvalidSignature, ValueError):
            pass
        else:
            return
    raise OpenError(text)


def _as_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _read_text(text: object, size: int = PUBLIC_KEY_BYTES) -> bytes | None:
    """Return the `size` bytes written in base64url, or None if `text` has another form. One trailing "=" is allowed if
    base64 has one there."""
    if not isinstance(text, str) or not text.isascii():
        return None
    padding = "=" * (-size % 3)
    bare = text.removesuffix(padding)
    try:
        data = base64.b64decode(bare + padding, altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    # Accept one text per key only: b64decode also accepts "+", "/" and stray low bits.
    return data if len(data) == size and _as_text(data) == bare else None


def _digest(data: bytes) -> bytes:
    """Return the first 16 bytes of SHA-256."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(data)
    return digest.finalize()[:KEY_ID_BYTES]


def _proof(
    relay_id: bytes, session_id: bytes, challenge: bytes, key_id: bytes, channel: bytes = b""
) -> bytes:
    # The concatenation is unambiguous because the lengths are fixed.
    lengths = (len(relay_id), len(session_id), len(challenge))
    if lengths != (RELAY_ID_BYTES, SESSION_ID_BYTES, CHALLENGE_BYTES):
        raise LocalProtocolError(
            f"relay id, session id and challenge must be 16, 8 and 32 bytes, not {lengths}"
        )
    message = relay_id + session_id + challenge + key_id
    if not channel:
        return _PROOF + message
    if len(channel) != CHANNEL_BYTES:
        raise LocalProtocolError(
            f"a certificate hash must be {CHANNEL_BYTES} bytes, not {len(channel)}"
        )
    return _BOUND_PROOF + message + channel


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=info).derive(secret)
