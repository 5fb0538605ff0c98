/** SFrame (RFC 9605) with AES_256_GCM_SHA512_128, as docs/protocol.md §7 uses it. */

import { concat, EMPTY, hex, hmac, u16, u64, utf8, view, type Bytes } from "./bytes.ts";
import { OpenError } from "./errors.ts";
import { Kind } from "./frames.ts";
import type { ClusterKey } from "./keys.ts";

const SUITE = Uint8Array.of(0, 5);
const TAG_BYTES = 16;
const MAX_COUNTER = 2 ** 32;
/** Openers that are kept; beyond it the one used longest ago is derived again. */
const MAX_OPENERS = 1024;

/** What is authenticated and never sent, but for the line of answers. */
export function metadata(kind: number, name: Bytes, keyId: Bytes, senderId: Bytes, end: Bytes): Bytes {
  return concat(Uint8Array.of(1, kind), u16(name.length), name, keyId, senderId, end);
}

/** The line of REPLY, FAULT and ANSWER: which request or survey they answer. */
export function answersLine(senderId: Bytes, counter: number): Bytes {
  return concat(senderId, u64(counter));
}

interface Cipher {
  readonly key: CryptoKey;
  readonly salt: Bytes;
}

async function derive(root: Bytes, senderId: Bytes): Promise<Cipher> {
  const one = Uint8Array.of(1);
  // HKDF-Expand to at most one block is HMAC(info ‖ 1).
  const base = await hmac("SHA-256", root, concat(utf8("iris-seal-1"), senderId, one));
  const secret = await hmac("SHA-512", EMPTY, base);
  const kid = senderId.subarray(0, 8);
  const expand = (label: string): Promise<Bytes> => hmac("SHA-512", secret, concat(utf8(label), kid, SUITE, one));
  const key = (await expand("SFrame 1.0 Secret key ")).slice(0, 32);
  const salt = (await expand("SFrame 1.0 Secret salt ")).slice(0, 12);
  return { key: await crypto.subtle.importKey("raw", key, "AES-GCM", false, ["encrypt", "decrypt"]), salt };
}

function nonce(salt: Bytes, counter: number): Bytes {
  const bytes = salt.slice();
  const fields = view(bytes);
  fields.setUint32(8, (fields.getUint32(8) ^ counter) >>> 0);
  return bytes;
}

/** Return big-endian bytes without leading zeros, at least one. */
function shortest(value: bigint): Bytes {
  const bytes: number[] = [];
  for (let rest = value; rest > 0n || !bytes.length; rest >>= 8n) bytes.unshift(Number(rest & 0xffn));
  return Uint8Array.from(bytes);
}

/** The shortest header that holds both (RFC 9605 §4.3). */
function header(kid: bigint, counter: number): Bytes {
  let config = 0;
  let tail: Bytes = EMPTY;
  if (kid < 8n) config |= Number(kid) << 4;
  else {
    tail = shortest(kid);
    config |= 0x80 | ((tail.length - 1) << 4);
  }
  if (counter < 8) config |= counter;
  else {
    const bytes = shortest(BigInt(counter));
    config |= 8 | (bytes.length - 1);
    tail = concat(tail, bytes);
  }
  return concat(Uint8Array.of(config), tail);
}

function kidOf(senderId: Bytes): bigint {
  return view(senderId).getBigUint64(0);
}

/** Seals under one key as one sender. Its counter counts up over all addresses, and no value is used twice. */
export class Sealer {
  readonly senderId: Bytes;
  readonly senderHex: string;
  readonly #kid: bigint;
  readonly #cipher: Promise<Cipher>;
  #counter = 0;

  constructor(key: ClusterKey, senderId: Bytes) {
    this.senderId = senderId;
    this.senderHex = hex(senderId);
    this.#kid = kidOf(senderId);
    this.#cipher = derive(key.sealingRoot, senderId);
  }

  /** Whether its counters are used up, so that another sender must be drawn. */
  get spent(): boolean {
    return this.#counter >= MAX_COUNTER;
  }

  /** How many counters are used: the next one. */
  get used(): number {
    return this.#counter;
  }

  /** Take the next counter at once; the body follows. */
  seal(meta: Bytes, plain: Bytes): { counter: number; body: Promise<Bytes> } {
    const counter = this.#counter++;
    return { counter, body: this.#seal(counter, meta, plain) };
  }

  async #seal(counter: number, meta: Bytes, plain: Bytes): Promise<Bytes> {
    const { key, salt } = await this.#cipher;
    const head = header(this.#kid, counter);
    const sealed = await crypto.subtle.encrypt(
      { name: "AES-GCM", iv: nonce(salt, counter), additionalData: concat(head, meta), tagLength: 8 * TAG_BYTES },
      key, plain,
    );
    return concat(head, new Uint8Array(sealed));
  }
}

export interface Opened {
  readonly counter: number;
  readonly plain: Bytes;
}

/** Opens what any holder of the given keys sealed. */
export class Openers {
  readonly #ciphers = new Map<string, Promise<Cipher>>();

  /** Return the counter and the plain text of `body`. Raises OpenError, for whatever reason. */
  async open(key: ClusterKey, senderId: Bytes, meta: Bytes, body: Bytes): Promise<Opened> {
    const [counter, size] = readHeader(body, kidOf(senderId));
    const { key: cipher, salt } = await this.#cipher(key, senderId);
    try {
      const plain = await crypto.subtle.decrypt(
        {
          name: "AES-GCM", iv: nonce(salt, counter), additionalData: concat(body.subarray(0, size), meta),
          tagLength: 8 * TAG_BYTES,
        },
        cipher, body.subarray(size),
      );
      return { counter, plain: new Uint8Array(plain) };
    } catch (error) {
      if (error instanceof DOMException) throw new OpenError();
      throw error;
    }
  }

  #cipher(key: ClusterKey, senderId: Bytes): Promise<Cipher> {
    const name = key.idHex + hex(senderId);
    let cipher = this.#ciphers.get(name);
    if (cipher) this.#ciphers.delete(name); // so that it is the one used last
    else {
      cipher = derive(key.sealingRoot, senderId);
      if (this.#ciphers.size >= MAX_OPENERS) this.#ciphers.delete(this.#ciphers.keys().next().value!);
    }
    this.#ciphers.set(name, cipher);
    return cipher;
  }
}

/** Return the counter of a body, and the bytes of its header. Raises OpenError unless it is the shortest, of `kid`. */
function readHeader(body: Bytes, kid: bigint): [counter: number, size: number] {
  const config = body[0];
  if (config === undefined) throw new OpenError();
  let at = 1;
  const field = (bits: number): bigint => {
    if (bits < 8) return BigInt(bits);
    const size = (bits & 7) + 1;
    let value = 0n;
    for (let i = 0; i < size; i++) value = (value << 8n) | BigInt(body[at + i] ?? 0);
    at += size;
    return value;
  };
  const found = field(config >> 4);
  const counter = field(config & 15);
  if (found !== kid || counter >= MAX_COUNTER || body.length < at + TAG_BYTES) throw new OpenError();
  const shortestHead = header(found, Number(counter));
  if (shortestHead.length !== at || shortestHead.some((byte, i) => byte !== body[i])) throw new OpenError();
  return [Number(counter), at];
}

/** Kinds whose metadata ends with the line of what they answer. */
export const ANSWER_KINDS: ReadonlySet<number> = new Set([Kind.REPLY, Kind.FAULT, Kind.ANSWER]);
