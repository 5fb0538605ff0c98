"""What needs a package that is not installed says which extra brings it, before anything else goes wrong."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell
from support.waiting import PATIENCE_S

import iris.blocking
from iris.errors import ConfigError
from iris.extras import install_line

pytestmark = pytest.mark.timeout(60)

WITHOUT = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


MISSING = sys.argv.pop(1).split(",")
sys.meta_path.insert(0, Missing())
"""


def run_without(
    packages: str, program: str, *arguments: str, shell: Shell
) -> subprocess.CompletedProcess[bytes]:
    """Run a program in an interpreter that lacks these packages."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + program, packages, *arguments],
        env=shell.environ, cwd=shell.root, capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("package", "bucket", "extra"),
    [("rocksdict", "", "store"), ("obstore", "s3://streams/here", "bucket"), ("", "s4://x", "")],
)
def test_the_check_of_a_relay_finds_what_its_store_lacks(
    package: str, bucket: str, extra: str
) -> None:
    with commands.short_directory("iris-extra-") as root:
        shell = Shell(root)
        shell.process("key", "new")
        options = ["--data", str(Path(root) / "data"), *(["--bucket", bucket] if bucket else [])]
        program = "from iris.cli import main; main()"
        ran = run_without(package, program, "relay", "--check", *options, shell=shell)
        assert (ran.returncode, ran.stdout) == (2, b""), ran
        wanted = install_line(extra) if extra else "'s4://x' does not begin"
        assert wanted in ran.stderr.decode()
        assert ran.stderr.count(b"\n") == 1
        if extra:
            ran = run_without("nothing", program, "relay", "--check", *options, shell=shell)
            assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("iris.spark", "pyspark", "spark"),
        ("pyspark_iris", "pyspark", "spark"),
        ("iris.metrics", "prometheus_client", "metrics"),
        ("iris.tracing", "opentelemetry", "otel"),
    ],
)
def test_a_module_that_needs_an_extra_names_it(
    tmp_path: Path, module: str, package: str, extra: str
) -> None:
    ran = run_without(package, f"import {module}", shell=Shell(tmp_path))
    last = ran.stderr.decode().splitlines()[-1]
    assert last.startswith("ImportError: iris.")
    assert last.endswith(install_line(extra))


@pytest.mark.parametrize(
    ("module", "asked", "library"),
    [("gevent.monkey", "is_module_patched", "gevent"), ("eventlet.patcher", "is_monkey_patched", "eventlet")],
)  # fmt: skip
def test_a_blocking_client_refuses_threads_that_are_greenlets(
    monkeypatch: pytest.MonkeyPatch, module: str, asked: str, library: str
) -> None:
    patched = types.ModuleType(module)
    setattr(patched, asked, lambda name: name in ("threading", "thread"))
    monkeypatch.setitem(sys.modules, module, patched)
    with pytest.raises(ConfigError, match=f"but {library} has patched the threads"):
        iris.blocking.connect(embedded=True)
    setattr(patched, asked, lambda name: False)
    with iris.blocking.connect(embedded=True) as client:
        assert client.message_limit
