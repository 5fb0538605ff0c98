"""A session that breaks a rule is ended with an error that names the rule, leaves no state, and affects no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversity.kit import Wire, neighbours, tables, unaccounted
from adversity.offences import OFFENCES
from support.relays import Daemon

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with Daemon(tmp_path_factory.mktemp("relay")) as daemon:
        yield daemon.socket


@pytest.mark.parametrize("name", OFFENCES)
async def test_the_error_names_the_broken_rule_and_nobody_else_notices(
    name: str, relay: Path
) -> None:
    offend, rule = OFFENCES[name]
    async with neighbours(relay) as others:
        await others.check()
        before = await others.status()
        async with Wire(relay) as offender:
            await offend(offender)
            detail = await offender.error()
            await others.check()
        assert re.search(rule, detail), detail
        after = await others.settled(len(before["sessions"]))
        assert tables(after) == tables(before)
        assert unaccounted(after) == 0
        assert after["protocol_errors"] == before["protocol_errors"] + 1
        await others.check()


async def test_all_offenders_at_once_cost_the_others_nothing(relay: Path) -> None:
    async with neighbours(relay) as others:
        await others.check()  # who asks has proven its key then, which status shows
        before = await others.status()
        offenders = [Wire(relay) for _ in OFFENCES]
        for wire, (offend, _) in zip(offenders, OFFENCES.values(), strict=True):
            await wire.__aenter__()
            await offend(wire)
            await others.check()
        for wire, (_, rule) in zip(offenders, OFFENCES.values(), strict=True):
            assert re.search(rule, await wire.error())
            await wire.__aexit__(None, None, None)
        after = await others.settled(len(before["sessions"]))
        assert tables(after) == tables(before)
        assert unaccounted(after) == 0
        await others.check()
