"""The rules for orders: who may create, change and end a stream. This module only decides; `calls`
writes and serves.

    create    every order is signed by the key that it names, has revision 0, and is fresh; the uuid is made of the key
              of the first one, which countersigns the others
    change    every order has the next revision, is fresh, and is signed by a key of the stream, or countersigned by one
    end       every order has the next revision, is fresh, and is signed by a key of the stream
    start     the signatures, and how each key joined the stream, from the one that its uuid is made of; not the time,
              so that stored orders stay valid

So a uuid belongs to the key that the stream was created under, at every store, and later keys change nothing of that.

A revision grows by one. So every order can be replaced by a later one, and of two concurrent
changes one is refused.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from msgspec import Struct, structs

from iris.crypto.keys import public_id, verify_countersignature, verify_order
from iris.errors import ConfigError, DecodeError, InvalidName, OpenError
from iris.wire.orders import (
    END,
    KEEP,
    MOVE,
    ORDER_FRESH_US,
    Definition,
    Order,
    SignedOrder,
    check_definition,
    decode_order,
    in_force,
    log_uuid,
)
from relay.store.errors import Refuse

_Signed = dict[bytes, tuple[Order, SignedOrder]]
_ELSEWHERE: Final = "a stream stays on the disk of its store, or in its bucket; bring it elsewhere with `iris stream handover`"


class DefinitionFile(Struct, frozen=True):
    """The contents of a log's definition file."""

    orders: list[SignedOrder] = []
    parent: bytes = b""
    """For a log of dead letters: the uuid of their stream. Otherwise empty."""
    founder: bytes = b""
    """Id of the key that the stream was created under, which needs no countersignature."""
    admitted: list[SignedOrder] = []
    """The countersigned orders of the stream's other keys."""
    salt: bytes = b""
    """What the uuid was made of, with the `founder`; see `log_uuid`. Both are empty for a log of dead letters."""
    superseded: list[SignedOrder] = []
    """Orders of the stream that has taken the place of this one; see `Authority.supersede`."""


class Charter(Struct, frozen=True):
    """The orders that authorize a stream."""

    orders: _Signed = {}
    """Key id -> order."""
    founder: bytes = b""
    admitted: dict[bytes, SignedOrder] = {}
    salt: bytes = b""
    superseded: tuple[SignedOrder, ...] = ()
    by: Order | None = None
    """The order of the stream that has taken the place of this one."""

    @property
    def order(self) -> Order | None:
        """The order in force; None if there are none."""
        return in_force(order for order, _ in self.orders.values())

    @property
    def store(self) -> bytes:
        """The public key of the store, or group of stores, that the orders name; empty if there are none."""
        order = self.order
        return b"" if order is None else order.store

    @property
    def definition(self) -> Definition:
        """The definition in the order in force."""
        order = self.order
        return Definition("?") if order is None else order.definition

    @property
    def definition_file(self) -> DefinitionFile:
        """The contents of the definition file."""
        signed = [one for _, one in self.orders.values()]
        return DefinitionFile(
            signed, b"", self.founder, list(self.admitted.values()), self.salt, list(self.superseded)
        )  # fmt: skip


NO_CHARTER = Charter()


