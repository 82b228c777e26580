// SPDX-License-Identifier: Apache-2.0
// The scene's words, on a canvas above it: tokens where there is room, the
// newest and those that it looked at first, and the names of layers.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `place` gives a point in space of (position, row, height, towards us).
// frame: {tokens, share: by position or null, rows: layers, layer: the chosen
// one or -1}
export function drawWords(overlay, m, place, frame) {
  const pen = overlay.getContext('2d');
  const {width, height} = overlay;
  pen.clearRect(0, 0, width, height);
  const scale = width / Math.max(1, overlay.clientWidth);
  const project = (x, y, z) => {
    const w = m[3] * x + m[7] * y + m[11] * z + m[15];
    if (w <= 0) return null;
    return [((m[0] * x + m[4] * y + m[8] * z + m[12]) / w * 0.5 + 0.5) * width,
      (0.5 - (m[1] * x + m[5] * y + m[9] * z + m[13]) / w * 0.5) * height];
  };
  const ink = css('--ink');
  const muted = css('--muted');
  pen.textBaseline = 'middle';
  pen.textRendering = 'optimizeSpeed';  // no ligatures
  pen.lineJoin = 'round';
  pen.lineWidth = 4 * scale;
  pen.strokeStyle = css('--panel');
  const taken = [];
  // `side`: of the point that the words are on.
  const put = (text, [px, py], side, colour) => {
    const wide = pen.measureText(text).width;
    const x = side === 'right' ? px - wide - 6 * scale : px - wide / 2;
    const box = [x - 3 * scale, py - 7 * scale, x + wide + 3 * scale, py + 7 * scale];
    if (box[0] < 0 || box[2] > width || box[1] < 0 || box[3] > height) return;
    if (taken.some((t) => t[0] < box[2] && box[0] < t[2] && t[1] < box[3] && box[1] < t[3])) return;
    taken.push(box);
    pen.strokeText(text, x, py);
    pen.fillStyle = colour;
    pen.fillText(text, x, py);
  };

  pen.font = `500 ${12 * scale}px ${css('--mono')}`;
  const weight = (i) => (frame.share && i < frame.share.length ? frame.share[i] : 0);
  const last = frame.tokens.length - 1;
  const order = frame.tokens.map((_, i) => i).sort((a, b) => (b === last) - (a === last) || (weight(b) > 0.35) - (weight(a) > 0.35) || b - a);
  for (const i of order) {
    const p = project(...place(i, 0, 0, 0.42));
    if (p) put(frame.tokens[i].text.trim() || '␣', [p[0], p[1] + 15 * scale], 'middle', i === last || weight(i) > 0.35 ? ink : muted);
  }
  pen.font = `500 ${11 * scale}px ${css('--mono')}`;
  const ends = new Set([frame.rows.indexOf(frame.layer), 0, frame.rows.length - 1, ...frame.rows.keys()]);
  for (const row of ends) {
    const p = row >= 0 && project(...place(-0.7, row + 1, 0, 0));
    if (p) put(`layer ${frame.rows[row]}`, p, 'right', frame.rows[row] === frame.layer ? ink : muted);
  }
}
