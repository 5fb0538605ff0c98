"""A relay for developing, as a process of its own, that returns freed memory at every idle moment and prints its size.

    python tests/support/tidy_relay.py SOCKET

Each line is JSON: `resident` bytes after the memory was returned, `busy`: whether anything of sessions is left.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from iris import memory
from relay import daemon
from relay.config import dev
from relay.core import missed_casts

IDLE_S = 0.1


def main() -> None:
    """Run until a signal."""
    made: list[daemon.Relay] = []

    class Relay(daemon.Relay):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            made.append(self)

    class Tidier(memory.Tidier):
        def returns(self, resident: int, *, idle: bool) -> bool:
            return idle

        def returned(self, resident: int) -> None:
            router = made[0].router
            busy = bool(router.sessions or router.ending or router._casts.missed._sent)
            print(json.dumps({"resident": resident, "busy": busy}), flush=True)  # noqa: T201 - for the test

    daemon.Relay = Relay  # type: ignore[misc]  # for this process only
    memory.Tidier = Tidier  # type: ignore[misc]
    daemon.tidy = lambda: memory.tidy(idle_s=IDLE_S)  # type: ignore[assignment]
    missed_casts.UNSURE_US = missed_casts.LOOK_US = 50_000  # type: ignore[misc]
    daemon.run(dev(Path(sys.argv[1])), {})


if __name__ == "__main__":
    main()
