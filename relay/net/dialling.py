"""Decides which relays to dial, and when: a bounded table of targets from discovery and from peers, with backoff.

A target is dialled while its relay is not linked: at once when discovery reports it, at once when its link is lost,
and at growing intervals after failures. If the relay's id is known (from an advert or a peer), each of the target's
addresses is tried until that relay is linked. Another relay that answers there counts as an error of that address;
this happens at addresses that several hosts have, such as those of container bridges.

A seed stands for whichever relay answers. If two relays discover each other, the one with the higher id waits a moment
for the other to dial.

Anybody on the LAN can send adverts. A target that was never linked and that only adverts name is a **stranger**. Dials
to strangers are limited, in total and per host. A stranger's new addresses do not make this relay dial sooner, and
strangers displace only strangers. A goodbye in an advert ends the dialling of a stranger. A relay that was linked is
dialled for another `GOODBYE_S`; by then discovery has reported it again if it still runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from iris.core.backoff import backoff_s
from relay.logs import Quiet
from relay.net.addresses import show

log = logging.getLogger(__name__)

MAX_TARGETS: Final = 4096
MAX_DIALS: Final = 32
"""Most dials at once."""
BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
PEER_BACKOFF_MAX_S: Final = 30.0
PEER_FAILURES: Final = 40
"""After so many failures, about a quarter of an hour, a target from a peer is removed; the peer can introduce it
again."""
LATELY_S: Final = 30.0
LATELY_BACKOFF_MAX_S: Final = 1.0
"""For `LATELY_S` after its link was lost, a relay is dialled at least every `LATELY_BACKOFF_MAX_S`: calls wait for its
members for only three seconds."""
STRANGER_BACKOFF_MAX_S: Final = 30.0
STRANGERS_PER_S: Final = 100.0
STRANGERS_BURST: Final = 256.0
"""Limits of dials to all strangers together: per second, and at once."""
HOST_PER_S: Final = 5.0
HOST_BURST: Final = 32.0
"""Limits of dials to the strangers of one host: per second, and at once."""
MAX_HOSTS: Final = 1024
NEWS_S: Final = 10.0
"""Shortest time between two immediate dials of a stranger because its advert changed."""
GOODBYE_S: Final = 120.0
"""How long a relay that said goodbye is still dialled: twice the interval at which discovery asks."""
STABLE_S: Final = 10.0
"""A link that was up for so long resets the backoff."""
WAIT_FOR_OTHER_S: Final = 1.0
SELF_S: Final = 60.0
"""Pause before a seed that is this relay itself is tried again."""

Address = tuple[str, int]

ADVERT: Final = "mdns"
"""The source of targets from adverts, which anybody can forge."""
UP: Final = "up"
LINKED: Final = "linked already"
OURSELVES: Final = "ourselves"


class Seen(Protocol):
    """A sighting; see `relay.discovery.Sighting`."""

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def relay_id(self) -> bytes | None: ...
    @property
    def networks(self) -> tuple[bytes, ...]: ...
    @property
    def source(self) -> str: ...
    @property
    def gone(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Target:
    """A relay to dial."""

    key: Hashable
    addresses: tuple[tuple[str, int], ...]
    networks: tuple[bytes, ...]
    source: str
    relay_id: bytes | None
    """The relay's id: known from the start, or for a seed the one that answered last."""
    from_peer: bool = False
    network: bytes = b""
    """Fingerprint of the network in which it was linked last."""
    advertised: tuple[tuple[str, int], ...] = ()
    """The addresses that were advertised last."""
    good: tuple[str, int] | None = None
    """The address at which it was reached last, if its id was known before."""
    known: bool = False
    """Whether the relay was ever linked."""
    said_goodbye: bool = False
    """Whether an advert said goodbye for it."""
    goodbye_s: float = -math.inf
    news_s: float = -math.inf
    """Time of the last immediate dial because its advert changed."""
    lost_s: float = -math.inf
    """Time at which its link was last lost."""
    failures: int = 0
    error: str = ""
    dialling: bool = False
    queued: bool = False
    gone: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def stranger(self) -> bool:
        """Whether only adverts name it and it was never linked."""
        return self.source == ADVERT and not self.known


