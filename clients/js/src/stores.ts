/** One session's calls to stores: finding a log, its channel, and authenticated calls (docs/protocol.md §19). */

import { concat, equal, hex, random, sha256, unhex, utf8, type Bytes } from "./bytes.ts";
import { hasCode, Knock, type Channel } from "./channel.ts";
import { wallUs } from "./clock.ts";
import {
  AmbiguousStream, ConnectionLost, DecodeError, NoStream, OpenError, SealError, StreamDamaged, StreamError, StreamSuperseded,
  StreamUnavailable, type IrisError,
} from "./errors.ts";
import { Cause, encodeEnd, Kind, type DataFrame, type Fields, type Int } from "./frames.ts";
import { verify, type ClusterKey } from "./keys.ts";
import { decode, encode } from "./msgpack.ts";
import type { Declared, Session } from "./session.ts";

interface Pending {
  readonly name: string;
  readonly keyId: Bytes;
  readonly resolve: (answer: { end: Bytes; body: Bytes }) => void;
  readonly reject: (error: StreamError) => void;
  readonly stream: string;
  readonly writes: boolean;
}

/** What an order says of the stream, after its checks. */
export interface Definition {
  readonly name: string;
  readonly topic: string;
  readonly cluster: string;
  /** The log whose place this one has taken, and the offset at which they part. */
  readonly replaces: { readonly uuid: string; readonly next: number } | null;
  readonly origins: readonly { readonly name: string; readonly topic: string; readonly cluster: string }[];
  /** The uuid that keys and ids of messages are hashed with. */
  readonly hashUuid: Bytes;
  /** Uuids in hex of the partitions from 1 on (§19.10); empty for a stream of one log, and in a partition. */
  readonly partitions: readonly string[];
  /** Of a partition from 1 on: the uuid of partition 0 in hex, and its number. */
  readonly parent: string;
  readonly partition: number;
}

/** Which partition messages go to, as the store last said. */
interface Placing {
  readonly atMs: number;
  readonly count: number;
  readonly key: ClusterKey;
}

/** A log that this session has a channel to. */
export interface Log {
  readonly uuid: Bytes;
  readonly uuidHex: string;
  readonly key: ClusterKey;
  readonly definition: Definition;
  readonly channel: Channel;
  /** Its name in the cache of the session. */
  readonly cached: string;
}

/** How long partitions are not looked up again. */
const PLACING_MS = 10_000;
/** Codes of "refused" that the call did not cause, and that may pass. */
const PASSING: ReadonlySet<string> = new Set(["leaving", "moved", "disk", "failed", "channel"]);

/** How the relay's reason begins when the session's ticket does not name a stream. */
const BY_TICKET = "the ticket does not allow ";
const EXPLAIN_MS = 1000;

const ORDER = new Set(["action", "uuid", "key_id", "store", "issued_us", "definition", "revision"]);
const DEFINITION = new Set([
  "name", "topic", "cluster", "max_bytes", "max_messages", "max_age_us", "compact", "paused", "mirror", "origins",
  "consuming_paused", "dedup_window_us", "partitions", "parent", "partition", "replaces", "successor",
]);

/** The name of a field of an order that this client does not know, or "". Without it another stream would be read. */
export function unknownField(order: Fields): string {
  const fields = Object.keys(order).filter((name) => !ORDER.has(name));
  return [...fields, ...Object.keys(order.definition as Fields).filter((name) => !DEFINITION.has(name))][0] ?? "";
}

export class StoreCalls {
  readonly #session: Session;
  readonly #pending = new Map<bigint, Pending>();
  readonly #senderId = random(16);
  readonly #logs = new Map<string, Promise<Log>>();
  readonly #placings = new Map<string, Placing>();

