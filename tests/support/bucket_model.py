"""A model of streams in a bucket: who holds a stream, and what was acknowledged.

    python -m support.bucket_model [SEEDS] [--break RULE], in tests/

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
5.  One stream moves by a release in its old journal and a take in the new one; both name the move.
    Neither means anything until the move's decision is created. The new journal's store decides for
    it when both are known to be there; whoever succeeds one of the journals before that, and the
    old store after a while, decides no. Then the new journal gets a copy of the stream, and a mark
    says that the move is settled. Before that neither journal has a checkpoint, and the stream does
    not move again. Each journal is looked at by itself: that a stream left one of those that were
    taken says nothing about the others.
6.  Each stream remembers its producers' numbers, so a repeated append is stored once.

Who holds a stream is thus a function of what was created in the bucket. `World.check` follows it.
"""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from typing import Any

from support.bucket_model_journals import (
    NOBODY,
    Bucket,
    Journal,
    Place,
    State,
    apply,
    last_checkpoint,
    merge,
    read,
)

STREAMS = ("a", "b", "c")
RULES = (
    "order",
    "compare",
    "fence",
    "intent",
    "void",
    "checkpoint",
    "release",
    "take",
    "decision",
    "succeed",
    "itself",
    "settled",
    "copied",
    "duplicates",
    "reads",
)
"""Rules that can be broken to see that the check notices."""


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
        self.open: dict[Place, str] = {}
        self.moves: dict[str, tuple[str, str]] = {}
        """As in `Journal`, and those that are not decided."""
        self.leaving: dict[str, State] = {}
        """Move that is not decided -> the stream that was released here."""
        self.taking: dict[str, tuple[int, str]] = {}
        """Move that is not decided -> (number of the object with the take, source)."""
        self.copying: dict[str, int] = {}
        """Move whose stream has arrived -> number of the object with its copy, or 0."""
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

    def release(self, stream: str, target: Store) -> None:
        """Release a stream, and give a ticket for `target` to the client."""
        moving = any(stream == its for _, its in self.moves.values())
        if self.fenced or stream not in self.held or moving:
            return
        token = self.world.new_token()
        self.leaving[token] = self.held.pop(stream)
        self.moves[token] = "release", stream
        self.batch.append(("release", token, stream))
        ticket = ("ticket", target, token, stream, self.name)
        if self.world.broken == "release":
            self.world.leave(ticket)
        else:
            self.outputs.setdefault(self.number, []).append(ticket)

    def ticket(self, token: str, stream: str, source: str) -> None:
        """A client asks this store to take a stream."""
        if not self.fenced and self.world.bucket.get(("decision", token)) is None:
            self.taking.setdefault(token, (self.number, source))
            self.moves[token] = "take", stream
            self.batch.append(("take", token, stream, source))

    # Steps

    def step(self) -> None:
        rng = self.world.rng
        if self.fenced:
            return
        if rng.random() < 0.05:
            self.checkpoint()
        if self.moves and rng.random() < 0.3:
            self.go_on(rng.choice(sorted(self.moves)))
            return
        if self.batch and len(self.flying) < 4:
            self.cut()
        if self.flying:
            self.send(rng.choice(sorted(self.flying)))
            return
        if self.open:
            self.take(rng.choice(sorted(self.open)))

    def go_on(self, token: str) -> None:
        """Do what a move needs next."""
        bucket, broken = self.world.bucket, self.world.broken
        _, stream = self.moves[token]
        by = bucket.get(("decision", token))
        if token in self.leaving:
            if by is None and self.world.rng.random() < 0.2:
                bucket.create(("decision", token), NOBODY)  # it took too long
            elif by == NOBODY:
                self.held[stream] = self.leaving.pop(token)
                del self.moves[token]
            elif by is not None:
                del self.leaving[token]
        elif token in self.taking:
            number, source = self.taking[token]
            if by is None and (number <= self.known or broken == "take"):
                bucket.create(("decision", token), self.name)
                by = self.name if broken == "decision" else None
            if by is None:
                return
            del self.taking[token]
            if by == self.name:
                self.held[stream] = read(bucket, source, ended=False, until=token).held[stream]
                self.copying[token] = 0
            else:
                del self.moves[token]
        elif bucket.get(("settled", token)) is not None:
            del self.moves[token]
            self.copying.pop(token, None)
        elif token in self.copying:
            if not self.copying[token]:
                self.copying[token] = self.number
                self.batch.append(("copy", stream, tuple(self.held[stream].log)))
            elif self.copying[token] <= self.known or broken == "copied":
                bucket.create(("settled", token), True)

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
                if entry[0] == "intent":
                    self.open[self.name, settled, index] = entry[1]
        self.release_outputs()

    def release_outputs(self) -> None:
        """Let out what rests on nothing that is still on its way."""
        for number in sorted(self.outputs):
            if number <= self.known or (number == self.known + 1 == self.number and not self.batch):
                for output in self.outputs.pop(number):
                    self.world.leave(output)

    def take(self, place: Place) -> None:
        """One probe for each step; a lost answer is read back the next time."""
        bucket, victim = self.world.bucket, self.open[place]
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

    def enter(self, place: Place, there: Journal) -> None:
        """Go on with what a request brought."""
        del self.open[place]
        merge(self.world.bucket, self, there)
        self.copying |= {token: 0 for token, (what, _) in there.moves.items() if what == "take"}
        self.batch.append(("took", place, deepcopy(there)))

    def checkpoint(self) -> None:
        """Write down what the journal holds, then delete what that covers."""
        bucket = self.world.bucket
        end = self.known
        if self.world.broken == "checkpoint":
            end = self.number - 1 + (1 if self.batch else 0)
        content = Journal()
        base_end, base = last_checkpoint(bucket, self.name)
        if base_end >= end or (self.moves and self.world.broken != "settled"):
            return
        if base:
            content = deepcopy(base)
        for number in range(base_end + 1, end + 1):
            sent = self.sent.get(number)
            for index, entry in enumerate(sent[2] if sent else self.batch):
                apply(bucket, content, (self.name, number, index), entry, ended=False)
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
        self.bucket = Bucket(self.rng, broken)
        self.tickets: list[tuple[Store, str, str, str]] = []
        """(store, move, stream, source), with clients."""
        self.tokens = 0
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
        elif output[0] == "ticket":
            self.tickets.append(output[1:])
        else:
            self.seen.append((output[1], output[2]))

    def run(self, steps: int = 600) -> str:
        """Return what is wrong with this history; empty if nothing is."""
        try:
            return self._run(steps)
        except KeyError as err:
            return f"a journal writes to stream {err}, which it does not have"

    def _run(self, steps: int) -> str:
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
            elif dice < 0.12:
                target = rng.choice(self.stores)
                if target is not store:
                    store.release(rng.choice(STREAMS), target)
            elif dice < 0.16 and self.tickets:
                target, *ticket = self.tickets.pop(rng.randrange(len(self.tickets)))
                target.ticket(*ticket)
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
            successor.open[successor.name, 0, 0] = victim.name
        else:
            successor.batch.append(("intent", victim.name))
        return successor

    def new_token(self) -> str:
        self.tokens += 1
        return f"m{self.tokens}"

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
        takes = {
            entry[1]: (key[0], key[1], index + 1)
            for key, value in self.batches()
            for index, entry in enumerate(value[2])
            if entry[0] == "take" and created.get(("decision", entry[1])) == key[0]
        }
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
                elif entry[0] == "release" and entry[2] == stream and entry[1] in takes:
                    name, number, index = takes[entry[1]]
                    break
        return name, log

    def batches(self) -> list[tuple[Any, Any]]:
        """Return (key, batch) for each one that was ever created."""
        made = self.bucket.created.items()
        return [(key, value) for key, value in made if isinstance(key[1], int) and value[0] == "batch"]  # fmt: skip

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
        takes += sum(value[:1] == ("fence",) for value in world.bucket.created.values() if isinstance(value, tuple))  # fmt: skip
        checkpoints += sum(key[1] == "checkpoint" for key in world.bucket.created)
        moves += sum(
            key[0] == "decision" and value != NOBODY for key, value in world.bucket.created.items()
        )
    sys.stdout.write(
        f"{seeds} histories held: {acked} acknowledged, {takes} journals taken, "
        f"{moves} streams moved, {checkpoints} checkpoints\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
