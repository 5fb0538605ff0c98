"""Limits on what sessions may hold at a relay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WEB_ALIASES: Final = 4096
"""Limit of aliases of a session over WebSocket: as many sessions as an issuer allows one subject by default, 32, do not
use up the share of all holders of its tickets.
"""
Quota = tuple[int, int]
"""Messages and bytes a second; 0 means no limit."""


class Limits:
    """Limits of one session at this relay, and (`all_…`) of all sessions together.

    Members and watches are counted once per key id.
    """

    __slots__ = (
        "address_rates",
        "aliases",
        "all_aliases",
        "all_keys",
        "all_members",
        "all_pending",
        "all_subscriptions",
        "all_watches",
        "direct",
        "joins",
        "keys",
        "pending",
        "session_rate",
        "subscriptions",
    )  # fmt: skip

    def __init__(
        self, *, aliases: int = 65_536, joins: int = 1024, keys: int = 1024, pending: int = 65_536,
        subscriptions: int = 65_536, all_members: int = 262_144, all_subscriptions: int = 262_144, all_watches: int = 65_536,
        all_aliases: int = 262_144, all_pending: int = 524_288, all_keys: int = 262_144,
        direct: int = 512, session_rate: Quota = (0, 0), address_rates: Sequence[tuple[str, Quota]] = (),
    ) -> None:  # fmt: skip
        self.aliases = aliases
        self.joins = joins
        self.keys = keys
        self.pending = pending
        self.subscriptions = subscriptions
        self.all_aliases = all_aliases
        self.all_keys = all_keys
        self.all_members = all_members
        self.all_pending = all_pending
        self.all_subscriptions = all_subscriptions
        self.all_watches = all_watches
        self.direct = direct
        """Tunnels with a socket pair."""
        self.session_rate = session_rate
        self.address_rates = address_rates
        """(filter, quota) of all sessions of this relay together."""

    def aliases_of(self, *, web: bool) -> int:
        """Return the limit of aliases of one session, in each direction."""
        return min(self.aliases, WEB_ALIASES) if web else self.aliases
