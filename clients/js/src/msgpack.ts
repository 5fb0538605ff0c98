/** MessagePack: what the protocol and payloads need. Integers beyond 2^53 are bigint. */

import { EMPTY, text, utf8, view, type Bytes } from "./bytes.ts";
import { DecodeError, EncodeError } from "./errors.ts";

const MAX_DEPTH = 128;

/** Return `value` in MessagePack: null, booleans, numbers, bigints, strings, bytes, Dates, arrays, Maps and objects. */
export function encode(value: unknown): Bytes {
  const out = new Writer();
  out.value(value, 0);
  return out.done();
}

class Writer {
  #bytes = new Uint8Array(256);
  #view = view(this.#bytes);
  #at = 0;

  done(): Bytes {
    return this.#bytes.slice(0, this.#at);
  }

  #room(count: number): number {
    const at = this.#at;
    this.#at += count;
    if (this.#at > this.#bytes.length) {
      const larger = new Uint8Array(Math.max(2 * this.#bytes.length, this.#at));
      larger.set(this.#bytes);
      this.#bytes = larger;
      this.#view = view(larger);
    }
    return at;
  }

  #u8(value: number): void {
    const at = this.#room(1);
    this.#bytes[at] = value;
  }

  #head(small: number, limit: number, kinds: readonly (number | undefined)[], size: number): void {
    if (size < limit) this.#u8(small | size);
    else if (size < 0x100 && kinds[0] !== undefined) {
      this.#u8(kinds[0]);
      this.#u8(size);
    } else if (size < 0x10000) {
      this.#u8(kinds[1]!);
      const at = this.#room(2);
      this.#view.setUint16(at, size);
    } else {
      this.#u8(kinds[2]!);
      const at = this.#room(4);
      this.#view.setUint32(at, size);
    }
  }

  #raw(bytes: Uint8Array): void {
    const at = this.#room(bytes.length);
    this.#bytes.set(bytes, at);
  }

  value(value: unknown, depth: number): void {
    if (depth > MAX_DEPTH) throw new EncodeError(`the value is nested deeper than ${MAX_DEPTH}`);
    if (value === null || value === undefined) this.#u8(0xc0);
    else if (typeof value === "boolean") this.#u8(value ? 0xc3 : 0xc2);
    else if (typeof value === "number") this.#number(value);
    else if (typeof value === "bigint") this.#integer(value);
    else if (typeof value === "string") {
      if (!value.isWellFormed()) throw new EncodeError("a text has surrogates without their pair");
      const bytes = utf8(value);
      this.#head(0xa0, 32, [0xd9, 0xda, 0xdb], bytes.length);
      this.#raw(bytes);
    } else if (value instanceof Uint8Array) {
      this.#head(0, 0, [0xc4, 0xc5, 0xc6], value.length);
      this.#raw(value);
    } else if (Array.isArray(value)) {
      this.#head(0x90, 16, [undefined, 0xdc, 0xdd], value.length);
      for (const item of value) this.value(item, depth + 1);
    } else if (value instanceof Map) this.#map([...value], depth);
    else if (value instanceof Date) this.#date(value);
    else if (typeof value === "object" && !(value instanceof ArrayBuffer) && !ArrayBuffer.isView(value)) {
      this.#map(Object.entries(value).filter(([, item]) => item !== undefined), depth);
    } else throw new EncodeError(`cannot encode a value of type ${describe(value)}; send bytes or plain objects`);
  }

  #map(entries: [unknown, unknown][], depth: number): void {
    this.#head(0x80, 16, [undefined, 0xde, 0xdf], entries.length);
    for (const [key, item] of entries) {
      this.value(key, depth + 1);
      this.value(item, depth + 1);
    }
  }

  #number(value: number): void {
    if (Number.isSafeInteger(value) && !Object.is(value, -0)) this.#integer(value);
    else {
      this.#u8(0xcb);
      const at = this.#room(8);
      this.#view.setFloat64(at, value);
    }
  }

  #integer(value: number | bigint): void {
    if (value >= 0) {
      if (value < 0x80) this.#u8(Number(value));
      else if (value < 0x100) {
        this.#u8(0xcc);
        this.#u8(Number(value));
      } else if (value < 0x10000) {
        this.#u8(0xcd);
        const at = this.#room(2);
        this.#view.setUint16(at, Number(value));
      } else if (value < 0x100000000) {
        this.#u8(0xce);
        const at = this.#room(4);
        this.#view.setUint32(at, Number(value));
      } else {
        if (value >= 1n << 64n) throw new EncodeError("an integer is not below 2^64");
        this.#u8(0xcf);
        const at = this.#room(8);
        this.#view.setBigUint64(at, BigInt(value));
      }
    } else if (value >= -0x20) this.#u8(0x100 + Number(value));
    else if (value >= -0x80) {
      this.#u8(0xd0);
      const at = this.#room(1);
      this.#view.setInt8(at, Number(value));
    } else if (value >= -0x8000) {
      this.#u8(0xd1);
      const at = this.#room(2);
      this.#view.setInt16(at, Number(value));
    } else if (value >= -0x80000000) {
      this.#u8(0xd2);
      const at = this.#room(4);
      this.#view.setInt32(at, Number(value));
    } else {
      if (value < -(1n << 63n)) throw new EncodeError("an integer is below -2^63");
      this.#u8(0xd3);
      const at = this.#room(8);
      this.#view.setBigInt64(at, BigInt(value));
    }
  }

  /** The timestamp of 96 bits: extension -1. */
  #date(value: Date): void {
    const ms = value.getTime();
    if (Number.isNaN(ms)) throw new EncodeError("a Date is not valid");
    const seconds = Math.floor(ms / 1000);
    this.#u8(0xc7);
    this.#u8(12);
    this.#u8(0xff);
    const at = this.#room(12);
    this.#view.setUint32(at, (ms - 1000 * seconds) * 1_000_000);
    this.#view.setBigInt64(at + 4, BigInt(seconds));
  }
}

