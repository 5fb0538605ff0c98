/** Messages and losses as users see them. */

import { text, utf8, type Bytes } from "./bytes.ts";
import type { Headers } from "./bundle.ts";
import { DecodeError, EncodeError, type IrisError } from "./errors.ts";
import { decode, encode } from "./msgpack.ts";

/** A message as received. */
export class Message {
  /** The bytes as sent. */
  readonly payload: Bytes;
  /** The topic or cluster. */
  readonly name: string;
  readonly headers: Headers;
  /** Whether the payload is MessagePack, because the sender gave an object. */
  readonly packed: boolean;
  /** The sender's id in hex, new for each of its connections. */
  readonly source: string;
  /** The method that was called; "" for none. */
  readonly method: string;

  constructor(payload: Bytes, name: string, headers: Headers | null, packed: boolean, source: string, method = "") {
    this.payload = payload;
    this.name = name;
    this.headers = headers ?? {};
    this.packed = packed;
    this.source = source;
    this.method = method;
  }

  /** The payload: bytes if it was sent as bytes or text, else the value. Raises DecodeError. */
  get value(): unknown {
    return this.packed ? decode(this.payload) : this.payload;
  }

  /** The payload as text. Raises DecodeError. */
  get text(): string {
    if (this.packed) {
      const value = decode(this.payload);
      if (typeof value !== "string") throw new DecodeError("the message is not a text");
      return value;
    }
    try {
      return text(this.payload);
    } catch (error) {
      throw new DecodeError("the message is not UTF-8", { cause: error });
    }
  }
}

/** Return what is sent for `value`: bytes and text as they are, other values as MessagePack. Raises EncodeError. */
export function encodePayload(value: unknown): { payload: Bytes; packed: boolean } {
  if (value instanceof Uint8Array) return { payload: new Uint8Array(value), packed: false };
  if (typeof value === "string") {
    if (!value.isWellFormed()) throw new EncodeError("a text has surrogates without their pair");
    return { payload: utf8(value), packed: false };
  }
  return { payload: encode(value), packed: true };
}

/** Messages that did not arrive: `count` of them, null if nobody knows, and why. */
export interface Loss {
  readonly kind: "publish" | "broadcast" | "push" | "survey" | "relay";
  readonly name: string;
  /** The sender's id in hex; "" if it is not known or is this client. */
  readonly source: string;
  readonly count: number | null;
  readonly cause: string;
  /** Of a push: what a request would have raised. */
  readonly error?: IrisError;
}
