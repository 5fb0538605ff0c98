"""What a session sends to one address: the unfinished bundle or run, and what it is sealed and framed with."""

from __future__ import annotations

from iris.core.aliases import Alias
from iris.core.bundle import BundleBuilder
from iris.core.credit import Credit
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import Sealer
from iris.wire.codec import metadata_prefix


class OutFlow(BundleBuilder):
    """One (kind, name, key) that this session sends to, with its unfinished bundle or run."""

    __slots__ = (
        "alias",
        "bodies",
        "body_bytes",
        "callers",
        "credit",
        "cuts",
        "deadline_us",
        "declared_first",
        "end",
        "first",
        "hop",
        "hops",
        "key",
        "kind",
        "member",
        "metadata",
        "name",
        "parts",
        "prefix",
        "sealer",
        "sender_id",
        "site",
        "timeout_ms",
    )

    def __init__(self, kind: int, name: str, key: ClusterKey, site: str, member: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.name = name
        self.site = site
        """Destination site, as in DECLARE."""
        self.member = member
        """Id of the one member that its calls are for; empty if the relays choose one."""
        self.key = key
        self.alias: Alias | None = None
        self.declared_first = 0
        """Sequence of the first message under `alias`."""
        self.parts = 1
        """Number of bundles into which a turn's messages are cut, so that queue groups share them."""
        self.cuts = 0
        """Bundles that were full in this turn, counted while `parts` > 1."""
        self.credit: Credit | None = None
        """Credit for publishing, once a publisher has waited for it."""
        self.bodies: list[bytes] = []
        """The run under construction: this turn's calls or answers, sealed and not yet framed."""
        self.body_bytes = 0
        self.end = b""
        """End fields with which each body of the run is sealed."""
        self.metadata = b""
        """The flow's constant metadata, followed by `end`."""
        self.hop = 0
        """Hop id of the first call in the run; the ids of the others follow it."""
        self.hops: list[int] = []
        """Hop ids of the answers in the run."""
        self.callers: list[bytes] = []
        """Sender ids of the callers of these answers."""
        self.deadline_us = 0
        self.timeout_ms = 0

    @property
    def address(self) -> str:
        """The name, with the site before it if there is one, as `Outbound.flow` takes it."""
        return f"{self.site}:{self.name}" if self.site else self.name

    def set_sealer(self, sealer: Sealer, sender_id: bytes) -> None:
        """Use another sealer from now on. Sequences belong to a sender id, so they start again at 0."""
        self.sealer = sealer
        self.sender_id = sender_id
        self.first = 0
        self.prefix = metadata_prefix(self.kind, self.name, self.key.key_id, sender_id)
        self.alias = None
