"""What a store makes of clocks: one that may be set, one that passes while the host sleeps, and a process that is
stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from iris.wire.codec import END
from relay.store.clock import MAX_STEPS, STALL_US, Clock, Steps
from relay.store.consumer import Consumer
from relay.store.cursor import Settings
from relay.store.dispatch import Delivery, Taken
from relay.store.log import Log
from relay.store.records import Entry

SECOND = 1_000_000
HOUR = 3600 * SECOND
BEGIN = 1_700_000_000 * SECOND
ANN, BOB = b"ann", b"bob"
LOOK = SECOND // 20


class Host:
    """The clocks of a host, and a store's look at them every 50 ms."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.wall_us, self.running_us = BEGIN, 5 * SECOND
        self.steps: list[int] = []
        self.look()

    def look(self) -> None:
        if step := self.clock.update(self.wall_us, self.running_us):
            self.steps.append(step)

    def run(self, seconds: float, *, drift: float = 0.0) -> None:
        """Time passes while the store runs; `drift` is what the wall clock gains in a second."""
        for _ in range(round(seconds * 20)):
            self.wall_us += LOOK + round(LOOK * drift)
            self.running_us += LOOK
            self.look()

    def sleep(self, seconds: float) -> None:
        """The host sleeps, or the process is stopped."""
        self.wall_us += round(seconds * SECOND)
        self.running_us += round(seconds * SECOND)
        self.look()

    def set(self, seconds: float) -> None:
        """Somebody sets the clock, forward or back."""
        self.wall_us += round(seconds * SECOND)
        self.look()


def test_a_clock_that_nobody_sets_goes_as_time_does() -> None:
    host = Host()
    host.run(10)
    clock = host.clock
    assert (
        clock.wall_us == clock.elapsed_us == clock.awake_us == clock.high_us == BEGIN + 10 * SECOND
    )
    assert host.steps == []


@pytest.mark.parametrize("hours", [1, -1])
def test_a_step_is_noticed_once_and_moves_only_the_wall_clock(hours: int) -> None:
    host = Host()
    host.run(1)
    host.set(3600 * hours)
    host.run(5)
    clock = host.clock
    assert host.steps == [hours * HOUR]
    assert clock.elapsed_us == clock.awake_us == BEGIN + 6 * SECOND
    assert clock.wall_us == BEGIN + 6 * SECOND + hours * HOUR
    assert clock.high_us == max(clock.wall_us, BEGIN + 6 * SECOND), (
        "it goes on as if nobody had set it back"
    )


@pytest.mark.parametrize("drift", [0.0005, -0.0005, 0.1, -0.1])
def test_drift_is_followed_and_is_not_a_step(drift: float) -> None:
    host = Host()
    host.run(600, drift=drift)
    clock = host.clock
    assert host.steps == []
    assert clock.elapsed_us == BEGIN + 600 * SECOND
    assert clock.high_us == clock.wall_us == host.wall_us


def test_a_host_that_slept_ends_no_lease_and_makes_up_for_delays() -> None:
    host = Host()
    host.sleep(3600)
    clock = host.clock
    assert host.steps == []
    assert clock.elapsed_us == clock.wall_us == BEGIN + HOUR
    assert clock.awake_us == BEGIN + STALL_US


def test_steps_of_a_log_count_for_what_was_stored_before_them() -> None:
    steps = Steps()
    steps.back(HOUR, 10)
    steps.back(SECOND, 20)
    assert [steps.grace_us(at) for at in (0, 9, 10, 19, 20)] == [
        HOUR + SECOND, HOUR + SECOND, SECOND, SECOND, 0,
    ]  # fmt: skip
    steps.forward(HOUR)
    assert [steps.grace_us(at) for at in (0, 10, 20)] == [SECOND, 0, 0]
    for end in range(10 * MAX_STEPS):
        steps.back(SECOND, end)
    assert len(steps._steps) == MAX_STEPS
    assert steps.grace_us(0) == (1 + 10 * MAX_STEPS) * SECOND


# -- a consumer by these clocks ------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.create(str(tmp_path / "log"), uuid=bytes(16), definition=b"", created_us=BEGIN) as log:
        yield log


class Worker(Host):
    """A consumer and its store's clocks; the store tells its logs of steps."""

    def __init__(self, log: Log, ack_timeout_us: int = 24 * HOUR, max_deliver: int = 0) -> None:
        super().__init__()
        self.log = log
        settings = Settings(shared=True, ack_timeout_us=ack_timeout_us, max_deliver=max_deliver)
        self.consumer = Consumer(log, "c", settings, 0, self.clock.elapsed_us, self.clock)

    def look(self) -> None:
        super().look()
        if self.steps:
            step = self.steps.pop()
            if step < 0:
                self.log.steps.back(-step, self.log.next)
            else:
                self.log.steps.forward(step)

    def append(
        self, *, due_s: float | None = None, ttl_s: float | None = None, key: int | None = None
    ) -> None:
        def at(seconds: float | None) -> int:
            return 0 if seconds is None else self.wall_us + round(seconds * SECOND)

        end = END.pack(0, 0, 1, 0)
        key_hash = None if key is None else bytes([key]) * 32
        entry = Entry(
            1,
            "orders",
            bytes(16),
            bytes(16),
            end,
            b"sealed",
            None,
            key_hash,
            False,
            at(ttl_s),
            at(due_s),
        )
        self.log.append([entry], self.clock.wall_us)

    def take(self, worker: bytes = ANN) -> list[int]:
        taken: Taken = self.consumer.take(worker, 1 << 30, 1000, self.clock.elapsed_us)
        self.consumer.confirm(worker)
        return [item.record.first for item in taken.items if isinstance(item, Delivery)]

    def due_after(self, limit_s: float, worker: bytes = BOB) -> float:
        """Return after how many seconds something can be taken."""
        for tenth in range(round(limit_s * 10) + 1):
            if self.take(worker):
                return tenth / 10
            self.run(0.1)
        raise AssertionError(f"nothing came for {limit_s} s")


