// SPDX-License-Identifier: Apache-2.0
// Lines over a number, as SVG; the figures stand in a table beside it.

import {s, short} from './dom.js';

const MOST_DOTS = 24;

function ticks(most, count) {
  if (most <= 0) return [0];
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power;
  const out = [];
  for (let v = 0; v <= most * 1.0001; v += by) out.push(v);
  return out;
}

// series: [{name, class, points: [[x, y]]}]; drawn `width` CSS pixels wide, so
// that its words are as large as others.
export function linePlot(title, series, xName, yName, width) {
  const height = Math.round(Math.min(300, Math.max(210, width * 0.54)));
  const left = 58, right = 14, top = 30, bottom = 42;
  const points = series.flatMap((line) => line.points);
  const xMost = Math.max(1, ...points.map((p) => p[0]));
  const yMost = Math.max(1e-9, ...points.map((p) => p[1])) * 1.06;
  const x = (v) => left + (v / xMost) * (width - left - right);
  const y = (v) => height - bottom - (v / yMost) * (height - top - bottom);
  const node = s('svg', {viewBox: `0 0 ${width} ${height}`, class: 'plot', role: 'img', 'aria-label': `${title}. The figures are in the table.`});
  for (const v of ticks(yMost, 5)) {
    node.append(s('line', {x1: left, x2: width - right, y1: y(v), y2: y(v), class: 'grid'}),
      s('text', {x: left - 8, y: y(v) + 4, class: 'tick end'}, short(v)));
  }
  for (const v of ticks(xMost, width < 420 ? 4 : 6)) node.append(s('text', {x: x(v), y: height - bottom + 18, class: 'tick middle'}, String(v)));
  node.append(s('text', {x: (left + width - right) / 2, y: height - 6, class: 'tick middle'}, xName),
    s('text', {x: left - 50, y: 12, class: 'tick'}, yName));
  for (const line of series) {
    if (!line.points.length) continue;
    node.append(s('polyline', {class: `line ${line.class}`, points: line.points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(' ')}));
    if (line.points.length <= MOST_DOTS) {
      for (const p of line.points) node.append(s('circle', {class: `dot ${line.class}`, cx: x(p[0]), cy: y(p[1]), r: 3}));
    }
    const [lastX, lastY] = line.points[line.points.length - 1];
    node.append(s('text', {x: x(lastX) - 6, y: Math.max(top + 8, y(lastY) - 9), class: `tick end name ${line.class}`}, line.name));
  }
  return node;
}
