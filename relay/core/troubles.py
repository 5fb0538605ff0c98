"""Losses and failed handlers that programs report (TROUBLE), for operators. Nothing else depends on these figures.

A program can report anything, so all of this is bounded: rows by session and cause, names in a row, programs with sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Final

from iris.core.troubles import Tally
from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.kinds import TroubleCause
from iris.wire.names import printable
from relay.core.session import Session

MAX_ROWS: Final = 256
"""Limit of rows that are remembered. The oldest one of the user that has most rows makes room."""
MAX_REPORTED: Final = 64
"""Rows in a status report, the latest first."""
MAX_PROGRAMS: Final = 128
"""Limit of programs with sums of their own. Those of others are summed under `OTHER`."""
OTHER: Final = "other"
MAX_SUM: Final = (1 << 53) - 1
"""Largest sum: what every reader of JSON can hold."""
Key = tuple[int, TroubleCause]
"""(number of the session, cause)."""


class Row:
    """What one session has reported of one cause."""

    __slots__ = ("address", "label", "last_us", "pid", "since_us", "tally", "user")

    def __init__(self, session: Session, now_us: int) -> None:
        self.label = session.label
        self.pid = session.pid
        self.user = session.user
        self.address = session.address
        self.since_us = self.last_us = now_us
        """Times of the first and the latest report, by the relay's clock."""
        self.tally = Tally()


class Troubles:
    """What the sessions of one relay have reported, also those that have ended."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` returns the relay's time in µs."""
        self._clock = clock
        self._rows: dict[Key, Row] = {}
        """The row of the latest report is last."""
        self.totals: dict[TroubleCause, int] = {}
        self._programs: dict[str, dict[TroubleCause, int]] = {}
        """Label -> its sums."""

    def reported(self, session: Session, trouble: frames.Trouble) -> None:
        """Add what a session reports; raises PeerProtocolError."""
        for entry in trouble.entries:
            if sum(entry.names.values()) > entry.count:
                raise PeerProtocolError("TROUBLE with more by name than in all")
        now_us = self._clock()
        label = session.label
        if label not in self._programs and len(self._programs) >= MAX_PROGRAMS:
            label = OTHER
        sums = self._programs.setdefault(label, {})
        for entry in trouble.entries:
            for table in (self.totals, sums):
                table[entry.cause] = min(table.get(entry.cause, 0) + entry.count, MAX_SUM)
            self._add(session, entry, now_us)

    def _add(self, session: Session, entry: frames.TroubleEntry, now_us: int) -> None:
        key = session.number, entry.cause
        row = self._rows.pop(key, None)
        if row is None:
            if len(self._rows) >= MAX_ROWS:
                self._make_room()
            row = Row(session, now_us)
        self._rows[key] = row
        row.last_us = now_us
        tally = row.tally
        tally.count = min(tally.count + entry.count, MAX_SUM)
        for name, count in entry.names.items():
            tally.add_name(printable(name), count)

    def _make_room(self) -> None:
        """Forget the oldest row of the user that has most, so that nobody pushes out the rows of others."""
        ((most, _),) = Counter(row.user for row in self._rows.values()).most_common(1)
        del self._rows[next(key for key, row in self._rows.items() if row.user == most)]

    def status(self, now_us: int) -> dict[str, object]:
        """Return the figures, ready for JSON, including names."""
        return {
            "totals": dict(self.totals),
            "programs": {label: dict(sums) for label, sums in self._programs.items()},
            "latest": [
                self._shown(*each, now_us)
                for each in islice(reversed(self._rows.items()), MAX_REPORTED)
            ],
        }

    @staticmethod
    def _shown(key: Key, row: Row, now_us: int) -> dict[str, object]:
        session, cause = key
        return {
            "session": session,
            "label": row.label,
            "pid": row.pid,
            "user": row.user,
            "address": row.address,
            "cause": cause,
            "count": row.tally.count,
            "names": {name: min(count, MAX_SUM) for name, count in row.tally.names.items()},
            "since_s": round((now_us - row.since_us) / 1e6, 3),
            "last_s": round((now_us - row.last_us) / 1e6, 3),
        }