class Allowance:
    """A token bucket: `burst` at once, and `per_s` per second."""

    __slots__ = ("_burst", "_left", "_per_s", "_then_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._left = burst
        self._then_s = -math.inf

    def take(self, now_s: float) -> bool:
        """Take a token; return False if there is none."""
        self._left = min(self._burst, self._left + (now_s - self._then_s) * self._per_s)
        self._then_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of dialling one address: UP, LINKED, OURSELVES or an error, and the answering relay's id, if known."""

    what: str
    relay_id: bytes | None = None


class Dialler:
    """The targets of one hub, and the tasks that dial them."""

    def __init__(
        self,
        own_id: bytes,
        dial: Callable[[Target, Address], Awaitable[Outcome]],
        linked: Callable[[bytes], bool],
        rng: random.Random | None = None,
        *,
        kind: str = "link",
    ) -> None:
        """`dial` dials one address, `linked` returns whether a relay is linked, `kind` begins log events."""
        self._kind = kind
        self._own_id = own_id
        self._dial = dial
        self._linked = linked
        self._rng = rng or random.Random()
        self._targets: dict[Hashable, Target] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: deque[Target] = deque()
        self._stopped = False
        self._strangers = Allowance(STRANGERS_PER_S, STRANGERS_BURST)
        self._hosts: dict[str, Allowance] = {}
        self._quiet = Quiet()
        self.evicted = 0
        self.ignored = 0
        self.held_back = 0
        """Addresses of strangers that were not dialled because of the limits."""
        self.dials = 0

    def sighted(self, seen: Seen) -> None:
        """Dial a relay that was sighted, or stop dialling one that left. A link that is up stays."""
        key: Hashable = seen.relay_id
        if key is None:
            # A name of many relays has a target for each address; a name of one relay has one target.
            many = seen.source.startswith("dns:")
            key = (seen.source, seen.addresses) if many else (seen.source,)
        if seen.gone:
            target = self._targets.get(key)
            if target is not None and seen.relay_id is None:
                target.addresses = tuple(a for a in target.addresses if a not in seen.addresses)
            if target is not None and target.known and seen.source == ADVERT:
                target.said_goodbye, target.goodbye_s = True, time.monotonic()
            elif target is not None and (seen.relay_id is not None or not target.addresses):
                self._forget(target)
        elif seen.relay_id != self._own_id and seen.addresses:
            self._add(key, seen.addresses, seen.networks, seen.source, seen.relay_id, False)

    def introduced(self, relay_id: bytes, addresses: Sequence[tuple[str, int]]) -> None:
        """Dial a relay whose addresses a peer gave."""
        if relay_id != self._own_id and addresses and relay_id not in self._targets:
            self._add(relay_id, tuple(addresses), (), "peer", relay_id, True)

    def lost(self, relay_id: bytes, lived_s: float, dialled: bool) -> None:
        """Dial the relay of a lost link: at once if this side had dialled, else after the peer had time to dial."""
        for target in list(self._targets.values()):
            if target.relay_id == relay_id and not target.dialling:
                target.known = True
                target.lost_s = time.monotonic()
                if lived_s >= STABLE_S:
                    target.failures = 0
                delay_s = self._backoff_s(target) if target.failures else 0.0
                target.failures += lived_s < STABLE_S
                if not delay_s:
                    delay_s = self._rng.uniform(0, BACKOFF_MIN_S)
                self._schedule(target, delay_s if dialled else delay_s + WAIT_FOR_OTHER_S)

    def up(self, relay_id: bytes) -> None:
        """Note that a link is up, whichever side dialled, and remove peers' targets for the same relay."""
        same = [t for t in self._targets.values() if t.relay_id == relay_id]
        for target in same:
            target.known, target.news_s = True, -math.inf
            if target.from_peer and len(same) > 1 and not target.dialling:
                self._forget(target)
                same = [t for t in same if t is not target]

    async def stop(self) -> None:
        """Stop dialling and remove all targets. Idempotent."""
        self._stopped = True
        for target in list(self._targets.values()):
            self._forget(target)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def targets(self) -> Iterable[Target]:
        """All targets, linked or not."""
        return self._targets.values()

    def status(self) -> dict[str, object]:
        """Return counters and the targets that are not linked (at most 64), ready for JSON."""
        shown = [
            t
            for t in self._targets.values()
            if not t.said_goodbye and not (t.relay_id and self._linked(t.relay_id))
        ]
        return {
            "targets": len(self._targets),
            "dials": self.dials,
            "evicted": self.evicted,
            "ignored": self.ignored,
            "held_back": self.held_back,
            "unlinked": [
                {
                    "source": target.source,
                    "addresses": [f"{host}:{port}" for host, port in target.addresses],
                    "failures": target.failures,
                    "error": target.error,
                }
                for target in shown[:64]
            ],
        }

    # -- the table -------------------------------------------------------------------------------------------

    def _add(
        self,
        key: Hashable,
        addresses: tuple[tuple[str, int], ...],
        networks: tuple[bytes, ...],
        source: str,
        relay_id: bytes | None,
        from_peer: bool,
    ) -> None:
        if self._stopped:
            return
        target = self._targets.get(key)
        if target is not None:
            news = target.advertised != addresses or target.networks != networks
            target.advertised = addresses
            target.addresses, target.networks, target.source = addresses, networks, source
            target.from_peer = from_peer
            target.said_goodbye = False
            now_s = time.monotonic()
            if target.known and target.good and target.good not in addresses:
                # Keep the last good address, behind the others: the advert may be forged.
                target.addresses = (*addresses, target.good)
            if news and source == ADVERT and now_s - target.news_s < NEWS_S:
                return  # the next regular dial uses the new addresses
            if news:
                target.news_s = now_s
                target.failures = 0
                self._schedule(target, 0)
            return
        made = Target(key, addresses, networks, source, relay_id, from_peer)
        made.advertised = addresses
        made.known = relay_id is not None and self._linked(relay_id)
        if len(self._targets) >= MAX_TARGETS and not self._make_room(made):
            self.ignored += 1
            return
        target = self._targets[key] = made
        target.news_s = time.monotonic()
        waits = relay_id is not None and relay_id < self._own_id
        self._schedule(target, WAIT_FOR_OTHER_S if waits else 0)

    def _make_room(self, made: Target) -> bool:
        """Remove a target that is not linked; return False if there is none to remove.

        A stranger displaces the oldest stranger. Others displace the oldest from a peer, then any other.
        A target from a peer displaces only other targets from peers, and not one that was linked and has not failed
        since.
        """
        for_peer = made.from_peer
        for from_peer in (True,) if for_peer else (False,) if made.stranger else (True, False):
            for target in self._targets.values():
                if made.stranger and not target.stranger:
                    continue
                linked = target.relay_id is not None and self._linked(target.relay_id)
                if target.from_peer == from_peer and not linked and not target.dialling:
                    if for_peer and not target.failures and target.lost_s > -math.inf:
                        continue
                    self._forget(target)
                    self.evicted += 1
                    return True
        return False

    def _forget(self, target: Target | None) -> None:
        if target is not None:
            target.gone = True
            self._targets.pop(target.key, None)
            if target.queued:
                target.queued = False
                self._ready.remove(target)
            if target.timer is not None:
                target.timer.cancel()
                target.timer = None

    # -- dialling --------------------------------------------------------------------------------------------

    def _backoff_s(self, target: Target) -> float:
        longest_s = PEER_BACKOFF_MAX_S if target.from_peer else BACKOFF_MAX_S
        if target.stranger:
            longest_s = STRANGER_BACKOFF_MAX_S
        if time.monotonic() - target.lost_s < LATELY_S:
            longest_s = LATELY_BACKOFF_MAX_S
        return backoff_s(target.failures, BACKOFF_MIN_S, longest_s, self._rng.random)

    def _schedule(self, target: Target, delay_s: float) -> None:
        if target.dialling or target.queued or target.gone:
            return
        if target.timer is not None:
            target.timer.cancel()
        target.timer = asyncio.get_running_loop().call_later(delay_s, self._due, target)

    def _due(self, target: Target) -> None:
        target.timer = None
        if target.relay_id is not None and self._linked(target.relay_id):
            return
        if len(self._tasks) >= MAX_DIALS:
            target.queued = True
            self._ready.append(target)
            return
        self._start(target)

    def _start(self, target: Target) -> None:
        target.dialling = True
        self.dials += 1
        task = asyncio.create_task(self._run(target), name="iris-dial")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        while self._ready and len(self._tasks) < MAX_DIALS and not self._stopped:
            target = self._ready.popleft()
            target.queued = False
            if not (target.relay_id and self._linked(target.relay_id)):
                self._start(target)

    async def _run(self, target: Target) -> None:
        began_s = time.monotonic()
        try:
            outcome = await self._try_all(target)
        except Exception as err:  # an internal error must cost this dial only, not the target
            outcome = Outcome(f"internal error: {err!r}")
            if target.error != outcome.what:
                log.exception("%s.dial_fault", self._kind)
        finally:
            target.dialling = False
        linked = target.relay_id is not None and self._linked(target.relay_id)
        target.error = "" if linked else outcome.what
        if (
            not linked
            and outcome.what != OURSELVES
            and not target.failures
            and not target.from_peer
        ):
            fields = {"source": target.source, "error": target.error}
            if target.stranger:  # an attacker may advertise any number of them
                event = f"{self._kind}.not_reached"
                self._quiet.warning(log, event, ADVERT, time.monotonic(), fields)
            else:
                log.warning("%s.not_reached", self._kind, extra={"fields": fields})
        if outcome.what == OURSELVES:
            self._schedule(target, SELF_S)
        elif linked:
            if outcome.relay_id is not None:
                self.up(outcome.relay_id)
        else:
            # The dial failed, or the link was up for less than a turn of the loop.
            away_s = time.monotonic() - max(target.lost_s, target.goodbye_s)
            if (target.from_peer and target.failures >= PEER_FAILURES) or (
                target.said_goodbye and away_s > GOODBYE_S
            ):
                self._forget(target)
                return
            delay_s = self._backoff_s(target)
            target.failures += 1
            self._schedule(target, max(0.0, delay_s - (time.monotonic() - began_s)))

    def _may_dial(self, address: Address) -> bool:
        """Return whether the limits allow to dial one more address of a stranger now."""
        host, now_s = address[0], time.monotonic()
        allowance = self._hosts.pop(host, None) or Allowance(HOST_PER_S, HOST_BURST)
        if len(self._hosts) >= MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]  # the host dialled longest ago
        self._hosts[host] = allowance
        return allowance.take(now_s) and self._strangers.take(now_s)

    async def _try_all(self, target: Target) -> Outcome:
        """Dial a target's addresses in turn until its relay is linked; for a seed, until any relay is."""
        wanted = target.key if isinstance(target.key, bytes) else None
        outcome = Outcome("no address is known")
        for number, address in enumerate(target.addresses):
            if wanted is not None and self._linked(wanted):
                return Outcome(LINKED, wanted)  # it has dialled this relay meanwhile
            if target.stranger and not self._may_dial(address):
                self.held_back += 1
                outcome = Outcome(
                    "too many relays are advertised at once; this one is dialled later"
                )
                continue
            found = await self._dial(target, address)
            answered = found.what in (UP, LINKED)
            if wanted is None:
                if answered:
                    target.relay_id = found.relay_id
                    return found
                # The seed is this relay only if all its addresses are.
                if found.what != OURSELVES or not number:
                    outcome = found
            elif answered and found.relay_id == wanted:
                target.good = address
                return found
            elif answered or found.what == OURSELVES:
                who = "this relay itself" if found.what == OURSELVES else "another relay"
                outcome = Outcome(f"{show(*address)}: {who} answers there")
                if (
                    target.from_peer or target.said_goodbye
                ):  # it has left, and another relay has its address: retry rarely
                    target.lost_s = -math.inf
                    target.failures = max(target.failures, 6)
            else:
                outcome = found
        return outcome
