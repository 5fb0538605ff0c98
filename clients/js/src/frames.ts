/** Frames and their bytes (docs/protocol.md §2, §5, §6): the only home of the layout. No IO. */

import { concat, EMPTY, text, view, type Bytes } from "./bytes.ts";
import { DecodeError, LocalProtocolError, PeerProtocolError } from "./errors.ts";
import { decode, encode } from "./msgpack.ts";

export const VERSION = 1;
export const MINOR = 0;

export const Kind = {
  HELLO: 0x01, WELCOME: 0x02, ERROR: 0x03, BYE: 0x04, DRAIN: 0x05, ACK: 0x06, PROVE: 0x07, DECLARE: 0x08, JOIN: 0x09,
  LEAVE: 0x0a, SUBSCRIBE: 0x0b, UNSUBSCRIBE: 0x0c, CREDIT: 0x0d, GAP: 0x0e, FAIL: 0x0f, ROSTER: 0x10, DONE: 0x11,
  MEMBERS: 0x12, MEMBERSHIP: 0x13, UNWATCH: 0x14, STATUS: 0x15, REPORT: 0x16, PING: 0x17, PONG: 0x18, GRANT: 0x19,
  SETTLE: 0x1a, TOPIC: 0x1b, AUDIENCE: 0x1c, CALLER_LEFT: 0x1d, SHARE: 0x1e, WAIT: 0x1f, BEAT: 0x21, WINDOW: 0x27,
  DIRECT: 0x28, PAIR: 0x29, FETCH: 0x2a, CARRIED: 0x2b, UNROUTED: 0x2c, TICKET: 0x2d, TROUBLE: 0x2f,
  REQUEST: 0x40, REPLY: 0x41, FAULT: 0x42, PUSH: 0x43, SURVEY: 0x44, ANSWER: 0x45, BROADCAST: 0x46, PUBLISH: 0x47,
  TUNNEL_OPEN: 0x48, TUNNEL_ACCEPT: 0x49, TUNNEL_DATA: 0x4a, TUNNEL_END: 0x4b, STREAM: 0x4c, STREAM_REPLY: 0x4d,
  CALLS: 0x4e, ANSWERS: 0x4f,
} as const;

/** Causes of FAIL and TUNNEL_END. */
export const Cause = {
  CLOSED: 0, NO_MEMBERS: 1, OVERLOADED: 2, EXPIRED: 3, LOST: 4, REFUSED: 5, BROKEN: 6,
} as const;

/** Why a member sends a message back (§10). */
export const Reason = {
  FULL: 1, LEAVING: 2, EXPIRED: 3, STALE: 4, REPLAYED: 5, UNREADABLE: 6, CLOCK: 7,
} as const;

const NAMES = new Map<number, string>(Object.entries(Kind).map(([name, kind]) => [kind, name]));

export function kindName(kind: number): string {
  return NAMES.get(kind) ?? `0x${kind.toString(16).padStart(2, "0")}`;
}

/** An integer as MessagePack yields it: bigint only beyond 2^53. */
export type Int = number | bigint;
export type Fields = Record<string, unknown>;

type Type = "int" | "str" | "bool" | "list" | "map" | "bin" | "bin8" | "bin16" | "bin32" | "bin64";
/** name, type, default. Without a default the field is required; a default of `undefined` is left out. */
type Field = readonly [name: string, type: Type, ...rest: [] | [fallback: unknown]];

const DELIVERY: readonly Field[] = [["plain", "bool", true], ["groups", "list", []], ["member", "int", 0]];

