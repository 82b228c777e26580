// SPDX-License-Identifier: Apache-2.0
// OpenAI's SDK for JavaScript against a running server.
//
// Usage: node node_client.mjs http://127.0.0.1:8000/v1
// The server's key, if it asks for one, is in TANDEM_API_KEY.
import assert from "node:assert/strict";
import OpenAI from "openai";

const baseURL = process.argv[2];
const apiKey = process.env.TANDEM_API_KEY ?? "none";
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const request = {
  model: "tales",
  messages: [{ role: "user", content: "Tell me a story about a cat." }],
  temperature: 0,
  max_tokens: 24,
};

const plain = await fetch(`${baseURL}/chat/completions`, {
  method: "POST",
  headers: {
    "content-type": "application/json",
    authorization: `Bearer ${apiKey}`,
  },
  body: JSON.stringify(request),
}).then((answer) => answer.json());
const want = plain.choices[0].message.content;

const whole = await client.chat.completions.create(request);
assert.equal(whole.choices[0].message.content, want);
assert.equal(whole.choices[0].finish_reason, "length");
assert.equal(whole.usage.completion_tokens, 24);

let text = "";
let usage;
let reason;
const stream = await client.chat.completions.create({
  ...request,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
  reason = chunk.choices[0]?.finish_reason ?? reason;
}
assert.equal(text, want);
assert.equal(usage.completion_tokens, 24);
assert.equal(usage.prompt_tokens, plain.usage.prompt_tokens);
assert.equal(reason, "length");

await assert.rejects(
  client.completions.create({ model: "tales", prompt: "a", temperature: 7 }),
  (error) => error.status === 400 && error.param === "temperature",
);
const models = await client.models.list();
assert.deepEqual(models.data.map((model) => model.id), ["tales"]);
console.log("openai for JavaScript: ok");
