// SPDX-License-Identifier: Apache-2.0
// Requests as bars of time. While one is in flight its phases are as the feed
// saw them; at its end they are what router and workers measured.

import {bytes, h, milliseconds, short} from './dom.js';
import {all, state} from './runs.js';
import {show} from './generation.js';

const MOST = 24;
const NAMES = {queue: 'queue', prefill: 'prefill', handoff: 'handoff', decode: 'decode'};
// Which part of the bar a phase of the router belongs to.
const PART = {queued: 'queue', opening: 'queue', prefilling: 'prefill', handing_over: 'decode',
  decoding: 'decode', retrying: 'queue'};

// [{part, from, to}] in milliseconds since admission.
export function measured(ended) {
  const t = ended.timings;
  const split = !!t.prefill_worker && t.prefill_ms > 0;
  const first = t.time_to_first_token_ms || t.total_ms;
  const parts = [{part: 'queue', from: 0, to: Math.min(t.queue_ms, first)},
    {part: 'prefill', from: Math.min(t.queue_ms, first), to: first},
    {part: 'decode', from: first, to: t.total_ms}];
  if (split && t.handoff_ms > 0) {
    const to = first + (t.handoff_exposed_ms || 0);
    parts.push({part: 'handoff', from: Math.max(t.queue_ms, to - t.handoff_ms), to});
  }
  return parts;
}

function bar(parts, scale) {
  return h('span', {class: 'track', 'aria-hidden': 'true'}, parts.map(({part, from, to}) =>
    h('i', {class: part, style: {left: `${(from / scale) * 100}%`, width: `${Math.max(0, (to - from) / scale) * 100}%`}})));
}

function pairs(list) {
  return h('dl', {class: 'pairs'}, list.filter(([, v]) => v !== undefined && v !== null && v !== '')
    .map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, String(value)))));
}

function details(entry) {
  const {ended} = entry;
  if (!ended) {
    const r = entry.request;
    return pairs([['Phase', r.phase.replace('_', ' ')], ['Prompt', `${r.prompt_tokens} tokens`], ['Output', `${r.output_tokens} tokens`],
      ['Prefill', r.prefill_worker || 'by the decode worker'], ['Decode', r.decode_worker]]);
  }
  const t = ended.timings;
  const u = ended.usage;
  const w = ended.work;
  return pairs([
    ['Queue', milliseconds(t.queue_ms)], ['Prefill', t.prefill_ms ? milliseconds(t.prefill_ms) : 'by the decode worker'],
    ['Handoff', t.handoff_ms ? `${milliseconds(t.handoff_ms)}, of which ${milliseconds(t.handoff_exposed_ms)} after the first token` : ''],
    ['Moved', t.kv_bytes ? `${bytes(t.kv_bytes)} by ${t.way}` : ''],
    ['First token', milliseconds(t.time_to_first_token_ms)], ['Decode', milliseconds(t.decode_ms)], ['Total', milliseconds(t.total_ms)],
    ['Prompt', `${u.prompt_tokens} tokens, ${u.prompt_tokens_details.cached_tokens} cached`],
    ['Output', `${u.completion_tokens} tokens`],
    ['Compute', w ? `${short(w.matrix_flops + w.attention_flops)}FLOP in ${w.steps} steps` : ''],
    ['K/V rows', w ? short(w.kv_rows, 4) : ''],
    ['Workers', [t.prefill_worker, t.decode_worker].filter(Boolean).join(' → ')],
    ['Attempts redone', t.retries || ''], ['Gave way', t.preemptions || ''],
    ['Ended', ended.ok ? ended.finish_reason : ended.client_gone ? 'its client went' : ended.error]]);
}

function makeRow(entry) {
  const summary = h('summary', {});
  const body = h('div', {class: 'req-body'});
  const node = h('details', {class: 'req'}, summary, body);
  node.addEventListener('toggle', () => { if (node.open) body.replaceChildren(details(entry), ...entry.extra()); });
  return {node, summary, body};
}

export function timelines() {
  const list = h('div', {class: 'reqs'});
  const entries = new Map();  // by internal id, oldest first
  const empty = h('p', {class: 'note'}, 'Requests appear here as they come.');

  const scale = () => Math.max(20, ...[...entries.values()].map((e) => e.total));
  const draw = (entry, most) => {
    const {ended} = entry;
    const mine = all.some((run) => run.label === entry.label);
    const state_ = ended ? (ended.ok ? '' : ' failed') : ' live';
    entry.row.node.className = `req${state_}`;
    const phase = ended ? milliseconds(entry.total) : entry.request.phase.replace('_', ' ');
    entry.row.summary.replaceChildren(
      h('span', {class: 'req-id mono'}, entry.id.slice(0, 6), mine && h('span', {class: 'mine'}, 'this page')),
      bar(entry.parts, most), h('span', {class: 'req-total number'}, phase));
    if (entry.row.node.open) entry.row.body.replaceChildren(details(entry), ...entry.extra());
  };
  const redraw = () => {
    empty.hidden = entries.size > 0;
    const most = scale();
    for (const entry of entries.values()) {
      if (entry.dirty || most !== entry.scale) draw(entry, most);
      entry.dirty = false;
      entry.scale = most;
    }
  };
  const add = (id, label) => {
    const entry = {id, label, request: null, ended: null, parts: [], total: 0, dirty: true};
    entry.extra = () => {
      const run = all.find((r) => r.label === label);
      return run ? [h('button', {type: 'button', class: 'quiet', onclick: () => { show(run); location.hash = '#generation'; }}, 'See it generated')] : [];
    };
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
  const update = (cluster) => {
    for (const request of cluster.requests) {
      const entry = entries.get(request.id) || add(request.id, request.label);
      if (entry.ended) continue;
      entry.request = request;
      const part = PART[request.phase] || 'queue';
      const last = entry.parts[entry.parts.length - 1];
      if (last) last.to = request.age_ms;
      if (!last || last.part !== part) entry.parts.push({part, from: request.age_ms, to: request.age_ms});
      entry.total = request.age_ms;
      entry.dirty = true;
    }
    redraw();
  };
  const ended = (data) => {
    const entry = entries.get(data.id) || add(data.id, data.label);
    entry.ended = data;
    entry.parts = measured(data);
    entry.total = data.timings.total_ms;
    entry.dirty = true;
    redraw();
  };
  return {
    node: h('section', {class: 'panel', 'aria-labelledby': 'req-title'}, h('h2', {id: 'req-title'}, 'Requests'),
      h('p', {class: 'legend note'}, Object.keys(NAMES).map((name) => h('span', {}, h('i', {class: name}), NAMES[name]))),
      empty, list),
    update, ended,
  };
}
