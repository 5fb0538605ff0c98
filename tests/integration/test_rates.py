"""Rate quotas of a real relay: what callers and publishers over a quota get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from integration.kit import echo_service

import iris
from iris.crypto.keys import ClusterKey
from relay.config import dev
from relay.daemon import Relay

KEYS = iris.Keyring.single(ClusterKey(bytes(range(32))))
TRIES = 50
"""Many more than a quota of one a second allows, even on a busy machine."""


async def test_calls_over_a_quota_are_refused_by_name_and_lost_casts_are_reported(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "relay.sock"
    relay = Relay(replace(dev(path), session_rate="1", address_rate=("news.>=1",)))
    await relay.start()
    try:
        async with iris.connect(path, keyring=KEYS) as member, member.serve(echo_service("db")):
            async with iris.connect(path, keyring=KEYS) as caller:
                refused = []
                for _ in range(TRIES):
                    try:
                        await caller.request("db", b"", timeout=5.0)
                    except iris.Overloaded as err:
                        refused.append(err)
            assert refused
            assert "session quota (session_rate) of 1 message/s" in str(refused[0])
            assert not any(err.may_have_run for err in refused)
            rates = (await member.status())["rates"]
            assert rates["session_rate"]["refused"] == len(refused)
    finally:
        await relay.stop()


async def test_casts_over_a_quota_and_broadcasts_to_nobody_are_reported_to_their_sender(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "relay.sock"
    relay = Relay(replace(dev(path), address_rate=("news.>=1",)))
    await relay.start()
    try:
        async with (
            iris.connect(path, keyring=KEYS) as client,
            client.subscribe("news.>") as news,
            client.watch_losses() as losses,
        ):
            await client.broadcast("nobody", b"x")
            await client.flush()
            assert [(lost.kind, lost.name, lost.count, lost.cause) for lost in losses] == [
                ("broadcast", "nobody", 1, "no members")
            ]
            for _ in range(TRIES):
                await client.publish("news.today", b"x")
                await client.flush()
            over = losses[1:]
            assert over
            assert "quota of 'news.>' (address_rate) of 1 message/s" in over[0].cause
            assert {(lost.kind, lost.name, lost.count) for lost in over} == {
                ("publish", "news.today", 1)
            }
            assert (await client.status())["rates"]["news.>"]["refused"] == len(over)
            for _ in range(TRIES - len(over)):
                await anext(aiter(news))
    finally:
        await relay.stop()
