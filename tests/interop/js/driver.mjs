// Runs what a test asks of the JavaScript client: one JSON object a line, {id, code, args}. `code` is the body of an async
// function with the parameters iris (the module), s (what the test keeps between its calls) and args.
import { createInterface } from "node:readline";
import * as iris from "../../../clients/js/dist/iris.js";

const AsyncFunction = (async () => undefined).constructor;
const states = new Map();

const text = (bytes) => new TextDecoder().decode(bytes);
const until = async (condition, what = String(condition)) => {
  for (let i = 0; !(await condition()); i++) {
    if (i > 4000) throw new Error(`never: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
};

/** What JSON can say: bytes as text. */
function plain(value) {
  if (value instanceof Uint8Array) return text(value);
  if (typeof value === "bigint") return JSON.rawJSON(String(value));
  if (JSON.isRawJSON(value)) return value;
  if (value instanceof Date) return value.toISOString();
  if (value instanceof Map) return [...value].map(plain);
  if (Array.isArray(value)) return value.map(plain);
  if (value instanceof Error) {
    const { name, message, mayHaveRun, code, details } = value;
    return plain({ name, message, mayHaveRun, code, details });
  }
  if (typeof value === "object" && value !== null) {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]));
  }
  return value;
}

async function run({ id, state, code, args }) {
  if (!states.has(state)) states.set(state, {});
  let answer;
  try {
    const result = await new AsyncFunction("iris", "s", "args", "until", "text", code)(iris, states.get(state), args, until, text);
    answer = { id, result: plain(result) ?? null };
  } catch (error) {
    answer = { id, error: { ...plain(error), stack: error?.stack } };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

for await (const line of createInterface({ input: process.stdin })) void run(JSON.parse(line));
process.exit(0);
