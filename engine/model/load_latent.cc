// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "absl/types/span.h"
#include "engine/model/model_loader.h"
#include "engine/model/rope.h"

namespace tandem::engine {
namespace {

// A matrix of zeros at first.
struct Values {
  Values(int rows, int columns)
      : cols(columns), numbers(static_cast<size_t>(rows) * cols) {}
  float* row(int i) { return numbers.data() + int64_t{i} * cols; }

  const int cols;
  std::vector<float> numbers;
};

// What of the cache's one key lies at a place, of its kv_rank numbers and then
// of those that turn.
std::vector<int> KeyOrder(const ModelSpec& spec) {
  return RotaryOrder(spec.rope, spec.head_dim, 1);
}

// From the numbers that all heads share to what the cache takes.
Values CacheRows(const ModelSpec& spec) {
  const int dim = spec.head_dim;
  const std::vector<int> order = KeyOrder(spec);
  Values values(2 * dim, dim);
  for (int i = 0; i < dim; ++i) {
    values.row(i)[order[static_cast<size_t>(i)]] = 1;
    if (i < spec.kv_rank) values.row(dim + i)[i] = 1;
  }
  return values;
}

// Of `up` [heads, still_dim + value_dim, kv_rank], which makes keys and values
// of those numbers: what makes queries that meet the numbers themselves.
Values QueryHeads(const ModelSpec& spec, absl::Span<const float> up) {
  const std::vector<int> order = KeyOrder(spec);
  const int rows = kernels::HeadRows(spec.head_dim);
  Values values(spec.heads * rows, spec.query_dim());
  for (int head = 0; head < spec.heads; ++head) {
    const int first = head * (spec.still_dim + spec.value_dim);
    for (int place = 0; place < spec.head_dim; ++place) {
      float* const row = values.row(head * rows + place);
      const int from = order[static_cast<size_t>(place)];
      if (from >= spec.kv_rank) {
        row[spec.still_dim + from - spec.kv_rank] = 1;
        continue;
      }
      for (int i = 0; i < spec.still_dim; ++i) {
        row[i] =
            up[static_cast<size_t>(int64_t{first + i} * spec.kv_rank + from)];
      }
    }
  }
  return values;
}

// What makes a head's values of those that attention gives.
Values ValueHeads(const ModelSpec& spec, absl::Span<const float> up) {
  const int rows = kernels::HeadRows(spec.value_dim);
  Values values(spec.heads * rows, spec.head_dim);
  for (int head = 0; head < spec.heads; ++head) {
    const int first = head * (spec.still_dim + spec.value_dim) + spec.still_dim;
    for (int i = 0; i < spec.value_dim; ++i) {
      std::copy_n(up.begin() + int64_t{first + i} * spec.kv_rank, spec.kv_rank,
                  values.row(head * rows + i));
    }
  }
  return values;
}

}  // namespace

absl::Status ModelLoader::LoadLatent(int index, Model::Latent& latent) {
  const LatentNames& names = spec_.names.latent;
  const int hidden = spec_.hidden_size;
  const int rank = spec_.query_rank;
  const auto name = [&](std::string_view part) {
    return NameOf(index, part, ".weight");
  };
  const auto product = [&](std::string_view part, int rows, int cols,
                           std::unique_ptr<kernels::Matrix>& matrix) {
    return packer_.Pack({{name(part), rows}}, cols, MatrixUse::kProduct,
                        matrix);
  };
  absl::Status status;
  if (rank > 0) {
    status.Update(product(names.query_down, rank, hidden, latent.query_down));
    status.Update(AddNorm(index, names.query_norm, rank, latent.query_norm));
  }
  status.Update(product(rank > 0 ? names.query_up : spec_.names.query,
                        spec_.heads * spec_.query_dim(),
                        rank > 0 ? rank : hidden, latent.query));
  status.Update(product(names.kv_down, spec_.head_dim, hidden, latent.kv_down));
  status.Update(AddNorm(index, names.kv_norm, spec_.kv_rank, latent.kv_norm));
  const auto up = packer_.ReadNumbers(
      {name(names.kv_up), spec_.heads * (spec_.still_dim + spec_.value_dim)},
      spec_.kv_rank);
  if (!up.ok()) return up.status();
  const auto exact = [&](const Values& values,
                         std::unique_ptr<kernels::Matrix>& matrix) {
    return packer_.PackNumbers({values.numbers, up->bf16}, values.cols,
                               MatrixUse::kExact, matrix);
  };
  status.Update(exact(CacheRows(spec_), latent.kv));
  status.Update(exact(QueryHeads(spec_, up->values), latent.query_heads));
  status.Update(exact(ValueHeads(spec_, up->values), latent.value_heads));
  return status;
}

}  // namespace tandem::engine