  constructor(session: Session) {
    this.#session = session;
    session.onData([Kind.STREAM_REPLY], {
      handle: (frame, declared) => this.#reply(frame, declared),
      overflow: ({ hop }) => this.#take(hop)?.reject(new StreamUnavailable("", "this program reads too slowly", true)),
    });
    session.onEnd((error) => {
      for (const pending of this.#pending.values()) pending.reject(lost(pending.stream, error));
      this.#pending.clear();
    });
  }

  get size(): number {
    return this.#pending.size;
  }

  /** FAIL for a call to a store. */
  fail(hop: bigint, { cause, detail, may_have_run }: Fields): void {
    const pending = this.#take(hop);
    if (!pending) return;
    const ran = may_have_run as boolean;
    const text = detail as string;
    if (Number(cause) === Cause.REFUSED && !ran) {
      // Such as for a ticket that does not allow it: a repeated call is refused, too. No key holder said it, so what
      // writes may have run.
      pending.reject(new StreamError(pending.stream, text || "the relay refused it", pending.writes));
      return;
    }
    pending.reject(Number(cause) === Cause.NO_MEMBERS
      ? new NoStream(pending.stream, text || "no store serves it", ran)
      : new StreamUnavailable(pending.stream, text || "the store did not answer", ran));
  }

  /** Return the log of a stream, or of a partition of it. Raises NoStream, AmbiguousStream, StreamUnavailable. */
  log(stream: string, keys: readonly ClusterKey[], uuid: string, partition = 0): Promise<Log> {
    const name = cacheName(stream, uuid, partition);
    let log = this.#logs.get(name);
    if (!log) {
      log = partition ? this.#partition(stream, keys, uuid, partition) : this.#find(stream, keys, uuid);
      this.#logs.set(name, log);
      log.catch(() => this.#logs.delete(name));
    }
    return log;
  }

  async #find(stream: string, keys: readonly ClusterKey[], uuid: string): Promise<Log> {
    const listed = (name: string) => this.#session.listed({ name, key_ids: keys.map(({ id }) => id), streams: true })
      .catch((error: unknown) => {
        throw error instanceof ConnectionLost ? new StreamUnavailable(stream, error.detail) : error;
      });
    const { joined, starting } = await listed(stream);
    const found = joined.filter(({ tag }) => !uuid || tag === uuid);
    const uuids = new Set(found.map(({ tag }) => tag as string));
    if (uuids.size > 1) throw new AmbiguousStream(stream, `several stores have it; name one by its uuid: ${[...uuids].join(", ")}`);
    const [tag] = uuids;
    if (tag === undefined) {
      if (uuid && joined.length) {
        // Another log has the name now. The old one may still be read by its uuid.
        const kept = (await listed(uuid)).joined.flatMap(({ key_ids }) => key_ids as Bytes[]);
        const key = keys.find(({ id }) => kept.some((other) => equal(other, id)));
        if (key) return this.#open(stream, uuid, key, cacheName(stream, uuid, 0));
        const now = await this.#find(stream, keys, "");
        const { replaces } = now.definition;
        if (replaces?.uuid === uuid) {
          throw new StreamSuperseded(stream, `log ${uuid} was superseded by log ${now.uuidHex}, which has its name now; ` +
            `both have the same messages below offset ${replaces.next}. Start again without the old uuid`);
        }
      }
      if (starting.length) throw new StreamUnavailable(stream, `the stores of ${starting.join(", ")} are starting`);
      await this.#explain(stream, keys);
      throw new NoStream(stream, "no store has it under your keys");
    }
    const held = found.flatMap(({ key_ids }) => key_ids as Bytes[]);
    const key = keys.find(({ id }) => held.some((other) => equal(other, id)));
    if (!key) throw new NoStream(stream, "no store has it under your keys");
    return this.#open(stream, tag, key, cacheName(stream, uuid, 0));
  }

  /** Raise NoStream with the relay's reason if the ticket does not name a stream: only the answer to a call says that. */
  async #explain(stream: string, [key]: readonly ClusterKey[]): Promise<void> {
    if (!key) return;
    const error = await this.#bare(stream, stream, key, { op: "describe" }, EXPLAIN_MS).catch((error: unknown) => error);
    if (error instanceof NoStream && error.detail.startsWith(BY_TICKET)) throw error;
  }

