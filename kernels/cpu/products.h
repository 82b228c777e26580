// SPDX-License-Identifier: Apache-2.0
// Products with packed matrices, split over the team by outputs and rows; and
// what is made of several: gated ones, and layers of many experts. Each call
// returns when all of it is done.

#ifndef TANDEM_KERNELS_CPU_PRODUCTS_H_
#define TANDEM_KERNELS_CPU_PRODUCTS_H_

#include <cstddef>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/thread_pool.h"

namespace tandem::kernels::cpu {

// Backend::MatMul.
void RunMatMul(const KernelTable& table, ThreadPool& pool, int num_rows,
               const float* x, const PackedMatrix& w, const float* bias,
               float* out);

// Backend::MatMulHeads.
void RunMatMulHeads(const KernelTable& table, ThreadPool& pool, int num_rows,
                    int heads, int outputs, const float* x,
                    const PackedMatrix& w, float* out);

// Backend::GateHalves, of halves that lie one behind the other in `both`
// [num_rows, 2 * dim].
void RunGate(const KernelTable& table, ThreadPool& pool, int num_rows, int dim,
             Activation activation, const float* both, float* out);

// Backend::GatedMatMul, in two passes: the halves are far apart in the packed
// matrix. `both`: room for [num_rows, w.rows()].
void RunGatedMatMul(const KernelTable& table, ThreadPool& pool, int num_rows,
                    const float* x, const PackedMatrix& w, const float* bias,
                    Activation activation, float* both, float* out);

class CpuExperts final : public ExpertSet {
 public:
  explicit CpuExperts(const std::vector<Expert>& experts)
      : ExpertSet(static_cast<int>(experts.size())), experts_(experts) {}

  const PackedMatrix& gate_up(int e) const { return Of(At(e).gate_up); }
  const PackedMatrix& down(int e) const { return Of(At(e).down); }
  int dim() const { return down(0).rows(); }
  int wide() const { return down(0).cols(); }

 private:
  const Expert& At(int e) const { return experts_[static_cast<size_t>(e)]; }
  static const PackedMatrix& Of(const Matrix* matrix) {
    return static_cast<const PackedMatrix&>(*matrix);
  }

  const std::vector<Expert> experts_;
};

// Of a row: its copy and what its expert makes of it, both halves of the
// gated product, and what comes of them.
constexpr size_t ExpertFloats(int dim, int wide) {
  return size_t{2} * dim + size_t{3} * wide;
}

// The arguments of Backend::Experts.
struct ExpertsStep {
  const CpuExperts* experts;
  int num_rows;
  const float* x;
  const float* weights;
  ExpertOptions options;
  float* out;
};

// Each expert's rows together. `memory`: room for [num_rows, ExpertFloats].
void RunExperts(const KernelTable& table, ThreadPool& pool,
                const ExpertsStep& step, float* memory);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_PRODUCTS_H_
