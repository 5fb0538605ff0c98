"""What some tests need from the machine: without it they are skipped, or fail where they must run (.ci/run)."""

from __future__ import annotations

import os
from typing import Literal, NoReturn

import pytest

Kind = Literal["BROWSER", "HOSTS", "JS", "NNG", "PEERS", "SPARK"]


def cannot(kind: Kind, reason: str) -> NoReturn:
    """Skip the test, or fail it if the environment variable `IRIS_TEST_…` of its kind is "required"."""
    if os.environ.get(f"IRIS_TEST_{kind}") == "required":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
