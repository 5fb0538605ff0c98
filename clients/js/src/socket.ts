/** The WebSocket that carries a session (docs/protocol.md §18.1). */

import type { Bytes } from "./bytes.ts";
import { ConfigError, IrisError, LocalProtocolError, PeerProtocolError, RelayUnavailable } from "./errors.ts";
import type { Connected } from "./session.ts";

const SUBPROTOCOL = "iris.1";
const CONNECT_MS = 10_000;
/** Close codes after which the same client need not try again; after the last two, not with the same ticket. */
const HOPELESS: ReadonlySet<number> = new Set([1002, 1003, 1009, 4000, 4003, 4004]);

export function checkUrl(url: string): void {
  if (!/^wss?:\/\/./.test(url)) throw new ConfigError(`a relay is named ws://host:port or wss://host:port, not '${url}'`);
}

/** Return why no WebSocket was opened. A browser says the same of a relay that is away and of one that refuses the page. */
function unanswered(url: string): string {
  const origin = (globalThis as { location?: { origin?: string } }).location?.origin;
  const text = `no relay answered at ${url}; start one with: iris relay --listen ${url}`;
  if (!origin || origin === "null") return text;
  return `${text} --origin ${origin}; or a relay there refused this page, because it does not allow ${origin}: then its log has web.refused`;
}

/** Open a WebSocket to a relay. Raises RelayUnavailable, ConfigError, or what `signal` was aborted with. */
export function openSocket(url: string, signal?: AbortSignal): Promise<Connected> {
  return new Promise((resolve, reject) => {
    if (typeof WebSocket === "undefined") {
      reject(new ConfigError("this JavaScript runtime has no WebSocket; use Node 22 or newer, or a browser"));
      return;
    }
    let socket: WebSocket;
    try {
      socket = new WebSocket(url, SUBPROTOCOL);
    } catch (error) {
      reject(new ConfigError(`${url} is not an address of a relay: ${String(error)}`));
      return;
    }
    socket.binaryType = "arraybuffer";
    const give = (error: unknown): void => {
      stop();
      socket.close();
      reject(error);
    };
    const failed = (): void => give(new RelayUnavailable(unanswered(url)));
    const abort = (): void => give(signal!.reason);
    const timer = setTimeout(failed, CONNECT_MS);
    const stop = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
      socket.onopen = socket.onerror = socket.onclose = null;
    };
    socket.onerror = socket.onclose = failed;
    socket.onopen = () => {
      stop();
      resolve({
        port: {
          send: (bytes) => {
            if (socket.readyState === WebSocket.OPEN) socket.send(bytes);
          },
          get buffered() {
            return socket.bufferedAmount;
          },
          // Programs may say only 1000 and 3000 to 4999.
          close: (code, reason) => socket.close(code === 1000 ? 1000 : 3000 + (code % 1000), reason),
        },
        listen: (receive, closed) => listen(socket, receive, closed),
      });
    };
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort);
  });
}

function listen(socket: WebSocket, receive: (bytes: Bytes) => void, closed: (error: IrisError) => void): void {
  socket.onmessage = ({ data }: MessageEvent<unknown>) => {
    if (data instanceof ArrayBuffer) receive(new Uint8Array(data));
    else {
      socket.close(3003, "messages must be binary");
      closed(new PeerProtocolError("the relay sent a text message"));
    }
  };
  socket.onclose = ({ code, reason }) => {
    const text = `the relay closed the connection (${code}${reason && `: ${reason}`})`;
    closed(HOPELESS.has(code) ? new LocalProtocolError(text) : new IrisError(text));
  };
}
