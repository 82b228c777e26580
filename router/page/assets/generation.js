// SPDX-License-Identifier: Apache-2.0
// One generation, played again at a speed that eyes can follow: in space, or
// flat, as buttons and tables. Both show the same tokens, blocks and weights.

import {announce, bytes, h, percent, short, visible} from './dom.js';
import {all, generate, runs, state} from './runs.js';
import {hasMean, layersOf, shownLayers, weightsOf} from './attention.js';
import {blockSize, keptBytes, kind, legend, positions} from './blocks.js';
import {EXAMPLES} from './examples.js';
import {flatView} from './flat.js';
import {makeFlash} from './flash.js';
import {makeScene} from './scene.js';
import {steer} from './stage.js';
import {alternatives} from './tokens.js';

const LOOKS = 6;
const SPEED = 12;         // tokens a second
const SLOW = 2.5;         // without a cache: a flash for each token

let playing = true;
let fraction = 0;         // of the next token
let speed = SPEED;
let speedChosen = false;  // by hand: it stays
let layer = 'mean';
let flat = false;
let visibleNow = false;
let scene = null;
let ui = null;
let dirty = true;
let lastFrame = 0;
const flash = makeFlash();
const player = {run: null, cursor: 0, seek,  // tokens played
  weights: (index) => weightsOf(player.run && player.run.tokens[index], layer)};

// From another view: this run, from its beginning.
export function show(run) {
  Object.assign(player, {run, cursor: 0});
  fraction = 0;
  playing = true;
  dirty = true;
  if (!speedChosen) speed = run.noCache ? SLOW : SPEED;
  if (ui) ui.picked();
}

function seek(to) {
  player.cursor = Math.max(0, Math.min(player.run ? player.run.tokens.length : 0, to));
  fraction = 0;
  playing = false;
  dirty = true;
}

const wordAt = (position) => {
  const {promptTokens, tokens} = player.run;
  return (position < promptTokens.length ? promptTokens[position] : tokens[position - promptTokens.length]).text;
};

function frame(now) {
  const {run, cursor} = player;
  const prompt = run.promptTokens.map((t, i) => ({text: t.text, kind: kind(run, i)}));
  const tokens = prompt.concat(run.tokens.slice(0, cursor).map((t) => ({text: t.text, kind: 'generated'})));
  const came = layersOf(run);
  return {
    // Over the token that the weights belong to; at first, where it will be.
    tokens, head: cursor > 0 ? tokens.length - 1 : tokens.length, playing,
    rows: came.length ? came : shownLayers(state.capabilities.layers || 1), size: blockSize(),
    held: positions(run, cursor), kinds: (i) => kind(run, i), layer: layer === 'mean' ? -1 : layer,
    weights: cursor > 0 ? player.weights(cursor - 1) : null,
    of: (l) => (cursor > 0 ? weightsOf(run.tokens[cursor - 1], l) : null),
    // Without a cache all that is there was computed again for this token.
    again: run.noCache && cursor > 0 ? flash.level(now, playing) : 0,
  };
}

// ------------------------------------------------------------ figures

