// SPDX-License-Identifier: Apache-2.0
// Keyboard, themes, phone width, and what axe finds.
import assert from 'node:assert/strict';
import {readFileSync} from 'node:fs';
import {open, close, view, finished, type, axe, VIEWS, STORY} from './harness.mjs';

const AXE = readFileSync(axe, 'utf8');

export default {
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

  async 'the machine and the cache are worked by keyboard alone'() {
    const page = await open();
    const named = () => page.evaluate(() => {
      const e = document.activeElement;
      return e.id || (e.getAttribute('aria-label') || e.textContent || '').trim();
    });
    const to = async (want) => {
      const passed = [];
      for (let i = 0; i < 60; ++i) {
        await page.keyboard.press('Tab');
        const name = await named();
        if (name === want || (want instanceof RegExp && want.test(name))) return;
        passed.push(name.slice(0, 20));
      }
      assert.fail(`the Tab key does not come to ${want}: ${passed}`);
    };
    await to('Machine');
    await page.keyboard.press('Enter');
    await page.waitForSelector('#view-machine:not([hidden])');
    await to('Send a request');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.req:not(.live)');
    await to(/this page/);
    await page.keyboard.press('Space');
    await page.locator('.req[open] dl').waitFor();
    await to('See it generated');
    await page.keyboard.press('Enter');
    await page.waitForSelector('#view-generation:not([hidden])');
    await page.waitForFunction(() => document.querySelector('#position').max > 5);

    await to('Cache');
    await page.keyboard.press('Enter');
    await page.waitForSelector('#view-cache:not([hidden])');
    await to('cache-tokens');
    await page.keyboard.press('Home');
    assert.equal(await page.textContent('output[for="cache-tokens"]'), '16');
    await to('Measure');
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => /Measured/.test(document.querySelector('#view-cache [role=status]').textContent));
    await to('metric');
    await page.keyboard.press('ArrowDown');
    await page.waitForFunction(() => /^FLOPs/.test(document.querySelector('.measured caption').textContent));
    await to('Figures');
    await close(page);
  },

  async 'both themes and a phone pass axe, without scrolling sideways'() {
    for (const [scheme, width] of [['light', 1280], ['dark', 1280], ['light', 360], ['dark', 360]]) {
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
