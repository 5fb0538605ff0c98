"""Pages that are made of the code itself: the command, the Python API, metrics, the glossary and the examples."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import staging
import typer
from prometheus_client import CollectorRegistry

import iris
from iris.cli import SUMMARIES, VERBS, app, load
from iris.metrics import client as program_metrics
from iris.metrics import handler_times
from iris.spark import lag_metrics
from relay.metrics import bridges as bridge_metrics
from relay.metrics import figures as relay_metrics

NAMES: Final = {
    "client": ("Client", "Connecting and calling", (
        "connect", "Client", "ClientConfig", "Members", "Outcome", "Survey", "Tunnel", "EndOfTunnel", "Subscription", "Scope",
    )),
    "service": ("Service", "Serving a cluster", (
        "Service", "Limits", "Request", "Message", "Reply", "Deferred", "Refusal", "Call", "CallNext", "Middleware",
    )),
    "streams": ("Streams", "Messages that are kept on disk; `client.streams` has the calls", (
        "StreamMessage", "StreamRecord", "StreamPage", "StreamGap", "StreamInfo", "RedriveInfo", "Staging", "StagedAttempt", "StagedPart",
        "CommitInfo",
    )),
    "watching": ("Losses and counts", "What was lost, and what a client, a service or a topic is doing", (
        "Loss", "Audience", "SlowReceiver", "Stats", "ServiceStats", "HandlerStats", "SubscriptionStats", "Description", "HandlerInfo",
        "Ping", "PerMember",
    )),
    "errors": ("Errors", "What can go wrong, and whether it may have run", (
        "IrisError", "RequestError", "NoMembers", "Overloaded", "RequestTimeout", "ConnectionLost", "RemoteError", "RelayError",
        "DecodeError", "Closed", "RelayUnavailable", "MessageTooLarge", "EncodeError", "ConfigError", "InvalidName", "KeyringError",
        "TunnelBroken", "StreamError", "NoStream", "AmbiguousStream", "StreamExists", "StreamUnavailable", "StreamDamaged",
        "OffsetConflict", "StagedMissing", "NotActive", "TooManyWorkers",
    )),
    "keys": ("Keys", "Keyrings, for programs that do not read theirs from a file", ("Keyring", "ClusterKey")),
}  # fmt: skip
"""Page -> its title, what it is about, and the names of `iris` on it. A test checks that every name has a page."""
OPTIONS: Final = dict.fromkeys(
    (
        "iris.Client",
        "iris.Subscription",
        "iris.Tunnel",
        "iris.streams.Consumer",
        "iris.streams.Reader",
        "iris.streams.Streams",
    ),
    "    options:\n      inherited_members: true\n",
)
"""Name -> how mkdocstrings shows it, if not as the others: what these inherit is not described elsewhere."""
MODULES: Final = {
    "iris.streams": (
        "Streams",
        "Consumer",
        "Reader",
        "Mirror",
        "ConsumerInfo",
        "Offset",
        "PartitionMove",
        "StoreHealth",
        "partition_of",
    ),
    "iris.blocking": ("connect", "Client", "Items", "Tunnel", "Answers"),
    "iris.testing": ("LocalCluster",),
    "iris.metrics": ("serve", "ClientCollector", "handler_times"),
    "iris.tickets": ("Issuer", "parse_network"),
    "iris.tracing": ("Tracing", "instrument", "process", "uninstrument"),
    "pytest_iris": ("iris_cluster", "iris_stream_cluster", "iris_client", "iris_blocking"),
    "iris.spark": ("register", "IrisSource", "IrisLagListener", "with_dead_letter"),
}
"""Modules that have a page of their own -> what it describes, besides the text at the top of the module."""
METRICS: Final = {
    "A relay and its store": (relay_metrics.SPECS, "`iris relay --metrics HOST:PORT`", "monitoring.md"),
    "Your own programs": (program_metrics.SPECS, "`iris.metrics.ClientCollector`", "monitoring.md#metrics-of-your-own-programs"),
    "Bridges": (bridge_metrics.SPECS, "`iris bridge … --metrics HOST:PORT`", "monitoring.md#metrics-of-bridges"),
    "Spark": (lag_metrics.SPECS, "`iris.spark.IrisLagListener`", "spark.md#how-far-behind"),
}  # fmt: skip
"""Heading -> the metrics, what serves them, and the page that explains them."""


def write_reference(out: Path) -> None:
    """Write all pages that are made of the code to `out`."""
    pages = {
        **{f"api/{name}.md": text for name, text in api_pages()},
        **{f"command/{name}.md": text for name, text in command_pages()},
        "metrics.md": metrics_page(),
        "words.md": words_page(),
        "examples.md": examples_page(),
    }
    for name, text in pages.items():
        target = out / "reference" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page about Python, for mkdocstrings to fill in."""
    for name, (title, about, names) in NAMES.items():
        entries = described("iris", names)
        yield name, f"# {title}\n\n{about}.\n\n{entries}"
    for module, names in MODULES.items():
        about = inspect.getdoc(__import__(module, fromlist=["_"])) or ""
        entries = described(module, names)
        yield module, f"# {module}\n\n{about}\n\n{entries}"


