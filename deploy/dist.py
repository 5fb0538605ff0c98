"""Make a release in dist/: wheel, sdist, locked requirements, bill of materials (CycloneDX), and an audit.

IRIS_REPOSITORY is the address of the repository, to which an index then links (deploy/metadata.py).

`make dist` runs this with the tools of requirements/build.txt and requirements/dist.txt. Exit codes: 0, all is well;
1, a dependency has a known vulnerability; 2, something could not be made; 3, the dependencies could not be audited,
because no service of vulnerabilities is reachable. With --no-audit the last step is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

from packaging.markers import Marker

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "requirements" / "deploy.txt"
AUDIT_S: Final = 300.0
VULNERABLE: Final = 1
NOT_MADE: Final = 2
NOT_AUDITED: Final = 3
LOCKED: Final = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)(?: ; ([^\\\n]+))?", re.MULTILINE)
"""A project, its version, and the condition under which it is installed."""


class DistError(Exception):
    """A step failed; the text says which one, and `code` is the exit code."""

    def __init__(self, text: str, code: int = NOT_MADE) -> None:
        super().__init__(text)
        self.code = code


def locked(text: str, *, here: bool = False) -> dict[str, str]:
    """Return project -> version of a lock file, or with `here` of what is installed on this platform."""
    rows = LOCKED.findall(text)
    return {
        plain(name): version
        for name, version, marker in rows
        if not (here and marker) or Marker(marker).evaluate()
    }


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def build(into: Path) -> None:
    """Write wheel and sdist into `into`. The same files give the same bytes: hatchling writes no times of its own."""
    run([sys.executable, "-P", "-m", "hatchling", "build", "-d", str(into), "-t", "wheel", "-t", "sdist"], "hatchling")  # fmt: skip


def check_shown(directory: Path) -> None:
    """Check that an index can show the description of wheel and sdist. Raises DistError."""
    files = map(str, sorted([*directory.glob("*.whl"), *directory.glob("*.tar.gz")]))
    run([sys.executable, "-P", "-m", "twine", "check", "--strict", *files], "twine check")


def run(command: list[str], name: str) -> str:
    """Run a command in the project's folder and return its output. Raises DistError."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise DistError(f"{name}: {error}") from error
    if done.returncode:
        raise DistError(f"{name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def write_bill(path: Path) -> None:
    """Write the bill of materials of `LOCK`, and check that it lists every project in it. Raises DistError."""
    tool = Path(sys.executable).with_name("cyclonedx-py")
    run([str(tool), "requirements", str(LOCK), "--pyproject", "pyproject.toml", "--output-reproducible", "--of", "JSON", "-o", str(path)], "cyclonedx-py")  # fmt: skip
    parts = json.loads(path.read_text())["components"]
    listed = {plain(part["name"]): part.get("version", "") for part in parts}
    if listed != locked(LOCK.read_text()):
        raise DistError(f"{path.name} does not list exactly the projects of {LOCK.name}")


def audit(path: Path) -> None:
    """Look for known vulnerabilities of the projects in `LOCK`, and write what was found. Raises DistError."""
    tool = Path(sys.executable).with_name("pip-audit")
    command = [str(tool), "-r", str(LOCK), "--require-hashes", "--disable-pip", "--progress-spinner", "off", "-f", "json"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S)
    except subprocess.TimeoutExpired as error:
        raise DistError(f"not audited: no answer within {AUDIT_S:g} s", NOT_AUDITED) from error
    try:
        report = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise DistError(f"not audited: pip-audit failed: {last}", NOT_AUDITED) from error
    path.write_text(json.dumps(report, indent=1) + "\n")
    judge(report, locked(LOCK.read_text(), here=True))


def judge(report: dict[str, Any], wanted: dict[str, str]) -> None:
    """Raise DistError if a report of pip-audit names a vulnerability, or leaves out one of the `wanted` projects.

    pip-audit skips a project that its service does not know and still exits with 0, also if no service is reachable.
    """
    found = report["dependencies"]
    faults = [f"{one['name']} {one['version']}: {each['id']}" for one in found for each in one.get("vulns", ())]  # fmt: skip
    if faults:
        raise DistError("known vulnerabilities:\n  " + "\n  ".join(faults), VULNERABLE)
    audited = {plain(one["name"]) for one in found if "skip_reason" not in one}
    missing = sorted(set(wanted) - audited)
    if missing:
        count = f"{len(missing)} of {len(wanted)} projects"
        raise DistError(
            f"not audited: {count}, such as {missing[0]}; the service of vulnerabilities (pypi.org) is not reachable "
            "or does not know them. Run `make dist` where it is reachable, or `make dist AUDIT=off`",
            NOT_AUDITED,
        )


def write_sums(directory: Path) -> None:
    """Write SHA256SUMS, in the form that `sha256sum -c` reads."""
    sums = directory / "SHA256SUMS"
    files = sorted(path for path in directory.iterdir() if path != sums)
    rows = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    sums.write_text("".join(rows))


def main(arguments: list[str]) -> int:
    """Make the release; return the exit code."""
    parser = argparse.ArgumentParser(description="Make a release in dist/.")
    parser.add_argument(
        "--no-audit", action="store_true", help="do not look for known vulnerabilities"
    )
    parser.add_argument(
        "--into", type=Path, default=ROOT / "dist", help="another directory than dist/"
    )
    chosen = parser.parse_args(arguments)
    into: Path = chosen.into
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    code = 0
    try:
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        build(into)
        check_shown(into)
        shutil.copy(LOCK, into / f"{stem}-requirements.txt")
        write_bill(into / f"{stem}.cdx.json")
        if chosen.no_audit:
            sys.stderr.write("make dist: not audited, because AUDIT=off\n")
        else:
            audit(into / f"{stem}-audit.json")
    except DistError as error:
        sys.stderr.write(f"make dist: {error}\n")
        code = error.code
    if code != NOT_MADE:
        write_sums(into)
        sys.stdout.write("".join(f"{path}\n" for path in sorted(into.iterdir())))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
