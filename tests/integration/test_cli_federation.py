"""`iris federation`, and gateways as an operator starts them: keys, fingerprints, two relays as processes, what is
seen of sites.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.relays import Daemon
from support.waiting import wait_until
from typer.testing import CliRunner, Result

from iris import cli, keyfiles
from iris.cli.exits import Exit
from iris.crypto.keys import dump_fingerprint, parse_fingerprint

pytestmark = pytest.mark.timeout(60)


def federation(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["federation", *map(str, arguments)])


# -- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_key_is_made_once_in_a_private_file_and_its_fingerprint_alone_is_printed(
    tmp_path: Path, umask: int
) -> None:
    path = tmp_path / "eu.toml"
    before = os.umask(umask)
    try:
        made = federation("key", path)
    finally:
        os.umask(before)
    assert made.exit_code == Exit.OK, made.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = keyfiles.load_site_key(path)
    assert made.stdout == f"{key.fingerprint}\n"
    assert parse_fingerprint(made.stdout.strip()) == key.public_key
    assert key.reveal() not in made.output
    content = path.read_bytes()
    again = federation("key", path)
    assert (again.exit_code, again.stdout, again.stderr) == (Exit.OK, made.stdout, "")
    assert path.read_bytes() == content
    as_json = json.loads(federation("key", path, "--json").stdout)
    assert as_json == {"file": str(path), "fingerprint": key.fingerprint, "new": False}


def test_what_is_not_a_key_file_is_left_alone_and_named(tmp_path: Path) -> None:
    path, link, target = tmp_path / "mine", tmp_path / "link", tmp_path / "target"
    path.write_text("mine")
    path.chmod(0o600)
    link.symlink_to(target)
    for there in (path, link, tmp_path, tmp_path / "absent" / "eu.toml"):
        result = federation("key", there)
        assert result.exit_code == Exit.USAGE
        assert result.stdout == ""
        assert str(there) in result.stderr
    assert path.read_text() == "mine"
    assert not target.exists()


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eu.toml"
    federation("key", path)
    path.chmod(0o644)
    result = federation("key", path)
    assert result.exit_code == Exit.USAGE
    assert "chmod 600" in result.stderr


# -- sites -------------------------------------------------------------------------------------------------------


class Site:
    """A site of one relay, a gateway, as a process."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.directory = directory / name
        self.directory.mkdir(0o700)
        self.keys = self.directory / "keys"
        keyfiles.create_keys(self.keys)
        self.key_file = self.directory / "site.toml"
        self.fingerprint = federation("key", self.key_file).stdout.strip()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"tls://127.0.0.1:{probe.getsockname()[1]}"

    def daemon(self, *arguments: str) -> Daemon:
        own = ("--site", self.name, "--site-key", str(self.key_file), "--gateway", self.address)
        alone = ("--bind", "127.0.0.1", "--port", "0", "--no-mdns")
        settings = {"IRIS_CONFIG": str(self.keys)}
        return Daemon(self.directory, *own, *alone, *arguments, settings=settings, dev=False)


@pytest.fixture
def sites(tmp_path: Path) -> tuple[Site, Site]:
    return Site(tmp_path, "eu"), Site(tmp_path, "us")


@pytest.fixture
def running(sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Daemon]]:
    """The relays of two sites that know each other, and of which one knows a third that is not there."""
    eu, us = sites
    nowhere = f"ap=tls://127.0.0.1:1#{dump_fingerprint(b'a' * 32)}"
    monkeypatch.setenv("IRIS_CONFIG", str(eu.keys))
    one = eu.daemon(
        "--peer-site", f"us={us.address}#{us.fingerprint}", "--peer-site", nowhere, "--site-cost", "us=10",
        "--export", "orders.>", "--export", "!orders.secret", "--import", ">",
    )  # fmt: skip
    with one, us.daemon("--peer-site", f"eu=#{eu.fingerprint}") as two:
        wait_until(lambda: one.said("gateway.up") and two.said("gateway.up"))
        yield [one, two]
        for daemon in (two, one):
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log.read_text()


def listed(daemon: Daemon) -> dict[str, Any]:
    result = federation("list", "--json", "--relay", daemon.socket)
    assert result.exit_code == Exit.OK, result.output
    return {site["site"]: site for site in map(json.loads, result.stdout.splitlines())}


def test_sites_are_listed_with_their_cost_and_connections_and_pinged(
    running: list[Daemon], sites: tuple[Site, Site]
) -> None:
    one, two = running
    wait_until(lambda: listed(one)["us"]["rtt_us"] and listed(two)["eu"]["linked"])
    known = listed(one)
    assert list(known) == ["ap", "us"]
    assert (known["us"]["linked"], known["us"]["cost_ms"], known["us"]["errors"]) == (True, 10, [])
    assert not known["ap"]["linked"]
    assert "127.0.0.1:1" in known["ap"]["errors"][0]
    shown = federation("list", "--relay", one.socket)
    assert shown.exit_code == Exit.OK
    assert "site eu" in shown.stdout
    assert sites[1].address.removeprefix("tls://") in shown.stdout
    assert "not linked: ap: 127.0.0.1:1: " in shown.stdout

    status = CliRunner().invoke(cli.app, ["status", "--relay", str(one.socket)])
    assert status.exit_code == Exit.OK, status.output
    (line,) = (line.split() for line in status.stdout.splitlines() if line.startswith("us "))
    assert line[4:] == ["10", "ms", "1", "0", "0"]
    assert "no other relay found" not in status.stdout
    assert "sites not linked: ap; `iris federation list` shows why" in status.stdout
    with socket.socket() as stranger:
        stranger.connect(("127.0.0.1", int(sites[0].address.rpartition(":")[2])))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: one.said("gateway.refused"))
    status = CliRunner().invoke(cli.app, ["status", "--relay", str(one.socket)])
    assert "refused as gateways: 1 not TLS" in status.stdout

    pinged = federation("ping", "--relay", one.socket)
    assert pinged.exit_code == Exit.ANSWER
    first, second = pinged.stdout.splitlines()
    assert first.startswith("ap  not linked: 127.0.0.1:1")
    assert second.startswith("us  ")
    assert second.endswith(" ms")
    pinged = federation("ping", "us", "--json", "--relay", one.socket)
    assert pinged.exit_code == Exit.OK
    answer = json.loads(pinged.stdout)
    assert (answer["site"], answer["linked"]) == ("us", True)
    assert answer["rtt_ms"] > 0
    pinged = federation("ping", "mars", "--relay", one.socket)
    assert (pinged.exit_code, pinged.stdout) == (Exit.ANSWER, "mars  not linked: the relay does not know this site\n")  # fmt: skip


def test_a_gateway_whose_settings_are_wrong_says_which(sites: tuple[Site, Site]) -> None:
    eu, us = sites
    for argument, named in (
        (f"us={us.address}", "peer_site: "),
        (
            f"us={us.address}#{eu.fingerprint}",
            "peer_site: us has the fingerprint of this site's own",
        ),
        (f"eu={us.address}#{us.fingerprint}", "peer_site: eu is this "),
    ):
        daemon = eu.daemon("--peer-site", argument)
        with pytest.raises(AssertionError, match=named):
            daemon.start()
        assert daemon.process.wait() == 2
