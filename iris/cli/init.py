"""`iris init`: write a project with one service."""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from iris.cli import output
from iris.cli.exits import Exit, run
from iris.errors import ConfigError
from iris.extras import requirement
from iris.wire.names import printable

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")

SERVICE: Final = '''"""The service @name@: `iris run @module@` serves it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import iris


class Greetings:
    """What the handlers share, such as a connection to a database."""

    def __init__(self) -> None:
        self.count = 0


@asynccontextmanager
async def lifespan(client: iris.Client) -> AsyncIterator[Greetings]:
    yield Greetings()  # the service joins now; code below runs when it has left


service = iris.Service("@name@", lifespan=lifespan)


@service.on_request
async def greet(name: str, greetings: Greetings) -> str:
    greetings.count += 1
    return f"hello, {name} ({greetings.count})"
'''

TEST: Final = '''"""The service @name@, without a relay process or keys: `pytest`."""

import asyncio

from iris.testing import LocalCluster
from @module@ import service


def test_a_greeting_names_the_caller_and_counts() -> None:
    async def scenario() -> list[str]:
        async with LocalCluster() as cluster, cluster.serve(service), cluster.client() as client:
            return [
                await client.request("@name@", "world", timeout=5.0, type=str) for _ in range(2)
            ]

    assert asyncio.run(scenario()) == ["hello, world (1)", "hello, world (2)"]
'''

PROJECT: Final = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "@name@"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [@requirement@]

[project.optional-dependencies]
dev = [@dev@, "pytest"]

@direct@[tool.hatch.build.targets.wheel]
include = ["@module@.py"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

ALLOWED: Final = """[tool.hatch.metadata]
allow-direct-references = true

"""

UNIT: Final = """# sudo cp @name@.service /etc/systemd/system/ && sudo systemctl enable --now @name@
[Unit]
Description=Iris service @name@
After=network.target

[Service]
Type=notify
WorkingDirectory=@directory@
# Where keyring.toml is; without it, ~/.config/iris of the user.
#Environment=IRIS_CONFIG=/etc/iris
#User=@name@
ExecStart=@iris@ run @module@
# Reads the keys again, without losing a message.
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=1
KillMode=mixed
TimeoutStopSec=30

[Install]
WantedBy=multi-user.target
"""

README: Final = """# @name@

A service on Iris. In two terminals, in this directory:

    iris relay --dev
    iris run @module@ --reload

In a third:

    iris request @name@ world

| file | what it holds |
|---|---|
| `@module@.py` | the service and its handlers |
| `test_@module@.py` | its test, with a relay in the same process: `pytest` |
| `@name@.service` | the unit for systemd: `systemctl reload @name@` reads the keys again |
"""


def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the project, of its directory and of its cluster.")
    ],
) -> None:  # fmt: skip
    """Write a project: a service, its test, and what it needs to run under systemd.

    The new directory NAME gets the module, a test that needs no relay, a
    pyproject.toml, a README.md and a unit file. Nothing is overwritten.

    \b
    Examples:
      iris init orders
      cd orders; pytest
    """

    async def work() -> int:
        for path in create(Path.cwd(), name):
            output.write(f"{path}\n".encode(errors="surrogateescape"))
        return Exit.OK

    run(work)


def create(parent: Path, name: str) -> list[Path]:
    """Write the project `name` into a new directory of `parent`; return the paths of its files.

    Raises:
        ConfigError: the name cannot be used, the directory exists, or a write failed; then nothing was changed that
            existed before.
    """
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module) or module == "iris":
        raise ConfigError(
            f"{name[:80]!r} cannot be the name of a project; use lower-case letters, digits, '-' and '_', beginning with "
            "a letter"
        )
    if module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None:
        raise ConfigError(
            f"{name!r} cannot be the name of a project, because a Python module has this name"
        )
    directory = parent / name
    if not str(directory.absolute()).isprintable():
        raise ConfigError(
            f"{printable(str(directory))}: no unit of systemd can name this directory; choose another one"
        )
    words = {
        "name": name,
        "module": module,
        "directory": str(directory.absolute()).replace("%", "%%"),
        "iris": _executable(),
        "requirement": json.dumps(requirement(named=True)),
        "dev": json.dumps(requirement("reload", named=True)),
        "direct": ALLOWED if " @ " in requirement(named=True) else "",
    }
    texts = {
        f"{module}.py": SERVICE,
        f"test_{module}.py": TEST,
        "pyproject.toml": PROJECT,
        f"{name}.service": UNIT,
        "README.md": README,
    }
    try:
        directory.mkdir()
    except FileExistsError as error:
        raise ConfigError(f"{directory} exists and was not changed; choose another name") from error
    except OSError as error:
        raise ConfigError(f"cannot create {directory}: {error.strerror}") from error
    for file, text in texts.items():
        filled = re.sub(r"@(\w+)@", lambda found: words[found[1]], text)
        try:
            (directory / file).write_text(filled, "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {directory / file}: {error.strerror}") from error
    return [directory / file for file in texts]


def _executable() -> str:
    """Return the path of the command `iris` beside this interpreter, else the interpreter and its module."""
    command = os.path.join(os.path.dirname(sys.executable), "iris")
    if os.access(command, os.X_OK):
        return _unit_word(command)
    return f"{_unit_word(sys.executable)} -P -m iris.cli"


def _unit_word(path: str) -> str:
    """Return a path as the first word of a unit's command line, which may have no quotes or backslashes.

    See systemd.syntax(7), "Quoting", and systemd.unit(5), "Specifiers".
    """
    escaped = path.replace("%", "%%")
    return f'"{escaped}"' if set(path) & set(" ;") else escaped
