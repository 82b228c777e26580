// SPDX-License-Identifier: Apache-2.0
// The page in a real Chromium against a real cluster: what it shows is compared
// with what the API says.
//
// Usage: node page_test.mjs BINARIES MODEL [SCREENSHOT_FOLDER]
import assert from 'node:assert/strict';
import {createRequire} from 'node:module';
import {chromium} from 'playwright-core';
import {feed, post, start} from './cluster.mjs';

const [binaries, model, shots] = process.argv.slice(2);
const axe = createRequire(import.meta.url).resolve('axe-core/axe.min.js');
const VIEWS = ['chat', 'machine', 'generation', 'cache'];
const STORY = 'Tell me a story about a cat.';

const cluster = await start(binaries, model);
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
  args: ['--no-sandbox', '--use-angle=swiftshader', '--enable-unsafe-swiftshader']});
const wrong = [];  // console errors and foreign requests, of all pages

// Axe is put in by the debugger, past the page's policy.
async function open(options = {}) {
  const context = await browser.newContext({viewport: {width: 1280, height: 860}, ...options});
  const page = await context.newPage();
  page.on('console', (m) => { if (['error', 'warning'].includes(m.type()) && !/GPU stall|GL Driver/.test(m.text())) wrong.push(m.text()); });
  page.on('pageerror', (error) => wrong.push(error.message));
  page.on('request', (request) => { if (!request.url().startsWith(cluster.url)) wrong.push(`asked ${request.url()}`); });
  await page.goto(cluster.url);
  await page.waitForSelector('#send');
  return page;
}
const close = (page) => page.context().close();
const view = async (page, name) => {
  await page.click(`nav a[href="#${name}"]`);
  await page.waitForSelector(`#view-${name}:not([hidden])`);
};
const words = (text) => text.replace(/\s+/g, ' ').trim();
const finished = (page) => page.waitForSelector('.turn.assistant:last-child[aria-busy="false"]', {timeout: 60000});

// Requests of the page with other fields: greedy, and as long as wanted.
async function asking(page, more) {
  await page.route('**/v1/chat/completions', (route) => route.continue(
    {postData: JSON.stringify({...route.request().postDataJSON(), ...more})}));
}
async function type(page, text) {
  await page.fill('#prompt', text);
  await page.press('#prompt', 'Enter');
}
const chatBody = (more) => ({messages: [{role: 'user', content: STORY}], temperature: 0, ...more});

