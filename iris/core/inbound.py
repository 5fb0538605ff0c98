"""The receiving half of a session: declared aliases, openers, and what each flow expects next."""

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
"""Of the names of queue groups that all aliases name; what an alias beyond names is for nobody here."""


class UnknownKey(Exception):
    """A frame whose alias was declared under a key that we do not have. It is dropped, and the session goes on."""


class Window:
    """What a publisher that waits may send under one alias: see `iris.core.credit`."""

    __slots__ = ("alias", "bytes", "limit", "limited", "received", "serial")

    def __init__(self, alias: int, serial: int, size: int) -> None:
        self.alias = alias
        self.serial = serial
        """Of the latest WAIT."""
        self.bytes = size
        """Its size: so much may wait to be handled."""
        self.received = 0
        """Bytes of frames since that WAIT, ..."""
        self.limit = 0
        """... and up to which the publisher was told that it may send."""
        self.limited = False
        """Whether that is less than `UNLIMITED`."""


class InFlow:
    """One declared alias: who sends what to which address, and who here wants it."""

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
        """Whether it is for subscriptions without a group, or for a service, so that nothing of it may be missing."""
        self.groups = frozenset(declared.groups)
        self.member = declared.member
        self.opener = opener
        """None for a tunnel's opening: its first message is Noise, not SFrame."""
        self.prefix = metadata_prefix(self.kind, self.name, key.key_id, self.sender_id)
        self.is_local = False
        """Whether its sender delivers its casts here itself."""
        self.expected: Expected | None = None
        self.sinks: Sequence[Any] = ()
        self.version = -1
        """Version of the subscriptions for which `sinks` was found."""
        self.window: Window | None = None
        """What its publisher may send, if it waits."""

    def as_plain(self) -> InFlow:
        """Return the flow of the same sender and topic for subscriptions without a group."""
        declared = Declare(0, self.kind, self.name, self.key.key_id, self.sender_id)
        return InFlow(declared, self.key, None)


class Inbound:
    """The relay's aliases towards this session, each with what is needed to open its frames."""

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
        """Alias -> declaration, for aliases under keys that we did not have at that time."""
        self._group_bytes: dict[int, int] = {}
        """Alias -> bytes of the group names that it declares, if any."""
        self._all_group_bytes = 0
        self.replies: set[int] = set()
        """Aliases of stores' answers."""

    def declare(self, declared: Declare) -> None:
        """Store a declaration; it replaces what the alias stood for.

        A key that we do not have is not the relay's fault: it may forward what others say, or what was said before the key left.

        Raises:
            PeerProtocolError: the kind cannot be declared.
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
        if declared.kind == Kind.STREAM_REPLY:  # in clear: whose it is, its hop id says
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
                    self._openers.clear()  # flows keep theirs; the rest is derived again when declared again
                opener = self._openers[opener_key] = Opener(key, declared.sender_id)
        self.replies.discard(declared.alias)
        flow = InFlow(declared, key, opener)
        if self._local_senders is not None:
            flow.is_local = declared.sender_id in self._local_senders
        self._set_flow(declared.alias, flow)

    def forget_keys(self) -> None:
        """Drop aliases under keys that we no longer have. An honest relay sends nothing under them."""
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
            PeerProtocolError: it was not declared for this kind.
            UnknownKey: it was declared under a key that we do not have.
        """
        try:
            flow = self._flows[alias]
        except IndexError:
            flow = None
        if flow is None or flow.kind != kind:
            declared = self._unknown.get(alias)
            if declared is not None and declared.kind == kind:
                self.declare(declared)  # the key may have arrived in the meantime
                if alias in self._unknown:
                    raise UnknownKey
                return self.flow(alias, kind)
            raise PeerProtocolError(f"alias {alias} was not declared for {Kind(kind).name}")
        return flow

    def flow_of(self, alias: int, kinds: Collection[int]) -> InFlow:
        """Return the flow of an alias that was declared for one of `kinds`; raises as `flow`."""
        declared: InFlow | Declare | None = None
        if alias < len(self._flows):
            declared = self._flows[alias]
        declared = declared or self._unknown.get(alias)
        if declared is None or declared.kind not in kinds:
            raise PeerProtocolError(f"alias {alias} was not declared for REQUEST or PUSH")
        return self.flow(alias, declared.kind)
