/** The caller's side of requests, pushes and surveys (docs/protocol.md §10). */

import { equal, unbase64, type Bytes } from "./bytes.ts";
import { decodeBundle, encodeBundle, encodeHeaders, type Bundle, type Headers } from "./bundle.ts";
import {
  ConnectionLost, DecodeError, MessageTooLarge, NoMembers, OpenError, Overloaded, RelayError, RemoteError,
  RequestTimeout, type IrisError, type RequestError,
} from "./errors.ts";
import { Cause, decodeRun, encodeEnd, Kind, lenientText, texts, type DataFrame, type Fields } from "./frames.ts";
import type { ClusterKey } from "./keys.ts";
import { Message } from "./messages.ts";
import { decode } from "./msgpack.ts";
import { answersLine, type Opened } from "./sframe.ts";
import type { Address, Declared, Session } from "./session.ts";

const MAX_PENDING = 65_536;
const MAX_DETAILS = 2048;
const STALE = "stale";

/** Receives what a survey yields. */
export interface SurveySink {
  roster(members: readonly string[]): void;
  answer(member: string, message: Message): void;
  fault(member: string, error: RemoteError): void;
  done(lost: readonly string[], error: IrisError | null): void;
}

interface Pending {
  readonly kind: number;
  readonly address: Address;
  readonly senderId: Bytes;
  readonly counter: number;
  readonly resolve: (message: Message) => void;
  readonly reject: (error: RequestError) => void;
  readonly sink: SurveySink | null;
  readonly answered: Set<string>;
  timer: ReturnType<typeof setTimeout> | undefined;
}

export interface CallOptions {
  readonly headers?: Headers | undefined;
  readonly method?: string | undefined;
}

export function isStale(error: unknown): boolean {
  return error instanceof RelayError && error.detail === STALE;
}

/** Raise MessageTooLarge unless a message may be sent. */
export function checkMessage(payload: Bytes, limit: number): void {
  if (payload.length > limit) throw new MessageTooLarge(`${payload.length} bytes are over the limit of ${limit}; use a tunnel`);
}

/** One session's calls that wait for an answer. */
export class Calls {
  readonly #session: Session;
  readonly #pending = new Map<bigint, Pending>();
  /** Hop ids of calls whose callers gave up in this turn. */
  #left: bigint[] = [];
  readonly #pushFailed: (cluster: string, error: RequestError) => void;

