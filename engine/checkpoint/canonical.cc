// SPDX-License-Identifier: Apache-2.0
// ModelSpec as a line of text.

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::engine {

std::string ModelSpec::Canonical() const {
  // %.17g tells any two doubles apart. What a family always has is in its
  // name; what it may have is said where it has it.
  static constexpr const char* kActivations[] = {
      "silu", "gelu_tanh", "clamped_swiglu", "gelu", "relu2"};
  std::string text = absl::StrFormat(
      "%s hidden=%d intermediate=%d layers=%d heads=%d kv_heads=%d "
      "head_dim=%d vocab=%d max_positions=%d norm=%s eps=%.17g act=%s "
      "attention_bias=%d mlp_bias=%d tied=%d rope_theta=%.17g",
      architecture, hidden_size,
      intermediate_size > 0 ? intermediate_size : expert_size, layers, heads,
      kv_heads, head_dim, vocab_size, max_positions,
      norm == NormKind::kRms || norm == NormKind::kOffset ? "rms" : "layer",
      norm_eps, kActivations[static_cast<int>(activation)], output_bias,
      mlp_bias, tied_head, rope.theta);
  if (mixed_heads()) {
    absl::StrAppendFormat(&text, " full_kv_heads=%d full_head_dim=%d",
                          full_kv_heads, full_head_dim);
  }
  if (keys_are_values) absl::StrAppend(&text, " keys_are_values=1");
  if (shared_kv_layers > 0) {
    absl::StrAppendFormat(&text, " shared_kv_layers=%d wide=%d",
                          shared_kv_layers, wide_shared);
  }
  if (told > 0) absl::StrAppendFormat(&text, " told=%d", told);
  text += rope.Canonical();
  if (rope.rotary_dim > 0) {
    absl::StrAppendFormat(&text, " rotary_dim=%d", rope.rotary_dim);
  }
  if (latent()) {
    absl::StrAppendFormat(&text,
                          " latent=%d queries=%d still=%d values=%d turned=%s",
                          kv_rank, query_rank, still_dim, value_dim,
                          rope.interleaved ? "neighbours" : "halves");
  }
  if (parallel) absl::StrAppend(&text, " parallel=1");
  const auto bits = [](const std::vector<bool>& flags) {
    return absl::StrJoin(flags, "", [](std::string* out, bool one) {
      out->push_back(one ? '1' : '0');
    });
  };
  if (!no_rope.empty()) {
    absl::StrAppendFormat(&text, " no_rope=%s", bits(no_rope));
  }
  if (window > 0) {
    absl::StrAppendFormat(&text, " window=%d windowed=%s local_theta=%.17g%s",
                          window, bits(windowed), local_rope.theta,
                          local_rope.Canonical());
  }
  if (attention_scale != 1 / std::sqrt(static_cast<double>(query_dim()))) {
    absl::StrAppendFormat(&text, " attention_scale=%.17g", attention_scale);
  }
  if (routes.experts > 0) {
    absl::StrAppendFormat(&text, " experts=%d of %d normalised=%d",
                          routes.chosen, routes.experts, routes.normalise);
  }
  if (!routes.sigmoid && (routes.scale != 1 || routes.groups > 1)) {
    absl::StrAppendFormat(&text, " groups=%d of %d scale=%.9g",
                          routes.chosen_groups, routes.groups, routes.scale);
  }
  if (!dense.empty()) {
    absl::StrAppendFormat(&text, " dense=%s expert_size=%d", bits(dense),
                          expert_size);
  }
  if (shared_size > 0) absl::StrAppendFormat(&text, " shared=%d", shared_size);
  if (routes.sigmoid) {
    absl::StrAppendFormat(&text, " groups=%d of %d scale=%.9g norms=%d",
                          routes.chosen_groups, routes.groups, routes.scale,
                          !names.query_norm.empty());
  }
  if (centres_heads()) absl::StrAppend(&text, " head_norms=1");
  if (logit_scale != 1 || (embedding_scale != 1 && !embedding_scale_rounds)) {
    absl::StrAppendFormat(&text, " embedding_scale=%.17g logit_scale=%.17g",
                          embedding_scale, logit_scale);
  }
  if (score_cap > 0)
    absl::StrAppendFormat(&text, " score_cap=%.17g", score_cap);
  if (logit_cap > 0)
    absl::StrAppendFormat(&text, " logit_cap=%.17g", logit_cap);
  absl::StrAppend(&text, quantisation.Canonical());
  return text;
}

}  // namespace tandem::engine
