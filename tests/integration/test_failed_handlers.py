"""A handler that fails is named in the log with its traceback, whatever else fails at the same time."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import until

import iris
from iris.logs import event_of
from iris.testing import LocalCluster


@pytest.fixture
def plain() -> Iterator[io.StringIO]:
    """What a program sees that only called `logging.basicConfig()`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


def failures(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of each line about a failed handler."""
    return [r.__dict__["fields"] for r in caplog.records if event_of(r) == "client.handler_failed"]


async def test_every_handler_that_fails_is_in_the_log_with_its_name_cluster_and_traceback(
    plain: io.StringIO,
) -> None:
    service = iris.Service("thumbnails")

    @service.on_request
    async def shrink(payload: bytes) -> bytes:
        raise ValueError("bad photo")

    @service.on_survey
    def count(payload: bytes) -> int:
        raise KeyError("no such album")

    @service.on_push
    def forget(payload: bytes) -> None:
        raise OSError("disk")

    @service.on_broadcast
    def reload(payload: bytes) -> None:
        raise RuntimeError("not now")

    @service.on_tunnel
    async def upload(tunnel: iris.Tunnel) -> None:
        raise EOFError("half a photo")

    @service.on_publish("photos.*")
    async def index(payload: bytes) -> None:
        raise LookupError("unknown")

    def told(lost: iris.Loss) -> None:
        raise ArithmeticError("in on_loss")

    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        cluster.client() as caller,
        member.serve(service),
    ):
        with pytest.raises(iris.RemoteError):
            await caller.request("thumbnails", b"", timeout=5)
        assert [a async for a in caller.survey("thumbnails", b"", timeout=5)] == []
        await caller.push("thumbnails", b"")
        await caller.broadcast("thumbnails", b"")
        await caller.publish("photos.new", b"")
        with pytest.raises(iris.TunnelBroken):
            async with caller.tunnel("thumbnails", timeout=5) as tunnel:
                await tunnel.recv()
        await until(lambda: member.counters.get("failed handlers") == 6)
        caller.on_loss = told
        await caller.push("nobody", b"")
        await until(lambda: caller.counters.get("failed handlers") == 1)
    text = plain.getvalue()
    for handler, function, error in (
        ("handler of thumbnails", "shrink", "ValueError: bad photo"),
        ("handler of thumbnails", "count", "KeyError: 'no such album'"),
        ("handler of thumbnails", "forget", "OSError: disk"),
        ("broadcast handler of thumbnails", "reload", "RuntimeError: not now"),
        ("tunnel handler of thumbnails", "upload", "EOFError: half a photo"),
        ("subscription photos.*", "index", "LookupError: unknown"),
        ("on_loss", "told", "ArithmeticError: in on_loss"),
    ):
        assert f"{function} ({handler}) raised {error}." in text
        assert f"in {function}\n" in text, "its traceback is below"
        assert f"\n{error}\n" in text


async def test_a_failure_that_repeats_is_logged_once_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = iris.Service("calc")

    @service.on_request
    def divide(payload: bytes) -> float:
        return 1 / int(payload)

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for body in (b"0", b"0", b"0", b"x"):
            with pytest.raises(iris.RemoteError):
                await client.request("calc", body, timeout=5)
        assert [line["error"].partition(":")[0] for line in failures(caplog)] == [
            "ZeroDivisionError",
            "ValueError",
        ]
    (rest,) = [line for line in failures(caplog) if "held_back" in line]
    assert (rest["held_back"], rest["error"]) == (2, "ZeroDivisionError: division by zero")


async def test_a_reply_that_cannot_be_sent_is_in_the_log_of_the_member(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = iris.Service("odd")

    @service.on_request
    def odd(payload: bytes) -> object:
        return object()

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="cannot encode a value of type object"):
            await client.request("odd", b"", timeout=5)
        (line,) = failures(caplog)
        assert line["function"].endswith("odd")
        assert "cannot encode a value of type object" in line["error"]


async def test_losses_of_different_clusters_do_not_hide_each_other(plain: io.StringIO) -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        for name in ("a", "b", "b"):
            await client.push(name, b"")
        await client.flush()
        await until(lambda: len(client.losses) == 3)
    text = plain.getvalue()
    assert "client.loss: Messages were lost: 1 push to a: " in text
    assert "client.loss: Messages were lost: 1 push to b: " in text
    assert "and 1 more losses like it were not logged" in text
