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
    case DType::kW8A8:
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
  const int halves = spec.is_gated() ? 2 : 1;
  const auto bytes = [&](DType type, int64_t rows, int64_t cols) {
    return MatrixBytes(type, rows, cols, formats.zero_bytes);
  };
  const auto feed_forward = [&](int64_t size) {
    return (halves + 1) * hidden * size;
  };
  const auto feed_forward_bytes = [&](DType type, int64_t size) {
    return bytes(type, halves * size, hidden) + bytes(type, hidden, size);
  };
  // What makes queries, keys and values of the hidden state, and its bytes.
  int64_t qkv = 0;
  int64_t qkv_bytes = 0;
  const auto add = [&](DType type, int64_t rows, int64_t cols) {
    qkv += rows * cols;
    qkv_bytes += bytes(type, rows, cols);
  };
  const auto add_latent = [&] {
    const int rank = spec.query_rank;
    if (rank > 0) add(formats.layers, rank, hidden);
    add(formats.layers, int64_t{spec.heads} * spec.query_dim(),
        rank > 0 ? rank : hidden);
    add(formats.layers, spec.head_dim, hidden);
    add(formats.routers, int64_t{2} * spec.head_dim, spec.head_dim);
    add(formats.routers, int64_t{spec.heads} * spec.head_dim, spec.query_dim());
  };
  add(formats.layers, spec.told_numbers(), hidden);
  for (int layer = 0; layer < spec.kv_layers(); ++layer) {
    if (spec.latent()) {
      add_latent();
    } else {
      add(formats.layers, spec.qkv_rows(layer), hidden);
    }
  }
  const kernels::RouteOptions& routes = spec.routes;
  WorkShape shape{
      .heads = spec.heads,
      .qkv = qkv,
      .head = spec.vocab_size * hidden,
      .qkv_bytes = qkv_bytes,
      .head_bytes = MatrixBytes(formats.head, spec.vocab_size, hidden),
      .expert_bytes =
          routes.experts == 0
              ? 0
              : feed_forward_bytes(formats.experts.value_or(formats.layers),
                                   spec.expert_size),
      .experts = routes.experts,
      .experts_per_token = routes.chosen};
  for (int layer = 0; layer < spec.layers; ++layer) {
    const ModelSpec::KvHeads kv = spec.kv_heads_of(layer);
    const bool windowed = spec.is_windowed(layer);
    WorkShape::Layers& kind = windowed ? shape.windowed : shape.full;
    kind = {.count = kind.count + 1,
            .window = windowed ? spec.window : 0,
            .kv_heads = kv.count,
            .head_dim = kv.dim,
            .kv_vector_bytes = kernels::KvVectorBytes(formats.kv, kv.dim),
            .shared = kind.shared + (spec.has_kv(layer) ? 0 : 1)};
    const int64_t output =
        int64_t{spec.heads} * (spec.latent() ? spec.value_dim : kv.dim);
    const bool few = layer >= spec.kv_layers() - 1;
    int64_t& work = few ? shape.drawn : shape.after_attention;
    int64_t& read = few ? shape.drawn_bytes : shape.after_attention_bytes;
    if (!spec.has_kv(layer)) {
      work += spec.qkv_rows(layer) * hidden;
      read += bytes(formats.layers, spec.qkv_rows(layer), hidden);
    }
    work += hidden * output;
    read += bytes(formats.layers, hidden, output);
    if (spec.latent()) {
      work += output * spec.head_dim;
      read += bytes(formats.routers, output, spec.head_dim);
    }
    if (const int size = spec.dense_size(layer); size > 0) {
      work += feed_forward(size);
      read += feed_forward_bytes(formats.layers, size);
    }
    if (spec.told > 0) {
      work += int64_t{2} * spec.told * hidden;
      read += bytes(formats.layers, spec.told, hidden) +
              bytes(formats.layers, hidden, spec.told);
    }
    if (!spec.has_experts(layer)) continue;
    work += routes.logits() * hidden +
            routes.chosen * feed_forward(spec.expert_size);
    read += MatrixBytes(formats.routers, routes.logits(), hidden);
    ++(few ? shape.drawn_expert_layers : shape.expert_layers);
  }
  shape.last_windowed =
      spec.layers > 0 && spec.is_windowed(spec.kv_layers() - 1);
  return shape;
}

int ZeroBytes(const Quantisation& quantisation, bool gpu) {
  return !quantisation.zeros ? 0 : gpu ? 1 : 2;
}

WorkShape MakeWorkShape(const Model& model, DType kv, bool gpu) {
  const Model::Layer& first = model.layers().front();
  const bool latent = model.spec().latent();
  const DType layers = (latent ? first.latent.query : first.qkv)->dtype();
  std::optional<DType> experts;
  DType routers = latent ? first.latent.kv->dtype() : layers;
  for (const Model::Layer& layer : model.layers()) {
    if (layer.experts == nullptr) continue;
    experts = layer.expert_matrices.front()->dtype();
    routers = layer.router->dtype();
    break;
  }
  return MakeWorkShape(model.spec(),
                       {.layers = layers,
                        .zero_bytes = ZeroBytes(model.spec().quantisation, gpu),
                        .experts = experts,
                        .routers = routers,
                        .head = model.head().dtype(),
                        .kv = kv});
}

}  // namespace tandem::engine
