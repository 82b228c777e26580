// SPDX-License-Identifier: Apache-2.0
// From an element type that is known at run time to code made for it.

#ifndef TANDEM_KERNELS_CUDA_DISPATCH_H_
#define TANDEM_KERNELS_CUDA_DISPATCH_H_

#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/device/types.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

// run(T{}) for the T that holds `type`.
template <typename Function>
int WithElement(DType type, const Function& run) {
  switch (type) {
    case DType::kF32:
      return run(float{});
    case DType::kBF16:
      return run(BFloat16{});
    case DType::kF16:
      return run(Half{});
    case DType::kFp8:
    case DType::kInt8:
    case DType::kInt4:
    case DType::kW8A8:
      break;  // not of activations
  }
  return kInvalidLaunch;
}

// The same of a KV cache or of the wire; Code is all quantised formats.
template <typename Function>
int WithKvElement(DType type, const Function& run) {
  return IsQuantised(type) ? run(Code{}) : WithElement(type, run);
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DISPATCH_H_
