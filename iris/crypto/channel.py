"""Channels to stores: a caller with a cluster key and a store agree on keys that authenticate every call and answer.

    caller                                    store
    Knock(nonce) ──────────────────────────►
                 ◄────────────────────────── Door(store, uuid, door, orders)      `door` is a nonce
    Open(nonce, door, public key, share, signature) ─►
                 ◄────────────────────────── Opened(channel, share, signature)

Each side signs all values that both have sent (`keys`), so a relay cannot alter them. The X25519 shares are new
each time, so replaying a recording does not open a channel. A call or answer in a channel begins with `MARK`,
which is not the first byte of any MessagePack:

    0xc1 | channel u64 | counter u64 | HMAC-SHA256 (32) | the call or answer

The HMAC covers the channel, the counter, the end fields of the frame and the body. Each direction has its own keys. An
answer carries the counter of its call. The keys depend on the frame's address, which the receiver compares with the
channel's. Sans-IO.

SHA-256 over everything would slow appends by a tenth. So for a body over `LONG_BYTES` the HMAC covers its AES-256-GMAC,
under a separate key. That tag is never sent and is hidden by the HMAC, so a repeated counter would reveal nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from struct import Struct
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from iris.crypto.keys import (
    ClusterKey,
    StoreKey,
    public_id,
    verify_caller,
    verify_channel,
)
from iris.crypto.sframe import ReplayWindow
from iris.errors import LocalProtocolError, OpenError

MARK: Final = 0xC1
NONCE_BYTES: Final = 32
SEALED_BYTES: Final = 49
"""Size of the head before an authenticated body."""
LONG_BYTES: Final = 1024
WINDOW_CALLS: Final = 1 << 14
"""Replay window of a channel: a call whose counter is further behind the newest is refused."""
_HEAD: Final = Struct("<BQQ")
_MAC_AT: Final = _HEAD.size
Buffer = bytes | bytearray | memoryview


class DirectionKeys:
    """The authentication keys of one direction of a channel."""

    __slots__ = ("_hmac", "_long", "_long_key")

    def __init__(self, keys: bytes) -> None:
        """`keys` are 64 bytes: the HMAC key, then the key for long bodies."""
        self._hmac = HMAC(keys[:32], hashes.SHA256()).copy
        """Return a keyed HMAC without data. Copying one takes a third of the time of making one."""
        self._long_key = keys[32:]
        self._long: AESGCM | None = None

    def mac(self, head: Buffer, counter: int, end: Buffer, body: Buffer) -> bytes:
        """Return the 32 bytes that authenticate a body in a frame with these end fields."""
        size = len(body).to_bytes(4, "little")
        if len(body) > LONG_BYTES:
            if self._long is None:
                self._long = AESGCM(self._long_key)
            body = self._long.encrypt(counter.to_bytes(12), b"", body)
        mac = self._hmac()
        mac.update(b"".join((head, end, size, body)))
        return mac.finalize()


class Channel:
    """One side of an open channel.

    `number` is the store's number for it, `key_id` the id of the cluster key that opened it.
    """

    __slots__ = ("_receive", "_send", "_window", "key_id", "next", "number", "uuid")

    def __init__(
        self, number: int, uuid: bytes, key_id: bytes, send: bytes, receive: bytes
    ) -> None:
        self.number = number
        self.uuid = uuid
        """Uuid of the log; zeros for the store itself."""
        self.key_id = key_id
        self.next = 0
        """Counter of the caller's next call."""
        self._send = DirectionKeys(send)
        self._receive = DirectionKeys(receive)
        self._window = ReplayWindow(WINDOW_CALLS)

    def __repr__(self) -> str:
        return f"<Channel {self.number} under {self.key_id.hex()[:8]}…>"

    def seal(self, counter: int, end: Buffer, body: bytes) -> bytes:
        """Return the 49 bytes that go before `body` in a frame with these end fields."""
        head = _HEAD.pack(MARK, self.number, counter)
        return head + self._send.mac(head, counter, end, body)

    def open(self, end: Buffer, data: memoryview) -> tuple[int, memoryview]:
        """Return the counter and the body. Raises OpenError unless the peer of this channel sent them."""
        if len(data) < SEALED_BYTES:
            raise OpenError(
                f"an authenticated body of {len(data)} bytes is shorter than its head of {SEALED_BYTES}"
            )
        mark, number, counter = _HEAD.unpack_from(data)
        body = data[SEALED_BYTES:]
        wanted = self._receive.mac(data[:_MAC_AT], counter, end, body)
        if (mark, number) != (MARK, self.number) or not compare_digest(
            wanted, data[_MAC_AT:SEALED_BYTES]
        ):
            raise OpenError("the body was not authenticated by the peer of this channel")
        return counter, body

    def accept(self, end: Buffer, data: memoryview) -> tuple[int, memoryview]:
        """Return what `open` returns, but only once for each counter (the store's side).

        Raises:
            OpenError: as `open`.
            Replayed, Stale: the counter was used before, or is too old to know.
        """
        counter, body = self.open(end, data)
        self._window.accept(counter)
        return counter, body


