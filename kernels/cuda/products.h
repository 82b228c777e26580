// SPDX-License-Identifier: Apache-2.0
// Products with packed matrices: of all rows with one matrix, or of each row
// with the matrices of its experts. Rows that meet codes are quantised first.

#ifndef TANDEM_KERNELS_CUDA_PRODUCTS_H_
#define TANDEM_KERNELS_CUDA_PRODUCTS_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_matrix.h"
#include "kernels/cuda/cuda_queue.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/scratch.h"

namespace tandem::kernels::cuda {

// What a product takes and gives, as Backend::MatMul, Logits, GatedMatMul and
// MatMulHalves do.
struct Product {
  const CudaMatrix& matrix;
  int num_rows;
  const void* x;
  const float* bias = nullptr;
  MatMulOutput output = MatMulOutput::kPlain;
  Activation activation = Activation::kSilu;  // kGated
  void* out;
};

// Puts it on the queue. `type`: of activations.
void Multiply(CudaQueue& queue, ReservedScratch& scratch, DType type,
              const Product& product);

class CudaExperts final : public ExpertSet {
 public:
  CudaExperts(int count, const CudaMatrix& gate_up, const CudaMatrix& down,
              bool ordered, std::unique_ptr<Memory> table)
      : ExpertSet(count),
        gate_up_(gate_up),
        down_(down),
        ordered_(ordered),
        table_(std::move(table)) {}

  // The first expert's, which all are like.
  const CudaMatrix& gate_up() const { return gate_up_; }
  const CudaMatrix& down() const { return down_; }
  const ExpertMatrix* gate_ups() const {
    return reinterpret_cast<const ExpertMatrix*>(table_->data());
  }
  const ExpertMatrix* downs() const { return gate_ups() + count(); }
  // Whether any of them takes its inputs in an order of its own.
  bool ordered() const { return ordered_; }

 private:
  const CudaMatrix& gate_up_;
  const CudaMatrix& down_;
  const bool ordered_;
  const std::unique_ptr<Memory> table_;  // all gate_ups, then all downs
};

// Backend::GroupExperts, of matrices that `packer` made.
absl::StatusOr<std::unique_ptr<ExpertSet>> GroupExperts(
    const std::vector<Expert>& experts, MatrixPacker& packer);

// The arguments of Backend::Experts.
struct ExpertsStep {
  const CudaExperts& experts;
  int num_rows;
  const void* x;
  const float* weights;
  ExpertOptions options;
  void* out;

  int columns() const {  // of weights
    return experts.count() + (options.shared ? 1 : 0);
  }
};

// Puts it on the queue. Which rows an expert has, the host does not know:
// launches are made for as many tiles as there can be.
void RunExperts(CudaQueue& queue, ReservedScratch& scratch, DType type,
                const ExpertsStep& step);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_PRODUCTS_H_
