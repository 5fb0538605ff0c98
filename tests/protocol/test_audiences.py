"""Publishers ask for their audience and its slow receivers: no answer of another relay ends a session or link."""

from __future__ import annotations

import pytest
from protocol.kit import KEY, Host, LinkEnd, Network, Result, control_of, kind_of

from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.frames import SlowEntry
from iris.wire.kinds import Kind

WIDE = "\U00020000"
"""A printable character of four bytes."""


def longest(count: int) -> list[SlowEntry]:
    """Return entries of the greatest length that a relay may send."""
    most = (1 << 63) - 1
    entry = SlowEntry(WIDE * 64, most, most, most, WIDE * 64, (1 << 32) - 1, WIDE * 300, True)
    return [entry] * count


def says(end: LinkEnd, slow: list[SlowEntry]) -> None:
    """Let the relay at this end name these slow receivers in its answers."""

    def tamper(frame: bytes) -> list[bytes]:
        if kind_of(frame) != Kind.AUDIENCE:
            return [frame]
        return [encode_control(frames.Audience(control_of(frame).id, 1, 7, slow))]

    end.tamper = tamper


def ask(host: Host) -> Result:
    audience = Result()
    host.session.ask(lambda number: frames.Topic(number, "a", KEY.key_id, True), audience)
    return audience


@pytest.mark.parametrize("silent", [False, True])
def test_answers_that_are_too_long_together_are_cut_to_what_a_frame_takes(silent: bool) -> None:
    net = Network(relays=4)
    links = [net.link(0, there) for there in (1, 2, 3)]
    asker = net.host("asker")
    for there in (1, 2, 3):
        net.host(relay=there).subscribe("a")
    asker.subscribe("a")
    says(links[0][1], longest(36))
    says(links[1][1], longest(36))
    if silent:  # after the time limit the received answers are reported
        links[2][1].tamper = lambda frame: [frame] if kind_of(frame) != Kind.AUDIENCE else []
    answer = ask(asker)
    net.run()
    net.pass_time(0.6)
    assert answer.done()
    assert answer.message.dropped == 14, "what is not named still counts"
    assert 30 < len(answer.message.slow) < 40
    assert not asker.ended_because
    assert [end.why for pair in links for end in pair] == [""] * 6
    assert not asker.peer.closed
