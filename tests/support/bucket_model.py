"""A model of streams in a bucket: who holds a stream, and what was acknowledged.

    python -m tests.support.bucket_model [SEEDS] [--break RULE]

The bucket has one atomic step, to create an object that is not there, and reads. PUTs are applied
late, out of order, or never; answers get lost; stores stop, sleep and wake up at any moment.

1.  A store has one journal. A batch is PUT as the journal's next number; several may be on the way.
    What a batch causes (acknowledgements, answers to readers) leaves the store when this batch and
    all before it are known to be there. A PUT without an answer is repeated unchanged; "exists" is
    read back and compared.
2.  A number that holds somebody else's fence ends the journal.
3.  A successor first writes into its own journal that it intends to take journal J. It then probes
    J's numbers one by one and creates a fence, which names its intent, at the first that is absent.
4.  A checkpoint has what a journal held up to a number; the objects up to there are then deleted.
    Checkpoints are numbered and created, too. A fence below a checkpoint is void, so a successor
    looks for a newer checkpoint after it has created its fence.
5.  One stream moves by a release in its old journal, which names an entry of the new journal that
    asked for it.
6.  Each stream remembers its producers' numbers, so a repeated append is stored once.

Who holds a stream is thus a function of what was created in the bucket. `World.check` follows it.
"""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from typing import Any

STREAMS = ("a", "b", "c")
Place = tuple[str, int, int]
"""Where a request stands: journal, number, index."""
RULES = (
    "order",
    "compare",
    "fence",
    "intent",
    "void",
    "checkpoint",
    "asked",
    "duplicates",
    "reads",
)
"""Rules that can be broken to see that the check notices."""


class Bucket:
    """Objects by key. `created` has everything that was ever created, also if it was deleted since."""

    def __init__(self, rng: random.Random) -> None:
        self.objects: dict[Any, Any] = {}
        self.created: dict[Any, Any] = {}
        self.late: list[tuple[Any, Any]] = []
        self.rng = rng

    def get(self, key: Any) -> Any:
        return self.objects.get(key)

    def create(self, key: Any, value: Any) -> bool | None:
        """True: created. False: exists. None: nobody can say (applied now, later, or never)."""
        fate = self.rng.random()
        if fate < 0.15:
            self.late.append((key, value))
            return None
        made = self._put(key, value)
        return made if fate < 0.85 else None

    def _put(self, key: Any, value: Any) -> bool:
        if key in self.objects:
            return False
        self.objects[key] = value
        self.created.setdefault(key, value)
        return True

    def settle(self) -> None:
        """One of the late PUTs arrives, or is dropped for good."""
        if self.late:
            key, value = self.late.pop(self.rng.randrange(len(self.late)))
            if self.rng.random() < 0.6:
                self._put(key, value)

    def delete(self, key: Any) -> None:
        self.objects.pop(key, None)


