"""Reads whole objects. How long an object is, is authenticated before more than its beginning is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relay.store.bucket.objects import FIRST_BYTES, Objects, at_once
from relay.store.bucket.sealing import ObjectDamaged, Sealer


async def fetch(objects: Objects, sealer: Sealer, key: str) -> bytes | None:
    """Return an object as it was sealed, of the length with which it was; None if it does not exist.

    Raises BucketError, ObjectDamaged.
    """
    found = await objects.get(key)
    if found is None:
        return None
    size = sealer.size(key, found)
    if FIRST_BYTES <= len(found) <= size:
        rest = await objects.get_range(key, len(found), size + 1)
        if rest is None:
            return None
        found += rest
    if len(found) != size:
        raise ObjectDamaged(
            f"object {key} of bucket {objects.url}: it was written with {size} bytes, and is "
            f"{'longer' if len(found) > size else 'shorter'}; restore it from a backup"
        )
    return found


async def fetch_all(
    objects: Objects, sealer: Sealer, keys: Sequence[str]
) -> Iterator[tuple[str, bytes | None]]:
    """Return an iterator over these keys with their objects, which are fetched at once.

    The iterator raises ObjectDamaged when it comes to such an object: behind the end of a list nobody needs it.
    Raises BucketError.
    """
    found = await at_once(_fetch_or_damage(objects, sealer, key) for key in keys)

    def each() -> Iterator[tuple[str, bytes | None]]:
        for key, one in zip(keys, found, strict=True):
            if isinstance(one, ObjectDamaged):
                raise one
            yield key, one

    return each()


async def _fetch_or_damage(
    objects: Objects, sealer: Sealer, key: str
) -> bytes | ObjectDamaged | None:
    try:
        return await fetch(objects, sealer, key)
    except ObjectDamaged as err:
        return err


async def holds(objects: Objects, key: str, sealed: bytes) -> bool | None:
    """Return whether an object is exactly `sealed`; None if it does not exist. Raises BucketError."""
    try:
        found = await objects.get_range(key, 0, len(sealed) + 1)
    except ObjectDamaged:
        return False
    return None if found is None else found == sealed
