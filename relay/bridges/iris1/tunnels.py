"""Join the client's end of a tunnel with an `iris.Tunnel`, message by message.

A message from the client is forwarded when it is complete. Until it is forwarded, the client may send
no more than its window. A message to the client waits for the client's grant and for its socket, so the
slower end sets the pace in both directions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Coroutine

import iris
from relay.bridges.iris1.config import Iris1Config
from relay.bridges.iris1.core import codec
from relay.bridges.iris1.core.frames import CHUNK_LIMIT
from relay.bridges.iris1.core.machine import Machine
from relay.bridges.iris1.core.tunnels import ClientEnd, TunnelFault
from relay.bridges.iris1.local import LocalClients
from relay.bridges.iris1.local_tunnel import LocalTunnelEnd, local_tunnel
from relay.bridges.iris1.writer import ClientWriter

log = logging.getLogger(__name__)


class Tunnels:
    """The tunnels of one connection."""

    def __init__(
        self, client: iris.Client, machine: Machine, config: Iris1Config, counters: Counter[str],
        writer: ClientWriter, local: LocalClients,
    ) -> None:  # fmt: skip
        self.machine = machine
        self.config = config
        self.counters = counters
        self.writer = writer
        self._local = local
        self._client = client
        self._tunnels: set[BridgedTunnel] = set()
        self._opening: set[asyncio.Future[iris.Tunnel]] = set()
        self._ended: tuple[str, bool] | None = None
        """Arguments of `end`, once called: tunnels that come later end in the same way."""

    async def open(self, id: int, cluster: str, timeout_ms: int) -> None:
        """Open a tunnel for the client and carry it to its end.

        A member at this bridge is preferred if it has room.
        """
        member = self._local.for_tunnel(cluster)
        if member is not None:
            ours, theirs = local_tunnel(cluster)
            member.accept_tunnel(theirs)
            bridged = BridgedTunnel(self, ours)
            self.machine.confirm_tunnel(id, bridged)
            await self._carry(bridged)
            return
        timeout = max(timeout_ms, 1) / 1000
        opening = asyncio.ensure_future(self._client.open_tunnel(cluster, timeout=timeout))
        self._opening.add(opening)
        try:
            tunnel = await opening
        except (iris.IrisError, asyncio.CancelledError) as err:
            opening.cancel()
            self.counters["tunnels unopened"] += 1
            self.machine.refuse_tunnel(id)
            if isinstance(err, asyncio.CancelledError) and being_cancelled():
                raise
            return
        finally:
            self._opening.discard(opening)
        bridged = BridgedTunnel(self, tunnel)
        self.machine.confirm_tunnel(id, bridged)
        await self._carry(bridged)

    async def on_tunnel(self, tunnel: iris.Tunnel | LocalTunnelEnd) -> None:
        """Carry a tunnel that was opened to the client, once the client has confirmed it."""
        bridged = BridgedTunnel(self, tunnel)
        build = self.machine.build_tunnel(bridged)
        if build is not None:
            self._tunnels.add(bridged)
            await bridged.confirmed(self.config.confirm_s)
            self.machine.give_up_build(build)
        await self._carry(bridged)

    async def _carry(self, bridged: BridgedTunnel) -> None:
        self._tunnels.add(bridged)
        if self._ended is not None:
            bridged.finish(self._ended[0], gracefully=self._ended[1])
        try:
            await bridged.run()
        finally:
            self._tunnels.discard(bridged)

    def end(self, reason: str, *, gracefully: bool) -> None:
        """End all tunnels. `gracefully`: forward first what the client has sent."""
        self._ended = reason, gracefully
        for opening in list(self._opening):
            opening.cancel()
        for bridged in list(self._tunnels):
            bridged.finish(reason, gracefully=gracefully)


def being_cancelled() -> bool:
    """Whether this task itself is being cancelled, not only what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class BridgedTunnel:
    """One tunnel: the client's end joined with the other end."""

    def __init__(self, tunnels: Tunnels, tunnel: iris.Tunnel | LocalTunnelEnd) -> None:
        self.client_end: ClientEnd | None = None
        self._owner = tunnels
        self._tunnel = tunnel
        self._messages: deque[bytes] = deque()
        self._held = 0
        """Bytes of the message to the client that is being sent."""
        self._sender: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Set when the client confirmed or granted something, or the tunnel is over."""
        self._over = asyncio.Event()
        self._reason = ""
        self._gracefully = False
        self._local_end = tunnel if isinstance(tunnel, LocalTunnelEnd) else None
        if self._local_end is not None:
            self._local_end.on_message = self._send_at_once

    # -- what the machine calls ------------------------------------------------------------------------------

    def opened(self, client_end: ClientEnd) -> None:
        """Note that the client confirmed the tunnel."""
        self._changed.set()

    def allowed(self) -> None:
        """Note that the client granted more bytes."""
        self._changed.set()

    def message(self, data: bytes) -> None:
        """Forward a complete message from the client."""
        local_end = self._local_end
        if local_end is not None and self._sender is None and local_end.offer(data):
            assert self.client_end is not None  # it sent the message
            self.client_end.forwarded(len(data))
            return
        self._messages.append(data)
        if self._sender is None:
            self._sender = self._start(self._send(), "iris1-tunnel-send")

    def closed(self, reason: str | None) -> None:
        """End the tunnel because the client closed it (None) or broke the protocol (the reason)."""
        self.finish(reason or "", gracefully=reason is None)

    # -- its life --------------------------------------------------------------------------------------------

    def finish(self, reason: str, *, gracefully: bool) -> None:
        """End the tunnel. Only the first reason counts."""
        if not self._over.is_set():
            self._reason = reason
            self._gracefully = gracefully
            self._over.set()
            self._changed.set()

    async def confirmed(self, timeout: float) -> None:
        """Return when the client has confirmed the tunnel or it is over. It is over as well if `timeout` passes."""
        try:
            async with asyncio.timeout(timeout):
                while self.client_end is None and not self._over.is_set():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._owner.counters["tunnels unconfirmed"] += 1
            self.finish(
                f"the service did not confirm the tunnel within {timeout:g} s", gracefully=False
            )

    async def run(self) -> None:
        """Carry messages both ways until one end closes, breaks or leaves."""
        client_end, tunnel = self.client_end, self._tunnel
        if client_end is None:
            tunnel.fail(self._reason or self._refusal())
            return
        receiving = self._start(self._receive(client_end), "iris1-tunnel-receive")
        try:
            await self._over.wait()
            if self._gracefully and self._sender is not None:
                await asyncio.wait((self._sender,), timeout=self._owner.config.drain_s)
        except asyncio.CancelledError:
            self.finish("the bridge stopped", gracefully=False)
            raise
        finally:
            receiving.cancel()
            if self._sender is not None:
                self._sender.cancel()
                self._gracefully = False
            self._owner.machine.close_tunnel(client_end, self._reason)
            if self._gracefully and not self._reason:
                await tunnel.close()
            else:
                tunnel.fail(self._reason or "the other side disconnected")
            sending = [self._sender] if self._sender is not None else []
            await asyncio.gather(receiving, *sending, return_exceptions=True)
            if self._messages:
                self._owner.counters["tunnel messages not passed on"] += len(self._messages)
            while self._messages:
                client_end.forwarded(len(self._messages.popleft()))
            self._release()

    def _refusal(self) -> str:
        limit = self._owner.config.max_tunnels
        return f"the service is at capacity ({limit} tunnels) or is disconnecting"

    def _start(self, process: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(process, name=name)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """End the tunnel after an internal error, so that neither end waits for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bridge.tunnel_fault", exc_info=error)
            self.finish(f"internal error of the bridge: {error!r}", gracefully=False)

    async def _send(self) -> None:
        client_end = self.client_end
        assert client_end is not None
        try:
            while self._messages:
                await self._tunnel.send(self._messages[0])
                client_end.forwarded(len(self._messages.popleft()))
                self._owner.machine.grant(client_end)
        except iris.Closed:
            self.finish("", gracefully=True)  # the other end does not want more
        except iris.IrisError as err:
            self.finish(str(err), gracefully=False)
        finally:
            self._sender = None

    async def _receive(self, client_end: ClientEnd) -> None:
        try:
            while True:
                message = await self._message()
                if message:
                    await self._send_to_client(client_end, message)
                else:
                    # The protocol has no empty messages.
                    self._owner.counters["empty tunnel messages"] += 1
                self._release()
        except iris.EndOfTunnel:
            self.finish("", gracefully=True)
        except iris.IrisError as err:
            self.finish(str(err), gracefully=False)
        except TunnelFault as fault:
            self._owner.counters["tunnel faults"] += 1
            self.finish(str(fault), gracefully=False)

    async def _message(self) -> bytes:
        """Return the next complete message for the client, held in its budget.

        Raises:
            TunnelFault: the message is over the limit or the budget.
            IrisError: as `Tunnel.recv_chunks`.
        """
        limit = self._owner.config.tunnel_message_bytes
        while True:
            parts: list[bytes] = []
            try:
                async for chunk in self._tunnel.recv_chunks():
                    if self._held + len(chunk) > limit:
                        raise TunnelFault(f"a message is longer than the limit of {limit} bytes")
                    self._owner.machine.outgoing.reserve(len(chunk))
                    self._held += len(chunk)
                    parts.append(chunk)
                return b"".join(parts)
            except iris.TunnelBroken:
                if not parts:
                    raise
                # The sender gave up this message, and the next may follow. If the tunnel broke, the next
                # turn raises that.
                self._release()

    def _release(self) -> None:
        self._owner.machine.outgoing.release(self._held)
        self._held = 0

    def _send_at_once(self, message: bytes) -> bool:
        """Forward a message if nothing waits before it; return False if it must wait."""
        client_end, size = self.client_end, len(message)
        if (
            client_end is None
            or client_end.allowance < size
            or size > CHUNK_LIMIT
            or self._over.is_set()
        ):
            return False
        if self._owner.writer.full:
            return False
        client_end.sent(size)
        self._owner.machine.send(codec.tun_transfer(client_end.id, size, message))
        return True

    async def _send_to_client(self, client_end: ClientEnd, message: bytes) -> None:
        view = memoryview(message)
        size = len(view)
        while client_end.allowance < min(size, CHUNK_LIMIT):
            self._changed.clear()
            await self._changed.wait()
        for start in range(0, size, CHUNK_LIMIT):
            await self._owner.writer.wait_writable()
            if self._over.is_set():
                return
            chunk = view[start : start + CHUNK_LIMIT]
            client_end.sent(len(chunk))
            self._owner.machine.send(codec.tun_transfer(client_end.id, 0 if start else size, chunk))
