// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/products.h"

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/packed_weights.h"
#include "kernels/experts.h"

namespace tandem::kernels::cuda {
namespace {

// Of x as the matrix's products take it, quantised where they do; of `experts`
// rows in the order of each one's own.
MatMulParams ParamsOf(CudaQueue& queue, ReservedScratch& scratch, DType type,
                      const Product& product,
                      const ExpertProductParams* experts = nullptr) {
  const CudaMatrix& matrix = product.matrix;
  const void* x = product.x;
  const int outputs = product.output == MatMulOutput::kGated
                          ? matrix.rows() / 2
                          : PackedRows(matrix.rows(), matrix.order());
  if (HasIntegerProducts(matrix.type())) {
    std::byte* const rows = scratch.Take(
        queue, CudaQueue::kCodes,
        static_cast<size_t>(CodeRowsBytes(product.num_rows, matrix.cols())));
    QuantiseRowsParams params{.x = x,
                              .out = rows,
                              .x_stride = matrix.cols(),
                              .tokens = product.num_rows,
                              .cols = matrix.cols(),
                              .whole = matrix.type() == WeightType::kW8A8,
                              .order = matrix.input_order()};
    if (experts != nullptr) {
      params.matrices = experts->matrices;
      params.tiles = experts->tiles;
      params.num_tiles = experts->num_tiles;
    }
    queue.Check(LaunchQuantiseRows(queue.stream(), type, params),
                "quantised rows");
    x = rows;
  }
  return {.weights = matrix.weights(),
          .scales = matrix.scales(),
          .x = x,
          .bias = product.bias,
          .out = product.out,
          .x_stride = matrix.cols(),
          .out_stride = outputs,
          .rows = PackedRows(matrix.rows(), matrix.order()),
          .cols = matrix.cols(),
          .tokens = product.num_rows,
          .outputs = outputs,
          .output = product.output,
          .activation = product.activation};
}

bool Alike(const CudaMatrix& a, const CudaMatrix& b) {
  return a.rows() == b.rows() && a.cols() == b.cols() && a.type() == b.type();
}

// Each row is copied to where its experts have theirs.
void SpreadRows(CudaQueue& queue, DType type, const ExpertsStep& step,
                int tile_rows, const ExpertScratch& work) {
  queue.Check(LaunchExpertPlan(queue.stream(), {.weights = step.weights,
                                                .counts = work.counts,
                                                .places = work.places,
                                                .shares = work.shares,
                                                .tiles = work.tiles,
                                                .num_tiles = work.num_tiles,
                                                .num_rows = step.num_rows,
                                                .experts = step.experts.count(),
                                                .chosen = step.options.chosen,
                                                .tile_rows = tile_rows,
                                                .columns = step.columns()}),
              "experts' rows");
  queue.Check(LaunchSpreadRows(queue.stream(), type,
                               {.x = step.x,
                                .places = work.places,
                                .out = work.x,
                                .num_rows = step.num_rows,
                                .chosen = step.options.chosen,
                                .dim = step.experts.down().rows()}),
              "copies of rows");
}

// What experts make of their copies: work.x to work.hidden to work.y.
void MultiplyTiles(CudaQueue& queue, ReservedScratch& scratch, DType type,
                   const ExpertsStep& step, int tile_rows,
                   const ExpertScratch& work) {
  const CudaExperts& set = step.experts;
  ExpertProductParams product{
      .product = {},
      .matrices = set.gate_ups(),
      .tiles = work.tiles,
      .num_tiles = work.num_tiles,
      .most_tiles = static_cast<int>(MostExpertTiles(
          step.num_rows, set.count(), step.options.chosen, tile_rows))};
  const ExpertProductParams* const ordered = set.ordered() ? &product : nullptr;
  const int copies = static_cast<int>(
      MostExpertRows(step.num_rows, set.count(), step.options.chosen));
  product.product = ParamsOf(queue, scratch, type,
                             {.matrix = set.gate_up(),
                              .num_rows = copies,
                              .x = work.x,
                              .bias = step.options.biases.gate_up,
                              .output = MatMulOutput::kGated,
                              .activation = step.options.activation,
                              .out = work.hidden},
                             ordered);
  queue.Check(LaunchExpertProduct(queue.stream(), type, set.gate_up().type(),
                                  tile_rows, product),
              "experts' products");
  product.matrices = set.downs();
  product.product = ParamsOf(queue, scratch, type,
                             {.matrix = set.down(),
                              .num_rows = copies,
                              .x = work.hidden,
                              .bias = step.options.biases.down,
                              .activation = step.options.activation,
                              .out = work.y},
                             ordered);
  queue.Check(LaunchExpertProduct(queue.stream(), type, set.down().type(),
                                  tile_rows, product),
              "experts' products");
}

}  // namespace

void Multiply(CudaQueue& queue, ReservedScratch& scratch, DType type,
              const Product& product) {
  const WeightType weights = product.matrix.type();
  const MatMulParams params = ParamsOf(queue, scratch, type, product);
  const auto launch =
      HasIntegerProducts(weights) ? LaunchMatMulCodes : LaunchMatMul;
  queue.Check(launch(queue.stream(), type, weights, params), "matrix product");
}

absl::StatusOr<std::unique_ptr<ExpertSet>> GroupExperts(
    const std::vector<Expert>& experts, MatrixPacker& packer) {
  const auto of = [](const Matrix* matrix) -> const CudaMatrix& {
    return static_cast<const CudaMatrix&>(*matrix);
  };
  const CudaMatrix& gate_up = of(experts[0].gate_up);
  const CudaMatrix& down = of(experts[0].down);
  std::vector<ExpertMatrix> table(2 * experts.size());
  bool ordered = false;
  for (size_t e = 0; e < experts.size(); ++e) {
    const CudaMatrix& own_gate_up = of(experts[e].gate_up);
    const CudaMatrix& own_down = of(experts[e].down);
    if (!Alike(own_gate_up, gate_up) || !Alike(own_down, down)) {
      return absl::InvalidArgumentError(
          absl::StrCat("expert ", e,
                       " is kept in other shapes or formats "
                       "than expert 0: on a GPU all must be alike"));
    }
    const auto entry = [&](const CudaMatrix& own) {
      ordered = ordered || own.input_order() != nullptr;
      return ExpertMatrix{own.weights(), own.scales(), own.input_order()};
    };
    table[e] = entry(own_gate_up);
    table[experts.size() + e] = entry(own_down);
  }
  absl::StatusOr<std::unique_ptr<Memory>> memory =
      packer.Uploaded(table.data(), table.size() * sizeof(ExpertMatrix));
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<ExpertSet>(
      std::make_unique<CudaExperts>(static_cast<int>(experts.size()), gate_up,
                                    down, ordered, *std::move(memory)));
}

void RunExperts(CudaQueue& queue, ReservedScratch& scratch, DType type,
                const ExpertsStep& step) {
  const CudaExperts& set = step.experts;
  const int hidden = set.down().rows();
  const int wide = set.down().cols();
  const int tile_rows =
      ExpertTileRows(type, step.num_rows, set.count(), step.options.chosen);
  const ExpertScratch::Shape shape{step.num_rows, hidden, wide, set.count(),
                                   step.options.chosen};
  const ExpertScratch work(
      scratch.Take(queue, CudaQueue::kExperts,
                   ExpertScratch(nullptr, shape, type).bytes()),
      shape, type);
  SpreadRows(queue, type, step, tile_rows, work);
  MultiplyTiles(queue, scratch, type, step, tile_rows, work);
  queue.Check(
      LaunchSumExperts(queue.stream(), type,
                       {.y = work.y,
                        .places = work.places,
                        .shares = work.shares,
                        .out = step.out,
                        .num_rows = step.num_rows,
                        .chosen = step.options.chosen,
                        .dim = hidden,
                        .weights = step.options.shared ? step.weights : nullptr,
                        .columns = step.columns()}),
      "experts' sums");
}

}  // namespace tandem::kernels::cuda
