"""Credit of publishers that wait for slow subscribers, as the publisher and as the subscriber see it (sans-IO).

Publishers wait only if both publisher and subscriber enable it. Each connection on the route has its own credit per
alias: the number of frame bytes, counted from the latest WAIT, that may be sent. This limit is absolute, so it can be
sent again at any time and a lost WINDOW does no lasting harm.

    publisher ── WAIT ──► relay ── WAIT ──► subscriber       credit: the smallest limit that a subscriber granted
    publisher ◄── WINDOW ── relay ◄── WINDOW ── subscriber   window: `FIRST_WINDOW` at first, less what its queue holds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from iris.core.inbound import Inbound, InFlow, UnknownKey, Window
from iris.core.interfaces import Sink, Waiter
from iris.wire import frames
from iris.wire.kinds import UNLIMITED, Kind

WhenFull = Literal["drop", "wait"]
"""What a publisher does while a subscriber is full. It waits only for subscriptions that choose "wait", too."""
WhenQueueFull = Literal["drop-new", "drop-old", "close", "wait"]
"""What a subscription does when its queue is full."""
FIRST_WINDOW: Final = 64 << 10
"""Bytes that may be sent before the first WINDOW, and the initial window size."""
MAX_WINDOW: Final = 4 << 20
GROWTH: Final = 4
"""Factor by which a window grows while the subscriber keeps up."""
QUEUE_SHARE: Final = 4
"""All windows of a subscription together are at most its queue's limit divided by this, unless each is
`FIRST_WINDOW`."""
MIN_QUEUE_BYTES: Final = 4 << 20
"""Smallest queue of a subscription for which publishers wait, because earlier windows may still allow
bytes to arrive."""


class Credit:
    """A publisher's credit for one topic: it may send while `sent` < `limit`."""

    __slots__ = ("limit", "sent", "serial", "waiters")

    def __init__(self) -> None:
        self.serial = 0
        """Serial of the latest WAIT."""
        self.limit = 0
        """Frame bytes that may be sent, counted from the latest WAIT."""
        self.sent = 0
        """Frame bytes sent since the latest WAIT."""
        self.waiters: list[Waiter] = []
        """Publishers to wake when the credit grows."""

    def wake(self) -> None:
        """Wake all waiters, so that they check the credit again."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Credits:
    """Credit of all topics that one session publishes to and waits for."""

    def __init__(self, send: Callable[[frames.Control], None]) -> None:
        """`send` sends a control frame."""
        self._send = send
        self._by_alias: dict[int, Credit] = {}
        """Credit requested with WAIT: alias -> credit."""
        self._serial = 0
        """Serial of the latest WAIT."""

    def ask(self, credit: Credit, alias: int, *, stalled: bool = False) -> None:
        """Send WAIT for `alias`, from which bytes are counted. `stalled`: a publisher has waited up to its timeout."""
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        credit.serial, credit.sent = self._serial, 0
        credit.limit = 0 if stalled else FIRST_WINDOW
        self._by_alias[alias] = credit
        self._send(frames.Wait(alias, self._serial, stalled))

    def window(self, window: frames.Window) -> None:
        """Apply a WINDOW from the relay. One that answers an earlier WAIT is ignored."""
        credit = self._by_alias.get(window.alias)
        if credit is not None and credit.serial == window.serial:
            credit.limit = window.limit
            credit.wake()

    def forget(self, alias: int) -> None:
        """Remove an alias that was declared for another address."""
        if self._by_alias:
            self._by_alias.pop(alias, None)

    def end(self) -> None:
        """Wake all waiters, because the session has ended or all its sender ids change."""
        credits, self._by_alias = self._by_alias, {}
        for credit in credits.values():
            credit.wake()


class Windows:
    """Credit that one session's subscriptions grant to publishers. A window is renewed only when half of it is free."""

    def __init__(
        self, sinks: Callable[[InFlow], Sequence[Sink]], inbound: Inbound, send: Callable[[frames.Control], None]
    ) -> None:  # fmt: skip
        self._sinks = sinks
        self._flow = inbound.flow
        self._send = send
        self._flows: dict[int, InFlow] = {}
        """Flows whose publishers wait: alias -> flow."""
        self._by_sender: dict[tuple[str, bytes], dict[int, InFlow]] = {}
        """The same flows: (topic, sender id) -> alias -> flow."""
        self._limited = 0
        """Number of their windows that have a limit."""

    def on_wait(self, wait: frames.Wait) -> None:
        """Grant credit to a publisher that waits. Raises PeerProtocolError for an alias that was not declared."""
        before = self._forget(wait.alias)
        try:
            flow = self._flow(wait.alias, Kind.PUBLISH)
        except UnknownKey:
            self._send(frames.Window(wait.alias, wait.serial, UNLIMITED))
            return
        size = before.window.bytes if before is flow and before.window is not None else FIRST_WINDOW
        flow.window = Window(wait.alias, wait.serial, size)
        self._flows[wait.alias] = flow
        self._by_sender.setdefault((flow.name, flow.sender_id), {})[wait.alias] = flow
        self._review(flow, flow.window, answer=True)

    def received(self, flow: InFlow, window: Window, size: int) -> None:
        """Count a frame of `size` bytes that was delivered or dropped."""
        window.received += size
        if _may_be_half_free(window):
            self._review(flow, window)

    def freed(self, name: str, source: bytes) -> None:
        """Renew windows after a subscription has handled messages of a publisher."""
        for flow in self._by_sender.get((name, source), {}).values():
            if flow.window is not None and _may_be_half_free(flow.window):
                self._review(flow, flow.window)

    def changed(self) -> None:
        """Renew all windows after the subscriptions have changed."""
        for flow in self._flows.values():
            if flow.window is not None:
                self._review(flow, flow.window)

    def _review(self, flow: InFlow, window: Window, *, answer: bool = False) -> None:
        """Send the credit that is free, if it is worth a frame or if `answer` is set."""
        waiting = () if flow.is_local else [sink for sink in self._sinks(flow) if sink.waits]
        if not waiting:
            if answer or window.limit != UNLIMITED:
                self._send_window(window, UNLIMITED)
            return
        queue_bytes = min(sink.limit_bytes for sink in waiting)
        most = max(FIRST_WINDOW, queue_bytes // QUEUE_SHARE // max(1, self._limited))
        size = min(window.bytes, most)
        held = max(sink.held(flow.name, flow.sender_id) for sink in waiting)
        free = size - held
        if 2 * free < size:
            free = 0
        gained = window.received + free - window.limit
        if answer or window.limit == UNLIMITED or 2 * gained >= size:
            if 4 * held <= size <= window.limit:  # the subscriber is not the bottleneck
                size = min(GROWTH * size, most, MAX_WINDOW)
                free = max(0, size - held)
            window.bytes = size
            self._send_window(window, window.received + free)

    def _send_window(self, window: Window, limit: int) -> None:
        self._limited += (limit != UNLIMITED) - window.limited
        window.limited = limit != UNLIMITED
        window.limit = limit
        self._send(frames.Window(window.alias, window.serial, limit))

    def _forget(self, alias: int) -> InFlow | None:
        """Remove and return the flow of an alias, which may have been declared for another address since."""
        flow = self._flows.pop(alias, None)
        if flow is None:
            return None
        assert flow.window is not None  # every listed flow has one
        self._limited -= flow.window.limited
        sender = (flow.name, flow.sender_id)
        flows = self._by_sender[sender]
        del flows[alias]
        if not flows:
            del self._by_sender[sender]
        return flow


def _may_be_half_free(window: Window) -> bool:
    """Return whether half of a limited window may be free.

    A window without a limit gets one only when subscriptions change.
    """
    return window.limited and 2 * (window.received + window.bytes - window.limit) >= window.bytes
