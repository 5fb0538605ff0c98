// MessagePack, names and compressed bundles, beyond the examples of the document.
import assert from "node:assert/strict";
import { test } from "node:test";
import { inspect } from "node:util";
import { constants, zstdCompressSync } from "node:zlib";
import { concat, u32, unhex, utf8 } from "../src/bytes.ts";
import { decodeBundle, encodeBundle } from "../src/bundle.ts";
import { DecodeError, EncodeError, InvalidName, KeyringError, OpenError } from "../src/errors.ts";
import { ClusterKey, Keyring } from "../src/keys.ts";
import { decode, encode } from "../src/msgpack.ts";
import { checkFilter, checkName, matches, splitSite } from "../src/names.ts";

test("MessagePack values come back as they were", () => {
  const values = [
    null, true, false, 0, 1, 127, 128, 255, 256, 65535, 65536, 2 ** 32 - 1, 2 ** 32, Number.MAX_SAFE_INTEGER, -1, -32,
    -33, -128, -129, -32768, -32769, -(2 ** 31), -(2 ** 31) - 1, Number.MIN_SAFE_INTEGER, 2n ** 63n, 2n ** 64n - 1n,
    -(2n ** 63n), 1.5, -0.1, Infinity, "", "é", "x".repeat(31), "x".repeat(32), "x".repeat(256), "x".repeat(70000),
    new Uint8Array(0), new Uint8Array(300), new Uint8Array(70000), [], [1, [2, [3]]], Array(20).fill("a"),
    { a: 1, b: [null] }, JSON.parse('{"__proto__": 1}'), new Map([[1, "a"], [2, "b"]]), new Date(1700000000123),
    new Date(-1500), Object.fromEntries(Array.from({ length: 20 }, (_, i) => [`key ${i}`, i])),
  ];
  for (const value of values) assert.deepEqual(decode(encode(value)), value);
});

test("the shorter timestamps of MessagePack are read, too", () => {
  assert.deepEqual(decode(unhex("d6ff6553f100")), new Date(1700000000000));
  assert.deepEqual(decode(unhex("d7ff1dcd65006553f100")), new Date(1700000000125 - 0));
});

test("what is not MessagePack raises DecodeError, and what cannot be sent EncodeError", () => {
  for (const bad of ["", "c1", "92 01", "a2 61", "a1 ff", "d9", "cf 00", "0101", "c7 00 05", "dd ff ff ff ff", "df ff ff ff ff", "c6 ff ff ff ff"]) {
    assert.throws(() => decode(unhex(bad.replaceAll(" ", ""))), DecodeError, bad);
  }
  assert.throws(() => decode(new Uint8Array(1000).fill(0x91)), DecodeError);
  for (const bad of [Symbol("a"), () => 1, 2n ** 64n, -(2n ** 63n) - 1n, "\ud800", new Date(NaN), new Float64Array(1)]) {
    assert.throws(() => encode(bad), EncodeError);
  }
});

test("a key as text is one of its kind, unchanged, or refused", async () => {
  const text = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh-qXniY";
  const key = await ClusterKey.from(text);
  assert.equal(key.idHex, (await ClusterKey.from(Uint8Array.from({ length: 32 }, (_, i) => i))).idHex);
  const network = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh-LPYEJ";
  for (const bad of [network, text.replace("AAEC", "AAED"), text.slice(0, 47) + "Z", text.slice(0, 43), text + "AAAA", "!"]) {
    await assert.rejects(ClusterKey.from(bad), KeyringError, bad);
  }
  await assert.rejects(ClusterKey.from(new Uint8Array(36)), KeyringError);
});

test("a compressed bundle opens if it names its size", () => {
  const messages = [{ payload: utf8("abc".repeat(5000)) }, { payload: utf8("") }];
  const plain = encodeBundle(messages, true);
  const columns = plain.subarray(8);
  const wrap = (size: number, frame: Uint8Array) => concat(u32(2), u32(2 | 8), u32(size), frame);
  const frame = zstdCompressSync(columns, { pledgedSrcSize: columns.length });
  const bundle = decodeBundle(wrap(columns.length, frame), 2);
  assert.deepEqual(bundle.entries.map((entry) => entry.payload.length), [15000, 0]);
  assert(bundle.packed);
  assert.throws(() => decodeBundle(wrap(columns.length + 1, frame), 2), OpenError);
  assert.throws(() => decodeBundle(wrap(columns.length, frame.subarray(0, -9)), 2), OpenError);
  const unnamed = zstdCompressSync(columns, { params: { [constants.ZSTD_c_contentSizeFlag]: 0 } });
  assert.throws(() => decodeBundle(wrap(columns.length, unnamed), 2), OpenError);
});

