"""Requests in both directions: from the client to any cluster, and from any caller to the client.

Between two bridges, headers carry the timeout of a request and the kind of its answer. A service of the
first Iris judges by itself whether a request has expired, and the text of a fault must arrive byte for
byte, however long it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import iris
from iris.core.message import foreign_bytes
from relay.bridges.iris1.config import Iris1Config
from relay.bridges.iris1.core.frames import Oversized, Payload
from relay.bridges.iris1.core.machine import MAX_TIMEOUT_MS, Machine
from relay.bridges.iris1.local import LocalClients, LocalRequest

TIMEOUT_HEADER: Final = "iris1-timeout-ms"
"""Header of a request: its caller's timeout in milliseconds. Native callers may set it as well."""
KIND_HEADER: Final = "iris1"
FAULT: Final = "fault"
NO_REPLY: Final = "timeout"
POLL_S: Final = 0.005
"""Pause between two checks for unanswered requests when a connection ends."""


class Requests:
    """The requests of one connection, in both directions."""

    def __init__(
        self, client: iris.Client, machine: Machine, config: Iris1Config, counters: Counter[str], local: LocalClients
    ) -> None:  # fmt: skip
        self._client = client
        self._machine = machine
        self._config = config
        self._counters = counters
        self._local = local
        self._loop = asyncio.get_running_loop()
        self._requesting: set[asyncio.Task[None]] = set()

    def request(
        self, id: int, cluster: str, payload: bytes, timeout_ms: int
    ) -> asyncio.Task[None] | None:
        """Send a request for the client and answer it once.

        Returns None if a member at this bridge gets it, else the task.
        """
        member = self._local.for_request(cluster, len(payload))
        if member is not None:
            local_request = LocalRequest(self._machine, id, self._counters, self._config)
            if local_request.begin(member, payload, max(timeout_ms, 1)):
                return None
        requesting = self._request(id, cluster, payload, timeout_ms)
        task = self._loop.create_task(requesting, name="iris1-request")
        self._requesting.add(task)
        task.add_done_callback(self._requesting.discard)
        return task

    def end(self) -> None:
        """Cancel the client's requests: it waits for no answers."""
        for task in list(self._requesting):
            task.cancel()

    async def _request(self, id: int, cluster: str, payload: bytes, timeout_ms: int) -> None:
        machine = self._machine
        timeout_ms = max(timeout_ms, 1)
        timeout = timeout_ms / 1000
        headers = {TIMEOUT_HEADER: str(timeout_ms)}
        try:
            async with asyncio.timeout(timeout + self._config.slack_s):
                # The request is sent before this waits at all, however short the timeout is.
                message: iris.Message = await self._client.request(
                    cluster, payload, timeout=timeout + self._config.grace_s, headers=headers, type=iris.Message
                )  # fmt: skip
        except iris.RemoteError as err:
            machine.reply(id, err.detail.encode(errors="backslashreplace"), success=False)
        except (TimeoutError, iris.NoMembers, iris.Overloaded, iris.ConnectionLost) as err:
            self._counters[f"requests unanswered: {_cause(err)}"] += 1
            machine.no_reply(id)
        except iris.IrisError as err:
            machine.reply(id, str(err).encode(errors="backslashreplace"), success=False)
        else:
            kind = (message.headers or {}).get(KIND_HEADER)
            if kind == NO_REPLY:
                machine.no_reply(id)
            else:
                machine.reply(id, foreign_bytes(message), success=kind != FAULT)

    async def finished(self) -> None:
        """Return when the client has its answers and has given its own."""
        while self._machine.pending or self._machine.dispatched:  # noqa: ASYNC110 - only at the end
            await asyncio.sleep(POLL_S)

    def on_request(self, request: iris.Request) -> None:
        """Dispatch a request to the client, which may answer at any time or not at all."""
        timeout_ms = _timeout_ms((request.headers or {}).get(TIMEOUT_HEADER))
        relayed = RelayRequest(request.defer(), self._counters, timeout_ms is not None)
        if timeout_ms is None:
            timeout_ms = round(self._config.native_timeout_s * 1000)
        id = self._machine.dispatch(relayed, request.payload, timeout_ms)
        if id is None:
            relayed.failed(
                f"the service is at capacity ({self._config.max_calls} requests) or is disconnecting"
            )
            return
        wait_s = timeout_ms / 1000 + self._config.grace_s
        relayed.timer = self._loop.call_later(wait_s, self._expired, id, relayed, wait_s)

    def _expired(self, id: int, relayed: RelayRequest, wait_s: float) -> None:
        self._machine.forget_dispatched(id)
        self._counters["services that did not answer"] += 1
        relayed.failed(f"the service did not answer within {wait_s:g} s")


class RelayRequest:
    """A request that came through the relay and was dispatched to the client."""

    __slots__ = ("_counters", "_deferred", "_from_bridge", "timer")

    def __init__(self, deferred: iris.Deferred, counters: Counter[str], from_bridge: bool) -> None:
        self._deferred = deferred
        self._counters = counters
        self._from_bridge = from_bridge
        self.timer: asyncio.TimerHandle | None = None

    def answered(self, success: bool, payload: Payload) -> None:
        """Pass the client's answer to the caller."""
        if isinstance(payload, Oversized):
            self._counters["oversized"] += 1
            success, payload = False, payload.text("reply").encode()
        self._end()
        if success:
            self._deferred.reply(payload)
        elif self._from_bridge:
            self._deferred.reply(iris.Reply(payload, {KIND_HEADER: FAULT}))
        else:
            self._deferred.fail(payload.decode(errors="backslashreplace"))

    def failed(self, reason: str) -> None:
        """Report to the caller that the client does not answer."""
        self._end()
        if self._from_bridge:
            self._deferred.reply(iris.Reply(b"", {KIND_HEADER: NO_REPLY}))
        else:
            self._deferred.fail(reason)

    def _end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


def _timeout_ms(text: str | None) -> int | None:
    """Return the timeout in a header, or None if it is not a number: any holder of the key can write
    anything there.
    """
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 10:
        return None
    return min(max(1, int(text)), MAX_TIMEOUT_MS)


def _cause(err: BaseException) -> str:
    match err:
        case iris.NoMembers():
            return "no members"
        case iris.Overloaded():
            return "overloaded"
        case iris.ConnectionLost():
            return "connection lost"
        case _:
            return "timeout"
