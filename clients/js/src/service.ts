/** Services: the handlers that a client serves as a member of a cluster. */

import { monotonicUs } from "./clock.ts";
import { ConfigError, InvalidName } from "./errors.ts";
import { Kind, type DataFrame } from "./frames.ts";
import type { ClusterKey, Keyring } from "./keys.ts";
import { Message, type Loss } from "./messages.ts";
import { checkMethod, checkName } from "./names.ts";
import { notify } from "./notify.ts";
import type { Declared } from "./session.ts";
import type { Troubles } from "./troubles.ts";
import type { Tunnel } from "./tunnel.ts";

/** A message for a handler. */
export class IncomingMessage extends Message {
  /** Aborted when the caller gives up or leaves. The handler may go on. */
  readonly signal: AbortSignal;

  constructor(message: Message, signal: AbortSignal) {
    super(message.payload, message.name, message.headers, message.packed, message.source, message.method);
    this.signal = signal;
  }
}

/** Gets the payload's value (bytes if bytes or text were sent), and the whole message. */
export type Handler = (value: any, message: IncomingMessage) => unknown;
export type TunnelHandler = (tunnel: Tunnel) => unknown;

export interface ServiceOptions {
  /** Handlers of one kind that run at once. */
  readonly concurrency?: number;
  /** Bytes of one kind's messages that wait or run; beyond it they are refused. */
  readonly limitBytes?: number;
  readonly description?: string;
  readonly version?: string;
}

const CONCURRENCY = 64;
const LIMIT_BYTES = 67_108_864;

const GENERATORS = [function* () {}, async function* () {}].map((each) => Object.getPrototypeOf(each) as object);

/** Raise ConfigError for what is no function, and for a generator function, whose body would never run. */
function checkHandler(handler: unknown): void {
  if (typeof handler !== "function") throw new ConfigError("a handler must be a function");
  if (GENERATORS.includes(Object.getPrototypeOf(handler) as object)) {
    throw new ConfigError(`the handler ${handler.name} is a generator function, whose body would never run; use a plain or an async function`);
  }
}

/** Return what a handler returned. Raises TypeError for a generator, whose body has not run. */
export function checkResult(result: unknown): unknown {
  const tag = Object.prototype.toString.call(result);
  if (tag === "[object Generator]" || tag === "[object AsyncGenerator]") {
    throw new TypeError("the handler returned a generator, whose body never runs; return a value or a promise");
  }
  return result;
}

/** The handlers of one cluster. Serve it with `Client.serve`. */
export class Service {
  readonly name: string;
  readonly concurrency: number;
  readonly limitBytes: number;
  readonly description: string;
  readonly version: string;
  /** Kind -> method, "" for none -> handler. */
  readonly handlers = new Map<number, Map<string, Handler>>();
  tunnelHandler: TunnelHandler | null = null;

  constructor(name: string, options: ServiceOptions = {}) {
    checkName(name, "cluster");
    const { concurrency = CONCURRENCY, limitBytes = LIMIT_BYTES, description = "", version = "" } = options;
    for (const [what, text] of Object.entries({ description, version })) {
      if (typeof text !== "string") throw new ConfigError(`${what} must be a string`);
    }
    if (!Number.isInteger(concurrency) || concurrency < 1 || concurrency > 2 ** 20) {
      throw new ConfigError(`concurrency must be from 1 to ${2 ** 20}`);
    }
    if (!Number.isInteger(limitBytes) || limitBytes < 1 || limitBytes > 2 ** 40) {
      throw new ConfigError("limitBytes must be from 1 to 2^40");
    }
    this.name = name;
    this.concurrency = concurrency;
    this.limitBytes = limitBytes;
    this.description = description;
    this.version = version;
  }

  /** The handler's result is the reply: bytes and text as they are, other values as MessagePack. */
  onRequest(handler: Handler): this;
  onRequest(method: string, handler: Handler): this;
  onRequest(...given: [Handler] | [string, Handler]): this {
    return this.#add(Kind.REQUEST, given);
  }

