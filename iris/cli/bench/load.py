"""The load generators. Messages are sent when they are due, even if earlier ones are unanswered (open loop).

Latency is counted twice: from the time at which a message was due, which is how long a caller at that time would have
waited, and from the time at which it was sent, which leaves out delays in this process and in a full buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Final

import iris
from iris.cli.bench.jobs import BEHIND, NUMBER, OUTSTANDING, STAMP, Load, Outcome
from iris.cli.bench.samples import Samples
from iris.cli.bench.timer import GRACE_NS, batches, due_ns

MAX_OUTSTANDING: Final = 10_000
MAX_OUTSTANDING_BYTES: Final = 256 << 20
PAUSE_S: Final = 0.001
START_DELAY_NS: Final = 10_000_000
"""Time from the start of a run until its first message is due, so that setting up does not make that one late."""
PROBE: Final = (1 << 64) - 1

Run = Callable[[], Awaitable[Outcome]]


class Tally:
    """Counts and latencies of a running load."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.count = 0 if load.rate is None else max(1, round(load.rate * load.seconds))
        self.sent = 0
        self.answered = 0
        self.errors: Counter[str] = Counter()
        self.not_sent: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.begin_ns = time.monotonic_ns()
        self._last_sent_ns = self._last_answer_ns = self.begin_ns
        self._latest_ns = 0
        self._corrected = Samples()
        self._uncorrected = Samples()

    def count_sent(self, due_at_ns: int, at_ns: int) -> None:
        """Count a message that was sent at `at_ns`."""
        self.sent += 1
        self._last_sent_ns = at_ns
        if at_ns - due_at_ns > self._latest_ns:
            self._latest_ns = at_ns - due_at_ns

    def count_answered(self, due_at_ns: int, sent_at_ns: int) -> None:
        """Count a message that was answered, delivered or acknowledged now."""
        now_ns = time.monotonic_ns()
        self.answered += 1
        self._last_answer_ns = now_ns
        self._uncorrected.add(now_ns - sent_at_ns)
        if self.count:
            self._corrected.add(now_ns - due_at_ns)

    def outcome(self) -> Outcome:
        """Return the outcome; call it when nothing more can arrive."""
        behind = self.count - self.sent - self.not_sent.total()
        if self.count and behind > 0:
            self.not_sent[BEHIND] += behind
        sending_s = max(self.load.seconds, (self._last_sent_ns - self.begin_ns) / 1e9)
        return Outcome(
            due=self.count or self.sent,
            sent=self.sent,
            answered=self.answered,
            errors=dict(self.errors),
            not_sent=dict(self.not_sent),
            lost=dict(self.lost),
            sending_s=sending_s,
            total_s=max(sending_s, (self._last_answer_ns - self.begin_ns) / 1e9),
            latest_ms=self._latest_ns / 1e6,
            uncorrected=self._uncorrected.encode(),
            corrected=self._corrected.encode() if self.count else None,
        )


@contextlib.asynccontextmanager
async def prepared(load: Load, relay: str | None) -> AsyncIterator[Run]:
    """Connect, send one message that is not counted, and yield the function that runs the load; disconnect at the end.

    Raises NoMembers, RequestTimeout or another IrisError if that first message fails.
    """
    kind = {"request": _requests, "publish": _publications, "tunnel": _messages}[load.verb]
    async with kind(load, relay) as run:
        yield run


def _connect(load: Load, relay: str | None) -> iris.Client:
    config = iris.ClientConfig(relay=relay, label=f"iris bench {load.verb}")
    return iris.connect(config=config)


def _due(tally: Tally) -> contextlib.aclosing[AsyncGenerator[range, None]]:
    """Start the clock of `tally`; the context manager yields message numbers as they become due."""
    assert tally.load.rate is not None
    tally.begin_ns = time.monotonic_ns() + START_DELAY_NS
    return contextlib.aclosing(batches(tally.load.rate, tally.count, tally.begin_ns))


@contextlib.asynccontextmanager
async def _within_time(tally: Tally) -> AsyncIterator[None]:
    """Cancel without an error what is still waiting for room GRACE_NS twice after the end."""
    timer = asyncio.timeout(tally.load.seconds + 2 * GRACE_NS / 1e9)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise


