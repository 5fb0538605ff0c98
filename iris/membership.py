"""Who is in a cluster, now and as it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import overload

from iris.core.session import Session
from iris.crypto.keys import ClusterKey
from iris.errors import InvalidName, KeyringError, LocalProtocolError
from iris.wire import frames
from iris.wire.frames import MemberInfo
from iris.wire.kinds import HERE, Kind
from iris.wire.names import check_address


class Members(Sequence[MemberInfo]):
    """The members of one cluster at one time, oldest first.

    `others` counts members of the same name under keys that we did not ask for, by the first 8 hex digits of the key id; `sites` those in
    other sites, as they were when this list was asked for: they are known by their number alone.
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
        """Return how many serve `kind`: request, push, survey, broadcast or tunnel."""
        wanted = Kind.TUNNEL_OPEN if kind == "tunnel" else Kind[kind.upper()]
        return sum(wanted in member.kinds for member in self._members)

    def __repr__(self) -> str:
        return f"Members({self.cluster!r}: {[member.member for member in self._members]})"


class Watcher:
    """Follows one cluster over reconnects."""

    def __init__(self, cluster: str, keys: Sequence[ClusterKey]) -> None:
        site, cluster = check_address(cluster)
        if site not in ("", HERE):
            raise InvalidName(
                f"{site}:{cluster}: members of another site are known by their number alone, `Members.sites`"
            )
        self.cluster = cluster
        self.ended = False
        self._keys = keys
        self._session: Session | None = None
        self._number = 0
        self._members: dict[str, MemberInfo] = {}
        self._others: dict[str, int] = {}
        self._sites: dict[str, int] = {}
        self._heard = asyncio.Event()
        self._changed = asyncio.Event()
        self._fresh = True
        self._error: LocalProtocolError | None = None
        """Why the relay does not tell us."""

    def use(self, keys_of: Callable[[str], Sequence[ClusterKey]]) -> None:
        """Watch under these keys from the next session on. Without keys there are no members."""
        try:
            self._keys = keys_of(self.cluster)
        except KeyringError:
            self._keys = ()

    def attach(self, session: Session) -> None:
        """Ask this session's relay from now on, and no other."""
        self.detach()
        self._error = None
        if not self._keys:
            self._fresh = True
            self._hear(frames.Membership(0))
            return
        for key in self._keys:
            session.out.prove(key)
        self._session = session
        self._fresh = True
        key_ids = [key.key_id for key in self._keys]
        self._number = session.watch(
            self.cluster, key_ids, self._hear, refused=self._refused, stay=True
        )

    def detach(self) -> None:
        """Stop listening."""
        if self._session is not None:
            self._session.unwatch(self._number)
            self._session = None

    def end(self) -> None:
        """The client is closed: whoever waits goes on."""
        self.ended = True
        self._heard.set()
        self._changed.set()

    async def first(self) -> None:
        """Return when the relay has said who is there; raises LocalProtocolError if it refused to."""
        await self._heard.wait()
        self._check()

    async def changed(self) -> None:
        """Return at the next change after the last return; raises LocalProtocolError if a new session's relay tells us none."""
        await self._changed.wait()
        self._changed.clear()
        self._check()

    def members(self) -> Members:
        """Return who is there as far as we heard."""
        return Members(self.cluster, list(self._members.values()), self._others, self._sites)

    def _refused(self, error: str) -> None:
        """The relay has no room for this watch."""
        text = f"the relay refused to tell who is in {self.cluster}: {error}"
        self._session, self._error = None, LocalProtocolError(text)
        self._heard.set()
        self._changed.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _hear(self, heard: frames.Membership) -> None:
        if self._fresh:  # the first answer of a session is the whole list
            self._members = {}
            self._others, self._sites = heard.others, heard.sites
            self._fresh = False
        self._members.update({info.member: info for info in heard.joined})
        for member in heard.left:
            self._members.pop(member, None)
        if heard.more:
            return
        if self._heard.is_set():
            self._changed.set()
        self._heard.set()
