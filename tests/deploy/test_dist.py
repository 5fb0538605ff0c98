"""What a release consists of works outside this checkout, and says what was not checked."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PACKAGES = ("iris", "relay", "pyspark_iris", "pytest_iris")


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deploy_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dist = _module(ROOT / "deploy" / "dist.py")
metadata = _module(ROOT / "deploy" / "metadata.py")


def build(project: Path, into: Path, *targets: str) -> None:
    """Build in this environment, as `make dist` does in its own."""
    wanted = [part for target in targets for part in ("-t", target)]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(into), *wanted],
        cwd=project, check=True, capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist."""
    into = tmp_path_factory.mktemp("dist")
    build(ROOT, into, "wheel", "sdist")
    return into


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and what it depends on from this environment."""
    place = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--quiet", "--no-deps",
         "--no-index", "--disable-pip-version-check", str(wheel)],
        check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    (site,) = place.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(msgspec.__file__).parents[1]}\n")
    return place


def run(command: list[str], cwd: Path) -> str:
    environ = {"PATH": os.environ["PATH"], "HOME": str(cwd), "XDG_RUNTIME_DIR": str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_hello_runs_from_the_wheel_outside_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    hello = re.search(r'```python\n(import asyncio\n.*?Service\("greeter"\).*?)```', (ROOT / "README.md").read_text(), re.DOTALL)  # fmt: skip
    assert hello is not None
    (tmp_path / "greetings.py").write_text(hello[1])
    python = str(installed / "bin" / "python")
    assert run([python, "greetings.py"], tmp_path) == "hello, world\n"


def test_every_package_and_the_command_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    asked = f"from importlib.util import find_spec\nfor name in {PACKAGES}: print(find_spec(name).origin)"
    found = run([str(installed / "bin" / "python"), "-c", asked], tmp_path).split()
    assert len(found) == len(PACKAGES)
    for package, origin in zip(PACKAGES, found, strict=True):
        assert origin.startswith(f"{installed}/lib/")
        assert origin.endswith(f"/site-packages/{package}/__init__.py")
    command = str(installed / "bin" / "iris")
    assert run([command, "--version"], tmp_path).startswith("iris ")
    assert "queue_bytes" in run([command, "relay", "--settings"], tmp_path)


def test_the_wheel_brings_the_units_of_systemd(installed: Path) -> None:
    names = sorted(path.name for path in (installed / "share" / "iris" / "systemd").iterdir())
    assert names == sorted(path.name for path in (ROOT / "deploy" / "systemd").iterdir())


def test_the_wheel_has_only_the_packages_and_says_that_they_are_typed(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name and ".data/" not in name}  # fmt: skip
    assert tops == set(PACKAGES)
    assert {f"{package}/py.typed" for package in ("iris", "relay")} <= set(names)


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(tmp_path)], check=True)
    (project,) = tmp_path.iterdir()
    build(project, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    (wheel,) = built.glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes()


def test_hosts_install_from_a_directory_of_wheels_and_from_a_server_that_lists_it(
    built: Path, tmp_path: Path
) -> None:
    """The lines are those of the page; `make` has run the one that downloads."""
    page = (ROOT / "docs" / "install.md").read_text()
    _, copied, installed, _, served = re.findall(r"^    ((?:pip|cp|python3) .*(?:wheels|find-links).*)$", page, re.MULTILINE)  # fmt: skip
    wheels = tmp_path / "wheels"
    shutil.copytree(ROOT / ".venv" / "wheels", wheels)
    for file in built.iterdir():
        shutil.copy(file, tmp_path)
    run(["sh", "-c", copied], tmp_path)
    listing = partial(SimpleHTTPRequestHandler, directory=str(wheels))
    with ThreadingHTTPServer(("127.0.0.1", 0), listing) as server:
        threading.Thread(target=server.serve_forever).start()
        for name, line in (
            ("directory", installed),
            ("server", served.replace(":8000", f":{server.server_port}")),
        ):
            place = tmp_path / name
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            run(["sh", "-c", f"PATH={place}/bin:$PATH; {line}"], tmp_path)
            code = "import iris, relay.store.database; print(iris.__file__)"
            assert run([str(place / "bin" / "python"), "-P", "-c", code], tmp_path).startswith(str(place))  # fmt: skip
        server.shutdown()


# -- what an index shows ---------------------------------------------------------------------------------------

REPOSITORY = "https://example.org/iris"


def test_every_link_of_the_readme_leads_to_a_page_of_the_version() -> None:
    text = (ROOT / "README.md").read_text()
    shown = metadata.readme(text, REPOSITORY, "1.2.3")
    targets = [target for _, target in metadata.LINK.findall(shown)]
    pages = f"{REPOSITORY}/blob/v1.2.3/"
    files = [target.removeprefix(pages).split("#")[0] for target in targets]
    assert len(files) == len(metadata.LINK.findall(text)) > 20
    assert all((ROOT / file).is_file() for file in files)
    assert shown.replace(pages, "") == text


def test_without_a_repository_the_readme_has_only_links_that_work_anywhere() -> None:
    text = "[a page](docs/a.md#b), [another](https://example.org/), [below](#below)\n"
    assert metadata.readme(text, "", "1") == "a page, [another](https://example.org/), [below](#below)\n"  # fmt: skip
    whole = (ROOT / "README.md").read_text()
    shown = metadata.readme(whole, "", "1")
    assert all("://" in target or target.startswith("#") for _, target in metadata.LINK.findall(shown))  # fmt: skip
    assert re.findall("```.*?```", shown, re.DOTALL) == re.findall("```.*?```", whole, re.DOTALL)
    assert metadata.urls("", "1") == {}


@pytest.mark.parametrize("wrong", ["http://example.org", "example.org/iris", "javascript:alert(1)"])
def test_a_repository_that_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="must begin with https://"):
        metadata.urls(wrong, "1")


def test_the_release_is_published_without_a_password_and_only_by_the_step_that_needs_no_code() -> (
    None
):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as true
    assert workflow["permissions"] == {}
    assert publish["permissions"] == {"id-token": "write"}
    assert "id-token" not in build["permissions"]
    assert "secrets." not in json.dumps(workflow)
    assert any(step.get("run") == "make dist" for step in build["steps"])
    assert publish["environment"] == "pypi"
    assert not any("checkout" in step.get("uses", "") for step in publish["steps"])
    (root, _, repository) = build["steps"][3]["env"]["IRIS_REPOSITORY"].partition("/")
    assert (root, repository) == ("${{ github.server_url }}", "${{ github.repository }}")


# -- the audit -------------------------------------------------------------------------------------------------


def report(*dependencies: dict[str, Any]) -> dict[str, Any]:
    return {"dependencies": list(dependencies), "fixes": []}


SOUND = {"name": "msgpack", "version": "1.2.4", "vulns": []}
UNKNOWN = {"name": "zstandard", "skip_reason": "Dependency not found on PyPI"}
WANTED = {"msgpack": "1.2.4", "zstandard": "0.25.0"}


def test_an_audit_of_everything_without_a_finding_passes() -> None:
    dist.judge(report(SOUND, {**SOUND, "name": "Zstandard"}), WANTED)


@pytest.mark.parametrize("rows", [(SOUND, UNKNOWN), (SOUND,), ()])
def test_a_project_that_was_not_audited_is_a_failure_of_its_own(
    rows: tuple[dict[str, Any], ...],
) -> None:
    with pytest.raises(dist.DistError, match=r"not audited: . of 2 projects, such as ") as caught:
        dist.judge(report(*rows), WANTED)
    assert caught.value.code == dist.NOT_AUDITED


def test_a_vulnerability_is_named_even_if_not_everything_was_audited() -> None:
    bad = {"name": "msgpack", "version": "1.2.4", "vulns": [{"id": "PYSEC-2026-1"}]}
    with pytest.raises(dist.DistError, match=r"msgpack 1\.2\.4: PYSEC-2026-1") as caught:
        dist.judge(report(bad, UNKNOWN), WANTED)
    assert caught.value.code == dist.VULNERABLE


@pytest.mark.parametrize(
    ("output", "error"), [("", "cannot connect"), ("<html>", "cannot connect"), ("", "")]
)
def test_an_audit_that_fails_is_not_one_that_passed(
    output: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!/bin/sh\necho '{error}' >&2\nprintf '%s' '{output}'\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(dist.DistError, match="not audited: pip-audit failed") as caught:
        dist.audit(tmp_path / "audit.json")
    assert caught.value.code == dist.NOT_AUDITED


def test_what_other_platforms_need_is_not_missed_in_an_audit() -> None:
    text = (
        "a==1 \\\n    --hash=sha256:00\nb==2 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    assert dist.locked(text) == {"a": "1", "b": "2"}
    assert dist.locked(text, here=True) == {"a": "1"}


def test_a_bill_of_materials_that_leaves_a_project_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill = tmp_path / "bill.json"
    components = [{"name": name, "version": version} for name, version in dist.locked(dist.LOCK.read_text()).items()]  # fmt: skip
    monkeypatch.setattr(dist, "run", lambda command, name: "")
    bill.write_text(json.dumps({"components": components}))
    dist.write_bill(bill)
    bill.write_text(json.dumps({"components": components[1:]}))
    with pytest.raises(dist.DistError, match="does not list exactly"):
        dist.write_bill(bill)
