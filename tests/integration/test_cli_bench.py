"""`iris bench` as users run it: processes, a real relay, small counts. What is asserted are counts, never speed."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hdrh.histogram import HdrHistogram
from support import commands
from support.commands import Shell, dev_relay, end
from support.waiting import PATIENCE_S
from typer.testing import CliRunner

import iris
import iris.blocking
from iris import cli, keyfiles
from iris.cli.bench import jobs, load, report, samples, timer, workers
from iris.extras import install_line

pytestmark = pytest.mark.timeout(60)

VERBS = ["serve", "request", "publish", "tunnel"]
OTHERS = """
import asyncio, itertools
import iris

slow = iris.Service("slow", limits=iris.Limits(concurrency=1000))
asked = itertools.count()

@slow.on_request
async def answer(message: bytes):
    if next(asked):  # the first, which is not counted, at once
        await asyncio.sleep(0.3)

mute = iris.Service("mute", limits=iris.Limits(concurrency=1000))
given_up = itertools.count()

@mute.on_request
async def long_after(message: bytes):
    if next(given_up):
        await asyncio.sleep(3)

flaky = iris.Service("flaky")
turns = itertools.count()

@flaky.on_request
def every_other(message: bytes):
    if next(turns) % 2:
        raise ValueError("every other")

fragile = iris.Service("fragile")

@fragile.on_tunnel
async def break_off(tunnel):
    for _ in range(6):
        await tunnel.send((await tunnel.recv())[:8])
    raise ValueError("broken on purpose")

@flaky.on_tunnel
async def unmoved(tunnel):
    async for message in tunnel:
        pass
"""


class Serving:
    """An `iris bench serve` process that tells what it does, and its worker's id."""

    def __init__(self, shell: Shell, label: str) -> None:
        self.label = label
        self.process: subprocess.Popen[bytes] = shell.start("bench", "serve", "--label", label)

    def ready(self) -> None:
        self.worker = re.findall(r"serving bench as worker (\w+) on ", self.says("serving"))[0]

    def says(self, text: str) -> str:
        """Return the next line with `text` in it."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline().decode():
            if text in line:
                return line
        pytest.fail(f"it ended without saying {text!r}")

    def stop(self) -> None:
        self.process.terminate()
        end(self.process)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory of this module, with other members than those of the bench."""
    with commands.short_directory("iris-bench-") as root:
        (root / "others.py").write_text(OTHERS)
        yield root


@pytest.fixture(scope="module")
def relay(home: Path) -> Iterator[Path]:
    """A relay with throw-away keys; gives its socket."""
    with dev_relay(home) as socket:
        yield socket


