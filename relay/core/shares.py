"""Counters of one session's and one user's calls in flight at a link or WAN connection. `quotas` sets their limits."""

from __future__ import annotations


class UserShare:
    """Calls of all sessions of one user in flight at a link or WAN connection.

    It removes itself from `users` when unused.
    """

    __slots__ = ("_user", "_users", "held", "sessions")

    def __init__(self, users: dict[str, UserShare], user: str) -> None:
        self.held = 0
        self.sessions = 0
        """Number of shares of sessions that still exist. Calls of a session that left stay in `held` until they end."""
        self._users = users
        self._user = user
        users[user] = self

    def forget_if_done(self) -> None:
        """Remove this share if it counts no calls and no session can add one."""
        if not self.held and not self.sessions:
            self._users.pop(self._user, None)


class Share:
    """Calls of one session in flight at a link or WAN connection."""

    __slots__ = ("held", "whole")

    def __init__(self, whole: UserShare) -> None:
        self.held = 0
        self.whole = whole
        whole.sessions += 1

    def add(self, count: int) -> None:
        """Count calls that were dispatched."""
        self.held += count
        self.whole.held += count

    def remove(self, count: int = 1) -> None:
        """Count calls that ended."""
        self.held -= count
        whole = self.whole
        whole.held -= count
        if not whole.sessions:
            whole.forget_if_done()

    def close(self) -> None:
        """End the session's part. Its calls in flight stay counted for its user."""
        self.whole.sessions -= 1
        self.whole.forget_if_done()
