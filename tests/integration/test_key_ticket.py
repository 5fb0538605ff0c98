"""`iris key ticket-issuer` and `iris key ticket`: tickets as an operator makes them."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from iris import cli, keyfiles
from iris.cli.exits import Exit
from iris.crypto.keys import public_id
from iris.crypto.tickets import read_ticket
from relay.issuer_settings import parse_issuers

KEY_ID = bytes(range(16))


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory of keys; return the fingerprint of its network."""
    directory = tmp_path / "keys"
    _, key = keyfiles.create_keys(directory)
    monkeypatch.setenv("IRIS_CONFIG", str(directory))
    return key.fingerprint.hex()


def key(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["key", *map(str, arguments)])


def test_an_issuer_prints_what_relays_need_and_its_tickets_say_what_was_asked(
    network: str, tmp_path: Path
) -> None:
    path = tmp_path / "issuer.toml"
    made = key("ticket-issuer", path, "--name", "shop")
    assert made.exit_code == Exit.OK, made.output
    (issuer,) = parse_issuers(tomllib.loads(made.stdout)["issuers"]) or ()
    assert issuer.name == "shop"
    assert path.stat().st_mode & 0o777 == 0o600
    result = key(
        "ticket", path, "alice", "--allow", "read=a.>", "--allow", "read=b", "--key", KEY_ID.hex(), "--life", 60,
        "--origin", "https://app.example",
    )  # fmt: skip
    assert result.exit_code == Exit.OK, result.output
    known = {public_id(issuer.public_keys[0]): issuer.public_keys[0]}
    ticket = read_ticket(
        result.stdout.strip(), find_key=known.get, networks=[network], now_s=time.time(), max_life_s=lambda _: 60
    )  # fmt: skip
    assert (ticket.subject, ticket.origin) == ("alice", "https://app.example")
    assert ticket.keys == {KEY_ID}
    assert [ticket.allow.allows("read", name) for name in ("a.x", "b", "c")] == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--allow", "read"), "is not VERB=NAME"),
        (("--allow", "reed=a"), "did you mean 'read'"),
        (("--allow", "read=a", "--key", "xyz"), "write a whole key id"),
        (("--allow", "read=a", "--life", "0"), "exp must be after iat"),
    ],
)
def test_a_ticket_that_no_relay_would_accept_is_not_made(
    network: str, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    path = tmp_path / "issuer.toml"
    assert key("ticket-issuer", path).exit_code == Exit.OK
    result = key("ticket", path, "alice", *arguments)
    assert result.exit_code == Exit.USAGE
    assert text in result.stderr
    assert not result.stdout


def test_without_a_network_the_issuer_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IRIS_CONFIG", str(tmp_path / "none"))
    path = tmp_path / "issuer.toml"
    result = key("ticket-issuer", path)
    assert result.exit_code == Exit.USAGE
    assert "--network" in result.stderr
    assert not path.exists()
    assert "is not the fingerprint" in key("ticket-issuer", path, "--network", "12").stderr
    assert key("ticket-issuer", path, "--network", "ab" * 16).exit_code == Exit.OK
