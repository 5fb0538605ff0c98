"""docs/operation.md is true: its tables list every setting with its default, every drop cause, and real log events."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import typer

from relay.__main__ import relay
from relay.config import ENVIRONMENT_PREFIX, SETTINGS, RelayConfig
from relay.daemon import LIVE
from relay.log_texts import SENTENCES
from relay.store.__main__ import store

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operation.md").read_text("utf-8")
NOT_SETTINGS = ("config_file", "network_keys")
"""Fields of RelayConfig that no setting sets: the file itself, and what key files hold."""
NOT_FOR_SETTINGS = {"--check", "--config", "--help", "--settings"}
"""Flags that set nothing."""
OTHER_FLAGS = {
    "socket_path": "--socket",
    "socket_group": "--group",
    "mdns": "--no-mdns",
    "origins": "--origin",
}


def section(heading: str) -> str:
    """Return the text under a heading, up to the next heading of any level."""
    _, _, rest = PAGE.partition(f"\n{heading}\n")
    assert rest, heading
    return re.split(r"^#", rest, maxsplit=1, flags=re.M)[0]


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row whose first cell is code."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" |")]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def shown(name: str, value: object) -> str:
    """Return a default as the page shows it."""
    match value:
        case None | "" | ():
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case tuple():
            return ", ".join(f"`{part}`" for part in value)
        case float() if name.endswith("_s"):
            return f"{value:g} s"
        case int() if name.endswith("_bytes"):
            assert value % (1 << 20) == 0
            return f"{value >> 20} MiB"
        case int():
            return f"{value:,}"
    return f"`{value}`"


def flags(command: typer.models.CommandFunctionType) -> set[str]:
    """Return the flags of a command that are shown in its help, and those that are accepted without it."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return {flag for given in typer.main.get_command(app).params for flag in given.opts}


def test_the_table_lists_every_setting_with_its_variable_and_default() -> None:
    listed = {}
    for setting, _, variable, default, meaning in rows(section("### Every setting of a relay")):
        (name,) = code(setting)
        assert code(variable) == [ENVIRONMENT_PREFIX + name.upper()]
        assert meaning, name
        assert name not in listed
        listed[name] = default
    expected = {
        SETTINGS.get(field.name, field.name): "[see below](#paths-and-keys)"
        if field.default is MISSING
        else shown(field.name, field.default)
        for field in fields(RelayConfig)
        if field.name not in NOT_SETTINGS
    }
    assert listed == expected


def test_the_table_lists_every_flag_of_the_relay() -> None:
    listed = set()
    for setting, flag, *_ in rows(section("### Every setting of a relay")):
        for given in code(flag):
            (name,) = code(setting)
            assert given == OTHER_FLAGS.get(name, "--" + name.replace("_", "-"))
            listed.add(given)
    assert listed == flags(relay) - NOT_FOR_SETTINGS


def test_the_table_lists_every_flag_of_a_store() -> None:
    listed = set(re.findall(r"\| `(--[\w-]+)` \|", section("### Every setting of a store")))
    hidden = {"--supervised", "--figures", "--checkpoint-bytes", "--failover-s"}
    assert listed | hidden == flags(store)


def test_the_page_says_which_settings_change_at_once() -> None:
    ((at_once, _),) = rows(section("### Change a running relay"))
    assert sorted(code(at_once)) == sorted(LIVE)


def test_every_drop_cause_is_explained() -> None:
    explained = {name for row in rows(section("### The account of messages")) for name in code(row[0])}  # fmt: skip
    assert explained == set(drop_causes())


def drop_causes() -> Iterator[str]:
    """Yield the causes by which the relay's router and ports count drops."""
    for folder in ("core", "net"):
        for path in (ROOT / "relay" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                match node:
                    case ast.Call(func=ast.Attribute(value=owner, attr="drop")):
                        if "accounts" not in ast.unparse(owner):
                            continue
                    case ast.Call(func=ast.Attribute(attr="_lost")) if folder == "net":
                        pass
                    case ast.Call(func=ast.Attribute(attr="_break") | ast.Name("refuse")):
                        pass
                    case _:
                        continue
                for given in node.args:
                    for part in ast.walk(given):
                        if isinstance(part, ast.Constant) and isinstance(part.value, str):
                            yield part.value


def test_every_event_on_the_page_exists() -> None:
    named = [
        name
        for heading in ("### What to alert on", "## Stopping and restarting")
        for row in rows(section(heading))
        for name in code(row[0])
    ]
    assert len(named) > 30
    assert set(named) <= SENTENCES.keys()
