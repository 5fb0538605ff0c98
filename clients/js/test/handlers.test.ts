// Handlers: generator functions are refused when they are registered, and what a handler returns is looked at.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ConfigError } from "../src/errors.ts";
import { checkResult, Service } from "../src/service.ts";

async function* asynchronous(): AsyncGenerator<string> {
  yield "never";
}

function* plain(): Generator<string> {
  yield "never";
}

test("a generator function is refused for every kind of message", () => {
  for (const make of [plain, asynchronous]) {
    const refused = { name: "ConfigError", message: /is a generator function, whose body would never run/ };
    assert.throws(() => new Service("shop").onRequest(make), refused);
    assert.throws(() => new Service("shop").onRequest("place", make), refused);
    assert.throws(() => new Service("shop").onPush(make), refused);
    assert.throws(() => new Service("shop").onSurvey(make), refused);
    assert.throws(() => new Service("shop").onBroadcast(make), refused);
    assert.throws(() => new Service("shop").onTunnel(make), refused);
  }
});

test("what is no function is refused", () => {
  for (const value of [null, undefined, 7, "place", {}]) {
    assert.throws(() => new Service("shop").onRequest(value as any), ConfigError);
  }
});

test("a generator that a handler returns is an error of that message", () => {
  assert.throws(() => checkResult(plain()), /returned a generator, whose body never runs/);
  assert.throws(() => checkResult(asynchronous()), /returned a generator, whose body never runs/);
  for (const value of [null, undefined, 0, "", [1], { next: 1 }, new Map()]) assert.equal(checkResult(value), value);
});
