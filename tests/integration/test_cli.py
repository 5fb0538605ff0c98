"""The `iris` command as scripts use it: processes, pipes and exit codes, against a real relay."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import commands, warm
from support.commands import Shell, dev_relay, end
from support.waiting import PATIENCE_S, wait_until
from typer.testing import CliRunner

import iris.blocking
from iris import cli, keyfiles
from iris.cli.exits import Exit

pytestmark = pytest.mark.timeout(60)

VERBS = [
    "request", "push", "survey", "broadcast", "publish", "subscribe", "tunnel", "members", "describe", "ping", "status", "run", "relay",
    "key new", "key show", "key list", "context add", "context use", "context list", "context remove", "init", "key add", "key promote", "key retire", "demo", "bench serve", "bench request", "bench publish",
    "bench tunnel", "store", "federation key", "federation list", "federation ping", "bridge iris1", "bridge sp", *(f"stream {verb}" for verb in (
        "create", "list", "info", "read", "append", "export", "import", "change", "pause", "resume", "delete", "move", "keys",
        "consumer list", "consumer delete", "mirror", "promote",
    )),
]  # fmt: skip

SERVICES = """
import asyncio, os
import iris

echo = iris.Service("echo")
noted, pushed = [], []

@echo.on_request
def answer(message: iris.Message):
    if message.payload == b"noted":
        return b" ".join(noted)
    if message.payload == b"fail":
        raise ValueError("no such thing")
    if message.payload == b"refuse":
        raise iris.Refusal("sold_out", "sorry", left=0, until=b"x")
    return message.value if message.packed else iris.Reply(message.payload, message.headers)

@echo.on_request("shout")
def shout(message: str):
    return message.upper() + "!"

@echo.on_push("later")
def later(message: bytes):
    pushed.append(message)

@echo.on_push("numbered")
def numbered(message: dict[str, int]):
    pushed.append(b"numbered")

@echo.on_request("pushed")
def what_was_pushed(message: bytes):
    return b" ".join(pushed)

@echo.on_survey("who")
def who(message: str):
    return "me"

@echo.on_push
def push(message: bytes):
    noted.append(b"push:" + message)

@echo.on_broadcast
def hear(message: bytes):
    noted.append(b"cast:" + message)

@echo.on_survey
async def survey(message: str):
    if message == "fail":
        raise ValueError("not me")
    if message == "hang":
        await asyncio.sleep(1)
    return {"received": message}

@echo.on_tunnel
async def tunnel(tunnel):
    async for message in tunnel:
        if message == b"break":
            raise ValueError("broken on purpose")
        if message == b"enough":
            await tunnel.send(b"bye")
            return
        await tunnel.send(message.upper() if "upper" in tunnel.headers else message)

narrow = iris.Service("narrow", limits=iris.Limits(concurrency=1, queue_bytes=1))
gate = asyncio.Event()

@narrow.on_request
async def wait(message: str):
    if message == "die":
        os._exit(9)
    if message == "block":
        await gate.wait()
    return "done after " + message

@narrow.on_push
def go(message: bytes):
    gate.set()

