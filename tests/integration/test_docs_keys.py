"""docs/keys.md is true: a rotation goes as the page says, while a service runs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell, end
from support.docs import fits, printed, sessions
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text("utf-8")
SERVICE = """
import iris

service = iris.Service("billing")


@service.on_request
def bill(number: str) -> str:
    return f"bill {number}"
"""


def test_a_rotation_goes_as_the_page_says() -> None:
    new, add, refused, promote, retire = sessions(PAGE)
    with commands.short_directory("iris-keys-") as root:
        shell = Shell(root, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

        def right(command: str, output: str) -> bool:
            return fits(printed(command, shell.environ, root), output)

        assert right(*new)
        (root / "billing.py").write_text(SERVICE)
        relay = shell.start("relay", "--no-mdns", "--port", "0", "--bind", "127.0.0.1")
        wait_until(lambda: (root / "iris" / "relay.sock").exists())
        service = shell.start("run", "billing")
        wait_until(lambda: shell.run("members", "billing").returncode == 0)

        assert right(*add)
        assert right(*refused)
        service.send_signal(signal.SIGHUP)
        wait_until(lambda: right(*promote))
        service.send_signal(signal.SIGHUP)
        assert right(*retire)
        service.send_signal(signal.SIGHUP)
        assert shell("request", "billing", "7") == b"bill 7\n"

        for process in (service, relay):
            process.terminate()
            end(process)
        shell.finish()
