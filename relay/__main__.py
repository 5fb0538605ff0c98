"""`python -m relay` and `iris relay`: checks the arguments, then turns this process into the relay (`relay.start`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from iris import keyfiles, program
from iris.causes import print_error
from iris.cli.arguments import read_plainly
from iris.errors import IrisError
from relay.settings import as_environment, defaults, load_config

_SITES: Final = "Other sites"


def relay(
    socket: Annotated[
        Path | None, typer.Option(help="Socket for programs. Default: iris/relay.sock in $XDG_RUNTIME_DIR.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings (TOML).", exists=True, dir_okay=False)
    ] = None,
    group: Annotated[str | None, typer.Option(help="Group whose users may connect, besides this user and root.")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR. Default: INFO.")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="json, or text: sentences for people. Default: json.")
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="A relay to link with, at port 7430 if none is given; dns:NAME[:PORT] for all addresses of a name. Repeatable.",
        ),
    ] = None,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Do not find relays by multicast DNS.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(help="Port for links; 0: any free port. Default: 7430, or any free port if that is in use."),
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Address of this host for links. Repeatable. Default: all addresses."),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="tls://HOST:PORT",
            help="Accept programs of hosts without a relay (`iris key access`). wss://HOST:PORT: browsers, over WebSocket; ws://127.0.0.1:PORT: behind a proxy. Repeatable.",
        ),
    ] = None,
    wss_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Web certificate of wss:// (PEM, with its chain).", dir_okay=False)
    ] = None,
    wss_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of --wss-cert (PEM). Default: in the same file.", dir_okay=False)
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin of web pages that may connect, such as https://app.example. Repeatable."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Directory for durable streams; starts a store there.", file_okay=False),
    ] = None,
    bucket: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Object storage for streams that outlive the disk: s3://NAME/PATH, gs://, az:// or file:///PATH."),
    ] = None,
    bucket_key: Annotated[
        Path | None,
        typer.Option(help="Key file of the stores that share the bucket. Default: group.key in the data directory.", dir_okay=False),
    ] = None,
    disk_limit: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Bytes of records that streams in the bucket may have on this disk; older ones are read from the bucket. Default: no limit."),
    ] = None,
    bucket_pause_ms: Annotated[
        int | None,
        typer.Option(metavar="MS", help="Longest wait of an append for others that go into the same object of the bucket. Default: 100, for a directory 5."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve metrics and health over HTTP here, such as 127.0.0.1:9464. Needs the extra 'metrics'."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of this relay's site.", rich_help_panel=_SITES),
    ] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option(
            metavar="tls://HOST:PORT", help="Accept gateways of other sites here. Repeatable.", rich_help_panel=_SITES
        ),
    ] = None,
    site_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key of this site (`iris federation key`).", dir_okay=False, rich_help_panel=_SITES),
    ] = None,
    peer_site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE=tls://HOST:PORT#FINGERPRINT",
            help="Another site: addresses of its gateways (with commas; none: they dial this one) and fingerprint of its key. Repeatable.",
            rich_help_panel=_SITES,
        ),
    ] = None,
    site_cost: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE=MS", help="Milliseconds added to the round trip when a site is chosen for a request. Repeatable.", rich_help_panel=_SITES),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Clusters and topics advertised to other sites: names, filters, or !FILTER to leave out. Repeatable. Default: all.",
            rich_help_panel=_SITES,
        ),
    ] = None,
    import_: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="PATTERN", help="Clusters and topics of other sites that this one uses, as in --export. Repeatable.", rich_help_panel=_SITES),
    ] = None,
    dev: Annotated[
        bool,
        typer.Option("--dev", help="For development: no peers, and throw-away keys that this user's programs find."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check settings and keys and exit: code 0, or 2 with what is wrong. Addresses and ports are not checked."),
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="Print every setting with its default (not the values in use), as a settings file, and exit.")
    ] = False,
) -> None:  # fmt: skip
    """Run this host's relay until SIGTERM or Ctrl-C (a second one ends it at once).

    SIGHUP makes it read settings and network keys again. The log names the
    settings that need a restart.

    \b
    Examples:
      iris relay --dev
      iris relay --join 10.0.0.7:7430
      iris relay --listen tls://0.0.0.0:7431
      iris relay --dev --listen ws://127.0.0.1:7432 --origin http://localhost:8000
      iris relay --data /var/lib/iris
      iris relay --config relay.toml --check
      iris relay --site eu --site-key eu.toml --gateway tls://0.0.0.0:7440 \\
          --peer-site us=tls://gw.us.example:7440#FINGERPRINT
    """
    if settings:
        for name, default in defaults().items():
            sys.stdout.write(f"{name} = {default}\n" if default else f"# {name} =\n")
        return
    try:
        overrides: dict[str, object] = {
            "socket_path": socket and socket.absolute(), "socket_group": group, "log_level": log_level, "log_format": log_format, "dev": dev or None,
            "join": join or None, "mdns": False if no_mdns else None, "port": port, "bind": bind or None,
            "listen": listen or None, "wss_cert": wss_cert and wss_cert.absolute(), "wss_key": wss_key and wss_key.absolute(), "origins": origin or None,
            "data": data and data.absolute(), "bucket": bucket,
            "bucket_key": bucket_key and bucket_key.absolute(), "disk_limit": disk_limit, "bucket_pause_ms": bucket_pause_ms, "metrics": metrics, "site": site, "gateway": gateway or None,
            "site_key": site_key and site_key.absolute(), "peer_site": peer_site or None, "site_cost": site_cost or None,
            "export": export or None, "import": import_ or None,
        }  # fmt: skip
        load_config(overrides, os.environ, config)  # here, because its errors name the flags
        environ = {**os.environ, **as_environment(overrides, config)}
        if check:
            _check(environ)
            return
    except IrisError as err:
        print_error("iris relay", err)
        raise typer.Exit(2) from err
    # The argument parser takes 10 MB of memory, which the relay would keep for as long as it runs.
    # Without -P, here and in every other start, -m executes modules of the working directory.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "relay.start", *sys.argv[1:]], environ)


def _check(environ: Mapping[str, str]) -> None:
    """Raise ConfigError or KeyringError if a relay with these settings could not start. Create and bind nothing."""
    from relay.metrics.supervisor import check_installed
    from relay.net.socketfile import group_id
    from relay.net.web import check_installed as check_web_installed
    from relay.net.web import web_context
    from relay.start import network_keys
    from relay.supervisor import check_data, check_store

    config = load_config({}, environ, None)
    if not config.dev:
        network_keys(environ)
    if config.site_key is not None:
        keyfiles.load_site_key(config.site_key)
    if config.data is not None:
        check_data(config.data.absolute())
        check_store(config.bucket)
    if config.metrics:
        check_installed()
    if config.web_listen:
        check_web_installed()
        web_context(config)
    if config.socket_group is not None:
        group_id(config.socket_group)
    sys.stdout.write("settings and keys are valid; addresses and ports were not checked\n")


def main() -> None:
    """Entry point of `python -m relay`."""
    program.begin()
    app = typer.Typer(add_completion=False)
    app.command()(relay)
    read_plainly(typer.main.get_command(app))()


if __name__ == "__main__":
    main()
