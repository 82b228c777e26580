// SPDX-License-Identifier: Apache-2.0
#include "engine/model/forward.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tandem::engine {

using kernels::Backend;
using kernels::Queue;

namespace {

// Whatever the config's, in every model that has it.
constexpr float kLatentNormEps = 1e-6f;

struct Pass {
  const Model& model;
  Backend& backend;
  Queue& queue;
  const StepAdapters& adapters;
  const int32_t* slots;  // of the rows that are left

  // out = norm of x, or x where there is none, after x += delta unless that is
  // null.
  void Norm(int rows, const Model::Norm& norm, void* x, const void* delta,
            void* out) const {
    const ModelSpec& spec = model.spec();
    const auto eps = static_cast<float>(spec.norm_eps);
    if (norm.bias == nullptr) {
      backend.RmsNorm(queue, rows, spec.hidden_size, eps, x, delta, norm.weight,
                      out);
    } else {
      backend.LayerNorm(queue, rows, spec.hidden_size, eps, x, delta,
                        norm.weight, norm.bias, out);
    }
  }

  // Norms q and k where the family does that to all heads together, or to each
  // with weights of its own; what is left for each head.
  kernels::HeadNorms NormHeads(int index, int rows, const Model::Layer& layer,
                               Workspace& w) const {
    const ModelSpec& spec = model.spec();
    const auto eps = static_cast<float>(spec.norm_eps);
    const bool centres = spec.centres_heads();
    if (!spec.wide_norms && !centres) {
      return {.query = layer.query_norm.weight,
              .key = layer.key_norm.weight,
              .eps = eps,
              .rotated = spec.turned_norms,
              .value = layer.value_norm};
    }
    const int kv_heads = spec.kv_heads_of(index).count;
    const int dim = spec.kv_heads_of(index).dim;
    const int query = spec.heads * dim;
    const int64_t stride = spec.qkv_rows(index);
    std::byte* const key = static_cast<std::byte*>(w.qkv) +
                           query * SizeOf(backend.activation_type());
    if (centres) {
      const auto centre = [&](int heads, const Model::Norm& norm, void* x) {
        backend.CentreHeads(queue, rows, heads, dim, stride, eps, norm.weight,
                            x);
      };
      centre(spec.heads, layer.query_norm, w.qkv);
      centre(kv_heads, layer.key_norm, key);
      return {};
    }
    backend.NormInPlace(queue, rows, query, stride, eps,
                        layer.query_norm.weight, w.qkv);
    backend.NormInPlace(queue, rows, kv_heads * dim, stride, eps,
                        layer.key_norm.weight, key);
    return {};
  }

  // Queries, keys and values of w.normed; where K and V are, unless behind
  // each row's Q.
  void* Project(int index, int rows, const Model::Layer& layer,
                Workspace& w) const {
    const ModelSpec& spec = model.spec();
    if (spec.latent()) return ProjectLatent(rows, layer.latent, w);
    backend.MatMul(queue, rows, w.normed, *layer.qkv, layer.qkv_bias, w.qkv);
    Adapt(LoraProduct::kQkv, index, rows, w.normed, spec.qkv_rows(index), w.qkv,
          w);
    return nullptr;
  }

  void* ProjectLatent(int rows, const Model::Latent& latent,
                      Workspace& w) const {
    const ModelSpec& spec = model.spec();
    const void* of = w.normed;
    if (latent.query_down != nullptr) {
      backend.MatMul(queue, rows, w.normed, *latent.query_down, nullptr,
                     w.latent);
      backend.RmsNorm(queue, rows, spec.query_rank, kLatentNormEps, w.latent,
                      nullptr, latent.query_norm.weight, w.latent);
      of = w.latent;
    }
    backend.MatMul(queue, rows, of, *latent.query, nullptr, w.attention);
    backend.MatMulHeads(queue, rows, spec.heads, spec.head_dim, w.attention,
                        *latent.query_heads, w.qkv);
    backend.MatMul(queue, rows, w.normed, *latent.kv_down, nullptr, w.latent);
    backend.NormInPlace(queue, rows, spec.kv_rank, spec.head_dim,
                        kLatentNormEps, latent.kv_norm.weight, w.latent);
    void* const kv = static_cast<std::byte*>(w.qkv) +
                     static_cast<size_t>(rows) * spec.heads * spec.head_dim *
                         SizeOf(backend.activation_type());
    backend.MatMul(queue, rows, w.latent, *latent.kv, nullptr, kv);
    return kv;
  }

  // What the output's product takes of attention; w.qkv is lost.
  const void* Values(int rows, const Model::Layer& layer, const void* attention,
                     Workspace& w) const {
    const ModelSpec& spec = model.spec();
    if (!spec.latent()) return attention;
    backend.MatMulHeads(queue, rows, spec.heads, spec.value_dim, attention,
                        *layer.latent.value_heads, w.qkv);
    return w.qkv;
  }

