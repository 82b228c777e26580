// SPDX-License-Identifier: Apache-2.0
// Requests as bars of time. While one is in flight its phases are as the feed
// saw them; at its end they are what router and workers measured.

import {bytes, h, milliseconds, short} from './dom.js';
import {all} from './runs.js';
import {show} from './generation.js';

const MOST = 24;
const NAMES = {queue: 'queue', prefill: 'prefill', handoff: 'handoff', decode: 'decode', retry: 'moved to another worker'};
// Which part of the bar a phase of the router belongs to. While a handoff goes
// on behind it, the first token is there.
const PART = {queued: 'queue', opening: 'queue', prefilling: 'prefill', handing_over: 'decode',
  decoding: 'decode', retrying: 'retry'};

// [{part, from, to}] in milliseconds since admission.
export function measured({timings: t}) {
  const first = t.time_to_first_token_ms || t.total_ms;
  const parts = [{part: 'queue', from: 0, to: Math.min(t.queue_ms, first)}];
  // Of a request that was redone, the last one's prefill came later than that.
  if (t.prefill_ms && !t.retries) parts.push({part: 'prefill', from: Math.max(0, first - t.prefill_ms), to: first});
  parts.push({part: 'decode', from: first, to: t.total_ms});
  if (t.prefill_worker && t.handoff_ms > 0 && !t.retries) {
    const to = first + (t.handoff_exposed_ms || 0);
    parts.push({part: 'handoff', from: Math.max(0, to - t.handoff_ms), to});
  }
  return parts;
}

// What the feed saw of `request`, which is `last` older than the last time.
export function follow(parts, request, before) {
  const age = request.age_ms;
  const grow = (part) => {
    const last = parts.filter((p) => (p.part === 'handoff') === (part === 'handoff')).pop();
    if (last) last.to = age;
    if (!last || last.part !== part) parts.push({part, from: age, to: age});
  };
  // Moved between two states: nobody saw it retrying.
  if (before && before.decode_worker && request.decode_worker && before.decode_worker !== request.decode_worker
    && parts[parts.length - 1].part !== 'retry') parts.push({part: 'retry', from: before.age_ms, to: age});
  grow(PART[request.phase] || 'queue');
  if (request.phase === 'handing_over') grow('handoff');
}

// Of parts that were seen: from each move until it decoded again.
export function moves(parts) {
  const out = [];
  let moved = false;
  for (const p of parts) {
    moved = p.part === 'retry' || (moved && p.part !== 'decode');
    if (moved) out.push(p);
  }
  return out;
}

function figures(entry) {
  const {ended, request: r} = entry;
  if (!ended) {
    return [['Phase', entry.lost ? 'ended, not seen' : r.phase.replace('_', ' ')], ['Prompt', `${r.prompt_tokens} tokens`], ['Output', `${r.output_tokens} tokens`],
      ['Prefill', r.prefill_worker || 'by the decode worker'], ['Decode', r.decode_worker]];
  }
  const {timings: t, usage: u, work: w} = ended;
  return [
    ['Queue', milliseconds(t.queue_ms)], ['Prefill', t.prefill_ms ? milliseconds(t.prefill_ms) : 'by the decode worker'],
    ['Handoff', t.handoff_ms ? `${milliseconds(t.handoff_ms)}, of which ${milliseconds(t.handoff_exposed_ms)} after the first token` : ''],
    ['Moved', t.kv_bytes ? `${bytes(t.kv_bytes)} by ${t.way}` : ''],
    ['First token', milliseconds(t.time_to_first_token_ms)], ['Decode', milliseconds(t.decode_ms)], ['Total', milliseconds(t.total_ms)],
    ['Prompt', u ? `${u.prompt_tokens} tokens, ${u.prompt_tokens_details.cached_tokens} cached` : ''],
    ['Output', u ? `${u.completion_tokens} tokens` : ''],
    ['Compute', w ? `${short(w.matrix_flops + w.attention_flops)}FLOP in ${w.steps} steps` : ''],
    ['K/V rows', w ? short(w.kv_rows, 4) : ''],
    ['Workers', [t.prefill_worker, t.decode_worker].filter(Boolean).join(' → ')],
    ['Attempts redone', t.retries || ''], ['Gave way', t.preemptions || ''],
    ['Ended', ended.ok ? ended.finish_reason : ended.client_gone ? 'its client went' : ended.error]];
}

