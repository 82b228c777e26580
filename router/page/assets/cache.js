// SPDX-License-Identifier: Apache-2.0
// The same prompt with and without a KV cache on the model that is served: two
// requests, and at every token what their workers had counted by then. Nothing
// is computed here but differences.

import {announce, h, milliseconds, short} from './dom.js';
import {generate, runs, state} from './runs.js';
import {linePlot} from './plot.js';

const PROMPT = 'Tell me a story about a cat.';
const ROWS = 8;  // of the table

const METRICS = {
  kv_rows: ['K/V rows', (token) => token.work.kv_rows],
  flops: ['FLOPs', (token) => token.work.matrix_flops + token.work.attention_flops],
  bytes: ['bytes read', (token) => token.work.weight_bytes_read + token.work.kv_bytes_read],
  time: ['milliseconds', (token) => token.at],
};

let both = {};  // on, off: runs
let asked = 0;  // tokens

// [tokens so far, what they took], where a message of the server ended.
function points(run, value) {
  if (!run) return [];
  const out = [];
  run.tokens.forEach((token, i) => {
    const next = run.tokens[i + 1];
    if (token.work && (!next || next.work !== token.work)) out.push([i + 1, value(token)]);
  });
  return out;
}

// Of each token: what came to it, divided by the tokens that came with it.
const perToken = (line) => line.slice(1).map(([n, v], i) => [n, (v - line[i][1]) / (n - line[i][0])]);

async function measure(text, report) {
  both = {};
  const prompt = state.capabilities.chat ? [{role: 'user', content: text}] : text;
  for (const [name, more] of [['on', {}], ['off', {no_kv_cache: true}]]) {
    const what = name === 'on' ? 'with' : 'without';
    report(`${asked} tokens ${what} a cache …`);
    // The whole prompt is computed in both, and by the same worker.
    const run = generate(prompt, {max_tokens: asked, temperature: 0, ignore_eos: true, bypass_prefix_cache: true,
      placement: 'local', ...more}, {title: `${text} (${what} cache)`});
    both[name] = run;
    await run.ended;
    if (run.error) throw new Error(run.error);
    if (run.finish === 'stopped') return;
    if (!run.tokens.some((token) => token.work)) throw new Error('the workers told no figures');
  }
}

function table(metric) {
  const [name, value] = METRICS[metric];
  const show = metric === 'time' ? milliseconds : (v) => short(v, 4);
  const at = (run, tokens) => { const token = run && run.tokens[tokens - 1]; return token && token.work ? value(token) : null; };
  const counts = [...new Set(Array.from({length: ROWS}, (_, i) => Math.max(1, Math.round((asked * (i + 1)) / ROWS))))];
  return h('div', {class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'Figures'}, h('table', {class: 'measured'},
    h('caption', {}, metric === 'time' ? 'Milliseconds since the request, by this page’s clock' : `${name} up to a token, as the workers counted`),
    h('thead', {}, h('tr', {}, ['Tokens', 'With cache', 'Without', 'Ratio'].map((t, i) => h('th', {scope: 'col', class: i ? 'number' : ''}, t)))),
    h('tbody', {}, counts.map((tokens) => {
      const [on, off] = [at(both.on, tokens), at(both.off, tokens)];
      const ratio = on && off ? `${(off / on).toFixed(1)} ×` : '–';
      return h('tr', {'data-tokens': tokens, 'data-on': on, 'data-off': off}, h('th', {scope: 'row'}, String(tokens)),
        [on === null ? '–' : show(on), off === null ? '–' : show(off), ratio].map((t) => h('td', {class: 'number'}, t)));
    }))));
}

function verdict(metric) {
  const [name, value] = METRICS[metric];
  const {on, off} = both;
  if (!on || !off || on.end === null || off.end === null || !off.tokens.length) return [];
  const n = Math.min(on.tokens.length, off.tokens.length);
  const same = on.tokens.length === off.tokens.length && on.tokens.every((t, i) => t.id === off.tokens[i].id);
  return [h('b', {}, `${(value(off.tokens[n - 1]) / value(on.tokens[n - 1])).toFixed(1)} times the ${name}`),
    ` without a cache, after ${on.promptTokens.length} prompt and ${n} generated tokens. `,
    same ? 'Both wrote the very same tokens.' : off.finish === 'stopped' ? '' : 'They did not write the same tokens: that is a fault.'];
}

export function cacheView(section) {
  const can = state.capabilities.no_kv_cache;
  const most = Math.max(16, Math.min(512, (state.capabilities.max_model_len || 1024) - 128));
  const input = h('input', {type: 'text', id: 'cache-prompt', 'aria-label': 'Prompt', value: PROMPT});
  const tokens = h('input', {type: 'range', id: 'cache-tokens', min: 16, max: most, step: 16});
  tokens.value = Math.min(128, most);
  const tokensText = h('output', {for: 'cache-tokens'}, tokens.value);
  tokens.addEventListener('input', () => { tokensText.textContent = tokens.value; });
  const button = h('button', {type: 'submit', class: 'primary', disabled: !can}, 'Measure');
  const progress = h('p', {class: 'note', role: 'status'}, can
    ? 'Two requests; the cache is the only difference, and every token a point.'
    : 'This server does not offer it: start it with --enable-no-kv-cache.');
  const plots = h('div', {class: 'plots'});
  const figures = h('div', {});
  const said = h('p', {class: 'verdict'});
  let metric = 'kv_rows';
  let scheduled = false;

  const figure = (title, words, line) => {
    const node = h('figure', {class: 'panel'}, h('figcaption', {}, words));
    const {on, off} = both;
    const two = [{name: 'without cache', class: 'off', points: line(off)}, {name: 'with cache', class: 'on', points: line(on)}];
    const width = Math.max(260, Math.min(620, (plots.clientWidth - (plots.clientWidth > 800 ? 20 : 0)) / (plots.clientWidth > 800 ? 2 : 1) - 40));
    node.append(linePlot(title, two, 'tokens generated', METRICS[metric][0], width));
    return node;
  };
  const draw = () => {
    scheduled = false;
    if (!both.on || !section.clientWidth) return;
    const [name, value] = METRICS[metric];
    plots.replaceChildren(
      figure(`${name} per token`, `${name} for each further token`, (run) => perToken(points(run, value))),
      figure(`${name} in all`, `${name} so far`, (run) => points(run, value)));
    figures.replaceChildren(table(metric));
    said.replaceChildren(...verdict(metric));
  };
  const soon = () => {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(draw);
  };
  const pick = h('select', {id: 'metric'}, Object.entries(METRICS).map(([value, [name]]) => h('option', {value}, name)));
  pick.addEventListener('change', () => { metric = pick.value; draw(); });
  runs.addEventListener('grown', (event) => { if (event.detail === both.on || event.detail === both.off) soon(); });
  new ResizeObserver(soon).observe(plots);

  let running = false;
  const start = async () => {
    if (running) {
      for (const run of Object.values(both)) run.stop();
      return;
    }
    running = true;
    button.textContent = 'Stop';
    asked = Number(tokens.value);
    try {
      await measure(input.value, (text) => { progress.textContent = text; });
      draw();
      progress.textContent = Object.values(both).some((run) => run.finish === 'stopped') ? 'Stopped.' : 'Measured.';
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
  return {shown: (on) => { if (on) soon(); }};
}
