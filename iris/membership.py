"""The members of a cluster: as a list now, and followed as they change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import overload

from iris.core.session import Session
from iris.crypto.keys import ClusterKey
from iris.errors import Closed, InvalidName, IrisError, KeyringError, LocalProtocolError
from iris.forks import FORKED
from iris.wire import frames
from iris.wire.frames import MemberInfo
from iris.wire.kinds import HERE, Kind
from iris.wire.names import check_address


class Members(Sequence[MemberInfo]):
    """The members of one cluster in this site at one time, oldest first.

    Other members of the cluster are only counted. `others` counts members of the same name under keys that you
    do not hold: first 8 hex digits of the key id -> number. `sites` counts members in other sites as they were
    when this list was requested: site -> number.
    """

    def __init__(
        self, cluster: str, members: Sequence[MemberInfo], others: dict[str, int], sites: dict[str, int]
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.others = others
        self.sites = sites
        self._members = tuple(members)

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> MemberInfo: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[MemberInfo, ...]: ...
    def __getitem__(self, index: int | slice) -> MemberInfo | tuple[MemberInfo, ...]:
        return self._members[index]

    def serving(self, kind: str) -> int:
        """Return how many members serve `kind`: "request", "push", "survey", "broadcast" or "tunnel"."""
        wanted = Kind.TUNNEL_OPEN if kind == "tunnel" else Kind[kind.upper()]
        return sum(wanted in member.kinds for member in self._members)

    def __repr__(self) -> str:
        return f"Members({self.cluster!r}: {[member.member for member in self._members]})"


class Watcher:
    """Follows the members of one cluster, across reconnects."""

    def __init__(self, cluster: str, keys: Sequence[ClusterKey]) -> None:
        site, cluster = check_address(cluster)
        if site not in ("", HERE):
            raise InvalidName(
                f"cannot list the members of {site}:{cluster}: other sites report only their number; "
                f"call members({cluster!r}) and read its `sites`"
            )
        self.cluster = cluster
        self.ended = False
        self._keys = keys
        self._session: Session | None = None
        self._number = 0
        self._members: dict[str, MemberInfo] = {}
        self._others: dict[str, int] = {}
        self._sites: dict[str, int] = {}
        self._received = asyncio.Event()
        """Set once the first list, or a refusal, was received."""
        self._changed = asyncio.Event()
        self._fresh = True
        """Whether the next frame is the first of its session, which holds the whole list."""
        self._error: IrisError | None = None
        """Set if the relay refused to list the members, and after a fork."""

    def use(self, keys_of: Callable[[str], Sequence[ClusterKey]]) -> None:
        """Use these keys from the next session on. Without a key for the cluster the list is empty."""
        try:
            self._keys = keys_of(self.cluster)
        except KeyringError:
            self._keys = ()

    def attach(self, session: Session) -> None:
        """Follow the cluster through `session`, and no longer through the one before."""
        self.detach()
        self._error = None
        if not self._keys:
            self._fresh = True
            self._on_membership(frames.Membership(0))
            return
        for key in self._keys:
            session.out.prove(key)
        self._session = session
        self._fresh = True
        key_ids = [key.key_id for key in self._keys]
        self._number = session.watch(
            self.cluster, key_ids, self._on_membership, refused=self._on_refused, stay=True
        )

    def detach(self) -> None:
        """Stop following through the current session."""
        if self._session is not None:
            self._session.unwatch(self._number)
            self._session = None

    def _forked(self) -> None:
        """Raise in the child of a fork, now and later. Nobody is woken: those that wait do so in the parent."""
        self._session = None
        self._error = Closed(f"the watch of the members of {self.cluster} {FORKED}")
        self._received, self._changed = asyncio.Event(), asyncio.Event()
        self._received.set()
        self._changed.set()

    def end(self) -> None:
        """End the watch because the client is closed: wake all waiters."""
        self.ended = True
        self._received.set()
        self._changed.set()

    async def first(self) -> None:
        """Wait for the first list from the relay. Raises LocalProtocolError if the relay refused."""
        await self._received.wait()
        self._check()

    async def changed(self) -> None:
        """Wait for a change since the last return.

        Raises LocalProtocolError if the relay of a new session refused.
        """
        await self._changed.wait()
        self._changed.clear()
        self._check()

    def members(self) -> Members:
        """Return the members as last received."""
        return Members(self.cluster, list(self._members.values()), self._others, self._sites)

    def _on_refused(self, error: str) -> None:
        """Record that the relay refused this watch, because it has no room for it."""
        text = f"the relay refused to list the members of {self.cluster}: {error}"
        self._session, self._error = None, LocalProtocolError(text)
        self._received.set()
        self._changed.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _on_membership(self, membership: frames.Membership) -> None:
        if self._fresh:  # the first answer of a session is the whole list
            self._members = {}
            self._others, self._sites = membership.others, membership.sites
            self._fresh = False
        self._members.update({info.member: info for info in membership.joined})
        for member in membership.left:
            self._members.pop(member, None)
        if membership.more:
            return
        if self._received.is_set():
            self._changed.set()
        self._received.set()
