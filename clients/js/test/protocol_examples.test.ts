// The client reads and writes every example of docs/protocol.md.
import assert from "node:assert/strict";
import { test } from "node:test";
import { concat, hex, sha256, u64, unhex, utf8, type Bytes } from "../src/bytes.ts";
import { decodeBundle, encodeBundle, encodeHeaders } from "../src/bundle.ts";
import { Code, Knock, type Channel } from "../src/channel.ts";
import { OpenError } from "../src/errors.ts";
import {
  decodeFrame, decodeRun, encodeControl, encodeData, encodeEnd, FrameReader, isData, Kind, kindName, type DataFrame,
} from "../src/frames.ts";
import { Item, FIRST, LAST, decodeItems } from "../src/items.ts";
import { ClusterKey, topicSecret, verify } from "../src/keys.ts";
import { decode, encode } from "../src/msgpack.ts";
import { accept, Opening, prologue } from "../src/noise.ts";
import { ANSWER_KINDS, answersLine, metadata, Openers, Sealer } from "../src/sframe.ts";
import { partitionOf, unknownField } from "../src/stores.ts";
import { Share } from "../src/x25519.ts";
import { HEX, JSON_OF } from "./document.ts";

const KEY = await ClusterKey.from(unhex(JSON_OF.get("key").secret));
/** Only relays send these. */
const LINKS = new Set(["LINK_HELLO", "INTEREST", "RESYNC", "LOADS", "ASK_PEERS", "PEERS"]);
/** Only stores send it. */
const OTHERS = new Set([...LINKS, "GRANT"]);
const FRAMES = [...HEX.keys()].filter((name) => !name.startsWith("bundle-") && JSON_OF.get(name).frame in Kind && !OTHERS.has(JSON_OF.get(name).frame));

function readable(value: unknown): unknown {
  if (value instanceof Uint8Array) return hex(value);
  if (Array.isArray(value)) return value.map(readable);
  if (value instanceof Map) return Object.fromEntries([...value].map(([key, item]) => [String(key), readable(item)]));
  if (typeof value === "object" && value !== null) {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, readable(item)]));
  }
  return value;
}

function data(name: string): DataFrame {
  const frame = decodeFrame(HEX.get(name)!);
  assert(isData(frame));
  return frame;
}

test("every frame decodes to its fields and encodes to its bytes", () => {
  let whole = 0;
  for (const name of FRAMES) {
    const bytes = HEX.get(name)!;
    const said = JSON_OF.get(name);
    const frame = decodeFrame(bytes);
    assert.equal(kindName(frame.kind), said.frame, name);
    if (isData(frame)) {
      for (const field of ["flags", "alias", "count", "first", "timeout", "sent", "hop", "deadline"] as const) {
        const value = said[field];
        if (value !== undefined) assert.equal(String(frame[field]), String(value), `${name}: ${field}`);
      }
      const end = frame.end.length ? encodeEnd(frame.sent, frame.timeout, frame.count, frame.first) : frame.end;
      assert.deepEqual(end, frame.end);
      assert.deepEqual(
        encodeData(frame.kind, frame.alias, frame.hop, frame.deadline, end, frame.body, frame.flags), bytes, name,
      );
    } else {
      // Fields of calls that this client does not make are ignored, as those of later minor versions.
      const { frame: _, ...fields } = said;
      const known = Object.fromEntries(Object.entries(fields).filter(([field]) => field in frame.fields));
      assert.deepEqual(readable(frame.fields), known, name);
      if (Object.keys(known).length < Object.keys(fields).length) continue;
      whole++;
      assert.deepEqual(encodeControl(frame.kind, frame.fields), bytes, name);
    }
  }
  assert(whole > 45, String(whole));
});

test("a stream of frames is cut at their ends, however it is split", () => {
  const whole = concat(...FRAMES.map((name) => HEX.get(name)!));
  const reader = new FrameReader();
  let frames = 0;
  for (let at = 0; at < whole.length; at += 61) frames += [...reader.feed(whole.slice(at, at + 61))].length;
  assert.equal(frames, FRAMES.length);
  assert.equal(reader.unfinished, 0);
});

test("a key yields what the document says, and its proof is the document's", async () => {
  const said = JSON_OF.get("key");
  assert.equal(hex(KEY.sealingRoot), said.sealing_root);
  assert.equal(hex(KEY.publicKey), said.public_key);
  assert.equal(hex(KEY.tunnelPsk), said.tunnel_psk);
  assert.equal(hex(KEY.keyHashKey), said.key_hash_key);
  assert.equal(KEY.idHex, said.key_id);
  const { relay_id, session_id, challenge } = JSON_OF.get("welcome");
  const proof = await KEY.prove(unhex(relay_id), unhex(session_id), unhex(challenge));
  assert.equal(hex(proof), JSON_OF.get("prove").signature);
});

function expectedBundle(said: any): { payloads: string[]; headers: unknown[] } {
  return { payloads: said.payloads, headers: said.headers ?? said.payloads.map(() => null) };
}

