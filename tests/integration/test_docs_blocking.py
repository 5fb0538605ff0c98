"""docs/blocking.md is true: its Python blocks run, one after the other, as one program beside a real relay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.relays import Daemon

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).parents[2] / "docs" / "blocking.md"
PRINTED = [
    "connected: 1048576 bytes in one message",
    "hello, world",
    "[['en', 'de']] missing: []",
    "b'it works'",
    "[b'one', b'two']",
    "printing b'one'",
    "printing b'two'",
]


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    assert len(blocks) == PAGE.read_text("utf-8").count("```python")
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks))
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as relay:
        done = subprocess.run(
            [sys.executable, "-W", "error", program],
            env=os.environ | relay.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == PRINTED
        assert relay.stop() == 0
