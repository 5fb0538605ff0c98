"""JavaScript reads and appends to streams that Python made, and Python reads what JavaScript appended."""

from __future__ import annotations

import pytest
from interop.js.kit import Page, Raised

import iris

READ = """
const got = [];
for await (const message of s.client.streams.read(args.stream, {start: args.start, follow: args.count === undefined ? false : true})) {
    got.push([message.offset, message.key, message.packed ? message.value : text(message.payload), message.headers]);
    if (got.length === args.count) break;
}
return got;
"""


async def test_javascript_reads_what_python_published_pushed_and_appended(
    page: Page, python: iris.Client, name: str
) -> None:
    await python.streams.create(name, topic=f"{name}.>")
    await python.publish(f"{name}.a", {"n": 1}, headers={"h": "x"})
    await python.publish(f"{name}.b", b"two")
    await python.flush()
    while (await python.streams.describe(name)).messages < 2:
        pass
    offset = await python.streams.append(name, {"n": 3}, key=b"k\xff")
    got = await page.run(READ, stream=name, start="first")
    assert [entry[1:] for entry in got] == [
        ["", {"n": 1}, {"h": "x"}],
        ["", "two", {}],
        ["k\ufffd", {"n": 3}, {}],
    ]
    assert got[-1][0] == offset
    later = await page.run(READ, stream=name, start=offset)
    assert [entry[2] for entry in later] == [{"n": 3}]
    said = await page.run("return s.client.streams.describe(args.stream)", stream=name)
    assert (said["messages"], said["end"]) == (3, offset + 1)


async def test_javascript_follows_a_stream(page: Page, python: iris.Client, name: str) -> None:
    await python.streams.create(name)
    await page.run(
        """s.got = [];
        s.abort = new AbortController();
        s.reading = (async () => {
            for await (const { value } of s.client.streams.read(args.stream, {start: "first", signal: s.abort.signal})) {
                s.got.push(value);
            }
        })().catch((error) => error);""",
        stream=name,
    )
    for number in range(30):
        await python.streams.append(name, number)
    await page.run("await until(() => s.got.length === 30)")
    assert await page.run("return s.got") == list(range(30))
    await page.run("s.abort.abort()")
    assert (await page.run("return s.reading"))["name"] == "AbortError"


async def test_python_reads_what_javascript_appended(
    page: Page, python: iris.Client, name: str
) -> None:
    await python.streams.create(name, compact=True)
    offsets = await page.run(
        """return Promise.all(Array.from({length: 60}, (_, i) => s.client.streams.append(
            args.stream, i % 2 ? `text ${i}` : {i}, {key: `key ${i % 10}`, headers: {i: String(i)}})))""",
        stream=name,
    )
    assert offsets == sorted(set(offsets))
    last: dict[bytes | None, str] = {}
    async for message in python.streams.read(name, start="first", follow=False):
        last[message.key] = (message.headers or {})["i"]
    assert last == {f"key {n % 10}".encode(): str(n) for n in range(50, 60)}
    with pytest.raises(Raised) as conflict:
        await page.run(
            "await s.client.streams.append(args.stream, 1, {expect: 0, key: 'a'})", stream=name
        )
    assert (conflict.value.name, conflict.value.fields["mayHaveRun"]) == ("OffsetConflict", False)
    await page.run(
        "await s.client.streams.append(args.stream, 1, {expect: args.next, key: 'a'})",
        stream=name,
        next=offsets[-1] + 1,
    )


async def test_a_stream_that_nobody_has_is_named(page: Page, name: str) -> None:
    with pytest.raises(Raised) as raised:
        await page.run(READ, stream=name, start="first")
    assert raised.value.name == "NoStream"


@pytest.mark.parametrize("start", ["next", "last", -1, 0.5])
async def test_a_start_that_is_none_is_refused(page: Page, name: str, start: object) -> None:
    with pytest.raises(Raised) as raised:
        await page.run(READ, stream=name, start=start)
    assert raised.value.name == "ConfigError"
    assert "start must be an offset, 'first' or 'new'" in str(raised.value)


async def test_what_retention_removed_is_a_gap(page: Page, python: iris.Client, name: str) -> None:
    await python.streams.create(name, max_messages=3)
    for number in range(10):
        await python.streams.append(name, number)
    said = await page.run(
        """const got = [], gaps = [];
        const options = {start: 0, follow: false, onGap: (gap) => gaps.push(gap)};
        for await (const { value } of s.client.streams.read(args.stream, options)) got.push(value);
        return { got, gaps };""",
        stream=name,
    )
    assert said["got"][-3:] == [7, 8, 9]
    covered = sum(gap["end"] - gap["first"] for gap in said["gaps"])
    assert covered + len(said["got"]) >= 10
    assert {(gap["cause"], gap["count"]) for gap in said["gaps"]} == {("retention", 0)}


async def test_a_stream_with_partitions_has_each_key_where_python_has_it(
    page: Page, python: iris.Client, name: str
) -> None:
    await python.streams.create(name, partitions=3)
    for number in range(12):
        await python.streams.append(name, number, key=f"k{number}")
    await page.run(
        """await Promise.all(Array.from({length: 12}, (_, i) =>
            s.client.streams.append(args.stream, 100 + i, {key: `k${i}`})));
        await s.client.streams.append(args.stream, 200);""",
        stream=name,
    )
    found: dict[str, set[int]] = {}
    values: list[int] = []
    for partition in range(3):
        got = await page.run(
            """const got = [], options = {start: "first", follow: false, partition: args.partition};
            for await (const { key, value } of s.client.streams.read(args.stream, options)) got.push([key, value]);
            return got;""",
            stream=name,
            partition=partition,
        )
        for key, value in got:
            found.setdefault(key, set()).add(partition)
            values.append(value)
    assert sorted(values) == [*range(12), *range(100, 112), 200]
    assert all(len(partitions) == 1 for partitions in found.values())
    assert len(set.union(*found.values())) > 1
    with pytest.raises(Raised, match="it has 3 partitions"):
        await page.run(READ, stream=name, start="first")
    with pytest.raises(Raised, match="it has 3 partitions"):
        await page.run(
            "for await (const _ of s.client.streams.read(args.stream, {partition: 3, start: 'first'}));",
            stream=name,
        )


async def test_javascript_goes_on_at_the_copy_that_took_the_place_of_a_stream(
    page: Page, python: iris.Client, name: str
) -> None:
    append = "return s.client.streams.append(args.stream, args.text, {uuid: args.uuid, key: 'k'})"
    old = await python.streams.create(name)
    assert await page.run(append, stream=name, text="0", uuid="") == 0
    new = await python.streams.handover(name, f"{name}-copy", durability="disk")
    assert await page.run(append, stream=name, text="1", uuid="") == 1
    found = [message async for message in python.streams.read(name, follow=False)]
    assert [(one.payload, one.offset) for one in found] == [(b"0", 0), (b"1", 1)]
    with pytest.raises(Raised, match=f"{old.uuid} was superseded by log {new.uuid}") as caught:
        await page.run(append, stream=name, text="x", uuid=old.uuid)
    assert caught.value.name == "StreamSuperseded"
