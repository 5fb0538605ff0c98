// Sessions without a network: what each sends is kept, and the test plays the relay.
import { random, type Bytes } from "../src/bytes.ts";
import { decodeFrame, encodeControl, isData, Kind, type DataFrame, type Fields, type Frame } from "../src/frames.ts";
import { Keyring } from "../src/keys.ts";
import { greet, type Session } from "../src/session.ts";

export const KEYRING = await Keyring.from(new Uint8Array(32).fill(1));
export const KEY = KEYRING.all[0]!;

/** The relay's end of one session. */
export class End {
  readonly frames: Frame[] = [];
  readonly bytes: Bytes[] = [];
  session!: Session;
  closed = false;
  #receive!: (bytes: Bytes) => void;
  #answered = 0;

  static async open(prepare: (session: Session) => void = () => undefined): Promise<End> {
    const end = new End();
    const port = {
      send: (bytes: Bytes) => {
        end.bytes.push(bytes);
        end.frames.push(decodeFrame(bytes));
      },
      buffered: 0,
      close: () => {
        end.closed = true;
      },
    };
    const listen = (receive: (bytes: Bytes) => void): void => {
      end.#receive = receive;
    };
    const greeting = greet({ port, listen }, KEYRING, { label: "test" }, prepare);
    end.say(Kind.WELCOME, {
      version: 1, minor: 0, relay_id: random(16), session_id: random(8), challenge: random(32), message_limit: 1_048_576,
      mono_us: 1,
    });
    end.session = await greeting;
    ends.add(end);
    return end;
  }

  say(kind: number, fields: Fields): void {
    this.feed(encodeControl(kind, fields));
  }

  feed(bytes: Bytes): void {
    this.#receive(bytes);
  }

  /** Declare an alias to the session, as a relay does for what the frame's alias stands for. */
  declare(fields: Fields): void {
    this.say(Kind.DECLARE, { alias: 0, key_id: KEY.id, sender_id: random(16), ...fields });
  }

  /** Wait for a data frame of a kind, and return its bytes. */
  async sent(kind: number): Promise<Bytes> {
    for (;;) {
      const at = this.frames.findIndex((frame) => frame.kind === kind);
      if (at >= 0) {
        this.frames.splice(at, 1);
        return this.bytes.splice(at, 1)[0]!;
      }
      await settled();
    }
  }

  /** The last DECLARE that the session sent. */
  get declared(): Fields {
    return (this.frames.findLast((frame) => frame.kind === Kind.DECLARE) as { fields: Fields }).fields;
  }

  /** Answer everything that waits for an ACK. */
  acknowledge(fields: Fields = {}): void {
    const asking: ReadonlySet<number> = new Set([Kind.JOIN, Kind.SUBSCRIBE, Kind.UNSUBSCRIBE, Kind.SETTLE, Kind.LEAVE]);
    for (const frame of this.frames.slice(this.#answered)) {
      if (asking.has(frame.kind) && !isData(frame)) this.say(Kind.ACK, { id: frame.fields.id, ...fields });
    }
    this.#answered = this.frames.length;
  }

  /** Refusals that the session sent: the reason of each. */
  get refusals(): number[] {
    return this.frames.filter((frame): frame is DataFrame => isData(frame) && (frame.flags & 2) > 0).map((frame) => frame.flags >> 4);
  }
}

const ends = new Set<End>();

/** Return when no session has anything to open, to handle or to seal. */
export async function settled(): Promise<void> {
  for (let idle = 0; idle < 2; idle++) {
    await new Promise((resolve) => setTimeout(resolve, 0));
    for (const { session } of ends) {
      if (session.ended) continue;
      if (session.waiting || session.outbox.depth) idle = -1;
    }
  }
}
