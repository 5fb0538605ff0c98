"""The throw-away keys of a development relay."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay import start


@pytest.mark.parametrize("hidden", [False, True], ids=["default", "IRIS_CONFIG"])
def test_a_development_relay_says_if_a_variable_hides_its_keys_from_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hidden: bool
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    if hidden:
        environ["IRIS_CONFIG"] = str(tmp_path / "empty")
    start._dev_keys(environ)
    said = capsys.readouterr().err
    assert "using throw-away development keys" in said
    assert ("without IRIS_CONFIG" in said) is hidden
