// SPDX-License-Identifier: Apache-2.0
// Chat: what it shows is what the API answers, and what a model writes is text.
import assert from 'node:assert/strict';
import {execFileSync} from 'node:child_process';
import {mkdtempSync, rmSync} from 'node:fs';
import {tmpdir} from 'node:os';
import {join} from 'node:path';
import {feed, post, start} from './cluster.mjs';
import {binaries, cluster, browser, wrong, open, close, view, words, finished, asking, type, chatBody, STORY} from './harness.mjs';

export default {
  async 'a chat shows what the API answers, with its tokens and their alternatives'() {
    const page = await open();
    await asking(page, {temperature: 0});
    await type(page, STORY);
    await finished(page);
    const want = await post(cluster.url, '/v1/chat/completions',
      chatBody({max_tokens: 256, logprobs: true, top_logprobs: 5}));
    assert.equal(words(await page.textContent('.turn.assistant .content')), words(want.choices[0].message.content));
    assert.match(await page.textContent('.meta'), new RegExp(`^${want.usage.completion_tokens} tokens · \\d+ tokens/s · first token`));
    await page.click('button:text-is("Tokens")');
    assert.equal(await page.locator('.token-view .token').count(), want.usage.completion_tokens);
    const records = want.choices[0].logprobs.content;
    // The least sure one, and one that might well have been another.
    const nearest = (p) => records.reduce((best, r, i) => (
      Math.abs(Math.exp(r.logprob) - p) < Math.abs(Math.exp(records[best].logprob) - p) ? i : best), 0);
    for (const index of [nearest(0), nearest(0.4)]) {
      await page.click(`.token-view .token >> nth=${index}`);
      const rows = await page.locator('.alternatives tbody tr').allTextContents();
      const percents = records[index].top_logprobs.map((t) => Math.exp(t.logprob) * 100);
      assert.equal(rows.length, 5);
      rows.forEach((row, i) => {
        const shown = /(< )?([\d.]+) %$/.exec(row);
        const off = Math.abs(Number(shown[2]) - percents[i]);
        assert.ok(shown[1] ? percents[i] < 0.1 : off <= (shown[2].includes('.') ? 0.051 : 0.51), `${row} is ${percents[i]}`);
      });
    }
    await close(page);
  },

  async 'stop stops the work on the server'() {
    const page = await open();
    const heard = await feed(cluster.url);
    const before = heard.state.counters.cancelled;
    // Slow enough that the server is not done before the page has drawn it.
    await asking(page, {ignore_eos: true, max_tokens: 900, no_kv_cache: true});
    await type(page, STORY);
    await page.waitForFunction(() => document.querySelector('.turn.assistant .content').textContent.length > 150);
    await page.click('#send');
    await finished(page);
    assert.match(await page.textContent('.turn.assistant'), /Stopped\./);
    assert.equal(await page.textContent('#send'), 'Send');
    for (let i = 0; i < 50 && (heard.state.counters.cancelled === before || heard.state.phases.total); ++i) await page.waitForTimeout(100);
    assert.equal(heard.state.counters.cancelled, before + 1);
    assert.equal(heard.state.phases.total, 0);
    heard.close();
    await close(page);
  },

  async 'a stream goes on when its decode worker is killed, with the same text'() {
    const long = {temperature: 0, ignore_eos: true, max_tokens: 400};
    const want = await post(cluster.url, '/v1/chat/completions', chatBody(long));
    const page = await open();
    const heard = await feed(cluster.url);
    // Slow enough that it still runs when its worker is killed.
    await asking(page, {...long, no_kv_cache: true});
    const watcher = await open();
    await view(watcher, 'machine');
    await type(page, STORY);
    const running = () => heard.state.requests.find((r) => r.output_tokens > 0 && r.output_tokens < 300);
    for (let i = 0; i < 500 && !running(); ++i) await page.waitForTimeout(10);
    const victim = running().decode_worker;
    process.kill(cluster.pid(victim), 'SIGKILL');
    // Its card says so, and the request's bar shows the move.
    await watcher.waitForFunction((id) => [...document.querySelectorAll('.worker')].some((card) => card.textContent.startsWith(id) && /lost/.test(card.textContent)), victim);
    await finished(page);
    await watcher.waitForSelector('.req:not(.live) i.retry', {state: 'attached'});
    await close(watcher);
    assert.equal(words(await page.textContent('.turn.assistant .content')), words(want.choices[0].message.content));
    assert.match(await page.textContent('.meta'), /^400 tokens/);
    for (let i = 0; i < 50 && !heard.ended.length; ++i) await page.waitForTimeout(100);
    assert.equal(heard.ended[0].timings.retries, 1);
    const survivor = heard.ended[0].timings.decode_worker;
    assert.notEqual(survivor, victim);
    assert.equal(await page.textContent('.by'), `moved once, now ${survivor}`);
    for (let i = 0; i < 200 && heard.state.workers.filter((w) => w.placeable).length < 3; ++i) await page.waitForTimeout(100);
    heard.close();
    await close(page);
  },

  async 'a key is asked for, texts are completed, and a failed message is kept'() {
    const told = (more) => async (route) => {
      const answer = await route.fetch();
      await route.fulfill({response: answer, json: {...await answer.json(), ...more}});
    };
    // No key: the settings are there to give one.
    const locked = await browser.newContext();
    const gate = await locked.newPage();
    await gate.route('**/v1/tandem/capabilities', (route) => (route.request().headers().authorization === 'Bearer k'
      ? route.continue() : route.fulfill({status: 401, json: {error: {message: 'a key is wanted'}}})));
    await gate.goto(cluster.url);
    await gate.fill('#key', 'k');
    await gate.press('#key', 'Tab');
    await gate.waitForSelector('#send');
    await locked.close();
    // Without a chat template, and without a feed.
    const page = await open({}, (p) => p.route('**/v1/tandem/capabilities', told({chat: false, events: false})));
    await type(page, 'Once upon a time');
    await finished(page);
    assert.ok((await page.textContent('.turn.assistant .content .plain')).length > 20);
    await page.click('button:text-is("Tokens")');
    assert.ok(await page.locator('.token-view .token').count() > 5);
    await view(page, 'machine');
    assert.match(await page.textContent('.cluster'), /does not tell/);
    await view(page, 'chat');
    await page.route('**/v1/completions', (route) => route.fulfill({status: 503, json: {error: {message: 'no worker'}}}));
    await type(page, 'Said once');
    await page.waitForSelector('.turn.assistant .failed');
    assert.equal(await page.inputValue('#prompt'), 'Said once');
    wrong.splice(0, wrong.length, ...wrong.filter((w) => !/status of (401|503)/.test(w)));
    await close(page);
  },

  async 'what a model thinks is folded away once its answer begins'() {
    // A real model whose weights say what comes: it thinks, then it answers.
    const folder = mkdtempSync(join(tmpdir(), 'page-qwen3-'));
    execFileSync('python3', [process.env.SCRIPTED_MODEL, 'qwen3', folder]);
    const thinker = await start(binaries, folder, ['--reasoning-parser', 'qwen3']);
    const page = await open({}, null, thinker.url);
    await asking(page, {chat_template_kwargs: {think: true}});
    await type(page, 'Is it warm in Rome?');
    await finished(page);
    assert.equal(words(await page.textContent('.reasoning p')), 'I should look.');
    assert.equal(await page.locator('.reasoning').evaluate((e) => e.open), false);
    const answer = words(await page.textContent('.turn.assistant .content'));
    assert.ok(answer.startsWith('Let me look.') && !answer.includes('think'), answer);
    await page.focus('.reasoning summary');
    await page.keyboard.press('Enter');
    assert.ok(await page.isVisible('.reasoning p'));
    await close(page);
    await thinker.stop();
    rmSync(folder, {recursive: true});
  },

  async 'what a model writes never becomes markup'() {
    const page = await open();
    const made = await page.evaluate(async () => {
      const {markdown} = await import('/page/markdown.js');
      const {h} = await import('/page/dom.js');
      const div = h('div', {}, markdown([
        '# Title', 'a **bold** and *soft* `co<b>de`', '<img src=x onerror=alert(1)>',
        '[bad](javascript:alert(1)) [good](https://example.org/a)', '- one', '  - two', '1. first',
        '```js', '<script>', '```', '> said', '| a | b |', '|---|---|', '| 1 | 2 |'].join('\n')));
      let threw = '';
      try { document.body.innerHTML = '<b>x</b>'; } catch (error) { threw = error.name; }
      return {tags: [...new Set([...div.querySelectorAll('*')].map((e) => e.localName))].sort(), text: div.textContent,
        links: [...div.querySelectorAll('a')].map((a) => a.href), threw};
    });
    assert.deepEqual(made.links, ['https://example.org/a']);
    for (const tag of ['img', 'script', 'b']) assert.ok(!made.tags.includes(tag), tag);
    for (const tag of ['h3', 'strong', 'em', 'code', 'pre', 'li', 'ul', 'ol', 'blockquote', 'td', 'th']) assert.ok(made.tags.includes(tag), tag);
    assert.ok(made.text.includes('<img src=x onerror=alert(1)>') && made.text.includes('<script>') && made.text.includes('[bad](javascript:alert(1))'));
    assert.equal(made.threw, 'TypeError');
    wrong.splice(0, wrong.length, ...wrong.filter((w) => !/TrustedHTML|Trusted Type/.test(w)));
    await close(page);
  },
};
