"""Traffic between clients of one bridge stays in the bridge: members, subscribers, casts and calls.

A member at this bridge is preferred while it has room. Otherwise the relay chooses among all members.
Events and broadcasts reach the bridge's clients here and everybody else through the relay. The bridge
drops the copies that the relay sends back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

import iris
from iris.core.local_senders import LocalSenders
from relay.bridges.iris1.config import Iris1Config
from relay.bridges.iris1.core import codec
from relay.bridges.iris1.core.frames import Oversized, Payload
from relay.bridges.iris1.core.machine import Machine
from relay.bridges.iris1.local_tunnel import LocalTunnelEnd

SHARED_REQUESTS: Final = iris.Limits().concurrency
"""Unanswered requests that a member at this bridge may have while others serve its cluster as well: as
many as the relay would give it.
"""
SHARED_BYTES: Final = 16 << 20
"""Bytes of unanswered requests that a member at this bridge may have.

Without any, it accepts a request of any size.
"""
MAX_CANDIDATES: Final = 8
"""Members compared for one call: the one with the fewest unanswered requests or tunnels gets it."""


class LocalClient(Protocol):
    """A client of this bridge as others see it; implemented by `relay.bridges.iris1.connection.ClientConnection`."""

    machine: Machine
    client: iris.Client | None
    local_request_bytes: int
    """Bytes of unanswered requests from other clients of the bridge."""

    def accept_tunnel(self, tunnel: LocalTunnelEnd) -> None:
        """Carry a tunnel that another client opened to this one."""


class LocalGroup:
    """The clients of this bridge that serve one cluster."""

    def __init__(self) -> None:
        self.members: list[LocalClient] = []
        self.total: int | None = None
        """Members of the cluster that the relay knows of; None until it has answered."""
        self.turn = 0
        self.watch: tuple[LocalClient, asyncio.Task[None]] | None = None

    @property
    def alone(self) -> bool:
        """Whether only clients of this bridge serve the cluster."""
        return self.total is not None and self.total <= len(self.members)


class LocalClients:
    """The members and subscribers among the clients of one bridge."""

    def __init__(self, config: Iris1Config) -> None:
        self.local_senders = LocalSenders()
        self._config = config
        self._groups: dict[str, LocalGroup] = {}
        self._topics: dict[str, dict[LocalClient, bytes]] = {}
        """Subscribers: topic name -> client -> the name that this client uses for the topic."""

    # -- who is here -----------------------------------------------------------------------------------------

    def join(self, cluster: str, member: LocalClient) -> None:
        """Add a client that serves a cluster."""
        group = self._groups.setdefault(cluster, LocalGroup())
        group.members.append(member)
        self._watch(cluster, group)

    def leave(self, cluster: str, member: LocalClient) -> None:
        """Remove a client from its cluster, so that it gets no new calls. Idempotent."""
        group = self._groups.get(cluster)
        if group is None or member not in group.members:
            return
        group.members.remove(member)
        if group.watch is not None and group.watch[0] is member:
            group.watch[1].cancel()
            group.watch = None
        if group.members:
            self._watch(cluster, group)
        else:
            del self._groups[cluster]

    def _watch(self, cluster: str, group: LocalGroup) -> None:
        """Have one of the members watch how many members the relay knows of."""
        if group.watch is None:
            member = group.members[0]
            assert member.client is not None  # a member has a session
            watching = self._count(member.client, cluster, group)
            task = asyncio.get_running_loop().create_task(watching, name="iris1-members")
            group.watch = member, task

    async def _count(self, client: iris.Client, cluster: str, group: LocalGroup) -> None:
        try:
            async for members in client.watch_members(cluster):
                group.total = len(members)
        except iris.IrisError:
            group.total = None  # other members are possible, so share calls with them

    def subscribe(self, name: str, topic: bytes, subscriber: LocalClient) -> None:
        """Add a client that subscribes to a topic."""
        self._topics.setdefault(name, {})[subscriber] = topic

    def unsubscribe(self, name: str, subscriber: LocalClient) -> None:
        """Remove a subscriber. Idempotent."""
        subscribers = self._topics.get(name, {})
        subscribers.pop(subscriber, None)
        if not subscribers:
            self._topics.pop(name, None)

    # -- casts -----------------------------------------------------------------------------------------------

    def publish(self, name: str, event: bytes) -> None:
        """Send an event to all clients of this bridge that subscribe to its topic."""
        subscribers = self._topics.get(name)
        if subscribers is not None:
            frame = b""
            for subscriber, topic in list(subscribers.items()):
                frame = frame or codec.publish(topic, event)  # a name stands for one topic
                subscriber.machine.send(frame)

    def broadcast(self, cluster: str, message: bytes) -> None:
        """Send a broadcast to all members at this bridge."""
        group = self._groups.get(cluster)
        if group is not None:
            frame = codec.broadcast(message)
            for member in list(group.members):
                member.machine.send(frame)

    # -- calls -----------------------------------------------------------------------------------------------

    def for_request(self, cluster: str, size: int) -> LocalClient | None:
        """Return the member at this bridge that gets a request of `size` bytes, or None if the relay
        must choose.

        While others serve the cluster as well, a member here is full with `SHARED_REQUESTS` unanswered
        requests.
        """
        group = self._groups.get(cluster)
        if group is None:
            return None
        most = self._config.max_calls if group.alone else SHARED_REQUESTS
        member = self._choose(group, most, lambda one: one.machine.dispatched)
        if (
            member is not None
            and member.local_request_bytes
            and member.local_request_bytes + size > SHARED_BYTES
        ):
            return None
        return member

    def for_tunnel(self, cluster: str) -> LocalClient | None:
        """Return the member at this bridge that gets a tunnel, or None if the relay must choose."""
        group = self._groups.get(cluster)
        if group is None:
            return None
        return self._choose(group, self._config.max_tunnels, lambda one: one.machine.tunnel_count)

    @staticmethod
    def _choose(
        group: LocalGroup, most: int, load: Callable[[LocalClient], int]
    ) -> LocalClient | None:
        members = group.members
        group.turn = turn = (group.turn + 1) % len(members)
        best, least = None, most
        for step in range(turn, turn + min(len(members), MAX_CANDIDATES)):
            member = members[step % len(members)]
            loaded = load(member)
            if loaded < least:
                best, least = member, loaded
                if not loaded:
                    break
        return best


class LocalRequest:
    """A request from one client of the bridge to another. It is answered exactly once."""

    __slots__ = (
        "_awaited",
        "_counters",
        "_grace_s",
        "_id",
        "_machine",
        "_service",
        "_size",
        "_slack_s",
        "_timer",
    )

    def __init__(
        self, machine: Machine, id: int, counters: Counter[str], config: Iris1Config
    ) -> None:
        self._machine = machine
        self._id = id
        self._counters = counters
        self._grace_s = config.grace_s
        self._slack_s = config.slack_s
        self._service: tuple[LocalClient, int]
        self._size: int
        self._timer: asyncio.TimerHandle
        self._awaited = True
        """Whether the caller still waits for the answer."""

    def begin(self, service: LocalClient, payload: bytes, timeout_ms: int) -> bool:
        """Dispatch the request to the service; return False if the service accepts none."""
        dispatch_id = service.machine.dispatch(self, payload, timeout_ms)
        if dispatch_id is None:
            return False
        self._service = service, dispatch_id
        self._size = len(payload)
        service.local_request_bytes += self._size
        wait_s = timeout_ms / 1000 + self._slack_s
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._timed_out)
        return True

    def answered(self, success: bool, payload: Payload) -> None:
        """Pass the service's answer to the caller."""
        self._end()
        if self._awaited:
            if isinstance(payload, Oversized):
                self._counters["oversized"] += 1
                success, payload = False, payload.text("reply").encode()
            self._machine.reply(self._id, payload, success=success)

    def failed(self, reason: str) -> None:
        """Answer the caller with a timeout: the service has left."""
        self._end()
        if self._awaited:
            self._machine.no_reply(self._id)

    def _end(self) -> None:
        self._timer.cancel()
        self._service[0].local_request_bytes -= self._size

    def _timed_out(self) -> None:
        if self._machine.is_pending(self._id):
            self._counters["requests unanswered: timeout"] += 1
            self._machine.no_reply(self._id)
        self._awaited = False  # the caller may use its id for another request now
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._given_up)

    def _given_up(self) -> None:
        self._end()
        service, dispatch_id = self._service
        service.machine.forget_dispatched(dispatch_id)
        self._counters["services that did not answer"] += 1
