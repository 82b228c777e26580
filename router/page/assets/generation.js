// SPDX-License-Identifier: Apache-2.0
// One generation, played again at a speed that eyes can follow: in space, or
// flat, as buttons and tables. Both show the same tokens, blocks and weights.

import {announce, bytes, calm, h, percent, short, visible} from './dom.js';
import {all, generate, runs, state} from './runs.js';
import {blockGrid, bytesPerToken, kind, legend, positions} from './blocks.js';
import {makeScene} from './scene.js';
import {alternatives} from './tokens.js';

const STORY = 'Tell me a story about a cat.';
const LOOKS = 6;
const FLASH_MS = 450;

let run = null;
let cursor = 0;          // tokens played
let fraction = 0;        // of the next one
let playing = true;
let speed = 12;          // tokens a second
let layer = 'mean';
let flat = false;
let visibleNow = false;
let scene = null;
let ui = null;
let dirty = true;
let lastFrame = 0;
let flashed = -1e9;

// From another view: this run, from its beginning.
export function show(other) {
  run = other;
  cursor = 0;
  fraction = 0;
  playing = true;
  dirty = true;
  if (ui) ui.picked();
}

// Weights of the row that output token `index` was drawn from, by position.
function weights(index) {
  const attention = run && run.tokens[index] && run.tokens[index].attention;
  if (!attention || !attention.length) return null;
  if (layer !== 'mean') {
    const found = attention.find((a) => a.layer === layer);
    return found ? found.weights : null;
  }
  if (attention.length === 1) return attention[0].weights;
  const sum = new Float32Array(attention[0].weights.length);
  for (const a of attention) a.weights.forEach((w, i) => { sum[i] += w / attention.length; });
  return sum;
}

const wordAt = (position) => {
  const p = run.promptTokens.length;
  return position < p ? run.promptTokens[position].text : run.tokens[position - p].text;
};

function frame(now) {
  const prompt = run.promptTokens.map((t, i) => ({text: t.text, kind: i < run.cached ? 'cached' : 'prompt'}));
  const tokens = prompt.concat(run.tokens.slice(0, cursor).map((t) => ({text: t.text, kind: 'generated'})));
  const since = now - flashed;
  return {
    tokens, head: tokens.length - 1, layers: state.capabilities.layers || 1,
    size: state.capabilities.kv_block_size || 16, held: positions(run, cursor), kinds: (i) => kind(run, i),
    weights: cursor > 0 ? weights(cursor - 1) : null, layer: layer === 'mean' ? -1 : layer,
    // Without a cache all that is there was computed again for this token.
    again: run.noCache && cursor > 0 ? (calm() ? 0.8 : Math.max(0.12, 1 - since / FLASH_MS)) : 0,
  };
}

// ------------------------------------------------------------ figures

