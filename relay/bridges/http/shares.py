"""What the tokens of a bridge share: no token takes every place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from iris.web.problems import Problem
from relay.core.quotas import Table, all_but_a_quarter

OPEN: Final = ""
"""User of requests without a token."""


class Share(Table):
    """Places of one kind. The user is the name of a token; `refused_by` counts refusals by reason."""

    __slots__ = ("_what", "refused_by")

    def __init__(self, limit: int, what: str, refused_by: Counter[str]) -> None:
        super().__init__(limit)
        self._what = what
        self.refused_by = refused_by

    def check(self, user: str, count: int = 1) -> None:
        """Raise Problem 503 if a user may not take `count` more. The refusal is counted."""
        if self.has_room(user, count):
            return
        if self.total + count > self.limit:
            self.refused_by["full"] += 1
            raise full(f"the bridge has {self.total} {self._what}, and may have {self.limit}")
        self.refused_by["share of a token"] += 1
        who = f"the token {user!r} has" if user else "requests without a token have"
        raise full(
            f"{who} {self.held.get(user, 0)} {self._what}, and may have {all_but_a_quarter(self.limit)} of {self.limit}; "
            "the rest is for others"
        )  # fmt: skip

    @contextmanager
    def place(self, user: str) -> Iterator[None]:
        """Take a place while the block runs. Raises Problem 503."""
        self.check(user)
        self.take(user)
        try:
            yield
        finally:
            self.give(user)


def full(detail: str) -> Problem:
    """Return the problem of a request for which the bridge has no room now."""
    return Problem(503, detail, kind="full", headers={"retry-after": "1"}, may_have_run=False)
