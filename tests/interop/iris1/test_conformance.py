"""The assertions of the Go binding's tests against a live relay, one test for each of them, under its name.

Each client is like the binding (`binding.py`): it has no timers, and a frame that would break it fails the test.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress

import pytest
from interop.iris1 import binding
from interop.iris1.kit import Echo, Handler, Limits, Tunnel, bridged, collecting, until

pytestmark = pytest.mark.timeout(60)


class Slow(Echo):
    """Answers slowly."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def request(self, request: bytes) -> bytes:
        await asyncio.sleep(self.seconds)
        return request


class Paced(Echo):
    """Takes `milliseconds` of a time that the test controls, because real time proves nothing on a busy machine."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds
        self.done = 0
        self.now_ms = 0.0
        self.running: list[tuple[float, asyncio.Future[None]]] = []

    async def broadcast(self, message: bytes) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.append((self.now_ms + self.milliseconds, ended))
        await ended
        self.done += 1

    async def request(self, request: bytes) -> bytes:
        await self.broadcast(request)
        return request

    async def let_pass(self, milliseconds: float) -> None:
        """Let time pass. A handler that starts when another ends starts at the end of that one."""
        until_ms = self.now_ms + milliseconds
        while self.running and min(self.running)[0] <= until_ms:
            due = min(self.running)
            self.running.remove(due)
            self.now_ms = due[0]
            due[1].set_result(None)
            for _ in range(5):  # the handler ends, and its thread takes up the next
                await asyncio.sleep(0)
        self.now_ms = until_ms


async def test_connect() -> None:
    """TestConnect: 100 parallel connects, then closes; no error."""
    async with bridged() as side:
        clients = await asyncio.gather(*(side.connect() for _ in range(100)))
        await asyncio.gather(*(client.close() for client in clients))
        await until(lambda: not side.bridge.connections)
        assert not side.counters


async def test_register() -> None:
    """TestRegister: 100 parallel registrations, then closes; no error, HandleDrop never called."""
    async with bridged() as side:
        services = await asyncio.gather(
            *(side.register("go-binding", Handler()) for _ in range(100))
        )
        async with side.cluster.client() as native:
            assert len(await native.wait_for_members("go-binding", 100, timeout=5)) == 100
            await asyncio.gather(*(service.close() for service in services))
            assert len(await native.members("go-binding")) == 0
        assert not side.counters


async def test_broadcast() -> None:
    """TestBroadcast: 25+25, each 25 broadcasts; every service gets all 1250 distinct messages."""
    async with bridged() as side:
        handlers = [Echo() for _ in range(25)]
        services = [await side.register("bc", handler) for handler in handlers]
        clients = [await side.connect() for _ in range(25)]
        for number, sender in enumerate([*clients, *services]):
            for turn in range(25):
                sender.broadcast("bc", b"%d/%d" % (number, turn))
        wanted = {b"%d/%d" % pair for pair in itertools.product(range(50), range(25))}
        await until(lambda: all(len(handler.received) == 1250 for handler in handlers))
        assert all(set(handler.received) == wanted for handler in handlers)
        await asyncio.gather(*(one.close() for one in [*clients, *services]))


async def test_broadcast_thread_limit() -> None:
    """TestBroadcastThreadLimit: 1 thread, 100 ms handler, 4 messages: after 250 ms exactly 2 are done."""
    async with bridged() as side:
        handler = Paced(100)
        service = await side.register("bc", handler, broadcasts=Limits(threads=1))
        for number in range(4):
            service.broadcast("bc", b"%d" % number)
        await until(lambda: len(service.casts.queue) == 3 and handler.running)
        await handler.let_pass(250)
        assert handler.done == 2


async def test_broadcast_memory_limit() -> None:
    """TestBroadcastMemoryLimit: limit 1 byte: 1 byte arrives, 2 bytes never, the next 1 byte arrives."""
    async with bridged() as side:
        handler = Echo()
        service = await side.register("bc", handler, broadcasts=Limits(memory=1))
        for message in (b"1", b"22", b"3"):
            service.broadcast("bc", message)
            await until(lambda: len(handler.received) + service.casts.dropped == int(message[:1]))  # noqa: B023 - awaited here
        assert handler.received == [b"1", b"3"]


async def test_publish() -> None:
    """TestPublish: 5+5 subscribed to the same 7 topics, 15 events each to each: all get all 150 per topic."""
    async with bridged() as side:
        services = [await side.register("pub", Handler()) for _ in range(5)]
        clients = [await side.connect() for _ in range(5)]
        everybody = [*services, *clients]
        topics = [f"topic-{number}" for number in range(7)]
        received: dict[tuple[int, str], list[bytes]] = {}
        for number, one in enumerate(everybody):
            for topic in topics:
                one.subscribe(topic, collecting(received.setdefault((number, topic), [])))
        await asyncio.gather(*(one.settled() for one in everybody))
        for number, one in enumerate(everybody):
            for topic, turn in itertools.product(topics, range(15)):
                one.publish(topic, b"%d/%d" % (number, turn))
        await until(lambda: all(len(got) == 150 for got in received.values()))
        wanted = {b"%d/%d" % pair for pair in itertools.product(range(10), range(15))}
        assert all(set(got) == wanted for got in received.values())
        for one, topic in itertools.product(everybody, topics):
            one.unsubscribe(topic)
        await asyncio.gather(*(one.close() for one in everybody))


async def test_publish_thread_limit() -> None:
    """TestPublishThreadLimit: as for broadcasts."""
    async with bridged() as side:
        client = await side.connect()
        paced = Paced(100)
        client.subscribe("topic", paced.broadcast, Limits(threads=1))
        pool = client.topics[b"topic"][1]
        for number in range(4):
            client.publish("topic", b"%d" % number)
        await until(lambda: len(pool.queue) == 3 and paced.running)
        await paced.let_pass(250)
        assert paced.done == 2


async def test_publish_memory_limit() -> None:
    """TestPublishMemoryLimit: as for broadcasts."""
    async with bridged() as side:
        client = await side.connect()
        received: list[bytes] = []
        client.subscribe("topic", collecting(received), Limits(memory=1))
        pool = client.topics[b"topic"][1]
        for event in (b"1", b"22", b"3"):
            client.publish("topic", event)
            await until(lambda: len(received) + pool.dropped == int(event[:1]))  # noqa: B023 - awaited here
        assert received == [b"1", b"3"]


async def test_local_delivery_within_a_millisecond() -> None:
    """The binding's tests of memory limits sleep 1 ms between send and check, so casts must be back within that."""
    async with bridged() as side:
        handler = Echo()
        service = await side.register("bc", handler)
        received: list[bytes] = []
        service.subscribe("topic", collecting(received))
        for send, into in ((service.broadcast, handler.received), (service.publish, received)):
            for number in range(
                2000
            ):  # a busy machine is late with most, and with all only if something waits
                begin_s = time.perf_counter()
                send("bc" if into is handler.received else "topic", b"x")
                while len(into) <= number:  # noqa: ASYNC110 - nothing is to come between
                    await asyncio.sleep(0)
                if time.perf_counter() - begin_s < 0.001:
                    break
            else:
                raise AssertionError("never within a millisecond")


