/** Subscriptions: publications in, per subscription a bounded queue, and every gap reported (docs/protocol.md §9). */

import { hex, type Bytes } from "./bytes.ts";
import { decodeBundle } from "./bundle.ts";
import { clockDifference, monotonicUs, wallUs } from "./clock.ts";
import { Closed, ConfigError, LocalProtocolError, OpenError, Overloaded } from "./errors.ts";
import { Kind, type DataFrame, type Fields } from "./frames.ts";
import { FRESH_US, type Guard, type Sequence } from "./guard.ts";
import type { Keyring } from "./keys.ts";
import { Message, type Loss } from "./messages.ts";
import { checkFilter, groupName, matches } from "./names.ts";
import { notify } from "./notify.ts";
import { NO_LIMIT, type Declared, type Session } from "./session.ts";
import type { Opened } from "./sframe.ts";
import type { Trouble, Troubles } from "./troubles.ts";

const UNKNOWN_COUNT = 2 ** 32 - 1;
const QUEUE_BYTES = 8_388_608;
/** What a queued message counts beside its payload. */
const QUEUED_EXTRA = 256;
const MAX_TOPICS = 4096;

export type WhenFull = "drop-new" | "drop-old" | "close";

export interface SubscribeOptions {
  /** Subscriptions of one group share the messages: each bundle goes to one of them. */
  readonly group?: string | null;
  /** What to do when the queue is full: drop the new messages, the oldest ones, or end the subscription. */
  readonly whenFull?: WhenFull;
  /** Bytes of messages that were not iterated over yet. */
  readonly limitBytes?: number;
  /** Called with each loss. */
  readonly onLoss?: (loss: Loss) => void;
  readonly signal?: AbortSignal;
}

/** A subscription. Iterate over it with `for await`; leaving the loop closes it. */
export class Subscription implements AsyncIterable<Message>, AsyncDisposable {
  readonly filter: string;
  readonly group: string;
  /** Resolves when the relays know the subscription: what is published in this site after that is received. */
  readonly ready: Promise<void>;
  /** How many messages of this subscription are known to be lost. */
  lostMessages = 0;
  /** Value of the guard's epoch since when the subscription is followed without a break. */
  since = Infinity;

  readonly #whenFull: WhenFull;
  readonly #limit: number;
  readonly #onLoss: ((loss: Loss) => void) | undefined;
  readonly #troubles: Troubles;
  readonly #close: (subscription: Subscription) => Promise<void>;
  readonly #stop: () => void;
  readonly #queue: Message[] = [];
  #queuedBytes = 0;
  #ended = false;
  /** The relay's answer, while the subscription leaves its group. */
  #leaving: Promise<void> | undefined;
  /** Iterators that have not ended. */
  #iterating = 0;
  #error: unknown = null;
  readonly #waiters: (() => void)[] = [];
  #settleReady!: { resolve: () => void; reject: (error: unknown) => void };

  /** Made by `Client.subscribe`. */
  constructor(filter: string, options: SubscribeOptions, troubles: Troubles, close: (subscription: Subscription) => Promise<void>) {
    const { whenFull = "drop-new", limitBytes = QUEUE_BYTES, onLoss, signal } = options;
    checkFilter(filter);
    this.group = groupName(options.group);
    if (!["drop-new", "drop-old", "close"].includes(whenFull)) {
      throw new ConfigError(`whenFull must be 'drop-new', 'drop-old' or 'close', not '${String(whenFull)}'`);
    }
    if (!Number.isSafeInteger(limitBytes) || limitBytes < 1) throw new ConfigError("limitBytes must be a whole number above 0");
    signal?.throwIfAborted();
    this.filter = filter;
    this.#whenFull = whenFull;
    this.#limit = limitBytes;
    this.#onLoss = onLoss;
    this.#troubles = troubles;
    this.#close = close;
    this.ready = new Promise((resolve, reject) => {
      this.#settleReady = { resolve, reject };
    });
    this.ready.catch(() => undefined); // the iterator raises it, too
    const abort = (): void => void this.#abort(signal!.reason);
    signal?.addEventListener("abort", abort, { once: true });
    this.#stop = () => signal?.removeEventListener("abort", abort);
  }

