"""REQ and REP: requests of SP programs to a cluster, and requests of a cluster to SP programs."""

from __future__ import annotations

import asyncio

import iris
from iris import IrisError
from iris.core.message import foreign_bytes
from relay.bridges.sp.bridge import Bridge
from relay.bridges.sp.sockets import Closed, SpContext, SpError, SpTimeout


class RepBridge(Bridge):
    """A REQ peer asks, and a member of the cluster answers.

    Each of `concurrency` contexts handles one request. When all are busy, nothing more is read and the
    peers wait. SP has no errors: a failed request gets no answer, or `error_reply`. A peer that does
    not read its reply for `timeout_s` is disconnected, which frees all contexts that have a reply for
    it.
    """

    async def run(self) -> None:
        """Answer until the socket is closed."""
        contexts = [self.socket.context() for _ in range(self.config.concurrency)]
        async with asyncio.TaskGroup() as group:
            for context in contexts:
                group.create_task(self._answer(context), name=f"sp {self.config.label}")

    async def _answer(self, context: SpContext) -> None:
        while not self.stopping:
            try:
                question = await context.receive()
            except Closed:
                return
            except SpError as err:
                self.tally.count_lost(f"sp: {type(err).__name__}", err)
                continue
            if self.stopping:
                self.tally.count_lost("stopping")
                return
            self.in_flight += 1
            try:
                answer = await self._request(question)
                if answer is None:
                    continue
                if not self.socket.is_connected(context.peer):
                    self.tally.count_lost("peer gone")  # nng would drop it without reporting it
                    continue
                await context.send(answer)
            except Closed:
                self.tally.count_lost("stopping")
                return
            except asyncio.CancelledError:
                self.tally.count_lost("stopping")
                raise
            except SpTimeout:
                self.tally.count_lost("slow peer")
                self.socket.hang_up(context.peer)
            except SpError as err:
                self.tally.count_lost(f"sp: {type(err).__name__}", err)
            finally:
                self.ended(0)

    async def _request(self, question: bytes) -> bytes | None:
        config = self.config
        try:
            reply = await self.client.request(
                config.cluster, question, timeout=config.timeout_s, type=iris.Message
            )
        except IrisError as err:
            self.tally.count_lost(type(err).__name__, err)
            if config.error_reply is None:
                return None
            return f"{config.error_reply}{type(err).__name__}: {err}".encode(errors="replace")
        return foreign_bytes(reply)


class ReqBridge(Bridge):
    """A member asks the cluster, and a REP peer answers. nng gives each request to one peer and never repeats it."""

    async def run(self) -> None:
        """Serve the cluster while a peer is connected."""
        config = self.config
        limits = iris.Limits(concurrency=config.concurrency, queue_bytes=config.queue_bytes)
        service = iris.Service(config.cluster, limits=limits)
        free: list[SpContext] = []

        @service.on_request
        async def forward(question: bytes) -> bytes:
            context = free.pop() if free else self.socket.context()
            self.in_flight += 1
            try:
                async with asyncio.timeout(config.timeout_s):
                    await context.send(question)
                    return await context.receive()
            except (SpError, TimeoutError) as err:
                cause = "sp: no answer" if isinstance(err, TimeoutError | SpTimeout) else f"sp: {type(err).__name__}"  # fmt: skip
                self.tally.count_lost(cause, err)
                if cause == "sp: no answer":
                    raise RuntimeError(
                        f"no SP peer answered within {config.timeout_s:g} s"
                    ) from err
                raise RuntimeError(f"the SP peer failed: {type(err).__name__}: {err}") from err
            finally:
                self.ended(0)
                free.append(context)

        await self.serve(service)
