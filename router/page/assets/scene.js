// SPDX-License-Identifier: Apache-2.0
// The generation in space: tokens along x, below them one row of KV blocks for
// each layer with a cell for each position, the write head over the token that
// is written, and a beam from its tip to each position that the token looked
// at. Beams and cells are as bright as the measured weights.

import {calm} from './dom.js';
import {makeCamera} from './camera.js';
import {makeGpu} from './gl.js';
import {drawWords} from './words.js';

const MOST_BEAMS = 512;
const MOST_HALOS = 600;
// Between the tokens and the first layer: room for words, however far away.
const gap = (length) => Math.min(3, Math.max(1.4, 0.045 * length));

const hex = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16) / 255);
const mix = (a, b, t) => a.map((v, i) => v + (b[i] - v) * t);

function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => {
    const value = style.getPropertyValue(`--${name}`).trim();
    return hex(value.length === 4 ? `#${[...value.slice(1)].map((c) => c + c).join('')}` : value);
  };
  const out = {};
  for (const name of ['prefill', 'decode', 'cached', 'flash', 'ink', 'panel', 'strong-line']) out[name] = read(name);
  out.dark = out.panel[0] + out.panel[1] + out.panel[2] < 1.5;
  out.kinds = {cached: out.cached, prompt: out.prefill, generated: out.decode};
  return out;
}

