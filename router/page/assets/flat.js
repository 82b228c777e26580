// SPDX-License-Identifier: Apache-2.0
// The flat twin of the scene, for keyboard and screen reader: the tokens as
// buttons, underlined by how much the newest one looked at them, and one
// layer's blocks.

import {announce, h, percent, visible} from './dom.js';
import {blockGrid} from './blocks.js';

// `player`: {run, cursor, weights(index), seek(count)}.
export function flatView(player) {
  const strip = h('div', {class: 'tokens', role: 'toolbar', 'aria-label': 'Tokens of prompt and answer'});
  const grid = blockGrid();
  let drawn = {run: null, tokens: -1, cached: 0};

  const add = (text, name, position, count) => {
    const button = h('button', {type: 'button', class: `token ${name}`, tabindex: strip.children.length ? -1 : 0,
      'aria-label': `${text.trim() || 'space'}, ${name}, position ${position}`}, visible(text));
    button.addEventListener('click', () => {
      player.seek(count);
      const token = player.run.tokens[count - 1];
      announce(token ? `${text.trim() || 'space'}, position ${position}, drawn with ${percent(token.p)}` : `${text}, of the prompt`);
    });
    strip.append(button);
  };
  strip.addEventListener('keydown', (event) => {
    const buttons = [...strip.children];
    const now = buttons.indexOf(document.activeElement);
    const to = {ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: buttons.length - 1}[event.key];
    if (now < 0 || !buttons[to]) return;
    event.preventDefault();
    buttons[now].tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
  });

  const update = () => {
    const {run, cursor} = player;
    if (!run || !run.promptTokens.length) {
      strip.replaceChildren();
      drawn.run = null;
      return;
    }
    if (run !== drawn.run || run.cached !== drawn.cached) {
      strip.replaceChildren();
      drawn = {run, tokens: 0, cached: run.cached};
      run.promptTokens.forEach((t, i) => add(t.text, i < run.cached ? 'cached' : 'prompt', i, 0));
    }
    const p = run.promptTokens.length;
    for (; drawn.tokens < run.tokens.length; ++drawn.tokens) add(run.tokens[drawn.tokens].text, 'generated', p + drawn.tokens, drawn.tokens + 1);
    const w = cursor > 0 ? player.weights(cursor - 1) : null;
    let most = 0;
    if (w) for (const v of w) most = Math.max(most, v);
    [...strip.children].forEach((button, i) => {
      button.classList.toggle('unplayed', i >= p + cursor);
      button.setAttribute('aria-pressed', String(i === p + cursor - 1));
      const share = w && i < w.length && most > 0 ? Math.sqrt(w[i] / most) : 0;
      button.style.boxShadow = share > 0.08 ? `inset 0 -3px 0 rgb(from var(--decode) r g b / ${share.toFixed(2)})` : '';
    });
    grid.update(run, cursor);
    grid.node.classList.toggle('again', run.noCache);
  };
  return {update, node: h('div', {class: 'flat panel', hidden: true}, h('h2', {}, 'Tokens'),
    h('p', {class: 'note'}, 'The line below a token is how much the newest one looked at it.'), strip,
    h('h2', {}, 'One layer’s KV blocks'), grid.node)};
}
