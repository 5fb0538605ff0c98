"""The file of `iris bridge sp`, and how topics and messages stand for each other: no socket is opened."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import iris
from iris import ConfigError, InvalidName, cli
from relay.bridges.sp.config import SocketConfig, load, parse

REP = 'protocol = "rep"\ncluster = "c"\nlisten = "tcp://127.0.0.1:0"\n'
PUB = 'protocol = "pub"\ntopics = [">"]\nlisten = "ipc:///tmp/x"\n'
SUB = 'protocol = "sub"\ndial = "tcp://elsewhere:1"\n'


def entry(text: str) -> SocketConfig:
    (config,) = parse(tomllib.loads("[[socket]]\n" + text))
    return config


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (REP + "retries = 3", "socket 1: retries: unknown"),
        (REP + "timeout = 3", "socket 1: timeout: unknown setting; did you mean timeout_s?"),
        (
            REP + 'ipc_mode = "0600"',
            "socket 1: ipc_mode: Expected `int`, got `str`; write ipc_mode = 0o600",
        ),
        (
            REP + "ipc_mode = 600",
            "socket 1: ipc_mode: 600 is not from 0 to 0o777; write ipc_mode = 0o600",
        ),
        (REP + 'concurrency = "many"', "socket 1: concurrency: Expected `int`, got `str`"),
        (REP + "concurrency = 0", "socket 1: concurrency: 0 is not from 1 to 4096"),
        (REP + "queue_bytes = 1000", "socket 1: queue_bytes: 1000 is not from 1048576"),
        (REP + 'topics = ["a"]', "socket 1: topics: not a setting of rep"),
        (REP + 'dial = "tcp://127.0.0.1:1"', "socket 1: listen: give one of listen and dial"),
        (REP + 'tls_ca = "x"', "socket 1: tls_ca: tcp does not use TLS"),
        (REP.replace('"c"', '"a b"'), "socket 1: cluster: 'a b' is not a cluster name"),
        (REP.replace('cluster = "c"', ""), "socket 1: cluster: missing"),
        (
            REP.replace("rep", "reply"),
            "socket 1: protocol: 'reply' is not one of rep, req, respondent,",
        ),
        ('cluster = "c"', "socket 1: protocol: missing"),
        (
            REP.replace("tcp:", "udp:"),
            "socket 1: listen: 'udp://127.0.0.1:0' has an unknown scheme",
        ),
        (
            REP.replace("127.0.0.1", "0.0.0.0"),
            "socket 1: listen: 0.0.0.0 is not a loopback address",
        ),
        (
            REP.replace("127.0.0.1", "example.org"),
            "socket 1: listen: example.org is not a loopback address",
        ),
        (
            REP.replace("tcp:", "tls+tcp:"),
            "socket 1: tls_cert: missing; it is required to listen with TLS",
        ),
        (
            SUB.replace("tcp:", "tls+tcp:"),
            "socket 1: tls_ca: missing; it is required to dial with TLS",
        ),
        (PUB.replace("/tmp/x", "x"), "socket 1: listen: 'x' is not an absolute path"),
        (
            PUB.replace("/tmp/x", "/tmp/a\\u0000b"),
            "socket 1: listen: 'ipc:///tmp/a\\x00b' contains characters",
        ),
        (PUB.replace('[">"]', '["a..b"]'), "socket 1: topics: 'a..b' is not a topic filter"),
        (PUB.replace('[">"]', "[]"), "socket 1: topics: missing"),
        (
            PUB + 'when_full = "drop"',
            "socket 1: when_full: 'drop' is not one of drop-new, wait",
        ),
        (PUB + 'under = "old."', "socket 1: topics: '>' does not begin with 'old.'"),
        (SUB + 'under = "old"', "socket 1: under: 'old' does not end with '.'"),
        (SUB + 'separator = ""', "socket 1: separator: empty"),
        (SUB + "prefixes = []", "socket 1: prefixes: empty"),
        (SUB + 'topic = "*"', "socket 1: topic: '*' is not"),
        (
            REP.replace("rep", "req").replace('"c"', '"eu:c"'),
            "socket 1: cluster: 'eu:c' names a site",
        ),
        (
            PUB + '[[socket]]\nname = "b"\n' + PUB.replace("/tmp/x", "/tmp/./x"),
            "socket 2: listen: ipc:///tmp/./x is already the address of socket 1",
        ),
        (
            REP + f"[[socket]]\n{REP}",
            "socket 2: name: 'rep tcp://127.0.0.1:0' is also the name of socket 1",
        ),
    ],
)
def test_a_mistake_is_named_by_its_entry_and_field(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        entry(text)
    assert str(caught.value).startswith(error)


def test_what_is_not_a_list_of_sockets_is_refused(tmp_path: Path) -> None:
    for text, error in (("", "socket: write"), ("[socket]\n", r"write \[\[socket\]\]"), ("[relay]\n", "relay: unknown"), ("x", "sp.toml")):  # fmt: skip
        (tmp_path / "sp.toml").write_text(text)
        with pytest.raises(ConfigError, match=error):
            load(tmp_path / "sp.toml")
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.toml")


def test_a_directory_of_a_socket_has_to_be_there_to_listen_not_to_dial(tmp_path: Path) -> None:
    file, there = tmp_path / "sp.toml", tmp_path / "run"
    file.write_text(f"[[socket]]\n{PUB.replace('/tmp/x', f'{there}/x')}")
    with pytest.raises(ConfigError) as caught:
        load(file)
    expected = f"socket 1: listen: directory {there} does not exist; create it first"
    assert str(caught.value) == expected
    checked = CliRunner().invoke(cli.app, ["bridge", "sp", "--config", str(file), "--check"])
    assert (checked.exit_code, checked.stderr) == (2, f"iris: {expected}\n")
    file.write_text(file.read_text().replace("listen", "dial"))
    assert load(file)
    there.mkdir()
    file.write_text(file.read_text().replace("dial", "listen"))
    assert load(file)


def test_help_shows_how_an_entry_begins() -> None:
    assert "[[socket]]" in CliRunner().invoke(cli.app, ["bridge", "sp", "--help"]).output


@pytest.mark.parametrize(
    "urls",
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("ws://127.0.0.1:80/a", "ws://127.0.0.1:80/b"),
        ("tcp://127.0.0.1:5", "tcp://127.0.0.1:6"),
    ],
)
def test_entries_may_share_what_is_not_one_address(urls: tuple[str, str]) -> None:
    entries = [{"protocol": "rep", "cluster": "c", "name": url + name, "listen": url} for url, name in zip(urls, "ab", strict=True)]  # fmt: skip
    assert len(parse({"socket": entries})) == 2


def test_a_caller_may_name_a_cluster_of_another_site() -> None:
    assert entry(REP.replace('"c"', '"eu:c"')).cluster == "eu:c"


def test_remote_allows_to_listen_to_others() -> None:
    assert entry(REP.replace("127.0.0.1", "0.0.0.0") + "remote = true").remote


@given(st.text("abc.|é", min_size=1, max_size=20), st.binary(max_size=50), st.sampled_from(" |/\0"))
def test_a_topic_and_payload_that_are_joined_are_split_alike(
    topic: str, payload: bytes, separator: str
) -> None:
    pytest.importorskip("pynng")
    from relay.bridges.sp.topics import Mapping

    out = Mapping(SocketConfig(protocol="pub", topics=("old.>",), listen="ipc:///x", under="old.", separator=separator))  # fmt: skip
    back = Mapping(SocketConfig(protocol="sub", listen="ipc:///x", under="old.", separator=separator))  # fmt: skip
    try:
        joined = out.join("old." + topic, payload)
    except InvalidName:
        assert separator in topic
    else:
        assert back.split(joined) == ("old." + topic, payload)


@given(st.lists(st.sampled_from("ab*"), min_size=1, max_size=4), st.booleans(), st.lists(st.sampled_from("ab"), min_size=1, max_size=4))  # fmt: skip
def test_a_filter_selects_what_it_selects_in_iris(
    parts: list[str], rest: bool, tokens: list[str]
) -> None:
    pytest.importorskip("pynng")
    from iris.wire.names import matches
    from relay.bridges.sp.topics import selects

    pattern, topic = ".".join([*parts, *[">"] * rest]), ".".join(tokens)
    assert selects(pattern, topic) == matches(pattern, topic)


async def test_empty_messages_that_wait_are_bounded_too() -> None:
    pytest.importorskip("pynng")
    from relay.bridges.sp.bridge import MESSAGE_BYTES, Backlog, Bridge

    config = SocketConfig(protocol="sub", listen="ipc:///x", max_message_bytes=1000, queue_bytes=10 * MESSAGE_BYTES)  # fmt: skip
    bridge = Bridge(config, cast(iris.Client, SimpleNamespace()))

    async def never(name: str, payload: bytes) -> None:
        await asyncio.Event().wait()

    backlog = Backlog(bridge, never)
    for _ in range(25):
        backlog.add("t", b"")
    assert (len(backlog), bridge.tally.causes) == (10, {"queue full": 15})
    draining = asyncio.create_task(backlog.drain())
    await asyncio.sleep(0)
    draining.cancel()
    await asyncio.wait((draining,))
    assert bridge.tally.causes == {"queue full": 15, "stopping": 10}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"protocol": "pub", "topics": ("a",), "when_full": "wait", "listen": "ws://127.0.0.1:5555/x"}, "when_full: nng does not report"),
        ({"protocol": "pub", "topics": ("a",), "when_full": "wait", "queue_bytes": 1 << 20}, "queue_bytes: 1048576 is under 4194304"),
        ({"protocol": "push", "topics": ("a",), "queue_bytes": 1 << 20}, "queue_bytes: 1048576 is under 4194304"),
        ({"protocol": "push", "topics": ("a",), "cluster": "c"}, "topics: a push entry has either topics or a cluster"),
        ({"protocol": "push", "topics": ("a..b",)}, "topics: "),
        ({"protocol": "push", "cluster": "c", "when_full": "wait"}, "when_full: not a setting of push"),
        ({"protocol": "sub", "when_full": "wait"}, "when_full: not a setting of sub"),
    ],
)  # fmt: skip
def test_what_cannot_be_waited_for_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        SocketConfig(**{"listen": "tcp://127.0.0.1:5555", "max_message_bytes": 1 << 16, **settings})


def test_a_push_entry_takes_topics_in_place_of_a_cluster() -> None:
    made = SocketConfig(protocol="push", listen="tcp://127.0.0.1:5555", topics=("a.>",), group="g")
    assert made.waits
