"""Answers the calls of consumers at one stream.

A consumer is created by the first call that names it. It is saved while it changes, and its dead
letters are written to their log.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Final

from iris.core.conversation import UP
from iris.errors import IrisError
from iris.wire import streams
from iris.wire.consumers import (
    MAX_SHOWN,
    ChangeConsumer,
    Consume,
    ConsumerInfo,
    Delivered,
    Handed,
    HandOver,
    Range,
    RedriveLetters,
    Redriven,
    Settle,
)
from iris.wire.stream_items import DEAD_KIND, decode_dead
from relay.store.answers import item_to_wire
from relay.store.bucket.replica import Replica
from relay.store.clock import Clock
from relay.store.consumer import Consumer, Redrive
from relay.store.cursor import CursorDamaged, Dead, Settings
from relay.store.dispatch import Delivery, Taken
from relay.store.errors import (
    CursorsFull,
    LogDamaged,
    LogError,
    RecordsAway,
    RecordsUnreachable,
)
from relay.store.line import LEASE_US, Lease
from relay.store.log import Log
from relay.store.records import Gap, Hole, Item, Record
from relay.store.session import IncomingCall

MAX_EPHEMERAL: Final = 1024
MAX_LISTED: Final = 500
MAX_WAITING: Final = 16_384
MAX_REDRIVING: Final = 16
"""Calls for which records from the bucket are kept. What was read for another one is read again."""
IDLE_US: Final = 60_000_000
"""An ephemeral consumer without calls for this long is removed."""
SAVE_US: Final = 50_000
"""Pause between two saves of a consumer. A killed store delivers again what was settled since the last save."""

WriteDeadLetters = Callable[[str, list[Dead]], None]
"""Writes the dead letters of a consumer, by name; raises LogError if that failed."""


class _Waiting:
    __slots__ = ("call", "incoming", "until_us")

    def __init__(self, incoming: IncomingCall, call: Consume, until_us: int) -> None:
        self.incoming = incoming
        self.call = call
        self.until_us = until_us


class ConsumerCalls:
    """All consumers of a log.

    `now_us` is `Clock.elapsed_us`, so setting the wall clock ends no lease, delay or wait.
    """

    def __init__(
        self, log: Log, write_dead_letters: WriteDeadLetters, clock: Clock | None = None
    ) -> None:
        self._log = log
        self.replica: Replica | None = None
        """Copies the log to a bucket, which makes it durable; None if the disk does."""
        self._rests: dict[str, int] = {}
        """Consumer -> number of the bucket's object that has its creation or its last change."""
        self._clock = clock or Clock()
        self._opened_us = self._clock.awake_us
        """When this store has opened the log, in time that it was awake."""
        self.paused = False
        """No messages are dispatched. Workers may settle those they hold."""
        self._write_dead_letters = write_dead_letters
        self._consumers: dict[str, Consumer] = {}
        self._used_us: dict[str, int] = {}
        """Ephemeral consumer -> time of its last call."""
        self._waiting: dict[str, list[_Waiting]] = {}
        self._save_us: dict[str, int] = {}
        """Consumer -> when it may be saved next."""
        self._answered: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        """(consumer, worker) -> hop id of the call that last dispatched messages to the worker."""
        self._redriving: OrderedDict[int, tuple[RedriveLetters, dict[int, Record | None]]] = (
            OrderedDict()
        )
        """Calls that wait for records from the bucket -> what was read for them, without bodies."""

    # -- calls -----------------------------------------------------------------------------------------------

    def take(
        self,
        incoming: IncomingCall,
        call: Consume,
        now_us: int,
        *,
        lease: Lease | None = None,
        wait: bool = False,
    ) -> None:
        """Answer a Consume call now, or when there are messages for the worker.

        An earlier waiting call of the worker is answered with nothing. `lease` is that of the worker's client, unless
        the consumer is shared. Raises LineFull.
        """
        consumer = self._consumer(call, now_us)
        over: list[bytes] = []
        if lease is not None:
            if ended := consumer.expire_line(now_us):  # also if the worker finds no place
                self._taken_out(consumer, ended)
                self._after_settle(consumer, now_us)
            over = consumer.join(call.worker, lease, call.label, now_us, was_active=call.was_active)
            self._taken_out(consumer, over)
        waiting = self._waiting.setdefault(call.consumer, [])
        self._answer_empty(consumer, [one for one in waiting if one.call.worker == call.worker])
        if call.again:
            consumer.answer_lost(call.worker, now_us)
        else:
            consumer.confirm(call.worker)
        if not wait and self._answer(consumer, incoming, call, now_us, last=not call.wait_ms):
            pass
        elif len(waiting) >= MAX_WAITING:
            incoming.refuse(
                "leaving",
                f"{MAX_WAITING} workers already wait for consumer {call.consumer!r}, which is the limit; stop some of them",
            )
        else:
            waiting.append(_Waiting(incoming, call, now_us + 1000 * call.wait_ms))
        if over or (lease is not None and call.again):
            self._after_settle(consumer, now_us)  # there may be something for another worker

    def settle(self, incoming: IncomingCall, call: Settle, now_us: int) -> None:
        """Answer a Settle call.

        Messages that were dispatched before a crash and not saved since are delivered again, so
        settling them has no effect.
        """
        consumer = self._get(call.consumer)
        for ranges in (call.done, call.failed, call.held, call.had, call.unseen):
            _check_ranges(ranges, self._log.next)
        worker = call.worker
        if not consumer.may_settle(worker):
            self._refuse_settling(consumer, incoming, call, now_us)
            return
        consumer.line.renew(worker, self._clock.awake_us)
        if not (consumer.settings.shared or call.gone or consumer.line.active):
            # It was active before this store opened the log, and is busy: it asks for messages later.
            consumer.line.hold(self._clock.awake_us + LEASE_US)
        work: list[Callable[[], int]] = [
            partial(consumer.ack, worker, r.first, r.next, now_us) for r in call.done
        ]
        if call.through is not None:
            work.append(partial(consumer.ack_through, worker, call.through, now_us))
        failed = (call.delay_us, call.reason, now_us)
        work += [partial(consumer.nack, worker, r.first, r.next, *failed) for r in call.failed]
        work += [partial(consumer.touch, worker, r.first, r.next, now_us) for r in call.held]
        work += [partial(consumer.give_back, worker, r.first, r.next, now_us) for r in call.unseen]
        count = 0
        for each in call.had:
            with contextlib.suppress(ValueError):
                consumer.confirm_range(worker, each.first, each.next, now_us)
        for one in work:
            # Messages dispatched before a crash and not saved since are unknown here. They are
            # dispatched again.
            with contextlib.suppress(ValueError):
                count += one()
        if call.gone:
            consumer.confirm(worker)
            self._leave(consumer, worker, now_us)
        self._after_settle(consumer, now_us)
        incoming.answer(streams.Settled(count))

    def _leave(self, consumer: Consumer, worker: bytes, now_us: int) -> None:
        self._taken_out(consumer, [worker])
        consumer.worker_left(worker, now_us)

    def _refuse_settling(
        self, consumer: Consumer, incoming: IncomingCall, call: Settle, now_us: int
    ) -> None:
        """Answer a Settle call of a worker that is not active: nothing is settled, but the worker may leave."""
        if call.gone:
            self._leave(consumer, call.worker, now_us)
        if call.done or call.failed or call.held or call.had or call.through is not None:
            incoming.refuse(
                "not-active",
                f"another worker of consumer {consumer.name!r} is active, so what this one settles is refused: the messages "
                "are delivered to the active one",
            )
        else:
            incoming.answer(streams.Settled(0))

    def _taken_out(self, consumer: Consumer, workers: Sequence[bytes]) -> None:
        """Answer the waiting calls of workers that have no place any more; if they ask again, they get the last."""
        if workers:
            waiting = self._waiting.get(consumer.name, [])
            self._answer_empty(consumer, [one for one in waiting if one.call.worker in workers])

    def callers_left(self, hops: Set[int], now_us: int) -> None:
        """Remove the calls, by hop id, whose callers no longer wait.

        What was just dispatched to them goes to other workers.
        """
        for name, waiting in self._waiting.items():
            consumer = self._consumers.get(name)
            if consumer is not None:
                self._answer_empty(consumer, [one for one in waiting if one.incoming.hop in hops])
        for key in [key for key, hop in self._answered.items() if hop in hops]:
            del self._answered[key]
            consumer = self._consumers.get(key[0])
            if consumer is not None:
                consumer.answer_lost(key[1], now_us, counted=False)
                self._after_settle(consumer, now_us)

    def detached(self) -> None:
        """The session has ended, and the hop ids of its calls have no meaning any more."""
        self._answered.clear()

    def _answer_empty(self, consumer: Consumer, these: list[_Waiting]) -> None:
        """Answer these waiting calls with nothing, so that the relay forgets them."""
        for one in these:
            self._waiting[consumer.name].remove(one)
            one.incoming.answer(self._delivered(consumer, one.call, Taken([], 0, 0)))

    def described(self, after: str, *, workers: bool = False) -> tuple[list[ConsumerInfo], bool]:
        """Return the state of the consumers after the name `after`, sorted by name, and whether
        there are more. `workers`: also which workers are active and stand by.
        """
        names = sorted({*self._log.cursors.names(), *self._consumers})
        names = [name for name in names if name > after]
        infos = [self._info(self._get(name), workers=workers) for name in names[:MAX_LISTED]]
        return infos, len(names) > MAX_LISTED

    def _info(self, consumer: Consumer, *, workers: bool = True) -> ConsumerInfo:
        waiting = {one.call.worker for one in self._waiting.get(consumer.name, ())}
        info, settings, counts = consumer.info(waiting), consumer.settings, consumer.counts
        line = list(consumer.line)
        standing = [place.label for place in line if place.worker != consumer.line.active]
        shown = (
            [place.label for place in line if place.worker == consumer.line.active],
            standing[:MAX_SHOWN],
        )
        return ConsumerInfo(
            consumer.name, settings.shared, settings.durable, info.floor, info.position, info.lag, info.pending,
            info.redelivering, info.workers, info.dead, counts.missed, counts.late, consumer.paused,
            settings.ack_timeout_us, settings.max_deliver, counts.redriven,
            *(shown if workers else ([], [])), len(standing),
        )  # fmt: skip

    def change(self, call: ChangeConsumer, now_us: int) -> ConsumerInfo:
        """Change the settings of a consumer, or pause or resume it, and return its state once that is on disk.

        Raises ConsumerRefused, ValueError or LogWriteFailed.
        """
        consumer = self._get(call.consumer)
        consumer.change(
            ack_timeout_us=call.ack_timeout_us, max_deliver=call.max_deliver, paused=call.paused, now_us=now_us
        )  # fmt: skip
        self._save(consumer)
        self._after_settle(consumer, now_us)
        return self._info(consumer)

    def hand_over(self, call: HandOver, now_us: int) -> ConsumerInfo:
        """Let the next worker of a consumer that stands by be active. Raises ConsumerRefused."""
        consumer = self._get(call.consumer)
        if not consumer.hand_over(now_us):
            raise ConsumerRefused(f"no worker of consumer {call.consumer!r} stands by")
        self._after_settle(consumer, now_us)
        return self._info(consumer)

    def redrive(self, call: RedriveLetters, dead: Log, now_us: int) -> Redriven:
        """Make the messages of these letters in the log `dead` deliverable again, then delete the letters.

        The consumer is saved in between. After a crash there, a message is deliverable and its letter is still there,
        so it may be redriven twice, but it is never lost. Raises ConsumerRefused, LogDamaged or LogWriteFailed.
        """
        consumer = self._get(call.consumer)
        if not consumer.settings.durable:
            raise ConsumerRefused(
                f"consumer {call.consumer!r} is not durable, so redriven messages could be lost; use a durable consumer"
            )
        _check_letters(call.letters, dead.next)
        letters = [
            (at, self._message_of(dead.read(at, 1, now_us=0).items[0], call.consumer))
            for at in call.letters
        ]
        found = self._letters(
            consumer, call, [one for _, one in letters if one is not None], now_us
        )
        self._move_dead_letters(consumer)
        dealt_with: set[int] = set()
        gone = []
        count = 0
        for at, offset in letters:
            if offset is not None:  # otherwise it was redriven before, and the answer was lost
                outcome = consumer.redrive(offset, found[offset], now_us)
                if outcome is Redrive.FULL:
                    break
                if outcome is Redrive.WAITING:
                    dealt_with.add(at)
                else:
                    gone.append(at)
            count += 1
        self._save(consumer)
        if dealt_with:
            dead.remove(dealt_with)
        self._after_settle(consumer, now_us)
        return Redriven(count, gone)

    def _letters(
        self, consumer: Consumer, call: RedriveLetters, offsets: Sequence[int], now_us: int
    ) -> dict[int, Record | None]:
        """Read all records of a call before anything changes: the call is repeated if one of them is in the bucket.

        What was read is kept for the repeated call, because all of it may be more than the cache of records has room
        for.
        """
        found = self._redriving.setdefault(id(call), (call, {}))[1]
        if len(self._redriving) > MAX_REDRIVING:
            self._redriving.popitem(last=False)
        for offset in offsets:
            if offset not in found:
                found[offset] = consumer.letter(offset, now_us)
        self._redriving.pop(id(call), None)
        return found

    def delete(self, name: str) -> bool:
        """Delete a consumer; return whether it existed. Raises LogWriteFailed."""
        known = self._forget(name)
        self._used_us.pop(name, None)
        self._save_us.pop(name, None)
        self._rests.pop(name, None)
        for waiting in self._waiting.pop(name, []):
            waiting.incoming.refuse("consumer", f"consumer {name!r} was deleted")
        return self._log.cursors.delete(name) or known

    # -- time ------------------------------------------------------------------------------------------------

    def wake(self, now_us: int) -> None:
        """Dispatch available messages to the waiting workers."""
        for name in list(self._waiting):
            self._wake(name, now_us)

    def _wake(self, name: str, now_us: int) -> None:
        waiting = self._waiting[name]
        consumer = self._consumers.get(name)
        if not waiting or consumer is None:
            del self._waiting[name]
            return
        # The longest waiting call is first. If there is nothing for it, there is nothing for the others, which stand by
        # unless the consumer is shared.
        while one := next(
            (one for one in waiting if consumer.line.active in (None, one.call.worker)), None
        ):
            if one.incoming.session.state is UP and not self._answer(
                consumer, one.incoming, one.call, now_us, last=False
            ):
                return
            waiting.remove(one)

    def _arrived(self, name: str) -> None:
        """Records that a consumer needs have arrived from the bucket."""
        if name in self._waiting:
            self._wake(name, self._clock.elapsed_us)

    def tend(self, now_us: int) -> None:
        """End expired leases and waits, write dead letters, and save consumers. Raises LogError."""
        for name, waiting in self._waiting.items():
            over = [one for one in waiting if one.until_us <= now_us]
            for one in over:
                waiting.remove(one)
                consumer = self._consumers.get(name)
                if consumer is not None and not self._answer(
                    consumer, one.incoming, one.call, now_us, last=True
                ):
                    one.incoming.refuse("consumer", f"consumer {name!r} was deleted")
        for name, consumer in list(self._consumers.items()):
            if len(consumer.line):
                active = consumer.line.active
                self._taken_out(consumer, consumer.expire_line(now_us))
                if consumer.line.active != active:
                    self._after_settle(consumer, now_us)
            deadline_us = consumer.deadline_us
            if deadline_us is not None and deadline_us <= now_us:
                self._after_settle(consumer, now_us)
            if name in self._used_us:
                if not self._waiting.get(name) and self._used_us[name] + IDLE_US < now_us:
                    self._forget(name)
                    del self._used_us[name]
            elif consumer.dirty and now_us >= self._save_us.get(name, 0):
                began_s = time.monotonic()
                consumer.save()
                # A large table takes long to save. Saving must not use more than a twentieth of the time.
                took_us = int(1e6 * (time.monotonic() - began_s))
                self._save_us[name] = now_us + max(SAVE_US, 20 * took_us)

    def refuse_waiting(self, reason: str) -> None:
        """Refuse all waiting calls."""
        for waiting in self._waiting.values():
            for one in waiting:
                one.incoming.refuse("leaving", reason)
        self._waiting.clear()

    def clear_lines(self) -> None:
        """Take all workers out of the lines, because the log is closed or served by another store."""
        for consumer in self._consumers.values():
            consumer.line.clear()

    def close(self) -> None:
        """Save all durable consumers. Raises LogWriteFailed."""
        for name, consumer in self._consumers.items():
            if name not in self._used_us and consumer.dirty:
                consumer.save(sync=True)

    # -- inside ----------------------------------------------------------------------------------------------

    def _consumer(self, call: Consume, now_us: int) -> Consumer:
        settings = Settings(
            shared=call.shared,
            ack_timeout_us=call.ack_timeout_us,
            max_deliver=call.max_deliver,
            durable=call.durable,
        )
        if call.create:
            consumer = self._consumers.get(call.consumer) or self._load(call.consumer)
        else:
            consumer = self._get(call.consumer)
        if consumer is None:
            if not call.durable and len(self._used_us) >= MAX_EPHEMERAL:
                raise ConsumerRefused(
                    f"the stream has {MAX_EPHEMERAL} consumers that are not durable, which is the limit; stop one, or use a durable consumer"
                )
            start = min(call.start, self._log.next)
            consumer = Consumer(self._log, call.consumer, settings, start, now_us, self._clock)
            if call.durable:
                try:
                    self._save(consumer)
                except CursorsFull as err:
                    raise ConsumerRefused(str(err)) from err
            self._consumers[call.consumer] = consumer
        elif settings != consumer.settings and settings not in consumer.former:
            raise ConsumerRefused(
                f"consumer {call.consumer!r} exists with other settings: {_differing(consumer.settings, settings)}; "
                "use those settings or another name, change max_deliver and ack_timeout with `iris stream consumer change`, "
                "or delete the consumer and its position with `iris stream consumer delete`"
            )
        if not call.durable:
            self._used_us[call.consumer] = now_us
        return consumer

    def _forget(self, name: str) -> bool:
        """Remove a consumer from memory; return whether it was there."""
        consumer = self._consumers.pop(name, None)
        if consumer is not None:
            consumer.line.clear()
        return consumer is not None

    def _get(self, name: str) -> Consumer:
        consumer = self._consumers.get(name) or self._load(name)
        if consumer is None:
            raise ConsumerRefused(f"the stream has no consumer {name!r}")
        return consumer

    def _load(self, name: str) -> Consumer | None:
        try:
            consumer = Consumer.load(self._log, name, self._clock.elapsed_us, self._clock)
            consumer.line.hold(self._opened_us + LEASE_US)
            self._consumers[name] = consumer
        except KeyError:
            return None
        except CursorDamaged as err:
            raise ConsumerRefused(f"{err}; delete the consumer and create it again") from err
        return consumer

    def _answer(
        self, consumer: Consumer, incoming: IncomingCall, call: Consume, now_us: int, *, last: bool
    ) -> bool:
        """Answer a call with the available messages.

        Returns False if there are none and the call may wait (not `last`).
        """
        if self.paused or consumer.paused:
            if last:
                incoming.answer(self._delivered(consumer, call, Taken([], 0, 0)))
            return last
        limit = min(call.max_bytes, incoming.session.message_limit)
        try:
            taken = consumer.take(call.worker, limit, call.prefetch, now_us)
        except LogDamaged as err:
            incoming.refuse("damaged", str(err))
            return True
        except RecordsUnreachable as err:
            incoming.refuse("leaving", str(err))
            return True
        except RecordsAway as away:
            away.when((self, consumer.name), lambda: self._arrived(consumer.name))
            taken = Taken([], 0, 0)
        self._move_dead_letters(consumer)
        if not taken.items and not last:
            return False
        incoming.rests_on = self._rests_on(consumer, taken)
        incoming.answer(self._delivered(consumer, call, taken))
        if taken.messages:
            key = (call.consumer, call.worker)
            self._answered[key] = incoming.hop
            self._answered.move_to_end(key)
            if len(self._answered) > MAX_WAITING:
                self._answered.popitem(last=False)
        return True

    def rest_on(self, replica: Replica | None) -> None:
        """Deliver what this replica has brought to the bucket; None: what is on the disk."""
        self.replica = replica
        self._rests.clear()  # numbers of another journal

    def _rests_on(self, consumer: Consumer, taken: Taken) -> int | None:
        """Return the object of the bucket without which these messages may not be delivered; None: the last one.

        That they were dispatched need not be in the bucket: a successor delivers them again, as a restarted store does.
        """
        if self.replica is None or any(isinstance(item, Hole) for item in taken.items):
            return None
        tail = self.replica.tail
        ends = [
            item.record.next if isinstance(item, Delivery) else item.next for item in taken.items
        ]
        number = tail.number_of(max(ends, default=0))
        return max(number, tail.changed, self._rests.get(consumer.name, 0))

    def _save(self, consumer: Consumer) -> None:
        """Save a consumer. Nothing is delivered until this is durable. Raises CursorsFull or LogWriteFailed."""
        consumer.save(sync=True)
        if self.replica is not None:
            self._rests[consumer.name] = self.replica.last

    def _delivered(self, consumer: Consumer, call: Consume, taken: Taken) -> Delivered:
        items = [_to_wire(item) for item in taken.items]
        timeout_us = consumer.settings.ack_timeout_us
        changed_us = 0 if timeout_us == call.ack_timeout_us else timeout_us
        return Delivered(items, self._log.uuid, consumer.info().lag, changed_us)

    def _message_of(self, letter: Item, consumer: str) -> int | None:
        """Return the offset of the message that a dead letter refers to; None if the letter was removed."""
        if isinstance(letter, Hole):
            return None
        dead = None
        if isinstance(letter, Record) and letter.kind == DEAD_KIND:
            dead = decode_dead(letter.body)
        if dead is None or (dead.consumer, dead.uuid) != (consumer, self._log.uuid):
            raise ConsumerRefused(
                f"letters: the record at {letter.first} is not a dead letter of consumer {consumer!r}"
            )
        return dead.offset

    def _after_settle(self, consumer: Consumer, now_us: int) -> None:
        consumer.expire(now_us)
        self._move_dead_letters(consumer)
        if consumer.name in self._waiting:
            self._wake(consumer.name, now_us)

    def _move_dead_letters(self, consumer: Consumer) -> None:
        letters = consumer.dead_letters()
        if letters:
            try:
                self._write_dead_letters(consumer.name, letters)
            except LogError:
                return  # they stay in the table, and are written when the disk works again
            consumer.forget_dead(len(letters))


