/** The client: connects, reconnects, and keeps what outlives a connection. */

import { text, unbase64, type Bytes } from "./bytes.ts";
import { encodeHeaders, type Headers } from "./bundle.ts";
import { Calls, checkMessage, isStale } from "./calls.ts";
import { Casts } from "./casts.ts";
import { monotonicUs } from "./clock.ts";
import { Closed, ConfigError, ConnectionLost, IrisError, LocalProtocolError, NoMembers, Overloaded, RelayError, RelayUnavailable, RequestError, RequestTimeout } from "./errors.ts";
import { Kind } from "./frames.ts";
import { Guard } from "./guard.ts";
import { Keyring, type ClusterKey, type KeyringEntries } from "./keys.ts";
import { encodePayload, type Loss, type Message } from "./messages.ts";
import { checkName, methodName, splitSite } from "./names.ts";
import { notify } from "./notify.ts";
import { Binding, type Service } from "./service.ts";
import { Serving } from "./serving.ts";
import { greet, type Address, type Connected, type Session } from "./session.ts";
import { checkUrl, openSocket } from "./socket.ts";
import { StoreCalls } from "./stores.ts";
import { Streams } from "./streams.ts";
import { Subscription, Subscriptions, type SubscribeOptions } from "./subscriptions.ts";
import { Survey } from "./survey.ts";
import { Troubles } from "./troubles.ts";
import { Tunnels, type Tunnel } from "./tunnel.ts";

const MEMBER = /^[0-9a-f]{32}\.[1-9][0-9]{0,18}$/;
const DEFAULT_TIMEOUT_MS = 5000;
const MAX_TIMEOUT_MS = 2 ** 31 - 1;
/** An idempotent request waits for members until its deadline if the last one left less than this ago. */
const SEEN_MS = 10_000;
const FIRST_PAUSE_MS = 100;
const MAX_PAUSE_MS = 1000;
/** Sessions that an idempotent request is sent through. */
const TRIES = 3;
const BYE_MS = 5000;
/** Cause of UNROUTED for a broadcast that nobody misses. */
const NO_MEMBERS = "no members";
const SILENCE_MS = 60_000;

export interface ConnectOptions {
  /** ws://host:port or wss://host:port; of several, the next one is tried when one fails. */
  readonly relay: string | readonly string[];
  readonly keyring: Keyring | KeyringEntries | string | Uint8Array;
  /** Shown by `iris status`. */
  readonly label?: string;
  /** Called with each loss: of pushes, of casts that the relay dropped, of a relay, of subscriptions and of services. */
  readonly onLoss?: (loss: Loss) => void;
  /** How long `connect` waits for a first relay before it raises RelayUnavailable. */
  readonly waitMs?: number;
  /** Milliseconds between attempts to connect: the first one and the longest one. Half of each is random. */
  readonly reconnectMinMs?: number;
  readonly reconnectMaxMs?: number;
  /** Bytes of publications and broadcasts that are held while no relay is connected. */
  readonly offlineBytes?: number;
  /** How long `close` waits for handlers that run. */
  readonly drainMs?: number;
  /**
   * What a relay with tickets requires. A function is called for every connection, and before a ticket expires, so that
   * the session goes on; it may ask your login handler.
   */
  readonly ticket?: string | (() => string | Promise<string>);
  /** Opens a connection; a WebSocket by default. */
  readonly open?: (url: string, signal: AbortSignal) => Promise<Connected>;
}

export interface CastOptions {
  readonly headers?: Headers;
}

export interface BroadcastOptions extends CastOptions {
  /** "site": only members of this site. */
  readonly scope?: "federation" | "site";
}

export interface PushOptions {
  readonly headers?: Headers;
  readonly timeoutMs?: number;
  /** Id of the one member to call. */
  readonly member?: string | null;
  readonly method?: string | null;
  readonly signal?: AbortSignal;
}

