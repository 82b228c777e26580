// SPDX-License-Identifier: Apache-2.0
// The generation in space, in plain WebGL2: tokens along x, one row of KV
// blocks below them for each layer, the write head, and an arc for each
// position that the newest token looked at, as bright as its weight.
//
// Two instanced draws: boxes, and arcs. Everything else is arithmetic.

import {calm} from './dom.js';

const FOV = 0.66;
const ARC_POINTS = 24;
const MOST_ARCS = 512;

const BOX_VERTEX = `#version 300 es
layout(location=0) in vec3 corner; layout(location=1) in vec3 normal;
layout(location=2) in vec3 centre; layout(location=3) in vec3 size; layout(location=4) in vec4 colour;
uniform mat4 view; uniform vec3 light; out vec4 tint;
void main() {
  gl_Position = view * vec4(centre + corner * size, 1.0);
  tint = vec4(colour.rgb * (0.74 + 0.26 * max(0.0, dot(normal, light))), colour.a);
}`;
const ARC_VERTEX = `#version 300 es
layout(location=0) in vec2 along;  // share of the way, side
layout(location=1) in vec4 ends;   // x and y of both
layout(location=2) in vec4 colour;
uniform mat4 view; uniform vec2 pixel; uniform float lift; out vec4 tint; out float side;
vec3 at(float t) {
  float span = abs(ends.x - ends.z);
  vec2 top = vec2((ends.x + ends.z) * 0.5, max(ends.y, ends.w) + lift * (0.5 + pow(span, 0.72)));
  vec2 p = mix(mix(ends.xy, top, t), mix(top, ends.zw, t), t);
  return vec3(p, 0.0);
}
void main() {
  vec4 here = view * vec4(at(along.x), 1.0);
  vec4 next = view * vec4(at(along.x + 0.02), 1.0);
  vec2 way = normalize((next.xy / next.w - here.xy / here.w) / pixel + vec2(1e-5, 0.0));
  float width = 0.9 + 2.4 * colour.a;
  here.xy += vec2(-way.y, way.x) * pixel * width * along.y * here.w;
  gl_Position = here; tint = colour; side = along.y;
}`;
const BOX_FRAGMENT = `#version 300 es
precision mediump float; in vec4 tint; out vec4 pixel;
void main() { pixel = vec4(tint.rgb * tint.a, tint.a); }`;
const ARC_FRAGMENT = `#version 300 es
precision mediump float; in vec4 tint; in float side; out vec4 pixel;
void main() { float a = tint.a * (1.0 - side * side * 0.75); pixel = vec4(tint.rgb * a, a); }`;

