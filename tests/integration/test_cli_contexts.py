"""Contexts, the list of keys, and the project that `iris init` writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell, dev_relay
from support.waiting import PATIENCE_S

from iris import keyfiles
from iris.cli import contexts, init
from iris.cli.contexts import Context, Contexts
from iris.errors import ConfigError, KeyringError

pytestmark = pytest.mark.timeout(90)


# -- contexts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of the test."""
    with commands.short_directory("iris-ctx-") as root:
        yield root


def test_contexts_are_added_used_listed_and_removed(home: Path) -> None:
    shell = Shell(home)
    keyfiles.create_keys(home / "keys")
    add = shell(
        "context",
        "add",
        "prod",
        "--relay",
        "tls://relay.example:7431",
        "--config",
        str(home / "keys"),
    )
    assert add == b"context prod added\n"
    shell("context", "add", "test", "--relay", "relay.sock", "--use")
    assert b"exists and was not changed" in shell("context", "add", "test", "--relay", "x", code=2)
    rows = [json.loads(line) for line in shell("context", "list", "--json").splitlines()]
    assert rows == [
        {"name": "prod", "used": False, "relay": "tls://relay.example:7431", "config": str(home / "keys"), "access": ""},
        {"name": "test", "used": True, "relay": os.path.abspath("relay.sock"), "config": "", "access": ""},
    ]  # fmt: skip
    shell("context", "use", "prod")
    assert re.search(
        rb"^\* prod  relay tls://relay.example:7431, config", shell("context", "list"), re.M
    )
    assert b"there is no context 'prd'; did you mean 'prod'?" in shell(
        "context", "use", "prd", code=2
    )
    shell("context", "remove", "prod")
    assert [
        json.loads(line)["used"] for line in shell("context", "list", "--json").splitlines()
    ] == [False]
    assert b"requires at least one of" in shell("context", "add", "empty", code=2)
    assert b"is not a name for a context" in shell("context", "add", "a b", "--relay", "x", code=2)


def test_the_file_of_contexts_is_private_and_replaced_whole(home: Path) -> None:
    shell = Shell(home)
    shell("context", "add", "prod", "--relay", "tls://relay.example:7431")
    path = home / "config" / "iris" / "contexts.toml"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["contexts.toml"]
    path.chmod(0o644)
    assert b"chmod 600" in shell("context", "list", code=2)
    path.chmod(0o600)
    path.write_text("contexts = 1\n")
    assert b"the file is malformed" in shell("context", "list", code=2)


@pytest.mark.parametrize(
    "value",
    ["tls://a:1,tls://b:2", 'with "quotes" \\ and ünïcode', "line\nend", "/keys/🔑", "del\x7f"],
)
def test_a_context_is_read_as_it_was_written(home: Path, value: str) -> None:
    written = Contexts("a", {"a": Context(relay=value), "b-c": Context(config=value, access=value)})
    contexts.save(home / "contexts.toml", written)
    assert contexts.load(home / "contexts.toml") == written


def test_a_path_that_is_not_text_is_refused_and_the_file_stays_usable(home: Path) -> None:
    shell = Shell(home)
    shell("context", "add", "prod", "--relay", "tls://relay.example:7431")
    wrong = home / os.fsdecode(b"keys\xff")
    wrong.mkdir()
    said = shell("context", "add", "wrong", "--config", str(wrong), code=2)
    assert b"is not UTF-8 text, so a context cannot hold it" in said
    assert [json.loads(line)["name"] for line in shell("context", "list", "--json").splitlines()] == ["prod"]  # fmt: skip
    (home / "file").touch()
    shell.environ["IRIS_CONFIG"] = str(home / "file" / "config")
    said = shell("context", "add", "prod", "--relay", "x", code=2)
    assert b"cannot create" in said
    assert b"Traceback" not in said


def test_a_file_of_contexts_that_is_nested_too_deeply_is_malformed(home: Path) -> None:
    keyfiles.replace(home / "contexts.toml", "a = " + "[" * 5000)
    with pytest.raises(KeyringError, match="the file is malformed"):
        contexts.load(home / "contexts.toml")


@pytest.mark.parametrize(
    ("environ", "named", "result"),
    [
        ({}, None, {"IRIS_RELAY": "used", "IRIS_CONFIG": "used-keys"}),
        ({"IRIS_CONTEXT": "other"}, None, {"IRIS_RELAY": "other"}),
        ({"IRIS_RELAY": "mine"}, None, {"IRIS_RELAY": "mine", "IRIS_CONFIG": "used-keys"}),
        ({"IRIS_RELAY": "mine", "IRIS_CONTEXT": "other"}, None, {"IRIS_RELAY": "mine"}),
        ({"IRIS_RELAY": "mine", "IRIS_ACCESS": "x"}, "other", {"IRIS_RELAY": "other"}),
        ({"IRIS_CONTEXT": "used"}, "other", {"IRIS_RELAY": "other"}),
    ],
)  # fmt: skip
def test_options_come_before_variables_and_these_before_the_context_in_use(
    home: Path, environ: dict[str, str], named: str | None, result: dict[str, str]
) -> None:
    (home / "iris").mkdir()
    contexts.save(
        home / "iris" / "contexts.toml",
        Contexts("used", {"used": Context("used", "used-keys"), "other": Context("other")}),
    )
    given = {"XDG_CONFIG_HOME": str(home), **environ}
    contexts.apply(given, named)
    assert {k: v for k, v in given.items() if k in contexts.VARIABLES.values()} == result


