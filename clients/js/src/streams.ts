/** Durable streams: read from an offset and follow, and append (docs/protocol.md §19). */

import { EMPTY, hex, random, utf8, view, type Bytes } from "./bytes.ts";
import { decodeBundle, encodeBundle, encodeHeaders, type Headers } from "./bundle.ts";
import type { Parts } from "./client.ts";
import { wallUs } from "./clock.ts";
import {
  ConfigError, ConnectionLost, MessageTooLarge, NoStream, OffsetConflict, OpenError, StreamDamaged, StreamError,
  StreamSuperseded, StreamUnavailable,
} from "./errors.ts";
import { encodeEnd, Kind, lenientText, type Fields, type Int } from "./frames.ts";
import type { Keyring } from "./keys.ts";
import { encodePayload, Message } from "./messages.ts";
import { checkName, matches, streamUuid } from "./names.ts";
import { notify } from "./notify.ts";
import { metadata, Openers } from "./sframe.ts";
import { ChannelGone, refusal, type Definition, type Log } from "./stores.ts";

const TIMEOUT_MS = 10_000;
const FETCH_BYTES = 1_048_576;
const WAIT_MS = 20_000;
const RETRY_MIN_MS = 50;
const RETRY_MAX_MS = 2000;
const MAX_BATCH = 4096;
const BATCH_BYTES = 262_144;
const HOLES: Readonly<Record<number, string>> = {
  1: "retention", 2: "compacted", 3: "expired", 4: "deferred", 5: "damaged",
};

/** A message of a stream. */
export class StreamMessage extends Message {
  readonly offset: number;
  /** The key that it was appended with; empty for none. */
  readonly keyBytes: Bytes;
  /** When the store stored it, in ms since 1970. */
  readonly storedMs: number;
  readonly tombstone: boolean;

  constructor(message: Message, offset: number, key: Bytes, storedMs: number, tombstone: boolean) {
    super(message.payload, message.name, message.headers, message.packed, message.source);
    this.offset = offset;
    this.keyBytes = key;
    this.storedMs = storedMs;
    this.tombstone = tombstone;
  }

  /** The key as text; "" for none. */
  get key(): string {
    return lenientText(this.keyBytes);
  }
}

/** Offsets that hold no message. */
export interface StreamGap {
  readonly first: number;
  /** The first offset after it. */
  readonly end: number;
  /** Messages that are known to be lost: 0 if the stream had them and no longer has them, null if nobody knows. */
  readonly count: number | null;
  readonly cause: string;
}

export interface ReadOptions {
  /** The first offset to read; "first" for the oldest message, "new" for what comes from now on. */
  readonly start?: number | "first" | "new";
  /** Wait for more at the end; otherwise the iteration ends where the stream ended when it was first asked. */
  readonly follow?: boolean;
  /** Of several streams with the name. */
  readonly uuid?: string | null;
  /** Of a stream with partitions: which one to read, from 0. */
  readonly partition?: number;
  readonly onGap?: (gap: StreamGap) => void;
  readonly signal?: AbortSignal;
}

export interface AppendOptions {
  readonly key?: string | Uint8Array;
  readonly headers?: Headers;
  /** Time to live. */
  readonly ttlMs?: number;
  /** The offset that the message must get; otherwise OffsetConflict. */
  readonly expect?: number;
  /** Says that there is no message with `key` any more. */
  readonly tombstone?: boolean;
  readonly uuid?: string | null;
  readonly timeoutMs?: number;
}

/** What an item of "fetched" covers: offsets until `covers`. */
interface Item {
  readonly covers: number;
  readonly gap: StreamGap | null;
  readonly messages: readonly StreamMessage[];
}

type Ready = (name: string, timeoutMs: number, signal?: AbortSignal) => Promise<Parts>;

interface Appending {
  readonly payload: Bytes;
  readonly packed: boolean;
  readonly options: AppendOptions;
  readonly until: number;
  readonly resolve: (offset: number) => void;
  readonly reject: (error: unknown) => void;
}

