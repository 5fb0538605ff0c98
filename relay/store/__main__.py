"""`python -m relay.store` and `iris store`: run a store on a data directory, or salvage its streams."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from iris import program
from iris.causes import print_error
from iris.cli.arguments import read_plainly
from iris.errors import ConfigError, IrisError
from iris.wire.names import plural, printable
from iris.wire.texts import sound_json
from relay.logs import warnings_of
from relay.settings import load_config
from relay.store import needs_rocksdb

if TYPE_CHECKING:
    from relay.store.bucket.checking import Report as Found
    from relay.store.salvage import Report


app = typer.Typer(name="store", add_completion=False, pretty_exceptions_enable=False)
SHOWN = 20
"""Lost ranges of a stream that the text output lists; --json has all."""


@app.callback(invoke_without_command=True)
def store(
    context: typer.Context,
    data: Annotated[
        Path | None, typer.Option(help="Directory of the streams.", file_okay=False)
    ] = None,
    relay: Annotated[
        Path | None,
        typer.Option(help="The relay's socket. Default: the socket of `iris relay` on this host."),
    ] = None,
    bucket: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Object storage for streams that outlive the disk: s3://NAME/PATH, gs://, az:// or file:///PATH.",
        ),
    ] = "",
    bucket_key: Annotated[
        Path | None,
        typer.Option(
            help="Key file of the stores that share the bucket. Default: group.key in the data directory.",
            dir_okay=False,
        ),
    ] = None,
    disk_limit: Annotated[
        int,
        typer.Option(
            metavar="BYTES",
            min=0,
            help="Bytes that records of streams in the bucket may use on this disk; older records are read from the bucket. Default: no limit.",
        ),
    ] = 0,
    bucket_pause_ms: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            min=0,
            max=60_000,
            help="Longest wait of an append for others that go into the same object of the bucket. Default: 100, for a directory 5.",
        ),
    ] = None,
    checkpoint_bytes: Annotated[
        int,
        typer.Option(
            hidden=True, min=1, help="A checkpoint is written when a journal is larger than this."
        ),
    ] = 64 << 20,
    failover_s: Annotated[
        float,
        typer.Option(
            hidden=True,
            min=0.1,
            help="Seconds that another store of the bucket must be gone before this one takes over.",
        ),
    ] = 5.0,
    log_level: Annotated[
        str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR. Default: INFO.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="json, or text: sentences for people. Default: json.")
    ] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised", hidden=True, help="Exit when standard input ends.")
    ] = False,
    figures: Annotated[
        bool,
        typer.Option(
            "--figures", hidden=True, help="Write figures for metrics to standard output."
        ),
    ] = False,
) -> None:
    """Store durable streams for the relay on this host. Runs until SIGTERM or Ctrl-C; a second signal
    ends it at once.

    `iris relay --data DIR` starts a store by itself. A store has no cluster key, so it cannot read
    what it stores.

    \b
    Examples:
      iris store --data /var/lib/iris
      iris store --data /var/lib/iris --bucket s3://company-iris/streams
      iris store salvage /var/lib/iris       (while the store is stopped)
      iris store restore /var/lib/iris --bucket s3://company-iris/streams
      iris store check /var/lib/iris --bucket s3://company-iris/streams
    """
    if context.invoked_subcommand:
        return
    try:
        if data is None:
            raise ConfigError(
                "--data is missing; give the directory of the streams, for example --data /var/lib/iris"
            )
        daemon = _load("daemon")
        flags: dict[str, object] = {
            "socket_path": relay and relay.absolute(),
            "log_level": log_level,
            "log_format": log_format,
        }
        chosen = load_config(flags, os.environ, None)
        daemon.run(
            data.absolute(),
            chosen.socket_path,
            chosen.trusted_user,
            chosen.log_level,
            chosen.log_format,
            supervised=supervised,
            figures=figures,
            bucket=daemon.BucketSettings(
                bucket, bucket_key, checkpoint_bytes, failover_s, disk_limit, bucket_pause_ms
            )
            if bucket
            else None,
        )
    except IrisError as err:
        print_error("iris store", err)
        if supervised:
            sys.stdout.write(sound_json(json.dumps({"cannot": str(err), "final": True})) + "\n")
        raise typer.Exit(2) from err


@app.command()
def salvage(
    data: Annotated[Path, typer.Argument(help="Directory of the streams.", file_okay=False)],
    stream: Annotated[
        str, typer.Argument(help="Name or uuid of one stream. Default: every damaged stream.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per stream.")
    ] = False,
) -> None:
    """Recover what can be read of damaged streams. Stop their store first.

    Reads every stream and rewrites each damaged one with everything that can still be read, at the
    same offsets. Readers receive the lost offsets as gaps with the reason "damaged". This needs as
    much free disk space as the damaged streams use. The damaged files are kept as UUID.damaged-N;
    delete them when you no longer need them. Undamaged streams are not changed.

    \b
    Examples:
      iris store salvage /var/lib/iris
      iris store salvage /var/lib/iris orders --json
    """
    from iris.cli.output import write_json

    try:
        directory = _load("directory")
        from relay.store import salvage as work

        def print_report(report: work.Report) -> None:
            if as_json:
                write_json(report)
            else:
                typer.echo("\n".join(_report_lines(report)))

        with warnings_of("iris store salvage"), directory.locked(data.absolute()) as streams:
            reports = work.salvage(streams, stream, print_report)
    except (IrisError, OSError) as err:
        print_error("iris store salvage", err)
        raise typer.Exit(2) from err
    if not reports and not as_json:
        typer.echo(f"{data}: no streams")
    if any(report.state == "failed" for report in reports):
        raise typer.Exit(1)


@app.command()
def restore(
    data: Annotated[Path, typer.Argument(help="Empty directory for the streams.", file_okay=False)],
    bucket: Annotated[
        str, typer.Option(metavar="URL", help="The bucket: s3://NAME/PATH, gs://, az:// or file:///PATH.")
    ],
    bucket_key: Annotated[
        Path | None, typer.Option(help="Key file of the stores that shared the bucket. Default: group.key in DATA.", dir_okay=False)
    ] = None,
) -> None:  # fmt: skip
    """Bring all streams of a bucket to this host: after a disaster, or to leave another host.

    Takes over from every store that uses the bucket. A store that still runs
    loses its streams to DATA, so stop all stores first. Afterwards, start the
    relay or store with DATA, the same bucket and the same bucket key.

    \b
    Examples:
      iris store restore /var/lib/iris --bucket s3://company-iris/streams
    """
    import asyncio

    try:
        process = _load("process")
        settings = process.BucketSettings(bucket, bucket_key and bucket_key.absolute())
        with warnings_of("iris store restore"):
            count = asyncio.run(process.restore(data.absolute(), settings))
    except (IrisError, OSError) as err:
        print_error("iris store restore", err)
        raise typer.Exit(2) from err
    typer.echo(f"{data}: {plural(count, 'stream')} from {bucket}")


@app.command()
def check(
    data: Annotated[Path, typer.Argument(help="Data directory of a store of the bucket.", file_okay=False)],
    bucket: Annotated[
        str, typer.Option(metavar="URL", help="The bucket: s3://NAME/PATH, gs://, az:// or file:///PATH.")
    ],
    bucket_key: Annotated[
        Path | None, typer.Option(help="Key file of the stores that share the bucket. Default: group.key in DATA.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:  # fmt: skip
    """Check a bucket, and compare it with the streams on this disk. Changes nothing.

    Reads every object of the bucket, also while its stores run. The streams in DATA are compared only
    while their store is stopped. This needs as much free disk space as they use. Exits 0 if nothing is
    damaged, 1 if something is, and 2 if it cannot be checked.

    \b
    Examples:
      iris store check /var/lib/iris --bucket s3://company-iris/streams
      iris store check /var/lib/iris --bucket s3://company-iris/streams --json
    """
    import asyncio

    from iris.cli.output import write_json

    try:
        work = _load("bucket_check")
        key_file = bucket_key and bucket_key.absolute()
        found: Found = asyncio.run(work.check_bucket(data.absolute(), bucket, key_file))
    except (IrisError, OSError) as err:
        print_error("iris store check", err)
        raise typer.Exit(2) from err
    if as_json:
        write_json(found)
    else:
        typer.echo("\n".join(_check_lines(found)))
    if found.damage:
        raise typer.Exit(1)


def _check_lines(found: Found) -> list[str]:
    """Return the lines of a check for people."""
    lines = [f"{found.bucket}: {plural(len(found.journals), 'journal')}, {plural(found.streams, 'log')}"]  # fmt: skip
    for one in found.journals:
        objects = f"objects {one.first} to {one.last}" if one.last >= one.first else "no objects"
        after = f", taken by {one.taken_by[:8]}" if one.taken_by else ""
        lines.append(
            f"  journal {one.journal[:8]} of {printable(one.label)} ({one.store[:8]}): {objects}{after}"
        )
    lines += [
        f"  log     {one.uuid}: {one.state}{f': {one.detail}' if one.detail else ''}"
        for one in found.databases
    ]
    lines += [f"  skipped {found.skipped}"] if found.skipped else []
    lines += [f"  garbage {printable(one)}" for one in found.garbage]
    lines += [f"  damage  {printable(one)}" for one in found.damage]
    lines.append("damaged" if found.damage else "no damage found")
    return lines


def _report_lines(report: Report) -> list[str]:
    """Return the lines of a report for people."""
    name = f"{printable(report.stream) or '(unnamed)'} {report.uuid}"
    if report.state == "undamaged":
        return [f"{name}: undamaged, left alone"]
    if report.state == "failed":
        return [f"{name}: not salvaged, nothing was changed: {printable(report.error)}"]
    lines = [
        f"{name}: salvaged, epoch {report.epoch}",
        f"  damage   {printable(report.error)}",
        f"  kept     {plural(report.records, 'record')}, {plural(report.messages, 'message')}",
        f"  offsets  {_offsets(report.oldest, report.end)} (known from {report.end_from})",
    ]
    shown = ", ".join(_offsets(first, end) for first, end in report.lost[:SHOWN])
    more = f", and {len(report.lost) - SHOWN} more ranges" if len(report.lost) > SHOWN else ""
    lost = plural(report.lost_offsets, "offset")
    lines.append(f"  lost     {lost}{': ' if shown else ''}{shown}{more}")
    lines += [f"  also     {printable(one)}" for one in report.also]
    lines.append(f"  before   {report.kept_at}: delete it when you no longer need it")
    return lines


def _offsets(first: int, end: int) -> str:
    """Return the offsets from `first` up to but not including `end`, as "0-39", "20" or "none"."""
    if end <= first:
        return "none"
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def _load(name: str) -> ModuleType:
    """Return a module of this package, which requires RocksDB. Raises ConfigError if RocksDB is not installed."""
    try:
        return importlib.import_module(f"relay.store.{name}")
    except ModuleNotFoundError as err:
        if err.name != "rocksdict":
            raise
        raise ConfigError(needs_rocksdb()) from err


def main() -> None:
    """Entry point of `python -m relay.store`."""
    program.begin()
    read_plainly(typer.main.get_command(app))()


if __name__ == "__main__":
    main()
