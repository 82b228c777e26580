// SPDX-License-Identifier: Apache-2.0
// One generation as this page saw it: prompt and output token by token, with
// probabilities, attention, and what the server counted at its end. Views
// listen to `runs`.

import {post, stream, label} from './api.js';
import {ask} from './attention.js';

export const state = {capabilities: null, workers: []};
export const runs = new EventTarget();
export const all = [];  // newest last, a few at most

const MOST = 12;
const ALTERNATIVES = 5;

const say = (type, run) => runs.dispatchEvent(new CustomEvent(type, {detail: run}));

// `prompt` is a text, or a list of messages. `options` are fields of the API.
function body(prompt, options) {
  return typeof prompt === 'string' ? {prompt, ...options} : {messages: prompt, ...options};
}

async function promptTokens(prompt, signal) {
  const asked = typeof prompt === 'string' ? {prompt} : {messages: prompt};
  const answer = await post('/tokenize', {...asked, return_token_strs: true}, signal);
  return answer.token_strs.map((text, i) => ({text, id: answer.tokens[i]}));
}

function addTokens(run, choice, chat) {
  const now = performance.now();
  const records = [];
  if (choice.logprobs && chat) {
    for (const record of choice.logprobs.content || []) {
      records.push({
        text: record.token, p: Math.exp(record.logprob),
        top: record.top_logprobs.map((t) => ({text: t.token, p: Math.exp(t.logprob)})),
      });
    }
  } else if (choice.logprobs) {
    const {tokens, token_logprobs: values, top_logprobs: tops} = choice.logprobs;
    tokens.forEach((text, i) => records.push({
      text, p: Math.exp(values[i]),
      top: Object.entries(tops[i] || {}).map(([t, p]) => ({text: t, p: Math.exp(p)}))
        .sort((a, b) => b.p - a.p).slice(0, ALTERNATIVES),
    }));
  }
  records.forEach((record, i) => {
    record.id = choice.token_ids && choice.token_ids[i];
    record.at = now - run.begun;
    const layers = choice.attention && choice.attention[i];
    if (layers) {
      record.attention = layers.map((l) => ({layer: l.layer, weights: Float32Array.from(l.weights)}));
    }
    run.tokens.push(record);
  });
}

// Starts a run and returns it at once; `run.ended` is a promise of it. It never
// rejects: `run.error` says what went wrong.
export function generate(prompt, options, want = {}) {
  const chat = typeof prompt !== 'string';
  const requestId = `page-${crypto.getRandomValues(new Uint32Array(3)).join('-')}`;
  const abort = new AbortController();
  const run = {
    requestId, label: label(requestId), prompt, chat, options,
    noCache: !!options.no_kv_cache, title: want.title || '',
    promptTokens: [], tokens: [], text: '', reasoning: '', cached: 0,
    begun: performance.now(), first: null, end: null,
    finish: null, usage: null, timings: null, work: null, error: null,
    stop: () => abort.abort(),
  };
  all.push(run);
  if (all.length > MOST) all.shift();
  say('begun', run);
  run.ended = (async () => {
    try {
      run.promptTokens = await promptTokens(prompt, abort.signal);
      const fields = body(prompt, options);
      fields.return_token_ids = true;
      if (want.alternatives !== false) {
        if (chat) Object.assign(fields, {logprobs: true, top_logprobs: ALTERNATIVES});
        else fields.logprobs = ALTERNATIVES;
      }
      if (want.attention && state.capabilities.attention) {
        fields.attention = ask(state.capabilities, run.promptTokens.length + options.max_tokens);
      }
      fields.stream_options = {include_usage: true, continuous_usage_stats: true};
      fields.work = true;
      run.begun = performance.now();
      const path = chat ? '/v1/chat/completions' : '/v1/completions';
      for await (const chunk of stream(path, fields, abort.signal, requestId)) {
        if (chunk.usage) {
          run.usage = chunk.usage;
          run.cached = chunk.usage.prompt_tokens_details.cached_tokens;
        }
        if (chunk.timings) run.timings = chunk.timings;
        if (chunk.work) run.work = chunk.work;
        for (const choice of chunk.choices) {
          const text = chat ? choice.delta.content : choice.text;
          const before = run.tokens.length;
          addTokens(run, choice, chat);
          // What the workers had done by then, where they tell.
          for (const token of run.tokens.slice(before)) token.work = chunk.work || null;
          if (text) run.text += text;
          const thought = chat && choice.delta.reasoning_content;
          if (thought) run.reasoning += thought;
          if ((text || thought || run.tokens.length > before) && run.first === null) {
            run.first = performance.now();
          }
          if (run.tokens.length > before) run.last = performance.now();
          if (choice.finish_reason) run.finish = choice.finish_reason;
        }
        say('grown', run);
      }
    } catch (error) {
      if (abort.signal.aborted) run.finish = 'stopped';
      else run.error = error.message;
    }
    run.end = performance.now();
    say('ended', run);
    return run;
  })();
  return run;
}

// Tokens a second after the first: as the router measured once the answer is
// there, till then by this page's clock; null where too few.
export function speed(run) {
  const n = (run.usage ? run.usage.completion_tokens : run.tokens.length) - 1;
  if (n < 1) return null;
  if (run.timings && run.timings.decode_ms > 0) return (n * 1000) / run.timings.decode_ms;
  if (run.first === null || !run.last || run.last <= run.first) return null;
  return (n * 1000) / (run.last - run.first);
}
