"""Every event that Iris logs has a sentence for people, and every sentence has an event that gives it its fields.

The events are collected from the source: calls of loggers and of `Quiet.warning`, with their names and fields followed
through variables, parameters and the functions that make them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import iris
import relay
from iris.log_texts import SENTENCES as LIBRARY
from relay.log_texts import SENTENCES

ROOTS = (Path(iris.__file__).parent, Path(relay.__file__).parent)
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
ELSEWHERE = {"self._what": ("subscription", "service"), "structs.asdict(found)": "QueryLag"}
"""What cannot be followed: a key -> its values, and a call -> the class whose fields it gives."""
COMMON_NAME = 3
"""A method name that more functions have is looked up in the imported modules only."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop)
"""More than half of all nodes, with nothing in them that is looked for."""


@dataclass
class Module:
    path: Path
    tree: ast.Module
    imports: set[str] = field(default_factory=set)


@dataclass
class Site:
    """One place that logs: the events, the fields that it always gives, and those that it may give."""

    where: str
    events: set[str]
    always: set[str]
    maybe: set[str]


class Source:
    """The source of both packages, with its functions and calls by name."""

    def __init__(self) -> None:
        self.functions: dict[str, list[tuple[Module, Function]]] = defaultdict(list)
        self.calls: dict[str, list[tuple[Module, Function | None, ast.Call]]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.kinds: set[str] = set()
        self.sites: list[Site] = []
        modules = [
            Module(path, ast.parse(path.read_text("utf-8")))
            for root in ROOTS
            for path in sorted(root.rglob("*.py"))
        ]
        for module in modules:
            self._walk(module, module.tree, None)
        for module in modules:
            if module.path.name != "logs.py":
                self.sites += self._sites(module)

    def _walk(self, module: Module, node: ast.AST, within: Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, LEAVES):
                continue
            if isinstance(child, ast.ImportFrom):
                module.imports.add((child.module or "").rpartition(".")[2])
            elif isinstance(child, ast.ClassDef):
                self.classes[child.name] = child
                self.kinds |= {
                    str(each.value.value)
                    for each in child.body
                    if isinstance(each, ast.AnnAssign)
                    and ast.unparse(each.target) == "kind"
                    and isinstance(each.value, ast.Constant)
                    and each.value.value  # a message of no kind begins no event
                }
            elif isinstance(child, ast.Call):
                func = child.func
                name = func.attr if isinstance(func, ast.Attribute) else ast.unparse(func)
                self.calls[name].append((module, within, child))
            if isinstance(child, Function):
                self.functions[child.name].append((module, child))
                self._walk(module, child, child)
            else:
                self._walk(module, child, within)

    def _sites(self, module: Module) -> Iterator[Site]:
        for name in LEVELS:
            for found, within, call in self.calls[name]:
                if found is not module or not isinstance(call.func, ast.Attribute):
                    continue
                receiver = ast.unparse(call.func.value)
                where = f"{module.path}:{call.lineno}"
                if receiver == "log":
                    event = call.args[1 if name == "log" else 0]
                    extra = [each.value for each in call.keywords if each.arg == "extra"]
                    fields = (
                        extra[0].values[0] if extra and isinstance(extra[0], ast.Dict) else None
                    )
                elif receiver.endswith(("quiet", "repeats")):
                    event, fields = call.args[1], call.args[4]
                else:
                    continue
                events = self.texts(event, within)
                assert events, f"{where}: cannot tell which event {ast.unparse(event)} is"
                always, maybe = self.fields(fields, module, within) if fields else (set(), set())
                if receiver.endswith("repeats"):
                    maybe |= {"held_back"}
                yield Site(where, events, always, maybe)

    def texts(self, node: ast.expr, within: Function | None) -> set[str]:
        """Return the texts that an expression can be."""
        match node:
            case ast.Constant(value=str(text)):
                return {text.replace("%s", kind) for kind in self.kinds} if "%s" in text else {text}
            case ast.JoinedStr():
                shape = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "%s"
                    for part in node.values
                )
                return {shape.replace("%s", kind) for kind in self.kinds}
            case ast.IfExp():
                return self.texts(node.body, within) | self.texts(node.orelse, within)
            case ast.Name() if within is not None:
                found: set[str] = set()
                for value in _assigned(node.id, within):
                    found |= self.texts(value, within)
                names = [each.arg for each in within.args.args if each.arg != "self"]
                if node.id in names:
                    for _, caller, call in self.calls[within.name]:
                        found |= self.texts(call.args[names.index(node.id)], caller)
                return found
        return set()

    def fields(
        self, node: ast.expr, module: Module, within: Function | None
    ) -> tuple[set[str], set[str]]:
        """Return the keys that a dict always has, and those that it may have."""
        always: set[str] = set()
        maybe: set[str] = set()

        def also(more: tuple[set[str], set[str]]) -> None:
            always.update(more[0])
            maybe.update(more[1])

        shown = ast.unparse(node)
        match node:
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is None:
                        also(self.fields(value, module, within))
                    elif isinstance(key, ast.Constant):
                        always.add(str(key.value))
                    else:
                        always.update(ELSEWHERE[ast.unparse(key)])
            case ast.BinOp(op=ast.BitOr()):
                also(self.fields(node.left, module, within))
                also(self.fields(node.right, module, within))
            case ast.Name() if within is not None:
                for each in ast.walk(within):
                    if (
                        isinstance(each, ast.Subscript)
                        and ast.unparse(each.value) == node.id
                        and isinstance(each.slice, ast.Constant)
                    ):
                        maybe.add(str(each.slice.value))
                for value in _assigned(node.id, within):
                    also(self.fields(value, module, within))
            case ast.Call() if shown in ELSEWHERE:
                made = self.classes[str(ELSEWHERE[shown])]
                always.update(
                    ast.unparse(each.target)
                    for each in made.body
                    if isinstance(each, ast.AnnAssign)
                )
            case ast.Call(func=ast.Attribute(attr=name)):
                candidates = [
                    (other, function)
                    for other, function in self.functions[name]
                    if [each.arg for each in function.args.args][:1] == ["self"]
                ]
                if len(candidates) > COMMON_NAME:
                    near = module.imports | {module.path.stem}
                    candidates = [c for c in candidates if c[0].path.stem in near]
                for other, function in candidates:
                    for each in ast.walk(function):
                        if isinstance(each, ast.Return) and each.value is not None and function is not within:  # fmt: skip
                            also(self.fields(each.value, other, function))
        return always, maybe | always


