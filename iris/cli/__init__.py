"""The `iris` command. Each verb is a module, which is imported when the verb is called."""

from __future__ import annotations

import errno
import os
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from iris import program
from iris.causes import VARIABLE, print_causes
from iris.cli import stdout
from iris.cli.arguments import WrongUsage, read_plainly
from iris.wire.names import did_you_mean, printable

VERBS: Final = {
    "request": "iris.cli.request",
    "push": "iris.cli.push",
    "survey": "iris.cli.survey",
    "broadcast": "iris.cli.broadcast",
    "publish": "iris.cli.publish",
    "subscribe": "iris.cli.subscribe",
    "tunnel": "iris.cli.tunnel",
    "members": "iris.cli.members",
    "describe": "iris.cli.describe",
    "ping": "iris.cli.ping",
    "status": "iris.cli.status",
    "dashboard": "iris.cli.dashboard",
    "top": "iris.cli.top",
    "check": "iris.cli.check",
    "run": "iris.cli.run",
    "relay": "relay.__main__",
    "store": "relay.store.__main__",
    "stream": "iris.cli.stream",
    "init": "iris.cli.init",
    "context": "iris.cli.context",
    "key": "iris.cli.key",
    "federation": "iris.cli.federation",
    "bridge": "iris.cli.bridge",
    "bench": "iris.cli.bench",
    "demo": "iris.cli.demo",
}
"""Verb -> its module. The module has a function named after the verb, or an `app` with sub-verbs."""

SUMMARIES: Final = {
    "request": "Send a request to one member of a cluster and print its reply.",
    "push": "Send a message to one member of a cluster, without waiting for a reply.",
    "survey": "Ask every member of a cluster and print each answer on a line, as it arrives.",
    "broadcast": "Send a message to every member of a cluster that serves broadcasts.",
    "publish": "Publish to a topic.",
    "subscribe": "Print messages published to matching topics, one per line, until Ctrl-C.",
    "tunnel": "Open a tunnel to one member: send it the lines of standard input, and print what it sends back.",
    "members": "List the members of a cluster: id, what they serve, keys, relay, program.",
    "describe": "Ask each member of a cluster what it is: versions, handlers and their types, counts and times.",
    "ping": "Measure the round trip to each member of a cluster in this site.",
    "status": "Show the relay: sessions, clusters, links to other relays, other sites, and counts of messages.",
    "dashboard": "Serve a page that shows the network live: clusters, who is slow and why, drops, links, streams.",
    "top": "Watch the network: members, relays, links, streams, drops, and who is slow.",
    "check": "Check the relay of this host, for monitoring.",
    "run": "Serve one or more services, imported from the current directory or the Python environment.",
    "relay": "Run this host's relay until SIGTERM or Ctrl-C (a second one ends it at once).",
    "store": "Store durable streams for the relay on this host. Runs until SIGTERM or Ctrl-C; a second signal ends it at once.",
    "stream": "Keep messages on disk and read them later: durable streams.",
    "init": "Write a project: a service, its test, and what it needs to run under systemd.",
    "context": "Name relays and keys, and choose among them.",
    "key": "Make, show and rotate keys.",
    "federation": "Connect sites, each a network of relays, through gateways.",
    "bridge": "Connect programs of other protocols to clusters and topics.",
    "bench": "Measure latency and throughput of your own network.",
    "demo": "See Iris at work on a year of real flight departures from New York.",
}
"""Verb -> the first sentence of its help, so that `iris --help` imports no verb."""

WITHOUT_CONTEXT: Final = ("relay", "store", "demo", "init", "context")
"""Verbs that connect to no relay, or to one that they start."""

OTHER_WORDS: Final = {
    "call": "request",
    "emit": "publish",
    "listen": "subscribe",
    "pub": "publish",
    "send": "push",
    "serve": "run",
    "start": "run",
    "sub": "subscribe",
}
"""Words of similar tools -> the verb that does it here."""

HELP = """Send messages to clusters by name, and run relays and services.

    A payload is an argument or standard input. Results go to standard output:
    as raw bytes, or with --json as one JSON object per line. On a terminal,
    control characters are shown escaped. An error is one line on stderr;
    `iris --verbose VERB ...` also prints what caused it.

    \b
    Start here:
      iris demo                     see everything at work, on real data
      iris relay --dev              start a relay with throw-away keys
      iris run greetings            serve a cluster (README.md has greetings.py)
      iris request greeter world    send that cluster a request

    \b
    Exit codes:
      0    success
      1    refused or failed: a member, relay or store answered with an error
      2    wrong usage or configuration: argument, name, key, file; no relay
      3    not found: no members, no such stream, no store
      4    refused for now: nothing ran and no stream changed; try again later
      5    timeout: it may have run, and a stream may have changed
      6    connection lost: a member or relay left, or a tunnel broke
      130  interrupted

    \b
    Exit code 1 also reports these results:
      survey                  a member answered with an error
      stream append --expect  the message would have got another offset
      federation ping         a site is not linked
      demo                    figures differ from the file
      any command             standard output cannot be written (disk full)
    If the reader of standard output leaves, as `head` does, the command ends
    with exit code 0.

    \b
    Environment:
      IRIS_RELAY    the relay to use: path of its socket, or tls://HOST:PORT.
                    Several, with commas: one that answers is used.
                    tls://dns:NAME:PORT stands for all addresses of NAME.
                    Default: a relay started by your user, else the system's.
      IRIS_CONFIG   directory of keyring.toml, network.toml and access.pem.
                    Default: $XDG_CONFIG_HOME/iris, else ~/.config/iris.
      IRIS_ACCESS   access file for tls:// relays.
                    Default: access.pem in the configuration directory.
      IRIS_CONTEXT  name of a context (`iris context`), for what is not set above
      IRIS_VERBOSE  1: same as --verbose
    """


