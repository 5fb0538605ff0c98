"""A relay's settings come from one place each, and a wrong one is named."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from iris.crypto.keys import dump_fingerprint, dump_public_key
from iris.errors import ConfigError
from relay import config
from relay.config import RelayConfig, dev, lan
from relay.issuer_settings import parse_issuers
from relay.settings import as_environment, load_config

SOCKET = Path("/run/iris/relay.sock")
ISSUERS = f'{{"login": {{"public_keys": ["{dump_public_key(bytes(32))}"], "allow": {{"read": ["a.>"]}}}}}}'


def pin(number: int) -> str:
    """Return a site's fingerprint."""
    return dump_fingerprint(bytes([number]) * 32)


PIN, OTHER_PIN = pin(1), pin(2)


def load(
    overrides: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> RelayConfig:
    return load_config(overrides or {}, environ or {}, file, uid=1000)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def as_toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(as_toml(part) for part in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and '"' in value:
        return f"'{value}'"
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def test_a_relay_without_settings_gets_the_defaults() -> None:
    assert load() == lan(Path("/tmp/iris-1000/relay.sock"))


def test_the_socket_of_a_relay_is_where_its_clients_look() -> None:
    assert load(environ={"IRIS_RELAY": "/srv/r.sock"}).socket_path == Path("/srv/r.sock")
    by_name = {"IRIS_RELAY": "/srv/r.sock", "IRIS_RELAY_SOCKET_PATH": "/srv/s.sock"}
    assert load(environ=by_name).socket_path == Path("/srv/s.sock")


def test_the_environment_beats_the_file_and_flags_beat_both(tmp_path: Path) -> None:
    file = written(
        tmp_path / "r.toml", "max_sessions = 1\nmax_aliases = 1\nmax_joins_per_session = 1"
    )
    environ = {"IRIS_RELAY_MAX_ALIASES": "2", "IRIS_RELAY_MAX_JOINS_PER_SESSION": "2"}
    read = load({"max_joins_per_session": 3, "max_keys_per_session": None}, environ, file)
    assert (read.max_sessions, read.max_aliases, read.max_joins_per_session) == (1, 2, 3)
    assert read.max_keys_per_session == 1024
    assert read.config_file == file


def test_the_environment_can_name_the_file_and_a_flag_another(tmp_path: Path) -> None:
    one = written(tmp_path / "1.toml", "max_sessions = 1")
    two = written(tmp_path / "2.toml", "max_sessions = 2")
    environ = {"IRIS_RELAY_CONFIG_FILE": str(one)}
    assert load(environ=environ).max_sessions == 1
    assert load(environ=environ, file=two).max_sessions == 2


def test_every_setting_can_be_given_as_toml_and_as_text(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        "socket_path": SOCKET,
        "socket_group": "staff",
        "socket_mode": 0o660,
        "trusted_user": "relay",
        "message_limit_bytes": 65_537,
        "port_queue_bytes": 70_000,
        "queue_bytes": 80_000,
        "tunnel_share_bytes": 4,
        "max_direct_tunnels": 13,
        "max_sessions": 5,
        "max_members": 11,
        "max_subscriptions": 12,
        "max_aliases": 6,
        "max_pending_per_session": 7,
        "max_subscriptions_per_session": 8,
        "max_keys_per_session": 9,
        "max_joins_per_session": 10,
        "session_rate": "1000:1048576",
        "address_rate": ("orders.>=100", "billing=0:4096"),
        "hello_timeout_s": 0.5,
        "frame_timeout_s": 1.5,
        "port": 0,
        "bind": ("127.0.0.1", "::1"),
        "join": ("10.0.0.7:7430", "dns:relays.example", "[fe80::1%eth0]:1"),
        "data": Path("/var/lib/iris"),
        "bucket": "s3://iris/streams",
        "bucket_key": Path("/etc/iris/group.key"),
        "disk_limit": 1 << 30,
        "bucket_pause_ms": 20,
        "metrics": "[::1]:9464",
        "mdns": False,
        "listen": ("tls://127.0.0.1:7431", "wss://127.0.0.1:7432", "ws://[::1]:7433"),
        "wss_cert": Path("/etc/iris/web.pem"),
        "wss_key": Path("/etc/iris/web.key"),
        "origins": ("https://app.example", "null"),
        "tickets": False,
        "issuers": ISSUERS,
        "revoked_tickets": Path("/etc/iris/revoked.txt"),
        "site": "eu",
        "gateway": ("tls://127.0.0.1:7440", "tls://[::1]:0"),
        "site_key": Path("/etc/iris/eu.toml"),
        "peer_site": (
            f"us=tls://gw.us.example:7440,tls://[2001:db8::7]:7441#{PIN}",
            f"ap=#{OTHER_PIN}",
        ),
        "site_cost": ("us=10", "ap=3600000"),
        "export": ("orders.>", "!orders.secret", "b2b.*"),
        "import_": ("!>",),
        "drain_timeout_s": 2.5,
        "log_level": "DEBUG",
        "log_format": "text",
        "dev": False,
    }
    apart = {"config_file", "network_keys"}
    assert set(wanted) == {found.name for found in fields(RelayConfig)} - apart
    expected = RelayConfig(**{**wanted, "issuers": parse_issuers(ISSUERS)})

    wanted["import"] = wanted.pop("import_")
    texts = {
        name: ", ".join(value) if isinstance(value, tuple) else str(value)
        for name, value in wanted.items()
    } | {"socket_mode": "0660"}
    assert load(dict(texts)) == expected
    assert load(environ={f"IRIS_RELAY_{name.upper()}": texts[name] for name in texts}) == expected
    flags = {
        name: list(value) if isinstance(value, tuple) else value for name, value in wanted.items()
    }
    flags["socket_mode"] = "0660"
    assert load(flags) == expected
    assert load(environ=as_environment(flags, None)) == expected

    toml = "".join(f"{name} = {as_toml(value)}\n" for name, value in wanted.items())
    file = written(tmp_path / "r.toml", toml)
    assert load(file=file) == replace(expected, config_file=file)
    assert load(environ=as_environment({"port": None}, file)) == replace(expected, config_file=file)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("max_sesions = 1", "max_sesions is not a setting"),
        ("[relay]\nmax_sessions = 1", "relay is not a setting"),
        ("network_keys = []", "network_keys is not a setting"),
        ("max_sessions = true", "max_sessions: True is not a whole number"),
        ("max_sessions = 1.5", "max_sessions: 1.5 is not a whole number"),
        ("dev = 'perhaps'", "dev: 'perhaps' is not true or false"),
        ("hello_timeout_s = []", "hello_timeout_s: [] is not a number of seconds"),
        ("log_level = 1", "log_level: 1 is not a text"),
        ("port = 'any'", "port: 'any' is not a whole number"),
        ("bind = 7", "bind: 7 is not a list of texts"),
        ("join = [7]", "join: [7] is not a list of texts"),
        ("socket_path = ''", "socket_path: '' is not a path"),
        ("max_sessions = ", "Invalid value"),
    ],
)
def test_a_setting_that_the_file_has_wrong_is_named_with_the_file(
    tmp_path: Path, text: str, names: str
) -> None:
    file = written(tmp_path / "r.toml", text)
    with pytest.raises(ConfigError) as raised:
        load(file=file)
    assert str(file) in str(raised.value)
    assert names in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml"):
        load(file=tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"trusted_user = '\xe9'")
    with pytest.raises(ConfigError, match=r"latin.toml"):
        load(file=tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("IRIS_RELAY_MAX_SESIONS", "1"),
        ("IRIS_RELAY_NETWORK_KEYS", "secret"),
        ("IRIS_RELAY_MAX_SESSIONS", "many"),
        ("IRIS_RELAY_MAX_SESSIONS", "9" * 5000),
        ("IRIS_RELAY_SOCKET_MODE", "0680"),
        ("IRIS_RELAY_HELLO_TIMEOUT_S", "soon"),
    ],
)
def test_a_variable_that_is_wrong_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}(: | is not a setting)"):
        load(environ={variable: value})


