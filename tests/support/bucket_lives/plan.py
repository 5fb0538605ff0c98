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
ORDERS: Final = 1_000_000
"""First seed of lives in which streams begin on a disk, are moved by force when it is lost, and join the bucket."""
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
        """Somebody is about to delete it, or has; or another log has taken its place."""
        self.from_disk = False
        """Whether it began on the disk of a store."""
        self.revision = 1
        """The number that the next order for it has."""

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

    def __init__(self, rng: random.Random, *, orders: bool = False) -> None:
        """`orders`: some streams begin on a disk."""
        self._rng = rng
        self.made: list[StreamPlan] = []
        """All streams that clients have created or tried to."""
        self.disk_limit = rng.choice((0, 0, 1500, 4000))
        """Bytes of all streams of a store that stay on its disk; 0: all."""
        self.moves_s = rng.choice((0.0, 1.5, 3.0))
        """Mean pause between two moves; 0: there are none."""
        self.deletes = rng.random() < 0.35
        self.copies = rng.random() < 0.2
        """Whether there is a stream on a disk, which is copied to the bucket."""
        self.rolls_back = rng.random() < 0.2
        """Whether the newest objects of the bucket are hidden for a while."""
        self.keeps_older = rng.random() < 0.25
        """Whether an older copy of the bucket is restored, too."""
        self.streams = [self.stream(f"s{number}") for number in range(1, rng.randint(2, 3) + 1)]
        self.on_disk = [self.from_disk(f"d{one}") for one in range(1, rng.randint(1, 2) + 1)] if orders else []  # fmt: skip

    def from_disk(self, name: str) -> StreamPlan:
        """Draw a stream that begins on a disk. It keeps everything."""
        definition = Definition(name, dedup_window_us=DAY_US)
        return self._made(definition, self._rng.choice((0, 0, 3)))

    def again(self, lost: StreamPlan, uuid: bytes) -> StreamPlan:
        """Return the stream that takes the place of one that was lost."""
        lost.deleted = True
        definition = lost.definition.made_again(lost.uuid)
        return self._made(definition, lost.max_deliver, uuid)

    def _made(
        self, definition: Definition, max_deliver: int, uuid: bytes | None = None
    ) -> StreamPlan:
        number = len(self.made) + 1
        plan = StreamPlan(
            f"{definition.name}.{number}",
            uuid or founded(OWNER, number.to_bytes(16, "big")),
            definition,
            max_deliver,
        )
        plan.from_disk = True
        self.made.append(plan)
        return plan

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