  registered(): void {
    this.#settleReady.resolve();
  }

  /** End with an error, or with none: the iterator yields what is queued, then ends. */
  end(error: unknown = null): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#error = error;
    this.#stop();
    this.#settleReady.reject(error ?? new Closed("the subscription was closed"));
    this.#wake();
  }

  deliver(messages: readonly Message[]): void {
    for (const [i, message] of messages.entries()) {
      if (this.#ended) return;
      const size = message.payload.length + QUEUED_EXTRA;
      if (this.#queue.length && this.#queuedBytes + size > this.#limit && !this.#makeRoom(message, messages.length - i, size)) return;
      this.#queue.push(message);
      this.#queuedBytes += size;
    }
    this.#wake();
  }

  /** Report a loss. */
  gap(loss: Loss, cause: Trouble = loss.count === null ? "uncounted" : "missing"): void {
    if (this.#ended) return;
    this.#report(loss, cause);
  }

  #report(loss: Loss, cause: Trouble): void {
    this.lostMessages += loss.count ?? 0;
    this.#troubles.count(cause, this.filter, loss.count ?? 1);
    if (this.#onLoss) notify(this.#onLoss, loss);
  }

  /** Whether `message` may be queued now. `left` counts it and those that came with it after it. */
  #makeRoom({ name, source }: Message, left: number, size: number): boolean {
    const loss = (count: number): Loss => ({ kind: "publish", name, source, count, cause: "slow subscriber" });
    if (this.#whenFull === "close") {
      this.end(new Overloaded(this.filter, `the queue of ${this.#limit} bytes is full`));
      void this.#close(this);
      return false;
    }
    if (this.#whenFull === "drop-new") {
      this.gap(loss(left), "queue full");
      return false;
    }
    let dropped = 0;
    while (this.#queue.length && this.#queuedBytes + size > this.#limit) {
      this.#queuedBytes -= this.#queue.shift()!.payload.length + QUEUED_EXTRA;
      dropped++;
    }
    this.gap(loss(dropped), "queue full");
    return true;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Message, void, undefined> {
    this.#iterating++;
    try {
      for (;;) {
        const message = this.#queue.shift();
        if (message) {
          this.#queuedBytes -= message.payload.length + QUEUED_EXTRA;
          yield message;
        } else if (this.#ended) {
          if (this.#error !== null) throw this.#error;
          return;
        } else {
          await new Promise<void>((resolve) => {
            this.#waiters.push(resolve);
          });
        }
      }
    } finally {
      this.#iterating--;
      await this.close();
      if (!this.#iterating) this.#dropUnread();
    }
  }

  /**
   * End the subscription. Its iterator yields what is queued, then ends. In a group, it also yields what was on its way,
   * because no other member gets that.
   */
  async close(): Promise<void> {
    if (this.group && !this.#ended) {
      this.#leaving ??= this.#close(this).finally(() => this.end());
      await this.#leaving;
    } else if (!this.#ended) {
      this.end();
      await this.#close(this);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  async #abort(reason: unknown): Promise<void> {
    if (this.#ended) return;
    this.end(reason);
    await this.#close(this);
  }

  /** Nobody iterates any more. What a group sent to this member reaches no other, so it is a loss. */
  #dropUnread(): void {
    const unread = this.#queue.splice(0);
    this.#queuedBytes = 0;
    if (!this.group) return;
    const counts = new Map<string, [Message, number]>();
    for (const message of unread) {
      const key = `${message.name}\0${message.source}`;
      counts.set(key, [message, (counts.get(key)?.[1] ?? 0) + 1]);
    }
    for (const [{ name, source }, count] of counts.values()) {
      this.#report({ kind: "publish", name, source, count, cause: "subscription closed" }, "unread");
    }
  }

  #wake(): void {
    for (const wake of this.#waiters.splice(0)) wake();
  }
}

/** All subscriptions of a client. They outlive its sessions. */
export class Subscriptions {
  readonly #subscriptions = new Set<Subscription>();
  /** What matches a topic; emptied when it is full, and with each change. */
  readonly #byTopic = new Map<string, readonly Subscription[]>();
  readonly #guard: Guard;
  readonly #keyring: Keyring;
  /** Rises with each bundle for a group of several subscriptions. */
  #turn = 0;

  constructor(guard: Guard, keyring: Keyring) {
    this.#guard = guard;
    this.#keyring = keyring;
  }

  /** Raises LocalProtocolError if there is such a subscription, as a relay does. */
  add(subscription: Subscription): void {
    const { filter, group } = subscription;
    this.#keyring.filterKeys(filter);
    for (const other of this.#subscriptions) {
      if (other.filter === filter && other.group === group) {
        throw new LocalProtocolError(`this client subscribes to '${filter}'${group && ` in the group '${group}'`} already`);
      }
    }
    this.#subscriptions.add(subscription);
    this.#byTopic.clear();
  }

  remove(subscription: Subscription): void {
    this.#subscriptions.delete(subscription);
    this.#byTopic.clear();
  }

  get all(): Subscription[] {
    return [...this.#subscriptions];
  }

  endAll(error: unknown = null): void {
    for (const subscription of this.all) subscription.end(error);
    this.#subscriptions.clear();
    this.#byTopic.clear();
  }

  /** End those without a group, and leave all groups. */
  async closeAll(): Promise<void> {
    await Promise.all(this.all.map((subscription) => subscription.close()));
  }

  /** Register one with a session. */
  async register(session: Session, subscription: Subscription): Promise<void> {
    const { filter, group } = subscription;
    const keyIds = this.#keyring.filterKeys(filter).map((key) => key.id);
    await session.asked(Kind.SUBSCRIBE, { filter, key_ids: keyIds, group }, Kind.ACK, () => {
      subscription.since = ++this.#guard.epoch;
    });
    await session.asked(Kind.SETTLE, {}, Kind.ACK);
    subscription.registered();
  }

  async unregister(session: Session, { filter, group }: Subscription): Promise<void> {
    await session.asked(Kind.UNSUBSCRIBE, { filter, group }, Kind.ACK);
  }

  /** The connection was lost, or the session moves: nobody knows what was missed until the next one. */
  interrupted(cause: string): void {
    this.#guard.epoch++;
    for (const subscription of this.#subscriptions) {
      if (subscription.since === Infinity) continue;
      subscription.since = Infinity;
      subscription.gap({ kind: "publish", name: subscription.filter, source: "", count: null, cause });
    }
  }

  /** Handle the publications of a session. */
  attach(session: Session): void {
    session.onData([Kind.PUBLISH], {
      open: (frame, declared) => (declared.key ? session.open(declared, Kind.PUBLISH, frame.end, frame.body) : undefined),
      handle: (frame, declared, opened) => this.#publication(session, frame, declared, opened),
      // The sequence of what comes next shows how many were dropped.
      overflow: () => undefined,
    });
    session.onControl(Kind.WAIT, ({ alias, serial }) => {
      session.control(Kind.WINDOW, { alias, serial, limit: NO_LIMIT });
    });
  }

  #publication(session: Session, frame: DataFrame, declared: Declared, opened: unknown): void {
    const { name, key, senderHex, plain } = declared;
    if (!key || !this.#keyring.opensTopic(name, key)) {
      session.count("publication under another key");
      return;
    }
    if (opened instanceof OpenError) {
      session.count("publication that does not open");
      this.#reported(declared, frame.first, frame.count, "it does not open");
      return;
    }
    if (opened instanceof Error) throw opened;
    const { plain: bytes } = opened as Opened;
    const sequence = this.#guard.sequence(addressOf(declared), declared.keyHex, true, monotonicUs());
    if (!sequence) {
      this.#tell(this.#receivers(declared), declared, frame.count, "too many senders to keep apart");
      return;
    }
    if (frame.first < sequence.next) {
      session.count("publication that came before");
      return;
    }
    const followers = this.#followers(declared, sequence);
    const missing = sequence.missing(frame.first);
    sequence.next = frame.first + frame.count;
    if (!plain) this.#tell(followers, declared, Math.max(0, missing) + frame.count, "delivered to queue groups alone");
    else if (missing > 0) this.#tell(followers, declared, missing, "missing on the way");
    if (plain) sequence.epoch = this.#guard.epoch;
    const receivers = this.#receivers(declared);
    if (Math.abs(frame.sent - wallUs()) >= FRESH_US) {
      this.#tell(receivers, declared, frame.count, clockDifference(frame.sent));
      return;
    }
    let messages: Message[];
    try {
      const bundle = decodeBundle(bytes, frame.count);
      messages = bundle.entries.map(({ payload, headers }) => new Message(payload, name, headers, bundle.packed, senderHex));
    } catch (error) {
      if (!(error instanceof OpenError)) throw error;
      this.#tell(receivers, declared, frame.count, "the bundle does not decode");
      return;
    }
    for (const subscription of receivers) subscription.deliver(messages);
  }

  /** Handle a GAP of publications. */
  gap(fields: Fields): void {
    const declared: Declared = {
      kind: Kind.PUBLISH, name: fields.name as string, nameBytes: new Uint8Array(0), keyId: fields.key_id as Bytes,
      keyHex: hex(fields.key_id as Bytes), key: this.#keyring.byId(fields.key_id as Bytes),
      senderId: fields.sender_id as Bytes, senderHex: hex(fields.sender_id as Bytes), plain: fields.plain as boolean,
      groups: fields.groups as string[], member: 0,
    };
    if (!declared.key || !this.#keyring.opensTopic(declared.name, declared.key)) return;
    this.#reported(declared, Number(fields.first), Number(fields.count), fields.cause as string);
  }

  /** A relay says that `count` messages from `first` on were dropped. It never changes the expected number. */
  #reported(declared: Declared, first: number, count: number, cause: string): void {
    const groups = this.#receivers(declared).filter(({ group }) => group);
    if (groups.length) this.#tell(groups, declared, count === UNKNOWN_COUNT ? null : count, cause);
    const sequence = this.#guard.sequence(addressOf(declared), declared.keyHex, false, monotonicUs())!;
    const plain = this.#matching(declared).filter(({ group }) => !group);
    if (!declared.plain) {
      const missed = this.#followers(declared, sequence);
      if (missed.length && count && count !== UNKNOWN_COUNT) this.#tell(missed, declared, sequence.noteLost(first, count, true), cause);
      return;
    }
    if (count === UNKNOWN_COUNT && !first) {
      if (sequence.noteUnknown()) this.#tell(plain, declared, null, cause);
    } else if (count) {
      this.#tell(plain, declared, sequence.noteLost(first, count, this.#followers(declared, sequence).length > 0), cause);
    }
  }

  #matching({ name }: Declared): readonly Subscription[] {
    let found = this.#byTopic.get(name);
    if (!found) {
      found = this.all.filter(({ filter }) => matches(filter, name));
      if (this.#byTopic.size >= MAX_TOPICS) this.#byTopic.clear();
      this.#byTopic.set(name, found);
    }
    return found;
  }

  /** Subscriptions that a delivery is for: all without a group, and one of each group, which take turns. */
  #receivers(declared: Declared): Subscription[] {
    const found = this.#matching(declared).filter(({ group }) => (group ? declared.groups.includes(group) : declared.plain));
    const grouped = found.filter(({ group }) => group);
    if (grouped.length < 2) return found;
    this.#turn++;
    const chosen = declared.groups.flatMap((name) => {
      const members = grouped.filter(({ group }) => group === name);
      return members.length ? [members[this.#turn % members.length]!] : [];
    });
    return [...found.filter(({ group }) => !group), ...chosen];
  }

  /** Subscriptions without a group that have followed the sender since a message of it. */
  #followers(declared: Declared, { epoch }: Sequence): Subscription[] {
    return this.#matching(declared).filter(({ group, since }) => !group && since <= epoch);
  }

  #tell(subscriptions: readonly Subscription[], { name, senderHex }: Declared, count: number | null, cause: string): void {
    if (count === 0) return;
    for (const subscription of subscriptions) subscription.gap({ kind: "publish", name, source: senderHex, count, cause });
  }
}

function addressOf({ kind, name, keyHex, senderHex }: Declared): string {
  return [kind, name, keyHex, senderHex].join("\0");
}

