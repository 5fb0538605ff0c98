"""What a life has in it: its streams and their limits, and which of the things that stores do happen. All of it is
drawn from the seed, and each life has some of it.
"""

from __future__ import annotations

import random
from typing import Final

from iris.wire.orders import Definition
from support.founded import founded
from support.keeper import OWNER

DAY_US: Final = int(86_400e6)
RECORD_BYTES: Final = 170
"""Size of a record of a life in its log, about."""


class StreamPlan:
    """One stream. `label` is its name in histories: a stream that is created again has another one."""

    def __init__(self, label: str, uuid: bytes, definition: Definition, max_deliver: int) -> None:
        self.label = label
        self.uuid = uuid
        self.definition = definition
        self.max_deliver = max_deliver
        """Deliveries after which a message becomes a dead letter; 0: none does."""
        self.deleted = False
        """Somebody is about to delete it, or has."""

    @property
    def address(self) -> str:
        """Under which clients find it: the name may pass to another stream."""
        return self.uuid.hex()

    @property
    def limited(self) -> bool:
        """Whether retention removes messages."""
        one = self.definition
        return bool(one.max_messages or one.max_bytes or one.max_age_us)


class Plan:
    """What happens in one life."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.made: list[StreamPlan] = []
        """All streams that clients have created or tried to."""
        self.disk_limit = rng.choice((0, 0, 1500, 4000))
        """Bytes of all streams of a store that stay on its disk; 0: all."""
        self.moves_s = rng.choice((0.0, 1.5, 3.0))
        """Mean pause between two moves; 0: there are none."""
        self.deletes = rng.random() < 0.35
        self.rolls_back = rng.random() < 0.2
        """Whether the newest objects of the bucket are hidden for a while."""
        self.keeps_older = rng.random() < 0.25
        """Whether an older copy of the bucket is restored, too."""
        self.streams = [self.stream(f"s{number}") for number in range(1, rng.randint(2, 3) + 1)]

    def stream(self, name: str) -> StreamPlan:
        """Draw one more stream."""
        rng = self._rng
        number = len(self.made) + 1
        limits: dict[str, int] = {}
        match rng.choice(("all", "all", "count", "bytes", "age")):
            case "count":
                limits["max_messages"] = rng.randint(5, 15)
            case "bytes":
                limits["max_bytes"] = rng.randint(5, 15) * RECORD_BYTES
            case "age":
                limits["max_age_us"] = int(rng.uniform(4, 30) * 1e6)
        letters = rng.choice((0, 2, 3)) if not limits else 0
        definition = Definition(name, dedup_window_us=DAY_US, **limits)
        plan = StreamPlan(
            f"{name}.{number}", founded(OWNER, number.to_bytes(16, "big")), definition, letters
        )
        self.made.append(plan)
        return plan