function figures() {
  const node = h('dl', {class: 'figures hud'});
  return {node, update: () => {
    const {run, cursor} = player;
    const held = run ? positions(run, cursor) : 0;
    const token = run && run.tokens[cursor - 1];
    const w = token && (token.work || (cursor === run.tokens.length ? run.work : null));
    const values = [['sequence', `${run ? run.promptTokens.length + cursor : 0}`], ['KV cache', run ? bytes(keptBytes(held)) : '–'],
      ['blocks', run ? `${Math.ceil(held / blockSize())}` : '–'],
      ['compute so far', w ? `${short(w.matrix_flops + w.attention_flops)}FLOP` : '–'],
      ['K/V rows so far', w ? short(w.kv_rows, 4) : '–'], ['read so far', w ? bytes(w.weight_bytes_read + w.kv_bytes_read) : '–']];
    node.replaceChildren(...values.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
  }};
}

function looksAt(index) {
  const w = player.weights(index);
  if (!w) {
    return h('p', {class: 'note'}, state.capabilities.attention ? 'No attention weights came with this answer.'
      : 'Attention weights need --enable-attention-output.');
  }
  const order = [...w.keys()].sort((i, j) => w[j] - w[i]).slice(0, LOOKS);
  return h('div', {class: 'alternatives'}, h('table', {},
    h('caption', {}, layer === 'mean' ? 'It looked at, mean of all layers' : `It looked at, layer ${layer}`),
    h('thead', {class: 'visually-hidden'}, h('tr', {}, ['Token', 'Share', 'Weight'].map((t) => h('th', {scope: 'col'}, t)))),
    h('tbody', {}, order.map((i) => h('tr', {}, h('th', {scope: 'row'}, h('code', {}, visible(wordAt(i))), h('span', {class: 'note'}, ` ${i}`)),
      h('td', {class: 'bar-cell'}, h('span', {class: `bar-fill ${kind(player.run, i)}`, style: {width: `${Math.max(0.5, w[i] * 100)}%`}})),
      h('td', {class: 'number'}, percent(w[i])))))));
}

function side() {
  const node = h('div', {class: 'panel side'});
  return {node, update: () => {
    const {run, cursor} = player;
    const token = run && cursor > 0 ? run.tokens[cursor - 1] : null;
    if (!token) {
      node.replaceChildren(h('h2', {}, 'The newest token'), h('p', {class: 'note'}, run ? 'The prompt is computed in one pass.' : 'Nothing was generated yet.'));
      return;
    }
    node.replaceChildren(h('h2', {}, 'The newest token', h('code', {class: 'big-token'}, visible(token.text))),
      alternatives(token, run.promptTokens.length + cursor - 1), looksAt(cursor - 1));
  }};
}

// ------------------------------------------------------------ playing

function tick(now) {
  if (!visibleNow) return;
  requestAnimationFrame(tick);
  const seconds = Math.min(0.1, (now - lastFrame) / 1000);
  lastFrame = now;
  const {run, cursor: before} = player;
  if (run && playing) {
    fraction += seconds * speed;
    while (fraction >= 1 && player.cursor < run.tokens.length) { ++player.cursor; fraction -= 1; }
    if (player.cursor >= run.tokens.length) {
      fraction = Math.min(fraction, 1);
      if (run.end !== null) { playing = false; dirty = true; }
    }
  }
  const moved = player.cursor !== before;
  if (moved) flash.strike(now);
  if (moved || dirty) ui.update();
  if (scene && !flat && run) {
    const changed = dirty || moved || (run.noCache && flash.fading(now));
    if (changed) scene.setFrame(frame(now));
    if (scene.move(seconds) || changed) scene.draw();
  }
  dirty = false;
}

// A set of buttons of which one is pressed.
function choice(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    h('button', {type: 'button', class: 'quiet', 'aria-pressed': String(value === chosen), onclick: () => pick(value)}, text));
  const press = (value) => buttons.forEach((b, i) => b.setAttribute('aria-pressed', String(options[i][0] === value)));
  const pick = (value) => { press(value); onChoose(value); dirty = true; };
  return {node: h('div', {class: 'choice', role: 'group', 'aria-label': label}, buttons), press};
}

