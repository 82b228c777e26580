// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/products.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cpu/code_matrix.h"
#include "kernels/cpu/for_rows.h"

namespace tandem::kernels::cpu {
namespace {

// Below this many products a fork costs more than it saves.
inline constexpr int64_t kForkProducts = 65536;

// Threads over (outputs, rows) such that the largest share is smallest.
struct Split {
  int outputs;
  int rows;
};

Split SplitMatMul(int threads, int panels, int rows) {
  Split best{1, 1};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int by_rows = 1; by_rows <= threads; ++by_rows) {
    // A share of few rows would read the weights for too little work.
    if (by_rows > 1 && rows / by_rows < 32) break;
    const int by_outputs = std::min(threads / by_rows, panels);
    const int64_t share = int64_t{(panels + by_outputs - 1) / by_outputs} *
                          ((rows + by_rows - 1) / by_rows);
    if (share < least) {
      least = share;
      best = {by_outputs, by_rows};
    }
  }
  return best;
}

// Runs `product` over the pieces of `whole` on the team.
void SplitProduct(ThreadPool::Team& team, const MatMulPiece& whole,
                  int num_rows, void (*product)(const MatMulPiece&)) {
  const int panels = PackedMatrix::Panels(whole.n);
  const int64_t products = int64_t{num_rows} * whole.n * whole.k;
  const Split split = products < kForkProducts
                          ? Split{1, 1}
                          : SplitMatMul(team.threads(), panels, num_rows);
  const auto run = [&](int share, int member) {
    MatMulPiece mine = whole;
    const int column = share % split.outputs;
    const int row = share / split.outputs;
    const auto cut = [](int count, int part, int parts) {
      return static_cast<int>(int64_t{count} * part / parts);
    };
    mine.panel_begin = cut(panels, column, split.outputs);
    mine.panel_end = cut(panels, column + 1, split.outputs);
    mine.row_begin = cut(num_rows, row, split.rows);
    mine.row_end = cut(num_rows, row + 1, split.rows);
    mine.scratch = team.member_scratch(member);
    product(mine);
  };
  const int shares = split.outputs * split.rows;
  if (shares == 1) {
    run(0, 0);
    return;
  }
  team.Run([&](int member) {
    if (member < shares) run(member, member);
  });
}

// As many rows at once as the team's scratch memory holds quantised. `order` is
// PackedMatrix's.
void SplitCodeProduct(const KernelTable& table, ThreadPool::Team& team,
                      MatMulPiece piece, const int32_t* order, int num_rows) {
  const float* const x = piece.x;
  float* const out = piece.out;
  const int pieces = RowPieces(piece.k);
  const int most = std::max(
      1, (static_cast<int>(ThreadPool::kTeamScratchBytes / sizeof(RowPiece)) -
          kRowPiecesRead) /
             pieces);
  auto* const codes = reinterpret_cast<RowPiece*>(team.team_scratch());
  const auto quantise_row =
      IsW8A8(piece.kind) ? table.quantise_whole_row : table.quantise_row;
  piece.codes = codes;
  for (int begin = 0; begin < num_rows; begin += most) {
    piece.rows = std::min(most, num_rows - begin);
    const float* const from = x + int64_t{begin} * piece.k;
    const auto quantise = [&](int row, int member) {
      const float* in = from + int64_t{row} * piece.k;
      if (order != nullptr) {
        auto* const moved =
            reinterpret_cast<float*>(team.member_scratch(member));
        for (int i = 0; i < piece.k; ++i) moved[i] = in[order[i]];
        in = moved;
      }
      quantise_row(in, piece.k, codes + row, piece.rows);
    };
    if (int64_t{piece.rows} * piece.k < kForkElements) {
      for (int row = 0; row < piece.rows; ++row) quantise(row, 0);
    } else {
      team.ForEach(piece.rows, quantise);
    }
    piece.out = out + int64_t{begin} * piece.n;
    SplitProduct(team, piece, piece.rows, table.matmul_codes);
  }
}

// Of all of `w`, but for its rows, and what goes in and out.
MatMulPiece PieceOf(const KernelTable& table, const PackedMatrix& w) {
  MatMulPiece piece{};
  piece.w = w.data();
  piece.k = w.cols();
  piece.type = w.dtype();
  piece.fetching = table.fetching;
  return piece;
}

}  // namespace

