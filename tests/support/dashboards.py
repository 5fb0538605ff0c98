"""`iris dashboard` in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import iris
from iris.keyfiles import KEYRING_FILE, save_keyring
from support import warm
from support.commands import command
from support.relays import KEY
from support.waiting import PATIENCE_S

TOKEN = "a-token-of-the-tests-that-is-long-enough"
"""What `token_file` admits."""


class Dashboard:
    """`iris dashboard` of the relay at a socket. A context manager that ends it and checks that it ended well."""

    def __init__(
        self, directory: Path, relay: Path, *arguments: str, keys: bool = True, token_file: bool = False, port: int = 0
    ) -> None:  # fmt: skip
        directory.mkdir(mode=0o700, exist_ok=True)
        if keys:
            save_keyring(directory / KEYRING_FILE, iris.Keyring.single(KEY))
        self.directory = directory
        self._log = directory / "dashboard.log"
        more = []
        if token_file:
            file = directory / "tokens.toml"
            file.write_text(f'[[token]]\nname = "all"\ntoken = "{TOKEN}"\nallow.view = [">"]\nallow.peek = [">"]\nallow.manage = [">"]\n')  # fmt: skip
            file.chmod(0o600)
            more = ["--tokens", str(file)]
        self._command = command("dashboard", "--listen", f"127.0.0.1:{port}", "--relay", str(relay), *more, *arguments)  # fmt: skip
        self.process: subprocess.Popen[bytes]
        self.url = ""
        """The address that it printed, with the token if it made one."""

    def start(self) -> Self:
        environ = {"PATH": "/usr/bin:/bin", "IRIS_CONFIG": str(self.directory), "HOME": str(self.directory)}  # fmt: skip
        with self._log.open("ab") as log:
            self.process = warm.Popen(
                self._command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        assert self.url, self._log.read_text()
        return self

    @property
    def address(self) -> str:
        """http://127.0.0.1:PORT"""
        return self.url.partition("/#")[0].rstrip("/")

    @property
    def token(self) -> str:
        return self.url.partition("#token=")[2] or TOKEN

    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        self.process.terminate()
        code = self.process.wait(PATIENCE_S)
        assert code == 0, self.log()
        assert "Traceback" not in self.log()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if error is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        else:
            self.stop()