/** Fields of control frames, in the order in which they are written. */
const FIELDS: Readonly<Record<number, readonly Field[]>> = {
  [Kind.HELLO]: [
    ["version", "int"], ["minor", "int"], ["label", "str", ""], ["pid", "int", 0], ["mono_us", "int", 0],
    ["ticket", "str", undefined],
  ],
  [Kind.WELCOME]: [
    ["version", "int"], ["minor", "int"], ["relay_id", "bin16"], ["session_id", "bin8"], ["challenge", "bin32"],
    ["message_limit", "int"], ["site", "str", ""], ["aliases", "int", 65536], ["mono_us", "int", 0],
  ],
  [Kind.ERROR]: [["detail", "str"]],
  [Kind.BYE]: [["reason", "str", ""], ["complete", "bool", false]],
  [Kind.DRAIN]: [["grace_ms", "int"]],
  [Kind.ACK]: [["id", "int"], ["error", "str", ""], ["member", "int", 0], ["fresh", "bool", false]],
  [Kind.PROVE]: [["id", "int"], ["public_key", "bin32"], ["signature", "bin64"]],
  [Kind.DECLARE]: [
    ["alias", "int"], ["kind", "int"], ["name", "str"], ["key_id", "bin16"], ["sender_id", "bin16"], ...DELIVERY,
    ["hop_class", "int", 0], ["site", "str", ""], ["relay", "bin16", undefined],
  ],
  [Kind.JOIN]: [
    ["id", "int"], ["name", "str"], ["key_ids", "list"], ["kinds", "map"], ["tag", "str", ""],
    ["methods", "int", undefined],
  ],
  [Kind.LEAVE]: [["id", "int"], ["member", "int"]],
  [Kind.SUBSCRIBE]: [["id", "int"], ["filter", "str"], ["key_ids", "list"], ["group", "str", ""]],
  [Kind.UNSUBSCRIBE]: [["id", "int"], ["filter", "str"], ["group", "str", ""], ["stay", "bool", undefined]],
  [Kind.CREDIT]: [["member", "int"], ["kind", "int"], ["hops", "list"], ["unstarted", "list", undefined]],
  [Kind.GAP]: [
    ["kind", "int"], ["name", "str"], ["key_id", "bin16"], ["sender_id", "bin16"], ["first", "int"], ["count", "int"],
    ["cause", "str"], ...DELIVERY, ["site", "str", ""],
  ],
  [Kind.FAIL]: [
    ["hop", "int"], ["cause", "int"], ["detail", "str", ""], ["may_have_run", "bool", false], ["seen_ms", "int", undefined],
  ],
  [Kind.ROSTER]: [["hop", "int"], ["members", "list"]],
  [Kind.DONE]: [["hop", "int"], ["lost", "list", []]],
  [Kind.MEMBERS]: [["id", "int"], ["name", "str"], ["key_ids", "list"], ["watch", "bool", false], ["streams", "bool", false]],
  [Kind.MEMBERSHIP]: [
    ["id", "int"], ["joined", "list", []], ["left", "list", []], ["others", "map", {}], ["more", "bool", false],
    ["sites", "map", {}], ["starting", "list", []],
  ],
  [Kind.UNWATCH]: [["id", "int"]],
  [Kind.STATUS]: [["id", "int"]],
  [Kind.REPORT]: [["id", "int"], ["document", "str"]],
  [Kind.PING]: [["id", "int"], ["mono_us", "int", undefined]],
  [Kind.PONG]: [["id", "int"], ["mono_us", "int", undefined]],
  [Kind.SETTLE]: [["id", "int"]],
  [Kind.TOPIC]: [["id", "int"], ["name", "str"], ["key_id", "bin16"], ["slow", "bool", false]],
  [Kind.AUDIENCE]: [
    ["id", "int"], ["subscribers", "int"], ["dropped", "int", 0], ["slow", "list", []], ["others", "map", undefined],
  ],
  [Kind.CALLER_LEFT]: [["hops", "list"]],
  [Kind.SHARE]: [["name", "str"], ["key_id", "bin16"], ["parts", "int"]],
  [Kind.WAIT]: [["alias", "int"], ["serial", "int"], ["stalled", "bool", false]],
  [Kind.WINDOW]: [["alias", "int"], ["serial", "int"], ["limit", "int"]],
  [Kind.BEAT]: [
    ["mono_us", "int"], ["heard_us", "int", 0], ["held_us", "int", 0], ["version", "int", 0],
    ["wall_us", "int", undefined],
  ],
  [Kind.DIRECT]: [["hop", "int"]],
  [Kind.PAIR]: [["hop", "int"], ["token", "bin16"]],
  [Kind.FETCH]: [["token", "bin16"]],
  [Kind.CARRIED]: [
    ["sent_records", "int"], ["sent_bytes", "int"], ["received_records", "int"], ["received_bytes", "int"],
  ],
  [Kind.TROUBLE]: [["entries", "list"]],
  [Kind.TICKET]: [["id", "int"], ["ticket", "str"]],
  [Kind.UNROUTED]: [
    ["kind", "int"], ["name", "str"], ["key_id", "bin16"], ["count", "int"], ["cause", "str"],
    ["others", "map", undefined], ["alias", "int", undefined], ["full", "bool", undefined],
  ],
};

/** Control frames whose map may have 16 MiB instead of 65,536 bytes, because they hold a relay's list. */
const LONG: ReadonlySet<number> = new Set([Kind.MEMBERSHIP, Kind.ROSTER, Kind.DONE, Kind.REPORT]);
const MAX_MAP = 65_536;
const MAX_LONG_MAP = 16_777_216;
/** Least limit of a frame that a session reads. */
const MIN_FRAME_LIMIT = 16_777_216;
export const FRAME_EXTRA = 4096;

