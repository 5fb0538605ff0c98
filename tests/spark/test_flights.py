"""The demo of Spark: its results agree with the file, it reports that, and it leaves nothing behind."""

from __future__ import annotations

import pytest
from support.commands import processes_under

from spark.kit import Example

pytestmark = pytest.mark.timeout(240)


def test_a_query_of_departures_agrees_with_the_file(flights: Example) -> None:
    code = flights.process.wait(220)
    said = flights.said.read_text()
    assert code == 0, said + flights.complaints.read_text()[-3000:]
    lines = [line for line in said.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(lines) == 3
    assert all(line.startswith("ok  ") for line in lines)
    assert "2,500 departures" in lines[0]
    assert "2,500 departures" in lines[1]
    assert (flights.out / "delays.parquet").is_dir()
    assert list(flights.inside.iterdir()) == []
    assert processes_under(flights.inside) == []
