// SPDX-License-Identifier: Apache-2.0
// OpenAI's SDK for JavaScript calls tools of a server that serves a model of
// make_scripted_model.py: whole, streamed, by its stream helper, and a whole
// conversation by runTools.
//
// Usage: node tool_client.mjs http://127.0.0.1:8000/v1 STYLE
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, style] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const declare = (name, types) => ({
  type: "function",
  function: {
    name,
    parameters: {
      type: "object",
      properties: Object.fromEntries(
        Object.entries(types).map(([key, type]) => [key, { type }]),
      ),
    },
  },
});
const request = {
  model: style,
  messages: [{ role: "user", content: "Is it warm in Rome?" }],
  tools: [
    declare("get_weather", { city: "string", days: "integer" }),
    declare("clock", { zone: "string" }),
  ],
};
const want = [
  ["get_weather", { city: "Rome", days: 2 }],
  ["clock", { zone: "CET" }],
];
const calls = (message) =>
  message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);

const whole = await client.chat.completions.create(request);
assert.deepEqual(calls(whole.choices[0].message), want);
assert.equal(whole.choices[0].finish_reason, "tool_calls");
assert.ok(whole.usage.completion_tokens > 5);

const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
  for (const call of chunk.choices[0]?.delta?.tool_calls ?? []) {
    pieces[call.index] ??= { id: call.id, name: call.function.name, text: "" };
    pieces[call.index].text += call.function.arguments;
  }
}
assert.deepEqual(pieces.map((piece) => [piece.name, JSON.parse(piece.text)]), want);
assert.ok(pieces.every((piece) => piece.id));

const final = await client.chat.completions.stream(request).finalChatCompletion();
assert.deepEqual(calls(final.choices[0].message), want);
assert.equal(final.choices[0].finish_reason, "tool_calls");

const called = [];
const runner = client.chat.completions.runTools({
  ...request,
  tools: request.tools.map((tool) => ({
    type: "function",
    function: {
      ...tool.function,
      parse: JSON.parse,
      function: (given) => {
        called.push([tool.function.name, given]);
        return "done";
      },
    },
  })),
});
assert.equal(await runner.finalContent(), "It is warm in Rome.");
assert.deepEqual(called, want);
console.log(`${style}, openai for JavaScript: ok`);
