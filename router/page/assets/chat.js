// SPDX-License-Identifier: Apache-2.0
// The conversation: streamed answers, a stop button, settings, and below each
// answer how fast it came and who computed it.

import {announce, byId, h, milliseconds} from './dom.js';
import {generate, runs, speed, state} from './runs.js';
import {markdown} from './markdown.js';
import {fields, settingsForm, systemPrompt, wantsAttention} from './settings.js';
import {EXAMPLES} from './examples.js';
import {tokenStrip} from './tokens.js';
import {show} from './generation.js';

let turns = [];  // {role, content}
let thread, input, send, current = null;

function rate(run) {
  const tokensPerSecond = speed(run);
  const count = run.usage ? run.usage.completion_tokens : run.tokens.length;
  const parts = [`${count} tokens`];
  if (tokensPerSecond) parts.push(`${tokensPerSecond.toFixed(tokensPerSecond < 10 ? 1 : 0)} tokens/s`);
  if (run.first !== null) parts.push(`first token ${milliseconds(run.first - run.begun)}`);
  if (run.cached) parts.push(`${run.cached} prompt tokens cached`);
  if (run.noCache) parts.push('no KV cache');
  return parts.join(' · ');
}

function workers(run) {
  if (!run.timings) return '';
  const {prefill_worker: p, decode_worker: d, retries} = run.timings;
  if (retries) return `moved ${['', 'once', 'twice'][retries] || `${retries} times`}, now ${d}`;
  return p ? `${p} → ${d}` : d;
}

function ending(run) {
  if (run.error) return run.error;
  if (run.finish === 'stopped') return 'Stopped.';
  if (run.finish === 'length') return 'Cut at the most tokens asked for.';
  return '';
}

// An answer that grows with its run.
function answer(run) {
  const content = h('div', {class: 'content'});
  const meta = h('p', {class: 'meta'}, 'computing the prompt …');
  const tools = h('div', {class: 'tools'});
  const thought = h('p', {class: 'plain'});
  const reasoning = h('details', {class: 'reasoning', hidden: ''}, h('summary', {}, 'Reasoning'), thought);
  const node = h('article', {class: 'turn assistant', 'aria-label': 'Answer', 'aria-busy': 'true'},
    reasoning, content, meta, tools);
  let drawn = -1;
  let thoughtDrawn = 0;
  let scheduled = false;
  const draw = () => {
    scheduled = false;
    if (run.reasoning.length !== thoughtDrawn) {
      if (!thoughtDrawn) reasoning.open = true;  // until the answer begins
      thoughtDrawn = run.reasoning.length;
      reasoning.hidden = false;
      thought.textContent = run.reasoning;
    }
    if (run.text && drawn <= 0) reasoning.open = false;
    if (run.text.length !== drawn) {
      drawn = run.text.length;
      content.replaceChildren(state.capabilities.chat ? markdown(run.text) : h('p', {class: 'plain'}, run.text));
    }
    content.classList.toggle('streaming', run.end === null);
    meta.replaceChildren(rate(run), workers(run) && h('span', {class: 'by'}, workers(run)));
    follow();
  };
  const onGrown = (event) => {
    if (event.detail !== run || scheduled) return;
    scheduled = true;
    requestAnimationFrame(draw);
  };
  runs.addEventListener('grown', onGrown);
  run.ended.then(() => {
    runs.removeEventListener('grown', onGrown);
    draw();
    node.setAttribute('aria-busy', 'false');
    const note = ending(run);
    if (note) meta.before(h('p', {class: run.error ? 'failed' : 'note'}, note));
    if (run.tokens.length) {
      const open = h('button', {type: 'button', class: 'quiet', 'aria-expanded': 'false'}, 'Tokens');
      let strip = null;
      open.addEventListener('click', () => {
        if (strip) { strip.remove(); strip = null; } else { strip = tokenStrip(run); tools.after(strip); }
        open.setAttribute('aria-expanded', String(!!strip));
      });
      tools.append(open, h('button', {type: 'button', class: 'quiet', onclick: () => { show(run); location.hash = '#generation'; }},
        'See it generated'));
    }
    announce(run.error ? `Failed: ${run.error}` : `Answer finished: ${run.text}`);
  });
  return node;
}