async def test_request() -> None:
    """TestRequest: 25+25, 25 requests each, one's own reply comes back."""
    async with bridged() as side:
        services = [await side.register("rq", Echo()) for _ in range(25)]
        clients = [await side.connect() for _ in range(25)]

        async def ask(one: binding.Binding, number: int) -> None:
            for turn in range(25):
                question = b"%d/%d" % (number, turn)
                assert await one.request("rq", question, 20_000) == question

        everybody = [*clients, *services]
        await asyncio.gather(*(ask(one, number) for number, one in enumerate(everybody)))
        await asyncio.gather(*(one.close() for one in everybody))


async def test_request_fail() -> None:
    """TestRequestFail: 125 failing requests: RemoteError with identical text."""

    class Failing(Echo):
        async def request(self, request: bytes) -> bytes:
            raise binding.Remote(request)

    async with bridged() as side:
        service = await side.register("rq", Failing())
        client = await side.connect()
        texts = [b"%d: \xff\x00 %s" % (n, "größer".encode()) for n in range(124)] + [b"x" * 100_000]
        for one, text in itertools.product((client, service), texts):
            with pytest.raises(binding.Remote) as raised:
                await one.request("rq", text, 1000)
            assert raised.value.text == text


async def test_request_timeout() -> None:
    """TestRequestTimeout: 25 ms handler: a timeout of 50 ms succeeds, one of 12 ms fails."""
    async with bridged() as side:
        service = await side.register("rq", Slow(0.025))
        for _ in range(10):  # 25 ms of a busy machine's may be more
            with suppress(binding.TimedOut):
                assert await service.request("rq", b"x", 50) == b"x"
                break
        else:
            raise AssertionError("never within 50 ms")
        with pytest.raises(binding.TimedOut):
            await service.request("rq", b"x", 12)


async def test_request_thread_limit() -> None:
    """TestRequestThreadLimit: 4 requests of 25 ms to 1 thread. After 62.5 ms exactly 2 are done, after 125 ms all."""
    async with bridged() as side:
        handler = Paced(25)
        service = await side.register("rq", handler, requests=Limits(threads=1))
        waiting = [asyncio.create_task(service.request("rq", b"x", 20_000)) for _ in range(4)]
        await until(lambda: len(service.asks.queue) == 3 and handler.running)
        await handler.let_pass(62.5)
        assert handler.done == 2
        await until(lambda: sum(task.done() for task in waiting) == 2)
        await handler.let_pass(62.5)
        assert handler.done == 4
        assert await asyncio.gather(*waiting) == [b"x"] * 4


