"""Streams in a bucket: who holds a journal, where it ends, and when an answer leaves."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

TAKEOVERS = ("tests/unit/relay/store/bucket/test_takeovers.py",)
TAIL = ("tests/unit/relay/store/bucket/test_tail.py",)
LIVES = ("tests/unit/relay/store/bucket/test_lives.py",)
KEEPER = "tests/unit/relay/store/bucket/test_keeper.py"
TIERS = "tests/unit/relay/store/bucket/test_tiers.py"
SUCCESSION = ("tests/unit/relay/store/bucket/test_succession.py",)

SABOTAGES = (
    Sabotage(
        "bucket-fence-taken-for-ours",
        "relay/store/bucket/puts.py",
        "Puts._create",
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
    Sabotage(
        "bucket-lives-no-fence",
        "relay/store/bucket/succession.py",
        "fence",
        "await objects.create(key, sealer.seal(key, Fence(end.hash, journal, intent)))",
        "return Fence(end.hash, journal, intent)",
        LIVES,
        "a store takes a journal without a fence",
    ),
    Sabotage(
        "bucket-lives-no-read-back",
        "relay/store/bucket/puts.py",
        "Puts._create",
        "not await self._objects.create(flying.key, flying.sealed)",
        "not await self._objects.create(flying.key, flying.sealed) and False",
        LIVES,
        "an object that another store was first to create counts as ours",
    ),
    Sabotage(
        "bucket-lives-no-hash-chain",
        "relay/store/bucket/writer.py",
        "Writer.take_off",
        "self._before = hash_of(sealed)",
        "pass",
        LIVES,
        "objects do not name the ones before them",
    ),
    Sabotage(
        "bucket-lives-acknowledged-out-of-order",
        "relay/store/bucket/writer.py",
        "Writer.landed",
        "self._there.add(flying.number)",
        "self._there.add(flying.number) or [one.release() for one in self._held.pop(flying.number, ())]",
        LIVES,
        "an answer leaves although an earlier object is on its way",
    ),
    Sabotage(
        "bucket-lives-intent-not-awaited",
        "relay/store/bucket/keeper.py",
        "Keeper._take",
        "await self._puts.land_all(writer)",
        "writer.take_off(self._now_us())",
        LIVES,
        "a fence names an intent that may never be there",
    ),
    Sabotage(
        "bucket-intents-beyond-the-window",
        "relay/store/bucket/puts.py",
        "Puts.land_all",
        "while not writer.idle:",
        "for _ in (1,):",
        (f"{KEEPER}::test_an_intent_is_in_the_bucket_before_its_fence_however_often_it_failed",),
        "after many tries a fence names an intent that is not there",
    ),
    Sabotage(
        "bucket-no-redo",
        "relay/store/bucket/replica.py",
        "redo",
        "_REDO.unpack(row)[0] > after",
        "False",
        (
            f"{KEEPER}::test_a_store_that_killed_before_its_rows_left_adds_them_again_in_parts",
            *LIVES,
        ),
        "what a killed store had written is on its disk and not in the bucket",
    ),
    Sabotage(
        "bucket-redo-over-others",
        "relay/store/bucket/loading.py",
        "_replay",
        "written_last[uuid] <= read_last[place.journal]",
        "True",
        (f"{KEEPER}::test_rows_of_a_killed_store_are_dropped_if_it_takes_its_stream_back_at_once",),
        "what a killed store had written is added to what another one wrote meanwhile",
    ),
    Sabotage(
        "bucket-segment-deleted-early",
        "relay/store/bucket/tiers.py",
        "Tiers.delete",
        "left.number <= replica.writer.known",
        "True",
        (
            f"{TIERS}::test_retention_deletes_objects_once_the_bucket_knows_of_it",
            f"{TIERS}::test_a_store_whose_journal_has_ended_deletes_nothing_that_its_successor_serves",
        ),
        "a store deletes records that its successor serves",
    ),
    Sabotage(
        "bucket-chunk-of-another-object",
        "relay/store/bucket/sealing.py",
        "_of_chunk",
        'f"{key}#{number}".encode()',
        "b''",
        (f"{TIERS}::test_an_object_that_was_harmed_is_an_error_that_names_it",),
        "the bucket's owner can serve one object of records for another",
    ),
)
