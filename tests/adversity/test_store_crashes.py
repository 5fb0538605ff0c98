"""After any end of a store and any fault of its disk, acknowledged messages are stored, and losses are reported.

Runs the scenarios of `make proof AREA=streams` at small counts with fixed seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from proofs.scenarios import batches, consuming, disks, streams
from support.required import cannot
from support.stores import POWER_LOST, Outcome, Rig, build_lossy_disk, build_shim, compiler

pytestmark = pytest.mark.timeout(240)  # a busy machine is slow; all of it takes under a minute


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short name, for the relay's socket."""
    with tempfile.TemporaryDirectory(prefix="iris-crash-") as name:
        yield Path(name)


@pytest.fixture
def rig(directory: Path) -> Iterator[Rig]:
    with Rig(directory) as rig:
        yield rig


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD is Linux's")
    if compiler() is None:
        cannot(
            "HOSTS",
            "there is no C compiler (gcc and libc6-dev) to build the disk that loses power with",
        )
    return build_lossy_disk(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def clock_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD is Linux's")
    if compiler() is None:
        cannot(
            "HOSTS",
            "there is no C compiler (gcc and libc6-dev) to build the clock that is set with",
        )
    return build_shim("set_clock", tmp_path_factory.mktemp("clock"))


def held(outcome: Outcome) -> None:
    """Print the counts, and fail if a promise was broken."""
    for name, value in outcome.figures.items():
        print(f"{name}: {value}")  # noqa: T201 - shown with a failure, or by -rP
    assert not outcome.broken, "\n".join(outcome.broken)


async def test_a_killed_store_keeps_what_it_acknowledged(rig: Rig) -> None:
    held(await streams.kills(rig, 3, 1))


async def test_a_long_read_takes_no_more_memory_than_a_short_one(rig: Rig) -> None:
    held(await consuming.long_read(rig, 50_000, 5))


async def test_workers_that_are_killed_leave_no_message_unhandled(rig: Rig) -> None:
    held(await consuming.workers(rig, 300, 3, 6))


async def test_a_clock_that_is_set_holds_up_and_kills_nothing(rig: Rig, clock_shim: Path) -> None:
    held(await consuming.clock_steps(rig, 2, 7, clock_shim))


async def test_a_disk_that_loses_power_keeps_what_was_acknowledged(rig: Rig, shim: Path) -> None:
    held(await streams.power(rig, 2, 2, shim))


async def test_a_new_directory_that_loses_power_keeps_what_was_acknowledged(
    rig: Rig, shim: Path
) -> None:
    held(await streams.first_power(rig, 7, shim))


async def test_a_disk_that_forgets_what_was_synced_is_noticed(rig: Rig, shim: Path) -> None:
    outcome = await streams.power(rig, 2, 3, shim, lie=True)
    assert any("acknowledged" in text or "beyond the end" in text for text in outcome.broken), (
        outcome
    )


async def test_damaged_files_are_noticed_or_harmless_and_cost_no_other_stream(rig: Rig) -> None:
    held(await disks.damage(rig, 10, 4))


async def test_a_full_disk_refuses_appends_and_nothing_else(directory: Path) -> None:
    if os.geteuid():
        cannot("HOSTS", "only root may mount a small disk")
    try:
        held(await disks.full_disk(directory, 5))
    except PermissionError as err:
        cannot(f"no small disk can be mounted: {err}")


async def test_relay_and_store_end_and_come_back_in_any_order(rig: Rig) -> None:
    held(await streams.restarts(rig, 4, 1))


async def test_a_killed_store_shows_every_batch_whole_and_once(rig: Rig) -> None:
    held(await batches.batches(rig, 3, 8))


# -- the disk that loses power does what it says -------------------------------------------------------------

SYNC = "def sync(p='.'):\n f=os.open(p,os.O_RDONLY);os.fsync(f);os.close(f)\n"
PUT = "def put(p,b,s=True,f=os.O_RDWR|os.O_CREAT):\n d=os.open(p,f);os.write(d,b);s and os.fsync(d);return d\n"
POWER = "\nos.kill(os.getpid(),signal.SIGUSR2)\nos.open('last',os.O_CREAT|os.O_WRONLY)\n"


@pytest.mark.parametrize(
    ("program", "left"),
    [
        ("put('a',b'1')", {}),
        ("put('a',b'1');sync()", {"a": "1"}),
        ("put('a',b'1',False);sync()", {"a": ""}),
        ("d=put('a',b'123');sync();os.pwrite(d,b'99',0);os.pwrite(d,b'8888',2)", {"a": "123"}),
        ("d=put('a',b'123');sync();os.pwrite(d,b'99',0);os.fdatasync(d)", {"a": "993"}),
        ("d=put('a',b'123');sync();os.ftruncate(d,1);os.pwrite(d,b'zz',1)", {"a": "123"}),
        ("put('a',b'1');sync();put('a',b'2',False,os.O_WRONLY|os.O_TRUNC)", {"a": "1"}),
        (
            "put('a',b'1');sync();put('a',b'2',False,os.O_WRONLY|os.O_APPEND|os.O_DSYNC)",
            {"a": "12"},
        ),
        ("put('a',b'1');sync();os.unlink('a')", {"a": "1"}),
        ("put('a',b'1');sync();os.unlink('a');sync()", {}),
        ("put('a',b'1');sync();put('t',b'2');os.rename('t','a')", {"a": "1"}),
        ("put('a',b'1');sync();put('t',b'2');os.rename('t','a');sync()", {"a": "2"}),
        ("os.mkdir('n');put('n/f',b'1');sync('n');os.rename('n','d')", {}),
        (
            "os.mkdir('n');put('n/f',b'1');sync('n');put('n/g',b'2');os.rename('n','d');sync()",
            {"d/f": "1"},
        ),
        ("os.mkdir('d');put('d/f',b'1');sync('d');sync();shutil.rmtree('d')", {"d/f": "1"}),
    ],
)
def test_the_disk_keeps_what_syncs_covered_and_no_more(
    program: str, left: dict[str, str], shim: Path, tmp_path: Path
) -> None:
    disk, side = tmp_path / "disk", tmp_path / "side"
    disk.mkdir()
    side.mkdir()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import os,shutil,signal\n" + SYNC + PUT + program + POWER],
        env={"LD_PRELOAD": str(shim), "LOSSY_DIR": str(disk), "LOSSY_SIDE": str(side)},
        cwd=disk,
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == POWER_LOST, done.stderr
    files = [path for path in disk.rglob("*") if path.is_file()]
    assert {str(path.relative_to(disk)): path.read_text() for path in files} == left
