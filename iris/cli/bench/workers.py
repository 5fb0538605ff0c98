"""Load from several hosts: workers are members of `<cluster>.workers`, and a coordinator commands them with surveys.

    who      each worker answers with its id, host and label, and the job that keeps it busy
    prepare  workers with a share connect and send one message; nothing starts unless all are ready
    start    all begin
    poll     each answers with its state, and with its outcome at the end; a worker not polled for LEASE_S stops
    stop     the job ends, whatever its state

A survey reaches all workers. Each looks for its own id in it, and answers Aside if that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

import iris
from iris.cli.bench.jobs import NUMBER, Load, Name, Outcome, Text
from iris.cli.bench.load import prepared
from iris.cli.bench.report import Part
from iris.cli.bench.samples import merge
from iris.program import host_name

LEASE_S: Final = 30.0
READY_S: Final = 20.0
ASK_S: Final = 3.0
POLL_S: Final = 0.25
MISSES: Final = 3
"""Polls in a row that a worker may miss before it counts as lost."""
SPARE_S: Final = 10.0
MAX_WORKERS: Final = 1000

Shares = Annotated[dict[Name, Load], Meta(max_length=MAX_WORKERS)]


class Who(msgspec.Struct, frozen=True, tag=True):
    """Ask every worker to introduce itself."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Prepare a job: worker id -> its share of the load."""

    job: Name
    shares: Shares


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start the job now."""

    job: Name


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Ask for the state of the job."""

    job: Name


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the job."""

    job: Name


Command = Who | Prepare | Start | Poll | Stop


class Here(msgspec.Struct, frozen=True, tag=True):
    """Introduce a worker; `busy` describes its running job, "" if it has none."""

    worker: Name
    host: Name
    label: Name
    busy: Text


class Aside(msgspec.Struct, frozen=True, tag=True):
    """The worker has no share in this job."""

    worker: Name


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker is ready to start."""

    worker: Name


