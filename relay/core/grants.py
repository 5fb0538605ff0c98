"""What a session without the key may do: a store acts on orders that a key holder signed.

An order to keep a stream replaces the proof of its key, for what it names only: to serve the stream and its
dead letters, and to receive what the stream records. That is a topic filter, or the pushes and broadcasts
of a cluster. The store signs the session's challenge with the key that the order names, so a copied order
is useless.
"""

from __future__ import annotations

from typing import Final

from iris.crypto.keys import verify_order, verify_store_proof
from iris.errors import DecodeError, OpenError
from iris.wire import frames
from iris.wire.kinds import NO_KEY, Kind
from iris.wire.orders import DEAD, KEEP, decode_order
from iris.wire.stream_items import dead_uuid
from relay.core.session import Session

MAX_GRANTED: Final = 65_536
"""Limit of grants of one session."""
_RECORDED: Final = frozenset({Kind.PUSH, Kind.BROADCAST})


def take_grant(session: Session, grant: frames.Grant, relay_id: bytes) -> str:
    """Allow a session what an order names; return why not, or an empty text."""
    if not session.ours:
        return "a store must run as the relay's own user or as root, on the relay's host"
    if len(session.granted) > MAX_GRANTED:
        return f"this session already has {MAX_GRANTED} grants, which is the limit"
    try:
        key_id = verify_order(grant.public_key, grant.signature, grant.order)
        order = decode_order(grant.order)
        verify_store_proof(
            order.store, grant.proof, grant.order,
            relay_id=relay_id, session_id=session.session_id, challenge=session.challenge,
        )  # fmt: skip
    except (DecodeError, OpenError) as err:
        return str(err)
    if order.key_id != key_id or order.action != KEEP:
        return "the order was signed by another key, or does not order a store to keep a stream"
    definition = order.definition
    uuids = (order.uuid.hex(), dead_uuid(order.uuid).hex())
    for name in (definition.name, definition.name + DEAD, *uuids):
        session.granted.add(("stream", name, key_id))
    if definition.topic:
        session.granted.add(("topic", definition.topic, key_id))
    if definition.cluster:
        session.granted.add(("cluster", definition.cluster, key_id))
    return ""


def barred(session: Session, join: frames.Join) -> str:
    """Return why a session may not serve what it asks for, or an empty text."""
    kinds = join.kinds.keys()
    for key_id in join.key_ids:
        if key_id in session.proven:
            continue
        if key_id == NO_KEY:
            if kinds == {Kind.STREAM} and session.ours:
                continue
            return "only a store of the relay's own user can serve without a key, and only streams"
        if kinds == {Kind.STREAM} and ("stream", join.name, key_id) in session.granted:
            continue
        if kinds <= _RECORDED and ("cluster", join.name, key_id) in session.granted:
            continue
        return f"this session has not proven key {key_id.hex()[:8]}"
    return ""
