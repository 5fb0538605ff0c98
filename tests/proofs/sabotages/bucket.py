"""Streams in a bucket: who holds a journal, where it ends, and when an answer leaves."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

TAKEOVERS = ("tests/unit/relay/store/bucket/test_takeovers.py",)
TAIL = ("tests/unit/relay/store/bucket/test_tail.py",)
SUCCESSION = ("tests/unit/relay/store/bucket/test_succession.py",)

SABOTAGES = (
    Sabotage(
        "bucket-fence-taken-for-ours",
        "relay/store/bucket/keeper.py",
        "Keeper._create",
        "there != flying.sealed",
        "False",
        TAKEOVERS,
        "a store acknowledges what another store's fence has shut out",
    ),
    Sabotage(
        "bucket-objects-far-ahead",
        "relay/store/bucket/writer.py",
        "Writer.take_off",
        "self._closed[0][0] <= self.known + self._window",
        "True",
        SUCCESSION,
        "the end of a journal cannot be found behind a hole",
    ),
    Sabotage(
        "bucket-fence-behind-a-hole",
        "relay/store/bucket/history.py",
        "end_of",
        "there - WINDOW",
        "there",
        SUCCESSION,
        "a fenced store goes on in the hole before the fence",
    ),
    Sabotage(
        "bucket-answers-early",
        "relay/store/bucket/writer.py",
        "Writer.hold",
        "number <= self.known",
        "True",
        TAKEOVERS,
        "an append is acknowledged that is not in the bucket",
    ),
    Sabotage(
        "bucket-removals-shown-early",
        "relay/store/stream.py",
        "Stream._answer",
        "self.replica.tail.changed",
        "0",
        TAIL,
        "a reader misses a message that a successor has again",
    ),
    Sabotage(
        "bucket-deliveries-early",
        "relay/store/consumer_calls.py",
        "ConsumerCalls._rests_on",
        "max(number, tail.changed, self._rests.get(consumer.name, 0))",
        "0",
        TAIL,
        "messages are delivered for a consumer that a successor does not know",
    ),
)
