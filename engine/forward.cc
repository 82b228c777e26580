// SPDX-License-Identifier: Apache-2.0
#include "engine/forward.h"

#include <cmath>
#include <cstdint>
#include <utility>

namespace tandem::engine {

using kernels::Backend;
using kernels::Queue;

void Forward(const Model& model, const kernels::Rows& rows,
             const SampledRows& sampled, Backend& backend, Queue& queue,
             kernels::KvCache& cache, Workspace& w,
             absl::FunctionRef<void(int)> kv_written) {
  const ModelSpec& spec = model.spec();
  const int hidden = spec.hidden_size;
  const int query = spec.heads * spec.head_dim;
  const int last = spec.layers - 1;
  const float eps = static_cast<float>(spec.norm_eps);
  const float scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(spec.head_dim)));
  int n = rows.num_rows;
  void* x = w.x;
  const void* attention = w.attention;
  const void* delta = nullptr;

  backend.Embed(queue, rows, model.embedding(), x);
  for (int i = 0; i <= last; ++i) {
    const Model::Layer& layer = model.layers()[i];
    backend.RmsNorm(queue, n, hidden, eps, x, delta, layer.input_norm,
                    w.normed);
    backend.MatMul(queue, n, w.normed, *layer.qkv, layer.qkv_bias, w.qkv);
    backend.RopeAppend(queue, rows, spec.heads, model.rope(), w.qkv, cache, i);
    kv_written(i + 1);
    if (i == last && sampled.count == 0) return;  // KV was all that is wanted
    backend.Attention(queue, rows, spec.heads, scale, w.qkv, spec.qkv_rows(),
                      cache, i, w.attention);
    if (i == last) {  // no row looks at another any more: go on with few
      n = sampled.count;
      backend.GatherRows(queue, n, hidden, sampled.row_ids, x, w.sampled_x);
      backend.GatherRows(queue, n, query, sampled.row_ids, w.attention,
                         w.sampled_attention);
      x = w.sampled_x;
      attention = w.sampled_attention;
    }
    backend.MatMul(queue, n, attention, *layer.output, layer.output_bias,
                   w.delta);
    backend.RmsNorm(queue, n, hidden, eps, x, w.delta,
                    layer.post_attention_norm, w.normed);
    backend.MatMul(queue, n, w.normed, *layer.gate_up, layer.gate_up_bias,
                   w.gate_up);
    backend.SiluMul(queue, n, spec.intermediate_size, w.gate_up, w.activated);
    backend.MatMul(queue, n, w.activated, *layer.down, layer.down_bias,
                   w.delta);
    delta = w.delta;
  }
  backend.RmsNorm(queue, n, hidden, eps, x, delta, model.final_norm(),
                  w.normed);
  backend.Logits(queue, n, w.normed, model.head(), w.logits);
}

absl::StatusOr<Workspace> Workspace::Create(const ModelSpec& spec, int max_rows,
                                            int max_sampled, Backend* backend) {
  Workspace w;
  const auto rows = static_cast<size_t>(max_rows);
  const auto sampled = static_cast<size_t>(max_sampled);
  const auto query = static_cast<size_t>(spec.heads) * spec.head_dim;
  const size_t element = SizeOf(backend->activation_type());
  const std::pair<void**, size_t> parts[] = {
      {&w.x, rows * spec.hidden_size},
      {&w.normed, rows * spec.hidden_size},
      {&w.qkv, rows * spec.qkv_rows()},
      {&w.attention, rows * query},
      {&w.delta, rows * spec.hidden_size},
      {&w.gate_up, rows * 2 * spec.intermediate_size},
      {&w.activated, rows * spec.intermediate_size},
      {&w.sampled_x, sampled * spec.hidden_size},
      {&w.sampled_attention, sampled * query}};
  const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  const size_t logits = sampled * spec.vocab_size * sizeof(float);
  size_t total = logits;
  for (const auto& [pointer, count] : parts) total += aligned(count * element);
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer =
      backend->Allocate(total);
  if (!buffer.ok()) return buffer.status();
  w.buffer_ = *std::move(buffer);
  std::byte* next = w.buffer_->data();
  for (const auto& [pointer, count] : parts) {
    *pointer = next;
    next += aligned(count * element);
  }
  w.logits = reinterpret_cast<float*>(next);
  return w;
}

}  // namespace tandem::engine
