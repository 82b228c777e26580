// SPDX-License-Identifier: Apache-2.0
#include "engine/forward.h"

#include <array>
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
    backend.GatedMatMul(queue, n, w.normed, *layer.gate_up, layer.gate_up_bias,
                        w.activated);
    backend.MatMul(queue, n, w.activated, *layer.down, layer.down_bias,
                   w.delta);
    delta = w.delta;
  }
  backend.RmsNorm(queue, n, hidden, eps, x, delta, model.final_norm(),
                  w.normed);
  backend.Logits(queue, n, w.normed, model.head(), w.logits);
}

namespace {

struct Part {
  void** pointer;
  size_t bytes;
};

constexpr int kParts = 9;

// One after another, each in whole cache lines.
std::array<Part, kParts> PartsOf(const ModelSpec& spec, int max_rows,
                                 int max_sampled, kernels::DType activation,
                                 Workspace& w, void** logits) {
  const size_t rows = static_cast<size_t>(max_rows) * SizeOf(activation);
  const size_t sampled = static_cast<size_t>(max_sampled) * SizeOf(activation);
  const auto query = static_cast<size_t>(spec.heads) * spec.head_dim;
  std::array<Part, kParts> parts = {
      {{&w.x, rows * spec.hidden_size},
       {&w.normed, rows * spec.hidden_size},
       {&w.qkv, rows * spec.qkv_rows()},
       {&w.attention, rows * query},
       {&w.delta, rows * spec.hidden_size},
       {&w.activated, rows * spec.intermediate_size},
       {&w.sampled_x, sampled * spec.hidden_size},
       {&w.sampled_attention, sampled * query},
       {logits,
        static_cast<size_t>(max_sampled) * spec.vocab_size * sizeof(float)}}};
  for (Part& part : parts) part.bytes = (part.bytes + 255) / 256 * 256;
  return parts;
}

}  // namespace

size_t Workspace::Bytes(const ModelSpec& spec, int max_rows, int max_sampled,
                        kernels::DType activation) {
  Workspace none;
  void* logits = nullptr;
  size_t total = 0;
  for (const Part& part :
       PartsOf(spec, max_rows, max_sampled, activation, none, &logits)) {
    total += part.bytes;
  }
  return total;
}

absl::StatusOr<Workspace> Workspace::Create(const ModelSpec& spec, int max_rows,
                                            int max_sampled, Backend* backend) {
  const kernels::DType activation = backend->activation_type();
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer =
      backend->Allocate(Bytes(spec, max_rows, max_sampled, activation));
  if (!buffer.ok()) return buffer.status();
  Workspace w;
  w.buffer_ = *std::move(buffer);
  std::byte* next = w.buffer_->data();
  void* logits = nullptr;
  for (const Part& part :
       PartsOf(spec, max_rows, max_sampled, activation, w, &logits)) {
    *part.pointer = next;
    next += part.bytes;
  }
  w.logits = static_cast<float*>(logits);
  return w;
}

}  // namespace tandem::engine
