"""Contexts of the command: a relay and keys under a name, in the file `contexts.toml` of the configuration directory.

Only the command uses them. A program that calls `iris.connect()` is explicit, or has its environment from whoever
starts it; `iris run` sets that environment for its services.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from iris.errors import ConfigError, KeyringError
from iris.wire.names import did_you_mean, printable

CONTEXT_VARIABLE: Final = "IRIS_CONTEXT"
CONTEXTS_FILE: Final = "contexts.toml"
VARIABLES: Final = {"relay": "IRIS_RELAY", "config": "IRIS_CONFIG", "access": "IRIS_ACCESS"}
"""Setting of a context -> the environment variable that it stands for."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Context:
    """What a context sets; "" leaves a setting as it is without one."""

    relay: str = ""
    config: str = ""
    access: str = ""


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts, and the name of the one in use ("" for none)."""

    current: str
    by_name: dict[str, Context]

    def named(self, name: str) -> Context:
        """Return the context of this name. Raises ConfigError."""
        if name not in self.by_name:
            hint = (
                did_you_mean(name, self.by_name) or "; `iris context list` shows those that exist"
            )
            raise ConfigError(f"there is no context {name!r}{hint}")
        return self.by_name[name]


def check_name(name: str) -> str:
    """Return `name`. Raises ConfigError if a context cannot have it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is not a name for a context; use 1 to 64 letters, digits, '-' and '_'"
        )
    return name


def contexts_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the file of contexts; it need not exist."""
    from iris.keyfiles import config_directory

    return config_directory(environ) / CONTEXTS_FILE


def load(path: Path) -> Contexts:
    """Return the contexts in the file `path`; none if it does not exist.

    Raises:
        KeyringError: the file cannot be used: as `iris.keyfiles.load_keyring`, or its content is malformed.
    """
    from iris import keyfiles

    return keyfiles.load(path, _parse) if os.path.exists(path) else Contexts("", {})


def save(path: Path, contexts: Contexts) -> None:
    """Replace the file `path` atomically, mode 0600.

    Raises:
        ConfigError: a value is not UTF-8 text, so the file cannot hold it.
        KeyringError: the write failed.
    """
    from iris import keyfiles

    lines = ["# Contexts of the command `iris`; `iris context` changes them."]
    if contexts.current:
        lines.append(f"current = {_quoted(contexts.current)}")
    for name, context in sorted(contexts.by_name.items()):
        lines += ["", f"[contexts.{name}]"]
        lines += [
            f"{key} = {_quoted(getattr(context, key))}"
            for key in VARIABLES
            if getattr(context, key)
        ]
    keyfiles.replace(path, "\n".join(lines) + "\n")


def _quoted(value: str) -> str:
    """Return a text as TOML. Raises ConfigError if it has bytes that are not UTF-8, as the path of a file may."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{printable(value)!r} is not UTF-8 text, so a context cannot hold it; use another path"
        ) from error
    # Not ASCII only: JSON escapes a character beyond U+FFFF as two, which TOML does not allow.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(text: str) -> Contexts:
    import tomllib

    try:
        document = tomllib.loads(text)
        found = {
            check_name(name): Context(**body) for name, body in document.get("contexts", {}).items()
        }
    except (
        tomllib.TOMLDecodeError, ConfigError, TypeError, AttributeError, RecursionError,
    ) as error:  # fmt: skip
        raise KeyringError(f"the file is malformed: {error}; correct or delete it") from error
    texts = [getattr(each, field.name) for each in found.values() for field in fields(each)]
    current = document.get("current", "")
    if not all(isinstance(each, str) for each in [*texts, current]):
        raise KeyringError(
            "the file is malformed: every value must be a text; correct or delete it"
        )
    return Contexts(current, found)


def apply(environ: MutableMapping[str, str], name: str | None) -> None:
    """Set the variables of a context in `environ`: of `name`, else of $IRIS_CONTEXT, else of the one in use.

    A context that is named here takes precedence over variables that are set; any other gives way to them, each
    setting by itself.

    Raises:
        ConfigError: there is no context of that name.
        KeyringError: the file of contexts cannot be used.
    """
    path = contexts_path(environ)
    wanted = name or environ.get(CONTEXT_VARIABLE, "")
    if not wanted and not os.path.exists(path):
        return
    contexts = load(path)
    wanted = wanted or contexts.current
    if not wanted:
        return
    context = contexts.named(wanted)
    for key, variable in VARIABLES.items():
        value = getattr(context, key)
        if name:
            environ.pop(variable, None)
        if value and not environ.get(variable):
            environ[variable] = value