def test_a_flag_that_is_not_a_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^max_sesions is not a setting"):
        load({"max_sesions": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("socket_path", Path("relay.sock")),
        ("socket_path", Path("/" + "x" * 106)),
        ("socket_path", Path("/a\0b")),
        ("socket_group", ""),
        ("socket_mode", 0o440),
        ("socket_mode", 0o700),
        ("socket_mode", 0o1660),
        ("trusted_user", ""),
        ("message_limit_bytes", 65_535),
        ("message_limit_bytes", (64 << 20) + 1),
        ("port_queue_bytes", (1 << 20) - 1),
        ("queue_bytes", (1 << 20) - 1),
        ("tunnel_share_bytes", 0),
        ("max_sessions", 0),
        ("max_aliases", 65_537),
        ("max_pending_per_session", 0),
        ("max_subscriptions_per_session", 0),
        ("max_keys_per_session", 0),
        ("max_joins_per_session", -1),
        ("hello_timeout_s", 0.0),
        ("frame_timeout_s", float("inf")),
        ("port", -1),
        ("port", 65_536),
        ("bind", ()),
        ("bind", ("localhost",)),
        ("bind", ("::1", "::1")),
        ("join", ("10.0.0.7:0",)),
        ("join", ("fe80::1:7430",)),
        ("join", ("relays.example:7430",) * 257),
        ("listen", ("tcp://127.0.0.1:7431",)),
        ("listen", ("127.0.0.1:7431",)),
        ("listen", ("tls://127.0.0.1",)),
        ("listen", ("tls://[::1",)),
        ("site", "EU"),
        ("site", "e" * 33),
        ("gateway", ("127.0.0.1:7440",)),
        ("gateway", ("tcp://127.0.0.1:7440",)),
        ("gateway", ("tls://127.0.0.1",)),
        ("gateway", ("tls://127.0.0.1:70000",)),
        ("gateway", ("tls://127.0.0.1:7440/x",)),
        ("gateway", ("tls://127.0.0.1:7440",) * 17),
        ("peer_site", ("us",)),
        ("peer_site", ("us=tls://gw.us.example:7440",)),
        ("peer_site", ("us=tls://gw.us.example:7440#",)),
        ("peer_site", (f"us=tls://gw.us.example:7440#{PIN}x",)),
        ("peer_site", (f"US=tls://gw.us.example:7440#{PIN}",)),
        ("peer_site", (f"=tls://gw.us.example:7440#{PIN}",)),
        ("peer_site", (f"us=gw.us.example:7440#{PIN}",)),
        ("peer_site", (f"us=tls://gw.us.example#{PIN}",)),
        ("peer_site", (f"us=tls://gw.us.example:0#{PIN}",)),
        ("peer_site", (f"us=tls://dns:gw.us.example:7440#{PIN}",)),
        ("peer_site", (f"us=tls://10.0.0.300:7440#{PIN}",)),
        ("peer_site", (f"us=tls://fe80::1:7440#{PIN}",)),
        ("peer_site", (f"us=tls://a:1,,tls://b:1#{PIN}",)),
        ("peer_site", (f"us=tls://a:1#{PIN}", f"ap=tls://b:1#{PIN}")),
        ("peer_site", tuple(f"us=tls://a:{number}#{PIN}" for number in range(1, 18))),
        ("peer_site", tuple(f"s{number}=tls://a:1#{pin(number)}" for number in range(65))),
        ("peer_site", tuple(f"us=tls://a:1#{pin(number)}" for number in range(9))),
        ("site_cost", ("us=1",)),
        ("site_cost", ("us",)),
        ("site_cost", ("us=-1",)),
        ("site_cost", ("us=1.5",)),
        ("site_cost", ("us=3600001",)),
        ("site_cost", ("=1",)),
        ("session_rate", "fast"),
        ("session_rate", "1:2:3"),
        ("session_rate", "-1"),
        ("session_rate", "1000000000001"),
        ("address_rate", ("orders",)),
        ("address_rate", ("orders=",)),
        ("address_rate", ("orders.>.x=1",)),
        ("address_rate", ("orders=1", "orders=2")),
        ("address_rate", tuple(f"a{number}=1" for number in range(257))),
        ("export", ("orders",) * 1025),
        ("export", ("orders",)),
        ("import", ("orders",)),
        ("drain_timeout_s", float("nan")),
        ("drain_timeout_s", -1.0),
        ("log_level", "info"),
        ("log_format", "xml"),
    ],
)
def test_a_value_out_of_its_range_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        replace(lan(SOCKET), **{"import_" if name == "import" else name: value})


