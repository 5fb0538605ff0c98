"""How busy members are: of ours, as the links are told that call them; of other relays', as they tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.wire import frames
from iris.wire.kinds import NEVER_US
from relay.core.interest import Interest
from relay.core.link import Link

LOADS_US: Final = 10_000
ASKED_US: Final = 1_000_000
"""Loads of an address are reported for so long after the last call that came over the link for it."""
_LOAD_ENTRIES: Final = 48
"""Names are 255 bytes at most: this many always fit a control frame."""


class LoadReports:
    """What links tell one another of how busy their members are."""

    def __init__(
        self, links: dict[bytes, Link], interest: Interest, due: Callable[[int], None]
    ) -> None:
        """`due` hears when `report` is due."""
        self._links = links
        self._interest = interest
        self._due = due
        self.report_us = NEVER_US

    def called(self, now_us: int) -> None:
        """A call came over a link: its side is to know how busy our members are."""
        if self.report_us == NEVER_US:
            self.report_us = now_us + LOADS_US
            self._due(self.report_us)

    def on_loads(self, link: Link, report: frames.Loads) -> None:
        """The other relay tells."""
        for entry in report.loads:
            load = link.loads.get((entry.kind, entry.name, entry.key_id))
            if load is not None:
                load.others = entry.others

    def report(self, now_us: int) -> None:
        """Tell each link that asked lately what our members hold from others.

        Where nobody asks any more, the other side is told 0 once: it will ask again, and hear the truth then.
        """
        self.report_us = NEVER_US
        for link in self._links.values():
            entries: list[frames.Load] = []
            for key, demand in list(link.demands.items()):
                kind, name, key_id = key
                others = 0
                if now_us - demand.used_us <= ASKED_US:
                    self.report_us = now_us + LOADS_US
                    held = sum(load.messages for load in self._interest.loads(name, key_id, kind))
                    others = max(0, held - demand.messages)
                elif not demand.messages:
                    del link.demands[key]
                if others != demand.reported:
                    demand.reported = others
                    entries.append(frames.Load(kind, name, key_id, others))
            for at in range(0, len(entries), _LOAD_ENTRIES):
                link.control(frames.Loads(entries[at : at + _LOAD_ENTRIES]))
