import { type Bytes } from "../src/bytes.ts";
export declare const HEX: Map<string, Bytes>;
export declare const JSON_OF: Map<string, any>;