  // From one row of w.qkv to the next.
  int64_t query_stride(int index) const {
    const ModelSpec& spec = model.spec();
    return spec.latent() ? int64_t{spec.heads} * spec.head_dim
                         : spec.qkv_rows(index);
  }

  // w.route_weights = what rows choose by w.normed.
  void Route(int rows, const Model::Layer& layer, Workspace& w) const {
    kernels::RouteOptions routes = model.spec().routes;
    routes.choice_bias = layer.choice_bias;
    routes.expert_scales = layer.expert_scales;
    backend.Logits(queue, rows, w.normed, *layer.router, layer.router_bias,
                   w.route_logits);
    backend.Route(queue, rows, routes, w.route_logits, w.route_weights);
  }

  // out = what those experts make of w.normed, and what it holds where all rows
  // take that.
  void Experts(int rows, const Model::Layer& layer, Workspace& w,
               void* out) const {
    const ModelSpec& spec = model.spec();
    const kernels::RouteOptions& routes = spec.routes;
    backend.Experts(queue, rows, w.normed, w.route_weights, *layer.experts,
                    {.chosen = routes.chosen,
                     .shared = routes.shared != kernels::SharedExpert::kNone,
                     .biases = layer.expert_biases,
                     .activation = spec.activation},
                    out);
  }

  bool Adapts(LoraProduct product) const {
    if (adapters.slots == nullptr) return false;
    const auto& sections = adapters.slots->layout().sections();
    for (size_t s = 0; s < sections.size(); ++s) {
      if (sections[s].product == product && (adapters.sections >> s & 1) != 0) {
        return true;
      }
    }
    return false;
  }

  // out [rows, stride] += what adapters make of x; out may be halves.
  void Adapt(LoraProduct product, int layer, int rows, const void* x,
             int64_t stride, void* out, Workspace& w, int halves = 0) const {
    if (adapters.slots == nullptr) return;
    const auto& sections = adapters.slots->layout().sections();
    for (size_t s = 0; s < sections.size(); ++s) {
      if (sections[s].product != product || (adapters.sections >> s & 1) == 0) {
        continue;
      }
      backend.AddLora(queue, rows, x, slots,
                      adapters.slots->Factors(layer, static_cast<int>(s)),
                      {.out = out,
                       .stride = stride,
                       .first = sections[s].first,
                       .halves = halves,
                       .scratch = w.lora_inner});
    }
  }

  // w.told = what all layers are told of the rows, of which x is the embedding.
  void Tell(const kernels::Rows& rows, const void* x, Workspace& w) const {
    const ModelSpec& spec = model.spec();
    const Model::Told& told = model.told();
    const int numbers = spec.told_numbers();
    // What the projection gives is to be scaled by hidden^-0.5, which its norm
    // takes out again, with an epsilon in the same measure.
    const auto eps = static_cast<float>(spec.norm_eps * spec.hidden_size);
    backend.MatMul(queue, rows.num_rows, x, *told.projection, nullptr, w.told);
    backend.RmsNorm(queue, rows.num_rows * spec.layers, spec.told, eps, w.told,
                    nullptr, told.norm.weight, w.told);
    backend.Embed(queue, rows, *told.table, told.scale, nullptr, w.activated);
    backend.AddAndScale(queue, rows.num_rows, numbers,
                        static_cast<float>(std::sqrt(0.5)), w.activated,
                        w.told);
  }

  // w.delta = what the layer makes of what it is `told`, after x += w.delta.
  void Listen(int index, int rows, const Model::ToldLayer& layer, void* x,
              const void* told, Workspace& w) const {
    const ModelSpec& spec = model.spec();
    backend.RmsNorm(queue, rows, spec.hidden_size, 0, x, w.delta, nullptr,
                    w.delta);
    backend.MatMul(queue, rows, x, *layer.gate, nullptr, w.activated);
    const auto* const own = static_cast<const std::byte*>(told) +
                            static_cast<size_t>(index) * spec.told *
                                SizeOf(backend.activation_type());
    backend.ActivateTimes(queue, rows, spec.told, spec.activation, own,
                          spec.told_numbers(), w.activated);
    backend.MatMul(queue, rows, w.activated, *layer.output, nullptr, w.delta);
    Norm(rows, layer.output_norm, w.delta, nullptr, w.delta);
  }