def _check_ranges(ranges: Sequence[Range], end: int) -> None:
    """Raise ConsumerRefused unless the ranges are ascending and below `end`, so that no message is
    processed twice.
    """
    last = 0
    for one in ranges:
        if not last <= one.first < one.next <= end:
            raise ConsumerRefused(
                f"offsets {one.first} to {one.next} are not in ascending order and below the end of the stream, {end}"
            )
        last = one.next


def _check_letters(letters: Sequence[int], end: int) -> None:
    """Raise ConsumerRefused unless these offsets of dead letters are ascending and below `end`."""
    last = -1
    for at in letters:
        if not last < at < end:
            raise ConsumerRefused(
                f"letters: {at} is not in ascending order and below the end of the dead letters, {end}"
            )
        last = at


def _to_wire(item: Delivery | Gap | Hole) -> Handed:
    if isinstance(item, Delivery):
        count = item.record.count
        wanted = item.wanted.to_bytes((count + 7) // 8, "little")
        return Handed(item_to_wire(item.record), wanted, item.deliveries)
    return Handed(item_to_wire(item))


class ConsumerRefused(IrisError):
    """The named consumer cannot be created or does not exist."""


def _differing(existing: Settings, requested: Settings) -> str:
    """Return the settings that differ, named as the arguments of `client.streams.consumer`."""
    said = []
    for field in existing.__struct_fields__:
        has, wants = getattr(existing, field), getattr(requested, field)
        if has != wants and field.endswith("_us"):
            said.append(f"{field.removesuffix('_us')} {has / 1e6:g}, not {wants / 1e6:g}")
        elif has != wants:
            said.append(f"{field} {has}, not {wants}")
    return ", ".join(said)
