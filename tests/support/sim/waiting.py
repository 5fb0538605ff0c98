"""Publishing that waits, in a simulated session: the real `iris.core.credit`, with queues and handlers in virtual
time on either side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from iris.core.credit import Credit, Credits, Windows
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.kinds import Kind
from relay.core.credit import Credit as RelayCredit
from relay.core.credit import Flow
from relay.core.neighbor import RELEASED
from relay.core.router import Router

if TYPE_CHECKING:
    from support.sim.members import SimSession
    from support.sim.network import SimRelay

STALL_US: Final = 1_000_000
"""How long a publisher waits for credit with one message."""
LATE_US: Final = 1_000
"""Tolerance of that time."""
QUEUE_BYTES: Final = 4 << 20
"""Default queue limit of a subscription, in bytes."""


class SimSink:
    """A subscription that publishers wait for. It holds bundles, and handles one each `pace_us`."""

    waits = True

    def __init__(self, owner: Waiting, subscription: tuple[str, str, bytes], pace_us: int) -> None:
        self.pattern, self.group, self.key = subscription
        self.pace_us = pace_us
        self.limit_bytes = QUEUE_BYTES
        self.paused = False
        self.handled = 0
        """Number of bundles handled."""
        self.most_bytes = 0
        """Most bytes that were held at once."""
        self._owner = owner
        self._queue: deque[tuple[tuple[str, bytes], int]] = deque()
        self._held: dict[tuple[str, bytes], int] = {}
        self._busy = False

    def wants(self, flow: SimFlow) -> bool:
        """Return whether the subscription matches a flow."""
        there = self.group in flow.groups if self.group else flow.plain
        return (
            there and self.key == flow.key and self._owner.session.matches(self.pattern, flow.name)
        )

    def held(self, name: str, source: bytes) -> int:
        return self._held.get((name, source), 0)

    def take(self, name: str, source: bytes, size: int) -> None:
        """Hold a bundle until it is handled."""
        flow = (name, source)
        self._queue.append((flow, size))
        self._held[flow] = self._held.get(flow, 0) + size
        total = sum(self._held.values())
        self.most_bytes = max(self.most_bytes, total)
        if total > self.limit_bytes:
            self._owner.session.net.violate(f"a subscription of {self._owner.session} holds {total} bytes")  # fmt: skip
        self._go_on()

    def pause(self) -> None:
        """Handle nothing until `resume`."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._go_on()

    def _go_on(self) -> None:
        if self._queue and not self.paused and not self._busy:
            self._busy = True
            self._owner.session.net.clock.after(self.pace_us, self._handle)

    def _handle(self) -> None:
        self._busy = False
        if self.paused:
            return
        flow, size = self._queue.popleft()
        self.handled += 1
        self._held[flow] -= size
        if not self._held[flow]:
            del self._held[flow]
        if not self._owner.session.closed:
            self._owner.windows.freed(*flow)
            self._go_on()


class SimFlow:
    """A declaration of the relay, in the form that `Windows` needs."""

    is_local = False

    def __init__(self, declared: frames.Declare) -> None:
        self.name = declared.name
        self.key = declared.key_id
        self.sender_id = declared.sender_id
        self.plain = declared.plain
        self.groups = frozenset(declared.groups)
        self.window: Any = None


class SimPublisher:
    """A queue of messages for one topic: each is sent when there is credit, or after `STALL_US`."""

    def __init__(self, owner: Waiting, topic: str, key: bytes) -> None:
        self.topic = topic
        self.key = key
        self.credit = Credit()
        self.queue: deque[tuple[int, int]] = deque()
        """Bundles that are not sent yet, as (messages, bytes)."""
        self.sent: list[int] = []
        """Tags of sent bundles."""
        self.stalls = 0
        self._owner = owner
        self._since_us = 0
        """Time since which the next message waits; 0 if none waits."""
        self._turn = 0

    # The `Waiter` of its credit.

    def done(self) -> bool:
        return False

    def set_result(self, result: object, /) -> None:
        self._owner.session.net.clock.after(0, self.pump)

    def set_exception(self, exception: BaseException, /) -> None:
        raise AssertionError("nobody tells it so")

    def pump(self) -> None:
        """Send bundles while there is credit."""
        session = self._owner.session
        if session.closed or session.leaving or not session.relay.alive:
            self.queue.clear()
        while self.queue and self.credit.sent < self.credit.limit:
            self._send()
        if not self.queue:
            self._since_us = 0
        elif not self._since_us:
            self._wait()
        if self.queue and self not in self.credit.waiters:
            self.credit.waiters.append(self)

    def _send(self) -> None:
        count, size = self.queue.popleft()
        self._since_us = 0
        self.sent.append(self._owner.session.publish(self.topic, count, key=self.key, size=size))

    def _wait(self) -> None:
        net = self._owner.session.net
        self._since_us = net.now_us
        self._turn += 1
        net.clock.after(STALL_US, self._stalled, self._turn)

    def _stalled(self, turn: int) -> None:
        """Send the next message without credit, because it has waited for `STALL_US`."""
        session = self._owner.session
        if turn != self._turn or not self._since_us:
            return
        if session.closed or session.leaving or not session.relay.alive:
            # No credit can come; see `pump`.
            self.queue.clear()
            self._since_us = 0
            return
        self.stalls += 1
        session.net.ledger.stalls += 1
        session.net.note(f"{session} has stalled with {self.topic!r}")
        alias = session.alias(Kind.PUBLISH, self.topic, self.key)
        self._owner.credits.ask(self.credit, alias, stalled=True)
        self._send()
        self.pump()

    def check(self) -> None:
        """Check that no message waits for longer than `STALL_US`."""
        session = self._owner.session
        late = session.net.now_us - self._since_us > STALL_US + LATE_US
        if self.queue and self._since_us and late and not session.closed:
            session.net.violate(f"{session} still waits to publish to {self.topic!r}")


