// SPDX-License-Identifier: Apache-2.0
// The machine view: workers, requests and blocks as the live feed tells them.
import assert from 'node:assert/strict';
import {feed} from './cluster.mjs';
import {cluster, open, close, view, words, finished, type} from './harness.mjs';

export default {
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
    let difference = await differs();
    for (let i = 0; i < 50 && difference; ++i) {
      await page.waitForTimeout(100);
      difference = await differs();
    }
    assert.equal(difference, '');
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

  async 'a request whose end was not heard does not go on for ever'() {
    const page = await open();
    const rows = await page.evaluate(async () => {
      const {timelines} = await import('/page/timeline.js');
      const lines = timelines();
      document.body.append(lines.node);
      const request = {id: 'ab12cd', label: 'x', phase: 'decoding', age_ms: 5, prompt_tokens: 3, output_tokens: 1, prefill_worker: '', decode_worker: 'decode-0'};
      const cluster = (requests, total) => ({requests, phases: {total}});
      lines.update(cluster([request], 1));
      const row = lines.node.querySelector('.req');
      const seen = [row.className];
      row.open = true;
      await new Promise((resolve) => setTimeout(resolve, 50));
      const body = row.querySelector('dd');
      // Another worker has it: drawn as a move. The row is the same one.
      lines.update(cluster([{...request, age_ms: 9, decode_worker: 'decode-1'}], 1));
      seen.push(row.querySelectorAll('i.retry').length, row.querySelector('dd') === body);
      lines.update(cluster([], 70));  // not all are shown
      seen.push(row.className);
      lines.update(cluster([], 0));
      seen.push(row.className, row.querySelector('.req-total').textContent);
      lines.node.remove();
      return seen;
    });
    assert.deepEqual(rows, ['req live', 1, true, 'req live', 'req', 'not seen']);
    await close(page);
  },
};