function describe(value: unknown): string {
  return typeof value === "object" && value !== null ? value.constructor.name : typeof value;
}

/**
 * Return the one value in `bytes`. Maps whose keys are all strings become objects, others Map.
 *
 * Raises DecodeError: not MessagePack, an unknown extension, or something follows the value.
 */
export function decode(bytes: Uint8Array): unknown {
  const reader = new Reader(bytes);
  let value: unknown;
  try {
    value = reader.value(0);
  } catch (error) {
    if (error instanceof DecodeError) throw error;
    throw new DecodeError("the MessagePack is cut short, or a text in it is not UTF-8", { cause: error });
  }
  if (reader.at !== bytes.length) throw new DecodeError("something follows the MessagePack value");
  return value;
}

class Reader {
  at = 0;
  readonly #bytes: Uint8Array;
  readonly #view: DataView;

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
    this.#view = view(bytes);
  }

  /** Move by `count` bytes and return where they begin. DataView raises RangeError beyond the end. */
  #take(count: number): number {
    const at = this.at;
    this.at += count;
    if (this.at > this.#bytes.length) throw new DecodeError("the MessagePack is cut short");
    return at;
  }

  #bin(size: number): Bytes {
    const at = this.#take(size);
    return size ? this.#bytes.slice(at, at + size) : EMPTY;
  }

  #text(size: number): string {
    const at = this.#take(size);
    return text(this.#bytes.subarray(at, at + size));
  }

  #size(bytes: 1 | 2 | 4): number {
    const at = this.#take(bytes);
    if (bytes === 1) return this.#view.getUint8(at);
    return bytes === 2 ? this.#view.getUint16(at) : this.#view.getUint32(at);
  }

  value(depth: number): unknown {
    if (depth > MAX_DEPTH) throw new DecodeError(`the MessagePack is nested deeper than ${MAX_DEPTH}`);
    const kind = this.#size(1);
    if (kind < 0x80) return kind;
    if (kind < 0x90) return this.#map(kind & 15, depth);
    if (kind < 0xa0) return this.#array(kind & 15, depth);
    if (kind < 0xc0) return this.#text(kind & 31);
    if (kind >= 0xe0) return kind - 0x100;
    switch (kind) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.#bin(this.#size(1));
      case 0xc5: return this.#bin(this.#size(2));
      case 0xc6: return this.#bin(this.#size(4));
      case 0xc7: return this.#extension(this.#size(1));
      case 0xca: return this.#view.getFloat32(this.#take(4));
      case 0xcb: return this.#view.getFloat64(this.#take(8));
      case 0xcc: return this.#size(1);
      case 0xcd: return this.#size(2);
      case 0xce: return this.#size(4);
      case 0xcf: return small(this.#view.getBigUint64(this.#take(8)));
      case 0xd0: return this.#view.getInt8(this.#take(1));
      case 0xd1: return this.#view.getInt16(this.#take(2));
      case 0xd2: return this.#view.getInt32(this.#take(4));
      case 0xd3: return small(this.#view.getBigInt64(this.#take(8)));
      case 0xd6: return this.#extension(4);
      case 0xd7: return this.#extension(8);
      case 0xd9: return this.#text(this.#size(1));
      case 0xda: return this.#text(this.#size(2));
      case 0xdb: return this.#text(this.#size(4));
      case 0xdc: return this.#array(this.#size(2), depth);
      case 0xdd: return this.#array(this.#size(4), depth);
      case 0xde: return this.#map(this.#size(2), depth);
      case 0xdf: return this.#map(this.#size(4), depth);
      default: throw new DecodeError(`unknown MessagePack type 0x${kind.toString(16)}`);
    }
  }

  #array(size: number, depth: number): unknown[] {
    const items: unknown[] = [];
    for (let i = 0; i < size; i++) items.push(this.value(depth + 1));
    return items;
  }

  #map(size: number, depth: number): unknown {
    const entries: [unknown, unknown][] = [];
    let texts = true;
    for (let i = 0; i < size; i++) {
      const key = this.value(depth + 1);
      texts &&= typeof key === "string";
      entries.push([key, this.value(depth + 1)]);
    }
    // Object.fromEntries defines properties, so "__proto__" is a key like others.
    return texts ? Object.fromEntries(entries as [string, unknown][]) : new Map(entries);
  }

  #extension(size: number): Date {
    const type = this.#view.getInt8(this.#take(1));
    const at = this.#take(size);
    if (type !== -1) throw new DecodeError(`unknown MessagePack extension ${type}`);
    if (size === 4) return new Date(1000 * this.#view.getUint32(at));
    if (size === 8) {
      const both = this.#view.getBigUint64(at);
      return new Date(1000 * Number(both & 0x3ffffffffn) + Number(both >> 34n) / 1e6);
    }
    if (size === 12) {
      return new Date(1000 * Number(this.#view.getBigInt64(at + 4)) + this.#view.getUint32(at) / 1e6);
    }
    throw new DecodeError("malformed MessagePack timestamp");
  }
}

function small(value: bigint): number | bigint {
  return value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
}