  /** Its result is ignored; an error that it raises is logged. */
  onPush(handler: Handler): this;
  onPush(method: string, handler: Handler): this;
  onPush(...given: [Handler] | [string, Handler]): this {
    return this.#add(Kind.PUSH, given);
  }

  onSurvey(handler: Handler): this;
  onSurvey(method: string, handler: Handler): this;
  onSurvey(...given: [Handler] | [string, Handler]): this {
    return this.#add(Kind.SURVEY, given);
  }

  onBroadcast(handler: Handler): this {
    return this.#add(Kind.BROADCAST, [handler]);
  }

  /** The tunnel is closed when the handler returns, and broken when it raises. */
  onTunnel(handler: TunnelHandler): this {
    checkHandler(handler);
    this.tunnelHandler = handler;
    return this;
  }

  #add(kind: number, given: [Handler] | [string, Handler]): this {
    const [method, handler] = given.length === 2 ? given : (["", given[0]] as const);
    checkHandler(handler);
    if (method) checkMethod(method);
    if (method.startsWith("iris.")) throw new InvalidName(`'${method}' is not allowed: names that begin with "iris." are the library's`);
    const handlers = this.handlers.get(kind) ?? new Map<string, Handler>();
    if (handlers.has(method)) throw new ConfigError(`${this.name} has a handler for that already`);
    handlers.set(method, handler);
    this.handlers.set(kind, handlers);
    return this;
  }

  get kinds(): number[] {
    return [...this.handlers.keys(), ...(this.tunnelHandler ? [Kind.TUNNEL_OPEN] : [])];
  }

  get methods(): number {
    let count = 0;
    for (const handlers of this.handlers.values()) for (const method of handlers.keys()) if (method) count++;
    return count;
  }
}

/** A call that was accepted. `frame` is what is sent back if it is refused after all. */
export interface Job {
  readonly kind: number;
  readonly hop: bigint;
  readonly frame: DataFrame;
  readonly declared: Declared;
  readonly counter: number;
  readonly message: Message;
  /** In our clock's µs; 0 for none. */
  readonly deadlineUs: number;
  readonly size: number;
}

/** What waits and runs of one kind. */
export class Lane {
  running = 0;
  bytes = 0;
  readonly queue: Job[] = [];
}

/** A service that is served, as `Client.serve` returns it. */
export class Binding implements AsyncDisposable {
  readonly service: Service;
  readonly keys: readonly ClusterKey[];
  /** Messages that this member dropped, by cause. */
  readonly dropped = new Map<string, number>();
  /** Called with broadcasts that were lost. */
  onLoss: ((loss: Loss) => void) | undefined;
  /** Value of the guard's epoch since when the member is there without a break. */
  since = Infinity;
  readonly lanes = new Map<number, Lane>();
  readonly startedUs = monotonicUs();
  readonly troubles: Troubles;
  readonly #close: (binding: Binding) => Promise<void>;

  /** Made by `Client.serve`. */
  constructor(service: Service, keyring: Keyring, troubles: Troubles, close: (binding: Binding) => Promise<void>) {
    this.service = service;
    this.troubles = troubles;
    this.keys = keyring.clusterKeys(service.name);
    this.#close = close;
    for (const kind of service.kinds) this.lanes.set(kind, new Lane());
    // A member of any kind answers requests for its description.
    if (!this.lanes.has(Kind.REQUEST)) this.lanes.set(Kind.REQUEST, new Lane());
  }

  /** Leave the cluster, and return when what was accepted is done. */
  close(): Promise<void> {
    return this.#close(this);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** The connection was lost, or the session moves. */
  interrupted(cause: string): void {
    if (this.since === Infinity) return;
    this.since = Infinity;
    if (!this.lanes.has(Kind.BROADCAST)) return;
    this.troubles.count("uncounted", this.service.name);
    if (this.onLoss) {
      notify(this.onLoss, { kind: "broadcast" as const, name: this.service.name, source: "", count: null, cause });
    }
  }
}
