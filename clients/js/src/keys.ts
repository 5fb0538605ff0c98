/** Cluster keys and keyrings (docs/protocol.md §4). */

import { concat, equal, hex, hkdf, hmac, sha256, unbase64, utf8, view, EMPTY, type Bytes } from "./bytes.ts";
import { ConfigError, KeyringError } from "./errors.ts";
import { checkName } from "./names.ts";

export const NO_KEY: Bytes = new Uint8Array(16);

const PKCS8_ED25519 = Uint8Array.of(0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20);

/** The key of a cluster, and what follows from it. Make it with `ClusterKey.from`. The secret itself is not kept. */
export class ClusterKey {
  /** First 16 bytes of SHA-256 of the public key. */
  readonly id: Bytes;
  /** The same in hex, for maps. */
  readonly idHex: string;
  readonly publicKey: Bytes;
  // Private, so that a console or a log does not show them.
  readonly #sealingRoot: Bytes;
  readonly #tunnelPsk: Bytes;
  readonly #keyHashKey: Bytes;
  readonly #signer: CryptoKey;

  private constructor(
    id: Bytes, publicKey: Bytes, signer: CryptoKey, sealingRoot: Bytes, tunnelPsk: Bytes, keyHashKey: Bytes,
  ) {
    this.id = id;
    this.idHex = hex(id);
    this.publicKey = publicKey;
    this.#signer = signer;
    this.#sealingRoot = sealingRoot;
    this.#tunnelPsk = tunnelPsk;
    this.#keyHashKey = keyHashKey;
  }

  get sealingRoot(): Bytes {
    return this.#sealingRoot;
  }

  get tunnelPsk(): Bytes {
    return this.#tunnelPsk;
  }

  get keyHashKey(): Bytes {
    return this.#keyHashKey;
  }

  /** `secret` is 32 bytes, or the 48 characters of base64url of a key file. Raises KeyringError. */
  static async from(secret: Uint8Array | string): Promise<ClusterKey> {
    const bytes = secretBytes(secret);
    const derive = (info: string): Promise<Bytes> => hkdf(bytes, EMPTY, utf8(info), 32);
    const seed = await derive("iris-sign-1");
    // Only an extractable key shows its public part.
    const pkcs8 = concat(PKCS8_ED25519, seed);
    const shown = await crypto.subtle.importKey("pkcs8", pkcs8, "Ed25519", true, ["sign"]);
    const publicKey = unbase64((await crypto.subtle.exportKey("jwk", shown)).x!);
    const signer = await crypto.subtle.importKey("pkcs8", pkcs8, "Ed25519", false, ["sign"]);
    const id = (await sha256(publicKey)).slice(0, 16);
    return new ClusterKey(
      id, publicKey, signer, await derive("iris-seal-root-1"), await derive("iris-tunnel-psk-1"),
      await derive("iris-key-hash-1"),
    );
  }

