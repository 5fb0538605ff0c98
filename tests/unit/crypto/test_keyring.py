"""What the keyring promises: the right keys for each address, rotation that loses none, no secret in errors."""

from __future__ import annotations

import itertools
import pickle
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.crypto.keyring import Keyring, dump_network_keys, parse_network_keys
from iris.crypto.keys import ClusterKey, NetworkKey
from iris.errors import InvalidName, KeyringError
from iris.wire.names import matches

KEYS = [ClusterKey(bytes([n]) * 32) for n in range(12)]
A, B, C, D = KEYS[:4]

tokens = st.sampled_from(["a", "b", "c"])
topics = st.lists(tokens, min_size=1, max_size=3).map(".".join)
key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)
names = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "S"], exclude_characters=".*>"),
    min_size=1,
    max_size=8,
)
filters = (
    st.tuples(st.lists(st.sampled_from(["a", "b", "c", "*"]), max_size=3), st.booleans())
    .filter(any)
    .map(lambda parts: ".".join([*parts[0], *([">"] if parts[1] else [])]))
)


@st.composite
def topic_keyrings(draw: st.DrawFn) -> Keyring:
    entries = {f"topic:{topic}": draw(key_lists) for topic in draw(st.sets(topics, max_size=5))}
    if draw(st.booleans()):
        entries["default"] = draw(key_lists)
    return Keyring(entries)


@st.composite
def keyrings(draw: st.DrawFn) -> Keyring:
    clusters = draw(
        st.sets(
            names.filter(lambda name: name != "default" and not name.startswith("topic:")),
            max_size=4,
        )
    )
    prefixes = draw(st.sets(st.lists(names, min_size=1, max_size=3).map(".".join), max_size=4))
    entries = {name: draw(key_lists) for name in clusters}
    entries |= {f"topic:{prefix}": draw(key_lists) for prefix in prefixes}
    if draw(st.booleans()):
        entries["default"] = draw(key_lists)
    return Keyring(entries)


# Which key for which address


def test_a_cluster_has_the_keys_of_its_entry_or_the_default() -> None:
    keyring = Keyring({"default": [A], "databases": [B, C]})
    assert keyring.for_cluster("databases") == (B, C)
    assert keyring.for_cluster("databases.eu") == (A,)
    assert keyring.for_cluster("mail") == (A,)


def test_a_topic_has_the_keys_of_its_longest_prefix_by_whole_tokens() -> None:
    keyring = Keyring({"default": [A], "topic:orders": [B], "topic:orders.eu.vip": [C]})
    assert keyring.for_topic("orders") == (B,)
    assert keyring.for_topic("orders.eu") == (B,)
    assert keyring.for_topic("orders.eu.vip") == (C,)
    assert keyring.for_topic("orders.eu.vip.7") == (C,)
    assert keyring.for_topic("orders.eu.vips") == (B,)
    assert keyring.for_topic("orders-old") == (A,)


def test_clusters_and_topics_of_one_name_have_their_own_keys() -> None:
    keyring = Keyring({"orders": [A], "topic:orders": [B]})
    assert keyring.for_cluster("orders") == (A,)
    assert keyring.for_topic("orders") == (B,)


def test_names_that_mean_other_entries_are_clusters_like_any() -> None:
    keyring = Keyring({"default": [A], "topic:orders": [B]})
    assert keyring.for_cluster("topic:orders") == (A,)
    assert keyring.for_cluster("default") == (A,)
    for name in ("default", "topic:orders"):
        with pytest.raises(KeyringError, match="clusters"):
            Keyring.parse(f'[clusters."{name}"]\nkeys = ["{A.reveal()}"]\n')


def test_without_entry_or_default_there_is_no_key() -> None:
    keyring = Keyring({"databases": [A]})
    assert keyring.for_cluster("mail") == ()
    assert keyring.for_topic("databases") == ()
    assert keyring.for_filter(">") == ()


def test_one_key_serves_everything() -> None:
    keyring = Keyring.single(A)
    assert keyring.for_cluster("any") == keyring.for_topic("any.topic") == (A,)
    assert keyring.for_filter("a.*.>") == (A,)
    assert keyring.entries() == {"default": (A,)}


@given(keyring=topic_keyrings(), topic=st.lists(tokens, min_size=1, max_size=5).map(".".join))
def test_no_prefix_longer_than_the_chosen_one_has_an_entry(keyring: Keyring, topic: str) -> None:
    prefixes = [
        name
        for name in keyring.entries()
        if name != "default" and f"{topic}.".startswith(f"{name.removeprefix('topic:')}.")
    ]
    chosen = max(prefixes, key=len, default="default")
    assert keyring.for_topic(topic) == keyring.entries().get(chosen, ())


