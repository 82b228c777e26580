// SPDX-License-Identifier: Apache-2.0
// By what the work of a model's steps is counted: its shape, and how its
// matrices and its KV cache are kept.

#ifndef TANDEM_ENGINE_MODEL_MODEL_WORK_H_
#define TANDEM_ENGINE_MODEL_MODEL_WORK_H_

#include <cstdint>
#include <optional>

#include "engine/checkpoint/model_config.h"
#include "engine/model/model.h"
#include "engine/work.h"
#include "kernels/types.h"

namespace tandem::engine {

struct WorkFormats {
  kernels::DType layers = kernels::DType::kBF16;  // matrices of layers
  int zero_bytes = 0;  // of theirs in kInt4, beside each scale
  std::optional<kernels::DType> experts = std::nullopt;  // unset: as layers
  kernels::DType routers = kernels::DType::kBF16;
  kernels::DType head = kernels::DType::kBF16;
  kernels::DType kv = kernels::DType::kBF16;
};

// Scales included, and in kInt4 zeros of so many bytes; cols are inputs.
int64_t MatrixBytes(kernels::DType type, int64_t rows, int64_t cols,
                    int zero_bytes = 0);

WorkShape MakeWorkShape(const ModelSpec& spec, const WorkFormats& formats);
// Beside a scale of kInt4 that the checkpoint has, as the backends' layouts
// have them.
int ZeroBytes(const Quantisation& quantisation, bool gpu);
// Of a model as it was loaded, on a GPU or a CPU.
WorkShape MakeWorkShape(const Model& model, kernels::DType kv, bool gpu);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_MODEL_WORK_H_
