"""Channels of calls: each direction, counter and body has its own code."""

from __future__ import annotations

import os

import pytest

from iris.crypto.channel import LONG_BYTES, Channel, Offer, accept_offer
from iris.crypto.keys import ClusterKey, StoreKey
from iris.errors import OpenError, Replayed

KEY, STORE = ClusterKey(bytes(range(32))), StoreKey(bytes(range(1, 33)))
UUID, DOOR = bytes(16), bytes(32)
END = bytes(24)


def opened(number: int = 7) -> tuple[Channel, Channel]:
    """Return the caller's side and the store's."""
    offer = Offer(KEY, os.urandom)
    share, signature = offer.sign(STORE.public_key, UUID, DOOR)
    theirs, answer, signed = accept_offer(
        STORE, UUID, number, nonce=offer.nonce, door=DOOR, public_key=KEY.public_key, share=share,
        signature=signature, secret=os.urandom(32),
    )  # fmt: skip
    return offer.opened(number, answer, signed), theirs


@pytest.mark.parametrize("size", [0, 1, LONG_BYTES, LONG_BYTES + 1, 100_000])
def test_a_call_and_its_answer_arrive_unchanged(size: int) -> None:
    caller, store = opened()
    call = caller.seal(3, END, b"c" * size) + b"c" * size
    counter, body = store.accept(END, memoryview(call))
    assert (counter, bytes(body)) == (3, b"c" * size)
    answer = store.seal(counter, END, b"a" * size) + b"a" * size
    counter, body = caller.open(END, memoryview(answer))
    assert (counter, bytes(body)) == (3, b"a" * size)
    with pytest.raises(Replayed):
        store.accept(END, memoryview(call))


def test_a_body_of_one_side_is_never_accepted_as_the_others() -> None:
    caller, store = opened()
    with pytest.raises(OpenError):
        caller.open(END, memoryview(caller.seal(0, END, b"call") + b"call"))
    with pytest.raises(OpenError):
        store.accept(END, memoryview(store.seal(0, END, b"answer") + b"answer"))


def test_a_channel_of_the_same_parties_and_number_opens_nothing_of_another() -> None:
    (caller, _), (_, store) = opened(), opened()
    with pytest.raises(OpenError):
        store.accept(END, memoryview(caller.seal(0, END, b"call") + b"call"))
