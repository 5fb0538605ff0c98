/**
 * One connection's conversation with its relay (docs/protocol.md §3 to §6): greeting, proofs, aliases, ids, and frames in
 * order. It does no IO but through its port. What the frames mean is decided by its parts: calls, serving, casts, tunnels
 * and stores.
 *
 * WebCrypto is asynchronous, and order matters. So a body's counter and its place in the outbox are taken at once, and
 * the bytes follow; and what comes is handled in the order in which it came, however long each body takes to open.
 */

import { hex, random, utf8, type Bytes } from "./bytes.ts";
import { ClockOffset, monotonicUs, wallUs } from "./clock.ts";
import { ConnectionLost, IrisError, LocalProtocolError, PeerProtocolError } from "./errors.ts";
import {
  encodeControl, encodeData, encodeEnd, FrameReader, isData, Kind, kindName, MINOR, texts, VERSION,
  type ControlFrame, type DataFrame, type Fields, type Frame, type Int,
} from "./frames.ts";
import type { ClusterKey, Keyring } from "./keys.ts";
import { Outbox, type Port } from "./outbox.ts";
import { metadata, Openers, Sealer, type Opened } from "./sframe.ts";
import { concat, EMPTY } from "./bytes.ts";

/** An alias that this session declared, and the messages sent under it. */
interface Alias {
  readonly number: number;
  readonly kind: number;
  readonly name: string;
  readonly keyHex: string;
  sent: number;
}

/** What an incoming alias stands for. */
export interface Declared {
  readonly kind: number;
  readonly name: string;
  readonly nameBytes: Bytes;
  readonly keyId: Bytes;
  readonly keyHex: string;
  /** undefined if the key is not one of ours; its frames are refused or dropped. */
  readonly key: ClusterKey | undefined;
  readonly senderId: Bytes;
  readonly senderHex: string;
  readonly plain: boolean;
  readonly groups: readonly string[];
  readonly member: Int;
}

export interface Address {
  readonly kind: number;
  readonly name: string;
  readonly key: ClusterKey;
  /** "" for wherever it is wanted, "." for this site alone, or a site's name. */
  readonly site?: string;
  /** Id of the one member to call. */
  readonly member?: string;
}

export interface Sending {
  readonly hop?: bigint;
  /** Milliseconds allowed; 0 for none. */
  readonly timeoutMs?: number;
  readonly count?: number;
  readonly first?: number;
  /** The last line of an answer's metadata. */
  readonly line?: Bytes;
}

/** Receives the frames of the kinds that it is registered for, in order. */
export type ControlHandler = (fields: Fields) => void;

/** Of a data frame: `open` is called at once, when it comes, and `handle` in order, with what it yields. */
export interface DataHandler {
  open?(frame: DataFrame, declared: Declared): Promise<unknown> | undefined;
  handle(frame: DataFrame, declared: Declared, opened: unknown): void;
  /** The inbox is full: drop or refuse the frame. */
  overflow(frame: DataFrame, declared: Declared): void;
}

/** Incoming frames that wait for their bodies to open; beyond it casts are dropped and calls refused. */
const INBOX_BYTES = 67_108_864;
const MAX_KEYS = 1024;
const MAX_NAME = 255;
const MAX_GROUPS = 256;
export const NO_LIMIT = 2n ** 63n - 1n;
const GREETING_MS = 10_000;
/** Answers that a relay may owe us. */
const MAX_ASKED = 65_536;

/** The members or stores that a relay lists. */
export interface Listed {
  readonly joined: readonly Fields[];
  readonly sites: Readonly<Record<string, number>>;
  readonly others: Readonly<Record<string, number>>;
  readonly starting: readonly string[];
}

interface Waiting {
  readonly kind: number;
  readonly answer: (fields: Fields) => void;
  readonly lost: (error: IrisError) => void;
  /** Stays registered after an answer. */
  readonly watch: boolean;
}

interface Item {
  readonly frame: Frame;
  readonly declared: Declared | null;
  readonly opening: Promise<unknown> | null;
  readonly size: number;
}

