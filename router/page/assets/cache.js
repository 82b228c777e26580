// SPDX-License-Identifier: Apache-2.0
// The same prompt with and without a KV cache, for growing answers, on the
// model that is served. Every point is a request of its own, and every figure
// is what its workers counted: nothing is computed here but differences.

import {announce, h, milliseconds, short} from './dom.js';
import {generate, state} from './runs.js';
import {linePlot} from './plot.js';

const PROMPT = 'Tell me a story about a cat.';
const STEPS = 8;

const METRICS = {
  kv_rows: ['K/V rows', (run) => run.work.kv_rows],
  flops: ['FLOPs', (run) => run.work.matrix_flops + run.work.attention_flops],
  bytes: ['bytes read', (run) => run.work.weight_bytes_read + run.work.kv_bytes_read],
  time: ['milliseconds', (run) => run.timings.total_ms],
};

let points = [];  // {tokens, on, off}: runs
let abort = false;

async function measure(text, most, report) {
  points = [];
  abort = false;
  const prompt = state.capabilities.chat ? [{role: 'user', content: text}] : text;
  for (let i = 1; i <= STEPS && !abort; ++i) {
    const tokens = Math.max(1, Math.round((most * i) / STEPS));
    const both = {};
    for (const [name, more] of [['on', {}], ['off', {no_kv_cache: true}]]) {
      // The whole prompt is computed in both, and by the same worker.
      const run = generate(prompt, {max_tokens: tokens, temperature: 0, ignore_eos: true, bypass_prefix_cache: true,
        placement: 'local', ...more}, {title: `${text} (${tokens} tokens, ${name === 'on' ? 'with' : 'without'} cache)`});
      report(`${tokens} tokens ${name === 'on' ? 'with' : 'without'} a cache …`);
      await run.ended;
      if (run.error) throw new Error(run.error);
      if (!run.work) throw new Error('the workers told no figures');
      both[name] = run;
    }
    points.push({tokens, ...both});
    report(null);
  }
}

function table(metric) {
  const [name, value] = METRICS[metric];
  const show = metric === 'time' ? milliseconds : (v) => short(v, 4);
  return h('div', {class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'Figures'}, h('table', {class: 'measured'},
    h('caption', {}, `${name} of a whole answer, as the workers ${metric === 'time' ? 'took' : 'counted'}`),
    h('thead', {}, h('tr', {}, ['Tokens', 'With cache', 'Without', 'Ratio'].map((t, i) => h('th', {scope: 'col', class: i ? 'number' : ''}, t)))),
    h('tbody', {}, points.map((p) => h('tr', {'data-tokens': p.tokens, 'data-on': value(p.on), 'data-off': value(p.off)}, h('th', {scope: 'row'}, String(p.tokens)),
      h('td', {class: 'number'}, show(value(p.on))), h('td', {class: 'number'}, show(value(p.off))),
      h('td', {class: 'number'}, `${(value(p.off) / value(p.on)).toFixed(1)} ×`))))));
}

// Work of each token: what an answer took beyond the one before it, divided by
// the tokens that it has more.
function perToken(value, side) {
  return points.slice(1).map((p, i) => [p.tokens, (value(p[side]) - value(points[i][side])) / (p.tokens - points[i].tokens)]);
}

export function cacheView(section) {
  const can = state.capabilities.no_kv_cache;
  const context = state.capabilities.max_model_len || 1024;
  const most = Math.min(512, context - 128);
  const input = h('input', {type: 'text', id: 'cache-prompt', 'aria-label': 'Prompt', value: PROMPT});
    const tokens = h('input', {type: 'range', id: 'cache-tokens', min: 16, max: Math.max(16, most), step: 16, value: 128});
  tokens.value = Math.min(128, most);
  const tokensText = h('output', {for: 'cache-tokens'}, tokens.value);
  tokens.addEventListener('input', () => { tokensText.textContent = tokens.value; });
  const button = h('button', {type: 'submit', class: 'primary', disabled: !can}, 'Measure');
  const progress = h('p', {class: 'note', role: 'status'}, can
    ? 'Each point is a request; the cache is the only difference.'
    : 'This server does not offer it: start it with --enable-no-kv-cache.');
  const plots = h('div', {class: 'plots'});
  const figures = h('div', {});
  const said = h('p', {class: 'verdict'});
  let metric = 'kv_rows';
  let running = false;

  const draw = () => {
    if (!points.length) return;
    const [name, value] = METRICS[metric];
    const line = (side) => points.map((p) => [p.tokens, value(p[side])]);
    const two = (on, off) => [{name: 'without cache', class: 'off', points: off}, {name: 'with cache', class: 'on', points: on}];
    plots.replaceChildren(
      h('figure', {class: 'panel'}, h('figcaption', {}, `${name} for each further token`), linePlot(`${name} per token`, two(perToken(value, 'on'), perToken(value, 'off')), 'tokens generated', name, 560)),
      h('figure', {class: 'panel'}, h('figcaption', {}, `${name} of the whole answer`), linePlot(`${name} in all`, two(line('on'), line('off')), 'tokens generated', name, 560)));
    figures.replaceChildren(table(metric));
    const last = points[points.length - 1];
    const same = last.on.tokens.length === last.off.tokens.length && last.on.tokens.every((t, i) => t.id === last.off.tokens[i].id);
    said.replaceChildren(h('b', {}, `${(value(last.off) / value(last.on)).toFixed(1)} times the ${name}`),
      ` without a cache, after ${last.on.promptTokens.length} prompt and ${last.tokens} generated tokens. `,
      same ? 'Both wrote the very same tokens.' : 'They did not write the same tokens: that is a fault.');
  };
  const pick = h('select', {id: 'metric'}, Object.entries(METRICS).map(([value, [name]]) => h('option', {value}, name)));
  pick.addEventListener('change', () => { metric = pick.value; draw(); });

  const start = async () => {
    if (running) { abort = true; return; }
    running = true;
    button.textContent = 'Stop';
    try {
      await measure(input.value, Number(tokens.value), (text) => { if (text) progress.textContent = text; else draw(); });
      progress.textContent = abort ? 'Stopped.' : 'Measured.';
      announce(said.textContent);
    } catch (error) {
      progress.textContent = error.message;
    }
    running = false;
    button.textContent = 'Measure';
  };
  section.append(
    h('div', {class: 'head'}, h('div', {}, h('h1', {id: 'cache-title'}, 'What the cache saves'),
      h('p', {class: 'lead'}, 'Without a cache, every token computes the whole sequence again: the work of an answer grows with the square of its length. With one, each token is computed once.')),
    h('form', {class: 'starter', onsubmit: (e) => { e.preventDefault(); start(); }}, input,
      h('div', {class: 'inline'}, h('label', {for: 'cache-tokens'}, 'Tokens'), tokens, tokensText), button)),
    progress,
    h('div', {class: 'controls'}, h('div', {class: 'inline'}, h('label', {for: 'metric'}, 'Work as'), pick)),
    said, plots, figures);
  return {};
}
