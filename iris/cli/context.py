"""`iris context`: name relays and keys, and choose among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from iris import keyfiles
from iris.cli import contexts, options, output
from iris.cli.contexts import Context, Contexts
from iris.cli.exits import Exit, run
from iris.errors import ConfigError

app = typer.Typer(
    name="context", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""Name relays and keys, and choose among them.

    A context is used by --context NAME before the verb, by IRIS_CONTEXT, or
    by `iris context use NAME`. The relay and the keys of a verb are those of

    \\b
      1. the options of the verb, such as --relay
      2. --context NAME
      3. IRIS_RELAY, IRIS_CONFIG and IRIS_ACCESS, each by itself
      4. IRIS_CONTEXT
      5. the context in use
      6. the defaults, which `iris --help` shows

    `iris relay`, `iris store`, `iris demo` and `iris init` use no context.
    Programs use none either: iris.connect() reads only the variables of 3.

    \\b
    Examples:
      iris context add prod --relay tls://relay.example:7431 --config ~/keys/prod
      iris context use prod
      iris --context prod members orders
      iris context list
      iris context remove prod
    """,
)  # fmt: skip

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


@app.command()
def add(
    name: Name,
    relay: options.RelayPath = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="DIR", help="Directory of keyring.toml, for IRIS_CONFIG.", file_okay=False, exists=True)
    ] = None,
    access: Annotated[
        Path | None, typer.Option("--access", metavar="FILE", help="Access file for tls:// relays, for IRIS_ACCESS.", dir_okay=False, exists=True)
    ] = None,
    use: Annotated[bool, typer.Option("--use", help="Also use it from now on.")] = False,
) -> None:  # fmt: skip
    """Add a context. An existing one is not changed.

    \b
    Examples:
      iris context add prod --relay tls://relay.example:7431 --access prod.pem
      iris context add test --config ~/keys/test --use
    """
    local = relay is not None and "://" not in relay
    context = Context(
        relay=os.path.abspath(relay) if relay is not None and local else relay or "",
        config=os.path.abspath(config) if config else "",
        access=os.path.abspath(access) if access else "",
    )

    def change(found: Contexts) -> Contexts:
        if contexts.check_name(name) in found.by_name:
            raise ConfigError(
                f"context {name!r} exists and was not changed; run `iris context remove {name}` first"
            )
        if context == Context():
            raise ConfigError("a context requires at least one of --relay, --config and --access")
        return Contexts(name if use else found.current, {**found.by_name, name: context})

    _edit(change, f"context {name} added" + (" and in use" if use else ""))


@app.command("use")
def use_(name: Name) -> None:
    """Use a context from now on, where no other is named.

    \b
    Examples:
      iris context use prod
    """

    def change(found: Contexts) -> Contexts:
        found.named(name)
        return replace(found, current=name)

    _edit(change, f"context {name} in use")


@app.command("list")
def list_(json: options.AsJson = False) -> None:
    """List all contexts; '*' marks the one in use.

    \b
    Examples:
      iris context list
      iris context list --json | jq -r .relay
    """

    async def work() -> int:
        found = contexts.load(contexts.contexts_path(os.environ))
        for name, context in sorted(found.by_name.items()):
            used = name == found.current
            if json:
                output.write_json({"name": name, "used": used, **asdict(context)})
            else:
                shown = [f"{key} {value}" for key, value in asdict(context).items() if value]
                line = f"{'*' if used else ' '} {name}  {', '.join(shown)}\n"
                output.write(line.encode(errors="surrogateescape"))
        return Exit.OK

    run(work)


@app.command()
def remove(name: Name) -> None:
    """Remove a context. Its keys and its relay are not touched.

    \b
    Examples:
      iris context remove prod
    """

    def change(found: Contexts) -> Contexts:
        found.named(name)
        left = {each: context for each, context in found.by_name.items() if each != name}
        return Contexts("" if found.current == name else found.current, left)

    _edit(change, f"context {name} removed")


def _edit(change: Callable[[Contexts], Contexts], said: str) -> None:
    """Change the file of contexts under a lock, and say what was done."""

    async def work() -> int:
        path = contexts.contexts_path(os.environ)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create {path.parent}: {error.strerror}; name a directory of yours with IRIS_CONFIG"
            ) from error
        with keyfiles.locked(path):
            contexts.save(path, change(contexts.load(path)))
        output.write(f"{said}\n".encode())
        return Exit.OK

    run(work)