const NO_ALIAS: Declared = {
  kind: 0, name: "", nameBytes: EMPTY, keyId: EMPTY, keyHex: "", key: undefined, senderId: EMPTY, senderHex: "",
  plain: false, groups: [], member: 0,
};

export class Session {
  readonly relayId: Bytes;
  readonly site: string;
  readonly messageLimit: number;
  readonly keyring: Keyring;
  readonly outbox: Outbox;
  readonly openers = new Openers();
  readonly clock = new ClockOffset();
  /** Why it ended; null while it lives. */
  ended: IrisError | null = null;
  /** Whether the relay is stopping. */
  draining = false;
  /** When something last came from the relay, by our clock in µs. */
  heardUs = monotonicUs();
  /** Frames that were dropped because they did not belong here, by cause. */
  readonly dropped = new Map<string, number>();

  readonly #port: Port;
  #aliasLimit: number;
  readonly #controls = new Map<number, ControlHandler>();
  readonly #datas = new Map<number, DataHandler>();
  readonly #sealers = new Map<string, Sealer>();
  readonly #out = new Map<string, Alias>();
  /** Numbers of aliases that stand for nothing; the last one is used next. */
  readonly #free: number[] = [];
  #nextAlias = 0;
  readonly #in = new Map<number, Declared>();
  readonly #asked = new Map<number, Waiting>();
  readonly #endings: ((error: IrisError) => void)[] = [];
  readonly #inbox: Item[] = [];
  #inboxBytes = 0;
  #handling = false;
  #byeSent = false;
  #hop = 0n;
  #id = 16; // the ids of PING below it have meanings of their own
  /** Before anything else is sent: writes what was collected in this turn. */
  beforeSend: () => void = () => undefined;