class Authority:
    """Checks orders for the store with this public key.

    Every method raises Refuse if an order fails a check.
    """

    def __init__(self, store: bytes, group: bytes = b"") -> None:
        """`group` is the public key of the stores that share this one's bucket."""
        self._stores = {store, group} - {b""}

    def create(self, orders: _Signed, salt: bytes, now_us: int) -> Charter:
        """Return the charter of a new stream, from orders that `read` and `one_definition` have accepted."""
        founder = next(iter(orders))
        others = {key_id: one for key_id, (_, one) in orders.items() if key_id != founder}
        for order, _ in orders.values():
            _check_uuid(order.uuid, founder, salt)
            if order.revision:
                raise Refuse(
                    "order",
                    f"the order that creates a stream must have revision 0, not {order.revision}",
                )
            _check_fresh(order, now_us)
        for key_id, one in others.items():
            _check_countersigned(key_id, one, (founder,))
        return Charter(orders, founder, others, salt)

    def change(
        self, charter: Charter, signed: Sequence[SignedOrder], uuid: bytes, now_us: int
    ) -> Charter:
        """Return the stream's new charter, or the same `charter` if the orders are already in
        force, as in a retry.
        """
        orders = self.read(signed, uuid)
        definition = one_definition(orders)
        if all(_is_in_force(charter, key_id, one) for key_id, (_, one) in orders.items()):
            return charter
        admitted = dict(charter.admitted)
        for key_id, (order, one) in orders.items():
            if order.store != charter.store:
                raise Refuse("order", _ELSEWHERE)
            if key_id not in charter.orders:
                _check_countersigned(key_id, one, charter.orders)
                admitted[key_id] = one
            _check_step(charter, order)
            _check_fresh(order, now_us)
        _check_fixed_fields(charter, definition)
        if definition.name != charter.definition.name:
            _check_all_sign(charter, orders)
        return Charter({**charter.orders, **orders}, charter.founder, admitted, charter.salt)

    def supersede(self, charter: Charter, signed: Sequence[SignedOrder], uuid: bytes) -> Charter:
        """Return the charter of a stream whose place another one takes, as its orders say: one of them must be signed
        by a key of this stream, and name this log and a higher revision than it has.

        When they were issued does not matter: a store may come back after any time.
        """
        order = self._replacing(charter, signed, uuid)
        replaced, there = order.definition.replaces, charter.order
        assert replaced is not None
        if there is None or replaced.revision <= there.revision:
            raise Refuse(
                "revision",
                "the stream was changed since it was handed over, so it stays in use; hand it over again",
            )
        return structs.replace(charter, superseded=tuple(signed), by=order)

    def _replacing(self, charter: Charter, signed: Sequence[SignedOrder], uuid: bytes) -> Order:
        """Return the order, signed by a key of this stream, of the one that takes its place."""
        for one in signed:
            if public_id(one.public_key) not in charter.orders:
                continue
            try:
                key_id = verify_order(one.public_key, one.signature, one.order)
                order = decode_order(one.order)
                check_definition(order.definition)
            except (OpenError, DecodeError, ConfigError, InvalidName) as err:
                raise Refuse("order", str(err)) from err
            replaced = order.definition.replaces
            named = (order.key_id, order.action, order.definition.mirror) == (key_id, KEEP, "")
            if named and replaced is not None and replaced.uuid == uuid:
                return order
        raise Refuse(
            "order", "none of the orders is signed by a key of the stream and lets another log take its place"
        )  # fmt: skip

    def end(
        self, charter: Charter, signed: Sequence[SignedOrder], uuid: bytes, now_us: int
    ) -> None:
        """Return if the orders may end the stream; raise Refuse otherwise."""
        self._check_act(charter, self.read(signed, uuid, action=END), now_us)

    def move(
        self, charter: Charter, signed: Sequence[SignedOrder], uuid: bytes, now_us: int
    ) -> bytes:
        """Return the public key of the store to which the orders move the stream."""
        orders = self.read(signed, uuid, action=MOVE)
        self._check_act(charter, orders, now_us)
        return next(order.store for order, _ in orders.values())

    def _check_act(self, charter: Charter, orders: _Signed, now_us: int) -> None:
        for key_id, (order, _) in orders.items():
            if key_id not in charter.orders:
                raise Refuse(
                    "order",
                    f"key {key_id.hex()[:8]} is not a key of the stream; sign with a key of the stream",
                )
            _check_step(charter, order)
            _check_fresh(order, now_us)

    def load(self, stored: DefinitionFile, uuid: bytes) -> Charter:
        """Check the stored orders, and return their charter."""
        orders = self.read(stored.orders, uuid)
        _check_uuid(uuid, stored.founder, stored.salt)
        found = self.read(stored.admitted, uuid)
        admitted: dict[bytes, SignedOrder] = {}
        keys = {stored.founder: None}
        while new := {k: one for k, (_, one) in found.items() if public_id(one.by) in keys}:
            for key_id, one in new.items():
                del found[key_id]
                _check_countersigned(key_id, one, keys)
                admitted[key_id] = one
            keys.update(dict.fromkeys(new))
        for key_id in orders:
            if key_id not in keys:
                detail = f"key {key_id.hex()[:8]} is not countersigned by a key of the stream"
                raise Refuse("order", detail)
        charter = Charter(orders, stored.founder, admitted, stored.salt)
        if stored.superseded:
            by = self._replacing(charter, stored.superseded, uuid)
            charter = structs.replace(charter, superseded=tuple(stored.superseded), by=by)
        return charter

    def read(self, signed: Sequence[SignedOrder], uuid: bytes, *, action: str = KEEP) -> _Signed:
        """Return key id -> order. Each order must be signed, and be for this store, log and action.

        An order that moves a stream names the store that is to have it.
        """
        orders: _Signed = {}
        for one in signed:
            try:
                key_id = verify_order(one.public_key, one.signature, one.order)
                order = decode_order(one.order)
                check_definition(order.definition)
            except (OpenError, DecodeError, ConfigError, InvalidName) as err:
                raise Refuse("order", str(err)) from err
            if action != MOVE and order.store not in self._stores:
                raise Refuse("order", "the order is for another store")
            if (order.key_id, order.uuid, order.action) != (key_id, uuid, action):
                raise Refuse(
                    "order", "the order was signed for another key, log or action than this call"
                )
            orders[key_id] = (order, one)
        if len({order.store for order, _ in orders.values()}) > 1:
            raise Refuse("order", "the orders of one stream must all be for the same store")
        return orders


