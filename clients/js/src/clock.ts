/** Clocks, and how far that of the relay is from ours (docs/protocol.md §18.1). */

const SAMPLES = 16;

/** This process's monotonic clock in µs; never 0. */
export function monotonicUs(): number {
  return Math.floor(performance.now() * 1000) + 1;
}

/** The wall clock in µs since 1970. */
export function wallUs(): number {
  return Date.now() * 1000;
}

/** Say how far from this clock a message was sent, as the cause of a loss. */
export function clockDifference(sentUs: number): string {
  const seconds = Math.round((wallUs() - sentUs) / 1e6);
  return `sent ${seconds < 0 ? "" : "+"}${seconds} s from our clock`;
}

/** The least of the last samples of (our clock at receipt - the relay's): add it to the relay's times. */
export class ClockOffset {
  readonly #samples: number[] = [];
  us = 0;

  add(relayUs: number): void {
    this.#samples.push(monotonicUs() - relayUs);
    if (this.#samples.length > SAMPLES) this.#samples.shift();
    this.us = Math.min(...this.#samples);
  }
}