function figures() {
  const node = h('dl', {class: 'figures hud'});
  return {node, update: () => {
    const length = run ? run.promptTokens.length + cursor : 0;
    const perToken = bytesPerToken();
    const held = run ? positions(run, cursor) : 0;
    const w = run && run.work;
    const values = [['sequence', `${length}`], ['KV cache', perToken ? bytes(held * perToken) : '–'],
      ['blocks', run ? `${Math.ceil(held / (state.capabilities.kv_block_size || 16))}` : '–'],
      ['compute, in all', w ? `${short(w.matrix_flops + w.attention_flops)}FLOP` : run && run.end === null ? 'at the end' : '–'],
      ['K/V rows, in all', w ? short(w.kv_rows, 4) : '–']];
    node.replaceChildren(...values.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
  }};
}

function looksAt(index) {
  const w = weights(index);
  if (!w) {
    return h('p', {class: 'note'}, state.capabilities.attention ? 'No attention weights came with this answer.'
      : 'Attention weights need --enable-attention-output.');
  }
  const order = [...w.keys()].sort((i, j) => w[j] - w[i]).slice(0, LOOKS);
  return h('div', {class: 'alternatives'}, h('table', {},
    h('caption', {}, layer === 'mean' ? 'It looked at, mean of all layers' : `It looked at, layer ${layer}`),
    h('thead', {class: 'visually-hidden'}, h('tr', {}, ['Token', 'Share', 'Weight'].map((t) => h('th', {scope: 'col'}, t)))),
    h('tbody', {}, order.map((i) => h('tr', {}, h('th', {scope: 'row'}, h('code', {}, visible(wordAt(i))), h('span', {class: 'note'}, ` ${i}`)),
      h('td', {class: 'bar-cell'}, h('span', {class: `bar-fill ${kind(run, i)}`, style: {width: `${Math.max(0.5, w[i] * 100)}%`}})),
      h('td', {class: 'number'}, percent(w[i])))))));
}

function side() {
  const node = h('div', {class: 'panel side'});
  return {node, update: () => {
    const token = run && cursor > 0 ? run.tokens[cursor - 1] : null;
    if (!token) {
      node.replaceChildren(h('h2', {}, 'The newest token'), h('p', {class: 'note'}, run ? 'The prompt is computed in one pass.' : 'Nothing was generated yet.'));
      return;
    }
    node.replaceChildren(h('h2', {}, 'The newest token', h('code', {class: 'big-token'}, visible(token.text))),
      alternatives(token, run.promptTokens.length + cursor - 1), looksAt(cursor - 1));
  }};
}

// ------------------------------------------------------------ the flat twin

function flatView() {
  const strip = h('div', {class: 'tokens', role: 'toolbar', 'aria-label': 'Tokens of prompt and answer'});
  const grid = blockGrid();
  let drawnRun = null;
  let drawn = 0;
  const add = (text, name, position, count) => {
    const button = h('button', {type: 'button', class: `token ${name}`, tabindex: strip.children.length ? -1 : 0,
      'aria-label': `${text.trim() || 'space'}, ${name}, position ${position}`}, visible(text));
    button.addEventListener('click', () => seek(count));
    strip.append(button);
  };
  strip.addEventListener('keydown', (event) => {
    const buttons = [...strip.children];
    const now = buttons.indexOf(document.activeElement);
    const to = {ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: buttons.length - 1}[event.key];
    if (now < 0 || !buttons[to]) return;
    event.preventDefault();
    buttons[now].tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
  });
  const update = () => {
    if (run !== drawnRun || drawn > run.tokens.length) {
      strip.replaceChildren();
      drawnRun = run;
      drawn = -1;
    }
    if (!run || !run.promptTokens.length) return;
    if (drawn < 0) {
      run.promptTokens.forEach((t, i) => add(t.text, i < run.cached ? 'cached' : 'prompt', i, 0));
      drawn = 0;
    }
    for (; drawn < run.tokens.length; ++drawn) add(run.tokens[drawn].text, 'generated', run.promptTokens.length + drawn, drawn + 1);
    const w = cursor > 0 ? weights(cursor - 1) : null;
    let most = 0;
    if (w) for (const v of w) most = Math.max(most, v);
    const p = run.promptTokens.length;
    [...strip.children].forEach((button, i) => {
      button.classList.toggle('unplayed', i >= p + cursor);
      button.setAttribute('aria-pressed', String(i === p + cursor - 1));
      const share = w && i < w.length && most > 0 ? Math.sqrt(w[i] / most) : 0;
      button.style.boxShadow = share > 0.08 ? `inset 0 -3px 0 rgb(from var(--decode) r g b / ${share.toFixed(2)})` : '';
    });
    grid.update(run, cursor);
    grid.node.classList.toggle('again', run.noCache);
  };
  return {node: h('div', {class: 'flat panel', hidden: true}, h('h2', {}, 'Tokens'),
    h('p', {class: 'note'}, 'The line below a token is how much the newest one looked at it.'), strip,
    h('h2', {}, 'One layer’s KV blocks'), grid.node), update};
}

// ------------------------------------------------------------ playing

function seek(to) {
  cursor = Math.max(0, Math.min(run ? run.tokens.length : 0, to));
  fraction = 0;
  playing = false;
  flashed = performance.now();
  dirty = true;
  ui.drawControls();
}

function tick(now) {
  if (!visibleNow) return;
  requestAnimationFrame(tick);
  const seconds = Math.min(0.1, (now - lastFrame) / 1000);
  lastFrame = now;
  const before = cursor;
  if (run && playing) {
    fraction += seconds * speed;
    while (fraction >= 1 && cursor < run.tokens.length) { ++cursor; fraction -= 1; }
    if (cursor >= run.tokens.length) {
      fraction = Math.min(fraction, 1);
      if (run.end !== null) playing = false;
    }
  }
  if (cursor !== before || dirty) {
    if (cursor !== before) flashed = now;
    ui.drawControls();
    ui.update();
  }
  const moving = scene && !flat && scene.moveCamera(seconds);
  const flashing = run && run.noCache && now - flashed < FLASH_MS + 100;
  if (scene && !flat && run) {
    const changed = dirty || flashing || cursor !== before;
    if (changed) scene.setFrame(frame(now));
    if (changed || moving) scene.draw();
  }
  dirty = false;
}

function drag(canvas) {
  const held = new Map();
  canvas.addEventListener('pointerdown', (event) => {
    held.set(event.pointerId, [event.clientX, event.clientY]);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointermove', (event) => {
    const from = held.get(event.pointerId);
    if (!from || !scene) return;
    scene.turn(-(event.clientX - from[0]) * 0.006, (event.clientY - from[1]) * 0.005);
    held.set(event.pointerId, [event.clientX, event.clientY]);
    dirty = true;
  });
  for (const end of ['pointerup', 'pointercancel']) canvas.addEventListener(end, (event) => held.delete(event.pointerId));
  canvas.addEventListener('wheel', (event) => {
    if (!scene || !(event.ctrlKey || document.activeElement === canvas)) return;
    event.preventDefault();
    scene.zoom(Math.exp(event.deltaY * 0.0012));
    dirty = true;
  }, {passive: false});
  canvas.addEventListener('keydown', (event) => {
    const act = {ArrowLeft: () => scene.turn(-0.12, 0), ArrowRight: () => scene.turn(0.12, 0), ArrowUp: () => scene.turn(0, 0.1),
      ArrowDown: () => scene.turn(0, -0.1), '+': () => scene.zoom(0.85), '=': () => scene.zoom(0.85), '-': () => scene.zoom(1.18)}[event.key];
    if (!act || !scene) return;
    event.preventDefault();
    act();
    dirty = true;
  });
}

// A set of buttons of which one is pressed.
function choice(label_, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) => {
    const button = h('button', {type: 'button', class: 'quiet', 'aria-pressed': String(value === chosen)}, text);
    button.addEventListener('click', () => {
      for (const b of buttons) b.setAttribute('aria-pressed', String(b === button));
      onChoose(value);
      dirty = true;
    });
    return button;
  });
  return h('div', {class: 'choice', role: 'group', 'aria-label': label_}, buttons);
}