const tests = {
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
    const long = {temperature: 0, ignore_eos: true, max_tokens: 900};
    const want = await post(cluster.url, '/v1/chat/completions', chatBody(long));
    const page = await open();
    const heard = await feed(cluster.url);
    await asking(page, long);
    await type(page, STORY);
    const running = () => heard.state.requests.find((r) => r.output_tokens > 0 && r.output_tokens < 700);
    for (let i = 0; i < 500 && !running(); ++i) await page.waitForTimeout(10);
    const victim = running().decode_worker;
    process.kill(cluster.pid(victim), 'SIGKILL');
    await finished(page);
    assert.equal(words(await page.textContent('.turn.assistant .content')), words(want.choices[0].message.content));
    assert.match(await page.textContent('.meta'), /^900 tokens/);
    for (let i = 0; i < 50 && !heard.ended.length; ++i) await page.waitForTimeout(100);
    assert.equal(heard.ended[0].timings.retries, 1);
    assert.notEqual(heard.ended[0].timings.decode_worker, victim);
    for (let i = 0; i < 200 && heard.state.workers.filter((w) => w.placeable).length < 3; ++i) await page.waitForTimeout(100);
    heard.close();
    await close(page);
  },

  async 'the machine shows workers and requests as the feed tells them'() {
    const page = await open();
    const heard = await feed(cluster.url);
    await view(page, 'machine');
    await page.waitForSelector('.worker >> nth=2');
    await page.click('text=Send five at once');
    for (let i = 0; i < 200 && heard.ended.length < 5; ++i) await page.waitForTimeout(100);
    await page.waitForFunction(() => document.querySelectorAll('.req:not(.live)').length === 5);
    // Both hear the same, but not in the same moment.
    const differs = async () => {
      for (const {id, blocks, max_num_seqs: slots} of heard.state.workers) {
        const card = await page.locator('.worker', {hasText: id}).textContent();
        const want = `${blocks.live + blocks.reserved} in use, ${blocks.cached} cached, ${blocks.free} free`;
        if (!card.includes(want) || !card.includes(`of ${slots}`)) return `${card}, not ${want}`;
      }
      return heard.state.workers.some((w) => w.blocks.cached > 0) ? '' : 'nothing is cached';
    };
    for (let i = 0; i < 50 && await differs(); ++i) await page.waitForTimeout(100);
    assert.equal(await differs(), '');
    const ended = heard.ended[3];
    const row = page.locator('.req', {hasText: ended.id.slice(0, 6)});
    await row.locator('summary').click();
    await row.locator('dl').waitFor();
    const body = words(await row.textContent());
    assert.ok(body.includes(`${ended.usage.completion_tokens} tokens`), body);
    assert.ok(body.includes(`${ended.timings.prefill_worker} → ${ended.timings.decode_worker}`), body);
    assert.ok(body.includes(` in ${ended.work.steps} steps`), body);
    assert.ok(body.includes('by shm'), body);
    // Prefill, and beside it the handoff that it hides.
    assert.equal(await row.locator('.track i.handoff').count(), 1);
    await page.waitForFunction(() => document.querySelectorAll('.block i.generated').length > 0);
    heard.close();
    await close(page);
  },

  async 'cached positions are those of the usage'() {
    const page = await open();
    await view(page, 'machine');
    const prompt = `Repeat: ${'red, green, blue, '.repeat(6)}red.`;
    for (const expected of [false, true]) {
      await view(page, 'chat');
      await page.click('text=New conversation');
      await type(page, prompt);
      await finished(page);
      await view(page, 'machine');
      const cells = await page.locator('#view-machine .block i.cached').count();
      assert.equal(cells > 0, expected, `${cells} cached`);
      if (expected) {
        await view(page, 'chat');
        assert.ok((await page.textContent('.meta')).includes(`${cells} prompt tokens cached`));
      }
    }
    await close(page);
  },

  async 'the generation shows the weights that the API gives, in space and flat'() {
    const page = await open();
    await view(page, 'generation');
    const answered = page.waitForResponse((r) => r.url().endsWith('/v1/chat/completions'));
    await page.click('button:text-is("Generate")');
    const body = (await answered).request().postDataJSON();
    await page.waitForFunction(() => document.querySelector('#position').max > 20);
    await page.locator('#position').evaluate((e) => { e.value = 20; e.dispatchEvent(new Event('input')); });
    const response = await fetch(`${cluster.url}/v1/chat/completions`, {method: 'POST',
      headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)});
    const tokens = [];
    let last = null;
    for (const event of (await response.text()).split('\n\n')) {
      if (!event.startsWith('data: {')) continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.work) last = chunk;
      for (const c of chunk.choices) if (c.attention) tokens.push(...c.attention);
    }
    assert.equal(tokens[19].length, 6);
    const shown = async () => page.locator('.side table >> nth=1').locator('tbody tr').evaluateAll((rows) => rows.map((row) => [
      Number(row.querySelector('.note').textContent), row.querySelector('.number').textContent]));
    const top = (weights) => [...weights.keys()].sort((i, j) => weights[j] - weights[i]).slice(0, 3);
    await page.selectOption('#layer', '3');
    await page.waitForTimeout(200);
    assert.deepEqual((await shown()).slice(0, 3).map((r) => r[0]), top(tokens[19][3].weights));
    await page.selectOption('#layer', 'mean');
    await page.waitForTimeout(200);
    const mean = tokens[19][0].weights.map((_, i) => tokens[19].reduce((sum, l) => sum + l.weights[i], 0) / 6);
    assert.deepEqual((await shown()).slice(0, 3).map((r) => r[0]), top(mean));
    // Figures of the whole answer are the workers'.
    const hud = words(await page.textContent('.hud'));
    assert.ok(hud.includes(`${last.work.kv_rows}`), `${hud} has ${last.work.kv_rows}`);
    // Something is drawn, and another camera sees it otherwise.
    const pictures = new Set();
    for (const name of ['Follow', 'Overview', 'From the top', 'Side']) {
      await page.click(`button:text-is("${name}")`);
      await page.waitForTimeout(1200);
      pictures.add((await page.locator('.stage').screenshot()).toString('base64'));
    }
    assert.equal(pictures.size, 4);
    await page.click('button:text-is("Flat")');
    const prompt = await post(cluster.url, '/tokenize', {messages: body.messages});
    await page.locator('.flat .block').first().waitFor();
    assert.equal(await page.locator('.flat .token:not(.generated)').count(), prompt.count);
    // Positions that have keys and values: all but the newest.
    assert.equal(await page.locator('.flat .block i:is(.prompt, .cached, .generated)').count(), prompt.count + 19);
    await close(page);
  },

  async 'without a cache everything turns red'() {
    const page = await open({reducedMotion: 'reduce'});
    await view(page, 'generation');
    await page.check('#gen-no-cache');
    await page.click('button:text-is("Generate")');
    await page.waitForFunction(() => document.querySelector('#position').max > 20);
    await page.click('button:text-is("Flat")');
    await page.locator('#position').evaluate((e) => { e.value = 20; e.dispatchEvent(new Event('input')); });
    await page.waitForSelector('.flat .blocks.again');
    assert.match(await page.textContent('#gen-note'), /without a KV cache/);
    await close(page);
  },

  async 'the plots are of numbers that workers counted'() {
    const page = await open();
    await view(page, 'cache');
    await page.locator('#cache-tokens').evaluate((e) => { e.value = 64; e.dispatchEvent(new Event('input')); });
    await page.click('button:text-is("Measure")');
    await page.waitForFunction(() => document.querySelectorAll('.measured tbody tr').length === 8, null, {timeout: 60000});
    await page.waitForFunction(() => /Measured/.test(document.querySelector('#view-cache [role=status]').textContent));
    const rows = await page.locator('.measured tbody tr').evaluateAll((all) => all.map((r) => [
      Number(r.dataset.tokens), Number(r.dataset.on), Number(r.dataset.off)]));
    const p = (await post(cluster.url, '/tokenize', {messages: chatBody().messages})).count;
    const heads = 6 * 2;  // layers times KV heads of models/tales
    for (const [g, on, off] of rows) {
      assert.equal(on, heads * (p + g - 1), `with a cache, ${g} tokens`);
      assert.equal(off, heads * (g * p + (g * (g - 1)) / 2), `without, ${g} tokens`);
    }
    for (const [name, more] of [['data-on', {}], ['data-off', {no_kv_cache: true}]]) {
      const answer = await post(cluster.url, '/v1/chat/completions', chatBody(
        {max_tokens: 64, ignore_eos: true, bypass_prefix_cache: true, placement: 'local', ...more}));
      const flops = answer.work.matrix_flops + answer.work.attention_flops;
      await page.selectOption('#metric', 'flops');
      assert.equal(Number(await page.locator('.measured tbody tr >> nth=7').getAttribute(name)), flops);
    }
    assert.match(await page.textContent('.verdict'), /the very same tokens/);
    assert.equal(await page.locator('.plot').count(), 2);
    await close(page);
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

  async 'the keyboard reaches everything, and is seen'() {
    const page = await open();
    const seen = [];
    for (let i = 0; i < 16; ++i) {
      await page.keyboard.press('Tab');
      seen.push(await page.evaluate(() => {
        const e = document.activeElement;
        const style = getComputedStyle(e);
        const shown = style.outlineStyle !== 'none' || e.id === 'prompt';  // its frame shows that
        return {name: (e.getAttribute('aria-label') || e.textContent || e.id).trim().slice(0, 40), shown, body: e === document.body};
      }));
    }
    const names = seen.filter((s) => !s.body).map((s) => s.name);
    for (const want of ['Skip to content', 'Tandem, to the chat', 'Chat', 'Machine', 'Generation', 'Cache', 'Message', 'Send', 'Settings', 'New conversation']) {
      assert.ok(names.includes(want), `${want} in ${names}`);
    }
    assert.deepEqual(seen.filter((s) => !s.body && !s.shown), []);
    await page.focus('#prompt');
    await page.keyboard.type('What is 17 + 25?');
    await page.keyboard.press('Enter');
    await finished(page);
    await page.focus('button:text-is("Tokens")');
    await page.keyboard.press('Enter');
    await page.focus('.token >> nth=0');
    await page.keyboard.press('ArrowRight');
    assert.equal(await page.getAttribute('.token >> nth=1', 'aria-pressed'), 'true');
    assert.match(await page.textContent('#status'), /Answer finished/);
    await close(page);
  },

  async 'both themes and a phone pass axe, without scrolling sideways'() {
    for (const [scheme, width] of [['light', 1280], ['dark', 1280], ['light', 360]]) {
      const page = await open({colorScheme: scheme, viewport: {width, height: 800}, reducedMotion: 'reduce'});
      await page.context().route('**/axe.js', (route) => route.fulfill({path: axe}));
      await type(page, STORY);
      await finished(page);
      await page.click('button:text-is("Tokens")');
      await page.click('.token-view .token >> nth=3');
      await page.click('.settings-panel > summary');
      for (const name of VIEWS) {
        await view(page, name);
        if (name === 'machine') {
          await page.click('text=Send a request');
          await page.waitForSelector('.req:not(.live) summary');
          await page.click('.req summary >> nth=0');
        } else if (name === 'generation') {
          await page.waitForTimeout(1200);
          await page.click('button:text-is("Flat")');
        } else if (name === 'cache') {
          await page.locator('#cache-tokens').evaluate((e) => { e.value = 16; e.dispatchEvent(new Event('input')); });
          await page.click('button:text-is("Measure")');
          await page.waitForFunction(() => /Measured/.test(document.querySelector('#view-cache [role=status]').textContent));
        }
        const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert.ok(over <= 0, `${name} is ${over} px wider than ${width}`);
        const cdp = await page.context().newCDPSession(page);
        await cdp.send('Runtime.evaluate', {expression: AXE});
        const found = await page.evaluate(() => axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}));
        assert.deepEqual(found.violations.map((v) => [name, scheme, width, v.id, v.nodes.slice(0, 3).map((n) => `${n.target} ${n.failureSummary}`)]), []);
      }
      await close(page);
    }
  },
};

const {readFileSync} = await import('node:fs');
const AXE = readFileSync(axe, 'utf8');

let failed = 0;
const only = process.env.ONLY;
for (const [name, test] of Object.entries(tests)) {
  if (only && !name.includes(only)) continue;
  const begun = Date.now();
  try {
    await test();
    assert.deepEqual(wrong, [], 'console errors, foreign requests');
    console.log(`ok      ${name} (${((Date.now() - begun) / 1000).toFixed(1)} s)`);
  } catch (error) {
    ++failed;
    wrong.length = 0;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}
if (shots && !failed) {
  const {takeShots} = await import('./screenshots.mjs');
  await takeShots(open, shots);
}
await browser.close();
await cluster.stop();
process.exit(failed ? 1 : 0);
