"""The JavaScript client, by the Node that pip installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

REQUIRED: Final = "IRIS_TEST_JS"
"""Environment variable: if it is "required", these tests fail instead of being skipped."""
CLIENT: Final = Path(__file__).parents[3] / "clients" / "js"

Node = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def node() -> Node:
    """Run Node in clients/js with arguments and environment variables, and return what it wrote."""
    if not (CLIENT / "node_modules" / "esbuild").is_dir():
        reason = "the packages of clients/js are not installed; run `make js`"
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"no tests of the JavaScript client: {reason}", pytrace=False)
        pytest.skip(f"no tests of the JavaScript client: {reason}")

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CLIENT / "node", *arguments],
            env={**os.environ, "NO_COLOR": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )

    return run
