"""What the command writes when it fails."""

from __future__ import annotations

import pytest

from iris.cli.exits import Exit, report_error
from iris.errors import RemoteError


def test_the_text_of_a_members_error_is_one_line_and_does_not_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report_error(RemoteError("db", "no\x1b[2J\x07\nmore")) == Exit.ANSWER
    assert capsys.readouterr().err == "iris: db: no?[2J? more\n"
