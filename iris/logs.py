"""Log records that are readable with plain `logging`, and complete for programs that read logs.

Modules log a constant event with fields beside it, with a logger that `logger` made:

    log.warning("client.loss", extra={"fields": {"topic": topic}})

The record then has `event` (the constant name) and `fields`, and its message is "event: sentence key=value ...": the
event's sentence (`iris.log_texts`), and the fields that the sentence does not use. The message is made only if a
formatter asks for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import string
from collections.abc import Callable, Hashable, Mapping
from typing import Final

from iris.wire.names import printable

Texts = Mapping[str, str | tuple[str, ...]]
"""Event -> its sentence, or several: the first one whose fields are all present is used."""

REPEATS_LIMIT: Final = 256
"""Most keys that one `Repeats` remembers, about 1 KiB each."""
REPEATS_S: Final = 10.0
"""Seconds between two log lines about the same key."""
ERROR_CHARACTERS: Final = 500
"""Characters of an exception's text that `error_text` keeps."""


EXITS: Final = (SystemExit, KeyboardInterrupt)
"""What a function of the user raises to end the program."""
RAISED: Final = (Exception, asyncio.CancelledError, *EXITS)
"""What a function of the user may raise. Its boundary catches all of it, so that what is counted stays right; see
`Runtime.handler_failed`."""


class Event:
    """The message of a log record of Iris: it becomes text when a formatter asks for it."""

    __slots__ = ("_fields", "_texts", "name")

    def __init__(self, name: str, fields: Mapping[str, object], texts: Callable[[], Texts]) -> None:
        self.name = name
        self._fields = fields
        self._texts = texts

    def __str__(self) -> str:
        return describe(self.name, self._fields, self._texts())

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a record that is sent to another process takes its text along


class _Readable(logging.Filter):
    """Gives each record of one logger its `event`, and a message that people can read."""

    def __init__(self, texts: Callable[[], Texts]) -> None:
        super().__init__()
        self._texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and not record.args:
            record.event = record.msg
            record.msg = Event(record.msg, getattr(record, "fields", {}), self._texts)
        return True


def _library_texts() -> Texts:
    from iris.log_texts import SENTENCES  # only if a message is shown: it takes memory

    return SENTENCES


_readable: Final = _Readable(_library_texts)


def logger(name: str) -> logging.Logger:
    """Return the logger of this name, whose records are readable with any formatter."""
    log = logging.getLogger(name)
    log.addFilter(_readable)  # adding it twice has no effect
    return log


def event_of(record: logging.LogRecord) -> str:
    """Return the event of a record, or the message of a record that Iris did not log."""
    return record.msg.name if isinstance(record.msg, Event) else record.getMessage()


def describe(event: str, fields: Mapping[str, object], texts: Texts, unknown: str = "") -> str:
    """Return "event: sentence key=value ...", with the fields that the sentence does not use at the end.

    `unknown` comes before an event without a sentence.
    """
    text, used = sentence(event, fields, texts)
    start = f"{event}: {text}" if text else f"{unknown}{printable(event)}"
    rest = [f"{printable(name)}={_value(fields[name])}" for name in fields if name not in used]
    return " ".join([start, *rest])


def sentence(event: str, fields: Mapping[str, object], texts: Texts) -> tuple[str, frozenset[str]]:
    """Return the sentence of an event, and the fields that it uses; "" if the event has none."""
    found = texts.get(event, ())
    for text in (found,) if isinstance(found, str) else found:
        names = frozenset(name for _, name, _, _ in string.Formatter().parse(text) if name)
        if names <= fields.keys():
            return text.format_map({name: _words(fields[name]) for name in names}), names
    return "", frozenset()


def plain(value: object) -> str:
    """Return a field's value as text: bytes in hex."""
    return bytes(value).hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)


def _words(value: object) -> str:
    """Return a field's value as part of a sentence."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None | "":
            return "-"
        case Mapping():
            return (
                ", ".join(f"{_words(key)}: {_words(each)}" for key, each in value.items()) or "none"
            )
        case list() | tuple():
            return ", ".join(map(_words, value)) or "none"
    return printable(plain(value))


def _value(value: object) -> str:
    """Return a field's value as it follows `key=`: texts quoted if necessary, all others as JSON."""
    text = plain(value) if isinstance(value, bytes | bytearray | memoryview) else value
    if not isinstance(text, str):
        return json.dumps(text, default=plain, separators=(",", ":"))
    bare = text.isprintable() and text and not set(text) & set(' "=')
    return text if bare else json.dumps(text, ensure_ascii=not text.isprintable())


