// SPDX-License-Identifier: Apache-2.0
// Which layers' attention weights a request asks for, and those of a token.

const MOST_LAYERS = 32;  // asked for and drawn

// So many of them, from the first to the last.
export const evenly = (layers, count) => (count < 2 ? [0]
  : Array.from({length: count}, (_, i) => Math.round((i * (layers - 1)) / (count - 1))));

export const shownLayers = (layers) => evenly(layers, Math.min(layers, MOST_LAYERS));

// As much as the server gives for a sequence of so many positions: all layers,
// some of them, their mean, or (undefined) nothing.
export function ask({layers, max_attention_weights: most}, positions) {
  const fit = Math.min(layers, MOST_LAYERS, Math.floor(most / Math.max(1, positions)));
  if (fit >= layers) return true;
  if (fit >= 2) return {layers: evenly(layers, fit)};
  return fit >= 1 ? 'mean' : undefined;
}

const of = (run) => {
  const first = run && run.tokens[0];
  return (first && first.attention) || [];
};

// The layers that came; empty where only the mean did, or nothing.
export const layersOf = (run) => of(run).map((a) => a.layer).filter((layer) => layer >= 0);

// A mean is one of all layers, or none.
export const hasMean = (run, layers) => of(run).length === layers || of(run).some((a) => a.layer < 0);

// Weights of the row that the token was drawn from, by position; `layer` may be
// 'mean'. Null where there are none.
export function weightsOf(token, layer) {
  const attention = token && token.attention;
  if (!attention || !attention.length) return null;
  const found = attention.find((a) => a.layer === (layer === 'mean' ? -1 : layer));
  if (found) return found.weights;
  if (layer !== 'mean' || attention[0].layer < 0) return null;
  if (!token.mean) {
    token.mean = new Float32Array(attention[0].weights.length);
    for (const {weights} of attention) weights.forEach((w, i) => { token.mean[i] += w / attention.length; });
  }
  return token.mean;
}
