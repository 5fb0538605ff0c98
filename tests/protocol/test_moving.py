"""A client that moves to another session reads two connections at once, in whichever order."""

from __future__ import annotations

from protocol.kit import Network


def test_a_subscriber_that_moves_loses_nothing_whichever_connection_it_reads_first() -> None:
    # Both sessions share one guard. "1" waits unread on the old connection while the new one already has "2".
    net = Network()
    sender, old = net.host(), net.host()
    before = old.subscribe("t")
    sender.publish("t", b"0")
    net.run()
    unread, net.hosts = net.hosts, [sender]
    sender.publish("t", b"1")
    net.run()
    new = net.host(guard=old.guard)
    new.session.hold_casts()
    after = new.subscribe("t")
    sender.publish("t", b"2")
    net.run()
    assert not after.payloads, "held back while the old connection may owe us something"
    net.hosts = [*unread, new]
    net.run()
    new.session.release_casts()
    sender.publish("t", b"3")
    net.run()
    assert sorted({*before.payloads, *after.payloads}) == [b"0", b"1", b"2", b"3"]
    assert len(before.payloads) + len(after.payloads) == 4, "each of them once"
    assert not before.gaps + after.gaps
