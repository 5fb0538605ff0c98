"""What is in an object of a bucket: encrypted, authenticated, and bound to its key.

    object = head | body
    head   = u8 version | 12 bytes nonce | u64 size of the object, big-endian | the tag of AES-256-GCM of nothing;
             associated data: version | size | the object's key and "#head"
    body   = 12 bytes nonce | AES-256-GCM of the MessagePack content; associated data: version | the object's key

The head is authenticated before more is read, so whoever writes to the bucket cannot have a store read more than a
store of the bucket wrote. Nothing is believed before it is authenticated, not even the version. A nonce is random: a
key encrypts far fewer than 2^32 objects (NIST SP 800-38D, 8.3), because each holds up to some MiB. An object cannot be
altered or served under another key. Each object of a journal names the hash of the one before, so none can be left out.
What the bucket's owner can still do is to withhold the newest objects. A store notices that if it has seen more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Meta, Struct

from iris.crypto.keys import GroupKey
from iris.errors import IrisError
from relay.store.batches import Op

VERSION: Final = 1
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
HEAD_BYTES: Final = 1 + NONCE_BYTES + 8 + TAG_BYTES
HASH_BYTES: Final = 32
NO_HASH: Final = bytes(HASH_BYTES)
WINDOW: Final = 4
"""A store creates the object `n` of a journal only when all up to `n - WINDOW` are known to be there."""

Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
JournalId = Annotated[str, Meta(min_length=32, max_length=32)]
"""32 hex digits, random for each journal."""


class ObjectDamaged(IrisError):
    """An object of the bucket was not written by a store with our group key, or is not what it wrote."""


class Rows(Struct, frozen=True, array_like=True, tag="rows"):
    """What was written to the database of one stream, in order."""

    uuid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    ops: list[Op]


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """A stream was deleted."""

    uuid: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Intent(Struct, frozen=True, array_like=True, tag="intent"):
    """The store of this journal is about to take another journal."""

    victim: JournalId


Token = Annotated[str, Meta(min_length=32, max_length=32)]
"""32 hex digits, random for each try to move a stream. The object `decision_key` decides whether the try succeeds."""
Uuid = Annotated[bytes, Meta(min_length=16, max_length=16)]
Uuids = Annotated[list[Uuid], Meta(min_length=1, max_length=2)]
"""The uuid of a stream, and that of its dead letters if it has some."""


class Released(Struct, frozen=True, array_like=True, tag="released"):
    """If move `token` takes place, this journal no longer holds these streams."""

    token: Token
    uuids: Uuids


class Taken(Struct, frozen=True, array_like=True, tag="taken"):
    """If move `token` takes place, this journal holds these streams, as journal `source` had them when it released
    them.
    """

    token: Token
    uuids: Uuids
    source: JournalId


Entry = Rows | Ended | Intent | Released | Taken


class Registered(Struct, frozen=True, tag_field="t", tag="journal"):
    """A journal has begun. These objects are numbered from 1 for the whole bucket."""

    journal: JournalId
    store: bytes
    """The public key of the store that began it."""
    label: str
    begun_us: int


class Numbered(Struct, frozen=True, tag_field="t", tag="batch"):
    """An object of a journal: what one store wrote, under the journal's next number."""

    before: Hash
    """Hash of the object before; of the registration for number 1."""
    entries: list[Entry]


class Fence(Struct, frozen=True, tag_field="t", tag="fence"):
    """The end of a journal: its streams go on in the journal `by`, which wrote its intent in object `intent`."""

    before: Hash
    by: JournalId
    intent: int


class Covered(Struct, frozen=True, array_like=True):
    """Objects that a checkpoint covers: from `first` up to but not including `end`. A fence at `end` stays."""

    journal: JournalId
    first: int
    end: int


class Checkpoint(Struct, frozen=True, tag_field="t", tag="checkpoint"):
    """Everything that a journal holds is in its objects from `number` on. These objects are numbered from 1, too."""

    number: int
    before: Hash
    """Hash of the object before `number`."""
    covers: list[Covered] = []
    """What may be deleted, of this journal and of those that it took."""


class Decision(Struct, frozen=True, tag_field="t", tag="decision"):
    """Which journal has the streams of a move; empty if the move does not take place. Whoever creates this object first
    decides it. The token may also be the uuid of a log. Then `journal` is a random name of the one attempt that may
    create the log."""

    journal: Annotated[str, Meta(max_length=32)]


class Settled(Struct, frozen=True, tag_field="t", tag="settled"):
    """The journal that took the streams of a move has all of them, so the other one need not keep them."""


class Ticket(Struct, frozen=True, tag_field="t", tag="ticket"):
    """Shows the store `target` that the move `token` may take place. It is carried by clients, not in the bucket."""

    token: Token
    uuids: Uuids
    source: JournalId
    target: bytes
    """Public key of the store that takes the streams."""
    size_bytes: int
    name: str
    key_ids: list[bytes]
    """Keys that the stream is served under."""


Content = Registered | Numbered | Fence | Checkpoint | Decision | Settled | Ticket

_decode: Final = msgspec.msgpack.Decoder(Content).decode
_encode: Final = msgspec.msgpack.Encoder().encode