def test_a_filter_has_the_keys_of_all_it_may_match() -> None:
    keyring = Keyring(
        {"default": [A], "topic:flights": [B], "topic:flights.JFK": [C], "topic:ships": [D]}
    )
    assert keyring.for_filter("flights.>") == (B, C)
    assert keyring.for_filter("flights.*") == (B, C)
    assert keyring.for_filter("flights.JFK") == (C,)
    assert keyring.for_filter("flights.JFK.>") == (C,)
    assert keyring.for_filter("flights.LHR") == (B,)
    assert keyring.for_filter("flights") == (B,)
    assert keyring.for_filter("trains.*") == (A,)
    assert keyring.for_filter("*") == (A, B, D)
    assert keyring.for_filter("*.JFK") == (A, C, D)
    assert keyring.for_filter(">") == (A, B, C, D)


def test_a_key_in_several_entries_is_named_once() -> None:
    keyring = Keyring({"default": [A, B], "topic:x": [B, C], "topic:x.y": [C, A]})
    assert keyring.for_filter(">") == (A, B, C)


@settings(max_examples=150, deadline=None)
@given(keyring=topic_keyrings(), topic_filter=filters)
def test_a_filter_has_exactly_the_keys_of_the_topics_it_matches(
    keyring: Keyring, topic_filter: str
) -> None:
    # "z" is in no entry; a prefix has three tokens at most, so topics of five show every case.
    every_topic = (
        ".".join(topic)
        for length in range(1, 6)
        for topic in itertools.product("abcz", repeat=length)
    )
    expected = {
        key
        for topic in every_topic
        if matches(topic_filter, topic)
        for key in keyring.for_topic(topic)
    }
    found = keyring.for_filter(topic_filter)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_a_filter_outside_the_grammar_is_refused() -> None:
    with pytest.raises(InvalidName):
        Keyring.single(A).for_filter("a.>.b")


def test_a_key_is_found_by_its_id_wherever_it_is() -> None:
    keyring = Keyring({"default": [A], "databases": [B], "topic:x": [C]})
    assert [keyring.by_id(key.key_id) for key in (A, B, C)] == [A, B, C]
    assert keyring.by_id(D.key_id) is None


# Rotation


def test_rotation_in_three_steps_never_leaves_the_old_key_unopened_too_early() -> None:
    start = Keyring.single(A)
    added = start.add("databases", B)
    assert added.for_cluster("databases") == (A, B)  # seals as before, opens both
    promoted = added.promote("databases")
    assert promoted.for_cluster("databases") == (B, A)
    retired = promoted.retire("databases")
    assert retired.for_cluster("databases") == (B,)
    for keyring in (start, added, promoted, retired):  # nobody else noticed
        assert keyring.for_cluster("mail") == (A,)
    assert start == Keyring.single(A)  # and each step is another keyring


@given(keyring=keyrings(), prefix=topics, cluster=st.sampled_from(["a", "b", "mail"]))
def test_add_changes_nothing_but_what_is_opened(
    keyring: Keyring, prefix: str, cluster: str
) -> None:
    new = ClusterKey(b"new key!" * 4)
    as_topic = keyring.add(f"topic:{prefix}", new)
    assert as_topic.for_topic(prefix) == (*keyring.for_topic(prefix), new)
    assert as_topic.for_topic(f"{prefix}.z") == (*keyring.for_topic(f"{prefix}.z"), new)
    as_cluster = keyring.add(cluster, new)
    assert as_cluster.for_cluster(cluster) == (*keyring.for_cluster(cluster), new)
    as_default = keyring.add("default", new)
    assert as_default.for_cluster("unlisted") == (*keyring.for_cluster("unlisted"), new)
    for changed in (as_topic, as_cluster, as_default):
        assert changed.by_id(new.key_id) == new
        untouched = {
            name: keys
            for name, keys in keyring.entries().items()
            if changed.entries()[name] == keys
        }
        assert len(untouched) >= len(keyring.entries()) - 1


def test_an_entry_for_a_topic_starts_from_the_longest_prefix_above_it() -> None:
    keyring = Keyring({"default": [A], "topic:orders": [B]})
    assert keyring.add("topic:orders.eu", C).for_topic("orders.eu.7") == (B, C)


def test_promote_and_retire_take_a_key_by_its_id() -> None:
    keyring = Keyring({"databases": [A, B, C]})
    promoted = keyring.promote("databases", B.key_id)
    assert promoted.for_cluster("databases") == (B, A, C)
    assert promoted.promote("databases", B.key_id) == promoted
    assert promoted.retire("databases", A.key_id).for_cluster("databases") == (B, C)


