// SPDX-License-Identifier: Apache-2.0
// The pictures of docs/: `scripts/page.sh docs`. Words look best where the fonts
// are that the page asks for first (Debian: fonts-inter, fonts-jetbrains-mono).
import {browser, open} from './harness.mjs';

const pause = (page, ms) => page.waitForTimeout(ms);
const STORY_WRITES = 39;  // a token that looks far back

async function generate(page, {noCache = false, preset = 'Overview'} = {}) {
  await page.click('nav a[href="#generation"]');
  if (noCache) await page.check('#gen-no-cache');
  await page.click('button:text-is("Generate")');
  await page.waitForFunction((least) => document.querySelector('#position').max > least, STORY_WRITES + 4, {timeout: 60000});
  await page.locator('#position').evaluate((e, to) => { e.value = to; e.dispatchEvent(new Event('input')); }, STORY_WRITES);
  await page.click(`button:text-is("${preset}")`);
  await page.mouse.move(0, 0);
  await pause(page, 3500);
}

const PICTURES = {
  'page-chat': [{}, async (page) => {
    await page.click('text=Tell me a story about a cat.');
    await page.waitForSelector('.turn.assistant[aria-busy="false"]');
    await page.click('button:text-is("Tokens")');
    await page.click('.token-view .sure-5 >> nth=0');
  }],
  'page-machine': [{}, async (page) => {
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
  'page-generation': [{colorScheme: 'dark', viewport: {width: 1200, height: 870}}, (page) => generate(page)],
  'page-phone': [{colorScheme: 'dark', viewport: {width: 390, height: 844}, deviceScaleFactor: 2},
    (page) => generate(page, {preset: 'Follow'})],
  'page-cache': [{}, async (page) => {
    await page.click('nav a[href="#cache"]');
    await page.click('button:text-is("Measure")');
    await page.waitForFunction(() => /Measured/.test(document.querySelector('#view-cache [role=status]').textContent), null, {timeout: 60000});
    await page.mouse.move(0, 0);
  }],
};

// The same token with a cache and without, side by side, and what the workers
// counted up to it.
async function takeSplit(folder) {
  const halves = [];
  for (const noCache of [false, true]) {
    const page = await open({colorScheme: 'dark', viewport: {width: 640, height: 800}});
    await generate(page, {noCache});
    await page.evaluate(() => { document.querySelector('.zoom').hidden = true; });
    const figures = await page.locator('.hud > div').evaluateAll((all) => all.map((d) => d.innerText.split('\n')));
    halves.push({noCache, image: (await page.locator('.stage').screenshot()).toString('base64'), figures});
    await page.context().close();
  }
  const page = await browser.newPage();
  const half = ({noCache, image, figures}) => `<figure><figcaption class="${noCache ? 'off' : 'on'}">${noCache ? 'Without a KV cache' : 'With a KV cache'}</figcaption>
    <dl>${figures.filter(([name]) => /compute|rows|read/.test(name)).map(([name, value]) => `<div><dt>${name}</dt><dd>${value}</dd></div>`).join('')}</dl>
    <img src="data:image/png;base64,${image}"></figure>`;
  await page.setContent(`<!doctype html><style>
    body { margin: 0; padding: 22px; background: #0f1114; color: #ecebe7; font: 15px Inter, sans-serif; display: flex; gap: 22px; width: max-content; }
    figure { margin: 0; } figcaption { font-weight: 650; font-size: 21px; } .on { color: #9db0ff; } .off { color: #ff8a7d; }
    dl { display: flex; gap: 30px; margin: 10px 0 14px; } dt { color: #a0a4ad; font-size: 13px; } dd { margin: 0; font-size: 20px; font-weight: 600; }
    img { display: block; border-radius: 16px; }</style>${halves.map(half).join('')}`);
  await pause(page, 300);
  await page.locator('body').screenshot({path: `${folder}/page-split.png`});
  await page.close();
}

export async function takeShots(folder) {
  for (const [name, [options, act]] of Object.entries(PICTURES)) {
    const page = await open({colorScheme: 'light', viewport: {width: 1200, height: 860}, ...options});
    await act(page);
    await pause(page, 300);
    await page.screenshot({path: `${folder}/${name}.png`});
    await page.context().close();
  }
  await takeSplit(folder);
}