test("bundles decode and encode", () => {
  for (const name of [...HEX.keys()].filter((name) => name.startsWith("bundle-"))) {
    const said = JSON_OF.get(name);
    const payloads = said.payloads ?? [said.payload];
    const bundle = decodeBundle(HEX.get(name)!, payloads.length, name === "bundle-method");
    assert.deepEqual(bundle.entries.map((entry) => new TextDecoder().decode(entry.payload)), payloads);
    assert.equal(bundle.packed, said.packed);
    assert.equal(bundle.method, said.method ?? "");
    if (said.keys) assert.deepEqual(bundle.entries.map((entry) => new TextDecoder().decode(entry.key)), said.keys);
    if (said.headers) assert.deepEqual(bundle.entries.map((entry) => entry.headers), said.headers);
    const outgoing = bundle.entries.map((entry) => ({ ...entry, headers: encodeHeaders(entry.headers) }));
    assert.deepEqual(encodeBundle(outgoing, bundle.packed, bundle.method), HEX.get(name));
  }
});

test("a bundle with an unknown flag, another count or bytes behind it is refused", () => {
  const good = HEX.get("bundle-headers")!;
  for (const [at, value] of [[4, 32], [4, 16], [0, 3], [8, 1], [30, 1]] as const) {
    const bad = good.slice();
    bad[at] = value;
    assert.throws(() => decodeBundle(bad, 2), OpenError);
  }
  assert.throws(() => decodeBundle(concat(good, Uint8Array.of(0)), 2), OpenError);
  for (let size = 0; size < good.length; size++) assert.throws(() => decodeBundle(good.slice(0, size), 2), OpenError);
});

function metadataOf(said: any, frame: DataFrame): Bytes {
  const kind = { [Kind.CALLS]: Kind.REQUEST, [Kind.ANSWERS]: Kind.REPLY }[frame.kind] ?? frame.kind;
  const end = frame.count === 1 || kind === Kind.PUBLISH ? frame.end : encodeEnd(frame.sent, frame.timeout, 1, frame.first);
  return metadata(kind, utf8(said.declared.name), KEY.id, unhex(said.declared.sender_id), end);
}

test("sealed bodies open, and seal to the same bytes", async () => {
  const openers = new Openers();
  const sealers = new Map<string, Sealer>();
  const sealed: { counter: number; sender: string; meta: Bytes; body: Bytes; said: any; count: number }[] = [];
  for (const name of FRAMES) {
    const said = JSON_OF.get(name);
    if (!said.declared || (said.counter === undefined && !said.each)) continue;
    const frame = data(name);
    const parts = said.each ?? [said];
    const bodies = said.each ? decodeRun(frame).map((part) => part.body) : [frame.body];
    parts.forEach((part: any, i: number) => {
      const base = metadataOf(said, frame);
      const line = part.answers && answersLine(unhex(part.answers.sender_id), part.answers.counter);
      assert.equal(Boolean(line), ANSWER_KINDS.has(base[1]!));
      const meta = line ? concat(base, line) : base;
      assert.equal(hex(meta), part.metadata, name);
      const count = said.each ? 1 : frame.count;
      sealed.push({ counter: part.counter, sender: said.declared.sender_id, meta, body: bodies[i]!, said: part, count });
    });
    if (said.hops) assert.deepEqual(decodeRun(frame).map((part) => part.hop), said.hops);
  }
  sealed.sort((a, b) => a.counter - b.counter);
  for (const { counter, sender, meta, body, said, count } of sealed) {
    const opened = await openers.open(KEY, unhex(sender), meta, body);
    assert.equal(opened.counter, counter);
    const bundle = decodeBundle(opened.plain, count);
    assert.deepEqual(
      { payloads: bundle.entries.map((entry) => new TextDecoder().decode(entry.payload)), headers: bundle.entries.map((entry) => entry.headers) },
      expectedBundle(said),
    );
    const sealer = sealers.get(sender) ?? new Sealer(KEY, unhex(sender));
    sealers.set(sender, sealer);
    while (sealer.used < counter) await sealer.seal(meta, opened.plain).body;
    if (sealer.used > counter) continue; // `refused` is `request`, sent back
    assert.deepEqual(await sealer.seal(meta, opened.plain).body, body);
  }
  assert(sealed.length > 10);
});

test("a body with one other bit does not open, nor one with another header, sender or metadata", async () => {
  const openers = new Openers();
  const said = JSON_OF.get("request");
  const { body } = data("request");
  const sender = unhex(said.declared.sender_id);
  const meta = unhex(said.metadata);
  for (let i = 0; i < body.length; i++) {
    const bad = body.slice();
    bad[i]! ^= 1;
    await assert.rejects(openers.open(KEY, sender, meta, bad), OpenError);
  }
  const longer = concat(Uint8Array.of(body[0]! | 8), body.slice(1, 9), Uint8Array.of(2), body.slice(9));
  await assert.rejects(openers.open(KEY, sender, meta, longer), OpenError);
  await assert.rejects(openers.open(KEY, sender, concat(meta, Uint8Array.of(0)), body), OpenError);
  await assert.rejects(openers.open(KEY, unhex("00".repeat(16)), meta, body), OpenError);
});

