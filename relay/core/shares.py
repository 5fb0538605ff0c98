"""What one session, and one user, has of the places of a link or WAN connection. `quotas` says how much that may be."""

from __future__ import annotations


class UserShare:
    """Calls of all sessions of one user that a link or WAN connection was handed. It removes itself from `users` when unused."""

    __slots__ = ("_user", "_users", "held", "sessions")

    def __init__(self, users: dict[str, UserShare], user: str) -> None:
        self.held = 0
        self.sessions = 0
        """Shares of sessions that still exist. Calls that a session left behind stay in `held` until they end."""
        self._users = users
        self._user = user
        users[user] = self

    def forget_if_done(self) -> None:
        """Remove this share if it counts no calls and no session can add one."""
        if not self.held and not self.sessions:
            self._users.pop(self._user, None)


class Share:
    """Calls of one session that a link or WAN connection was handed."""

    __slots__ = ("held", "whole")

    def __init__(self, whole: UserShare) -> None:
        self.held = 0
        self.whole = whole
        whole.sessions += 1

    def add(self, count: int) -> None:
        """Count calls that were handed over."""
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
        """End the session's part. Its calls that are not finished stay counted for its user."""
        self.whole.sessions -= 1
        self.whole.forget_if_done()
