/** Sending publications and broadcasts: what is sent to one address in one turn is one bundle (docs/protocol.md §8, §9). */

import type { Bytes } from "./bytes.ts";
import { CUT_BYTES, encodeBundle, encodeHeaders, MESSAGE_BYTES, type Headers, type Outgoing } from "./bundle.ts";
import { checkMessage } from "./calls.ts";
import type { Address, Session } from "./session.ts";

interface Flow {
  address: Address;
  /** Number of the next message. */
  next: number;
  packed: boolean;
  size: number;
  messages: Outgoing[];
}

/** Addresses whose numbers are kept. With one more, everything is numbered again, under new sender ids. */
const MAX_FLOWS = 65_536;

export class Casts {
  readonly #session: Session;
  readonly #flows = new Map<string, Flow>();
  #begun: Flow[] = [];
  #scheduled = false;

  constructor(session: Session) {
    this.#session = session;
    session.beforeSend = () => this.flush();
  }

  add(address: Address, payload: Bytes, packed: boolean, headers: Headers | undefined): void {
    const encoded = encodeHeaders(headers);
    checkMessage(payload, this.#session.messageLimit);
    const flow = this.#flow(address);
    const size = payload.length + encoded.length + MESSAGE_BYTES;
    const other = flow.packed !== packed || flow.address.site !== address.site;
    if (flow.messages.length && (other || flow.size + size > CUT_BYTES)) this.flush();
    if (!flow.messages.length) {
      flow.address = address;
      flow.packed = packed;
      this.#begun.push(flow);
    }
    flow.messages.push({ payload, headers: encoded });
    flow.size += size;
    if (!this.#scheduled) {
      this.#scheduled = true;
      // While seals are being made, more messages join the bundle.
      this.#session.outbox.whenCalm(() => {
        this.#scheduled = false;
        this.flush();
      });
    }
  }

  /** Seal everything that was collected, in the order of its first messages. */
  flush(): void {
    if (!this.#begun.length) return;
    for (const flow of this.#begun.splice(0)) {
      const { address, messages, packed, next } = flow;
      flow.messages = [];
      flow.size = 0;
      flow.next += messages.length;
      if (!this.#session.ended) this.#session.seal(address, encodeBundle(messages, packed), { count: messages.length, first: next });
    }
  }

  #flow(address: Address): Flow {
    if (this.#flows.size >= MAX_FLOWS) {
      this.flush();
      this.#flows.clear();
      this.#session.renewSenders();
    }
    const name = [address.kind, address.name, this.#session.sealer(address.key).senderHex].join("\0");
    let flow = this.#flows.get(name);
    if (!flow) {
      flow = { address, next: 0, packed: false, size: 0, messages: [] };
      this.#flows.set(name, flow);
    }
    return flow;
  }
}