def described(module: str, names: tuple[str, ...]) -> str:
    """Return the lines with which mkdocstrings describes these names of a module."""
    return "\n".join(
        f"::: {module}.{each}\n{OPTIONS.get(f'{module}.{each}', '')}" for each in names
    )


def command_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of a page for the command itself, and for each verb."""
    yield "iris", "# iris\n\n" + command_text(typer.main.get_command(app), "iris")
    for verb in VERBS:
        yield verb, "".join(section(load(verb), f"iris {verb}", 1))


def section(command: Any, path: str, level: int) -> Iterator[str]:
    """Yield the help of a command and of its sub-commands, each under a heading."""
    yield f"{'#' * level} {path}\n\n{command_text(command, path)}"
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        if not sub.hidden:
            yield from section(sub, f"{path} {name}", min(level + 1, 3))


def command_text(command: Any, path: str) -> str:
    """Return the help of one command: its text, how it is called, and what can be given."""
    context = command.context_class(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [help_text(command.help or ""), f"    {path} {usage}\n"]
    rows: dict[str, list[str]] = {"argument": [], "option": []}
    for given in command.get_params(context):
        record = None if getattr(given, "hidden", False) else given.get_help_record(context)
        if record and "--help" not in given.opts:
            name, about = record[0].replace("|", "\\|"), plain(record[1])
            rows[given.param_type_name].append(f"| `{name}` | {about} |\n")
    if verbs := command_rows(command, path):
        parts.append("| command | what it does |\n|---|---|\n" + "".join(verbs))
    for kind, found in rows.items():
        if found:
            parts.append(f"| {kind} | meaning |\n|---|---|\n" + "".join(found))
    return "\n".join(parts) + "\n"


def command_rows(command: Any, path: str) -> list[str]:
    """Return a row for each sub-command, with a link to it."""
    if path == "iris":
        return [f"| [{verb}]({verb}.md) | {plain(text)} |\n" for verb, text in SUMMARIES.items()]
    return [
        f"| [{name}](#{f'{path} {name}'.replace(' ', '-')}) | {plain(sub.get_short_help_str(200))} |\n"
        for name, sub in sorted(getattr(command, "commands", {}).items())
        if not sub.hidden
    ]


def plain(text: str) -> str:
    """Return a text of help as a table can show it: without the marks of rich, and with code kept as it is."""
    text = re.sub(r"\\(?=\[)", "", " ".join(text.split())).replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;")


def help_text(text: str) -> str:
    """Return the help of a command as Markdown: paragraphs, and as code what the terminal shows line by line."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept, mark, rest = paragraph.partition("\b\n")
        if mark:
            head, *lines = rest.split("\n")
            if head.endswith(":") and lines and all(line.startswith(" ") for line in lines):
                paragraphs += [head, *code_block(lines)]
            else:
                paragraphs += code_block([head, *lines])
        else:
            paragraphs.append(re.sub(r"\\(?=\[)", "", kept))
    return "\n\n".join(part for part in paragraphs if part) + "\n"


def code_block(lines: list[str]) -> list[str]:
    """Return lines as a block of code, in one text."""
    text = inspect.cleandoc("\n" + "\n".join(lines))
    return ["```text\n" + re.sub(r"\\(?=\[)", "", text) + "\n```"]


def metrics_page() -> str:
    """Return the page that lists every metric."""
    parts = [
        "# Metrics\n\nEvery metric of every process, from the code that serves it. Counters end in `_total`; the others are\n"
        "gauges. [Monitoring](../monitoring.md) says how to set them up, and what to alert on.\n"
    ]
    for heading, (specs, served, page) in METRICS.items():
        parts.append(f"## {heading}\n\nServed by {served}; see [the page about it](../{page}).\n")
        rows = [
            f"| `{spec.name}` | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.help} |"
            for spec in specs
        ]
        if specs is program_metrics.SPECS:
            rows += histograms()
        parts.append("| metric | labels | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def histograms() -> Iterator[str]:
    """Yield the rows of what `iris.metrics.handler_times` adds."""
    registry = CollectorRegistry()
    handler_times(registry)
    for metric in registry.collect():
        yield f"| `{metric.name}` | `cluster`, `method` | {metric.documentation} A histogram, of `iris.metrics.handler_times`. |"


def words_page() -> str:
    """Return the glossary of `iris` as tables."""
    _, _, text = (iris.__doc__ or "").partition("from top to bottom:\n")
    parts = ["# Words\n\nOne word for each idea, here and in the code.\n"]
    for line in text.splitlines():
        if found := re.fullmatch(r"    (\S.*?)\s{2,}(\S.*)", line):
            parts.append(f"| {found[1]} | {found[2]} |")
        elif line and not line.startswith(("(", " ")) and not line.endswith(")"):
            parts.append(f"\n## {line}\n\n| word | meaning |\n|---|---|")
    return "\n".join(parts) + "\n"


def examples_page() -> str:
    """Return the list of all example programs."""
    parts = ["# Examples\n\nOne idea each, and complete. A test runs every one of them.\n"]
    parts.append("| program | what it shows |\n|---|---|")
    for path in staging.files_in("examples"):
        if path.endswith(".py"):
            name = path.removeprefix("examples/")
            parts.append(f"| [{name}](../{staging.place(path)}) | {staging.summary(path)} |")
    return "\n".join(parts) + "\n"
