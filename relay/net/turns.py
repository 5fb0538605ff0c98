"""The share of a turn: how long the relay handles what one connection has sent before others get their turn.

    bytes ──► frames, for at most SHARE_NS ── more are here ──► `Turns`: reading pauses, and goes on in the next turn
                                                                one connection of each user after the other,
                                                                for at most ROUND_NS of a turn together

A connection that sends little is read in every turn, whatever waits here. What waits for its turn counts as heard:
see `relay.core.ports.Port.unread`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final, Protocol

SHARE_NS: Final = 1_000_000
"""How long one connection is handled at a stretch. A single frame is always handled whole."""
CONTROL_NS: Final = SHARE_NS // 4
"""The same for a connection that sends control frames, which are seldom urgent and cost more."""
ROUND_NS: Final = 4_000_000
"""How long connections that wait for their turn are handled in one turn, all together."""

PEER: Final = 1
TURN: Final = 2
"""Why a connection is not read: its peer does not read what it is sent, or it waits for its next turn."""


class Waiting(Protocol):
    """A connection of which more was received than fits in its share of a turn. Its reading is paused."""

    @property
    def turn_user(self) -> str:
        """The user in whose place it waits."""

    def go_on(self) -> bool:
        """Handle more, for at most `SHARE_NS`; return whether it has to wait again."""


class Turns:
    """The connections of one relay that wait for their turn. Users take turns, and so do the connections of a user."""

    __slots__ = ("_loop", "_scheduled", "_users", "pauses")

    def __init__(self) -> None:
        self._users: dict[str, deque[Waiting]] = {}
        """User -> connections that wait, in the order of their turns. The first user is next."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self.pauses = 0
        """How often a connection had to wait for its next turn."""

    def wait(self, connection: Waiting) -> None:
        """Handle more of a connection in the next turn. It must not wait already."""
        self.pauses += 1
        self._users.setdefault(connection.turn_user, deque()).append(connection)
        if not self._scheduled:
            self._scheduled = True
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._turn)

    def __len__(self) -> int:
        return sum(map(len, self._users.values()))

    def _turn(self) -> None:
        self._scheduled = False
        until_ns = time.monotonic_ns() + ROUND_NS
        again: list[Waiting] = []
        while self._users and time.monotonic_ns() < until_ns:
            user = next(iter(self._users))
            connections = self._users.pop(user)
            connection = connections.popleft()
            if connections:
                self._users[user] = connections  # behind all others
            if connection.go_on():
                again.append(connection)
        for connection in again:
            self.wait(connection)
        if self._users and not self._scheduled:
            self._scheduled = True
            assert self._loop is not None
            self._loop.call_soon(self._turn)


class Turn:
    """The share of one connection, and why it is not read at present."""

    __slots__ = ("_owner", "_pauses", "_since_us", "_transport", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._owner: Waiting | None = None
        """The connection, from `begin` to `end`: it refers to this object, too."""
        self._transport: asyncio.Transport | None = None
        self._since_us = 0
        """When its share of this turn began, if more may be read in the same turn; else 0."""
        self._pauses = 0

    def begin(self, owner: Waiting, transport: asyncio.Transport) -> None:
        """Pause and resume `transport` for `owner` from now on: its connection is made."""
        self._owner, self._transport = owner, transport

    def end(self) -> None:
        """Pause and resume nothing any more: the connection has ended. Idempotent."""
        self._owner = self._transport = None

    def has_time(self, begun_us: int, share_ns: int = SHARE_NS) -> bool:
        """Whether more may be handled in this turn of what was read at `begun_us`."""
        if self._since_us:
            begun_us = self._since_us
        return time.monotonic_ns() < 1000 * begun_us + share_ns and not self._pauses & PEER

    def hold(self, begun_us: int) -> None:
        """Until the event loop has made a turn, count what is read in the share that began at `begun_us`."""
        if not self._since_us:
            self._since_us = begun_us
            asyncio.get_running_loop().call_soon(self.release)

    def release(self) -> None:
        """Let the next read begin a share."""
        self._since_us = 0

    def wait(self) -> None:
        """Read no more, and let the owner go on in the next turn, or once the peer reads again."""
        self.pause(TURN)
        if not self._pauses & PEER and self._owner is not None:
            self._turns.wait(self._owner)

    @property
    def paused(self) -> bool:
        """Whether the connection is not read at present."""
        return self._pauses > 0

    @property
    def peer_is_behind(self) -> bool:
        """Whether it is not read because the peer does not read."""
        return self._pauses & PEER > 0

    def pause(self, why: int) -> None:
        """Do not read from now on. Idempotent."""
        transport = self._transport
        if transport is not None and not self._pauses and not transport.is_closing():
            transport.pause_reading()
        self._pauses |= why

    def resume(self, why: int) -> None:
        """Read again, unless there is another reason not to. Idempotent."""
        if not self._pauses & why:
            return
        self._pauses &= ~why
        owner, transport = self._owner, self._transport
        if owner is None or transport is None:
            return
        if self._pauses == TURN:
            self._turns.wait(owner)
        elif not self._pauses and not transport.is_closing():
            transport.resume_reading()
