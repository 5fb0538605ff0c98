// Why a WebSocket was not opened is said in a way that leads to the cause.
import assert from "node:assert/strict";
import { test, type TestContext } from "node:test";
import { ConfigError, RelayUnavailable } from "../src/errors.ts";
import { openSocket } from "../src/socket.ts";

const URL = "ws://127.0.0.1:7432";

/** Replace a global for one test. */
function put(t: TestContext, name: string, value: unknown): void {
  const before = Object.getOwnPropertyDescriptor(globalThis, name);
  Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
  t.after(() => {
    if (before) Object.defineProperty(globalThis, name, before);
    else delete (globalThis as Record<string, unknown>)[name];
  });
}

class Refused {
  onerror: (() => void) | null = null;
  constructor() {
    queueMicrotask(() => this.onerror?.());
  }
  close(): void {}
}

test("a runtime without WebSocket is named, not the address", async (t) => {
  put(t, "WebSocket", undefined);
  await assert.rejects(openSocket(URL), (error) => error instanceof ConfigError && /has no WebSocket; use Node 22 or newer/.test(error.message));
});

test("a page that may have been refused learns how the relay would allow it", async (t) => {
  put(t, "WebSocket", Refused);
  put(t, "location", { origin: "https://app.example" });
  await assert.rejects(
    openSocket(URL),
    (error) =>
      error instanceof RelayUnavailable &&
      error.message.endsWith(
        "start one with: iris relay --listen ws://127.0.0.1:7432 --origin https://app.example; or a relay there refused this page, because it does not allow https://app.example: then its log has web.refused",
      ),
  );
});

test("a program outside a page is not told of origins", async (t) => {
  put(t, "WebSocket", Refused);
  await assert.rejects(openSocket(URL), (error) => error instanceof RelayUnavailable && error.message.endsWith("start one with: iris relay --listen ws://127.0.0.1:7432"));
});
