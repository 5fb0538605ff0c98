"""Publishing that waits: what a publisher may still send, and what a subscriber lets it send (sans-IO).

Publisher and subscriber both ask for it. Each connection on the way has credit of its own, per alias: a position in bytes of frames
since the latest WAIT, up to which may be sent. A position can be said again at any time, so none that is lost is missed for long.

    publisher ── WAIT ──► relay ── WAIT ──► subscriber       credit: the least of what the subscribers let through
    publisher ◄── WINDOW ── relay ◄── WINDOW ── subscriber   a window: `FIRST_WINDOW` at first, less what waits in the queue
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from iris.core.inbound import Inbound, InFlow, UnknownKey, Window
from iris.core.interfaces import Sink, Waiter
from iris.wire import frames
from iris.wire.kinds import UNLIMITED, Kind

WhenFull = Literal["drop", "wait"]
"""Whether a publisher waits for subscribers that are slower, if both of them ask for it."""
FIRST_WINDOW: Final = 64 << 10
"""What may be sent before the first WINDOW, and how large a window is at first."""
MAX_WINDOW: Final = 4 << 20
GROWTH: Final = 4
"""Times the window before, while the subscriber keeps up."""
QUEUE_SHARE: Final = 4
"""All windows of a subscription together are at most its queue's bound divided by this, unless each is the smallest."""
MIN_QUEUE_BYTES: Final = 4 << 20
"""A subscription that publishers wait for has room for so much at least: a new one may get what other windows had allowed before."""


class Credit:
    """What a publisher may send to one topic."""

    __slots__ = ("limit", "sent", "serial", "waiters")

    def __init__(self) -> None:
        self.serial = 0
        """Of the latest WAIT."""
        self.limit = 0
        self.sent = 0
        """Bytes since the latest WAIT, as `limit` is counted."""
        self.waiters: list[Waiter] = []
        """Who is to be woken when there is more."""

    def wake(self) -> None:
        """Let those that wait look again."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Credits:
    """The credit of one session's publishers."""

    def __init__(self, send: Callable[[frames.Control], None] | None) -> None:
        """`send` sends a frame; None: the relay is too old to be asked, and there is no limit."""
        self._send = send
        self._by_alias: dict[int, Credit] = {}
        """By alias."""
        self._serial = 0
        """Of the latest WAIT."""

    def ask(self, credit: Credit, alias: int, *, stalled: bool = False) -> None:
        """Ask for credit: what was sent counts from here. `stalled`: a publisher has waited for as long as it does."""
        if self._send is None:
            credit.limit = UNLIMITED
            return
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        credit.serial, credit.sent = self._serial, 0
        credit.limit = 0 if stalled else FIRST_WINDOW
        self._by_alias[alias] = credit
        self._send(frames.Wait(alias, self._serial, stalled))

    def window(self, window: frames.Window) -> None:
        """The relay tells how much may be sent. What it said before the latest WAIT is void."""
        credit = self._by_alias.get(window.alias)
        if credit is not None and credit.serial == window.serial:
            credit.limit = window.limit
            credit.wake()

    def forget(self, alias: int) -> None:
        """An alias stands for something else now."""
        if self._by_alias:
            self._by_alias.pop(alias, None)

    def end(self) -> None:
        """The session has ended, or begins anew: whoever waits looks again."""
        credits, self._by_alias = self._by_alias, {}
        for credit in credits.values():
            credit.wake()


class Windows:
    """The credit that one session's subscriptions give. A window is renewed only when half of it is free."""

    def __init__(
        self, sinks: Callable[[InFlow], Sequence[Sink]], inbound: Inbound, send: Callable[[frames.Control], None]
    ) -> None:  # fmt: skip
        self._sinks = sinks
        self._flow = inbound.flow
        self._send = send
        self._flows: dict[int, InFlow] = {}
        """By alias: those whose publishers wait."""
        self._by_sender: dict[tuple[str, bytes], dict[int, InFlow]] = {}
        """(topic, sender id) -> alias -> the same."""
        self._limited = 0
        """How many of their windows have a limit."""

    def on_wait(self, wait: frames.Wait) -> None:
        """A publisher waits; raises PeerProtocolError for an alias that was not declared."""
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
        """A frame of `size` bytes came, and was delivered or dropped."""
        window.received += size
        if _may_be_half_free(window):
            self._review(flow, window)

    def freed(self, name: str, source: bytes) -> None:
        """A subscription has handled some of what it had of a publisher."""
        for flow in self._by_sender.get((name, source), {}).values():
            if flow.window is not None and _may_be_half_free(flow.window):
                self._review(flow, flow.window)

    def changed(self) -> None:
        """There are other subscriptions now."""
        for flow in self._flows.values():
            if flow.window is not None:
                self._review(flow, flow.window)

    def _review(self, flow: InFlow, window: Window, *, answer: bool = False) -> None:
        """Give the credit that there is, if it is worth a frame or an answer is due."""
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
            if 4 * held <= size <= window.limit:  # the subscriber is not what takes time
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
        """Forget whose publisher waited under an alias, which is asked for anew and may stand for something else; return it."""
        flow = self._flows.pop(alias, None)
        if flow is None:
            return None
        assert flow.window is not None  # it is there while the flow is listed
        self._limited -= flow.window.limited
        sender = (flow.name, flow.sender_id)
        flows = self._by_sender[sender]
        del flows[alias]
        if not flows:
            del self._by_sender[sender]
        return flow


def _may_be_half_free(window: Window) -> bool:
    """Whether half of a window may be free. Whether there is a limit at all changes with the subscriptions alone."""
    return window.limited and 2 * (window.received + window.bytes - window.limit) >= window.bytes
