// SPDX-License-Identifier: Apache-2.0
// The cluster at work, from the router's live feed: workers with their queues,
// batches and blocks, and every request as a timeline.

import {h, short} from './dom.js';
import {all, generate, runs, state} from './runs.js';
import {sequencePanel} from './blocks.js';
import {timelines} from './timeline.js';
import {workersPanel} from './workers.js';

const PROMPTS = ['Tell me a story about a cat.', 'What is 17 + 25?', 'Tell me a story about Mia.',
  'Make a JSON list of red, green and blue.', 'Tell me a story about a boat.', 'What can you do?',
  'Tell me a story about a garden.'];
// Browsers open six connections to a server, and the feed is one of them.
const AT_ONCE = 5;

function figures() {
  const node = h('dl', {class: 'figures'});
  let before = null;
  let perSecond = 0;
  const update = (cluster) => {
    const now = performance.now();
    if (before && now - before.at >= 500) {
      perSecond = Math.max(0, cluster.counters.tokens - before.tokens) / ((now - before.at) / 1000);
      before = null;
    }
    before = before || {at: now, tokens: cluster.counters.tokens};
    const values = [['in flight', cluster.phases.total], ['tokens/s', Math.round(perSecond)],
      ['answered', short(cluster.counters.finished_ok, 4)],
      ['split', short(cluster.counters.split_placements, 4)],
      ['moved on', short(cluster.counters.prefill_retries + cluster.counters.decode_retries, 4)]];
    node.replaceChildren(...values.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, String(value)))));
  };
  return {node, update};
}

function send(count) {
  for (let i = 0; i < count; ++i) {
    const text = PROMPTS[(all.length + i) % PROMPTS.length];
    const prompt = state.capabilities.chat ? [{role: 'user', content: text}] : text;
    // Split, so that a handoff is seen; other seeds, so that answers differ.
    generate(prompt, {max_tokens: 128, temperature: 0.8, placement: 'split', bypass_prefix_cache: i % 2 === 0},
      {title: text});
  }
}

export function machineView(section) {
  const cluster = workersPanel();
  const numbers = figures();
  const lines = timelines();
  const sequence = sequencePanel();
  section.append(
    h('div', {class: 'head'}, h('div', {}, h('h1', {id: 'machine-title'}, 'The machine at work'),
      h('p', {class: 'note'}, 'Told by the router ten times a second: numbers, never anybody’s text.')),
    h('div', {class: 'tools'},
      h('button', {type: 'button', class: 'quiet', onclick: () => send(1)}, 'Send a request'),
      h('button', {type: 'button', class: 'quiet', onclick: () => send(AT_ONCE)}, 'Send five at once'))),
    numbers.node, cluster.node,
    h('div', {class: 'two'}, lines.node, sequence.node));
  if (!state.capabilities.events) cluster.stale('This server does not tell (--live-feed).');
  runs.addEventListener('feed-state', (event) => {
    cluster.update(event.detail);
    numbers.update(event.detail);
    lines.update(event.detail);
  });
  runs.addEventListener('feed-ended', (event) => lines.ended(event.detail));
  runs.addEventListener('feed-told', (event) => {
    if (!event.detail.connected) cluster.stale(`The live feed is not there: ${event.detail.reason || 'it broke off'}`);
  });
  return {shown: (on) => { if (on) sequence.redraw(); }};
}
