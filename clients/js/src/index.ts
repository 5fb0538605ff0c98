/** Iris for browsers and Node: see README.md. */

export type { Headers } from "./bundle.ts";
export {
  Client, connect, type BroadcastOptions, type CastOptions, type ConnectOptions, type Members, type PushOptions,
  type RequestOptions, type SurveyOptions,
} from "./client.ts";
export * from "./errors.ts";
export { ClusterKey, Keyring, topicSecret, type KeyringEntries } from "./keys.ts";
export { Message, type Loss } from "./messages.ts";
export { Binding, IncomingMessage, Service, type Handler, type ServiceOptions, type TunnelHandler } from "./service.ts";
export { StreamMessage, Streams, type AppendOptions, type ReadOptions, type StreamGap } from "./streams.ts";
export { Subscription, type SubscribeOptions, type WhenFull } from "./subscriptions.ts";
export { Survey, type Answer } from "./survey.ts";
export { Tunnel } from "./tunnel.ts";
