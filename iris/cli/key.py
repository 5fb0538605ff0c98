"""`iris key`: make, show and rotate keys. It prints names and ids, never a secret."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

import iris
from iris import keyfiles, paths, remote
from iris.cli import options, output, tickets
from iris.cli.exits import Exit, complain, run
from iris.crypto.keyring import DEFAULT, TOPIC, Keyring
from iris.crypto.keys import SECRET_BYTES, ClusterKey, GroupKey, public_id
from iris.errors import KeyringError, RelayUnavailable
from iris.wire.names import plural

app = typer.Typer(
    name="key", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""Make, show and rotate keys.

    To replace a key without downtime: add, promote, retire. After each step,
    copy the keyring to every host and let every program reload it, for
    `iris run` with SIGHUP.

    \b
    Examples:
      iris key new
      iris key add databases
      iris key list
      iris key promote databases
      iris key retire databases
      iris key access batch-host.pem
      iris key store-group /var/lib/iris/group.key
    """,
)  # fmt: skip

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="'default', a cluster name, or 'topic:PREFIX'.")
]
_COPY: Final = "copy {} to every host, and send SIGHUP to every program"
_ID: Final = "Id of the key, or its first digits. Default: "


@app.command()
def new() -> None:
    """Write a new keyring and a new network key to the configuration directory. Existing files are not overwritten.

    The directory is $IRIS_CONFIG, else $XDG_CONFIG_HOME/iris, else
    ~/.config/iris. Programs of this user find the keys there: a relay needs
    network.toml, a client or member keyring.toml.

    \b
    Examples:
      iris key new
      IRIS_CONFIG=/etc/iris iris key new
    """

    async def work() -> int:
        directory = keyfiles.config_directory(os.environ)
        keyring, network = keyfiles.create_keys(directory)
        (key,) = keyring.for_cluster("any")
        output.say(f"{directory / keyfiles.KEYRING_FILE}: default key {key.key_id.hex()}")
        output.say(f"{directory / keyfiles.NETWORK_FILE}: network {network.fingerprint.hex()}")
        dev = paths.dev_key_directory(os.environ, os.geteuid()) / keyfiles.KEYRING_FILE
        if dev.exists() and not os.environ.get("IRIS_CONFIG"):
            complain(
                f"programs started before keep the development keys in {dev.parent}, and so do the streams that they made; "
                "restart the programs, and the relay without --dev"
            )
        return Exit.OK

    run(work)


@app.command()
def show(json: options.AsJson = False) -> None:
    """Show the keys that programs of this user find: name, key id, role.

    \b
    Roles:
      seals   messages are sealed with this key
      opens   messages sealed with this key can be opened
      dials   relays dial with this network key
      admits  relays that dial with this network key are admitted

    \b
    Examples:
      iris key show
      iris key show --json | jq -r 'select(.role == "seals") | .key'
    """

    async def work() -> int:
        rows = _rows(keyring_path())
        width = max((len(name) for name, *_ in rows), default=0)
        for name, key_id, role, _ in rows:
            if json:
                output.write_json({"name": name, "key": key_id, "role": role})
            else:
                output.say(f"{name:<{width}}  {key_id}  {role}")
        return Exit.OK

    run(work)


@app.command("list")
def list_(json: options.AsJson = False) -> None:
    """List all keys that programs of this user find: name, fingerprint, role, age.

    The fingerprint is the key id. The file of a key does not record when it
    was made, only when the file was last changed. So each key is at least as
    old as AGE says.

    \b
    Examples:
      iris key list
      iris key list --json | jq -r 'select(.role == "seals") | .name'
    """

    async def work() -> int:
        path = keyring_path()
        rows = _rows(path)
        width = max([len(name) for name, *_ in rows] + [4])
        if not json:
            output.say(f"{'NAME':<{width}}  {'FINGERPRINT':<32}  {'ROLE':<6}  AGE")
        for name, key_id, role, file in rows:
            changed_s = file.stat().st_mtime
            if json:
                since = datetime.fromtimestamp(changed_s, UTC).isoformat(timespec="seconds")
                output.write_json(
                    {"name": name, "key": key_id, "role": role, "file": str(file), "unchanged_since": since}
                )  # fmt: skip
            else:
                age = _age(time.time() - changed_s)
                output.say(f"{name:<{width}}  {key_id}  {role:<6}  {age}")
        return Exit.OK

    run(work)