@pytest.fixture
def shell(home: Path, relay: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell in which clients find the relay and its keys; coordinators in this process do not pause for long."""
    monkeypatch.setattr(workers, "POLL_S", 0.02)
    shell = Shell(home)
    yield shell
    shell.finish()


@pytest.fixture(scope="module")
def serving(home: Path, relay: Path) -> Iterator[list[Serving]]:
    """Two bench members on this host, a and b."""
    shell = Shell(home)
    try:
        both = [Serving(shell, label) for label in "ab"]
        for one in both:
            one.ready()
        yield both
        for one in both:
            one.stop()
    finally:
        shell.finish()


@pytest.fixture(scope="module")
def servers(serving: list[Serving]) -> dict[str, str]:
    """Their worker ids by label."""
    return {one.label: one.worker for one in serving}


@pytest.fixture(scope="module")
def others(home: Path, relay: Path) -> Iterator[None]:
    """Members of slow, mute, fragile and flaky that were not started by `iris bench`."""
    shell = Shell(home)
    process = shell.start("run", "others:slow", "others:mute", "others:fragile", "others:flaky")
    try:
        with iris.blocking.connect(relay, keyring=dev_keys(relay)) as client:
            client.wait_for_members("slow", 1, timeout=PATIENCE_S)  # the last that joins
        yield
        process.terminate()
        end(process)
    finally:
        shell.finish()


def dev_keys(relay: Path) -> iris.Keyring:
    return keyfiles.load_keyring(relay.parent / "dev" / "keyring.toml")


def bench(shell: Shell, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a bench to its end and return its JSON; checks what holds for every one of them."""
    document = json.loads(shell("bench", *arguments, "--json", code=code))
    check(document)
    return document


def check(document: dict[str, Any]) -> None:
    assert document["due"] == document["sent"] + sum(document["not_sent"].values())
    failed = sum(document["errors"].values()) + sum(document["lost"].values())
    assert document["sent"] == document["answered"] + failed
    for name in ("corrected", "uncorrected"):
        if document[name] is not None:
            assert document[name]["samples"] == document["answered"]
            decoded = HdrHistogram.decode(document[name]["histogram"].encode())
            assert decoded.get_total_count() == document["answered"]


def total_ns(document: dict[str, Any], name: str) -> float:
    decoded = HdrHistogram.decode(document[name]["histogram"].encode())
    return float(decoded.get_mean_value() * decoded.get_total_count())


# -- help and bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", verb, "--help"])
    assert result.exit_code == 0
    assert f"iris bench {verb}" in result.output
    assert f"iris bench {verb}" in CliRunner().invoke(cli.app, ["bench", "--help"]).output


@pytest.mark.parametrize("verb", VERBS)
def test_without_hdrhistogram_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.setitem(sys.modules, "hdrh", None)
    said = Shell(tmp_path)("bench", verb, code=2).decode()
    assert said == f"iris: iris bench needs hdrhistogram: {install_line('bench')}\n"
    assert CliRunner().invoke(cli.app, ["bench", verb, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("request --rate 0", "--rate"), ("request --rate nan", "finite|rate"), ("request --rate 2000000", "--rate"),
        ("request --rate 1 --inflight 1", "not both"), ("request --inflight 0", "--inflight"),
        ("request --size 2000000", "--size"), ("request --seconds 3601", "--seconds"),
        ("request --connections 1001", "--connections"), ("request --timeout 61", "--timeout"),
        ("request no*name", "not a cluster name"), ("publish no*topic", "not a topic"), ("publish --size 31", "--size"),
        ("tunnel --size 7", "--size"), ("tunnel no*name", "not a cluster name"), ("serve no*name", "not a cluster name"),
        ("publish --workers all --cluster no*name", "not a cluster name"),
        ("serve --topic a.>", "not a topic"), ("serve --label a,b", "--label"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_sent(
    tmp_path: Path, arguments: str, said: str
) -> None:
    assert re.search(said, Shell(tmp_path)("bench", *arguments.split(), code=2).decode())


def test_without_a_member_it_says_what_to_run(shell: Shell, relay: Path) -> None:
    assert b"run `iris bench serve` on another host" in shell("bench", "request", code=3)
    assert b"run `iris bench serve nobody`" in shell("bench", "tunnel", "nobody", code=3)
    assert b"run `iris bench serve` on other hosts" in shell(
        "bench", "publish", "--workers", "all", code=3
    )


# -- request ---------------------------------------------------------------------------------------------------


def test_requests_are_all_counted_and_sampled(shell: Shell, servers: dict[str, str]) -> None:
    found = bench(shell, "request", "--rate", "200", "--seconds", "0.3", "--connections", "2")
    assert (found["loop"], found["due"], found["answered"], found["errors"]) == ("open", 60, 60, {})
    assert found["corrected"]["latency_us"].keys() == {"p50", "max"}  # 6 samples lie beyond p90


def test_the_text_leaves_out_percentiles_without_samples(
    shell: Shell, servers: dict[str, str]
) -> None:
    said = shell("bench", "request", "--rate", "200", "--seconds", "0.6").decode()
    assert re.search(r"wanted 200\.0/s, sent [\d.]+/s, answered ", said)
    assert "sent 120, answered 120\n" in said
    assert re.search(r"120 samples +FROM INTENDED SEND +FROM ACTUAL SEND", said)
    assert re.search(r"p90 +[\d.,]+ ms +[\d.,]+ ms", said)
    assert "p99" not in said


def test_a_closed_loop_has_no_intended_times(shell: Shell, servers: dict[str, str]) -> None:
    found = bench(shell, "request", "--inflight", "2", "--seconds", "0.2")
    assert (found["loop"], found["rate"], found["corrected"]) == ("closed", None, None)
    assert found["answered"] == found["sent"] > 0
    said = shell("bench", "request", "--inflight", "2", "--seconds", "0.1").decode()
    assert "closed loop" in said
    assert "INTENDED" not in said


def test_slow_answers_do_not_hold_back_the_next_requests(shell: Shell, others: None) -> None:
    found = bench(shell, "request", "slow", "--rate", "100", "--seconds", "0.2")
    assert (found["due"], found["answered"]) == (20, 20)
    least = HdrHistogram.decode(found["uncorrected"]["histogram"].encode()).get_min_value()
    assert least > 290_000_000


def test_a_message_that_leaves_late_has_waited_since_it_was_due(
    shell: Shell, servers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, calls = iris.Client.request, 0

    async def stall_once(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            time.sleep(0.2)  # noqa: ASYNC251 - it is to block the loop
        return await request(*arguments, **more)

    monkeypatch.setattr(iris.Client, "request", stall_once)
    found = bench(shell, "request", "--rate", "200", "--seconds", "0.4")
    assert found["answered"] == 80
    assert found["latest_ms"] > 100
    waited_ns = total_ns(found, "corrected") - total_ns(found, "uncorrected")
    assert waited_ns > 2e9, (
        "40 messages were due in these 0.2 s, and waited for half of them on average"
    )


def test_more_outstanding_than_allowed_are_not_sent_and_reported(
    shell: Shell, others: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MAX_OUTSTANDING", 5)
    found = bench(shell, "request", "slow", "--rate", "100", "--seconds", "0.2")
    assert (found["due"], found["sent"]) == (20, 5)
    assert found["not_sent"] == {"too many outstanding": 15}
    assert found["behind"] is False


def test_a_generator_that_falls_behind_says_so(
    shell: Shell, servers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "GRACE_NS", 0)
    rate = ("--rate", "400000", "--seconds", "0.02")
    found = bench(shell, "request", *rate)
    assert found["due"] == 8000
    assert found["behind"] is True
    assert found["not_sent"]["fell behind"] > 0
    assert b"FELL BEHIND" in shell("bench", "request", *rate)


def test_errors_are_counted_by_name(shell: Shell, others: None) -> None:
    found = bench(shell, "request", "flaky", "--rate", "200", "--seconds", "0.2")
    assert (found["answered"], found["errors"]) == (20, {"RemoteError": 20})


def test_requests_unanswered_at_the_end_are_timeouts(
    shell: Shell, others: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, first = iris.Client.request, True

    async def impatient(*arguments: Any, timeout: float, **more: Any) -> Any:
        nonlocal first
        timeout, first = (5.0 if first else timeout), False
        return await request(*arguments, timeout=timeout, **more)

    monkeypatch.setattr(iris.Client, "request", impatient)
    rate = ("--rate", "50", "--seconds", "0.2", "--timeout", "0.1")
    found = bench(shell, "request", "mute", *rate, code=5)
    assert (found["answered"], found["errors"]) == (0, {"RequestTimeout": 10})
    assert found["corrected"]["latency_us"] == {}


# -- publish and tunnel ----------------------------------------------------------------------------------------


def test_publications_are_all_delivered_to_its_own_subscriber(shell: Shell, relay: Path) -> None:
    found = bench(shell, "publish", "--rate", "1000", "--seconds", "0.3", "--size", "64")
    assert (found["due"], found["answered"], found["lost"], found["errors"]) == (300, 300, {}, {})
    said = shell("bench", "publish", "--rate", "100", "--seconds", "0.2", "--size", "32").decode()
    assert "sent 20, delivered 20\n" in said


def test_publications_that_do_not_come_are_counted_as_lost(
    shell: Shell, relay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = iris.Client.subscribe

    def leaky(client: iris.Client, pattern: str, handler: Any, *, on_loss: Any) -> Any:
        count = -2  # the first is not counted

        def take(message: iris.Message) -> None:
            nonlocal count
            count += 1
            if count % 10 == 3:
                on_loss(iris.Loss("publish", pattern, b"", 1, "slow subscriber"))
            elif count % 10 != 7:
                handler(message)

        return subscribe(client, pattern, take, on_loss=on_loss)

    monkeypatch.setattr(iris.Client, "subscribe", leaky)
    rate = ("--rate", "200", "--seconds", "0.2", "--timeout", "0.3")
    found = bench(shell, "publish", *rate)
    assert (found["sent"], found["answered"]) == (40, 32)
    assert found["lost"] == {"slow subscriber": 4, "unaccounted for": 4}


def test_messages_of_a_tunnel_are_all_acknowledged(shell: Shell, servers: dict[str, str]) -> None:
    found = bench(shell, "tunnel", "--rate", "100", "--seconds", "0.3", "--size", "65536")
    assert (found["due"], found["answered"], found["errors"]) == (30, 30, {})
    said = shell("bench", "tunnel", "--rate", "20", "--seconds", "0.2", "--size", "8").decode()
    assert "acknowledged 4\n" in said
    assert "MB/s" in said


def test_a_member_that_acknowledges_nothing_is_not_a_bench_member(
    shell: Shell, others: None
) -> None:
    assert b"is it `iris bench serve`?" in shell(
        "bench", "tunnel", "flaky", "--timeout", "0.2", code=5
    )


def test_a_tunnel_that_breaks_ends_the_load_and_is_reported(shell: Shell, others: None) -> None:
    found = bench(shell, "tunnel", "fragile", "--rate", "50", "--seconds", "0.4", "--size", "64")
    assert 1 <= found["answered"] <= 5
    assert found["errors"].keys() <= {"TunnelBroken"}
    assert found["not_sent"].keys() == {"tunnel ended"}
    assert found["behind"] is False


# -- workers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["request", "publish", "tunnel"])
def test_workers_share_the_rate_and_their_results_are_one(
    shell: Shell, servers: dict[str, str], verb: str
) -> None:
    found = bench(
        shell, verb, "--rate", "200", "--seconds", "0.3", "--size", "128", "--workers", "all"
    )
    assert {part["worker"] for part in found["workers"]} == set(servers.values())
    assert [part["due"] for part in found["workers"]] == [30, 30]
    for name in ("due", "sent", "answered"):
        assert found[name] == sum(part[name] for part in found["workers"]) == 60
    assert found["corrected"]["samples"] == 60


def test_workers_are_chosen_by_number_label_id_or_host(
    shell: Shell, servers: dict[str, str]
) -> None:
    def chosen(wanted: str) -> list[str]:
        found = bench(shell, "request", "--rate", "20", "--seconds", "0.1", "--workers", wanted)
        return [part["label"] for part in found["workers"]]

    assert chosen("1") == ["a"]
    assert chosen("b") == ["b"]
    assert chosen(f"{servers['b']}, a") == ["a", "b"]
    assert chosen(socket.gethostname()) == ["a", "b"]
    divided = bench(
        shell, "request", "--inflight", "3", "--seconds", "0.1", "--workers", "all"
    )  # one and two
    assert len(divided["workers"]) == 2


def test_a_line_for_each_worker_is_printed(shell: Shell, servers: dict[str, str]) -> None:
    said = shell("bench", "request", "--rate", "40", "--seconds", "0.1", "--workers", "2").decode()
    for label, worker in servers.items():
        assert re.search(rf"worker {worker} \S+ {label}: sent 2 at [\d.]+/s, answered 2\n", said)


def test_a_worker_that_is_not_there_is_an_error_that_lists_those_that_are(
    shell: Shell, servers: dict[str, str]
) -> None:
    said = shell("bench", "request", "--workers", "a,elsewhere", code=3).decode()
    assert "no worker is called 'elsewhere'" in said
    assert all(f"({label}) {worker}" in said for label, worker in servers.items())
    assert b"3 workers are wanted and 2 are running" in shell(
        "bench", "request", "--workers", "3", code=3
    )
    assert b"fewer than 2 workers" in shell(
        "bench", "request", "--inflight", "1", "--workers", "all", code=2
    )


def test_a_busy_worker_refuses_and_is_free_again_when_its_coordinator_stops(
    shell: Shell, serving: list[Serving]
) -> None:
    request = ("request", "--rate", "20", "--workers", "a", "--seconds")
    first = shell.start("bench", *request, "30")
    serving[0].says("started: request bench, 20/s of 256 bytes for 30 s")
    said = shell("bench", *request, "0.1", code=4)
    assert b"busy with request bench, 20/s of 256 bytes for 30 s" in said
    first.send_signal(signal.SIGINT)
    end(first, 130)
    serving[0].says("failed: request bench, 20/s of 256 bytes for 30 s: it was stopped")
    assert bench(shell, *request, "0.1")["answered"] == 2


def test_a_worker_that_dies_in_the_middle_is_missing_and_the_others_count(
    shell: Shell, serving: list[Serving]
) -> None:
    dies = Serving(shell, "dies")
    dies.ready()
    running = shell.start(
        "bench", "publish", "--rate", "18", "--seconds", "3", "--size", "64", "--workers", "all", "--json",
    )  # fmt: skip
    dies.says("started: publish")
    dies.process.kill()
    out, err = end(running, 6)
    found = json.loads(out)
    check(found)
    assert found["answered"] == found["due"] == 36
    problems = {part["label"]: part.get("problem") for part in found["workers"]}
    assert problems == {"a": None, "b": None, "dies": "lost: it did not answer 3 polls"}
    assert f"worker {dies.worker} of ".encode() in err
    end(dies.process, -signal.SIGKILL)


def test_serve_says_who_it_is_in_json_and_ends_well(shell: Shell, relay: Path) -> None:
    process = shell.start("bench", "serve", "alone", "--label", "x", "--json")
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said == {
        "cluster": "alone", "worker": said["worker"], "host": socket.gethostname(), "label": "x",
    }  # fmt: skip
    process.send_signal(signal.SIGINT)
    assert end(process) == (b"", b"")


async def test_a_worker_checks_what_it_is_told(relay: Path, servers: dict[str, str]) -> None:
    good = {
        "verb": "request", "target": "bench", "size": 1, "seconds": 1.0, "timeout": 1.0, "rate": 1.0,
    }  # fmt: skip
    bad: list[dict[str, Any]] = [
        {"rate": 1e9}, {"rate": float("nan")}, {"rate": None}, {"seconds": 3601.0}, {"seconds": float("inf")},
        {"connections": 1001}, {"size": 1 << 30}, {"size": -1}, {"verb": "push"}, {"inflight": 5}, {"timeout": 3600.0},
    ]  # fmt: skip
    async with iris.connect(relay, keyring=dev_keys(relay)) as client:
        for change in bad:
            shares = {worker: {**good, **change} for worker in servers.values()}
            command = {"type": "Prepare", "job": "x", "shares": shares}
            survey = client.survey("bench.workers", command, timeout=5.0)
            assert [answer async for answer in survey] == [], change
            assert len(survey.failed) == 2, change
            assert all("does not decode" in text for text in survey.failed.values())
        answers = [
            a
            async for a in client.survey(
                "bench.workers", workers.Who(), timeout=5.0, type=workers.Answer
            )
        ]
    assert {(a.worker, a.label, a.busy) for a in answers} == {
        (worker, label, "") for label, worker in servers.items()
    }


async def test_a_worker_that_nobody_polls_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LEASE_S", 0.3)
    said: list[str] = []
    async with iris.connect(embedded=True) as client:

        class Kept:
            async def __aenter__(self) -> Any:
                async def run() -> Any:
                    while True:
                        await client.flush()

                return run

            async def __aexit__(self, *error: object) -> None:
                pass

        monkeypatch.setattr(workers, "prepared", lambda *_: Kept())
        worker = workers.Worker(None, "", said.append)
        asked = jobs.Load("request", "x", 1, 60.0, 1.0, rate=1.0)
        ready = await worker.answer(workers.Prepare("j", {worker.id: asked}))
        assert ready == workers.Ready(worker.id)
        assert await worker.answer(workers.Start("j")) == workers.Running(worker.id)
        assert await worker.answer(workers.Poll("other")) == workers.Aside(worker.id)
        while len(said) < 2:
            await client.flush()
        refused = await worker.answer(workers.Poll("j"))
        assert isinstance(refused, workers.Refused)
        assert "the coordinator did not poll" in refused.reason
        here = await worker.answer(workers.Who())
        assert isinstance(here, workers.Here)
        assert here.busy == ""
        await worker.close()


# -- times and histograms
# ------------------------------------------------------------------------------------------------


async def test_no_message_leaves_before_it_is_due() -> None:
    begin_ns = time.monotonic_ns() + 1_000_000
    seen: list[int] = []
    async for numbers in timer.batches(333.0, 40, begin_ns):
        assert time.monotonic_ns() >= begin_ns + timer.due_ns(numbers[-1], 333.0)
        seen += numbers
    assert seen == list(range(40))


def test_samples_are_what_the_histogram_would_have_recorded() -> None:
    rng = random.Random(7)
    direct, ours = samples.new(), samples.Samples()
    for _ in range(2000):
        value = int(10 ** rng.uniform(0, 11))
        direct.record_value(value)
        ours.add(value)
    merged = samples.merge([ours.encode()])
    assert merged.get_total_count() == 2000
    for percentile in (0, 10, 50, 90, 99, 99.9, 100):
        found = merged.get_value_at_percentile(percentile)
        assert found == direct.get_value_at_percentile(percentile)
    assert samples.merge([ours.encode(), ours.encode()]).get_total_count() == 4000


def test_what_is_not_a_histogram_of_ours_is_refused() -> None:
    other = HdrHistogram(1, 1 << 40, 4)
    other.record_value(5)
    for text in ("", "HISTF", "garbage!", "é", other.encode().decode()):
        with pytest.raises(ValueError, match="a latency histogram is invalid"):
            samples.merge([text])


@pytest.mark.parametrize(
    ("count", "last"),
    [(19, None), (20, "p50"), (99, "p50"), (100, "p90"), (999, "p90"), (1000, "p99"), (10_000_000, "p99.9999")],
)  # fmt: skip
def test_a_percentile_is_reported_only_if_ten_samples_lie_beyond_it(
    count: int, last: str | None
) -> None:
    histogram = samples.new()
    histogram.record_value(5_000, count)
    encoded = histogram.encode().decode()
    asked = jobs.Load("request", "x", 1, 1.0, 1.0, rate=float(count))
    came = jobs.Outcome(count, count, count, {}, {}, {}, 1.0, 1.0, 0.0, encoded, encoded)
    latencies = report.Report(asked, [came], []).document()["corrected"]["latency_us"]
    assert list(latencies)[-1] == "max"
    assert ([None, *latencies][-2]) == last
    assert msgspec.json.encode(latencies)


def test_the_text_names_what_failed_and_gives_no_percentile_of_few_samples(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    ours = samples.Samples()
    for value in (1_000, 2_000, 3_000, 4_000):
        ours.add(value)
    asked = jobs.Load("publish", "x", 64, 1.0, 1.0, rate=10.0)
    came = jobs.Outcome(
        10, 7, 4, {"OutOfOrder": 1}, {"fell behind": 3}, {"slow subscriber": 2, "unaccounted for": 1}, 1.0, 1.0, 12.5,
        ours.encode(), ours.encode(),
    )  # fmt: skip
    lost = report.Part("0a", "host\x1b", "", None, "missing: it went away")
    report.Report(asked, [came], [report.Part("0b", "host", "l", came), lost]).show()
    said = capfdbinary.readouterr().out.decode()
    assert "errors: OutOfOrder 1\n" in said
    assert "not sent: fell behind 3\n" in said
    assert "lost: slow subscriber 2, unaccounted for 1\n" in said
    assert "FELL BEHIND" in said
    assert "12.5 ms after it was due" in said
    assert "worker 0b host l: sent 7 at 7.0/s, delivered 4, 7 failed\n" in said
    assert "worker 0a host?: NO RESULT: missing: it went away\n" in said
    assert "4 samples" in said
    assert not re.search(r"\bp\d", said)
    assert re.search(r"max +0\.004 ms", said)
