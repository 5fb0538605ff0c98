"""Relays in one process and in virtual time: each is a real Router behind simulated ports, on a host with its own
clock.

Hosts belong to sites. Two hosts of one site are connected by a wire for a link, gateways of two sites by a wire for a
WAN connection, and others are not connected.

    net = SimNetwork(seed=1, relays=2)
    alice, bob = net.relays[0].session("alice"), net.relays[1].session("bob")
    bob.serve("echo")
    net.run(1.0)
    call = alice.request("echo")
    net.run(1.0)
    call.outcome == "reply"

Everything is drawn from the seed. After every event the accounts must balance and the promises of the `Ledger` must
hold. Otherwise the run ends with a `Violation` that shows the seed and the latest events.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from iris.errors import PeerProtocolError
from iris.wire.codec import KIND_AT, decode_control, encode_control
from iris.wire.frames import Bye, Declare
from iris.wire.kinds import FIRST_DATA_KIND, Kind
from iris.wire.link_frames import LinkHello
from relay.core.budget import QUEUE_BYTES, Budget
from relay.core.limits import Limits
from relay.core.policy import Policy
from relay.core.router import Router
from support.sim.ledger import Ledger, table_sizes
from support.sim.members import KEY, OTHER_KEY, SimSession
from support.sim.waiting import check_credits
from support.sim.wires import WINDOW_BYTES, Clock, Pipe, SimPort

LIMIT: Final = 1 << 20
SITE: Final = "sim"
"""The name of the only site, in a network without a federation."""
WAN_DELAYS_US: Final = (20_000, 80_000)
WAN_WINDOW_BYTES: Final = 256 << 10
SESSION_DELAY_US: Final = 20
NOTICE_US: Final = 50_000
"""Time within which each end notices a broken connection."""
REDIAL_US: Final = (20_000, 300_000)
DEAD_US: Final = 3_000_000
HELLO_US: Final = 1_500_000
"""Time after which a connection without a HELLO is closed."""
SETTLE_S: Final = 8.0
"""Virtual seconds within which a network without faults converges: silence noticed, redialled, suspensions over."""
TRACE: Final = 60


class Violation(AssertionError):
    """A broken promise. The text has the seed to replay and the events before it."""


class End:
    """A relay's end of a connection: it passes frames to and from the Router."""

    def __init__(self, relay: SimRelay, inbound: Pipe, port: SimPort) -> None:
        self.relay = relay
        self.inbound = inbound
        self.port = port
        self.closed = False
        inbound.deliver = self.arrived
        inbound.ended = self.lost
        port.on_abort = self.aborted
        port.paused = lambda: relay.frozen
        if relay.frozen:
            inbound.stop()
        relay.ends.append(self)

    def arrived(self, frame: bytes) -> None:
        raise NotImplementedError

    def down(self) -> None:
        """Notify the Router that the connection is down."""
        raise NotImplementedError

    def aborted(self) -> None:
        """End the connection, which the Router aborted. As in a daemon this happens after the Router's turn."""
        self.relay.net.clock.after(0, self.lost)

    def lost(self, hang_up: bool = True) -> None:
        """Close this end. The peer is notified if `hang_up`."""
        if self.closed:
            return
        self.closed = True
        self.relay.ends.remove(self)
        self.inbound.close()
        if self.relay.alive:
            self.relay.tick()
            self.down()
            accounts = self.relay.router.accounts
            if lost := self.port.close():
                accounts.out -= lost
                accounts.drop("session lost", lost)
            self.relay.acted()
        if hang_up:
            self.port.pipe.hang_up()
        else:
            self.port.pipe.close()

    def vanish(self, hang_up: bool) -> None:
        """Close this end because the process has ended. The peer is notified if `hang_up`."""
        self.closed = True
        self.inbound.close()
        self.port.close()
        if hang_up:
            self.port.pipe.hang_up()
        else:
            self.port.pipe.close()


