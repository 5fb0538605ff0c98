"""What a relay keeps of what has ended, and when it looks for cycles."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

KEPT = ("tests/protocol/test_kept.py",)
FREED = ("tests/integration/test_freed.py",)
MEMORY = ("tests/unit/test_memory.py",)

SABOTAGES = (
    Sabotage(
        "kept-casts",
        "relay/core/mesh.py",
        "Mesh.expire",
        "now_us >= missed.look_us",
        "False",
        KEPT,
        "recorded casts keep the sessions of their senders until the next one is sent",
    ),
    Sabotage(
        "kept-targets",
        "relay/core/neighbor.py",
        "Route.target",
        "len(self.targets) >= self._sweep_at",
        "len(self.targets) >= MAX_TARGETS",
        KEPT,
        "a member that stays keeps a thousand callers that have gone",
    ),
    Sabotage(
        "kept-port",
        "relay/core/neighbor.py",
        "Neighbor.let_go",
        "GONE",
        "self.port",
        FREED,
        "a session and its port keep each other until a full collection",
    ),
    Sabotage(
        "kept-reader",
        "relay/net/ports.py",
        "ConnectionPort._lost",
        "self._reader.end()",
        "None",
        FREED,
        "a port and its reader keep each other",
    ),
    Sabotage(
        "kept-turn",
        "relay/net/ports.py",
        "ConnectionPort._lost",
        "self._turn_ended()",
        "None",
        FREED,
        "a port and its turn keep each other",
    ),
    Sabotage(
        "kept-transport",
        "relay/net/ports.py",
        "ConnectionPort._lost",
        "self._transport = _CLOSED",
        "None",
        FREED,
        "a port and what TLS remembers of it keep each other",
    ),
    Sabotage(
        "kept-accepted",
        "iris/accepting.py",
        "Accepted._gone",
        "self.cut = self._task = self._transport = None",
        "None",
        FREED,
        "an accepted connection and its port keep each other",
    ),
    Sabotage(
        "kept-wan",
        "relay/core/site_routes.py",
        "Wan.let_go",
        "del self.site_route",
        "None",
        FREED,
        "a connection to a gateway and its route keep each other",
    ),
    Sabotage(
        "kept-web",
        "relay/net/websession.py",
        "WebConnection._lose_port",
        "self.port = None",
        "None",
        FREED,
        "a browser's connection and its session keep each other",
    ),
    Sabotage(
        "collect-often",
        "iris/memory.py",
        "collect_seldom",
        "gc.disable()",
        "None",
        MEMORY,
        "what others make a relay hold decides how often it stops",
    ),
    Sabotage(
        "collect-when-idle",
        "iris/memory.py",
        "Tidier.collects",
        "idle and waited_s >= COLLECT_S",
        "idle",
        MEMORY,
        "a relay collects cycles at every idle moment",
    ),
    Sabotage(
        "collect-never",
        "iris/memory.py",
        "Tidier.collects",
        "resident > self._collected_bytes + SUSPECT_BYTES",
        "False",
        MEMORY,
        "cycles of a library grow without a bound",
    ),
)