test("names keep to the grammar", () => {
  for (const good of ["a", "a.b", "flights.JFK.AA", "é-1", Array(32).fill("x").join("."), "x".repeat(255), "a:b", "a\ufeff"]) checkName(good, "topic");
  for (const bad of ["", ".", "a.", ".a", "a..b", "a b", "a.*", ">", "a\u0085", "a\u2003b", "\ud800", Array(33).fill("x").join("."), "é".repeat(128)]) {
    assert.throws(() => checkName(bad, "topic"), InvalidName, bad);
  }
  for (const good of ["*", ">", "a.*.b", "a.>", "*.>"]) checkFilter(good);
  for (const bad of ["a.>.b", "a*", "*a.b", ">>", "a.>>"]) assert.throws(() => checkFilter(bad), InvalidName, bad);
});

test("a filter matches whole tokens", () => {
  for (const [filter, topic, expected] of [
    ["a", "a", true], ["a", "b", false], ["a.*", "a.b", true], ["a.*", "a.b.c", false], ["a.>", "a.b.c", true],
    ["a.>", "a", false], [">", "a", true], ["*.b", "a.b", true], ["a.b", "a", false], ["*", "a.b", false],
  ] as const) assert.equal(matches(filter, topic), expected, `${filter} ${topic}`);
});

test("a site before a name is split off", () => {
  assert.deepEqual(splitSite("eu:billing"), ["eu", "billing"]);
  assert.deepEqual(splitSite(".:billing"), [".", "billing"]);
  for (const name of ["billing", "Eu:billing", "billing:", ":billing"]) assert.deepEqual(splitSite(name), ["", name]);
});

test("a key shows its id to a console, and no secret", async () => {
  const keyring = await Keyring.from(new Uint8Array(32).fill(1));
  const [key] = keyring.all;
  const shown = inspect([keyring, key], { depth: null, showHidden: true }) + JSON.stringify([keyring, key]);
  assert(shown.includes(key!.idHex));
  for (const secret of [key!.sealingRoot, key!.tunnelPsk, key!.keyHashKey]) {
    assert(!shown.replace(/\s/g, "").includes(secret.slice(0, 6).join(",")));
  }
});

test("a topic has the key of its longest prefix, a cluster the key of its name", async () => {
  const secret = (byte: number) => new Uint8Array(32).fill(byte);
  const keyring = await Keyring.from({
    default: secret(1), clusters: { billing: [secret(2), secret(1)] }, topics: { orders: secret(3), "orders.eu": secret(4) },
  });
  const [one, two, three, four] = keyring.all;
  assert.deepEqual(keyring.clusterKeys("billing"), [two, one]);
  assert.deepEqual(keyring.clusterKeys("orders"), [one]);
  assert.deepEqual(keyring.topicKeys("orders.us.x"), [three]);
  assert.deepEqual(keyring.topicKeys("orders.eu.x"), [four]);
  assert.deepEqual(keyring.topicKeys("orderseu"), [one]);
  assert.deepEqual(keyring.filterKeys("orders.eu.>"), [four]);
  assert.deepEqual(keyring.filterKeys("orders.>"), [three, four]);
  assert.deepEqual(keyring.filterKeys("*.eu"), [one, three, four]);
  assert.deepEqual(keyring.filterKeys(">"), [one, three, four]);
  const bare = await Keyring.from({ topics: { a: secret(1) } });
  assert.throws(() => bare.clusterKeys("x"), KeyringError);
  await assert.rejects(Keyring.from("short"), KeyringError);
  await assert.rejects(Keyring.from({ clusters: { x: [secret(1), secret(1)] } }), KeyringError);
});
