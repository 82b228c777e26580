// SPDX-License-Identifier: Apache-2.0
// A list of cases (conformance.json, tools.json) through the TypeScript client,
// as it is packed, and the fold.json beside it:
//
//   node conformance.mjs ADDRESS CASES  (tandem-client beside it in node_modules)

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { Readable } from "node:stream";
import { isDeepStrictEqual } from "node:util";

import {
  Client,
  DetokenizeRequest,
  DetokenizeResponse,
  GenerateOnceResponse,
  GenerateRequest,
  GenerateResponse,
  GetModelResponse,
  ListModelsResponse,
  Stream,
  TandemError,
  TokenizeRequest,
  TokenizeResponse,
} from "tandem-client";

const path = process.argv[3];
const { cases } = JSON.parse(readFileSync(path, "utf8"));
const client = new Client({ address: process.argv[2] });

// Where `got` is not what conformance.json means by `want`; or "".
function differs(want, got, at = "") {
  const wrong = `${at}: ${JSON.stringify(got)}, not ${JSON.stringify(want)}`;
  if (typeof want === "number") {
    const number = got === undefined ? 0 : got;
    return typeof number === "number" && Math.abs(want - number) <= 1e-3 ? "" : wrong;
  }
  if (Array.isArray(want)) {
    if (!Array.isArray(got) || got.length !== want.length) return wrong;
    return want.map((item, i) => differs(item, got[i], `${at}[${i}]`)).find(Boolean) ?? "";
  }
  if (typeof want === "object") {
    if (typeof got !== "object") return wrong;
    return (
      Object.entries(want)
        .map(([key, value]) => differs(value, got[key], `${at}.${key}`))
        .find(Boolean) ?? ""
    );
  }
  return want === got ? "" : wrong;
}

// ts-proto writes JSON's own names; the list has the fields'.
function snake(value) {
  if (Array.isArray(value)) return value.map(snake);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(
    Object.entries(value).map(([key, inner]) => [
      key.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`),
      snake(inner),
    ]),
  );
}

async function answer(c) {
  const options = { timeoutMs: c.timeout_ms };
  switch (c.call) {
    case "generate": {
      const stream = client.generate(GenerateRequest.fromJSON(c.request), options);
      let deltas = 0;
      for await (const _ of stream) {
        if (++deltas === c.cancel_after_deltas) stream.cancel();
      }
      return GenerateOnceResponse.toJSON(stream.answer);
    }
    case "generate_once":
      return GenerateOnceResponse.toJSON(
        await client.generateOnce(GenerateRequest.fromJSON(c.request), options),
      );
    case "tokenize":
      return TokenizeResponse.toJSON(
        await client.tokenize(TokenizeRequest.fromJSON(c.request), options),
      );
    case "detokenize":
      return DetokenizeResponse.toJSON(
        await client.detokenize(DetokenizeRequest.fromJSON(c.request), options),
      );
    case "get_model":
      return GetModelResponse.toJSON({ model: await client.getModel("", options) });
    case "list_models":
      return ListModelsResponse.toJSON({ models: await client.listModels(options) });
    default:
      throw new Error(`no call ${c.call}`);
  }
}

async function verdict(c) {
  try {
    const got = snake(await answer(c));
    return c.error ? `no error, but ${JSON.stringify(got)}` : differs(c.expect, got);
  } catch (error) {
    if (!(error instanceof TandemError)) throw error;
    if (!c.error) return `failed: ${error.message}`;
    const { code, reason, metadata } = error;
    return differs(c.error, { code, reason, field: metadata.field ?? "" }, "error");
  }
}

// Of fold.json's events to the last field of their answer.
async function fold() {
  const file = join(dirname(path), "fold.json");
  const { events, answer: want } = JSON.parse(readFileSync(file, "utf8"));
  const call = Readable.from(events.map((event) => GenerateResponse.fromJSON(event)));
  call.cancel = () => {};
  const got = await new Stream(call).collect();
  return isDeepStrictEqual(got, GenerateOnceResponse.fromJSON(want))
    ? ""
    : `${JSON.stringify(GenerateOnceResponse.toJSON(got))}, not ${JSON.stringify(want)}`;
}

const LONG = {
  text: "a",
  sampling: { temperature: 0 },
  stopping: { max_tokens: 900, ignore_eos: true },
};

// What is not CANCELLED of the ends of `calls`; or "".
async function cancelled(calls) {
  for (const call of calls) {
    try {
      await call();
      return "no error";
    } catch (error) {
      if (!(error instanceof TandemError) || error.code !== "CANCELLED") return `${error.stack}`;
    }
  }
  return "";
}

async function collectLeft() {
  const stream = client.generate(LONG);
  for await (const _ of stream) break;
  return cancelled([() => stream.collect()]);
}

async function close() {
  const closed = new Client({ address: process.argv[2] });
  const deltas = closed.generate(LONG)[Symbol.asyncIterator]();
  await deltas.next();
  const once = closed.generateOnce(LONG);
  closed.close();
  closed.close();
  const rest = async () => {
    while (!(await deltas.next()).done);
  };
  return cancelled([
    () => once,
    rest,
    () => closed.generateOnce(LONG),
    async () => closed.generate(LONG).collect(),
  ]);
}

// The constructor throws for an address that says nothing.
async function defaults() {
  process.env.TANDEM_ADDRESS = "";
  try {
    new Client().close();
    return "";
  } catch (error) {
    return error.message;
  }
}

const start = Date.now();
let failed = 0;
function judge(name, wrong) {
  if (!wrong) return;
  failed += 1;
  console.log(`typescript: ${name}: ${wrong}`);
}
for (const c of cases) judge(c.name, await verdict(c));
const others = [
  ["a stream's events make one answer", fold],
  ["collect after a left loop is CANCELLED", collectLeft],
  ["close ends what runs, and calls after it, with CANCELLED", close],
  ["an empty TANDEM_ADDRESS is the default", defaults],
];
for (const [name, check] of others) judge(name, await check());
client.close();
const total = cases.length + others.length;
const seconds = ((Date.now() - start) / 1000).toFixed(1);
console.log(`typescript: ${total - failed} passed, ${failed} failed, ${seconds} s`);
process.exitCode = failed > 0 ? 1 : 0;
