"""A service with metrics for Prometheus: its counters, and a histogram of handler times."""

import asyncio
import urllib.request

import iris
import iris.metrics

service = iris.Service("greeter", middleware=[iris.metrics.handler_times()])


@service.on_request
async def greet(name: str) -> str:
    if not name:
        raise iris.Refusal("empty-name")
    return f"Hello, {name}!"


def page(url: str) -> list[str]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return [line for line in answer.read().decode().splitlines() if "greeter" in line]


async def main() -> None:
    config = iris.ClientConfig(label="greetings")
    async with iris.connect(config=config, embedded=True) as client, client.serve(service):
        for name in ("Ada", "Alan", ""):
            try:
                print(await client.request("greeter", name, timeout=5, type=str))
            except iris.RemoteError as error:
                print("refused:", error.code)
        async with iris.metrics.serve(client, 0) as port:  # in your program, a port such as 9100
            for line in await asyncio.to_thread(page, f"http://127.0.0.1:{port}/metrics"):
                if "calls_total" in line or "duration_seconds_count" in line:
                    print(line)


asyncio.run(main())