async def test_request_memory_limit() -> None:
    """TestRequestMemoryLimit: limit 1 byte: 1 byte is answered, 2 bytes give ErrTimeout, 1 byte is answered again."""
    async with bridged() as side:
        service = await side.register("rq", Echo(), requests=Limits(memory=1))
        assert await service.request("rq", b"1", 1000) == b"1"
        with pytest.raises(binding.TimedOut):
            await service.request("rq", b"22", 25)
        assert await service.request("rq", b"3", 1000) == b"3"


async def test_request_expiration() -> None:
    """TestRequestExpiration: 1 thread, 4 requests of 1 ms to a 25 ms handler: all arrive, exactly 1 is executed."""
    async with bridged(grace_s=20.0) as side:  # none of them expires before it arrives
        handler = Paced(25)
        service = await side.register("rq", handler, requests=Limits(threads=1))
        service.clock = lambda: handler.now_ms / 1000
        arrived: list[int] = []
        put = service.asks.put

        def count(size: int, work: object) -> None:
            arrived.append(size)
            put(size, work)  # type: ignore[arg-type]  # as it came

        service.asks.put = count  # type: ignore[method-assign]  # the test listens in
        asked = [asyncio.create_task(service.request("rq", b"x", 1)) for _ in range(4)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(result, binding.TimedOut) for result in results)
        await until(lambda: len(arrived) == 4 and handler.running)
        await handler.let_pass(25)
        await until(lambda: not service.asks.tasks)
        assert handler.done == 1


async def test_tunnel() -> None:
    """TestTunnel: 7+7, 7 tunnels each, 7 messages echoed in order per tunnel: 98 tunnels."""
    async with bridged() as side:
        services = [await side.register("tn", Echo()) for _ in range(7)]
        clients = [await side.connect() for _ in range(7)]

        async def talk(one: binding.Binding) -> None:
            tunnel = await one.tunnel("tn", 10_000)
            for number in range(7):
                await tunnel.send(b"%d" % number)
            assert [await tunnel.recv() for _ in range(7)] == [b"%d" % n for n in range(7)]
            await tunnel.close()

        everybody = [*clients, *services]
        await asyncio.gather(*(talk(one) for one in everybody for _ in range(7)))
        await asyncio.gather(*(one.close() for one in everybody))


async def test_tunnel_timeout() -> None:
    """TestTunnelTimeout: no such cluster, 100 ms: ErrTimeout."""
    async with bridged() as side:
        client = await side.connect()
        with pytest.raises(binding.TimedOut):
            await client.tunnel("nobody", 100)
        await client.close()


async def test_tunnel_chunking() -> None:
    """TestTunnelChunking: a message of 16 MiB is echoed intact within 10 s."""
    async with bridged() as side:
        await side.register("tn", Echo())
        client = await side.connect()
        tunnel = await client.tunnel("tn", 1000)
        message = bytes(range(256)) * (16 << 12)
        begin_s = time.perf_counter()
        await tunnel.send(message)
        assert await tunnel.recv() == message
        assert time.perf_counter() - begin_s < 10
        await tunnel.close()
        await client.close()


async def test_tunnel_overload() -> None:
    """TestTunnelOverload: sends of 64 MiB with 10 ms time out 10 times; then 10 small echoes work."""
    async with bridged() as side:
        await side.register("tn", Echo())
        client = await side.connect()
        tunnel = await client.tunnel("tn", 1000)
        large = bytes(64 << 20)
        for _ in range(10):
            with pytest.raises(binding.TimedOut):
                await tunnel.send(large, 0.01)
        for number in range(10):
            await tunnel.send(b"%d" % number)
            assert await tunnel.recv() == b"%d" % number
        await tunnel.close()
        await client.close()


@pytest.mark.parametrize("closer", ["initiator", "acceptor"])
async def test_tunnel_interrupt(closer: str) -> None:
    """Java's TunnelInterruptTest: when one end closes, the other's blocked receive and send raise a closed error."""
    accepted: asyncio.Queue[Tunnel] = asyncio.Queue()

    class Accepting(Echo):
        async def tunnel(self, tunnel: Tunnel) -> None:
            await accepted.put(tunnel)

    async def flood(tunnel: Tunnel) -> None:
        while True:
            await tunnel.send(bytes(1 << 20))

    async with bridged() as side:
        await side.register("tn", Accepting())
        client = await side.connect()
        for blocked in ("recv", "send"):
            ends = [await client.tunnel("tn", 1000), await accepted.get()]
            if closer == "acceptor":
                ends.reverse()
            ours, theirs = ends
            waiting = asyncio.create_task(theirs.recv() if blocked == "recv" else flood(theirs))
            await asyncio.sleep(0)
            if blocked == "send":
                await until(lambda: theirs.allowance < 65536)  # noqa: B023 - awaited here
            assert not waiting.done()
            await ours.close()
            with pytest.raises(binding.Closed):
                await waiting
            assert theirs.closed == ""
