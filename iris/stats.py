"""What a client has sent, received, dropped and holds at one time: the result of `Client.stats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from iris.runtime import FAILED_HANDLERS, Runtime
from iris.tally import Tally
from iris.wire.kinds import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStats:
    """The queue and the losses of one subscription."""

    filter: str
    """Filter of its topics."""
    group: str
    """Queue group; "" without one."""
    queued_bytes: int
    """Bytes that were received and not handled yet."""
    limit_bytes: int
    """Limit of `queued_bytes`."""
    lost_messages: int
    """Messages for it that are known to be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerStats:
    """The calls of one handler of requests, pushes or surveys since the service is served."""

    kind: str
    """"request", "push" or "survey"."""
    method: str
    """Name of the method; "" if the handler has none."""
    handled: int
    """Calls whose function returned."""
    failed: int
    """Calls whose function raised."""
    refused: int
    """Calls that ended with a `Refusal`, or whose payload does not fit the type."""
    expired: int
    """Calls that were not started, because their deadline had passed."""
    timed: int
    """Calls that were timed: of plain functions every 16th, of other handlers all."""
    timed_s: float
    """Seconds that the timed calls took together."""
    max_s: float
    """Seconds that the longest timed call took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStats:
    """The work of one service that is served."""

    cluster: str
    """Name of its cluster."""
    member: str
    """Id of its member; "" before it has joined."""
    running: int
    """Deliveries, bundles of broadcasts and tunnels that are queued or running."""
    queued_bytes: int
    """Bytes that are queued or running."""
    handlers: Sequence[HandlerStats]
    """Its handlers of requests, pushes and surveys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A client's counters at one time. All numbers but those of queues only grow while the client is open."""

    sent_messages: int
    """Messages and answers sent."""
    received_messages: int
    """Messages and answers received, accepted or not."""
    sent_bytes: int
    """Bytes written to connections with relays, with all frames and seals; without direct tunnels."""
    received_bytes: int
    """Bytes read from connections with relays, with all frames and seals; without direct tunnels."""
    connected_since: datetime | None
    """When the session in use began (UTC); None while no relay is connected."""
    reconnects: int
    """How often a relay was connected again after one was lost or stopped."""
    held_bytes: int
    """Bytes of publications and broadcasts that wait for a relay; at most `ClientConfig.offline_bytes`."""
    unwritten_bytes: int
    """Bytes in the write buffer of the connection."""
    queued_bytes: int
    """Bytes that subscriptions and services have received and not handled yet."""
    dropped: Mapping[str, int]
    """Messages that were dropped in this process: cause -> number."""
    losses: int
    """Losses reported to `on_loss` and `losses`. One loss may stand for many messages, or for an unknown number."""
    failed_handlers: int
    """How often a handler or callback raised an exception."""
    subscriptions: Sequence[SubscriptionStats]
    """The subscriptions of this client, and those of its services."""
    services: Sequence[ServiceStats]
    """The services that this client serves."""


def dropped_messages(runtime: Runtime) -> dict[str, int]:
    """Return the messages that were dropped in this process: cause -> number."""
    dropped = dict(runtime.counters)
    for cause, count in runtime.attached().dropped():
        dropped[cause] = dropped.get(cause, 0) + count
    dropped.pop(FAILED_HANDLERS, None)
    return dropped


def snapshot(runtime: Runtime) -> Stats:
    """Return the counters of a client as they are now."""
    attachment = runtime.attached()
    registry = runtime.registry
    subscriptions = tuple(
        SubscriptionStats(
            filter=each.filter, group=each.group, queued_bytes=each.queued_bytes, limit_bytes=each.limit_bytes,
            lost_messages=each.lost_messages,
        )
        for each in registry.subscriptions()
    )  # fmt: skip
    services = tuple(
        ServiceStats(
            cluster=each.service.name, member=each.member_id, running=each.running, queued_bytes=each.queued_bytes,
            handlers=tuple(_handler(*tally) for tally in each.tallies()),
        )
        for each in registry.services
    )  # fmt: skip
    since_s = attachment.connected_s
    return Stats(
        sent_messages=attachment.messages("sent"),
        received_messages=attachment.messages("received"),
        sent_bytes=attachment.messages("sent bytes"),
        received_bytes=attachment.messages("received bytes"),
        connected_since=datetime.fromtimestamp(since_s, UTC) if since_s is not None else None,
        reconnects=attachment.reconnects,
        held_bytes=attachment.held.bytes,
        unwritten_bytes=attachment.pump.unwritten_bytes if attachment.pump is not None else 0,
        queued_bytes=sum(each.queued_bytes for each in subscriptions)
        + sum(each.queued_bytes for each in services),
        dropped=dropped_messages(runtime),
        losses=runtime.reported_losses,
        failed_handlers=runtime.counters.get(FAILED_HANDLERS, 0),
        subscriptions=subscriptions,
        services=services,
    )


def _handler(kind: int, method: str, tally: Tally) -> HandlerStats:
    return HandlerStats(
        kind=Kind(kind).name.lower(), method=method, handled=tally.handled, failed=tally.failed, refused=tally.refused,
        expired=tally.expired, timed=tally.timed, timed_s=tally.total_ns / 1e9, max_s=tally.max_ns / 1e9,
    )  # fmt: skip
