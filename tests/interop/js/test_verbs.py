"""Python and JavaScript use every verb with each other, both ways, at one relay and across two."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from interop.js.kit import Page, Raised
from support.waiting import eventually

import iris

SERVE = """
s.got = [];
s.service = new iris.Service(args.name)
    .onRequest((value) => value instanceof Uint8Array ? `got ${text(value)}` : { got: value })
    .onRequest("headers", (value, message) => ({ ...message.headers, method: message.method }))
    .onRequest("refuse", () => { throw new iris.Refusal("sold_out", { left: 0 }); })
    .onRequest("fail", () => { throw new TypeError("broken"); })
    .onRequest("slow", (value, { signal }) => new Promise((resolve) => {
        s.got.push("began");
        signal.onabort = () => { s.got.push("left"); resolve(null); };
    }))
    .onPush((value) => { s.got.push(value); })
    .onSurvey((value) => ({ answer: value }))
    .onBroadcast((value) => { s.got.push(value); })
    .onTunnel(async (tunnel) => {
        for await (const message of tunnel) await tunnel.send(message);
        await tunnel.send(tunnel.headers.last ?? "none");
    });
s.binding = await s.client.serve(s.service);
"""


def service(name: str, got: list[Any]) -> iris.Service:
    """The same in Python."""
    made = iris.Service(name)

    @made.on_request
    async def plain(message: iris.Message) -> Any:
        value = message.value
        return b"got " + value if isinstance(value, bytes) else {"got": value}

    @made.on_request("headers")
    async def headers(request: iris.Request) -> dict[str, str]:
        return {**(request.headers or {}), "method": request.method}

    @made.on_request("refuse")
    async def refuse(message: iris.Message) -> None:
        raise iris.Refusal("sold_out", left=0)

    @made.on_request("fail")
    async def fail(message: iris.Message) -> None:
        raise TypeError("broken")

    @made.on_push
    async def push(message: iris.Message) -> None:
        got.append(message.value)

    @made.on_survey
    async def survey(message: iris.Message) -> dict[str, Any]:
        return {"answer": message.value}

    @made.on_broadcast
    async def broadcast(message: iris.Message) -> None:
        got.append(message.value)

    @made.on_tunnel
    async def tunnel(opened: iris.Tunnel) -> None:
        async for message in opened:
            await opened.send(message)
        await opened.send(opened.headers.get("last", "none"))

    return made


# -- requests --------------------------------------------------------------------------------------------------


async def test_javascript_requests_of_python(page: Page, python: iris.Client, name: str) -> None:
    async with python.serve(service(name, [])):
        await page.run("s.ask = (...asked) => s.client.request(args.name, ...asked);", name=name)
        assert await page.run("return s.ask('x')") == "got x"
        assert await page.run("return s.ask({a: [1, null, 2n ** 60n]})") == {
            "got": {"a": [1, None, 2**60]}
        }
        said = await page.run("return s.ask(null, {method: 'headers', headers: {a: 'é'}})")
        assert said == {"a": "é", "method": "headers"}
        with pytest.raises(Raised) as refused:
            await page.run("await s.ask(1, {method: 'refuse'})")
        assert refused.value.name == "RemoteError"
        assert (refused.value.fields["code"], refused.value.fields["details"]) == (
            "sold_out",
            {"left": 0},
        )
        assert refused.value.fields["mayHaveRun"] is True
        with pytest.raises(Raised, match="TypeError: broken"):
            await page.run("await s.ask(1, {method: 'fail'})")
        with pytest.raises(Raised) as missing:
            await page.run("await s.ask(1, {method: 'nothing'})")
        assert (missing.value.fields["code"], missing.value.fields["mayHaveRun"]) == (
            "no_method",
            False,
        )


async def test_python_requests_of_javascript(page: Page, python: iris.Client, name: str) -> None:
    await page.run(SERVE, name=name)
    assert await python.request(name, b"x", timeout=5) == b"got x"
    assert await python.request(name, {"a": [1, None, 2**60]}, timeout=5) == {
        "got": {"a": [1, None, 2**60]}
    }
    said = await python.request(name, None, timeout=5, method="headers", headers={"a": "é"})
    assert said == {"a": "é", "method": "headers"}
    with pytest.raises(iris.RemoteError) as refused:
        await python.request(name, 1, timeout=5, method="refuse")
    assert (refused.value.code, refused.value.details) == ("sold_out", {"left": 0})
    with pytest.raises(iris.RemoteError, match="TypeError: broken"):
        await python.request(name, 1, timeout=5, method="fail")
    with pytest.raises(iris.RemoteError) as missing:
        await python.request(name, 1, timeout=5, method="nothing")
    assert (missing.value.code, missing.value.may_have_run) == ("no_method", False)


async def test_many_requests_at_once_are_runs_that_both_sides_read(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(SERVE, name=name)
    replies = await asyncio.gather(
        *(python.request(name, number, timeout=5) for number in range(300))
    )
    assert replies == [{"got": number} for number in range(300)]
    async with python.serve(service(f"{name}.py", [])):
        said = await page.run(
            "return Promise.all(Array.from({length: 300}, (_, i) => s.client.request(args.name, i)))",
            name=f"{name}.py",
        )
    assert said == [{"got": number} for number in range(300)]


async def test_a_request_to_nobody_has_not_run(page: Page, name: str) -> None:
    with pytest.raises(Raised) as raised:
        await page.run("await s.client.request(args.name, 1)", name=name)
    assert (raised.value.name, raised.value.fields["mayHaveRun"]) == ("NoMembers", False)


async def test_a_caller_that_gives_up_is_reported_to_the_handler(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(SERVE, name=name)
    asking = asyncio.create_task(python.request(name, 1, timeout=10, method="slow"))
    await page.run("await until(() => s.got.includes('began'))")
    asking.cancel()
    await page.run("await until(() => s.got.includes('left'))")


async def test_a_timeout_and_an_abort_end_a_request_of_javascript(
    page: Page, python: iris.Client, name: str
) -> None:
    began, stopped = asyncio.Event(), asyncio.Event()
    slow = iris.Service(name)

    @slow.on_request
    async def never(message: iris.Message) -> None:
        began.set()
        await stopped.wait()

    async with python.serve(slow):
        with pytest.raises(Raised) as late:
            await page.run("await s.client.request(args.name, 1, {timeoutMs: 50})", name=name)
        assert (late.value.name, late.value.fields["mayHaveRun"]) == ("RequestTimeout", True)
        began.clear()
        asking = asyncio.create_task(
            page.run(
                """s.abort = new AbortController();
                await s.client.request(args.name, 1, {signal: s.abort.signal, timeoutMs: 10000})""",
                name=name,
            )
        )
        await began.wait()
        await page.run("s.abort.abort()")
        with pytest.raises(Raised) as aborted:
            await asking
        assert aborted.value.name == "AbortError"
        stopped.set()


async def test_one_member_is_called_by_its_id_and_describes_itself(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(SERVE, name=name)
    (description,) = await python.describe(name)
    assert description.service == name
    assert {handler.name for handler in description.handlers if handler.kind == "request"} >= {
        "refuse",
        "",
    }
    assert await python.request(name, 1, timeout=5, member=description.member) == {"got": 1}
    members = await page.run("return s.client.members(args.name)", name=name)
    assert [member["member"] for member in members["members"]] == [description.member]
    said = await page.run(
        "return s.client.request(args.name, 2, {member: args.member})",
        name=name,
        member=description.member,
    )
    assert said == {"got": 2}
    await page.run("await s.binding.close()")
    with pytest.raises(iris.NoMembers):
        await python.request(name, 1, timeout=5, member=description.member)


# -- pushes, surveys, broadcasts -------------------------------------------------------------------------------


async def test_pushes_and_broadcasts_arrive_both_ways(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(SERVE, name=name)
    await python.push(name, {"n": 1})
    await python.broadcast(name, {"n": 2})
    await page.run("await until(() => s.got.length === 2)")
    assert await page.run("return s.got") == [{"n": 1}, {"n": 2}]
    got: list[Any] = []
    async with python.serve(service(f"{name}.py", got)):
        await page.run(
            "await s.client.push(args.name, {n: 3}); await s.client.broadcast(args.name, 'four');",
            name=f"{name}.py",
        )
        await eventually(lambda: len(got) == 2)
    assert sorted(map(str, got)) == sorted([str({"n": 3}), str(b"four")])


async def test_a_push_that_nobody_takes_is_reported(page: Page, name: str) -> None:
    await page.run("await s.client.push(args.name, 1); await s.client.flush();", name=name)
    (lost,) = await page.run("return s.losses")
    assert (lost["kind"], lost["name"], lost["error"]["name"]) == ("push", name, "NoMembers")


async def test_a_survey_asks_python_and_javascript(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(SERVE, name=name)
    async with python.serve(service(name, [])):
        await python.wait_for_members(name, 2, timeout=5)
        answers = [answer.value async for answer in python.survey(name, 1, timeout=5)]
        assert answers == [{"answer": 1}] * 2
        said = await page.run(
            """await until(async () => (await s.client.members(args.name)).members.length === 2);
            const answers = [], survey = s.client.survey(args.name, "x");
            for await (const { member, value } of survey) answers.push([member, text(value.answer)]);
            return { answers, missing: [...survey.missing], errors: survey.errors.size };""",
            name=name,
        )
    assert [value for _, value in said["answers"]] == ["x", "x"]
    assert len({member for member, _ in said["answers"]}) == 2
    assert (said["missing"], said["errors"]) == ([], 0)


# -- topics ----------------------------------------------------------------------------------------------------


async def test_publications_reach_filters_both_ways_in_order(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(
        """s.sub = s.client.subscribe(`${args.name}.*.x`);
        await s.sub.ready;""",
        name=name,
    )
    for number in range(50):
        await python.publish(f"{name}.a.x", {"n": number}, headers={"h": str(number)})
        await python.publish(f"{name}.a.y", {"n": -1})
    said = await page.run(
        """const got = [];
        for await (const message of s.sub) if (got.push([message.value.n, message.headers.h]) === 50) break;
        return got;"""
    )
    assert said == [[number, str(number)] for number in range(50)]
    async with python.subscribe(f"{name}.>") as subscription:
        await page.run(
            "for (let i = 0; i < 50; i++) await s.client.publish(`${args.name}.b`, i % 2 ? `text ${i}` : i);",
            name=name,
        )
        got = []
        async for message in subscription:
            got.append(message.value)
            if len(got) == 50:
                break
    assert got == [f"text {n}".encode() if n % 2 else n for n in range(50)]


async def test_a_queue_group_is_shared_by_python_and_javascript(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(
        """s.got = [];
        s.sub = s.client.subscribe(args.name, {group: "workers", onLoss: (lost) => s.got.push(lost)});
        await s.sub.ready;
        void (async () => { for await (const { value } of s.sub) s.got.push(value); })();""",
        name=name,
    )
    mine: list[Any] = []
    async with python.subscribe(name, lambda message: mine.append(message.value), group="workers"):
        for number in range(40):
            await python.publish(name, number)
            await python.flush()
        await page.run("await until(() => s.got.length + args.mine >= 40)", mine=len(mine))
        theirs = await page.run("return s.got")
    assert sorted(mine + theirs) == list(range(40))
    assert mine
    assert theirs


async def test_a_slow_subscription_reports_what_it_drops(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(
        """s.gaps = [];
        s.sub = s.client.subscribe(args.name, {limitBytes: 2000, onLoss: (lost) => s.gaps.push(lost)});
        s.cut = s.client.subscribe(args.name, {limitBytes: 2000, whenFull: "close", group: "g"});
        await Promise.all([s.sub.ready, s.cut.ready]);""",
        name=name,
    )
    for number in range(20):
        await python.publish(name, number)
    await page.run("await until(() => s.sub.lostMessages > 0 && s.sub.lostMessages + 7 >= 20)")
    said = await page.run(
        """const got = [];
        for await (const { value } of s.sub) if (got.push(value) === 20 - s.sub.lostMessages) break;
        const sum = (losses) => losses.reduce((sum, { count }) => sum + count, 0);
        return { got, lost: s.sub.lostMessages, told: sum(s.gaps), ofClient: sum(s.losses) };"""
    )
    assert said["got"] == list(range(20 - said["lost"]))
    assert said["told"] == said["ofClient"] == said["lost"]
    with pytest.raises(Raised) as raised:
        await page.run("for await (const _ of s.cut);")
    assert raised.value.name == "Overloaded"


# -- tunnels ---------------------------------------------------------------------------------------------------


async def test_tunnels_carry_large_and_empty_messages_both_ways(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(SERVE, name=name)
    large = bytes(range(256)) * 12_000
    async with python.tunnel(name, timeout=5, headers={"last": "bye"}) as tunnel:
        for message in (b"small", b"", large):
            await tunnel.send(message)
            assert await tunnel.recv() == message
        await tunnel.finish()
        assert [message async for message in tunnel] == [b"bye"]
    async with python.serve(service(f"{name}.py", [])):
        said = await page.run(
            """const tunnel = await s.client.tunnel(args.name, {headers: {last: "bye"}});
            const sizes = [];
            for (const message of ["small", "", new Uint8Array(3_000_000).fill(7)]) {
                await tunnel.send(message);
                const back = await tunnel.recv();
                sizes.push(back.length, back[0] ?? null);
            }
            await tunnel.finish();
            const rest = [];
            for await (const message of tunnel) rest.push(text(message));
            await tunnel.close();
            await until(() => tunnel.closed);
            return { sizes, rest };""",
            name=f"{name}.py",
        )
    assert said == {"sizes": [5, ord("s"), 0, None, 3_000_000, 7], "rest": ["bye"]}


async def test_a_broken_tunnel_is_reported_at_the_other_end(
    page: Page, python: iris.Client, name: str
) -> None:
    breaking = iris.Service(name)

    @breaking.on_tunnel
    async def fails(tunnel: iris.Tunnel) -> None:
        await tunnel.recv()
        raise ValueError("over")

    async with python.serve(breaking):
        with pytest.raises(Raised) as raised:
            await page.run(
                """const tunnel = await s.client.tunnel(args.name);
                await tunnel.send("x");
                await tunnel.recv();""",
                name=name,
            )
        assert raised.value.name == "TunnelBroken"
    with pytest.raises(Raised) as nobody:
        await page.run("await s.client.tunnel(`${args.name}.x`)", name=name)
    assert nobody.value.name == "NoMembers"


async def test_a_publisher_that_waits_is_not_held_up_by_javascript(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run("s.sub = s.client.subscribe(args.name); await s.sub.ready;", name=name)
    for _ in range(40):
        await python.publish(name, bytes(10_000), when_full="wait")
    said = await page.run(
        """let count = 0;
        for await (const { payload } of s.sub) if (payload.length === 10_000 && ++count === 40) break;
        return [count, s.sub.lostMessages];"""
    )
    assert said == [40, 0]


async def test_null_is_none_in_both_directions(page: Page, python: iris.Client, name: str) -> None:
    made = iris.Service(f"{name}.py")
    got: list[Any] = []

    @made.on_request
    async def find(number: int | None) -> str | None:
        got.append(number)
        return "found" if number else None

    async with python.serve(made):
        asked = "return s.client.request(args.name, args.value)"
        assert await page.run(asked, name=f"{name}.py", value=None) is None
        assert await page.run(asked, name=f"{name}.py", value=1) == "found"
        assert got == [None, 1]
    await page.run(
        "s.binding = await s.client.serve(new iris.Service(args.name).onRequest((value) => value === null ? 'null' : null))",
        name=name,
    )
    assert await python.request(name, None, timeout=5, type=str | None) == "null"
    assert await python.request(name, 1, timeout=5, type=str | None) is None
    assert await python.request(name, 1, timeout=5) is None


async def test_a_group_that_is_null_is_none_and_a_wrong_one_costs_nothing_else(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(SERVE, name=name)
    await page.run(
        """s.subscription = s.client.subscribe(args.name, {group: null});
        await s.subscription.ready;""",
        name=name,
    )
    for group in (0, False, "a b", []):
        with pytest.raises(Raised) as raised:
            await page.run(
                "s.client.subscribe(args.name, {group: args.group})", name=name, group=group
            )
        assert raised.value.name == "InvalidName"
    await python.publish(name, b"x")
    got = await page.run("for await (const message of s.subscription) return message.text;")
    assert got == "x"
    assert await python.request(name, b"x", timeout=5) == b"got x"


async def test_a_generator_that_a_handler_returns_is_its_failure(
    page: Page, python: iris.Client, name: str
) -> None:
    await page.run(
        """s.binding = await s.client.serve(new iris.Service(args.name)
            .onRequest((value) => value ? (function* () { yield 1; })() : "good"));""",
        name=name,
    )
    with pytest.raises(iris.RemoteError, match="returned a generator, whose body never runs"):
        await python.request(name, 1, timeout=5)
    assert await python.request(name, 0, timeout=5, type=str) == "good"