def _assigned(name: str, within: Function) -> Iterator[ast.expr]:
    for each in ast.walk(within):
        targets = (
            each.targets
            if isinstance(each, ast.Assign)
            else [each.target]
            if isinstance(each, ast.AnnAssign) and each.value
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(each, ast.Assign | ast.AnnAssign)
            assert each.value is not None
            yield each.value


@functools.cache
def sites() -> list[Site]:
    return Source().sites


def sentences(event: str) -> tuple[str, ...]:
    texts = SENTENCES.get(event, ())
    return (texts,) if isinstance(texts, str) else texts


def names(text: str) -> set[str]:
    return set(re.findall(r"{(\w+)}", text))


def test_the_collector_finds_calls_of_each_kind() -> None:
    found = {event for site in sites() for event in site.events}
    assert len(sites()) > 100
    for event in (
        "relay.started",  # a logger
        "relay.settings_read",  # Logger.log
        "relay.missed",  # named by a parameter
        "sessions.full",  # Quiet.warning
        "link.slow",  # a variable, hub.quiet
        "gateways.no_descriptors",  # an f-string of a kind
        "gateway.up",  # a %s of a kind
        "bridge.client_refused",  # through a function of the bridge
        "client.loss",  # the library
        "spark.progress",
    ):
        assert event in found
    (refused,) = (site for site in sites() if "link.refused" in site.events)
    assert refused.always == {"address", "reason"}
    assert refused.maybe == {"address", "reason", "detail"}


def test_every_event_has_a_sentence_that_each_place_can_fill() -> None:
    for site in sites():
        for event in site.events:
            assert sentences(event), f"{site.where}: {event} has no sentence in relay/log_texts.py"
            assert any(names(text) <= site.always for text in sentences(event)), (
                f"{site.where}: no sentence of {event} can be filled with {sorted(site.always)}"
            )


def test_every_event_of_the_library_has_its_sentence_in_the_library() -> None:
    for site in sites():
        if site.where.startswith(f"{ROOTS[0]}/"):
            assert site.events <= LIBRARY.keys(), f"{site.where}: add it to iris/log_texts.py"


def test_every_sentence_has_an_event_and_names_only_fields_of_it() -> None:
    given: dict[str, list[set[str]]] = defaultdict(list)
    for site in sites():
        for event in site.events:
            given[event].append(site.maybe)
    for event in SENTENCES:
        assert event in given, f"{event} is not logged anywhere"
        for text in sentences(event):
            assert any(names(text) <= fields for fields in given[event]), (
                f"{event}: no place gives the fields of {text!r}"
            )


def test_sentences_are_sentences() -> None:
    for event in SENTENCES:
        for text in sentences(event):
            assert text[0].isupper() or text[0] == "{", text
            assert text.endswith((".", "…")), text
            assert not re.search(r"{\W|{}", text), f"{text}: a field without a name"