class Running(msgspec.Struct, frozen=True, tag=True):
    """The worker is running the job."""

    worker: Name


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The worker refuses the job, or could not continue it."""

    worker: Name
    reason: Text


class Done(msgspec.Struct, frozen=True, tag=True):
    """The job has ended."""

    worker: Name
    outcome: Outcome


Answer = Here | Aside | Ready | Running | Refused | Done


def address(cluster: str) -> str:
    """Return the cluster of the workers of a bench cluster."""
    return f"{cluster}.workers"


# -- the worker's side ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Job:
    name: str
    load: Load
    lease: asyncio.Timeout
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    outcome: Outcome | None = None
    failure: str = ""

    @property
    def busy(self) -> bool:
        return self.outcome is None and not self.failure


class Worker:
    """Run one job at a time, on connections of its own; `log` gets one line at the start and end of each."""

    def __init__(self, relay: str | None, label: str, log: Callable[[str], object]) -> None:
        self.id = secrets.token_hex(4)
        self.host = host_name()
        self.label = label
        self._relay = relay
        self._log = log
        self._job: _Job | None = None

    async def answer(self, command: Command) -> Answer:
        """Carry out a command and return the answer."""
        job = self._job
        if isinstance(command, Who):
            return Here(self.id, self.host, self.label, self._busy())
        if isinstance(command, Prepare):
            return await self._prepare(command)
        if job is None or job.name != command.job:
            return Aside(self.id)
        if isinstance(command, Stop):
            await self.close()
            return Aside(self.id)
        if job.outcome is not None:
            return Done(self.id, job.outcome)
        if job.failure:
            return Refused(self.id, job.failure)
        if isinstance(command, Start):
            job.go.set()
        job.lease.reschedule(asyncio.get_running_loop().time() + LEASE_S)
        return Running(self.id)

    async def close(self) -> None:
        """End the job if one is running."""
        job, self._job = self._job, None
        if job is not None and job.task is not None:
            job.task.cancel()
            await asyncio.wait((job.task,), timeout=READY_S)

    async def _prepare(self, command: Prepare) -> Answer:
        load = command.shares.get(self.id)
        if load is None:
            return Aside(self.id)
        if busy := self._busy():
            return Refused(self.id, busy)
        job = self._job = _Job(command.job, load, asyncio.timeout(LEASE_S))
        job.task = asyncio.create_task(self._work(job), name="iris-bench-job")
        await job.ready.wait()
        return Refused(self.id, job.failure) if job.failure else Ready(self.id)

    def _busy(self) -> str:
        job = self._job
        return "" if job is None or not job.busy else f"busy with {describe(job.load)}"

    async def _work(self, job: _Job) -> None:
        what = describe(job.load)
        try:
            async with job.lease, prepared(job.load, self._relay) as run:
                job.ready.set()
                await job.go.wait()
                self._log(f"started: {what}")
                outcome = await run()
            job.outcome = outcome
            self._log(f"ended: {what}: sent {outcome.sent:,}, answered {outcome.answered:,}")
        except asyncio.CancelledError:
            job.failure = "it was stopped"
            raise
        except Exception as error:  # the worker survives any failed load
            job.failure = (
                f"the coordinator did not poll for {LEASE_S:g} s"
                if job.lease.expired()
                else f"{type(error).__name__}: {error}"[:1000]
            )
        finally:
            if job.failure:
                self._log(f"failed: {what}: {job.failure}")
            job.ready.set()


def services(cluster: str, topic: str, worker: Worker) -> list[iris.Service]:
    """Return the services of a bench member: the target of loads, and the worker."""
    target = iris.Service(cluster)
    control = iris.Service(address(cluster))

    @target.on_request
    def echo(message: bytes) -> bytes:
        return message

    @target.on_publish(topic)
    @target.on_publish(f"{topic}.>")
    def drop(message: iris.Message) -> None:
        pass

    @target.on_tunnel
    async def acknowledge(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message[: NUMBER.size])

    @control.on_survey
    async def obey(command: Command) -> Answer:
        return await worker.answer(command)

    return [target, control]


def describe(load: Load) -> str:
    """Return a short description of a load."""
    pace = f"{load.inflight} in flight" if load.rate is None else f"{load.rate:g}/s"
    return f"{load.verb} {load.target}, {pace} of {load.size} bytes for {load.seconds:g} s"


# -- the coordinator's side ----------------------------------------------------------------------------------


async def run(client: iris.Client, cluster: str, wanted: str, load: Load) -> list[Part]:
    """Run a load on the workers that `wanted` names, its rate divided among them; return one part for each.

    `wanted` is "all", a number, or names separated by commas: hosts, labels or worker ids.

    Raises:
        NoMembers: there are no workers, or fewer than wanted; nothing was started.
        Overloaded, ConnectionLost: a worker refused, or was lost, before the start; nothing was started.
    """
    chosen = _choose(cluster, await _who(client, cluster), wanted)
    shares = _divide(load, sorted(chosen))
    job = secrets.token_hex(8)
    try:
        answers = await _ask(client, cluster, Prepare(job, shares), set(shares), READY_S)
        for worker, here in chosen.items():
            answer = answers.get(worker)
            if isinstance(answer, Refused):
                raise iris.Overloaded(
                    address(cluster), f"worker {_name(here)} refused: {answer.reason}"
                )
            if not isinstance(answer, Ready):
                raise iris.ConnectionLost(
                    address(cluster),
                    f"worker {_name(here)} was not ready within {READY_S:g} s",
                    may_have_run=False,
                )
        # A worker that does not answer is missed in the polls; it may have started.
        await _ask(client, cluster, Start(job), set(shares), ASK_S)
        return await _collect(client, cluster, job, chosen, load)
    finally:
        with contextlib.suppress(iris.IrisError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                await _ask(client, cluster, Stop(job), set(shares), ASK_S)


async def _who(client: iris.Client, cluster: str) -> dict[str, Here]:
    try:
        answers = await _ask(client, cluster, Who(), set(), ASK_S)
    except iris.NoMembers:
        answers = {}
    workers = {name: answer for name, answer in answers.items() if isinstance(answer, Here)}
    if not workers:
        command = "iris bench serve" + ("" if cluster == "bench" else f" {cluster}")
        raise iris.NoMembers(
            address(cluster), f"there are no workers; run `{command}` on other hosts"
        )
    return workers


def _choose(cluster: str, workers: dict[str, Here], wanted: str) -> dict[str, Here]:
    """Return the wanted workers, sorted by host, label and id."""
    ordered = dict(sorted(workers.items(), key=lambda item: (item[1].host, item[1].label, item[0])))
    listed = "; ".join(map(_name, ordered.values()))
    if wanted == "all":
        return ordered
    if wanted.isdecimal():
        if not 1 <= int(wanted) <= len(ordered):
            detail = f"{wanted} workers are wanted and {len(ordered)} are running: {listed}"
            raise iris.NoMembers(address(cluster), detail)
        return dict(list(ordered.items())[: int(wanted)])
    names = [name.strip() for name in wanted.split(",")]
    known = {name for here in workers.values() for name in (here.host, here.label, here.worker)}
    if missing := [name for name in names if name not in known or not name]:
        detail = f"no worker is called {', '.join(map(repr, missing))}; running: {listed}"
        raise iris.NoMembers(address(cluster), detail)
    return {
        worker: here
        for worker, here in ordered.items()
        if {here.host, here.label, here.worker} & set(names)
    }


def _divide(load: Load, workers: list[str]) -> dict[str, Load]:
    """Return worker id -> its share of the rate or of the requests in flight. Each publishes to a topic of its own."""
    count = len(workers)
    if load.inflight is not None and load.inflight < count:
        raise iris.ConfigError(
            f"{load.inflight} requests in flight are fewer than {count} workers; raise --inflight or choose fewer workers"
        )
    shares: dict[str, Load] = {}
    for number, worker in enumerate(workers):
        changes: dict[str, Any] = (
            {"rate": load.rate / count}
            if load.rate is not None
            else {
                "inflight": (load.inflight or 0) * (number + 1) // count
                - (load.inflight or 0) * number // count
            }
        )
        if load.verb == "publish":
            changes["target"] = f"{load.target}.{worker}"
        shares[worker] = msgspec.structs.replace(load, **changes)
    return shares


async def _collect(
    client: iris.Client, cluster: str, job: str, chosen: dict[str, Here], load: Load
) -> list[Part]:
    """Poll until every worker has an outcome or counts as lost, within a time limit."""
    parts: dict[str, Part] = {}
    misses = dict.fromkeys(chosen, 0)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + load.seconds + 2 * load.timeout + SPARE_S

    def settle(worker: str, outcome: Outcome | None, problem: str = "") -> None:
        here = chosen[worker]
        parts[worker] = Part(worker, here.host, here.label, outcome, problem)

    while len(parts) < len(chosen):
        open_ = chosen.keys() - parts.keys()
        answers: dict[str, Answer] = {}
        with contextlib.suppress(iris.RequestError):  # no worker answers, or the relay is away
            answers = await _ask(client, cluster, Poll(job), set(open_), ASK_S)
        for worker in open_:
            match answers.get(worker):
                case Done(outcome=outcome):
                    problem = _check(outcome)
                    settle(worker, None if problem else outcome, problem)
                case Running():
                    misses[worker] = 0
                case Refused(reason=reason):
                    settle(worker, None, reason)
                case None:
                    misses[worker] += 1
                    if misses[worker] >= MISSES:
                        settle(worker, None, f"lost: it did not answer {MISSES} polls")
                case _:
                    settle(worker, None, "it was restarted and lost the job")
        if loop.time() > until_s:
            for worker in chosen.keys() - parts.keys():
                settle(worker, None, "it did not end in time")
        elif len(parts) < len(chosen):
            await asyncio.sleep(POLL_S)
    return [parts[worker] for worker in chosen]


def _check(outcome: Outcome) -> str:
    """Return what is wrong with an outcome of another host, or ""."""
    try:
        for text in filter(None, (outcome.corrected, outcome.uncorrected)):
            if merge([text]).get_total_count() != outcome.answered:
                return (
                    f"its histogram does not have {outcome.answered} samples, one for each answer"
                )
    except ValueError as error:
        return str(error)
    return ""


async def _ask(
    client: iris.Client, cluster: str, command: Command, wanted: set[str], timeout: float
) -> dict[str, Answer]:
    """Return answers by worker id; early once all that are `wanted` have answered."""
    answers: dict[str, Answer] = {}
    survey = client.survey(address(cluster), command, timeout=timeout, type=iris.Message)
    async with contextlib.aclosing(aiter(survey)) as messages:
        async for message in messages:
            try:
                answer: Answer = message.decode(Answer)
            except iris.DecodeError:
                continue  # from another version
            answers[answer.worker] = answer
            if wanted and wanted <= answers.keys():
                break
    return answers


def _name(here: Here) -> str:
    label = f" ({here.label})" if here.label else ""
    return f"{here.host}{label} {here.worker}"
