"""`iris.connect(wait=…)`: a program that is started before its relay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.relays import KEY, Daemon
from support.waiting import until

import iris
import iris.blocking
from iris import dialling


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every attempt to reach a relay."""
    made: list[None] = []
    reach = dialling.reach

    async def counted(*arguments: object) -> object:
        made.append(None)
        return await reach(*arguments)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr("iris.connection.reach", counted)
    return made


async def test_a_client_waits_for_a_relay_that_starts_later(
    tmp_path: Path, tries: list[None]
) -> None:
    daemon = Daemon(tmp_path, dev=True)
    keyring = iris.Keyring.single(KEY)
    client = iris.connect(daemon.socket, keyring=keyring, wait=60.0)
    opening = asyncio.create_task(client.open())
    await until(lambda: len(tries) >= 2)
    await asyncio.to_thread(daemon.start)
    try:
        await opening
        assert client.message_limit > 0
        await client.close()
    finally:
        daemon.stop()


async def test_without_wait_or_when_it_is_over_the_error_is_raised(
    tmp_path: Path, tries: list[None]
) -> None:
    keyring = iris.Keyring.single(KEY)
    with pytest.raises(iris.RelayUnavailable):
        await iris.connect(tmp_path / "none.sock", keyring=keyring).open()
    assert len(tries) == 1
    with pytest.raises(iris.RelayUnavailable):
        await iris.connect(tmp_path / "none.sock", keyring=keyring, wait=0.2).open()
    assert len(tries) > 2
    with pytest.raises(iris.RelayUnavailable):
        await asyncio.to_thread(
            iris.blocking.connect, tmp_path / "none.sock", keyring=keyring, wait=0.05
        )
    with pytest.raises(iris.ConfigError, match="wait"):
        iris.connect(tmp_path / "none.sock", keyring=keyring, wait=-1.0)


async def test_a_client_that_waits_can_be_cancelled(tmp_path: Path, tries: list[None]) -> None:
    client = iris.connect(tmp_path / "none.sock", keyring=iris.Keyring.single(KEY), wait=60.0)
    opening = asyncio.create_task(client.open())
    await until(lambda: len(tries) >= 2)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


async def test_keys_that_appear_with_a_relay_are_waited_for_and_a_keyring_that_is_missing_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[None] = []

    async def find() -> iris.Keyring:
        made.append(None)
        missing = dialling.NoKeyring("there is no keyring", Path("/nowhere"))
        if len(made) < 3:
            raise missing from iris.RelayUnavailable("no relay")
        raise missing

    loop = asyncio.get_running_loop()
    with pytest.raises(iris.KeyringError):
        await dialling.retried(find, loop.time() + 60.0)
    assert len(made) == 3


def test_a_keyring_that_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(
        iris.ConfigError, match=r"^keyring must be an iris\.Keyring, not a PosixPath; "
    ):
        iris.connect(keyring=Path("keyring.toml"))  # type: ignore[arg-type]  # what the test is about
