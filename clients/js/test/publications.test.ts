// Two sessions back to back: what a subscriber accepts and reports, whatever the relay between them does.
import assert from "node:assert/strict";
import { test } from "node:test";
import { view, type Bytes } from "../src/bytes.ts";
import { Casts } from "../src/casts.ts";
import { Kind } from "../src/frames.ts";
import { Guard } from "../src/guard.ts";
import type { Loss } from "../src/messages.ts";
import { Overloaded } from "../src/errors.ts";
import { Subscription, Subscriptions, type SubscribeOptions, type WhenFull } from "../src/subscriptions.ts";
import { encodePayload } from "../src/messages.ts";
import { Troubles } from "../src/troubles.ts";
import { End, KEY, KEYRING, settled } from "./pair.ts";

class World {
  publisher!: End;
  subscriber!: End;
  casts!: Casts;
  readonly guard = new Guard(() => 1);
  readonly subscriptions = new Subscriptions(this.guard, KEYRING);
  readonly gaps: Loss[] = [];
  /** What a subscription that is closed waits for. */
  closing: () => Promise<void> = async () => undefined;

  static async make(): Promise<World> {
    const world = new World();
    world.publisher = await End.open((session) => {
      world.casts = new Casts(session);
    });
    world.subscriber = await End.open((session) => {
      world.subscriptions.attach(session);
      session.onControl(Kind.GAP, (fields) => world.subscriptions.gap(fields));
    });
    return world;
  }

  async subscribe(filter = "news", options: SubscribeOptions = {}): Promise<Subscription> {
    const subscription = new Subscription(filter, { onLoss: (loss) => this.gaps.push(loss), ...options }, new Troubles(() => undefined), () => this.closing());
    this.subscriptions.add(subscription);
    const registered = this.subscriptions.register(this.subscriber.session, subscription);
    this.subscriber.acknowledge();
    await settled();
    this.subscriber.acknowledge();
    await registered;
    return subscription;
  }

  /** Publish one message, and return its frame as the relay got it. */
  async publish(value: unknown): Promise<Bytes> {
    const { payload, packed } = encodePayload(value);
    this.casts.add({ kind: Kind.PUBLISH, name: "news", key: KEY }, payload, packed, undefined);
    return this.publisher.sent(Kind.PUBLISH);
  }

  /** Deliver a frame, plainly or to queue groups. */
  async deliver(frame: Bytes, delivery: object = {}): Promise<void> {
    const { name, sender_id } = this.publisher.declared;
    this.subscriber.declare({ kind: Kind.PUBLISH, name, sender_id, ...delivery });
    this.subscriber.feed(frame);
    await settled();
  }

  async gap(first: number, count: number, delivery: object = {}): Promise<void> {
    const { name, key_id, sender_id } = this.publisher.declared;
    this.subscriber.say(Kind.GAP, { kind: Kind.PUBLISH, name, key_id, sender_id, first, count, cause: "slow receiver", ...delivery });
    await settled();
  }

  get counts(): (number | null)[] {
    return this.gaps.map(({ count }) => count);
  }
}

/** The values that wait in a subscription's queue. */
async function queued(subscription: Subscription): Promise<unknown[]> {
  subscription.end();
  const values: unknown[] = [];
  for await (const { value } of subscription) values.push(value);
  return values;
}

test("messages come in order, and each once", async () => {
  const world = await World.make();
  const subscription = await world.subscribe();
  for (let i = 0; i < 3; i++) {
    const frame = await world.publish(i);
    await world.deliver(frame);
    await world.deliver(frame);
  }
  assert.deepEqual(await queued(subscription), [0, 1, 2]);
  assert.deepEqual(world.counts, []);
});

test("loops that share a subscription get each message once, and all end", { timeout: 10_000 }, async () => {
  const world = await World.make();
  const subscription = await world.subscribe();
  const values: unknown[] = [];
  const loops = [0, 1, 2].map(async () => {
    for await (const { value } of subscription) values.push(value);
  });
  for (let i = 0; i < 6; i++) {
    await world.deliver(await world.publish(i));
    await settled();
  }
  subscription.end();
  await Promise.all(loops);
  assert.deepEqual(values, [0, 1, 2, 3, 4, 5]);
});

