"""What the integration tests share: named clients, and ways to hurt a relay's sessions from the relay's side."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from typing import Any, cast

from support.waiting import until

from iris import Client, ClientConfig, Keyring, Loss, Message, Service
from iris.testing import LocalCluster
from relay.embedded import MemoryTransport
from relay.net.sessions import SessionPort


def named(
    cluster: LocalCluster, label: str, *, keyring: Keyring | None = None, **settings: Any
) -> Client:  # fmt: skip
    """Return a client of `cluster` that `port_of` finds by its label."""
    settings = {"reconnect_min_s": 0.005, "reconnect_max_s": 0.02, **settings}
    return cluster.client(keyring=keyring, config=ClientConfig(label=label, **settings))


def port_of(cluster: LocalCluster, label: str) -> SessionPort:
    """Return the relay's side of the session of this label."""
    (port,) = [p for p in cluster.relay.hub.ports if p.session.label == label]
    return port


async def cut(cluster: LocalCluster, label: str) -> None:
    """End the connection of a client, as its crash would; returns when both sides know."""
    port = port_of(cluster, label)
    port.abort("cut by the test")
    await until(lambda: port not in cluster.relay.hub.ports)


def freeze(cluster: LocalCluster, label: str) -> Callable[[], None]:
    """Stop a client from reading, as a stopped process would; the function returned lets it go on."""
    transport = cast(MemoryTransport, cast(Any, port_of(cluster, label))._transport)._peer
    transport.pause_reading()
    return transport.resume_reading


async def fill(held: list[Any], items: AsyncIterable[Any]) -> None:
    """Append all items to `held`: what came before an error is seen there."""
    async for item in items:
        held.append(item)


class Collector:
    """A callback that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.gaps: list[Loss] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    def gap(self, lost: Loss) -> None:
        self.gaps.append(lost)

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    @property
    def numbers(self) -> list[int]:
        return [int(message.payload) for message in self.messages]

    @property
    def lost(self) -> int:
        return sum(gap.count or 0 for gap in self.gaps)


def echo_service(name: str = "echo", **kwargs: Any) -> Service:
    """A service that answers with what it got."""
    service = Service(name, **kwargs)

    @service.on_request
    def echo(payload: bytes) -> bytes:
        return payload

    return service
