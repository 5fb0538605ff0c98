"""`iris key ticket-issuer` and `iris key ticket`: who may open a session from a browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from iris import keyfiles
from iris.cli import output
from iris.cli.exits import Exit, run
from iris.errors import ConfigError, KeyringError


def ticket_issuer(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create, with mode 0600.")],
    network: Annotated[
        str, typer.Option("--network", metavar="FINGERPRINT", help="Network in which the tickets are valid. Default: that of network.toml here.")
    ] = "",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the issuer in the settings of relays.")] = "login",
) -> None:  # fmt: skip
    """Write the key of an issuer of tickets, which admit sessions from browsers. An existing FILE is not overwritten.

    The application that logs people in keeps FILE and makes tickets with it
    (`iris key ticket`, or iris.tickets in Python). Relays get only the public
    key: add the lines printed here to their settings file, list everything that
    tickets of this issuer may allow, and send SIGHUP.

    \b
    Examples:
      iris key ticket-issuer issuer.toml
    """

    async def work() -> int:
        from iris.tickets import Issuer, parse_network

        if network:
            fingerprint = parse_network(network)
        else:
            path = keyfiles.config_directory(os.environ) / keyfiles.NETWORK_FILE
            if not path.exists():
                raise KeyringError(
                    f"no network key at {path}; name the network with --network (`iris key show` on a host of a relay prints it)"
                )
            fingerprint = keyfiles.load_network_keys(path)[0].fingerprint
        issuer = Issuer.create(file, fingerprint)
        output.say(
            f"# {file}: for network {fingerprint.hex()}. Add this to relay.toml, and list all that tickets may allow:"
        )
        output.say(
            f'[issuers.{name}]\npublic_keys = ["{issuer.public_key}"]\nallow.subscribe = ["news.>"]'
        )
        return Exit.OK

    run(work)


def ticket(
    issuer: Annotated[Path, typer.Argument(metavar="FILE", help="Key of the issuer (`iris key ticket-issuer`).")],
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Name of the person or device that the ticket is for.")],
    allow: Annotated[
        list[str],
        typer.Option("--allow", metavar="VERB=NAME", help="What the ticket allows: a verb and a name, with * and > as in topic filters. Repeatable."),
    ],
    key: Annotated[
        list[str] | None, typer.Option("--key", metavar="ID", help="Id of a key that the session must prove. With this, it can use no other keys. Repeatable. Default: any key.")
    ] = None,
    life: Annotated[int, typer.Option("--life", metavar="SECONDS", help="How long it is valid.")] = 900,
    origin: Annotated[str, typer.Option("--origin", metavar="ORIGIN", help="Only pages of this origin can use it. Default: any.")] = "",
) -> None:  # fmt: skip
    """Print a ticket, with which a browser opens a session.

    The verbs are request, push, survey, broadcast, tunnel, members and serve
    (clusters), publish and subscribe (topics), read, consume and append
    (streams). A relay allows what both the ticket and its own settings allow.
    With consume, "#" and a consumer after the stream allow this consumer alone,
    or with a final * all whose names begin so. No ticket creates a consumer.

    \b
    Examples:
      iris key ticket issuer.toml alice --allow 'subscribe=users.alice' --allow request=delays
      iris key ticket issuer.toml alice --allow 'consume=orders#page-*'
    """

    async def work() -> int:
        from iris.tickets import Issuer

        patterns: dict[str, list[str]] = {}
        for text in allow:
            verb, equals, pattern = text.partition("=")
            if not equals:
                raise ConfigError(
                    f"--allow: {text!r} is not VERB=NAME; write it like request=delays"
                )
            patterns.setdefault(verb, []).append(pattern)
        try:
            keys = [bytes.fromhex(text) for text in key or ()]
        except ValueError:
            raise ConfigError(
                "--key: write a whole key id, 32 hexadecimal digits; `iris key show` lists them"
            ) from None
        output.say(
            Issuer.load(issuer).issue(
                subject, allow=patterns, life_s=life, keys=keys, origin=origin
            )
        )
        return Exit.OK

    run(work)