  constructor(session: Session, pushFailed: (cluster: string, error: RequestError) => void) {
    this.#session = session;
    this.#pushFailed = pushFailed;
    session.onControl(Kind.FAIL, (fields) => this.#failed(fields));
    session.onControl(Kind.ROSTER, ({ hop, members }) => this.#sink(hop)?.roster(texts(members)));
    session.onControl(Kind.DONE, (fields) => this.#done(fields));
    session.onData([Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.ANSWERS], {
      open: (frame, declared) => this.#open(frame, declared),
      handle: (frame, declared, opened) => this.#handle(frame, declared, opened),
      overflow: (frame, declared) => this.#overflow(frame, declared),
    });
    session.onEnd((error) => this.#lost(error));
  }

  /** Calls that wait; pushes do not count, because they wait for nothing. */
  get size(): number {
    let size = 0;
    for (const { kind } of this.#pending.values()) if (kind !== Kind.PUSH) size++;
    return size;
  }

  /** Send a request; the reply or a RequestError follows. */
  request(address: Address, payload: Bytes, packed: boolean, timeoutMs: number, options: CallOptions, signal?: AbortSignal): Promise<Message> {
    return new Promise((resolve, reject) => {
      const abort = (): void => {
        this.#leave(hop);
        reject(signal!.reason);
      };
      const stop = (): void => signal?.removeEventListener("abort", abort);
      const hop = this.#send(address, payload, packed, timeoutMs, options, {
        resolve: (message) => {
          stop();
          resolve(message);
        },
        reject: (error) => {
          stop();
          reject(error);
        },
        sink: null,
      });
      this.#pending.get(hop)!.timer = setTimeout(() => {
        this.#leave(hop);
        stop();
        reject(new RequestTimeout(address.name, `no reply within ${timeoutMs / 1000} s`));
      }, timeoutMs);
      signal?.addEventListener("abort", abort, { once: true });
    });
  }

  /** Send a push. A failure is reported later. */
  push(address: Address, payload: Bytes, packed: boolean, timeoutMs: number, options: CallOptions): void {
    const reject = (error: RequestError): void => this.#pushFailed(address.name, error);
    const hop = this.#send(address, payload, packed, timeoutMs, options, { resolve: () => undefined, reject, sink: null });
    // Success has no answer: after the deadline and a while, no failure will come either.
    this.#pending.get(hop)!.timer = setTimeout(() => this.#pending.delete(hop), 2 * timeoutMs + 10_000);
  }

  survey(address: Address, payload: Bytes, packed: boolean, timeoutMs: number, options: CallOptions, sink: SurveySink): () => void {
    const reject = (error: RequestError): void => sink.done([], error);
    const hop = this.#send(address, payload, packed, timeoutMs, options, { resolve: () => undefined, reject, sink });
    const pending = this.#pending.get(hop)!;
    pending.timer = setTimeout(() => {
      this.#leave(hop);
      sink.done([], null);
    }, timeoutMs);
    return () => this.#leave(hop);
  }

  #send(
    address: Address, payload: Bytes, packed: boolean, timeoutMs: number, { headers, method = "" }: CallOptions,
    answer: Pick<Pending, "resolve" | "reject" | "sink">,
  ): bigint {
    const encoded = encodeHeaders(headers);
    checkMessage(payload, this.#session.messageLimit);
    if (this.#pending.size >= MAX_PENDING) throw new Overloaded(address.name, `${MAX_PENDING} calls wait for answers already`);
    this.#session.beforeSend();
    const hop = this.#session.nextHop();
    const plain = encodeBundle([{ payload, headers: encoded }], packed, method);
    const sealed = this.#session.seal(address, plain, { hop, timeoutMs });
    this.#pending.set(hop, { kind: address.kind, address, ...sealed, ...answer, answered: new Set(), timer: undefined });
    return hop;
  }

  /** Forget a call, and tell the relay that nobody waits. */
  #leave(hop: bigint): void {
    const pending = this.#take(hop);
    if (!pending || this.#session.ended) return;
    if (!this.#left.length) queueMicrotask(() => this.#reportLeft());
    this.#left.push(hop);
  }

  #reportLeft(): void {
    while (this.#left.length) {
      const hops = this.#left.splice(0, 4096);
      if (!this.#session.ended && !this.#session.leaving) this.#session.control(Kind.CALLER_LEFT, { hops });
    }
  }

  #take(hop: bigint): Pending | undefined {
    const pending = this.#pending.get(hop);
    if (pending) {
      this.#pending.delete(hop);
      clearTimeout(pending.timer);
    }
    return pending;
  }

  #sink(hop: unknown): SurveySink | null {
    return this.#pending.get(BigInt(hop as number))?.sink ?? null;
  }

  #failed(fields: Fields): void {
    const hop = BigInt(fields.hop as number);
    const pending = this.#take(hop);
    if (pending) pending.reject(errorOf(pending.address.name, fields));
    else this.onFail(hop, fields);
  }

  /** FAIL of other calls: tunnels and stores. */
  onFail: (hop: bigint, fields: Fields) => void = () => undefined;