CLICK_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""ClickException, the base of all errors of usage. Typer does not export it."""


class Verbs(TyperGroup):
    """Import a verb's module by the verb's name, so that one verb does not wait for the imports of all the others."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        read_plainly(self)

    def main(self, *args: Any, **more: Any) -> Any:
        """Run a verb and exit. An error of usage is one line on stderr, as every other error is."""
        if not more.get("standalone_mode", True):
            return super().main(*args, **more)
        try:
            code = super().main(*args, **{**more, "standalone_mode": False})
        except typer.Abort:
            sys.exit(1)
        except CLICK_ERROR as error:
            _print_usage_error(error)
            sys.exit(2)
        except OSError as error:
            if error.filename is not None or not _is_of_output(error):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would print an error at exit, too
            typer.echo(f"iris: cannot write to standard output: {error.strerror}", err=True)
            print_causes(error)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that the arguments begin with, or fail with the verb that was probably meant."""
        word = args[0]
        if word in VERBS:
            return word, load(word), args[1:]
        if not word.startswith("-"):
            meant = OTHER_WORDS.get(word)
            hint = f"; did you mean {meant!r}?" if meant else did_you_mean(word, VERBS)
            ctx.fail(f"there is no command {word!r}{hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order in which the help shows them."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what the list of verbs shows of one; None if there is no such verb. `resolve_command` loads it."""
        if cmd_name not in VERBS:
            return None
        return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])


@cache
def load(verb: str) -> Any:
    """Import a verb's module, and return its command."""
    module = import_module(VERBS[verb])
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(verb)(getattr(module, verb))
    return read_plainly(typer.main.get_command(app))


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"iris {version('iris-messaging')}")
        raise typer.Exit


@app.callback(help=HELP)
def iris(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    context: Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="Use the relay and the keys of this context (`iris context`).", show_default=False)
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", envvar=VARIABLE, show_envvar=False, help="Below the line of an error, print the exceptions that caused it and where they were raised.")
    ] = False,
) -> None:  # fmt: skip
    """Handle the options that come before a verb."""
    if verbose:
        os.environ[VARIABLE] = "1"
    else:
        os.environ.pop(VARIABLE, None)
    if ctx.invoked_subcommand in WITHOUT_CONTEXT:
        if context is not None:
            raise WrongUsage(
                f"`iris {ctx.invoked_subcommand}` does not use contexts; leave out --context"
            )
        return
    from iris.cli import contexts
    from iris.errors import IrisError

    try:
        contexts.apply(os.environ, context)
    except IrisError as error:
        raise WrongUsage(str(error)) from error


def _is_of_output(error: OSError) -> bool:
    """Return whether an error can only be that of a write to standard output: verbs handle those of anything else."""
    return error.errno in (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)


def _resemble(given: str, name: str) -> bool:
    """Return whether two options are alike by more than their dashes and length, as --drain and --data are not."""
    from difflib import SequenceMatcher  # only for errors

    return SequenceMatcher(None, given, name).ratio() >= 0.75


def _print_usage_error(error: Any) -> None:
    """Print an error of usage as one line, with its causes below it if `iris --verbose` was given.

    The help of a command that was given without its sub-command is printed whole.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    text = " ".join(_usage_text(error).split()).removesuffix(".")
    where = error.ctx.command_path if getattr(error, "ctx", None) else "iris"
    hint = "" if text.endswith("?") else f"; `{where} --help` shows the usage"
    typer.echo(f"iris: {printable(text)}{hint}", err=True)
    if error.__cause__ or error.__context__:
        print_causes(error)


def _usage_text(error: Any) -> str:
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option:
        near = [name for name in error.possibilities or () if _resemble(option, name)]
        return f"there is no option {printable(option)!r}{did_you_mean(option, near)}"
    text: str = error.message if isinstance(error, WrongUsage) else error.format_message()
    return text


def main() -> None:
    """Entry point of `iris`."""
    program.begin()
    with stdout.guarded():
        app(prog_name="iris")
