/** X25519 shares, by WebCrypto. */

import { concat, type Bytes } from "./bytes.ts";
import { SealError } from "./errors.ts";

const PKCS8_X25519 = Uint8Array.of(0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x6e, 4, 0x22, 4, 0x20);
const BASE_POINT = Uint8Array.of(9, ...new Uint8Array(31));

export class Share {
  readonly publicShare: Bytes;
  readonly #secret: CryptoKey;

  private constructor(secret: CryptoKey, publicShare: Bytes) {
    this.#secret = secret;
    this.publicShare = publicShare;
  }

  static async draw(): Promise<Share> {
    const pair = (await crypto.subtle.generateKey("X25519", false, ["deriveBits"])) as CryptoKeyPair;
    return new Share(pair.privateKey, new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey)));
  }

  /** Of 32 known bytes: for tests. */
  static async of(secret: Bytes): Promise<Share> {
    const key = await crypto.subtle.importKey("pkcs8", concat(PKCS8_X25519, secret), "X25519", false, ["deriveBits"]);
    return new Share(key, await agree(key, BASE_POINT));
  }

  /** Return the common secret with the other side's share. Raises SealError for a share of low order. */
  agree(other: Bytes): Promise<Bytes> {
    return agree(this.#secret, other);
  }
}

async function agree(secret: CryptoKey, other: Bytes): Promise<Bytes> {
  let bits: Bytes;
  try {
    const share = await crypto.subtle.importKey("raw", other, "X25519", false, []);
    bits = new Uint8Array(await crypto.subtle.deriveBits({ name: "X25519", public: share }, secret, 256));
  } catch (error) {
    if (error instanceof DOMException) throw new SealError("a share of X25519 is not allowed", { cause: error });
    throw error;
  }
  if (bits.every((byte) => !byte)) throw new SealError("a share of X25519 has low order");
  return bits;
}
