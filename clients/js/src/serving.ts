/** The member's side of calls and broadcasts: one session's members (docs/protocol.md §10). */

import { base64, concat, hex, u32, utf8, view, type Bytes } from "./bytes.ts";
import { decodeBundle, encodeBundle, encodeHeaders, type Bundle } from "./bundle.ts";
import { clockDifference, monotonicUs, wallUs } from "./clock.ts";
import { DecodeError, EncodeError, OpenError, Refusal } from "./errors.ts";
import { decodeRun, encodeEnd, encodeData, Kind, Reason, type DataFrame, type Fields, type Int } from "./frames.ts";
import { FRESH_US, type Guard } from "./guard.ts";
import { encodePayload, Message } from "./messages.ts";
import { encode } from "./msgpack.ts";
import { notify } from "./notify.ts";
import { answersLine, type Opened } from "./sframe.ts";
import { checkResult, IncomingMessage, type Binding, type Handler, type Job, type Lane } from "./service.ts";
import type { Declared, Session } from "./session.ts";
import type { Trouble } from "./troubles.ts";

/** What a waiting message counts beside its body. */
const QUEUED_EXTRA = 256;
const MAX_DETAILS = 2048;
const LIBRARY = "js-0.1.0";

/** One session's members. */
export class Serving {
  readonly #session: Session;
  readonly #guard: Guard;
  readonly #members = new Map<Int, Binding>();
  /** Hop id of a call that runs -> what its caller's leaving aborts. */
  readonly #controllers = new Map<bigint, AbortController>();
  readonly #credit = new Map<Int, { hops: bigint[]; unstarted: bigint[] }>();
  readonly #idle: (() => void)[] = [];
  #active = 0;

