"""A relay and a store as processes in their own directory: ways to end them, loads, and an audit of what they kept.

    with Rig(directory) as rig:
        rig.start_relay()
        await rig.serve()                       # a store, attached
        async with rig.client() as client: ...
        rig.end_store(signal.SIGKILL)

Every message contains its writer, its number and its checksum, so a reader can find wrong data without anything
else. Used by the tests and by `make proof AREA=streams`, so it imports neither pytest nor a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import iris
from iris.errors import IrisError, StreamError, StreamUnavailable
from iris.streams import StreamGap, StreamMessage
from support import warm

PATIENCE_S = 40.0
"""Limit of every wait, after which the test fails. No measurement depends on it."""
DEPTH = 48
"""Appends of one producer that are in flight."""
HERE = Path(__file__).parent
POWER_LOST = 137
"""Exit code with which the shim ends a process."""
_HEAD = struct.Struct("<IHQ")
KEY = iris.ClusterKey(bytes(range(32)))


# -- messages ------------------------------------------------------------------------------------------------


def make_message(writer: int, number: int, size: int) -> bytes:
    """Return message `number` of `writer`: a header with a checksum, and `size` bytes."""
    rest = _HEAD.pack(0, writer, number)[4:] + random.Random(number << 16 | writer).randbytes(size)
    return crc32(rest).to_bytes(4, "little") + rest


def read_message(payload: bytes) -> tuple[int, int]:
    """Return writer and number. Raises ValueError if the checksum is wrong."""
    if len(payload) < _HEAD.size or crc32(payload[4:]) != int.from_bytes(payload[:4], "little"):
        raise ValueError(f"wrong data: {len(payload)} bytes that no writer wrote")
    _, writer, number = _HEAD.unpack_from(payload)
    return writer, number


# -- processes -----------------------------------------------------------------------------------------------


class Rig:
    """A relay and a store. A context manager that ends both. `data` is the directory of the streams."""

    def __init__(self, directory: Path, data: Path | None = None) -> None:
        self.directory = directory
        self.data = data or directory / "disk" / "data"
        self.socket = directory / "iris" / "relay.sock"
        self.environ = {
            "PATH": os.environ["PATH"],
            "XDG_RUNTIME_DIR": str(directory),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "HOME": str(directory),
        }
        self.starts = 0
        self.data.parent.mkdir(exist_ok=True)
        self._relay: subprocess.Popen[bytes] | None = None
        self._store: subprocess.Popen[bytes] | None = None
        self._said_from = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.end_store(signal.SIGKILL)
        self.end_relay(signal.SIGKILL)

    def client(self, **settings: Any) -> iris.Client:
        """Return a client of the relay; `settings` are fields of its `ClientConfig`."""
        config = iris.ClientConfig(relay=self.socket, **settings)
        return iris.connect(keyring=iris.Keyring.single(KEY), config=config)

    # The relay

    def start_relay(self) -> None:
        """Start a relay, and return when it serves."""
        log = self.directory / "relay.log"
        size = log.stat().st_size if log.exists() else 0
        self._relay = self._start(["relay", "--dev"], log, {})
        until_s = time.monotonic() + PATIENCE_S
        while not _said(log, size, "relay.started"):
            if self._relay.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the relay did not start: {log.read_text()[-2000:]}")
            time.sleep(0.01)

    def end_relay(self, number: int) -> None:
        """End the relay. Idempotent."""
        self._relay = _end(self._relay, number)

    # The store

    def start_store(self, **environ: str) -> None:
        """Start a store, without waiting until it serves: see `attached`."""
        log = self.directory / "store.log"
        self._said_from = log.stat().st_size if log.exists() else 0
        command = ["relay.store", "--data", str(self.data), "--relay", str(self.socket)]
        self._store = self._start(command, log, environ)
        self.starts += 1

    async def attached(self, *, again: bool = False) -> bool:
        """Wait until the store serves the relay. Return False if it has ended. `again`: ignore its log so far."""
        log = self.directory / "store.log"
        if again:
            self._said_from = log.stat().st_size
        until_s = time.monotonic() + PATIENCE_S
        while not _said(log, self._said_from, "store.attached"):
            if self._store is None or self._store.poll() is not None:
                return False
            if time.monotonic() > until_s:
                raise TimeoutError(f"the store did not attach: {self.last_words()}")
            await asyncio.sleep(0.01)
        return True

    async def serve(self, **environ: str) -> None:
        """Start a store and return when it serves."""
        self.start_store(**environ)
        if not await self.attached():
            raise RuntimeError(f"the store ended by itself: {self.last_words()}")

    @property
    def store_pid(self) -> int:
        """Process id of the running store."""
        assert self._store is not None
        return self._store.pid

    def mark_said(self) -> None:
        """Let `attached` read only what the store logs from now on."""
        log = self.directory / "store.log"
        self._said_from = log.stat().st_size if log.exists() else 0

    def signal_store(self, number: int) -> None:
        """Send the store a signal."""
        if self._store is not None and self._store.poll() is None:
            self._store.send_signal(number)

    async def store_ended(self, within_s: float) -> int | None:
        """Return the exit code of the store, or None if it still runs after `within_s`."""
        until_s = time.monotonic() + within_s
        while self._store is not None and self._store.poll() is None:
            if time.monotonic() > until_s:
                return None
            await asyncio.sleep(0.005)
        return None if self._store is None else self._store.returncode

    def end_store(self, number: int) -> None:
        """End the store. Idempotent."""
        self._store = _end(self._store, number)

    def last_words(self) -> str:
        """Return the end of the store's log."""
        return (self.directory / "store.log").read_text(errors="replace")[-1500:]

    def _start(
        self, module: list[str], log: Path, environ: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as errors:
            return warm.Popen(
                [sys.executable, "-m", *module],
                env={**self.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )


def _end(process: subprocess.Popen[bytes] | None, number: int) -> None:
    if process is None:
        return
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise RuntimeError(f"process {process.pid} did not end by signal {number}") from None


def _said(log: Path, start: int, event: str) -> bool:
    with log.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n") and line.startswith(b"{") and event.encode() in line:
                with contextlib.suppress(ValueError):
                    if json.loads(line)["event"] == event:
                        return True
    return False


# -- a disk that loses power ---------------------------------------------------------------------------------


def compiler() -> str | None:
    """Return the name of a C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build_shim(name: str, directory: Path) -> Path:
    """Build the shim `name`.c in `directory` and return its path. Raises RuntimeError if it cannot be built."""
    cc = compiler()
    if cc is None:
        raise RuntimeError("no C compiler: install gcc and libc6-dev")
    made = directory / f"{name}.so"
    source = HERE / f"{name}.c"
    done = subprocess.run(
        [cc, "-O1", "-fPIC", "-shared", "-o", str(made), str(source), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        raise RuntimeError(f"{cc}: {done.stderr[-2000:]}")
    return made


def build_lossy_disk(directory: Path) -> Path:
    """Build `lossy_disk.c` in `directory` and return its path. Raises RuntimeError if it cannot be built."""
    return build_shim("lossy_disk", directory)


class WallClock:
    """The wall clock of processes that start with `environ`: it is wrong by the seconds of the last `set_by`."""

    def __init__(self, shim: Path, directory: Path) -> None:
        self._path = directory / "clock"
        self.ahead_s = 0
        self._path.write_bytes(bytes(8))
        self.environ = {"LD_PRELOAD": str(shim), "SET_CLOCK": str(self._path)}

    def set_by(self, seconds: int) -> None:
        """Set the clock forward by `seconds`, or back if they are negative."""
        self.ahead_s += seconds
        with self._path.open("r+b", buffering=0) as file:
            file.write((self.ahead_s * 10**9).to_bytes(8, sys.byteorder, signed=True))


def lossy(
    shim: Path, rig: Rig, *, at: int = 0, after: int = 0, keep: int = 0, lie: bool = False
) -> dict[str, str]:
    """Return the environment of a store whose disk (the parent of its directory) loses power: see lossy_disk.c."""
    side = rig.directory / "side"
    side.mkdir(exist_ok=True)
    return {
        "LD_PRELOAD": str(shim),
        "LOSSY_DIR": str(rig.data.parent),
        "LOSSY_SIDE": str(side),
        "LOSSY_AT": str(at),
        "LOSSY_AFTER": str(after),
        "LOSSY_KEEP": str(keep),
        "LOSSY_LIE": str(int(lie)),
    }


@contextlib.contextmanager
def small_disk(directory: Path, size_mb: int) -> Iterator[Path]:
    """Mount a file system of `size_mb` in memory. Raises PermissionError if that is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "iris-test", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        directory.rmdir()
        raise PermissionError(f"mount: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=PATIENCE_S)
        directory.rmdir()


# -- loads ---------------------------------------------------------------------------------------------------


class Appender:
    """A producer that keeps appends in flight until `finish`."""

    def __init__(self, client: iris.Client, stream: str, writer: int, rng: random.Random) -> None:
        self.writer = writer
        self.sent = 0
        self.acked: dict[int, int] = {}
        """Acknowledged messages: number -> offset."""
        self.unsure: dict[int, str] = {}
        """Messages that may be stored or not: number -> error."""
        self.refused: dict[int, str] = {}
        """Messages that are certainly not stored: number -> error."""
        self._client = client
        self._stream = stream
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.create_task(self._run(), name=f"appender-{writer}")

    async def _run(self) -> None:
        room = asyncio.Semaphore(DEPTH)
        while True:
            for _ in range(self._rng.randrange(1, 9)):
                await room.acquire()
                task = asyncio.create_task(self._append(self.sent))
                self.sent += 1
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: room.release())
            await asyncio.sleep(self._rng.choice((0, 0.002, 0.01)))

    async def _append(self, number: int) -> None:
        # Mostly small, so that several share a record, and sometimes large.
        size = random.Random(number).choice((8, 40, 200, 900, 3000, 3000, 20_000))
        payload = make_message(self.writer, number, size)
        try:
            offset = await self._client.streams.append(
                self._stream, payload, timeout=2 * PATIENCE_S
            )
        except StreamUnavailable as err:
            (self.unsure if err.may_have_run else self.refused)[number] = str(err)
        except IrisError as err:
            self.refused[number] = f"{type(err).__name__}: {err}"
        else:
            self.acked[number] = offset

    async def progress(self) -> None:
        """Return when more messages have been acknowledged. Raises TimeoutError."""
        before = len(self.acked)
        async with asyncio.timeout(PATIENCE_S):
            while len(self.acked) == before:  # noqa: ASYNC110 - the tasks have no one event
                await asyncio.sleep(0.01)

    async def finish(self) -> None:
        """Stop appending, and return when no append is in flight."""
        await self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3 * PATIENCE_S)
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Stop appending."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


class Publisher:
    """Publishes numbered messages, until `stop`."""

    def __init__(self, client: iris.Client, topic: str, writer: int, pause_s: float = 0.004) -> None:  # fmt: skip
        self.writer = writer
        self.sent = 0
        self._client = client
        self._topic = topic
        self._pause_s = pause_s
        self._running = asyncio.create_task(self._run(), name=f"publisher-{writer}")

    async def _run(self) -> None:
        while True:
            try:
                await self.publish()
            except IrisError:
                await asyncio.sleep(0.05)  # refused: send the same number again
            await asyncio.sleep(self._pause_s)

    async def publish(self) -> int:
        """Publish one more message and return its number."""
        number = self.sent
        await self._client.publish(self._topic, make_message(self.writer, number, 200))
        self.sent += 1
        return number

    async def stop(self) -> None:
        """Stop publishing."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


# -- audits --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """The result of one proof: figures, and each promise that did not hold, with the seed."""

    seed: int
    figures: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def break_(self, what: str) -> None:
        if len(self.broken) < 20:
            self.broken.append(f"{what} (seed {self.seed})")

    def expect(self, what: str, holds: bool) -> None:
        if not holds:
            self.break_(what)


class Audit:
    """The content of one stream, read in several looks. `wrong` lists what a store must never show."""

    def __init__(self, stream: str, wrong: Callable[[str], None]) -> None:
        self.stream = stream
        self.at = 0
        self.found: dict[tuple[int, int], int] = {}
        """Messages read so far: (writer, number) -> offset."""
        self.gaps: list[StreamGap] = []
        self.missing = self.reported = 0
        """Numbered publications that are not stored, and how many of them a gap with a count reported."""
        self._wrong = wrong
        self._latest: dict[int, int] = {}
        self._open: list[StreamGap] = []
        self._tells = False

    async def look(self, client: iris.Client, *, tells: bool = False) -> None:
        """Read on to the end. `tells`: missing numbers must be reported by gaps at their position."""
        self._tells = tells
        gaps: list[StreamGap] = []
        items: list[tuple[int, int, StreamMessage | StreamGap]] = []
        try:
            async with client.streams.read(
                self.stream, self.at, follow=False, patience=PATIENCE_S, on_gap=gaps.append
            ) as reader:
                async for messages in reader.batches():
                    items += [(m.offset, m.offset + 1, m) for m in messages]
        except StreamError as err:
            self._wrong(f"reading {self.stream!r} from {self.at}: {type(err).__name__}: {err}")
            return
        items += [(gap.first, gap.end, gap) for gap in gaps]
        self.take(sorted(items, key=lambda item: item[:2]))

    def take(self, items: list[tuple[int, int, StreamMessage | StreamGap]]) -> None:
        """Add items, given as (offset, next offset, message or gap), in order."""
        for first, end, item in items:
            if first != self.at:
                self._wrong(f"{self.stream!r}: offsets {self.at} to {first} are not covered")
            self.at = end
            if isinstance(item, StreamGap):
                self.gaps.append(item)
                self._open.append(item)
                continue
            try:
                writer, number = read_message(item.payload)
            except ValueError as err:
                self._wrong(f"{self.stream!r}, offset {first}: {err}")
                continue
            latest = self._latest.get(writer, -1)
            if (writer, number) in self.found:
                self._wrong(
                    f"{self.stream!r}: number {number} of {writer} is there twice, at {self.found[writer, number]} and {first}"
                )
            elif number < latest:
                self._wrong(f"{self.stream!r}: number {number} of {writer} comes after {latest}")
            self.found[writer, number] = first
            if self._tells:
                self._account(writer, number, latest)
            self._latest[writer] = max(number, latest)

    def _account(self, writer: int, number: int, latest: int) -> None:
        missing = number - latest - 1
        counts = [gap.count for gap in self._open]
        reported = sum(count or 0 for count in counts)
        self.missing += max(0, missing)
        self.reported += min(reported, max(0, missing))
        if None in counts:
            if reported > missing:
                self._wrong(
                    f"{self.stream!r}: {reported} reported as lost before {number}, {missing} are"
                )
        elif reported != missing:
            self._wrong(
                f"{self.stream!r}: numbers {latest + 1} to {number} of {writer} are missing, {reported} of them reported"
            )
        self._open.clear()

    def check(self, writer: int, acked: dict[int, int]) -> None:
        """Check that every message in `acked` is stored at its acknowledged offset."""
        lost = [n for n, at in acked.items() if at < self.at and (writer, n) not in self.found]
        if lost:
            self._wrong(
                f"{self.stream!r}: {len(lost)} acknowledged appends of {writer} are gone, the first at offset {acked[lost[0]]}"
            )
        beyond = [at for at in acked.values() if at >= self.at]
        if beyond:
            self._wrong(
                f"{self.stream!r}: acknowledged offsets up to {max(beyond)} are beyond the end, {self.at}"
            )
        moved = [n for n, at in acked.items() if self.found.get((writer, n), at) != at]
        if moved:
            self._wrong(
                f"{self.stream!r}: {len(moved)} acknowledged appends of {writer} are at other offsets"
            )


async def streams_listed(client: iris.Client) -> dict[str, Any]:
    """Return the entries of `list`, by uuid."""
    return {info.uuid: info for info in await client.streams.list(timeout=PATIENCE_S)}