test("what is missing in a sender's sequence is reported, once", async () => {
  const world = await World.make();
  const subscription = await world.subscribe();
  await world.deliver(await world.publish(0));
  for (let i = 1; i < 4; i++) await world.publish(i);
  await world.gap(1, 2);
  assert.deepEqual(world.counts, [2]);
  await world.gap(1, 2);
  await world.deliver(await world.publish(4));
  assert.deepEqual(world.counts, [2, 1]);
  assert.equal(subscription.lostMessages, 3);
  assert.deepEqual(await queued(subscription), [0, 4]);
});

test("a report that was wrong costs no message", async () => {
  const world = await World.make();
  const subscription = await world.subscribe();
  await world.deliver(await world.publish(0));
  await world.gap(1, 5);
  await world.deliver(await world.publish(1));
  assert.deepEqual(await queued(subscription), [0, 1]);
});

test("a loss of unknown size is reported once, until something comes", async () => {
  const world = await World.make();
  await world.subscribe();
  await world.deliver(await world.publish(0));
  const unknown = (): Promise<void> => world.gap(0, 2 ** 32 - 1);
  await unknown();
  await unknown();
  assert.deepEqual(world.counts, [null]);
  await world.deliver(await world.publish(1));
  await unknown();
  assert.deepEqual(world.counts, [null, null]);
});

test("a new subscription misses nothing of what came before it, and a lost connection is a gap of its own", async () => {
  const world = await World.make();
  await world.subscribe();
  await world.deliver(await world.publish(0));
  await world.publish(1);
  const later = await world.subscribe("*");
  await world.deliver(await world.publish(2));
  assert.deepEqual(world.counts, [1]);
  assert.equal(later.lostMessages, 0);
  world.subscriptions.interrupted("the relay was lost");
  assert.deepEqual(world.counts, [1, null, null]);
  await world.publish(3);
  await world.deliver(await world.publish(4));
  assert.deepEqual(world.counts, [1, null, null]);
});

test("a share of a queue group is no gap, but what only a group got is lost to others", async () => {
  const world = await World.make();
  const worker = await world.subscribe("news", { group: "workers" });
  const shared = { plain: false, groups: ["workers"] };
  await world.deliver(await world.publish(0), shared);
  await world.publish(1);
  await world.deliver(await world.publish(2), shared);
  assert.deepEqual(world.counts, []);
  assert.equal(worker.lostMessages, 0);
  const other = await world.subscribe("news");
  await world.deliver(await world.publish(3), { plain: true, groups: ["workers"] });
  await world.deliver(await world.publish(4), shared);
  assert.deepEqual(world.counts, [1]);
  assert.deepEqual(await queued(other), [3]);
  assert.deepEqual(await queued(worker), [0, 2, 3, 4]);
});

test("a bundle for a group with several subscriptions here goes to one of them, in turn", async () => {
  const world = await World.make();
  const [one, two] = [await world.subscribe("news", { group: "workers" }), await world.subscribe("*", { group: "workers" })];
  for (let i = 0; i < 4; i++) await world.deliver(await world.publish(i), { plain: false, groups: ["workers"] });
  await world.gap(4, 1, { plain: false, groups: ["workers"] });
  assert.deepEqual(world.counts, [1]);
  const [first, second] = [await queued(one), await queued(two)];
  assert.equal(first.length, 2);
  assert.deepEqual([...first, ...second].sort(), [0, 1, 2, 3]);
});

test("a member of a group yields what comes until its relay has answered", { timeout: 10_000 }, async () => {
  const world = await World.make();
  let answer!: () => void;
  world.closing = () => new Promise((resolve) => (answer = resolve));
  const worker = await world.subscribe("news", { group: "workers" });
  const values: unknown[] = [];
  const iterating = (async () => {
    for await (const { value } of worker) values.push(value);
  })();
  const closing = worker.close();
  await world.deliver(await world.publish(0), { plain: false, groups: ["workers"] });
  answer();
  await Promise.all([closing, iterating]);
  assert.deepEqual(values, [0]);
  assert.deepEqual(world.counts, []);
});

