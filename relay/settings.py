"""Reads a relay's settings: a TOML file, overridden by the environment, overridden by flags."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from iris import paths
from iris.errors import ConfigError
from iris.wire.names import did_you_mean
from relay.address_settings import whole
from relay.config import ENVIRONMENT_PREFIX, FIELDS, SETTINGS, RelayConfig, dev, lan
from relay.issuer_settings import parse_issuers


def load_config(
    argv_overrides: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None,
    *,
    uid: int | None = None,
) -> RelayConfig:
    """Return the settings of `file`, overridden by the environment, overridden by flags.

    `file` is TOML whose keys are the fields of `RelayConfig`. If it is None, the file that
    IRIS_RELAY_CONFIG_FILE names is read, if that is set. Variables are named IRIS_RELAY_<FIELD>.
    `argv_overrides` maps fields to values or texts; None is a flag that was not given. `dev` selects the
    preset that all of them override. The socket's default is `iris.paths.default_socket` for `uid` (None:
    the user of this process).

    Raises:
        ConfigError: the file cannot be read, a setting is unknown, or a value has the wrong type or
            range. The message names the file or variable, and the setting.
    """
    named_by = ""
    if file is None and (named := environ.get(_FILE_VARIABLE)):
        file = Path(named)
        named_by = _FILE_VARIABLE
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        for name, value in _read(file, named_by).items():
            sources[name] = f"{file}: {name}"
            values[name] = _parse(name, value, sources[name])
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable != _FILE_VARIABLE:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            sources[name] = variable
            values[name] = _parse(name, environ[variable], variable)
    for name, value in argv_overrides.items():
        if value is not None:
            sources.pop(name, None)
            given = name in _GIVEN_ONLY
            values[name] = value if given else _parse(name, value, name)
    values = {FIELDS.get(name, name): value for name, value in values.items()}
    values["config_file"] = file
    default_path = paths.default_socket(environ, os.geteuid() if uid is None else uid)
    socket_path = values.pop("socket_path", default_path)
    preset = dev if values.get("dev") else lan
    try:
        return replace(preset(socket_path), **values)
    except ConfigError as err:
        name, colon, rest = str(err).partition(":")
        if name not in sources:
            raise
        raise ConfigError(f"{sources[name]}{colon}{rest}") from err


def defaults() -> dict[str, str]:
    """Return every setting with its default as TOML; "" if it has none, or one that depends on the host."""
    known = {found.name: found for found in fields(RelayConfig)}
    values = {name: known[FIELDS.get(name, name)].default for name in sorted(_PARSERS)}
    return {
        name: "" if value in (MISSING, None, "") else json.dumps(value)
        for name, value in values.items()
    }


def as_environment(argv_overrides: Mapping[str, object], file: Path | None) -> dict[str, str]:
    """Return the environment variables from which `load_config` reads the settings of these flags and this file."""
    variables = {
        ENVIRONMENT_PREFIX + name.upper(): ",".join(value)
        if isinstance(value, list)
        else str(value)
        for name, value in argv_overrides.items()
        if value is not None
    }
    if file is not None:
        variables[_FILE_VARIABLE] = str(file.absolute())
    return variables


def _read(file: Path, named_by: str) -> dict[str, object]:
    """Return the content of a settings file. `named_by` is the variable that names it, "" if none does."""
    shown = f"{file} ({named_by})" if named_by else str(file)
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"the settings file {shown} does not exist") from error
    except OSError as error:
        raise ConfigError(f"the settings file {shown} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        what, at, where = str(error).removesuffix(")").rpartition(" (at ")
        found = f" at {where}: {what}" if at and where.startswith("line ") else f": {error}"
        raise ConfigError(f"{file}: not valid TOML{found}") from error


def _parse(name: str, value: object, where: str) -> object:
    """Return `value` converted to the type of field `name`; errors begin with `where`."""
    parser = _PARSERS.get(name)
    if parser is None:
        hint = did_you_mean(name, _PARSERS)
        if hint and where.startswith(ENVIRONMENT_PREFIX):
            meant = hint.split("'")[1].upper()
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{meant}?"
        raise ConfigError(
            f"{where} is not a setting{hint or '; `iris relay --settings` lists them'}"
        )
    try:
        parsed = parser(value)
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from err
    if parsed is None:
        raise ConfigError(f"{where}: {value!r} is not {_WANTED[parser]}{_unit_hint(name, value)}")
    return parsed


def _unit_hint(name: str, value: object) -> str:
    """Return what to write instead, if `value` begins with a number and so seems to have a unit."""
    if not isinstance(value, str) or not value[:1].isdigit():
        return ""
    if name.endswith("_bytes"):
        return "; write bytes without a unit, such as 268435456"
    return "; write seconds without a unit, such as 30" if name.endswith("_s") else ""


# Each parser returns None for a value that is not of its type.


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _path(value: object) -> Path | None:
    return Path(value) if isinstance(value, str | Path) and str(value) else None


def _port(value: object) -> int | None:
    return whole(value)


def _texts(value: object) -> tuple[str, ...] | None:
    """Parse a list of texts; in the environment it is one text with commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    return None


def _sites(value: object) -> tuple[str, ...] | None:
    """Parse like `_texts`, but entries begin with SITE= and may contain commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in _NEXT_SITE.split(value) if part.strip())
    return _texts(value)


def _bits(value: object) -> int | None:
    """Parse permission bits. Texts are octal, as for chmod; TOML and Python have 0o660 for numbers."""
    if isinstance(value, str):
        digits = value.removeprefix("0o")
        return int(digits, 8) if digits and not set(digits) - set("01234567") else None
    return whole(value)


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _truth(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"1": True, "true": True, "0": False, "false": False}.get(str(value).lower())


_WANTED: dict[Callable[[object], object], str] = {
    _text: "a text",
    _path: "a path",
    whole: "a whole number",
    _bits: "octal permission bits",
    _port: "a whole number",
    _texts: "a list of texts",
    _sites: "a list of texts",
    _seconds: "a number of seconds",
    _truth: "true or false",
    parse_issuers: "tables [issuers.NAME], or their JSON text",
}
_BY_ANNOTATION: dict[object, Callable[[object], object]] = {
    "Path": _path,
    "Path | None": _path,
    "str": _text,
    "str | None": _text,
    "int": whole,
    "int | None": _port,
    "tuple[str, ...]": _texts,
    "float": _seconds,
    "bool": _truth,
    "tuple[Issuer, ...]": parse_issuers,
}
_GIVEN_ONLY = ("network_keys",)
_NEXT_SITE = re.compile(r",(?=[^,=]*=)")
_FILE_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG_FILE"
_PARSERS = {
    SETTINGS.get(found.name, found.name): _BY_ANNOTATION[found.type]
    for found in fields(RelayConfig)
    if found.name not in (*_GIVEN_ONLY, "config_file")
}
_PARSERS["socket_mode"] = _bits  # octal
_PARSERS["peer_site"] = _sites
