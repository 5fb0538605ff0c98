"""Keys that a keyring derives for each topic below a prefix."""

from __future__ import annotations

import pytest

from iris.crypto import keyring as module
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import KeyringError

BASE, NEXT, OTHER, PLAIN = (ClusterKey(bytes(range(at, at + 32))) for at in range(4))
SERVICE = Keyring({"default": (PLAIN,), "topic:users.*": (BASE,)})


def test_each_name_below_the_prefix_has_a_key_and_what_is_below_it_the_same() -> None:
    (alice,) = SERVICE.for_topic("users.alice")
    assert SERVICE.for_topic("users.alice.inbox.new") == (alice,)
    (bob,) = SERVICE.for_topic("users.bob")
    assert len({alice, bob, BASE, PLAIN}) == 4
    assert alice == BASE.for_topic("users.alice")
    assert SERVICE.for_topic("users") == (PLAIN,)
    assert SERVICE.for_cluster("users.alice") == (PLAIN,)


def test_who_is_given_a_derived_key_meets_who_derives_it() -> None:
    key = ClusterKey.parse(SERVICE.for_topic("users.alice")[0].reveal())
    page = Keyring.parse(f'[topics."users.alice"]\nkeys = ["{key.reveal()}"]')
    assert page.for_topic("users.alice.inbox") == SERVICE.for_topic("users.alice.inbox")
    assert page.for_topic("users.bob") == ()
    assert page.for_filter("users.alice.>") == SERVICE.for_filter("users.alice.>")


def test_a_filter_has_the_derived_key_of_the_name_it_says_and_no_other() -> None:
    alice = SERVICE.for_topic("users.alice")
    for pattern in ("users.alice", "users.alice.>", "users.alice.*.new"):
        assert SERVICE.for_filter(pattern) == alice
    for pattern in ("users.*", "users.>", "users.*.inbox"):
        assert SERVICE.for_filter(pattern) == ()
    assert SERVICE.for_filter("users") == SERVICE.for_filter(">") == (PLAIN,)
    both = Keyring({"topic:users.*": (BASE,), "topic:users.alice.vault": (OTHER,)})
    assert both.for_filter("users.alice.>") == (*alice, OTHER)


def test_an_entry_of_a_name_goes_before_the_derived_key() -> None:
    keyring = Keyring({"topic:users.*": (BASE,), "topic:users.bob": (OTHER,)})
    assert keyring.for_topic("users.bob.x") == (OTHER,)
    assert keyring.for_filter("users.bob") == (OTHER,)


def test_rotation_derives_from_each_key_in_order() -> None:
    both = SERVICE.add("topic:users.*", NEXT)
    old, new = BASE.for_topic("users.a"), NEXT.for_topic("users.a")
    assert both.for_topic("users.a") == (old, new)
    assert both.promote("topic:users.*").for_topic("users.a") == (new, old)
    assert Keyring({"default": (PLAIN,)}).add("topic:rooms.*", BASE).for_topic("rooms.1") == (
        BASE.for_topic("rooms.1"),
    )


def test_derived_keys_are_found_by_id_and_only_so_many_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_DERIVED", 2)
    keyring = Keyring({"topic:users.*": (BASE,)})
    a, b, c = (BASE.for_topic(f"users.{name}") for name in "abc")
    assert keyring.by_id(a.key_id) is None
    keyring.for_topic("users.a")
    keyring.for_topic("users.b")
    keyring.for_topic("users.a")
    keyring.for_topic("users.c")
    assert [keyring.by_id(key.key_id) == key for key in (a, b, c)] == [True, False, True]
    assert keyring.by_id(BASE.key_id) == BASE


def test_the_file_says_derive_and_only_where_it_can() -> None:
    text = SERVICE.dump()
    assert '[topics."users.*"]\nderive = true\nkeys = [' in text
    assert Keyring.parse(text) == SERVICE
    key = BASE.reveal()
    for wrong in (
        f'[topics."users.*"]\nkeys = ["{key}"]',
        f'[topics."users"]\nderive = true\nkeys = ["{key}"]',
        f'[topics."users.*"]\nderive = 1\nkeys = ["{key}"]',
        f'[topics."*"]\nderive = true\nkeys = ["{key}"]',
        f'[topics."users.*.x"]\nderive = true\nkeys = ["{key}"]',
        f'[clusters."users"]\nderive = true\nkeys = ["{key}"]',
    ):
        with pytest.raises(KeyringError) as caught:
            Keyring.parse(wrong)
        assert key not in str(caught.value)