  async #partition(stream: string, keys: readonly ClusterKey[], uuid: string, partition: number): Promise<Log> {
    const parent = await this.log(stream, keys, uuid);
    const definition = await this.#inForce(parent);
    const found = definition.partitions[partition - 1];
    if (found === undefined) throw new NoStream(stream, `it has ${definition.partitions.length + 1} partitions, and no ${partition}`);
    const log = await this.#open(`${stream}/${partition}`, found, parent.key, cacheName(stream, uuid, partition));
    if (log.definition.parent !== parent.uuidHex || log.definition.partition !== partition) {
      throw new NoStream(stream, `the store's order does not say that it is partition ${partition}`);
    }
    return log;
  }

  /** Return the definition in force of a log. */
  async #inForce(log: Log): Promise<Definition> {
    const answer = this.#expect(log.definition.name, await this.call(log, { op: "describe" }, 10_000), "described");
    return (await this.#definition(log.definition.name, log.uuidHex, answer)).definition;
  }

  /** Return the number of the partition that a message with this key goes to; without a key, any. */
  async place(log: Log, recordKey: Bytes): Promise<number> {
    let placing = this.#placings.get(log.cached);
    if (!placing || performance.now() - placing.atMs > PLACING_MS) {
      const { name } = log.definition;
      const answer = this.#expect(name, await this.call(log, { op: "describe" }, 10_000), "described");
      const { definition, keys } = await this.#definition(name, log.uuidHex, answer);
      placing = { atMs: performance.now(), count: definition.partitions.length + 1, key: keys[0]! };
      this.#placings.set(log.cached, placing);
    }
    if (!recordKey.length) return Math.floor(Math.random() * placing.count);
    return partitionOf(await placing.key.partitionHash(log.definition.hashUuid, recordKey), placing.count);
  }

  /** Open a channel to the log `uuid`, which must be the stream's. */
  async #open(stream: string, uuid: string, key: ClusterKey, cached: string): Promise<Log> {
    const knock = new Knock(key, random(32));
    const timeoutMs = 10_000;
    const door = this.#expect(stream, await this.#bare(stream, uuid, key, { op: "knock", nonce: knock.nonce }, timeoutMs), "door");
    const { definition } = await this.#definition(stream, uuid, door);
    const { fields, opening } = await knock.open(door as unknown as { store: Bytes; uuid: Bytes; nonce: Bytes });
    const opened = this.#expect(stream, await this.#bare(stream, uuid, key, { op: "open", ...fields }, timeoutMs), "opened");
    try {
      const channel = await opening.finish(opened.channel as Int, opened.share as Bytes, opened.signature as Bytes);
      return { uuid: unhex(uuid), uuidHex: uuid, key, definition, channel, cached };
    } catch (error) {
      if (error instanceof SealError) throw new StreamUnavailable(stream, "the store did not prove its key");
      throw error;
    }
  }

  /**
   * Check the orders of "door" or "described": one of our keys must say that this store keeps this log under this name.
   * Returns the definition of the highest revision, and those of our keys that signed, in the order of the answer.
   */
  async #definition(stream: string, uuid: string, door: Fields): Promise<{ definition: Definition; keys: ClusterKey[] }> {
    let best: Fields | null = null;
    const keys: ClusterKey[] = [];
    if (!Array.isArray(door.orders) || !(door.uuid instanceof Uint8Array) || hex(door.uuid) !== uuid) {
      throw new StreamUnavailable(stream, "the store's answer is malformed");
    }
    for (const signed of door.orders as unknown[][]) {
      const [order, publicKey, signature] = signed as [Bytes, Bytes, Bytes];
      const keyId = (await sha256(publicKey)).slice(0, 16);
      const key = this.#session.keyring.byId(keyId);
      if (!key) continue;
      if (!(await verify(publicKey, signature, concat(utf8("iris-stream-order-1"), order)))) continue;
      const said = decode(order) as Fields;
      const fits = said.action === "keep" && equal(said.store as Bytes, door.store as Bytes) &&
        equal(said.uuid as Bytes, door.uuid) && equal(said.key_id as Bytes, keyId);
      const unknown = fits && unknownField(said);
      if (unknown) throw new StreamError(stream, `its order has the field '${unknown}', which this client does not know; upgrade it`);
      if (fits) keys.push(key);
      if (fits && (!best || Number(said.revision ?? 0) >= Number(best.revision ?? 0))) best = said;
    }
    if (!best) throw new NoStream(stream, "the store shows no order of your keys to keep it");
    const { name, topic = "", cluster = "", origins = [], replaces = null } =
      best.definition as Fields & { origins?: Fields[]; replaces?: Fields | null };
    if (name !== stream) throw new NoStream(stream, `the store's order names it '${String(name)}'`);
    const first = (origins as Fields[])[0];
    const { partitions = [], parent, partition = 0 } = best.definition as { partitions?: Bytes[]; parent?: Bytes; partition?: number };
    const definition = {
      name: stream, topic: topic as string, cluster: cluster as string,
      partitions: partitions.map(hex), parent: parent ? hex(parent) : "", partition: Number(partition),
      replaces: replaces && { uuid: hex(replaces.uuid as Bytes), next: Number(replaces.next) },
      origins: (origins as Fields[]).map((origin) => ({
        name: origin.name as string, topic: (origin.topic ?? "") as string, cluster: (origin.cluster ?? "") as string,
      })),
      hashUuid: (first?.uuid as Bytes | undefined) ?? unhex(uuid),
    };
    return { definition, keys };
  }

  /** Call a log through its channel, and return the answer. `timeoutMs` covers the store's own wait. */
  async call(log: Log, map: Fields, timeoutMs: number, signal?: AbortSignal): Promise<Fields> {
    const stream = log.definition.name;
    const end = encodeEnd(wallUs(), timeoutMs, 1, 0);
    const { counter, body } = log.channel.call(end, encode(map));
    const answer = await this.#send(stream, log.uuidHex, log.key, end, body, timeoutMs, signal, map.op === "append");
    if (!hasCode(answer.body)) {
      const bare = this.#decode(stream, answer.body);
      this.forget(log);
      if (bare.op === "refused" && bare.code === "channel") throw new ChannelGone(stream);
      throw new StreamUnavailable(stream, "the answer is not authenticated", true);
    }
    try {
      const said = this.#decode(stream, await log.channel.answer(counter, answer.end, answer.body));
      if (said.op === "refused" && said.code === "superseded") this.forget(log); // another log has the name now
      return said;
    } catch (error) {
      if (!(error instanceof OpenError)) throw error;
      this.forget(log);
      throw new StreamUnavailable(stream, "the answer does not have the store's code", true);
    }
  }

  /** Look a log up again at its next use. */
  forget({ cached }: Log): void {
    this.#logs.delete(cached);
    this.#placings.delete(cached);
  }

  async #bare(stream: string, name: string, key: ClusterKey, map: Fields, timeoutMs: number): Promise<Fields> {
    const end = encodeEnd(wallUs(), timeoutMs, 1, 0);
    const answer = await this.#send(stream, name, key, end, encode(map), timeoutMs);
    return this.#decode(stream, answer.body);
  }

  #send(
    stream: string, name: string, key: ClusterKey, end: Bytes, body: Bytes | Promise<Bytes>, timeoutMs: number,
    signal?: AbortSignal, writes = false,
  ): Promise<{ end: Bytes; body: Bytes }> {
    const session = this.#session;
    return new Promise((resolve, reject) => {
      if (session.ended) {
        reject(lost(stream, session.ended, false));
        return;
      }
      session.beforeSend();
      const hop = session.nextHop();
      const alias = session.alias({ kind: Kind.STREAM, name, key }, this.#senderId);
      const abort = (): void => give(signal!.reason);
      const timer = setTimeout(() => give(new StreamUnavailable(stream, `the store did not answer within ${timeoutMs / 1000} s`, true)), timeoutMs + 1000);
      const stop = (): void => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", abort);
        this.#pending.delete(hop);
      };
      const give = (error: unknown): void => {
        stop();
        reject(error);
      };
      signal?.addEventListener("abort", abort);
      this.#pending.set(hop, {
        name, keyId: key.id, stream, writes, reject: give,
        resolve: (answer) => {
          stop();
          resolve(answer);
        },
      });
      session.data(Kind.STREAM, alias, hop, session.deadline(timeoutMs), end, body);
    });
  }

  #reply({ hop, end, body }: DataFrame, { name, keyId }: Declared): void {
    const pending = this.#pending.get(hop);
    if (!pending) {
      this.#session.count("late answer of a store");
      return;
    }
    if (name !== pending.name || !equal(keyId, pending.keyId)) {
      pending.reject(new StreamUnavailable(pending.stream, "the answer is from another address", true));
      return;
    }
    pending.resolve({ end, body });
  }

  #take(hop: bigint): Pending | undefined {
    return this.#pending.get(hop);
  }

  #decode(stream: string, body: Bytes): Fields {
    try {
      const map = decode(body);
      if (typeof map === "object" && map !== null && typeof (map as Fields).op === "string") return map as Fields;
    } catch (error) {
      if (!(error instanceof DecodeError)) throw error;
    }
    throw new StreamUnavailable(stream, "the store's answer is malformed", true);
  }

  #expect(stream: string, answer: Fields, op: string): Fields {
    if (answer.op === op) return answer;
    throw refusal(stream, answer);
  }
}

