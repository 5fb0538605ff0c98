"""The course of the demo: publish, request, survey and stream at once, kill a member, request the result."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from pathlib import Path
from typing import Final

import msgspec

import iris
from iris.cli.demo import data
from iris.cli.demo.data import Route
from iris.cli.demo.display import Screen
from iris.cli.demo.figures import Figures, MemberFigures
from iris.cli.demo.member import CLUSTER, Count, Delay, Question
from iris.cli.demo.sandbox import START_S, Sandbox

MEMBERS: Final = 3
RATE: Final = 16_000
"""Flights published per second: a year in 21 seconds."""
MAX_AHEAD: Final = 50_000
"""Flights that the dashboard may be behind before the publisher waits."""
ASKERS: Final = 16
ASK_PAUSE_S: Final = 0.01
ANSWER_S: Final = 5.0
CARRIER: Final = "B6"
KILL_AT: Final = 0.4
"""Share of the flights that are published before a member is killed."""
SETTLE_S: Final = 20.0
LIMIT_S: Final = 150.0


async def play(source: Path, figures: Figures, screen: Screen) -> None:
    """Run the demo. Failures of messages are counted in `figures`; what prevents the demo from running raises
    IrisError.

    No process and no file is left behind, also after an error or a cancellation.
    """
    with Sandbox() as sandbox:
        screen.note("starting a relay and three members of the cluster delays")
        sandbox.start("relay")
        await sandbox.relay_up()
        for _ in range(MEMBERS):
            pid = sandbox.start("iris.cli", "run", f"{__package__}.member")
            figures.members[pid] = MemberFigures(pid)
        script = Script(list(data.rows(source, quick=figures.quick)))
        figures.to_publish, figures.to_stream = len(script.rows), len(script.stream)
        figures.carrier = CARRIER
        async with (
            sandbox.client("iris demo publisher") as publisher,
            sandbox.client("iris demo dashboard") as dashboard,
            sandbox.client("iris demo caller") as caller,
        ):
            await _members_up(sandbox, caller)
            story = Story(figures, sandbox, caller, script)
            async with dashboard.subscribe("flights.>", story.received, on_loss=story.missed):
                try:
                    async with asyncio.timeout(LIMIT_S):
                        await story.run(publisher, screen)
                except TimeoutError:
                    screen.note(f"not finished after {LIMIT_S:g} s")
                except ExceptionGroup as group:
                    raise _first(group) from group


async def _members_up(sandbox: Sandbox, caller: iris.Client) -> None:
    for _ in range(int(START_S)):
        try:
            await caller.wait_for_members(CLUSTER, MEMBERS, timeout=1.0)
            return
        except iris.RequestTimeout:
            sandbox.check_alive()
    raise iris.RequestTimeout(CLUSTER, f"{MEMBERS} members did not start within {START_S:g} s")


def _first(error: Exception) -> Exception:
    """Return the error that ended a task group; the others follow from it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class Script:
    """The messages to send, prepared before the clock starts."""

    def __init__(self, rows: list[bytes]) -> None:
        self.rows = rows
        self.topics = [data.topic(row) for row in rows]
        self.stream = [row for row in rows if data.carrier(row) == CARRIER]
        """The flights that go through the tunnel."""
        pairs = sorted({tuple(topic.split(".")[1:]) for topic in self.topics})
        self.routes: list[Route] = [(origin, carrier) for origin, carrier in pairs]


