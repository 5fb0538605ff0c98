"""Sealing of messages with SFrame (RFC 9605), only with the cipher suite AES_256_GCM_SHA512_128 (0x0005).

A sealed message is `header ‖ ciphertext ‖ 16-byte tag`. The header (§4.3) holds the key number KID and the
counter CTR, each in as few bytes as it needs:

    config byte  X KKK Y CCC     X = 0: KID is KKK (0-7); X = 1: KID follows in KKK + 1 bytes
    [KID] [CTR]                  Y and CCC have the same meaning for CTR; both big-endian

    sender's base key = HKDF-Expand(SHA-256, sealing root, "iris-seal-1" ‖ sender id, 32 bytes)
    secret            = HKDF-Extract(SHA-512, "", base key)                               (§4.4.2)
    key, salt         = HKDF-Expand(secret, "SFrame 1.0 Secret key " / "... salt " ‖ KID ‖ suite)
    nonce, AAD        = salt XOR CTR, header ‖ metadata                                   (§4.4.3)

**KID is the first 8 bytes of the sender id**, which is random and public. It is not taken from the base key,
because the header is sent in clear. KID distinguishes senders and reveals nothing about the key, which depends
on all 16 bytes of the sender id.

One sender id seals at most 2^32 messages over all addresses, so counters fit in 4 bytes. A larger counter is
refused like a forgery.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident  # noqa: TID251 - to refuse a second thread, never to start or wait for one
from typing import Final, NoReturn, Self, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from iris.crypto.keys import ClusterKey
from iris.errors import LocalProtocolError, OpenError, Replayed, Stale

Buffer: TypeAlias = bytes | bytearray | memoryview

SENDER_ID_BYTES: Final = 16
TAG_BYTES: Final = 16
MAX_OVERHEAD_BYTES: Final = 1 + 8 + 4 + TAG_BYTES
"""Most bytes that sealing adds to a message."""
SEALS_PER_SENDER: Final = 1 << 32
WINDOW_COUNTERS: Final = 1 << 17

_SUITE: Final = 0x0005
_BASE_KEY_BYTES: Final = 32
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_MAX_U64: Final = (1 << 64) - 1
_BLOCK_BITS: Final = 1024
_FULL_BLOCK: Final = (1 << _BLOCK_BITS) - 1


class Sealer:
    """Seals the messages of one sender under one key, never two under one counter.

    It belongs to the thread that first seals, because two threads could otherwise use one counter. After a fork both
    processes hold the same counters, so the child must call `poison` first. The owner draws a new random sender id for
    every connection, and after 2^32 seals.
    """

    __slots__ = (
        "_claim",
        "_counter",
        "_encrypt",
        "_header_base",
        "_header_bytes",
        "_kid",
        "_next_width",
        "_owner",
        "_salt",
    )

    def __init__(self, key: ClusterKey, sender_id: bytes) -> None:
        """`sender_id` is 16 random bytes, never used before. Raises LocalProtocolError for other lengths."""
        self._start(*_sender_keys(key, sender_id))

    @classmethod
    def from_base_key(cls, base_key: bytes, kid: int) -> Self:
        """Return a sealer for a given base key and KID, as in the test vectors of RFC 9605."""
        sealer = cls.__new__(cls)
        sealer._start(base_key, kid)
        return sealer

    def _start(self, base_key: bytes, kid: int) -> None:
        key, salt = derive_key_and_salt(base_key, kid)
        self._encrypt: Callable[[bytes, Buffer, Buffer], bytes] = AESGCM(key).encrypt
        self._salt = int.from_bytes(salt)
        self._kid = kid
        self._counter = 0
        self._claim: dict[None, int] = {}
        self._owner = 0  # not the identifier of a thread: the first seal claims it
        # While headers keep their length, header = (base + counter) as one big-endian number.
        self._header_base = self._header_bytes = 0
        self._next_width = 0  # counter at which the two above must be computed again

    @property
    def counter(self) -> int:
        """The counter of the next seal."""
        return self._counter

    def seal(self, plaintext: Buffer, metadata: bytes) -> bytes:
        """Return header ‖ ciphertext ‖ tag: `plaintext` encrypted, and authenticated together with `metadata`.

        Raises as `seal_apart`.
        """
        header, ciphertext = self.seal_apart(plaintext, metadata)
        return header + ciphertext

    def seal_apart(self, plaintext: Buffer, metadata: bytes) -> tuple[bytes, bytes]:
        """Return (header, ciphertext ‖ tag), so that a caller who writes them one after the other need not join them.

        A counter is spent even if this raises.

        Raises:
            LocalProtocolError: 2^32 messages were sealed, another thread sealed first, or `poison` was called.
                Nothing was sealed; use a new sealer with a new sender id.
        """
        if get_ident() != self._owner:
            self._claim_thread()
        # There is no call between these two lines, so no signal handler or other thread runs there.
        counter = self._counter
        self._counter = counter + 1
        if counter >= self._next_width:
            self._widen(counter)
        header = (self._header_base + counter).to_bytes(self._header_bytes)
        nonce = (self._salt ^ counter).to_bytes(_NONCE_BYTES)
        return header, self._encrypt(nonce, plaintext, header + metadata)

    def poison(self) -> None:
        """Make every later seal raise, and forget the key; for the child of a fork."""
        self._encrypt = _refuse_poisoned

    def _claim_thread(self) -> None:
        # setdefault is atomic: if two threads make the first seal at once, one wins and the other raises.
        if self._claim.setdefault(None, get_ident()) != get_ident():
            raise LocalProtocolError(
                "a sealer may be used only by the thread that first sealed with it"
            )
        self._owner = get_ident()

    def _widen(self, counter: int) -> None:
        if counter >= SEALS_PER_SENDER:
            self._counter = SEALS_PER_SENDER
            raise LocalProtocolError(
                "2^32 messages were sealed under this sender id, which is the limit; draw a new one"
            )
        header = encode_header(self._kid, counter)
        base, length = int.from_bytes(header) - counter, len(header)
        next_width = counter + 1 if counter < 8 else 1 << 8 * _width(counter)
        # Again, there is no call from here to the use of the first two.
        self._header_base, self._header_bytes = base, length
        self._next_width = next_width


class Opener:
    """Opens messages that one sender sealed under one key. It does not track counters; see `ReplayWindow`."""

    __slots__ = ("_decrypt", "_forms", "_salt")

    def __init__(self, key: ClusterKey, sender_id: bytes) -> None:
        """`sender_id` is 16 bytes, as received. Raises LocalProtocolError for other lengths."""
        self._start(*_sender_keys(key, sender_id))

    @classmethod
    def from_base_key(cls, base_key: bytes, kid: int) -> Self:
        """Return an opener for a given base key and KID, as in the test vectors of RFC 9605."""
        opener = cls.__new__(cls)
        opener._start(base_key, kid)
        return opener

    def _start(self, base_key: bytes, kid: int) -> None:
        key, salt = derive_key_and_salt(base_key, kid)
        self._decrypt = AESGCM(key).decrypt
        self._salt = int.from_bytes(salt)
        # Config byte -> (length, base, first, last) of the only headers that this sender may write with it.
        # The header read as one number, minus `base`, is the counter. It is in first to last if and only if
        # KID is this sender's and CTR is as short as possible. At most 12 entries.
        self._forms: dict[int, tuple[int, int, int, int]] = {}
        for first in (*range(8), 8, 1 << 8, 1 << 16, 1 << 24):
            header = encode_header(kid, first)
            last = first if first < 8 else (1 << 8 * _width(first)) - 1
            self._forms[header[0]] = (len(header), int.from_bytes(header) - first, first, last)

    def open(self, body: Buffer, metadata: bytes) -> tuple[int, bytes]:
        """Return (counter, plaintext) of `body`, which is only read. A memoryview must be of bytes.

        Raises:
            OpenError: `body` was not sealed by this sender under this key with this `metadata`: it was forged, damaged,
                truncated, spliced, or its header is not the shortest. The text is the same for all reasons, so that a
                forger learns nothing from it.
        """
        try:
            length, base, first, last = self._forms[body[0]]
            header = body[:length]
            counter = int.from_bytes(header) - base
            if first <= counter <= last:
                nonce = (self._salt ^ counter).to_bytes(_NONCE_BYTES)
                # join, because a memoryview cannot be added to bytes
                aad = b"".join((header, metadata))
                return counter, self._decrypt(nonce, body[length:], aad)
        except (KeyError, IndexError, InvalidTag):
            pass
        raise OpenError("the message was not sealed for this address by this sender under this key")


class ReplayWindow:
    """Set of the accepted counters among one sender's last `size` counters.

    Call `check` before a message is accepted and `mark` when it is, so that a refused message may come again.
    The window ends at the highest marked counter. Memory grows with the marks: a new window takes 128 bytes,
    one with a single mark 330 bytes, and the worst case 33 KB for 2^17 counters.
    """

    __slots__ = ("_blocks", "_highest", "_max_blocks", "_size")

    def __init__(self, size: int = WINDOW_COUNTERS) -> None:
        self._size = size
        self._highest = -1
        self._blocks: dict[int, int] = {}  # counter // 1024 -> bitmap of its 1,024 counters
        # A quarter more than the window spans: each pruning removes that quarter, so each block is visited
        # five times in its life, however busy the sender.
        self._max_blocks = 5 * (size // _BLOCK_BITS + 2) // 4

    def check(self, counter: int) -> None:
        """Return if `counter` was not accepted. This changes nothing.

        Raises:
            Replayed: it was accepted.
            Stale: it is `size` or more below the highest accepted one, so it may have been accepted.
        """
        if counter > self._highest:
            return
        if counter <= self._highest - self._size:
            raise Stale("the message is older than its sender's replay window")
        if self._blocks.get(counter // _BLOCK_BITS, 0) >> counter % _BLOCK_BITS & 1:
            raise Replayed("the message was accepted before")

    def accept(self, counter: int) -> None:
        """Check and mark `counter`. Raises as `check`."""
        if counter <= self._highest:
            self.check(counter)
        self.mark(counter)

    def mark(self, counter: int) -> None:
        """Note that `counter` was accepted. A counter below the window is ignored, because it stays stale."""
        if counter > self._highest:
            self._highest = counter
        elif counter <= self._highest - self._size:
            return
        index = counter // _BLOCK_BITS
        block = self._blocks.get(index, 0) | 1 << counter % _BLOCK_BITS
        # A busy sender fills its blocks, so all full blocks share one object.
        self._blocks[index] = _FULL_BLOCK if block == _FULL_BLOCK else block
        if len(self._blocks) > self._max_blocks:
            oldest = (self._highest - self._size + 1) // _BLOCK_BITS
            self._blocks = {i: bits for i, bits in self._blocks.items() if i >= oldest}


def encode_header(kid: int, ctr: int) -> bytes:
    """Return the SFrame header of `kid` and `ctr`, 1 to 17 bytes (RFC 9605 §4.3).

    Raises:
        LocalProtocolError: one of them is not an unsigned 64-bit number.
    """
    if not (0 <= kid <= _MAX_U64 and 0 <= ctr <= _MAX_U64):
        raise LocalProtocolError(
            f"KID and CTR must be unsigned 64-bit numbers, not {kid} and {ctr}"
        )
    kid_nibble, kid_bytes = _encode_field(kid)
    ctr_nibble, ctr_bytes = _encode_field(ctr)
    return bytes((kid_nibble << 4 | ctr_nibble,)) + kid_bytes + ctr_bytes


def decode_header(data: Buffer) -> tuple[int, int, int]:
    """Return (KID, CTR, length of the header) of the header at the start of `data` (RFC 9605 §4.3).

    Raises:
        OpenError: it is truncated, or a number takes more bytes than it needs. RFC 9605 requires senders to write the
            shortest form; enforcing that leaves one encoding per message.
    """
    if not data:
        raise OpenError("the SFrame header is truncated")
    kid, kid_end = _decode_field(data, data[0] >> 4, 1)
    ctr, end = _decode_field(data, data[0] & 15, kid_end)
    return kid, ctr, end


def derive_key_and_salt(base_key: bytes, kid: int) -> tuple[bytes, bytes]:
    """Return the AES-256 key (32 bytes) and the nonce salt (12 bytes) of a sender (RFC 9605 §4.4.2)."""
    suffix = kid.to_bytes(8) + _SUITE.to_bytes(2)
    labels = ((b"SFrame 1.0 Secret key ", _KEY_BYTES), (b"SFrame 1.0 Secret salt ", _NONCE_BYTES))
    key, salt = (
        HKDF(hashes.SHA512(), length, salt=None, info=label + suffix).derive(base_key)
        for label, length in labels
    )
    return key, salt


def _sender_keys(key: ClusterKey, sender_id: bytes) -> tuple[bytes, int]:
    if len(sender_id) != SENDER_ID_BYTES:
        raise LocalProtocolError(
            f"a sender id must be {SENDER_ID_BYTES} bytes, not {len(sender_id)}"
        )
    info = b"iris-seal-1" + sender_id
    base_key = HKDFExpand(hashes.SHA256(), _BASE_KEY_BYTES, info=info).derive(key.sealing_root)
    return base_key, int.from_bytes(sender_id[:8])


def _refuse_poisoned(nonce: bytes, plaintext: Buffer, aad: Buffer) -> NoReturn:
    raise LocalProtocolError(
        "this process was forked, and its sender id belongs to the parent; draw a new one"
    )


def _width(number: int) -> int:
    return (number.bit_length() + 7) // 8


def _encode_field(number: int) -> tuple[int, bytes]:
    if number < 8:
        return number, b""
    width = _width(number)
    return 8 | width - 1, number.to_bytes(width)


def _decode_field(data: Buffer, nibble: int, start: int) -> tuple[int, int]:
    if nibble < 8:
        return nibble, start
    width = (nibble & 7) + 1
    field = data[start : start + width]
    number = int.from_bytes(field)
    if len(field) != width:
        raise OpenError("the SFrame header is truncated")
    if number < 8 or _width(number) != width:
        raise OpenError("a number in the SFrame header takes more bytes than it needs")
    return number, start + width