function program(gl, vertex, fragment) {
  const made = gl.createProgram();
  for (const [type, source] of [[gl.VERTEX_SHADER, vertex], [gl.FRAGMENT_SHADER, fragment]]) {
    const shader = gl.createShader(type);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(made, shader);
  }
  gl.linkProgram(made);
  if (!gl.getProgramParameter(made, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(made));
  return made;
}

// Six faces of a unit cube, position and normal.
function cube() {
  const out = [];
  for (const axis of [0, 1, 2]) {
    for (const sign of [-1, 1]) {
      const corner = (u, v) => {
        const p = [0, 0, 0];
        p[axis] = sign / 2;
        p[(axis + 1) % 3] = u / 2;
        p[(axis + 2) % 3] = v / 2;
        const n = [0, 0, 0];
        n[axis] = sign;
        return [...p, ...n];
      };
      for (const [u, v] of [[-1, -1], [1, -1], [1, 1], [-1, -1], [1, 1], [-1, 1]]) out.push(...corner(u, v));
    }
  }
  return new Float32Array(out);
}

// Column-major product of perspective and look-at.
function viewMatrix(camera, aspect) {
  const {target, distance, yaw, pitch} = camera;
  const back = [Math.sin(yaw) * Math.cos(pitch), Math.sin(pitch), Math.cos(yaw) * Math.cos(pitch)];
  const right = [Math.cos(yaw), 0, -Math.sin(yaw)];
  const up = [back[1] * right[2] - back[2] * right[1], back[2] * right[0] - back[0] * right[2],
    back[0] * right[1] - back[1] * right[0]];
  const eye = target.map((c, i) => c + back[i] * distance);
  const dot = (a) => -(a[0] * eye[0] + a[1] * eye[1] + a[2] * eye[2]);
  const near = 0.1;
  const far = distance * 4 + 400;
  const f = 1 / Math.tan(FOV / 2);
  const rows = [[...right, dot(right)].map((v) => (v * f) / aspect), [...up, dot(up)].map((v) => v * f),
    [...back, dot(back)]];
  const a = (far + near) / (near - far);
  const b = (2 * far * near) / (near - far);
  const z = rows[2].map((v, i) => v * a + (i === 3 ? b : 0));
  const w = rows[2].map((v) => -v);
  const m = new Float32Array(16);
  for (let c = 0; c < 4; ++c) {
    m[c * 4] = rows[0][c];
    m[c * 4 + 1] = rows[1][c];
    m[c * 4 + 2] = z[c];
    m[c * 4 + 3] = w[c];
  }
  return m;
}

const hex = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16) / 255);

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => {
    const value = style.getPropertyValue(name).trim();
    return hex(value.length === 4 ? `#${[...value.slice(1)].map((c) => c + c).join('')}` : value);
  };
  const out = {};
  for (const name of ['prefill', 'decode', 'cached', 'again', 'ink', 'muted', 'line', 'bg', 'sunk', 'strong-line']) out[name] = read(`--${name}`);
  return out;
}

const mix = (a, b, t) => a.map((v, i) => v + (b[i] - v) * t);

