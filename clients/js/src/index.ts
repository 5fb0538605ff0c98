/** Iris for browsers and Node: see README.md. */

export * from "./errors.ts";
export { ClusterKey, Keyring, type KeyringEntries } from "./keys.ts";
