"""Which streams may move to a store: it checks them as it checks those that are created there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.founded import founded
from support.keeper import OWNER, SECOND, UUID, Keeper, order

from iris.wire.orders import Definition
from iris.wire.streams import Described, Refused
from relay.store import catalogue
from relay.store.errors import Refuse


def test_a_stream_whose_name_is_taken_under_one_of_its_keys_is_refused(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    assert isinstance(keeper.create(order()), Described)
    check = keeper.store.catalogue.check_arrival
    with pytest.raises(Refuse, match=f"already has a stream 'orders', as log {UUID.hex()}") as caught:  # fmt: skip
        check("orders", [SECOND.key_id, OWNER.key_id], 1)
    assert caught.value.code == "exists"
    check("orders", [SECOND.key_id], 1)
    check("others", [OWNER.key_id], 1)
    check("", [], 1)  # of a store that does not say it
    keeper.store.close()


def test_a_store_takes_no_more_streams_than_it_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "MAX_STREAMS", 2)
    keeper = Keeper(tmp_path)
    assert isinstance(keeper.create(order()), Described)
    check = keeper.store.catalogue.check_arrival
    check("others", [OWNER.key_id], 1)
    with pytest.raises(Refuse, match="this store has 1 stream, and 2 is the limit") as caught:
        check("others", [OWNER.key_id], 2)
    assert caught.value.code == "full"
    second = order(
        uuid=founded(OWNER, bytes(16)), definition=Definition("others", "", max_messages=1)
    )
    assert isinstance(keeper.create(second), Described)
    third = order(
        uuid=founded(OWNER, b"3" * 16), definition=Definition("third", "", max_messages=1)
    )
    refused = keeper.create(third)
    assert isinstance(refused, Refused)
    assert refused.code == "full"
    keeper.store.close()