function starter() {
  const input = h('input', {type: 'text', id: 'gen-prompt', 'aria-label': 'Prompt', value: EXAMPLES[0][1]});
  const without = h('input', {type: 'checkbox', id: 'gen-no-cache'});
  const button = h('button', {type: 'submit', class: 'primary'}, 'Generate');
  const start = async () => {
    if (!input.value.trim() || button.disabled) return;
    const prompt = state.capabilities.chat ? [{role: 'user', content: input.value}] : input.value;
    const made = generate(prompt, {max_tokens: 96, temperature: 0, placement: 'split',
      ...(without.checked ? {no_kv_cache: true} : {})}, {attention: true, title: input.value});
    show(made);
    button.disabled = true;
    await made.ended;
    button.disabled = false;
    announce(made.error ? `Failed: ${made.error}` : `Generated ${made.tokens.length} tokens.`);
  };
  const chips = EXAMPLES.map(([name, text]) => h('button', {type: 'button', class: 'quiet', title: text,
    onclick: () => { input.value = text; start(); }}, name));
  return h('form', {class: 'starter', onsubmit: (e) => { e.preventDefault(); start(); }},
    h('div', {class: 'chips', role: 'group', 'aria-label': 'Example prompts'}, chips), input,
    state.capabilities.no_kv_cache && h('span', {class: 'check'}, without, h('label', {for: 'gen-no-cache'}, 'without cache')), button);
}

// Play, position, speed.
function controls() {
  const play = h('button', {type: 'button', class: 'quiet play'}, 'Play');
  play.addEventListener('click', () => {
    if (!player.run) return;
    if (!playing && player.cursor >= player.run.tokens.length) player.cursor = 0;
    playing = !playing;
    dirty = true;
  });
  const position = h('input', {type: 'range', min: 0, max: 0, step: 1, value: 0, id: 'position', 'aria-label': 'Token'});
  position.addEventListener('input', () => { seek(Number(position.value)); flash.strike(performance.now()); });
  const rateText = h('output', {for: 'speed'});
  const rate = h('input', {type: 'range', min: 0.5, max: 60, step: 0.5, id: 'speed'});
  rate.addEventListener('input', () => { speed = Number(rate.value); speedChosen = true; dirty = true; });
  return {
    node: h('div', {class: 'controls player'}, play, position,
      h('div', {class: 'inline'}, h('label', {for: 'speed'}, 'Speed'), rate, rateText)),
    update: () => {
      const {run, cursor} = player;
      play.textContent = playing && run ? 'Pause' : 'Play';
      position.max = run ? run.tokens.length : 0;
      position.value = cursor;
      const word = run && cursor > 0 ? `: ${run.tokens[cursor - 1].text.trim() || 'space'}` : '';
      position.setAttribute('aria-valuetext', `${cursor} of ${run ? run.tokens.length : 0}${word}`);
      rate.value = speed;
      rateText.textContent = `${speed} tokens/s`;
      rate.setAttribute('aria-valuetext', `${speed} tokens a second`);
    },
  };
}

function layerChoice() {
  const layers = h('select', {id: 'layer'});
  layers.addEventListener('change', () => { layer = layers.value === 'mean' ? 'mean' : Number(layers.value); dirty = true; });
  const update = () => {
    const known = layersOf(player.run);
    const begun = player.run.tokens.length > 0;
    const offered = begun ? known : shownLayers(state.capabilities.layers || 1);
    const mean = !begun || !known.length || hasMean(player.run, state.capabilities.layers);
    layers.replaceChildren(...(mean ? [h('option', {value: 'mean'}, 'mean of all')] : []), ...offered.map((l) => h('option', {value: l}, `layer ${l}`)));
    if (layer === 'mean' ? !mean : !offered.includes(layer)) layer = mean ? 'mean' : offered[Math.floor(offered.length / 2)];
    layers.value = String(layer);
  };
  return {node: h('div', {class: 'inline'}, h('label', {for: 'layer'}, 'Attention'), layers), update};
}

