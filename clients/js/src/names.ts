/** Names of clusters, topics, groups and filters: grammar and matching (docs/protocol.md §14). */

import { utf8 } from "./bytes.ts";
import { InvalidName } from "./errors.ts";

const MAX_TOKENS = 32;
const MAX_BYTES = 255;
// No ".", "*", ">", white space, controls (C0, DEL, C1) or surrogates.
const TOKEN = /^[^.*>\p{White_Space}\u0000-\u001f\u007f-\u009f\ud800-\udfff]+$/u;
const UUID = /^[0-9a-f]{32}$/;
const METHOD = /^[A-Za-z][A-Za-z0-9_.-]{0,63}$/;

/** Raise InvalidName unless `name` may name a cluster, topic or queue group. `what` is for the error. */
export function checkName(name: string, what: string): void {
  const parts = checkSize(name, what);
  for (const part of parts) {
    if (!TOKEN.test(part)) throw new InvalidName(`${what} '${name}' has the token '${part}', which is not allowed`);
  }
}

export function checkFilter(filter: string): void {
  const parts = checkSize(filter, "filter");
  parts.forEach((part, i) => {
    if (part === "*" || (part === ">" && i === parts.length - 1) || TOKEN.test(part)) return;
    throw new InvalidName(`filter '${filter}' has the token '${part}', which is not allowed there`);
  });
}

/** As `checkName` for a queue group; undefined, null and "" mean none, for which it returns "". */
export function groupName(group: string | null | undefined): string {
  if (group === undefined || group === null || group === "") return "";
  checkName(group, "queue group");
  return group;
}

/** Raise InvalidName unless `uuid` is the uuid of a stream; undefined, null and "" mean none, for which it returns "". */
export function streamUuid(uuid: string | null | undefined): string {
  if (uuid === undefined || uuid === null || uuid === "") return "";
  if (typeof uuid !== "string" || !UUID.test(uuid)) throw new InvalidName(`'${shown(uuid)}' is not the uuid of a stream: 32 hex digits`);
  return uuid;
}

/** As `checkMethod`; undefined and null mean none, for which it returns "". */
export function methodName(method: string | null | undefined): string {
  if (method === undefined || method === null) return "";
  checkMethod(method);
  return method;
}

export function checkMethod(method: string): void {
  if (typeof method !== "string" || !METHOD.test(method)) {
    throw new InvalidName(`a method must be 1 to 64 of A-Z a-z 0-9 _ - . and begin with a letter: '${shown(method)}'`);
  }
}

/** What TypeScript does not let pass, but JavaScript does, as an error shows it. */
function shown(value: unknown): string {
  return typeof value === "string" ? value.slice(0, 80) : typeof value;
}

function checkSize(name: string, what: string): string[] {
  if (typeof name !== "string") throw new InvalidName(`a ${what} must be a string, not ${name === null ? "null" : typeof name}`);
  const parts = name.split(".");
  if (!name || utf8(name).length > MAX_BYTES) {
    throw new InvalidName(`a ${what} must have 1 to ${MAX_BYTES} bytes: '${name.slice(0, 80)}'`);
  }
  if (parts.length > MAX_TOKENS) throw new InvalidName(`a ${what} may have ${MAX_TOKENS} tokens: '${name}'`);
  return parts;
}

/** Split "eu:billing" into its site and its name. The site is "" for none, and "." for the local one. */
export function splitSite(address: string): [site: string, name: string] {
  checkSize(address, "cluster");
  const at = address.indexOf(":");
  const site = address.slice(0, Math.max(at, 0));
  const named = site === "." || /^[a-z][a-z0-9-]{0,31}$/.test(site);
  return named && at < address.length - 1 ? [site, address.slice(at + 1)] : ["", address];
}

export function matches(filter: string, topic: string): boolean {
  const parts = filter.split(".");
  const tokens = topic.split(".");
  for (const [i, part] of parts.entries()) {
    if (part === ">") return tokens.length > i;
    if (i >= tokens.length || (part !== "*" && part !== tokens[i])) return false;
  }
  return parts.length === tokens.length;
}