def test_the_ends_of_the_ranges_are_allowed() -> None:
    at_the_ends = {
        "socket_path": Path("/" + "x" * 105),
        "message_limit_bytes": 64 << 20,
        "port_queue_bytes": 64 << 20,
        "queue_bytes": 64 << 20,
        "socket_mode": 0o666,
        "drain_timeout_s": 0.0,
    }
    changed = replace(lan(SOCKET), **at_the_ends)
    assert {name: getattr(changed, name) for name in at_the_ends} == at_the_ends


def test_a_development_relay_stops_at_once_unless_configured_otherwise() -> None:
    assert dev(SOCKET).dev
    assert dev(SOCKET).drain_timeout_s < lan(SOCKET).drain_timeout_s
    assert load({"dev": True, "socket_path": SOCKET}) == dev(SOCKET)
    assert load({"dev": True, "drain_timeout_s": 7}).drain_timeout_s == 7.0
    assert load({"dev": False}, {"IRIS_RELAY_DEV": "1"}) == load()


GATEWAY: dict[str, Any] = {
    "site": "eu",
    "site_key": Path("/etc/iris/eu.toml"),
    "gateway": ("tls://0.0.0.0:7440",),
    "peer_site": (f"us=tls://gw.us.example:7440#{PIN}",),
}


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        ("site", {"site": ""}),
        ("site_key", {"site_key": None}),
        ("peer_site: us is this relay's own site", {"site": "us"}),
        ("peer_site: us has no address", {"gateway": (), "peer_site": (f"us=#{PIN}",)}),
        ("site_cost: 'ap' is not listed in peer_site", {"site_cost": ("ap=1",)}),
        ("site_cost: us is given twice", {"site_cost": ("us=1", "us=2")}),
    ],
)
def test_a_gateway_whose_settings_do_not_belong_together_is_refused(
    names: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as raised:
        replace(lan(SOCKET), **{**GATEWAY, **changes})
    assert str(raised.value).startswith(names)


def test_a_relay_of_a_site_need_not_be_a_gateway_and_a_gateway_need_not_listen_or_dial() -> None:
    assert not replace(lan(SOCKET), site="eu", site_key=Path("eu.toml")).is_gateway
    assert replace(lan(SOCKET), **{**GATEWAY, "gateway": ()}).is_gateway
    assert replace(lan(SOCKET), **{**GATEWAY, "peer_site": ()}).is_gateway
    assert replace(lan(SOCKET), **{**GATEWAY, "peer_site": (f"us=#{PIN}",)}).is_gateway


@pytest.mark.parametrize("text", ["", "!", "orders.>.x", "! orders", "or ders", "a..b", "a" * 256])
def test_a_pattern_that_is_none_names_its_setting(text: str) -> None:
    for name in ("export", "import"):
        with pytest.raises(ConfigError, match=f"^{name}: .*topic filter"):
            replace(lan(SOCKET), **{**GATEWAY, "import_" if name == "import" else name: (text,)})


@pytest.mark.parametrize(
    ("name", "value"),
    [*GATEWAY.items(), ("site_cost", ("us=1",)), ("export", ("a",)), ("import", ("a",))],
)
def test_a_development_relay_joins_no_site(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: a development relay "):
        replace(dev(SOCKET), **{"import_" if name == "import" else name: value})


def test_network_keys_come_from_code_and_stay_out_of_the_repr() -> None:
    class Key:
        def __repr__(self) -> str:
            return "SECRET"

    read = load({"network_keys": (Key(),)})
    assert len(read.network_keys) == 1
    assert "SECRET" not in repr(read)


def test_every_field_says_what_it_is() -> None:
    source = Path(config.__file__).read_text()
    for found in fields(RelayConfig):
        declaration = source.index(f"\n    {found.name}: ")
        following = source[declaration + 1 :].split("\n", 2)[1]
        assert following.startswith('    """'), found.name


def test_a_value_out_of_its_range_is_named_with_its_source(tmp_path: Path) -> None:
    file = written(tmp_path / "relay.toml", 'log_level = "LOUD"\n')
    with pytest.raises(ConfigError) as raised:
        load(file=file)
    assert str(raised.value).startswith(f"{file}: log_level: 'LOUD' is not one of ")
    environ = {"IRIS_RELAY_LOG_LEVEL": "QUIET", "IRIS_RELAY_PORT": "99999"}
    with pytest.raises(ConfigError, match=r"^IRIS_RELAY_PORT: 99999 is not from 0 to 65535$"):
        load(environ={"IRIS_RELAY_PORT": "99999"}, file=written(file, "port = 0\n"))
    with pytest.raises(ConfigError, match=r"^IRIS_RELAY_LOG_LEVEL: 'QUIET' "):
        load({"port": 7430}, environ)
    with pytest.raises(ConfigError, match=r"^port: 70000 is not "):
        load({"port": 70_000, "log_level": "INFO"}, environ)
