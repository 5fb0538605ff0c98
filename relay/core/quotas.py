"""Quotas: how much of a shared table, byte limit or set of slots one user and one session may hold.

    what is shared       a user may have                        a session may have
    sessions             all but the last quarter               -
    members, topics,     all but the last quarter               what its own limits say
    watches, parked,
    aliases, calls,
    proven keys
    a link's slots       all but the last quarter               half

A user is a uid of this host, the holder of one access file, or, for calls that arrive over a link or WAN
connection, that connection. A user over its share gets an error; other users notice nothing.
"""

from __future__ import annotations

from typing import Final

from relay.core.neighbor import Dispatched, Neighbor, Target
from relay.core.shares import Share, UserShare

RELAYS_STORE: Final = "the relay's store"
"""User name of the store that this relay started itself. No share limits it, so that no user can lock it out."""


def all_but_a_quarter(limit: int) -> int:
    """Return one user's share of a limit: all but the last quarter, which is reserved for others."""
    return limit - limit // 4


class Table:
    """A limit that users share. Each may take all but the last quarter."""

    __slots__ = ("held", "limit", "refused", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.held: dict[str, int] = {}
        """User -> how much that user has."""
        self.refused = 0

    def has_room(self, user: str, count: int = 1) -> bool:
        """Whether a user may take `count` more. A refusal is counted."""
        if self.fits(user, count):
            return True
        self.refused += 1
        return False

    def fits(self, user: str, count: int) -> bool:
        """Whether a user may take `count` more."""
        mine = self.held.get(user, 0) + count
        within = self.total + count <= self.limit and mine <= all_but_a_quarter(self.limit)
        return within or user == RELAYS_STORE

    def take(self, user: str, count: int = 1) -> None:
        """Add `count` to what a user has."""
        self.held[user] = self.held.get(user, 0) + count
        self.total += count

    def give(self, user: str, count: int = 1) -> None:
        """Subtract `count` from what a user has."""
        left = self.held[user] - count
        if left:
            self.held[user] = left
        else:
            del self.held[user]
        self.total -= count

    def drop(self, user: str) -> None:
        """Remove everything that a user has."""
        self.total -= self.held.pop(user, 0)

    def full(self, user: str, what: str) -> str:
        """Return why a user gets no more of `what`."""
        if self.held.get(user, 0) and self.total < self.limit:
            share = all_but_a_quarter(self.limit)
            return (
                f"the sessions of {user} already use their share of the relay's {what} ({share} of {self.limit}, the rest is "
                "reserved for other users); use fewer, or raise the relay's limit"
            )
        return f"the relay's limit of {self.limit} {what} is reached; raise the limit, or use another relay"

    def status(self) -> dict[str, int]:
        """Return how full the table is, ready for JSON."""
        return {"held": self.total, "limit": self.limit, "refused": self.refused}


class Quotas:
    """The tables that the sessions of one relay share. Each one is also limited per session."""

    def __init__(
        self,
        *,
        members: int,
        subscriptions: int,
        watches: int,
        parked_bytes: int,
        aliases: int,
        calls: int,
        in_flight: int,
        keys: int,
        questions: int,
    ) -> None:
        self.members = Table(members)
        self.subscriptions = Table(subscriptions)
        self.watches = Table(watches)
        self.parked = Table(parked_bytes)
        self.aliases = Table(aliases)
        self.keys = Table(keys)
        """Keys that sessions have proven."""
        self.questions = Table(questions)
        """Questions about topics that wait for other relays."""
        self.calls = Table(calls)
        """Places for unanswered calls and tunnels of sessions; `relay.core.allowances` takes them in steps."""
        self.in_flight = Table(in_flight)
        """Places for calls and tunnels in flight at members of sessions."""

    def status(self) -> dict[str, object]:
        """Return how full each table is, ready for JSON."""
        return {
            "members": self.members.status(),
            "subscriptions": self.subscriptions.status(),
            "watches": self.watches.status(),
            "parked_bytes": self.parked.status(),
            "aliases": self.aliases.status(),
            "keys": self.keys.status(),
            "questions": self.questions.status(),
            "calls": self.calls.status(),
            "in_flight": self.in_flight.status(),
        }


def share_at(neighbor: Neighbor, origin: Neighbor) -> Share:
    """Return the counter of calls from `origin`, and from its user, in flight at a link or WAN connection."""
    share = neighbor.shares.get(origin.number)
    if share is None:
        users = neighbor.users
        whole = users.get(origin.user) or UserShare(users, origin.user)
        share = neighbor.shares[origin.number] = Share(whole)
    return share


def is_over(neighbor: Neighbor, origin: Neighbor, limit: int) -> bool:
    """Whether `origin` has used its share of a connection's slots: half for a session, three quarters for a user."""
    share = neighbor.shares.get(origin.number)
    return share is not None and _is_over(share, origin, limit)


def _is_over(share: Share, origin: Neighbor, limit: int, count: int = 1) -> bool:
    """Whether `count` more calls would be over the share."""
    more = count - 1
    return share.whole.held + more >= all_but_a_quarter(limit) or (
        share.held + more >= max(1, limit // 2) and not origin.hop_class
    )


def hold(target: Target, dispatched: Dispatched, limit: int) -> bool:
    """Count calls in their sender's share of a connection with `limit` slots. Returns False if the share is used up."""
    share = target.share
    if share is None:
        share = target.share = share_at(target.neighbor, target.route.neighbor)
    if _is_over(share, target.route.neighbor, limit, dispatched.count):
        target.neighbor.over_share += 1
        return False
    share.add(dispatched.count)
    dispatched.share = share
    return True
