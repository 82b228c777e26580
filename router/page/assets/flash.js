// SPDX-License-Identifier: Apache-2.0
// How red the cells are that were computed again: a flash for each token, but
// where tokens come faster than three a second a steady red (WCAG 2.3.1: at
// most three flashes a second).

import {calm} from './dom.js';

const FLASH_MS = 380;
const STEADY = 0.8;
const REST = 0.12;

export function makeFlash() {
  let begun = -1e9;   // of the last flash
  let steadyTill = -1e9;
  return {
    // A token came, or another one is looked at.
    strike: (now) => {
      if (now - begun < FLASH_MS || now < steadyTill) steadyTill = now + FLASH_MS;
      else begun = now;
    },
    level: (now, playing) => {
      if (calm() || !playing || now < steadyTill) return STEADY;
      return Math.max(REST, 1 - Math.max(0, now - begun) / FLASH_MS);
    },
    // Whether it changes by itself.
    fading: (now) => now < Math.max(begun, steadyTill) + FLASH_MS + 100,
  };
}
