"""A command in a pseudo-terminal, whose screen is drawn by an emulator (pyte)."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pyte

from support.waiting import PATIENCE_S


class PseudoTerminal:
    """A command with a terminal of its own. A context manager that ends the command."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], columns: int = 80, lines: int = 24
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.written = b""
        """Everything that the command has written."""
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self._set_size(columns, lines)
        self.process = subprocess.Popen(
            command, env={"TERM": "xterm-256color", **environ}, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def text(self) -> str:
        """The screen as text, without blanks at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def modes(self) -> list[Any]:
        """The settings of the terminal now, in the order of termios."""
        return termios.tcgetattr(self._theirs)

    def until(self, holds: Callable[[], object]) -> None:
        """Draw what the command writes until something holds."""
        until_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until_s, f"it did not happen; the screen is:\n{self.text}"
            self._draw(0.05)

    def shows(self, *texts: str) -> None:
        """Draw until all these texts are on the screen."""
        self.until(lambda: all(text in self.text for text in texts))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size; the emulator's screen is empty then, so that only what is drawn afterwards is shown."""
        self.screen.resize(lines, columns)
        self.screen.erase_in_display(2)
        self._set_size(columns, lines)

    def stop(self, number: int) -> int:
        """Send a signal to the command, and return its exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Draw until the command has ended, and return its exit code."""
        self.until(lambda: self.process.poll() is not None)
        while self._draw(0):
            pass
        return self.process.wait()

    def stopped(self) -> bool:
        """Return whether the command is stopped, as by Ctrl-Z."""
        stat = f"/proc/{self.process.pid}/stat"
        with open(stat) as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _draw(self, wait_s: float) -> bool:
        """Draw what there is; return whether there was anything."""
        if not select.select([self._ours], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the command has closed the terminal
            return False
        self.written += data
        self._stream.feed(data)
        return bool(data)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