idle = iris.Service("idle")
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory of this module."""
    with commands.short_directory("iris-cli-") as root:
        yield root


@pytest.fixture(scope="module")
def relay(home: Path) -> Iterator[Path]:
    """A relay with throw-away keys; gives its socket."""
    with dev_relay(home) as socket:
        yield socket


@pytest.fixture
def shell(home: Path, relay: Path) -> Iterator[Shell]:
    """A shell in which clients find the relay and its keys."""
    shell = Shell(home)
    yield shell
    shell.finish()


@pytest.fixture(scope="module")
def observer(home: Path, relay: Path) -> Iterator[iris.blocking.Client]:
    """A client that sees what the relay sees."""
    keyring = keyfiles.load_keyring(home / "iris" / "dev" / "keyring.toml")
    with iris.blocking.connect(relay, keyring=keyring) as client:
        yield client


@pytest.fixture(scope="module")
def member(home: Path, observer: iris.blocking.Client) -> Iterator[str]:
    """A member of the cluster echo, by `iris run`; gives its id."""
    (home / "services.py").write_text(SERVICES)
    shell = Shell(home)
    process = shell.start("run", "services:echo")
    try:
        (info,) = observer.wait_for_members("echo", 1, timeout=PATIENCE_S)
        yield info.member
        process.terminate()
        end(process)
    finally:
        shell.finish()


@pytest.fixture
def narrow(shell: Shell, member: str, observer: iris.blocking.Client) -> subprocess.Popen[bytes]:
    """A member of the cluster narrow, which takes one request at a time; the test ends it."""
    return start_narrow(shell, observer)


def start_narrow(shell: Shell, observer: iris.blocking.Client) -> subprocess.Popen[bytes]:
    """Start the only member of the cluster narrow; returns when it is there."""
    # The relay may not have noticed yet that the one of the test before is dead.
    wait_until(lambda: not observer.members("narrow"))
    process = shell.start("run", "services:narrow")
    observer.wait_for_members("narrow", 1, timeout=PATIENCE_S)
    return process


def running(observer: iris.blocking.Client, process: subprocess.Popen[bytes]) -> int:
    """Return how many requests a member process has in its hands."""
    sessions = observer.status()["sessions"]
    return sum(s["running"] for s in sessions if s["pid"] == process.pid)


def subscribed(observer: iris.blocking.Client, process: subprocess.Popen[bytes]) -> bool:
    sessions = observer.status()["sessions"]
    return any(s["subscriptions"] for s in sessions if s["pid"] == process.pid)


# -- help ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    result = CliRunner().invoke(cli.app, [*verb.split(), "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"iris {verb}" in result.output


def test_the_installed_command_lists_its_verbs_and_exit_codes() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("iris"), "--help"], capture_output=True, text=True, check=True
    )  # fmt: skip
    for verb in VERBS:
        assert re.search(rf"^\W*{verb.split()[0]} ", done.stdout, re.MULTILINE), verb
    for code in Exit:
        assert re.search(rf"^\W*{code.value} ", done.stdout, re.MULTILINE), code
    for variable in ("RELAY", "CONFIG", "ACCESS"):
        assert re.search(rf"^\W*IRIS_{variable} ", done.stdout, re.MULTILINE), variable
    assert "completion" in done.stdout


@pytest.mark.parametrize(("verb", "said"), [("new", "~/.config/iris"), ("access", "IRIS_ACCESS")])
def test_help_of_keys_says_where_their_files_are_found(verb: str, said: str) -> None:
    assert said in CliRunner().invoke(cli.app, ["key", verb, "--help"]).output


@pytest.mark.parametrize("verb", ["run x", "bridge iris1", "bridge sp -c x.toml"])
def test_a_wrong_log_level_is_refused_with_those_that_are_accepted(verb: str) -> None:
    done = CliRunner().invoke(cli.app, [*verb.split(), "--log-level", "debug"])
    assert done.exit_code == Exit.USAGE
    said = " ".join(done.output.replace("│", " ").split())
    assert "'debug' is not a log level; use DEBUG, INFO, WARNING or ERROR" in said


# -- nothing runs ----------------------------------------------------------------------------------------------


def test_without_a_relay_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    keyfiles.create_keys(tmp_path / "keys")
    shell = Shell(tmp_path, IRIS_CONFIG=str(tmp_path / "keys"))
    for verb in (["request", "echo", "x"], ["status"], ["subscribe", "t"], ["members", "echo"]):
        said = shell(*verb, code=2).decode()
        assert f"no relay at {tmp_path}/iris/relay.sock" in said
        assert "start one with `iris relay`" in said


def test_without_keys_and_without_a_relay_the_error_names_both(tmp_path: Path) -> None:
    said = Shell(tmp_path)("request", "echo", "x", code=2).decode()
    assert said.count("\n") == 1
    assert f"no relay is running (looked at {tmp_path}/iris/relay.sock)" in said
    assert f"no keyring in {tmp_path}/config/iris" in said
    assert "start `iris relay --dev`; for a network, make keys with `iris key new`" in said
    hidden = Shell(tmp_path, IRIS_CONFIG=str(tmp_path))("status", code=2)
    assert b"unset IRIS_CONFIG and start `iris relay --dev`" in hidden


def test_without_keys_but_with_a_relay_the_error_says_how_to_make_keys(
    relay: Path, tmp_path: Path
) -> None:
    said = Shell(tmp_path, IRIS_RELAY=str(relay))("request", "echo", "x", code=2)
    assert b"no relay" not in said
    assert b"make one with `iris key new`" in said


USAGE = {
    "requst a b": "there is no command 'requst'; did you mean 'request'?",
    "serve orders": "there is no command 'serve'; did you mean 'run'?",
    "zzz": "there is no command 'zzz'; `iris --help` shows the usage",
    "stream lst": "No such command 'lst'. Did you mean 'list'?",
    "request a --timeout abc": "Invalid value for '--timeout' / '-t': 'abc' is not a number; `iris request --help` shows the usage",
    "request a --timeout 0": "Invalid value for '--timeout' / '-t': 0 is too small; the minimum is 0.001; `iris request --help` shows the usage",
    "request a --timeout nan": "Invalid value for '--timeout' / '-t': 'nan' is not a number; `iris request --help` shows the usage",
    "subscribe t -n 1.5": "Invalid value for '--count' / '-n': '1.5' is not a whole number; `iris subscribe --help` shows the usage",
    "run x --log-format xml": "Invalid value for '--log-format': 'xml' is not accepted; use json or text; `iris run --help` shows the usage",
    "request a --timout 1": "there is no option '--timout'; did you mean '--timeout'?",
    "request a --zzz": "there is no option '--zzz'; `iris request --help` shows the usage",
    "stream delete orders": "this deletes stream orders with all its messages; confirm with --yes; `iris stream delete --help` shows the usage",
    "request --relay": "Option '--relay' requires an argument; `iris request --help` shows the usage",
    "relay --drain": "there is no option '--drain'; `iris relay --help` shows the usage",
    "relay --no-mdn": "there is no option '--no-mdn'; did you mean '--no-mdns'?",
    "publish": "Missing argument 'TOPIC'; `iris publish --help` shows the usage",
    "request a --pack {": """Invalid value for --pack: the payload '{' is not JSON at line 1, column 2; write JSON, such as '"text"' or '{"n": 1}', or leave out --pack to send the text as it is; `iris request --help` shows the usage""",
}  # fmt: skip


@pytest.mark.parametrize("line", USAGE)
def test_an_error_of_usage_is_one_line_that_says_what_to_write(tmp_path: Path, line: str) -> None:
    assert Shell(tmp_path)(*line.split(), code=2).decode() == f"iris: {USAGE[line]}\n"


def test_an_unknown_setting_is_answered_with_the_one_that_resembles_it(tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_text("queue_byte = 1\n")
    shell = Shell(tmp_path)
    said = shell("relay", "--config", str(tmp_path / "relay.toml"), "--check", code=2)
    assert b"queue_byte is not a setting; did you mean 'queue_bytes'?" in said
    far = Shell(tmp_path, IRIS_RELAY_FRUIT="apple")("relay", "--check", code=2)
    assert b"IRIS_RELAY_FRUIT is not a setting; `iris relay --settings` lists them" in far
    for variable, value, answer in (
        ("IRIS_RELAY_PROT", "1", "IRIS_RELAY_PROT is not a setting; did you mean IRIS_RELAY_PORT?"),
        (
            "IRIS_RELAY_QUEUE_BYTES",
            "256MB",
            "IRIS_RELAY_QUEUE_BYTES: '256MB' is not a whole number; write bytes without a unit, such as 268435456",
        ),
        (
            "IRIS_RELAY_DRAIN_TIMEOUT_S",
            "30s",
            "IRIS_RELAY_DRAIN_TIMEOUT_S: '30s' is not a number of seconds; write seconds without a unit, such as 30",
        ),
        (
            "IRIS_RELAY_CONFIG_FILE",
            "none.toml",
            "the settings file none.toml (IRIS_RELAY_CONFIG_FILE) does not exist",
        ),
    ):
        told = Shell(tmp_path, **{variable: value})("relay", "--check", code=2)
        assert told.decode() == f"iris relay: {answer}\n"
    (tmp_path / "broken.toml").write_text("port = 1\nmdns = maybe\n")
    told = shell("relay", "--config", str(tmp_path / "broken.toml"), "--check", code=2)
    assert b"broken.toml: not valid TOML at line 2, column 8: Invalid value" in told
    listed = shell("relay", "--settings").decode()
    assert "queue_bytes = 134217728\n" in listed
    (tmp_path / "all.toml").write_text(listed)
    shell("relay", "--dev", "--check", "--config", str(tmp_path / "all.toml"))


@pytest.mark.parametrize("verb", ["run", "relay", "store"])
def test_help_shows_the_default_of_the_log(verb: str) -> None:
    said = " ".join(CliRunner().invoke(cli.app, [verb, "--help"]).output.replace("│", " ").split())
    assert "[default: json]" in said or "Default: json." in said
    assert "[default: INFO]" in said or "Default: INFO." in said
    assert "(INFO)" not in said


def test_help_of_bench_names_its_extra() -> None:
    said = CliRunner().invoke(cli.app, ["bench", "--help"]).output
    assert "Needs the extra [bench]" in said


def test_help_shows_no_type_for_flags_and_no_range_for_numbers() -> None:
    for words in (
        ["request"],
        ["stream", "append"],
        ["relay"],
        ["bench", "request"],
        ["key", "promote"],
    ):
        said = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "200"}).output
        assert "--help" in said
        assert "<bool>" not in said
        assert "range" not in said.replace("ranges", "")


def test_a_relay_without_a_network_key_names_the_two_ways_to_get_one(tmp_path: Path) -> None:
    said = Shell(tmp_path).process("relay", code=2)
    assert b"iris key new" in said
    assert b"copy network.toml" in said


def test_a_second_relay_is_refused_with_the_pid_of_the_first(shell: Shell, relay: Path) -> None:
    pid = (relay.parent / "relay.sock.lock").read_text().strip()
    assert f"process {pid}".encode() in shell.process("relay", "--dev", code=2)


# -- causes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("request echo x", "ConnectionRefusedError: "), ("stream list", "iris.errors.RelayUnavailable: "),
        ("run nowhere", "ModuleNotFoundError: No module named 'nowhere'"), ("key show", "iris.errors.KeyringError: "),
        ("relay --port 99999", "iris.errors.ConfigError: "), ("relay", "network_keys(environ)"),
        ("store", "iris.errors.ConfigError: "), ("store salvage nowhere", "iris.errors.ConfigError: "),
        ("bridge iris1", "iris.errors.RelayUnavailable: "), ("bridge sp -c nowhere", "FileNotFoundError: "),
        ("stream import x", "iris.errors.RelayUnavailable: "), ("request --pack echo {", "JSONDecodeError: "),
    ],
)  # fmt: skip
def test_verbose_prints_the_causes_of_an_error_below_its_line(
    tmp_path: Path, line: str, cause: str
) -> None:
    environ = Shell(tmp_path).environ
    if line.startswith("request echo"):
        keyfiles.create_keys(tmp_path / "keys")
        (tmp_path / "socket").touch()
        environ |= {"IRIS_CONFIG": str(tmp_path / "keys"), "IRIS_RELAY": str(tmp_path / "socket")}

    def errors(*options: str) -> tuple[int, str]:
        command = commands.command(*options, *line.split())
        done = warm.run(command, env=environ, cwd=tmp_path, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stderr

    code, plain = errors()
    assert "Traceback" not in plain
    for option in ("--verbose", "-v"):
        verbose_code, said = errors(option)
        assert verbose_code == code == Exit.USAGE
        assert said.startswith(plain)
        causes = said.removeprefix(plain)
        assert causes.startswith("Traceback (most recent call last):\n")
        assert causes.count(cause) == 1
        assert 'File "' in causes


# -- request ---------------------------------------------------------------------------------------------------


def test_a_raw_request_gives_back_exactly_the_bytes_of_the_reply(shell: Shell, member: str) -> None:
    every_byte = bytes(range(256)) * 10
    assert shell.process("request", "echo", "--raw", stdin=every_byte) == every_byte
    assert shell("request", "echo", "--raw", "-", stdin=b"") == b""


def test_the_output_of_a_request_ends_with_one_newline(shell: Shell, member: str) -> None:
    assert shell("request", "echo", "héllo") == "héllo\n".encode()
    assert shell("request", "echo", "-", stdin=b"line\n") == b"line\n"
    assert shell("request", "echo", "-", stdin=b"") == b"\n"


def test_json_says_how_the_payload_is_written(shell: Shell, member: str) -> None:
    text = json.loads(shell("request", "echo", "hi", "--json", "-H", "a=b", "--header", "c=d=e"))
    assert text == {
        "name": "echo", "payload": "hi", "encoding": "utf-8", "headers": {"a": "b", "c": "d=e"},
    }  # fmt: skip
    binary = json.loads(shell("request", "echo", "--json", stdin=b"\xff\0"))
    assert (binary["payload"], binary["encoding"]) == ("/wA=", "base64")
    packed = json.loads(shell("request", "echo", "--json", "--pack", '{"n": [1, null]}'))
    assert (packed["payload"], packed["encoding"]) == ({"n": [1, None]}, "object")
    assert shell("request", "echo", "--pack", "[1, 2]") == b"[1,2]\n"


def test_a_refusal_prints_its_code_and_details_and_json_prints_them_as_an_object(
    shell: Shell, member: str
) -> None:
    said = shell("request", "echo", "refuse", code=1)
    assert said == b"iris: echo: sold_out: sorry (left=0, until=b'x')\n"
    line, said = shell("request", "echo", "refuse", "--json", code=1).splitlines()
    assert json.loads(line) == {
        "error": "sold_out: sorry (left=0, until=b'x')", "code": "sold_out", "details": {"left": 0, "until": "eA=="},
        "may_have_run": True,
    }  # fmt: skip
    assert said == b"iris: echo: sold_out: sorry (left=0, until=b'x')"


def test_a_member_can_be_named(shell: Shell, member: str) -> None:
    (line,) = shell("members", "echo", "--json").splitlines()
    one = json.loads(line)["member"]
    assert shell("request", "echo", "hi", "--member", one) == b"hi\n"
    gone = f"{one.partition('.')[0]}.99999"
    said = shell("request", "echo", "hi", "--member", gone, code=Exit.NO_MEMBERS)
    assert f"member {gone} has left" in said.decode()
    said = shell("push", "echo", "hi", "--member", gone, code=Exit.NO_MEMBERS)
    assert f"member {gone} has left" in said.decode()
    assert b"is not a member id" in shell("request", "echo", "hi", "--member", "7", code=Exit.USAGE)


def test_describe_and_ping_ask_every_member(shell: Shell, member: str) -> None:
    text = shell("describe", "echo").decode()
    assert text.startswith("member ")
    assert "  request shout(str)\n" in text
    assert " handled, " in text
    one = json.loads(shell("describe", "echo", "--json"))
    assert {"shout", "pushed", ""} <= {h["name"] for h in one["handlers"] if h["kind"] == "request"}
    pinged = json.loads(shell("ping", "echo", "--json"))
    assert pinged["member"] == one["member"]
    assert shell("ping", "echo").startswith(one["member"].encode())
    for verb in ("describe", "ping"):
        assert b"no members of nobody in this site" in shell(verb, "nobody", code=3)


def test_method_calls_the_handler_of_that_name(shell: Shell, member: str) -> None:
    assert shell("request", "echo", "hi", "--method", "shout") == b"HI!\n"
    assert shell("survey", "echo", "hi", "--method", "who") == b"me\n"
    shell("push", "echo", "x", "--method", "later")
    wait_until(lambda: shell("request", "echo", "", "--method", "pushed") == b"x\n")
    said = shell("request", "echo", "hi", "--method", "whisper", "--json", code=1)
    assert json.loads(said.splitlines()[0])["code"] == "no_method"
    assert b"has no method 'whisper' for requests; its methods are pushed, shout" in said
    assert b"is not the name of a method" in shell(
        "request", "echo", "x", "--method", "a b", code=2
    )


def test_exit_codes_tell_failures_apart(shell: Shell, member: str) -> None:
    said = b"iris: the handler of echo raised ValueError: no such thing; the member's log has the traceback\n"
    assert shell.process("request", "echo", "fail", code=1) == said
    assert b"not a cluster name" in shell("request", "no such name", "x", code=2)
    assert b"NAME=VALUE" in shell("request", "echo", "x", "--header", "oops", code=2)
    assert b"not JSON" in shell("request", "echo", "{", "--pack", code=2)
    assert b"over the limit" in shell("request", "echo", stdin=bytes(2 << 20), code=2)
    assert b"iris: nobody: no members have joined under this name" in shell.process(
        "request", "nobody", "x", code=3
    )


def test_overload_timeout_and_a_lost_member_have_codes_of_their_own(
    shell: Shell, observer: iris.blocking.Client, narrow: subprocess.Popen[bytes]
) -> None:
    blocked = shell.start("request", "narrow", "block")
    assert blocked.stdin is not None
    wait_until(lambda: running(observer, narrow) == 1)
    shell("request", "narrow", "more", code=4)
    shell("push", "narrow", "go")
    assert end(blocked)[0] == b"done after block\n"
    wait_until(lambda: running(observer, narrow) == 0)
    lost = shell("request", "narrow", "die", code=6)
    assert lost.startswith(b"iris: narrow: ")
    assert lost.endswith(b"; it may have run\n")
    end(narrow, 9)


def test_a_request_that_takes_too_long_ends_with_code_5(
    shell: Shell, observer: iris.blocking.Client, narrow: subprocess.Popen[bytes]
) -> None:
    late = shell("request", "narrow", "block", "--timeout", "0.1", code=5)
    assert late == b"iris: narrow: no reply within 0.1 s; it may have run\n"
    narrow.kill()
    end(narrow, -signal.SIGKILL)


# -- push, broadcast, survey -----------------------------------------------------------------------------------


def test_push_and_broadcast_arrive_whole_or_line_by_line(shell: Shell, member: str) -> None:
    shell("push", "echo", "1")
    assert json.loads(shell.process("push", "echo", "--lines", "--json", stdin=b"2\n3\n\n4")) == {
        "sent": 4,
        "lost": 0,
    }
    shell("broadcast", "echo", stdin=b"5\n6")
    shell.process("broadcast", "echo", "--lines", stdin=b"7\n8\n")
    noted = shell("request", "echo", "noted")
    assert noted == b"push:1 push:2 push:3 push: push:4 cast:5\n6 cast:7 cast:8\n"


def test_a_push_whose_payload_does_not_fit_its_handler_fails_with_the_report(
    shell: Shell, member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iris.cli.push.REPORT_S", PATIENCE_S)  # the report ends the wait
    said = shell("push", "echo", "--pack", "7", "--method", "numbered", code=1)
    assert said.startswith(
        b"iris: push to echo failed: the member did not run it: it could not decode"
    )


def test_a_push_that_fails_is_reported(shell: Shell, relay: Path) -> None:
    said = shell.process("push", "nobody", "--lines", "--json", stdin=b"1\n2\n", code=3)
    assert b'{"sent":2,"lost":2}' in said
    assert said.count(b"push to nobody failed") == 2
    assert b"leave PAYLOAD out" in shell("push", "nobody", "x", "--lines", code=2)


def test_a_broadcast_to_nobody_ends_with_the_code_of_a_push_to_nobody(
    shell: Shell, relay: Path
) -> None:
    said = shell.process("broadcast", "nobody", "x", "--json", code=3)
    assert said.endswith(b"iris: no member of nobody serves broadcasts\n")
    assert json.loads(said.splitlines()[0]) == {"sent": 1, "lost": 1, "members": 0}
    shell("push", "nobody", "x", code=3)
    said = shell("broadcast", "nobody", "x", "--scope", "site", code=3)
    assert said == b"iris: no member of nobody serves broadcasts\n"


def test_a_publication_to_nobody_succeeds_and_says_so(shell: Shell, relay: Path) -> None:
    said = shell.printed("publish", "nobody.listens", "x", "--json")
    assert json.loads(said[0]) == {"sent": 1, "lost": 0, "subscribers": 0}
    assert said[1] == b"iris: nobody subscribes to nobody.listens\n"


def test_a_name_with_a_colon_that_names_a_site_which_is_not_there_says_so(
    shell: Shell, relay: Path
) -> None:
    said = shell("request", "eu:billing", "x", code=3)
    assert b"no gateway here is connected to a site 'eu'" in said
    assert b"what stands before ':' names a site" in said
    _, said = shell.printed("publish", "eu:orders", "x")
    assert b"a topic names no site: 'eu:orders' is a topic of its own" in said
    (shell.root / "colon.py").write_text("import iris\nservice = iris.Service('eu:billing')\n")
    assert b"leave the site out" in shell.process("run", "colon", code=2)


def test_a_survey_prints_answers_and_names_who_failed_or_is_missing(
    shell: Shell, member: str
) -> None:
    assert shell.process("survey", "echo", "q") == b'{"received":"q"}\n'
    answer = json.loads(shell("survey", "echo", "q", "--json"))
    assert (answer["member"], answer["payload"]) == (member, {"received": "q"})
    assert (
        f"{member} answered with an error: ValueError: not me"
        in shell("survey", "echo", "fail", code=1).decode()
    )
    assert (
        f"no answer from member {member}"
        in shell("survey", "echo", "hang", "--timeout", "0.2", code=5).decode()
    )
    shell("survey", "nobody", "q", code=3)


# -- publish and subscribe -------------------------------------------------------------------------------------


def test_subscribe_prints_count_messages_and_ends(
    shell: Shell, observer: iris.blocking.Client
) -> None:
    raw = shell.start("subscribe", "news.>", "--count", "3")
    as_json = shell.start("subscribe", "news.*", "-n", "3", "--json")
    wait_until(lambda: subscribed(observer, raw) and subscribed(observer, as_json))
    shell.process("publish", "news.a", "one", "--header", "k=v")
    shell.process("publish", "news.b", "--lines", stdin=b"two\n\xff\n")
    assert end(raw)[0] == b"one\ntwo\n\xff\n"
    documents = [json.loads(line) for line in end(as_json)[0].splitlines()]
    assert documents[0] == {
        "name": "news.a", "payload": "one", "encoding": "utf-8", "headers": {"k": "v"},
    }  # fmt: skip
    assert [d["payload"] for d in documents[1:]] == ["two", "/w=="]


def test_publish_waits_for_a_subscriber_that_asks_for_it(
    shell: Shell, observer: iris.blocking.Client
) -> None:
    lines = b"".join(b"%d %s\n" % (number, b"x" * 4000) for number in range(1500))
    reader = shell.start("subscribe", "bulk", "--count", "1500", "--wait")
    wait_until(lambda: subscribed(observer, reader))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(
            end, reader
        )  # what is not read holds it up, and the publisher with it
        shell.process("publish", "bulk", "--lines", "--wait", stdin=lines)
        assert reading.result()[0] == lines


def test_publish_says_when_a_subscriber_has_had_no_room_for_too_long(
    shell: Shell, observer: iris.blocking.Client
) -> None:
    lines = b"".join(b"%d %s\n" % (number, b"x" * 4000) for number in range(1500))
    reader = shell.start("subscribe", "bulk", "--wait")  # nobody reads what it prints
    wait_until(lambda: subscribed(observer, reader))
    publisher = shell.start("publish", "bulk", "--lines", "--wait")
    _, said = publisher.communicate(lines, timeout=PATIENCE_S)
    assert publisher.returncode == 0
    assert (
        said
        == b"iris: a subscriber of bulk was full for 1 s; its messages are dropped until it has room\n"
    )
    reader.kill()
    reader.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_subscribe_ends_well_when_it_is_told_to(
    shell: Shell, observer: iris.blocking.Client, number: signal.Signals
) -> None:
    process = shell.start("subscribe", "news.>")
    wait_until(lambda: subscribed(observer, process))
    process.send_signal(number)
    assert end(process) == (b"", b"")


def test_subscribe_ends_quietly_when_its_reader_has_enough(
    shell: Shell, observer: iris.blocking.Client
) -> None:
    process = shell.start("subscribe", "news.>")
    wait_until(lambda: subscribed(observer, process))
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    shell("publish", "news.a", "one")
    assert end(process)[1] == b""


def test_subscribe_reports_a_lost_relay_in_one_line() -> None:
    root = Path(tempfile.mkdtemp(prefix="iris-lost-"))
    alone = Shell(root)
    relay = alone.start("relay", "--dev")
    try:
        wait_until(lambda: (root / "iris" / "relay.sock").exists() or relay.poll() is not None)
        process = alone.start("subscribe", "t")
        wait_until(
            lambda: any(
                s["subscriptions"] for s in json.loads(alone("status", "--json"))["sessions"]
            )
        )
        relay.kill()
        assert process.stderr is not None
        assert process.stderr.readline().startswith(
            b"iris: lost an unknown number of messages to t"
        )
        process.terminate()
        assert end(process)[1] == b""
    finally:
        alone.finish()
        shutil.rmtree(root)


def test_subscribe_that_waits_in_vain_ends_with_code_5(shell: Shell, relay: Path) -> None:
    assert b"0 of 1 message within" in shell(
        "subscribe", "t", "-n", "1", "--timeout", "0.1", code=5
    )
    assert shell("subscribe", "t", "--timeout", "0.1") == b""


# -- tunnel ----------------------------------------------------------------------------------------------------


def test_a_tunnel_carries_lines_both_ways(shell: Shell, member: str) -> None:
    assert (
        shell.process("tunnel", "echo", "-H", "upper=1", stdin=b"one\ntwo\nthree")
        == b"ONE\nTWO\nTHREE\n"
    )
    documents = shell.process("tunnel", "echo", "--json", stdin=b"a\n\xff\n").splitlines()
    assert [json.loads(d)["encoding"] for d in documents] == ["utf-8", "base64"]


def test_a_raw_tunnel_carries_bytes_of_any_size(shell: Shell, member: str) -> None:
    data = os.urandom(1 << 20) * 3 + b"odd"
    assert shell.process("tunnel", "echo", "--raw", stdin=data) == data


def test_a_tunnel_ends_when_the_member_has_enough_though_stdin_stays_open(
    shell: Shell, member: str
) -> None:
    process = shell.start("tunnel", "echo")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"hello\n"  # while stdin is open
    process.stdin.write(b"enough\n")
    process.stdin.flush()
    assert process.wait(PATIENCE_S) == 0
    assert process.stdout.read() == b"bye\n"


def test_a_tunnel_that_breaks_ends_with_code_6(shell: Shell, member: str) -> None:
    shell.process("tunnel", "echo", stdin=b"break\n", code=6)
    shell.process("tunnel", "nobody", stdin=b"", code=3)


# -- members and status ----------------------------------------------------------------------------------------


def test_members_lists_who_is_there(shell: Shell, member: str) -> None:
    listed = shell.process("members", "echo")
    assert member.encode() in listed
    assert b"tunnel (5 methods)" in listed
    document = json.loads(shell("members", "echo", "--json"))
    assert document["member"] == member
    assert document["serves"] == ["request", "push", "survey", "broadcast", "tunnel"]
    assert document["methods"] == 5
    assert document["label"] == "iris run services:echo"
    assert b"no members of nobody" in shell("members", "nobody", code=3)


def test_members_under_another_key_are_pointed_out(
    shell: Shell, member: str, relay: Path, tmp_path: Path
) -> None:
    keyfiles.create_keys(tmp_path / "other")
    stranger = Shell(shell.root, IRIS_CONFIG=str(tmp_path / "other"))
    said = stranger("members", "echo", code=3).decode()
    assert re.search(r"1 under [0-9a-f]{8}…", said)
    said = stranger("request", "echo", "x", code=3).decode()
    assert re.search(
        r"no members serve requests under your key [0-9a-f]{8}…; members under other keys: 1 under",
        said,
    )


@pytest.mark.parametrize("verb", ["request", "push", "survey", "tunnel"])
def test_a_verb_that_no_member_takes_names_those_that_they_take(
    shell: Shell, observer: iris.blocking.Client, verb: str
) -> None:
    (shell.root / "hearer.py").write_text(
        "import iris\nservice = iris.Service('hearer')\n@service.on_broadcast\ndef hear(message: bytes): ...\n"
    )
    process = shell.start("run", "hearer")
    observer.wait_for_members("hearer", 1, timeout=PATIENCE_S)
    said = shell(verb, "hearer", stdin=b"x", code=3).decode()
    assert "no members serve " in said
    assert said.count("1 member serves: broadcast\n") == 1
    process.terminate()
    end(process)


def test_members_watch_shows_who_joins_and_leaves(
    shell: Shell, observer: iris.blocking.Client, member: str
) -> None:
    wait_until(lambda: not observer.members("narrow"))
    watching = shell.start("members", "narrow", "--watch", "--json")
    assert watching.stdout is not None
    wait_until(lambda: any(s["pid"] == watching.pid for s in observer.status()["sessions"]))
    process = shell.start("run", "services:narrow")
    came = json.loads(watching.stdout.readline())
    process.terminate()
    end(process)
    left = json.loads(watching.stdout.readline())
    assert (came["change"], left["change"]) == ("+", "-")
    assert came["member"] == left["member"]
    watching.send_signal(signal.SIGINT)
    end(watching)


def test_status_shows_sessions_clusters_and_the_account(shell: Shell, member: str) -> None:
    table = shell.process("status").decode()
    assert "iris run services:echo" in table
    assert table.endswith("columns: `iris status --help`\n")
    assert re.search(r"echo +[0-9a-f]{8}… +1", table)
    report = json.loads(shell("status", "--json"))
    assert {"relay", "sessions", "clusters", "accounts", "pid", "socket"} <= report.keys()
    assert report["queues"] == {"bytes": 0, "limit_bytes": 128 << 20, "full": 0, "shed": 0}
    assert shell("status", "--json", "--relay", report["socket"])


# -- run -------------------------------------------------------------------------------------------------------


def test_run_finishes_what_it_accepted_before_it_ends(
    shell: Shell, observer: iris.blocking.Client, narrow: subprocess.Popen[bytes]
) -> None:
    request = shell.start("request", "narrow", "block", "--timeout", "20")
    wait_until(lambda: running(observer, narrow) == 1)
    narrow.terminate()
    wait_until(lambda: len(observer.members("narrow")) == 0)
    assert narrow.poll() is None, "it waits for the request"
    assert request.poll() is None
    narrow.terminate()  # a second signal ends it at once: what it had accepted is lost
    end(narrow, 130)
    end(request, 6)


def test_run_answers_a_request_that_was_under_way_when_it_was_told_to_stop(
    shell: Shell, observer: iris.blocking.Client, home: Path, member: str
) -> None:
    (home / "patient.py").write_text(
        "import asyncio, os, iris\n"
        "service = iris.Service('patient')\n"
        "@service.on_request\n"
        "async def answer(path: str):\n"
        "    while not os.path.exists(path):\n"
        "        await asyncio.sleep(0.01)\n"
        "    return 'done'\n"
    )
    process = shell.start("run", "patient")
    observer.wait_for_members("patient", 1, timeout=PATIENCE_S)
    request = shell.start("request", "patient", str(home / "go"), "--timeout", "20")
    wait_until(lambda: running(observer, process) == 1)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: len(observer.members("patient")) == 0)
    (home / "go").touch()
    assert end(request)[0] == b"done\n"
    end(process)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere", "no module 'nowhere'"), ("services:nothing", "no iris.Service called 'nothing'"),
        ("services", "no iris.Service called 'service'; it has: echo, narrow, idle"), ("json", "json defines no iris.Service; add `service = iris.Service(CLUSTER)`"),
        ("services:noted", "no iris.Service called 'noted'; it has: echo"), ("services.py", "leave out the '.py': services"),
        ("./services.py", "write it as in an import statement"), ("services:idle", "services:idle has no handlers"),
    ],
)  # fmt: skip
def test_run_says_what_is_wrong_with_a_place(
    shell: Shell, member: str, where: str, said: str
) -> None:
    assert said.encode() in shell.process("run", where, code=2)


@pytest.mark.parametrize(
    ("source", "line", "said"),
    [
        ("import json\ndef load():\n    return json.loads('{')\nload()\n", 3, "JSONDecodeError: Expecting"),
        ("import iris\nservice = iris.Service('no such name')\n", 2, "InvalidName: 'no such name'"),
        ("import nowhere\n", 1, "ModuleNotFoundError: No module named 'nowhere'"),
        ("x = = 1\n", 1, "SyntaxError: invalid syntax"),
        ("import asyncio\nasync def f(): pass\nc = f()\ntry:\n    asyncio.run(c)\nfinally:\n    c.close()\n", 5, "asyncio.run()"),
    ],
)  # fmt: skip
def test_run_shows_where_an_import_failed(
    tmp_path: Path, source: str, line: int, said: str
) -> None:
    (tmp_path / "boom.py").write_text(source)
    (last,) = Shell(tmp_path).process("run", "boom", code=2).decode().splitlines()
    assert last.startswith(f"iris: cannot import boom: boom.py:{line}: ")
    assert said in last


def test_run_with_verbose_prints_the_traceback_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "boom.py").write_text("def load():\n    return 1 / 0\nload()\n")
    command = [sys.executable, "-m", "iris.cli", "--verbose", "run", "boom"]
    shell = Shell(tmp_path)
    done = subprocess.run(
        command, env=shell.environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("iris: cannot import boom: boom.py:2: ZeroDivisionError: ")
    assert f'{tmp_path}/boom.py", line 3' in done.stderr


# -- keys ------------------------------------------------------------------------------------------------------


def secrets(path: Path) -> list[str]:
    return re.findall(r'"([\w-]{48})"', path.read_text())


def test_new_keys_are_private_shown_by_id_only_and_never_overwritten(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    keyring, network = (tmp_path / "config" / "iris" / n for n in ("keyring.toml", "network.toml"))
    said = shell.process("key", "new")
    assert {path.stat().st_mode & 0o777 for path in (keyring, network)} == {0o600}
    before = keyring.read_bytes()
    said += shell("key", "new", code=2)
    assert b"already exists" in said
    assert keyring.read_bytes() == before
    said += shell("key", "add", "databases") + shell("key", "add", "topic:orders.eu")
    assert b"; it can decrypt, but does not encrypt yet\nnext: copy " in said
    said += shell("key", "show") + shell("key", "show", "--json")
    found = secrets(keyring) + secrets(network)
    assert len(found) == 6
    assert not any(secret.encode() in said for secret in found)
    rows = [json.loads(line) for line in shell("key", "show", "--json").splitlines()]
    assert [(row["name"], row["role"]) for row in rows] == [
        ("default", "seals"), ("databases", "seals"), ("databases", "opens"), ("topic:orders.eu", "seals"),
        ("topic:orders.eu", "opens"), ("(network)", "dials"),
    ]  # fmt: skip
    keyring.chmod(0o644)
    assert b"chmod 600" in shell("key", "show", code=2)


def test_a_second_promote_changes_nothing_and_says_how_to_go_back(tmp_path: Path) -> None:
    alone = Shell(tmp_path)
    alone("key", "new")
    file = tmp_path / "config" / "iris" / "keyring.toml"
    said = alone("key", "add", "billing").decode()
    assert "; it can decrypt, but does not encrypt yet\n" in said
    assert (
        f"next: copy {file} to every host, and send SIGHUP to every program, then `iris key promote"
        in said
    )
    old, new = (key.key_id.hex() for key in keyfiles.load_keyring(file).for_cluster("billing"))
    lines = alone("key", "promote", "billing", "--force").decode().splitlines()
    assert lines[0] == f"billing: {new} now encrypts"
    assert [line for line in lines if "no relay is running" in line] == lines[2:]
    before = file.read_bytes()
    again = alone("key", "promote", "billing").decode()
    assert again == (
        f"billing: {new} already encrypts; nothing changed. To encrypt with another key, name it: `--key {old[:8]}`\n"
    )
    assert file.read_bytes() == before
    assert f"{old} is retired" in alone("key", "retire", "billing").decode()


def test_throw_away_keys_of_a_development_relay_are_not_edited(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    directory = tmp_path / "iris" / "dev"
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    keyfiles.create_keys(directory)
    before = (directory / "keyring.toml").read_bytes()
    for step in ("add", "promote", "retire"):
        said = shell("key", step, "billing", code=2)
        assert b"only throw-away keys of a development relay exist" in said
        assert b"run `iris key new` first" in said
    assert (directory / "keyring.toml").read_bytes() == before


def test_promote_wants_force_when_nobody_can_say_who_holds_the_new_key(
    tmp_path: Path, shell: Shell
) -> None:
    alone = Shell(tmp_path)
    alone("key", "new")
    alone("key", "add", "databases")
    said = alone("key", "promote", "databases", code=2)
    assert b"no relay at" in said
    assert b"--force" in said
    alone("key", "promote", "databases", "--force")
    alone("key", "add", "topic:orders")
    assert b"--force" in alone("key", "promote", "topic:orders", code=2)
    alone("key", "promote", "topic:orders", "--force")
    alone("key", "retire", "databases")
    assert b"its only key" in alone("key", "retire", "databases", code=2)


def test_keys_rotate_under_a_member_that_keeps_serving(
    shell: Shell, observer: iris.blocking.Client, home: Path, member: str
) -> None:
    keys = Shell(home, IRIS_CONFIG=str(home / "iris" / "dev"))  # named, so they may be edited
    process = start_narrow(shell, observer)
    (info,) = observer.members("narrow")
    said = keys("key", "add", "narrow")
    new = re.search(r"added ([0-9a-f]{32})", said.decode())
    assert new is not None
    refused = keys("key", "promote", "narrow", code=2)
    assert b"holds only old keys" in refused
    assert info.member.encode() in refused
    process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: any(
            bytes.fromhex(new[1]) in m.key_ids and m.member != info.member
            for m in observer.members("narrow")
        )
    )
    keys.process("key", "promote", "narrow", "--key", new[1][:8])
    assert shell("request", "narrow", "x") == b"done after x\n"
    assert info.key_ids[0].hex().encode() in keys("key", "retire", "narrow")
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(observer.members("narrow")) == 0)  # the observer has the old key only
    assert shell("request", "narrow", "y") == b"done after y\n"
    process.terminate()
    end(process)


def test_a_second_key_before_the_first_is_promoted_is_added_with_a_warning(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell("key", "new")
    assert shell.printed("key", "add", "databases")[1] == b""
    said, warned = shell.printed("key", "add", "databases")
    assert b"databases: added " in said
    assert warned.startswith(
        b"iris: databases has 3 keys now, because an earlier rotation was not finished"
    )


def test_new_keys_beside_those_of_a_development_relay_say_who_keeps_the_old_ones(
    tmp_path: Path,
) -> None:
    shell = Shell(tmp_path)
    assert shell.printed("key", "new")[1] == b""
    shutil.rmtree(tmp_path / "config" / "iris")
    keyfiles.create_keys(tmp_path / "iris" / "dev")
    warned = shell.printed("key", "new")[1].decode()
    assert f"programs started before keep the development keys in {tmp_path}/iris/dev" in warned


def test_keys_that_are_added_at_once_are_all_kept(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell("key", "new")
    added = [shell.start("key", "add", f"cluster-{n}") for n in range(4)]
    for process in added:
        end(process)
    keyring = keyfiles.load_keyring(tmp_path / "config" / "iris" / "keyring.toml")
    assert {f"cluster-{n}" for n in range(4)} < keyring.entries().keys()
