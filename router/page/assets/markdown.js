// SPDX-License-Identifier: Apache-2.0
// The Markdown that chat models write, as elements: headings, lists, quotes,
// rules, tables, fenced and inline code, emphasis, links. Whatever is not
// understood stays text. Nothing becomes markup, no link but http(s), no image.

import {h} from './dom.js';

const INLINE = /(`+)([^`][^]*?)\1|\*\*([^\s*][^]*?)\*\*|__([^\s_][^]*?)__|\*([^\s*][^*]*?)\*|(?<![\w])_([^\s_][^_]*?)_(?![\w])|~~([^~]+)~~|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>)\]]+)/;

function inline(text) {
  const out = [];
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    if (found.index) out.push(rest.slice(0, found.index));
    const [whole, , code, bold, bold2, soft, soft2, gone, name, href, bare] = found;
    if (code !== undefined) out.push(h('code', {}, code));
    else if (bold || bold2) out.push(h('strong', {}, inline(bold || bold2)));
    else if (soft || soft2) out.push(h('em', {}, inline(soft || soft2)));
    else if (gone) out.push(h('del', {}, inline(gone)));
    else {
      out.push(h('a', {href: href || bare, rel: 'noreferrer noopener', target: '_blank'},
        name || bare));
    }
    rest = rest.slice(found.index + whole.length);
  }
  if (rest) out.push(rest);
  return out;
}

function copyButton(text) {
  const button = h('button', {class: 'copy', type: 'button'}, 'Copy');
  button.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = 'Copied';
    } catch {
      button.textContent = 'No clipboard';
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  });
  return button;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((c) => c.trim());

function table(lines) {
  const [head, , ...rows] = lines.map(cells);
  return h('div', {class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'Table'},
    h('table', {}, h('thead', {}, h('tr', {}, head.map((c) => h('th', {}, inline(c))))),
      h('tbody', {}, rows.map((row) => h('tr', {}, row.map((c) => h('td', {}, inline(c))))))));
}

const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;

// Lines from `from` on that belong to one list; deeper ones become lists within.
function list(lines, from) {
  const first = ITEM.exec(lines[from]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const node = h(ordered ? 'ol' : 'ul', ordered ? {start: parseInt(first[2], 10)} : {});
  let i = from;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length < indent) break;
    if (item[1].length > indent + 1 && node.lastChild) {
      const [inner, next] = list(lines, i);
      node.lastChild.append(inner);
      i = next;
      continue;
    }
    if (/\d/.test(item[2]) !== ordered) break;
    node.append(h('li', {}, inline(item[3])));
    ++i;
    while (i < lines.length && /^\s+\S/.test(lines[i]) && !ITEM.test(lines[i])) {
      node.lastChild.append(' ', ...inline(lines[i++].trim()));
    }
  }
  return [node, i];
}

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const OTHER = [FENCE, ITEM, /^#{1,6}\s/, /^\s*>/, /^\s*([-*_])(\s*\1){2,}\s*$/];

export function markdown(text) {
  const out = document.createDocumentFragment();
  const lines = text.split('\n');
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (fence) {
      const code = [];
      for (++i; i < lines.length && !lines[i].trim().startsWith(fence[1]); ++i) code.push(lines[i]);
      ++i;
      const block = code.join('\n');
      out.append(h('figure', {class: 'code'},
        h('figcaption', {}, h('span', {}, fence[2] || 'text'), copyButton(block)),
        h('pre', {tabindex: 0}, h('code', {}, block))));
    } else if (!line.trim()) {
      ++i;
    } else if (heading) {
      // The page itself has the first two levels.
      out.append(h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2])));
      ++i;
    } else if (OTHER[4].test(line)) {
      out.append(h('hr'));
      ++i;
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      for (; i < lines.length && /^\s*>/.test(lines[i]); ++i) quoted.push(lines[i].replace(/^\s*> ?/, ''));
      out.append(h('blockquote', {}, markdown(quoted.join('\n'))));
    } else if (line.includes('|') && /^\s*\|?[\s:|-]+\|[\s:|-]*$/.test(lines[i + 1] || '')) {
      const rows = [];
      for (; i < lines.length && lines[i].includes('|'); ++i) rows.push(lines[i]);
      out.append(table(rows));
    } else if (ITEM.test(line)) {
      const [node, next] = list(lines, i);
      out.append(node);
      i = next;
    } else {
      const words = [];
      for (; i < lines.length && lines[i].trim() && (!words.length || !OTHER.some((o) => o.test(lines[i]))); ++i) {
        words.push(lines[i]);
      }
      const paragraph = h('p');
      words.forEach((w, k) => paragraph.append(...(k ? ['\n'] : []), ...inline(w)));
      out.append(paragraph);
    }
  }
  return out;
}
