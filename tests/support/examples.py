"""Programs of examples/web as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

WEB: Final = Path(__file__).parents[2] / "examples" / "web"


def load(name: str) -> ModuleType:
    """Return the module of a program, which finds those beside it, as when it is run."""
    spec = importlib.util.spec_from_file_location(f"web_{name}", WEB / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    sys.path.insert(0, str(WEB))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(WEB))
    return module
