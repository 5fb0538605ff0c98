"""The `iris` command: one verb a module, imported when it is called; `--help` imports them all."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from iris.causes import VARIABLE, print_causes

VERBS: Final = {
    "request": "iris.cli.request",
    "push": "iris.cli.push",
    "survey": "iris.cli.survey",
    "broadcast": "iris.cli.broadcast",
    "publish": "iris.cli.publish",
    "subscribe": "iris.cli.subscribe",
    "tunnel": "iris.cli.tunnel",
    "members": "iris.cli.members",
    "status": "iris.cli.status",
    "run": "iris.cli.run",
    "relay": "relay.__main__",
    "store": "relay.store.__main__",
    "stream": "iris.cli.stream",
    "key": "iris.cli.key",
    "federation": "iris.cli.federation",
    "bridge": "iris.cli.bridge",
    "bench": "iris.cli.bench",
    "demo": "iris.cli.demo",
}
"""Verb -> the module with a function of that name, or with an `app` of further verbs."""

HELP = """Talk to clusters by name, from a shell.

    Payloads come from an argument or from standard input, results go to
    standard output: bytes as they are, or with --json one object a line.
    Errors are one line on stderr.

    \b
    Start here:
      iris demo                          see everything at work on real data
      iris relay --dev                   a relay, with throw-away keys
      iris run greetings:greeter         a member (README.md has greetings.py)
      iris request greeter world
      iris stream create orders          a log on disk (relay --data DIR)

    \b
    Exit codes:
      0    it worked
      1    the answer was an error (survey: one of them; demo: figures differ;
           a stream's store refused, or the offset was not the expected one;
           federation ping: a site is not linked)
      2    usage or configuration: names, keys, files, no relay
      3    nobody is there: no members, no such stream, no store
      4    overloaded: every member is full; nothing ran, no stream has changed
      5    timeout; a stream may have changed
      6    connection lost: a member or relay went away, a tunnel broke
      130  interrupted

    \b
    Environment:
      IRIS_RELAY   the relay: path of its socket, or tls://host:port; of several
                   one that answers: tls://a:7431,tls://dns:NAME:7431
      IRIS_CONFIG  directory of keyring.toml, network.toml and access.pem; without
                   it $XDG_CONFIG_HOME/iris, else ~/.config/iris
      IRIS_ACCESS  access file for tls://; without it access.pem of that directory
    """


class Verbs(TyperGroup):
    """Finds a verb's module by its name, so that one verb does not wait for the imports of all."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs, in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb by its name, or None."""
        if cmd_name not in VERBS:
            return None
        module = import_module(VERBS[cmd_name])
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(app)


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"iris {version('iris-messaging')}")
        raise typer.Exit


@app.callback(help=HELP)
def iris(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and leave.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", envvar=VARIABLE, show_envvar=False, help="Under the line of an error, print its causes: exceptions, and where they were raised.")
    ] = False,
) -> None:  # fmt: skip
    """Handle the options that come before a verb."""
    if verbose:
        os.environ[VARIABLE] = "1"
    else:
        os.environ.pop(VARIABLE, None)


def main() -> None:
    """Entry point of `iris`."""
    try:
        app(prog_name="iris")
    except SystemExit as end:
        usage = end.__context__  # typer has printed this error, but not what caused it
        if isinstance(usage, typer.BadParameter) and (usage.__cause__ or usage.__context__):
            print_causes(usage)
        raise