/** Kinds of data frames without end fields. */
const SHORT: ReadonlySet<number> = new Set([Kind.TUNNEL_ACCEPT, Kind.TUNNEL_DATA, Kind.TUNNEL_END]);
const HOP_END = 26;
export const END_BYTES = 24;
const BODY_AT = HOP_END + END_BYTES;

export interface ControlFrame {
  readonly kind: number;
  readonly fields: Fields;
}

/** A data frame. `end` are bytes 26 to 50, which the seal authenticates; empty in frames of a tunnel. */
export interface DataFrame {
  readonly kind: number;
  readonly flags: number;
  readonly alias: number;
  readonly hop: bigint;
  readonly deadline: bigint;
  readonly end: Bytes;
  readonly sent: number;
  readonly timeout: number;
  readonly count: number;
  readonly first: number;
  readonly body: Bytes;
}

export type Frame = ControlFrame | DataFrame;

export function isData(frame: Frame): frame is DataFrame {
  return frame.kind >= Kind.REQUEST;
}

/** Return a control frame as sent. Missing fields get their defaults. Raises LocalProtocolError if it is too long. */
export function encodeControl(kind: number, fields: Fields): Bytes {
  const table = FIELDS[kind];
  if (!table) throw new LocalProtocolError(`${kindName(kind)} is not a control frame of sessions`);
  const map: Fields = {};
  for (const [name, , ...fallback] of table) {
    const value = fields[name] ?? fallback[0];
    if (value !== undefined) map[name] = value;
    else if (!fallback.length) throw new LocalProtocolError(`${kindName(kind)} requires the field ${name}`);
  }
  const body = encode(map);
  if (body.length > (LONG.has(kind) ? MAX_LONG_MAP : MAX_MAP)) {
    throw new LocalProtocolError(`${kindName(kind)} would have a map of ${body.length} bytes`);
  }
  const frame = new Uint8Array(6 + body.length);
  view(frame).setUint32(0, 2 + body.length, true);
  frame[4] = kind;
  frame.set(body, 6);
  return frame;
}

/** Return the end fields of a data frame: sent (µs since 1970), timeout (ms), count, first. */
export function encodeEnd(sent: number, timeout: number, count: number, first: number): Bytes {
  const end = new Uint8Array(END_BYTES);
  const fields = view(end);
  fields.setBigInt64(0, BigInt(sent), true);
  fields.setUint32(8, timeout, true);
  fields.setUint32(12, count, true);
  fields.setBigUint64(16, BigInt(first), true);
  return end;
}

/** Return a data frame as sent. `end` is empty in frames of a tunnel. */
export function encodeData(
  kind: number, alias: number, hop: bigint, deadline: bigint, end: Uint8Array, body: Uint8Array, flags = 0,
): Bytes {
  const frame = new Uint8Array(HOP_END + end.length + body.length);
  const fields = view(frame);
  fields.setUint32(0, frame.length - 4, true);
  frame[4] = kind;
  frame[5] = flags;
  fields.setUint32(6, alias, true);
  fields.setBigUint64(10, hop, true);
  fields.setBigInt64(18, deadline, true);
  frame.set(end, HOP_END);
  frame.set(body, HOP_END + end.length);
  return frame;
}

/** Return one frame, which is `bytes` with its length field. Raises PeerProtocolError. */
export function decodeFrame(bytes: Bytes): Frame {
  const kind = bytes[4]!;
  if (!NAMES.has(kind)) throw new PeerProtocolError(`unknown kind of frame: 0x${kind.toString(16).padStart(2, "0")}`);
  return kind < Kind.REQUEST ? decodeControl(kind, bytes) : decodeData(kind, bytes);
}

function decodeControl(kind: number, bytes: Bytes): ControlFrame {
  const size = bytes.length - 6;
  if (size > (LONG.has(kind) ? MAX_LONG_MAP : MAX_MAP)) {
    throw new PeerProtocolError(`${kindName(kind)} has a map of ${size} bytes`);
  }
  let map: unknown;
  try {
    map = decode(bytes.subarray(6));
  } catch (error) {
    if (error instanceof DecodeError) throw new PeerProtocolError(`${kindName(kind)}: ${error.message}`, { cause: error });
    throw error;
  }
  if (typeof map !== "object" || map === null || Array.isArray(map) || map instanceof Uint8Array || map instanceof Map) {
    throw new PeerProtocolError(`${kindName(kind)} is not a map of texts`);
  }
  const fields: Fields = {};
  const table = FIELDS[kind];
  if (!table) return { kind, fields: map as Fields };
  for (const [name, type, ...fallback] of table) {
    let value = (map as Fields)[name];
    if (value === undefined) {
      if (!fallback.length) throw new PeerProtocolError(`${kindName(kind)} lacks the field ${name}`);
      value = fallback[0];
    } else if (!fits(value, type)) throw new PeerProtocolError(`${kindName(kind)}: ${name} does not fit ${type}`);
    if (value !== undefined) fields[name] = value;
  }
  return { kind, fields };
}

