"""A relay is killed with the only members of a service: what calls from another relay wait for, and what they say."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from integration.kit import echo_service
from support.links import Host
from support.relays import client
from support.waiting import wait_until

import iris

pytestmark = pytest.mark.timeout(60)
LONG_S = 60.0


async def test_calls_know_where_the_members_were_and_idempotent_ones_wait_for_them(
    tmp_path: Path,
) -> None:
    one = Host(tmp_path / "one", "--port", "0")
    with one.daemon:
        two = Host(tmp_path / "two", "--port", "0", "--join", one.address)
        with two.daemon:
            wait_until(lambda: one.events("link.up") and two.events("link.up"))
            async with client(one.daemon.socket) as caller:
                async with client(two.daemon.socket) as member, member.serve(echo_service()):
                    await caller.wait_for_members("echo", 1, timeout=LONG_S)
                    two.daemon.process.send_signal(signal.SIGKILL)
                    two.daemon.process.wait()
                    wait_until(lambda: one.events("link.down"))
                patient = asyncio.create_task(
                    caller.request("echo", b"patient", timeout=LONG_S, idempotent=True)
                )
                with pytest.raises(iris.NoMembers, match=r"connected to .* until . s ago") as info:
                    await caller.request("echo", b"once", timeout=LONG_S)
                assert socket.gethostname().split(".")[0] in info.value.detail
                with pytest.raises(iris.NoMembers, match="check its spelling"):
                    await caller.request("ecko", b"", timeout=LONG_S, idempotent=True)
                assert not patient.done()
                async with client(one.daemon.socket) as member, member.serve(echo_service()):
                    assert await patient == b"patient"