class Offer:
    """A caller's side of a channel that is being opened. `nonce` is sent in Knock."""

    __slots__ = ("_key", "_share", "_store", "_transcript", "_uuid", "nonce")

    def __init__(self, key: ClusterKey, entropy: Callable[[int], bytes]) -> None:
        self.nonce = entropy(NONCE_BYTES)
        self._key = key
        self._share = X25519PrivateKey.from_private_bytes(entropy(32))
        self._store = self._uuid = self._transcript = b""

    def sign(self, store: bytes, uuid: bytes, door: bytes) -> tuple[bytes, bytes]:
        """Return share and signature for Open. The caller must have checked that this store is trusted for the log."""
        share = self._share.public_key().public_bytes_raw()
        self._store, self._uuid = store, uuid
        self._transcript = transcript(store, uuid, self._key.key_id, self.nonce, door, share)
        return share, self._key.sign_caller(self._transcript)

    def opened(self, number: int, share: bytes, signature: bytes) -> Channel:
        """Return the open channel. Raises OpenError if the store's signature is not valid."""
        signed = self._transcript + share + number.to_bytes(8, "little")
        verify_channel(self._store, signature, signed)
        call, answer = _keys(self._share, share, signed)
        return Channel(number, self._uuid, self._key.key_id, call, answer)


def accept_offer(
    key: StoreKey, uuid: bytes, number: int, *, nonce: bytes, door: bytes, public_key: bytes, share: bytes, signature: bytes,
    secret: bytes,
) -> tuple[Channel, bytes, bytes]:  # fmt: skip
    """Return a store's side of the channel `number`, its share and its signature. `secret` is 32 random bytes.

    The store must have checked that it issued `door`, and that the key of `public_key` may open the channel.

    Raises:
        OpenError: the caller's signature is not valid for that key.
    """
    key_id = public_id(public_key)
    signed = transcript(key.public_key, uuid, key_id, nonce, door, share)
    verify_caller(public_key, signature, signed)
    private = X25519PrivateKey.from_private_bytes(secret)
    ours = private.public_key().public_bytes_raw()
    signed += ours + number.to_bytes(8, "little")
    call, answer = _keys(private, share, signed)
    return Channel(number, uuid, key_id, answer, call), ours, key.sign_channel(signed)


def transcript(
    store: bytes, uuid: bytes, key_id: bytes, nonce: bytes, door: bytes, share: bytes
) -> bytes:
    """Return the bytes that a caller signs: store key (32) ‖ uuid (16) ‖ key id (16) ‖ nonce (32) ‖
    door (32) ‖ share (32)."""
    parts = (store, uuid, key_id, nonce, door, share)
    if tuple(map(len, parts)) != (32, 16, 16, NONCE_BYTES, NONCE_BYTES, 32):
        raise LocalProtocolError(
            f"the parts of a channel's transcript must be 32, 16, 16, 32, 32 and 32 bytes, not {tuple(map(len, parts))}"
        )
    return b"".join(parts)


def _keys(private: X25519PrivateKey, share: bytes, signed: bytes) -> tuple[bytes, bytes]:
    """Return the keys of calls and of answers, 64 bytes each. Raises OpenError."""
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(share))
    except ValueError as err:  # a point of low order: everybody would know the secret
        raise OpenError("the peer's share is not a usable X25519 public key") from err
    digest = hashes.Hash(hashes.SHA256())
    digest.update(signed)
    info = b"iris-stream-channel-1"
    keys = HKDF(hashes.SHA256(), 128, salt=digest.finalize(), info=info).derive(secret)
    return keys[:64], keys[64:]
