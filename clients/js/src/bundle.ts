/** Bundles: the plain text of every seal (docs/protocol.md §8). */

import { decompress } from "fzstd";
import { concat, EMPTY, text, utf8, view, type Bytes } from "./bytes.ts";
import { EncodeError, MessageTooLarge, OpenError } from "./errors.ts";
import { decode, encode } from "./msgpack.ts";

const HEADERS = 1;
const PACKED = 2;
const KEYS = 4;
const COMPRESSED = 8;
const METHOD = 16;
/** Sent bundles are cut before they exceed this; each message counts these bytes more. */
export const CUT_BYTES = 66_560;
export const MESSAGE_BYTES = 8;
export const MAX_HEADERS = 3072;
const MAX_SIZE = 67_108_864 + 4096;

export type Headers = Readonly<Record<string, string>>;

export interface Entry {
  readonly payload: Bytes;
  readonly headers: Headers | null;
  /** The key that the message was appended to a stream with; empty for none. */
  readonly key: Bytes;
}

export interface Bundle {
  readonly entries: readonly Entry[];
  /** Whether the payloads are MessagePack. */
  readonly packed: boolean;
  readonly method: string;
}

export interface Outgoing {
  readonly payload: Bytes;
  /** As `encodeHeaders` returns it: empty for none. */
  readonly headers?: Bytes;
  readonly key?: Bytes;
}

/** Return headers as the column holds them: empty for none. Raises EncodeError, and MessageTooLarge. */
export function encodeHeaders(headers: Headers | null | undefined): Bytes {
  if (headers === null || headers === undefined) return EMPTY;
  if (typeof headers !== "object" || Symbol.iterator in headers) throw new EncodeError("headers must be an object of strings, such as {name: \"value\"}");
  for (const value of Object.values(headers)) {
    if (typeof value !== "string") throw new EncodeError(`header values must be strings, not ${value === null ? "null" : typeof value}`);
  }
  if (!Object.entries(headers).flat().every((each) => each.isWellFormed())) throw new EncodeError("a header has a lone surrogate, which UTF-8 cannot encode");
  const encoded = Object.keys(headers).length ? encode(headers) : EMPTY;
  if (encoded.length > MAX_HEADERS) throw new MessageTooLarge(`headers of ${encoded.length} bytes are over the limit of ${MAX_HEADERS}; put what is large into the payload`);
  return encoded;
}

export function encodeBundle(messages: readonly Outgoing[], packed: boolean, method = ""): Bytes {
  let flags = packed ? PACKED : 0;
  const columns = [messages.map((message) => message.payload)];
  if (messages.some((message) => message.key?.length)) {
    flags |= KEYS;
    columns.push(messages.map((message) => message.key ?? EMPTY));
  }
  if (messages.some((message) => message.headers?.length)) {
    flags |= HEADERS;
    columns.push(messages.map((message) => message.headers ?? EMPTY));
  }
  if (method) {
    flags |= METHOD;
    columns.push([utf8(method)]);
  }
  const head = new Uint8Array(8);
  view(head).setUint32(0, messages.length, true);
  view(head).setUint32(4, flags, true);
  const parts: Bytes[] = [head];
  let size = head.length;
  for (const column of columns) {
    if (size % 8) {
      parts.push(new Uint8Array(8 - (size % 8)));
      size += 8 - (size % 8);
    }
    const offsets = new Uint8Array(4 * (column.length + 1));
    let offset = 0;
    column.forEach((entry, i) => view(offsets).setInt32(4 * (i + 1), (offset += entry.length), true));
    parts.push(offsets, ...column);
    size += offsets.length + offset;
  }
  return concat(...parts);
}

/**
 * Return the messages of a bundle. `mayName` allows the method column.
 *
 * Raises OpenError: a bundle is sealed, so a malformed one was made by a holder of the key, and is refused like a forgery.
 */
export function decodeBundle(plain: Bytes, count: number, mayName = false): Bundle {
  try {
    return read(plain, count, mayName);
  } catch (error) {
    if (error instanceof OpenError) throw error;
    throw Object.assign(new OpenError(), { cause: error });
  }
}

