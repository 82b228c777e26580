// SPDX-License-Identifier: Apache-2.0
// The KV cache of one sequence: a box for each block, a cell for each position,
// coloured by where its keys and values came from.

import {bytes, h} from './dom.js';
import {all, runs, state} from './runs.js';

export const blockSize = () => state.capabilities.kv_block_size || 16;

// Of so many positions, as a decode worker keeps them; null where none told.
export const keptBytes = (held) => {
  const each = state.capabilities.kv_bytes_per_token;
  return each ? held * each : null;
};

// Positions whose keys and values are there once `count` tokens have come: the
// newest token is fed back only in the next step.
export const positions = (run, count) =>
  Math.max(0, run.promptTokens.length + Math.max(0, count - 1));

export function kind(run, position) {
  if (position < run.cached) return 'cached';
  return position < run.promptTokens.length ? 'prompt' : 'generated';
}

// Grows with calls of the function that it returns.
export function blockGrid() {
  const node = h('div', {class: 'blocks', role: 'img', 'aria-label': 'No block holds anything yet'});
  let shownRun = null;
  let cells = [];
  let filled = 0;
  let cached = 0;
  const update = (run, count) => {
    const size = blockSize();
    const want = positions(run, count);
    if (run !== shownRun || want < filled) {
      node.replaceChildren();
      cells = [];
      filled = 0;
      shownRun = run;
    }
    // What the cache gave is known only when the first token comes.
    if (run.cached !== cached) {
      cached = run.cached;
      filled = 0;
    }
    while (cells.length < want) {
      const block = h('span', {class: 'block'});
      for (let i = 0; i < size; ++i) {
        const cell = h('i');
        block.append(cell);
        cells.push(cell);
      }
      node.append(block);
    }
    for (; filled < want; ++filled) cells[filled].className = kind(run, filled);
    node.setAttribute('aria-label', `${Math.ceil(want / size)} blocks of ${size} positions hold ${want}: `
      + `${Math.min(run.cached, want)} from the prefix cache, `
      + `${Math.max(0, Math.min(run.promptTokens.length, want) - run.cached)} of the prompt, `
      + `${Math.max(0, want - run.promptTokens.length)} generated`);
    return {want, blocks: Math.ceil(want / size)};
  };
  return {node, update};
}

export function legend(...names) {
  const words = {cached: 'from the prefix cache', prompt: 'prompt', generated: 'generated', again: 'computed again'};
  return h('p', {class: 'legend note'}, names.map((name) =>
    h('span', {}, h('i', {class: name}), words[name])));
}

// The panel of the machine view: the newest run of this page.
export function sequencePanel() {
  const grid = blockGrid();
  const text = h('p', {class: 'note'}, 'Ask something, and its cache grows here.');
  const update = (run) => {
    if (run !== all[all.length - 1]) return;
    const {want, blocks} = grid.update(run, run.tokens.length);
    const kept = keptBytes(want);
    text.textContent = run.noCache
      ? `${want} positions, each computed again for every token`
      : `${want} positions in ${blocks} blocks${kept ? `, ${bytes(kept)}` : ''}`
        + (run.cached ? `; ${run.cached} positions were there already` : '');
  };
  for (const type of ['grown', 'ended']) runs.addEventListener(type, (event) => update(event.detail));
  return {
    node: h('section', {class: 'panel', 'aria-labelledby': 'kv-title'},
      h('h2', {id: 'kv-title'}, 'The KV cache of the newest answer'), text, grid.node,
      legend('cached', 'prompt', 'generated')),
    redraw: () => { if (all.length) update(all[all.length - 1]); },
  };
}
