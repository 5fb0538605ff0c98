"""Counts losses and failed handlers by cause and name, in bounded memory: for a client's next report, and at relays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from iris.wire import frames
from iris.wire.frames import MAX_TROUBLE_NAME
from iris.wire.kinds import MAX_TROUBLE_NAMES, TroubleCause

MAX_COUNT: Final = 0xFFFFFFFF
"""Largest count that a report carries."""


class Tally:
    """How often one thing happened, and some of that by name."""

    __slots__ = ("count", "names")

    def __init__(self) -> None:
        self.count = 0
        self.names: dict[str, int] = {}
        """Name -> count, of at most `MAX_TROUBLE_NAMES` names. What is of others is only in `count`."""

    def add_name(self, name: str, count: int) -> None:
        """Add to the count of a name. At the limit, a larger one takes the place of the smallest."""
        names = self.names
        if name not in names and len(names) >= MAX_TROUBLE_NAMES:
            least = min(names, key=names.__getitem__)
            if names[least] >= count:
                return
            del names[least]
        names[name] = names.get(name, 0) + count


class Unreported:
    """What a client has not reported to its relay yet."""

    __slots__ = ("_tallies",)

    def __init__(self) -> None:
        self._tallies: dict[TroubleCause, Tally] = {}

    def __bool__(self) -> bool:
        return bool(self._tallies)

    def add(self, cause: TroubleCause, name: str, count: int) -> None:
        """Count something that happened to a cluster, topic or filter, or to none (""). A longer name is cut."""
        if len(name) > MAX_TROUBLE_NAME:
            name = name[: MAX_TROUBLE_NAME - 1] + "…"
        tally = self._tallies.get(cause) or Tally()
        count = min(count, MAX_COUNT - tally.count)
        if count <= 0:
            return
        self._tallies[cause] = tally
        tally.count += count
        if name:
            tally.add_name(name, count)

    def take(self) -> frames.Trouble:
        """Return the report of everything counted, and begin again. There must be something."""
        tallies, self._tallies = self._tallies, {}
        return frames.Trouble(
            [
                frames.TroubleEntry(cause, tally.count, tally.names)
                for cause, tally in tallies.items()
            ]
        )


SHOWN: Final = 3
"""Names in a text about one cause."""
ADVICE: Final[Mapping[str, str]] = {
    "queue full": "handle messages faster, give it a longer queue, or let publishers wait (when_full)",
    "unread": "let it end only after it has handled what it received",
    "missing": "its log has the reason (client.loss)",
    "not sent": "its log has the reason (client.loss)",
    "handler failed": "its log has the error (client.handler_failed)",
}
"""Cause -> what an operator can do. Losses of unknown size are not in it: perhaps nothing was lost."""


def described(cause: str, count: int, names: Mapping[str, int]) -> str:
    """Return what a program has reported, as a phrase that follows its name."""
    first = sorted(names, key=lambda name: (-names[name], name))[:SHOWN]
    more = sum(names[name] for name in first) < count
    of = f" of {', '.join(first)}{' and others' if more else ''}" if first else ""
    messages = f"{count:,} message{'' if count == 1 else 's'}"
    match cause:
        case "queue full":
            return f"lost {messages}{of}: its own queue was full"
        case "unread":
            return f"lost {messages}{of}: it ended before it handled them"
        case "missing":
            return f"lost {messages}{of}: they did not arrive, or could not be opened"
        case "uncounted":
            return f"may have lost messages{of}: a relay or link was lost ({count:,} times)"
        case "not sent":
            return f"sent {messages}{of.replace(' of ', ' to ', 1)} that nobody got"
        case "handler failed":
            return f"{count:,} call{'' if count == 1 else 's'}{of} failed: a handler raised an exception"
    return f"{cause}: {count:,}{of}"  # of a newer relay
