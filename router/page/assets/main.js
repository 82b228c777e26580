// SPDX-License-Identifier: Apache-2.0
// Starts the page: capabilities, colours, and which view is shown.

import {byId, h, warn} from './dom.js';
import {get, watch} from './api.js';
import {state, runs} from './runs.js';
import {loadSettings, settingsForm} from './settings.js';
import {chatView} from './chat.js';
import {machineView} from './machine.js';
import {generationView} from './generation.js';
import {cacheView} from './cache.js';

const NAMES = ['chat', 'machine', 'generation', 'cache'];
export const views = {};  // for tests
let feed = null;  // an AbortController while somebody looks

function onFeed(event, data) {
  if (event === 'state') {
    state.cluster = data;
    state.workers = data.workers;
  }
  runs.dispatchEvent(new CustomEvent(`feed-${event}`, {detail: data}));
}

// The feed costs the server a little: only a page that is looked at has one.
function setFeed(on) {
  if (!state.capabilities.events || on === !!feed) return;
  if (!on) {
    feed.abort();
    feed = null;
    return;
  }
  feed = new AbortController();
  watch(feed.signal, onFeed, (connected, reason) => {
    runs.dispatchEvent(new CustomEvent('feed-told', {detail: {connected, reason}}));
  });
}

function go() {
  const name = NAMES.includes(location.hash.slice(1)) ? location.hash.slice(1) : 'chat';
  for (const other of NAMES) byId(`view-${other}`).hidden = other !== name;
  document.body.dataset.view = name;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === `#${name}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  document.title = name === 'chat' ? 'Tandem' : `${name[0].toUpperCase()}${name.slice(1)} – Tandem`;
  for (const [other, view] of Object.entries(views)) if (view && view.shown) view.shown(other === name);
  setFeed(name !== 'chat' && !document.hidden);
}

function colours() {
  const order = ['auto', 'light', 'dark'];
  const words = {auto: 'as the system', light: 'light', dark: 'dark'};
  const button = byId('theme');
  let now = 'auto';
  try { now = localStorage.getItem('tandem.theme') || 'auto'; } catch { /* keeps nothing */ }
  const apply = () => {
    if (now === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = now;
    button.setAttribute('aria-label', `Colours: ${words[now]}`);
    button.title = `Colours: ${words[now]}`;
    runs.dispatchEvent(new CustomEvent('colours'));
  };
  button.addEventListener('click', () => {
    now = order[(order.indexOf(now) + 1) % order.length];
    try { localStorage.setItem('tandem.theme', now); } catch { /* keeps nothing */ }
    apply();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', apply);
  apply();
}

async function start() {
  colours();
  try {
    state.capabilities = await get('/v1/tandem/capabilities');
  } catch (error) {
    warn(error.code === 401 || error.code === 403
      ? 'This server wants an API key.' : `The server does not answer: ${error.message}`);
    state.capabilities = {chat: true, defaults: {}, max_model_len: 0, events: false};
    byId('view-chat').append(h('h1', {id: 'chat-title'}, 'Not connected'), settingsForm());
    return;
  }
  loadSettings();
  byId('model').textContent = state.capabilities.model;
  views.chat = chatView(byId('view-chat'));
  views.machine = machineView(byId('view-machine'));
  views.generation = generationView(byId('view-generation'));
  views.cache = cacheView(byId('view-cache'));
  addEventListener('hashchange', go);
  addEventListener('visibilitychange', go);
  go();
}

start();
