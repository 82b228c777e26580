// SPDX-License-Identifier: Apache-2.0
// Where the scene is seen from: presets that frame what there is, turning,
// zooming, and the way to a new place. `fold` says how flat the rows are laid
// out; only the view from the top does that.

import {calm} from './dom.js';

const FOV = 0.66;
const STEEPEST = Math.PI / 2 - 0.001;
const MARGIN = 0.94;  // of the picture, for what is framed

const ANGLES = {follow: [0.5, 0.3], overview: [0.64, 0.3], top: [0, STEEPEST], side: [0, 0.03]};

// How high beams over so many positions go.
const arch = (span) => 1.1 + 0.31 * Math.pow(Math.max(1, span), 0.74);

// To the right, upwards, and back from what is looked at.
function axes(yaw, pitch) {
  const back = [Math.sin(yaw) * Math.cos(pitch), Math.sin(pitch), Math.cos(yaw) * Math.cos(pitch)];
  const right = [Math.cos(yaw), 0, -Math.sin(yaw)];
  const up = [back[1] * right[2] - back[2] * right[1], back[2] * right[0] - back[0] * right[2],
    back[0] * right[1] - back[1] * right[0]];
  return {right, up, back};
}
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];

// Column-major product of perspective and look-at.
function viewMatrix({target, distance, yaw, pitch}, aspect) {
  const {right, up, back} = axes(yaw, pitch);
  const eye = target.map((c, i) => c + back[i] * distance);
  const near = Math.max(0.1, distance / 200);
  const far = distance * 4 + 400;
  const f = 1 / Math.tan(FOV / 2);
  const rows = [[...right, -dot(right, eye)].map((v) => (v * f) / aspect), [...up, -dot(up, eye)].map((v) => v * f),
    [...back, -dot(back, eye)]];
  const a = (far + near) / (near - far);
  const b = (2 * far * near) / (near - far);
  const z = rows[2].map((v, i) => v * a + (i === 3 ? b : 0));
  const w = rows[2].map((v) => -v);
  const m = new Float32Array(16);
  for (let c = 0; c < 4; ++c) m.set([rows[0][c], rows[1][c], z[c], w[c]], c * 4);
  return m;
}

// Target and distance from which a box ([least, greatest] corner) fills the
// picture, whatever the angle.
function frameBox([least, most], yaw, pitch, aspect) {
  const {right, up, back} = axes(yaw, pitch);
  const corners = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => [0, 1, 2].map((axis) => ((i >> axis) & 1 ? most : least)[axis]));
  let target = least.map((v, i) => (v + most[i]) / 2);
  const t = Math.tan(FOV / 2);
  let distance = 0;
  for (let round = 0; round < 8; ++round) {
    // Each corner says how far away it must be at least.
    const from = corners.map((corner) => corner.map((v, i) => v - target[i]));
    distance = Math.max(...from.map((c) => dot(c, back) + Math.max(Math.abs(dot(c, right)) / aspect, Math.abs(dot(c, up))) / (t * MARGIN)));
    const seen = from.map((c) => [dot(c, right), dot(c, up)].map((v) => v / (distance - dot(c, back))));
    const off = [0, 1].map((axis) => (Math.min(...seen.map((p) => p[axis])) + Math.max(...seen.map((p) => p[axis]))) / 2);
    target = target.map((v, i) => v + (right[i] * off[0] + up[i] * off[1]) * distance * 0.8);
  }
  return {target, distance: distance + 0.6};
}

export function makeCamera() {
  const now = {target: [8, -1, 0], distance: 24, yaw: ANGLES.follow[0], pitch: ANGLES.follow[1], fold: 0};
  let goal = {...now, target: [...now.target]};
  let preset = 'follow';
  let zoomed = false;
  let fresh = true;  // nothing was seen yet: no way to go

  // content: {length, head, span: of the longest beam, depth: of the rows, flat:
  // of the rows when folded}
  const aim = ({length, head, span: longest, depth, flat}, aspect) => {
    // Not to and fro with every token.
    const high = arch(Math.max(longest, 0.3 * length));
    let box;
    if (preset === 'top') {
      box = [[-1 - 0.085 * length, 0, -0.82 * high], [length, 0, flat]];
    } else if (preset === 'follow') {
      const span = Math.max(9, 13 * aspect);
      const from = Math.max(-1, head - span * 0.8);
      box = [[from, -depth, -0.5], [Math.max(head + 2, from + span * 0.7), arch(span * 0.5), 0.5]];
    } else {
      box = [[-1, -depth, -0.5], [Math.min(length, head + 2.5), high, 0.5]];
    }
    const framed = frameBox(box, ...ANGLES[preset], aspect);
    goal = {...goal, target: framed.target, distance: zoomed ? goal.distance : framed.distance};
  };
  return {
    aim,
    setPreset: (name) => {
      preset = name;
      [goal.yaw, goal.pitch] = ANGLES[name];
      goal.fold = name === 'top' ? 1 : 0;
      zoomed = false;
    },
    turn: (yaw, pitch) => {
      goal.yaw += yaw;
      goal.pitch = Math.min(STEEPEST, Math.max(-1.2, goal.pitch + pitch));
    },
    zoom: (factor) => {
      goal.distance = Math.min(900, Math.max(4, goal.distance * factor));
      zoomed = true;
    },
    // Towards the goal; true while it still moves.
    move: (seconds) => {
      const share = calm() || fresh ? 1 : 1 - Math.exp(-seconds * 6);
      fresh = false;
      let left = 0;
      const step = (from, to) => { left += Math.abs(to - from); return from + (to - from) * share; };
      now.target = now.target.map((v, i) => step(v, goal.target[i]));
      for (const name of ['distance', 'yaw', 'pitch', 'fold']) now[name] = step(now[name], goal[name]);
      return left > 0.002;
    },
    fold: () => now.fold,
    matrix: (aspect) => viewMatrix(now, aspect),
  };
}