  // w.delta = what all rows take of w.normed.
  void Dense(int index, int rows, const Model::Layer& layer,
             Workspace& w) const {
    const ModelSpec& spec = model.spec();
    const int wide = spec.dense_size(index);
    if (spec.is_gated() && Adapts(LoraProduct::kGateUp)) {
      backend.MatMulHalves(queue, rows, w.normed, *layer.gate_up, w.halves);
      Adapt(LoraProduct::kGateUp, index, rows, w.normed, 0, w.halves, w, wide);
      backend.GateHalves(queue, rows, wide, spec.activation, w.halves,
                         w.activated);
    } else if (spec.is_gated()) {
      backend.GatedMatMul(queue, rows, w.normed, *layer.gate_up,
                          layer.gate_up_bias, spec.activation, w.activated);
    } else {
      backend.MatMul(queue, rows, w.normed, *layer.gate_up, layer.gate_up_bias,
                     w.activated);
      Adapt(LoraProduct::kGateUp, index, rows, w.normed, wide, w.activated, w);
      backend.Activate(queue, rows, wide, spec.activation, w.activated);
    }
    backend.MatMul(queue, rows, w.activated, *layer.down, layer.down_bias,
                   w.delta);
    Adapt(LoraProduct::kDown, index, rows, w.activated, spec.hidden_size,
          w.delta, w);
  }

  // w.delta = the feed-forward layer of w.normed, but for what is returned,
  // which is to be added: what experts with norms of their own make of x.
  const void* FeedForward(int index, int rows, const Model::Layer& layer,
                          void* x, Workspace& w) const {
    if (layer.gate_up != nullptr) Dense(index, rows, layer, w);
    if (layer.experts == nullptr) return nullptr;
    if (layer.router_norm.weight == nullptr) {
      Route(rows, layer, w);
      Experts(rows, layer, w, w.delta);
      return nullptr;
    }
    Norm(rows, layer.shared_output_norm, w.delta, nullptr, w.delta);
    Norm(rows, layer.router_norm, x, nullptr, w.normed);
    Route(rows, layer, w);
    Norm(rows, layer.expert_norm, x, nullptr, w.normed);
    Experts(rows, layer, w, w.experts);
    Norm(rows, layer.expert_output_norm, w.experts, nullptr, w.experts);
    return w.experts;
  }

  // The weights with which a row looks at what `options` say, where its ask
  // is of this layer. `q` is of all rows, or of those that are sampled alone.
  void Look(const RowLook& row, int layer, const kernels::Rows& rows,
            const kernels::AttentionOptions& options, const void* q,
            bool sampled_alone, const kernels::KvCache& cache,
            int cache_layer) const {
    const ModelSpec& spec = model.spec();
    const std::vector<int32_t>& layers = row.ask->layers;
    const auto found = std::lower_bound(layers.begin(), layers.end(), layer);
    if (found == layers.end() || *found != layer) return;
    const int64_t index = found - layers.begin();
    kernels::AttentionLook look = row.look;
    if (sampled_alone) look.row = row.drawn;
    look.block_table = rows.host_spans[row.entry].block_table;
    look.factor = 1.0f / static_cast<float>(spec.heads);
    if (row.ask->mean) {
      look.factor /= static_cast<float>(layers.size());
      look.add = index > 0;
    } else {
      look.out += index * (look.position + 1);
    }
    backend.AttentionWeights(queue, rows, spec.heads, options, q,
                             query_stride(layer), cache, cache_layer, look);
  }

  // w.normed = the norm of x, after x += what w.delta has of attention, or
  // before where the layer's parts are parallel. `as_before`: w.normed still
  // has what attention took of these rows.
  void NormForFeedForward(int rows, const Model::Layer& layer, void* x,
                          bool as_before, Workspace& w) const {
    const ModelSpec& spec = model.spec();
    if (!spec.parallel) {
      return Norm(rows, layer.mlp_norm, x, w.delta, w.normed);
    }
    const bool own = layer.mlp_norm.weight != nullptr;
    if (own || !as_before) {
      Norm(rows, own ? layer.mlp_norm : layer.input_norm, x, nullptr, w.normed);
    }
    backend.RmsNorm(queue, rows, spec.hidden_size, 0, x, w.delta, nullptr,
                    w.delta);
  }

  // Norms what is about to be added to x, where the family does; with `more`
  // unless that is null.
  void OutputNorm(int rows, const Model::Norm& norm, Workspace& w,
                  const void* more = nullptr) const {
    if (norm.weight != nullptr) Norm(rows, norm, w.delta, more, w.delta);
  }
};

}  // namespace

