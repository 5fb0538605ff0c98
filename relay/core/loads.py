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

    def asked(self, now_us: int) -> None:
        """A call came over a link: its side is to know how busy our members are."""
        if self.report_us == NEVER_US:
            self.report_us = now_us + LOADS_US
            self._due(self.report_us)

    def on_loads(self, link: Link, report: frames.Loads) -> None:
        """The other relay tells."""
        for told in report.loads:
            load = link.loads.get((told.kind, told.name, told.key_id))
            if load is not None:
                load.others = told.others

    def report(self, now_us: int) -> None:
        """Tell each link that asked lately what our members hold from others.

        Where nobody asks any more, the other side is told 0 once: it will ask again, and hear the truth then.
        """
        self.report_us = NEVER_US
        for link in self._links.values():
            told: list[frames.Load] = []
            for place, asked in list(link.asked.items()):
                kind, name, key_id = place
                others = 0
                if now_us - asked.used_us <= ASKED_US:
                    self.report_us = now_us + LOADS_US
                    held = sum(load.messages for load in self._interest.loads(name, key_id, kind))
                    others = max(0, held - asked.messages)
                elif not asked.messages:
                    del link.asked[place]
                if others != asked.told:
                    asked.told = others
                    told.append(frames.Load(kind, name, key_id, others))
            for at in range(0, len(told), _LOAD_ENTRIES):
                link.control(frames.Loads(told[at : at + _LOAD_ENTRIES]))
