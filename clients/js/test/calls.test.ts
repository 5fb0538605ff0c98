// Members and callers against a relay that repeats, changes and misdirects what passes.
import assert from "node:assert/strict";
import { test } from "node:test";
import { view, type Bytes } from "../src/bytes.ts";
import { Calls } from "../src/calls.ts";
import { ConnectionLost, LocalProtocolError, NoMembers, PeerProtocolError, Refusal, RemoteError, RequestError } from "../src/errors.ts";
import { encodeControl, Kind, Reason } from "../src/frames.ts";
import { Guard } from "../src/guard.ts";
import { encodePayload, type Message } from "../src/messages.ts";
import { Binding, Service } from "../src/service.ts";
import { Serving } from "../src/serving.ts";
import { HEX, JSON_OF } from "./document.ts";
import { Troubles } from "../src/troubles.ts";
import { End, KEY, KEYRING, settled } from "./pair.ts";

const MEMBER = 7;

class World {
  caller!: End;
  member!: End;
  calls!: Calls;
  serving!: Serving;
  readonly ran: unknown[] = [];
  readonly service = new Service("echo", { limitBytes: 5000 })
    .onRequest((value) => {
      this.ran.push(value);
      if (value.refuse) throw new Refusal("busy", { left: 0 });
      return value.wait ? new Promise(() => undefined) : value;
    })
    .onPush((value) => void this.ran.push(value));

  static async make(): Promise<World> {
    const world = new World();
    world.caller = await End.open((session) => {
      world.calls = new Calls(session, () => undefined);
    });
    world.member = await End.open((session) => {
      world.serving = new Serving(session, new Guard(() => 1));
    });
    const joined = world.serving.join(new Binding(world.service, KEYRING, new Troubles(() => undefined), async () => undefined));
    world.member.acknowledge({ member: MEMBER });
    await settled();
    world.member.acknowledge();
    await joined;
    return world;
  }

  request(value: unknown): Promise<Message> {
    const { payload, packed } = encodePayload(value);
    const asked = this.calls.request({ kind: Kind.REQUEST, name: "echo", key: KEY }, payload, packed, 2000, {});
    asked.catch(() => undefined);
    return asked;
  }

  /** Carry a call to the member as a relay does: under another hop id, and an alias of its own. */
  async carry(frame: Bytes, declared: object = {}): Promise<void> {
    const { kind, name, key_id, sender_id } = this.caller.declared;
    this.member.declare({ kind, name, key_id, sender_id, member: MEMBER, ...declared });
    const moved = frame.slice();
    view(moved).setUint32(6, 0, true);
    view(moved).setBigUint64(10, view(frame).getBigUint64(10, true) | (1n << 63n), true);
    this.member.feed(moved);
    await settled();
  }

  async back(frame: Bytes, declared: object = {}): Promise<void> {
    const { kind, name, key_id, sender_id } = this.member.declared;
    this.caller.declare({ kind, name, key_id, sender_id, ...declared });
    const moved = frame.slice();
    view(moved).setUint32(6, 0, true);
    view(moved).setBigUint64(10, view(frame).getBigUint64(10, true) & ~(1n << 63n), true);
    this.caller.feed(moved);
    await settled();
  }
}

test("a request runs once, however often the relay delivers it", async () => {
  const world = await World.make();
  const asked = world.request("x");
  const frame = await world.caller.sent(Kind.REQUEST);
  await world.carry(frame);
  await world.back(await world.member.sent(Kind.REPLY));
  assert.equal((await asked).text, "x");
  await world.carry(frame);
  assert.deepEqual(world.member.refusals, [Reason.REPLAYED]);
  assert.equal(world.ran.length, 1);
});

test("a request for another address, or that does not open, is sent back unread", async () => {
  const world = await World.make();
  void world.request("x");
  const frame = await world.caller.sent(Kind.REQUEST);
  await world.carry(frame, { name: "other" });
  await world.carry(frame, { member: 8 });
  await world.carry(frame, { key_id: new Uint8Array(16) });
  const forged = frame.slice();
  forged[forged.length - 1]! ^= 1;
  await world.carry(forged);
  assert.deepEqual(world.member.refusals, [Reason.UNREADABLE, Reason.LEAVING, Reason.UNREADABLE, Reason.UNREADABLE]);
  assert.deepEqual(world.ran, []);
  await world.carry(frame);
  assert.equal(world.ran.length, 1);
});

test("a request after its deadline is sent back, and so is one to a member that is full", async () => {
  const world = await World.make();
  void world.request("x");
  const frame = await world.caller.sent(Kind.REQUEST);
  view(frame).setBigInt64(18, 1n, true);
  await world.carry(frame);
  assert.deepEqual(world.member.refusals, [Reason.EXPIRED]);
  for (const value of [{ wait: new Uint8Array(3000) }, { wait: new Uint8Array(3000) }]) {
    void world.request(value);
    await world.carry(await world.caller.sent(Kind.REQUEST));
  }
  assert.deepEqual(world.member.refusals, [Reason.EXPIRED, Reason.FULL]);
  assert.equal(world.ran.length, 1);
  world.caller.session.end(new LocalProtocolError("done"));
});

