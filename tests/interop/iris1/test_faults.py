"""Faults of a client in its handshake, its frames and its end: it gets a clear error, and nothing happens to anybody
else, bounded and counted.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import pytest
from interop.iris1 import binding
from interop.iris1.binding import blob, hello, number
from interop.iris1.kit import Echo, Handler, bridged, collecting, until
from interop.iris1.offence import WELCOME, Mute, beside, connection, greeted

import iris
from relay.bridges.iris1.connection import FRAMES_A_TURN

pytestmark = pytest.mark.timeout(60)


# -- the handshake -----------------------------------------------------------------------------------------------


async def test_a_wrong_version_is_denied_byte_for_byte() -> None:
    async with bridged() as side:
        raw = await side.raw()
        raw.send(hello(version=b"v9"))
        text = b"Unsupported protocol. Client: v9. Iris: v1.0-draft2."
        assert await raw.rest() == b"\x01" + blob(b"iris-relay-magic") + blob(text)


@pytest.mark.parametrize("said", [hello(magic=b"iris-client-magik"), b"\x03" + blob(b"c") + blob(b"m"), b"GET / HTTP/1.1\r\n\r\n", b"\xff"])  # fmt: skip
async def test_a_wrong_magic_or_first_operation_is_closed_silently(said: bytes) -> None:
    async with bridged() as side:
        raw = await side.raw()
        raw.send(said)
        assert await raw.rest() == b""


async def test_a_silent_client_is_cut_after_the_handshake_timeout() -> None:
    async with bridged() as side, beside(side):
        # From here on: who is beside them may take its time.
        side.bridge.config = replace(side.bridge.config, handshake_s=0.05)
        silent, halfway = await side.raw(), await side.raw()
        halfway.send(hello()[:9])
        assert await silent.rest() == b""
        assert await halfway.rest() == b""
        assert side.counters["handshake timeouts"] == 2


async def test_those_who_say_nothing_give_way_and_take_no_clients_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.bridges.iris1.bridge.MAX_WAITING", 3)
    async with bridged(max_clients=2) as side:
        silent = [await side.raw() for _ in range(5)]
        assert await silent[0].rest() == await silent[1].rest() == b""
        first, second = await side.connect(), await side.connect()
        await asyncio.gather(first.close(), second.close())
        assert side.counters["handshakes over the bound"] >= 2


async def test_a_client_too_many_is_denied() -> None:
    async with bridged(max_clients=2) as side:
        first, second = await side.connect(), await side.connect()
        with pytest.raises(binding.Denied, match="it has 2 clients"):
            await binding.Binding().open(side.port)
        await first.close()
        await until(lambda: len(side.bridge.connections) == 1)
        third = await side.connect()
        await asyncio.gather(second.close(), third.close())


async def test_there_are_no_more_clients_than_fit_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes one for its connection, and one for its session at the relay."""
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("iris.accepting.descriptor_limit", lambda: (used + 64, 16))
    async with bridged(max_clients=1000) as side:
        fit = side.bridge.max_clients
        assert 1 <= fit <= 24
        clients = [await side.connect() for _ in range(fit)]
        with pytest.raises(binding.Denied, match=f"it has {fit} clients"):
            await binding.Binding().open(side.port)
        await asyncio.gather(*(client.close() for client in clients))


async def test_those_who_are_denied_take_no_place_and_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.bridges.iris1.bridge.MAX_WAITING", 3)
    async with bridged(max_clients=1) as side:
        first = await side.connect()
        for _ in range(5):
            denied = await side.raw()
            denied.send(hello())
            assert b"it has 1 clients" in await denied.rest()  # and it stays
        assert side.counters["handshakes over the bound"] >= 2
        assert len(side.bridge.connections) <= 4
        await first.close()
        await until(lambda: not side.bridge._admitted)
        await (await side.connect()).close()


async def test_a_client_given_up_in_the_turn_of_its_init_leaves_nothing() -> None:
    async with bridged() as side:
        raw = await side.raw()
        await until(lambda: side.bridge.connections)
        (ours,) = side.bridge.connections
        ours.data_received(hello())
        ours.give_up()
        assert await raw.rest() == b""
        await until(lambda: not side.bridge.connections)
        assert await ours.reload_keys(side.cluster.keyring)


async def test_a_client_whose_host_has_vanished_is_noticed_without_a_heartbeat() -> None:
    async with bridged() as side:
        accepted = connection(side, await greeted(side))._transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