function fits(value: unknown, type: Type): boolean {
  switch (type) {
    case "int": return (typeof value === "bigint" || Number.isInteger(value)) && (value as Int) >= 0;
    case "str": return typeof value === "string";
    case "bool": return typeof value === "boolean";
    case "list": return Array.isArray(value);
    case "map": return typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Uint8Array);
    default: return value instanceof Uint8Array && (type === "bin" || value.length === Number(type.slice(3)));
  }
}

function decodeData(kind: number, bytes: Bytes): DataFrame {
  const bodyAt = SHORT.has(kind) ? HOP_END : BODY_AT;
  if (bytes.length < bodyAt) throw new PeerProtocolError(`${kindName(kind)} of ${bytes.length} bytes is cut short`);
  const fields = view(bytes);
  const long = bodyAt === BODY_AT;
  return {
    kind,
    flags: bytes[5]!,
    alias: fields.getUint32(6, true),
    hop: fields.getBigUint64(10, true),
    deadline: fields.getBigInt64(18, true),
    end: long ? bytes.subarray(HOP_END, BODY_AT) : EMPTY,
    sent: long ? Number(fields.getBigInt64(26, true)) : 0,
    timeout: long ? fields.getUint32(34, true) : 0,
    count: long ? fields.getUint32(38, true) : 1,
    first: long ? Number(fields.getBigUint64(42, true)) : 0,
    body: bytes.subarray(bodyAt),
  };
}

/** Cuts a byte stream into frames, however it is split. */
export class FrameReader {
  /** Greatest length field that is accepted; raise it when WELCOME says a larger message limit. */
  limit = MIN_FRAME_LIMIT;
  #rest: Bytes = EMPTY;

  setMessageLimit(bytes: number): void {
    this.limit = Math.max(bytes + FRAME_EXTRA, MIN_FRAME_LIMIT);
  }

  /** Yield the frames that `bytes` completes. They share its memory. Raises PeerProtocolError. */
  *feed(bytes: Bytes): Generator<Frame> {
    const data = this.#rest.length ? concat(this.#rest, bytes) : bytes;
    const fields = view(data);
    let at = 0;
    while (data.length - at >= 4) {
      const length = fields.getUint32(at, true);
      if (length < 2 || length > this.limit) throw new PeerProtocolError(`a frame has the length ${length}`);
      if (data.length - at < 4 + length) break;
      const frame = decodeFrame(data.subarray(at, at + 4 + length));
      at += 4 + length;
      yield frame;
    }
    this.#rest = data.slice(at);
  }

  get unfinished(): number {
    return this.#rest.length;
  }
}

/** A call or an answer of a run (§10.1). */
export interface RunPart {
  readonly hop: bigint;
  readonly body: Bytes;
}

/** Return the parts of a CALLS or ANSWERS frame. Raises PeerProtocolError if the lengths do not add up. */
export function decodeRun(frame: DataFrame): RunPart[] {
  const hops = frame.kind === Kind.ANSWERS;
  const { body, count } = frame;
  const head = (hops ? 12 : 4) * count;
  if (!count || count > 256 || body.length < head) throw new PeerProtocolError(`${kindName(frame.kind)} of ${count} parts`);
  const fields = view(body);
  const parts: RunPart[] = [];
  let at = head;
  for (let i = 0; i < count; i++) {
    const size = fields.getUint32((hops ? 8 * count : 0) + 4 * i, true);
    if (at + size > body.length) break;
    const hop = hops ? fields.getBigUint64(8 * i, true) : frame.hop + BigInt(i);
    parts.push({ hop, body: body.subarray(at, at + size) });
    at += size;
  }
  if (parts.length !== count || at !== body.length) {
    throw new PeerProtocolError(`the lengths in ${kindName(frame.kind)} do not add up to its body`);
  }
  return parts;
}

/** Raise PeerProtocolError unless `value` is a list of texts. */
export function texts(value: unknown): string[] {
  if (Array.isArray(value) && value.every((item) => typeof item === "string")) return value;
  throw new PeerProtocolError("a list is not of texts");
}

/** Return the UTF-8 text in `bytes`, with what is not UTF-8 replaced: for texts that people read. */
export function lenientText(bytes: Uint8Array): string {
  try {
    return text(bytes);
  } catch {
    return new TextDecoder().decode(bytes);
  }
}
