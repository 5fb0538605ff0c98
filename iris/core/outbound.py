"""The sending half of a session: sealers, aliases, bundles, runs, and the bytes to write.

Messages for one address collect in an `OutFlow` until `flush` (once per turn of the event loop) or until the bundle is
full. Then they are sealed and framed as one. Requests and answers are sealed one by one and framed in runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from iris.core.aliases import MAX_ALIASES, Alias, AliasTable
from iris.core.bundle import Headers, encode_bundle, encode_single, message_bytes
from iris.core.compression import Compressor
from iris.core.credit import Credit, Credits
from iris.core.local_senders import LocalSenders
from iris.core.outflow import OutFlow
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import SEALS_PER_SENDER, Sealer
from iris.errors import KeyringError
from iris.wire.codec import BODY_AT, DATA_LENGTH, END, HOP, encode_control
from iris.wire.frames import Control, Declare, Prove, Release
from iris.wire.kinds import MAX_PARTS, NO_KEY, Kind
from iris.wire.names import split_member, split_site
from iris.wire.runs import MAX_RUN, MAX_RUN_BYTES, answer_run, call_run

SMALL_BYTES: Final = 8192
"""A smaller body is cheaper to copy behind its header than to write separately."""
EAGER_CHUNKS: Final = 16
"""Most frames that are collected before they are written, so that others work on them meanwhile."""
EAGER_CALLS: Final = 32
"""Most calls in a run: short enough that several runs are in flight."""
RUN_OVERHEAD: Final = 64
"""Bytes that a call in a run may take besides its plain text: hop id, length, seal."""
MAX_FLOWS: Final = 262_144
"""Addresses remembered per session. Beyond it all flows are forgotten and all sender ids change."""
MAX_PUBLISHED_KEYS: Final = 512
"""Keys that a session has proven for publishing alone; beyond it the least recently used ones are released. A relay
accepts 1,024 keys of a session."""
MAX_PROVEN: Final = 1024
AliasKey = tuple[int, str, bytes, bytes, str, str]
"""(kind, name, key id, sender id, site, member)."""


class Outbound:
    """Everything that one session sends, as bytes in order.

    The shell writes `chunks` and clears them. The session sets the time, `now_us`, in µs since 1970.
    """

    def __init__(
        self,
        *,
        relay_id: bytes,
        session_id: bytes,
        challenge: bytes,
        channel: bytes = b"",
        entropy: Callable[[int], bytes],
        on_full: Callable[[], None],
        releases: bool = True,
        full_bytes: int = 256 << 10,
        max_aliases: int = MAX_ALIASES,
        compress: bool = False,
        local_senders: LocalSenders | None = None,
    ) -> None:
        self.now_us = 0
        self.hops = 0
        """The last hop id that this session used."""
        self.chunks: list[bytes] = []
        self.chunk_bytes = 0
        self.sent_messages = 0
        self._relay_id = relay_id
        self._session_id = session_id
        self._challenge = challenge
        self._channel = channel
        self._entropy = entropy
        self._on_full = on_full
        self._full_bytes = full_bytes
        self._compressor = Compressor() if compress else None
        self._local_senders = local_senders
        self._aliases: AliasTable[AliasKey] = AliasTable(max_aliases)
        self._sealers: dict[tuple[bytes, str], tuple[Sealer, bytes]] = {}
        """(key id, site) -> (sealer, sender id). Per site, so that messages for one site leave no gap
        in what others receive."""
        self._flows: dict[tuple[int, str, bytes], OutFlow] = {}
        """(kind, name with site, key id) -> flow."""
        self.topics: dict[str, OutFlow] = {}
        """Topic -> flow, for the hot path of publishing."""
        self.credits = Credits(self._send_control)
        self._dirty: list[OutFlow] = []
        self._running: list[OutFlow] = []
        """Flows with an unfinished run."""
        self._proven: set[bytes] = set()
        self._published: dict[bytes, None] = {}
        """Ids of the proven keys that are used for publishing alone."""
        self._releases = releases
        """Whether keys that were proven for publishing are released again."""
        self._caller = b""
        """Sender id of this session's calls to stores, drawn at the first one."""
        self._tick = 0

    def control(self, body: Control) -> None:
        """Queue a control frame behind everything sent before it."""
        if self._running:
            self._end_runs()
        self._send_control(body)

    def _send_control(self, body: Control) -> None:
        data = encode_control(body)
        self.chunks.append(data)
        self.chunk_bytes += len(data)

    def raw(self, frame: bytes) -> None:
        """Queue a whole frame, or the last part of one."""
        self.chunks.append(frame)
        self.chunk_bytes += len(frame)
        if self.chunk_bytes > self._full_bytes:
            self._on_full()

    def prove(self, key: ClusterKey) -> None:
        """Send a proof of `key` to the relay, if none was sent yet. The key stays proven."""
        self._published.pop(key.key_id, None)
        self._prove(key)

    def _prove(self, key: ClusterKey) -> None:
        if key.key_id not in self._proven:
            self._proven.add(key.key_id)
            signature = key.sign_proof(
                relay_id=self._relay_id, session_id=self._session_id, challenge=self._challenge, channel=self._channel
            )  # fmt: skip
            self.control(Prove(id=0, public_key=key.public_key, signature=signature))

    def flow(self, kind: int, name: str, key: ClusterKey) -> OutFlow:
        """Return the flow of an address, created at first use. `name` may begin with a site, except for topics."""
        flow_key = (kind, name, key.key_id)
        flow = self._flows.get(flow_key)
        if flow is None:
            if len(self._flows) >= MAX_FLOWS:
                self._start_over()
            if kind != Kind.PUBLISH:
                self.prove(key)
            elif key.key_id not in self._proven:
                self._make_room()
                self._published[key.key_id] = None
            site, bare = split_site(name) if kind != Kind.PUBLISH else ("", name)
            flow = self._flows[flow_key] = OutFlow(kind, bare, key, site)
            flow.set_sealer(*self._sealer(key, site))
            if kind == Kind.PUBLISH:
                flow.parts = MAX_PARTS  # until the relay says how many, with its first SHARE
        return flow

    def flow_to(self, kind: int, name: str, key: ClusterKey, member: str) -> OutFlow:
        """Return the flow of calls to one member, given by its id."""
        flow_key = (kind, f"{name}@{member}", key.key_id)
        flow = self._flows.get(flow_key)
        if flow is None:
            if len(self._flows) >= MAX_FLOWS:
                self._start_over()
            self.prove(key)
            site, bare = split_site(name)
            flow = self._flows[flow_key] = OutFlow(kind, bare, key, site, member)
            flow.set_sealer(*self._sealer(key, site))
        return flow

    def add(self, flow: OutFlow, payload: bytes, headers: Headers | None, packed: bool) -> None:
        """Add a message to the flow's bundle. `Client.offer` does the same inline for the plain case."""
        size = message_bytes(payload, headers)
        if not flow.payloads:
            self._dirty.append(flow)
        elif not flow.fits(size, packed):
            self.cut(flow, full=True)  # it stays listed as dirty
        flow.append(payload, headers, packed, size)

    def cut(self, flow: OutFlow, *, full: bool = False) -> None:
        """Seal and frame the flow's bundle of one message or more. `full`: more messages of this turn follow."""
        payloads, headers = flow.cut()
        parts = flow.parts
        if full and parts > 1:
            # In a long burst each member gets several bundles anyway: parts even that out, and each costs a seal.
            flow.cuts += 1
            parts = (parts + 1) // 2 if flow.cuts <= parts else 1
        if parts > 1:
            size = -(-len(payloads) // parts)
            for at in range(0, len(payloads), size):
                some = headers[at : at + size] if headers is not None else None
                self._bundle(flow, payloads[at : at + size], some)
        else:
            self._bundle(flow, payloads, headers)

    def _bundle(
        self, flow: OutFlow, payloads: list[bytes], headers: list[Headers | None] | None
    ) -> None:
        first = flow.first
        count = len(payloads)
        flow.first = first + count
        plain = encode_bundle(payloads, headers, flow.packed)
        self._seal(flow, plain, 0, 0, 0, count, first, b"")

    def share(self, name: str, key_id: bytes, parts: int) -> None:
        """Cut each turn's publications to a topic into `parts` bundles from now on."""
        flow = self._flows.get((Kind.PUBLISH, name, key_id))
        if flow is not None:
            flow.parts = parts

    def credit(self, flow: OutFlow) -> Credit:
        """Return the credit for publishing to a topic. The first use sends WAIT to its subscribers."""
        credit = flow.credit
        if credit is None:
            credit = flow.credit = Credit()
            alias = flow.alias
            if alias is None or alias.number < 0:
                self._declare_flow(flow)
            else:
                self.credits.ask(credit, alias.number)
        return credit

    def stalled(self, flow: OutFlow) -> None:
        """Report that a publisher has waited up to its timeout.

        Messages for subscribers without credit are dropped until they grant some.
        """
        alias = flow.alias
        if flow.credit is not None and alias is not None and alias.number >= 0:
            self.credits.ask(flow.credit, alias.number, stalled=True)

    def flush(self) -> None:
        """Send every unfinished bundle and run."""
        if self._running:
            self._end_runs()
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            for flow in dirty:
                if flow.payloads:
                    self.cut(flow)
                flow.cuts = 0

    def call(
        self, flow: OutFlow, payload: bytes, headers: Headers | None, packed: bool, deadline_us: int, timeout_ms: int,
        method: str = "",
    ) -> tuple[int, int]:  # fmt: skip
        """Seal a request or push into the flow's run. Return its hop id and its seal counter."""
        plain = encode_single(payload, headers, packed, method)
        if self._compressor is not None:
            plain = self._compressor.compressed(plain)
        if flow.bodies and (
            flow.timeout_ms != timeout_ms
            or flow.body_bytes + len(plain) > MAX_RUN_BYTES - RUN_OVERHEAD
        ):
            self._end_run(flow)
        counter = flow.sealer.counter
        if counter >= SEALS_PER_SENDER:
            self._renew(flow)
            counter = 0
        bodies = flow.bodies
        if not bodies:
            self._running.append(flow)
            flow.end = END.pack(self.now_us, timeout_ms, 1, 0)
            flow.metadata = flow.prefix + flow.end
            flow.hop = self.hops + 1
            self.hops += MAX_RUN
            flow.deadline_us = deadline_us
            flow.timeout_ms = timeout_ms
        hop = flow.hop + len(bodies)
        header, text = flow.sealer.seal_apart(plain, flow.metadata)
        bodies.append(header + text)
        flow.body_bytes += len(plain) + RUN_OVERHEAD
        if len(bodies) >= EAGER_CALLS:
            self._write_run(flow)
        return hop, counter

    def answer(
        self, flow: OutFlow, payload: bytes, headers: Headers | None, packed: bool, hop: int, caller: bytes, suffix: bytes
    ) -> None:  # fmt: skip
        """Seal an answer to `caller`, a sender id, into the flow's run. `suffix` binds it to its request."""
        plain = encode_single(payload, headers, packed)
        if self._compressor is not None:
            plain = self._compressor.compressed(plain)
        if flow.bodies and flow.body_bytes + len(plain) > MAX_RUN_BYTES - RUN_OVERHEAD:
            self._end_run(flow)
        if flow.sealer.counter >= SEALS_PER_SENDER:
            self._renew(flow)
        bodies = flow.bodies
        if not bodies:
            self._running.append(flow)
            flow.end = END.pack(self.now_us, 0, 1, 0)
            flow.metadata = flow.prefix + flow.end
        header, text = flow.sealer.seal_apart(plain, flow.metadata + suffix)
        bodies.append(header + text)
        flow.hops.append(hop)
        flow.callers.append(caller)
        flow.body_bytes += len(plain) + RUN_OVERHEAD
        if len(bodies) >= EAGER_CALLS:
            self._write_run(flow)

    def _write_run(self, flow: OutFlow) -> None:
        """Frame a run that is long enough and have it written, so that its receivers work while this
        side makes the next."""
        self._end_run(flow)
        self._on_full()

    def _end_runs(self) -> None:
        running, self._running = self._running, []
        for flow in running:
            if flow.bodies:
                self._end_run(flow)

    def _end_run(self, flow: OutFlow) -> None:
        """Frame a flow's run; a run of answers becomes one run per caller. The flow stays listed as running."""
        bodies, flow.bodies, flow.body_bytes = flow.bodies, [], 0
        if not flow.hops:
            self._frame_run(flow, bodies, ())
            return
        hops, flow.hops = flow.hops, []
        callers, flow.callers = flow.callers, []
        if len(set(callers)) == 1:
            self._frame_run(flow, bodies, hops)
            return
        by_caller: dict[bytes, tuple[list[bytes], list[int]]] = {}
        for caller, body, hop in zip(callers, bodies, hops, strict=True):
            theirs = by_caller.setdefault(caller, ([], []))
            theirs[0].append(body)
            theirs[1].append(hop)
        for theirs in by_caller.values():
            self._frame_run(flow, *theirs)

    def _frame_run(self, flow: OutFlow, bodies: Sequence[bytes], hops: Sequence[int]) -> None:
        alias = flow.alias
        if alias is None or alias.number < 0:
            alias = self._declare_flow(flow)
        alias.used = self._tick = self._tick + 1
        count = len(bodies)
        if count == 1:
            body = bodies[0]
            hop = hops[0] if hops else flow.hop
            size = DATA_LENGTH + len(body)
            head = HOP.pack(size, flow.kind, 0, alias.number, hop, flow.deadline_us)
            frame = head + flow.end + body
        elif hops:
            frame = answer_run(alias.number, flow.end, hops, bodies)
        else:
            frame = call_run(alias.number, 0, flow.hop, flow.deadline_us, flow.end, bodies)
        self.sent_messages += count
        self.chunks.append(frame)
        self.chunk_bytes += len(frame)
        if self.chunk_bytes > self._full_bytes:
            self._on_full()

    def single(
        self, flow: OutFlow, payload: bytes, headers: Headers | None, packed: bool, hop: int, deadline_us: int,
        timeout_ms: int, suffix: bytes = b"", method: str = "",
    ) -> int:  # fmt: skip
        """Seal and frame one message at once; return its seal counter."""
        plain = encode_single(payload, headers, packed, method)
        first = flow.first
        flow.first = first + 1
        counter = self._seal(flow, plain, hop, deadline_us, timeout_ms, 1, first, suffix)
        if len(self.chunks) >= EAGER_CHUNKS:
            self._on_full()  # so that receivers work on these while this side makes the next
        return counter

    def opening(
        self, name: str, key: ClusterKey, tunnel_id: bytes, body: bytes, hop: int, deadline_us: int, timeout_ms: int,
        member: str = "",
    ) -> None:  # fmt: skip
        """Frame the first handshake message of a tunnel.

        Each tunnel has its own alias, because its id is the sender id. Its number is free again at once.
        """
        self.prove(key)
        site, name = split_site(name)
        alias_key = (int(Kind.TUNNEL_OPEN), name, key.key_id, tunnel_id, site, member)
        number = self._declare(*alias_key).number
        self._aliases.free(alias_key)  # no other frame is sent under it
        self.sent_messages += 1
        self.raw(
            HOP.pack(DATA_LENGTH + len(body), Kind.TUNNEL_OPEN, 0, number, hop, deadline_us)
            + END.pack(self.now_us, timeout_ms, 1, 0)
            + body
        )

    def store_call(
        self, name: str, key: ClusterKey | None, end: bytes, head: bytes, body: bytes, hop: int, deadline_us: int
    ) -> None:  # fmt: skip
        """Frame a call to a stream under `key`, or to a store itself if `key` is None, with these end fields.

        `head` authenticates the body (`iris.crypto.channel`); empty for a call without a channel.
        """
        if key is not None:
            self.prove(key)
        self._caller = self._caller or self._entropy(16)
        site, name = split_site(name)
        key_id = key.key_id if key is not None else NO_KEY
        alias_key = (Kind.STREAM, name, key_id, self._caller, site, "")
        alias = self._aliases.get(alias_key) or self._declare(*alias_key)
        alias.used = self._tick = self._tick + 1
        self.sent_messages += 1
        size = DATA_LENGTH + len(head) + len(body)
        start = HOP.pack(size, Kind.STREAM, 0, alias.number, hop, deadline_us) + end + head
        if len(body) < SMALL_BYTES:
            self.raw(start + body)
        else:
            self.chunks.append(start)
            self.chunk_bytes += len(start)
            self.raw(body)

    def record(
        self, name: str, key: ClusterKey, payloads: Sequence[bytes], headers: Sequence[Headers | None] | None, packed: bool,
        message_key: bytes = b"",
    ) -> tuple[bytes, bytes, bytes]:  # fmt: skip
        """Seal messages for a stream, all with the same `message_key` (empty for none); return (sender id, end
        fields, body).

        It frames nothing.
        """
        count = len(payloads)
        keys = [message_key] * count if message_key else None
        return self.record_bundle(name, key, encode_bundle(payloads, headers, packed, keys), count)

    def record_bundle(
        self, name: str, key: ClusterKey, plain: bytes, count: int
    ) -> tuple[bytes, bytes, bytes]:
        """Seal a bundle of `count` messages, encoded as by `encode_bundle`; return as `record`."""
        if self._compressor is not None:
            plain = self._compressor.compressed(plain)
        flow = self.flow(Kind.STREAM, split_site(name)[1], key)
        if flow.sealer.counter >= SEALS_PER_SENDER:
            self._renew(flow)
        end = END.pack(self.now_us, 0, count, flow.first)
        flow.first += count
        return flow.sender_id, end, flow.sealer.seal(plain, flow.prefix + end)

    def alias_refused(self, number: int, kind: int, name: str, key_id: bytes, *, full: bool) -> int:
        """Free an alias that the relay did not accept, so that its address is declared again when it is next used.

        Returns the number of casts that were sent under it, which are lost. Calls under it get FAIL.
        """
        key = self._aliases.key_of(number)
        if key is not None and key[:3] != (kind, name, key_id):
            return 0  # declared for something else since
        lost = 0
        if key is not None:
            _, _, _, sender_id, site, member = key
            address = f"{name}@{member}" if member else f"{site}:{name}" if site else name
            flow = self._flows.get((kind, address, key_id))
            if flow is not None and flow.sender_id == sender_id:
                lost = flow.first - flow.declared_first
                if flow.credit is not None:
                    self.credits.forget(number)
                    flow.credit.sent = 0
                    flow.credit.wake()
        self._aliases.refused(number, full=full)
        return lost

    def unsent(self) -> list[tuple[int, str, bytes, Headers | None, bool]]:
        """Remove and return the messages of unfinished bundles: (kind, name, payload, headers, packed)."""
        held = []
        for flow in self._dirty:
            payloads, headers = flow.cut()
            held += [
                (flow.kind, flow.address, p, h, flow.packed)
                for p, h in zip(payloads, headers or [None] * len(payloads), strict=True)
            ]
        self._dirty = []
        return held

    def poison(self) -> None:
        """Make every later seal fail; for the child of a fork, which shares these counters."""
        for sealer, _ in self._sealers.values():
            sealer.poison()

    def retire_senders(self) -> None:
        """Retire this session's sender ids from the process's `LocalSenders`."""
        if self._local_senders is not None:
            self._local_senders.retire(sender_id for _, sender_id in self._sealers.values())

    def _sealer(self, key: ClusterKey, site: str) -> tuple[Sealer, bytes]:
        entry = self._sealers.get((key.key_id, site))
        if entry is None:
            self._prove(key)
            sender_id = self._entropy(16)
            if self._local_senders is not None:
                self._local_senders.add(sender_id)
            entry = self._sealers[key.key_id, site] = Sealer(key, sender_id), sender_id
        return entry

    def _make_room(self) -> None:
        """Make room for one more key that is proven for publishing.

        Raises KeyringError: the session has proven as many keys as it may, and none can be released.
        """
        if self._releases and len(self._published) >= MAX_PUBLISHED_KEYS:
            self._release_oldest()
        if len(self._proven) >= MAX_PROVEN:
            raise KeyringError(
                f"this session has proven {len(self._proven)} keys, which is the limit; publish to fewer topics with keys of their own"
            )

    def _release_oldest(self) -> None:
        """Release an eighth of the keys that are proven for publishing: those used longest ago.

        Their sender ids end with them, because sequences must not restart under the same one. Keys for whose topics
        a publisher waits for credit stay.
        """
        flows: dict[bytes, list[OutFlow]] = {key_id: [] for key_id in self._published}
        for flow in self._flows.values():
            if flow.key.key_id in flows:
                flows[flow.key.key_id].append(flow)
        used = {
            key_id: max((flow.alias.used for flow in theirs if flow.alias is not None), default=0)
            for key_id, theirs in flows.items()
            if not any(flow.credit is not None for flow in theirs)
        }
        for key_id in sorted(used, key=used.__getitem__)[: max(1, len(flows) // 8)]:
            for flow in flows[key_id]:
                if flow.payloads:
                    self.cut(flow)
                self._aliases.free((flow.kind, flow.name, key_id, flow.sender_id, flow.site, ""))
                del self._flows[flow.kind, flow.address, key_id]
                self.topics.pop(flow.name, None)
            _, sender_id = self._sealers.pop((key_id, ""))
            if self._local_senders is not None:
                self._local_senders.retire((sender_id,))
            self._proven.discard(key_id)
            del self._published[key_id]
            self.control(Release(key_id))

    def _start_over(self) -> None:
        """Forget every flow and every sender id, because sequences must not restart under the same sender id."""
        self.flush()
        self.credits.end()
        self._flows.clear()
        self.topics.clear()
        self.retire_senders()
        self._sealers.clear()

    def _renew(self, flow: OutFlow) -> None:
        """Draw a new sender id for a flow and all flows that share its sealer, so that no counter is used twice."""
        self._end_runs()
        key, site = flow.key, flow.site
        _, ended = self._sealers.pop((key.key_id, site))
        if self._local_senders is not None:
            self._local_senders.retire((ended,))
        entry = self._sealer(key, site)
        for flow in self._flows.values():
            if flow.key.key_id == key.key_id and flow.site == site:
                flow.set_sealer(*entry)

    def _declare_flow(self, flow: OutFlow) -> Alias:
        """Declare an alias for a flow, at first use or after its number was freed."""
        alias = flow.alias = self._declare(
            flow.kind, flow.name, flow.key.key_id, flow.sender_id, flow.site, flow.member
        )
        flow.declared_first = flow.first
        self.credits.forget(alias.number)
        if flow.credit is not None:
            self.credits.ask(flow.credit, alias.number)
        return alias

    def _declare(
        self, kind: int, name: str, key_id: bytes, sender_id: bytes, site: str, member: str
    ) -> Alias:
        self._tick += 1
        alias = self._aliases.add((kind, name, key_id, sender_id, site, member), self._tick)
        declared = Declare(alias.number, kind, name, key_id, sender_id, site=site)
        if member:
            relay_id, serial = split_member(member)
            declared = msgspec.structs.replace(declared, member=serial, relay=relay_id)
        # Do not end unfinished runs first: each looks up its alias when it ends, and could take this one.
        self._send_control(declared)
        return alias

    def _seal(
        self, flow: OutFlow, plain: bytes, hop: int, deadline_us: int, timeout_ms: int, count: int, first: int,
        suffix: bytes,
    ) -> int:  # fmt: skip
        if self._compressor is not None:
            plain = self._compressor.compressed(plain)
        sealer = flow.sealer
        counter = sealer.counter
        if counter >= SEALS_PER_SENDER:
            self._renew(flow)
            sealer, counter, first = flow.sealer, 0, 0
            flow.first = count
        alias = flow.alias
        if alias is None or alias.number < 0:
            alias = self._declare_flow(flow)
            flow.declared_first = first
        alias.used = self._tick = self._tick + 1
        end = END.pack(self.now_us, timeout_ms, count, first)
        sealed, body = sealer.seal_apart(plain, flow.prefix + end + suffix)
        size = len(sealed) + len(body)
        header = (
            HOP.pack(DATA_LENGTH + size, flow.kind, 0, alias.number, hop, deadline_us)
            + end
            + sealed
        )
        if size < SMALL_BYTES:
            self.chunks.append(header + body)
        else:
            self.chunks.append(header)
            self.chunks.append(body)
        self.sent_messages += count
        if flow.credit is not None:
            flow.credit.sent += BODY_AT + size
        self.chunk_bytes += BODY_AT + size
        if self.chunk_bytes > self._full_bytes:
            self._on_full()
        return counter
