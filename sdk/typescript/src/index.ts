// SPDX-License-Identifier: Apache-2.0
// Client of a Tandem cluster:
//
//   const client = new Client({ address: "127.0.0.1:50051" });
//   for await (const delta of client.generate({ text: "Once upon a time" })) {
//     process.stdout.write(delta.text);
//   }
//
// Messages are those of proto/tandem/v1/inference.proto, which says what each
// field means.

import { readFileSync } from "node:fs";

import * as grpc from "@grpc/grpc-js";

import { readDetails } from "./details.js";
import {
  type DeepPartial,
  DetokenizeRequest,
  type DetokenizeResponse,
  type GenerateDelta,
  GenerateOnceResponse,
  GenerateRequest,
  type GenerateResponse,
  GeneratedSequence,
  GetModelRequest,
  InferenceServiceClient,
  ListModelsRequest,
  type ModelInfo,
  TokenizeRequest,
  type TokenizeResponse,
  ToolCall,
  type ToolCallDelta,
} from "./gen/tandem/v1/inference.js";

export * from "./gen/tandem/v1/inference.js";
export { FinishReason } from "./gen/tandem/v1/generation.js";

// Only what was refused before it began is tried again (gRFC A6): the server
// sends no header before it has admitted a request.
const SERVICE_CONFIG = JSON.stringify({
  loadBalancingConfig: [],
  methodConfig: [
    {
      name: [{ service: "tandem.v1.InferenceService" }],
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.2s",
        maxBackoff: "2s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
});

/** How to reach a router. What is absent comes from the environment. */
export interface Options {
  address?: string; // TANDEM_ADDRESS, else 127.0.0.1:50051
  apiKey?: string; // TANDEM_API_KEY
  /** PEM files. A CA means TLS; certificate and key, mutual TLS. */
  ca?: string; // TANDEM_CA
  cert?: string; // TANDEM_CERT
  key?: string; // TANDEM_KEY
  /** Of calls that are given none; absent: the server's own limit. */
  timeoutMs?: number;
}

export interface CallOptions {
  timeoutMs?: number;
  /** Stops the call, and the work behind it, when aborted. */
  signal?: AbortSignal;
}

/** A call that failed: the gRPC status, and what its ErrorInfo says. */
export class TandemError extends Error {
  /** "INVALID_ARGUMENT" */
  readonly code: string;
  /** "FIELD_INVALID"; empty where the server did not say. */
  readonly reason: string;
  readonly metadata: Record<string, string>;
  /** Milliseconds after which a retry may succeed. */
  readonly retryAfterMs: number | undefined;

  constructor(error: grpc.ServiceError) {
    const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
    const details = readDetails(bytes instanceof Buffer ? bytes : Buffer.alloc(0));
    const code = grpc.status[error.code] ?? "UNKNOWN";
    super(`${code}${details.reason && ` (${details.reason})`}: ${error.details}`);
    this.name = "TandemError";
    this.code = code;
    this.reason = details.reason;
    this.metadata = details.metadata;
    this.retryAfterMs = details.retryAfterMs;
  }
}

function cancelled(details: string): TandemError {
  const code = grpc.status.CANCELLED;
  const metadata = new grpc.Metadata();
  return new TandemError(Object.assign(new Error(details), { code, details, metadata }));
}

/** Adds the pieces of calls to the calls that they belong to. */
function joinToolCalls(pieces: ToolCallDelta[], calls: ToolCall[]): void {
  for (const piece of pieces) {
    const call = (calls[piece.index] ??= ToolCall.fromPartial({}));
    call.id ||= piece.id;
    call.name ||= piece.name;
    call.arguments_json += piece.arguments_json;
  }
}

/** Deltas as they come. Iterate once, or `collect`. */
export class Stream implements AsyncIterable<GenerateDelta> {
  /** What is known so far: `started` from the first delta on, `done` and the
   * sequences after the last. */
  readonly answer: GenerateOnceResponse = GenerateOnceResponse.fromPartial({});
  readonly #call: grpc.ClientReadableStream<GenerateResponse>;
  #error: Error | undefined;
  readonly #sequences = new Map<number, GeneratedSequence>();

  constructor(call: grpc.ClientReadableStream<GenerateResponse>, signal?: AbortSignal) {
    this.#call = call;
    // It may come, with the stream's end, before anybody iterates.
    call.on("error", (error: Error) => {
      this.#error = error;
    });
    const stop = () => call.cancel();
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
    call.once("close", () => signal?.removeEventListener("abort", stop));
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<GenerateDelta, void, void> {
    try {
      for await (const event of this.#call) {
        const delta = this.#add(event as GenerateResponse);
        if (delta) yield delta;
      }
      if (this.#error) throw this.#error;
    } catch (error) {
      if (error instanceof Error && "code" in error && "details" in error) {
        throw new TandemError(error as grpc.ServiceError);
      }
      // Node's word for a stream whose loop was left before.
      if (error instanceof Error && error.name === "AbortError") {
        throw cancelled("cancelled by this client");
      }
      throw error;
    } finally {
      // Also where the loop around it was left.
      this.#call.cancel();
    }
  }

  /** The whole answer. Leaving a loop over this early stops the work. */
  async collect(): Promise<GenerateOnceResponse> {
    for await (const _ of this);
    return this.answer;
  }

  cancel(): void {
    this.#call.cancel();
  }

  #add(event: GenerateResponse): GenerateDelta | undefined {
    if (event.request_id) this.answer.request_id = event.request_id;
    if (event.started) this.answer.started = event.started;
    if (event.prompt_logprobs) {
      this.answer.prompt_logprobs.push(...event.prompt_logprobs.tokens);
    }
    if (event.finished) this.#sequence(event.finished.index).finished = event.finished;
    if (event.done) {
      this.answer.done = event.done;
      const inOrder = [...this.#sequences.values()].sort((a, b) => a.index - b.index);
      this.answer.sequences.push(...inOrder);
    }
    if (event.delta) {
      const sequence = this.#sequence(event.delta.index);
      sequence.text += event.delta.text;
      sequence.reasoning_content += event.delta.reasoning_content;
      sequence.token_ids.push(...event.delta.token_ids);
      sequence.logprobs.push(...event.delta.logprobs);
      sequence.attention.push(...event.delta.attention);
      joinToolCalls(event.delta.tool_calls, sequence.tool_calls);
    }
    return event.delta;
  }

  #sequence(index: number): GeneratedSequence {
    let sequence = this.#sequences.get(index);
    if (!sequence) {
      sequence = GeneratedSequence.fromPartial({ index });
      this.#sequences.set(index, sequence);
    }
    return sequence;
  }
}

type Unary<Request, Response> = (
  request: Request,
  metadata: grpc.Metadata,
  options: Partial<grpc.CallOptions>,
  callback: (error: grpc.ServiceError | null, response: Response) => void,
) => grpc.ClientUnaryCall;

/** One connection. Calls that fail throw TandemError. */
export class Client {
  readonly #stub: InferenceServiceClient;
  readonly #metadata = new grpc.Metadata();
  readonly #timeoutMs: number | undefined;
  readonly #running = new Set<grpc.Call>();
  #closed = false;

  constructor(options: Options = {}) {
    const env = process.env;
    const ca = options.ca ?? env.TANDEM_CA;
    const cert = options.cert ?? env.TANDEM_CERT;
    const key = options.key ?? env.TANDEM_KEY;
    const apiKey = options.apiKey ?? env.TANDEM_API_KEY;
    if (!cert !== !key) throw new Error("cert and key (TANDEM_CERT, TANDEM_KEY) go together");
    if (cert && !ca) throw new Error("cert (TANDEM_CERT) needs ca (TANDEM_CA)");
    const read = (path?: string) => (path ? readFileSync(path) : null);
    this.#stub = new InferenceServiceClient(
      options.address ?? (env.TANDEM_ADDRESS || "127.0.0.1:50051"),
      ca
        ? grpc.credentials.createSsl(read(ca), read(key), read(cert))
        : grpc.credentials.createInsecure(),
      {
        "grpc.service_config": SERVICE_CONFIG,
        // A long prompt is a long silence.
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_timeout_ms": 10_000,
        "grpc.max_receive_message_length": 64 << 20,
      },
    );
    if (apiKey) this.#metadata.set("authorization", `Bearer ${apiKey}`);
    this.#timeoutMs = options.timeoutMs;
  }

  /** Ends what still runs with CANCELLED, and so do calls after it. */
  close(): void {
    this.#closed = true;
    for (const call of this.#running) call.cancel();
    this.#stub.close();
  }

  generate(request: DeepPartial<GenerateRequest>, options: CallOptions = {}): Stream {
    const call = this.#stub.generate(
      GenerateRequest.fromPartial(request),
      this.#metadata,
      this.#call(options),
    );
    this.#running.add(call);
    call.once("status", () => this.#running.delete(call));
    return new Stream(call, options.signal);
  }

  generateOnce(
    request: DeepPartial<GenerateRequest>,
    options: CallOptions = {},
  ): Promise<GenerateOnceResponse> {
    return this.#unary(
      this.#stub.generateOnce.bind(this.#stub),
      GenerateRequest.fromPartial(request),
      options,
    );
  }

  tokenize(
    request: DeepPartial<TokenizeRequest>,
    options: CallOptions = {},
  ): Promise<TokenizeResponse> {
    return this.#unary(
      this.#stub.tokenize.bind(this.#stub),
      TokenizeRequest.fromPartial(request),
      options,
    );
  }

  detokenize(
    request: DeepPartial<DetokenizeRequest>,
    options: CallOptions = {},
  ): Promise<DetokenizeResponse> {
    return this.#unary(
      this.#stub.detokenize.bind(this.#stub),
      DetokenizeRequest.fromPartial(request),
      options,
    );
  }

  async listModels(options: CallOptions = {}): Promise<ModelInfo[]> {
    const answer = await this.#unary(
      this.#stub.listModels.bind(this.#stub),
      ListModelsRequest.fromPartial({}),
      options,
    );
    return answer.models;
  }

  async getModel(model = "", options: CallOptions = {}): Promise<ModelInfo | undefined> {
    const answer = await this.#unary(
      this.#stub.getModel.bind(this.#stub),
      GetModelRequest.fromPartial({ model }),
      options,
    );
    return answer.model;
  }

  #call(options: CallOptions): Partial<grpc.CallOptions> {
    if (this.#closed) throw cancelled("the client is closed");
    const timeoutMs = options.timeoutMs ?? this.#timeoutMs;
    return timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
  }

  #unary<Request, Response>(
    method: Unary<Request, Response>,
    request: Request,
    options: CallOptions,
  ): Promise<Response> {
    return new Promise((resolve, reject) => {
      const call = method(request, this.#metadata, this.#call(options), (error, response) => {
        options.signal?.removeEventListener("abort", stop);
        this.#running.delete(call);
        if (error) reject(new TandemError(error));
        else resolve(response);
      });
      this.#running.add(call);
      const stop = () => call.cancel();
      if (options.signal?.aborted) stop();
      options.signal?.addEventListener("abort", stop, { once: true });
    });
  }
}
