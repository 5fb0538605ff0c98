"""A terminal as `iris top` uses it: another screen, keys one by one, and everything put back at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
import tty
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from iris.cli.top.screen import Line
from iris.signals import on_signal
from iris.wire.names import printable

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Another screen, no cursor, no wrapping, and empty."""
LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
COLOURS: Final[Mapping[str, str]] = {
    "good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1", "reverse": "7",
}  # fmt: skip
PLAIN: Final[Mapping[str, str]] = {"bold": "1", "reverse": "7"}
"""Styles without colours, for NO_COLOR (https://no-color.org)."""
KEYS: Final = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right",
    "\x1bOD": "left", "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home",
    "\x1b[4~": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[Z": "left", "\x1b": "escape", "\r": "enter", "\n": "enter",
    "\t": "tab", "\x7f": "backspace", "\b": "backspace",
}  # fmt: skip
_LONGEST: Final = max(map(len, KEYS))


def keys(data: bytes) -> list[str]:
    """Return the keys in what a terminal sent: characters, and names such as "left". Unknown sequences are left out."""
    found: list[str] = []
    text = data.decode(errors="ignore")
    while text:
        known = next((text[:n] for n in range(_LONGEST, 1, -1) if text[:n] in KEYS), "")
        if known:
            text = text[len(known) :]
            found.append(KEYS[known])
        elif text[0] == "\x1b" and len(text) > 1 and text[1] in "[O":
            end = next((i for i, c in enumerate(text[2:], 2) if "@" <= c <= "~"), len(text) - 1)
            text = text[end + 1 :]
        else:
            found.append(KEYS.get(text[0], text[0]))
            text = text[1:]
    return found


class Terminal:
    """The terminal of this process while the block runs. Whatever ends the block, it is left as it was."""

    def __init__(
        self, pressed: Callable[[str], None], resized: Callable[[], None], closed: Callable[[], None], environ: Mapping[str, str]
    ) -> None:  # fmt: skip
        """`pressed` gets each key, `resized` is called when the size changed, `closed` when the terminal is gone."""
        self._pressed, self._resized, self._closed = pressed, resized, closed
        plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        self._styles = PLAIN if plain else COLOURS
        self._before: list[Any] = []
        self._lines: list[str] = []
        self._in, self._out = 0, 1

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._before = termios.tcgetattr(self._in)
        try:
            self._take()
            loop.add_reader(self._in, self._read)
            on_signal(signal.SIGWINCH, self._changed)
            on_signal(signal.SIGTSTP, self._suspend)
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        try:
            loop.remove_reader(self._in)
            for number in (signal.SIGWINCH, signal.SIGTSTP):
                signal.signal(number, signal.SIG_DFL)
        finally:
            self._give_back()

    def size(self) -> tuple[int, int]:
        """Return columns and lines; 80 and 24 if the terminal does not say."""
        try:
            columns, lines = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return columns or 80, lines or 24

    def show(self, lines: Sequence[Line]) -> None:
        """Write the lines that have changed since the last time."""
        drawn = ["".join(self._styled(text, style) for text, style in line) for line in lines]
        out = ""
        for number, line in enumerate(drawn):
            if number >= len(self._lines) or line != self._lines[number]:
                out += f"\x1b[{number + 1};1H{line}\x1b[0m\x1b[K"
        if len(drawn) < len(self._lines):
            out += f"\x1b[{len(drawn) + 1};1H\x1b[J"
        self._lines = drawn
        self._write(out)

    def _styled(self, text: str, style: str) -> str:
        code = self._styles.get(style)
        text = printable(text)
        return f"\x1b[{code}m{text}\x1b[0m" if code else text

    def _take(self) -> None:
        tty.setcbreak(self._in, termios.TCSADRAIN)
        self._lines = []
        self._write(ENTER)

    def _give_back(self) -> None:
        try:
            self._write(LEAVE)
        finally:
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            try:
                data = data[os.write(self._out, data) :]
            except (
                BlockingIOError
            ):  # somebody made the terminal non-blocking: wait for it, as usual
                os.set_blocking(self._out, True)

    def _changed(self) -> None:
        self._lines = []
        self._write("\x1b[2J")
        self._resized()

    def _suspend(self) -> None:
        """Give the terminal back while this process is stopped (Ctrl-Z), and take it again when it goes on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
        self._resized()

    def _read(self) -> None:
        try:
            data = os.read(self._in, 1024)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._in)
            self._closed()
            return
        for key in keys(data):
            self._pressed(key)