def _rows(path: Path) -> list[tuple[str, str, str, Path]]:
    """Return (name, key id, role, file) of the keys in a keyring and of the network keys beside it."""
    rows = [
        (name, key.key_id.hex(), "opens" if index else "seals", path)
        for name, keys in keyfiles.load_keyring(path).entries().items()
        for index, key in enumerate(keys)
    ]
    network = path.with_name(keyfiles.NETWORK_FILE)
    if network.exists():
        for index, key in enumerate(keyfiles.load_network_keys(network)):
            role = "admits" if index else "dials"
            rows.append(("(network)", key.fingerprint.hex(), role, network))
    return rows


def _age(seconds: float) -> str:
    """Return a lower bound of a key's age for people."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"at least {plural(int(seconds / length), unit)}"
    return "unknown: the file was changed within the last minute"


@app.command()
def add(name: Name) -> None:
    """Make a key for NAME that decrypts messages but does not encrypt yet: the first step of a rotation.

    If NAME has no key in effect, the new key encrypts at once.

    \b
    Examples:
      iris key add databases
      iris key add topic:flights.JFK
    """

    async def work() -> int:
        with editing() as (path, keyring):
            before = keyring.entries().get(name, ())
            key = ClusterKey(os.urandom(SECRET_BYTES))
            changed = keyring.add(name, key)
            keyfiles.save_keyring(path, changed)
        keys = changed.entries()[name]
        if keys[0] == key:
            output.say(
                f"{name}: added {key.key_id.hex()}; messages are encrypted with it from now on"
            )
            return Exit.OK
        output.say(f"{name}: added {key.key_id.hex()}; it can decrypt, but does not encrypt yet")
        output.say(f"next: {_COPY.format(path)}, then `iris key promote {name}`")
        if len(before) > 1:
            complain(
                f"{name} has {len(keys)} keys now, because an earlier rotation was not finished: some keys were added and not "
                f"promoted, or replaced and not retired. `iris key show` lists them; `iris key retire {name} --key ID` "
                "removes one"
            )
        return Exit.OK

    run(work)


@app.command()
def promote(
    name: Name,
    key: Annotated[
        str, typer.Option("--key", metavar="ID", help=f"{_ID}the key added last, if it was never promoted.")
    ] = "",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Promote even if some members lack the key; they then cannot read your messages."
        ),
    ] = False,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Encrypt with the key added last: the second step of a rotation.

    If that key encrypts already, nothing changes. To go back to an older key,
    name it with --key.

    Refused while the relay knows members that hold only old keys, or if that
    cannot be checked; --force promotes anyway. Durable streams then accept
    messages that are sealed with the new key, too.

    \b
    Examples:
      iris key promote databases
      iris key promote databases --key 1f2e3d4c
    """

    async def work() -> int:
        with editing() as (path, keyring):
            changed = keyring.promote(name, _find(keyring, name, key))
            chosen, *others = changed.entries()[name]
            if changed == keyring:
                output.say(
                    f"{name}: {chosen.key_id.hex()} already encrypts; nothing changed. To encrypt with another key, name it: "
                    + " or ".join(f"`--key {other.key_id.hex()[:8]}`" for other in others)
                )
                return Exit.OK
            shared = await _share_stream_keys(changed, relay)
            if not force:
                await _check_everybody_holds(keyring, name, chosen, relay)
            keyfiles.save_keyring(path, changed)
        output.say(f"{name}: {chosen.key_id.hex()} now encrypts")
        output.say(f"next: {_COPY.format(path)}, then `iris key retire {name}`")
        for line in shared:
            output.say(line)
        return Exit.OK

    run(work)


@app.command()
def retire(
    name: Name,
    key: Annotated[
        str, typer.Option("--key", metavar="ID", help=f"{_ID}the key that was replaced first.")
    ] = "",
) -> None:
    """Remove an old key: the third step of a rotation.

    The key that encrypts cannot be removed.

    \b
    Examples:
      iris key retire databases
      iris key retire databases --key 9a0b1c2d
    """

    async def work() -> int:
        with editing() as (path, keyring):
            changed = keyring.retire(name, _find(keyring, name, key))
            retired = set(keyring.entries()[name]) - set(changed.entries()[name])
            keyfiles.save_keyring(path, changed)
        for old in retired:
            output.say(f"{name}: {old.key_id.hex()} is retired")
        output.say(
            "next: let every process reload its keys (SIGHUP); it forgets a retired key when the calls that use it have ended. "
            "KEYS in `iris status` shows on each host which programs still use one"
        )
        return Exit.OK

    run(work)