void RunMatMul(const KernelTable& table, ThreadPool& pool, int num_rows,
               const float* x, const PackedMatrix& w, const float* bias,
               float* out) {
  MatMulPiece piece = PieceOf(table, w);
  piece.x = x;
  piece.scales = w.scales();
  piece.bias = bias;
  piece.out = out;
  piece.n = w.rows();
  piece.x_stride = piece.k;
  piece.out_stride = piece.n;
  ThreadPool::Team team(&pool);
  if (!w.has_codes()) {
    SplitProduct(team, piece, num_rows, table.matmul);
    return;
  }
  piece.kind = w.kind();
  SplitCodeProduct(table, team, piece, w.order(), num_rows);
}

void RunMatMulHeads(const KernelTable& table, ThreadPool& pool, int num_rows,
                    int heads, int outputs, const float* x,
                    const PackedMatrix& w, float* out) {
  MatMulPiece whole = PieceOf(table, w);
  whole.n = outputs;
  whole.x_stride = int64_t{heads} * whole.k;
  whole.out_stride = int64_t{heads} * outputs;
  whole.panel_end = PackedMatrix::Panels(outputs);
  whole.row_end = num_rows;
  const int64_t bytes = HeadRows(outputs) / kPanel * w.panel_bytes();
  ThreadPool::Team team(&pool);
  const auto run = [&](int head, int member) {
    MatMulPiece mine = whole;
    mine.x = x + int64_t{head} * mine.k;
    mine.w = whole.w + head * bytes;
    mine.out = out + int64_t{head} * outputs;
    mine.scratch = team.member_scratch(member);
    table.matmul(mine);
  };
  const int64_t products = int64_t{num_rows} * heads * outputs * whole.k;
  if (products < kForkProducts) {
    for (int head = 0; head < heads; ++head) run(head, 0);
  } else {
    team.ForEach(heads, run);
  }
}

void RunGate(const KernelTable& table, ThreadPool& pool, int num_rows, int dim,
             Activation activation, const float* both, float* out) {
  ForRows(pool, num_rows, dim, [&](int row) {
    const float* const gate = both + int64_t{row} * 2 * dim;
    table.gate(activation, dim, gate, gate + dim, out + int64_t{row} * dim);
  });
}

void RunGatedMatMul(const KernelTable& table, ThreadPool& pool, int num_rows,
                    const float* x, const PackedMatrix& w, const float* bias,
                    Activation activation, float* both, float* out) {
  RunMatMul(table, pool, num_rows, x, w, bias, both);
  RunGate(table, pool, num_rows, w.rows() / 2, activation, both, out);
}

void RunExperts(const KernelTable& table, ThreadPool& pool,
                const ExpertsStep& step, float* memory) {
  const CpuExperts& set = *step.experts;
  const int dim = set.dim();
  const int wide = set.wide();
  const auto rows_of = [&](int width) {
    return int64_t{step.num_rows} * width;
  };
  float* const taken = memory;
  float* const both = taken + rows_of(dim);
  float* const hidden = both + rows_of(2 * wide);
  float* const y = hidden + rows_of(wide);
  const int64_t columns = set.count() + (step.options.shared ? 1 : 0);
  for (int row = 0; row < step.num_rows; ++row) {
    float* const out = step.out + int64_t{row} * dim;
    if (step.options.shared) {
      table.scale(dim, step.weights[(row + 1) * columns - 1], 0, out);
    } else {
      std::fill_n(out, dim, 0.0f);
    }
  }
  for (int e = 0; e < set.count(); ++e) {
    const auto weight = [&](int row) {
      return step.weights[row * columns + e];
    };
    int rows = 0;
    for (int row = 0; row < step.num_rows; ++row) {
      if (weight(row) == 0) continue;
      std::copy_n(step.x + int64_t{row} * dim, dim,
                  taken + int64_t{rows++} * dim);
    }
    if (rows == 0) continue;
    const auto bias = [&](const float* biases, int width) {
      return biases == nullptr ? nullptr : biases + int64_t{e} * width;
    };
    RunGatedMatMul(table, pool, rows, taken, set.gate_up(e),
                   bias(step.options.biases.gate_up, 2 * wide),
                   step.options.activation, both, hidden);
    RunMatMul(table, pool, rows, hidden, set.down(e),
              bias(step.options.biases.down, dim), y);
    rows = 0;
    for (int row = 0; row < step.num_rows; ++row) {
      if (weight(row) == 0) continue;
      table.add_weighted(dim, weight(row), y + int64_t{rows++} * dim,
                         step.out + int64_t{row} * dim);
    }
  }
}

}  // namespace tandem::kernels::cpu
