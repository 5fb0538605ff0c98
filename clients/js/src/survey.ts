/** Answers to a survey. */

import type { SurveySink } from "./calls.ts";
import type { IrisError, RemoteError } from "./errors.ts";
import type { Message } from "./messages.ts";

export interface Answer {
  /** Id of the member. */
  readonly member: string;
  readonly message: Message;
  /** The value of the message. */
  readonly value: any;
}

/**
 * A survey. Iterate over its answers with `for await`; it ends when all members have answered, or at the timeout. Raises
 * RequestError if it could not be asked.
 */
export class Survey implements AsyncIterable<Answer>, SurveySink {
  /** Ids of the members that were asked. */
  readonly asked = new Set<string>();
  /** Errors of members: id -> error. */
  readonly errors = new Map<string, RemoteError>();
  /** Ids of the members that have not answered: complete when the iteration has ended. */
  readonly missing = new Set<string>();

  readonly #answers: Answer[] = [];
  #done = false;
  #error: unknown = null;
  readonly #waiters: (() => void)[] = [];
  #leave: () => void = () => undefined;

  /** `start` asks, and returns what gives up. */
  constructor(start: (survey: Survey) => Promise<() => void>) {
    start(this).then((leave) => {
      this.#leave = leave;
      if (this.#done) leave();
    }, (error: unknown) => this.fail(error));
  }

  roster(members: readonly string[]): void {
    for (const member of members) {
      this.asked.add(member);
      if (!this.errors.has(member) && !this.#answered.has(member)) this.missing.add(member);
    }
  }

  readonly #answered = new Set<string>();

  answer(member: string, message: Message): void {
    this.missing.delete(member);
    this.#answered.add(member);
    this.#answers.push({
      member, message,
      get value() {
        return message.value;
      },
    });
    this.#wake();
  }

  fault(member: string, error: RemoteError): void {
    this.missing.delete(member);
    this.errors.set(member, error);
  }

  done(lost: readonly string[], error: IrisError | null): void {
    for (const member of lost) if (!this.#answered.has(member) && !this.errors.has(member)) this.missing.add(member);
    this.fail(error);
  }

  /** End, with an error or none. */
  fail(error: unknown): void {
    if (this.#done) return;
    this.#done = true;
    this.#error = error;
    this.#wake();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Answer, void, undefined> {
    try {
      for (;;) {
        const answer = this.#answers.shift();
        if (answer) yield answer;
        else if (this.#done) {
          if (this.#error !== null) throw this.#error;
          return;
        } else {
          await new Promise<void>((resolve) => {
            this.#waiters.push(resolve);
          });
        }
      }
    } finally {
      if (!this.#done) {
        this.#done = true;
        this.#leave();
      }
    }
  }

  #wake(): void {
    for (const wake of this.#waiters.splice(0)) wake();
  }
}
