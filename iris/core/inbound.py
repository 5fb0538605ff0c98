"""The receiving half of a session: aliases that the relay declared, and for each the opener and the
expected sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from iris.core.aliases import MAX_ALIASES
from iris.core.guard import Sequence as Expected
from iris.core.local_senders import LocalSenders
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import Opener
from iris.errors import PeerProtocolError
from iris.wire.codec import metadata_prefix
from iris.wire.frames import Declare
from iris.wire.kinds import DECLARED_KINDS, Kind

MAX_OPENERS: Final = 16_384
MAX_GROUP_BYTES: Final = 64 << 20
"""Most bytes of queue group names in all aliases together. The groups of an alias beyond it are ignored."""


class UnknownKey(Exception):
    """The alias of a frame was declared under a key that this process does not have. Drop the frame and continue."""


class Window:
    """Credit granted to a waiting publisher under one alias (see `iris.core.credit`)."""

    __slots__ = ("alias", "bytes", "limit", "limited", "received", "serial")

    def __init__(self, alias: int, serial: int, size: int) -> None:
        self.alias = alias
        self.serial = serial
        """Serial of the latest WAIT."""
        self.bytes = size
        """Size of the window: bytes that may wait to be handled."""
        self.received = 0
        """Frame bytes received since that WAIT."""
        self.limit = 0
        """Frame bytes that the publisher may send, counted from that WAIT."""
        self.limited = False
        """Whether `limit` is less than `UNLIMITED`."""


class InFlow:
    """One declared alias: its sender, kind and address, and the local subscriptions that receive it."""

    __slots__ = (
        "expected",
        "groups",
        "is_local",
        "key",
        "kind",
        "member",
        "name",
        "opener",
        "plain",
        "prefix",
        "sender_id",
        "sinks",
        "version",
        "window",
    )  # fmt: skip

    def __init__(self, declared: Declare, key: ClusterKey, opener: Opener | None) -> None:
        self.kind = declared.kind
        self.name = declared.name
        self.key = key
        self.sender_id = declared.sender_id
        self.plain = declared.plain or declared.kind != Kind.PUBLISH
        """Whether it goes to subscriptions without a group, or to a service, so that every missing
        message is a loss."""
        self.groups = frozenset(declared.groups)
        self.member = declared.member
        self.opener = opener
        """None for a tunnel's opening, whose first message is Noise, not SFrame."""
        self.prefix = metadata_prefix(self.kind, self.name, key.key_id, self.sender_id)
        self.is_local = False
        """Whether its sender is in this process and delivers its casts directly (`iris.core.local_senders`)."""
        self.expected: Expected | None = None
        self.sinks: Sequence[Any] = ()
        self.version = -1
        """`Casts.subscriptions_version` for which `sinks` was computed."""
        self.window: Window | None = None
        """Credit of its publisher, if that waits."""

    def as_plain(self) -> InFlow:
        """Return the flow of the same sender and topic for subscriptions without a group."""
        declared = Declare(0, self.kind, self.name, self.key.key_id, self.sender_id)
        return InFlow(declared, self.key, None)


class Inbound:
    """Aliases that the relay declared to this session, each with what is needed to open its frames."""

    def __init__(
        self,
        find_key: Callable[[bytes], ClusterKey | None],
        local_senders: LocalSenders | None = None,
    ) -> None:
        self._find_key = find_key
        self._local_senders = local_senders
        self._flows: list[InFlow | None] = []
        self._openers: dict[tuple[bytes, bytes], Opener] = {}
        self._unknown: dict[int, Declare] = {}
        """Declarations under keys that this process did not have at the time: alias -> declaration."""
        self._group_bytes: dict[int, int] = {}
        """Alias -> bytes of its group names, if it has any."""
        self._all_group_bytes = 0
        self.replies: set[int] = set()
        """Aliases declared for answers of stores."""

    def declare(self, declared: Declare) -> None:
        """Store a declaration, which replaces an earlier one of the same alias.

        A key that this process does not have is not the relay's fault: it may forward declarations of others, or those
        from before the key was removed.

        Raises:
            PeerProtocolError: an alias cannot be declared for this kind.
        """
        if declared.kind not in DECLARED_KINDS:
            raise PeerProtocolError(
                f"an alias cannot be declared for frame kind 0x{declared.kind:02x}"
            )
        self._unknown.pop(declared.alias, None)
        self._all_group_bytes -= self._group_bytes.pop(declared.alias, 0)
        if declared.groups:
            size = sum(map(len, declared.groups))
            if self._all_group_bytes + size > MAX_GROUP_BYTES:
                declared = msgspec.structs.replace(declared, groups=[])
            else:
                self._group_bytes[declared.alias] = size
                self._all_group_bytes += size
        if declared.kind == Kind.STREAM_REPLY:  # in clear; its hop id names the call
            self._set_flow(declared.alias, None)
            self.replies.add(declared.alias)
            return
        key = self._find_key(declared.key_id)
        if key is None:
            self.replies.discard(declared.alias)
            self._set_flow(declared.alias, None)
            self._unknown[declared.alias] = declared
            return
        opener = None
        if declared.kind != Kind.TUNNEL_OPEN:
            opener_key = (key.key_id, declared.sender_id)
            opener = self._openers.get(opener_key)
            if opener is None:
                if len(self._openers) >= MAX_OPENERS:
                    self._openers.clear()  # existing flows keep theirs; others are derived again at the next declaration
                opener = self._openers[opener_key] = Opener(key, declared.sender_id)
        self.replies.discard(declared.alias)
        flow = InFlow(declared, key, opener)
        if self._local_senders is not None:
            flow.is_local = declared.sender_id in self._local_senders
        self._set_flow(declared.alias, flow)

    def forget_keys(self) -> None:
        """Remove aliases under keys that this process no longer has. An honest relay sends nothing under them."""
        find_key = self._find_key
        self._openers = {p: o for p, o in self._openers.items() if find_key(p[0]) is not None}
        for alias, flow in enumerate(self._flows):
            if flow is not None and find_key(flow.key.key_id) is None:
                self._flows[alias] = None

    def _set_flow(self, alias: int, flow: InFlow | None) -> None:
        flows = self._flows
        if alias >= len(flows):
            flows.extend([None] * (min(MAX_ALIASES, max(16, 2 * alias + 1)) - len(flows)))
        flows[alias] = flow

    def flow(self, alias: int, kind: int) -> InFlow:
        """Return the flow of an alias.

        Raises:
            PeerProtocolError: the alias was not declared for this kind.
            UnknownKey: it was declared under a key that this process does not have.
        """
        try:
            flow = self._flows[alias]
        except IndexError:
            flow = None
        if flow is None or flow.kind != kind:
            declared = self._unknown.get(alias)
            if declared is not None and declared.kind == kind:
                self.declare(declared)  # the key may have been added in the meantime
                if alias in self._unknown:
                    raise UnknownKey
                return self.flow(alias, kind)
            raise PeerProtocolError(f"alias {alias} was not declared for {Kind(kind).name}")
        return flow

    def flow_of(self, alias: int, kinds: Collection[int]) -> InFlow:
        """Return the flow of an alias that was declared for one of `kinds`. Raises as `flow`."""
        declared: InFlow | Declare | None = None
        if alias < len(self._flows):
            declared = self._flows[alias]
        declared = declared or self._unknown.get(alias)
        if declared is None or declared.kind not in kinds:
            raise PeerProtocolError(f"alias {alias} was not declared for REQUEST or PUSH")
        return self.flow(alias, declared.kind)
