"""The HTTP bridge keeps what its OpenAPI document says, and survives what schemathesis makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from integration.http_kit import a_host, bridged, running

from relay.bridges.http.config import VERBS

pytestmark = pytest.mark.timeout(180)

LEFT_OUT = (
    "not_a_server_error",  # 503 and 504 are answers of a gateway, and 500 is not in the document
    "negative_data_rejection",  # headers that nobody knows are allowed
    "positive_data_acceptance",  # a member or stream may refuse what the document allows
)


def test_the_bridge_keeps_its_document_whatever_it_is_sent(tmp_path: Path) -> None:
    with a_host() as shell:
        allow = [text for verb in VERBS for text in ("--allow", f"{verb}=>")]
        token = shell("bridge", "http-token", "me", *allow).decode().strip()
        shell("stream", "create", "orders", "--dedup-window", "1h")
        with running(shell) as (address, process):
            done = subprocess.run(
                [
                    sys.executable, "-m", "schemathesis.cli", "run", f"http://{address}/openapi.json", "--header", f"Authorization: Bearer {token}",
                    "--exclude-operation-id", "subscribe", "--exclude-checks", ",".join(LEFT_OUT), "--phases", "coverage,fuzzing",
                    "--max-examples", "25", "--seed", "1", "--request-timeout", "20", "--generation-database", "none", "--no-color",
                ],
                env={**shell.environ, "SCHEMATHESIS_HOOKS": "support.openapi_hooks", "PYTHONPATH": str(Path(__file__).parents[1])},
                cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout
            assert "Tested: 9" in done.stdout
            assert process.poll() is None
        assert "web.failed" not in (shell.root / "bridge.log").read_text()


async def test_the_document_is_served_without_a_token_and_names_every_verb(tmp_path: Path) -> None:
    async with bridged(tmp_path) as made:
        answer = await made.get("/openapi.json", token="")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        found = [
            operation.get("operationId")
            for path in json.loads(answer.body)["paths"].values()
            for operation in path.values()
        ]
        assert sorted(filter(None, found)) == sorted(VERBS)
