"""Faults in a client's tunnels end the tunnel and are counted, with bounded memory; the connection continues."""

from __future__ import annotations

import asyncio

import pytest
from interop.iris1 import binding
from interop.iris1.binding import blob, number
from interop.iris1.kit import Echo, Handler, Raw, Side, Tunnel, bridged, until
from interop.iris1.offence import HASTY, beside, connection, greeted, opened, sleeper

import iris

pytestmark = pytest.mark.timeout(60)


async def tunnelled(side: Side) -> tuple[Raw, Handler]:
    """Return a raw client with tunnel 5 open to an echo."""
    echo = Echo()
    await side.register("tn", echo)
    raw = await greeted(side)
    await opened(raw, 5, b"tn")
    return raw, echo


FAULTS = {
    "no message begun": (b"\x0c\x05\x00\x01x", b"before the first chunk of its message"),
    "longer than announced": (b"\x0c\x05\x01\x02xx", b"longer than the 1 bytes left"),
    "a message over the limit": (b"\x0c\x05" + number(1 << 40) + b"\x01x", b"over the limit of"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_in_a_tunnel_ends_the_tunnel_and_not_the_connection(name: str) -> None:
    said, reason = FAULTS[name]
    async with bridged() as side, beside(side):
        raw, _ = await tunnelled(side)
        raw.send(said)
        assert await raw.read(2) == b"\x0d\x05"
        size = (await raw.read(1))[0]
        assert reason in await raw.read(size)
        raw.send(b"\x0c\x05\x00\x01x\x0b\x05\x01\x0d\x05")  # what was under way to a closed tunnel
        raw.send(b"\x02")
        assert await raw.rest() == b"\x02\x00"
        assert side.counters["tunnel faults"] == 1


async def test_a_partial_message_is_discarded_by_the_next() -> None:
    async with bridged() as side:
        raw, _ = await tunnelled(side)
        raw.send(b"\x0b\x05" + number(1 << 20))
        raw.send(b"\x0c\x05\x64\x05stale\x0c\x05\x02\x01o\x0c\x05\x00\x01k")
        assert await raw.read(6) == b"\x0c\x05\x02\x02ok"


async def test_a_message_waits_for_its_first_chunk_alone() -> None:
    async with bridged() as side:
        raw, _ = await tunnelled(side)
        message = bytes(200_000)
        for start in range(0, len(message), 65536):
            part = message[start : start + 65536]
            raw.send(b"\x0c\x05" + number(0 if start else len(message)) + blob(part))
        raw.send(b"\x0b\x05" + number(65_535))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await raw.reader.readexactly(1)
        raw.send(b"\x0b\x05\x01")
        first = b"\x0c\x05" + number(200_000) + number(65536)
        assert await raw.read(len(first)) == first
        whole = await raw.read(65536 + 2 * (2 + 1 + 3 + 65536) + 2 + 1 + 2 + 3392)
        assert whole[-3392:] == bytes(3392)


async def test_a_sender_is_granted_no_more_than_the_window_while_nobody_reads_the_other_end() -> (
    None
):
    async with (
        bridged() as side,
        side.cluster.client(config=HASTY) as native,
        native.serve(sleeper("ours")),
    ):
        client = await side.connect()
        line = await client.tunnel("ours", 1000)

        async def flood() -> None:
            while True:
                await line.send(bytes(1 << 20))

        flooding = asyncio.create_task(flood())
        await until(lambda: line.allowance < 65536)
        await side.cluster.settle()
        (flooded,) = (c for c in side.bridge.connections if c.machine._tunnels)
        assert flooded.machine._incoming.held <= 5 << 20
        flooding.cancel()


async def test_a_tunnel_waits_for_a_client_that_does_not_read_and_its_sender_too() -> None:
    async with bridged(queue_bytes=8 << 20) as side, side.cluster.client() as native:
        service = iris.Service("ours")
        sent = 0

        @service.on_tunnel
        async def flood(tunnel: iris.Tunnel) -> None:
            nonlocal sent
            for _ in range(64):
                await tunnel.send(bytes(1 << 20))
                sent += 1
            await tunnel.finish()

        async with native.serve(service):
            raw = await greeted(side)
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport
            raw.send(b"\x09\x05\x04ours" + number(5000))
            ours = connection(side, raw)
            await until(lambda: ours.machine._tunnels)
            raw.send(b"\x0b\x05" + number(1 << 40))
            await until(lambda: ours._writer._paused)
            await side.cluster.settle()
            assert 0 < sent < 64
            raw.writer.transport.resume_reading()  # type: ignore[attr-defined]  # a socket's transport
            size = 6 + 6 + 64 * ((1 << 20) + 8 + 15 * 6)
            await raw.read(size)
            assert await raw.read(3) == b"\x0d\x05\x00"
            assert not side.counters


async def test_tunnels_over_the_budget_end_and_the_others_go_on() -> None:
    async with bridged(tunnel_bytes=1 << 20) as side:
        raw, _ = await tunnelled(side)
        chunk = blob(bytes(65536))
        raw.send(b"\x0c\x05" + number(2 << 20) + chunk + (b"\x0c\x05\x00" + chunk) * 16)
        rest = b""
        while b"more than 1048576 bytes are queued" not in rest:
            rest += await raw.read(1)
        raw.send(b"\x02")
        assert (await raw.rest()).endswith(b"\x02\x00")


async def test_more_than_was_granted_ends_the_tunnel_and_not_the_connection() -> None:
    async with (
        bridged() as side,
        beside(side),
        side.cluster.client(config=HASTY) as native,
        native.serve(sleeper("ours")),
    ):
        raw = await greeted(side)
        await opened(raw, 5, b"ours")
        whole = number(1 << 16) + blob(bytes(1 << 16))
        for _ in range(65):  # the first is still waiting, so no further credit is granted
            raw.send(b"\x0c\x05" + whole)
        reason = b"the client sent 65536 bytes more than it was granted"
        assert await raw.read(3 + len(reason)) == b"\x0d\x05" + blob(reason)
        raw.send(b"\x02")
        assert await raw.rest() == b"\x02\x00"


async def test_the_id_of_a_closed_tunnel_may_be_given_to_another() -> None:
    async with (
        bridged(drain_s=0.2) as side,
        side.cluster.client(config=HASTY) as native,
        native.serve(sleeper("ours")),
    ):
        await side.register("tn", Echo())
        raw = await greeted(side)
        await opened(raw, 5, b"ours")
        lines = connection(side, raw)._tunnels._tunnels
        (old,) = lines
        message = b"\x0c\x05" + number(1 << 16) + blob(bytes(1 << 16))
        raw.send(message * 3 + b"\x0d\x05")
        assert await raw.read(3) == b"\x0d\x05\x00"
        await opened(raw, 5, b"tn")
        await until(lambda: old not in lines)
        raw.send(b"\x0b\x05\x01" + b"\x0c\x05\x01\x01x")
        assert await raw.read(5) == b"\x0c\x05\x01\x01x"
        assert side.counters["tunnel messages not passed on"] >= 2


async def test_messages_for_a_client_over_the_budget_end_the_tunnel_that_brings_more() -> None:
    async with bridged(tunnel_bytes=1 << 20) as side, side.cluster.client(config=HASTY) as native:
        service = iris.Service("ours")
        broken: list[str] = []

        @service.on_tunnel
        async def bring(tunnel: iris.Tunnel) -> None:
            try:
                await tunnel.send(bytes(512 << 10))
                await tunnel.recv()
            except iris.TunnelBroken as err:
                broken.append(str(err))

        async with native.serve(service):
            raw = await greeted(side)
            budget = connection(side, raw).machine.outgoing
            for id in (1, 2):
                await opened(raw, id, b"ours")  # and allow it nothing
            await until(lambda: budget.held == 1 << 20)
            await opened(raw, 3, b"ours")
            reason = b"more than 1048576 bytes are queued in the tunnels of this client"
            assert await raw.read(3 + len(reason)) == b"\x0d\x03" + blob(reason)
            await until(lambda: broken)
            for id in (1, 2):
                raw.send(b"\x0b" + number(id) + number(65536))
                await raw.read(8 * (2 + 3 + 65536) + 3 + 7)
            await until(lambda: not budget.held)
            assert side.counters == {"tunnel faults": 1}
            assert len(broken) == 1


async def test_a_fault_of_the_bridge_itself_ends_the_tunnel_on_both_sides_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bridged() as side:
        await side.register("tn", Echo())
        client = await side.connect()

        async def broken(self: iris.Tunnel) -> bytes:
            raise RuntimeError("on purpose")

        monkeypatch.setattr("relay.bridges.iris1.tunnels.BridgedTunnel._message", broken)
        line = await client.tunnel("tn", 20_000)
        with pytest.raises(binding.Closed, match="on purpose"):
            await line.recv()
        assert "bridge.tunnel_fault" in caplog.text
        assert await client.request("tn", b"x", 20_000) == b"x"


async def test_a_message_that_its_sender_gives_up_is_none_and_the_next_one_arrives() -> None:
    async with bridged() as side, side.cluster.client() as native:
        raw = await greeted(side, b"tn")
        async with native.tunnel("tn", timeout=5) as tunnel:
            assert await raw.read(5) == b"\x09\x00" + number(65536)
            raw.send(b"\x0a\x00\x07\x0b\x07" + number(1 << 20))
            assert await raw.read(6) == b"\x0b\x07" + number(4 << 20)
            budget = connection(side, raw).machine.outgoing
            given_up = asyncio.create_task(tunnel.send(bytes(64 << 20)))
            await until(lambda: budget.held)
            given_up.cancel()
            await tunnel.send(b"next")
            assert await raw.read(8) == b"\x0c\x07\x04\x04next"
            await until(lambda: not budget.held)


async def test_a_client_that_does_not_read_slows_all_its_tunnels_and_is_not_cut() -> None:
    async with bridged(queue_bytes=2 << 20) as side, side.cluster.client() as native:
        service = iris.Service("ours")
        go = asyncio.Event()

        @service.on_tunnel
        async def bring(tunnel: iris.Tunnel) -> None:
            await go.wait()
            await tunnel.send(bytes(256 << 10))
            await tunnel.finish()

        async with native.serve(service):
            raw = await greeted(side)
            for id in range(64):
                await opened(raw, id, b"ours")
                raw.send(b"\x0b" + number(id) + number(1 << 20))
            ours = connection(side, raw)
            await until(
                lambda: all(line.client_end.allowance for line in ours.machine._tunnels.values())
            )  # type: ignore[union-attr]  # it is open
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport
            go.set()
            await until(lambda: ours._writer._paused)
            await side.cluster.settle()
            raw.writer.transport.resume_reading()  # type: ignore[attr-defined]  # a socket's transport
            await raw.read(64 * (4 * (2 + 3 + 65536) + 2 + 3))
            assert not side.counters


async def test_a_service_that_does_not_confirm_a_tunnel_keeps_its_connection() -> None:
    async with bridged(confirm_s=0.05) as side, side.cluster.client() as native:
        raw = await greeted(side, b"tn")
        async with native.tunnel("tn", timeout=5) as tunnel:
            with pytest.raises(iris.TunnelBroken):
                await tunnel.recv()
        assert await raw.read(5) == b"\x09\x00" + number(65536)
        raw.send(b"\x0a\x00\x09")  # too late
        assert await raw.read(2) == b"\x0d\x09"
        assert side.counters["tunnels unconfirmed"] == 1
        assert side.counters["late tunnels"] == 1


async def test_500_idle_tunnels_cost_nobody_anything() -> None:
    accepted: list[Tunnel] = []

    class Accepting(Echo):
        async def tunnel(self, tunnel: Tunnel) -> None:
            accepted.append(tunnel)

    async with bridged() as side, beside(side):
        await side.register("idle", Accepting())
        client = await side.connect()
        lines = await asyncio.gather(*(client.tunnel("idle", 20_000) for _ in range(500)))
        await until(lambda: len(accepted) == 500)
        await lines[499].send(b"x")
        await until(lambda: any(tunnel.messages for tunnel in accepted))
        await client.close()


async def test_a_tunnel_too_many_is_refused() -> None:
    async with bridged(max_tunnels=3) as side:
        await side.register("tn", Echo())
        client = await side.connect()
        for _ in range(3):
            await client.tunnel("tn", 5000)
        with pytest.raises(binding.TimedOut):
            await client.tunnel("tn", 5000)
        assert side.counters["tunnels refused"] == 1
