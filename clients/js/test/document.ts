// The examples of docs/protocol.md.
import { readFileSync } from "node:fs";
import { unhex, type Bytes } from "../src/bytes.ts";

const text = readFileSync(new URL("../../../docs/protocol.md", import.meta.url), "utf8");
/** Integers beyond 2^53 as bigint. */
const exact = (_: string, value: unknown, { source }: { source: string }): unknown =>
  typeof value === "number" && !Number.isSafeInteger(value) ? BigInt(source) : value;

export const HEX = new Map<string, Bytes>();
export const JSON_OF = new Map<string, any>();
for (const [, kind, name, body] of text.matchAll(/^```(hex|json) name=(\S+)\n(.*?)^```/gms)) {
  if (kind === "hex") HEX.set(name!, unhex(body!.replace(/\s/g, "")));
  else JSON_OF.set(name!, JSON.parse(body!, exact as (key: string, value: unknown) => unknown));
}
