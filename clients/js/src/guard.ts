/**
 * Replay protection (docs/protocol.md §9): the receiver's memory of its senders, which outlives connections.
 *
 * Both tables are bounded. Entries idle for longer than a message can be fresh are removed to make room; a table full of
 * fresh entries refuses new senders. Half of each table is split equally among the keys, so that the holders of one key
 * cannot fill it for the others.
 */

/** Age from which a message is refused, in either direction. */
export const FRESH_US = 600_000_000;
/** A message may come from a clock that is ahead by FRESH_US, and its copy when that clock is behind by as much. */
const FORGET_US = 2 * FRESH_US;
const WINDOW = 131_072;
const MAX_SENDERS = 65_536;
const MAX_SEQUENCES = 262_144;
const MAX_REPORTED = 4096;

export type Verdict = "new" | "replayed" | "stale" | "full";

interface Entry {
  usedUs: number;
  readonly keyHex: string;
}

/** A bounded map of fresh entries, in the order of their last use. */
class Table<E extends Entry> {
  readonly #entries = new Map<string, E>();
  readonly #used = new Map<string, number>();
  readonly #limit: number;
  readonly #keys: () => number;

  constructor(limit: number, keys: () => number) {
    this.#limit = limit;
    this.#keys = keys;
  }

  get(name: string, nowUs: number): E | undefined {
    const entry = this.#entries.get(name);
    if (entry) {
      entry.usedUs = nowUs;
      this.#entries.delete(name);
      this.#entries.set(name, entry);
    }
    return entry;
  }

  /** Whether there was room. */
  add(name: string, entry: E): boolean {
    for (const [old, { usedUs, keyHex }] of this.#entries) {
      if (usedUs > entry.usedUs - FORGET_US) break;
      this.#entries.delete(old);
      this.#used.set(keyHex, this.#used.get(keyHex)! - 1);
    }
    if (!this.#hasRoom(entry.keyHex)) return false;
    this.#entries.set(name, entry);
    this.#used.set(entry.keyHex, (this.#used.get(entry.keyHex) ?? 0) + 1);
    return true;
  }

  #hasRoom(keyHex: string): boolean {
    const share = Math.max(1, Math.floor(this.#limit / (2 * Math.max(this.#keys(), this.#used.size, 1))));
    if ((this.#used.get(keyHex) ?? 0) < share) return true;
    let beyond = 0;
    for (const used of this.#used.values()) beyond += Math.max(0, used - share);
    return beyond < Math.floor(this.#limit / 2);
  }
}

/** The last WINDOW counters of one sender. */
class ReplayWindow {
  #next = 0;
  /** Bits of accepted counters, 32 to a word; ascending but for stragglers. */
  readonly #words = new Map<number, number>();

  mark(counter: number): Verdict {
    if (counter < this.#next - WINDOW) return "stale";
    const word = counter >>> 5;
    const bit = 1 << (counter & 31);
    const found = this.#words.get(word) ?? 0;
    if (found & bit) return "replayed";
    this.#words.set(word, found | bit);
    if (counter >= this.#next) {
      this.#next = counter + 1;
      if (this.#words.size > WINDOW / 16) {
        for (const old of this.#words.keys()) if (32 * (old + 1) <= this.#next - WINDOW) this.#words.delete(old);
      }
    }
    return "new";
  }
}

interface Sender extends Entry {
  readonly window: ReplayWindow;
}

/** The sequence of one sender's messages to one address. Losses are reported once. */
export class Sequence implements Entry {
  readonly keyHex: string;
  usedUs: number;
  /** Next expected number. Only a message that opened moves it. */
  next = 0;
  /** What a relay reported as lost is below this number. */
  reported = 0;
  /** When the last delivery without a queue group came, as `Guard.epoch`; -1 for never. */
  epoch = -1;
  #unknownAt = -1;

  constructor(keyHex: string, usedUs: number) {
    this.keyHex = keyHex;
    this.usedUs = usedUs;
  }

  /** Return how many messages before `first`, which has just come, are missing and not reported. */
  missing(first: number): number {
    if (first < this.reported) this.reported = 0; // the report was wrong
    return first - Math.max(this.next, this.reported);
  }

  /** Note that `count` messages from `first` on were dropped. Return how many of them, and of those before, are new. */
  noteLost(first: number, count: number, followed: boolean): number {
    const known = Math.max(this.next, this.reported);
    const end = first + count;
    if (end <= known) return 0;
    this.reported = end;
    return end - (followed ? known : Math.max(first, known));
  }

  /** Note a loss of unknown size. Return whether something came since the last one. */
  noteUnknown(): boolean {
    if (this.#unknownAt === this.next) return false;
    this.#unknownAt = this.next;
    return true;
  }
}

export class Guard {
  readonly #senders: Table<Sender>;
  readonly #sequences: Table<Sequence>;
  /** Of senders of which only a relay's report is known: the latest ones. */
  readonly #reported = new Map<string, Sequence>();
  /** Counts changes of what this client follows: new subscriptions, and connections. */
  epoch = 0;
  /** How often a new sender was refused because a table was full. */
  refusedSenders = 0;

  /** `keys` returns how many keys this client holds, among which the tables are divided. */
  constructor(keys: () => number, maxSenders = MAX_SENDERS, maxSequences = MAX_SEQUENCES) {
    this.#senders = new Table(maxSenders, keys);
    this.#sequences = new Table(maxSequences, keys);
  }

  /** Mark the counter of a call that opened and is about to run. `service` is "" but for surveys. */
  accept(keyHex: string, senderHex: string, service: string, counter: number, nowUs: number): Verdict {
    const name = `${keyHex} ${senderHex} ${service}`;
    let sender = this.#senders.get(name, nowUs);
    if (!sender) {
      sender = { usedUs: nowUs, keyHex, window: new ReplayWindow() };
      if (!this.#senders.add(name, sender)) {
        this.refusedSenders++;
        return "full";
      }
    }
    return sender.window.mark(counter);
  }

  /** Return the sequence of a sender at an address; with `opened` it is made, null if there is no room. */
  sequence(address: string, keyHex: string, opened: boolean, nowUs: number): Sequence | null {
    const known = this.#sequences.get(address, nowUs);
    if (known) return known;
    let sequence = this.#reported.get(address);
    if (opened) {
      this.#reported.delete(address);
      sequence ??= new Sequence(keyHex, nowUs);
      sequence.usedUs = nowUs;
      if (this.#sequences.add(address, sequence)) return sequence;
      this.refusedSenders++;
      return null;
    }
    if (!sequence) {
      sequence = new Sequence(keyHex, nowUs);
      if (this.#reported.size >= MAX_REPORTED) this.#reported.delete(this.#reported.keys().next().value!);
      this.#reported.set(address, sequence);
    }
    return sequence;
  }
}