@pytest.mark.parametrize("name", ["default", "databases", "topic:orders"])
@pytest.mark.parametrize("through_a_file", [False, True])
def test_a_second_promote_changes_nothing_and_retire_then_removes_the_old_key(
    name: str, through_a_file: bool
) -> None:
    def kept(keyring: Keyring) -> Keyring:
        return Keyring.parse(keyring.dump()) if through_a_file else keyring

    added = kept(Keyring({name: [A]}).add(name, B))
    promoted = kept(added.promote(name))
    twice = kept(promoted.promote(name))
    assert added.entries()[name] == (A, B)
    assert twice.entries()[name] == promoted.entries()[name] == (B, A)
    assert twice.retire(name).entries()[name] == (B,)
    # The next rotation begins before the old key is retired.
    third = kept(twice.add(name, C))
    assert third.retire(name).entries()[name] == (B, C)  # not the new key
    assert kept(third.promote(name)).promote(name).entries()[name] == (C, B, A)
    # To go back, the key is named. Then again a second promote changes nothing.
    back = kept(twice.promote(name, A.key_id))
    assert back.entries()[name] == back.promote(name).entries()[name] == (A, B)
    assert back.retire(name).entries()[name] == (A,)


def test_of_two_keys_added_the_last_is_promoted_and_the_oldest_retired_first() -> None:
    keyring = Keyring.single(A).add("default", B).add("default", C).promote("default")
    assert keyring.promote("default").for_cluster("x") == (C, B, A)
    assert keyring.retire("default").for_cluster("x") == (C, B)
    assert keyring.retire("default").retire("default").for_cluster("x") == (C,)


def test_the_mark_of_a_replaced_key_is_a_comment_that_every_version_can_read() -> None:
    text = Keyring({"default": [A, B]}).promote("default").dump()
    assert f'    "{A.reveal()}",  # replaced\n' in text
    assert tomllib.loads(text) == {"default": {"keys": [B.reveal(), A.reveal()]}}


@given(keyring=keyrings(), data=st.data())
def test_no_step_ever_leaves_an_entry_empty_or_removes_the_key_that_seals(
    keyring: Keyring, data: st.DataObject
) -> None:
    for name, keys in keyring.entries().items():
        key = data.draw(st.sampled_from(keys))
        promoted = keyring.promote(name, key.key_id).entries()[name]
        assert promoted[0] == key
        assert set(promoted) == set(keys)
        if key == keys[0]:
            with pytest.raises(KeyringError, match=r"seals|only key"):
                keyring.retire(name, key.key_id)
        else:
            left = keyring.retire(name, key.key_id).entries()[name]
            assert left == tuple(other for other in keys if other != key)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda ring: ring.add("databases", A), "already in effect there"),
        (lambda ring: ring.add("mail", C), "already in effect there"),
        (lambda ring: ring.add("no spaces", D), "not a cluster name"),
        (lambda ring: ring.add("topic:a.>", D), "not a topic"),
        (lambda ring: ring.promote("mail"), "mail: the keyring has no entry"),
        (lambda ring: ring.promote("default"), "default: .* is its only key"),
        (lambda ring: ring.promote("databases", D.key_id), "databases: key .* is not listed"),
        (lambda ring: ring.retire("mail"), "mail: the keyring has no entry"),
        (lambda ring: ring.retire("default"), "default: .* only key"),
        (lambda ring: ring.retire("databases", A.key_id), "databases: .* seals"),
        (lambda ring: ring.retire("databases", D.key_id), "databases: key .* is not listed"),
        (lambda ring: ring.retire("databases", b"short"), "databases: key .* is not listed"),
    ],
)
def test_a_step_that_cannot_be_taken_names_the_entry(step, reason: str) -> None:  # type: ignore[no-untyped-def]  # a lambda's type says nothing
    with pytest.raises(KeyringError, match=reason):
        step(Keyring({"default": [C], "databases": [A, B]}))


# The file


@given(keyrings())
def test_a_dumped_keyring_parses_to_the_same(keyring: Keyring) -> None:
    assert Keyring.parse(keyring.dump()) == keyring
    assert Keyring.parse(keyring.dump()).dump() == keyring.dump()


def test_the_layout_is_the_documented_one() -> None:
    text = (
        f'[default]\nkeys = ["{A.reveal()}"]\n'
        f'[clusters.databases]\nkeys = ["{B.reveal()}", "{C.reveal()}"]\n'
        f'[topics."orders.eu"]\nkeys = ["{D.reveal()}"]\n'
    )
    assert Keyring.parse(text).entries() == {
        "default": (A,),
        "databases": (B, C),
        "topic:orders.eu": (D,),
    }
    assert Keyring.parse("").entries() == {}


