"""PUSH and PULL: work of SP programs for a cluster, and work of a cluster for SP programs."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import iris
from iris import InvalidName, IrisError, MessageTooLarge, RequestError
from iris.core.backoff import Backoff
from relay.bridges.sp.bridge import Bridge

WINDOW_MESSAGES: Final = 256
"""Pushed before the bridge looks whether they were taken: as many may be lost when all members are full."""
PAUSE_MIN_S: Final = 0.02
PAUSE_MAX_S: Final = 1.0
FAILURES: Final = (iris.Overloaded, iris.NoMembers, iris.RequestTimeout, iris.ConnectionLost)


class PullBridge(Bridge):
    """Their PUSH becomes pushes to the cluster.

    Back-pressure: nothing is read while nobody in the cluster takes pushes, and after a window in which some were refused the
    bridge pauses, longer each time. What is not read waits with the peers.
    """

    async def run(self) -> None:
        """Push until the socket is closed."""
        self._has_members = asyncio.Event()
        self._failed = 0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._push())

    def lost(self, lost: iris.Lost) -> None:
        """A push was refused."""
        super().lost(lost)
        if isinstance(lost.error, FAILURES):
            self._failed += 1

    async def _watch(self) -> None:
        """Keep `_there` true while somebody takes pushes, as far as this site's relay knows."""
        try:
            async for members in self.client.watch_members(self.config.cluster):
                if members.serving("push") or any(members.sites.values()):
                    self._has_members.set()
                else:
                    self._has_members.clear()
        except InvalidName:  # of another site: only its number is known, and refusals will tell
            self._has_members.set()

    async def _push(self) -> None:
        config, socket = self.config, self.socket
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        while not self.stopping:
            await self._has_members.wait()
            failed, pushed, size = self._failed, 0, 0
            while pushed < WINDOW_MESSAGES and size < config.queue_bytes and not self.stopping:
                data = socket.receive_now()
                if data is None:
                    break
                self.in_flight += 1
                try:
                    await self._push_one(data)
                except asyncio.CancelledError:
                    self.tally.count_lost("stopping")
                    raise
                finally:
                    self.ended(0)
                pushed += 1
                size += len(data)
            if not pushed:
                await socket.readable()
                continue
            try:
                await self.client.flush(timeout=config.timeout_s)
            except RequestError:
                failed = -1  # the relay is away: who comes back is not hurried
            if self._failed == failed:
                backoff.succeeded()
            else:
                await asyncio.sleep(backoff.failed())

    async def _push_one(self, data: bytes) -> None:
        """Push, again and again while there is no relay: the message is ours until it is on the way."""
        while True:
            try:
                await self.client.push(self.config.cluster, data, timeout=self.config.timeout_s)
            except (MessageTooLarge, InvalidName) as err:
                self.tally.count_lost(type(err).__name__, err)
            except RequestError as err:
                if not self.stopping:
                    await asyncio.sleep(PAUSE_MIN_S)
                    continue
                self.tally.count_lost(type(err).__name__, err)
            except IrisError as err:
                self.tally.count_lost(type(err).__name__, err)
            return


class PushBridge(Bridge):
    """Pushes to the cluster reach their PULL: a handler ends when nng has the message, so slow peers fill the member's queue."""

    async def run(self) -> None:
        """Serve pushes while a peer is there."""
        config = self.config
        limits = iris.Limits(concurrency=config.concurrency, queue_bytes=config.queue_bytes)
        service = iris.Service(config.cluster, limits=limits)
        turn = asyncio.Lock()

        @service.on_push
        async def forward(message: iris.Message) -> None:
            self.in_flight += 1
            try:
                async with turn:
                    await self.socket.send(message.payload)
            except BaseException as err:
                self.tally.count_lost("stopping" if self.stopping else type(err).__name__, err)
                raise
            finally:
                self.ended(0)

        await self.serve(service)