// A row is made once; what changes is set in it, so that it can be clicked and
// keeps the focus.
function makeRow(entry) {
  const track = h('span', {class: 'track', 'aria-hidden': 'true'});
  const mine = h('span', {class: 'mine', hidden: true}, 'this page');
  const total = h('span', {class: 'req-total number'});
  const list = h('dl', {class: 'pairs'});
  const open = h('button', {type: 'button', class: 'quiet', hidden: true, onclick: () => { show(entry.run()); location.hash = '#generation'; }}, 'See it generated');
  const node = h('details', {class: 'req'},
    h('summary', {}, h('span', {class: 'req-id mono'}, entry.id.slice(0, 6), mine), track, total), h('div', {class: 'req-body'}, list, open));
  const values = new Map();
  const fill = () => {
    const now = figures(entry).filter(([, v]) => v !== undefined && v !== null && v !== '');
    if (now.length !== values.size || now.some(([name]) => !values.has(name))) {
      values.clear();
      list.replaceChildren(...now.map(([name]) => {
        const dd = h('dd', {});
        values.set(name, dd);
        return h('div', {}, h('dt', {}, name), dd);
      }));
    }
    for (const [name, value] of now) {
      if (values.get(name).textContent !== String(value)) values.get(name).textContent = value;
    }
    open.hidden = !entry.run();
  };
  node.addEventListener('toggle', () => { if (node.open) fill(); });
  const draw = (scale) => {
    const {ended, parts} = entry;
    node.className = `req${ended ? (ended.ok ? '' : ' failed') : entry.lost ? '' : ' live'}`;
    mine.hidden = !entry.run();
    total.textContent = ended ? milliseconds(entry.total) : entry.lost ? 'not seen' : entry.request.phase.replace('_', ' ');
    while (track.children.length > parts.length) track.lastChild.remove();
    while (track.children.length < parts.length) track.append(h('i', {}));
    parts.forEach(({part, from, to}, i) => {
      const bar = track.children[i];
      bar.className = part;
      Object.assign(bar.style, {left: `${(from / scale) * 100}%`, width: `${Math.max(0, (to - from) / scale) * 100}%`});
    });
    if (node.open) fill();
  };
  return {node, draw};
}

// As the feed would have told it, of this page's own run.
const endOf = (run) => run.timings && {ok: !run.error, finish_reason: run.finish, error: run.error, client_gone: false,
  usage: run.usage, timings: run.timings, work: run.work};

export function timelines() {
  const list = h('div', {class: 'reqs'});
  const entries = new Map();  // by internal id, oldest first
  const empty = h('p', {class: 'note'}, 'Requests appear here as they come.');

  const redraw = () => {
    empty.hidden = entries.size > 0;
    const scale = Math.max(20, ...[...entries.values()].map((e) => e.total));
    for (const entry of entries.values()) {
      if (entry.dirty || scale !== entry.scale) entry.row.draw(scale);
      entry.dirty = false;
      entry.scale = scale;
    }
  };
  const add = (id, label) => {
    const entry = {id, label, request: null, ended: null, lost: false, parts: [], total: 0, dirty: true,
      run: () => all.find((r) => r.label === label)};
    entry.row = makeRow(entry);
    entries.set(id, entry);
    list.prepend(entry.row.node);
    while (entries.size > MOST) {
      const [oldest, gone] = entries.entries().next().value;
      gone.row.node.remove();
      entries.delete(oldest);
    }
    return entry;
  };
  const end = (entry, ended) => {
    const seen = moves(entry.parts);
    entry.ended = ended;
    entry.parts = measured(ended).concat(seen);
    entry.total = ended.timings.total_ms;
    entry.dirty = true;
  };
  const update = (cluster) => {
    const live = new Set();
    for (const request of cluster.requests) {
      live.add(request.id);
      const entry = entries.get(request.id) || add(request.id, request.label);
      if (entry.ended) continue;
      follow(entry.parts, request, entry.request);
      Object.assign(entry, {request, total: request.age_ms, lost: false, dirty: true});
    }
    // All that are in flight are here: who is not among them has ended, seen
    // or not.
    if (cluster.requests.length === cluster.phases.total) {
      for (const entry of entries.values()) {
        if (entry.ended || live.has(entry.id)) continue;
        const run = entry.run();
        if (run && run.end !== null && endOf(run)) end(entry, endOf(run));
        else if (!entry.lost) entry.lost = entry.dirty = true;
      }
    }
    redraw();
  };
  const ended = (data) => {
    end(entries.get(data.id) || add(data.id, data.label), data);
    redraw();
  };
  return {
    node: h('section', {class: 'panel', 'aria-labelledby': 'req-title'}, h('h2', {id: 'req-title'}, 'Requests'),
      h('p', {class: 'legend note'}, Object.keys(NAMES).map((name) => h('span', {}, h('i', {class: name}), NAMES[name]))),
      empty, list),
    update, ended,
  };
}
