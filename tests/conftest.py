"""Settings that every test shares."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings
from support import alone, warm

# The same examples in every run, so a failure belongs to the change that shows it. `--hypothesis-profile many` takes
# other ones each time. No deadline, because tests assert outcomes and a busy machine is slow.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=50)
settings.register_profile("many", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    directory = alone.leave_the_host()
    config.add_cleanup(lambda: alone.come_back(directory))
    warm.switch_on()
    # For the runs that tests start: it is slow to import, and none of them uses it.
    os.environ.setdefault("PYTEST_ADDOPTS", "-p no:schemathesis")


def pytest_collection_finish() -> None:
    """Thousands of tests stay as they are until the end: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    warm.switch_off()


def pytest_report_header() -> str:
    return f"hypothesis: {settings.default!r}"
