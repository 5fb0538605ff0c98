/** What waits to be written: whole frames in order, some of which are still being sealed. */

import type { Bytes } from "./bytes.ts";

/** The connection as a session sees it. Bytes are whole frames. */
export interface Port {
  send(bytes: Bytes): void;
  /** Bytes that were sent and have not left this process. */
  readonly buffered: number;
  close(code: number, reason: string): void;
}

/** Senders wait while more than this is unwritten. */
const HIGH_WATER = 1_048_576;
/** How often a socket is asked whether it has room again; it reports nothing by itself. */
const POLL_MS = 5;

export class Outbox {
  readonly #port: Port;
  readonly #failed: (error: unknown) => void;
  readonly #queue: (Bytes | Promise<Bytes>)[] = [];
  readonly #calm: (() => void)[] = [];
  #bytes = 0;
  #running = false;
  #ended = false;

  constructor(port: Port, failed: (error: unknown) => void) {
    this.#port = port;
    this.#failed = failed;
  }

  /** Frames that wait for their seal, or behind one that does. */
  get depth(): number {
    return this.#queue.length;
  }

  /** `size` is about how long a frame will be that is still being sealed. */
  push(frame: Bytes | Promise<Bytes>, size = 0): void {
    if (this.#ended) {
      if (frame instanceof Promise) frame.catch(() => undefined); // nobody waits for it any more
      return;
    }
    if (!this.#running && !(frame instanceof Promise)) {
      this.#port.send(frame);
      return;
    }
    this.#bytes += size;
    this.#queue.push(frame);
    if (!this.#running) void this.#run();
  }

  /** Call `then` when fewer than a few frames wait for their seals. */
  whenCalm(then: () => void): void {
    if (this.#queue.length) this.#calm.push(then);
    else queueMicrotask(then);
  }

  async #run(): Promise<void> {
    this.#running = true;
    try {
      while (this.#queue.length) {
        const next = this.#queue[0]!;
        const frame = next instanceof Promise ? await next : next;
        if (this.#ended) return;
        this.#queue.shift();
        this.#port.send(frame);
        if (this.#queue.length <= 8) for (const then of this.#calm.splice(0)) then();
      }
      this.#bytes = 0;
    } catch (error) {
      this.#failed(error);
    } finally {
      this.#running = false;
    }
  }

  get full(): boolean {
    return this.#bytes + this.#port.buffered > HIGH_WATER;
  }

  /** Return when there is room, or the connection has ended. */
  async room(signal?: AbortSignal): Promise<void> {
    while (!this.#ended && this.full) {
      signal?.throwIfAborted();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  /** Return when everything is handed to the connection. */
  async drained(): Promise<void> {
    while (!this.#ended && (this.#queue.length || this.#running)) await new Promise((resolve) => setTimeout(resolve, 0));
  }

  end(): void {
    this.#ended = true;
    for (const frame of this.#queue.splice(0)) if (frame instanceof Promise) frame.catch(() => undefined);
    for (const then of this.#calm.splice(0)) then();
  }
}
