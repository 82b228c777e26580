// SPDX-License-Identifier: Apache-2.0
// What the scene draws with, in plain WebGL2: boxes, the write head, beams and
// halos, each instanced. It knows buffers and shaders, not what they mean.
//
// Rows lie one below the other; `fold` (0 to 1) lays them out flat, one behind
// the other, so that they are seen from the top.

const BEAM_POINTS = 32;

const PLACE = `
uniform mat4 view; uniform float fold; uniform vec4 rows;  // gap and pitch; the same when folded
vec3 place(vec3 at, float row) {
  float below = row < 0.5 ? 0.0 : rows.x + (row - 1.0) * rows.y;
  float behind = row < 0.5 ? 0.0 : rows.z + (row - 1.0) * rows.w;
  return vec3(at.x, at.y - below * (1.0 - fold), at.z + behind * fold);
}`;

const SHADERS = {
  box: [`#version 300 es
layout(location=0) in vec3 corner; layout(location=1) in vec3 normal;
layout(location=2) in vec2 at;  // position, row
layout(location=3) in vec4 size;  // and how far it is lifted
layout(location=4) in vec4 colour;
uniform vec3 offset; out vec4 tint;
${PLACE}
void main() {
  vec3 wide = size.xyz;
  if (at.y > 0.5) wide.z *= mix(1.0, rows.w, fold);
  gl_Position = view * vec4(place(vec3(at.x, size.w, 0.0), at.y) + offset + corner * wide, 1.0);
  float lit = 0.66 + 0.34 * max(0.0, dot(normal, normalize(vec3(0.35, 0.85, 0.5))));
  tint = vec4(colour.rgb * lit, colour.a);
}`, `#version 300 es
precision mediump float; in vec4 tint; out vec4 pixel;
void main() { pixel = vec4(tint.rgb * tint.a, tint.a); }`],

  beam: [`#version 300 es
layout(location=0) in vec2 along;  // share of the way, side
layout(location=1) in vec2 to;     // position, weight against the greatest
layout(location=2) in vec3 colour;
uniform vec3 tip; uniform vec2 texel; uniform float scale; uniform float pulse;
out vec3 tint; out vec3 ray;  // side, strength, share of the way
${PLACE}
vec3 curve(float t) {
  float high = 0.5 + 0.62 * pow(abs(tip.x - to.x), 0.74);
  vec3 end = vec3(to.x, 0.22, 0.0);
  vec3 top = mix(vec3((tip.x + end.x) * 0.5, tip.y + high, 0.0), vec3((tip.x + end.x) * 0.5, 0.9, -1.6 * high), fold);
  return mix(mix(tip, top, t), mix(top, end, t), t);
}
void main() {
  vec4 here = view * vec4(curve(along.x), 1.0);
  vec4 next = view * vec4(curve(along.x + 0.01), 1.0);
  vec2 way = normalize((next.xy / next.w - here.xy / here.w) / texel + vec2(1e-5, 0.0));
  float width = scale * (1.5 + 3.6 * to.y);
  here.xy += vec2(-way.y, way.x) * texel * width * along.y * here.w;
  gl_Position = here; tint = colour;
  float run = 1.0 - abs(along.x - (1.0 - pulse)) * 5.0;  // light on its way up
  ray = vec3(along.y, to.y * (1.0 + 0.9 * max(0.0, run)), along.x);
}`, `#version 300 es
precision mediump float; in vec3 tint; in vec3 ray; uniform float additive; out vec4 pixel;
void main() {
  float edge = 1.0 - ray.x * ray.x;
  float a = min(1.0, (0.05 + 0.95 * ray.y * mix(1.0, ray.y, 0.4 * additive)) * edge * edge);
  a *= mix(0.35, 1.0, smoothstep(0.0, 0.3, ray.z));  // many meet at the tip
  vec3 c = mix(tint, vec3(1.0), additive * 0.6 * pow(edge, 5.0) * pow(min(1.0, ray.y), 4.0));
  pixel = vec4(c * a, a * (1.0 - additive));
}`],

  halo: [`#version 300 es
layout(location=0) in vec2 at; layout(location=1) in vec4 colour;  // and strength
uniform float size; out vec4 tint;
${PLACE}
void main() {
  gl_Position = view * vec4(place(vec3(at.x, 0.0, 0.0), at.y), 1.0);
  gl_PointSize = size * (0.7 + 0.6 * colour.a) / gl_Position.w;
  tint = colour;
}`, `#version 300 es
precision mediump float; in vec4 tint; uniform float additive; out vec4 pixel;
void main() {
  float r = length(gl_PointCoord - 0.5) * 2.0;
  float a = tint.a * pow(max(0.0, 1.0 - r), 2.2);
  pixel = vec4(tint.rgb * a, a * (1.0 - additive));
}`],
};