  constructor(session: Session, guard: Guard) {
    this.#session = session;
    this.#guard = guard;
    session.onData([Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.CALLS], {
      open: (frame, declared) => this.#open(frame, declared),
      handle: (frame, declared, opened) => this.#calls(frame, declared, opened),
      overflow: (frame) => this.#refuse(frame, Reason.FULL),
    });
    session.onData([Kind.BROADCAST], {
      open: (frame, declared) => (declared.key ? session.open(declared, Kind.BROADCAST, frame.end, frame.body) : undefined),
      handle: (frame, declared, opened) => this.#broadcast(frame, declared, opened),
      overflow: () => undefined, // the next one's number shows how many
    });
    session.onControl(Kind.CALLER_LEFT, ({ hops }) => {
      for (const hop of hops as Int[]) this.#controllers.get(BigInt(hop))?.abort();
    });
    session.onEnd(() => {
      for (const controller of this.#controllers.values()) controller.abort();
      this.#members.clear();
    });
  }

  memberOf(number: Int): Binding | undefined {
    return this.#members.get(number);
  }

  /** Join as a member. */
  async join(binding: Binding): Promise<void> {
    const { service, keys } = binding;
    const kinds = new Map(service.kinds.map((kind) => [kind, {
      concurrency: service.concurrency, limit_bytes: service.limitBytes,
      ...(kind === Kind.REQUEST || kind === Kind.SURVEY ? { cancel: true } : {}),
    }]));
    const fields: Fields = { name: service.name, key_ids: keys.map((key) => key.id), kinds };
    if (service.methods) fields.methods = service.methods;
    await this.#session.asked(Kind.JOIN, fields, Kind.ACK, ({ member }) => {
      binding.since = ++this.#guard.epoch;
      this.#members.set(member as Int, binding);
    });
    await this.#session.asked(Kind.SETTLE, {}, Kind.ACK);
  }

  /** Leave, and return when nothing more comes. */
  async leave(binding: Binding): Promise<void> {
    for (const [member, other] of this.#members) {
      if (other === binding) {
        await this.#session.asked(Kind.LEAVE, { member }, Kind.ACK);
        this.#members.delete(member);
      }
    }
  }

  async leaveAll(): Promise<void> {
    await Promise.all([...new Set(this.#members.values())].map((binding) => this.leave(binding)));
  }

  /** Return when no handler runs for this session. */
  async idle(): Promise<void> {
    if (this.#active) await new Promise<void>((resolve) => this.#idle.push(resolve));
  }

  // -- calls -------------------------------------------------------------------------------------------------

  #open(frame: DataFrame, declared: Declared): Promise<unknown> | undefined {
    if (!declared.key) return undefined;
    if (frame.kind !== Kind.CALLS) return this.#session.open(declared, frame.kind, frame.end, frame.body);
    const end = encodeEnd(frame.sent, frame.timeout, 1, frame.first);
    return Promise.all(decodeRun(frame).map(({ body }) =>
      this.#session.open(declared, declared.kind, end, body).catch((error: unknown) => error)));
  }

  #calls(frame: DataFrame, declared: Declared, opened: unknown): void {
    if (frame.kind !== Kind.CALLS) {
      this.#call(frame, declared, opened);
      return;
    }
    decodeRun(frame).forEach((part, i) => {
      this.#call(partOf(frame, part.hop, part.body), declared, declared.key ? (opened as unknown[])[i] : undefined);
    });
  }

  #call(frame: DataFrame, declared: Declared, opened: unknown): void {
    const { kind, key, keyHex, name, senderHex, member } = declared;
    const binding = this.#members.get(member);
    if (!binding) {
      this.#refuse(frame, Reason.LEAVING);
      return;
    }
    const lane = binding.lanes.get(kind);
    if (!key || !lane || binding.service.name !== name || !binding.keys.includes(key) || opened instanceof OpenError) {
      this.#refuse(frame, Reason.UNREADABLE);
      return;
    }
    if (opened instanceof Error) throw opened;
    const size = frame.body.length + QUEUED_EXTRA;
    if (lane.bytes && lane.bytes + size > binding.service.limitBytes) {
      this.#refuse(frame, Reason.FULL);
      return;
    }
    const deadlineUs = frame.deadline ? Number(frame.deadline) + this.#session.clock.us : 0;
    if (deadlineUs && monotonicUs() > deadlineUs) {
      this.#refuse(frame, Reason.EXPIRED);
      return;
    }
    const { counter, plain } = opened as Opened;
    let bundle: Bundle;
    try {
      bundle = decodeBundle(plain, 1, true);
    } catch (error) {
      if (!(error instanceof OpenError)) throw error;
      this.#refuse(frame, Reason.UNREADABLE);
      return;
    }
    if (Math.abs(frame.sent - wallUs()) >= FRESH_US) {
      if (kind === Kind.PUSH) this.#refuse(frame, Reason.CLOCK);
      else this.#fault(frame.hop, declared, counter, "the clocks of caller and member differ by 600 s or more", false);
      return;
    }
    const service = kind === Kind.SURVEY ? name : "";
    switch (this.#guard.accept(keyHex, senderHex, service, counter, monotonicUs())) {
      case "replayed": this.#refuse(frame, Reason.REPLAYED); return;
      case "stale": this.#refuse(frame, Reason.STALE); return;
      case "full": this.#refuse(frame, Reason.FULL); return;
      case "new":
    }
    const { payload, headers } = bundle.entries[0]!;
    const message = new Message(payload, name, headers, bundle.packed, senderHex, bundle.method);
    lane.bytes += size;
    lane.queue.push({ kind, hop: frame.hop, frame, declared, counter, message, deadlineUs, size });
    this.#active++;
    this.#start(binding, lane);
  }

  #start(binding: Binding, lane: Lane): void {
    while (lane.running < binding.service.concurrency && lane.queue.length) {
      const job = lane.queue.shift()!;
      if (job.deadlineUs && monotonicUs() > job.deadlineUs) {
        if (job.kind === Kind.PUSH) this.#finish(job, true);
        else this.#refuse(job.frame, Reason.EXPIRED);
        this.#done(binding, lane, job);
        continue;
      }
      lane.running++;
      void this.#run(binding, job).finally(() => {
        lane.running--;
        this.#done(binding, lane, job);
        this.#start(binding, lane);
      });
    }
  }

  #done(_: Binding, lane: Lane, job: Job): void {
    lane.bytes -= job.size;
    if (!--this.#active) for (const resolve of this.#idle.splice(0)) resolve();
  }

  async #run(binding: Binding, job: Job): Promise<void> {
    const { kind, hop, declared, message, counter } = job;
    const handler = this.#handlerOf(binding, kind, message.method);
    if (!handler) {
      if (kind === Kind.PUSH) this.#finish(job, true);
      else {
        const text = message.method ? `${message.name} has no method '${message.method}'` : `${message.name} has only methods; name one`;
        this.#fault(hop, declared, counter, text, false, "no_method");
      }
      return;
    }
    const controller = new AbortController();
    this.#controllers.set(hop, controller);
    try {
      let value: unknown;
      try {
        value = message.value;
      } catch (error) {
        if (!(error instanceof DecodeError)) throw error;
        if (kind === Kind.PUSH) this.#finish(job, true);
        else this.#fault(hop, declared, counter, error.message, false, "bad_payload");
        return;
      }
      const result = checkResult(await handler(value, new IncomingMessage(message, controller.signal)));
      if (kind === Kind.PUSH) this.#finish(job, false);
      else this.#reply(job, result);
    } catch (error) {
      if (kind === Kind.PUSH) {
        binding.troubles.count("handler failed", message.name);
        console.error(`iris: the handler for pushes to ${message.name} raised`, error);
        this.#finish(job, false);
      } else if (error instanceof Refusal) {
        this.#fault(hop, declared, counter, error.message, true, error.code, error.details);
      } else {
        binding.troubles.count("handler failed", message.name);
        const name = error instanceof Error ? error.name : "Error";
        this.#fault(hop, declared, counter, `${name}: ${error instanceof Error ? error.message : String(error)}`, true);
      }
    } finally {
      this.#controllers.delete(hop);
    }
  }

  #handlerOf(binding: Binding, kind: number, method: string): Handler | undefined {
    if (method.startsWith("iris.") && kind !== Kind.PUSH) {
      if (method === "iris.ping") return () => new Uint8Array(0);
      if (method === "iris.describe") return () => this.#describe(binding);
      return undefined;
    }
    return binding.service.handlers.get(kind)?.get(method);
  }

  #describe(binding: Binding): unknown {
    const names = new Map<number, string>([
      [Kind.REQUEST, "request"], [Kind.PUSH, "push"], [Kind.SURVEY, "survey"], [Kind.BROADCAST, "broadcast"],
    ]);
    const handlers = [...binding.service.handlers].flatMap(([kind, methods]) =>
      [...methods].map(([name, handler]) => ({ kind: names.get(kind), name, function: handler.name })));
    if (binding.service.tunnelHandler) {
      handlers.push({ kind: "tunnel", name: "", function: binding.service.tunnelHandler.name });
    }
    const lanes = [...binding.lanes.values()];
    const sum = (of: (lane: Lane) => number): number => lanes.reduce((total, lane) => total + of(lane), 0);
    return {
      member: this.#idOf(binding), service: binding.service.name, version: binding.service.version,
      description: binding.service.description, handlers, running: sum((lane) => lane.running),
      queued: sum((lane) => lane.queue.length), uptime_s: (monotonicUs() - binding.startedUs) / 1e6, iris: LIBRARY,
      queued_bytes: sum((lane) => lane.bytes), dropped: Object.fromEntries(binding.dropped),
    };
  }

  #idOf(binding: Binding): string {
    for (const [member, other] of this.#members) if (other === binding) return `${hex(this.#session.relayId)}.${member}`;
    return "";
  }

  #memberId(declared: Declared): string {
    return `${hex(this.#session.relayId)}.${declared.member}`;
  }

  #reply(job: Job, result: unknown): void {
    const { kind, hop, declared, counter } = job;
    let encoded: ReturnType<typeof encodePayload>;
    try {
      encoded = encodePayload(result);
    } catch (error) {
      if (!(error instanceof EncodeError)) throw error;
      this.#fault(hop, declared, counter, `the reply cannot be sent: ${error.message}`, true);
      return;
    }
    const { payload, packed } = encoded;
    if (payload.length > this.#session.messageLimit) {
      this.#fault(hop, declared, counter, `the reply has ${payload.length} bytes, over the limit of ${this.#session.messageLimit}`, true);
      return;
    }
    const survey = kind === Kind.SURVEY;
    const headers = survey ? { "iris-member": this.#memberId(declared) } : undefined;
    this.#answer(survey ? Kind.ANSWER : Kind.REPLY, hop, declared, counter, payload, packed, headers);
  }

  #fault(
    hop: bigint, declared: Declared, counter: number, detail: string, ran: boolean, code = "",
    details: Record<string, unknown> = {},
  ): void {
    const headers: Record<string, string> = { "may-have-run": ran ? "1" : "0", member: this.#memberId(declared) };
    if (code) headers.code = code;
    if (Object.keys(details).length) {
      const packed = encode(details);
      if (packed.length <= MAX_DETAILS) headers.details = base64(packed);
    }
    const text = utf8(detail.toWellFormed().slice(0, 16_384));
    this.#answer(Kind.FAULT, hop, declared, counter, text, false, headers);
  }

  #answer(
    kind: number, hop: bigint, { name, key, senderId }: Declared, counter: number, payload: Bytes, packed: boolean,
    headers: Record<string, string> | undefined,
  ): void {
    if (this.#session.ended) return; // nobody can get it
    this.#session.beforeSend();
    const plain = encodeBundle([{ payload, headers: encodeHeaders(headers) }], packed);
    this.#session.seal({ kind, name, key: key! }, plain, { hop, line: answersLine(senderId, counter) });
  }

  /** Send a call back. */
  #refuse(frame: DataFrame, reason: number): void {
    if (this.#session.ended) return;
    const { kind, alias, hop, deadline, end, body } = frame;
    this.#session.outbox.push(encodeData(kind, alias, hop, deadline, end, body, 2 | (reason << 4)));
  }

  /** Credit a push, once per turn. */
  #finish({ declared: { member }, hop }: Job, unstarted: boolean): void {
    if (!this.#credit.size) queueMicrotask(() => this.#sendCredit());
    const credit = this.#credit.get(member) ?? { hops: [], unstarted: [] };
    this.#credit.set(member, credit);
    credit.hops.push(hop);
    if (unstarted) credit.unstarted.push(hop);
    if (credit.hops.length === 4096) this.#sendCredit();
  }

  #sendCredit(): void {
    for (const [member, { hops, unstarted }] of this.#credit) {
      if (this.#session.ended) break;
      const fields: Fields = { member, kind: Kind.PUSH, hops };
      if (unstarted.length) fields.unstarted = unstarted;
      this.#session.control(Kind.CREDIT, fields);
    }
    this.#credit.clear();
  }

  // -- broadcasts --------------------------------------------------------------------------------------------

  #broadcast(frame: DataFrame, declared: Declared, opened: unknown): void {
    const { name, key, keyHex, senderHex, member } = declared;
    const binding = this.#members.get(member);
    const lane = binding?.lanes.get(Kind.BROADCAST);
    if (!key || !binding || !lane || binding.service.name !== name || !binding.keys.includes(key)) {
      this.#session.count("broadcast for another member");
      return;
    }
    if (opened instanceof OpenError) {
      this.#lost(binding, declared, frame.count, "it does not open");
      return;
    }
    if (opened instanceof Error) throw opened;
    const sequence = this.#guard.sequence(sequenceOf(declared), keyHex, true, monotonicUs());
    if (!sequence) {
      this.#lost(binding, declared, frame.count, "too many senders to keep apart");
      return;
    }
    if (frame.first < sequence.next) {
      this.#session.count("broadcast that came before");
      return;
    }
    const missing = sequence.missing(frame.first);
    if (missing > 0 && binding.since <= sequence.epoch) this.#lost(binding, declared, missing, "missing on the way");
    sequence.next = frame.first + frame.count;
    sequence.epoch = this.#guard.epoch;
    if (Math.abs(frame.sent - wallUs()) >= FRESH_US) {
      this.#lost(binding, declared, frame.count, clockDifference(frame.sent));
      return;
    }
    let bundle: Bundle;
    try {
      bundle = decodeBundle((opened as Opened).plain, frame.count);
    } catch (error) {
      if (!(error instanceof OpenError)) throw error;
      this.#lost(binding, declared, frame.count, "the bundle does not decode");
      return;
    }
    for (const { payload, headers } of bundle.entries) {
      const size = payload.length + QUEUED_EXTRA;
      if (lane.bytes && lane.bytes + size > binding.service.limitBytes) {
        this.#lost(binding, declared, 1, "slow member", "queue full");
        continue;
      }
      lane.bytes += size;
      this.#active++;
      lane.queue.push({
        kind: Kind.BROADCAST, hop: 0n, frame, declared, counter: 0, deadlineUs: 0, size,
        message: new Message(payload, name, headers, bundle.packed, senderHex),
      });
    }
    this.#startBroadcasts(binding, lane);
  }

  #startBroadcasts(binding: Binding, lane: Lane): void {
    while (lane.running < binding.service.concurrency && lane.queue.length) {
      const job = lane.queue.shift()!;
      lane.running++;
      const handler = binding.service.handlers.get(Kind.BROADCAST)!.get("")!;
      const run = async (): Promise<void> => {
        try {
          checkResult(await handler(job.message.value, new IncomingMessage(job.message, new AbortController().signal)));
        } catch (error) {
          binding.troubles.count("handler failed", job.message.name);
          console.error(`iris: the handler for broadcasts to ${job.message.name} raised`, error);
        }
      };
      void run().finally(() => {
        lane.running--;
        this.#done(binding, lane, job);
        this.#startBroadcasts(binding, lane);
      });
    }
  }

  /** Handle a GAP of broadcasts. */
  gap(fields: Fields): void {
    const binding = this.#members.get(fields.member as Int);
    if (!binding) return;
    const keyHex = hex(fields.key_id as Bytes);
    const declared = { kind: Kind.BROADCAST, name: fields.name as string, keyHex, senderHex: hex(fields.sender_id as Bytes) };
    const sequence = this.#guard.sequence(sequenceOf(declared), keyHex, false, monotonicUs())!;
    const count = Number(fields.count);
    const first = Number(fields.first);
    if (count === 2 ** 32 - 1 && !first) {
      if (sequence.noteUnknown()) this.#lost(binding, declared, null, fields.cause as string);
    } else if (count) {
      const lost = sequence.noteLost(first, count, binding.since <= sequence.epoch);
      if (lost) this.#lost(binding, declared, lost, fields.cause as string);
    }
  }

  #lost(
    binding: Binding, { name, senderHex }: { name: string; senderHex: string }, count: number | null, cause: string,
    trouble: Trouble = count === null ? "uncounted" : "missing",
  ): void {
    binding.troubles.count(trouble, name, count ?? 1);
    binding.dropped.set(cause, (binding.dropped.get(cause) ?? 0) + (count ?? 1));
    if (binding.onLoss) notify(binding.onLoss, { kind: "broadcast" as const, name, source: senderHex, count, cause });
  }
}

function sequenceOf({ kind, name, keyHex, senderHex }: Pick<Declared, "kind" | "name" | "keyHex" | "senderHex">): string {
  return [kind, name, keyHex, senderHex].join("\0");
}

/** A part of a run as a frame of its own, which can be sent back: a run of one. */
function partOf(frame: DataFrame, hop: bigint, body: Bytes): DataFrame {
  const end = frame.end.slice();
  view(end).setUint32(12, 1, true);
  return { ...frame, hop, end, count: 1, body: concat(u32(body.length), body) };
}
