// SPDX-License-Identifier: Apache-2.0
// What the chat sends along; kept in this browser.

import {h} from './dom.js';
import {key, setKey} from './api.js';
import {state} from './runs.js';

const KEPT = 'tandem.settings';
const values = {system: '', temperature: 0.7, top_p: 1, top_k: 0, max_tokens: 256, seed: '',
  placement: 'auto', no_kv_cache: false, attention: true};
// Kept for any model; the others belong to the one that they were set for.
const GENERAL = ['system', 'placement', 'attention'];
let changed = {};

export function loadSettings() {
  const {temperature, top_p, top_k} = state.capabilities.defaults;
  Object.assign(values, {temperature, top_p, top_k});
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT) || '{}');
    for (const [name, value] of Object.entries(kept.changed || {})) {
      if (name in values && (GENERAL.includes(name) || kept.model === state.capabilities.model)) changed[name] = value;
    }
  } catch {
    changed = {};  // what was kept is of no use
  }
  Object.assign(values, changed);
}

function set(name, value) {
  values[name] = value;
  if (name === 'no_kv_cache') return;  // for this visit
  changed[name] = value;
  try {
    localStorage.setItem(KEPT, JSON.stringify({model: state.capabilities.model, changed}));
  } catch { /* a private window keeps nothing */ }
}

// As fields of the API.
export function fields() {
  const out = {temperature: values.temperature, top_p: values.top_p, top_k: values.top_k,
    max_tokens: values.max_tokens};
  if (values.seed !== '') out.seed = Number(values.seed);
  if (values.placement !== 'auto') out.placement = values.placement;
  if (values.no_kv_cache) out.no_kv_cache = true;
  return out;
}

// Whether answers bring weights along, for the generation view.
export const wantsAttention = () => values.attention;

export const systemPrompt = () => values.system.trim();

function slider(id, text, name, min, max, by, hint) {
  const shown = h('output', {for: id}, String(values[name]));
  const input = h('input', {type: 'range', id, min, max, step: by, value: values[name],
    'aria-describedby': `${id}-hint`});
  input.value = values[name];
  input.addEventListener('input', () => {
    set(name, Number(input.value));
    shown.textContent = input.value;
  });
  return h('div', {class: 'field'}, h('label', {for: id}, text, shown), input,
    h('p', {class: 'hint', id: `${id}-hint`}, hint));
}

function number(id, text, name, attributes, hint) {
  const input = h('input', {type: 'number', id, inputmode: 'numeric', ...attributes,
    'aria-describedby': `${id}-hint`});
  input.value = values[name];
  input.addEventListener('input', () => {
    if (!input.checkValidity()) return;
    set(name, input.value === '' ? (name === 'seed' ? '' : Number(attributes.min)) : Number(input.value));
  });
  return h('div', {class: 'field'}, h('label', {for: id}, text), input,
    h('p', {class: 'hint', id: `${id}-hint`}, hint));
}

export function settingsForm() {
  const can = state.capabilities;
  const system = h('textarea', {id: 'system', rows: 2});
  system.value = values.system;
  system.addEventListener('input', () => set('system', system.value));
  const placement = h('select', {id: 'placement'},
    [['auto', 'Automatic'], ['split', 'Prefill worker, then decode worker'], ['local', 'Decode worker alone']]
      .map(([value, text]) => h('option', {value}, text)));
  placement.value = values.placement;
  placement.addEventListener('change', () => set('placement', placement.value));
  const attention = h('input', {type: 'checkbox', id: 'attention', checked: values.attention});
  attention.addEventListener('change', () => set('attention', attention.checked));
  const noCache = h('input', {type: 'checkbox', id: 'no-cache'});
  noCache.addEventListener('change', () => set('no_kv_cache', noCache.checked));
  const secret = h('input', {type: 'password', id: 'key', autocomplete: 'off', spellcheck: 'false'});
  secret.value = key();
  secret.addEventListener('change', () => { setKey(secret.value.trim()); location.reload(); });
  return h('form', {class: 'settings', onsubmit: (e) => e.preventDefault()},
    can.chat && h('div', {class: 'field wide'}, h('label', {for: 'system'}, 'System prompt'), system),
    slider('temperature', 'Temperature', 'temperature', 0, 2, 0.05, '0 always takes the most probable token'),
    slider('top-p', 'Top p', 'top_p', 0.05, 1, 0.05, 'The smallest set with this probability'),
    number('top-k', 'Top k', 'top_k', {min: 0, max: 1000, step: 1}, '0 keeps all'),
    number('max-tokens', 'Most tokens', 'max_tokens', {min: 1, max: can.max_model_len || 4096, step: 1},
      `Of a context of ${can.max_model_len || '…'}`),
    number('seed', 'Seed', 'seed', {min: 0, max: Number.MAX_SAFE_INTEGER, step: 1},
      'Equal seeds give equal answers; empty draws one'),
    h('div', {class: 'field'}, h('label', {for: 'placement'}, 'Computed by'), placement,
      h('p', {class: 'hint'}, 'The answer is the same')),
    can.no_kv_cache && h('div', {class: 'field check'}, noCache, h('label', {for: 'no-cache'},
      'Without KV cache', h('span', {class: 'hint'}, 'Every token computes the whole sequence again'))),
    can.attention && h('div', {class: 'field check'}, attention, h('label', {for: 'attention'},
      'Attention weights', h('span', {class: 'hint'}, 'Come with every token, for “See it generated”'))),
    h('div', {class: 'field'}, h('label', {for: 'key'}, 'API key'), secret,
      h('p', {class: 'hint'}, 'Where the server asks for one; kept until this tab closes')));
}