function read(plain: Bytes, count: number, mayName: boolean): Bundle {
  const head = view(plain);
  const flags = head.getUint32(4, true);
  const unknown = flags & ~(HEADERS | PACKED | KEYS | COMPRESSED | (mayName ? METHOD : 0));
  if (head.getUint32(0, true) !== count || unknown) throw new OpenError();
  const columns = new Columns(flags & COMPRESSED ? inflate(plain) : plain, count);
  const payloads = columns.next();
  const keys = flags & KEYS ? columns.next() : null;
  const headers = flags & HEADERS ? columns.next() : null;
  const method = flags & METHOD ? columns.next(1)[0]! : EMPTY;
  columns.end();
  if (flags & METHOD && (count !== 1 || !/^[A-Za-z][A-Za-z0-9_.-]{0,63}$/.test(text(method)))) throw new OpenError();
  return {
    entries: payloads.map((payload, i) => ({
      payload, headers: headers ? decodeHeaders(headers[i]!) : null, key: keys ? keys[i]! : EMPTY,
    })),
    packed: (flags & PACKED) !== 0,
    method: text(method),
  };
}

/** Return the bundle with its columns as they were before compression, at the same offset. */
function inflate(plain: Bytes): Bytes {
  const size = view(plain).getUint32(8, true);
  const frame = plain.subarray(12);
  if (size > MAX_SIZE || contentSize(frame) !== size) throw new OpenError();
  const columns = decompress(frame, new Uint8Array(size));
  if (columns.length !== size) throw new OpenError();
  return concat(plain.subarray(0, 8), columns);
}

/** Return the size that a zstd frame names (RFC 8878 §3.1.1.1), or -1 for none. */
function contentSize(frame: Bytes): number {
  const fields = view(frame);
  if (fields.getUint32(0, true) !== 0xfd2fb528) return -1;
  const descriptor = fields.getUint8(4);
  const single = (descriptor >> 5) & 1;
  const flag = descriptor >> 6;
  if (!flag && !single) return -1;
  const at = 5 + (single ? 0 : 1) + [0, 1, 2, 4][descriptor & 3]!;
  if (flag === 0) return fields.getUint8(at);
  if (flag === 1) return fields.getUint16(at, true) + 256;
  return flag === 2 ? fields.getUint32(at, true) : Number(fields.getBigUint64(at, true));
}

class Columns {
  #at = 8;
  readonly #bytes: Bytes;
  readonly #fields: DataView;
  readonly #count: number;

  constructor(bytes: Bytes, count: number) {
    this.#bytes = bytes;
    this.#fields = view(bytes);
    this.#count = count;
  }

  next(count = this.#count): Bytes[] {
    const padded = Math.ceil(this.#at / 8) * 8;
    for (; this.#at < padded; this.#at++) if (this.#fields.getUint8(this.#at)) throw new OpenError();
    const base = padded + 4 * (count + 1);
    let from = this.#fields.getInt32(padded, true);
    if (from) throw new OpenError();
    const entries: Bytes[] = [];
    for (let i = 1; i <= count; i++) {
      const to = this.#fields.getInt32(padded + 4 * i, true);
      if (to < from || base + to > this.#bytes.length) throw new OpenError();
      entries.push(this.#bytes.subarray(base + from, base + to));
      from = to;
    }
    this.#at = base + from;
    return entries;
  }

  end(): void {
    if (this.#at !== this.#bytes.length) throw new OpenError();
  }
}

function decodeHeaders(bytes: Bytes): Headers | null {
  if (!bytes.length) return null;
  if (bytes.length > MAX_HEADERS) throw new OpenError();
  const map = decode(bytes);
  if (typeof map !== "object" || map === null || Object.getPrototypeOf(map) !== Object.prototype) throw new OpenError();
  if (Object.values(map).some((value) => typeof value !== "string")) throw new OpenError();
  return map as Headers;
}
