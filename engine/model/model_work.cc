// SPDX-License-Identifier: Apache-2.0
#include "engine/model/model_work.h"

#include <algorithm>

namespace tandem::engine {

using kernels::DType;

int64_t MatrixBytes(DType type, int64_t rows, int64_t cols, int zero_bytes) {
  const int64_t elements = rows * cols;
  // An f16 scale each group.
  const int64_t scales =
      (2 * elements + kernels::kCodeGroup - 1) / kernels::kCodeGroup;
  switch (type) {
    case DType::kFp8:
      return elements + 4 * rows;  // an f32 scale each row
    case DType::kInt8:
      return elements + scales;
    case DType::kInt4:
      return (elements + 1) / 2 + scales + scales * zero_bytes / 2;
    default:
      return elements * static_cast<int64_t>(kernels::SizeOf(type));
  }
}

WorkShape MakeWorkShape(const ModelSpec& spec, const WorkFormats& formats) {
  const int64_t hidden = spec.hidden_size;
  const int64_t query = int64_t{spec.heads} * spec.head_dim;
  const int64_t feed_forward =
      (spec.is_gated() ? 3 : 2) * hidden * spec.intermediate_size;
  const auto layer_bytes = [&](int64_t rows, int64_t cols) {
    return MatrixBytes(formats.layers, rows, cols, formats.zero_bytes);
  };
  const auto wide_bytes = [&](int64_t rows, int64_t cols) {
    return MatrixBytes(formats.experts.value_or(formats.layers), rows, cols,
                       formats.zero_bytes);
  };
  const int64_t feed_forward_bytes =
      wide_bytes(int64_t{spec.is_gated() ? 2 : 1} * spec.intermediate_size,
                 hidden) +
      wide_bytes(hidden, spec.intermediate_size);
  WorkShape shape{
      .layers = spec.layers,
      .window = spec.window,
      .heads = spec.heads,
      .kv_heads = spec.kv_heads,
      .head_dim = spec.head_dim,
      .kv_vector_bytes = static_cast<int64_t>(
          kernels::KvVectorBytes(formats.kv, spec.head_dim)),
      .qkv = spec.qkv_rows() * hidden,
      .after_attention = hidden * query,
      .head = spec.vocab_size * hidden,
      .qkv_bytes = layer_bytes(spec.qkv_rows(), hidden),
      .after_attention_bytes = layer_bytes(hidden, query),
      .head_bytes = MatrixBytes(formats.head, spec.vocab_size, hidden)};
  for (int layer = 0; layer < spec.layers; ++layer) {
    shape.windowed_layers += spec.is_windowed(layer) ? 1 : 0;
  }
  shape.last_windowed = spec.layers > 0 && spec.is_windowed(spec.layers - 1);
  if (spec.experts == 0) {
    shape.after_attention += feed_forward;
    shape.after_attention_bytes += feed_forward_bytes;
  } else {
    shape.after_attention +=
        spec.experts * hidden + spec.experts_per_token * feed_forward;
    shape.after_attention_bytes +=
        MatrixBytes(formats.routers, spec.experts, hidden);
    shape.expert_bytes = feed_forward_bytes;
    shape.experts = spec.experts;
    shape.experts_per_token = spec.experts_per_token;
  }
  return shape;
}

int ZeroBytes(const Quantisation& quantisation, bool gpu) {
  return !quantisation.zeros ? 0 : gpu ? 1 : 2;
}

WorkShape MakeWorkShape(const Model& model, DType kv, bool gpu) {
  const Model::Layer& layer = model.layers().front();
  std::optional<DType> experts;
  if (!layer.expert_matrices.empty()) {
    experts = layer.expert_matrices.front()->dtype();
  }
  return MakeWorkShape(
      model.spec(),
      {.layers = layer.qkv->dtype(),
       .zero_bytes = ZeroBytes(model.spec().quantisation, gpu),
       .experts = experts,
       .routers = layer.router ? layer.router->dtype() : layer.qkv->dtype(),
       .head = model.head().dtype(),
       .kv = kv});
}

}  // namespace tandem::engine