class SessionEnd(End):
    """A relay's end of a session."""

    def __init__(
        self, relay: SimRelay, inbound: Pipe, port: SimPort, keys: Sequence[bytes]
    ) -> None:
        super().__init__(relay, inbound, port)
        self.peer = relay.router.session_up(port)
        # The tests of the protocol cover proofs of keys. Here they would be most of the time.
        self.peer.proven.update(keys)
        port.writable = self._writable
        port.key_of = lambda alias: self.peer.aliases.key_of(alias)
        port.dropped = lambda delivery, count: relay.router.shed(self.peer, delivery, count)
        port.emptied = lambda: self.peer.aliases.forget_past()
        self._entry = partial(relay.router.frame_in, self.peer)

    def arrived(self, frame: bytes) -> None:
        self.relay.give(self._entry, frame)
        if self.peer.closed:
            self.closed = True
            self.relay.ends.remove(self)
            self.inbound.close()

    def _writable(self) -> None:
        self.relay.tick()
        self.relay.router.writable(self.peer)

    def down(self) -> None:
        self.relay.router.session_down(self.peer)


class LinkEnd(End):
    """A relay's end of a link or WAN connection. It is up when both ends have sent HELLO."""

    def __init__(
        self, relay: SimRelay, host: int, inbound: Pipe, port: SimPort, dialled: bool
    ) -> None:
        super().__init__(relay, inbound, port)
        self.host = host
        """The host of the other end."""
        self.link: Any = None
        self.dialled = dialled
        self.site = relay.net.site_of(host)
        self.wan = self.site != relay.site
        self.casts: set[tuple[int, int, str]] = set()
        """Bundles sent over it: (tag, hop class, site)."""
        self.said: dict[int, tuple[int, str]] = {}
        """Aliases of sent frames, in a federation: alias -> (hop class, site)."""
        self.received: dict[int, tuple[int, str]] = {}
        """Aliases of received frames, in a federation: alias -> (hop class, site)."""
        self._entry: Callable[[memoryview, int, int], None]
        port.sent = self._sent
        port.writable = self._writable
        port.key_of = lambda alias: self.link.aliases.key_of(alias) if self.link else None
        port.dropped = lambda delivery, count: relay.router.shed(self.link, delivery, count)
        port.emptied = lambda: self.link.aliases.forget_past() if self.link else None
        relay.net.clock.after(HELLO_US, self._give_up)
        if dialled:
            self._hello()

    def _give_up(self) -> None:
        if self.link is None:
            self.lost()

    def _hello(self) -> None:
        self.relay.tick()
        dial_us = self.relay.mono_us if self.dialled else 0
        self.port.control(encode_control(self.relay.router.hello(dial_us)))

    def _sent(self, frame: bytes) -> None:
        if frame[KIND_AT] >= FIRST_DATA_KIND:
            self.relay.net.ledger.over_link(self, frame)
        elif frame[KIND_AT] == Kind.DECLARE and self.relay.net.federated:
            note_alias(self.said, frame)

    def arrived(self, frame: bytes) -> None:
        relay = self.relay
        if self.link is not None:
            if frame[KIND_AT] >= FIRST_DATA_KIND:
                relay.net.ledger.from_link(self, frame)
            elif frame[KIND_AT] == Kind.DECLARE and relay.net.federated:
                note_alias(self.received, frame)
            elif (copies := relay.net.copies_of_control) is not None:
                for _ in range(copies(relay, self.host, frame)):
                    relay.give(self._entry, frame)
                return
            relay.give(self._entry, frame)
            if self.link.closed and not self.closed:
                self._over(f"{relay} hears that {self.host} leaves")
            return
        hello = decode_control(memoryview(frame), 0, len(frame))
        assert isinstance(hello, LinkHello)
        if not self.dialled:
            self._hello()
        for other in list(relay.ends):
            if (
                isinstance(other, LinkEnd)
                and other.link is not None
                and other.link.relay_id == hello.relay_id
            ):
                relay.net.note(f"{relay} replaces its link to {self.host}")
                other.lost()
        relay.tick()
        if self.wan:
            # The site of the peer's certificate.
            cost_ms = relay.net.costs_ms.get(self.site, 0)
            self.link = relay.router.wan_up(self.port, hello, self.site, cost_ms)
        else:
            self.link = relay.router.link_up(self.port, hello)
        self._entry = partial(relay.router.frame_in, self.link)
        relay.net.note(f"{relay} has a link to {self.host}")
        relay.net.ledger.fault_for(NOTICE_US)
        relay.net.wire(relay.host, self.host).changed_us = relay.net.now_us
        relay.acted()

    def leave(self) -> None:
        """Close with a goodbye: accepted frames are sent, and nothing more is read."""
        if self.link is None:
            self.lost()
            return
        self.relay.tick()
        self.port.control(encode_control(Bye()))
        self.port.finish()
        self._down()
        self._over(f"{self.relay} leaves {self.host}")
        self.relay.acted()

    def _down(self) -> None:
        router = self.relay.router
        (router.wan_down if self.wan else router.link_down)(self.link)

    def _over(self, text: str) -> None:
        self.closed = True
        self.relay.ends.remove(self)
        self.inbound.close()
        self.relay.net.note(text)
        self.relay.net.ledger.fault_for(DEAD_US)
        self.relay.net.link_lost(self.relay, self.host)

    def _writable(self) -> None:
        if self.link is not None:
            self.relay.tick()
            self.relay.router.writable(self.link)

    def down(self) -> None:
        if self.link is not None:
            self.relay.net.note(f"{self.relay} lost its link to {self.host} {self.port.aborted}")
            self.relay.net.ledger.fault_for(DEAD_US)
            self._down()
        self.relay.net.link_lost(self.relay, self.host)


