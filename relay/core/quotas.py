"""Who may hold how much of what many share. The one home of shares: tables, byte bounds, and the places of a link or WAN connection.

    what is shared       a user may have                        a session may have
    sessions             all but the last quarter               -
    members, topics,     all but the last quarter               what its own limits say
    watches, parked
    a link's places      all but the last quarter               half

A user is a uid of this host, the holder of one access file, or, for what comes over a link or WAN connection, that connection.
Whoever fills a share is told so, and nobody else notices.
"""

from __future__ import annotations

from typing import Final

from relay.core.session import Handed, Neighbor, Share, Target, UserShare

RELAYS_STORE: Final = "the relay's store"
"""The user as whom the store counts that this relay itself started: no user may lock it out, so no share bounds it."""


def all_but_a_quarter(limit: int) -> int:
    """Return what one of those who share `limit` may take of it: the last quarter is kept for others."""
    return limit - limit // 4


class Table:
    """A bound that users share: each may take all but the last quarter."""

    __slots__ = ("held", "limit", "refused", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.held: dict[str, int] = {}
        """User -> how much it has."""
        self.refused = 0

    def has_room(self, user: str, count: int = 1) -> bool:
        """Whether a user may take so much more; that it may not is counted."""
        mine = self.held.get(user, 0) + count
        within = self.total + count <= self.limit and mine <= all_but_a_quarter(self.limit)
        if within or user == RELAYS_STORE:
            return True
        self.refused += 1
        return False

    def take(self, user: str, count: int = 1) -> None:
        """A user has so much more."""
        self.held[user] = self.held.get(user, 0) + count
        self.total += count

    def give(self, user: str, count: int = 1) -> None:
        """A user has so much less."""
        left = self.held[user] - count
        if left:
            self.held[user] = left
        else:
            del self.held[user]
        self.total -= count

    def drop(self, user: str) -> None:
        """A user has nothing any more."""
        self.total -= self.held.pop(user, 0)

    def full(self, user: str, what: str) -> str:
        """Return why a user gets no more of `what`."""
        if self.held.get(user, 0) and self.total < self.limit:
            share = all_but_a_quarter(self.limit)
            return f"the sessions of {user} may have {share} of the relay's {self.limit} {what}, and the limit is reached; the rest is kept for other users"
        return f"the relay's limit of {self.limit} {what} is reached"

    def status(self) -> dict[str, int]:
        """Return how full it is, ready for JSON."""
        return {"held": self.total, "limit": self.limit, "refused": self.refused}


class Quotas:
    """The tables that the sessions of one relay share; each is bounded per session as well."""

    def __init__(
        self, *, members: int, subscriptions: int, watches: int, parked_bytes: int
    ) -> None:
        self.members = Table(members)
        self.subscriptions = Table(subscriptions)
        self.watches = Table(watches)
        self.parked = Table(parked_bytes)

    def status(self) -> dict[str, object]:
        """Return how full each table is, ready for JSON."""
        return {
            "members": self.members.status(),
            "subscriptions": self.subscriptions.status(),
            "watches": self.watches.status(),
            "parked_bytes": self.parked.status(),
        }


def share_at(neighbor: Neighbor, origin: Neighbor) -> Share:
    """Return where it is counted what a link or WAN connection was handed for `origin`, and for all of its user."""
    share = neighbor.shares.get(origin.number)
    if share is None:
        users = neighbor.users
        whole = users.get(origin.user) or UserShare(users, origin.user)
        share = neighbor.shares[origin.number] = Share(whole)
    return share


def is_over(neighbor: Neighbor, origin: Neighbor, limit: int) -> bool:
    """Whether one has its share of the places of a link or WAN connection: half for a session, all but a quarter for a user."""
    share = neighbor.shares.get(origin.number)
    return share is not None and _is_over(share, origin, limit)


def _is_over(share: Share, origin: Neighbor, limit: int) -> bool:
    return share.whole.held >= all_but_a_quarter(limit) or (
        share.held >= max(1, limit // 2) and not origin.hop_class
    )


def hold(target: Target, handed: Handed, limit: int) -> bool:
    """Count a call in the share of who sent it at a link or WAN connection of `limit` places; False: it has its share already."""
    share = target.share
    if share is None:
        share = target.share = share_at(target.neighbor, target.route.neighbor)
    if _is_over(share, target.route.neighbor, limit):
        target.neighbor.over_share += 1
        return False
    share.more()
    handed.share = share
    return True
