// SPDX-License-Identifier: Apache-2.0
// What tests of the engine over the CUDA backend run on: the GPU that
// TANDEM_TEST_DEVICE names ("cuda:0"), through the loader as a worker does, or
// without it the backend over the grid emulator.

#ifndef TANDEM_TESTS_ENGINE_TEST_DEVICE_H_
#define TANDEM_TESTS_ENGINE_TEST_DEVICE_H_

#include <memory>

#include "kernels/backend.h"
#include "kernels/types.h"

namespace tandem::engine {

// Tests are longer there: a fiber per GPU thread is slow.
bool TestsRunOnGpu();

// Aborts with its message where the device cannot be had.
std::unique_ptr<kernels::Backend> NewTestDevice(kernels::DType activation);

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_TEST_DEVICE_H_
