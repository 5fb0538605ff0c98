"""What a page of metrics is made of: the list of its metrics, their values, and labels of a limited number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from iris.wire.texts import encodable

OTHER: Final = "other"
"""Label value for all names over the limit of a label."""
MAX_NAME: Final = 128
"""Longest label value, in characters; longer ones are cut."""
KEEP_S: Final = 3600.0
"""How long a name keeps its place after it was last used."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric: a counter if its name ends in "_total", else a gauge."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


class Names:
    """The values of one label that other programs choose: at most `limit` at a time, and "other" for the rest.

    A name that is not used for `KEEP_S` gives up its place. So the number of series grows by at most `limit` an hour,
    whatever names programs give themselves.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._used_s: dict[str, float] = {}

    def __call__(self, name: str) -> str:
        """Return `name`, or "other" if there is no place for it."""
        name = encodable(name[:MAX_NAME])
        now_s = self._clock()
        used_s = self._used_s
        if name not in used_s and len(used_s) >= self._limit:
            oldest = next(iter(used_s))
            if now_s - used_s[oldest] < KEEP_S:
                return OTHER
            del used_s[oldest]
        used_s.pop(name, None)
        used_s[name] = now_s  # the last: the first is the one that was not used for longest
        return name


class Page:
    """The values of the metrics in a list of specs. A metric without values is shown, too, with its help."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._specs}

    def set(self, name: str, value: object, *labels: str) -> None:
        """Set one value, unless it is None, which stands for a figure that is not known."""
        if value is not None:
            self._values[name][labels] = float(value)  # type: ignore[arg-type]  # numbers of a JSON document

    def add(self, name: str, value: object, *labels: str) -> None:
        """Add to one value: several things may have the same label."""
        if value is not None:
            values = self._values[name]
            values[labels] = values.get(labels, 0.0) + float(value)  # type: ignore[arg-type]  # as above

    def raise_to(self, name: str, value: object, *labels: str) -> None:
        """Set one value if it is larger than the one before: the worst of several things with the same label."""
        if value is not None:
            values = self._values[name]
            values[labels] = max(values.get(labels, 0.0), float(value))  # type: ignore[arg-type]  # as above

    def add_all(
        self, name: str, values: Mapping[str, Any], label: Callable[[str], str] = str
    ) -> None:
        """Add a value for each label in a table."""
        for key, value in values.items():
            self.add(name, value, label(key))

    def families(self) -> Iterator[Metric]:
        """Yield all metrics with their values, in the order of the list."""
        for spec in self._specs.values():
            family = (CounterMetricFamily if spec.name.endswith("_total") else GaugeMetricFamily)(
                spec.name, spec.help, labels=spec.labels
            )
            for labels, value in self._values[spec.name].items():
                family.add_metric(labels, value)
            yield family
