"""Signals of a process reach its event loop once each."""

from __future__ import annotations

from pathlib import Path

import iris
import relay


def test_no_module_takes_signals_from_the_loop() -> None:
    """uvloop counts a signal twice if it comes with another one: see `iris.signals`."""
    modules = [
        path for package in (iris, relay) for path in Path(package.__file__).parent.rglob("*.py")
    ]
    users = [path.name for path in modules if ".add_signal_handler(" in path.read_text()]
    assert len(modules) > 100
    assert users == []