/** What is appended to one log by this client. */
class Producer {
  /** -1 until it is known whether the stream has partitions; then this producer hands on to those of the partitions. */
  readonly partition: number;
  readonly id = random(16);
  readonly queue: Appending[] = [];
  sequence = 0;
  epoch = 0;
  running = false;

  constructor(partition: number) {
    this.partition = partition;
  }
}

export class Streams {
  readonly #keyring: Keyring;
  readonly #ready: Ready;
  readonly #openers = new Openers();
  readonly #producers = new Map<string, Producer>();

  constructor(keyring: Keyring, ready: Ready) {
    this.#keyring = keyring;
    this.#ready = ready;
  }

  // -- reading -----------------------------------------------------------------------------------------------

  /**
   * Iterate over a stream from an offset on. When the connection or the store is lost, reading goes on behind the last
   * message, so nothing is missed and nothing comes twice. Raises NoStream, AmbiguousStream, StreamDamaged, StreamError.
   */
  async *read(name: string, options: ReadOptions = {}): AsyncGenerator<StreamMessage, void, undefined> {
    const { start = "new", follow = true, partition, onGap, signal } = options;
    checkName(name, "stream");
    const uuid = streamUuid(options.uuid);
    let offset = typeof start === "number" ? start : -1;
    if (typeof start === "number" ? !Number.isSafeInteger(start) || start < 0 : !["first", "new"].includes(start)) {
      throw new ConfigError("start must be an offset, 'first' or 'new'");
    }
    let end = follow ? Infinity : -1;
    for (;;) {
      const waitMs = follow ? WAIT_MS : 0;
      const answer = await this.#retrying(name, uuid, partition ?? 0, signal, async (log, parts) => {
        const others = log.definition.partitions.length;
        if (others && partition === undefined) {
          throw new StreamError(name, `it has ${others + 1} partitions; read each of them, with partition: 0 to ${others}`);
        }
        if (offset < 0) {
          const info = await this.#info(log, parts);
          offset = start === "first" ? info.oldest : info.end;
        }
        return { log, fetched: await this.#fetch(log, parts, offset, waitMs, signal) };
      }, !follow);
      const { log, fetched } = answer;
      if (end < 0) end = Number(fetched.high_water);
      const next = Number(fetched.next);
      let at = offset;
      const items = fetched.items as unknown[][];
      // All bodies at once: WebCrypto works in other threads.
      const opened = items.map((item) => (item[0] === 1 ? this.#record(log.definition, item, Number(item[1])) : undefined));
      for (const opening of opened) opening?.catch(() => undefined); // each is awaited in its turn
      for (const [i, item] of items.entries()) {
        const { covers, gap, messages } = await this.#item(log.definition, item, at, opened[i]);
        if (gap && onGap && gap.end > offset) notify(onGap, gap);
        for (const message of messages) {
          if (message.offset < offset) continue;
          offset = message.offset + 1;
          yield message;
        }
        at = covers;
        offset = Math.max(offset, at);
      }
      if (at !== next) throw new StreamDamaged(name, `the store's answer ends at ${at} and not at ${next}`);
      if (offset >= end) return;
      signal?.throwIfAborted();
    }
  }

  /** Return the offset of the first message that was stored at that time or later. */
  async find(name: string, timeMs: number, { uuid, signal }: { uuid?: string | null; signal?: AbortSignal } = {}): Promise<number> {
    checkName(name, "stream");
    return this.#retrying(name, streamUuid(uuid), 0, signal, async (log, { stores }) => {
      const answer = await stores.call(log, { op: "find", time_us: Math.max(0, Math.floor(timeMs * 1000)) }, TIMEOUT_MS, signal);
      if (answer.op !== "found") throw refusal(name, answer);
      return Number(answer.offset);
    }, true);
  }

  /** Return the oldest offset, where the stream ends, and how many messages it has. */
  async describe(name: string, { uuid }: { uuid?: string | null } = {}): Promise<{ uuid: string; oldest: number; end: number; messages: number }> {
    checkName(name, "stream");
    return this.#retrying(name, streamUuid(uuid), 0, undefined, (log, parts) => this.#info(log, parts), true);
  }

  async #info(log: Log, { stores }: Parts): Promise<{ uuid: string; oldest: number; end: number; messages: number }> {
    const answer = await stores.call(log, { op: "describe" }, TIMEOUT_MS);
    if (answer.op !== "described") throw refusal(log.definition.name, answer);
    return { uuid: log.uuidHex, oldest: Number(answer.oldest), end: Number(answer.next), messages: Number(answer.messages) };
  }

  async #fetch(log: Log, { stores }: Parts, start: number, waitMs: number, signal: AbortSignal | undefined): Promise<Fields> {
    const call = { op: "fetch", start, max_bytes: FETCH_BYTES, wait_ms: waitMs };
    const answer = await stores.call(log, call, waitMs + TIMEOUT_MS, signal);
    if (answer.op !== "fetched") throw refusal(log.definition.name, answer);
    return answer;
  }

  /** Call `attempt` until it succeeds; with `once`, only for TIMEOUT_MS. */
  async #retrying<T>(
    name: string, uuid: string, partition: number, signal: AbortSignal | undefined,
    attempt: (log: Log, parts: Parts) => Promise<T>, once: boolean,
  ): Promise<T> {
    const until = performance.now() + TIMEOUT_MS;
    const keys = this.#keyring.clusterKeys(name);
    let known = false;
    for (let delay = RETRY_MIN_MS; ; delay = Math.min(2 * delay, RETRY_MAX_MS)) {
      try {
        const parts = await this.#ready(name, once ? until - performance.now() : 2 ** 31 - 1, signal);
        const log = await parts.stores.log(name, keys, uuid, partition);
        known = true;
        return await attempt(log, parts);
      } catch (error) {
        // A store that was there may be on its way back.
        const passing = error instanceof StreamUnavailable || error instanceof ConnectionLost || (known && error instanceof NoStream);
        if (!passing || (once && performance.now() >= until)) throw error;
        if (error instanceof ChannelGone) continue;
      }
      await pause(delay, signal);
    }
  }

  /** Check an item that should begin at `at`; `opened` is what a record holds. */
  async #item(definition: Definition, item: readonly unknown[], at: number, opened: Promise<Item> | undefined): Promise<Item> {
    const [type, first] = item;
    const offset = Number(first);
    if (offset !== at && !(type === 3 && offset < at) && !(type === 1 && offset < at)) {
      throw new StreamDamaged(definition.name, `the store's answer has ${offset} after ${at}`);
    }
    if (type === 3) {
      const next = Number(item[2]);
      if (next <= at) throw new StreamDamaged(definition.name, "the store's answer has an empty hole");
      return { covers: next, gap: { first: offset, end: next, count: 0, cause: HOLES[Number(item[3])] ?? "removed" }, messages: [] };
    }
    if (type === 2) {
      const count = item[2] === null ? null : Number(item[2]);
      return { covers: offset + 1, gap: { first: offset, end: offset + 1, count, cause: String(item[3]) }, messages: [] };
    }
    if (!opened) throw new StreamDamaged(definition.name, `the store's answer has an item of the unknown type ${String(type)}`);
    return opened;
  }

  async #record(definition: Definition, item: readonly unknown[], offset: number): Promise<Item> {
    const [, , kind, name, keyId, senderId, end, body, storedUs, , tombstone] = item as
      [number, Int, number, string, Bytes, Bytes, Bytes, Bytes, number, Bytes, boolean];
    if (!(end instanceof Uint8Array) || end.length !== 24 || !(body instanceof Uint8Array)) {
      throw new StreamDamaged(definition.name, "the store's answer has a malformed record");
    }
    const count = view(end).getUint32(12, true);
    const covers = offset + count;
    const bad = (cause: string): Item => ({ covers, gap: { first: offset, end: covers, count, cause: `unreadable: ${cause}` }, messages: [] });
    const key = this.#keyring.byId(keyId);
    if (!key) return bad(`sealed under key ${hex(keyId).slice(0, 8)}, which is not in this keyring`);
    if (!records(definition, kind, name)) return bad("the record does not belong to this stream");
    try {
      const meta = metadata(kind, utf8(name), keyId, senderId, end);
      const { plain } = await this.#openers.open(key, senderId, meta, body);
      const bundle = decodeBundle(plain, count);
      const messages = bundle.entries.map(({ payload, headers, key: recordKey }, i) => {
        const message = new Message(payload, name, headers, bundle.packed, hex(senderId));
        return new StreamMessage(message, offset + i, recordKey, Number(storedUs) / 1000, Boolean(tombstone));
      });
      return { covers, gap: null, messages };
    } catch (error) {
      if (!(error instanceof OpenError)) throw error;
      return bad("it does not open");
    }
  }

  // -- appending ---------------------------------------------------------------------------------------------

  /**
   * Append a message, and return its offset when it is on disk. A call that got no answer is sent again, and stored once.
   *
   * Raises OffsetConflict, NoStream, StreamUnavailable (see its `mayHaveRun`), StreamError, MessageTooLarge.
   */
  append(name: string, payload: unknown, options: AppendOptions = {}): Promise<number> {
    checkName(name, "stream");
    this.#keyring.clusterKeys(name);
    const { timeoutMs = TIMEOUT_MS, tombstone = false } = options;
    const uuid = streamUuid(options.uuid);
    const key = bytesOf(options.key);
    if (tombstone && !key.length) throw new ConfigError("a tombstone requires a key");
    const encoded = encodePayload(payload);
    encodeHeaders(options.headers); // now, because a call holds the messages of many
    return new Promise((resolve, reject) => {
      this.#enqueue(name, uuid, -1, { ...encoded, options, until: performance.now() + timeoutMs, resolve, reject });
    });
  }

  #enqueue(name: string, uuid: string, partition: number, appending: Appending): void {
    const id = `${name}\0${uuid}\0${partition}`;
    const producer = this.#producers.get(id) ?? new Producer(partition);
    this.#producers.set(id, producer);
    producer.queue.push(appending);
    if (!producer.running) {
      producer.running = true;
      queueMicrotask(() => void this.#produce(name, uuid, producer));
    }
  }

  async #produce(name: string, uuid: string, producer: Producer): Promise<void> {
    try {
      while (producer.queue.length) {
        const batch = takeBatch(producer.queue);
        try {
          await this.#send(name, uuid, producer, batch);
        } catch (error) {
          // Whether it was stored is not known, so its numbers are not either: go on as another producer.
          this.#renew(producer);
          for (const { reject } of batch) reject(error);
        }
      }
    } finally {
      producer.running = false;
    }
  }

  #renew(producer: Producer): void {
    producer.epoch++;
    producer.sequence = 0;
  }

  async #send(name: string, uuid: string, producer: Producer, batch: readonly Appending[]): Promise<void> {
    const until = Math.max(...batch.map((one) => one.until));
    const keys = this.#keyring.clusterKeys(name);
    let call: Fields | null = null;
    let sent = false;
    let lost = false; // whether an earlier attempt was sent, and not answered
    for (let delay = RETRY_MIN_MS; ; delay = Math.min(2 * delay, RETRY_MAX_MS)) {
      try {
        const left = Math.ceil(until - performance.now());
        if (left <= 0) throw new StreamUnavailable(name, "the store did not confirm it in time", sent);
        const parts = await this.#ready(name, left);
        const log = await parts.stores.log(name, keys, uuid, Math.max(0, producer.partition));
        if (log.definition.partitions.length && producer.partition < 0) {
          if (sent) throw new StreamError(name, "the stream got partitions while this was appended", true);
          const places: number[] = [];
          for (const { options } of batch) places.push(await parts.stores.place(log, bytesOf(options.key)));
          batch.forEach((one, i) => this.#enqueue(name, uuid, places[i]!, one));
          return;
        }
        // The records that are sent again are the same to the byte.
        call ??= await this.#sealed(parts, log, producer, batch);
        sent = true;
        const answer = await parts.stores.call(log, call, left);
        if (answer.op !== "appended") throw refusal(name, answer);
        (answer.outcomes as unknown[][]).forEach((outcome, i) => settle(name, batch[i]!, outcome));
        producer.sequence += batch.length;
        if ((answer.outcomes as unknown[][]).some(([status]) => Number(status) > 1)) this.#renew(producer);
        return;
      } catch (error) {
        // Who appends by name goes on at the log that has the name now, which knows the producer.
        const renamed = !uuid && error instanceof StreamSuperseded;
        const passing = renamed || error instanceof StreamUnavailable || error instanceof ConnectionLost || (sent && error instanceof NoStream);
        if (!passing && error instanceof StreamError && (lost || error.mayHaveRun)) {
          const earlier = error.mayHaveRun ? "" : "; an earlier attempt may have stored it";
          throw new StreamUnavailable(name, `${error.detail}${earlier}`, true);
        }
        if (!passing || performance.now() >= until) throw finalError(name, error, sent);
        lost = sent;
      }
      await pause(Math.min(delay, Math.max(0, until - performance.now())), undefined);
    }
  }

  async #sealed({ session }: Parts, { key, definition }: Log, producer: Producer, batch: readonly Appending[]): Promise<Fields> {
    const sealer = session.sealer(key);
    const sent = wallUs();
    const records = await Promise.all(batch.map(async ({ payload, packed, options }, i) => {
      const { headers, ttlMs = 0, expect, tombstone = false } = options;
      if (payload.length > session.messageLimit) {
        throw new MessageTooLarge(`${payload.length} bytes are over the limit of ${session.messageLimit}`);
      }
      const recordKey = bytesOf(options.key);
      const end = encodeEnd(sent, 0, 1, producer.sequence + i);
      const meta = metadata(Kind.STREAM, utf8(definition.name), key.id, sealer.senderId, end);
      const plain = encodeBundle([{ payload, headers: encodeHeaders(headers), key: recordKey }], packed);
      return [
        producer.sequence + i, end, await sealer.seal(meta, plain).body,
        recordKey.length ? await key.keyHash(definition.hashUuid, recordKey) : EMPTY, tombstone,
        ttlMs ? sent + Math.floor(1000 * ttlMs) : 0, 0, expect ?? null, EMPTY,
      ];
    }));
    return { op: "append", sender_id: sealer.senderId, records, producer: producer.id, epoch: producer.epoch };
  }
}

