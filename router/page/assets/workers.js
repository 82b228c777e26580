// SPDX-License-Identifier: Apache-2.0
// The workers as cards: queue, batch, KV blocks. A card is made once and then
// changed in place; one whose worker is gone says so for a while.

import {bytes, h, milliseconds, short} from './dom.js';

const LOST_MS = 6000;
const LEAST_PIPS = 32;
const MOST_PIPS = 64;

function gauge(name, picture) {
  const figure = h('span', {class: 'number'});
  return {figure, node: h('div', {class: 'gauge'}, h('div', {class: 'gauge-head'}, h('span', {}, name), figure), picture)};
}

// As many lit as there are, of at most so many.
function pips() {
  const node = h('span', {class: 'pips', 'aria-hidden': 'true'});
  return {node, set: (on, of) => {
    const shown = Math.min(of, MOST_PIPS, Math.max(LEAST_PIPS, on));
    while (node.children.length > shown) node.lastChild.remove();
    while (node.children.length < shown) node.append(h('i', {}));
    [...node.children].forEach((pip, i) => pip.classList.toggle('on', i < on));
  }};
}

const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };

function makeCard(id) {
  const told = h('span', {class: 'state'});
  const waiting = pips();
  const running = pips();
  const parts = {};
  for (const name of ['live', 'reserved', 'cached']) parts[name] = h('span', {class: `seg ${name}`});
  const queue = gauge('Queue', waiting.node);
  const batch = gauge('Batch', running.node);
  const blocks = gauge('KV blocks', h('span', {class: 'stack', 'aria-hidden': 'true'}, Object.values(parts)));
  const note = h('p', {class: 'note number'});
  const node = h('article', {}, h('header', {}, h('h3', {}, id), told), queue.node, batch.node, blocks.node, note);
  let lostAt = -1e9;
  let losses = null;
  let role = 'decode';
  return {
    node,
    update: (w, now) => {
      if (losses !== null && w.losses > losses) lostAt = now;
      losses = w.losses;
      role = w.role;
      const back = now - lostAt < LOST_MS;
      node.className = `worker ${role}${w.placeable ? '' : ' away'}`;
      setText(told, back && w.placeable ? 'was lost, is back' : w.placeable ? w.state : w.reason || w.state);
      setText(queue.figure, w.waiting ? `${w.waiting} waiting, ${w.queued_tokens} tokens` : 'empty');
      waiting.set(w.waiting, LEAST_PIPS);
      setText(batch.figure, `${w.running} of ${w.max_num_seqs}`);
      running.set(w.running, w.max_num_seqs);
      const {total, free, reserved, live, cached} = w.blocks;
      setText(blocks.figure, `${live + reserved} in use, ${cached} cached, ${free} free`);
      for (const [name, count] of Object.entries({live, reserved, cached})) parts[name].style.width = `${total ? (count / total) * 100 : 0}%`;
      const speed = w.role === 'prefill' && w.prefill_tokens_per_second > 0 ? `${short(w.prefill_tokens_per_second)} prompt tokens/s` : '';
      setText(note, [`${w.step_ms ? milliseconds(w.step_ms) : '–'} a step`, `${short(w.steps, 4)} steps`, speed,
        `${bytes(w.kv_bytes_per_token)} of ${w.kv_dtype} a token`].filter(Boolean).join(' · '));
    },
    // True once that was shown long enough.
    gone: (now) => {
      if (node.classList.contains('lost')) return now - lostAt > LOST_MS;
      lostAt = now;
      node.className = `worker ${role} lost`;
      setText(told, 'lost');
      setText(batch.figure, 'its requests move on');
      running.set(0, LEAST_PIPS);
      for (const part of Object.values(parts)) part.style.width = '0%';
      return false;
    },
  };
}

export function workersPanel() {
  const columns = {prefill: h('div', {class: 'column'}), decode: h('div', {class: 'column'})};
  const lane = h('div', {class: 'lane', 'aria-hidden': 'true'}, h('span', {class: 'lane-line'}), h('span', {class: 'lane-text'}, 'KV'));
  const cards = new Map();
  const note = h('p', {class: 'note'}, 'Connecting …');
  const node = h('section', {class: 'cluster', 'aria-label': 'Workers'},
    h('div', {}, h('h2', {class: 'is-prefill'}, 'Prefill'), columns.prefill), lane,
    h('div', {}, h('h2', {class: 'is-decode'}, 'Decode'), columns.decode), note);
  const update = (cluster) => {
    const now = performance.now();
    const seen = new Set();
    for (const worker of cluster.workers) {
      seen.add(worker.id);
      if (!cards.has(worker.id)) {
        const card = makeCard(worker.id);
        cards.set(worker.id, card);
        (columns[worker.role] || columns.decode).append(card.node);
      }
      cards.get(worker.id).update(worker, now);
    }
    for (const [id, card] of cards) {
      if (seen.has(id) || !card.gone(now)) continue;
      card.node.remove();
      cards.delete(id);
    }
    lane.classList.toggle('busy', cluster.phases.prefilling + cluster.phases.handing_over > 0);
    node.classList.remove('stale');
    setText(note, cluster.workers.length ? '' : 'No worker is registered.');
  };
  // The feed broke off: what is shown is old.
  const stale = (why) => { node.classList.add('stale'); setText(note, why); };
  return {node, update, stale};
}