def test_a_context_that_is_not_there_is_an_error(home: Path) -> None:
    with pytest.raises(ConfigError, match="there is no context 'prod'; `iris context list`"):
        contexts.apply({"XDG_CONFIG_HOME": str(home), "IRIS_CONTEXT": "prod"}, None)
    (home / "iris").mkdir()
    (home / "iris" / "contexts.toml").write_text("x")
    (home / "iris" / "contexts.toml").chmod(0o600)
    with pytest.raises(KeyringError, match="the file is malformed"):
        contexts.apply({"XDG_CONFIG_HOME": str(home)}, None)


def test_a_verb_calls_the_relay_of_its_context(home: Path) -> None:
    with dev_relay(home) as socket:
        elsewhere = Shell(home, XDG_RUNTIME_DIR=str(home / "none"))
        dev = str(home / "iris" / "dev")
        elsewhere("context", "add", "here", "--relay", str(socket), "--config", dev)
        assert b"no relay is running" in elsewhere.process("status", code=2)
        report = json.loads(elsewhere.process("--context", "here", "status", "--json"))
        assert report["socket"] == str(socket)
        elsewhere.environ["IRIS_CONTEXT"] = "here"
        assert elsewhere.process("status", "--json")
        assert b"does not use contexts; leave out --context" in elsewhere(
            "--context", "here", "relay", "--check", code=2
        )
        assert elsewhere.process("context", "list")


# -- the list of keys -------------------------------------------------------------------------------------------


def test_the_list_of_keys_has_fingerprints_roles_and_the_least_age(home: Path) -> None:
    shell = Shell(home)
    shell("key", "new")
    shell("key", "add", "orders")
    shell("key", "add", "topic:news")
    ring = home / "config" / "iris" / "keyring.toml"
    two_days_ago = datetime.now(UTC).timestamp() - 2 * 86_400 - 5
    os.utime(ring, (two_days_ago, two_days_ago))
    lines = shell("key", "list").decode().splitlines()
    assert re.fullmatch(r"NAME +FINGERPRINT +ROLE +AGE", lines[0])
    assert all(line.endswith("at least 2 days") for line in lines[1:-1])
    assert re.fullmatch(r"\(network\) +[0-9a-f]{32}  dials +unknown: .*", lines[-1])
    rows = [json.loads(line) for line in shell("key", "list", "--json").splitlines()]
    assert [(row["name"], row["role"]) for row in rows] == [
        ("default", "seals"), ("orders", "seals"), ("orders", "opens"), ("topic:news", "seals"),
        ("topic:news", "opens"), ("(network)", "dials"),
    ]  # fmt: skip
    assert rows[0]["file"] == str(ring)
    assert datetime.fromisoformat(rows[0]["unchanged_since"]).timestamp() == int(two_days_ago)
    shown = [json.loads(line)["key"] for line in shell("key", "show", "--json").splitlines()]
    assert [row["key"] for row in rows] == shown


# -- init -------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(home: Path) -> Path:
    """A project as `iris init` writes it."""
    said = Shell(home).process("init", "my-orders").decode().splitlines()
    assert {Path(line).name for line in said} == {
        "my_orders.py", "test_my_orders.py", "pyproject.toml", "my-orders.service", "README.md",
    }  # fmt: skip
    return home / "my-orders"


def test_the_test_of_a_new_project_passes(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=project, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_new_project_is_served_by_the_command_of_its_unit(home: Path, project: Path) -> None:
    unit = (project / "my-orders.service").read_text()
    start = re.search(r"^ExecStart=(.*)$", unit, re.M)
    assert start is not None
    with dev_relay(home):
        shell = Shell(home)
        process = subprocess.Popen(
            start[1].split(), cwd=project, env=shell.environ, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        assert b"run.serving" in process.stderr.readline()
        assert shell("request", "my-orders", "world") == b"hello, world (1)\n"
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_of_a_new_project(project: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", project / "my-orders.service"], capture_output=True, text=True, check=False
    )  # fmt: skip
    about = [line for line in done.stderr.splitlines() if "my-orders" in line]
    assert about == [], done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_what_a_unit_names_below_odd_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "50% of our work; here"
    (odd / "bin").mkdir(parents=True)
    for name in ("python", "iris"):
        (odd / "bin" / name).write_text("#!/bin/sh\n")
        (odd / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(odd / "bin" / "python"))
    init.create(odd, "my-orders")
    done = subprocess.run(
        ["systemd-analyze", "verify", odd / "my-orders" / "my-orders.service"], capture_output=True, text=True, check=False
    )  # fmt: skip
    about = [line for line in done.stderr.splitlines() if "my-orders" in line]
    assert about == [], done.stderr


def test_a_directory_that_no_unit_can_name_gets_no_project(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no unit of systemd can name this directory"):
        init.create(tmp_path / "two\nlines", "my-orders")


def test_a_project_is_never_overwritten_and_its_name_is_checked(home: Path, project: Path) -> None:
    before = {path: path.read_bytes() for path in project.iterdir()}
    shell = Shell(home)
    assert b"exists and was not changed" in shell.process("init", "my-orders", code=2)
    assert {path: path.read_bytes() for path in project.iterdir()} == before
    for name in ("Orders", "1st", "a/b", "class", "iris"):
        assert b"cannot be the name of a project" in shell.process("init", name, code=2)
    assert b"a Python module has this name" in shell.process("init", "json", code=2)
    assert not (home / "json").exists()