def one_definition(orders: _Signed) -> Definition:
    """Return the definition that all orders of a call share. Raises Refuse if they differ."""
    definitions = [order.definition for order, _ in orders.values()]
    if any(definition != definitions[0] for definition in definitions):
        raise Refuse("order", "the orders of one call must all define the same stream")
    return definitions[0]


def is_promotion(old: Definition, new: Definition) -> bool:
    """Return whether the change turns a copy into an independent stream."""
    return bool(old.mirror) and not new.mirror


def _is_in_force(charter: Charter, key_id: bytes, one: SignedOrder) -> bool:
    there = charter.orders.get(key_id)
    return there is not None and there[1].order == one.order


def _check_uuid(uuid: bytes, founder: bytes, salt: bytes) -> None:
    """Raise Refuse unless a holder of the key `founder` made this uuid."""
    if uuid != log_uuid(founder, salt):
        raise Refuse(
            "order",
            f"the uuid {uuid.hex()} was not made of key {founder.hex()[:8]}, under which the stream is said to be created; "
            "create the stream with a new uuid",
        )


def _check_step(charter: Charter, order: Order) -> None:
    there = charter.order
    due = there.revision + 1 if there is not None else 0
    if order.revision != due:
        detail = (
            f"the order has revision {order.revision}, but the next revision is {due}; another client changed the stream. "
            "Read the stream again and repeat the change"
        )
        raise Refuse("revision", detail)


def _check_fresh(order: Order, now_us: int) -> None:
    ahead_us = order.issued_us - now_us
    if abs(ahead_us) > ORDER_FRESH_US:
        apart = f"{abs(ahead_us) / 1e6:,.0f} s {'after' if ahead_us > 0 else 'before'}"
        raise Refuse(
            "order",
            f"the order was issued {apart} the time of the store's clock; at most {ORDER_FRESH_US // 1_000_000} s are allowed. "
            "Synchronize the clocks of both hosts",
        )


def _check_countersigned(key_id: bytes, one: SignedOrder, keys: Container[bytes]) -> None:
    """Raise Refuse unless one of `keys` countersigned the order."""
    if not one.by:
        detail = (
            f"key {key_id.hex()[:8]} is new to the stream, so a key of the stream must countersign its order; "
            "run `iris stream keys` with a keyring that holds both keys"
        )
        raise Refuse("order", detail)
    try:
        by = verify_countersignature(one.by, one.countersignature, one.order)
    except OpenError as err:
        raise Refuse("order", str(err)) from err
    if by not in keys:
        detail = (
            f"key {key_id.hex()[:8]} is new to the stream, and the key that countersigned its order is not a key of the stream; "
            "countersign it with a key of the stream"
        )
        raise Refuse("order", detail)


def _check_all_sign(charter: Charter, orders: _Signed) -> None:
    """Raise Refuse unless every key of the stream signs."""
    if missing := [key_id.hex()[:8] for key_id in charter.orders if key_id not in orders]:
        raise Refuse(
            "order",
            f"a mirror can take the name of its source only if all its keys sign the order, and {', '.join(missing)} did not; "
            "use a keyring that has all keys of the stream",
        )


def _check_fixed_fields(charter: Charter, definition: Definition) -> None:
    """Raise Refuse if a change alters a field that cannot be changed."""
    there = charter.order
    old = there.definition if there is not None else definition
    wanted = _promoted(old, definition) if is_promotion(old, definition) else old
    if _fixed(definition) != _fixed(wanted):
        raise Refuse(
            "invalid",
            "the name and the sources of a stream cannot be changed; create another stream",
        )
    if definition.partitions[: len(old.partitions)] != old.partitions:
        raise Refuse(
            "invalid",
            "partitions can be added to a stream, but not removed or replaced; create another stream",
        )


def _fixed(definition: Definition) -> tuple[object, ...]:
    """Return the fields of a definition that cannot be changed."""
    return (
        definition.name,
        definition.topic,
        definition.cluster,
        definition.mirror,
        definition.origins,
        definition.parent,
        definition.partition,
        definition.replaces if not definition.mirror else None,
    )


def _promoted(copy: Definition, wanted: Definition) -> Definition:
    """Return the definition of a promoted copy, which records what its source recorded, or nothing."""
    source = copy.origins[-1]
    topic, cluster = (source.topic, source.cluster) if wanted.topic or wanted.cluster else ("", "")
    replaces = wanted.replaces  # `check_definition` has seen to it that this is the source
    name = copy.name if replaces is None else source.name
    return structs.replace(
        copy, name=name, mirror="", topic=topic, cluster=cluster, replaces=replaces
    )
