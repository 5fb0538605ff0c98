/** Tunnels: ordered messages of any size between two sessions, with credit (docs/protocol.md §11). */

import { concat, EMPTY, random, u32, utf8, view, type Bytes } from "./bytes.ts";
import { encodeHeaders, MAX_HEADERS, type Headers } from "./bundle.ts";
import { monotonicUs, wallUs } from "./clock.ts";
import {
  Closed, ConnectionLost, MessageTooLarge, PeerProtocolError, RequestTimeout, SealError, TunnelBroken,
  type IrisError, type RequestError,
} from "./errors.ts";
import { errorOf } from "./calls.ts";
import { Cause, encodeData, encodeEnd, Kind, Reason, type DataFrame, type Fields } from "./frames.ts";
import { CHUNK_COST, decodeItems, encodeItem, FIRST, Item, ITEM_HEAD, LAST, MAX_RECORD, type TunnelItem } from "./items.ts";
import { decode, encode } from "./msgpack.ts";
import { accept, Opening, prologue, type Transport } from "./noise.ts";
import type { Address, Declared, Session } from "./session.ts";
import type { Binding } from "./service.ts";
import type { Serving } from "./serving.ts";

const FIRST_WINDOW = 65_536;
/** What the window grows to when the first messages are read. */
const WINDOW = 1_048_576;
const MAX_WINDOW = 16_777_216;
const MAX_CHUNK = MAX_RECORD - 16 - ITEM_HEAD;
const RECV_LIMIT = 67_108_864;
const MAX_HALF_OPEN = 1024;
const FIRST_RECORD_MS = 5000;
const TEXTS: Readonly<Record<number, string>> = {
  [Cause.NO_MEMBERS]: "no member serves tunnels at this address",
  [Cause.OVERLOADED]: "all members are at capacity",
  [Cause.EXPIRED]: "no member answered before the deadline",
  [Cause.LOST]: "the peer's session was lost",
  [Cause.REFUSED]: "the member refused it",
};

interface Chunk {
  readonly type: number;
  readonly bytes: Bytes;
}

/** One end of a tunnel. Iterate over it with `for await` to receive messages until the other side finishes. */
export class Tunnel implements AsyncIterable<Bytes>, AsyncDisposable {
  /** Name of the cluster. */
  readonly name: string;
  /** Headers that the opener gave. */
  headers: Headers = {};

  readonly #session: Session;
  readonly #hop: bigint;
  readonly #transport: Transport;
  readonly #forget: (hop: bigint) => void;
  readonly #chunks: Chunk[] = [];
  readonly #waiters: (() => void)[] = [];
  #credit = FIRST_WINDOW;
  #allowed = FIRST_WINDOW;
  #owed = 0;
  #window = FIRST_WINDOW;
  #sending: Promise<void> = Promise.resolve();
  #begun = false;
  #finishSent = false;
  #closeSent = false;
  #finishCame = false;
  #closeCame = false;
  #ended = false;
  #error: IrisError | null = null;
  #headersCame: (() => void) | null = null;

  /** Made by `Client.tunnel`, or given to the handler of a service. */
  constructor(session: Session, name: string, hop: bigint, transport: Transport, forget: (hop: bigint) => void) {
    this.#session = session;
    this.name = name;
    this.#hop = hop;
    this.#transport = transport;
    this.#forget = forget;
  }

  /** Whether the tunnel has ended in both directions. */
  get closed(): boolean {
    return this.#ended;
  }

  /** The opener's first item. */
  sendHeaders(headers: Headers): void {
    this.headers = headers;
    this.#emit(encodeItem(Item.HEADERS, encode(headers)));
  }

  /** Call `started` when the opener's headers come. */
  whenStarted(started: () => void): void {
    this.#headersCame = started;
  }

  /**
   * Send one message of any size, and return when its last byte is on its way. Waits while the receiver gives no credit.
   * If `signal` is aborted before the end, the receiver discards the message, and the tunnel goes on.
   *
   * Raises TunnelBroken, or Closed if either side has closed or this side has finished.
   */
  send(data: Uint8Array | string, signal?: AbortSignal): Promise<void> {
    const bytes = typeof data === "string" ? utf8(data) : new Uint8Array(data);
    const sent = this.#sending.then(() => this.#send(bytes, signal));
    this.#sending = sent.catch(() => undefined); // its caller gets the error
    return sent;
  }