class Waiting:
    """The publishers of a session that wait, and its subscriptions that are waited for."""

    def __init__(self, session: SimSession) -> None:
        self.session = session
        self.sinks: dict[tuple[str, str, bytes], SimSink] = {}
        self.publishers: dict[tuple[str, bytes], SimPublisher] = {}
        self.renewals = 0
        """How often the relay asked for credit again."""
        self.mute = 0
        """Number of WINDOW frames to lose."""
        self.muted = 0
        self.credits = Credits(self._say)
        inbound: Any = self  # of which `Windows` uses `flow` alone
        self.windows = Windows(self._sinks, inbound, self._say)
        self._flows: dict[int, SimFlow] = {}

    def _say(self, body: frames.Control) -> None:
        if self.mute and isinstance(body, frames.Window):
            self.mute -= 1
            self.muted += 1
            return
        self.session.say(encode_control(body))

    def flow(self, alias: int, kind: int) -> Any:
        return self._flows[alias]

    def _sinks(self, flow: Any) -> list[Any]:
        return [sink for sink in self.sinks.values() if sink.wants(flow)]

    # -- subscribing -----------------------------------------------------------------------------------------

    def subscribe(self, subscription: tuple[str, str, bytes], pace_us: int) -> SimSink:
        sink = self.sinks[subscription] = SimSink(self, subscription, pace_us)
        self.windows.changed()
        return sink

    def unsubscribe(self, subscription: tuple[str, str, bytes]) -> None:
        if self.sinks.pop(subscription, None) is not None:
            self.windows.changed()

    def declared(self, body: frames.Declare) -> None:
        """Note a declaration of an alias, or a new one."""
        if body.kind == Kind.PUBLISH:
            self._flows[body.alias] = SimFlow(body)

    def arrived(self, alias: int, size: int, taken: bool) -> None:
        """Note a received bundle, which was accepted (`taken`) or dropped."""
        flow = self._flows[alias]
        if taken and self.sinks:
            for sink in self._sinks(flow):
                sink.take(flow.name, flow.sender_id, size)
        if flow.window is not None:
            of_flow: Any = flow
            self.windows.received(of_flow, flow.window, size)

    def asked(self, wait: frames.Wait) -> None:
        """Answer the relay's request for credit."""
        if self._flows[wait.alias].window is not None:
            self.renewals += 1
            self.session.net.ledger.renewals += 1
        self.windows.on_wait(wait)

    # -- publishing ------------------------------------------------------------------------------------------

    def publish(self, topic: str, key: bytes, count: int, size: int) -> SimPublisher:
        publisher = self.publishers.get((topic, key))
        if publisher is None:
            publisher = self.publishers[(topic, key)] = SimPublisher(self, topic, key)
            self.credits.ask(publisher.credit, self.session.alias(Kind.PUBLISH, topic, key))
        publisher.queue.append((count, size))
        publisher.pump()
        return publisher

    def sent(self, topic: str, key: bytes, size: int) -> None:
        """Note a sent frame under an alias that may use credit."""
        publisher = self.publishers.get((topic, key))
        if publisher is not None:
            publisher.credit.sent += size

    @property
    def queued(self) -> int:
        """Number of bundles that wait to be sent."""
        return sum(len(publisher.queue) for publisher in self.publishers.values())


# -- what a relay keeps ----------------------------------------------------------------------------------------


def flows(router: Router) -> Iterator[Flow]:
    """Yield the flows of all routes that the neighbors of a relay have declared."""
    for neighbor in router.neighbors.values():
        for route in neighbor.routes:
            if route is not None and isinstance(route.flow, Flow):
                yield route.flow


def left_out(router: Router) -> list[RelayCredit]:
    """Return the credits of the neighbors that a relay leaves out."""
    return [credit for flow in flows(router) for credit in flow.credits.values() if credit.left_out]


def check_credits(relay: SimRelay) -> None:
    """Check, without faults and with all handled, that nobody waits and no state of ended sessions is left."""
    router, net = relay.router, relay.net
    credits = router.credits
    if credits.waiting:
        net.violate(f"{relay} still has {credits.waiting} publishers wait")
    there = set(router.neighbors)
    if gone := set(credits._credits) - there:
        net.violate(f"{relay} keeps credits of {len(gone)} neighbors that are gone")
    for known in credits._credits.values():
        for credit in known.values():
            if not credit.flows or any(flow.route.version == RELEASED for flow in credit.flows):
                net.violate(f"{relay} keeps a credit for a publisher that is gone")
    for flow in flows(router):
        if gone := {number for number, *_ in flow.credits} - there:
            net.violate(
                f"{relay} keeps {len(gone)} credits of neighbors that are gone for {flow.route.name!r}"
            )
        if len(flow.credits) != len({id(c) for members in flow.by_group.values() for c in members}):
            net.violate(
                f"{relay} keeps slots of credits that it does not have for {flow.route.name!r}"
            )