  async sign(data: Bytes): Promise<Bytes> {
    return new Uint8Array(await crypto.subtle.sign("Ed25519", this.#signer, data));
  }

  /** Return the proof of this key for the session of a WELCOME. */
  prove(relayId: Bytes, sessionId: Bytes, challenge: Bytes): Promise<Bytes> {
    return this.sign(concat(utf8("iris-proof-1"), relayId, sessionId, challenge, this.id));
  }

  /** The hash of a record's key in the stream `uuid` (§19.4). */
  keyHash(uuid: Bytes, key: Bytes): Promise<Bytes> {
    return hmac("SHA-256", this.keyHashKey, concat(uuid, key));
  }

  /** The number by which a record's key chooses a partition of the stream whose partition 0 is `uuid` (§19.10). */
  async partitionHash(uuid: Bytes, key: Bytes): Promise<bigint> {
    const hash = await hmac("SHA-256", this.keyHashKey, concat(utf8("iris-partition-1"), uuid, key));
    return view(hash).getBigUint64(0, true);
  }

  /** Without secrets. */
  toString(): string {
    return `ClusterKey(${this.idHex.slice(0, 8)})`;
  }

  toJSON(): string {
    return this.toString();
  }
}

/**
 * Return the secret of the key of one topic and everything below it, derived from that of a key above (§4): what a login
 * handler gives to one person. Raises KeyringError, InvalidName.
 */
export async function topicSecret(secret: Uint8Array | string, topic: string): Promise<Uint8Array> {
  checkName(topic, "topic");
  return hkdf(secretBytes(secret), EMPTY, utf8(`iris-topic-key-1${topic}`), 32);
}

function secretBytes(secret: Uint8Array | string): Bytes {
  if (typeof secret !== "string") {
    if (secret.length !== 32) throw new KeyringError(`a key must have 32 bytes, not ${secret.length}`);
    return new Uint8Array(secret);
  }
  let bytes: Bytes;
  try {
    bytes = unbase64(secret);
  } catch {
    throw new KeyringError("a key is not base64url");
  }
  if (bytes.length !== 36) {
    throw new KeyringError("a cluster key must be written as 48 characters of base64url (32 bytes and a checksum)");
  }
  const key = bytes.slice(0, 32);
  if (view(bytes).getUint32(32) !== crc32(concat(utf8("cluster key"), key))) {
    throw new KeyringError("a cluster key is damaged, or a key of another kind: its checksum is wrong; copy it again");
  }
  return key;
}

/** CRC-32 as in zlib: any 32 bytes would be a key, so a text that was changed must not be one. */
function crc32(data: Bytes): number {
  let crc = ~0;
  for (const byte of data) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}

export async function verify(publicKey: Bytes, signature: Bytes, data: Bytes): Promise<boolean> {
  try {
    const key = await crypto.subtle.importKey("raw", publicKey, "Ed25519", false, ["verify"]);
    return await crypto.subtle.verify("Ed25519", key, signature, data);
  } catch (error) {
    if (error instanceof DOMException) return false; // not a point of the curve
    throw error;
  }
}

type Secret = Uint8Array | string;
type Secrets = Secret | readonly Secret[];

/** What `Keyring.from` takes: the tables of keyring.toml. Of several keys the first seals, and all open. */
export interface KeyringEntries {
  /** For every cluster and topic without an entry of its own. */
  readonly default?: Secrets;
  /** By the exact name of a cluster or stream. */
  readonly clusters?: Readonly<Record<string, Secrets>>;
  /** By a topic, for it and all topics below it; the longest prefix counts, by whole tokens. */
  readonly topics?: Readonly<Record<string, Secrets>>;
}

/** The keys of this program, by address. */
export class Keyring {
  readonly #default: readonly ClusterKey[];
  readonly #clusters: ReadonlyMap<string, readonly ClusterKey[]>;
  readonly #topics: ReadonlyMap<string, readonly ClusterKey[]>;
  readonly #byId = new Map<string, ClusterKey>();

  private constructor(
    fallback: readonly ClusterKey[], clusters: ReadonlyMap<string, readonly ClusterKey[]>,
    topics: ReadonlyMap<string, readonly ClusterKey[]>,
  ) {
    this.#default = fallback;
    this.#clusters = clusters;
    this.#topics = topics;
    for (const keys of [fallback, ...clusters.values(), ...topics.values()]) {
      for (const key of keys) this.#byId.set(key.idHex, key);
    }
  }

  /** A single secret is the key of every address. Raises KeyringError or InvalidName. */
  static async from(entries: KeyringEntries | Secret): Promise<Keyring> {
    const tables = typeof entries === "string" || entries instanceof Uint8Array ? { default: entries } : entries;
    const unknown = Object.keys(tables).find((name) => !["default", "clusters", "topics"].includes(name));
    if (unknown !== undefined) throw new ConfigError("a keyring may have only default, clusters and topics");
    const table = async (found: Readonly<Record<string, Secrets>> | undefined, what: string) => {
      const keys = new Map<string, readonly ClusterKey[]>();
      for (const [name, secrets] of Object.entries(found ?? {})) {
        checkName(name, what);
        keys.set(name, await load(secrets, name));
      }
      return keys;
    };
    return new Keyring(
      tables.default === undefined ? [] : await load(tables.default, "default"),
      await table(tables.clusters, "cluster"), await table(tables.topics, "topic"),
    );
  }

  /** Every key, once. */
  get all(): ClusterKey[] {
    return [...this.#byId.values()];
  }

  byId(id: Bytes): ClusterKey | undefined {
    return this.#byId.get(hex(id));
  }

  /** Keys of a cluster or stream; the first seals. Raises KeyringError if there are none. */
  clusterKeys(name: string): readonly ClusterKey[] {
    return need(this.#clusters.get(name) ?? this.#default, name);
  }

  /** Keys of a topic. Raises KeyringError if there are none. */
  topicKeys(topic: string): readonly ClusterKey[] {
    return need(this.#topic(topic), topic);
  }

  /** Whether `key` is one of the topic's. */
  opensTopic(topic: string, key: ClusterKey): boolean {
    return this.#topic(topic).includes(key);
  }

  opensCluster(name: string, key: ClusterKey): boolean {
    return (this.#clusters.get(name) ?? this.#default).includes(key);
  }

  /** Every key that a topic of the filter may have. Raises KeyringError if there are none. */
  filterKeys(filter: string): ClusterKey[] {
    const keys = new Set<ClusterKey>();
    const parts = filter.split(".");
    const fixed = parts.findIndex((part) => part === "*" || part === ">");
    const stem = fixed < 0 ? parts : parts.slice(0, fixed);
    for (const key of this.#topic(stem.join("."))) keys.add(key);
    for (const [prefix, found] of this.#topics) {
      const tokens = prefix.split(".");
      if (tokens.length > stem.length && mayReach(parts, tokens)) for (const key of found) keys.add(key);
    }
    return [...need([...keys], filter)];
  }

  #topic(topic: string): readonly ClusterKey[] {
    const tokens = topic.split(".");
    for (let count = tokens.length; count > 0; count--) {
      const found = this.#topics.get(tokens.slice(0, count).join("."));
      if (found) return found;
    }
    return this.#default;
  }
}

/** Whether a topic that the filter matches may begin with `prefix`. */
function mayReach(filter: readonly string[], prefix: readonly string[]): boolean {
  for (const [i, token] of prefix.entries()) {
    const part = filter[i];
    if (part === ">") return true;
    if (part === undefined || (part !== "*" && part !== token)) return false;
  }
  return true;
}

async function load(secrets: Secrets, name: string): Promise<ClusterKey[]> {
  const list = typeof secrets === "string" || secrets instanceof Uint8Array ? [secrets] : secrets;
  const keys: ClusterKey[] = [];
  for (const secret of list) {
    const key = await ClusterKey.from(secret).catch((error: unknown) => {
      if (error instanceof KeyringError) throw new KeyringError(`${name}: ${error.message}`);
      throw error;
    });
    if (keys.some((other) => equal(other.id, key.id))) throw new KeyringError(`${name}: a key is listed twice`);
    keys.push(key);
  }
  if (!keys.length) throw new KeyringError(`${name} has no keys`);
  return keys;
}

function need(keys: readonly ClusterKey[], name: string): readonly ClusterKey[] {
  if (!keys.length) throw new KeyringError(`the keyring has no key for '${name}'`);
  return keys;
}