def error_text(error: BaseException) -> str:
    """Return "ValueError: its text", at most `ERROR_CHARACTERS` of it."""
    try:
        text = str(error)
    except Exception as broken:  # the __str__ of a user's exception may raise anything
        text = f"its __str__ raised {type(broken).__name__}"
    kind = type(error).__name__
    return f"{kind}: {text}"[:ERROR_CHARACTERS] if text else kind


def function_name(function: object) -> str:
    """Return "module.qualified_name" of a function, of what a partial wraps, or of an object's class."""
    function = getattr(function, "func", function)
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"


class Repeats:
    """Logs the first event of each key at once, and what repeats it at most once in `interval_s`.

    The later line has the fields of the latest event, and `held_back`: how many were not logged. For what a program
    or peer can cause at any rate, in bounded memory: events with keys over `limit` are added up together, and logged
    with the fields of the latest one. Call it in the event loop.
    """

    __slots__ = ("_held", "_interval_s", "_limit", "_others", "_timer")

    def __init__(self, *, limit: int = REPEATS_LIMIT, interval_s: float = REPEATS_S) -> None:
        self._limit = limit
        self._interval_s = interval_s
        self._held: dict[Hashable, _Held] = {}
        """Keys that were logged in this interval -> what is held back."""
        self._others: _Held | None = None
        """What is held back of all keys over `limit`."""
        self._timer: asyncio.TimerHandle | None = None

    def warning(
        self, log: logging.Logger, event: str, key: Hashable, error: BaseException | None, fields: dict[str, object]
    ) -> None:  # fmt: skip
        """Log a warning with `fields`, and with the traceback of `error`; or hold it back."""
        self._write(_Held(log, logging.WARNING, event), key, error, fields)

    def error(
        self, log: logging.Logger, event: str, key: Hashable, error: BaseException | None, fields: dict[str, object]
    ) -> None:  # fmt: skip
        """Log an error with `fields`, and with the traceback of `error`; or hold it back."""
        self._write(_Held(log, logging.ERROR, event), key, error, fields)

    def _write(
        self, new: _Held, key: Hashable, error: BaseException | None, fields: dict[str, object]
    ) -> None:
        key = (new.event, key)
        held = self._held.get(key)
        if held is None and len(self._held) < self._limit:
            loop = asyncio.get_running_loop()
            self._held[key] = new
            new.logged_s = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self._interval_s, self._next_interval)
            new.log.log(new.level, new.event, exc_info=error, extra={"fields": fields})
            return
        if held is None:
            held = self._others = self._others or new
        held.count += 1
        held.fields = fields

    def _next_interval(self) -> None:
        """Log what was held back for at least an interval, and forget keys that were not repeated in it."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._timer = None
        for key, held in list(self._held.items()):
            if now_s - held.logged_s >= self._interval_s:
                if not held.count:
                    del self._held[key]
                held.flush()
                held.logged_s = now_s
        if self._others is not None:
            self._others.flush()
            self._others = None
        if self._held:
            self._timer = loop.call_later(self._interval_s, self._next_interval)

    def end(self) -> None:
        """Log what is held back, and stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, others = self._held, self._others
        self._held, self._others = {}, None
        for each in (*held.values(), others):
            if each is not None:
                each.flush()


class _Held:
    """What is held back of one key: the number of events, and the fields of the latest one."""

    __slots__ = ("count", "event", "fields", "level", "log", "logged_s")

    def __init__(self, log: logging.Logger, level: int, event: str) -> None:
        self.log = log
        self.level = level
        self.event = event
        self.logged_s = 0.0
        """Loop time of the latest line."""
        self.count = 0
        self.fields: dict[str, object] = {}

    def flush(self) -> None:
        """Log the latest event with the number of those held back, if there are any."""
        if self.count:
            fields = {**self.fields, "held_back": self.count}
            self.count, self.fields = 0, {}
            self.log.log(self.level, self.event, extra={"fields": fields})
