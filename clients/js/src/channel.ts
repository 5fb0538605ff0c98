/** Channels: calls of streams that caller and store authenticate (docs/protocol.md §19.9). No IO. */

import { concat, EMPTY, equal, hkdf, sha256, u32, u64, utf8, view, type Bytes } from "./bytes.ts";
import { verify, type ClusterKey } from "./keys.ts";
import type { Int } from "./frames.ts";
import { OpenError } from "./errors.ts";
import { Share } from "./x25519.ts";

const MARK = 0xc1;
const HEAD_BYTES = 17;
const CODE_BYTES = 32;
/** A longer map is replaced by its GMAC. */
const LONG_BYTES = 1024;

interface Door {
  readonly store: Bytes;
  readonly uuid: Bytes;
  readonly nonce: Bytes;
}

/** What the caller signs, without its string. */
function callerTranscript(door: Door, key: ClusterKey, nonce: Bytes, share: Bytes): Bytes {
  return concat(door.store, door.uuid, key.id, nonce, door.nonce, share);
}

/** Between "knock" and "opened": what the caller keeps. */
export class Knock {
  readonly nonce: Bytes;
  readonly #key: ClusterKey;

  constructor(key: ClusterKey, nonce: Bytes) {
    this.#key = key;
    this.nonce = nonce;
  }

  /** Return the fields of "open", and what finishes the channel. The caller has checked the door's orders. */
  async open(door: Door, share?: Share): Promise<{ fields: Record<string, unknown>; opening: ChannelOpening }> {
    const own = share ?? (await Share.draw());
    const transcript = callerTranscript(door, this.#key, this.nonce, own.publicShare);
    return {
      fields: {
        nonce: this.nonce, door: door.nonce, public_key: this.#key.publicKey, share: own.publicShare,
        signature: await this.#key.sign(concat(utf8("iris-stream-caller-1"), transcript)),
      },
      opening: new ChannelOpening(door.store, transcript, own),
    };
  }
}

export class ChannelOpening {
  readonly #store: Bytes;
  readonly #transcript: Bytes;
  readonly #share: Share;

  constructor(store: Bytes, transcript: Bytes, share: Share) {
    this.#store = store;
    this.#transcript = transcript;
    this.#share = share;
  }

  /** Return the channel that "opened" opens. Raises OpenError or SealError. */
  async finish(channel: Int, share: Bytes, signature: Bytes): Promise<Channel> {
    const transcript = concat(this.#transcript, share, u64(channel));
    if (!(await verify(this.#store, signature, concat(utf8("iris-stream-store-1"), transcript)))) throw new OpenError();
    const secret = await this.#share.agree(share);
    const keys = await hkdf(secret, await sha256(transcript), utf8("iris-stream-channel-1"), 128);
    return new Channel(
      channel, await Code.of(keys.slice(0, 32), keys.slice(32, 64)),
      await Code.of(keys.slice(64, 96), keys.slice(96, 128)),
    );
  }
}

/** The codes of one direction. */
export class Code {
  readonly #code: CryptoKey;
  readonly #hash: CryptoKey;

  private constructor(code: CryptoKey, hash: CryptoKey) {
    this.#code = code;
    this.#hash = hash;
  }

  static async of(code: Bytes, hash: Bytes): Promise<Code> {
    return new Code(
      await crypto.subtle.importKey("raw", code, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]),
      await crypto.subtle.importKey("raw", hash, "AES-GCM", false, ["encrypt"]),
    );
  }

  /** `head` is the mark, the channel and the counter. */
  async make(head: Bytes, end: Bytes, map: Bytes): Promise<Bytes> {
    const shown = map.length > LONG_BYTES ? await this.#gmac(head, map) : map;
    return new Uint8Array(
      await crypto.subtle.sign("HMAC", this.#code, concat(head, end, u32(map.length), shown)),
    );
  }

  async #gmac(head: Bytes, map: Bytes): Promise<Bytes> {
    const iv = new Uint8Array(12);
    view(iv).setBigUint64(4, view(head).getBigUint64(9, true));
    const parameters = { name: "AES-GCM", iv, additionalData: map, tagLength: 128 };
    return new Uint8Array(await crypto.subtle.encrypt(parameters, this.#hash, EMPTY));
  }
}

export class Channel {
  readonly #number: Int;
  readonly #calls: Code;
  readonly #answers: Code;
  #counter = 0;

  constructor(number: Int, calls: Code, answers: Code) {
    this.#number = number;
    this.#calls = calls;
    this.#answers = answers;
  }

  /** Take the next counter at once; the body of the call follows. `end` are the end fields of its frame. */
  call(end: Bytes, map: Bytes): { counter: number; body: Promise<Bytes> } {
    const counter = this.#counter++;
    const head = this.#head(counter);
    return { counter, body: this.#calls.make(head, end, map).then((code) => concat(head, code, map)) };
  }

  /** Return the map of the answer to the call with `counter`. Raises OpenError if the code is not right. */
  async answer(counter: number, end: Bytes, body: Bytes): Promise<Bytes> {
    const head = this.#head(counter);
    if (body.length < HEAD_BYTES + CODE_BYTES || !equal(body.subarray(0, HEAD_BYTES), head)) throw new OpenError();
    const map = body.slice(HEAD_BYTES + CODE_BYTES);
    const code = await this.#answers.make(head, end, map);
    if (!equal(code, body.subarray(HEAD_BYTES, HEAD_BYTES + CODE_BYTES))) throw new OpenError();
    return map;
  }

  #head(counter: number): Bytes {
    return concat(Uint8Array.of(MARK), u64(this.#number), u64(counter));
  }
}

/** Whether a body carries a code. */
export function hasCode(body: Bytes): boolean {
  return body[0] === MARK;
}
