"""The `iris` command: one verb a module. The daemon and what draws tables are imported only when they are wanted."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from iris.cli import (
    broadcast,
    demo,
    key,
    members,
    publish,
    push,
    request,
    run,
    status,
    subscribe,
    survey,
    tunnel,
)

HELP = """Talk to clusters by name, from a shell.

    Payloads come from an argument or from standard input, results go to
    standard output: bytes as they are, or with --json one object a line.
    Errors are one line on stderr.

    \b
    Start here:
      iris demo                          see everything at work on real data
      iris relay --dev &                 a relay with throw-away keys
      iris run lookup:service &          a member, from lookup.py
      iris request lookup "a question"

    \b
    Exit codes:
      0    it worked
      1    the answer was an error (survey: one of them; demo: figures differ)
      2    usage or configuration: names, keys, files, no relay
      3    no members
      4    overloaded: every member is full; nothing ran
      5    timeout
      6    connection lost: a member or relay went away, a tunnel broke
      130  interrupted
    """


class Verbs(TyperGroup):
    """The verbs, and `relay`, which is the daemon's own command: no other verb waits for its import."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        return [*super().list_commands(ctx), "relay"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb by its name, or None."""
        if cmd_name != "relay":
            return super().get_command(ctx, cmd_name)
        from relay.__main__ import relay

        only = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        only.command("relay")(relay)
        return typer.main.get_command(only)


def make_app() -> typer.Typer:
    """Return the command with all its verbs."""
    app = typer.Typer(
        name="iris",
        cls=Verbs,
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for verb in (
        request.request,
        push.push,
        survey.survey,
        broadcast.broadcast,
        publish.publish,
        subscribe.subscribe,
        tunnel.tunnel,
        members.members,
        status.status,
        run.run,
        demo.demo,
    ):
        app.command()(verb)
    app.add_typer(key.app)
    return app


def main() -> None:
    """Entry point of `iris`."""
    make_app()(prog_name="iris")
