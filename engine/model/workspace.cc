// SPDX-License-Identifier: Apache-2.0
#include "engine/model/workspace.h"

#include <algorithm>
#include <array>
#include <utility>

namespace tandem::engine {

using kernels::Backend;

namespace {

struct Part {
  void** pointer;
  size_t bytes;
};

// Where parts that are f32 everywhere come to lie.
struct FloatParts {
  void* route_logits = nullptr;
  void* route_weights = nullptr;
  void* logits = nullptr;
  void* lora_inner = nullptr;
};

constexpr int kParts = 17;

// One after another, each in whole cache lines.
std::array<Part, kParts> PartsOf(const ModelSpec& spec, int max_rows,
                                 int max_sampled, const LoraLayout* lora,
                                 kernels::DType activation, Workspace& w,
                                 FloatParts& floats) {
  const size_t rows = static_cast<size_t>(max_rows) * SizeOf(activation);
  const size_t sampled = static_cast<size_t>(max_sampled) * SizeOf(activation);
  const kernels::RouteOptions& routes = spec.routes;
  const size_t routed = routes.experts > 0 ? static_cast<size_t>(max_rows) : 0;
  const int query = spec.heads * spec.widest_head_dim();
  const bool halves =
      lora != nullptr && spec.is_gated() && lora->has(LoraProduct::kGateUp);
  const size_t ranks = lora == nullptr ? 0 : lora->max_rank();
  std::array<Part, kParts> parts = {
      {{&w.x, rows * spec.hidden_size},
       {&w.normed, rows * spec.hidden_size},
       {&w.qkv, rows * std::max(spec.widest_qkv_rows(),
                                spec.heads * spec.output_dim())},
       {&w.latent,
        spec.latent() ? rows * std::max(spec.query_rank, spec.head_dim) : 0},
       {&w.attention, rows * std::max(query, spec.heads * spec.query_dim())},
       {&w.delta, rows * spec.hidden_size},
       {&w.experts, routed == 0 || spec.names.router_norm.empty()
                        ? 0
                        : rows * spec.hidden_size},
       {&w.activated,
        rows * std::max(spec.widest_dense_size(), spec.told_numbers())},
       {&w.told, rows * spec.told_numbers()},
       {&w.sampled_x, sampled * spec.hidden_size},
       {&w.sampled_heads, sampled * std::max(query, spec.widest_qkv_rows())},
       {&w.sampled_told, sampled * spec.told_numbers()},
       {&floats.route_logits, routed * routes.logits() * sizeof(float)},
       {&floats.route_weights, routed * routes.weights() * sizeof(float)},
       {&w.halves, halves ? rows * (2 * spec.intermediate_size + 14) : 0},
       {&floats.lora_inner, max_rows * ranks * sizeof(float)},
       {&floats.logits,
        static_cast<size_t>(max_sampled) * spec.vocab_size * sizeof(float)}}};
  for (Part& part : parts) part.bytes = (part.bytes + 255) / 256 * 256;
  return parts;
}

}  // namespace

size_t Workspace::Bytes(const ModelSpec& spec, int max_rows, int max_sampled,
                        const LoraLayout* lora, kernels::DType activation) {
  Workspace none;
  FloatParts floats;
  size_t total = 0;
  for (const Part& part :
       PartsOf(spec, max_rows, max_sampled, lora, activation, none, floats)) {
    total += part.bytes;
  }
  return total;
}

absl::StatusOr<Workspace> Workspace::Create(const ModelSpec& spec, int max_rows,
                                            int max_sampled,
                                            const LoraLayout* lora,
                                            Backend* backend) {
  const kernels::DType activation = backend->activation_type();
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer =
      backend->Allocate(Bytes(spec, max_rows, max_sampled, lora, activation));
  if (!buffer.ok()) return buffer.status();
  Workspace w;
  w.buffer_ = *std::move(buffer);
  std::byte* next = w.buffer_->data();
  FloatParts floats;
  for (const Part& part :
       PartsOf(spec, max_rows, max_sampled, lora, activation, w, floats)) {
    *part.pointer = next;
    next += part.bytes;
  }
  w.route_logits = static_cast<float*>(floats.route_logits);
  w.route_weights = static_cast<float*>(floats.route_weights);
  w.logits = static_cast<float*>(floats.logits);
  w.lora_inner = static_cast<float*>(floats.lora_inner);
  return w;
}

}  // namespace tandem::engine
