"""SURVEYOR and RESPONDENT: surveys by SP programs of a cluster, and surveys by a cluster of SP programs."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final

import iris
from iris import IrisError
from iris.core.backoff import Backoff
from iris.core.message import foreign_bytes
from relay.bridges.sp.bridge import Bridge
from relay.bridges.sp.config import SocketConfig
from relay.bridges.sp.sockets import Received, SpContext, SpError, SpTimeout

WINDOW: Final = 2
"""Responses to one peer that nng has not written yet. nng queues no more for a peer, and drops others
without a report.
"""
SURVEY_WINDOW: Final = 8
"""The same limit for surveys."""
UNCOUNTED_PAUSE_S: Final = 0.005
"""Pause between messages over ws, where nng does not report what it has written."""
MAX_SLOW_S: Final = 0.1
MESSAGEPACK_BYTES: Final = 5
"""Upper bound of the bytes that MessagePack adds for a list and for each of its items."""
PAUSE_MIN_S: Final = 0.0005
PAUSE_MAX_S: Final = 0.02


class RespondentBridge(Bridge):
    """A SURVEYOR peer asks, and all members answer. Each answer is a response of its own.

    Members that fail or do not answer are counted, because SP cannot report them. A peer that reads no
    response for `timeout_s` is disconnected, which frees what it has in flight.
    """

    def __init__(self, config: SocketConfig, client: iris.Client) -> None:
        super().__init__(config, client)
        self._answered: dict[int, int] = {}
        """Responses passed to nng for each connected peer: pipe number -> count."""
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Read surveys while fewer than `concurrency` are in flight. More wait in nng's queue."""
        while not self.stopping:
            await self.room()
            question = self.socket.receive_message()
            if question is None:
                await self.socket.readable()
            else:
                self.start(self._survey(question), len(question.data))
                await asyncio.sleep(0)

    async def _survey(self, question: Received) -> None:
        config = self.config
        survey = self.client.survey(
            config.cluster, question.data, timeout=config.timeout_s, type=iris.Message
        )
        try:
            async for answer in survey:
                await self._answer(question, foreign_bytes(answer))
        except (IrisError, SpError) as err:
            self.tally.count_lost(type(err).__name__, err)
        if survey.missing:
            self.tally.count_lost("members that did not answer", "", len(survey.missing))
        if survey.failed:
            detail = next(iter(survey.failed.values()))
            self.tally.count_lost("members that failed", detail, len(survey.failed))

    async def _answer(self, question: Received, data: bytes) -> None:
        """Send a response, or count why it was not sent."""
        peer = question.peer
        if not self.config.counts_written:
            async with self._turn:
                await asyncio.sleep(UNCOUNTED_PAUSE_S)
        elif self._answered.get(peer, 0) >= WINDOW and not await self._room_at(peer):
            return
        if not self.socket.is_connected(peer):
            self._answered.pop(peer, None)
            self.tally.count_lost("peer gone")
        elif question.answer(data):
            if peer not in self._answered:
                self._answered = {n: sent for n, sent in self._answered.items() if self.socket.is_connected(n)}  # fmt: skip
            self._answered[peer] = self._answered.get(peer, 0) + 1
        else:
            self.tally.count_lost("slow peer")

    async def _room_at(self, peer: int) -> bool:
        """Return True when nng has room for a response: fewer than WINDOW are not written yet.

        Return False if the peer reads none.
        """
        began, end_s = self.socket.written().get(peer, 0), time.monotonic() + self.config.timeout_s
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        while self.socket.is_connected(peer):
            written = self.socket.written().get(peer, 0)
            if self._answered.get(peer, 0) - written < WINDOW:
                break
            if time.monotonic() > end_s:
                self.tally.count_lost("slow peer")
                if written == began:
                    self.socket.hang_up(peer)
                return False
            await asyncio.sleep(backoff.failed())
        return True


class SurveyorBridge(Bridge):
    """A member surveys the cluster, and RESPONDENT peers answer with the first response or a list of all."""

    async def run(self) -> None:
        """Serve surveys while a peer is connected."""
        config = self.config
        limits = iris.Limits(concurrency=config.concurrency, queue_bytes=config.queue_bytes)
        service = iris.Service(config.cluster, limits=limits)
        free: list[SpContext] = []
        turn = asyncio.Lock()
        self._stalled: dict[int, int] = {}
        """Slow peers that no survey waits for until nng has written more to them: pipe number -> messages written."""

        @service.on_survey
        async def forward(question: bytes) -> bytes | list[bytes]:
            context = free.pop() if free else self.socket.context()
            self.in_flight += 1
            try:
                async with turn:
                    await self._room_at_peers()
                    await context.send(question)
                if config.answers == "first":
                    return await context.receive()
                return await self._all(context)
            except SpError as err:
                cause = "sp: no answer" if isinstance(err, SpTimeout) else f"sp: {type(err).__name__}"  # fmt: skip
                self.tally.count_lost(cause, err)
                if isinstance(err, SpTimeout):
                    raise RuntimeError(
                        f"no SP peer answered within {config.timeout_s:g} s"
                    ) from err
                raise RuntimeError(f"the SP survey failed: {type(err).__name__}: {err}") from err
            finally:
                self.ended(0)
                free.append(context)

        await self.serve(service)

    async def _room_at_peers(self) -> None:
        """Return when nng has room for a survey to every peer.

        Wait for slow peers once, for up to MAX_SLOW_S, until they read again.
        """
        if not self.config.counts_written:
            await asyncio.sleep(UNCOUNTED_PAUSE_S)
            return
        end_s = time.monotonic() + MAX_SLOW_S
        while slow := self._slow():
            if time.monotonic() > end_s:
                self._stalled |= slow
            else:
                await asyncio.sleep(PAUSE_MIN_S)
        if self._stalled:
            self.tally.count_lost("slow peer", "", len(self._stalled))

    def _slow(self) -> dict[int, int]:
        """Return the peers whose queue is full: pipe number -> messages written."""
        written, since, sent = self.socket.written(), self.socket.peers.since, self.tally.to_sp
        for peer, before in list(self._stalled.items()):
            if written.get(peer) != before:
                del self._stalled[peer]
                if peer in written:  # the peer has read at least one more
                    since[peer] = sent - written[peer] - (SURVEY_WINDOW - 1)
        return {
            peer: count
            for peer, count in written.items()
            if peer not in self._stalled and sent - since[peer] - count >= SURVEY_WINDOW
        }

    async def _all(self, context: SpContext) -> list[bytes]:
        """Return the responses until the survey's time is over.

        Those that do not fit into one answer are counted as lost.
        """
        answers: list[bytes] = []
        room = min(self.config.max_message_bytes, self.client.message_limit) - MESSAGEPACK_BYTES
        while True:
            try:
                answer = await context.receive()
            except SpTimeout:
                return answers
            if len(answer) + MESSAGEPACK_BYTES > room:
                self.tally.count_lost("answer full")
            else:
                room -= len(answer) + MESSAGEPACK_BYTES
                answers.append(answer)