async def test_a_name_without_a_key_is_denied() -> None:
    async with bridged() as side:
        keys = iris.Keyring({"only.this": [iris.ClusterKey(bytes(32))]})
        side.bridge.connect = lambda label: side.cluster.client(keyring=keys)
        with pytest.raises(binding.Denied, match="no key for cluster 'other'"):
            await binding.Binding("other", Handler()).open(side.port)
        client = await side.connect()
        with pytest.raises(binding.Remote, match="no key for cluster 'other'"):
            await client.request("other", b"x", 1000)


# -- frames ------------------------------------------------------------------------------------------------------

VIOLATIONS = {
    "a bool of 2": (b"\x05\x00\x02", "0x02 is not a bool, which is 0x00 or 0x01"),
    "a varint without end": (b"\x0d" + b"\xff" * 10, "a varint is longer than 64 bits"),
    "a varint of 65 bits": (b"\x0d" + b"\xff" * 9 + b"\x02", "a varint is longer than 64 bits"),
    "a name of a gigabyte": (b"\x06" + number(1 << 30), "a name of 1073741824 bytes is over the limit of 65536"),
    "a message of an exabyte": (b"\x08\x01t" + number(1 << 60), "a message of 1152921504606846976 bytes is over the limit of 1073741824"),
    "a chunk over the limit": (b"\x0c\x00\x01" + number(65_537), "a chunk of 65537 bytes is over the limit of 65536"),
    "an empty topic": (b"\x08\x00\x01x", "the topic name is empty"),
    "a topic that is too long": (b"\x06" + blob(b"x" * 256), "the topic name is longer than 255 bytes"),
    "a confirmation of nothing": (b"\x0a\x07\x07", "tunnel 7 confirms build id 7, which the bridge did not offer"),
    "an event over the message limit": (b"\x08\x01t" + blob(bytes((1 << 20) + 1)), "a message of 1048577 bytes is over the limit of 1048576"),
    "a broadcast over the message limit": (b"\x03\x01c" + blob(bytes((1 << 20) + 1)), "a message of 1048577 bytes is over the limit of 1048576"),
    "a request under way twice": (b"\x04\x07\x05raw-1\x01x\x90\x4e" * 2, "request id 7 is in use by a request that is not answered yet"),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_ends_its_connection_with_the_reason_and_nobody_elses(name: str) -> None:
    said, reason = VIOLATIONS[name]
    async with bridged() as side, beside(side):
        raw = await greeted(side, b"raw-1")
        raw.send(said)
        assert (await raw.rest()).endswith(b"\x02" + blob(reason.encode()))
        assert side.counters["violations"] == 1


@pytest.mark.parametrize("op", [0x00, 0x01, 0x0E, 0x7F, 0xFF])
async def test_an_unknown_operation_ends_its_connection_without_a_close_frame(op: int) -> None:
    async with bridged() as side, beside(side):
        raw = await greeted(side)
        raw.send(bytes([op]) + b"\x01x\x01x")
        assert await raw.rest() == b""


async def test_a_flood_of_tiny_frames_leaves_the_others_their_turns() -> None:
    async with bridged() as side:
        raw = await greeted(side)
        raw.send(b"\x07\x01x" * 20_000)
        done, portions = 0, []
        while done < 20_000:
            await asyncio.sleep(0)
            portions.append(side.counters["unknown unsubscriptions"] - done)
            done += portions[-1]
        assert max(portions) <= FRAMES_A_TURN


async def test_requests_wait_while_the_relay_takes_nothing_and_each_is_answered_once() -> None:
    async with bridged() as side:
        raw = await greeted(side)
        ours = connection(side, raw)
        assert ours.client is not None
        assert ours.client._attachment is not None
        pump = ours.client._attachment.pump
        assert pump is not None
        relays_end = pump._transport._peer  # type: ignore[attr-defined]  # a pipe of memory
        relays_end.pause_reading()
        for id in range(400):
            raw.send(b"\x04" + number(id) + b"\x06nobody" + blob(bytes(100_000)) + b"\x01")
        await until(lambda: ours._reading_paused)
        assert pump.unwritten_bytes < 4 << 20
        relays_end.resume_reading()
        answered: list[int] = []
        for _ in range(400):
            assert await raw.read(1) == b"\x05"
            low = (await raw.read(1))[0]
            answered.append(low if low < 128 else low & 127 | (await raw.read(1))[0] << 7)
            assert await raw.read(1) == b"\x01"
        assert sorted(answered) == list(range(400))
        raw.send(b"\x02")
        assert await raw.rest() == b"\x02\x00"


async def test_a_pure_client_is_handed_no_broadcast_request_or_tunnel() -> None:
    async with bridged() as side, side.cluster.client() as native:
        raw = await greeted(side)
        raw.send(b"\x06\x02tn")
        service = await side.register("tn", Echo())
        native_service = iris.Service("tn")
        async with native.serve(native_service):
            await native.broadcast("tn", b"x")
            service.broadcast("tn", b"x")
            for _ in range(20):
                assert await service.request("tn", b"x", 5000) == b"x"
                await (await service.tunnel("tn", 5000)).close()
        raw.send(b"\x02")
        assert await raw.rest() == b"\x02\x00"


async def test_a_request_over_the_message_limit_gets_a_fault_and_the_connection_goes_on() -> None:
    async with bridged() as side:
        await side.register("echo", Echo())
        client = await side.connect()
        with pytest.raises(
            binding.Remote, match="a request of 3145728 bytes is over the limit of 1048576"
        ):
            await client.request("echo", bytes(3 << 20), 1000)
        whole = bytes(1 << 20)
        assert await client.request("echo", whole, 5000) == whole
        await client.close()


async def test_a_reply_over_the_message_limit_is_a_fault_for_its_caller() -> None:
    class Large(Echo):
        async def request(self, request: bytes) -> bytes:
            return bytes(3 << 20)

    async with bridged() as side, side.cluster.client() as native:
        service = await side.register("large", Large())
        client = await side.connect()
        with pytest.raises(binding.Remote, match="a reply of 3145728 bytes"):
            await client.request("large", b"x", 5000)
        with pytest.raises(iris.RemoteError, match="a reply of 3145728 bytes"):
            await native.request("large", b"x", timeout=5)
        await service.close()


async def test_subscriptions_of_a_client_with_many_topics_leave_the_others_their_turns() -> None:
    async with bridged() as side:
        raw = await greeted(side)
        topics = connection(side, raw)._topics
        raw.send(b"".join(b"\x06" + blob(b"t%d" % turn) for turn in range(500)))
        while len(topics) < 500:
            before = len(topics)
            await asyncio.sleep(0)
            assert len(topics) <= before + 1


async def test_a_frame_of_one_byte_at_a_time_is_a_frame() -> None:
    async with bridged() as side:
        await side.register("echo", Echo())
        raw = await side.raw()
        raw.writer.transport.get_extra_info("socket").setsockopt(6, 1, 1)
        said = hello() + b"\x04\x81\x01\x04echo\x02hi\xe8\x07"
        for byte in said:
            raw.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await raw.read(len(WELCOME)) == WELCOME
        assert await raw.read(8) == b"\x05\x81\x01\x00\x01\x02hi"


@pytest.mark.parametrize("name", ["", "x" * 300])
async def test_an_invalid_name_is_reported_by_the_frames_own_answer(name: str) -> None:
    async with bridged() as side:
        client = await side.connect()
        with pytest.raises(binding.Remote, match="cluster name"):
            await client.request(name, b"x", 1000)
        with pytest.raises(binding.TimedOut):
            await client.tunnel(name, 1000)
        await client.close()


async def test_double_subscriptions_and_unknown_unsubscriptions_change_nothing() -> None:
    async with bridged() as side:
        client = await side.connect()
        received: list[bytes] = []
        client.write(b"\x07" + blob(b"unknown"))
        client.subscribe("topic", collecting(received))
        client.write(b"\x06" + blob(b"topic"))
        client.publish("topic", b"once")
        client.publish("topic", b"more")
        await until(lambda: len(received) >= 2)
        assert received == [b"once", b"more"]
        client.unsubscribe("topic")
        client.write(b"\x07" + blob(b"topic"))
        await client.close()
        assert side.counters == {"unknown unsubscriptions": 2, "double subscriptions": 1}


async def test_a_subscription_too_many_ends_its_connection() -> None:
    async with bridged(max_subscriptions=3) as side, beside(side):
        client = await side.connect()
        for turn in range(4):
            client.subscribe(f"topic-{turn}", collecting([]))
        await client.ended.wait()
        assert "3 subscriptions, the limit" in client.closed


# -- clients that go -----------------------------------------------------------------------------------------------


async def test_a_client_lost_within_a_message_leaves_nothing() -> None:
    async with bridged() as side, beside(side), side.cluster.client() as native:
        service = await side.register("gone", Echo())
        await native.wait_for_members("gone", 1, timeout=5)
        service.write(b"\x08\x05topic" + number(1000) + b"only so much")
        await until(lambda: any(c.machine.decoder.mid_frame for c in side.bridge.connections))
        service.abort()
        await until(lambda: len(side.bridge.connections) == 2)
        assert not await native.members("gone")
        assert side.counters["lost within a frame"] == 1


async def test_requests_at_a_service_that_vanishes_end_at_once() -> None:
    async with bridged() as side, side.cluster.client() as native:
        mute = Mute()
        service = await side.register("mute", mute)
        client = await side.connect()
        theirs = asyncio.create_task(client.request("mute", b"x", 600_000))
        ours = asyncio.create_task(native.request("mute", b"x", timeout=600))
        await until(lambda: len(mute.received) == 2)
        service.abort()
        with pytest.raises(binding.TimedOut):
            await theirs
        with pytest.raises(iris.RemoteError, match="disconnected before it answered"):
            await ours


async def test_close_refuses_tunnels_forgets_requests_and_delivers_what_was_sent() -> None:
    async with bridged() as side:
        received: list[bytes] = []
        other = await side.connect()
        other.subscribe("topic", collecting(received))
        await other.settled()  # another connection's words are not ordered with the client's
        mute = Mute()
        await side.register("mute", mute)
        client = await side.connect()
        asked = [asyncio.create_task(client.request("mute", b"x", 600_000)) for _ in range(5)]
        tunnel = asyncio.create_task(client.tunnel("nobody", 1000))
        await until(lambda: len(mute.received) == 5)
        for turn in range(500):
            client.publish("topic", b"%d" % turn)
        await client.close()
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(outcome, binding.Closed)
        with pytest.raises(binding.TimedOut):
            await tunnel
        await until(lambda: len(received) == 500)


async def test_close_is_answered_though_the_relay_refuses_what_was_asked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bridged() as side:
        raw = await greeted(side)
        ours = connection(side, raw)

        async def refused(subscription: iris.Subscription) -> None:
            await ours._ended.wait()
            raise iris.ConfigError("refused")

        monkeypatch.setattr(iris.Subscription, "ready", refused)
        raw.send(b"\x06\x01t\x02")
        assert await raw.rest() == b"\x02\x00"


async def test_subscriptions_that_end_at_once_leave_nothing_while_there_is_no_relay() -> None:
    async with bridged() as side:
        raw = await greeted(side)
        ours = connection(side, raw)
        await side.cluster.stop_relay()
        raw.send(b"\x06\x01t\x07\x01t" * 1000 + b"\x07\x01x")
        await until(lambda: side.counters["unknown unsubscriptions"])
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ours._tasks
        await side.cluster.start_relay()


async def test_what_a_client_leaves_unread_at_its_end_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.bridges.iris1.writer.LINGER_S", 0.05)
    async with bridged() as side:
        raw = await greeted(side)
        raw.send(b"\x06\x05flood")
        ours = connection(side, raw)
        await until(lambda: ours._topics)
        await side.cluster.settle()
        raw.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport
        publisher = await side.connect()
        while not ours._writer._paused:
            publisher.publish("flood", bytes(100_000))
            await publisher.settled()
        raw.send(b"\x02")
        await until(lambda: ours not in side.bridge.connections)
        assert side.counters["slow clients cut"] == 1


async def test_a_slow_reader_is_cut_and_counted_and_nobody_waits_for_it() -> None:
    async with bridged(queue_bytes=1 << 20) as side, beside(side):
        slow = await greeted(side)
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport
        slow.send(b"\x06" + blob(b"flood"))
        received: list[bytes] = []
        other, publisher = await side.connect(), await side.connect()
        other.subscribe("flood", collecting(received))
        await other.settled()
        await until(lambda: connection(side, slow)._topics)
        await side.cluster.settle()
        for turn in range(400):
            publisher.publish("flood", bytes(50_000))
            if turn % 10 == 9:
                await publisher.writer.drain()
                await until(lambda: len(received) == turn + 1)  # noqa: B023 - awaited here
        assert side.counters["slow clients cut"] == 1
        slow.writer.transport.abort()
        await publisher.close()


async def test_requests_over_the_bound_are_answered_as_timeouts() -> None:
    async with bridged(max_calls=4) as side:
        await side.register("mute", Mute())
        client = await side.connect()
        asked = [asyncio.create_task(client.request("mute", b"x", 100_000)) for _ in range(6)]
        for late in asked[4:]:
            with pytest.raises(binding.TimedOut):
                await late
        assert not any(task.done() for task in asked[:4])
        assert side.counters["requests over the bound"] == 2
        await client.close()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_requests_for_a_service_over_the_bound_are_reported_and_counted() -> None:
    async with bridged(max_calls=1) as side, side.cluster.client() as native:
        mute = Mute()
        service = await side.register("mute", mute)
        first = asyncio.create_task(native.request("mute", b"x", timeout=60))
        await until(lambda: mute.received)
        with pytest.raises(iris.RemoteError, match="at capacity"):
            await native.request("mute", b"x", timeout=60)
        assert side.counters["requests over the bound"] == 1
        await service.close()
        with pytest.raises(iris.RemoteError, match="disconnect"):
            await first
