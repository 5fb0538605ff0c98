"""Copies of public objects, by pickle and by copy: errors and values arrive whole, and what uses a connection refuses.

The classes are found by reflection, so that a new one is checked, or fails here until it is listed.
"""

from __future__ import annotations

import asyncio
import collections.abc
import concurrent.futures
import copy
import dataclasses
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
import types
import typing
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import iris
import iris.blocking
import iris.spark
import iris.streams
import iris.streams.blocking
import iris.testing
from iris.handlers import Deferred
from iris.serving import ServiceBinding
from iris.streams.spreading import Offset, offset_in
from iris.wire.frames import MemberInfo

MODULES: Final = (
    "iris", "iris.blocking", "iris.metrics", "iris.spark", "iris.streams", "iris.streams.blocking", "iris.testing",
    "iris.tracing", "iris.watch", "pyspark_iris", "pytest_iris",
)  # fmt: skip
ONE_PROCESS: Final = frozenset((
    iris.Client, iris.Deferred, iris.Staging, iris.Subscription, iris.Survey, iris.Tunnel, ServiceBinding, iris.blocking.Client,
    iris.blocking.Items, iris.blocking.Tunnel, iris.streams.Consumer, iris.streams.Mirror, iris.streams.Reader, iris.streams.Streams,
    iris.streams.blocking.Batches, iris.streams.blocking.Consumer, iris.streams.blocking.Mirror, iris.streams.blocking.Reader, iris.streams.blocking.Staging,
    iris.streams.blocking.Streams, iris.StreamPage, iris.testing.LocalCluster, iris.watch.Watch,
))  # fmt: skip
"""Classes whose objects use a connection of their process."""
SECRET: Final = frozenset((iris.ClusterKey, iris.Keyring))
MADE_ANEW: Final = frozenset({
    "ClientCollector", "DefaultSource", "IrisLagListener", "IrisSource", "Runner", "Service", "Tracing",
})  # fmt: skip
"""Parts of a program, which each process makes for itself: whether they can be pickled depends on what they hold."""


def public_classes() -> set[type]:
    found = set()
    for name in MODULES:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [
            each
            for each, value in vars(module).items()
            if not each.startswith("_") and getattr(value, "__module__", "") == name
        ]
        found |= {value for each in names if isinstance(value := getattr(module, each), type)}
    return found | {MemberInfo}