function bytesOf(key: string | Uint8Array | null | undefined): Bytes {
  if (key === undefined || key === null) return EMPTY;
  if (typeof key === "string" && key.isWellFormed()) return utf8(key);
  if (!(key instanceof Uint8Array)) throw new ConfigError("a key must be a well-formed string or bytes");
  return new Uint8Array(key);
}

function takeBatch(queue: Appending[]): Appending[] {
  let size = 0;
  let count = 0;
  for (const { payload } of queue) {
    size += payload.length + 128;
    if (count && (size > BATCH_BYTES || count >= MAX_BATCH)) break;
    count++;
  }
  return queue.splice(0, count);
}

function settle(name: string, { resolve, reject, options }: Appending, outcome: unknown[] | undefined): void {
  const [status, value] = outcome ?? [];
  if ((status === 0 || status === 1) && value !== null) resolve(Number(value));
  else if (status === 4) reject(new OffsetConflict(name, `the stream ends at offset ${Number(value)}, not ${options.expect}`, Number(value)));
  else if (status === 1) reject(new StreamError(name, "it was stored before, at an offset that the store does not know any more", true));
  else reject(new StreamUnavailable(name, "the store does not know this producer any more; append it again", false));
}

function finalError(name: string, error: unknown, sent: boolean): unknown {
  if (error instanceof ConnectionLost) return new StreamUnavailable(name, error.detail, sent);
  if (error instanceof StreamUnavailable && sent && !error.mayHaveRun) return new StreamUnavailable(name, error.detail, true);
  return error;
}

/** Whether a stream may hold a record of this kind and name. */
function records(definition: Definition, kind: number, name: string): boolean {
  return [definition, ...definition.origins].some((origin) => {
    if (kind === Kind.STREAM) return name === origin.name;
    if (kind === Kind.PUBLISH) return origin.topic !== "" && matches(origin.topic, name);
    return (kind === Kind.PUSH || kind === Kind.BROADCAST) && origin.cluster !== "" && name === origin.cluster;
  });
}

function pause(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve, reject) => {
    const abort = (): void => {
      clearTimeout(timer);
      reject(signal!.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, ms);
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort);
  });
}