export function generationView(section) {
  const canvas = h('canvas', {class: 'scene', tabindex: 0, role: 'img', id: 'scene',
    'aria-label': 'The generation in space; arrow keys turn it, plus and minus zoom. “Flat” shows the same as text.'});
  const overlay = h('canvas', {class: 'scene-words', 'aria-hidden': 'true'});
  const zoom = (text, name, factor) => h('button', {type: 'button', 'aria-label': name, title: name,
    onclick: () => { if (scene) scene.zoom(factor); dirty = true; }}, text);
  const hint = h('p', {class: 'stage-hint note'}, 'Tokens, their KV cache and what they look at: press Generate.');
  const stage = h('div', {class: 'stage'}, canvas, overlay, hint,
    h('div', {class: 'zoom'}, zoom('+', 'Zoom in', 0.8), zoom('−', 'Zoom out', 1.25)));
  const hud = figures();
  const panel = side();
  const twin = flatView(player);
  const playback = controls();
  const layers = layerChoice();
  const note = h('p', {class: 'note', id: 'gen-note'}, '');
  let trouble = '';

  const setFlat = (value) => {
    flat = value;
    modes.press(flat);
    stage.hidden = flat;
    twin.node.hidden = !flat;
    cameras.node.hidden = flat;
    dirty = true;
  };
  const cameras = choice('Camera', [['follow', 'Follow'], ['overview', 'Overview'], ['top', 'From the top'], ['side', 'Side']], 'follow',
    (name) => scene && scene.setPreset(name));
  const modes = choice('View', [[false, '3D'], [true, 'Flat']], false, setFlat);
  let wasFlat = false;
  const onLost = (lost) => {
    trouble = lost ? 'The graphics context was lost: this is the flat view.' : '';
    modes.node.hidden = lost;
    if (lost) wasFlat = flat;
    setFlat(lost || wasFlat);
  };
  try {
    scene = makeScene(canvas, overlay, onLost);
    trouble = scene ? '' : 'This browser has no WebGL: this is the flat view.';
  } catch (error) {
    trouble = error.message;
  }
  if (!scene) {
    setFlat(true);
    modes.node.hidden = true;
  }

  const words = () => {
    const {run} = player;
    if (!run) return 'Generate something, or open an answer of the chat with “See it generated”.';
    return `${run.title || 'An answer'}${run.noCache ? ' — without a KV cache: what is red is computed again' : ''}${run.error ? ` — ${run.error}` : ''}`;
  };
  ui = {
    update: () => {
      playback.update();
      hud.update();
      panel.update();
      if (flat) twin.update();
      hint.hidden = !!player.run;
      note.textContent = [words(), trouble].filter(Boolean).join(' ');
    },
    picked: () => { layers.update(); dirty = true; },
  };
  steer(canvas, () => scene, () => { dirty = true; });
  section.append(
    h('div', {class: 'head'}, h('div', {}, h('h1', {id: 'generation-title'}, 'Token by token'), note), starter()),
    hud.node,
    h('div', {class: 'theatre'}, h('div', {class: 'theatre-main'},
      h('div', {class: 'controls'}, modes.node, cameras.node, layers.node),
      stage, twin.node, playback.node,
      legend(...(state.capabilities.no_kv_cache ? ['cached', 'prompt', 'generated', 'again'] : ['cached', 'prompt', 'generated']))), panel.node));
  runs.addEventListener('grown', (event) => {
    if (event.detail !== player.run) return;
    if (player.run.tokens.length && !player.run.offered) { player.run.offered = true; layers.update(); }
    dirty = true;
  });
  runs.addEventListener('ended', (event) => { if (event.detail === player.run) ui.picked(); });
  runs.addEventListener('colours', () => { if (scene) scene.recolour(); dirty = true; });
  new ResizeObserver(() => { dirty = true; }).observe(stage);
  ui.update();
  return {
    shown: (on) => {
      if (on && !player.run && all.length) show(all[all.length - 1]);
      if (on && !visibleNow) {
        visibleNow = true;
        lastFrame = performance.now();
        dirty = true;
        requestAnimationFrame(tick);
      }
      visibleNow = on;
    },
    // For tests: what is drawn.
    drawn: () => ({cursor: player.cursor, playing, ...(scene ? scene.counts() : {})}),
  };
}
