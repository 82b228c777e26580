// SPDX-License-Identifier: Apache-2.0
// Elements without markup: text is always text, never HTML.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'class') node.setAttribute('class', value);
    else if (name === 'style') Object.assign(node.style, value);
    else if (name in node && (name === 'value' || name === 'checked')) node[name] = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child);
  }
  return node;
}

// h('p', {class: 'note'}, 'text', h('b', {}, 'more'))
export const h = (name, attributes, ...children) =>
  fill(document.createElement(name), attributes, children);

export const s = (name, attributes, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

export const byId = (id) => document.getElementById(id);

export function announce(text) { byId('status').textContent = text; }

export function warn(text) {
  const notice = byId('notice');
  notice.textContent = text || '';
  notice.hidden = !text;
}

// 1234567 -> "1.23 M"
export function short(n, digits = 3) {
  if (n === undefined || n === null || Number.isNaN(n)) return '–';
  const size = Math.abs(n);
  for (const [unit, power] of [['T', 1e12], ['G', 1e9], ['M', 1e6], ['k', 1e3]]) {
    if (size >= power * 0.9995) return `${Number((n / power).toPrecision(digits))} ${unit}`;
  }
  return String(Number(n.toPrecision(Math.max(digits, 3))));
}

export function bytes(n) {
  if (n === undefined || n === null) return '–';
  for (const [unit, power] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]]) {
    if (n >= power) return `${Number((n / power).toPrecision(3))} ${unit}`;
  }
  return `${n} B`;
}

export function milliseconds(ms) {
  if (ms === undefined || ms === null) return '–';
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  if (ms >= 10) return `${Math.round(ms)} ms`;
  return `${ms.toFixed(ms >= 1 ? 1 : 2)} ms`;
}

export const percent = (p) =>
  p >= 0.9995 ? '100 %' : p < 0.001 ? '< 0.1 %' : `${(p * 100).toFixed(p < 0.1 ? 1 : 0)} %`;

// Spaces and control characters of a token, visible.
export function visible(token) {
  return token.replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/ /g, '·') || '∅';
}

export const calm = () => matchMedia('(prefers-reduced-motion: reduce)').matches;