  /** Made by `greet`, which has proven the keys. */
  constructor(port: Port, keyring: Keyring, welcome: Fields) {
    this.#port = port;
    this.keyring = keyring;
    this.relayId = welcome.relay_id as Bytes;
    this.site = welcome.site as string;
    this.messageLimit = Number(welcome.message_limit);
    this.#aliasLimit = Math.min(65_536, Math.max(1, Number(welcome.aliases)));
    this.outbox = new Outbox(port, (error) => this.end(asError(error)));
    this.clock.add(Number(welcome.mono_us));
    this.onControl(Kind.PING, ({ id, mono_us: theirs }) => {
      if (theirs !== undefined) this.clock.add(Number(theirs));
      if (Number(id) !== 1) this.control(Kind.PONG, { id, mono_us: monotonicUs() });
      else this.onDrainPing();
    });
    this.onControl(Kind.ERROR, ({ detail }) => {
      this.end(new LocalProtocolError(`the relay ended the session: ${String(detail)}`));
    });
    this.onControl(Kind.BYE, ({ reason }) => this.end(new IrisError(`the relay said bye: ${String(reason)}`)));
    for (const kind of [Kind.SHARE, Kind.PAIR]) this.onControl(kind, () => undefined); // advice that we do not need
    for (const kind of [Kind.ACK, Kind.PONG, Kind.MEMBERSHIP, Kind.AUDIENCE, Kind.REPORT]) {
      this.onControl(kind, (fields) => this.#answered(kind, fields));
    }
  }

  /** The relay asks whether this session, which it drains, starts nothing more. */
  onDrainPing: () => void = () => this.control(Kind.PONG, { id: 1, mono_us: monotonicUs() });

  onControl(kind: number, handler: ControlHandler): void {
    this.#controls.set(kind, handler);
  }

  onData(kinds: readonly number[], handler: DataHandler): void {
    for (const kind of kinds) this.#datas.set(kind, handler);
  }

  /** `ended` is called once, with why the session ended. */
  onEnd(ended: (error: IrisError) => void): void {
    if (this.ended) ended(this.ended);
    else this.#endings.push(ended);
  }

  // -- sending -----------------------------------------------------------------------------------------------

  control(kind: number, fields: Fields): void {
    this.beforeSend();
    this.outbox.push(encodeControl(kind, fields));
  }

  /** A new hop id. */
  nextHop(): bigint {
    return ++this.#hop;
  }

  sealer(key: ClusterKey): Sealer {
    let sealer = this.#sealers.get(key.idHex);
    if (!sealer || sealer.spent) {
      sealer = new Sealer(key, random(16));
      this.#sealers.set(key.idHex, sealer);
    }
    return sealer;
  }

  /** Seal as new senders from here on. */
  renewSenders(): void {
    this.#sealers.clear();
  }

  /** Return the alias for an address and sender, which is declared first if need be. `count` messages are sent under it. */
  alias(address: Address, senderId: Bytes, keyId = address.key.id, count = 1): number {
    const { kind, name, site = "", member = "" } = address;
    const what = [kind, name, hex(keyId), hex(senderId), site, member].join("\0");
    const known = this.#out.get(what);
    if (known !== undefined) {
      if (this.#out.size >= this.#aliasLimit / 2) { // so that it is the one used last
        this.#out.delete(what);
        this.#out.set(what, known);
      }
      known.sent += count;
      return known.number;
    }
    if (this.#out.size >= this.#aliasLimit) {
      const [oldest, { number }] = this.#out.entries().next().value!;
      this.#out.delete(oldest);
      this.#free.push(number);
    }
    const alias = this.#free.pop() ?? this.#nextAlias++;
    if (kind === Kind.TUNNEL_OPEN) this.#free.push(alias); // its id is used once
    else this.#out.set(what, { number: alias, kind, name, keyHex: hex(keyId), sent: count });
    const fields: Fields = { alias, kind, name, key_id: keyId, sender_id: senderId, site };
    if (member) {
      const [relay, serial] = member.split(".");
      fields.relay = Uint8Array.from(relay!.match(/../g)!, (byte) => parseInt(byte, 16));
      fields.member = BigInt(serial!);
    }
    this.outbox.push(encodeControl(Kind.DECLARE, fields));
    return alias;
  }

  /**
   * Free an alias that the relay did not accept; its address is declared again when it is next used. Returns the number
   * of messages that were sent under it.
   */
  aliasRefused({ alias, kind, name, key_id: keyId, full }: Fields): number {
    const refused = Number(alias);
    let sent = 0;
    for (const [what, each] of this.#out) {
      if (each.number !== refused) continue;
      if (each.kind !== kind || each.name !== name || each.keyHex !== hex(keyId as Bytes)) return 0; // declared for something else since
      this.#out.delete(what);
      this.#free.push(each.number);
      sent = each.sent;
    }
    const at = this.#free.indexOf(refused);
    if (full && at >= 0) { // from now on numbers that the relay has accepted are declared again; this one is used last
      this.#free.splice(at, 1);
      this.#free.unshift(refused);
      this.#aliasLimit = Math.max(1, this.#out.size);
    }
    return sent;
  }

  deadline(timeoutMs: number): bigint {
    return timeoutMs ? BigInt(monotonicUs() + 1000 * timeoutMs) : 0n;
  }

  /** Seal and send. Its counter and its place are taken before this returns. */
  seal(address: Address, plain: Bytes, sending: Sending): { senderId: Bytes; counter: number } {
    const { hop = 0n, timeoutMs = 0, count = 1, first = 0, line = EMPTY } = sending;
    const { kind, name, key } = address;
    const sealer = this.sealer(key);
    const alias = this.alias(address, sealer.senderId, key.id, count);
    const answer = line.length > 0;
    const deadline = answer ? 0n : this.deadline(timeoutMs);
    const end = encodeEnd(wallUs(), timeoutMs, count, first);
    const meta = concat(metadata(kind, utf8(name), key.id, sealer.senderId, end), line);
    const { counter, body } = sealer.seal(meta, plain);
    this.outbox.push(body.then((sealed) => encodeData(kind, alias, hop, deadline, end, sealed)), plain.length + 128);
    return { senderId: sealer.senderId, counter };
  }

  /** Send a data frame whose body is not sealed by SFrame. */
  data(kind: number, alias: number, hop: bigint, deadline: bigint, end: Bytes, body: Bytes | Promise<Bytes>, flags = 0): void {
    const frame = (bytes: Bytes): Bytes => encodeData(kind, alias, hop, deadline, end, bytes, flags);
    this.outbox.push(body instanceof Promise ? body.then(frame) : frame(body), 128);
  }

  /** Send a control frame with a new id; `answer` is called, in order, with what answers it. Returns the id. */
  ask(kind: number, fields: Fields, waiting: Omit<Waiting, "watch"> & { watch?: boolean }): number {
    if (this.#asked.size >= MAX_ASKED) throw new LocalProtocolError("too many questions to the relay wait for answers");
    const id = this.#id++;
    this.#asked.set(id, { watch: false, ...waiting });
    if (kind === Kind.PING) fields.mono_us = monotonicUs();
    this.control(kind, { id, ...fields });
    return id;
  }

  /** As `ask`, and return the answer. Rejects if the answer is an ACK with an error, or the session ends. */
  asked(kind: number, fields: Fields, expected: number, onAnswer: (fields: Fields) => void = () => undefined): Promise<Fields> {
    if (this.ended) return Promise.reject(new ConnectionLost("relay", this.ended.message, false));
    return new Promise((resolve, reject) => {
      this.ask(kind, fields, {
        kind: expected,
        answer: (found) => {
          if (found.error) {
            reject(new LocalProtocolError(`the relay refused ${kindName(kind)}: ${String(found.error)}`));
            return;
          }
          onAnswer(found);
          resolve(found);
        },
        lost: (error) => reject(new ConnectionLost("relay", error.message, false)),
      });
    });
  }

  /** Ask MEMBERS, and return its first answer, whole. */
  listed(fields: Fields): Promise<Listed> {
    if (this.ended) return Promise.reject(new ConnectionLost("relay", this.ended.message, false));
    const joined: Fields[] = [];
    const sites: Record<string, number> = {};
    const others: Record<string, number> = {};
    return new Promise((resolve, reject) => {
      const id = this.ask(Kind.MEMBERS, fields, {
        kind: Kind.MEMBERSHIP,
        watch: true, // until the last frame of the answer
        answer: (found) => {
          if (found.error) {
            reject(new LocalProtocolError(`the relay refused MEMBERS: ${String(found.error)}`));
            return;
          }
          joined.push(...(found.joined as Fields[]));
          Object.assign(sites, found.sites);
          Object.assign(others, found.others);
          if (found.more) return;
          this.#asked.delete(id);
          resolve({ joined, sites, others, starting: found.starting as string[] });
        },
        lost: (error) => reject(new ConnectionLost("relay", error.message, false)),
      });
    });
  }

  #answered(kind: number, fields: Fields): void {
    if (kind === Kind.PONG && fields.mono_us !== undefined) this.clock.add(Number(fields.mono_us));
    const id = Number(fields.id);
    const waiting = this.#asked.get(id);
    if (!waiting) return;
    if (waiting.kind !== kind && !(kind === Kind.ACK && fields.error)) {
      throw new PeerProtocolError(`${kindName(kind)} answers a frame that it does not fit`);
    }
    if (!waiting.watch || kind === Kind.ACK) this.#asked.delete(id);
    waiting.answer(fields);
  }

  // -- receiving ---------------------------------------------------------------------------------------------

  /** Handle one frame that came. Raises PeerProtocolError. */
  take(frame: Frame): void {
    if (this.ended) return;
    this.heardUs = monotonicUs();
    if (!isData(frame)) {
      if (frame.kind === Kind.DECLARE) this.#declare(frame.fields);
      else this.#enqueue({ frame, declared: null, opening: null, size: 0 });
      return;
    }
    const handler = this.#datas.get(frame.kind);
    if (!handler) throw new PeerProtocolError(`${kindName(frame.kind)} is not for this session`);
    const declared = this.#declaredOf(frame);
    if (frame.flags & 2 && declared.member !== 0) throw new PeerProtocolError("a refused message came to a member");
    const size = frame.body.length + 256;
    if (this.#inboxBytes + size > INBOX_BYTES) {
      this.count("inbox full");
      handler.overflow(frame, declared);
      return;
    }
    const opening = handler.open?.(frame, declared) ?? null;
    this.#enqueue({ frame, declared, opening, size });
  }

  /** Return what opens a body, with the frame's own end fields or those of a part of a run. */
  open(declared: Declared, kind: number, end: Bytes, body: Bytes, line: Bytes = EMPTY): Promise<Opened> {
    const meta = concat(metadata(kind, declared.nameBytes, declared.keyId, declared.senderId, end), line);
    const opening = this.openers.open(declared.key!, declared.senderId, meta, body);
    opening.catch(() => undefined); // it is awaited in its turn
    return opening;
  }

  /** Frames that came and wait for a body to open. */
  get waiting(): number {
    return this.#inbox.length + Number(this.#handling);
  }

  count(cause: string): void {
    this.dropped.set(cause, (this.dropped.get(cause) ?? 0) + 1);
  }

  #declare(fields: Fields): void {
    const keyId = fields.key_id as Bytes;
    const name = fields.name as string;
    const kind = Number(fields.kind);
    const senderId = fields.sender_id as Bytes;
    if (kind === Kind.CALLS || !this.#datas.has(kind) || NO_ALIAS_KINDS.has(kind)) {
      throw new PeerProtocolError(`DECLARE is for ${kindName(kind)}`);
    }
    const alias = Number(fields.alias);
    const groups = texts(fields.groups);
    if (alias >= 65_536 || name.length > MAX_NAME || groups.length > MAX_GROUPS || groups.some(({ length }) => length > MAX_NAME)) {
      throw new PeerProtocolError("a DECLARE is over the limits");
    }
    this.#in.set(alias, {
      kind, name, nameBytes: utf8(name), keyId, keyHex: hex(keyId), key: this.keyring.byId(keyId), senderId,
      senderHex: hex(senderId), plain: fields.plain as boolean, groups,
      member: fields.member as Int,
    });
  }

  #declaredOf(frame: DataFrame): Declared {
    if (NO_ALIAS_KINDS.has(frame.kind)) return NO_ALIAS;
    const declared = this.#in.get(frame.alias);
    if (!declared || !fits(frame.kind, declared.kind)) {
      throw new PeerProtocolError(`alias ${frame.alias} was not declared for ${kindName(frame.kind)}`);
    }
    return declared;
  }

  #enqueue(item: Item): void {
    if (!this.#handling && !item.opening) {
      this.#handle(item, undefined);
      return;
    }
    this.#inbox.push(item);
    this.#inboxBytes += item.size;
    if (!this.#handling) void this.#run();
  }

  async #run(): Promise<void> {
    this.#handling = true;
    try {
      while (this.#inbox.length && !this.ended) {
        const item = this.#inbox.shift()!;
        const opened = item.opening ? await item.opening.catch((error: unknown) => error) : undefined;
        this.#inboxBytes -= item.size;
        if (!this.ended) this.#handle(item, opened);
      }
    } finally {
      this.#handling = false;
      if (this.ended) this.#inbox.length = 0;
    }
  }

  #handle({ frame, declared }: Item, opened: unknown): void {
    try {
      if (isData(frame)) this.#datas.get(frame.kind)!.handle(frame, declared!, opened);
      else this.#handleControl(frame);
    } catch (error) {
      this.fail(asError(error));
    }
  }

  #handleControl({ kind, fields }: ControlFrame): void {
    const handler = this.#controls.get(kind);
    if (!handler) throw new PeerProtocolError(`a relay does not send ${kindName(kind)}`);
    handler(fields);
  }

  // -- the end -----------------------------------------------------------------------------------------------

  /** Say bye. The relay answers when everything before has been routed, and then `onEnd` is called. */
  bye(reason: string): void {
    if (this.#byeSent || this.ended) return;
    this.control(Kind.BYE, { reason });
    this.#byeSent = true;
  }

  /** Whether BYE was sent, so that the end of the connection is no loss. */
  get leaving(): boolean {
    return this.#byeSent;
  }

  /** The relay broke a rule, or we did: end the connection. */
  fail(error: IrisError): void {
    this.end(error);
  }

  end(error: IrisError): void {
    if (this.ended) return;
    this.ended = error;
    this.outbox.end();
    for (const waiting of [...this.#asked.values()]) waiting.lost(error);
    this.#asked.clear();
    for (const ended of this.#endings.splice(0)) ended(error);
    this.#port.close(1000, "");
  }
}

const NO_ALIAS_KINDS: ReadonlySet<number> = new Set([Kind.TUNNEL_ACCEPT, Kind.TUNNEL_DATA, Kind.TUNNEL_END]);

function fits(kind: number, declared: number): boolean {
  if (kind === Kind.CALLS) return declared === Kind.REQUEST || declared === Kind.PUSH;
  if (kind === Kind.ANSWERS) return declared === Kind.REPLY;
  return kind === declared;
}

function asError(error: unknown): IrisError {
  if (error instanceof IrisError) return error;
  return Object.assign(new IrisError(`internal error: ${String(error)}`), { cause: error });
}

/** Where bytes and the end of a connection go; a transport calls these. */
export interface Connected {
  readonly port: Port;
  listen(receive: (bytes: Bytes) => void, closed: (error: IrisError) => void): void;
}

export interface HelloOptions {
  readonly label: string;
  readonly ticket?: string | undefined;
}

/** Greet a relay, prove every key, and return the session. `prepare` registers its parts before a frame can come. */
export async function greet(
  { port, listen }: Connected, keyring: Keyring, { label, ticket }: HelloOptions, prepare: (session: Session) => void,
): Promise<Session> {
  const keys = keyring.all;
  if (keys.length > MAX_KEYS) throw new LocalProtocolError(`a session proves up to ${MAX_KEYS} keys, not ${keys.length}`);
  const reader = new FrameReader();
  const { session, fields } = await new Promise<{ session: Session; fields: Fields }>((resolve, reject) => {
    let live: Session | null = null;
    const failed = (error: IrisError): void => {
      clearTimeout(timer);
      if (live) live.end(error);
      else port.close(1000, "");
      reject(error);
    };
    const timer = setTimeout(() => failed(new IrisError("the relay did not greet in time")), GREETING_MS);
    const first = (frame: Frame): void => {
      clearTimeout(timer);
      const welcome = welcomed(frame);
      live = new Session(port, keyring, welcome);
      prepare(live);
      reader.setMessageLimit(live.messageLimit);
      resolve({ session: live, fields: welcome });
    };
    listen((bytes) => {
      try {
        for (const frame of reader.feed(bytes)) {
          if (live) live.take(frame);
          else first(frame);
        }
      } catch (error) {
        failed(asError(error));
      }
    }, failed);
    port.send(encodeControl(Kind.HELLO, { version: VERSION, minor: MINOR, label, mono_us: monotonicUs(), ticket }));
  });
  for (const key of keys) {
    const signature = await key.prove(session.relayId, fields.session_id as Bytes, fields.challenge as Bytes);
    session.control(Kind.PROVE, { id: 0, public_key: key.publicKey, signature });
  }
  return session;
}

function welcomed(frame: Frame): Fields {
  if (isData(frame) || (frame.kind !== Kind.WELCOME && frame.kind !== Kind.ERROR)) {
    throw new PeerProtocolError(`the relay began with ${kindName(frame.kind)}`);
  }
  if (frame.kind === Kind.ERROR) throw new LocalProtocolError(`the relay refused the session: ${String(frame.fields.detail)}`);
  if (Number(frame.fields.version) !== VERSION) throw new PeerProtocolError("the relay speaks another version");
  return frame.fields;
}
