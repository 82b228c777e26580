// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/attention_weights.h"

#include <algorithm>
#include <limits>

namespace tandem::kernels::cpu {
namespace {

inline constexpr int kKeys = 128;  // of a piece; pieces begin at multiples

struct Pieces {
  const KernelTable& table;
  const AttentionWeightsStep& step;
  const KvLayout& layout;
  const int group;  // heads of one KV head

  int first_key() const {
    const int window = step.options.window;
    return window > 0 ? std::max(0, step.look.position + 1 - window) : 0;
  }
  int end_key() const { return step.look.position + 1; }

  // scores [heads of kv_head][kKeys] of keys [begin, end).
  void Score(int kv_head, int begin, int end, float* scores) const {
    alignas(64) float row[2 * kMaxHeadDim];  // K, then V
    const float* const q = step.q + int64_t{kv_head} * group * layout.head_dim;
    for (int key = begin; key < end; ++key) {
      const int block = step.block_table[key / layout.block_size];
      ReadKvRow(layout, step.cache->Block(step.layer, block),
                key % layout.block_size, kv_head, kv_head + 1, DType::kF32,
                reinterpret_cast<std::byte*>(row));
      for (int h = 0; h < group; ++h) {
        float sum = 0;
        for (int i = 0; i < layout.head_dim; ++i) {
          sum += q[h * layout.head_dim + i] * row[i];
        }
        scores[h * kKeys + key - begin] = sum;
      }
    }
    for (int h = 0; h < group; ++h) {
      table.scale(end - begin, step.options.scale, step.options.soft_cap,
                  scores + int64_t{h} * kKeys);
    }
  }

  // weights = exp(scores - maximum).
  void Weigh(int count, float maximum, const float* scores,
             float* weights) const {
    for (int i = 0; i < count; ++i) weights[i] = scores[i] - maximum;
    table.exp(count, weights, weights);
  }

  // The maximum of all scores, and the sum of what they weigh, of each head.
  void States(int kv_head, float* scores) const {
    float weights[kKeys];
    float* const states = step.look.states + int64_t{2} * kv_head * group;
    for (int h = 0; h < group; ++h) {
      const size_t at = size_t{2} * static_cast<size_t>(h);
      states[at] = -std::numeric_limits<float>::infinity();
      states[at + 1] = 0;
    }
    for (int begin = first_key() / kKeys * kKeys; begin < end_key();
         begin += kKeys) {
      const int from = std::max(begin, first_key());
      const int end = std::min(begin + kKeys, end_key());
      Score(kv_head, from, end, scores);
      for (int h = 0; h < group; ++h) {
        const float* const own = scores + int64_t{h} * kKeys;
        const size_t at = size_t{2} * static_cast<size_t>(h);
        float& maximum = states[at];
        float& sum = states[at + 1];
        const float most =
            std::max(maximum, *std::max_element(own, own + end - from));
        float before = maximum - most;
        table.exp(1, &before, &before);
        Weigh(end - from, most, own, weights);
        float piece = 0;
        for (int i = 0; i < end - from; ++i) piece += weights[i];
        sum = sum * before + piece;
        maximum = most;
      }
    }
    const float* const sinks = step.options.sinks;
    for (int h = 0; sinks != nullptr && h < group; ++h) {
      AddSink(sinks[kv_head * group + h], states + int64_t{2} * h);
    }
  }

  // A sink weighs what its score does; nothing is looked at there.
  void AddSink(float sink, float* state) const {
    float weights[2] = {state[0], sink};
    const float most = std::max(state[0], sink);
    Weigh(2, most, weights, weights);
    state[0] = most;
    state[1] = state[1] * weights[0] + weights[1];
  }

  void Add(int begin, float* scores) const {
    const AttentionLook& look = step.look;
    const int from = std::max(begin, first_key());
    const int end = std::min(begin + kKeys, end_key());
    float weights[kKeys];
    float sums[kKeys] = {};
    for (int kv_head = 0; kv_head < layout.kv_heads && from < end; ++kv_head) {
      Score(kv_head, from, end, scores);
      for (int h = 0; h < group; ++h) {
        const float* const state =
            look.states + int64_t{2} * (kv_head * group + h);
        Weigh(end - from, state[0], scores + int64_t{h} * kKeys, weights);
        for (int i = from; i < end; ++i) {
          sums[i - begin] += weights[i - from] / state[1];
        }
      }
    }
    for (int key = begin; key < end; ++key) {
      const float weight = sums[key - begin] * look.factor;
      look.out[key] = look.add ? look.out[key] + weight : weight;
    }
  }
};

}  // namespace

void RunAttentionWeights(const KernelTable& table, ThreadPool::Team& team,
                         const AttentionWeightsStep& step) {
  const KvLayout& layout = step.cache->layout();
  const Pieces pieces{table, step, layout, step.heads / layout.kv_heads};
  const auto scores = [&](int member) {
    return reinterpret_cast<float*>(team.member_scratch(member));
  };
  team.ForEach(layout.kv_heads, [&](int kv_head, int member) {
    pieces.States(kv_head, scores(member));
  });
  team.ForEach((pieces.end_key() + kKeys - 1) / kKeys,
               [&](int piece, int member) {
                 pieces.Add(piece * kKeys, scores(member));
               });
}

}  // namespace tandem::kernels::cpu