export interface RequestOptions extends PushOptions {
  /** It may run again on another member if one is lost. */
  readonly idempotent?: boolean;
}

export interface SurveyOptions {
  readonly headers?: Headers;
  readonly timeoutMs?: number;
  readonly scope?: "federation" | "site";
  readonly method?: string | null;
}

export interface Members {
  /** Members of this site, oldest first. */
  readonly members: readonly { readonly member: string; readonly label: string; readonly kinds: readonly number[] }[];
  /** How many members each other site has. */
  readonly sites: Readonly<Record<string, number>>;
  /** How many members there are under other keys: first 8 hex digits of the key's id -> count. */
  readonly others: Readonly<Record<string, number>>;
}

/** One session, and what is done through it. */
export interface Parts {
  readonly session: Session;
  readonly calls: Calls;
  readonly casts: Casts;
  readonly serving: Serving;
  readonly tunnels: Tunnels;
  readonly stores: StoreCalls;
}

interface HeldCast {
  readonly address: Address;
  readonly payload: Bytes;
  readonly packed: boolean;
  readonly headers: Headers | undefined;
}

/**
 * Connect to a relay. The client reconnects by itself until it is closed.
 *
 * Raises RelayUnavailable if no relay answers within `waitMs`, KeyringError, ConfigError.
 */
export async function connect(options: ConnectOptions): Promise<Client> {
  const { keyring } = options;
  const client = new Client(options, keyring instanceof Keyring ? keyring : await Keyring.from(keyring));
  await client.start();
  return client;
}

export class Client implements AsyncDisposable {
  readonly keyring: Keyring;
  /** Durable streams. */
  readonly streams: Streams;