class State:
    """A stream: its records, and the last number of each producer (which follows from them)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def last(self, producer: str) -> int:
        return sum(1 for name, _ in self.log if name == producer)


class Journal:
    """What can be read of a journal: the streams it holds, those it released, and its open requests."""

    def __init__(self) -> None:
        self.number = 1
        """The first number that was not read."""
        self.held: dict[str, State] = {}
        self.released: dict[tuple[str, Place], State] = {}
        """(stream, place of the request) -> the stream."""
        self.open: dict[Place, tuple[str, ...]] = {}
        """("intent", journal) or ("ask", stream, journal), not known to be settled.

        A successor takes over the requests of the journals that it takes: what is granted to them is its.
        """
        self.fence: Place | None = None


def last_checkpoint(bucket: Bucket, name: str) -> tuple[int, Journal | None]:
    """Return the end of the last checkpoint of a journal, and its content."""
    at, found = 1, None
    while (value := bucket.get((name, "checkpoint", at))) is not None:
        found, at = value, at + 1
    return (found[0], found[1]) if found else (0, None)


def read(bucket: Bucket, name: str, *, deep: bool = True) -> Journal:
    """Return what a journal holds now, from its last checkpoint on; if `deep`, with what its requests brought.

    A journal takes only journals that began before it, so this ends.
    """
    end, base = last_checkpoint(bucket, name)
    journal = deepcopy(base) if base else Journal()
    journal.number = end + 1
    while (value := bucket.get((name, journal.number))) is not None:
        if value[0] == "fence":
            journal.fence = value[1]
            break
        apply(journal, name, journal.number, value[2])
        journal.number += 1
    for place in list(journal.open) if deep else ():
        settle(bucket, journal, place)
    return journal


def apply(journal: Journal, name: str, number: int, batch: tuple[Any, ...]) -> None:
    """Apply a batch of a journal."""
    for index, entry in enumerate(batch):
        apply_entry(journal, (name, number, index), entry)


def apply_entry(journal: Journal, place: Place, entry: tuple[Any, ...]) -> None:
    match entry:
        case ("make", stream):
            journal.held[stream] = State()
        case ("append", stream, producer, sequence):
            journal.held[stream].log.append((producer, sequence))
        case ("release", stream, asked):
            journal.released[stream, asked] = journal.held.pop(stream)
        case ("intent" | "ask", *_):
            journal.open[place] = entry
        case ("took", asked, there):
            journal.open.pop(asked, None)
            merge(journal, there)


def merge(journal: Journal, there: Journal) -> None:
    """Add what another journal held, and its requests."""
    journal.held |= deepcopy(there.held)
    journal.released |= there.released
    journal.open |= there.open


def settle(bucket: Bucket, journal: Journal, place: Place) -> None:
    """Look whether an open request was granted, and add what it brought."""
    there = outcome(bucket, place, journal.open[place])
    if there is not None:
        del journal.open[place]
        merge(journal, there)


def outcome(bucket: Bucket, place: Place, request: tuple[str, ...]) -> Journal | None:
    """Return what a request brought, maybe nothing; None if that is not decided."""
    gained = Journal()
    there = read(bucket, request[-1], deep=request[0] == "intent")
    if request[0] == "intent":
        if there.fence == place:
            return there
    else:
        state = there.released.get((request[1], place))
        if state is not None:
            gained.held[request[1]] = state
            return gained
    return gained if there.fence is not None else None


class Store:
    """One start of a store, with its journal."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.fenced = True, False
        self.number, self.known = 1, 0
        self.flying: dict[int, Any] = {}
        self.sent: dict[int, Any] = {}
        self.outputs: dict[int, list[Any]] = {}
        """Number -> what may leave when it is known to be there."""
        self.batch: list[Any] = []
        self.held: dict[str, State] = {}
        self.released: dict[tuple[str, Place], State] = {}
        self.open: dict[Place, tuple[str, ...]] = {}
        self.fencing: dict[Place, tuple[int, bool]] = {}
        """The next number to probe; whether the fence found there was compared with the checkpoint."""
        self.checkpoints = 0

    # What clients want

    def append(self, stream: str, producer: str, sequence: int) -> None:
        if self.fenced or stream not in self.held:
            return
        last = self.held[stream].last(producer)
        if sequence == last + 1:
            self.held[stream].log.append((producer, sequence))
            self.batch.append(("append", stream, producer, sequence))
        elif sequence > last:
            return
        elif self.world.broken == "duplicates":
            self.world.acked.add((stream, producer, sequence))
            return
        self.outputs.setdefault(self.number, []).append(("acked", stream, producer, sequence))
        self.release_outputs()

    def show(self, stream: str) -> None:
        """A reader asks for the whole stream."""
        if self.fenced or stream not in self.held:
            return
        seen = ("seen", stream, tuple(self.held[stream].log))
        if self.world.broken == "reads":
            self.world.leave(seen)
            return
        self.outputs.setdefault(self.number, []).append(seen)
        self.release_outputs()

    def move(self, stream: str, target: Store) -> None:
        """`target` asks for a stream of this store; this store grants it when it finds the request."""
        if stream in self.held and target is not self and not target.fenced:
            target.batch.append(("ask", stream, self.name))

    # Steps

    def step(self) -> None:
        rng = self.world.rng
        if self.fenced:
            return
        if rng.random() < 0.05:
            self.checkpoint()
        if self.batch and len(self.flying) < 4:
            self.cut()
        if self.flying:
            self.send(rng.choice(sorted(self.flying)))
            return
        if self.open:
            place = rng.choice(sorted(self.open))
            if self.open[place][0] == "intent":
                self.take(place)
            else:
                self.receive(place)

    def cut(self) -> None:
        batch, self.batch = self.batch, []
        self.flying[self.number] = self.sent[self.number] = ("batch", self.name, tuple(batch))
        self.number += 1

    def send(self, number: int) -> None:
        bucket, value = self.world.bucket, self.flying[number]
        made = bucket.create((self.name, number), value)
        if made is None:
            return
        if not made and self.world.broken != "compare" and bucket.get((self.name, number)) != value:
            self.fenced, self.held = True, {}
            return
        del self.flying[number]
        if self.world.broken == "order":
            for output in self.outputs.pop(number, []):
                self.world.leave(output)
        before = self.known
        while self.known + 1 < self.number and self.known + 1 not in self.flying:
            self.known += 1
        for settled in range(before + 1, self.known + 1):
            for index, entry in enumerate(self.sent[settled][2]):
                if entry[0] in ("intent", "ask"):
                    self.open[self.name, settled, index] = entry
        self.release_outputs()

    def release_outputs(self) -> None:
        """Let out what rests on nothing that is still on its way."""
        for number in sorted(self.outputs):
            if number <= self.known or (number == self.known + 1 == self.number and not self.batch):
                for output in self.outputs.pop(number):
                    self.world.leave(output)

    def take(self, place: Place) -> None:
        """One probe for each step; a lost answer is read back the next time."""
        bucket, victim = self.world.bucket, self.open[place][1]
        mine = ("fence", place)
        end, _ = last_checkpoint(bucket, victim)
        at, made = self.fencing.setdefault(place, (end + 1, False))
        found = bucket.get((victim, at))
        if found is None and self.world.broken != "fence":
            bucket.create((victim, at), mine)
            return
        if found is not None and found[0] != "fence":
            self.fencing[place] = (at + 1, False)
            return
        if not made and self.world.broken != "void":
            # A checkpoint that reaches this number was first: the number was free because it was deleted.
            self.fencing[place] = (at, True) if end < at else (end + 1, False)
            return
        del self.fencing[place]
        if found is not None and found != mine:
            del self.open[place]
            return
        there = read(bucket, victim)
        self.enter(place, there)

    def receive(self, place: Place) -> None:
        """Look whether a stream that was asked for was released."""
        gained = outcome(self.world.bucket, place, self.open[place])
        if gained is None and self.world.broken == "asked":
            gained = read(self.world.bucket, self.open[place][2])  # without waiting for the release
        if gained is not None:
            self.enter(place, gained)

    def enter(self, place: Place, there: Journal) -> None:
        """Go on with what a request brought."""
        del self.open[place]
        self.held |= deepcopy(there.held)
        self.open |= there.open
        self.batch.append(("took", place, deepcopy(there)))

    def grant(self, stream: str, asked: Place) -> None:
        if not self.fenced and stream in self.held:
            self.batch.append(("release", stream, asked))
            del self.held[stream]

    def checkpoint(self) -> None:
        """Write down what the journal holds, then delete what that covers."""
        bucket = self.world.bucket
        end = self.known
        if self.world.broken == "checkpoint":
            end = self.number - 1 + (1 if self.batch else 0)
        content = Journal()
        base_end, base = last_checkpoint(bucket, self.name)
        if base_end >= end:
            return
        if base:
            content = deepcopy(base)
        for number in range(base_end + 1, end + 1):
            sent = self.sent.get(number)
            apply(content, self.name, number, sent[2] if sent else tuple(self.batch))
        key = (self.name, "checkpoint", self.checkpoints + 1)
        made = bucket.create(key, (end, content))
        if made is None and bucket.get(key) is None:
            return
        self.checkpoints += 1
        for number in range(1, (bucket.get(key) or (end,))[0] + 1):
            bucket.delete((self.name, number))