  async #send(bytes: Bytes, signal: AbortSignal | undefined): Promise<void> {
    let at = 0;
    let first = FIRST;
    const abort = (): void => this.#wake();
    signal?.addEventListener("abort", abort);
    try {
      do {
        if (signal?.aborted) {
          if (!first) this.#emit(encodeItem(Item.ABORT));
          throw signal.reason;
        }
        this.#checkSending();
        const room = Math.min(this.#credit - CHUNK_COST, MAX_CHUNK, bytes.length - at);
        if (this.#credit < CHUNK_COST || (room <= 0 && at < bytes.length)) {
          await this.#change();
          continue;
        }
        this.#credit -= room + CHUNK_COST;
        at += room;
        const last = at === bytes.length ? LAST : 0;
        this.#emit(encodeItem(Item.CHUNK | first | last, bytes.subarray(at - room, at)));
        first = 0;
        if (last) break;
        await this.#session.outbox.room();
      } while (true);
      await this.#session.outbox.room();
    } finally {
      signal?.removeEventListener("abort", abort);
    }
  }

  #checkSending(): void {
    if (this.#error) throw this.#error;
    if (this.#finishSent || this.#closeSent) throw new Closed("this side of the tunnel has finished");
    if (this.#closeCame || this.#ended) throw new Closed("the other side closed the tunnel");
  }

  /** Return the next message, or null when the other side has finished or closed. Raises TunnelBroken, MessageTooLarge. */
  async recv(limitBytes = RECV_LIMIT): Promise<Bytes | null> {
    const parts: Bytes[] = [];
    let size = 0;
    for (;;) {
      const chunk = this.#chunks.shift();
      if (!chunk) {
        if (this.#error) throw this.#error;
        if (this.#closeSent) throw new Closed("this side closed the tunnel");
        if (this.#finishCame || this.#closeCame || this.#ended) return null;
        await this.#change();
        continue;
      }
      if (chunk.type === Item.ABORT) {
        parts.length = size = 0;
        continue;
      }
      this.#consumed(chunk.bytes.length + CHUNK_COST);
      size += chunk.bytes.length;
      if (size <= limitBytes) parts.push(chunk.bytes);
      else parts.length = 0;
      if (!(chunk.type & LAST)) continue;
      if (size > limitBytes) throw new MessageTooLarge(`a message of the tunnel has ${size} bytes, over the limit of ${limitBytes}`);
      return concat(...parts);
    }
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Bytes, void, undefined> {
    for (let message = await this.recv(); message !== null; message = await this.recv()) yield message;
  }

  /** Say that no message follows from this side. The other side may go on. */
  async finish(): Promise<void> {
    await this.#sending;
    if (this.#ended || this.#finishSent || this.#closeSent) return;
    this.#finishSent = true;
    this.#emit(encodeItem(Item.FINISH));
    if (this.#finishCame) this.#endWell();
  }

  /** Close both directions. What was sent before arrives; what was not received is discarded. */
  async close(): Promise<void> {
    await this.#sending;
    if (this.#ended || this.#closeSent) return;
    this.#closeSent = true;
    this.#emit(encodeItem(Item.CLOSE));
    this.#endWell();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** Break the tunnel on both sides. */
  fail(reason: string): void {
    this.#break(new TunnelBroken(reason), true);
  }

  // -- the protocol's side -----------------------------------------------------------------------------------

  async record(body: Bytes): Promise<void> {
    if (this.#ended) return;
    try {
      for (const item of decodeItems(await this.#transport.receive.decrypt(body))) this.#item(item);
    } catch (error) {
      if (!(error instanceof SealError || error instanceof PeerProtocolError)) throw error;
      this.#break(new TunnelBroken(`tunnel to ${this.name}: ${error.message}`), true);
    }
    this.#wake();
  }

  /** TUNNEL_END came. */
  peerEnded(cause: number): void {
    if (this.#ended) return;
    const well = this.#closeCame || (this.#finishCame && this.#finishSent);
    if (cause === Cause.CLOSED && well) {
      this.#ended = true;
      this.#forget(this.#hop);
      this.#wake();
    } else this.#break(new TunnelBroken(`tunnel to ${this.name}: ${TEXTS[cause] ?? "the peer broke it off"}`), false);
  }

  sessionLost(error: IrisError): void {
    this.#break(new TunnelBroken(`tunnel to ${this.name}: the connection to the relay was lost: ${error.message}`), false);
  }

  #item({ type, bytes }: TunnelItem): void {
    if ((type & 15) === Item.CHUNK) {
      this.#allowed -= bytes.length + CHUNK_COST;
      if (this.#allowed < 0 || this.#finishCame || this.#closeCame || Boolean(type & FIRST) === this.#begun) {
        throw new PeerProtocolError("a chunk is not allowed now");
      }
      this.#begun = !(type & LAST);
      this.#chunks.push({ type, bytes: bytes.slice() });
    } else if (type === Item.CREDIT) {
      if (bytes.length !== 4) throw new PeerProtocolError("malformed credit");
      this.#credit += view(bytes).getUint32(0, true);
      if (this.#credit > MAX_WINDOW + FIRST_WINDOW) throw new PeerProtocolError("too much credit");
    } else if (type === Item.HEADERS) {
      if (!this.#headersCame || bytes.length > MAX_HEADERS) throw new PeerProtocolError("headers are not allowed now");
      const map = decode(bytes);
      if (typeof map !== "object" || map === null || Object.values(map).some((value) => typeof value !== "string")) {
        throw new PeerProtocolError("malformed headers");
      }
      this.headers = map as Headers;
      const started = this.#headersCame;
      this.#headersCame = null;
      started();
    } else if (this.#headersCame) throw new PeerProtocolError("the first item is not the headers");
    else if (type === Item.FINISH) {
      if (this.#begun) throw new PeerProtocolError("finish inside a message");
      this.#finishCame = true;
    } else if (type === Item.CLOSE) this.#closeCame = true;
    else if (type === Item.ABORT) {
      if (!this.#begun) throw new PeerProtocolError("abort outside a message");
      this.#begun = false;
      this.#chunks.push({ type, bytes: EMPTY });
    } else throw new PeerProtocolError("an item that this session did not ask for");
  }

  #consumed(cost: number): void {
    this.#owed += cost;
    if (this.#window < WINDOW) {
      this.#owed += WINDOW - this.#window;
      this.#window = WINDOW;
    }
    if (this.#owed < this.#window / 4 || this.#ended || this.#finishCame || this.#closeCame) return;
    this.#emit(encodeItem(Item.CREDIT, u32(this.#owed)));
    this.#allowed += this.#owed;
    this.#owed = 0;
  }

  #emit(plain: Bytes): void {
    if (this.#ended || this.#session.ended) return;
    this.#session.data(Kind.TUNNEL_DATA, 0, this.#hop, 0n, EMPTY, this.#transport.send.encrypt(plain));
  }

  #sendEnd(cause: number): void {
    if (!this.#session.ended) this.#session.data(Kind.TUNNEL_END, 0, this.#hop, 0n, EMPTY, Uint8Array.of(cause));
  }

  #endWell(): void {
    this.#sendEnd(Cause.CLOSED);
    this.#ended = true;
    this.#forget(this.#hop);
    this.#wake();
  }

  #break(error: IrisError, tell: boolean): void {
    if (this.#ended) return;
    if (tell) this.#sendEnd(Cause.BROKEN);
    this.#ended = true;
    this.#error = error;
    this.#forget(this.#hop);
    this.#wake();
  }

  #change(): Promise<void> {
    return new Promise((resolve) => this.#waiters.push(resolve));
  }

  #wake(): void {
    for (const resolve of this.#waiters.splice(0)) resolve();
  }
}

/** A hop id's tunnel: its frames are handled one after the other. */
interface Route {
  chain: Promise<void>;
  /** The opener's side, until it is accepted. */
  accepted: ((body: Bytes) => Promise<void>) | null;
  failed: ((error: RequestError) => void) | null;
  tunnel: Tunnel | null;
  readonly name: string;
}

/** One session's tunnels. */
export class Tunnels {
  readonly #session: Session;
  readonly #serving: Serving;
  readonly #routes = new Map<bigint, Route>();
  /** Accepted tunnels whose first record has not come -> what says whether it came. */
  readonly #halfOpen = new Map<bigint, (began: boolean) => void>();
  readonly #running = new Map<Binding, number>();

  constructor(session: Session, serving: Serving) {
    this.#session = session;
    this.#serving = serving;
    session.onData([Kind.TUNNEL_OPEN], {
      handle: (frame, declared) => this.#opened(frame, declared),
      overflow: (frame) => this.#refuse(frame, Reason.FULL),
    });
    session.onData([Kind.TUNNEL_ACCEPT, Kind.TUNNEL_DATA, Kind.TUNNEL_END], {
      handle: (frame) => this.#frame(frame),
      overflow: (frame) => this.#routes.get(frame.hop)?.tunnel?.fail("this program reads too slowly"),
    });
    session.onEnd((error) => {
      for (const { tunnel, failed, name } of [...this.#routes.values()]) {
        tunnel?.sessionLost(error);
        failed?.(new ConnectionLost(name, `the connection to the relay was lost: ${error.message}`, false));
      }
      this.#routes.clear();
      for (const settle of [...this.#halfOpen.values()]) settle(false);
    });
  }

  get size(): number {
    return this.#routes.size;
  }

  /** Open a tunnel. Raises RequestError. */
  async open(address: Address, timeoutMs: number, headers: Headers, signal?: AbortSignal): Promise<Tunnel> {
    const session = this.#session;
    encodeHeaders(headers); // before anything is sent
    const { name, key } = address;
    const tunnelId = random(16);
    const opening = await Opening.begin(key, prologue(name, key.id, tunnelId));
    if (session.ended) throw new ConnectionLost(name, session.ended.message, false);
    signal?.throwIfAborted();
    session.beforeSend();
    const hop = session.nextHop();
    const alias = session.alias(address, tunnelId);
    const end = encodeEnd(wallUs(), timeoutMs, 1, 0);
    return new Promise<Tunnel>((resolve, reject) => {
      const give = (error: unknown): void => {
        stop();
        this.#routes.delete(hop);
        reject(error);
      };
      const leave = (error: unknown): void => {
        if (!session.ended) session.data(Kind.TUNNEL_END, 0, hop, 0n, EMPTY, Uint8Array.of(Cause.BROKEN));
        give(error);
      };
      const timer = setTimeout(() => leave(new RequestTimeout(name, `no member accepted the tunnel within ${timeoutMs / 1000} s`, false)), timeoutMs);
      const abort = (): void => leave(signal!.reason);
      signal?.addEventListener("abort", abort);
      const stop = (): void => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", abort);
      };
      this.#routes.set(hop, {
        chain: Promise.resolve(), tunnel: null, name, failed: give,
        accepted: async (body) => {
          const route = this.#routes.get(hop)!;
          let transport: Transport;
          try {
            transport = await opening.finish(body);
          } catch (error) {
            if (!(error instanceof SealError)) throw error;
            leave(new ConnectionLost(name, "the member's handshake does not hold", false));
            return;
          }
          if (!this.#routes.has(hop)) return;
          stop();
          route.accepted = route.failed = null;
          route.tunnel = new Tunnel(session, name, hop, transport, (ended) => this.#routes.delete(ended));
          route.tunnel.sendHeaders(headers);
          resolve(route.tunnel);
        },
      });
      session.data(Kind.TUNNEL_OPEN, alias, hop, session.deadline(timeoutMs), end, opening.message);
    });
  }

  /** FAIL for a tunnel that was not accepted. Returns whether it was one. */
  fail(hop: bigint, fields: Fields): boolean {
    const route = this.#routes.get(hop);
    route?.failed?.(errorOf(route.name, fields));
    return route !== undefined;
  }

  #frame({ kind, hop, body }: DataFrame): void {
    const route = this.#routes.get(hop);
    if (!route) {
      this.#session.count("frame of a tunnel that has ended");
      return;
    }
    route.chain = route.chain.then(async () => {
      if (kind === Kind.TUNNEL_ACCEPT) await route.accepted?.(body);
      else if (kind === Kind.TUNNEL_DATA) await route.tunnel?.record(body);
      else if (route.tunnel) route.tunnel.peerEnded(body[0] ?? Cause.BROKEN);
      else route.failed?.(errorOf(route.name, { cause: body[0], detail: "", may_have_run: false }));
    }).catch((error: unknown) => {
      route.tunnel?.fail(`internal error: ${String(error)}`);
    });
  }

  #opened(frame: DataFrame, declared: Declared): void {
    const { key, name, senderId, member } = declared;
    const binding = this.#serving.memberOf(member);
    if (!binding) {
      this.#refuse(frame, Reason.LEAVING);
      return;
    }
    if (!key || !binding.service.tunnelHandler || binding.service.name !== name || !binding.keys.includes(key)) {
      this.#refuse(frame, Reason.UNREADABLE);
      return;
    }
    if (this.#routes.has(frame.hop)) throw new PeerProtocolError("a new tunnel has the hop id of an open one");
    const running = this.#running.get(binding) ?? 0;
    if (running >= binding.service.concurrency || this.#halfOpen.size >= MAX_HALF_OPEN) {
      this.#refuse(frame, Reason.FULL);
      return;
    }
    if (frame.deadline && monotonicUs() > Number(frame.deadline) + this.#session.clock.us) {
      this.#refuse(frame, Reason.EXPIRED);
      return;
    }
    this.#halfOpen.set(frame.hop, () => undefined);
    this.#running.set(binding, running + 1);
    const route: Route = { chain: Promise.resolve(), tunnel: null, accepted: null, failed: null, name };
    this.#routes.set(frame.hop, route);
    const over = (): void => {
      this.#halfOpen.delete(frame.hop);
      this.#running.set(binding, this.#running.get(binding)! - 1);
    };
    route.chain = this.#accept(frame, prologue(name, key.id, senderId), declared, binding, route).then((accepted) => {
      if (accepted) void accepted.handled.finally(over);
      else over();
    });
  }

  /** Accept, and return what ends when the handler does; null if it was refused. */
  async #accept(
    frame: DataFrame, head: Bytes, { key, name }: Declared, binding: Binding, route: Route,
  ): Promise<{ handled: Promise<void> } | null> {
    const { hop, body } = frame;
    let message: Bytes;
    let transport: Transport;
    try {
      ({ message, transport } = await accept(key!, head, body));
    } catch (error) {
      if (!(error instanceof SealError)) throw error;
      this.#routes.delete(hop);
      this.#refuse(frame, Reason.UNREADABLE);
      return null;
    }
    if (this.#session.ended) return null;
    const tunnel = new Tunnel(this.#session, name, hop, transport, (ended) => this.#routes.delete(ended));
    route.tunnel = tunnel;
    this.#session.data(Kind.TUNNEL_ACCEPT, 0, hop, 0n, EMPTY, message);
    const started = new Promise<boolean>((resolve) => {
      const settle = (began: boolean): void => {
        clearTimeout(timer);
        this.#halfOpen.delete(hop);
        resolve(began);
      };
      const timer = setTimeout(() => {
        tunnel.fail("the opener's first record did not come in time");
        settle(false);
      }, FIRST_RECORD_MS);
      this.#halfOpen.set(hop, settle);
      tunnel.whenStarted(() => settle(true));
    });
    return { handled: started.then((began) => (began ? run(binding, tunnel) : undefined)) };
  }

  #refuse({ kind, alias, hop, deadline, end, body }: DataFrame, reason: number): void {
    if (this.#session.ended) return;
    this.#session.outbox.push(encodeData(kind, alias, hop, deadline, end, body, 2 | (reason << 4)));
  }
}

async function run(binding: Binding, tunnel: Tunnel): Promise<void> {
  try {
    await binding.service.tunnelHandler!(tunnel);
    await tunnel.close();
  } catch (error) {
    if (!tunnel.closed) console.error(`iris: the handler for tunnels of ${tunnel.name} raised`, error);
    tunnel.fail("the handler failed");
  }
}
