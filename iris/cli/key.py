"""`iris key`: make, show and rotate keys. Prints names and ids, never a secret."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import iris
from iris import keyfiles, paths, remote
from iris.cli import options, output
from iris.cli.exits import Exit, run
from iris.crypto.keyring import DEFAULT, TOPIC, Keyring
from iris.crypto.keys import SECRET_BYTES, ClusterKey
from iris.errors import KeyringError, RelayUnavailable

app = typer.Typer(
    name="key", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""Make, show and rotate keys.

    A rotation is three steps without downtime: add, promote, retire. After
    each, let every member read it again: SIGHUP to `iris run`.

    \b
    Examples:
      iris key new
      iris key add databases
      iris key promote databases
      iris key retire databases
      iris key access batch-host.pem
    """,
)  # fmt: skip

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="'default', a cluster, or 'topic:PREFIX'.")
]
KeyId = Annotated[
    str,
    typer.Option("--key", metavar="ID", help="Id of the key, or how it begins. Default: the one added last."),
]  # fmt: skip


@app.command()
def new() -> None:
    """Write a new keyring and a new network key into the configuration directory; refuses to overwrite.

    That directory is $IRIS_CONFIG, else $XDG_CONFIG_HOME/iris, else
    ~/.config/iris. They are for the processes of this user; a relay needs
    network.toml, clients keyring.toml.

    \b
    Examples:
      iris key new
      IRIS_CONFIG=/etc/iris iris key new
    """

    async def work() -> int:
        directory = keyfiles.config_directory(os.environ)
        keyring, network = keyfiles.create_keys(directory)
        (key,) = keyring.for_cluster("any")
        _say(f"{directory / keyfiles.KEYRING_FILE}: default key {key.key_id.hex()}")
        _say(f"{directory / keyfiles.NETWORK_FILE}: network {network.fingerprint.hex()}")
        return Exit.OK

    run(work)


@app.command()
def show(json: options.AsJson = False) -> None:
    """Show the keys that programs of this user find: name, key id, what the key does.

    \b
    Examples:
      iris key show
      iris key show --json | jq -r 'select(.role == "seals") | .key'
    """

    async def work() -> int:
        path = keyring_path()
        rows = [
            (name, key.key_id.hex(), "opens" if place else "seals")
            for name, keys in keyfiles.load_keyring(path).entries().items()
            for place, key in enumerate(keys)
        ]
        network = path.with_name(keyfiles.NETWORK_FILE)
        if network.exists():
            for place, key in enumerate(keyfiles.load_network_keys(network)):
                rows.append(("(network)", key.fingerprint.hex(), "admits" if place else "dials"))
        width = max((len(name) for name, _, _ in rows), default=0)
        for name, key_id, role in rows:
            if json:
                output.write_json({"name": name, "key": key_id, "role": role})
            else:
                _say(f"{name:<{width}}  {key_id}  {role}")
        return Exit.OK

    run(work)


@app.command()
def add(name: Name) -> None:
    """Make a key for NAME that opens and does not seal yet: the first step of a rotation.

    The first key of a name that had none in effect seals at once.

    \b
    Examples:
      iris key add databases
      iris key add topic:flights.JFK
    """

    async def work() -> int:
        with editing() as (path, keyring):
            key = ClusterKey(os.urandom(SECRET_BYTES))
            changed = keyring.add(name, key)
            keyfiles.save_keyring(path, changed)
        sealing = changed.entries()[name][0] == key
        _say(f"{name}: added {key.key_id.hex()}, which {'seals' if sealing else 'opens'}")
        if not sealing:
            _say(f"next: give {path} to every member, then `iris key promote {name}`")
        return Exit.OK

    run(work)


@app.command()
def promote(
    name: Name,
    key: KeyId = "",
    force: Annotated[
        bool, typer.Option("--force", help="Even if members that lack the key cannot read us then.")
    ] = False,
    relay: options.RelayPath = None,
) -> None:
    """Seal with the key added last: the second step of a rotation.

    Refuses while members that the relay knows hold only old keys, or if that
    cannot be known; --force does it anyway. Durable streams under the old key
    are kept under the new one, too.

    \b
    Examples:
      iris key promote databases
      iris key promote databases --key 1f2e3d4c
    """

    async def work() -> int:
        with editing() as (path, keyring):
            changed = keyring.promote(name, _find(keyring, name, key))
            chosen = changed.entries()[name][0]
            await _tell_streams(changed, relay)
            if not force:
                await _check_everybody_holds(keyring, name, chosen, relay)
            keyfiles.save_keyring(path, changed)
        _say(f"{name}: {chosen.key_id.hex()} seals")
        _say(f"next: give {path} to every member, then `iris key retire {name}`")
        return Exit.OK

    run(work)