def note_alias(aliases: dict[int, tuple[int, str]], frame: bytes) -> None:
    """Note the new meaning of an alias."""
    declared = decode_control(memoryview(frame), 0, len(frame))
    assert isinstance(declared, Declare)
    aliases[declared.alias] = (declared.hop_class, declared.site)


class SimRelay:
    """One run of a relay at a host. The host's clock shows `net.now_us + offset_us`."""

    def __init__(self, net: SimNetwork, host: int, offset_us: int, generation: int) -> None:
        self.net = net
        self.host = host
        self.offset_us = offset_us
        self.generation = generation
        self.site = net.site_of(host)
        self.relay_id = net.rng.randbytes(16)
        self.alive = True
        self.frozen = False
        self.awake_us = 0
        """Time of the latest thaw."""
        self.ends: list[End] = []
        self.sessions: dict[int, SimSession] = {}
        self._armed_us = 0
        self.budget = Budget(net.queue_bytes)
        self.router = Router(
            self.relay_id, entropy=net.rng.randbytes, message_limit=LIMIT, limits=net.limits, site=self.site,
            policy=Policy(*(net.policies.get(self.site, ()) if host in net.gateways[self.site] else ())),
        )  # fmt: skip
        self.tick()
        # Until the relay has settled, calls wait that find no member.
        net.ledger.fault_for(net.settle_us)
        self.router.mesh.settle_us = self.mono_us + net.settle_us if net.settle_us else 0

    def __repr__(self) -> str:
        return f"relay {self.host}.{self.generation}"

    @property
    def mono_us(self) -> int:
        return self.net.now_us + self.offset_us

    def session(
        self, label: str = "", *, keys: Sequence[bytes] = (KEY, OTHER_KEY), singly: bool = False
    ) -> SimSession:
        """Attach the session of a process. Its frames are handled in order, HELLO first."""
        net = self.net
        to_relay, from_relay = net.pipe(SESSION_DELAY_US), net.pipe(SESSION_DELAY_US)
        SessionEnd(self, to_relay, SimPort(from_relay, net.port_bytes, self.budget), keys)
        session = SimSession(self, label or f"s{len(self.sessions)}", keys, to_relay, singly)
        session.from_relay = from_relay
        from_relay.deliver = session.frame
        from_relay.ended = session.connection_lost
        self.sessions[session.uid] = session
        return session

    def link_to(self, other: SimRelay) -> Any:
        """Return the Router's link or WAN connection to another relay, or None."""
        router = self.router
        return router.links.get(other.relay_id) or router.wans.get(other.relay_id)

    # -- driving the Router as a daemon does -----------------------------------------------------------------

    def tick(self) -> None:
        self.router.now_us = self.mono_us

    def give(self, entry: Callable[[memoryview, int, int], None], frame: bytes) -> None:
        """Pass a copy of a frame to the Router, which may change it."""
        self.tick()
        try:
            entry(memoryview(bytearray(frame)), 0, len(frame))
        except PeerProtocolError as err:
            kind = Kind(frame[KIND_AT]).name
            self.net.violate(f"{self} calls a {kind} a breach of the protocol: {err}")
        self.acted()

    def acted(self) -> None:
        """Check the Router's accounts after an action, and plan its next deadline."""
        router = self.router
        if router.accounts.balance():
            self.net.violate(
                f"{self}: {router.accounts.balance()} messages are unaccounted for: {router.accounts.report(0)}"
            )
        due_us = router.deadline_us
        assert router.is_due_before(due_us + 1)
        assert not router.is_due_before(due_us)
        due_us -= self.offset_us
        if not self._armed_us or due_us < self._armed_us:
            self._armed_us = due_us
            self.net.clock.at(due_us, self._due, due_us)

    def _due(self, due_us: int) -> None:
        if due_us != self._armed_us or not self.alive or self.frozen:
            return
        self.expire()

    def expire(self) -> None:
        """Let the Router handle its due deadlines."""
        self._armed_us = 0
        self.tick()
        if self.router.deadline_us <= self.mono_us:
            self.router.expire()
            if self.router.deadline_us <= self.mono_us:
                self.net.violate(
                    f"{self}: the next deadline is {self.router.deadline_us - self.mono_us} µs ago"
                )
        self.acted()

    # -- what may happen to it -------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Freeze the process as SIGSTOP does; its kernel continues to buffer."""
        if not self.frozen:
            self.frozen = True
            self.net.ledger.fault_begins()
            self.net.note(f"{self} freezes")
            for end in self.ends:
                end.inbound.stop()

    def thaw(self) -> None:
        """Continue as SIGCONT does: read the buffered frames first, then run the timers."""
        if self.frozen and self.alive:
            self.frozen = False
            self.awake_us = self.net.now_us
            self.net.ledger.fault_ends()
            self.net.ledger.fault_for(DEAD_US)
            self.net.note(f"{self} thaws")
            for end in self.ends:
                end.inbound.go()
            self.net.clock.after(1, self._thawed)

    def _thawed(self) -> None:
        if self.alive and not self.frozen:
            self.expire()
            for end in list(self.ends):
                end.port.pump()

    def crash(self, *, silent: bool = False) -> None:
        """End the relay as SIGKILL does. `silent`: as a loss of power, which also ends its sessions silently."""
        if not self.alive:
            return
        net = self.net
        net.note(f"{self} {'loses power' if silent else 'is killed'}")
        self.thaw()
        self.alive = False
        net.ledger.fault_for((DEAD_US if silent else 0) + 2 * NOTICE_US + DEAD_US)
        for end in self.ends:
            end.vanish(hang_up=not silent)
        self.ends.clear()
        if silent:
            for session in list(self.sessions.values()):
                session.connection_lost()
        for host in net.wired(self.host):
            net.link_lost(self, host)

    def retire(self, grace_us: int) -> None:
        """Drain the relay as SIGTERM does: no new calls, `grace_us` for those in flight; then close its connections."""
        if self.alive and not self.router.draining:
            self.net.note(f"{self} is about to stop")
            self.net.ledger.fault_for(grace_us + DEAD_US)
            self.tick()
            self.router.drain(grace_us // 1000)
            self.acted()
            self.net.clock.after(grace_us, self.stop_now)

    def stop_now(self) -> None:
        """Stop at once, with a goodbye."""
        if self.frozen:
            self.net.clock.after(100_000, self.stop_now)
        elif self.alive:
            for end in list(self.ends):
                if isinstance(end, LinkEnd):
                    end.leave()
            self.crash()


class Wire:
    """The connection between two hosts, or the place of a future one."""

    def __init__(self, delay_us: int, dialler: int, *, wan: bool = False) -> None:
        self.delay_us = delay_us
        self.wan = wan
        self.dialler = dialler
        self.stopped = False
        self.pipes: list[Pipe] = []
        self.ends: list[LinkEnd] = []
        self.dialling = False
        self.slowest_us = 0
        self.changed_us = 0
        """Time of its latest change: connected, lost or stopped."""
        self.stopped_us = self.healed_us = -(1 << 60)
        """Times of the latest stop and of the latest heal."""


def slowest_us(wire: Wire) -> int:
    """Return the longest transit over a wire so far."""
    return max(wire.slowest_us, max((pipe.slowest_us for pipe in wire.pipes), default=0))


class SimNetwork:
    """Relays at hosts, with wires between the hosts, and the faults that happen to them.

    `sites` gives the number of relays of each site, instead of `relays`. The first `gateways` are connected to those
    of every other site: each to each, or (`pairs`) the first to the first and the second to the second. `policies`:
    what a site exports and imports.

    `limits`, `port_bytes` and `queue_bytes` bound each relay's sessions, each queue and all of them;
    `copies_of_control(relay, from host, frame)` says how often a control frame that came over a link arrives.
    """

    def __init__(
        self, seed: int = 0, *, relays: int = 3, port_bytes: int = 256 << 10, queue_bytes: int = QUEUE_BYTES, limits: Limits | None = None,
        delays_us: tuple[int, int] = (100, 5_000), settle_us: int = 0, sites: Mapping[str, int] | None = None,
        gateways: int = 2, pairs: bool = False, costs_ms: Mapping[str, int] | None = None,
        policies: Mapping[str, tuple[Sequence[str], Sequence[str]]] | None = None, warm_s: float = 1.0,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.limits = limits
        self.port_bytes = port_bytes
        self.queue_bytes = queue_bytes
        self.settle_us = settle_us
        self.ledger = Ledger(self)
        self.trace: deque[str] = deque(maxlen=TRACE)
        self.copies_of_control: Callable[[SimRelay, int, bytes], int] | None = None
        self.wires: dict[tuple[int, int], Wire] = {}
        self.relays: list[SimRelay] = []
        sites = sites or {SITE: relays}
        self.federated = len(sites) > 1
        self.costs_ms = costs_ms or {}
        self.policies = policies or {}
        self._sites = [site for site, count in sites.items() for _ in range(count)]
        self.hosts = {
            site: [at for at, where in enumerate(self._sites) if where == site] for site in sites
        }
        """Site -> hosts."""
        self.gateways = {site: hosts[:gateways] for site, hosts in self.hosts.items()}
        self._wired: dict[int, list[int]] = {host: [] for host in range(len(self._sites))}
        for host, site in enumerate(self._sites):
            self.relays.append(SimRelay(self, host, self.rng.randrange(1_000_000, 10**12), 0))
            for other in range(host):
                if self._sites[other] == site:
                    self._lay(other, host, delays_us, wan=False)
            if host not in self.gateways[site]:
                continue
            mine = self.gateways[site].index(host)
            for there, theirs in self.gateways.items():
                for index, other in enumerate(theirs):
                    if there != site and other < host and (index == mine or not pairs):
                        self._lay(other, host, WAN_DELAYS_US, wan=True)
        self.run(warm_s)

    def _lay(self, other: int, host: int, delays_us: tuple[int, int], *, wan: bool) -> None:
        dialler = self.rng.choice((host, other))
        self.wires[(other, host)] = Wire(self.rng.randint(*delays_us), dialler, wan=wan)
        self._wired[other].append(host)
        self._wired[host].append(other)
        self.dial(other, host)

    @property
    def now_us(self) -> int:
        return self.clock.now_us

    def pipe(self, delay_us: int) -> Pipe:
        return Pipe(self.clock, self.rng, delay_us)

    @property
    def digest(self) -> int:
        """Hash of all bytes sent. Two runs of one seed agree."""
        return self.clock.digest

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now_us / 1e6:12.6f} {text}"
        self.trace.append(line)

    def violation(self, text: str) -> Violation:
        """Return a Violation with the seed, the broken promise, and the latest events."""
        trace = "\n".join(self.trace)
        return Violation(
            f"seed {self.seed}, at {self.now_us / 1e6:.6f} s: {text}\n{trace}\nseed {self.seed}: {text}"
        )

    def violate(self, text: str) -> NoReturn:
        """End the run because of a broken promise."""
        raise self.violation(text)

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.clock.run(self.now_us + round(seconds * 1e6))

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Let virtual time pass until `condition` holds."""
        end_us = self.now_us + round(seconds * 1e6)
        while not condition():
            if self.now_us >= end_us:
                self.violate(f"after {seconds} s it still does not hold")
            self.run(0.001)

    @property
    def sessions(self) -> list[SimSession]:
        """All attached sessions, in order."""
        return [
            session
            for relay in self.relays
            for session in relay.sessions.values()
            if not session.closed
        ]

    # -- hosts ----------------------------------------------------------------------------------------------

    def site_of(self, host: int) -> str:
        return self._sites[host]

    def wired(self, host: int) -> list[int]:
        """Return the hosts to which there is a wire."""
        return self._wired[host]

    def at(self, site: str, index: int = 0) -> SimRelay:
        """Return a relay of a site by its index; gateways come first."""
        return self.relays[self.hosts[site][index]]

    def paths(self, a: int, b: int) -> Iterable[tuple[Wire, ...]]:
        """Return the wires of every path that a message can take from one host to another."""
        here, there = self._sites[a], self._sites[b]
        if here == there:
            yield (self.wire(a, b),)
            return
        for one in self.gateways[here]:
            for other in self.gateways[there]:
                hops = [(x, y) for x, y in ((a, one), (one, other), (other, b)) if x != y]
                if all((min(hop), max(hop)) in self.wires for hop in hops):
                    yield tuple(self.wire(*hop) for hop in hops)

    # -- wires -----------------------------------------------------------------------------------------------

    def wire(self, a: int, b: int) -> Wire:
        return self.wires[(min(a, b), max(a, b))]

    def known_by_us(self, a: SimRelay, b: SimRelay, before_us: int, known_us: int) -> int:
        """Return until when changes at one relay are known at the other: `before_us`, unless the wire was cut."""
        wire = self.wires.get((min(a.host, b.host), max(a.host, b.host)))
        if wire is None or not (wire.stopped or wire.healed_us > self.now_us - known_us):
            return before_us
        return min(before_us, wire.stopped_us - known_us)

    def slowest_us(self, a: SimRelay, b: SimRelay) -> int:
        """Return the longest transit between two relays so far."""
        return max(sum(map(slowest_us, path)) for path in self.paths(a.host, b.host))

    def dial(self, a: int, b: int) -> None:
        """Connect two hosts as soon as that is possible."""
        wire = self.wire(a, b)
        if not wire.dialling:
            wire.dialling = True
            self.clock.after(self.rng.randint(*REDIAL_US), self._dial, a, b)

    def _dial(self, a: int, b: int) -> None:
        wire = self.wire(a, b)
        wire.dialling = False
        dialler = self.relays[wire.dialler]
        other = self.relays[a if wire.dialler == b else b]
        if any(end.relay is dialler for end in wire.ends if not end.closed):
            return
        if not dialler.alive or not other.alive or wire.stopped or dialler.frozen or other.frozen:
            self.dial(a, b)
            return
        wire.slowest_us = slowest_us(wire)
        window_bytes = WAN_WINDOW_BYTES if wire.wan else WINDOW_BYTES
        there, back = (
            Pipe(self.clock, self.rng, wire.delay_us, window_bytes),
            Pipe(self.clock, self.rng, wire.delay_us, window_bytes),
        )
        wire.pipes = [*(pipe for pipe in wire.pipes if not pipe.closed), there, back]
        ends = [
            LinkEnd(
                other, dialler.host, there, SimPort(back, self.port_bytes, other.budget), False
            ),
            LinkEnd(
                dialler, other.host, back, SimPort(there, self.port_bytes, dialler.budget), True
            ),
        ]
        wire.ends = [*(end for end in wire.ends if not end.closed), *ends]

    def link_lost(self, relay: SimRelay, host: int) -> None:
        """Dial again after one end of a link has closed."""
        self.wire(relay.host, host).changed_us = self.now_us
        self.dial(relay.host, host)

    def cut(self, a: int, b: int) -> None:
        """Cut the connection: frames in transit are lost from some frame on; each end notices after its own delay."""
        wire = self.wire(a, b)
        self.note(f"the link between {a} and {b} is cut")
        self.ledger.fault_for(NOTICE_US + DEAD_US)
        for end in [end for end in wire.ends if not end.closed]:
            end.inbound.lose(self.rng.randint(0, len(end.inbound.flying)))
            end.inbound.hang_up(self.rng.randint(0, NOTICE_US))

    def stop(self, a: int, b: int) -> None:
        """Stop the wire as a disconnected cable does: nothing arrives, and nobody is notified."""
        wire = self.wire(a, b)
        if not wire.stopped:
            wire.stopped = True
            wire.changed_us = wire.stopped_us = self.now_us
            self.ledger.fault_begins()
            self.note(f"nothing passes between {a} and {b}")
            for pipe in wire.pipes:
                pipe.stop()

    def heal(self, a: int, b: int) -> None:
        """End a stop: the held frames arrive, if their end still exists."""
        wire = self.wire(a, b)
        if wire.stopped:
            wire.stopped = False
            wire.changed_us = wire.healed_us = self.now_us
            self.ledger.fault_ends()
            self.ledger.fault_for(DEAD_US)
            self.note(f"everything passes between {a} and {b} again")
            for pipe in wire.pipes:
                pipe.go()

    def come_back(self, host: int) -> SimRelay:
        """Start the relay of a host again, with a new id."""
        old = self.relays[host]
        assert not old.alive
        relay = self.relays[host] = SimRelay(self, host, old.offset_us, old.generation + 1)
        self.note(f"{relay} starts")
        relay.router.wait_for_links(len(self.wired(host)), relay.mono_us)  # as the door does
        for other in self.wired(host):
            self.dial(host, other)
        return relay

    # -- at rest ---------------------------------------------------------------------------------------------

    def calm(self, settle_s: float = SETTLE_S) -> None:
        """End every fault, and let the network settle."""
        for session in self.sessions:
            session.wake()
        for a, b in self.wires:
            self.heal(a, b)
        for relay in list(self.relays):
            relay.thaw()
            if relay.alive and relay.router.draining:
                relay.stop_now()
            if not relay.alive:
                self.come_back(relay.host)
        self.run(settle_s)

    def check_converged(self) -> None:
        """Check, without faults, that all relays are linked, all replicas are true, and nothing is in flight."""
        if self.federated:
            self._check_sites()
        for relay in self.relays:
            for host in self.hosts[relay.site]:
                if host != relay.host:
                    self._check_copy(relay, self.relays[host])
            extra = set(relay.router.links) - {other.relay_id for other in self.relays}
            if extra:
                self.violate(f"{relay} still has links to {len(extra)} relays that are gone")
        for session in self.sessions:
            for watch in session.watches.values():
                truth = {
                    member.member_id
                    for other in self.sessions
                    for member in other.members.values()
                    if other.relay.site == session.relay.site
                    and member.name == watch.name
                    and member.key == watch.key
                    and member.serial
                }
                if watch.members != truth:
                    self.violate(
                        f"{session} sees {len(watch.members)} members of {watch.name!r}: "
                        f"{sorted(watch.members - truth)} too many, {sorted(truth - watch.members)} too few"
                    )
        self._check_tunnels()

    def _check_copy(self, relay: SimRelay, other: SimRelay) -> None:
        link = relay.link_to(other)
        if link is None:
            self.violate(f"{relay} has no link to {other}")
        members = {
            serial: (
                member.name,
                member.key,
                tuple(sorted(map(int, member.kinds))),
                member.concurrency,
            )
            for session in other.sessions.values()
            for serial, member in session.members.items()
        }
        copied = {
            serial: (
                entry.name,
                *entry.key_ids,
                tuple(sorted(entry.kinds)),
                max(entry.kinds.values()),
            )
            for serial, entry in link.copy.members.items()
        }
        if copied != members:
            wrong = sorted(members.items() ^ copied.items())
            self.violate(f"{relay} has a wrong copy of the members of {other}: {wrong}")
        topics: dict[tuple[str, bytes, str], int] = {}
        for session in other.sessions.values():
            for pattern, group, key in session.subscriptions:
                subscription = (pattern, key, group)
                topics[subscription] = topics.get(subscription, 0) + 1
        if link.topics != topics:
            wrong = sorted(link.topics.items() ^ topics.items())
            self.violate(f"{relay} has a wrong copy of the topics of {other}: {wrong}")

    def _check_sites(self) -> None:
        """Check that each site route exists, and that its replica is the interest that both policies allow."""
        truth = {site: self._wants(site) for site in self.hosts}
        for relay in self.relays:
            router = relay.router
            ways = router.sites.site_routes
            if wrong := set(ways) - set(self.hosts) | ({relay.site} & set(ways)):
                self.violate(f"{relay} has ways to {sorted(wrong)}")
            for site in self.hosts:
                if site == relay.site:
                    continue
                own = [p for p in self.wired(relay.host) if self._sites[p] == site]
                others = [g for g in self.gateways[relay.site] if g != relay.host]
                behind = [g for g in others if site in map(self.site_of, self.wired(g))]
                wanted = {self.relays[host].relay_id for host in (*own, *behind)}
                found = list(ways.get(site, {}).values())
                if len(found) != len(wanted) or {way.relay_id for way in found} != wanted:
                    self.violate(f"{relay} has {len(found)} ways to {site}, not {len(wanted)}")
                clusters, topics = self._visible(truth[site], relay.site, site)
                for way in found:
                    if way.clusters != clusters or way.topics != topics:
                        wrong_ones = [
                            *((a, way.clusters.get(a), clusters.get(a)) for a in {*way.clusters, *clusters}),
                            *((t, way.topics.get(t), topics.get(t)) for t in {*way.topics, *topics}),
                        ]  # fmt: skip
                        wrong_ones = [one for one in wrong_ones if one[1] != one[2]]
                        self.violate(
                            f"{relay} has a wrong copy of {site}, {'its own' if way.own else 'behind a gateway'}: {wrong_ones}"
                        )

    def _wants(self, site: str) -> tuple[dict[Any, Any], dict[Any, int]]:
        """Return the interest of all members and subscribers of a site."""
        clusters: dict[Any, Any] = {}
        topics: dict[Any, int] = {}
        for host in self.hosts[site]:
            for session in self.relays[host].sessions.values():
                for member in session.members.values():
                    kinds, count = clusters.get((member.name, member.key), ({}, 0))
                    for kind in map(int, member.kinds):
                        kinds[kind] = kinds.get(kind, 0) + member.concurrency
                    listed = any(kind != Kind.STREAM for kind in member.kinds)
                    clusters[(member.name, member.key)] = (kinds, count + listed)
                for pattern, group, key in session.subscriptions:
                    topic = (pattern, key, group)
                    topics[topic] = topics.get(topic, 0) + 1 if group else 1
        return clusters, topics

    def _visible(
        self, wants: tuple[dict[Any, Any], dict[Any, int]], here: str, there: str
    ) -> tuple[dict[Any, Any], dict[Any, int]]:
        """Return the interest of one site that both policies let another site see."""
        clusters, topics = wants
        if not self.policies:
            return clusters, topics
        ours, theirs = (Policy(*self.policies.get(site, ())) for site in (here, there))
        return {
            address: granted
            for address, granted in clusters.items()
            if ours.imported.allow(address[0]) and theirs.exported.allow(address[0])
        }, {
            topic: count
            for topic, count in topics.items()
            if ours.exported.may_allow(topic[0]) and theirs.imported.may_allow(topic[0])
        }

    def _check_tunnels(self) -> None:
        pairs: dict[int, list[str]] = {}
        for session in self.sessions:
            for tunnel in session.tunnels.values():
                pairs.setdefault(tunnel.pair, []).append(f"{tunnel.state} at {session}")
        for pair, ends in pairs.items():
            if len(ends) != 2 or not all(end.startswith("open ") for end in ends):
                self.violate(f"tunnel {pair} has lost an end: {ends}")

    def check_idle(self) -> None:
        """Check, when all handlers have returned and all tunnels have ended, that nobody waits for anything."""
        for relay in self.relays:
            for neighbor in relay.router.neighbors.values():
                if neighbor.tunnels:
                    self.violate(
                        f"{relay} keeps {len(neighbor.tunnels)} tunnels of {neighbor.label!r}"
                    )
        self.check_idle_but_tunnels()

    def check_idle_but_tunnels(self) -> None:
        """As `check_idle`, while tunnels are open."""
        for call in self.ledger.open.values():
            self.violate(f"{call} never ended")
        for relay in self.relays:
            router = relay.router
            for neighbor in router.neighbors.values():
                handed = [hop for hop in neighbor.in_flight if hop not in neighbor.tunnels]
                openings = sum(
                    tunnel.opener is neighbor and tunnel.opener_hop == hop
                    for hop, tunnel in neighbor.tunnels.items()
                )
                if neighbor.pending > openings or handed:
                    self.violate(
                        f"{relay} still counts {neighbor.pending} waiting and {len(handed)} handed over "
                        f"for {neighbor.label!r} ({type(neighbor).__name__})"
                    )
            if router.held_messages:
                self.violate(f"{relay} holds {router.held_messages} messages for nobody")
            queued = sum(end.port.queued_bytes for end in relay.ends)
            if relay.budget.bytes != queued:
                self.violate(f"{relay} counts {relay.budget.bytes} bytes in its queues: {queued}")
            check_credits(relay)
        for session in self.sessions:
            if session.waiting.queued:
                self.violate(f"{session} still waits to publish")

    def table_sizes(self) -> list[dict[str, int]]:
        """Return the table sizes of each relay."""
        return [dict(table_sizes(relay.router)) for relay in self.relays]
