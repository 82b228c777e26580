// SPDX-License-Identifier: Apache-2.0
// The pictures of docs/: `scripts/page.sh docs`.

const pause = (page, ms) => page.waitForTimeout(ms);

const PICTURES = {
  'page-chat': ['light', async (page) => {
    await page.click('text=Tell me a story about a cat.');
    await page.waitForSelector('.turn.assistant[aria-busy="false"]');
    await page.click('button:text-is("Tokens")');
    await page.click('.token-view .sure-5 >> nth=0');
  }],
  'page-machine': ['light', async (page) => {
    await page.click('nav a[href="#machine"]');
    await page.click('text=Send five at once');
    await page.waitForFunction(() => document.querySelectorAll('.req:not(.live)').length === 5);
    // And five that take longer, at work.
    await page.route('**/v1/chat/completions', (route) => route.continue(
      {postData: JSON.stringify({...route.request().postDataJSON(), ignore_eos: true, max_tokens: 400, no_kv_cache: true})}));
    await page.click('text=Send five at once');
    await page.waitForFunction(() => document.querySelectorAll('.req.live').length > 4);
    await page.mouse.move(0, 0);
    await pause(page, 600);
  }],
  'page-generation': ['dark', async (page) => {
    await page.click('nav a[href="#generation"]');
    await page.click('button:text-is("Generate")');
    await page.waitForFunction(() => document.querySelector('#position').max > 40);
    await page.locator('#position').evaluate((e) => { e.value = 33; e.dispatchEvent(new Event('input')); });
    await page.mouse.move(0, 0);
    await pause(page, 2500);
  }],
  'page-cache': ['light', async (page) => {
    await page.click('nav a[href="#cache"]');
    await page.click('button:text-is("Measure")');
    await page.waitForFunction(() => /Measured/.test(document.querySelector('#view-cache [role=status]').textContent), null, {timeout: 60000});
    await page.mouse.move(0, 0);
  }],
};

export async function takeShots(open, folder) {
  for (const [name, [colorScheme, act]] of Object.entries(PICTURES)) {
    const page = await open({colorScheme, viewport: {width: 1200, height: 860}});
    await act(page);
    await pause(page, 300);
    await page.screenshot({path: `${folder}/${name}.png`});
    await page.context().close();
  }
}