  #done({ hop, lost }: Fields): void {
    const pending = this.#pending.get(BigInt(hop as number));
    if (!pending?.sink) return;
    this.#take(BigInt(hop as number));
    pending.sink.done(texts(lost), null);
  }

  #open(frame: DataFrame, declared: Declared): Promise<unknown> | undefined {
    if (frame.kind !== Kind.ANSWERS) return this.#openOne(frame.hop, frame.kind, frame.end, frame.body, declared);
    const end = encodeEnd(frame.sent, frame.timeout, 1, frame.first);
    const parts = decodeRun(frame).map(({ hop, body }) => ({
      hop, opening: this.#openOne(hop, Kind.REPLY, end, body, declared),
    }));
    return Promise.all(parts.map(async ({ hop, opening }) => ({ hop, opened: await opening?.catch((error: unknown) => error) })));
  }

  #openOne(hop: bigint, kind: number, end: Bytes, body: Bytes, declared: Declared): Promise<Opened> | undefined {
    const pending = this.#pending.get(hop);
    if (!pending || !declared.key || !answers(declared, kind, pending)) return undefined;
    return this.#session.open(declared, kind, end, body, answersLine(pending.senderId, pending.counter));
  }

  #handle(frame: DataFrame, declared: Declared, opened: unknown): void {
    if (frame.kind !== Kind.ANSWERS) this.#answer(frame.hop, frame.kind, declared, opened);
    else {
      for (const part of opened as { hop: bigint; opened: unknown }[]) this.#answer(part.hop, Kind.REPLY, declared, part.opened);
    }
  }

  #answer(hop: bigint, kind: number, declared: Declared, opened: unknown): void {
    const pending = this.#pending.get(hop);
    if (!pending) {
      this.#session.count("late answer");
      return;
    }
    const { name } = pending.address;
    if (opened instanceof OpenError || opened === undefined) {
      // Of a survey the others still count.
      if (pending.sink) this.#session.count("answer that does not open");
      else this.#take(hop)!.reject(new ConnectionLost(name, "the reply does not open, or is not for this request"));
      return;
    }
    if (opened instanceof Error) throw opened;
    let bundle: Bundle;
    try {
      bundle = decodeBundle((opened as Opened).plain, 1);
    } catch (error) {
      if (!(error instanceof OpenError)) throw error;
      if (pending.sink) this.#session.count("answer that does not decode");
      else this.#take(hop)!.reject(new RemoteError(name, "the reply does not decode", true));
      return;
    }
    const { payload, headers } = bundle.entries[0]!;
    const message = new Message(payload, name, headers, bundle.packed, declared.senderHex);
    if (pending.sink) this.#surveyed(pending, kind, message);
    else if (kind === Kind.FAULT) this.#take(hop)!.reject(faultOf(name, message));
    else this.#take(hop)!.resolve(message);
  }

  #surveyed(pending: Pending, kind: number, message: Message): void {
    const member = message.headers[kind === Kind.FAULT ? "member" : "iris-member"] ?? "";
    if (pending.answered.has(member)) return;
    pending.answered.add(member);
    if (kind === Kind.FAULT) pending.sink!.fault(member, faultOf(message.name, message));
    else pending.sink!.answer(member, message);
  }

  #overflow(frame: DataFrame, _: Declared): void {
    const hops = frame.kind === Kind.ANSWERS ? decodeRun(frame).map((part) => part.hop) : [frame.hop];
    for (const hop of hops) {
      const pending = this.#pending.get(hop);
      if (pending && !pending.sink) {
        this.#take(hop)!.reject(new ConnectionLost(pending.address.name, "this program reads too slowly, so the reply was dropped"));
      }
    }
  }

  #lost(error: IrisError): void {
    for (const [hop, pending] of this.#pending) {
      clearTimeout(pending.timer);
      this.#pending.delete(hop);
      // Of pushes that failed, the relay said so before its BYE.
      if (pending.kind === Kind.PUSH && this.#session.leaving) continue;
      pending.reject(new ConnectionLost(pending.address.name, `the connection to the relay was lost: ${error.message}`));
    }
  }
}

/** Whether an answer has its question's address and kind. */
function answers(declared: Declared, kind: number, { kind: asked, address }: Pending): boolean {
  const fitting = asked === Kind.SURVEY ? kind === Kind.ANSWER || kind === Kind.FAULT : kind === Kind.REPLY || kind === Kind.FAULT;
  return fitting && asked !== Kind.PUSH && declared.name === address.name && equal(declared.keyId, address.key.id);
}

/** Return the error that a relay's FAIL means for the caller of `name`. */
export function errorOf(name: string, { cause, detail, may_have_run, seen_ms }: Fields): RequestError {
  const ran = may_have_run as boolean;
  const said = (otherwise: string): string => (detail as string) || otherwise;
  switch (Number(cause)) {
    case Cause.NO_MEMBERS: return new NoMembers(name, said("no member serves it"), ran, Number(seen_ms ?? Infinity));
    case Cause.OVERLOADED: return new Overloaded(name, said("all members are at capacity"), ran);
    case Cause.EXPIRED: return new RequestTimeout(name, said("the member did not start it before the deadline"), ran);
    case Cause.LOST: return new ConnectionLost(name, said("the member disconnected"), ran);
    default: return new RelayError(name, said("the relay refused it"), ran || detail === STALE);
  }
}

function faultOf(name: string, fault: Message): RemoteError {
  const { headers } = fault;
  let details: Record<string, unknown> = {};
  const encoded = headers.details ?? "";
  if (encoded && encoded.length <= 4 * Math.ceil(MAX_DETAILS / 3)) {
    try {
      const found = decode(unbase64(encoded));
      if (typeof found === "object" && found !== null && !(found instanceof Map)) details = found as Record<string, unknown>;
    } catch (error) {
      // The refusal counts without its details.
      if (!(error instanceof DecodeError || error instanceof TypeError)) throw error;
    }
  }
  return new RemoteError(name, lenientText(fault.payload), headers["may-have-run"] !== "0", headers.code ?? null, details);
}

export function addressOf(kind: number, name: string, key: ClusterKey, site: string, member = ""): Address {
  return { kind, name, key, site, member };
}

