"""`iris bench`: measure the latency distribution and the throughput of your own network.

jobs       a load, and its outcome
timer      when messages are due
load       the load generators
samples    latencies as HDR histograms
report     figures for people and as JSON
workers    load from several hosts at once

The method is that of Tyler Treat's "Benchmarking Message Queue Latency" and his Flotilla: a fixed rate, latency
from the intended time of sending, and a percentile only where there are enough samples beyond it.
"""

from __future__ import annotations

import signal
from typing import Annotated, Any, Final

import msgspec
import typer

import iris
from iris.cli import options, output
from iris.cli.arguments import WrongUsage
from iris.cli.bench import jobs
from iris.cli.exits import Exit, complain, report_error, until_stopped
from iris.cli.exits import run as run_work
from iris.extras import install_line
from iris.signals import on_signal
from iris.wire.names import check_cluster, check_topic, printable
from iris.wire.words import in_words

CLUSTER: Final = "bench"
TOPIC: Final = "bench.load"

app = typer.Typer(
    name="bench", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""Measure latency and throughput of your own network.

    Messages are sent at a fixed rate, even if earlier ones are unanswered.
    Latency counts from the time at which a message was due, so a system that
    stalls cannot hide it. A percentile is printed only if at least 10 samples
    lie beyond it; averages are not printed.

    Needs the extra \\[bench]

    \b
    Examples:
      iris bench serve                              on the other hosts
      iris bench request --rate 1000 --seconds 10   on this one
      iris bench request --rate 50000 --workers all
      iris bench publish --rate 10000 --size 1024
      iris bench tunnel --rate 2000 --size 65536 --json
    """,
)  # fmt: skip

Cluster = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="Cluster that `iris bench serve` is a member of.")
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to publish to.")]
Rate = Annotated[
    float, typer.Option("--rate", "-r", min=0.001, max=jobs.MAX_RATE, help="Messages per second.")
]
Seconds = Annotated[
    float, typer.Option("--seconds", min=0.001, max=jobs.MAX_SECONDS, help="Seconds to send for.")
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", "-t", min=0.001, max=jobs.MAX_TIMEOUT, help="Seconds to wait for each answer."),
]  # fmt: skip
Workers = Annotated[
    str | None,
    typer.Option("--workers", "-w", metavar="WHICH", help="Let workers on other hosts send instead of this process: 'all', a number, or hosts, labels or ids (a,b).", show_default=False),
]  # fmt: skip
WorkersOf = Annotated[
    str,
    typer.Option("--cluster", metavar="CLUSTER", help="Cluster whose workers --workers chooses."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, including histograms.")
]


def _size(least: int, most: int) -> Any:
    return typer.Option("--size", "-s", min=least, max=most, help="Size of a message in bytes.")


@app.command()
def serve(
    cluster: Cluster = CLUSTER,
    topic: Annotated[
        str, typer.Option("--topic", help="Topic to receive, with all topics below it.")
    ] = TOPIC,
    label: Annotated[
        str,
        typer.Option(
            "--label", help="Name by which --workers can choose this worker, besides its host."
        ),
    ] = "",
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the start, and nothing else.")
    ] = False,
    relay: options.RelayPath = None,
) -> None:
    """Serve a bench cluster, until Ctrl-C: the other end of the benches that run elsewhere.

    It echoes requests, acknowledges tunnel messages, and receives publications
    and drops them. It is also a worker, which sends load when a bench on
    another host asks for it with --workers, one job at a time.

    Do not use the CLUSTER of a real service: this member would receive a share
    of its requests.

    \b
    Examples:
      iris bench serve
      iris bench serve --label rack-7
    """
    _need_histograms()
    _checked(check_cluster, cluster, "CLUSTER")
    _checked(check_topic, topic, "--topic")
    if len(label) > 64 or "," in label:
        raise typer.BadParameter(
            f"{label!r} is not a label; use at most 64 characters without a comma",
            param_hint="--label",
        )

    from contextlib import AsyncExitStack

    from iris.cli.bench import workers
    from iris.memory import keep_freed_memory

    keep_freed_memory()

    def log(line: str) -> None:
        if not json:
            output.write(f"{printable(line)}\n".encode())

    async def serving() -> None:
        import asyncio

        worker = workers.Worker(relay, label, log)
        config = iris.ClientConfig(relay=relay, label=f"iris bench serve {cluster}"[:64])
        async with iris.connect(config=config) as client, AsyncExitStack() as stack:
            stack.push_async_callback(worker.close)
            for service in workers.services(cluster, topic, worker):
                await stack.enter_async_context(client.serve(service))
            if json:
                output.write_json(
                    {"cluster": cluster, "worker": worker.id, "host": worker.host, "label": label}
                )
            log(f"serving {cluster} as worker {worker.id} on {worker.host}; stop it with Ctrl-C")
            await asyncio.Event().wait()

    async def work() -> int:
        await until_stopped(serving())
        return Exit.OK

    run_work(work)


@app.command()
def request(
    cluster: Cluster = CLUSTER,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "-r", min=0.001, max=jobs.MAX_RATE, help="Requests per second. Default: 1000 without --inflight.", show_default=False),
    ] = None,
    inflight: Annotated[
        int | None,
        typer.Option("--inflight", min=1, max=jobs.MAX_INFLIGHT, help="Instead of a rate: keep N requests in flight.", show_default=False),
    ] = None,
    size: Annotated[int, _size(0, jobs.MAX_MESSAGE)] = 256,
    seconds: Seconds = 10.0,
    connections: Annotated[
        int, typer.Option("--connections", "-c", min=1, max=jobs.MAX_CONNECTIONS, help="Connections that share the requests.")
    ] = 1,
    timeout: Timeout = 5.0,
    workers: Workers = None,
    json: AsJson = False,
    relay: options.RelayPath = None,
) -> None:  # fmt: skip
    """Send requests at a fixed rate and print the distribution of their latency.

    The cluster is that of `iris bench serve`, or a service of yours that
    accepts requests whose bytes are all 0. --inflight runs a closed loop instead,
    which shows the highest rate but hides time spent waiting.

    \b
    Examples:
      iris bench request
      iris bench request --rate 20000 --connections 4 --json
      iris bench request --inflight 64 --seconds 5
      iris bench request --rate 50000 --workers host1,host2
    """
    if rate is not None and inflight is not None:
        raise typer.BadParameter("use --rate or --inflight, not both", param_hint="--inflight")
    asked = _load(
        verb="request", target=_checked(check_cluster, cluster, "CLUSTER"), size=size, seconds=seconds, timeout=timeout,
        rate=1000.0 if rate is None and inflight is None else rate, inflight=inflight, connections=connections,
    )  # fmt: skip
    _run(asked, workers, cluster, relay, as_json=json)


@app.command()
def publish(
    topic: Topic = TOPIC,
    rate: Rate = 10_000.0,
    size: Annotated[int, _size(jobs.STAMP.size, jobs.MAX_MESSAGE)] = 1024,
    seconds: Seconds = 10.0,
    timeout: Timeout = 5.0,
    workers: Workers = None,
    cluster: WorkersOf = CLUSTER,
    json: AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Publish at a fixed rate, and measure delivery latency and loss at a subscriber in this process.

    Publisher and subscriber are two connections of one process, so that one
    clock measures both times. The figures are those of this host's relay, while
    it also delivers to every other receiver, such as each `iris bench serve`.
    With --workers each worker publishes to TOPIC.<worker>, to its own
    subscriber.

    \b
    Examples:
      iris bench publish --rate 50000 --size 256
      iris bench publish bench.load.blue --seconds 60 --json
      iris bench publish --rate 100000 --workers 4
    """
    asked = _load(
        verb="publish", target=_checked(check_topic, topic, "TOPIC"), size=size, seconds=seconds, timeout=timeout, rate=rate,
    )  # fmt: skip
    _run(asked, workers, cluster, relay, as_json=json)


@app.command()
def tunnel(
    cluster: Cluster = CLUSTER,
    rate: Rate = 1000.0,
    size: Annotated[int, _size(jobs.NUMBER.size, jobs.MAX_TUNNEL_MESSAGE)] = 65_536,
    seconds: Seconds = 10.0,
    timeout: Timeout = 5.0,
    workers: Workers = None,
    json: AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Send messages through one tunnel at a fixed rate.

    Latency ends with the acknowledgement of `iris bench serve`: 8 bytes, sent
    when it has the whole message. The return of send would only show that the
    message was accepted, and a full echo would measure two streams.

    \b
    Examples:
      iris bench tunnel --rate 500
      iris bench tunnel --rate 4000 --size 65536 --json
      iris bench tunnel --rate 2000 --workers all
    """
    asked = _load(
        verb="tunnel", target=_checked(check_cluster, cluster, "CLUSTER"), size=size, seconds=seconds, timeout=timeout, rate=rate,
    )  # fmt: skip
    _run(asked, workers, cluster, relay, as_json=json)


# -- what the verbs share ------------------------------------------------------------------------------------


def _need_histograms() -> None:
    try:
        import hdrh.histogram  # type: ignore[import-untyped]  # noqa: F401 - it ships no types; is it there?
    except ImportError as error:
        missing = iris.ConfigError(f"iris bench needs hdrhistogram: {install_line('bench')}")
        missing.__cause__ = error
        raise typer.Exit(int(report_error(missing))) from error


def _checked(check: Any, name: str, hint: str) -> str:
    try:
        good: str = check(name)
    except iris.InvalidName as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None
    return good


def _load(**fields: Any) -> jobs.Load:
    try:
        return msgspec.convert(fields, jobs.Load)
    except msgspec.ValidationError as error:
        raise WrongUsage(in_words(error)) from None


def _run(
    asked: jobs.Load, wanted: str | None, cluster: str, relay: str | None, *, as_json: bool
) -> None:
    """Run a load here or on workers and print the report; the exit code shows whether the result is complete."""
    _need_histograms()
    from iris.cli.bench import load, report, workers

    async def work() -> int:
        import asyncio

        task = asyncio.current_task()
        assert task is not None
        on_signal(signal.SIGTERM, task.cancel)  # so that workers are stopped, too
        parts: list[report.Part] = []
        if wanted is not None:
            _checked(check_cluster, workers.address(cluster), "CLUSTER")
            async with iris.connect(relay) as client:
                parts = await workers.run(client, cluster, wanted, asked)
            outcomes = [part.outcome for part in parts if part.outcome is not None]
        else:
            try:
                async with load.prepared(asked, relay) as run:
                    outcomes = [await run()]
            except iris.NoMembers:
                command = "iris bench serve" + ("" if cluster == CLUSTER else f" {cluster}")
                detail = (
                    f"the cluster has no members; run `{command}` on another host, or on this one"
                )
                raise iris.NoMembers(cluster, detail) from None
        found = report.Report(asked, outcomes, parts)
        if as_json:
            output.write_json(found.document())
        else:
            found.show()
        for part in parts:
            if part.outcome is None:
                complain(printable(f"worker {part.worker} of {part.host}: {part.problem}"))
        return _code(found)

    run_work(work)


def _code(found: Any) -> Exit:
    """Return OK for a complete result. Errors are part of it, as long as something was answered."""
    if any(part.outcome is None for part in found.parts):
        return Exit.CONNECTION
    if found.answered:
        return Exit.OK
    codes = {"NoMembers": Exit.NO_MEMBERS, "Overloaded": Exit.OVERLOADED, "RequestTimeout": Exit.TIMEOUT,
             "ConnectionLost": Exit.CONNECTION, "TunnelBroken": Exit.CONNECTION}  # fmt: skip
    most = max(found.errors, key=found.errors.get, default="RequestTimeout")
    return codes.get(most, Exit.ANSWER)