test("a tunnel's handshake and records are those of the document", async () => {
  const said = JSON_OF.get("tunnel");
  const head = prologue("databases", KEY.id, unhex(said.tunnel_id));
  assert.equal(hex(head), said.prologue);
  const opening = await Opening.begin(KEY, head, await Share.of(unhex(said.opener_ephemeral_secret)));
  assert.deepEqual(opening.message, data("tunnel-open").body);
  const accepted = await accept(KEY, head, opening.message, await Share.of(unhex(said.member_ephemeral_secret)));
  assert.deepEqual(accepted.message, data("tunnel-accept").body);
  const opener = await opening.finish(accepted.message);
  const forth = await accepted.transport.receive.decrypt(data("tunnel-data").body);
  assert.equal(hex(forth), JSON_OF.get("tunnel-data").plain);
  assert.deepEqual(await opener.send.encrypt(forth), data("tunnel-data").body);
  assert.deepEqual(decodeItems(forth).map((item) => item.type), [Item.HEADERS, Item.CHUNK | FIRST | LAST, Item.FINISH]);
  const back = await opener.receive.decrypt(data("tunnel-data-back").body);
  assert.equal(hex(back), JSON_OF.get("tunnel-data-back").plain);
  await assert.rejects(opener.receive.decrypt(data("tunnel-data-back").body), OpenError);
});

async function channel(): Promise<Channel> {
  const said = JSON_OF.get("stream-channel");
  const knock = decode(data("stream-knock").body) as { nonce: Bytes };
  const door = decode(data("stream-door").body) as { store: Bytes; uuid: Bytes; nonce: Bytes };
  const { fields, opening } = await new Knock(KEY, knock.nonce).open(door, await Share.of(unhex(said.caller_share_secret)));
  assert.deepEqual(encode({ op: "open", ...fields }), data("stream-open").body);
  const opened = decode(data("stream-opened").body) as { channel: number; share: Bytes; signature: Bytes };
  await assert.rejects(opening.finish(opened.channel + 1, opened.share, opened.signature), OpenError);
  return opening.finish(opened.channel, opened.share, opened.signature);
}

test("calls and answers in a channel have the codes of the document", async () => {
  const open = await channel();
  for (const [counter, name] of [[0, "stream-append"], [1, "stream-stage"], [2, "stream-commit"]] as const) {
    const frame = data(name);
    const made = open.call(frame.end, frame.body.slice(49));
    assert.equal(made.counter, counter);
    assert.deepEqual(await made.body, frame.body);
  }
  const reply = data("stream-reply");
  const map = await open.answer(3, reply.end, reply.body);
  assert.equal((decode(map) as { op: string }).op, "fetched");
  await assert.rejects(open.answer(2, reply.end, reply.body), OpenError);
  const bad = reply.body.slice();
  bad[60]! ^= 1;
  await assert.rejects(open.answer(3, reply.end, bad), OpenError);
});

test("the code of a long call has the GMAC of its map", async () => {
  const said = JSON_OF.get("stream-long");
  const keys = JSON_OF.get("stream-channel");
  const code = await Code.of(unhex(keys.call_code_key), unhex(keys.call_hash_key));
  const head = data("stream-append").body.slice(0, 17);
  head[9] = said.call_counter;
  assert.equal(hex(await code.make(head, unhex(said.end), new Uint8Array(1500).fill(0x80))), said.code);
});

test("the key of a topic follows from that of a key above", async () => {
  const said = JSON_OF.get("topic-key");
  const secret = await topicSecret(unhex(said.secret), said.topic);
  assert.equal(hex(secret), said.topic_secret);
  assert.equal((await ClusterKey.from(secret)).idHex, said.topic_key_id);
});

test("keys of records choose the document's partitions", async () => {
  const uuid = unhex(JSON_OF.get("stream").uuid);
  for (const [key, [hash, partition]] of Object.entries<[string, number]>(JSON_OF.get("stream-partitions").keys)) {
    const found = await KEY.partitionHash(uuid, utf8(key));
    assert.equal(hex(u64(found)), hash);
    assert.equal(partitionOf(found, 4), partition);
  }
});

test("the hash of a record's key is the document's, and its order is signed by the key", async () => {
  const said = JSON_OF.get("stream");
  assert.equal(hex(await KEY.keyHash(unhex(said.uuid), utf8(said.key))), said.key_hash);
  assert.equal(hex((await sha256(unhex(said.store_public_key))).slice(0, 16)), said.store_id);
  const door = decode(data("stream-door").body) as { orders: [Bytes, Bytes, Bytes][] };
  const [order, publicKey, signature] = door.orders[0]!;
  assert(await verify(publicKey, signature, concat(utf8("iris-stream-order-1"), order)));
  const { definition } = decode(order) as { definition: object };
  assert.deepEqual(readable(definition), JSON_OF.get("order").definition);
});

test("a field of an order that the document does not have is named", () => {
  const order = JSON_OF.get("order");
  assert.equal(unknownField(order), "");
  assert.equal(unknownField({ ...order, colour: "blue" }), "colour");
  assert.equal(unknownField({ ...order, definition: { ...order.definition, colour: "blue" } }), "colour");
});
