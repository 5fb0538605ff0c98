"""Prepares what the store keeps beside an appended message, in clear: key hash, times, id hash."""

from __future__ import annotations

import hmac
import time
from datetime import datetime
from typing import Final

from iris.checks import check_number, check_text
from iris.core.producer import PLAIN, Extras
from iris.errors import ConfigError, MessageTooLarge, StreamError
from iris.streams.stores import Stores

MAX_US: Final = 1 << 62
"""Latest time accepted, in µs since 1970 (about the year 148,000)."""
MAX_KEY_BYTES: Final = 4096
OF_A_MESSAGE: Final = " of a message"
"""Ends the error of a message over the size limit."""
ID_LABEL: Final = b"iris-message-id-1"
"""Put before a message id when it is hashed, so that it never hashes like a key."""


async def make_extras(
    stores: Stores, name: str, uuid: str, *, key: str | bytes | None, ttl: float | None, deliver_at: datetime | None, tombstone: bool,
    timeout: float, message_id: str | bytes | None = None,
) -> Extras:  # fmt: skip
    """Return what a message is stored with; the arguments are those of `Streams.append`.

    With a `key` or a `message_id`, it waits until the stream's location is known.

    Raises:
        ConfigError: a time is out of range, or the key or the id is neither text nor bytes.
        MessageTooLarge: the key or the id is over 4 KiB.
        StreamError: a tombstone has no key, or the stream was not found.
    """
    plain = key is None and ttl is None and deliver_at is None
    if plain and message_id is None and not tombstone:
        return PLAIN
    if tombstone and key is None:
        raise StreamError(name, "a tombstone requires a key; pass the one to delete as key=")
    for what, text in (("key", key), ("message_id", message_id)):
        if text is not None:
            check_text(what, text)
    if deliver_at is not None and not isinstance(deliver_at, datetime):
        raise ConfigError(f"deliver_at must be a datetime, not {deliver_at!r}")
    expires_us = 0 if ttl is None else time.time_ns() // 1000 + _microseconds("ttl", ttl)
    due_us = 0 if deliver_at is None else int(deliver_at.timestamp() * 1e6)
    if not 0 <= due_us < MAX_US or expires_us >= MAX_US:
        raise ConfigError("ttl, deliver_at: the time must be between the years 1970 and 148,000")
    key_hash = shown = b""
    if key is not None:
        shown = as_bytes("key", key)
        if len(shown) > MAX_KEY_BYTES:
            raise MessageTooLarge(f"key: {len(shown)} bytes are over the limit of {MAX_KEY_BYTES}")
        sealing, of = await stores.key_hash_source(name, uuid, timeout=timeout)
        key_hash = hmac.digest(sealing.key_hash_key, of + shown, "sha256")
    id_hash = b""
    if message_id is not None:
        named = as_bytes("message_id", message_id)
        if not 0 < len(named) <= MAX_KEY_BYTES:
            raise MessageTooLarge(
                f"message_id: {len(named)} bytes; it must have 1 to {MAX_KEY_BYTES}"
            )
        sealing, of = await stores.id_hash_source(name, uuid, timeout=timeout)
        # The label keeps id hashes apart from key hashes: the store cannot see that an id equals a key.
        id_hash = hmac.digest(sealing.key_hash_key, ID_LABEL + of + named, "sha256")
    return Extras(shown, key_hash, tombstone, expires_us, due_us, id_hash)


def as_bytes(what: str, text: str | bytes) -> bytes:
    """Return a key or a message id as bytes. Raises ConfigError, which names it, if it is neither text nor bytes."""
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as err:
            raise ConfigError(
                f"{what} must be text that UTF-8 can encode, or bytes: {err}"
            ) from err
    if not isinstance(text, (bytes, bytearray, memoryview)):
        raise ConfigError(f"{what} must be str or bytes, not {type(text).__name__}")
    return bytes(text)


def _microseconds(what: str, seconds: float) -> int:
    check_number(what, seconds)
    if not seconds > 0:
        raise ConfigError(f"{what}: {seconds} s is too short; it must be above 0")
    return round(seconds * 1e6)
