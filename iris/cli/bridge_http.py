"""`iris bridge http` and `iris bridge http-token`: clusters, topics and streams for curl, webhooks and old programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from iris.cli import options
from iris.cli.exits import Exit
from iris.cli.exits import run as run_work
from iris.errors import ConfigError, KeyringError

TOKENS_FILE: Final = "http-tokens.toml"

Tokens = Annotated[
    Path | None,
    typer.Option("--tokens", metavar="FILE", help="TOML file of tokens. Default: http-tokens.toml in the configuration directory.", show_default=False),
]  # fmt: skip


def http(
    listen: Annotated[str, typer.Option("--listen", metavar="ADDRESS:PORT", help="Address to serve HTTP at.")] = "127.0.0.1:8081",
    tokens: Tokens = None,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Allow addresses other than loopback without TLS, behind a proxy that uses it.")] = False,
    tls_cert: Annotated[str, typer.Option("--tls-cert", metavar="FILE", help="PEM file of a certificate, to use TLS.", show_default=False)] = "",
    tls_key: Annotated[str, typer.Option("--tls-key", metavar="FILE", help="PEM file of its key.", show_default=False)] = "",
    host: Annotated[list[str] | None, typer.Option("--host", metavar="NAME", help="Name under which clients reach the bridge, besides localhost and addresses. Repeatable.", show_default=False)] = None,
    origin: Annotated[list[str] | None, typer.Option("--origin", metavar="ORIGIN", help="Origin whose web pages may use the bridge, such as https://app.example. Repeatable.", show_default=False)] = None,
    max_body: Annotated[int, typer.Option("--max-body", metavar="BYTES", min=65_536, max=64 << 20, help="Largest body of a request.")] = 1 << 20,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: options.LogFormat = "json",
    metrics: options.Metrics = "",
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Serve clusters, topics and streams over HTTP, for curl, webhooks and programs without a library.

    The bridge opens every message that it passes on. Each request needs a
    bearer token, which allows verbs and names: see `iris bridge http-token`.

    SIGTERM or Ctrl-C finishes what is under way and exits with code 0; a second
    one exits at once. SIGHUP reads the tokens and the keyring again. Logs go to
    stderr; see --log-format. docs/http.md has all paths and headers.

    \b
    Examples:
      iris bridge http
      iris bridge http --listen 10.0.0.7:443 --tls-cert a.pem --tls-key a.key --host iris.example
    """
    from iris.web.server import check_installed
    from relay.logs import configure

    options.check_log_level(log_level)

    async def work() -> int:
        check_installed("the HTTP bridge")
        from relay.bridges.http.config import HttpConfig
        from relay.bridges.http.process import Front, serve
        from relay.process import raise_descriptor_limit, stop_on_signals

        front = Front(
            listen=listen, tokens=_tokens_file(tokens), allow_remote=allow_remote, certificate=tls_cert, key=tls_key,
            hosts=tuple(host or ()), origins=tuple(origin or ()),
        )  # fmt: skip
        config = HttpConfig(max_body_bytes=max_body)
        configure(log_level, log_format)
        raise_descriptor_limit()
        stop = stop_on_signals()
        if not metrics:
            await serve(front, config, relay, stop)
            return Exit.OK
        from relay.metrics.supervisor import check_installed as check_metrics

        check_metrics()
        from relay.bridges.http.metrics import source
        from relay.metrics.bridges import serving

        await serve(front, config, relay, stop, lambda bridge: serving(metrics, source(bridge)))
        return Exit.OK

    run_work(work)


def http_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the program or person that gets the token, for the log.")],
    allow: Annotated[list[str], typer.Option("--allow", metavar="VERB=NAME", help="What the token allows: a verb and a name, with * and > as in topic filters. Repeatable.")],
    tokens: Tokens = None,
) -> None:  # fmt: skip
    """Make a token for the HTTP bridge: add its hash to the file of tokens, and print it once.

    The verbs are request, push, broadcast and survey (clusters), publish and
    subscribe (topics), append and read (streams). Send SIGHUP to a running
    bridge afterwards. To withdraw a token, delete its entry.

    \b
    Examples:
      iris bridge http-token shop --allow push=orders --allow 'publish=shop.>'
    """

    async def work() -> int:
        typer.echo(add_token(_tokens_file(tokens), name, allow))
        return Exit.OK

    run_work(work)


def add_token(path: Path, name: str, allow: list[str]) -> str:
    """Add an entry to a file of tokens, which is created if it does not exist; return the token.

    Raises ConfigError if the entry or the file is wrong; the file is unchanged then.
    """
    import json
    from functools import partial

    from iris import keyfiles
    from iris.web.tokens import Tokens, hash_token, new_token
    from relay.bridges.http.config import VERBS

    patterns: dict[str, list[str]] = {}
    for text in allow:
        verb, equals, pattern = text.partition("=")
        if not equals:
            raise ConfigError(f"--allow: {text!r} is not VERB=NAME; write it like push=orders")
        patterns.setdefault(verb, []).append(pattern)
    token = new_token()
    quoted = partial(json.dumps, ensure_ascii=False)  # a string of JSON is one of TOML
    lines = ["[[token]]", f"name = {quoted(name)}", f'sha256 = "{hash_token(token)}"']
    lines += [f"allow.{quoted(verb)} = {quoted(names)}" for verb, names in patterns.items()]
    entry = "\n".join(lines) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with keyfiles.locked(path):
            old = keyfiles.read_secret(path) if path.exists() else ""
            text = f"{old.rstrip()}\n\n{entry}" if old.strip() else entry
            Tokens.parse(text, VERBS)
            keyfiles.replace(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    except KeyringError as error:
        raise ConfigError(str(error)) from error
    return token


def _tokens_file(named: Path | None) -> Path:
    from iris.keyfiles import config_directory

    return named if named is not None else config_directory(os.environ) / TOKENS_FILE