function program(gl, [vertex, fragment]) {
  const made = gl.createProgram();
  for (const [type, source] of [[gl.VERTEX_SHADER, vertex], [gl.FRAGMENT_SHADER, fragment]]) {
    const shader = gl.createShader(type);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(made, shader);
  }
  gl.linkProgram(made);
  if (!gl.isContextLost() && !gl.getProgramParameter(made, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(made));
  const at = {};
  for (const name of ['view', 'fold', 'rows', 'offset', 'tip', 'texel', 'scale', 'pulse', 'additive', 'size']) at[name] = gl.getUniformLocation(made, name);
  return {made, at};
}

// Six faces of a unit cube, corner and normal.
function cube() {
  const out = [];
  for (const axis of [0, 1, 2]) {
    for (const sign of [-1, 1]) {
      for (const [u, v] of [[-1, -1], [1, -1], [1, 1], [-1, -1], [1, 1], [-1, 1]]) {
        const corner = [0, 0, 0];
        const normal = [0, 0, 0];
        corner[axis] = sign / 2;
        corner[(axis + 1) % 3] = u / 2;
        corner[(axis + 2) % 3] = v / 2;
        normal[axis] = sign;
        out.push(...corner, ...normal);
      }
    }
  }
  return new Float32Array(out);
}

// A plummet that stands on its tip, which is the origin.
function plummet() {
  const out = [];
  const ring = [[1, 0], [0, 1], [-1, 0], [0, -1]].map(([x, z]) => [x * 0.5, 0.62, z * 0.5]);
  for (const [y, slope] of [[0, -0.5], [1, 0.8]]) {
    for (let i = 0; i < 4; ++i) {
      const a = ring[i];
      const b = ring[(i + 1) % 4];
      const n = [a[0] + b[0], slope, a[2] + b[2]];
      const length = Math.hypot(...n);
      for (const p of [[0, y, 0], a, b]) out.push(...p, ...n.map((v) => v / length));
    }
  }
  return new Float32Array(out);
}

function ribbon() {
  const out = [];
  for (let i = 0; i <= BEAM_POINTS; ++i) out.push((i / BEAM_POINTS) * 0.99, -1, (i / BEAM_POINTS) * 0.99, 1);
  return new Float32Array(out);
}

// Everything is made anew where a context came back: call it again.
export function makeGpu(gl) {
  const programs = {};
  for (const [name, sources] of Object.entries(SHADERS)) programs[name] = program(gl, sources);

  // `parts`: [location, numbers] in the order of the buffer.
  const attributes = (buffer, parts, divisor, first = 0) => {
    const stride = parts.reduce((sum, [, count]) => sum + count, 0) * 4;
    gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
    let offset = first * stride;
    for (const [location, count] of parts) {
      gl.enableVertexAttribArray(location);
      gl.vertexAttribPointer(location, count, gl.FLOAT, false, stride, offset);
      gl.vertexAttribDivisor(location, divisor);
      offset += count * 4;
    }
  };
  const mesh = (shape, shapeParts, parts) => {
    const array = gl.createVertexArray();
    gl.bindVertexArray(array);
    if (shape) {
      attributes(gl.createBuffer(), shapeParts, 0);
      gl.bufferData(gl.ARRAY_BUFFER, shape, gl.STATIC_DRAW);
    }
    const buffer = gl.createBuffer();
    attributes(buffer, parts, shape ? 1 : 0);
    return {array, buffer, parts, numbers: parts.reduce((sum, [, count]) => sum + count, 0), count: 0};
  };
  const BOX = [[2, 2], [3, 4], [4, 4]];
  const meshes = {
    box: mesh(cube(), [[0, 3], [1, 3]], BOX),
    head: mesh(plummet(), [[0, 3], [1, 3]], BOX),
    beam: mesh(ribbon(), [[0, 2]], [[1, 2], [2, 3]]),
    halo: mesh(null, null, [[0, 2], [1, 4]]),
  };
  gl.bindVertexArray(null);

  const set = (name, numbers) => {
    meshes[name].count = numbers.length / meshes[name].numbers;
    gl.bindBuffer(gl.ARRAY_BUFFER, meshes[name].buffer);
    gl.bufferData(gl.ARRAY_BUFFER, numbers, gl.DYNAMIC_DRAW);
  };
  const use = (name, scene) => {
    const {made, at} = programs[name];
    gl.useProgram(made);
    gl.uniformMatrix4fv(at.view, false, scene.view);
    gl.uniform1f(at.fold, scene.fold);
    gl.uniform4fv(at.rows, scene.rows);
    gl.uniform1f(at.additive, scene.additive ? 1 : 0);
    return at;
  };
  // Behind the first `from` instances of a buffer.
  const boxes = (from, to) => {
    const {array, buffer, parts} = meshes.box;
    if (to <= from) return;
    gl.bindVertexArray(array);
    attributes(buffer, parts, 1, from);
    gl.drawArraysInstanced(gl.TRIANGLES, 0, 36, to - from);
  };

  // scene: {view, fold, rows, additive, opaque: boxes that hide what is behind
  // them, tip, headOffset, scale: device pixels of a CSS pixel, pulse}
  const draw = (scene) => {
    const {width, height} = gl.canvas;
    gl.viewport(0, 0, width, height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    gl.enable(gl.DEPTH_TEST);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    let at = use('box', scene);
    gl.uniform3f(at.offset, 0, 0, 0);
    boxes(0, scene.opaque);
    gl.uniform3fv(at.offset, scene.tip);
    gl.bindVertexArray(meshes.head.array);
    gl.drawArraysInstanced(gl.TRIANGLES, 0, 24, meshes.head.count);
    gl.depthMask(false);
    gl.uniform3f(at.offset, 0, 0, 0);
    boxes(scene.opaque, meshes.box.count);
    if (scene.additive) gl.blendFunc(gl.ONE, gl.ONE);
    at = use('halo', scene);
    gl.uniform1f(at.size, height * 1.9);
    gl.bindVertexArray(meshes.halo.array);
    gl.disable(gl.DEPTH_TEST);
    gl.drawArrays(gl.POINTS, 0, meshes.halo.count);
    gl.enable(gl.DEPTH_TEST);
    at = use('beam', scene);
    gl.uniform3fv(at.tip, scene.tip);
    gl.uniform2f(at.texel, 2 / width, 2 / height);
    gl.uniform1f(at.scale, scene.scale);
    gl.uniform1f(at.pulse, scene.pulse);
    gl.bindVertexArray(meshes.beam.array);
    gl.drawArraysInstanced(gl.TRIANGLE_STRIP, 0, (BEAM_POINTS + 1) * 2, meshes.beam.count);
    gl.depthMask(true);
    gl.bindVertexArray(null);
  };
  return {set, draw};
}