function follow() {
  const room = document.documentElement.scrollHeight - innerHeight - scrollY;
  if (room < 160) scrollTo({top: document.documentElement.scrollHeight});
}

function setBusy(run) {
  current = run;
  send.textContent = run ? 'Stop' : 'Send';
  send.classList.toggle('stop', !!run);
  send.setAttribute('aria-label', run ? 'Stop generating' : 'Send');
}

export async function ask(text) {
  if (current || !text.trim()) return;
  const chat = state.capabilities.chat;
  byId('empty').hidden = true;
  input.value = '';
  grow();
  const mine = turns;  // it may be over before the answer is
  mine.push({role: 'user', content: text});
  thread.append(h('article', {class: 'turn user', 'aria-label': 'You'}, h('p', {}, text)));
  const system = systemPrompt();
  const prompt = chat ? [...(system ? [{role: 'system', content: system}] : []), ...turns]
    : turns.map((t) => t.content).join('');
  const run = generate(prompt, fields(), {attention: wantsAttention(), title: text});
  setBusy(run);
  thread.append(answer(run));
  scrollTo({top: document.documentElement.scrollHeight});
  await run.ended;
  setBusy(null);
  if (run.text) mine.push({role: 'assistant', content: run.text});
  else mine.pop();  // it was never answered
  // To be sent again as it is.
  if (run.error && !run.text && !input.value) {
    input.value = text;
    grow();
  }
}

function restart() {
  if (current) current.stop();
  turns = [];
  thread.replaceChildren();
  byId('empty').hidden = false;
  input.focus();
}

function grow() {
  input.style.height = 'auto';
  input.style.height = `${Math.min(input.scrollHeight + 2, innerHeight * 0.3)}px`;
}

export function chatView(section) {
  const chat = state.capabilities.chat;
  thread = h('div', {class: 'thread'});
  input = h('textarea', {id: 'prompt', rows: 1, placeholder: chat ? 'Write to the model' : 'A text to go on with',
    'aria-label': 'Message', enterkeyhint: 'send'});
  input.addEventListener('input', grow);
  input.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask(input.value);
    }
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && current && !section.hidden) current.stop();
  });
  send = h('button', {id: 'send', type: 'submit', class: 'primary', 'aria-label': 'Send'}, 'Send');
  const form = h('form', {class: 'composer', onsubmit: (event) => {
    event.preventDefault();
    if (current) current.stop(); else ask(input.value);
  }}, h('div', {class: 'composer-row'}, input, send));
  const panel = h('details', {class: 'settings-panel'}, h('summary', {}, 'Settings'), settingsForm());
  section.append(
    h('h1', {id: 'chat-title', class: 'visually-hidden'}, 'Chat'),
    h('div', {id: 'empty', class: 'empty'},
      h('h2', {class: 'display'}, 'One machine reads. ', h('br'), 'Another one writes.'),
      h('p', {class: 'lead'}, 'A ', h('b', {class: 'is-prefill'}, 'prefill worker'),
        ' computes your prompt in one pass and hands its cache over; a ',
        h('b', {class: 'is-decode'}, 'decode worker'), ' streams the answer from it.'),
      h('div', {class: 'examples'}, EXAMPLES.map(([name, text, what]) =>
        h('button', {type: 'button', class: 'example', onclick: () => { ask(text); input.focus(); }},
          h('span', {class: 'example-kind'}, name), h('span', {class: 'example-text'}, text),
          h('span', {class: 'example-what'}, what))))),
    thread,
    h('div', {class: 'dock'}, form,
      h('div', {class: 'dock-row'}, panel,
        h('button', {type: 'button', class: 'quiet', onclick: restart}, 'New conversation'))));
}
