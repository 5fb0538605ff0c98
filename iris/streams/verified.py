"""Descriptions of streams that a key of this keyring has signed."""

from __future__ import annotations

import contextlib

import msgspec

from iris.errors import DecodeError
from iris.wire.orders import Order, decode_order
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import Described


class VerifiedStream(msgspec.Struct, frozen=True):
    """A stream as its store describes it, with the order that defines it, which a key of this keyring has signed."""

    order: Order
    described: Described

    @property
    def name(self) -> str:
        """The stream's name. (The order of a dead-letter stream has the name of the stream that it belongs to.)"""
        return self.described.definition.name

    @property
    def revision(self) -> int:
        """Revision of the order in force as the store reports it, under any key."""
        revisions = [0]
        for signed in self.described.orders:
            with contextlib.suppress(DecodeError):
                revisions.append(decode_order(signed.order).revision)
        return max(revisions)

    @property
    def current_keys(self) -> set[bytes]:
        """Ids of the keys that have the order in force. A change by a client without a key leaves that key behind."""
        revisions: dict[bytes, int] = {}
        for signed in self.described.orders:
            with contextlib.suppress(DecodeError):
                order = decode_order(signed.order)
                revisions[order.key_id] = order.revision
        return {key_id for key_id, revision in revisions.items() if revision == self.revision}

    @property
    def dead(self) -> bool:
        """Whether it holds the dead letters of the stream that its order defines."""
        return self.described.uuid == dead_uuid(self.order.uuid)