test("a caller accepts an answer only from its request's address, and bound to it", async () => {
  const world = await World.make();
  const first = world.request("a");
  const second = world.request("b");
  const frames = [await world.caller.sent(Kind.REQUEST), await world.caller.sent(Kind.REQUEST)];
  await world.carry(frames[0]!);
  const reply = await world.member.sent(Kind.REPLY);
  const swapped = reply.slice();
  view(swapped).setBigUint64(10, 2n, true);
  await world.back(swapped); // the first one's reply, under the second one's hop id
  await assert.rejects(second, (error) => error instanceof ConnectionLost && error.mayHaveRun);
  await world.back(reply, { name: "other" });
  await assert.rejects(first, ConnectionLost);
  assert.equal(world.caller.session.ended, null);
});

test("a refusal of a handler has its code and its details", async () => {
  const world = await World.make();
  const asked = world.request({ refuse: true });
  await world.carry(await world.caller.sent(Kind.REQUEST));
  await world.back(await world.member.sent(Kind.FAULT));
  const error = await asked.catch((raised: unknown) => raised);
  assert(error instanceof RemoteError);
  assert.deepEqual([error.code, error.details, error.mayHaveRun], ["busy", { left: 0 }, true]);
});

test("FAIL says whether a handler may have run", async () => {
  const world = await World.make();
  const asked = world.request("x");
  await world.caller.sent(Kind.REQUEST);
  world.caller.say(Kind.FAIL, { hop: 1, cause: 1 });
  await assert.rejects(asked, (error) => error instanceof NoMembers && !error.mayHaveRun);
  const stale = world.request("x");
  world.caller.say(Kind.FAIL, { hop: 2, cause: 5, detail: "stale" });
  await assert.rejects(stale, (error) => error instanceof RequestError && error.mayHaveRun);
  const lost = world.request("x");
  world.caller.session.end(new LocalProtocolError("gone"));
  await assert.rejects(lost, (error) => error instanceof ConnectionLost && error.mayHaveRun);
});

test("pushes are credited once per turn", async () => {
  const world = await World.make();
  for (let i = 0; i < 3; i++) {
    const { payload, packed } = encodePayload(i);
    world.calls.push({ kind: Kind.PUSH, name: "echo", key: KEY }, payload, packed, 1000, {});
    await world.carry(await world.caller.sent(Kind.PUSH));
  }
  await settled();
  const credits = world.member.frames.filter(({ kind }) => kind === Kind.CREDIT) as unknown as { fields: { hops: number[] } }[];
  assert.deepEqual(credits.flatMap(({ fields }) => fields.hops).length, 3);
  assert.deepEqual(world.ran, [0, 1, 2]);
  world.caller.session.end(new LocalProtocolError("done"));
});

test("a counter is accepted once, and not when it is below the window; a full table refuses new senders", () => {
  const guard = new Guard(() => 2, 4);
  const verdict = (counter: number, sender = "s", key = "k"): string => guard.accept(key, sender, "", counter, 0);
  assert.deepEqual([verdict(5), verdict(5), verdict(4), verdict(300_000), verdict(5), verdict(299_999)], ["new", "replayed", "new", "new", "stale", "new"]);
  assert.deepEqual([verdict(0, "t"), verdict(0, "u"), verdict(0, "v")], ["new", "new", "full"]);
  assert.deepEqual([verdict(0, "a", "other"), verdict(0, "b", "other")], ["new", "full"]);
  assert.equal(guard.accept("k", "v", "", 0, 1_200_000_001), "new");
  assert.equal(guard.accept("k", "s", "", 5, 1_200_000_001), "new");
});

test("frames that a relay may not send end the session, and nothing else does", async () => {
  const bad: [string, Bytes][] = [
    ["a frame of 1 byte", Uint8Array.of(1, 0, 0, 0, 4)],
    ["a huge frame", Uint8Array.of(255, 255, 255, 255, 4, 0)],
    ["an unknown kind", Uint8Array.of(2, 0, 0, 0, 0x3f, 0)],
    ["no map", Uint8Array.of(3, 0, 0, 0, Kind.PONG, 0, 1)],
    ["a second WELCOME", HEX.get("welcome")!],
    ["a HELLO", HEX.get("hello")!],
    ["an undeclared alias", HEX.get("publish")!],
    ["an answer to nothing", encodeControl(Kind.DECLARE, { alias: 1, kind: Kind.PING, name: "a", key_id: KEY.id, sender_id: KEY.id })],
  ];
  for (const [what, bytes] of bad) {
    const world = await World.make();
    world.caller.feed(bytes);
    await settled();
    assert(world.caller.session.ended instanceof PeerProtocolError, what);
    assert(world.caller.closed, what);
  }
});

test("mutated frames are accepted, or end the session with one error", async () => {
  let seed = 7;
  const draw = (below: number): number => {
    seed = (Math.imul(seed, 1_103_515_245) + 12_345) >>> 0;
    return (seed >>> 8) % below;
  };
  const frames = [...HEX].filter(([name]) => !name.startsWith("bundle-") && JSON_OF.get(name).frame in Kind).map(([, bytes]) => bytes);
  for (let i = 0; i < 150; i++) {
    const end = await End.open((session) => {
      new Calls(session, () => undefined);
      new Serving(session, new Guard(() => 1));
    });
    end.declare({ kind: Kind.REQUEST, name: "databases", member: MEMBER });
    const bytes = frames[draw(frames.length)]!.slice();
    for (let n = draw(4); n >= 0; n--) bytes[4 + draw(bytes.length - 4)]! = draw(256);
    end.feed(bytes);
    if (i % 50 === 0) await settled();
    const { ended } = end.session;
    assert(ended === null || ended instanceof PeerProtocolError || ended instanceof LocalProtocolError || ended.message.startsWith("the relay said bye"), String(ended?.stack));
  }
});
