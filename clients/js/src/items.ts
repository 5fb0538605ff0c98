/** Items of a tunnel's records (docs/protocol.md §11). */

import { concat, EMPTY, u32, view, type Bytes } from "./bytes.ts";
import { PeerProtocolError } from "./errors.ts";

export const Item = {
  HEADERS: 0x01, CHUNK: 0x02, CREDIT: 0x03, FINISH: 0x04, CLOSE: 0x05, ABORT: 0x06, READY: 0x07, MOVED: 0x08,
} as const;
export const FIRST = 0x10;
export const LAST = 0x20;
/** Bytes of an item beside its own. */
export const ITEM_HEAD = 5;
/** What a chunk costs beside its bytes. */
export const CHUNK_COST = 64;
export const MAX_RECORD = 65_535;

const KNOWN: ReadonlySet<number> = new Set([
  ...Object.values(Item), Item.CHUNK | FIRST, Item.CHUNK | LAST, Item.CHUNK | FIRST | LAST,
]);

export interface TunnelItem {
  /** With FIRST and LAST, in chunks. */
  readonly type: number;
  readonly bytes: Bytes;
}

export function encodeItem(type: number, bytes: Bytes = EMPTY): Bytes {
  return concat(Uint8Array.of(type), u32(bytes.length), bytes);
}

/** Raises PeerProtocolError. */
export function decodeItems(plain: Bytes): TunnelItem[] {
  const fields = view(plain);
  const items: TunnelItem[] = [];
  for (let at = 0; at < plain.length; ) {
    if (plain.length - at < ITEM_HEAD) throw new PeerProtocolError("an item of a tunnel is cut short");
    const type = fields.getUint8(at);
    const size = fields.getUint32(at + 1, true);
    at += ITEM_HEAD;
    if (!KNOWN.has(type) || at + size > plain.length) throw new PeerProtocolError("a malformed item of a tunnel");
    items.push({ type, bytes: plain.subarray(at, at + size) });
    at += size;
  }
  return items;
}
