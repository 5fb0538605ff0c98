"""The memory of a relay's process after many short-lived clients: it does not grow with how many there were."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.visitors import VERBS

pytestmark = pytest.mark.timeout(120)
SUPPORT = Path(__file__).parents[1] / "support"
MIB = 1 << 20
CLIENTS = 100
AT_ONCE = 50
ROUNDS = 5


@contextmanager
def tidy_relay(socket: Path) -> Iterator[subprocess.Popen[str]]:
    """A relay that prints its size whenever it is idle."""
    socket.parent.mkdir(0o700)
    command = [sys.executable, str(SUPPORT / "tidy_relay.py"), str(socket)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as relay:
        try:
            yield relay
        finally:
            relay.terminate()


def idle_bytes(relay: subprocess.Popen[str]) -> int:
    """Return the size of the relay once nothing of sessions is left, and freed memory was returned."""
    assert relay.stdout is not None
    for line in relay.stdout:
        report = json.loads(line)
        if not report["busy"]:
            return int(json.loads(next(relay.stdout))["resident"])
    raise AssertionError("the relay ended")


def test_the_memory_of_a_relay_does_not_grow_with_the_number_of_clients_that_have_gone(
    tmp_path: Path,
) -> None:
    socket = tmp_path / "run" / "relay.sock"
    sizes = []
    with tidy_relay(socket) as relay:
        sizes.append(idle_bytes(relay))
        for number in range(ROUNDS):
            options = {
                "sockets": [str(socket)],
                "verbs": VERBS[:-1],
                "first": number * CLIENTS,
                "rounds": CLIENTS,
            }
            visitors = [
                str(SUPPORT / "visitors.py"),
                json.dumps({**options, "at_once": AT_ONCE, "aborts": False}),
            ]
            subprocess.run([sys.executable, *visitors], check=True, stderr=subprocess.DEVNULL)
            sizes.append(idle_bytes(relay))
    start, first, *later = sizes
    assert first < start + 10 * MIB, (
        sizes
    )  # modules and code that only now were used, and tables as large as the peak
    assert later[-1] < first + 2 * MIB, sizes
