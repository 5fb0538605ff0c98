/**
 * All errors that this client raises. They have the names of the Python library:
 *
 *     IrisError
 *     ├── ConfigError            an option is wrong; the text names it
 *     │   └── KeyringError       the keyring lacks a key, or a key is malformed
 *     ├── InvalidName            a cluster, topic or filter name is not allowed
 *     ├── RelayUnavailable       no relay answered at the address
 *     ├── Closed                 your program closed the object that it uses; fix the call
 *     ├── MessageTooLarge        a message is over the limit and was not sent
 *     ├── DecodeError            a payload is not MessagePack
 *     │   └── EncodeError        a value cannot be sent; nothing was sent
 *     ├── SealError
 *     │   ├── OpenError          forged, damaged, spliced or sealed under another key
 *     │   ├── Replayed           a copy of a message that was accepted before
 *     │   └── Stale              too old to tell apart from a replay
 *     ├── RequestError           a request, push, survey or tunnel opening failed; see `mayHaveRun`
 *     │   ├── NoMembers, Overloaded, RequestTimeout, ConnectionLost, RelayError, RemoteError
 *     ├── StreamError            an operation on a durable stream failed; see `mayHaveRun`
 *     │   ├── NoStream, AmbiguousStream, OffsetConflict, StreamDamaged, StreamSuperseded, StreamUnavailable
 *     ├── TunnelBroken           the tunnel ended although neither side closed it
 *     └── ProtocolError
 *         ├── LocalProtocolError this program asked for something that the protocol or the relay does not allow
 *         └── PeerProtocolError  the peer sent bytes that the protocol does not allow
 *
 * Only RemoteError comes from a holder of the key. `mayHaveRun === false` of every other error is only as trustworthy
 * as the relays on the path. An aborted call rejects with the reason of its AbortSignal.
 */

export class IrisError extends Error {
  override name = "IrisError";
}

export class ConfigError extends IrisError {
  override name = "ConfigError";
}

export class KeyringError extends ConfigError {
  override name = "KeyringError";
}

export class InvalidName extends IrisError {
  override name = "InvalidName";
}

export class RelayUnavailable extends IrisError {
  override name = "RelayUnavailable";
}

export class Closed extends IrisError {
  override name = "Closed";
}

export class MessageTooLarge extends IrisError {
  override name = "MessageTooLarge";
}

export class DecodeError extends IrisError {
  override name = "DecodeError";
}

export class EncodeError extends DecodeError {
  override name = "EncodeError";
}

export class SealError extends IrisError {
  override name = "SealError";
}

/** The text never says which check failed. */
export class OpenError extends SealError {
  override name = "OpenError";
  constructor() {
    super("the message cannot be opened: it is forged, damaged or sealed under another key");
  }
}

export class Replayed extends SealError {
  override name = "Replayed";
}

export class Stale extends SealError {
  override name = "Stale";
}

/** A request, push, survey or tunnel opening to `cluster` failed. `mayHaveRun` is false if no handler has run. */
export class RequestError extends IrisError {
  override name = "RequestError";
  readonly cluster: string;
  readonly detail: string;
  readonly mayHaveRun: boolean;
  constructor(cluster: string, detail: string, mayHaveRun = true) {
    super(`${cluster}: ${detail}`);
    this.cluster = cluster;
    this.detail = detail;
    this.mayHaveRun = mayHaveRun;
  }
}

export class NoMembers extends RequestError {
  override name = "NoMembers";
  /** Milliseconds since the last member left; Infinity if that is not known. */
  readonly seenMs: number;
  constructor(cluster: string, detail: string, mayHaveRun = false, seenMs = Infinity) {
    super(cluster, detail, mayHaveRun);
    this.seenMs = seenMs;
  }
}

export class Overloaded extends RequestError {
  override name = "Overloaded";
  constructor(cluster: string, detail: string, mayHaveRun = false) {
    super(cluster, detail, mayHaveRun);
  }
}

export class RequestTimeout extends RequestError {
  override name = "RequestTimeout";
}

export class ConnectionLost extends RequestError {
  override name = "ConnectionLost";
}

export class RelayError extends RequestError {
  override name = "RelayError";
}

/** The member answered with an error, sealed with the cluster's key. `code` and `details` are those of its refusal. */
export class RemoteError extends RequestError {
  override name = "RemoteError";
  readonly code: string | null;
  readonly details: Record<string, unknown>;
  constructor(
    cluster: string, detail: string, mayHaveRun: boolean, code: string | null = null,
    details: Record<string, unknown> = {},
  ) {
    super(cluster, detail, mayHaveRun);
    this.code = code;
    this.details = details;
  }
}

/** An operation on a durable stream failed. `mayHaveRun` is false if nothing was stored or changed. */
export class StreamError extends IrisError {
  override name = "StreamError";
  readonly stream: string;
  readonly detail: string;
  readonly mayHaveRun: boolean;
  constructor(stream: string, detail: string, mayHaveRun = false) {
    super(`stream ${stream}: ${detail}`);
    this.stream = stream;
    this.detail = detail;
    this.mayHaveRun = mayHaveRun;
  }
}

export class NoStream extends StreamError {
  override name = "NoStream";
}

export class AmbiguousStream extends StreamError {
  override name = "AmbiguousStream";
}

/** The stream ends at offset `end`, not at the expected one. Nothing was stored. */
export class OffsetConflict extends StreamError {
  override name = "OffsetConflict";
  readonly end: number;
  constructor(stream: string, detail: string, end: number) {
    super(stream, detail);
    this.end = end;
  }
}

/** Another log has taken the place of the one that was used; the text names both. */
export class StreamSuperseded extends StreamError {
  override name = "StreamSuperseded";
}

export class StreamDamaged extends StreamError {
  override name = "StreamDamaged";
}

export class StreamUnavailable extends StreamError {
  override name = "StreamUnavailable";
}

export class TunnelBroken extends IrisError {
  override name = "TunnelBroken";
}

export class ProtocolError extends IrisError {
  override name = "ProtocolError";
}

export class LocalProtocolError extends ProtocolError {
  override name = "LocalProtocolError";
}

export class PeerProtocolError extends ProtocolError {
  override name = "PeerProtocolError";
}

/**
 * Throw this in a handler to refuse a message. It is not an IrisError: the client never raises it; the caller gets a
 * RemoteError with this code and these details.
 */
export class Refusal extends Error {
  override name = "Refusal";
  readonly code: string;
  readonly details: Record<string, unknown>;
  constructor(code: string, details: Record<string, unknown> = {}) {
    const shown = Object.entries(details).map(([key, value]) => `${key}=${JSON.stringify(value)}`);
    super(shown.length ? `${code} (${shown.join(", ")})` : code);
    if (!/^[A-Za-z][A-Za-z0-9_.-]{0,63}$/.test(code)) {
      throw new ConfigError(`the code of a refusal must be 1 to 64 of A-Z a-z 0-9 _ - . and begin with a letter: '${code}'`);
    }
    this.code = code;
    this.details = details;
  }
}