function cacheName(stream: string, uuid: string, partition: number): string {
  return [stream, uuid, partition].join("\0");
}

/** The partition of a hash among `count` (§19.10): jump consistent hashing. */
export function partitionOf(hash: bigint, count: number): number {
  let h = hash;
  let b = -1;
  for (let j = 0; j < count; ) {
    b = j;
    h = BigInt.asUintN(64, h * 2_862_933_555_777_941_757n + 1n);
    j = Math.floor((b + 1) * (2 ** 31 / (Number(h >> 33n) + 1)));
  }
  return b;
}

/** The store does not know the channel any more. Calls that change nothing are repeated. */
export class ChannelGone extends StreamUnavailable {
  constructor(stream: string) {
    super(stream, "the store does not know the channel any more", true);
  }
}

/** Return the error that "refused", or an answer that does not fit, means. */
export function refusal(stream: string, { op, code, detail }: Fields): StreamError {
  if (op !== "refused") return new StreamUnavailable(stream, `the store answered with '${String(op)}'`, true);
  const text = String(detail || code);
  if (code === "no-stream") return new NoStream(stream, text);
  if (code === "damaged") return new StreamDamaged(stream, text);
  if (code === "superseded") return new StreamSuperseded(stream, text);
  return PASSING.has(code as string) ? new StreamUnavailable(stream, text, code === "moved") : new StreamError(stream, text);
}

function lost(stream: string, error: IrisError, ran = true): StreamUnavailable {
  return new StreamUnavailable(stream, `the connection to the relay was lost: ${error.message}`, ran);
}
