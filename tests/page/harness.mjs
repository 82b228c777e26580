// SPDX-License-Identifier: Apache-2.0
// A real cluster, a real Chromium, and what the tests do with pages.
import {createRequire} from 'node:module';
import {chromium} from 'playwright-core';
import {start} from './cluster.mjs';

export const [binaries, model] = process.argv.slice(2);
export const axe = createRequire(import.meta.url).resolve('axe-core/axe.min.js');
export const VIEWS = ['chat', 'machine', 'generation', 'cache'];
export const STORY = 'Tell me a story about a cat.';

export const cluster = await start(binaries, model);
export const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
  args: ['--no-sandbox', '--use-angle=swiftshader', '--enable-unsafe-swiftshader']});
export const wrong = [];  // console errors and foreign requests, of all pages

// Axe is put in by the debugger, past the page's policy.
export async function open(options = {}, before = null, url = cluster.url) {
  const context = await browser.newContext({viewport: {width: 1280, height: 860}, ...options});
  const page = await context.newPage();
  page.on('console', (m) => { if (['error', 'warning'].includes(m.type()) && !/GPU stall|GL Driver/.test(m.text())) wrong.push(m.text()); });
  page.on('pageerror', (error) => wrong.push(error.message));
  page.on('request', (request) => { if (!request.url().startsWith(url)) wrong.push(`asked ${request.url()}`); });
  if (before) await before(page);
  await page.goto(url);
  await page.waitForSelector('#send');
  return page;
}
export const close = (page) => page.context().close();
export const view = async (page, name) => {
  await page.click(`nav a[href="#${name}"]`);
  await page.waitForSelector(`#view-${name}:not([hidden])`);
};
export const words = (text) => text.replace(/\s+/g, ' ').trim();
export const finished = (page) => page.waitForSelector('.turn.assistant:last-child[aria-busy="false"]', {timeout: 60000});

// Requests of the page with other fields: greedy, and as long as wanted.
export async function asking(page, more) {
  await page.route('**/v1/chat/completions', (route) => route.continue(
    {postData: JSON.stringify({...route.request().postDataJSON(), ...more})}));
}
export async function type(page, text) {
  await page.fill('#prompt', text);
  await page.press('#prompt', 'Enter');
}
export const chatBody = (more) => ({messages: [{role: 'user', content: STORY}], temperature: 0, ...more});
