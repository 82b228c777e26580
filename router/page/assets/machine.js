// SPDX-License-Identifier: Apache-2.0
// The cluster at work, from the router's live feed: workers with their queues,
// batches and blocks, and every request as a timeline.

import {h, milliseconds, short, bytes} from './dom.js';
import {all, generate, runs, state} from './runs.js';
import {sequencePanel} from './blocks.js';
import {timelines} from './timeline.js';

const PROMPTS = ['Tell me a story about a cat.', 'What is 17 + 25?', 'Tell me a story about Mia.',
  'Make a JSON list of red, green and blue.', 'Tell me a story about a boat.', 'What can you do?',
  'Tell me a story about a garden.'];
const MOST_SLOTS = 32;
// Browsers open six connections to a server, and the feed is one of them.
const AT_ONCE = 5;

const part = (name, value, total) =>
  h('span', {class: `seg ${name}`, style: {width: `${total ? (value / total) * 100 : 0}%`}});

function pips(on, of) {
  const shown = Math.min(of, MOST_SLOTS);
  const lit = of > MOST_SLOTS ? Math.ceil((on / of) * shown) : on;
  return h('span', {class: 'pips', 'aria-hidden': 'true'},
    Array.from({length: shown}, (_, i) => h('i', {class: i < lit ? 'on' : ''})));
}

function row(name, figure, ...more) {
  return h('div', {class: 'gauge'}, h('div', {class: 'gauge-head'}, h('span', {}, name),
    h('span', {class: 'number'}, figure)), more);
}

function drawWorker(card, w) {
  const {total, free, reserved, live, cached} = w.blocks;
  const used = live + reserved;
  const speed = w.role === 'prefill' && w.prefill_tokens_per_second > 0
    ? `${short(w.prefill_tokens_per_second)} prompt tokens/s` : '';
  card.className = `worker ${w.role}${w.placeable ? '' : ' away'}`;
  card.replaceChildren(
    h('header', {}, h('h3', {}, w.id), h('span', {class: 'state'}, w.placeable ? w.state : w.reason || w.state)),
    row('Queue', w.waiting ? `${w.waiting} waiting, ${w.queued_tokens} tokens` : 'empty', pips(Math.min(w.waiting, MOST_SLOTS), MOST_SLOTS)),
    row('Batch', `${w.running} of ${w.max_num_seqs}`, pips(w.running, w.max_num_seqs)),
    row('KV blocks', `${used} in use, ${cached} cached, ${free} free`,
      h('span', {class: 'stack', 'aria-hidden': 'true'}, part('live', live, total), part('reserved', reserved, total), part('cached', cached, total))),
    h('p', {class: 'note number'}, [`${w.step_ms ? milliseconds(w.step_ms) : '–'} a step`, `${short(w.steps, 4)} steps`, speed,
      `${bytes(w.kv_bytes_per_token)} of ${w.kv_dtype} a token`].filter(Boolean).join(' · ')));
}

function workersPanel() {
  const columns = {prefill: h('div', {class: 'column'}), decode: h('div', {class: 'column'})};
  const lane = h('div', {class: 'lane', 'aria-hidden': 'true'}, h('span', {class: 'lane-line'}), h('span', {class: 'lane-text'}, 'KV'));
  const cards = new Map();
  const note = h('p', {class: 'note'}, 'Connecting …');
  const update = (cluster) => {
    const seen = new Set();
    for (const worker of cluster.workers) {
      seen.add(worker.id);
      if (!cards.has(worker.id)) {
        const card = h('article', {});
        cards.set(worker.id, card);
        (columns[worker.role] || columns.decode).append(card);
      }
      drawWorker(cards.get(worker.id), worker);
    }
    for (const [id, card] of cards) {
      if (!seen.has(id)) { card.remove(); cards.delete(id); }
    }
    lane.classList.toggle('busy', cluster.phases.prefilling + cluster.phases.handing_over > 0);
    note.textContent = cluster.workers.length ? '' : 'No worker is registered.';
  };
  return {
    node: h('section', {class: 'cluster', 'aria-label': 'Workers'},
      h('div', {}, h('h2', {class: 'is-prefill'}, 'Prefill'), columns.prefill), lane,
      h('div', {}, h('h2', {class: 'is-decode'}, 'Decode'), columns.decode), note),
    update, note,
  };
}

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
  if (!state.capabilities.events) {
    cluster.note.textContent = 'This server does not tell (--live-feed).';
  }
  runs.addEventListener('feed-state', (event) => {
    cluster.update(event.detail);
    numbers.update(event.detail);
    lines.update(event.detail);
  });
  runs.addEventListener('feed-ended', (event) => lines.ended(event.detail));
  runs.addEventListener('feed-told', (event) => {
    if (!event.detail.connected) cluster.note.textContent = `The live feed is not there: ${event.detail.reason || 'it broke off'}`;
  });
  return {shown: (on) => { if (on) sequence.redraw(); }};
}
