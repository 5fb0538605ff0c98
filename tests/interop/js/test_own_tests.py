"""The JavaScript client passes its own tests, among them every example of docs/protocol.md."""

from __future__ import annotations

import re

import pytest
from interop.js.conftest import Run
from interop.js.kit import CLIENT


@pytest.mark.timeout(90)
def test_the_client_passes_its_own_tests(run_node: Run) -> None:
    files = sorted(str(path) for path in (CLIENT / "test").glob("*.test.ts"))
    ran = run_node("--test", "--test-reporter=tap", *files)
    assert ran.returncode == 0, ran.stdout
    passed = re.search(r"^# pass (\d+)$", ran.stdout, re.M)
    assert passed is not None
    assert int(passed[1]) > 15, ran.stdout


def test_the_module_has_the_size_that_its_page_states(built: str) -> None:
    sizes = re.search(r"iris\.js: (\d+) bytes, (\d+) with gzip", built)
    stated = re.search(
        r"(\d+) KiB, (\d+) KiB with gzip", " ".join((CLIENT / "README.md").read_text().split())
    )
    assert sizes is not None
    assert stated is not None
    for size, kib in zip(sizes.groups(), stated.groups(), strict=True):
        assert int(size) / 1024 <= int(kib) <= int(size) / 1024 * 1.05 + 1


def test_an_uncaught_error_in_node_does_not_print_the_whole_module(built: str) -> None:
    lines = (CLIENT / "dist" / "iris.js").read_text().splitlines()
    assert max(map(len, lines)) < 2000, built
