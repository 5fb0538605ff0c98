"""PUSH and PULL: work from SP programs for a cluster, and work from a cluster for SP programs."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import iris
from iris import InvalidName, IrisError, MessageTooLarge, RequestError
from iris.core.backoff import Backoff
from relay.bridges.sp.bridge import Bridge

WINDOW_MESSAGES: Final = 256
"""Messages pushed before the bridge checks whether they were accepted.

Up to this many are lost when all members are full.
"""
PAUSE_MIN_S: Final = 0.02
PAUSE_MAX_S: Final = 1.0
FAILURES: Final = (iris.Overloaded, iris.NoMembers, iris.RequestTimeout, iris.ConnectionLost)


class PullBridge(Bridge):
    """Messages of PUSH peers become pushes to the cluster.

    Back-pressure: nothing is read while no member accepts pushes. After a window in which pushes were
    refused the bridge pauses, longer each time. Messages that are not read wait at the peers.
    """

    async def run(self) -> None:
        """Push until the socket is closed."""
        self._has_members = asyncio.Event()
        self._failed = 0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._push())

    def lost(self, lost: iris.Loss) -> None:
        """Count a push that was refused."""
        super().lost(lost)
        if isinstance(lost.error, FAILURES):
            self._failed += 1

    async def _watch(self) -> None:
        """Keep `_has_members` set while some member accepts pushes, as far as the relay of this site knows."""
        try:
            async for members in self.client.watch_members(self.config.cluster):
                if members.serving("push") or any(members.sites.values()):
                    self._has_members.set()
                else:
                    self._has_members.clear()
        except InvalidName:  # a cluster of another site has no list of members; refusals will show
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
                failed = -1  # the relay is away, and when it comes back it must not be flooded
            if self._failed == failed:
                backoff.succeeded()
            else:
                await asyncio.sleep(backoff.failed())

    async def _push_one(self, data: bytes) -> None:
        """Push one message. Without a relay, try again: the bridge holds the message until it is sent."""
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
    """Pushes to the cluster reach PULL peers.

    A handler ends when nng has the message, so slow peers fill the member's queue.
    """

    async def run(self) -> None:
        """Serve pushes while a peer is connected."""
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