@app.command()
def access(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create, with mode 0600.")],
) -> None:
    """Write an access file, with which programs on hosts without a relay connect to one over TLS.

    An existing FILE is not overwritten. An access file admits programs, never
    relays. It does not contain the network key, and it does not replace a
    keyring. Make a file for each host: the id printed here tells them apart.
    You cannot revoke one file; a new network key revokes all of them.

    On the other host, set IRIS_ACCESS to the file or save it as access.pem in
    the configuration directory, and set IRIS_RELAY=tls://HOST:PORT.

    \b
    Examples:
      iris key access batch-host.pem
    """

    async def work() -> int:
        network = keyfiles.config_directory(os.environ) / keyfiles.NETWORK_FILE
        if not network.exists():
            raise KeyringError(
                f"no network key at {network}; make one with `iris key new`, or run this on a host where a relay has one"
            )
        key = keyfiles.load_network_keys(network)[0]
        access_id = remote.create_access(file, key)
        output.say(f"{file}: access {access_id.hex()} to network {key.fingerprint.hex()}")
        return Exit.OK

    run(work)


@app.command("store-group")
def store_group(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create, with mode 0600.")],
) -> None:
    """Write the key of the stores that share a bucket. An existing FILE is not overwritten.

    Copy it to every host whose store uses the bucket, as group.key in its
    data directory or where the setting bucket_key says. Keep another copy:
    without it nobody can read the bucket.

    \b
    Examples:
      iris key store-group /var/lib/iris/group.key
    """

    async def work() -> int:
        key = GroupKey(os.urandom(SECRET_BYTES))
        keyfiles.create(file, key.reveal() + "\n")
        output.say(f"{file}: group {public_id(key.public_key).hex()}")
        return Exit.OK

    run(work)


app.command("ticket-issuer")(tickets.ticket_issuer)
app.command()(tickets.ticket)


def keyring_path() -> Path:
    """Return the path of the keyring that clients of this user use: in the configuration directory, else of `iris
    relay --dev`.

    Raises:
        KeyringError: neither exists.
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
    """Lock the keyring and yield its path and content. Raises KeyringError if it is that of a development relay."""
    path = keyring_path()
    if not os.environ.get("IRIS_CONFIG") and path.parent == paths.dev_key_directory(
        os.environ, os.geteuid()
    ):
        raise KeyringError(
            "only throw-away keys of a development relay exist, which last until this host restarts; "
            "run `iris key new` first"
        )
    with keyfiles.locked(path):
        yield path, keyfiles.load_keyring(path)


def _find(keyring: Keyring, name: str, text: str) -> bytes | None:
    """Return the id of the key of `name` whose hexadecimal form begins with `text`; None if `text` is empty."""
    if not text:
        return None
    found = [
        key.key_id
        for key in keyring.entries().get(name, ())
        if key.key_id.hex().startswith(text.lower())
    ]
    if len(found) != 1:
        raise KeyringError(
            f"{name}: {plural(len(found), 'key')} begin with {text!r}, not 1; `iris key show` lists them"
        )
    return found[0]


async def _share_stream_keys(keyring: Keyring, relay: str | None) -> list[str]:
    """Let every stream that is kept under one of our keys be kept under all of them; return what to say about it."""
    try:
        async with iris.connect(relay, keyring=keyring) as client:
            return [
                f"stream {info.name}: kept under {plural(len(info.key_ids), 'key')}"
                for info in await client.streams.share_keys()
            ]
    except RelayUnavailable:
        return [
            "no relay is running, so durable streams do not record messages under this key yet; "
            "when one runs: `iris stream keys`"
        ]


async def _check_everybody_holds(
    keyring: Keyring, name: str, key: ClusterKey, relay: str | None
) -> None:
    """Raise KeyringError unless every member that uses the keys of `name` also holds `key`."""
    if name.startswith(TOPIC):
        raise KeyringError(
            f"{name}: cannot check which subscribers hold the new key, because relays do not show it; "
            "use --force when every subscriber has reloaded the new keyring"
        )
    try:
        async with iris.connect(relay, keyring=keyring) as client:
            clusters = [name]
            if name == DEFAULT:
                report = await client.status()
                if "clusters" not in report:
                    raise KeyringError(
                        "cannot check which members hold the new key: the relay does not show all clusters to this "
                        f"connection ({report['limited']}); use --force if every member holds it"
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
            f"cannot check which members hold the new key: {error}. Use --force if every member holds it"
        ) from error
    if behind:
        raise KeyringError(
            f"{plural(len(behind), 'member')} {'holds' if len(behind) == 1 else 'hold'} only old keys and could not open messages sealed with {key.key_id.hex()[:8]}…: "
            f"{'; '.join(behind[:5])}{' …' if len(behind) > 5 else ''}. Copy the keyring to them and reload it (SIGHUP), "
            "or use --force"
        )