def journal_key(journal: str, number: int) -> str:
    """Return the object key of a number of a journal."""
    return f"journal/{journal}/{number:012d}"


def checkpoint_key(journal: str, number: int) -> str:
    """Return the object key of a checkpoint of a journal."""
    return f"checkpoint/{journal}/{number:012d}"


def decision_key(token: str) -> str:
    """Return the object key of what decides a move."""
    return f"decision/{token}"


def settled_key(token: str) -> str:
    """Return the object key that says that the source of a move need not keep its streams."""
    return f"settled/{token}"


def registration_key(number: int) -> str:
    """Return the object key of the bucket's journal `number`."""
    return f"journals/{number:012d}"


def segment_key(uuid: bytes, first: int, random: bytes) -> str:
    """Return the object key of records of a stream that begin at `first`."""
    return f"segment/{uuid.hex()}/{first:019d}-{random.hex()}"


def _of_chunk(key: str, number: int) -> bytes:
    """Return the associated data of a chunk. No key of another object has this form."""
    return f"{key}#{number}".encode()


def hash_of(sealed: bytes) -> bytes:
    """Return the hash by which the next object names this one."""
    return hashlib.sha256(sealed).digest()


class Sealer:
    """Seals and opens objects under one group key."""

    def __init__(self, key: GroupKey, entropy: Callable[[int], bytes]) -> None:
        self._cipher = AESGCM(key.object_key)
        self._entropy = entropy

    def seal(self, key: str, content: Content) -> bytes:
        """Return the object to store under `key`."""
        version, plain = bytes([VERSION]), _encode(content)
        size = (HEAD_BYTES + NONCE_BYTES + len(plain) + TAG_BYTES).to_bytes(8, "big")
        nonce, of_body = self._entropy(NONCE_BYTES), self._entropy(NONCE_BYTES)
        tag = self._cipher.encrypt(nonce, b"", _of_head(version, size, key))
        body = self._cipher.encrypt(of_body, plain, version + key.encode())
        return b"".join((version, nonce, size, tag, of_body, body))

    def seal_chunk(self, key: str, number: int, plain: bytes) -> bytes:
        """Return a chunk of the segment object `key`."""
        version, nonce = bytes([VERSION]), self._entropy(NONCE_BYTES)
        return (
            version + nonce + self._cipher.encrypt(nonce, plain, version + _of_chunk(key, number))
        )

    def open_chunk(self, key: str, number: int, sealed: bytes) -> bytes:
        """Return what a chunk of the segment object `key` holds. Raises ObjectDamaged."""
        version = sealed[:1]
        nonce, body = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            plain = self._cipher.decrypt(nonce, body, version + _of_chunk(key, number))
        except (InvalidTag, ValueError) as err:
            raise ObjectDamaged(
                f"object {key}: chunk {number} was not written with this group key, or was changed; "
                "restore the object from a backup"
            ) from err
        _check_version(key, version)
        return plain

    def size(self, key: str, start: bytes) -> int:
        """Return the size of an object, which begins with `start`. Raises ObjectDamaged."""
        version, nonce = start[:1], start[1 : 1 + NONCE_BYTES]
        size, tag = start[1 + NONCE_BYTES : HEAD_BYTES - TAG_BYTES], start[HEAD_BYTES - TAG_BYTES : HEAD_BYTES]  # fmt: skip
        try:
            self._cipher.decrypt(nonce, tag, _of_head(version, size, key))
        except (InvalidTag, ValueError) as err:
            raise _foreign(key) from err
        _check_version(key, version)
        return int.from_bytes(size, "big")

    def open(self, key: str, sealed: bytes) -> Content:
        """Return what an object holds. Raises ObjectDamaged."""
        size = self.size(key, sealed)
        if len(sealed) != size:
            raise ObjectDamaged(
                f"object {key}: it was written with {size} bytes, and is {'longer' if len(sealed) > size else 'shorter'}; "
                "restore it from a backup"
            )
        at = HEAD_BYTES + NONCE_BYTES
        body = memoryview(sealed)[at:]
        try:
            content: Content = _decode(
                self._cipher.decrypt(sealed[HEAD_BYTES:at], body, sealed[:1] + key.encode())
            )
        except (InvalidTag, ValueError) as err:
            raise _foreign(key) from err
        except (msgspec.DecodeError, RecursionError) as err:
            raise ObjectDamaged(
                f"object {key}: {err}; a newer store wrote it, so upgrade this one"
            ) from err
        return content


def _of_head(version: bytes, size: bytes, key: str) -> bytes:
    """Return the associated data of an object's head. That of its body, or of a chunk, never has this form."""
    return version + size + f"{key}#head".encode()


def _check_version(key: str, version: bytes) -> None:
    """Raise ObjectDamaged unless this is our version. Call it for a version that was authenticated."""
    if version[0] != VERSION:
        raise ObjectDamaged(
            f"object {key}: version {version[0]}; this store reads version {VERSION}, so upgrade it"
        )


def _foreign(key: str) -> ObjectDamaged:
    return ObjectDamaged(
        f"object {key}: it was not written with this group key, or was changed; "
        "use the group key of the stores that wrote the bucket, or restore the object from a backup"
    )
