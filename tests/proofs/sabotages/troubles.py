"""What programs report of themselves is bounded, and what they lose needs attention."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

COUNTS = ("tests/unit/core/test_troubles.py",)
REPORTS = ("tests/protocol/test_troubles.py",)
MODEL = ("tests/unit/watch/test_model.py",)
CHECK = ("tests/unit/test_check.py",)

SABOTAGES = (
    Sabotage(
        "troubles-names",
        "iris/core/troubles.py",
        "Tally.add_name",
        "name not in names and len(names) >= MAX_TROUBLE_NAMES",
        "False",
        REPORTS,
        "a program makes its relay remember as many names as it likes",
    ),
    Sabotage(
        "troubles-most",
        "iris/core/troubles.py",
        "Tally.add_name",
        "names[least] >= count",
        "False",
        COUNTS,
        "the topic that lost most is pushed out by many that lost little",
    ),
    Sabotage(
        "troubles-most-counted",
        "iris/core/troubles.py",
        "Unreported.add",
        "min(count, MAX_COUNT - tally.count)",
        "count",
        COUNTS,
        "a client whose relay claims absurd losses is cut by the next relay for its report",
    ),
    Sabotage(
        "troubles-sum",
        "relay/core/troubles.py",
        "Troubles.reported",
        "sum(entry.names.values()) > entry.count",
        "False",
        REPORTS,
        "a report names more than it counts",
    ),
    Sabotage(
        "troubles-rows",
        "relay/core/troubles.py",
        "Troubles._add",
        "len(self._rows) >= MAX_ROWS",
        "False",
        REPORTS,
        "each session that comes and goes leaves a row in the relay's memory",
    ),
    Sabotage(
        "troubles-user",
        "relay/core/troubles.py",
        "Troubles._make_room",
        "if row.user == most",
        "",
        REPORTS,
        "a user pushes out what the programs of others have reported",
    ),
    Sabotage(
        "troubles-programs",
        "relay/core/troubles.py",
        "Troubles.reported",
        "len(self._programs) >= MAX_PROGRAMS",
        "False",
        REPORTS,
        "a program makes its relay keep sums for as many labels as it invents",
    ),
    Sabotage(
        "troubles-attention",
        "iris/watch/judging.py",
        "Judge.judge",
        "trouble.cause in ADVICE and trouble.last_s <= LATELY_S",
        "False",
        MODEL,
        "what programs lose does not need attention",
    ),
    Sabotage(
        "troubles-uncounted",
        "iris/watch/judging.py",
        "Judge.judge",
        "trouble.cause in ADVICE and trouble.last_s <= LATELY_S",
        "trouble.last_s <= LATELY_S",
        MODEL,
        "every program needs attention after a relay was restarted",
    ),
    Sabotage(
        "troubles-lately",
        "iris/cli/check.py",
        "judge_programs",
        'each["last_s"] <= LATELY_S',
        "True",
        CHECK,
        "a loss of last week is a warning for ever",
    ),
)
