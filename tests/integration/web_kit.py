"""What the tests of tickets share: a relay that admits browsers with tickets of one issuer, and such tickets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from integration.stores import stored

import iris
from iris import Keyring
from iris.crypto.keys import ClusterKey, IssuerKey, NetworkKey
from iris.crypto.scopes import Scope
from iris.tickets import Issuer
from relay.config import dev
from relay.core import issuers
from relay.daemon import Relay
from relay.net.web import WebListener

KEY, OTHER = ClusterKey(bytes(range(32))), ClusterKey(bytes(range(1, 33)))
KEYS = Keyring({"default": (KEY,), "other": (OTHER,)})
NETWORK = NetworkKey(bytes(range(32)))
SIGNER = IssuerKey(bytes(range(2, 34)))
STRANGER = IssuerKey(bytes(range(3, 35)))
LOGIN = Issuer(SIGNER, NETWORK.fingerprint)
HOME = "https://app.example"
WIDE = {
    "request": ["delays", "other"], "publish": ["chat.>"], "subscribe": ["users.*", "chat.>"],
    "serve": ["browsers.*"], "push": ["delays"], "broadcast": ["delays"], "read": ["departures"],
    "members": ["delays"],
}  # fmt: skip


def login(**changes: Any) -> issuers.Issuer:
    fields: dict[str, Any] = {"sessions_per_subject": 3, **changes}
    return issuers.Issuer("login", (SIGNER.public_key,), Scope(WIDE), **fields)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay that admits browsers with tickets of one issuer."""
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    config = replace(
        dev(directory / "relay.sock"), listen=("ws://127.0.0.1:0",), origins=(HOME, "https://evil.example"), tickets=True,
        issuers=(login(),), network_keys=(NETWORK,),
    )  # fmt: skip
    made = Relay(config)
    await made.start()
    yield made
    await made.stop(drain_s=0)


def url(relay: Relay) -> str:
    assert relay.web is not None
    return relay.web.addresses[0]


def near(relay: Relay) -> iris.Client:
    return iris.connect(relay.config.socket_path, keyring=KEYS)


def tickets(relay: Relay) -> dict[str, Any]:
    assert relay.router.admission is not None
    return relay.router.admission.status()


def alice(**changes: Any) -> str:
    fields: dict[str, Any] = {"allow": WIDE, "life_s": 600, **changes}
    return LOGIN.issue("alice", **fields)


def service(name: str) -> iris.Service:
    made = iris.Service(name)
    made.on_request(lambda payload: payload)
    return made


@asynccontextmanager
async def ticketed(directory: Path, allow: Mapping[str, Sequence[str]]) -> AsyncIterator[Any]:
    """Yield (cluster, client, listener): a cluster with a store, whose browsers need tickets of the issuer."""
    async with stored(directory) as (cluster, client, _):
        hub = cluster.relay.hub
        known = issuers.Issuer("login", (SIGNER.public_key,), Scope(allow))
        hub.config = replace(
            hub.config, listen=("ws://127.0.0.1:0",), tickets=True, issuers=(known,), network_keys=(NETWORK,)
        )  # fmt: skip
        listener = WebListener(hub, hub.config)
        listener.check_tickets(lambda: {NETWORK.fingerprint.hex()})
        listener.listen(hub.config.web_listen)
        listener.accept()
        try:
            yield cluster, client, listener
        finally:
            await listener.close()
