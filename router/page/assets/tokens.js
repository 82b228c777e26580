// SPDX-License-Identifier: Apache-2.0
// The tokens of a run as buttons, tinted by how sure the model was; one of
// them, opened, shows what else it might have said.

import {h, percent, visible} from './dom.js';

// Six steps of sureness, which the style sheet tints.
const step = (p) => Math.min(5, Math.max(0, Math.floor((1 - p) * 6)));

export function alternatives(token, position) {
  const shown = token.top.length && token.top.some((t) => t.text === token.text)
    ? token.top : [{text: token.text, p: token.p}, ...token.top];
  return h('div', {class: 'alternatives'},
    h('p', {class: 'note'}, `Position ${position} · drawn with ${percent(token.p)}`),
    h('table', {},
      h('caption', {class: 'visually-hidden'}, `Alternatives to the token at position ${position}`),
      h('thead', {class: 'visually-hidden'}, h('tr', {}, h('th', {scope: 'col'}, 'Token'),
        h('th', {scope: 'col'}, 'Share'), h('th', {scope: 'col'}, 'Probability'))),
      h('tbody', {}, shown.map((t) => h('tr', {class: t.text === token.text ? 'chosen' : ''},
        h('th', {scope: 'row'}, h('code', {}, visible(t.text))),
        h('td', {class: 'bar-cell'}, h('span', {class: 'bar-fill', style: {width: `${Math.max(0.5, t.p * 100)}%`}})),
        h('td', {class: 'number'}, percent(t.p)))))));
}

export function tokenStrip(run) {
  const detail = h('div', {class: 'token-detail', 'aria-live': 'polite'},
    h('p', {class: 'note'}, 'Choose a token to see what else the model might have said.'));
  let current = null;
  const strip = h('div', {class: 'tokens', role: 'toolbar', 'aria-label': 'Tokens of the answer'});
  run.tokens.forEach((token, i) => {
    const button = h('button', {
      type: 'button', class: `token sure-${step(token.p)}`, tabindex: i ? -1 : 0,
      'aria-pressed': 'false',
      'aria-label': `${token.text.trim() || 'space'}, ${percent(token.p)}`,
    }, visible(token.text));
    button.addEventListener('click', () => {
      if (current) current.setAttribute('aria-pressed', 'false');
      current = button;
      button.setAttribute('aria-pressed', 'true');
      detail.replaceChildren(alternatives(token, run.promptTokens.length + i));
    });
    strip.append(button);
  });
  strip.addEventListener('keydown', (event) => {
    const buttons = [...strip.children];
    const at = buttons.indexOf(document.activeElement);
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1}[event.key];
    if (at < 0 || to === undefined || !buttons[to]) return;
    event.preventDefault();
    buttons[at].tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
    buttons[to].click();
  });
  return h('div', {class: 'token-view'}, strip, detail);
}
