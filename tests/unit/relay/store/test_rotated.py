"""A stream whose keys changed twice: which holders can go on with it, and what a long retired key still allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from support.keeper import DEFINITION, OWNER, SECOND, SMALL, STRANGER, UUID, Keeper, order

from iris.crypto.keys import ClusterKey
from iris.wire.orders import END, SignedOrder
from iris.wire.streams import Described, Refused, Settled
from relay.store.authority import DefinitionFile
from relay.store.log import Log

THIRD = ClusterKey(b"c" * 32)


def by(signer: ClusterKey, key: ClusterKey, revision: int) -> SignedOrder:
    one = order(key, revision=revision)
    said = signer.countersign_order(one.order)
    return structs.replace(one, by=signer.public_key, countersignature=said)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    """A stream made under the owner's key, which let the second in, which let the third in; a restart after each."""
    keeper = Keeper(tmp_path)
    assert isinstance(keeper.create(order()), Described)
    keeper.restart()
    assert isinstance(keeper.change(order(revision=1), by(OWNER, SECOND, 1)), Described)
    keeper.restart()
    let_in = keeper.change(order(SECOND, revision=2), by(SECOND, THIRD, 2), key=SECOND)
    assert isinstance(let_in, Described)
    keeper.restart()
    yield keeper
    keeper.store.close()


def refused(answer: Any, code: str) -> None:
    assert isinstance(answer, Refused), answer
    assert answer.code == code


def test_the_last_key_alone_changes_and_ends_the_stream(keeper: Keeper) -> None:
    assert set(keeper.store.streams[UUID].orders) == {OWNER.key_id, SECOND.key_id, THIRD.key_id}
    change = keeper.change(order(THIRD, SMALL, revision=3), key=THIRD)
    assert isinstance(change, Described)
    keeper.restart()
    assert keeper.max_messages == 1
    end = order(THIRD, SMALL, action=END, revision=4)
    assert isinstance(keeper.delete(end, key=THIRD), Settled)
    keeper.restart()
    assert not keeper.store.streams


def test_a_key_of_long_ago_still_changes_and_ends_the_stream(keeper: Keeper) -> None:
    """Meant so: a store cannot tell a retired key from one in use (docs/streams-security.md, "A stolen key")."""
    assert isinstance(keeper.change(order(OWNER, SMALL, revision=3)), Described)
    keeper.restart()
    assert isinstance(keeper.delete(order(OWNER, SMALL, action=END, revision=4)), Settled)


def test_what_an_earlier_key_signed_before_is_worth_nothing(keeper: Keeper) -> None:
    """Orders of each revision, as whoever sat on the way may have kept them, also after another restart."""
    for _ in range(2):
        for old in (order(), order(definition=SMALL, revision=1), order(SECOND, SMALL, revision=2)):
            refused(keeper.change(old), "revision")
        refused(keeper.delete(order(action=END, revision=1)), "revision")
        refused(keeper.change(by(STRANGER, STRANGER, 3)), "order")
        assert keeper.store.streams[UUID].definition == DEFINITION
        keeper.restart()


def rewrite(keeper: Keeper, **changes: Any) -> None:
    """Write another founder, or admissions, to the disk of a store that is stopped."""
    path = keeper.store.streams[UUID].path
    keeper.store.close()
    log = Log.open(path)
    kept = structs.replace(msgspec.msgpack.decode(log.definition, type=DefinitionFile), **changes)
    log.define(msgspec.msgpack.encode(kept))
    log.close()
    keeper.start()


def test_without_the_order_that_let_a_key_in_the_stream_is_not_served(keeper: Keeper) -> None:
    admitted = keeper.store.streams[UUID].charter.admitted
    rewrite(
        keeper, admitted=[admitted[THIRD.key_id]]
    )  # the line from the first key to the third is broken
    assert "countersigned" in keeper.store.streams[UUID].failed
    refused(keeper.change(order(THIRD, SMALL, revision=3), key=THIRD), "no-stream")


def test_a_definition_that_names_another_first_key_is_not_that_of_the_stream(
    keeper: Keeper,
) -> None:
    for founder in (b"", SECOND.key_id):
        rewrite(keeper, founder=founder)
        assert "was not made of key" in keeper.store.streams[UUID].failed
    refused(keeper.change(order(THIRD, SMALL, revision=3), key=THIRD), "no-stream")
