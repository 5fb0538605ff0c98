"""The end of a life, at which everything is healthy and must be in order; and what the bucket has without any store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from iris.wire import consumers, stream_items, streams
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import Answer, Call
from relay.store.bucket.objects import BucketError
from support.bucket_lives.clients import CONSUMER, RETENTION, body_of
from support.bucket_lives.history import End, judge_older
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.store import all_records
from support.keeper import OWNER

if TYPE_CHECKING:
    from support.bucket_lives.life import Life

SETTLED_S: Final = 600.0
"""Virtual time for everything to be in order after the last fault."""


class Ending:
    """The end of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._older: tuple[int, dict[str, bytes]] | None = None
        """(when it was made on the history's clock, copy of the bucket)."""

    async def copy_bucket(self, after_s: float) -> None:
        """Make a copy of the bucket at some time, which is restored at the end."""
        life = self._life
        await asyncio.sleep(after_s)
        while life.bucket.rolled_back:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.5)
        self._older = life.history.clock, dict(life.bucket.objects)

    async def run(self, others: list[asyncio.Task[None]]) -> None:
        """Wait for all who are done at some time, these `others` among them; then check everything."""
        life = self._life
        await self._until("the clients are not done", lambda: all(one.done() for one in (*life.writers, *others)))  # fmt: skip
        for one in (*life.writers, *others):
            one.result()
        await self._until("not every stream has one holder", self._in_order)
        for one in life.workers:
            one.calm = True
        for redriver in life.redrivers:
            redriver.calm = True
        ends = {plan.label: await self._whole(plan) for plan in life.streams}
        life.history.ends |= ends
        await self._until(
            "a reader does not reach the end",
            lambda: all(one.at >= ends[one.stream].next for one in life.readers),
        )
        await self._until(
            "a consumer does not reach the end",
            lambda: all(one.floor >= ends[one.stream].next for one in life.workers),
        )
        await self._until("objects that no stream has stay in the bucket", lambda: not self._orphans())  # fmt: skip
        endless = list(life.endless)
        for task in endless:
            task.cancel()
        for found in await asyncio.gather(*endless, return_exceptions=True):
            if not isinstance(found, asyncio.CancelledError):
                raise found  # type: ignore[misc]  # they never return
        for worker in life.workers:
            await self._note_consumer(worker.plan)
        for plan in life.streams:
            self._compare(plan, ends[plan.label], await self._whole(plan))
        await self._names()
        await self._restore_all()

    async def _until(self, what: str, holds: Callable[[], bool]) -> None:
        life = self._life
        try:
            await life.until(holds, SETTLED_S)
        except TimeoutError as err:
            holders = {
                plan.label: [one.number for one in life.processes.values() if one.holds(plan.uuid)]
                for plan in life.streams
            }
            raise TimeoutError(f"{what} {err}; holders: {holders}") from None

    def _in_order(self) -> bool:
        """Return whether each stream is held and served by one store, and the same one."""
        for plan in self._life.streams:
            holding = [one for one in self._life.processes.values() if one.holds(plan.uuid)]
            serving = [one for one in self._life.processes.values() if one.serves(plan.address)]
            if len(holding) != 1 or holding != serving or not holding[0].settled(plan.uuid):
                return False
        return True

    def _orphans(self) -> set[str]:
        """Return the segment objects that no stream names."""
        life = self._life
        there = {key for key in life.bucket.objects if key.startswith("segment/")}
        for process in life.processes.values():
            for stream in process.store.streams.values():
                if stream.log is not None:
                    there.difference_update(stream.log.offloading.keys())
        return there - life.bucket.excused

    async def _whole(self, plan: StreamPlan, *, again: bool = False) -> End:
        """Return everything that a stream has. If retention removes some of it meanwhile, it is read `again`, once."""
        found: list[tuple[int, bytes]] = []
        at = oldest = 0
        while True:
            answer = await self._at_end(plan, streams.Fetch(at, 1 << 19), streams.Fetched)
            for item in answer.items:
                if isinstance(item, stream_items.Hole) and item.reason == RETENTION:
                    if not found:
                        oldest = item.next
                        continue
                    if not again:
                        return await self._whole(plan, again=True)
                body = body_of(item)
                found.append((item.offset, body))
            at = answer.next
            if at == answer.high_water:
                break
        size = (await self._at_end(plan, streams.Describe(), streams.Described)).size_bytes
        return End(oldest, at, found, self._life.time.now_s, size)

    def _compare(self, plan: StreamPlan, before: End, now: End) -> None:
        """See that a stream did not change while nobody wrote to it, but for what grew too old."""
        kept = [one for one in before.items if one[0] >= now.oldest]
        if (now.items, now.next) != (kept, before.next) or (now.oldest != before.oldest and not plan.limited):  # fmt: skip
            self._life.breaks(f"{plan.label} changed after everything was quiet: it had {before}, has {now}")  # fmt: skip
        self._life.history.ends[plan.label] = now

    async def _note_consumer(self, plan: StreamPlan) -> None:
        """Note the position of a stream's consumer, and its dead letters."""
        life = self._life
        found = await self._at_end(plan, consumers.DescribeConsumers(), consumers.Consumers)
        life.history.final_places[plan.label, CONSUMER] = found.consumers[0].floor
        redriver = next((one for one in life.redrivers if one.plan is plan), None)
        holder = next(one for one in life.processes.values() if one.holds(plan.uuid))
        if redriver is not None and dead_uuid(plan.uuid) in holder.store.streams:
            letters = await redriver.letters()
            life.counts["dead letters"] += len(letters)
            life.history.letters[plan.label, CONSUMER] = set(letters.values())

    async def _names(self) -> None:
        """See that each name leads to the stream that has it."""
        life = self._life
        for plan in life.streams:
            for process in life.processes.values():
                if process.serves(plan.definition.name):
                    found = process.store.catalogue.by_address[plan.definition.name, OWNER.key_id]
                    if any(one.uuid == found.uuid for one in life.plan.made if one.deleted):
                        life.breaks(f"store {process.number} serves {found.uuid.hex()} under the name of {plan.label}")  # fmt: skip

    async def _at_end(self, plan: StreamPlan, call: Call, wanted: type[Answer]) -> Any:
        """Return the answer to a call when all is well; a takeover that began before may still be under way."""
        for _ in range(100):
            answer = await self._life.ask(plan.address, call)
            if isinstance(answer, wanted):
                return answer
            await asyncio.sleep(0.5)
        raise TimeoutError(f"{plan.label} is not served at the end: {answer}")

    # -- what the bucket has ---------------------------------------------------------------------------------

    async def _restore_all(self) -> None:
        """All stores are lost. An empty machine gets everything from the bucket, and from an older copy of it."""
        life = self._life
        ends = life.history.ends
        for number in list(life.processes):
            life.kill(number, disk=True)
        found = await self._restore(99)
        for plan in life.streams:
            end, there = ends[plan.label], found.get(plan.label)
            oldest = max(end.oldest, there.oldest) if there is not None and plan.limited else 0
            wanted = [one for one in end.items if one[0] >= oldest]
            if there is None or [one for one in there.items if one[0] >= oldest] != wanted:
                has = "nothing" if there is None else f"{len(there.items)} messages"
                life.breaks(f"{plan.label}: the bucket has {has}, its store had {len(wanted)}")
        for label in life.history.deleted:
            if label in found:
                life.breaks(f"{label}: it was deleted, and is in the bucket")
        if self._older is None:
            return
        clock, objects = self._older
        life.bucket.generation += 1
        life.bucket.objects = objects
        life.counts["older copies restored"] += 1
        for text in judge_older(life.history, clock, await self._restore(98)):
            life.breaks(text)

    async def _restore(self, number: int) -> dict[str, End]:
        """Return what the bucket has, by the labels of streams that clients know."""
        life = self._life
        process = life.start(number, runs=False)
        labels = {plan.uuid: plan.label for plan in life.plan.made}

        async def restore() -> dict[str, End]:
            while True:
                try:
                    await process.keeper.restore()
                except BucketError:  # it does not have all that it should: deletes still arrive
                    await asyncio.sleep(1)
                else:
                    break
            found = {}
            for uuid, stream in process.store.streams.items():
                if (log := stream.log) is not None and uuid in labels:
                    items = await all_records(log)
                    found[labels[uuid]] = End(log.oldest, log.next, items)
            return found

        restoring = process.loop.create_task(restore())
        await self._until("the bucket cannot be restored", restoring.done)
        life.kill(process.number, disk=True)
        return restoring.result()
