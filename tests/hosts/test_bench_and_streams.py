"""Commands over several hosts: a benchmark with workers on other hosts, and a stream in a store on another host."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hosts.kit import PATIENCE_S, Network, Relay, wait_until
from support import commands

pytestmark = [pytest.mark.timeout(120), pytest.mark.net]


def command(relay: Relay, *arguments: str, said: str = "") -> subprocess.Popen[bytes]:
    """Start `iris ...` on a relay's host, with its output to the file `said`, or to a pipe."""
    output: Any = (relay.directory / said).open("wb") if said else subprocess.PIPE
    try:
        return relay.host.start(
            commands.command(*arguments),
            env=relay.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT if said else subprocess.PIPE,
        )  # fmt: skip
    finally:
        if said:
            output.close()


def ends(process: subprocess.Popen[bytes]) -> str:
    """Wait until a command has ended with 0, and return its output."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("verb", ["request", "publish"])
def test_workers_on_other_hosts_bench_together(network: Network, verb: str) -> None:
    relays = network.hosts("abc")
    network.meshed()
    a, *others = relays
    serving = [
        command(relay, "bench", "serve", "--label", relay.host.name, said="serve")
        for relay in others
    ]
    for relay in others:
        wait_until(
            lambda relay=relay: (relay.directory / "serve").read_bytes(), f"{relay.name} serves"
        )
    with_workers = ("--workers", "b,c", "--json")
    report: dict[str, Any] = {}

    def both() -> bool:
        # Its relay learns of members at other relays within milliseconds, not at once.
        asked = command(
            a, "bench", verb, "--rate", "100", "--seconds", "0.5", "--size", "256", *with_workers
        )
        out, _ = asked.communicate(timeout=PATIENCE_S)
        if asked.returncode in (0, 1) and out:
            report.update(json.loads(out))
        return bool(report)

    wait_until(both, "both workers are found by their labels")
    assert sorted(part["label"] for part in report["workers"]) == ["b", "c"]
    assert [part["due"] for part in report["workers"]] == [25, 25]
    for process in serving:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_stream_is_kept_on_one_host_and_used_from_the_others(
    network: Network, tmp_path: Path
) -> None:
    keeper = network.relay(plugged(network, "a"), "--data", str(tmp_path / "data"))
    others = [network.relay(plugged(network, name)) for name in "bc"]
    network.meshed()
    b, c = others

    def created() -> bool:
        asked = command(b, "stream", "create", "orders", "--topic", "orders.>")
        asked.communicate(timeout=PATIENCE_S)
        return asked.returncode == 0

    wait_until(created, "the store is up")
    wait_until(
        lambda: command(c, "stream", "read", "orders").wait(PATIENCE_S) == 0, "c knows of it, too"
    )
    assert ends(command(c, "stream", "append", "orders", "appended on c")) == "0\n"
    ends(command(b, "publish", "orders.eu", "published on b"))

    def read() -> list[str]:
        return ends(command(c, "stream", "read", "orders")).splitlines()

    wait_until(lambda: len(read()) == 2, "both are in the stream")
    assert read() == ["appended on c", "published on b"]
    # The host of the store fails, and returns with its disk.
    keeper.kill()
    wait_until(
        lambda: (
            command(b, "stream", "append", "orders", "nobody", "--timeout", "1").wait(PATIENCE_S)
            != 0
        ),
        "nobody keeps it now",
    )
    keeper.start()
    network.meshed()
    wait_until(
        lambda: (
            command(b, "stream", "append", "orders", "and again", "--timeout", "5").wait(PATIENCE_S)
            == 0
        ),
        "the store is back",
    )
    found = read()
    assert found[:2] == ["appended on c", "published on b"]
    assert "and again" in found


def plugged(network: Network, name: str) -> Any:
    host = network.lan.host(name)
    host.plug()
    return host
