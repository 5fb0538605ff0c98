"""The relay's log on stderr, as JSON lines or as sentences, and a limit on warnings that peers cause.

Modules log constant events with fields beside them,

    log.warning("link.dropped", extra={"fields": {"peer": peer, "idle_s": idle_s}})

and only processes of Iris call `configure`: a relay inside another process leaves that process's logging alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Hashable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from iris.logs import describe, event_of, plain, sentence
from iris.wire.names import printable
from iris.wire.texts import sound_json

QUIET_LIMIT = 1024
"""Most (event, key) pairs that one `Quiet` remembers, about 200 bytes each."""

QUIET_INTERVAL_S = 10.0


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, event, then `record.fields`, then any traceback.

    From WARNING on, `message` after the event is its sentence (`relay.log_texts`), because somebody has to understand
    it. A field with the name of one of these six gets an underscore appended. Bytes are shown in hex, other
    values that JSON lacks as their `str`; the `str` of a key is redacted.
    """

    def __init__(self) -> None:
        super().__init__()
        from relay.log_texts import (
            SENTENCES,  # now: with no descriptor left a module cannot be loaded
        )

        self._texts = SENTENCES

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "event": event_of(record),
        }
        fields: Mapping[str, object] = getattr(record, "fields", {})
        if record.levelno >= logging.WARNING and (
            text := sentence(event_of(record), fields, self._texts)[0]
        ):
            line["message"] = text
        line.update({name + "_" if name in line else name: fields[name] for name in fields})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return sound_json(json.dumps(line, default=plain))


class Sentences(logging.Formatter):
    """One line for people: time (UTC), level, event, its sentence (`relay.log_texts`), unused fields as key=value.

    An event without a sentence, as those of other libraries, is shown with its logger and all its fields. The lines
    of a traceback follow, indented, so that none of them can pass for a line of the log. Text of peers is shown
    without its control characters.
    """

    def __init__(self) -> None:
        super().__init__()
        from relay.log_texts import SENTENCES  # only if text is wanted: it takes memory

        self._texts = SENTENCES

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, "fields", {})
        text = describe(event_of(record), fields, self._texts, unknown=f"{record.name}: ")
        lines = [self._begin(record, text)]
        for block in (record.exc_info and self.formatException(record.exc_info), record.stack_info):
            lines += [f"    {printable(line)}" for line in (block or "").splitlines()]
        return "\n".join(lines)

    def _begin(self, record: logging.LogRecord, text: str) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return f"{time.removesuffix('+00:00')}Z {record.levelname} {text}"


class OfCommand(Sentences):
    """What a command logs while somebody waits for it: the sentence, after the command's name as in its errors."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def _begin(self, record: logging.LogRecord, text: str) -> str:
        return f"{self._command}: {text.removeprefix(f'{event_of(record)}: ')}"


PRIORITIES: Final = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
"""Level -> its priority in the journal (syslog(3))."""


class Journal(logging.Formatter):
    """Lines of another formatter, each with its priority in front: "<4>" for a warning, as in sd-daemon(3).

    The journal removes the prefix and files the line under the priority, for `journalctl -p warning`.
    """

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{PRIORITIES.get(record.levelname, 6)}>"
        return "\n".join(prefix + line for line in self.inner.format(record).split("\n"))


def is_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """Return whether `descriptor` is the connection to the journal that JOURNAL_STREAM names (systemd.exec(5))."""
    named = environ.get("JOURNAL_STREAM", "")
    if not named:
        return False
    try:
        found = os.fstat(descriptor)
    except OSError:  # closed
        return False
    return named == f"{found.st_dev}:{found.st_ino}"


def configure(level: str, log_format: str = "json") -> logging.Handler:
    """Send the process's log at `level` ("INFO") and above to stderr, as JSON lines or, with "text", as sentences.

    If stderr is the journal of systemd, each line has its priority (`Journal`). Calling it again replaces the handler
    that the last call installed. Returns the handler.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == __name__]:
        root.removeHandler(handler)
        handler.close()
    handler = logging.StreamHandler(sys.stderr)
    handler.name = __name__
    formatter = Sentences() if log_format == "text" else JsonLines()
    journal = is_journal(os.environ, 2)
    handler.setFormatter(Journal(formatter) if journal else formatter)
    root.addHandler(handler)
    root.setLevel(level)
    return handler


@contextlib.contextmanager
def warnings_of(command: str) -> Iterator[None]:
    """Write warnings that are logged meanwhile to stderr, as sentences for the user of `command`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(OfCommand(command))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


class Quiet:
    """Logs one warning per (event, key) and interval, in bounded memory, and counts the others.

    For warnings that a peer can cause at will. It remembers hashes, so long keys cost no more memory; two
    keys with the same hash would share a line. When `limit` keys were logged within the interval, warnings
    for further keys are suppressed until the oldest of them is out of it. So a peer that varies its key
    cannot cause more than `limit` lines per interval either.
    """

    __slots__ = ("_limit", "_logged", "_suppressed_others", "suppressed")

    suppressed: int
    """Warnings suppressed since the start."""

    def __init__(self, *, limit: int = QUIET_LIMIT) -> None:
        self._limit = limit
        # hash of (event, key) -> (when it was last logged, suppressed since); the oldest comes first
        self._logged: dict[int, tuple[float, int]] = {}
        # suppressed for keys that are not, or no longer, in the table
        self._suppressed_others = 0
        self.suppressed = 0

    def __len__(self) -> int:
        """Return the number of keys remembered, at most `limit`."""
        return len(self._logged)

    def warning(
        self,
        log: logging.Logger,
        event: str,
        key: Hashable,
        now_s: float,
        fields: Mapping[str, object],
    ) -> bool:
        """Log `event` with `fields` unless this key was logged within the interval; return True if it was logged.

        `now_s` is monotonic. After suppressed warnings the next line has `suppressed`, their number for this
        key, and `suppressed_others`, their number for keys that were forgotten or never logged.
        """
        entry = hash((event, key))
        last = self._logged.get(entry)
        if last is not None:
            logged_s, suppressed = last
            if now_s - logged_s < QUIET_INTERVAL_S:
                self._logged[entry] = (logged_s, suppressed + 1)
                self.suppressed += 1
                return False
            del self._logged[entry]
        else:
            suppressed = 0
            if not self._make_room(now_s):
                self._suppressed_others += 1
                self.suppressed += 1
                return False
        self._logged[entry] = (now_s, 0)
        shown = dict(fields)
        if suppressed:
            shown["suppressed"] = suppressed
        if self._suppressed_others:
            shown["suppressed_others"] = self._suppressed_others
            self._suppressed_others = 0
        log.warning(event, extra={"fields": shown})
        return True

    def _make_room(self, now_s: float) -> bool:
        if len(self._logged) < self._limit:
            return True
        oldest = next(iter(self._logged), None)
        if oldest is None or now_s - self._logged[oldest][0] < QUIET_INTERVAL_S:
            return False
        self._suppressed_others += self._logged.pop(oldest)[1]
        return True