@app.command()
def retire(name: Name, key: KeyId = "") -> None:
    """Remove an old key, by default the last of NAME: the third step of a rotation.

    Never the one that seals.

    \b
    Examples:
      iris key retire databases
      iris key retire databases --key 9a0b1c2d
    """

    async def work() -> int:
        with editing() as (path, keyring):
            changed = keyring.retire(name, _find(keyring, name, key))
            gone = set(keyring.entries()[name]) - set(changed.entries()[name])
            keyfiles.save_keyring(path, changed)
        for old in gone:
            _say(f"{name}: {old.key_id.hex()} is retired")
        _say(
            "next: let every process reload its keys (SIGHUP). It forgets the retired keys when its running work has ended. "
            "To see who still uses one, look under KEYS in `iris status` on each host"
        )
        return Exit.OK

    run(work)


@app.command()
def access(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to make, mode 0600.")],
) -> None:
    """Write an access file: it lets processes on hosts without a relay reach one over TLS. Refuses to overwrite.

    It admits sessions, never relays, and does not hold the network key; they
    need a keyring, too. Made with the key that relays dial with. Each host is
    better off with a file of its own: its id, printed here, tells them apart.
    There is no taking one back but a new network key.

    Over there IRIS_ACCESS names the file, or it is access.pem in the
    configuration directory; IRIS_RELAY=tls://host:port names the relay.

    \b
    Examples:
      iris key access batch-host.pem
    """

    async def work() -> int:
        network = keyfiles.config_directory(os.environ) / keyfiles.NETWORK_FILE
        if not network.exists():
            raise KeyringError(
                f"no network key at {network}; make one with `iris key new`, or run this where your relays have theirs"
            )
        key = keyfiles.load_network_keys(network)[0]
        access_id = remote.create_access(file, key)
        _say(f"{file}: access {access_id.hex()} to network {key.fingerprint.hex()}")
        return Exit.OK

    run(work)


def keyring_path() -> Path:
    """Return the keyring that clients of this user find: the configuration's, else that of `iris relay --dev`.

    Raises:
        KeyringError: there is neither.
    """
    path = keyfiles.config_directory(os.environ) / keyfiles.KEYRING_FILE
    dev = paths.dev_key_directory(os.environ, os.geteuid()) / keyfiles.KEYRING_FILE
    if path.exists() or os.environ.get("IRIS_CONFIG") or not dev.exists():
        if not path.exists():
            raise KeyringError(
                f"no keyring in {path.parent}; make one with `iris key new`, or start `iris relay --dev`"
            )
        return path
    return dev


@contextlib.contextmanager
def editing() -> Iterator[tuple[Path, Keyring]]:
    """Give the keyring and its path, under a lock: two that edit at a time would lose a key."""
    path = keyring_path()
    directory = os.open(
        os.path.dirname(os.path.realpath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    )
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield path, keyfiles.load_keyring(path)
    finally:
        os.close(directory)


def _find(keyring: Keyring, name: str, text: str) -> bytes | None:
    """Return the id of the key of NAME that begins with `text`; None if no text was given."""
    if not text:
        return None
    found = [
        key.key_id
        for key in keyring.entries().get(name, ())
        if key.key_id.hex().startswith(text.lower())
    ]
    if len(found) != 1:
        raise KeyringError(f"{name}: {len(found)} keys begin with {text!r}; see `iris key show`")
    return found[0]


async def _tell_streams(keyring: Keyring, relay: str | None) -> None:
    """Have every stream that is kept under our keys kept under all of them."""
    try:
        async with iris.connect(relay, keyring=keyring) as client:
            for info in await client.streams.share_keys():
                _say(f"stream {info.name}: kept under {len(info.key_ids)} keys")
    except RelayUnavailable:
        _say(
            "no relay: streams under the old key, if there are any, record nothing under the new one"
        )
        _say("when there is a relay: iris stream keys")


async def _check_everybody_holds(
    keyring: Keyring, name: str, key: ClusterKey, relay: str | None
) -> None:
    """Raise KeyringError unless every member that NAME's keys are for holds `key`, too."""
    if name.startswith(TOPIC):
        raise KeyringError(
            f"{name}: relays do not tell who subscribes under which key. When every subscriber has taken up the new keyring, "
            "use --force"
        )
    try:
        async with iris.connect(relay, keyring=keyring) as client:
            clusters = [name]
            if name == DEFAULT:
                report = await client.status()
                if "clusters" not in report:
                    raise KeyringError(
                        "cannot check who holds the new key: the relay does not show all clusters to this connection "
                        f"({report['limited']}). "
                        "If every member holds it, use --force"
                    )
                known = report["clusters"]
                clusters = [cluster for cluster in known if cluster not in keyring.entries()]
            behind = [
                f"{cluster}: {member.member} ({member.label})"
                for cluster in clusters
                for member in await client.members(cluster)
                if key.key_id not in member.key_ids
            ]
    except RelayUnavailable as error:
        raise KeyringError(
            f"cannot tell who holds the new key: {error}. If every member does, use --force"
        ) from error
    if behind:
        raise KeyringError(
            f"{len(behind)} members hold only old keys and could not read what is sealed with {key.key_id.hex()[:8]}…: "
            f"{'; '.join(behind[:5])}{' …' if len(behind) > 5 else ''}. Give them the keyring and let them reload it (SIGHUP), "
            "or use --force"
        )


def _say(text: str) -> None:
    output.write(text.encode(errors="surrogateescape") + b"\n")