void Forward(const Model& model, absl::Span<const kernels::Rows> rows,
             absl::Span<const LayerParts::Place> places,
             const SampledRows& sampled, const StepAdapters& adapters,
             Backend& backend, Queue& queue, kernels::KvCache& cache,
             Workspace& w, absl::FunctionRef<void(int)> kv_written,
             absl::Span<const RowLook> looks) {
  const ModelSpec& spec = model.spec();
  Pass pass{model, backend, queue, adapters, adapters.rows};
  const int hidden = spec.hidden_size;
  const int last = spec.layers - 1;
  const int last_kv = spec.kv_layers() - 1;
  kernels::AttentionOptions look{
      .scale = static_cast<float>(spec.attention_scale),
      .soft_cap = static_cast<float>(spec.score_cap)};
  int n = rows[0].num_rows;
  absl::Span<const kernels::Rows> left = rows;  // by part
  void* x = w.x;
  const void* told = w.told;
  const void* delta = nullptr;
  // Nobody looks at the other rows any more: those that are sampled go on, with
  // `heads` of `width` numbers each.
  const auto keep_sampled = [&](const void* heads, int64_t width) {
    n = sampled.count;
    left = sampled.rows;
    backend.GatherRows(queue, n, hidden, sampled.row_ids, x, w.sampled_x);
    backend.GatherRows(queue, n, static_cast<int>(width), sampled.row_ids,
                       heads, w.sampled_heads);
    if (spec.told > 0) {
      backend.GatherRows(queue, n, spec.told_numbers(), sampled.row_ids, w.told,
                         w.sampled_told);
    }
    x = w.sampled_x;
    told = w.sampled_told;
    pass.slots = adapters.sampled;
    return w.sampled_heads;
  };

  backend.Embed(queue, rows[0], model.embedding(),
                static_cast<float>(spec.embedding_scale), model.positions(), x);
  if (spec.told > 0) pass.Tell(rows[0], x, w);
  for (int i = 0; i <= last; ++i) {
    const Model::Layer& layer = model.layers()[i];
    const LayerParts::Place place = places[static_cast<size_t>(i)];
    const auto part = static_cast<size_t>(place.part);
    kernels::KvCache& own = place.other ? cache.other() : cache;
    pass.Norm(n, layer.input_norm, x, delta, w.normed);
    void* const kv = pass.Project(i, n, layer, w);
    const kernels::HeadNorms norms = pass.NormHeads(i, n, layer, w);
    if (spec.has_kv(i)) {
      backend.RopeAppend(queue, left[part], spec.heads, model.rope(i), norms,
                         w.qkv, kv, own, place.layer);
      kv_written(i + 1);
    } else {
      backend.RopeQueries(queue, left[part], spec.heads,
                          spec.kv_heads_of(i).dim, model.rope(i), norms, w.qkv);
    }
    bool as_before = true;  // w.normed
    const void* query = w.qkv;
    // KV was all that is wanted.
    if (i == last_kv && sampled.count == 0) return;
    if (i == last_kv && !sampled.rows.empty() && sampled.count < n) {
      query = keep_sampled(query, pass.query_stride(i));
      as_before = false;
    }
    look.window = spec.is_windowed(i) ? spec.window : 0;
    look.sinks = layer.sinks;
    backend.Attention(queue, left[part], spec.heads, look, query,
                      pass.query_stride(i), own, place.layer, w.attention);
    for (const RowLook& row : looks) {
      pass.Look(row, i, rows[part], look, query, left.data() != rows.data(),
                own, place.layer);
    }
    const void* attention = w.attention;
    if (i == last && sampled.rows.empty()) {
      attention = keep_sampled(attention,
                               int64_t{spec.heads} * spec.kv_heads_of(i).dim);
      as_before = false;
    }
    const void* const values = pass.Values(n, layer, attention, w);
    backend.MatMul(queue, n, values, *layer.output, layer.output_bias, w.delta);
    pass.Adapt(LoraProduct::kOutput, i, n, values, hidden, w.delta, w);
    pass.OutputNorm(n, layer.attention_output_norm, w);
    pass.NormForFeedForward(n, layer, x, as_before, w);
    const void* const more = pass.FeedForward(i, n, layer, x, w);
    pass.OutputNorm(n, layer.mlp_output_norm, w, more);
    if (spec.told > 0) pass.Listen(i, n, layer.told, x, told, w);
    delta = w.delta;
    if (layer.scale != 1) {
      backend.AddAndScale(queue, n, hidden, layer.scale, delta, x);
      delta = nullptr;
    }
  }
  pass.Norm(n, model.final_norm(), x, delta, w.normed);
  backend.Logits(queue, n, w.normed, model.head(), model.head_bias(), w.logits);
  if (spec.logit_cap > 0 || spec.logit_scale != 1) {
    backend.ScaleLogits(queue, n, spec.vocab_size,
                        static_cast<float>(spec.logit_scale),
                        static_cast<float>(spec.logit_cap), w.logits);
  }
}

}  // namespace tandem::engine
