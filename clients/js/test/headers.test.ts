// Headers that cannot be sent are refused before anything is.
import assert from "node:assert/strict";
import { test } from "node:test";
import { encodeHeaders, MAX_HEADERS } from "../src/bundle.ts";
import { EncodeError, MessageTooLarge } from "../src/errors.ts";

test("headers must be strings of at most 3 KiB", () => {
  const wrong: [unknown, new (text: string) => Error, RegExp][] = [
    [{ a: 1 }, EncodeError, /header values must be strings, not number/],
    [{ a: null }, EncodeError, /header values must be strings, not null/],
    [[["a", "b"]], EncodeError, /headers must be an object of strings/],
    ["a: b", EncodeError, /headers must be an object of strings/],
    [new Map([["a", "b"]]), EncodeError, /headers must be an object of strings/],
    [{ a: "\ud800" }, EncodeError, /surrogate/],
    [{ a: "x".repeat(MAX_HEADERS) }, MessageTooLarge, /headers of 3078 bytes are over the limit of 3072/],
  ];
  for (const [headers, kind, text] of wrong) {
    assert.throws(() => encodeHeaders(headers as Record<string, string>), (error) => error instanceof kind && text.test(error.message));
  }
  assert.equal(encodeHeaders({}).length, 0);
  assert.equal(encodeHeaders(undefined).length, 0);
  assert.ok(encodeHeaders({ a: "b" }).length);
});