@pytest.mark.parametrize("hours", [0, 1, -1])
def test_leases_end_on_time_wherever_the_clock_is_set(log: Log, hours: int) -> None:
    host = Worker(log, ack_timeout_us=10 * SECOND, max_deliver=1)
    host.append()
    assert host.take(ANN) == [0]
    for _ in range(4):
        host.run(2)
        host.set(hours * 3600)
        host.consumer.expire(host.clock.elapsed_us)
        assert not host.consumer.dead_letters(), "its worker lives"
    assert host.take(BOB) == []
    host.run(2.1)
    host.consumer.expire(host.clock.elapsed_us)
    assert [dead.offset for dead in host.consumer.dead_letters()] == [0]


@pytest.mark.parametrize("hours", [0, 1, -1])
def test_a_nack_comes_again_after_its_delay_wherever_the_clock_is_set(log: Log, hours: int) -> None:
    host = Worker(log)
    host.append()
    host.take(ANN)
    host.consumer.nack(ANN, 0, 1, 5 * SECOND, "", host.clock.elapsed_us)
    host.run(1)
    host.set(hours * 3600)
    assert host.due_after(5) == pytest.approx(4, abs=0.2)


@pytest.mark.parametrize("drift", [0.0005, -0.0005])
def test_a_nack_does_not_drift(log: Log, drift: float) -> None:
    host = Worker(log)
    host.append()
    host.take(ANN)
    host.consumer.nack(ANN, 0, 1, 600 * SECOND, "", host.clock.elapsed_us)
    host.run(599, drift=drift)
    assert host.take() == []
    host.run(1.1, drift=drift)
    assert host.take() == [0]


def test_a_host_that_slept_takes_nothing_from_its_workers(log: Log) -> None:
    host = Worker(log, ack_timeout_us=10 * SECOND)
    host.append()
    host.append()
    host.take(ANN)
    host.consumer.nack(ANN, 1, 2, 600 * SECOND, "", host.clock.elapsed_us)
    host.sleep(3600)
    assert host.take(BOB) == [1], "the delay is over, the lease is not"
    host.run(9)
    host.consumer.expire(host.clock.elapsed_us)
    assert host.take(BOB) == [0]


def test_leases_of_a_consumer_that_is_new_after_the_host_slept_end_on_time(log: Log) -> None:
    host = Worker(log, ack_timeout_us=10 * SECOND)
    host.append()
    host.sleep(3600)
    settings = Settings(shared=True, ack_timeout_us=10 * SECOND)
    host.consumer = Consumer(log, "new", settings, 0, host.clock.elapsed_us, host.clock)
    assert host.take(ANN) == [0]
    assert host.due_after(11) == pytest.approx(10, abs=0.2)


def test_what_was_deferred_before_a_step_back_comes_when_as_much_time_has_passed(log: Log) -> None:
    host = Worker(log)
    host.append(due_s=10)
    host.run(4)
    host.set(-3600)
    assert host.take() == []
    assert host.due_after(7) == pytest.approx(6, abs=0.2)


def test_what_is_deferred_after_a_step_back_comes_by_the_new_time(log: Log) -> None:
    host = Worker(log)
    host.append(due_s=1)
    host.run(2)
    assert host.take() == [0], "due times until now were listed"
    host.set(-3600)
    host.append(due_s=5)
    host.append()
    host.append(due_s=7200)
    assert host.take() == [2], "what is not due holds nothing up, and none comes early"
    assert host.due_after(6) == pytest.approx(5, abs=0.2)
    host.run(7200 - 10)
    assert host.take() == []
    assert host.due_after(6) == pytest.approx(5, abs=0.4)


def test_a_step_forward_brings_what_is_due_by_the_new_time(log: Log) -> None:
    host = Worker(log)
    host.append(due_s=3600)
    host.append(ttl_s=60)
    host.set(3600)
    assert host.take() == [0], "and not what has expired"


def test_steps_there_and_back_change_nothing(log: Log) -> None:
    host = Worker(log)
    host.append(due_s=10)
    for hours in (-1, 1):
        host.run(1)
        host.set(3600 * hours)
    assert host.take() == []
    host.append(due_s=3)
    assert host.due_after(4) == pytest.approx(3, abs=0.2)
    assert host.due_after(6) == pytest.approx(5, abs=0.4)


@pytest.mark.parametrize("hours", [0, 1, -1])
def test_a_store_that_starts_again_after_a_step_waits_no_longer_than_it_had_to(
    log: Log, hours: int
) -> None:
    host = Worker(log)
    host.append()
    host.append(due_s=1)
    host.take()
    host.consumer.nack(ANN, 0, 1, 20 * SECOND, "", host.clock.elapsed_us)
    host.run(2)
    assert host.take() == [1]
    host.consumer.ack(ANN, 1, 2, host.clock.elapsed_us)
    host.consumer.save()
    again = Worker(log)
    again.set(2 + 3600 * hours)
    again.consumer = Consumer.load(log, "c", again.clock.elapsed_us, again.clock)
    if hours > 0:
        assert again.take() == [0]
        return
    again.append(due_s=1)  # behind what this consumer has listed, by an old clock
    assert again.due_after(2) == pytest.approx(1, abs=0.2)
    assert again.due_after(20) == pytest.approx(17, abs=0.4)
