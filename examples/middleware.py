"""Middleware has one form around handlers and around calls: here timing, authorisation by header, and a retry."""

import asyncio
import time
from typing import Any

import iris

timed: dict[str, float] = {}


async def timing(request: iris.Request | iris.Call, call_next: iris.CallNext) -> Any:
    started = time.monotonic()
    result = await call_next(request)
    timed[f"{type(request).__name__} of {request.name}"] = time.monotonic() - started
    return result


async def authorised(request: iris.Request, call_next: iris.CallNext) -> Any:
    if (request.headers or {}).get("token") != "secret":
        raise iris.Refusal("unauthorized")
    return await call_next(request)


async def token(call: iris.Call, call_next: iris.CallNext) -> Any:
    call.headers = {**(call.headers or {}), "token": "secret"}
    return await call_next(call)


async def retry(call: iris.Call, call_next: iris.CallNext) -> Any:
    try:
        return await call_next(call)
    except iris.RequestError as error:
        if error.may_have_run:
            raise
        print("again, because", type(error).__name__)
        return await call_next(call)


service = iris.Service("greeter", middleware=[timing, authorised])


@service.on_request
def greet(name: str) -> str:
    return f"hello, {name}"


async def main() -> None:
    async with iris.connect(embedded=True, middleware=[timing, retry, token]) as client:
        async with client.serve(service):
            print(await client.request("greeter", "world", timeout=1.0, type=str))
        try:
            await client.request("greeter", "world", timeout=1.0)
        except iris.NoMembers:
            print("nobody is there")
    print("timed:", list(timed))


asyncio.run(main())