// `canvas` for WebGL, `overlay` for words. Null where there is no WebGL2.
export function makeScene(canvas, overlay) {
  const gl = canvas.getContext('webgl2', {antialias: true, alpha: true, premultipliedAlpha: true});
  if (!gl) return null;
  const boxes = program(gl, BOX_VERTEX, BOX_FRAGMENT);
  const arcs = program(gl, ARC_VERTEX, ARC_FRAGMENT);
  const uniform = (p, name) => gl.getUniformLocation(p, name);
  const at = {boxView: uniform(boxes, 'view'), light: uniform(boxes, 'light'), arcView: uniform(arcs, 'view'),
    pixel: uniform(arcs, 'pixel'), lift: uniform(arcs, 'lift')};

  const layout = (buffer, stride, parts, divisor) => {
    gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
    let offset = 0;
    for (const [location, count] of parts) {
      gl.enableVertexAttribArray(location);
      gl.vertexAttribPointer(location, count, gl.FLOAT, false, stride * 4, offset * 4);
      gl.vertexAttribDivisor(location, divisor);
      offset += count;
    }
  };
  const boxArray = gl.createVertexArray();
  const boxBuffer = gl.createBuffer();
  gl.bindVertexArray(boxArray);
  const shape = gl.createBuffer();
  layout(shape, 6, [[0, 3], [1, 3]], 0);
  gl.bufferData(gl.ARRAY_BUFFER, cube(), gl.STATIC_DRAW);
  layout(boxBuffer, 10, [[2, 3], [3, 3], [4, 4]], 1);
  const arcArray = gl.createVertexArray();
  const arcBuffer = gl.createBuffer();
  gl.bindVertexArray(arcArray);
  const strip = gl.createBuffer();
  layout(strip, 2, [[0, 2]], 0);
  const steps = [];
  for (let i = 0; i <= ARC_POINTS; ++i) steps.push((i / ARC_POINTS) * 0.98, -1, (i / ARC_POINTS) * 0.98, 1);
  gl.bufferData(gl.ARRAY_BUFFER, new Float32Array(steps), gl.STATIC_DRAW);
  layout(arcBuffer, 8, [[1, 4], [2, 4]], 1);
  gl.bindVertexArray(null);

  let colours = palette();
  const camera = {target: [8, -1, 0], distance: 24, yaw: -0.36, pitch: 0.34};
  let goal = {...camera, target: [...camera.target]};
  let preset = 'follow';
  let content = {length: 1, depth: 4, head: 0};
  let opaque = 0;
  let boxCount = 0;
  let arcCount = 0;
  let words = [];
  let rows = {pitch: 1, layers: 0, chosen: -1};
  let lost = false;

  // ----------------------------------------------------------- content

  // frame: {tokens: [{text, kind}], head, layers, size, kinds(position), held,
  //         weights, layer, again}
  function setFrame(frame) {
    const solid = [];
    const glass = [];
    const put = (list, x, y, z, w, hh, d, c, a = 1) => list.push(x, y, z, w, hh, d, c[0], c[1], c[2], a);
    const pitch = Math.min(0.92, 7 / frame.layers);
    const depth = 1.05 + frame.layers * pitch;
    const tokenColour = {cached: mix(colours.cached, colours.bg, 0.35), prompt: mix(colours.prefill, colours.bg, 0.45), generated: colours.decode};
    frame.tokens.forEach((token, i) => {
      const newest = i === frame.head;
      put(solid, i, newest ? 0.06 : 0, 0, 0.8, newest ? 0.5 : 0.36, 0.8, newest ? mix(colours.decode, colours.ink, 0.25) : tokenColour[token.kind]);
    });
    const blocks = Math.ceil(frame.held / frame.size);
    const runs = {cached: colours.cached, prompt: colours.prefill, generated: colours.decode};
    for (let layer = 0; layer < frame.layers; ++layer) {
      const y = -1.05 - layer * pitch;
      const chosen = frame.layer === layer;
      for (let b = 0; b < blocks; ++b) {
        const from = b * frame.size;
        put(glass, from + frame.size / 2 - 0.5, y, 0, frame.size - 0.28, pitch * 0.4, 1.16, colours['strong-line'], 0.2);
        // One box for each stretch of a kind.
        const end = Math.min(from + frame.size, frame.held);
        for (let i = from; i < end;) {
          const kind = frame.kinds(i);
          let stop = i + 1;
          while (stop < end && frame.kinds(stop) === kind) ++stop;
          let c = mix(runs[kind], colours.bg, chosen ? 0 : 0.28);
          if (frame.again > 0) c = mix(c, colours.again, frame.again);
          const left = i === from ? i - 0.36 : i - 0.5;
          const rightEdge = stop === from + frame.size ? stop - 0.64 : stop - 0.5;
          put(solid, (left + rightEdge) / 2, y, 0, rightEdge - left, pitch * (chosen ? 0.4 : 0.24), 0.98, c);
          i = stop;
        }
      }
    }
    // The write head, above where the next token goes.
    const hx = frame.head + 1;
    put(solid, hx, 1.55, 0, 0.34, 0.6, 0.34, colours.ink);
    put(solid, hx, 1.08, 0, 0.13, 0.36, 0.13, colours.ink);
    put(glass, hx, 0.06, 0, 0.8, 0.36, 0.8, colours.ink, 0.14);
    rows = {pitch, layers: frame.layers, chosen: frame.layer};
    opaque = solid.length / 10;
    boxCount = opaque + glass.length / 10;
    gl.bindBuffer(gl.ARRAY_BUFFER, boxBuffer);
    gl.bufferData(gl.ARRAY_BUFFER, new Float32Array(solid.concat(glass)), gl.DYNAMIC_DRAW);
    setArcs(frame);
    words = frame.tokens;
    content = {length: frame.tokens.length, depth, head: frame.head};
    aim();
  }

  // From the newest token, where its row's weights are known, to each position.
  function setArcs(frame) {
    const out = [];
    if (frame.weights) {
      let most = 0;
      for (const w of frame.weights) most = Math.max(most, w);
      const order = [...frame.weights.keys()].filter((i) => frame.weights[i] > most * 0.01)
        .sort((i, j) => frame.weights[i] - frame.weights[j]).slice(-MOST_ARCS);
      for (const i of order) {
        const c = mix(colours.decode, colours.ink, 0.2);
        out.push(frame.head, 0.3, i, 0.22, c[0], c[1], c[2], 0.1 + 0.85 * Math.sqrt(frame.weights[i] / most));
      }
    }
    arcCount = out.length / 8;
    gl.bindBuffer(gl.ARRAY_BUFFER, arcBuffer);
    gl.bufferData(gl.ARRAY_BUFFER, new Float32Array(out), gl.DYNAMIC_DRAW);
  }

  // ------------------------------------------------------------ camera

  const aspect = () => canvas.width / Math.max(1, canvas.height);
  function fit(width, height) {
    const t = Math.tan(FOV / 2);
    return Math.max(width / 2 / (t * aspect()), height / 2 / t) * 1.12 + 1.5;
  }
  function aim() {
    const {length, depth, head} = content;
    const middle = (length - 1) / 2;
    const arch = Math.min(14, 0.4 * Math.pow(length, 0.72) + 1);
    if (preset === 'follow') {
      const span = Math.min(length + 4, 25);
      goal = {...goal, target: [Math.max(span / 2 - 3, head - span * 0.3), 0.9 - depth * 0.24, 0], distance: goal.moved ? goal.distance : fit(span, depth + 4) * 0.92};
    } else if (preset === 'overview') {
      goal = {...goal, target: [middle, (arch - depth) / 2, 0], distance: goal.moved ? goal.distance : fit(length + 2, depth + arch + 2) * 0.98};
    } else if (preset === 'top') {
      goal = {...goal, target: [middle, 0, 0], distance: goal.moved ? goal.distance : fit(length + 4, 6)};
    } else {
      goal = {...goal, target: [middle, (arch - depth) / 2, 0], distance: goal.moved ? goal.distance : fit(length + 4, depth + arch + 2)};
    }
  }
  function setPreset(name) {
    preset = name;
    const angles = {follow: [-0.36, 0.34], overview: [-0.3, 0.4], top: [0, Math.PI / 2 - 0.001], side: [0, 0.02]}[name];
    goal = {...goal, yaw: angles[0], pitch: angles[1], moved: false};
    aim();
  }
  function turn(yaw, pitch) {
    goal.yaw += yaw;
    goal.pitch = Math.min(Math.PI / 2 - 0.001, Math.max(-1.2, goal.pitch + pitch));
  }
  function zoom(factor) {
    goal.distance = Math.min(600, Math.max(5, goal.distance * factor));
    goal.moved = true;
  }
  // Towards the goal; true while it still moves.
  function moveCamera(seconds) {
    const share = calm() ? 1 : 1 - Math.exp(-seconds * 6);
    let left = 0;
    const step = (from, to) => { left += Math.abs(to - from); return from + (to - from) * share; };
    camera.target = camera.target.map((v, i) => step(v, goal.target[i]));
    for (const name of ['distance', 'yaw', 'pitch']) camera[name] = step(camera[name], goal[name]);
    return left > 0.002;
  }

  // ----------------------------------------------------------- drawing

  function resize() {
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = Math.max(1, Math.round(canvas.clientWidth * scale));
    const height = Math.max(1, Math.round(canvas.clientHeight * scale));
    if (canvas.width === width && canvas.height === height) return;
    canvas.width = overlay.width = width;
    canvas.height = overlay.height = height;
    aim();
  }
  function project(m, x, y, z) {
    const w = m[3] * x + m[7] * y + m[11] * z + m[15];
    if (w <= 0) return null;
    return [((m[0] * x + m[4] * y + m[8] * z + m[12]) / w * 0.5 + 0.5) * overlay.width,
      (0.5 - (m[1] * x + m[5] * y + m[9] * z + m[13]) / w * 0.5) * overlay.height];
  }
  // Words where they have room, the newest first.
  function drawWords(m) {
    const pen = overlay.getContext('2d');
    pen.clearRect(0, 0, overlay.width, overlay.height);
    const scale = overlay.width / Math.max(1, overlay.clientWidth);
    pen.font = `500 ${12 * scale}px "JetBrains Mono", ui-monospace, Menlo, Consolas, monospace`;
    pen.textAlign = 'center';
    pen.textBaseline = 'middle';
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue('--ink').trim();
    const muted = css.getPropertyValue('--muted').trim();
    const bg = css.getPropertyValue('--panel').trim();
    const taken = [];
    // Which row is which layer: the ends, and the chosen one.
    for (const layer of new Set([0, rows.layers - 1, rows.chosen])) {
      if (layer < 0 || preset === 'top') continue;
      const p = project(m, -0.7, -1.05 - layer * rows.pitch, 0.75);
      if (!p) continue;
      pen.textAlign = 'right';
      pen.fillStyle = layer === rows.chosen ? ink : muted;
      pen.fillText(`layer ${layer}`, p[0] - 4 * scale, p[1]);
    }
    pen.textAlign = 'center';
    for (let i = words.length - 1; i >= 0; --i) {
      const p = project(m, i, preset === 'top' ? 0.2 : 0, 0.42);
      if (!p || p[0] < 0 || p[0] > overlay.width) continue;
      const text = words[i].text.trim() || '␣';
      const half = pen.measureText(text).width / 2 + 4 * scale;
      const y = p[1] + 16 * scale;
      if (taken.some((t) => Math.abs(t.x - p[0]) < t.half + half && Math.abs(t.y - y) < 14 * scale)) continue;
      taken.push({x: p[0], y, half});
      pen.globalAlpha = 0.82;
      pen.fillStyle = bg;
      pen.fillRect(p[0] - half, y - 8 * scale, half * 2, 16 * scale);
      pen.globalAlpha = 1;
      pen.fillStyle = i === content.head ? ink : muted;
      pen.fillText(text, p[0], y);
    }
  }
  function draw() {
    if (lost) return;
    resize();
    const m = viewMatrix(camera, aspect());
    gl.viewport(0, 0, canvas.width, canvas.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    gl.enable(gl.DEPTH_TEST);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    gl.useProgram(boxes);
    gl.uniformMatrix4fv(at.boxView, false, m);
    gl.uniform3f(at.light, 0.32, 0.84, 0.44);
    gl.bindVertexArray(boxArray);
    gl.depthMask(true);
    gl.drawArraysInstanced(gl.TRIANGLES, 0, 36, opaque);
    gl.depthMask(false);
    if (boxCount > opaque) {
      // The glass follows the solid in the same buffer.
      gl.bindBuffer(gl.ARRAY_BUFFER, boxBuffer);
      const offset = opaque * 40;
      [[2, 3, 0], [3, 3, 12], [4, 4, 24]].forEach(([l, n, o]) => gl.vertexAttribPointer(l, n, gl.FLOAT, false, 40, offset + o));
      gl.drawArraysInstanced(gl.TRIANGLES, 0, 36, boxCount - opaque);
      [[2, 3, 0], [3, 3, 12], [4, 4, 24]].forEach(([l, n, o]) => gl.vertexAttribPointer(l, n, gl.FLOAT, false, 40, o));
    }
    if (arcCount) {
      gl.useProgram(arcs);
      gl.uniformMatrix4fv(at.arcView, false, m);
      gl.uniform2f(at.pixel, 2 / canvas.width, 2 / canvas.height);
      gl.uniform1f(at.lift, 0.75);
      gl.bindVertexArray(arcArray);
      gl.drawArraysInstanced(gl.TRIANGLE_STRIP, 0, (ARC_POINTS + 1) * 2, arcCount);
    }
    gl.depthMask(true);
    gl.bindVertexArray(null);
    drawWords(m);
  }

  canvas.addEventListener('webglcontextlost', (event) => { event.preventDefault(); lost = true; });
  return {setFrame, setPreset, turn, zoom, moveCamera, draw, recolour: () => { colours = palette(); }, counts: () => ({boxes: boxCount, arcs: arcCount}), isLost: () => lost};
}
