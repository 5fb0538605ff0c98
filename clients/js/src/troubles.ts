/** Losses and failed handlers, which the relay shows to operators: counted, and reported at most once a second. */

import { Kind, type Fields } from "./frames.ts";

export type Trouble = "queue full" | "unread" | "missing" | "uncounted" | "not sent" | "handler failed";

const REPORT_MS = 1000;
/** Names of one cause in one report. What is of others is only in its count. */
const MAX_NAMES = 8;
const MAX_NAME = 64;
const MAX_COUNT = 2 ** 32 - 1;

interface Tally {
  count: number;
  readonly names: Map<string, number>;
}

/** The reports of one client. Without a relay, or while it does not read, the counts wait. */
export class Troubles {
  readonly #send: (kind: number, make: () => Fields) => void;
  #tallies = new Map<Trouble, Tally>();
  #timer: ReturnType<typeof setTimeout> | undefined;
  #ended = false;

  /** `send` sends a frame, or does not call `make` because nothing can be sent now. */
  constructor(send: (kind: number, make: () => Fields) => void) {
    this.#send = send;
  }

  /** Count something that happened to a cluster, topic or filter. */
  count(cause: Trouble, name: string, count = 1): void {
    const tally = this.#tallies.get(cause) ?? { count: 0, names: new Map<string, number>() };
    count = Math.min(count, MAX_COUNT - tally.count);
    if (this.#ended || !(count > 0)) return;
    this.#tallies.set(cause, tally);
    tally.count += count;
    addName(tally.names, name.length > MAX_NAME ? `${name.slice(0, MAX_NAME - 1).toWellFormed()}…` : name, count);
    this.#timer ??= later(() => this.#due());
  }

  /** Report now what was counted since the last report. */
  flush(): void {
    if (this.#tallies.size) this.#send(Kind.TROUBLE, () => this.#take());
  }

  /** Count and report nothing more. */
  end(): void {
    this.#ended = true;
    clearTimeout(this.#timer);
  }

  #due(): void {
    this.#timer = undefined;
    if (!this.#tallies.size) return;
    this.flush();
    this.#timer = later(() => this.#due());
  }

  #take(): Fields {
    const entries = [...this.#tallies].map(([cause, { count, names }]) => [cause, count, names]);
    this.#tallies = new Map();
    return { entries };
  }
}

/** Add to the count of a name. At the limit, a larger one takes the place of the smallest. */
function addName(names: Map<string, number>, name: string, count: number): void {
  if (!names.has(name) && names.size >= MAX_NAMES) {
    const [least, held] = [...names].reduce((one, other) => (other[1] < one[1] ? other : one));
    if (held >= count) return;
    names.delete(least);
  }
  names.set(name, (names.get(name) ?? 0) + count);
}

function later(act: () => void): ReturnType<typeof setTimeout> {
  const timer = setTimeout(act, REPORT_MS);
  (timer as { unref?: () => void }).unref?.(); // it keeps no program from ending
  return timer;
}
