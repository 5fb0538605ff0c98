"""Load reports: relays report over links how busy their members are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.wire import link_frames
from iris.wire.kinds import NEVER_US
from relay.core.interest import Interest
from relay.core.link import Link

LOADS_US: Final = 10_000
"""Interval of load reports."""
ASKED_US: Final = 1_000_000
"""How long the load of an address is reported after the last call for it over the link."""
_LOAD_ENTRIES: Final = 48
"""Entries per frame. Names have at most 255 bytes, so this many always fit in a control frame."""


class LoadReports:
    """Sends and receives load reports over the links of one relay."""

    def __init__(
        self, links: dict[bytes, Link], interest: Interest, due: Callable[[int], None]
    ) -> None:
        """`due` is called with the time at which `report` is due."""
        self._links = links
        self._interest = interest
        self._due = due
        self.report_us = NEVER_US
        """When `report` is due."""

    def called(self, now_us: int) -> None:
        """Schedule a report, because a call came over a link and the other relay needs to know how busy our
        members are.
        """
        if self.report_us == NEVER_US:
            self.report_us = now_us + LOADS_US
            self._due(self.report_us)

    def on_loads(self, link: Link, report: link_frames.Loads) -> None:
        """Apply a load report of another relay."""
        for entry in report.loads:
            load = link.loads.get((entry.kind, entry.name, entry.key_id))
            if load is not None:
                load.others = entry.others

    def report(self, now_us: int) -> None:
        """Report to each link that sent calls lately what our members hold for other senders.

        When a link sends no more calls, 0 is reported once. With its next call, it gets correct figures again.
        """
        self.report_us = NEVER_US
        for link in self._links.values():
            entries: list[link_frames.Load] = []
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
                    entries.append(link_frames.Load(kind, name, key_id, others))
            for at in range(0, len(entries), _LOAD_ENTRIES):
                link.control(link_frames.Loads(entries[at : at + _LOAD_ENTRIES]))
