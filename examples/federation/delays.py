"""A service that answers how late a carrier leaves the airports of one site.

`DELAYS_SITE=lga-ewr iris run delays:delays` answers for LaGuardia and Newark alone.
"""

import os
from typing import Any

import iris
from iris.cli.demo.data import Tally, find_csv, rows, topic

SITE = os.environ["DELAYS_SITE"]
ORIGINS = SITE.upper().split("-")

tally = Tally()
for row in rows(find_csv(), quick="DELAYS_QUICK" in os.environ):
    if topic(row).split(".")[1] in ORIGINS:
        tally.add_delay(row)

delays = iris.Service("delays")


@delays.on_request
@delays.on_survey
def answer(carrier: str) -> dict[str, Any]:
    """Return by airport how many departures there were, and the sum of their delays in minutes."""
    found = {origin: total for (origin, of), total in tally.departures.items() if of == carrier}
    return {"site": SITE, "departures": found}
