"""Fixtures: a JVM, relays with stores, and clients. One Spark session serves all tests of this folder, because a start
takes seconds.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.required import cannot

from iris.extras import install_line
from spark.kit import FLIGHTS, JVM, QUICK, Example, Relay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import iris.blocking

HERE = Path(__file__).parent
LOG_BYTES = 6000
TIMEOUT_S = 300
relays = pytest.StashKey[list[Relay]]()
_names = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            # py4j leaves the sockets of its gateway to the garbage collector.
            item.add_marker(
                pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning")
            )


@pytest.fixture(scope="session")
def java() -> str:
    """The home of a Java for Spark. Without it, or without pyspark, the test is skipped."""
    if importlib.util.find_spec("pyspark") is None:
        cannot(
            "SPARK",
            f"no tests of Spark: pyspark is not installed: {install_line('spark')}",
        )
    found = subprocess.run(
        [HERE / "java", "find"], capture_output=True, text=True, timeout=30, check=False
    )
    if found.returncode:
        cannot(
            "SPARK",
            "no tests of Spark: no Java 17 or newer: apt-get install openjdk-17-jre-headless",
        )
    return found.stdout.strip()


@pytest.fixture(scope="session", autouse=True)
def _spark_can_run(java: str) -> None:
    """Check that Spark can run, for all tests of this folder."""


@pytest.fixture(scope="session")
def spark_home(java: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A home of Spark without the zipped pyspark: each worker would find that first, and compile it again."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    home = tmp_path_factory.mktemp("home")
    for name in ("bin", "jars"):
        (home / name).symlink_to(Path(found.origin).parent / name)
    return str(home)


@pytest.fixture(scope="session")
def spark(
    java: str, spark_home: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """A session of two threads that knows the format "iris", with its files in a separate directory."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    import iris.spark

    directory = tmp_path_factory.mktemp("spark")
    # The JVM and the Python workers inherit it; asyncio's debug mode would slow each of them down.
    environ = {name: value for name, value in os.environ.items() if not _is_foreign(name)} | {
        "JAVA_HOME": java,
        "SPARK_HOME": spark_home,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "XDG_CONFIG_HOME": str(directory / "config"),
        "XDG_RUNTIME_DIR": str(directory),
    }
    jvm = f"-Djava.io.tmpdir={directory} -Dderby.system.home={directory} -Xss4m -Xms512m {JVM}"
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": jvm,
        "spark.jars.ivy": str(directory / "ivy"),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.streaming.pollingDelay": "20ms",
        # Tests read the progress reports of batches, which reports of idle triggers must not displace.
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
        **QUICK,
    }
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        builder = SparkSession.builder.master("local[2]").appName("iris-tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    finally:
        os.environ.clear()
        os.environ.update(before)
    session.sparkContext.setLogLevel("ERROR")
    iris.spark.register(session)
    yield session
    gateway = SparkContext._gateway
    session.stop()
    gateway.shutdown()
    # The JVM ends with its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(30)


def _is_foreign(name: str) -> bool:
    return name.startswith(
        ("IRIS_", "PYTHONASYNCIO", "PYTHONDONTWRITEBYTECODE", "SPARK_", "PYSPARK_")
    )


@pytest.fixture(scope="session", autouse=True)
def flights(
    java: str,
    spark_home: str,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Example | None]:
    """The example, started with the first test if any test needs it: it has its own JVM, and the tests before
    it do not wait for it.
    """
    if not any(item.path.stem == "test_flights" for item in request.session.items):
        yield None
        return
    directory = tmp_path_factory.mktemp("flights")
    inside, out = directory / "inside", directory / "out"
    inside.mkdir()
    said, complaints = directory / "said", directory / "complaints"
    settings = " ".join(f"--conf {name}={value}" for name, value in QUICK.items())
    environ = {name: value for name, value in os.environ.items() if not _is_foreign(name)} | {
        "JAVA_HOME": java,
        "JDK_JAVA_OPTIONS": JVM,
        "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell",
        "SPARK_HOME": spark_home,
        "TMPDIR": str(inside),
    }
    with said.open("wb") as stdout, complaints.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, FLIGHTS, "--rows", "2500", "--out", out],
            env=environ, cwd=inside, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        )  # fmt: skip
    try:
        yield Example(process, inside, out, said, complaints)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """A relay with a store, shared by tests that do not end them."""
    relay = Relay(tmp_path_factory.mktemp("stage"))
    try:
        relay.start()
        yield relay
    finally:
        relay.stop()


@pytest.fixture(scope="session")
def client(stage: Relay) -> iris.blocking.Client:
    """A client of the shared relay."""
    return stage.client()


@pytest.fixture
def make_relay(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], Relay]]:
    """Return a function that starts a relay with a store for this test, which may end them."""
    made = request.node.stash.setdefault(relays, [])

    def make() -> Relay:
        relay = Relay(tmp_path / f"r{len(made)}")
        made.append(relay)
        relay.start()
        return relay

    yield make
    for relay in made:
        relay.stop()


@pytest.fixture
def relay(make_relay: Callable[[], Relay]) -> Relay:
    """A relay with a store, for this test only."""
    return make_relay()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The path of a directory for a query's checkpoint, which does not exist yet."""
    return tmp_path / "checkpoint"


@pytest.fixture
def name() -> str:
    """A unique name for a stream, group, cluster or topic."""
    return f"t{next(_names)}"


@pytest.fixture(autouse=True)
def _no_query_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # type: ignore[no-untyped-def]  # pytest's own names, untyped
    report = yield
    if report.failed:
        for relay in item.stash.get(relays, []):
            for log in (relay.rig.directory / "relay.log", relay.rig.directory / "store.log"):
                if log.exists():
                    report.sections.append((str(log), log.read_text()[-LOG_BYTES:]))
    return report
