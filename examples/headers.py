"""Headers travel beside the payload, sealed with it: trace ids, content types, tenants."""

import asyncio

import iris

service = iris.Service("reports")


@service.on_request
def render(request: iris.Request) -> iris.Reply:
    tenant = (request.headers or {}).get("tenant", "nobody")
    return iris.Reply(f"report for {tenant}", headers={"content-type": "text/plain"})


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        reply = await client.request(
            "reports", b"", timeout=1.0, headers={"tenant": "acme", "traceparent": "00-4bf92f-01"},
            type=iris.Message,  # the whole message, headers and all
        )  # fmt: skip
        print(reply.payload.decode(), reply.headers)


asyncio.run(main())
