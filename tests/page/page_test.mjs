// SPDX-License-Identifier: Apache-2.0
// The page in a real Chromium against a real cluster: what it shows is compared
// with what the API says.
//
// Usage: node page_test.mjs BINARIES MODEL [SCREENSHOT_FOLDER]
// ONLY=WORDS runs the tests whose names have these.
import assert from 'node:assert/strict';
import {browser, cluster, wrong} from './harness.mjs';
import access from './access_tests.mjs';
import chat from './chat_tests.mjs';
import generation from './generation_tests.mjs';
import machine from './machine_tests.mjs';

const shots = process.argv[4];
const tests = {...chat, ...machine, ...generation, ...access};


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
  await takeShots(shots);
}
await browser.close();
await cluster.stop();
process.exit(failed ? 1 : 0);
