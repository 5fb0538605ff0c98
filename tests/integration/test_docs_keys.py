"""docs/keys.md is true: a rotation goes as the page says, while a service runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell, end
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(120)

PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text("utf-8")
SERVICE = """
import iris

service = iris.Service("billing")


@service.on_request
def bill(number: str) -> str:
    return f"bill {number}"
"""


def sessions() -> list[tuple[str, str]]:
    """Return each command of the page with the output that the page shows; "…" stands for any text."""
    blocks = re.findall(r"^    \$ (.*)\n((?:    .*\n)*)", PAGE, re.M)
    return [(command, re.sub(r"^    ", "", output, flags=re.M)) for command, output in blocks]


def fits(shell: Shell, command: str, output: str) -> bool:
    done = subprocess.run(
        ["bash", "-c", command], env=shell.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return bool(re.fullmatch(re.escape(output.strip()).replace("…", ".*"), done.stdout.strip(), re.S))  # fmt: skip


def test_a_rotation_goes_as_the_page_says() -> None:
    new, add, refused, promote, retire = sessions()
    with commands.short_directory("iris-keys-") as root:
        shell = Shell(root, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert fits(shell, *new)
        (root / "billing.py").write_text(SERVICE)
        relay = shell.start("relay", "--no-mdns", "--port", "0", "--bind", "127.0.0.1")
        wait_until(lambda: (root / "iris" / "relay.sock").exists())
        service = shell.start("run", "billing")
        wait_until(lambda: shell.run("members", "billing").returncode == 0)

        assert fits(shell, *add)
        assert fits(shell, *refused)
        service.send_signal(signal.SIGHUP)
        wait_until(lambda: fits(shell, *promote))
        service.send_signal(signal.SIGHUP)
        assert fits(shell, *retire)
        service.send_signal(signal.SIGHUP)
        assert shell("request", "billing", "7") == b"bill 7\n"

        for process in (service, relay):
            process.terminate()
            end(process)
        shell.finish()