class Story:
    """The tasks of the demo, which share `figures`."""

    def __init__(
        self, figures: Figures, sandbox: Sandbox, caller: iris.Client, script: Script
    ) -> None:
        self._figures = figures
        self._sandbox = sandbox
        self._caller = caller
        self._script = script
        self._time_to_kill = asyncio.Event()
        self._reader_known = asyncio.Event()

    def received(self, message: iris.Message) -> None:
        """Count a flight that the dashboard received."""
        self._figures.dashboard.add(message.payload)

    def missed(self, loss: iris.Loss) -> None:
        """Count a loss that was reported to the dashboard."""
        self._figures.missed += loss.count or 1

    async def run(self, publisher: iris.Client, screen: Screen) -> None:
        """Run all tasks at once, then wait for the results."""
        screen.note("publishing, requesting, streaming")
        async with asyncio.TaskGroup() as always:
            watching = [
                always.create_task(self._show(screen)),
                always.create_task(self._survey_often()),
            ]
            askers = asyncio.Event()
            for first in range(ASKERS):
                always.create_task(self._ask(first, askers))
            async with asyncio.TaskGroup() as acts:
                acts.create_task(self._publish(publisher))
                acts.create_task(self._stream())
                acts.create_task(self._kill(screen))
            screen.note("waiting until every receiver has every flight")
            askers.set()
            await self._settle()
            for route in self._script.routes:
                answer = await self._answer(route)
                self._figures.averages[route] = (answer.flights, answer.minutes)
            report = await self._caller.status()
            self._figures.dropped = report["accounts"]["dropped"]
            for task in watching:
                task.cancel()
        self._figures.finished = True

    async def _show(self, screen: Screen) -> None:
        while True:
            screen.update()
            await asyncio.sleep(0.25)

    async def _publish(self, publisher: iris.Client) -> None:
        figures = self._figures
        begun = time.monotonic()
        for row, topic in zip(self._script.rows, self._script.topics, strict=True):
            await publisher.publish(topic, row)
            figures.published += 1
            if figures.published % 64 == 0:
                ahead_s = figures.published / RATE - (time.monotonic() - begun)
                await asyncio.sleep(max(0.0, ahead_s))
                while figures.published - figures.dashboard.rows - figures.missed > MAX_AHEAD:  # noqa: ASYNC110 - a pace
                    await asyncio.sleep(0.002)
            if figures.published >= KILL_AT * figures.to_publish:
                self._time_to_kill.set()
        await publisher.flush()

    async def _ask(self, first: int, stop: asyncio.Event) -> None:
        """Request the delays of one route after the other."""
        for number in itertools.count(first):
            if stop.is_set():
                return
            begun = time.monotonic()
            await self._answer(self._script.routes[number % len(self._script.routes)])
            self._figures.latencies.append(time.monotonic() - begun)
            await asyncio.sleep(ASK_PAUSE_S)

    async def _answer(self, route: Route) -> Delay:
        """Repeat a request until it is answered. The request is idempotent, so it may run twice when a member is
        lost."""
        figures = self._figures
        figures.asked += 1
        again = False
        while True:
            try:
                answer: Delay = await self._caller.request(
                    CLUSTER, Question(*route), timeout=ANSWER_S, idempotent=again, type=Delay
                )
            except iris.ConnectionLost:
                figures.reported_after.append(time.monotonic() - figures.killed_at)
            except (iris.NoMembers, iris.Overloaded):
                figures.refused += 1
                await asyncio.sleep(ASK_PAUSE_S)
            except iris.RequestTimeout:
                figures.timed_out += 1
            else:
                figures.answered += 1
                return answer
            again = True

    async def _stream(self) -> None:
        """Send one carrier's flights through a tunnel; its reader sets the pace."""
        figures = self._figures
        async with self._caller.tunnel(CLUSTER, timeout=ANSWER_S) as tunnel:
            reader = msgspec.json.decode(await tunnel.recv(), type=Count)
            figures.tunnel_pid = reader.pid
            self._reader_known.set()
            for row in self._script.stream:
                begun = time.monotonic()
                await tunnel.send(row)
                figures.held_back += time.monotonic() - begun
                figures.streamed += 1
            await tunnel.finish()
            figures.read = msgspec.json.decode(await tunnel.recv(), type=tuple[int, int])

    async def _kill(self, screen: Screen) -> None:
        """Kill a member with requests in flight. It is stopped first, so that there are some."""
        figures = self._figures
        await self._time_to_kill.wait()
        await self._reader_known.wait()
        victim = next(member for member in figures.members if member != figures.tunnel_pid)
        self._sandbox.signal(victim, signal.SIGSTOP)
        begun = time.monotonic()
        held = 0
        while held < (4 if time.monotonic() < begun + 0.5 else 1):
            await asyncio.sleep(0.005)
            held = await self._held_by(victim)
        figures.members[victim].killed = True
        figures.killed_at = time.monotonic()
        self._sandbox.signal(victim, signal.SIGKILL)
        screen.note(f"killed member {victim}")

    async def _held_by(self, pid: int) -> int:
        report = await self._caller.status()
        return sum(session["running"] for session in report["sessions"] if session["pid"] == pid)

    async def _survey_often(self) -> None:
        while True:
            await self._survey()
            await asyncio.sleep(1.0)

    async def _survey(self) -> None:
        """Survey all members for their counts. A member that is killed meanwhile does not answer."""
        async for count in self._caller.survey(CLUSTER, b"", timeout=ANSWER_S, type=Count):
            member = self._figures.members[count.pid]
            member.rows, member.checksum = count.rows, count.checksum
            member.missed, member.answered = count.missed, count.answered

    async def _settle(self) -> None:
        """Return when every remaining receiver has all flights or a report of their loss, or after SETTLE_S."""
        figures = self._figures
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            await self._survey()
            received = [
                figures.dashboard.rows + figures.missed,
                *(member.rows + member.missed for member in figures.survivors),
            ]
            if all(rows >= figures.published for rows in received):
                return
            await asyncio.sleep(0.05)
