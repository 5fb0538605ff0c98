/** Noise_NNpsk0_25519_AESGCM_SHA256 (Noise Protocol Framework, revision 34) for tunnels (docs/protocol.md §11). */

import { concat, EMPTY, hmac, sha256, utf8, view, type Bytes } from "./bytes.ts";
import { OpenError } from "./errors.ts";
import type { ClusterKey } from "./keys.ts";
import { Kind } from "./frames.ts";
import { Share } from "./x25519.ts";

const NAME = utf8("Noise_NNpsk0_25519_AESGCM_SHA256"); // 32 bytes, so it is the first hash itself
const TAG_BYTES = 16;
export const HANDSHAKE_BYTES = 48;

export function prologue(name: string, keyId: Bytes, tunnelId: Bytes): Bytes {
  return concat(utf8("iris-tunnel-1"), Uint8Array.of(Kind.TUNNEL_OPEN), utf8(name), keyId, tunnelId);
}

async function hkdf(chaining: Bytes, input: Bytes, outputs: 2 | 3): Promise<Bytes[]> {
  const secret = await hmac("SHA-256", chaining, input);
  const found: Bytes[] = [];
  for (let i = 1; i <= outputs; i++) {
    found.push(await hmac("SHA-256", secret, concat(found.at(-1) ?? EMPTY, Uint8Array.of(i))));
  }
  return found;
}

/** One direction's transport, or the cipher of the handshake. Nonces count up from 0. */
export class CipherState {
  readonly #key: CryptoKey;
  #nonce = 0n;

  private constructor(key: CryptoKey) {
    this.#key = key;
  }

  static async of(key: Bytes): Promise<CipherState> {
    return new CipherState(await crypto.subtle.importKey("raw", key, "AES-GCM", false, ["encrypt", "decrypt"]));
  }

  #parameters(associated: Bytes): AesGcmParams {
    const iv = new Uint8Array(12);
    view(iv).setBigUint64(4, this.#nonce++);
    return { name: "AES-GCM", iv, additionalData: associated, tagLength: 8 * TAG_BYTES };
  }

  /** Takes its nonce at once, so calls may overlap. */
  async encrypt(plain: Bytes, associated: Bytes = EMPTY): Promise<Bytes> {
    return new Uint8Array(await crypto.subtle.encrypt(this.#parameters(associated), this.#key, plain));
  }

  /** Takes its nonce at once. Raises OpenError. */
  async decrypt(sealed: Bytes, associated: Bytes = EMPTY): Promise<Bytes> {
    const parameters = this.#parameters(associated);
    try {
      return new Uint8Array(await crypto.subtle.decrypt(parameters, this.#key, sealed));
    } catch (error) {
      if (error instanceof DOMException) throw new OpenError();
      throw error;
    }
  }
}

export interface Transport {
  readonly send: CipherState;
  readonly receive: CipherState;
}

/** The symmetric state of a handshake. */
class Symmetric {
  #chaining: Bytes = NAME;
  #hash: Bytes = NAME;
  #cipher: CipherState | null = null;

  async mixHash(data: Bytes): Promise<void> {
    this.#hash = await sha256(concat(this.#hash, data));
  }

  async mixKey(input: Bytes): Promise<void> {
    const [chaining, key] = await hkdf(this.#chaining, input, 2);
    this.#chaining = chaining!;
    this.#cipher = await CipherState.of(key!);
  }

  async mixKeyAndHash(input: Bytes): Promise<void> {
    const [chaining, hash, key] = await hkdf(this.#chaining, input, 3);
    this.#chaining = chaining!;
    await this.mixHash(hash!);
    this.#cipher = await CipherState.of(key!);
  }

  /** The token e: with a PSK, the ephemeral share is mixed into the key, too. */
  async mixShare(share: Bytes): Promise<void> {
    await this.mixHash(share);
    await this.mixKey(share);
  }

  async encryptEmpty(): Promise<Bytes> {
    const tag = await this.#cipher!.encrypt(EMPTY, this.#hash);
    await this.mixHash(tag);
    return tag;
  }

  async decryptEmpty(tag: Bytes): Promise<void> {
    const plain = await this.#cipher!.decrypt(tag, this.#hash);
    if (plain.length) throw new OpenError();
    await this.mixHash(tag);
  }

  async split(opener: boolean): Promise<Transport> {
    const [first, second] = await hkdf(this.#chaining, EMPTY, 2);
    const [one, two] = [await CipherState.of(first!), await CipherState.of(second!)];
    return opener ? { send: one, receive: two } : { send: two, receive: one };
  }
}

/** The opener's side: `message` is the first handshake message; `finish` reads the second. */
export class Opening {
  readonly message: Bytes;
  readonly #state: Symmetric;
  readonly #share: Share;

  private constructor(message: Bytes, state: Symmetric, share: Share) {
    this.message = message;
    this.#state = state;
    this.#share = share;
  }

  static async begin(key: ClusterKey, head: Bytes, share?: Share): Promise<Opening> {
    const own = share ?? (await Share.draw());
    const state = new Symmetric();
    await state.mixHash(head);
    await state.mixKeyAndHash(key.tunnelPsk);
    await state.mixShare(own.publicShare);
    return new Opening(concat(own.publicShare, await state.encryptEmpty()), state, own);
  }

  /** Raises OpenError or SealError. */
  async finish(message: Bytes): Promise<Transport> {
    if (message.length !== HANDSHAKE_BYTES) throw new OpenError();
    const share = message.slice(0, 32);
    await this.#state.mixShare(share);
    await this.#state.mixKey(await this.#share.agree(share));
    await this.#state.decryptEmpty(message.subarray(32));
    return this.#state.split(true);
  }
}

/** The member's side: read the first message, and return the second. Raises OpenError or SealError. */
export async function accept(
  key: ClusterKey, head: Bytes, message: Bytes, share?: Share,
): Promise<{ message: Bytes; transport: Transport }> {
  if (message.length !== HANDSHAKE_BYTES) throw new OpenError();
  const state = new Symmetric();
  const theirs = message.slice(0, 32);
  await state.mixHash(head);
  await state.mixKeyAndHash(key.tunnelPsk);
  await state.mixShare(theirs);
  await state.decryptEmpty(message.subarray(32));
  const own = share ?? (await Share.draw());
  await state.mixShare(own.publicShare);
  await state.mixKey(await own.agree(theirs));
  const tag = await state.encryptEmpty();
  return { message: concat(own.publicShare, tag), transport: await state.split(false) };
}
