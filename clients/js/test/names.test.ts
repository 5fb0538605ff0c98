// What is no name is refused before anything is sent: TypeScript does not let it pass, but JavaScript does.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Client, type ConnectOptions } from "../src/client.ts";
import { ConfigError, EncodeError, InvalidName } from "../src/errors.ts";
import { Service } from "../src/service.ts";
import { KEYRING } from "./pair.ts";

const BAD: readonly any[] = [0, 1.5, false, true, [], ["orders"], {}, new Uint8Array(2), " ", "a b", "\ud800", "a\0"];

/** A client that never connects: what waits for a connection is not refused, and never ends. */
function client(options: Partial<ConnectOptions> = {}): Client {
  return new Client({ relay: "ws://127.0.0.1:1", keyring: KEYRING, ...options } as ConnectOptions, KEYRING);
}

type Use = (value: any) => unknown;

const NEEDED: Record<string, Use> = {
  request: (name) => client().request(name, ""),
  push: (name) => client().push(name, ""),
  survey: async (name) => client().survey(name, ""),
  broadcast: async (name) => client().broadcast(name, ""),
  publish: (name) => client().publish(name, ""),
  audience: (name) => client().audience(name),
  members: (name) => client().members(name),
  subscribe: async (name) => client().subscribe(name),
  tunnel: (name) => client().tunnel(name),
  service: async (name) => new Service(name),
  read: (name) => client().streams.read(name).next(),
  find: (name) => client().streams.find(name, 0),
  describe: (name) => client().streams.describe(name),
  append: async (name) => client().streams.append(name, ""),
};
const OPTIONAL: Record<string, Use> = {
  method: (method) => client().request("shop", "", { method, timeoutMs: 1 }),
  "method of push": (method) => client().push("shop", "", { method, timeoutMs: 1 }),
  "method of survey": async (method) => client().survey("shop", "", { method, timeoutMs: 1 }),
  member: (member) => client().request("shop", "", { member, timeoutMs: 1 }),
  group: async (group) => client().subscribe("orders.>", { group }),
  "uuid of read": (uuid) => client().streams.read("orders", { uuid }).next(),
  "uuid of append": async (uuid) => client().streams.append("orders", "", { uuid }),
  headers: (value) => client().publish("orders", "", { headers: { a: value } }),
};

async function refused(use: Use, value: unknown): Promise<boolean> {
  try {
    await use(value);
  } catch (error) {
    return error instanceof InvalidName || error instanceof ConfigError || error instanceof EncodeError;
  }
  return false;
}

for (const [verb, use] of Object.entries(NEEDED)) {
  test(`what is no name is refused by ${verb}`, async () => {
    for (const value of [null, undefined, "", ...BAD]) assert.ok(await refused(use, value), String(value));
  });
}

for (const [what, use] of Object.entries(OPTIONAL)) {
  test(`what is no name is refused as ${what}`, async () => {
    const texts = what === "headers" ? [" ", "a b", "a\0"] : [];
    for (const value of BAD) if (!texts.includes(value)) assert.ok(await refused(use, value), String(value));
  });
}

test("null means none where a name may be left out", () => {
  assert.equal(client().subscribe("orders.>", { group: null }).group, "");
  assert.equal(client().subscribe("orders.>", { group: "" }).group, "");
});

test("what a service says of itself, and the label of a program, are texts", () => {
  assert.throws(() => new Service("shop", { version: 7 as any }), ConfigError);
  assert.throws(() => new Service("shop", { description: null as any }), ConfigError);
  assert.throws(() => client({ label: 7 as any }), ConfigError);
});