def errors() -> set[type[BaseException]]:
    """Return all exceptions of the library that a program may get, also those that only its base class names."""
    for module in pkgutil.walk_packages(iris.__path__, "iris."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    def below(kind: type[BaseException]) -> Iterator[type[BaseException]]:
        yield kind
        for each in kind.__subclasses__():
            yield from below(each)

    public = {each for each in public_classes() if issubclass(each, BaseException)}
    ours = {each for each in below(iris.IrisError) if each.__module__.startswith("iris.")}
    return public | ours | set(below(iris.Refusal))


def sample(kind: Any, name: str = "text") -> Any:
    """Return a value of a type that differs from its defaults."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return sample(arguments[0], name)
    if origin is typing.Literal:
        return arguments[-1]
    if origin in (typing.Union, types.UnionType):
        return sample(next(each for each in arguments if each is not type(None)), name)
    if origin is tuple:
        return tuple(sample(each, name) for each in arguments if each is not ...)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return {sample(arguments[0], name): sample(arguments[1], name)}
    if isinstance(origin, type) and issubclass(origin, (collections.abc.Collection)):
        made = [sample(arguments[0], name)]
        return frozenset(made) if issubclass(origin, collections.abc.Set) else made
    plain: dict[Any, Any] = {
        str: f"{name} ä", bytes: b"\x00\xff", int: 7, float: 1.5, bool: True, Any: {"a": [1, None]}, object: "o", datetime: NOW,
        Path: Path("/x"), Offset: offset_in(5, 3),
    }  # fmt: skip
    if kind in plain:
        return plain[kind]
    if kind is iris.Refusal:
        return iris.Refusal("out_of_stock", "on Monday", left=0)
    if kind in MADE:
        return MADE[kind]()
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__"):
        every = typing.get_type_hints(kind)
        names = [each.name for each in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind.__struct_fields__  # fmt: skip
        return kind(**{each: sample(every[each], each) for each in names})
    if not inspect.isfunction(kind.__init__):
        return kind("what happened")
    every = typing.get_type_hints(kind.__init__)
    given: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(kind).parameters.values():
        made = sample(every[parameter.name], parameter.name)
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = made
        else:
            given.append(made)
    return kind(*given, **named)


NOW: Final = datetime(2026, 1, 2, tzinfo=UTC)
MADE: Final[dict[Any, Any]] = {
    iris.ClientConfig: lambda: iris.ClientConfig(relay="tls://host:7431", label="mine"),
    iris.Limits: lambda: iris.Limits(concurrency=3),
    iris.Outcome: lambda: iris.Outcome(3, None, iris.NoMembers("shop", "nobody")),
    iris.Members: lambda: iris.Members("shop", [sample(MemberInfo)], {"1f2e": 1}, {"eu": 2}),
    iris.PerMember: lambda: iris.PerMember([sample(iris.Ping)], {"m": iris.NoMembers("a", "b")}, {"eu": 2}),
    iris.blocking.Answers: lambda: _answers(),
    iris.Loss: lambda: iris.Loss("push", "shop", b"s", 1, "no members", sample(iris.NoMembers)),
    iris.Request: lambda: iris.Request(b"p", "shop", {"h": "v"}, True, b"s", deadline=1.5, method="place", kind="request"),
    Offset: lambda: offset_in(5, 3),
}  # fmt: skip
"""Objects that are not made of samples of their parameters alone."""


def _answers() -> iris.blocking.Answers[int]:
    answers = iris.blocking.Answers([1, 2])
    answers.answered, answers.missing = ["a"], ["b"]
    answers.errors = {"m": sample(iris.RemoteError)}
    return answers


def parts(value: Any) -> Any:
    """Return all that an object consists of, in a form that can be compared."""
    if isinstance(value, BaseException):
        return type(value), str(value), parts(value.args), parts(vars(value))
    if isinstance(value, collections.abc.Mapping):
        return {key: parts(each) for key, each in value.items()}
    if value is None or isinstance(value, (str, bytes, int, float, datetime, Path, frozenset)):
        return type(value), value
    own = getattr(value, "__dict__", {})
    names = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
    names += getattr(value, "__struct_fields__", ())
    fields = {name: parts(getattr(value, name)) for name in names if hasattr(value, name)}
    listed = [parts(each) for each in value] if isinstance(value, collections.abc.Iterable) else []
    return type(value), parts(own), fields, listed


def copies(value: Any) -> Iterator[Any]:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(value, protocol))
    yield copy.copy(value)
    yield copy.deepcopy(value)


ERRORS: Final = sorted(errors(), key=lambda kind: (kind.__module__, kind.__qualname__))
VALUES: Final = sorted(
    (
        kind
        for kind in public_classes() - ONE_PROCESS - SECRET
        if not issubclass(kind, BaseException) and kind.__name__ not in MADE_ANEW
    ),
    key=lambda kind: (kind.__module__, kind.__qualname__),
)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_a_copy_of_an_error_says_what_the_error_says(kind: type[BaseException]) -> None:
    error = sample(kind)
    if hasattr(error, "may_have_run"):
        error.may_have_run = not error.may_have_run
    error.add_note("a note")
    error.__cause__ = ValueError(lambda: "cannot be pickled")
    for made in copies(error):
        assert parts(made) == parts(error)
        assert made is not error


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_a_copy_of_a_value_has_all_of_it(kind: type) -> None:
    value = sample(kind)
    for made in copies(value):
        assert parts(made) == parts(value)


def test_a_snapshot_of_a_clients_counters_can_be_sent_and_taken_apart() -> None:
    async def taken() -> iris.Stats:
        async with iris.testing.LocalCluster() as cluster, cluster.client() as client:
            return client.stats()

    stats = asyncio.run(taken())
    for made in copies(stats):
        assert made == stats
    assert dataclasses.asdict(stats)["dropped"] == {}


def test_a_request_is_copied_without_the_way_to_defer_its_reply() -> None:
    request = iris.Request(b"p", "shop", context=lambda: None, kind="request")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        made = pickle.loads(pickle.dumps(request, protocol))
        assert parts(made) == parts(msgspec.structs.replace(request, context=None))
    with pytest.raises(iris.ConfigError, match="a copy of a message"):
        made.defer()


@pytest.mark.parametrize("kind", sorted(ONE_PROCESS, key=lambda kind: f"{kind.__module__}.{kind.__name__}"))  # fmt: skip
def test_what_uses_a_connection_of_its_process_refuses_to_be_copied(kind: type) -> None:
    held = kind.__new__(kind)
    if kind is Deferred:
        held.done = True
    for make in (*(lambda held, p=p: pickle.dumps(held, p) for p in range(pickle.HIGHEST_PROTOCOL + 1)), copy.copy, copy.deepcopy):  # fmt: skip
        with pytest.raises(
            TypeError, match=rf"^cannot pickle or copy this {kind.__name__}: it .*; "
        ):
            make(held)


def test_a_key_says_why_it_refuses_to_be_copied() -> None:
    key = iris.ClusterKey(b"k" * 32)
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied; pass the path"):
            make(key)
    for make in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied; pass the path"):
            make(iris.Keyring.single(key))


def _fails(number: int) -> None:
    error = iris.RemoteError("shop", "no", may_have_run=False, code="closed", details={"n": number})
    error.add_note("from the worker")
    raise error from ValueError(number)


def test_an_error_of_a_worker_process_reaches_the_program_whole() -> None:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        future = pool.submit(_fails, 7)
        with pytest.raises(iris.RemoteError) as caught:
            future.result(timeout=60)
    error = caught.value
    assert (error.cluster, error.detail, error.may_have_run) == ("shop", "no", False)
    assert (error.code, error.details, error.__notes__) == ("closed", {"n": 7}, ["from the worker"])
