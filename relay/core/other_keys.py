"""Finds publishers whose topics have subscribers only under other keys, which is usually a mistake in a keyring.

a publication without a target ── `OtherKeys.look` ──► UNROUTED with the other keys, and a line in the status report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from iris.wire.frames import Unrouted
from iris.wire.kinds import OTHER_KEYS
from relay.core.interest import Interest
from relay.core.neighbor import Address, Route

AGAIN_US: Final = 10_000_000
"""After a report, publications under the same alias are not looked at for this time."""
LOOK_US: Final = 1_000_000
"""The same if there was nothing to report, so that changes of other topics cost little."""
MAX_REMEMBERED: Final = 64
"""Limit of addresses kept for status reports; over it, the oldest is forgotten."""


class OtherKeys:
    """The publications at one relay whose topics have subscribers only under other keys."""

    def __init__(
        self, interest: Interest, clock: Callable[[], int], settling: Callable[[], bool]
    ) -> None:
        """`settling`: whether other relays may not have sent their interest yet."""
        self._interest = interest
        self._clock = clock
        self._settling = settling
        self._remembered: dict[Address, Route] = {}
        """Address that was reported -> the publisher's route, oldest first."""

    def look(self, route: Route, count: int) -> None:
        """Report to a session that `count` publications have no subscriber while other keys have some.

        Until the interest changes, and for some time after that, the route is not looked at again.
        """
        now_us = self._clock()
        if now_us < route.unheard_us or route.barred or self._settling():
            return
        route.unheard_version = self._interest.version
        address = (route.name, route.key_id)
        others = self._others(address)
        route.unheard_us = now_us + (AGAIN_US if others else LOOK_US)
        if not others:
            return
        self._remembered.pop(address, None)
        while len(self._remembered) >= MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[address] = route
        route.neighbor.control(
            Unrouted(route.kind, route.name, route.key_id, count, OTHER_KEYS, others)
        )

    def shown(self) -> Iterator[dict[str, object]]:
        """Yield, for a status report, the reported addresses that still have subscribers only under other keys.

        An address is left out once its publisher has disconnected.
        """
        for address, route in list(self._remembered.items()):
            if not route.neighbor.closed and (others := self._others(address)):
                name, key_id = address
                yield {"topic": name, "key": key_id[:4].hex(), "others": others}
            else:
                self._remembered.pop(address, None)

    def _others(self, address: Address) -> dict[str, int]:
        """Return the subscribers under other keys of an address that has none; empty if it has some."""
        if self._interest.audience(*address):
            return {}
        return self._interest.other_audience(*address, named=True)