function starter() {
  const input = h('input', {type: 'text', id: 'gen-prompt', 'aria-label': 'Prompt', value: STORY});
  const without = h('input', {type: 'checkbox', id: 'gen-no-cache'});
  const button = h('button', {type: 'submit', class: 'primary'}, 'Generate');
  const start = async () => {
    if (!input.value.trim()) return;
    const prompt = state.capabilities.chat ? [{role: 'user', content: input.value}] : input.value;
    const made = generate(prompt, {max_tokens: 96, temperature: 0, placement: 'split',
      ...(without.checked ? {no_kv_cache: true} : {})}, {attention: true, title: input.value});
    show(made);
    button.disabled = true;
    await made.ended;
    button.disabled = false;
    announce(made.error ? `Failed: ${made.error}` : `Generated ${made.tokens.length} tokens.`);
  };
  return h('form', {class: 'starter', onsubmit: (e) => { e.preventDefault(); start(); }}, input,
    state.capabilities.no_kv_cache && h('span', {class: 'check'}, without, h('label', {for: 'gen-no-cache'}, 'without cache')), button);
}

export function generationView(section) {
  const canvas = h('canvas', {class: 'scene', tabindex: 0, role: 'img', id: 'scene',
    'aria-label': 'The generation in space; arrow keys turn it, plus and minus zoom. “Flat” shows the same as text.'});
  const overlay = h('canvas', {class: 'scene-words', 'aria-hidden': 'true'});
  const stage = h('div', {class: 'stage'}, canvas, overlay);
  const hud = figures();
  const panel = side();
  const twin = flatView();
  const play = h('button', {type: 'button', class: 'quiet play'}, 'Play');
  play.addEventListener('click', () => {
    if (!run) return;
    if (!playing && cursor >= run.tokens.length) cursor = 0;
    playing = !playing;
    dirty = true;
  });
  const position = h('input', {type: 'range', min: 0, max: 0, step: 1, value: 0, id: 'position', 'aria-label': 'Token'});
  position.addEventListener('input', () => seek(Number(position.value)));
  const rateText = h('output', {for: 'speed'}, `${speed} tokens/s`);
  const rate = h('input', {type: 'range', min: 1, max: 60, step: 1, id: 'speed', value: speed});
  rate.value = speed;
  rate.addEventListener('input', () => { speed = Number(rate.value); rateText.textContent = `${speed} tokens/s`; });
  const layers = h('select', {id: 'layer'});
  layers.addEventListener('change', () => { layer = layers.value === 'mean' ? 'mean' : Number(layers.value); dirty = true; });
  const note = h('p', {class: 'note', id: 'gen-note'}, '');

  try {
    scene = makeScene(canvas, overlay);
  } catch (error) {
    note.textContent = error.message;
  }
  const setFlat = (value) => {
    flat = value;
    stage.hidden = flat;
    twin.node.hidden = !flat;
    cameras.hidden = flat;
    dirty = true;
  };
  const cameras = choice('Camera', [['follow', 'Follow'], ['overview', 'Overview'], ['top', 'From the top'], ['side', 'Side']], 'follow',
    (name) => scene && scene.setPreset(name));
  const modes = choice('View', [[false, '3D'], [true, 'Flat']], !scene, setFlat);

  ui = {
    drawControls: () => {
      play.textContent = playing ? 'Pause' : 'Play';
      position.max = run ? run.tokens.length : 0;
      position.value = cursor;
      position.setAttribute('aria-valuetext', `${cursor} of ${run ? run.tokens.length : 0}`);
    },
    update: () => {
      hud.update();
      panel.update();
      if (flat) twin.update();
      note.textContent = run ? `${run.title || 'An answer'}${run.noCache ? ' — without a KV cache: everything red is computed again for every token' : ''}${run.error ? ` — ${run.error}` : ''}`
        : 'Generate something, or open an answer of the chat with “See it generated”.';
    },
    picked: () => {
      const first = run.tokens[0];
      const known = first && first.attention ? first.attention.map((a) => a.layer).filter((l) => l >= 0) : [...Array(state.capabilities.layers || 0).keys()];
      layers.replaceChildren(h('option', {value: 'mean'}, 'mean of all'), ...known.map((l) => h('option', {value: l}, `layer ${l}`)));
      layers.value = layer === 'mean' || known.includes(layer) ? String(layer) : 'mean';
      layer = layers.value === 'mean' ? 'mean' : Number(layers.value);
      dirty = true;
    },
  };
  drag(canvas);
  section.append(
    h('div', {class: 'head'}, h('div', {}, h('h1', {id: 'generation-title'}, 'Token by token'), note), starter()),
    hud.node,
    h('div', {class: 'theatre'}, h('div', {class: 'theatre-main'},
      h('div', {class: 'controls'}, modes, cameras,
        h('div', {class: 'inline'}, h('label', {for: 'layer'}, 'Attention'), layers)),
      stage, twin.node,
      h('div', {class: 'controls player'}, play, position,
        h('div', {class: 'inline'}, h('label', {for: 'speed'}, 'Speed'), rate, rateText)),
      legend(...(state.capabilities.no_kv_cache ? ['cached', 'prompt', 'generated', 'again'] : ['cached', 'prompt', 'generated']))), panel.node));
  if (!scene) {
    setFlat(true);
    modes.hidden = true;
  }
  runs.addEventListener('grown', (event) => { if (event.detail === run) dirty = true; });
  runs.addEventListener('ended', (event) => { if (event.detail === run) ui.picked(); });
  runs.addEventListener('colours', () => { if (scene) scene.recolour(); dirty = true; });
  new ResizeObserver(() => { dirty = true; }).observe(stage);
  ui.update();
  return {
    shown: (on) => {
      if (on && !run && all.length) show(all[all.length - 1]);
      if (on && !visibleNow) {
        visibleNow = true;
        lastFrame = performance.now();
        dirty = true;
        requestAnimationFrame(tick);
      }
      visibleNow = on;
    },
    // For tests: what is drawn.
    drawn: () => ({cursor, ...(scene ? scene.counts() : {})}),
  };
}
