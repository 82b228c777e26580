// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/model/model_loader.h"

namespace tandem::engine {

// The table is the largest tensor of models that have it, of which a step reads
// a row for each token: it stays in its own type.
absl::Status ModelLoader::LoadTold(Model::Told& told) {
  const TensorNames& names = spec_.names;
  const int numbers = spec_.told_numbers();
  const std::string table = NameOf(names.told_table, ".weight");
  absl::Status status = packer_.Pack({{table, spec_.told_vocab}}, numbers,
                                     MatrixUse::kExact, told.table);
  status.Update(
      packer_.Pack({{NameOf(names.told_projection, ".weight"), numbers}},
                   spec_.hidden_size, MatrixUse::kProduct, told.projection));
  status.Update(AddNorm(NameOf(names.told_norm, ""), spec_.told, told.norm));
  told.scale = static_cast<float>(
      RoundedScale(table, std::sqrt(static_cast<double>(spec_.told))));
  return status;
}

absl::Status ModelLoader::LoadToldLayer(int index, Model::ToldLayer& told) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  absl::Status status =
      packer_.Pack({{NameOf(index, names.told_gate, ".weight"), spec_.told}},
                   hidden, MatrixUse::kProduct, told.gate);
  status.Update(
      packer_.Pack({{NameOf(index, names.told_output, ".weight"), hidden}},
                   spec_.told, MatrixUse::kProduct, told.output));
  status.Update(
      AddNorm(index, names.told_output_norm, hidden, told.output_norm));
  return status;
}

}  // namespace tandem::engine
