"""What programs of one bridge say to each other stays in the bridge: who serves and who subscribes here, and calls between them.

A member of the bridge is preferred while it has room; when it has not, or none is here, the relay chooses, among all. Events and
broadcasts reach the bridge's programs here and everybody else through the relay; the copies that it brings back are dropped.
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
from relay.bridges.iris1.near import NearEnd

SHARED: Final = iris.Limits().concurrency
"""Requests that a member here owes answers for, as many as the relay would let it have, when others serve its cluster, too."""
SHARED_BYTES: Final = 16 << 20
"""Bytes of requests that a member here has not answered. An empty one takes a request of any size."""
TRIED: Final = 8
"""Members that are looked at for a call: the one that owes the fewest answers gets it."""


class Local(Protocol):
    """A client of this bridge, to the others: see `relay.bridges.iris1.conversation.Conversation`."""

    machine: Machine
    client: iris.Client | None
    near_bytes: int
    """Bytes of requests of other clients that it has not answered."""

    def accept_tunnel(self, tunnel: NearEnd) -> None:
        """Carry a tunnel that another client opened to it."""


class Group:
    """The members of one cluster that are programs of the bridge."""

    def __init__(self) -> None:
        self.members: list[Local] = []
        self.everywhere: int | None = None
        """Members that the relay knows; None: it has not said so yet."""
        self.turn = 0
        self.watch: tuple[Local, asyncio.Task[None]] | None = None

    @property
    def alone(self) -> bool:
        """Whether nobody else serves this cluster."""
        return self.everywhere is not None and self.everywhere <= len(self.members)


class Locals:
    """Who serves and who subscribes, of one bridge's programs."""

    def __init__(self, config: Iris1Config) -> None:
        self.local_senders = LocalSenders()
        self._config = config
        self._groups: dict[str, Group] = {}
        self._topics: dict[str, dict[Local, bytes]] = {}
        """By name, who hears it, and what that topic is called there."""

    # -- who is here -----------------------------------------------------------------------------------------

    def join(self, cluster: str, member: Local) -> None:
        """Somebody serves from now on."""
        group = self._groups.setdefault(cluster, Group())
        group.members.append(member)
        self._watch(cluster, group)

    def leave(self, cluster: str, member: Local) -> None:
        """It takes nothing new. Idempotent."""
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

    def _watch(self, cluster: str, group: Group) -> None:
        """Have one of the members ask the relay how many there are in all."""
        if group.watch is None:
            member = group.members[0]
            assert member.client is not None  # it serves
            watching = self._count(member.client, cluster, group)
            task = asyncio.get_running_loop().create_task(watching, name="iris1-members")
            group.watch = member, task

    async def _count(self, client: iris.Client, cluster: str, group: Group) -> None:
        try:
            async for members in client.watch_members(cluster):
                group.everywhere = len(members)
        except iris.IrisError:
            group.everywhere = None  # others may be there: ours share with them

    def subscribe(self, name: str, topic: bytes, subscriber: Local) -> None:
        """Somebody hears a topic from now on."""
        self._topics.setdefault(name, {})[subscriber] = topic

    def unsubscribe(self, name: str, subscriber: Local) -> None:
        """It does not any more. Idempotent."""
        subscribers = self._topics.get(name, {})
        subscribers.pop(subscriber, None)
        if not subscribers:
            self._topics.pop(name, None)

    # -- casts -----------------------------------------------------------------------------------------------

    def publish(self, name: str, event: bytes) -> None:
        """Hand an event to everybody here who hears its topic."""
        subscribers = self._topics.get(name)
        if subscribers is not None:
            frame = b""
            for subscriber, topic in list(subscribers.items()):
                frame = frame or codec.publish(topic, event)  # a name stands for one topic
                subscriber.machine.send(frame)

    def broadcast(self, cluster: str, message: bytes) -> None:
        """Hand a broadcast to every member here."""
        group = self._groups.get(cluster)
        if group is not None:
            frame = codec.broadcast(message)
            for member in list(group.members):
                member.machine.send(frame)

    # -- calls -----------------------------------------------------------------------------------------------

    def for_request(self, cluster: str, size: int) -> Local | None:
        """Return the member here that is to get a request of `size` bytes; None: the relay is to choose.

        While others serve the cluster, too, a member here is full with as many requests as the relay would let it have.
        """
        group = self._groups.get(cluster)
        if group is None:
            return None
        most = self._config.max_calls if group.alone else SHARED
        member = self._choose(group, most, lambda one: one.machine.owed)
        if member is not None and member.near_bytes and member.near_bytes + size > SHARED_BYTES:
            return None
        return member

    def for_tunnel(self, cluster: str) -> Local | None:
        """Return the member here that is to get a tunnel; None: the relay is to choose."""
        group = self._groups.get(cluster)
        if group is None:
            return None
        return self._choose(group, self._config.max_tunnels, lambda one: one.machine.tunnels)

    @staticmethod
    def _choose(group: Group, most: int, load: Callable[[Local], int]) -> Local | None:
        members = group.members
        group.turn = turn = (group.turn + 1) % len(members)
        best, least = None, most
        for step in range(turn, turn + min(len(members), TRIED)):
            member = members[step % len(members)]
            loaded = load(member)
            if loaded < least:
                best, least = member, loaded
                if not loaded:
                    break
        return best


class LocalCall:
    """A request of one program to another, of the same bridge. It is the second one's debt, and answered once."""

    __slots__ = (
        "_counters",
        "_grace_s",
        "_id",
        "_machine",
        "_service",
        "_size",
        "_slack_s",
        "_timer",
        "_waited",
    )

    def __init__(
        self, machine: Machine, id: int, counters: Counter[str], config: Iris1Config
    ) -> None:
        self._machine = machine
        self._id = id
        self._counters = counters
        self._grace_s = config.grace_s
        self._slack_s = config.slack_s
        self._service: tuple[Local, int]
        self._size: int
        self._timer: asyncio.TimerHandle
        self._waited = True
        """Its caller waits for the answer."""

    def begin(self, service: Local, payload: bytes, timeout_ms: int) -> bool:
        """Hand it to the service; False: that takes none."""
        theirs = service.machine.call(self, payload, timeout_ms)
        if theirs is None:
            return False
        self._service = service, theirs
        self._size = len(payload)
        service.near_bytes += self._size
        wait_s = timeout_ms / 1000 + self._slack_s
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._timed_out)
        return True

    def answered(self, success: bool, payload: Payload) -> None:
        """The service answered."""
        self._end()
        if self._waited:
            if isinstance(payload, Oversized):
                self._counters["oversized"] += 1
                success, payload = False, payload.text("reply").encode()
            self._machine.reply(self._id, payload, success=success)

    def give_back(self, reason: str) -> None:
        """The service is gone."""
        self._end()
        if self._waited:
            self._machine.no_reply(self._id)

    def _end(self) -> None:
        self._timer.cancel()
        self._service[0].near_bytes -= self._size

    def _timed_out(self) -> None:
        if self._machine.waits_for(self._id):
            self._counters["requests unanswered: timeout"] += 1
            self._machine.no_reply(self._id)
        self._waited = False  # the caller may give its id to another request
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._given_up)

    def _given_up(self) -> None:
        self._end()
        service, theirs = self._service
        service.machine.forget_call(theirs)
        self._counters["services that did not answer"] += 1