test("what nobody iterates over when a member leaves its group is reported", async () => {
  const world = await World.make();
  const worker = await world.subscribe("news", { group: "workers" });
  for (let i = 0; i < 4; i++) await world.deliver(await world.publish(i), { plain: false, groups: ["workers"] });
  for await (const { value } of worker) if (value === 1) break;
  assert.deepEqual(world.counts, [2]);
  assert.equal(worker.lostMessages, 2);
});

test("a full subscription drops new messages, drops old ones, or closes", async () => {
  const room = 600; // for two messages
  const filled = async (whenFull: WhenFull): Promise<[Subscription, World]> => {
    const world = await World.make();
    const subscription = await world.subscribe("news", { whenFull, limitBytes: room });
    for (let i = 0; i < 5; i++) await world.deliver(await world.publish(i));
    return [subscription, world];
  };
  for (const [whenFull, kept] of [["drop-new", [0, 1]], ["drop-old", [3, 4]]] as const) {
    const [subscription, world] = await filled(whenFull);
    assert.equal(subscription.lostMessages, 3);
    assert.deepEqual(world.gaps.map(({ count, cause }) => [count, cause]), [0, 1, 2].map(() => [1, "slow subscriber"]));
    assert.deepEqual(await queued(subscription), kept);
  }
  const [closed] = await filled("close");
  const values: unknown[] = [];
  await assert.rejects(async () => {
    for await (const { value } of closed) values.push(value);
  }, Overloaded);
  assert.deepEqual(values, [0, 1]);
});

test("what a subscription cannot do when it is full is refused, with what it can do", async () => {
  const world = await World.make();
  for (const wrong of ["cut", "wait", "drop"]) {
    await assert.rejects(world.subscribe("news", { whenFull: wrong as WhenFull }), {
      name: "ConfigError", message: `whenFull must be 'drop-new', 'drop-old' or 'close', not '${wrong}'`,
    });
  }
});

test("a message that does not open, or is too old, is reported as lost", async () => {
  const world = await World.make();
  const subscription = await world.subscribe();
  await world.deliver(await world.publish(0));
  const forged = (await world.publish(1)).slice();
  forged[forged.length - 1]! ^= 1;
  await world.deliver(forged);
  assert.deepEqual(world.counts, [1]);
  await world.deliver(await world.publish(2));
  assert.deepEqual(world.counts, [1]);
  const now = Date.now;
  Date.now = () => now() - 600_000;
  const old = await world.publish(3);
  Date.now = now;
  await world.deliver(old);
  assert.deepEqual(world.counts, [1, 1]);
  assert.deepEqual(await queued(subscription), [0, 2]);
});

test("a publication under a key that is not the topic's is dropped, and the session goes on", async () => {
  const world = await World.make();
  const subscription = await world.subscribe();
  const frame = await world.publish(0);
  await world.deliver(frame, { key_id: new Uint8Array(16) });
  assert.equal(world.subscriber.session.ended, null);
  await world.deliver(await world.publish(1));
  assert.deepEqual(await queued(subscription), [1]);
});

test("many messages of one turn are one bundle, which is cut at 65 KiB", async () => {
  const world = await World.make();
  const subscription = await world.subscribe();
  for (let i = 0; i < 100; i++) {
    world.casts.add({ kind: Kind.PUBLISH, name: "news", key: KEY }, new Uint8Array(1000).fill(i), false, undefined);
  }
  const sizes: number[] = [];
  while (sizes.reduce((a, b) => a + b, 0) < 100) {
    const frame = await world.publisher.sent(Kind.PUBLISH);
    sizes.push(view(frame).getUint32(38, true));
    assert(frame.length <= 66_560 + 200);
    await world.deliver(frame);
  }
  assert.deepEqual(sizes, [66, 34]);
  assert.equal((await queued(subscription)).length, 100);
});