# -- requests ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _requests(load: Load, relay: str | None) -> AsyncIterator[Run]:
    payload = bytes(load.size)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(load.connections):
            client = await stack.enter_async_context(_connect(load, relay))
            await client.request(load.target, payload, timeout=load.timeout, type=bytes)
            clients.append(client)
        run = _open_loop if load.rate is not None else _closed_loop
        yield lambda: run(load, clients, payload)


async def _ask(client: iris.Client, payload: bytes, due_at_ns: int | None, tally: Tally) -> bool:
    load = tally.load
    now_ns = time.monotonic_ns()
    due_at_ns = now_ns if due_at_ns is None else due_at_ns
    tally.count_sent(due_at_ns, now_ns)
    try:
        await client.request(load.target, payload, timeout=load.timeout, type=bytes)
    except Exception as error:  # any error is counted by its name
        tally.errors[type(error).__name__] += 1
        return False
    tally.count_answered(due_at_ns, now_ns)
    return True


async def _open_loop(load: Load, clients: list[iris.Client], payload: bytes) -> Outcome:
    assert load.rate is not None
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[bool]] = set()
    most = min(MAX_OUTSTANDING, max(1, MAX_OUTSTANDING_BYTES // (load.size + 1)))
    tally = Tally(load)
    try:
        async with _due(tally) as due:
            async for numbers in due:
                for number in numbers:
                    if len(running) >= most:
                        tally.not_sent[OUTSTANDING] += 1
                        continue
                    due_at_ns = tally.begin_ns + due_ns(number, load.rate)
                    client = clients[number % len(clients)]
                    task = loop.create_task(_ask(client, payload, due_at_ns, tally))
                    running.add(task)
                    task.add_done_callback(running.discard)
        if running:  # each has its own timeout; one second more in case one is late
            _, late = await asyncio.wait(running, timeout=load.timeout + 1)
            tally.errors[iris.RequestTimeout.__name__] += len(late)
    finally:
        await _cancel(running)
    tally.errors = +tally.errors
    return tally.outcome()


async def _closed_loop(load: Load, clients: list[iris.Client], payload: bytes) -> Outcome:
    assert load.inflight is not None
    tally = Tally(load)
    end_ns = tally.begin_ns + int(load.seconds * 1e9)

    async def request_in_turn(client: iris.Client) -> None:
        while time.monotonic_ns() < end_ns:
            if not await _ask(client, payload, None, tally):
                await asyncio.sleep(PAUSE_S)  # do not spin on requests that fail at once

    async with asyncio.TaskGroup() as group:
        for number in range(load.inflight):
            group.create_task(request_in_turn(clients[number % len(clients)]))
    return tally.outcome()


async def _cancel(tasks: set[asyncio.Task[bool]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


# -- publications --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _publications(load: Load, relay: str | None) -> AsyncIterator[Run]:
    """Publish to a subscriber on a second connection of this process, so that one clock measures both times."""
    run_id = os.urandom(8)
    filler = bytes(load.size - STAMP.size)
    probed, progress = asyncio.Event(), asyncio.Event()
    tally = Tally(load)
    expected = 0

    def receive(message: iris.Message) -> None:
        nonlocal expected
        if len(message.payload) != load.size:
            return  # from another publisher
        run, number, due_at_ns, sent_at_ns = STAMP.unpack_from(message.payload)
        if run != run_id:
            return
        if number == PROBE:
            probed.set()
            return
        if number < expected:
            tally.errors["OutOfOrder"] += 1
        expected = number + 1
        tally.count_answered(due_at_ns, sent_at_ns)
        progress.set()

    def on_loss(gap: iris.Loss) -> None:
        tally.lost[gap.cause] += gap.count or 0
        progress.set()

    async def send(client: iris.Client) -> None:
        assert load.rate is not None
        async with _due(tally) as due:
            async for numbers in due:
                for number in numbers:
                    due_at_ns = tally.begin_ns + due_ns(number, load.rate)
                    now_ns = time.monotonic_ns()
                    data = STAMP.pack(run_id, number, due_at_ns, now_ns) + filler
                    try:
                        if not client.offer(load.target, data):
                            await client.publish(load.target, data)
                    except iris.IrisError as error:
                        tally.not_sent[type(error).__name__] += 1
                    else:
                        tally.count_sent(due_at_ns, now_ns)

    async def run(client: iris.Client) -> Outcome:
        async with _within_time(tally):
            await send(client)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(load.timeout):
                while _open(tally) > 0:
                    progress.clear()
                    await progress.wait()
        tally.lost["unaccounted for"] += max(0, _open(tally))
        tally.lost = +tally.lost
        return tally.outcome()

    async with (
        _connect(load, relay) as receiver,
        _connect(load, relay) as sender,
        receiver.subscribe(load.target, receive, on_loss=on_loss),
    ):
        await sender.publish(load.target, STAMP.pack(run_id, PROBE, 0, 0) + filler)
        try:
            async with asyncio.timeout(load.timeout):
                await probed.wait()
        except TimeoutError:
            detail = f"the first publication was not delivered within {load.timeout:g} s"
            raise iris.RequestTimeout(load.target, detail) from None
        yield lambda: run(sender)


def _open(tally: Tally) -> int:
    return tally.sent - tally.answered - tally.lost.total()


# -- a tunnel ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _messages(load: Load, relay: str | None) -> AsyncIterator[Run]:
    """Send messages through a tunnel; latency ends with the acknowledgement, sent when the member has the whole
    message.

    The return of `send` shows only that the bytes were accepted: with credit for a megabyte, it would measure this
    process. A full echo would measure both directions at once. Acknowledgements have 8 bytes, one per message, in
    order.
    """
    async with (
        _connect(load, relay) as client,
        client.tunnel(load.target, timeout=load.timeout) as tunnel,
    ):
        try:
            async with asyncio.timeout(load.timeout):
                await tunnel.send(NUMBER.pack(PROBE))
                first = await tunnel.recv(limit_bytes=NUMBER.size)
        except (TimeoutError, iris.EndOfTunnel, iris.MessageTooLarge):
            first = b""
        if first != NUMBER.pack(PROBE):
            detail = f"the member did not acknowledge the first message within {load.timeout:g} s; is it `iris bench serve`?"
            raise iris.RequestTimeout(load.target, detail)
        yield lambda: _stream(load, tunnel)


async def _stream(load: Load, tunnel: iris.Tunnel) -> Outcome:
    assert load.rate is not None
    filler = bytes(load.size - NUMBER.size)
    waiting: deque[tuple[int, int, int]] = deque()
    tally = Tally(load)

    async def acknowledged() -> None:
        async for head in tunnel:
            number, due_at_ns, sent_at_ns = waiting.popleft() if waiting else (PROBE, 0, 0)
            if number == PROBE or head != NUMBER.pack(number):
                tally.errors["OutOfOrder"] += 1
                return
            tally.count_answered(due_at_ns, sent_at_ns)

    async def send() -> None:
        assert load.rate is not None
        async with _due(tally) as due:
            async for numbers in due:
                for number in numbers:
                    due_at_ns = tally.begin_ns + due_ns(number, load.rate)
                    now_ns = time.monotonic_ns()
                    waiting.append((number, due_at_ns, now_ns))
                    whole = False
                    try:
                        await tunnel.send(NUMBER.pack(number) + filler)
                        whole = True
                    finally:
                        if not whole:  # interrupted: the member drops the incomplete message
                            waiting.pop()
                    tally.count_sent(due_at_ns, now_ns)

    receiving = asyncio.create_task(acknowledged())
    problem, ended = iris.RequestTimeout.__name__, False
    try:
        async with _within_time(tally):
            await send()
        await tunnel.finish()
        done, _ = await asyncio.wait((receiving,), timeout=load.timeout)
        if done:
            problem = iris.TunnelBroken.__name__
            receiving.result()
    except (iris.TunnelBroken, iris.Closed) as error:
        problem, ended = type(error).__name__, True
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
    left = tally.sent - tally.answered - tally.errors.total()
    if left > 0:
        tally.errors[problem] += left
    if ended and tally.sent < tally.count:
        tally.not_sent["tunnel ended"] = tally.count - tally.sent
    return tally.outcome()