// `canvas` for WebGL, `overlay` for words. Null where there is no WebGL2.
// `onLost` hears true when the context is lost, false when it came back.
export function makeScene(canvas, overlay, onLost) {
  const gl = canvas.getContext('webgl2', {antialias: true, alpha: true, premultipliedAlpha: true});
  if (!gl) return null;
  let gpu = makeGpu(gl);
  let colours = palette();
  const camera = makeCamera();
  let frame = {tokens: [], rows: [], layer: -1, share: null, head: 0};
  let rows = [1.4, 0.9, 1.8, 1];  // gap and pitch; the same when folded
  let counts = {boxes: 0, opaque: 0, cells: 0, beams: 0, halos: 0, again: 0};
  let headX = null;
  let wrote = -1e9;

  const content = () => {
    const below = Math.max(0, frame.rows.length - 1);
    const blocks = Math.ceil((frame.held || 0) / (frame.size || 1)) * frame.size || 0;
    return {length: Math.max(blocks, frame.head + 1), head: frame.head, span: frame.span || 0,
      depth: rows[0] + below * rows[1] + 0.5, flat: rows[2] + below * rows[3] + 0.7};
  };
  const aspect = () => canvas.width / Math.max(1, canvas.height);

  // Dim where nobody looks, its own colour, then nearly white (or black).
  const glowing = (base, share) => {
    const dim = mix(base, colours.panel, colours.dark ? 0.66 : 0.66);
    const hot = colours.dark ? mix(base, [1, 1, 1], 0.6) : mix(base, [0, 0, 0], 0.3);
    return share < 0.6 ? mix(dim, base, share / 0.6) : mix(base, hot, (share - 0.6) / 0.4);
  };

  function putTokens(solid) {
    frame.tokens.forEach((token, i) => {
      const newest = i === frame.head;
      const share = frame.share && i < frame.share.length ? frame.share[i] : 0;
      const c = newest ? glowing(colours.decode, 0.9) : glowing(colours.kinds[token.kind], (token.kind === 'generated' ? 0.45 : 0.2) + 0.4 * share);
      const high = newest ? 0.5 : 0.34;
      solid.push(i, 0, 0.8, high, 0.8, (high - 0.34) / 2, c[0], c[1], c[2], 1);
    });
  }

  // One row of cells and the blocks around them.
  function putRow(solid, glass, halos, row, weights, quiet) {
    const high = rows[1] * 0.34;
    for (let i = 0; i < frame.held; ++i) {
      const share = weights && i < weights.length ? Math.sqrt(weights[i] / frame.most) * quiet : 0;
      let c = glowing(colours.kinds[frame.kinds(i)], weights ? share : 0.22);
      if (frame.again > 0) c = mix(c, colours.flash, frame.again * 0.92);
      const grown = high * (1 + 0.7 * share);
      solid.push(i, row, 0.78, grown, 0.78, (grown - high) / 2, c[0], c[1], c[2], 1);
      if (share > 0.3) halos.push([i, row, colours.kinds[frame.kinds(i)], share * share]);
    }
    for (let from = 0; from < frame.held; from += frame.size) {
      const c = frame.again > 0 ? mix(colours['strong-line'], colours.flash, 0.6 * frame.again) : colours['strong-line'];
      glass.push(from + frame.size / 2 - 0.5, row, frame.size - 0.1, rows[1] * 0.62, 0.98, 0, c[0], c[1], c[2], 0.13);
    }
  }

  // frame: {tokens: [{text, kind}], head: position of the write head, held:
  //   positions with keys and values, size: of a block, kinds(position), rows:
  //   [layer], weights: of the chosen layer or the mean, of(layer): weights,
  //   layer: the chosen one or -1, again: 0..1, how red, playing}
  function setFrame(next) {
    if (next.head !== frame.head) wrote = performance.now();
    frame = next;
    let most = 1e-9;
    const of = frame.rows.map((layer) => frame.of(layer));
    for (const weights of of) if (weights) for (const w of weights) most = Math.max(most, w);
    frame.most = most;
    let greatest = 1e-9;
    if (frame.weights) for (const w of frame.weights) greatest = Math.max(greatest, w);
    frame.share = frame.weights && Float32Array.from(frame.weights, (w) => Math.sqrt(w / greatest));
    const count = Math.max(1, frame.rows.length);
    const length = frame.tokens.length;
    rows = [gap(length), Math.min(0.92, 7.5 / count), Math.max(1.8, 0.07 * length), Math.min(2.8, Math.max(1, (0.33 * length) / count))];
    const solid = [];
    const glass = [];
    const halos = [];
    putTokens(solid);
    const tokens = solid.length / 10;
    frame.rows.forEach((layer, i) => putRow(solid, glass, halos, i + 1, of[i], frame.layer < 0 || frame.layer === layer ? 1 : 0.4));
    const beams = [];
    if (frame.share) {
      const order = [...frame.share.keys()].filter((i) => frame.share[i] > 0.08).sort((a, b) => frame.share[a] - frame.share[b]).slice(-MOST_BEAMS);
      frame.span = frame.head - Math.min(frame.head, ...order);
      for (const i of order) beams.push(i, frame.share[i], ...colours.kinds[frame.tokens[i].kind]);
    }
    const brightest = halos.sort((a, b) => b[3] - a[3]).slice(0, MOST_HALOS);
    const strength = colours.dark ? 0.55 : 0.16;
    const opaque = solid.length / 10;
    counts = {boxes: opaque + glass.length / 10, opaque, cells: opaque - tokens, beams: beams.length / 5, halos: brightest.length, again: frame.again};
    gpu.set('box', new Float32Array(solid.concat(glass)));
    gpu.set('head', new Float32Array([0, 0, 0.8, 1.7, 0.8, 0, ...mix(colours.ink, colours.decode, 0.15), 1]));
    gpu.set('beam', new Float32Array(beams));
    gpu.set('halo', new Float32Array([[frame.head, 0, colours.decode, 0.9], ...brightest].flatMap(([x, row, c, a]) => [x, row, ...c, a * strength])));
    camera.aim(content(), aspect());
  }

  // The head on its way to the next token; true while it moves.
  function moveHead(seconds) {
    if (headX === null || calm() || Math.abs(frame.head - headX) > 12) headX = frame.head;
    headX += (frame.head - headX) * (1 - Math.exp(-seconds * 16));
    if (Math.abs(frame.head - headX) < 0.004) headX = frame.head;
    return headX !== frame.head || (frame.playing && !calm() && performance.now() - wrote < 700);
  }

  function resize() {
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = Math.max(1, Math.round(canvas.clientWidth * scale));
    const height = Math.max(1, Math.round(canvas.clientHeight * scale));
    if (canvas.width === width && canvas.height === height) return;
    canvas.width = overlay.width = width;
    canvas.height = overlay.height = height;
    camera.aim(content(), aspect());
  }

  function draw() {
    if (gl.isContextLost()) return;
    resize();
    const view = camera.matrix(aspect());
    const fold = camera.fold();
    const tip = [headX, 0.5 + Math.min(0.8, 0.5 * Math.abs(frame.head - headX)), 0];
    gpu.draw({view, fold, rows, additive: colours.dark, opaque: counts.opaque, tip,
      scale: canvas.width / Math.max(1, canvas.clientWidth), pulse: frame.playing && !calm() ? (performance.now() - wrote) / 500 : 9});
    const place = (x, row, y, z) => [x, y - (row ? rows[0] + (row - 1) * rows[1] : 0) * (1 - fold),
      z + (row ? rows[2] + (row - 1) * rows[3] : 0) * fold];
    drawWords(overlay, view, place, frame);
  }

  canvas.addEventListener('webglcontextlost', (event) => { event.preventDefault(); onLost(true); });
  canvas.addEventListener('webglcontextrestored', () => { gpu = makeGpu(gl); onLost(false); });
  return {
    setFrame, draw, setPreset: (name) => { camera.setPreset(name); camera.aim(content(), aspect()); },
    turn: camera.turn, zoom: camera.zoom,
    // True while something is on its way.
    move: (seconds) => { const head = moveHead(seconds); return camera.move(seconds) || head; },
    recolour: () => { colours = palette(); },
    counts: () => ({...counts}),
  };
}