class World:
    """Stores, clients and one bucket, from one seed."""

    def __init__(self, seed: int, broken: str = "") -> None:
        self.rng = random.Random(seed)
        self.broken = broken
        self.bucket = Bucket(self.rng)
        self.stores: list[Store] = []
        self.acked: set[tuple[str, str, int]] = set()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        self.next = {(s, p): 1 for s in STREAMS for p in ("p", "q")}
        first = self.start()
        first.batch += [("make", stream) for stream in STREAMS]
        first.held = {stream: State() for stream in STREAMS}

    def start(self) -> Store:
        store = Store(self, f"j{len(self.stores)}")
        self.stores.append(store)
        return store

    def leave(self, output: tuple[Any, ...]) -> None:
        """Something reached a client."""
        if output[0] == "acked":
            self.acked.add(output[1:])
        else:
            self.seen.append((output[1], output[2]))

    def run(self, steps: int = 600) -> str:
        """Return what is wrong at the end of this history; empty if nothing is."""
        rng = self.rng
        for _ in range(steps):
            dice = rng.random()
            store = rng.choice(self.stores)
            if dice < 0.03 and len(self.stores) < 7:
                self.succeed(rng.choice(self.stores))
            elif dice < 0.05:
                store.alive = False
            elif dice < 0.09:
                store.alive = True
            elif dice < 0.11 and self.stores:
                store.move(rng.choice(STREAMS), rng.choice(self.stores))
            elif dice < 0.14:
                self.grant(store)
            elif dice < 0.24:
                self.bucket.settle()
            elif store.alive:
                self.client(store)
                store.step()
        return self.check() or self.end()

    def succeed(self, victim: Store) -> Store:
        """Somebody believes that a store is gone, rightly or not."""
        successor = self.start()
        if self.broken == "intent":
            successor.open[successor.name, 0, 0] = ("intent", victim.name)
        else:
            successor.batch.append(("intent", victim.name))
        return successor

    def grant(self, store: Store) -> None:
        """The store finds a request for one of its streams."""
        for other in self.stores:
            for place, request in list(other.open.items()):
                if request[0] == "ask" and request[2] == store.name:
                    store.grant(request[1], place)

    def client(self, store: Store) -> None:
        rng = self.rng
        if rng.random() < 0.4:
            stream, producer = rng.choice(STREAMS), rng.choice("pq")
            sequence = self.next[stream, producer]
            if (stream, producer, sequence) in self.acked:
                self.next[stream, producer] = sequence = sequence + 1
            store.append(stream, producer, sequence)
        elif rng.random() < 0.2:
            store.show(rng.choice(STREAMS))

    def end(self) -> str:
        """At last somebody takes everything, undisturbed, and has to hold every stream at its end."""
        while self.bucket.late:
            self.bucket.settle()
        last = self.start()
        for _ in range(40):  # whoever holds something may hold it by a request of another one
            holders = {holder for holder, _ in self.truth().values()} - {last.name}
            if not holders:
                break
            last.batch += [("intent", holder) for holder in sorted(holders)]
            for _ in range(2000):
                if not (last.batch or last.flying or last.open):
                    break
                last.step()
                self.bucket.settle()
        if error := self.check():
            return error
        truth = {stream: log for stream, (_, log) in self.truth().items()}
        held = {stream: state.log for stream, state in last.held.items()}
        return "" if held == truth else f"the last holder has {held}, the streams are {truth}"

    def truth(self) -> dict[str, tuple[str, list[tuple[str, int]]]]:
        """Return each stream's holder and records, from everything that was ever created."""
        first = self.bucket.created.get((self.stores[0].name, 1), ("fence",))
        made = STREAMS if first[0] == "batch" else ()
        return {stream: self.follow(stream) for stream in made}

    def follow(self, stream: str) -> tuple[str, list[tuple[str, int]]]:
        created = self.bucket.created
        log: list[tuple[str, int]] = []
        name, number, index = self.stores[0].name, 1, 0
        while (value := created.get((name, number))) is not None:
            if value[0] == "fence":
                name, number, index = value[1]
                continue
            batch = value[2][index:]
            name, number, index = name, number + 1, 0
            for entry in batch:
                if entry[:2] == ("append", stream):
                    log.append(entry[2:])
                elif entry[:2] == ("release", stream):
                    name, number, index = entry[2]
                    break
        return name, log

    def check(self) -> str:
        """Return what is wrong with what clients were told; empty if nothing is."""
        logs: dict[str, list[tuple[str, int]]] = {stream: [] for stream in STREAMS}
        logs |= {stream: log for stream, (_, log) in self.truth().items()}
        for stream, log in logs.items():
            for producer in "pq":
                numbers = [sequence for name, sequence in log if name == producer]
                if numbers != list(range(1, len(numbers) + 1)):
                    return f"producer {producer} in {stream}: {numbers}"
        for stream, producer, sequence in self.acked:
            if (producer, sequence) not in logs[stream]:
                return f"{producer}{sequence} was acknowledged and is not in {stream}"
        for stream, prefix in self.seen:
            if logs[stream][: len(prefix)] != list(prefix):
                return f"a reader of {stream} saw {prefix}, the stream is {logs[stream]}"
        return ""


def main() -> int:
    args = sys.argv[1:]
    broken = args[args.index("--break") + 1] if "--break" in args else ""
    seeds = int(args[0]) if args and args[0].isdigit() else 2000
    acked = takes = moves = checkpoints = 0
    for seed in range(seeds):
        world = World(seed, broken)
        if error := world.run():
            sys.stdout.write(f"seed {seed}: {error}\n")
            return 1
        acked += len(world.acked)
        takes += sum(value[0] == "fence" for value in world.bucket.created.values())
        checkpoints += sum(key[1] == "checkpoint" for key in world.bucket.created)
        moves += sum(
            entry[0] == "release"
            for value in world.bucket.created.values()
            if value[0] == "batch"
            for entry in value[2]
        )
    sys.stdout.write(
        f"{seeds} histories held: {acked} acknowledged, {takes} journals taken, "
        f"{moves} streams moved, {checkpoints} checkpoints\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
