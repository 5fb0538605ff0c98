"""Reads the values of arguments and options in place of Typer, whose own reader imports Pydantic for each verb.

That import took a third of the time of a short command. Errors of this reader also say in plain words what a value
must be. Parameters of other types stay with Typer's reader; no verb has one.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import typer

_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE: Final = frozenset({"", "0", "false", "f", "no", "n", "off"})
_KINDS: Final = (str, int, float, bool, Path)


class WrongUsage(typer.BadParameter):
    """A mistake in how a verb was called whose text is complete: no "Invalid value for" is put before it."""


def read_plainly(command: Any) -> Any:
    """Let the parameters of a command, and of its sub-commands, be read by this module; return the command.

    It sets an attribute that Typer (0.29) fills in at the first use. With a Typer that lacks it nothing changes.
    """
    list_params = command.get_params

    def get_params(ctx: Any) -> list[Any]:
        found: list[Any] = list_params(ctx)  # among them --help, which is made here
        for parameter in found:
            _choose_reader(parameter)
        return found

    parse_args = command.parse_args

    def parse(ctx: Any, args: list[str]) -> Any:
        try:
            return parse_args(ctx, args)
        except Exception as error:
            # An option without its value is reported without the command that it belongs to.
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    command.get_params = get_params
    command.parse_args = parse
    for each in getattr(command, "commands", {}).values():
        read_plainly(each)
    return command


def _choose_reader(parameter: Any) -> None:
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is None or getattr(parameter, "_runtime_param", parameter) is not None:
        return
    annotation, info = descriptor.annotation, descriptor.parameter_info
    inner = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    if info.parser is not None or inner in _KINDS or get_origin(inner) is Literal:
        parameter._runtime_param = Reader(inner, info)
        _shorten_help(parameter, inner)


def _shorten_help(parameter: Any, kind: Any) -> None:
    """Show no type for a flag, and no range: an error states the limit that was passed."""
    parameter.min = parameter.max = None
    if kind is bool and not parameter.metavar:
        parameter.display_type_rich = lambda ctx: None
    elif kind in (int, float) and not parameter.metavar:
        parameter.display_type_rich = lambda ctx: f"<{kind.__name__}>"


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader of one parameter, which may be repeated."""

    kind: Any
    info: Any
    """What the verb says of it: limits of a number, what a path must be, a parser."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value of a parameter. Raises BadParameter, which says what the value must be."""
        repeated = param.multiple or param.nargs == -1
        if value is None:
            return () if repeated else None
        try:
            return [self._read(each) for each in value] if repeated else self._read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from None

    def _read(self, value: Any) -> Any:
        if self.info.parser is not None:
            return self.info.parser(value)
        if get_origin(self.kind) is Literal:
            accepted = get_args(self.kind)
            if value not in accepted:
                *others, last = map(str, accepted)
                raise ValueError(f"{value!r} is not accepted; use {', '.join(others)} or {last}")
            return value
        if self.kind is bool:
            return value if isinstance(value, bool) else self._read_truth(str(value))
        if self.kind is str:
            return os.fsdecode(value) if isinstance(value, bytes) else str(value)
        return (
            self._read_path(os.fsdecode(value)) if self.kind is Path else self._read_number(value)
        )

    def _read_truth(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is not accepted; use true or false")
        return word in _TRUE

    def _read_number(self, value: Any) -> int | float:
        what = "whole number" if self.kind is int else "number"
        try:
            number: int | float = self.kind(value)
        except (ValueError, TypeError):
            raise ValueError(f"{value!r} is not a {what}") from None
        if not math.isfinite(number):
            raise ValueError(f"{value!r} is not a {what}")
        least, most = self.info.min, self.info.max
        if least is not None and number < least:
            raise ValueError(f"{value} is too small; the minimum is {least:g}")
        if most is not None and number > most:
            raise ValueError(f"{value} is too large; the maximum is {most:g}")
        return number

    def _read_path(self, text: str) -> Path:
        info = self.info
        if not os.path.exists(text):
            if info.exists:
                raise ValueError(f"{text!r} does not exist")
        elif not info.dir_okay and os.path.isdir(text):
            raise ValueError(f"{text!r} is a directory, not a file")
        elif not info.file_okay and os.path.isfile(text):
            raise ValueError(f"{text!r} is a file, not a directory")
        elif info.readable and not os.access(text, os.R_OK):
            raise ValueError(f"this user cannot read {text!r}")
        return Path(text)
