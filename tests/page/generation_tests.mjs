// SPDX-License-Identifier: Apache-2.0
// The generation and the cache: weights and counters are those of the API.
import assert from 'node:assert/strict';
import {post} from './cluster.mjs';
import {cluster, open, close, view, words, chatBody} from './harness.mjs';

export default {
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
    const works = [];
    for (const event of (await response.text()).split('\n\n')) {
      if (!event.startsWith('data: {')) continue;
      const chunk = JSON.parse(event.slice(6));
      for (const c of chunk.choices) {
        if (!c.attention) continue;
        tokens.push(...c.attention);
        while (works.length < tokens.length) works.push(chunk.work);
      }
    }
    assert.equal(tokens[19].length, 6);
    const shown = async () => page.locator('.side table >> nth=1').locator('tbody tr').evaluateAll((rows) => rows.map((row) => [
      Number(row.querySelector('.note').textContent), row.querySelector('.number').textContent]));
    const top = (weights) => [...weights.keys()].sort((i, j) => weights[j] - weights[i]).slice(0, 3);
    const shows = async (wanted) => {
      const now = async () => (await shown()).slice(0, 3).map((r) => r[0]);
      for (let i = 0; i < 50 && String(await now()) !== String(wanted); ++i) await page.waitForTimeout(100);
      assert.deepEqual(await now(), wanted);
    };
    await page.selectOption('#layer', '3');
    await shows(top(tokens[19][3].weights));
    await page.selectOption('#layer', 'mean');
    const mean = tokens[19][0].weights.map((_, i) => tokens[19].reduce((sum, l) => sum + l.weights[i], 0) / 6);
    await shows(top(mean));
    // Figures up to a token are the workers': what they told with it.
    const hud = words(await page.textContent('.hud'));
    assert.ok(hud.includes(`${works[19].kv_rows}`), `${hud} has ${works[19].kv_rows}`);
    const {kv_bytes_per_token: each} = await (await fetch(`${cluster.url}/v1/tandem/capabilities`)).json();
    assert.equal(each, 6 * 2 * 2 * 32 * 2);  // layers, KV heads, K and V, head_dim, bytes
    // A cell for each position of each layer, glowing, and beams to what is
    // looked at; another camera sees it otherwise.
    const positions = tokens[19][0].weights.length;
    const drawn = await page.evaluate(async () => (await import('/page/main.js')).views.generation.drawn());
    assert.equal(drawn.cells, 6 * positions);
    assert.equal(drawn.beams, mean.filter((w) => Math.sqrt(w / Math.max(...mean)) > 0.08).length);
    assert.ok(drawn.halos > 1, 'nothing glows');
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

  async 'without a cache everything turns red, and flashes seldom enough'() {
    const page = await open();
    await view(page, 'generation');
    await page.check('#gen-no-cache');
    await page.click('button:text-is("Generate")');
    await page.waitForFunction(() => document.querySelector('#position').max > 20);
    assert.equal(await page.textContent('output[for="speed"]'), '2.5 tokens/s');
    await page.waitForFunction(async () => (await import('/page/main.js')).views.generation.drawn().again > 0.7);
    // Times at which it grows brighter, by a clock of its own: with every token
    // at the speed above, never at a higher one.
    const flashes = (speed) => page.evaluate(async (speed) => {
      const flash = (await import('/page/flash.js')).makeFlash();
      const seen = [];
      for (let now = 5000, next = 5000; now < 15000; now += 1000 / 60) {
        if (now >= next) { flash.strike(now); next += 1000 / speed; }
        seen.push(flash.level(now, true));
      }
      return {most: Math.max(...seen), flashes: seen.filter((v, i) => v > (i ? seen[i - 1] : 0) + 0.1).length};
    }, speed);
    assert.deepEqual(await flashes(2.5), {most: 1, flashes: 25});
    for (const speed of [3, 12, 60]) {
      const {most, flashes: count} = await flashes(speed);
      assert.ok(most > 0.7 && count <= 30, `${count} flashes in 10 s at ${speed} tokens/s`);
    }
    assert.ok((await flashes(12)).flashes <= 2, 'steady');
    await page.click('button:text-is("Flat")');
    await page.locator('#position').evaluate((e) => { e.value = 20; e.dispatchEvent(new Event('input')); });
    await page.waitForSelector('.flat .blocks.again');
    assert.match(await page.textContent('#gen-note'), /without a KV cache/);
    await close(page);
  },

  async 'a generation plays, pauses and is stepped through by keyboard'() {
    const page = await open({reducedMotion: 'reduce'});
    await view(page, 'generation');
    // It must still play when it is told to pause.
    const play = (speed) => page.locator('#speed').evaluate((e, speed) => { e.value = speed; e.dispatchEvent(new Event('input')); }, speed);
    await play(0.5);
    await page.click('.chips button:text-is("Code")');
    await page.waitForFunction(() => document.querySelector('#position').max > 15);
    const cursor = () => page.evaluate(async () => (await import('/page/main.js')).views.generation.drawn().cursor);
    await page.click('button:text-is("Pause")');
    const at = await cursor();
    await page.waitForTimeout(400);
    assert.equal(await cursor(), at);
    await play(12);
    await page.focus('#position');
    await page.keyboard.press('Home');
    await page.keyboard.press('ArrowRight');
    assert.equal(await cursor(), 1);
    await page.focus('.play');
    await page.keyboard.press('Enter');
    await page.waitForFunction(async () => (await import('/page/main.js')).views.generation.drawn().cursor > 4);
    await page.focus('#scene');
    for (const key of ['ArrowLeft', 'ArrowUp', '+', '-']) await page.keyboard.press(key);
    await page.click('button[aria-label="Zoom in"]');
    await page.focus('button:text-is("Flat")');
    await page.keyboard.press('Enter');
    await page.focus('.flat .token >> nth=0');
    await page.keyboard.press('End');
    await page.keyboard.press('Enter');
    assert.match(await page.textContent('#status'), /position \d+, drawn with/);
    await close(page);
  },

  async 'a lost graphics context, or none, leaves the flat view'() {
    const page = await open();
    await view(page, 'generation');
    await page.click('button:text-is("Generate")');
    await page.waitForFunction(() => document.querySelector('#position').max > 20);
    await page.evaluate(() => {
      window.lose = document.querySelector('#scene').getContext('webgl2').getExtension('WEBGL_lose_context');
      window.lose.loseContext();
    });
    await page.waitForSelector('.flat .token');
    assert.match(await page.textContent('#gen-note'), /context was lost/);
    await page.evaluate(() => window.lose.restoreContext());
    await page.waitForSelector('.stage:not([hidden])');
    await page.waitForTimeout(300);
    assert.ok(await page.evaluate(async () => (await import('/page/main.js')).views.generation.drawn().cells > 0));
    assert.doesNotMatch(await page.textContent('#gen-note'), /lost/);
    await close(page);

    const without = await open({}, (p) => p.addInitScript(() => { HTMLCanvasElement.prototype.getContext = () => null; }));
    await view(without, 'generation');
    assert.match(await without.textContent('#gen-note'), /no WebGL/);
    await without.click('button:text-is("Generate")');
    await without.waitForSelector('.flat .token.generated');
    await close(without);
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
    // Every token is a point.
    assert.equal((await page.getAttribute('.plot >> nth=1 >> .line.on', 'points')).split(' ').length, 64);
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
};
