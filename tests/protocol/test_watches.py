"""Watches: what they are sent, how often, and how much of it at a stretch."""

from __future__ import annotations

import random

import pytest
from protocol.kit import KEY, OTHER_KEY, Port

from iris.wire import frames
from iris.wire.codec import decode_control
from iris.wire.frames import MemberInfo
from relay.core import watches as watches_module
from relay.core.session import Session, Watch
from relay.core.watches import STEP_BYTES, Watches

KEYS = (KEY.key_id,)
BOTH = (KEY.key_id, OTHER_KEY.key_id)


def session(number: int = 1) -> Session:
    return Session(Port(), number, bytes(32), 64, False, False, True, "uid 1")


def info(number: int, label: str = "") -> MemberInfo:
    return MemberInfo(f"r.{number}", [0x40], [KEY.key_id], "r", "", label)


def sent(of: Session) -> list[frames.Membership]:
    """Return what a session was sent since the last call."""
    port = of.port
    assert isinstance(port, Port)
    bodies = [decode_control(memoryview(each), 0, len(each)) for each in port.out]
    port.out.clear()
    assert all(isinstance(body, frames.Membership) for body in bodies)
    return bodies  # type: ignore[return-value]  # asserted


def settle(watches: Watches) -> int:
    """Let turns pass until everything was sent; return how many that took."""
    turns = 0
    while not watches.deadline_us:
        watches.expire()
        turns += 1
    return turns


def test_a_turn_in_which_members_come_and_go_is_one_notice() -> None:
    watches, watcher = Watches(), session()
    watches.add(Watch(watcher, 7, "db", KEYS))
    watches.joined("db", KEYS, info(1))
    assert not sent(watcher)  # not before the end of the turn
    for number in range(2, 1002):
        watches.joined("db", KEYS, info(number))
        watches.left("db", KEYS, f"r.{number}")
    (cluster,) = watches._clusters.values()
    assert len(cluster.changes) == 1  # nobody knows of the others
    watches.expire()
    (notice,) = sent(watcher)
    assert (notice.id, [each.member for each in notice.joined], notice.left) == (7, ["r.1"], [])
    assert watches.deadline_us
    watches.left("db", KEYS, "r.1")
    watches.expire()
    (notice,) = sent(watcher)
    assert (notice.joined, notice.left) == ([], ["r.1"])


def test_a_member_that_came_back_left_first() -> None:
    watches, watcher = Watches(), session()
    watches.add(Watch(watcher, 1, "db", KEYS))
    watches.joined("db", KEYS, info(1))
    settle(watches)
    sent(watcher)
    watches.left("db", KEYS, "r.1")
    watches.joined("db", KEYS, info(1, "again"))
    settle(watches)
    gone, back = sent(watcher)
    assert (gone.joined, gone.left) == ([], ["r.1"])
    assert ([each.label for each in back.joined], back.left) == (["again"], [])


def test_a_watch_is_not_sent_what_its_first_answer_had() -> None:
    watches, early, late = Watches(), session(1), session(2)
    watches.add(Watch(early, 1, "db", KEYS))
    watches.joined("db", KEYS, info(1))
    watches.add(Watch(late, 1, "db", KEYS))  # it was sent that member 1 is there
    watches.joined("db", KEYS, info(2))
    watches.left("db", KEYS, "r.1")
    settle(watches)
    assert [([m.member for m in each.joined], each.left) for each in sent(early)] == [(["r.2"], [])]
    assert [([m.member for m in each.joined], each.left) for each in sent(late)] == [
        ([], ["r.1"]), (["r.2"], []),
    ]  # fmt: skip


def test_a_watch_of_several_keys_is_sent_a_member_once_and_one_of_others_nothing() -> None:
    watches, both, other = Watches(), session(1), session(2)
    watches.add(Watch(both, 1, "db", BOTH))
    watches.add(Watch(other, 1, "db", (OTHER_KEY.key_id,)))
    watches.joined("db", BOTH, info(1))
    watches.joined("db", KEYS, info(2))
    settle(watches)
    assert [m.member for each in sent(both) for m in each.joined] == ["r.1", "r.2"]
    assert [m.member for each in sent(other) for m in each.joined] == ["r.1"]
    assert not watches.expects("web", BOTH)


def test_very_many_watches_are_told_some_at_a_time_and_what_they_are_sent_is_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []
    encode = watches_module._Notice.__init__

    def counted(self: object, joined: list[MemberInfo], left: list[str]) -> None:
        encoded.append(len(joined))
        encode(self, joined, left)  # type: ignore[arg-type]  # a Notice

    monkeypatch.setattr(watches_module._Notice, "__init__", counted)
    watches, watcher = Watches(), session()
    for number in range(4096):
        watches.add(Watch(watcher, number, "db", KEYS))
    for number in range(1000):
        watches.joined("db", KEYS, info(number))
    most = 0
    while not watches.deadline_us:
        watches.expire()
        most = max(most, sum(map(len, watcher.port.out)))  # type: ignore[attr-defined]  # a Port
        watcher.port.out.clear()  # type: ignore[attr-defined]
    assert sum(encoded) == 1000
    assert most < 2 * STEP_BYTES


def test_names_take_turns() -> None:
    watches, eve, alice = Watches(), session(1), session(2)
    for number in range(4096):
        watches.add(Watch(eve, number, "busy", KEYS))
    watches.add(Watch(alice, 1, "db", KEYS))
    for number in range(1000):
        watches.joined("busy", KEYS, info(number))
    watches.expire()
    watches.joined("db", KEYS, info(1))
    turns = 0
    while not sent(alice):
        watches.expire()
        turns += 1
    assert turns <= 2


@pytest.mark.parametrize("seed", range(20))
def test_every_watch_ends_with_the_members_that_are_there(seed: int) -> None:
    rng = random.Random(seed)
    watches = Watches()
    there: dict[str, tuple[bytes, ...]] = {}
    seen: dict[Session, tuple[Watch, set[str]]] = {}
    made = sessions = 0
    for _ in range(400):
        what = rng.randrange(6)
        if what < 2:
            made += rng.random() < 0.7
            member, keys = f"r.{made}", rng.choice((KEYS, BOTH, (OTHER_KEY.key_id,)))
            if member not in there:
                there[member] = keys
                watches.joined("db", keys, info(made))
        elif what == 2 and there:
            member = rng.choice([*there])
            watches.left("db", there.pop(member), member)
        elif what == 3:
            sessions += 1
            watcher = session(sessions)
            watch = Watch(watcher, 1, "db", rng.choice((KEYS, BOTH)))
            watches.add(watch)
            known = {m for m, keys in there.items() if not set(keys).isdisjoint(watch.key_ids)}
            seen[watcher] = watch, known
        elif what == 4 and seen and rng.random() < 0.2:
            watcher = rng.choice([*seen])
            watches.remove(seen.pop(watcher)[0])
        else:
            watches.expire()
        for watcher, (_, known) in seen.items():
            for notice in sent(watcher):
                known |= {each.member for each in notice.joined}
                known -= {*notice.left}
    settle(watches)
    for watcher, (watch, known) in seen.items():
        for notice in sent(watcher):
            known |= {each.member for each in notice.joined}
            known -= {*notice.left}
        expected = {m for m, keys in there.items() if not set(keys).isdisjoint(watch.key_ids)}
        assert known == expected, f"seed {seed}"
    for watch, _ in seen.values():
        watches.remove(watch)
    assert not len(watches)
    assert not watches._clusters
    assert not watches._concerned
    assert not watches._busy