  readonly #options: ConnectOptions;
  readonly #urls: readonly string[];
  readonly #guard: Guard;
  readonly #subscriptions: Subscriptions;
  readonly #bindings = new Set<Binding>();
  readonly #waiters = new Set<() => void>();
  readonly #stop = new AbortController();
  readonly #troubles = new Troubles((kind, make) => {
    const session = this.#parts?.session;
    if (session && !session.ended && !session.outbox.full) session.control(kind, make());
  });
  #parts: Parts | null = null;
  /** Sessions that are open, among them those that move. */
  readonly #open = new Set<Parts>();
  #held: HeldCast[] = [];
  #heldBytes = 0;
  /** Why there will be no session again. */
  #error: IrisError | null = null;
  #closed = false;
  #wasConnected = false;

  /** Use `connect`. */
  constructor(options: ConnectOptions, keyring: Keyring) {
    const urls = typeof options.relay === "string" ? [options.relay] : [...options.relay];
    if (!urls.length) throw new ConfigError("relay names no relay");
    urls.forEach(checkUrl);
    if (typeof (options.label ?? "") !== "string") throw new ConfigError("label must be a string");
    this.#options = options;
    this.#urls = urls;
    this.keyring = keyring;
    this.#guard = new Guard(() => keyring.all.length);
    this.#subscriptions = new Subscriptions(this.#guard, keyring);
    this.streams = new Streams(keyring, (name, timeoutMs, signal) => this.#ready(name, timeoutMs, signal));
  }

  // -- the connection ----------------------------------------------------------------------------------------

  /** Called by `connect`. */
  async start(): Promise<void> {
    const until = performance.now() + (this.#options.waitMs ?? 0);
    const first = new Promise<void>((resolve, reject) => {
      void this.#run(until, resolve, reject);
    });
    await first;
  }

  /** Whether a relay is connected. */
  get connected(): boolean {
    return this.#parts !== null;
  }

  /** Keep a session until the client is closed. `failed` is called if there was none until `untilMs`. */
  async #run(untilMs: number, connected: () => void, failed: (error: unknown) => void): Promise<void> {
    const { reconnectMinMs = 100, reconnectMaxMs = 10_000 } = this.#options;
    let delay = reconnectMinMs;
    for (let attempt = 0; !this.#closed; attempt++) {
      const began = performance.now();
      try {
        const parts = await this.#connect(this.#urls[attempt % this.#urls.length]!);
        connected();
        await this.#adopt(parts);
        const hopeless = await new Promise<boolean>((resolve) => {
          parts.session.onEnd((error) => resolve(this.#isHopeless(error)));
          void this.#drained(parts).then(() => resolve(false));
        });
        if (hopeless) throw parts.session.ended!;
        if (performance.now() - began > delay) delay = reconnectMinMs;
      } catch (error) {
        if (this.#closed) return;
        if (this.#isHopeless(error) || (!this.#wasConnected && began >= untilMs)) {
          this.#give(error instanceof IrisError ? error : new RelayUnavailable(String(error)));
          failed(error);
          return;
        }
      }
      await this.#sleep(delay * (0.5 + Math.random() / 2));
      delay = Math.min(2 * delay, reconnectMaxMs);
    }
  }

  async #connect(url: string): Promise<Parts> {
    const { open = openSocket, label = "javascript" } = this.#options;
    const ticket = await this.#ticket();
    const connected = await open(url, this.#stop.signal);
    let parts!: Parts;
    const session = await greet(connected, this.keyring, { label, ticket }, (made) => {
      parts = this.#prepare(made, url);
    });
    if (session.ended) throw session.ended;
    if (typeof this.#options.ticket === "function") this.#renewLater(session, ticket!);
    return parts;
  }

  async #ticket(): Promise<string | undefined> {
    const { ticket } = this.#options;
    return typeof ticket === "function" ? ticket() : ticket;
  }

  /** Send a newer ticket when most of this one's life is over. */
  #renewLater(session: Session, ticket: string): void {
    const left = expiryMs(ticket) - Date.now();
    if (Number.isNaN(left)) return; // the relay has accepted it; it ends the session when it expires
    const renew = (): void => void this.#renew(session);
    this.#renewals.set(session, setTimeout(renew, Math.min(Math.max(100, left * 0.7), MAX_TIMEOUT_MS)));
  }

  async #renew(session: Session): Promise<void> {
    try {
      const ticket = (await this.#ticket())!;
      if (session.ended || session.leaving) return;
      await session.asked(Kind.TICKET, { ticket }, Kind.ACK);
      this.#renewLater(session, ticket);
    } catch (error) {
      // The session lives until its ticket expires; the next one draws another.
      if (!session.ended) console.warn("iris: cannot renew the ticket", error);
    }
  }

  #prepare(session: Session, url: string): Parts {
    const calls = new Calls(session, (name, error) => {
      this.#troubles.count("not sent", name);
      this.#lost({ kind: "push", name, source: "", count: 1, cause: error.detail, error });
    });
    const serving = new Serving(session, this.#guard);
    const tunnels = new Tunnels(session, serving);
    const stores = new StoreCalls(session);
    const parts: Parts = { session, calls, casts: new Casts(session), serving, tunnels, stores };
    calls.onFail = (hop, fields) => {
      if (!tunnels.fail(hop, fields)) stores.fail(hop, fields);
    };
    this.#subscriptions.attach(session);
    session.onControl(Kind.GAP, (fields) => {
      if (fields.kind === Kind.PUBLISH) this.#subscriptions.gap(fields);
      else serving.gap(fields);
    });
    session.onControl(Kind.UNROUTED, (fields) => {
      const { kind, name, cause, alias } = fields;
      const count = alias === undefined ? Number(fields.count) : session.aliasRefused(fields);
      if (alias !== undefined && (!count || (kind !== Kind.PUBLISH && kind !== Kind.BROADCAST))) return; // calls get FAIL
      if (cause !== NO_MEMBERS && fields.others === undefined) this.#troubles.count("not sent", name as string, count);
      const what = kind === Kind.PUBLISH ? "publish" : "broadcast";
      this.#lost({ kind: what, name: name as string, source: "", count, cause: cause as string });
    });
    session.onControl(Kind.DRAIN, ({ grace_ms }) => {
      if (session.draining) return;
      session.draining = true;
      if (this.#parts === parts) this.#parts = null;
      for (const drained of this.#drains.get(parts) ?? []) drained();
      void this.#move(parts, Number(grace_ms));
    });
    // The relay sends PING every 20 s, and a connection may die without a word.
    const watch = setInterval(() => {
      if (monotonicUs() - session.heardUs > 1000 * SILENCE_MS) session.end(new IrisError("nothing came from the relay for a minute"));
    }, SILENCE_MS / 4);
    session.onEnd((error) => {
      clearInterval(watch);
      clearTimeout(this.#renewals.get(session));
      this.#open.delete(parts);
      const moved = session.leaving;
      if (this.#parts === parts) this.#parts = null;
      if (this.#closed || moved) return;
      const cause = `the connection to the relay was lost: ${error.message}`;
      this.#lost({ kind: "relay", name: url, source: "", count: null, cause });
      this.#interrupted(cause);
    });
    this.#open.add(parts);
    return parts;
  }

  readonly #drains = new WeakMap<Parts, (() => void)[]>();
  /** Session -> the timer that renews its ticket. */
  readonly #renewals = new WeakMap<Session, ReturnType<typeof setTimeout>>();

  /** Return when the session's relay begins to stop. */
  #drained(parts: Parts): Promise<void> {
    if (parts.session.draining) return Promise.resolve();
    return new Promise((resolve) => {
      this.#drains.set(parts, [...(this.#drains.get(parts) ?? []), resolve]);
    });
  }

  #interrupted(cause: string): void {
    this.#subscriptions.interrupted(cause);
    for (const binding of this.#bindings) binding.interrupted(cause);
  }

  /** Register everything with a new session, and send what was held. */
  async #adopt(parts: Parts): Promise<void> {
    const { session } = parts;
    if (session.draining) return;
    if (this.#wasConnected) this.#interrupted("the relay stopped, or the connection to it was lost");
    this.#wasConnected = true;
    const registering = [
      ...this.#subscriptions.all.map((subscription) => this.#register(parts, subscription)),
      ...[...this.#bindings].map((binding) => parts.serving.join(binding).catch((error: unknown) => {
        if (!session.ended) console.error(`iris: cannot serve ${binding.service.name} any more`, error);
      })),
    ];
    this.#parts = parts;
    const held = this.#held;
    this.#held = [];
    this.#heldBytes = 0;
    for (const { address, payload, packed, headers } of held) parts.casts.add(address, payload, packed, headers);
    for (const wake of [...this.#waiters]) wake();
    await Promise.all(registering);
  }

  async #register({ session }: Parts, subscription: Subscription): Promise<void> {
    try {
      await this.#subscriptions.register(session, subscription);
    } catch (error) {
      if (session.ended || session.draining) return; // the next session registers it
      this.#subscriptions.remove(subscription);
      subscription.end(error);
    }
  }

  /** The relay stops: finish what runs, and say bye. */
  async #move({ session, casts, calls, serving, tunnels, stores }: Parts, graceMs: number): Promise<void> {
    const until = performance.now() + Math.max(0, graceMs - 500);
    casts.flush();
    const busy = (): boolean => calls.size + tunnels.size + stores.size > 0;
    try {
      await Promise.race([serving.leaveAll().then(() => serving.idle()), this.#sleep(until - performance.now())]);
    } catch (error) {
      if (!session.ended) throw error;
    }
    while (busy() && !session.ended && performance.now() < until) await this.#sleep(10);
    if (session.ended) return;
    session.bye("moving");
    await Promise.race([new Promise<void>((resolve) => session.onEnd(() => resolve())), this.#sleep(BYE_MS)]);
    session.end(new IrisError("the session has moved"));
  }

  /** Return what a call may use. Raises ConnectionLost, Closed, or what ended the client. */
  async #ready(name: string, timeoutMs: number, signal?: AbortSignal): Promise<Parts> {
    const until = performance.now() + timeoutMs;
    for (;;) {
      signal?.throwIfAborted();
      if (this.#closed) throw new Closed("the client was closed");
      if (this.#error) throw new ConnectionLost(name, this.#error.message, false);
      if (this.#parts) return this.#parts;
      const left = until - performance.now();
      if (left <= 0) throw new ConnectionLost(name, `no relay was connected within ${timeoutMs / 1000} s`, false);
      await new Promise<void>((resolve) => {
        const wake = (): void => {
          clearTimeout(timer);
          this.#waiters.delete(wake);
          signal?.removeEventListener("abort", wake);
          resolve();
        };
        const timer = setTimeout(wake, left);
        this.#waiters.add(wake);
        signal?.addEventListener("abort", wake);
      });
    }
  }

  /** Whether another attempt would end as this one did: our settings are wrong, or we break a rule of the protocol. */
  #isHopeless(error: unknown): boolean {
    const another = this.#wasConnected && typeof this.#options.ticket === "function";
    if (another && error instanceof LocalProtocolError && /: (?:the |no )?ticket\b|: too many sessions/.test(error.message)) return false;
    return error instanceof LocalProtocolError || error instanceof ConfigError;
  }

  #give(error: IrisError): void {
    this.#error = error;
    this.#subscriptions.endAll(error);
    for (const wake of [...this.#waiters]) wake();
  }

  async #sleep(ms: number): Promise<void> {
    await new Promise<void>((resolve) => {
      const { signal } = this.#stop;
      const timer = setTimeout(done, Math.max(0, ms));
      function done(): void {
        clearTimeout(timer);
        signal.removeEventListener("abort", done);
        resolve();
      }
      if (signal.aborted) done();
      else signal.addEventListener("abort", done);
    });
  }

  /** Return what a subscription or service reports its losses to: its own function, and the client's. */
  #reporting(own: ((loss: Loss) => void) | undefined): (loss: Loss) => void {
    return (loss) => {
      if (own) notify(own, loss);
      if (this.#options.onLoss) notify(this.#options.onLoss, loss);
    };
  }

  #lost(loss: Loss): void {
    if (this.#options.onLoss) notify(this.#options.onLoss, loss);
    else console.warn(`iris: lost ${loss.count ?? "an unknown number of"} messages to ${loss.name}: ${loss.cause}`);
  }

  /**
   * Leave every cluster, finish what runs, and close the connection. Idempotent. It waits for the handlers that run, at
   * most `drainMs`: so a handler starts it, `void client.close()`, and does not await it.
   */
  async close(): Promise<void> {
    if (this.#closed) return;
    const left = this.#subscriptions.closeAll();
    const open = [...this.#open];
    const { drainMs = BYE_MS } = this.#options;
    const timeout = new Promise<void>((resolve) => setTimeout(resolve, drainMs).unref?.());
    const leave = async ({ session, casts, serving }: Parts): Promise<void> => {
      casts.flush();
      await Promise.all([left, serving.leaveAll()]);
      await serving.idle();
      this.#troubles.flush();
      await session.outbox.drained();
      const ended = new Promise<void>((resolve) => session.onEnd(() => resolve()));
      session.bye("client closed");
      await ended;
    };
    try {
      await Promise.race([Promise.all(open.map(leave)), timeout]);
    } catch (error) {
      if (!open.some(({ session }) => session.ended)) throw error;
    } finally {
      this.#closed = true;
      this.#troubles.end();
      this.#subscriptions.endAll();
      this.#stop.abort();
      for (const { session } of open) session.end(new Closed("the client was closed"));
      for (const wake of [...this.#waiters]) wake();
    }
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  // -- calls -------------------------------------------------------------------------------------------------

  /** Send a request to one member, and return the value of its reply: bytes if it replied with bytes or text. */
  async request(cluster: string, payload: unknown, options: RequestOptions = {}): Promise<any> {
    return (await this.requestMessage(cluster, payload, options)).value;
  }

  /** As `request`, and return the whole reply. Raises RequestError, MessageTooLarge, EncodeError, KeyringError. */
  async requestMessage(cluster: string, payload: unknown, options: RequestOptions = {}): Promise<Message> {
    const { timeoutMs = DEFAULT_TIMEOUT_MS, idempotent = false, signal } = options;
    const address = this.#address(Kind.REQUEST, cluster, options.member);
    const method = methodName(options.method);
    const { payload: bytes, packed } = encodePayload(payload);
    const until = performance.now() + checkTimeout(timeoutMs);
    let ran = false;
    let pauseMs = 0;
    for (let tries = idempotent ? TRIES : 1; ; ) {
      try {
        const parts = await this.#ready(address.name, until - performance.now(), signal);
        if (parts.session.outbox.full) await parts.session.outbox.room(signal);
        tries--;
        const left = Math.ceil(until - performance.now());
        if (left <= 0) throw new RequestTimeout(address.name, `no reply within ${timeoutMs / 1000} s`, false);
        return await parts.calls.request(address, bytes, packed, left, { ...options, method }, signal);
      } catch (error) {
        if (!(error instanceof RequestError)) throw error;
        if (idempotent && error instanceof NoMembers && (pauseMs || error.seenMs < SEEN_MS)) {
          pauseMs = Math.min(2 * pauseMs || FIRST_PAUSE_MS, MAX_PAUSE_MS, until - performance.now());
          if (pauseMs > 0 && !this.#closed) {
            await this.#sleep(pauseMs);
            signal?.throwIfAborted();
            if (performance.now() < until && !this.#closed) {
              tries++;
              continue;
            }
          }
        }
        const again = error instanceof ConnectionLost || isStale(error);
        if (!again || tries <= 0 || performance.now() >= until || this.#closed) throw ran ? ranBefore(error) : error;
        ran ||= error.mayHaveRun;
      }
    }
  }

  /** Send a message to one member, without a reply; it runs at most once. A failure is reported to `onLoss`. */
  async push(cluster: string, payload: unknown, options: PushOptions = {}): Promise<void> {
    const { timeoutMs = DEFAULT_TIMEOUT_MS, signal } = options;
    const address = this.#address(Kind.PUSH, cluster, options.member);
    const method = methodName(options.method);
    const { payload: bytes, packed } = encodePayload(payload);
    const until = performance.now() + checkTimeout(timeoutMs);
    const parts = await this.#ready(address.name, timeoutMs, signal);
    parts.calls.push(address, bytes, packed, Math.max(1, Math.ceil(until - performance.now())), { ...options, method });
    await parts.session.outbox.room(signal);
  }

  /** Ask all members. */
  survey(cluster: string, payload: unknown, options: SurveyOptions = {}): Survey {
    const { timeoutMs = DEFAULT_TIMEOUT_MS, scope } = options;
    const address = this.#address(Kind.SURVEY, cluster, undefined, scope);
    const method = methodName(options.method);
    const { payload: bytes, packed } = encodePayload(payload);
    const until = performance.now() + checkTimeout(timeoutMs);
    return new Survey(async (survey) => {
      const parts = await this.#ready(address.name, timeoutMs);
      const left = Math.max(1, Math.ceil(until - performance.now()));
      return parts.calls.survey(address, bytes, packed, left, { ...options, method }, survey);
    });
  }

  /** Send a message to all members that serve broadcasts. Waits while much is unwritten. */
  broadcast(cluster: string, payload: unknown, { headers, scope }: BroadcastOptions = {}): Promise<void> {
    return this.#cast(this.#address(Kind.BROADCAST, cluster, undefined, scope), payload, headers);
  }

  /** Publish a message to all subscribers of the topic. Waits while much is unwritten. Raises ConnectionLost. */
  async publish(topic: string, payload: unknown, { headers }: CastOptions = {}): Promise<void> {
    checkName(topic, "topic");
    await this.#cast({ kind: Kind.PUBLISH, name: topic, key: this.keyring.topicKeys(topic)[0]! }, payload, headers);
  }

  async #cast(address: Address, payload: unknown, headers: Headers | undefined): Promise<void> {
    const { payload: bytes, packed } = encodePayload(payload);
    encodeHeaders(headers); // what is held cannot be refused later
    checkMessage(bytes, Infinity);
    if (this.#closed) throw new Closed("the client was closed");
    if (this.#parts) {
      this.#parts.casts.add(address, bytes, packed, headers);
      if (this.#parts.session.outbox.full) await this.#parts.session.outbox.room();
      return;
    }
    const { offlineBytes = 1_048_576 } = this.#options;
    const size = bytes.length + 256;
    if (this.#error || this.#heldBytes + size > offlineBytes) {
      throw new ConnectionLost(address.name, this.#error?.message ?? `no relay is connected, and ${this.#heldBytes} bytes are held`, false);
    }
    this.#held.push({ address, payload: bytes, packed, headers });
    this.#heldBytes += size;
  }

  /** Return when the relay has routed everything that was sent before. Failures of earlier pushes are reported by then. */
  async flush(timeoutMs = DEFAULT_TIMEOUT_MS): Promise<void> {
    const parts = await this.#ready("relay", timeoutMs);
    await within(parts.session.asked(Kind.PING, {}, Kind.PONG), timeoutMs, "relay", "the relay did not answer");
  }

  /** Return how many subscriptions a topic has, and how many of its messages were dropped for slow receivers. */
  async audience(topic: string, timeoutMs = DEFAULT_TIMEOUT_MS): Promise<{ subscribers: number; dropped: number }> {
    checkName(topic, "topic");
    const key = this.keyring.topicKeys(topic)[0]!;
    const parts = await this.#ready(topic, timeoutMs);
    const asked = parts.session.asked(Kind.TOPIC, { name: topic, key_id: key.id }, Kind.AUDIENCE);
    const { subscribers, dropped } = await within(asked, timeoutMs, topic, "the relay did not answer");
    return { subscribers: Number(subscribers), dropped: Number(dropped) };
  }

  /** Return the members of a cluster now. */
  async members(cluster: string, timeoutMs = DEFAULT_TIMEOUT_MS): Promise<Members> {
    checkName(cluster, "cluster");
    const { session } = await this.#ready(cluster, timeoutMs);
    const keyIds = this.keyring.clusterKeys(cluster).map((key) => key.id);
    const asked = session.listed({ name: cluster, key_ids: keyIds });
    const { joined, sites, others } = await within(asked, timeoutMs, cluster, "the relay did not answer");
    return {
      members: joined.map(({ member, label, kinds }) => ({ member: String(member), label: String(label), kinds: kinds as number[] })),
      sites, others,
    };
  }

  // -- subscriptions, services, tunnels ----------------------------------------------------------------------

  /** Subscribe to the topics that match `filter`. Await `ready` of the subscription before you cause publications. */
  subscribe(filter: string, options: SubscribeOptions = {}): Subscription {
    if (this.#closed) throw new Closed("the client was closed");
    const reporting = { ...options, onLoss: this.#reporting(options.onLoss) };
    const subscription = new Subscription(filter, reporting, this.#troubles, async (closed) => {
      if (!closed.group) this.#subscriptions.remove(closed);
      const parts = this.#parts;
      try {
        if (parts && closed.since !== Infinity) await this.#subscriptions.unregister(parts.session, closed);
      } catch (error) {
        if (!parts!.session.ended) throw error;
      } finally {
        this.#subscriptions.remove(closed); // one of a group gets what is on its way until the relay has answered
      }
    });
    this.#subscriptions.add(subscription);
    if (this.#parts) void this.#register(this.#parts, subscription);
    return subscription;
  }

  /** Serve a service until its binding is closed. Returns when the relays know the member. */
  async serve(service: Service, onLoss?: (loss: Loss) => void): Promise<Binding> {
    if (!service.kinds.length) throw new ConfigError(`the service ${service.name} has no handlers`);
    const binding = new Binding(service, this.keyring, this.#troubles, async (closed) => {
      this.#bindings.delete(closed);
      for (const { serving, session } of this.#open) {
        await serving.leave(closed).catch((error: unknown) => {
          if (!session.ended) throw error;
        });
        await serving.idle();
      }
    });
    binding.onLoss = this.#reporting(onLoss);
    const parts = await this.#ready(service.name, DEFAULT_TIMEOUT_MS);
    await parts.serving.join(binding);
    this.#bindings.add(binding);
    return binding;
  }

  /** Open a tunnel to one member; you must close it. Raises RequestError. */
  async tunnel(cluster: string, options: PushOptions = {}): Promise<Tunnel> {
    const { timeoutMs = DEFAULT_TIMEOUT_MS, headers = {}, signal } = options;
    const address = this.#address(Kind.TUNNEL_OPEN, cluster, options.member);
    const until = performance.now() + checkTimeout(timeoutMs);
    const parts = await this.#ready(address.name, timeoutMs, signal);
    return parts.tunnels.open(address, Math.max(1, Math.ceil(until - performance.now())), headers, signal);
  }

  #address(kind: number, cluster: string, named: string | null | undefined, scope: "federation" | "site" = "federation"): Address {
    const [siteName, name] = splitSite(cluster);
    checkName(name, "cluster");
    const member = named ?? "";
    if (named !== undefined && named !== null && (typeof named !== "string" || !MEMBER.test(named))) {
      throw new ConfigError(`'${typeof named === "string" ? named : typeof named}' is not a member id; use one of client.members()`);
    }
    const site = siteName || (scope === "site" ? "." : "");
    const key: ClusterKey = this.keyring.clusterKeys(name)[0]!;
    return { kind, name, key, site, member };
  }
}

/** When a ticket expires, in ms since 1970; NaN if it does not say. */
function expiryMs(ticket: string): number {
  try {
    const { exp } = JSON.parse(text(unbase64(ticket.split(".")[1] ?? ""))) as { exp?: unknown };
    return 1000 * Number(exp);
  } catch (error) {
    if (error instanceof SyntaxError || error instanceof TypeError) return NaN;
    throw error;
  }
}

function checkTimeout(timeoutMs: number): number {
  if (!(timeoutMs > 0 && timeoutMs <= MAX_TIMEOUT_MS)) throw new ConfigError(`timeoutMs must be above 0 and at most ${MAX_TIMEOUT_MS}`);
  return timeoutMs;
}

/** The error of a repeated call, of which an earlier attempt may have run. */
function ranBefore(error: RequestError): RequestError {
  if (error.mayHaveRun) return error;
  const detail = `${error.detail}; an earlier attempt may have run`;
  for (const kind of [NoMembers, Overloaded, RequestTimeout, ConnectionLost, RelayError]) {
    if (error instanceof kind) return new kind(error.cluster, detail, true);
  }
  return new RequestError(error.cluster, detail, true);
}

async function within<T>(answer: Promise<T>, timeoutMs: number, name: string, text: string): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new RequestTimeout(name, `${text} within ${timeoutMs / 1000} s`, false)), timeoutMs);
  });
  answer.catch(() => undefined);
  try {
    return await Promise.race([answer, late]);
  } finally {
    clearTimeout(timer);
  }
}
