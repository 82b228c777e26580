// SPDX-License-Identifier: Apache-2.0
// Prompts to begin with: a kind, the text, and what comes of it.

export const EXAMPLES = [
  ['Story', 'Tell me a story about a cat.', 'prose, token by token'],
  ['Code', 'Make a JSON list of red, green and blue.', 'structured output'],
  ['Chat', 'What is 17 + 25?', 'a question'],
];
