"""The attacks from sessions: each prepares a session up to its first `yield`, and then yields what it sends.

`support.attacker` runs them. To add one, write a generator and decorate it. A chunk is some KiB, so that the attacker
costs little beside the relay.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from support.attacker import BINARY, CONTINUATION, PING, Attacker, data_frame, web_frame

from iris.crypto.keys import ClusterKey
from iris.wire import frames
from iris.wire.codec import encode_control, tunnel_frame
from iris.wire.frames import MAX_CREDIT, MAX_KEY_IDS, Control
from iris.wire.kinds import FLAG_REFUSED, Kind, Refusal
from iris.wire.runs import MAX_RUN, answer_run, call_run

Chunks = Iterator[bytes]
END: Final = bytes(24)
MEMBERS: Final = 1024
TREE_LEVELS: Final = 12
FLOWS: Final = 8000
ALIASES: Final = 65_536


@dataclass(frozen=True)
class Attack:
    """One attack. `breaks`: it breaks a rule, so that the relay must close its connections, and count that."""

    make: Callable[[Attacker], Chunks]
    breaks: bool = False
    settles: bool = True
    """Whether the relay answers a PING after the last frame; it does not without HELLO, or if the rule is broken."""
    port: str = "socket"


ATTACKS: dict[str, Attack] = {}


def attack(*, breaks: bool = False, settles: bool = True, port: str = "socket") -> Callable[[Callable[[Attacker], Chunks]], Callable[[Attacker], Chunks]]:  # fmt: skip
    """Add the decorated generator to the table."""

    def add(make: Callable[[Attacker], Chunks]) -> Callable[[Attacker], Chunks]:
        ATTACKS[make.__name__] = Attack(make, breaks, settles and not breaks, port)
        return make

    return add


def packed(*bodies: Control) -> bytes:
    """Return control frames as one chunk."""
    return b"".join(map(encode_control, bodies))


def forever(*chunks: bytes) -> Chunks:
    """Yield chunks again and again."""
    return itertools.cycle(chunks)


def keys(attacker: Attacker, count: int) -> list[ClusterKey]:
    """Return more keys of an attacker."""
    return [ClusterKey(bytes([0xE1, attacker.number, n >> 8, n & 255]) * 8) for n in range(count)]


def members(attacker: Attacker, kind: int, count: int = MEMBERS, **more: Any) -> list[int]:
    """Join with many members; return their numbers."""
    serials = []
    count = attacker.many(count) if count > 1 else 1
    for at in range(0, count, 64):
        asked = min(64, count - at)
        attacker.say(*(attacker.join(kind, **more) for _ in range(asked)))
        serials += [attacker.expect(frames.Ack).member for _ in range(asked)]
    return serials


def calls(kind: int, *, alias: int = 0, per_chunk: int = 256, body: bytes = bytes(32), deadline_s: float = 0) -> Chunks:  # fmt: skip
    """Yield calls, each with a hop id of its own."""
    for first in itertools.count(1, per_chunk):
        deadline = int((time.monotonic() + deadline_s) * 1e6) if deadline_s else 0
        yield b"".join(
            data_frame(kind, body, alias=alias, hop=hop, deadline=deadline)
            for hop in range(first, first + per_chunk)
        )


# -- browsers ------------------------------------------------------------------------------------------------


@attack(breaks=True, port="web")
def web_pings_of_a_stranger(a: Attacker) -> Chunks:
    a.connect_web()
    yield from forever(web_frame(PING) * 1000)


@attack(breaks=True, port="web")
def web_pings(a: Attacker) -> Chunks:
    a.connect_web().greet()
    yield from forever(web_frame(PING) * 1000)


@attack(breaks=True, port="web")
def web_empty_fragments(a: Attacker) -> Chunks:
    a.connect_web().greet()
    yield web_frame(BINARY, fin=False)
    yield from forever(web_frame(CONTINUATION, fin=False) * 1000)


@attack(breaks=True, port="web")
def web_messages_without_a_frame(a: Attacker) -> Chunks:
    a.connect_web().greet()
    yield from forever(web_frame(BINARY) * 1000)


@attack(settles=False, port="web")
def web_tiny_messages(a: Attacker) -> Chunks:
    a.connect_web().greet()
    yield from forever(web_frame(BINARY, encode_control(frames.Unwatch(1))) * 500)


@attack(settles=False, port="web")
def web_huge_message_in_tiny_fragments(a: Attacker) -> Chunks:
    a.connect_web().greet().prove()
    a.say(a.declare(0, Kind.PUSH, "evil.nobody"))
    frame = data_frame(Kind.PUSH, bytes(1 << 20))
    yield b""
    while True:
        yield web_frame(BINARY, frame[:1], fin=False)
        for at in range(1, len(frame) - 1, 1024):
            part = frame[at : at + 1024]
            yield b"".join(web_frame(CONTINUATION, part[n : n + 1], fin=False) for n in range(len(part)))  # fmt: skip
        yield web_frame(CONTINUATION, b"\0")


@attack(breaks=True, port="web")
def web_reconnecting(a: Attacker) -> Chunks:
    a.connect_web()
    yield web_frame(BINARY, b"\1\0\0\0\0")


@attack(settles=False, port="web")
def web_connecting(a: Attacker) -> Chunks:
    yield b""
    while True:
        for _ in range(16):
            a.close()
            a.connect_web(upgrade=False)
        yield b""


@attack(breaks=True, port="web")
def web_without_http(a: Attacker) -> Chunks:
    a.connect_web(upgrade=False)
    yield bytes(1000)


@attack(breaks=True, port="web")
def web_tickets(a: Attacker) -> Chunks:
    a.connect_web().greet()
    yield web_frame(BINARY, encode_control(frames.Ticket(1, "x" * 8000))) * 8


# -- control frames ------------------------------------------------------------------------------------------


@attack()
def pings(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Ping(1)) * 2000)


@attack(settles=False)
def pings_without_reading(a: Attacker) -> Chunks:
    a.ready()
    a.deaf = True
    yield from forever(packed(frames.Ping(1)) * 2000)


@attack()
def statuses(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Status(1)) * 200)


@attack()
def statuses_of_much(a: Attacker) -> Chunks:
    """A STATUS lists 4,096 subscriptions and 1,024 members of many names."""
    a.ready()
    for n in range(0, a.many(4096), 64):
        a.say(*(frames.Subscribe(1, f"evil.a{a.number}.t{m}", [a.key.key_id]) for m in range(n, n + 64)))  # fmt: skip
    for n in range(a.many(MEMBERS)):
        a.say(a.join(Kind.PUSH, f"evil.a{a.number}.c{n}"))
    a.settle()
    yield from forever(packed(frames.Status(1)) * 20)


@attack()
def settles(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Settle(1)) * 1000)


@attack()
def settles_after_changes(a: Attacker) -> Chunks:
    a.ready()
    key = [a.key.key_id]
    one = packed(frames.Subscribe(1, a.name, key), frames.Settle(2), frames.Unsubscribe(3, a.name), frames.Settle(4))  # fmt: skip
    yield from forever(one * 200)


@attack()
def joins_and_leaves(a: Attacker) -> Chunks:
    a.ready()
    yield from _slow_churn(a)


def _slow_churn(a: Attacker) -> Chunks:
    """Join and leave in lockstep with the relay, whose numbers of members it needs."""
    yield b""
    while True:
        a.say(*[a.join(Kind.PUSH)] * 256)
        serials = [a.expect(frames.Ack).member for _ in range(256)]
        a.say(*(frames.Leave(1, serial) for serial in serials))
        for _ in serials:
            a.expect(frames.Ack)
        yield b""


@attack()
def joins_and_leaves_under_many_keys(a: Attacker) -> Chunks:
    a.ready()
    more = keys(a, MAX_KEY_IDS)
    a.prove(*more)
    ids = [key.key_id for key in more]
    serving = {int(kind): frames.Serving(1, 1) for kind in (Kind.REQUEST, Kind.PUSH, Kind.BROADCAST)}  # fmt: skip
    join = frames.Join(1, a.name, ids, serving)
    yield b""
    while True:
        a.say(*[join] * 64)
        a.say(*(frames.Leave(1, a.expect(frames.Ack).member) for _ in range(64)))
        for _ in range(64):
            a.expect(frames.Ack)
        yield b""


def _watch(a: Attacker) -> None:
    count = a.many(1024)
    for at in range(0, count, 256):
        a.say(*(frames.Members(10 + n, a.name, [a.key.key_id], watch=True) for n in range(at, min(at + 256, count))))  # fmt: skip
    a.settle()


@attack()
def watches_of_own_joins(a: Attacker) -> Chunks:
    a.ready()
    _watch(a)
    yield from _slow_churn(a)


@attack()
def watches_of_joins_of_another_session(a: Attacker) -> Chunks:
    _watch(a.another().ready())
    a.ready()
    yield from _slow_churn(a)


@attack()
def watches_that_begin_and_end(a: Attacker) -> Chunks:
    a.ready()
    members(a, Kind.PUSH, 64)
    one = frames.Members(1, a.name, [a.key.key_id], watch=True)
    yield from forever(packed(*[one, frames.Unwatch(1)] * 100))


@attack()
def topics_over_a_tree_of_wildcards(a: Attacker) -> Chunks:
    a.ready()
    _tree(a)
    name = ".".join("a" * TREE_LEVELS)
    yield from forever(packed(frames.Topic(1, name, a.key.key_id)) * 100)


@attack()
def topics_with_the_slow_ones(a: Attacker) -> Chunks:
    a.ready()
    _tree(a)
    name = ".".join("a" * TREE_LEVELS)
    yield from forever(packed(frames.Topic(1, name, a.key.key_id, slow=True)) * 100)


def _tree(a: Attacker, key: ClusterKey | None = None, levels: int = TREE_LEVELS) -> None:
    """Subscribe to all filters of "a" and "*" on each level."""
    key_id = (key or a.key).key_id
    for n in range(a.many(1 << levels)):
        pattern = ".".join("a*"[n >> level & 1] for level in range(levels))
        a.say(frames.Subscribe(1, pattern, [key_id]))
    a.settle()


@attack()
def topics_under_many_keys(a: Attacker) -> Chunks:
    a.ready()
    more = keys(a, 64)
    a.prove(*more)
    levels = 2 if a.brief else 6
    ids = [key.key_id for key in more]
    for n in range(1 << levels):
        pattern = ".".join("a*"[n >> level & 1] for level in range(levels))
        a.say(frames.Subscribe(1, pattern, ids))
    a.settle()
    yield from forever(packed(frames.Topic(1, ".".join("a" * levels), a.key.key_id)) * 100)


@attack()
def publications_to_new_topics_over_a_tree_of_wildcards(a: Attacker) -> Chunks:
    a.another().ready()
    _tree(a.others[0], levels=10)
    a.ready()
    name = ".".join("a" * 10)
    yield b""
    for n in itertools.count():
        sender = n.to_bytes(16, "little")
        yield b"".join(
            encode_control(a.declare(m, Kind.PUBLISH, name, sender_id=sender)) + data_frame(Kind.PUBLISH, alias=m)
            for m in range(16)
        )  # fmt: skip


@attack()
def publications_without_subscribers_over_a_tree_of_other_keys(a: Attacker) -> Chunks:
    other = a.another().ready()
    other_key = keys(a, 1)[0]
    other.prove(other_key)
    _tree(other, other_key)
    a.ready()
    name = ".".join("a" * TREE_LEVELS)
    yield b""
    for n in itertools.count():
        sender = n.to_bytes(16, "little")
        yield b"".join(
            encode_control(a.declare(m, Kind.PUBLISH, name, sender_id=sender)) + data_frame(Kind.PUBLISH, alias=m)
            for m in range(16)
        )  # fmt: skip


@attack()
def member_lists_of_own_members(a: Attacker) -> Chunks:
    """1,024 members, each under 8 keys."""
    a.ready()
    more = keys(a, 8)
    a.prove(*more)
    ids = [key.key_id for key in more]
    for _ in range(a.many(MEMBERS)):
        a.say(frames.Join(1, a.name, ids, {int(Kind.PUSH): frames.Serving(1, 1)}, "t" * 200))
    a.settle()
    yield from forever(packed(frames.Members(1, a.name, ids)) * 20)


@attack()
def member_lists_of_nobody(a: Attacker) -> Chunks:
    a.ready()
    more = keys(a, 64)
    a.prove(*more)
    yield from forever(packed(frames.Members(1, "evil.nobody", [key.key_id for key in more])) * 50)


@attack()
def subscriptions_that_begin_and_end(a: Attacker) -> Chunks:
    a.ready()
    key, deep = [a.key.key_id], ".".join("ab"[a.number % 2] * 120)
    yield from forever(packed(frames.Subscribe(1, deep, key), frames.Unsubscribe(1, deep)) * 100)


@attack()
def subscriptions_under_many_keys_that_begin_and_end(a: Attacker) -> Chunks:
    a.ready()
    more = keys(a, 64)
    a.prove(*more)
    ids = [key.key_id for key in more]
    deep = f"evil{a.number}." + ".".join("a" * 100)
    yield from forever(packed(frames.Subscribe(1, deep, ids), frames.Unsubscribe(1, deep)) * 20)


@attack()
def groups_that_begin_and_end(a: Attacker) -> Chunks:
    a.ready()
    key = [a.key.key_id]
    groups = [f"g{a.number}.{n}" for n in range(100)]
    yield from forever(
        packed(*(frames.Subscribe(1, a.name, key, g) for g in groups), *(frames.Unsubscribe(1, a.name, g) for g in groups))
    )  # fmt: skip


@attack()
def subscriptions_that_are_refused(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Subscribe(1, "..", [a.key.key_id])) * 500)


@attack()
def joins_that_are_refused(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(a.join(Kind.PUSH, "..")) * 500)


@attack(breaks=True)
def beats(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Beat(1)) * 500)


@attack(breaks=True)
def proofs(a: Attacker) -> Chunks:
    a.connect().greet()
    one = a.proof(a.key)
    yield from forever(packed(*[one] * 400))


@attack()
def proofs_and_releases(a: Attacker) -> Chunks:
    a.connect().greet()
    one = a.proof(a.key)
    yield from forever(packed(*[one, frames.Release(a.key.key_id)] * 50))


@attack()
def releases_with_many_members(a: Attacker) -> Chunks:
    """Each RELEASE looks at all members and subscriptions for the key."""
    a.ready()
    more = keys(a, 1)
    a.prove(*more)
    members(a, Kind.PUSH)
    _tree(a)
    one = a.proof(more[0])
    yield from forever(packed(*[frames.Release(more[0].key_id), one] * 20))


@attack()
def grants_that_nobody_signed(a: Attacker) -> Chunks:
    a.connect().greet()
    grant = frames.Grant(1, bytes(200), a.key.public_key, bytes(64), bytes(64))
    yield from forever(packed(grant) * 100)


@attack()
def long_control_frames(a: Attacker) -> Chunks:
    """The field that no struct has is a list of 61,440 empty lists, which the relay skips."""
    a.ready()
    body = b"\x82\xa2id\x01\xa1x\xdc\xf0\x00" + b"\x90" * 0xF000
    frame = (2 + len(body)).to_bytes(4, "little") + bytes((Kind.PING, 0)) + body
    yield from forever(frame * 8)


@attack()
def declarations_over_all_aliases(a: Attacker) -> Chunks:
    a.ready()
    declare = [encode_control(a.declare(alias, Kind.PUBLISH, f"evil.t{alias % 512}")) for alias in range(a.many(ALIASES))]  # fmt: skip
    yield from forever(*(b"".join(declare[at : at + 256]) for at in range(0, len(declare), 256)))


@attack()
def declarations_with_many_groups(a: Attacker) -> Chunks:
    a.ready()
    groups = [f"g{n}" for n in range(256)]
    yield from forever(packed(a.declare(0, Kind.PUBLISH, groups=groups)) * 20)


@attack()
def publications_of_ever_new_senders(a: Attacker) -> Chunks:
    a.another().ready().say(frames.Subscribe(1, a.name, [a.key.key_id]))
    a.others[0].settle()
    a.ready()
    yield b""
    for n in itertools.count():
        yield b"".join(
            encode_control(a.declare((n * 64 + m) % ALIASES, Kind.PUBLISH, sender_id=os.urandom(16)))
            + data_frame(Kind.PUBLISH, alias=(n * 64 + m) % ALIASES)
            for m in range(64)
        )  # fmt: skip


def _flows(a: Attacker) -> None:
    """Publish with WAIT under many aliases, to a subscriber that grants nothing."""
    other = a.another().ready()
    other.say(frames.Subscribe(1, f"{a.name}.>", [a.key.key_id]))
    other.settle()
    a.ready()
    for at in range(0, a.many(FLOWS), 50):
        a.say(*(a.declare(n, Kind.PUBLISH, f"{a.name}.t{n}") for n in range(at, at + 50)))
        a.send(b"".join(data_frame(Kind.PUBLISH, alias=n) for n in range(at, at + 50)))
        a.say(*(frames.Wait(n, 1) for n in range(at, at + 50)))
    a.settle()


@attack()
def flows_that_wait_and_nothing_more(a: Attacker) -> Chunks:
    _flows(a)
    while True:
        a.pause()
        yield b""


@attack()
def flows_that_wait_again_and_again(a: Attacker) -> Chunks:
    _flows(a)
    yield b""
    for serial in itertools.count(2):
        for at in range(0, a.many(FLOWS), 250):
            yield packed(*(frames.Wait(n, serial) for n in range(at, at + 250)))


@attack()
def flows_that_stall(a: Attacker) -> Chunks:
    _flows(a)
    yield b""
    for serial in itertools.count(2):
        for at in range(0, a.many(FLOWS), 250):
            yield b"".join(
                encode_control(frames.Wait(n, serial, True)) + data_frame(Kind.PUBLISH, alias=n)
                for n in range(at, at + 250)
            )


@attack()
def windows(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(*(frames.Window(n, 1, n) for n in range(500))))


@attack()
def subscribers_that_change_under_waiting_flows(a: Attacker) -> Chunks:
    _flows(a)
    key, pattern = [a.key.key_id], f"{a.name}.*"
    yield from forever(
        packed(frames.Subscribe(1, pattern, key), frames.Unsubscribe(1, pattern)) * 50
    )


# -- casts ---------------------------------------------------------------------------------------------------


@attack()
def publications_to_own_groups(a: Attacker) -> Chunks:
    other = a.another().ready()
    other.say(*(frames.Subscribe(1, a.name, [a.key.key_id], f"g{n}") for n in range(128)))
    other.settle()
    a.ready().say(a.declare(0, Kind.PUBLISH))
    yield from forever(data_frame(Kind.PUBLISH) * 200)


@attack()
def publications_to_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.PUBLISH))
    yield from forever(data_frame(Kind.PUBLISH) * 500)


@attack()
def broadcasts_to_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.BROADCAST, "evil.nobody"))
    yield from forever(data_frame(Kind.BROADCAST) * 500)


@attack()
def broadcasts_to_own_members(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.BROADCAST)
    a.ready().say(a.declare(0, Kind.BROADCAST))
    yield from forever(data_frame(Kind.BROADCAST) * 100)


@attack()
def broadcasts_to_members_that_do_not_read(a: Attacker) -> Chunks:
    other = a.another().ready()
    members(other, Kind.BROADCAST)
    other.deaf = True
    a.ready().say(a.declare(0, Kind.BROADCAST))
    yield from forever(data_frame(Kind.BROADCAST) * 100)


@attack()
def surveys_of_own_members(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.SURVEY)
    a.ready().say(a.declare(0, Kind.SURVEY))
    yield b""
    yield from calls(Kind.SURVEY, per_chunk=20)


@attack()
def surveys_that_expire(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.SURVEY)
    a.ready().say(a.declare(0, Kind.SURVEY))
    yield b""
    yield from calls(Kind.SURVEY, per_chunk=20, deadline_s=0.3)


@attack()
def surveys_of_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.SURVEY, "evil.nobody"))
    yield b""
    yield from calls(Kind.SURVEY)


# -- calls ---------------------------------------------------------------------------------------------------


@attack()
def requests_to_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.REQUEST, "evil.nobody"))
    yield b""
    yield from calls(Kind.REQUEST)


@attack()
def requests_to_a_full_member(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.REQUEST, 1, concurrency=1, limit_bytes=1)
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    yield from calls(Kind.REQUEST)


@attack()
def requests_to_many_full_members(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.REQUEST, concurrency=1, limit_bytes=1)
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    yield from calls(Kind.REQUEST)


@attack()
def requests_to_members_that_do_not_read(a: Attacker) -> Chunks:
    other = a.another().ready()
    members(other, Kind.REQUEST)
    other.deaf = True
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    yield from calls(Kind.REQUEST)


@attack()
def requests_that_expire(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.REQUEST)
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    yield from calls(Kind.REQUEST, deadline_s=0.3)


@attack()
def requests_that_wait_for_a_member(a: Attacker) -> Chunks:
    """To an address that had a member a moment ago."""
    other = a.another().ready()
    (serial,) = members(other, Kind.REQUEST, 1)
    other.say(frames.Leave(1, serial))
    other.settle()
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    yield from calls(Kind.REQUEST, deadline_s=5.0)


@attack()
def requests_that_members_refuse(a: Attacker) -> Chunks:
    """Own members send each request back, so that it is tried at others."""
    other = a.another().ready()
    members(other, Kind.REQUEST)
    rest = bytearray()

    def refuse(data: bytes) -> bytes:
        nonlocal rest
        rest += data
        at, out = 0, bytearray()
        while len(rest) - at >= 6:
            end = at + 4 + int.from_bytes(rest[at : at + 4], "little")
            if end > len(rest):
                break
            if rest[at + 4] == Kind.REQUEST:
                rest[at + 5] = FLAG_REFUSED | Refusal.FULL << 4
                out += rest[at:end]
            at = end
        rest = rest[at:]
        return bytes(out)

    other.reflect = refuse
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    yield from calls(Kind.REQUEST, per_chunk=64)


@attack()
def runs_to_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.REQUEST, "evil.nobody"))
    yield b""
    for first in itertools.count(1, MAX_RUN):
        yield call_run(0, 0, first, 0, END, [b"x" * 16] * MAX_RUN)


@attack()
def runs_to_many_members(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.REQUEST)
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    for first in itertools.count(1, MAX_RUN):
        yield call_run(0, 0, first, 0, END, [b"x" * 16] * MAX_RUN)


@attack()
def runs_of_pushes_to_many_members(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.PUSH)
    a.ready().say(a.declare(0, Kind.PUSH))
    yield b""
    for first in itertools.count(1, MAX_RUN):
        yield call_run(0, 0, first, 0, END, [b"x" * 16] * MAX_RUN)


@attack()
def small_pushes_to_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.PUSH, "evil.nobody"))
    yield b""
    yield from calls(Kind.PUSH, body=b"")


@attack()
def small_pushes_to_own_member(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.PUSH, 1)
    a.ready().say(a.declare(0, Kind.PUSH))
    yield b""
    yield from calls(Kind.PUSH, body=b"")


@attack()
def big_pushes_to_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.PUSH, "evil.nobody"))
    yield from forever(data_frame(Kind.PUSH, bytes(1 << 20), hop=1))


@attack()
def big_publications_to_own_subscribers(a: Attacker) -> Chunks:
    for _ in range(8):
        other = a.another().ready()
        other.say(frames.Subscribe(1, a.name, [a.key.key_id]))
        other.settle()
    a.ready().say(a.declare(0, Kind.PUBLISH))
    yield from forever(data_frame(Kind.PUBLISH, bytes(1 << 20)))


@attack()
def tunnels_that_open_and_end(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.TUNNEL_OPEN, 1)
    a.ready().say(a.declare(0, Kind.TUNNEL_OPEN))
    yield b""
    for first in itertools.count(1, 128):
        yield b"".join(
            data_frame(Kind.TUNNEL_OPEN, hop=hop) + tunnel_frame(Kind.TUNNEL_END, hop, b"\0") for hop in range(first, first + 128)
        )  # fmt: skip


@attack()
def tunnels_to_nobody(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.TUNNEL_OPEN, "evil.nobody"))
    yield b""
    yield from calls(Kind.TUNNEL_OPEN)


@attack()
def callers_that_leave(a: Attacker) -> Chunks:
    members(a.another().ready(), Kind.REQUEST)
    a.ready().say(a.declare(0, Kind.REQUEST))
    yield b""
    for first in itertools.count(1, 512):
        many = range(first, first + 512)
        yield b"".join(data_frame(Kind.REQUEST, hop=hop) for hop in many) + packed(frames.CallerLeft(list(many)))  # fmt: skip


@attack()
def leaving_of_unknown_calls(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.CallerLeft(list(range(1, MAX_CREDIT + 1)))))


@attack()
def credit_of_a_stranger(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Credit(1 << 40, Kind.PUSH, list(range(MAX_CREDIT)))))


@attack(breaks=True)
def credit_for_nothing(a: Attacker) -> Chunks:
    a.ready()
    (serial,) = members(a, Kind.PUSH, 1)
    yield from forever(packed(frames.Credit(serial, Kind.PUSH, list(range(MAX_CREDIT)))))


@attack(breaks=True)
def gaps(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Gap(Kind.PUBLISH, a.name, a.key.key_id, a.sender_id, 1, 2, "evil")) * 100)  # fmt: skip


@attack()
def late_answers(a: Attacker) -> Chunks:
    a.ready().say(a.declare(0, Kind.REPLY))
    run = answer_run(0, END, list(range(1 << 63, (1 << 63) + MAX_RUN)), [b"x" * 16] * MAX_RUN)
    yield from forever(run)


@attack()
def reports_of_socket_pairs(a: Attacker) -> Chunks:
    a.ready()
    yield from forever(packed(frames.Direct(1)) * 500)


# -- connections ---------------------------------------------------------------------------------------------


@attack(settles=False)
def connecting(a: Attacker) -> Chunks:
    yield b""
    while True:
        for _ in range(16):
            a.reopen()
        yield b""


@attack(settles=False)
def connecting_and_proving(a: Attacker) -> Chunks:
    yield b""
    while True:
        a.reopen().greet().prove()
        yield b""


@attack(settles=False)
def connecting_with_much_state(a: Attacker) -> Chunks:
    """1,024 members, 4,096 subscriptions, 4,096 aliases, and calls in flight; then the connection is closed."""
    yield b""
    while True:
        _much(a.reopen().greet().prove())
        yield b""


def _much(a: Attacker) -> None:
    a.say(*(a.join(Kind.REQUEST) for _ in range(a.many(MEMBERS))))
    a.say(
        *(frames.Subscribe(1, f"{a.name}.{n}.a.b.c.d", [a.key.key_id]) for n in range(a.many(4096)))
    )
    a.say(*(a.declare(n, Kind.REQUEST) for n in range(a.many(4096))))
    a.send(b"".join(data_frame(Kind.REQUEST, alias=n, hop=n + 1) for n in range(a.many(4096))))
    a.settle()


@attack(settles=False)
def connecting_with_many_keys(a: Attacker) -> Chunks:
    """Each of 1,024 members is under 60 keys."""
    more = keys(a, a.many(60))
    ids = [key.key_id for key in more]
    yield b""
    while True:
        a.reopen().greet().prove(*more)
        serving = {int(Kind.PUSH): frames.Serving(1, 1)}
        a.say(*(frames.Join(1, a.name, ids, serving) for _ in range(a.many(MEMBERS))))
        a.settle()
        yield b""


@attack(settles=False)
def connecting_with_unanswered_calls(a: Attacker) -> Chunks:
    """65,536 calls to the own member; then both are closed."""
    yield b""
    while True:
        a.reopen().greet().prove()
        a.say(a.join(Kind.REQUEST), a.declare(0, Kind.REQUEST))
        flood = calls(Kind.REQUEST, per_chunk=a.many(4096))
        for _ in range(16):
            a.send(next(flood))
        a.settle()
        yield b""


@attack(settles=False)
def frames_in_halves(a: Attacker) -> Chunks:
    """Each chunk ends within a frame of 200 KB."""
    a.ready().say(a.declare(0, Kind.PUSH, "evil.nobody"))
    frame = data_frame(Kind.PUSH, bytes(200_000), hop=1)
    yield frame[:100_000]
    yield from forever(frame[100_000:] + frame[:100_000])


@attack(settles=False)
def bytes_one_by_one(a: Attacker) -> Chunks:
    a.ready()
    frame = packed(frames.Unwatch(1))
    yield from forever(*(frame[n : n + 1] for n in range(len(frame))))


# -- other hosts ---------------------------------------------------------------------------------------------


@attack(port="tls")
def pings_from_another_host(a: Attacker) -> Chunks:
    a.connect_tls().greet()
    yield from forever(packed(frames.Ping(1)) * 2000)


@attack(port="tls", settles=False)
def small_pushes_from_another_host(a: Attacker) -> Chunks:
    a.connect_tls().greet().prove()
    a.say(a.declare(0, Kind.PUSH, "evil.nobody"))
    yield b""
    yield from calls(Kind.PUSH, body=b"")


@attack(port="tls", breaks=True)
def garbage_from_another_host(a: Attacker) -> Chunks:
    a.connect_tls(handshake=False)
    yield b"\x16\x03\x01" + bytes(1000)


@attack(port="tls", settles=False)
def connecting_from_another_host(a: Attacker) -> Chunks:
    yield b""
    while True:
        a.close()
        a.connect_tls().greet().prove()
        yield b""
