"""Over HTTP: a bridge, a call and a stream of events with nothing but an HTTP client."""

import http.client
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import iris.blocking

IRIS = [sys.executable, "-P", "-m", "iris.cli"]
ALLOW = ["--allow", "request=greeter", "--allow", "publish=news.*", "--allow", "subscribe=news.>"]
service = iris.Service("greeter")


@service.on_request
def greet(name: str) -> dict[str, str]:
    return {"greeting": f"hello, {name}"}


with ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    environ = {"XDG_RUNTIME_DIR": folder, "XDG_CONFIG_HOME": folder}

    def start(*arguments: str, until: str) -> str:
        """Start a process, and return the line of its log that has the event `until`."""
        process = subprocess.Popen([*IRIS, *arguments], env=environ, stderr=-1, text=True)
        stack.enter_context(process)
        stack.callback(process.terminate)
        assert process.stderr is not None
        return next(line for line in process.stderr if until in line)

    start("relay", "--dev", until="relay.started")
    made = [*IRIS, "bridge", "http-token", "me", *ALLOW]
    token = subprocess.check_output(made, env=environ, text=True).strip()
    line = start("bridge", "http", "--listen", "127.0.0.1:0", until="http.serving")
    address, headers = json.loads(line)["address"], {"Authorization": f"Bearer {token}"}

    keyring = iris.Keyring.parse(Path(folder, "iris/dev/keyring.toml").read_text())
    member = iris.blocking.connect(f"{folder}/iris/relay.sock", keyring=keyring)
    stack.enter_context(stack.enter_context(member).serve(service))

    calls, events = http.client.HTTPConnection(address), http.client.HTTPConnection(address)
    stack.callback(calls.close)
    calls.request("POST", "/clusters/greeter/request", "world", headers)
    print(json.load(calls.getresponse()))

    events.request("GET", "/topics/news.%3E", headers=headers)
    lines = stack.enter_context(events.getresponse())  # from here on nothing is missed
    stack.callback(events.close)
    calls.request("POST", "/topics/news.today", "rain", headers)
    print(json.load(calls.getresponse()))
    print(next(line for line in lines if line.startswith(b"data: ")).decode().strip())
