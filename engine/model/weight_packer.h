// SPDX-License-Identifier: Apache-2.0
// Tensors of a checkpoint become a backend's matrices: parts of one product
// stacked, in the format that is kept, codes as they are where they can be. It
// also knows which tensors were taken, and so how far loading is.

#ifndef TANDEM_ENGINE_MODEL_WEIGHT_PACKER_H_
#define TANDEM_ENGINE_MODEL_WEIGHT_PACKER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/model.h"
#include "kernels/backend.h"

namespace tandem::engine {

// One tensor of the checkpoint, how many rows it has, and which of them stands
// at each place (as RotaryOrder says; empty: as they are).
struct TensorPart {
  std::string name;
  int rows;
  std::vector<int> order = {};
};

// One of the matrices of which families.h says that they are stacked.
struct StackedPart {
  std::string name;
  int count;  // in the stack
  int index;
  int rows;
  int cols;
  std::vector<int> order = {};  // as above
};

// What a matrix is for: the embedding and the head, what is never quantised
// when it is loaded, or a layer's product, by GatedMatMul or not.
enum class MatrixUse { kTokens, kExact, kProduct, kGated };

// Of a matrix, row by row, and whether bf16 holds them all.
struct Numbers {
  std::vector<float> values;
  bool bf16 = true;
};

// One thread's. All that it is made of must outlive it.
class WeightPacker {
 public:
  WeightPacker(const ModelSpec& spec, const Checkpoint& checkpoint,
               const LoadOptions& options, kernels::Backend* backend,
               LoadProgress progress)
      : spec_(spec),
        checkpoint_(checkpoint),
        options_(options),
        backend_(backend),
        progress_(progress) {}

  // The parts, stacked by rows, as one matrix [sum of rows, cols].
  absl::Status Pack(const std::vector<TensorPart>& parts, int cols,
                    MatrixUse use, std::unique_ptr<kernels::Matrix>& matrix);

  // Of a tensor [part.rows, cols] from which matrices are made, dequantised
  // where it was quantised before.
  absl::StatusOr<Numbers> ReadNumbers(const TensorPart& part, int cols);
  // A matrix [.., cols], as bf16 if that holds it, or as loading is asked to.
  absl::Status PackNumbers(const Numbers& numbers, int cols, MatrixUse use,
                           std::unique_ptr<kernels::Matrix>& matrix);

  // Counts nothing as taken.
  absl::Status PackStacked(const StackedPart& part, MatrixUse use,
                           std::unique_ptr<kernels::Matrix>& matrix);

  // Counts a tensor as taken, which Pack does by itself.
  void Take(const std::string& name);
  bool taken(const std::string& name) const { return taken_.contains(name); }
  // Everything was read, whatever was left out.
  void Finish();

  // As Model::weight_format and Model::dequantised.
  std::string format() const;
  const std::vector<std::string>& dequantised() const { return dequantised_; }

 private:
  // How a matrix that is given as `given` is kept.
  kernels::DType KeptAs(kernels::DType given, MatrixUse use) const;
  // Of a part; none: it is a float type.
  absl::StatusOr<std::optional<CodeRows>> CodesOf(const TensorPart& part,
                                                  int cols);
  // Of parts some of which were quantised before: as they are where all have
  // one form, else dequantised.
  absl::Status PackQuantised(const std::vector<TensorPart>& parts, int cols,
                             MatrixUse use,
                             std::unique_ptr<kernels::Matrix>& matrix);
  absl::Status PackDequantised(
      const std::vector<TensorPart>& parts,
      const std::vector<std::optional<CodeRows>>& codes, int cols,
      MatrixUse use, std::unique_ptr<kernels::Matrix>& matrix);
  // Puts a part's behind them.
  absl::Status AppendPart(const TensorPart& part,
                          const std::optional<CodeRows>& codes, int cols,
                          Numbers& numbers);
  absl::Status PackMxfp4(const StackedPart& part, MatrixUse use,
                         std::unique_ptr<kernels::Matrix>& matrix);
  absl::Status PackCodes(const CodeRows& codes, MatrixUse use,
                         std::unique_ptr<kernels::Matrix>& matrix);
  absl::Status PackAs(const kernels::HostTensor& whole, kernels::DType kept,
                      MatrixUse use, std::unique_ptr<kernels::Matrix>& matrix);
  absl::Status Keep(absl::StatusOr<std::unique_ptr<kernels::Matrix>> packed,
                    std::unique_ptr<kernels::Matrix>& matrix);

  const ModelSpec& spec_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  kernels::Backend* const backend_;
  LoadProgress progress_;
  uint64_t done_bytes_ = 0;
  absl::flat_hash_set<std::string> taken_;
  std::set<std::string> formats_;
  std::vector<std::string> dequantised_;
};

// Bytes that a checkpoint's weights take on a CPU at least: without scales,
// zeros and tables.
int64_t LeastWeightBytes(const Checkpoint& checkpoint, const ModelSpec& spec,
                         const LoadOptions& load);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_WEIGHT_PACKER_H_
