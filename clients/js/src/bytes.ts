/** Byte strings: the few operations that every module needs. */

/** Bytes that own an ordinary buffer, as WebCrypto requires. */
export type Bytes = Uint8Array<ArrayBuffer>;

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export const EMPTY: Bytes = new Uint8Array(0);

export function utf8(text: string): Bytes {
  return encoder.encode(text) as Bytes;
}

/** Return the text in `bytes`. Raises TypeError if they are not UTF-8. */
export function text(bytes: Uint8Array): string {
  return decoder.decode(bytes);
}

export function concat(...parts: readonly Uint8Array[]): Bytes {
  let size = 0;
  for (const part of parts) size += part.length;
  const joined = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}

export function view(bytes: Uint8Array): DataView {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

export function equal(a: Uint8Array, b: Uint8Array): boolean {
  if (a.length !== b.length) return false;
  let difference = 0;
  for (let i = 0; i < a.length; i++) difference |= a[i]! ^ b[i]!;
  return difference === 0;
}

const digits = Array.from({ length: 256 }, (_, i) => i.toString(16).padStart(2, "0"));

export function hex(bytes: Uint8Array): string {
  let out = "";
  for (const byte of bytes) out += digits[byte];
  return out;
}

export function unhex(text: string): Bytes {
  if (text.length % 2 || /[^0-9a-fA-F]/.test(text)) throw new TypeError("not a hexadecimal string");
  return Uint8Array.from({ length: text.length / 2 }, (_, i) => parseInt(text.slice(2 * i, 2 * i + 2), 16));
}

/** Return the bytes that `text` writes in base64 or base64url, with or without padding. Raises TypeError. */
export function unbase64(text: string): Bytes {
  let binary: string;
  try {
    binary = atob(text.replaceAll("-", "+").replaceAll("_", "/").replace(/=+$/, ""));
  } catch {
    throw new TypeError("not base64");
  }
  return Uint8Array.from(binary, (char) => char.charCodeAt(0));
}

export function base64(bytes: Uint8Array): string {
  return btoa(String.fromCharCode(...bytes));
}

export function u16(value: number): Bytes {
  return Uint8Array.of(value & 0xff, value >>> 8);
}

export function u32(value: number): Bytes {
  const bytes = new Uint8Array(4);
  view(bytes).setUint32(0, value, true);
  return bytes;
}

/** `value` as 8 little-endian bytes. */
export function u64(value: number | bigint): Bytes {
  const bytes = new Uint8Array(8);
  view(bytes).setBigUint64(0, BigInt(value), true);
  return bytes;
}

export function random(count: number): Bytes {
  return crypto.getRandomValues(new Uint8Array(count));
}

export async function sha256(bytes: Bytes): Promise<Bytes> {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
}

export async function hmac(hash: "SHA-256" | "SHA-512", key: Bytes, data: Bytes): Promise<Bytes> {
  // WebCrypto refuses an empty key. HMAC pads keys with zeros, so one zero byte is the same key.
  const imported = await crypto.subtle.importKey(
    "raw", key.length ? key : new Uint8Array(1), { name: "HMAC", hash }, false, ["sign"],
  );
  return new Uint8Array(await crypto.subtle.sign("HMAC", imported, data));
}

/** HKDF (RFC 5869): extract with `salt`, expand with `info` to `size` bytes. */
export async function hkdf(secret: Bytes, salt: Bytes, info: Bytes, size: number): Promise<Bytes> {
  const key = await crypto.subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
  return new Uint8Array(
    await crypto.subtle.deriveBits({ name: "HKDF", hash: "SHA-256", salt, info }, key, 8 * size),
  );
}
