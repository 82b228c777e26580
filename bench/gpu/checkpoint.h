// SPDX-License-Identifier: Apache-2.0
// A checkpoint of random weights: what a model of a shape costs does not
// depend on what it says.

#ifndef TANDEM_BENCH_GPU_CHECKPOINT_H_
#define TANDEM_BENCH_GPU_CHECKPOINT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu/arithmetic.h"

namespace tandem::bench {

// Writes config.json and model.safetensors (bf16) into `directory`, on all
// cores: one block of random numbers, from another place in it for each
// tensor. Does nothing where it already did so for the same shape.
absl::Status WriteRandomCheckpoint(const Shape& shape, int max_positions,
                                   const std::string& directory);

// A folder with room for it: in TMPDIR, /dev/shm or /tmp.
absl::StatusOr<std::string> CheckpointFolder(const Shape& shape);

}  // namespace tandem::bench

#endif  // TANDEM_BENCH_GPU_CHECKPOINT_H_
