// SPDX-License-Identifier: Apache-2.0
// Checkpoint values to f32, exactly, and matrices turned around.

#ifndef TANDEM_ENGINE_CHECKPOINT_WIDEN_H_
#define TANDEM_ENGINE_CHECKPOINT_WIDEN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/types.h"

namespace tandem::engine {

float WidenBF16(uint16_t bits);
float WidenF16(uint16_t bits);

// Appends the tensor's values as `dtype`, its own or kF32.
void Append(const kernels::HostTensor& tensor, kernels::DType dtype,
            std::vector<std::byte>& out);

// The same as f32.
void AppendFloats(const kernels::HostTensor& tensor, std::vector<float>& out);

// Columns become rows. The values are in `out`.
kernels::HostTensor Transpose(const kernels::HostTensor& tensor,
                              std::vector<std::byte>& out);

// Row order[i] becomes row i; rows behind those stay where they are. An empty
// order gives the tensor itself, else the values are in `out`.
kernels::HostTensor RowsInOrder(const kernels::HostTensor& tensor,
                                const std::vector<int>& order,
                                std::vector<std::byte>& out);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_WIDEN_H_