SECRET_TEXT = D.reveal()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"[default]\nkeys = [{SECRET_TEXT}]", "not valid TOML at line 2"),
        (f"{SECRET_TEXT}", "not valid TOML"),
        (f"[{SECRET_TEXT}]\n[{SECRET_TEXT}]", "not valid TOML"),
        (f'[default]\nkeys = ["{SECRET_TEXT}', "not valid TOML"),
        (f'{SECRET_TEXT} = "x"', "may hold only the tables"),
        (f'keys = ["{SECRET_TEXT}"]', "may hold only the tables"),
        (f'default = "{SECRET_TEXT}"', "default: must hold one setting"),
        (f'[default]\nkey = ["{SECRET_TEXT}"]', "default: must hold one setting"),
        (f'[default]\nkeys = "{SECRET_TEXT}"', "default: must hold one setting"),
        (
            f'[default]\nkeys = ["{SECRET_TEXT}"]\n{SECRET_TEXT} = 1',
            "default: must hold one setting",
        ),
        (f'[default]\nkeys = ["{SECRET_TEXT}", "{SECRET_TEXT[:-1]}"]', "default: key 2: "),
        (f'[default]\nkeys = ["{SECRET_TEXT}", 7]', "default: key 2: "),
        (
            f'[default]\nkeys = ["{SECRET_TEXT}", "{SECRET_TEXT}"]',
            "default: lists the same key twice",
        ),
        ("[default]\nkeys = []", "default: does not list a key"),
        (f'[clusters]\nkeys = ["{SECRET_TEXT}"]', "keys: must hold one setting"),
        (f'clusters = ["{SECRET_TEXT}"]', "clusters is not a table"),
        (f'[clusters."a b"]\nkeys = ["{SECRET_TEXT}"]', "'a b' is not a cluster name"),
        (f'[topics."a.>"]\nkeys = ["{SECRET_TEXT}"]', "'a.>' is not a topic"),
        (f'[topics."a.b"]\nkeys = ["{SECRET_TEXT}!"]', "topic:a.b: key 1: "),
    ],
)
def test_a_malformed_file_is_named_by_entry_and_never_by_secret(text: str, reason: str) -> None:
    with pytest.raises(KeyringError) as caught:
        Keyring.parse(text)
    assert reason in str(caught.value)
    assert SECRET_TEXT[:10] not in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_a_keyring_or_refused(text: str) -> None:
    try:
        keyring = Keyring.parse(text)
    except KeyringError:
        return
    assert keyring.entries() == {}  # such as a comment; no short text holds a key


def test_a_keyring_shows_names_and_short_ids_only_and_is_never_pickled() -> None:
    keyring = Keyring({"default": [A], "topic:orders": [B, C]})
    shown = repr(keyring)
    assert "topic:orders" in shown
    assert B.key_id.hex()[:8] in shown
    assert not any(key.reveal() in shown for key in KEYS)
    with pytest.raises(TypeError):
        pickle.dumps(keyring)


def test_the_entries_handed_out_are_a_copy() -> None:
    keyring = Keyring.single(A)
    keyring.entries()["default"] = (B,)
    assert keyring.for_cluster("any") == (A,)


def test_equal_keyrings_hash_alike_whatever_the_order_of_their_entries() -> None:
    one, other = Keyring({"b": [B], "default": [A]}), Keyring({"default": [A], "b": [B]})
    assert one == other
    assert hash(one) == hash(other)
    assert Keyring({"b": [B, C]}) != Keyring({"b": [C, B]})  # another one seals


# Network keys


def test_network_keys_round_trip_in_order() -> None:
    keys = tuple(NetworkKey(bytes([n]) * 32) for n in (1, 2))
    assert parse_network_keys(dump_network_keys(keys)) == keys


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "one table"),
        (f'[default]\nkeys = ["{SECRET_TEXT}"]', "one table"),
        ("[network]\nkeys = []", "network: does not list a key"),
        (f'[network]\nkeys = ["{SECRET_TEXT}x"]', "network: key 1: a network key"),
        (f'[network]\nkeys = ["{SECRET_TEXT}"', "not valid TOML"),
    ],
)
def test_a_malformed_network_file_is_refused_without_its_secret(text: str, reason: str) -> None:
    with pytest.raises(KeyringError) as caught:
        parse_network_keys(text)
    assert reason in str(caught.value)
    assert SECRET_TEXT[:10] not in str(caught.value)
