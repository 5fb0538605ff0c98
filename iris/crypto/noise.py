"""Encryption of tunnels: Noise_NNpsk0_25519_AESGCM_SHA256 (Noise Protocol Framework, revision 34).

    NNpsk0:   -> psk, e        initiator writes, responder reads
              <- e, ee         responder writes, initiator reads; then both `split`

Neither side has a static key. The pre-shared key alone authenticates both sides; the ephemeral keys keep what was sent
secret even if the pre-shared key is stolen later. Because the pattern has a psk, "e" mixes the public key into the
chaining key, too (§9.2). Noise's HKDF (§4.3) is HKDF-SHA256 of RFC 5869 with the chaining key as salt and empty info.

Sans-IO: the owner of the handshake passes in 32 random bytes for the ephemeral key and carries the messages. A read or
write that fails changes nothing, so a forged message does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from iris.errors import LocalProtocolError, OpenError

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_MESSAGE_BYTES: Final = 65_535
TAG_BYTES: Final = 16
MAX_PLAINTEXT_BYTES: Final = MAX_MESSAGE_BYTES - TAG_BYTES
KEY_BYTES: Final = 32

_NAME: Final = (
    b"Noise_NNpsk0_25519_AESGCM_SHA256"  # exactly 32 bytes: the first hash is itself (§5.2)
)
_NONCE_BYTES: Final = 12
_MAX_NONCE: Final = (1 << 64) - 1  # reserved (§5.1)
_EMPTY: Final = b""


class CipherState:
    """Cipher of one direction of a tunnel. Each side encrypts with one and decrypts with the other (`Handshake.split`).

    Records must arrive whole and in order, because the nonce is the number of records before, and is not sent.
    """

    __slots__ = ("_decrypt", "_encrypt", "_nonce")

    def __init__(self, key: bytes) -> None:
        cipher = AESGCM(key)
        self._encrypt: Callable[[bytes, Buffer, Buffer | None], bytes] = cipher.encrypt
        self._decrypt = cipher.decrypt
        self._nonce = 0

    def encrypt(self, plaintext: Buffer, ad: bytes = _EMPTY) -> bytes:
        """Return ciphertext ‖ tag for a plaintext of at most 65,519 bytes. The nonce is spent even if this raises.

        Raises:
            LocalProtocolError: `plaintext` is longer, 2^64 - 1 records were sent, or `poison` was called. The tunnel
                must end.
        """
        # There is no call between these two lines, so no signal handler or other thread runs there.
        nonce = self._nonce
        self._nonce = nonce + 1
        if nonce >= _MAX_NONCE or len(plaintext) > MAX_PLAINTEXT_BYTES:
            self._refuse(nonce)
        return self._encrypt(nonce.to_bytes(_NONCE_BYTES), plaintext, ad)

    def decrypt(self, ciphertext: Buffer, ad: bytes = _EMPTY) -> bytes:
        """Return the plaintext of the next record. A failure changes nothing.

        Raises:
            OpenError: this is not the next record of this tunnel, or it is over 65,535 bytes.
            LocalProtocolError: 2^64 - 1 records were received.
        """
        nonce = self._nonce
        if nonce >= _MAX_NONCE:
            self._refuse(nonce)
        if len(ciphertext) <= MAX_MESSAGE_BYTES:
            try:
                # §12.4: 4 zero bytes ‖ big-endian u64, which is the number in 12 bytes.
                plaintext = self._decrypt(nonce.to_bytes(_NONCE_BYTES), ciphertext, ad)
            except InvalidTag:
                pass
            else:
                self._nonce = nonce + 1
                return plaintext
        raise OpenError("the record is not the next record of this tunnel")

    def poison(self) -> None:
        """Make every later `encrypt` raise; for the child of a fork, which shares these nonces."""
        self._encrypt = _refuse_poisoned

    def _refuse(self, nonce: int) -> NoReturn:
        if nonce >= _MAX_NONCE:
            self._nonce = _MAX_NONCE
            raise LocalProtocolError(
                "the tunnel has carried 2^64 - 1 records, which is the limit; open another"
            )
        raise LocalProtocolError(
            f"the plaintext of a tunnel record is over the limit of {MAX_PLAINTEXT_BYTES} bytes"
        )


class Handshake:
    """One side of the two-message handshake that begins a tunnel.

    It is used once: `split` returns the two ciphers and forgets every secret.
    """

    __slots__ = ("_ephemeral", "_hash", "_initiator", "_messages", "_psk", "_shared", "_state")

    def __init__(
        self, initiator: bool, prologue: bytes, psk: bytes, ephemeral_secret: bytes
    ) -> None:
        """`psk` and `ephemeral_secret` are 32 bytes each; the latter is random and used nowhere else.

        Both sides must have the same `prologue` and `psk`, otherwise the first message does not open.

        Raises:
            LocalProtocolError: one of them has another length.
        """
        if len(psk) != KEY_BYTES or len(ephemeral_secret) != KEY_BYTES:
            raise LocalProtocolError(
                f"psk and ephemeral secret must be 32 bytes each, not {len(psk)} and {len(ephemeral_secret)}"
            )
        self._initiator = initiator
        self._messages = 0  # number of the two messages that were written or read
        self._hash = _EMPTY
        # Secrets, and the state that they are mixed into. `split` deletes them.
        self._psk = psk
        self._ephemeral: X25519PrivateKey | None = X25519PrivateKey.from_private_bytes(
            ephemeral_secret
        )
        self._shared = _EMPTY
        self._state: _Symmetric | None = _Symmetric(_NAME, _NAME, _EMPTY)
        self._state.mix_hash(prologue)

    @property
    def finished(self) -> bool:
        """Whether both messages were exchanged, so that `split` may be called, or was."""
        return self._messages == 2

    @property
    def handshake_hash(self) -> bytes:
        """32 public bytes that are unique to this tunnel (§11.2).

        Raises:
            LocalProtocolError: the handshake has not finished.
        """
        if not self.finished:
            raise LocalProtocolError("the handshake has not finished")
        return self._hash

    def write_message(self, payload: Buffer = _EMPTY) -> bytes:
        """Return this side's message: 32 bytes of ephemeral key, then `payload` encrypted, then the tag.

        Raises:
            LocalProtocolError: it is not this side's turn, or the message would be over 65,535 bytes.
        """
        state, ephemeral = self._next(writes=True)
        if KEY_BYTES + len(payload) + TAG_BYTES > MAX_MESSAGE_BYTES:
            raise LocalProtocolError(
                f"a handshake message is over the limit of {MAX_MESSAGE_BYTES} bytes"
            )
        public = ephemeral.public_key().public_bytes_raw()
        state.mix_ephemeral(public)
        if self._messages == 1:
            state.mix_key(self._shared)
        message = public + state.encrypt_and_hash(payload)
        self._commit(state, self._shared)
        return message

    def read_message(self, message: Buffer) -> bytes:
        """Return the payload of the peer's message.

        Raises:
            OpenError: the message was forged, damaged, truncated, or made with another psk or prologue. Nothing
                changed: the true message may still be read.
            LocalProtocolError: it is not the peer's turn.
        """
        state, ephemeral = self._next(writes=False)
        shared = _EMPTY
        try:
            if KEY_BYTES + TAG_BYTES <= len(message) <= MAX_MESSAGE_BYTES:
                public = bytes(message[:KEY_BYTES])
                state.mix_ephemeral(public)
                if self._messages == 1:
                    shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(public))
                    state.mix_key(shared)
                payload = state.decrypt_and_hash(message[KEY_BYTES:])
                if self._messages == 0:  # needed for our answer; a degenerate key is refused here
                    shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(public))
                self._commit(state, shared)
                return payload
        except (InvalidTag, ValueError):  # ValueError: a point of low order, so an all-zero secret
            pass
        raise OpenError(
            "the handshake message does not open: it was damaged or forged, or made for another tunnel or key"
        )

    def split(self) -> tuple[CipherState, CipherState]:
        """Return (send, recv) for the records that follow, and forget the secrets.

        Raises:
            LocalProtocolError: the handshake has not finished, or was already split: two ciphers of one key
                would repeat nonces.
        """
        state = self._state
        if state is None or not self.finished:
            raise LocalProtocolError("split can be called once only, after both handshake messages")
        keys = _hkdf(state.chaining_key, _EMPTY, 2 * KEY_BYTES)
        first, second = CipherState(keys[:KEY_BYTES]), CipherState(keys[KEY_BYTES:])
        self._state = self._ephemeral = None
        self._psk = self._shared = _EMPTY
        return (first, second) if self._initiator else (second, first)

    def _next(self, *, writes: bool) -> tuple[_Symmetric, X25519PrivateKey]:
        """Return a copy of the state, ready for the next message, and our ephemeral key."""
        ours = self._initiator == (self._messages == 0)
        if self._state is None or self._ephemeral is None or self.finished or ours is not writes:
            raise LocalProtocolError("it is not this side's turn in the handshake")
        state = self._state.copy()
        if self._messages == 0:
            state.mix_key_and_hash(self._psk)
        return state, self._ephemeral

    def _commit(self, state: _Symmetric, shared: bytes) -> None:
        self._state, self._shared = state, shared
        self._messages += 1
        if self.finished:
            self._hash = state.hash


class _Symmetric:
    """SymmetricState of §5.2. In NNpsk0 every payload has a fresh key, so each nonce is 0."""

    __slots__ = ("chaining_key", "hash", "key")

    def __init__(self, chaining_key: bytes, hash_: bytes, key: bytes) -> None:
        self.chaining_key = chaining_key
        self.hash = hash_
        self.key = key

    def copy(self) -> _Symmetric:
        return _Symmetric(self.chaining_key, self.hash, self.key)

    def mix_hash(self, data: bytes) -> None:
        digest = hashes.Hash(hashes.SHA256())
        digest.update(self.hash)
        digest.update(data)
        self.hash = digest.finalize()

    def mix_key(self, material: bytes) -> None:
        keys = _hkdf(self.chaining_key, material, 2 * KEY_BYTES)
        self.chaining_key, self.key = keys[:32], keys[32:]

    def mix_key_and_hash(self, material: bytes) -> None:
        keys = _hkdf(self.chaining_key, material, 3 * KEY_BYTES)
        self.chaining_key, self.key = keys[:32], keys[64:]
        self.mix_hash(keys[32:64])

    def mix_ephemeral(self, public: bytes) -> None:
        self.mix_hash(public)
        self.mix_key(public)

    def encrypt_and_hash(self, plaintext: Buffer) -> bytes:
        ciphertext = AESGCM(self.key).encrypt(bytes(_NONCE_BYTES), plaintext, self.hash)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: Buffer) -> bytes:
        plaintext = AESGCM(self.key).decrypt(bytes(_NONCE_BYTES), ciphertext, self.hash)
        self.mix_hash(bytes(ciphertext))
        return plaintext


def _hkdf(chaining_key: bytes, material: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, salt=chaining_key, info=_EMPTY).derive(material)


def _refuse_poisoned(nonce: bytes, plaintext: Buffer, ad: Buffer | None) -> NoReturn:
    raise LocalProtocolError(
        "this process was forked, and its tunnels belong to the parent; open new ones"
    )
