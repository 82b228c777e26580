// SPDX-License-Identifier: Apache-2.0
// Operations on matrices that a warp (ldmatrix, stmatrix, mma) or a warpgroup
// (wgmma) does together: which lane holds which element is PTX's, the sums are
// tensor_core.h's. See emulator.h.

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cuda/device/tensor_core.h"
#include "kernels/cuda/emulator/block.h"

namespace tandem::kernels::cuda {

using emulator::Place;

// ---- What kernels call.

void LoadShared16(Grid& g, const void* shared, uint32_t (&r)[4]) {
  g.emulated->OffsetOf(g, shared, 16);
  std::memcpy(r, shared, 16);
}
void LoadMatrix4(Grid& g, uint32_t (&r)[4], const void* row, Place place) {
  g.emulated->LoadMatrix(g, r, row, false, place);
}
void LoadMatrix4Transposed(Grid& g, uint32_t (&r)[4], const void* row,
                           Place place) {
  g.emulated->LoadMatrix(g, r, row, true, place);
}
void StoreMatrix4Transposed(Grid& g, void* column, const uint32_t (&r)[4],
                            Place place) {
  g.emulated->StoreMatrix(g, column, r, place);
}
void MmaBf16(Grid& g, float (&d)[4], const uint32_t (&a)[4],
             const uint32_t (&b)[2], Place place) {
  g.emulated->Mma(g, d, a, b, false, place);
}
void MmaF16(Grid& g, float (&d)[4], const uint32_t (&a)[4],
            const uint32_t (&b)[2], Place place) {
  g.emulated->Mma(g, d, a, b, true, place);
}
void MmaS8(Grid& g, int32_t (&d)[4], const uint32_t (&a)[4],
           const uint32_t (&b)[2], Place place) {
  g.emulated->MmaS8(g, d, a, b, place);
}

void WgmmaFence(Grid&) {}
void WgmmaCommit(Grid& g, Place place) { g.emulated->WgmmaClose(g, place); }
void WgmmaWaitFor(Grid& g, int pending, Place place) {
  g.emulated->WgmmaPending(g, pending, place);
}
void WgmmaAny(Grid& g, float* d, int n, uint64_t a, const uint32_t* registers,
              uint64_t b, bool half, Place place, bool columns) {
  g.emulated->Wgmma(g, d, n, a, registers, b, half, columns, place);
}

namespace emulator {
namespace {

// Of every descriptor: groups of rows 1024 bytes apart, swizzled by 128.
constexpr uint64_t kStrideAndSwizzle = uint64_t{64} << 32 | uint64_t{1} << 62;

void SetOperand(TensorVector& vector, int i, uint32_t bits, bool half) {
  const uint16_t element = static_cast<uint16_t>(bits & 0xffffu);
  if (half) {
    vector.SetF16(i, element);
  } else {
    vector.SetBf16(i, element);
  }
}

bool IsZero(const TensorVector& vector) {
  int32_t any = 0;
  for (const int32_t significand : vector.significand) any |= significand;
  return any == 0 && !vector.special;
}

// TensorCoreStep; quick where `row_is_zero`, as padding and masked keys are.
float ChainStep(Generation generation, const TensorVector& row,
                bool row_is_zero, const TensorVector& column, float chain,
                bool half) {
  if (row_is_zero && !column.special && std::isfinite(chain)) {
    return chain == 0 ? 0.0f : chain;
  }
  return TensorCoreStep(generation, row, column, chain, half);
}

}  // namespace

// ---- Of a warp.

void Block::LoadMatrix(Grid& g, uint32_t (&r)[4], const void* row,
                       bool transposed, const Place& place) {
  struct Arguments {
    uint32_t* r;
    const uint16_t* row;
  } mine{r, static_cast<const uint16_t*>(row)};
  OffsetOf(g, row, 16);
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int m = 0; m < 4; ++m) {
        const int i = lane / 4;
        const int j = lane % 4 * 2;
        const auto at = [&](int x, int y) {
          return static_cast<uint32_t>(lanes[m * 8 + x]->row[y]);
        };
        lanes[lane]->r[m] = transposed ? at(j, i) | at(j + 1, i) << 16
                                       : at(i, j) | at(i, j + 1) << 16;
      }
    }
  });
}

void Block::StoreMatrix(Grid& g, void* column, const uint32_t (&r)[4],
                        const Place& place) {
  struct Arguments {
    const uint32_t* r;
    uint16_t* column;
  } mine{r, static_cast<uint16_t*>(column)};
  OffsetOf(g, column, 16);
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int m = 0; m < 4; ++m) {
        for (int i = 0; i < 2; ++i) {
          lanes[m * 8 + lane % 4 * 2 + i]->column[lane / 4] =
              static_cast<uint16_t>(lanes[lane]->r[m] >> (16 * i));
        }
      }
    }
  });
}

void Block::Mma(Grid& g, float* d, const uint32_t* a, const uint32_t* b,
                bool half, const Place& place) {
  struct Arguments {
    float* d;
    const uint32_t* a;
    const uint32_t* b;
  } mine{d, a, b};
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    TensorVector rows[16];
    TensorVector columns[8];
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 8; ++i) {
        const int row = lane / 4 + i / 2 % 2 * 8;
        const int k = lane % 4 * 2 + i % 2 + i / 4 * 8;
        SetOperand(rows[row], k, lanes[lane]->a[i / 2] >> (i % 2 * 16), half);
      }
      for (int i = 0; i < 4; ++i) {
        const int k = lane % 4 * 2 + i % 2 + i / 2 * 8;
        SetOperand(columns[lane / 4], k, lanes[lane]->b[i / 2] >> (i % 2 * 16),
                   half);
      }
    }
    bool zero[16];
    for (int i = 0; i < 16; ++i) zero[i] = IsZero(rows[i]);
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        float& chain = lanes[lane]->d[i];
        chain = ChainStep(generation_, rows[row], zero[row],
                          columns[lane % 4 * 2 + i % 2], chain, half);
      }
    }
  });
}

// PTX ISA, m16n8k32: byte i of a lane's 16 is of row lane / 4 (+ 8 where i / 4
// is odd) and input lane % 4 * 4 + i % 4 (+ 16 from 8 on); of the second
// operand likewise, with columns for rows.
void Block::MmaS8(Grid& g, int32_t* d, const uint32_t* a, const uint32_t* b,
                  const Place& place) {
  struct Arguments {
    int32_t* d;
    const uint32_t* a;
    const uint32_t* b;
  } mine{d, a, b};
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    int8_t rows[16][32];
    int8_t columns[8][32];
    const auto byte = [](const uint32_t* registers, int i) {
      return static_cast<int8_t>(registers[i / 4] >> (i % 4 * 8));
    };
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 16; ++i) {
        rows[lane / 4 + i / 4 % 2 * 8][lane % 4 * 4 + i % 4 + i / 8 * 16] =
            byte(lanes[lane]->a, i);
      }
      for (int i = 0; i < 8; ++i) {
        columns[lane / 4][lane % 4 * 4 + i % 4 + i / 4 * 16] =
            byte(lanes[lane]->b, i);
      }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 32; ++k) {
          lanes[lane]->d[i] +=
              rows[lane / 4 + i / 2 * 8][k] * columns[lane % 4 * 2 + i % 2][k];
        }
      }
    }
  });
}

// ---- Of a warpgroup.

// Where a byte is: the swizzle goes by the address, bits 4-6 ^= bits 7-9.
uint16_t Block::FencedElement(Grid& g, int address) {
  address ^= (address >> 7 & 7) << 4;
  if (address < 0 || address + 2 > shared_bytes_) {
    Fail(g, "a descriptor is outside of shared memory");
  }
  if (unfenced_[static_cast<size_t>(address / kPiece)] != 0) {
    Fail(g, "a warpgroup's operand was written but not fenced");
  }
  uint16_t bits;
  std::memcpy(&bits, shared_ + address, 2);
  return bits;
}

// Row r of an operand: 128 bytes at r * 128 from the aligned start; the
// descriptor's start may be some chunks further along the row.
TensorVector Block::RowOf(Grid& g, uint64_t descriptor, int r, bool half) {
  if ((descriptor & ~uint64_t{0x3fff}) !=
      (kStrideAndSwizzle | uint64_t{1} << 16)) {
    Fail(g, "a descriptor is of another layout");
  }
  const int start = static_cast<int>(descriptor & 0x3fff) * 16;
  TensorVector vector;
  for (int i = 0; i < 16; ++i) {
    SetOperand(vector, i, FencedElement(g, start + r * 128 + i * 2), half);
  }
  return vector;
}

// Token n of an operand whose rows are inputs.
TensorVector Block::ColumnOf(Grid& g, uint64_t descriptor, int n, bool half) {
  if ((descriptor & ~uint64_t{0x3fff3fff}) != kStrideAndSwizzle) {
    Fail(g, "a descriptor is of another layout");
  }
  const int start = static_cast<int>(descriptor & 0x3fff) * 16;
  const int apart = static_cast<int>(descriptor >> 16 & 0x3fff) * 16;
  TensorVector vector;
  for (int i = 0; i < 16; ++i) {
    SetOperand(vector, i,
               FencedElement(g, start + n / 64 * apart + i * 128 + n % 64 * 2),
               half);
  }
  return vector;
}

// As of mma.sync, each warp its 16 rows.
TensorVector Block::RowOfRegisters(const WgmmaStep& step, int r) {
  TensorVector vector;
  for (int k = 0; k < 16; ++k) {
    const int thread = r / 16 * 32 + r % 8 * 4 + k % 8 / 2;
    const uint32_t pair = step.registers[thread][k / 8 * 2 + r % 16 / 8];
    SetOperand(vector, k, pair >> (k % 2 * 16), step.half);
  }
  return vector;
}

void Block::Execute(Grid& g, const WgmmaStep& step) {
  columns_.clear();
  for (int n = 0; n < step.n; ++n) {
    columns_.push_back(step.columns ? ColumnOf(g, step.b, n, step.half)
                                    : RowOf(g, step.b, n, step.half));
  }
  for (int r = 0; r < 64; ++r) {
    const TensorVector weights = step.registers[0] == nullptr
                                     ? RowOf(g, step.a, r, step.half)
                                     : RowOfRegisters(step, r);
    const bool zero = IsZero(weights);
    for (int n = 0; n < step.n; ++n) {
      const int thread = r / 16 * 32 + r % 8 * 4 + n % 8 / 2;
      float& chain = step.d[thread][n / 8 * 4 + r % 16 / 8 * 2 + n % 2];
      chain = ChainStep(generation_, weights, zero,
                        columns_[static_cast<size_t>(n)], chain, step.half);
    }
  }
}

void Block::Wgmma(Grid& g, float* d, int n, uint64_t a,
                  const uint32_t* registers, uint64_t b, bool half,
                  bool columns, const Place& place) {
  struct Arguments {
    float* d;
    const uint32_t* registers;
  } mine{d, registers};
  Together(g, kWarpgroup, place, &mine, [&](Arguments* const* threads) {
    WgmmaStep step{{}, {}, n, a, b, half, columns};
    for (int i = 0; i < kWarpgroup; ++i) {
      step.d[i] = threads[i]->d;
      step.registers[i] = threads[i]->registers;
    }
    Warpgroup& warpgroup =
        warpgroups_[static_cast<size_t>(g.thread() / kWarpgroup)];
    if (settings_.landing == Landing::kEarly) Execute(g, step);
    warpgroup.open.push_back(step);
  });
}

void Block::WgmmaClose(Grid& g, const Place& place) {
  Together(g, kWarpgroup, place, &g, [&](Grid* const*) {
    Warpgroup& warpgroup =
        warpgroups_[static_cast<size_t>(g.thread() / kWarpgroup)];
    warpgroup.groups.push_back(std::move(warpgroup.open));
    warpgroup.open.clear();
  });
}

void Block::WgmmaPending(Grid& g, int pending, const Place& place) {
  Together(g, kWarpgroup, place, &g, [&](Grid* const*) {
    Warpgroup& warpgroup =
        warpgroups_[static_cast<size_t>(g.thread() / kWarpgroup)];
    while (static_cast<int>(warpgroup.groups.size()) > pending) {
      if (settings_.landing == Landing::kLate) {
        for (const WgmmaStep& step : warpgroup.groups.front()) {
          Execute(g, step);
        }
      }
      warpgroup.groups.pop_front();
    }
  });
}

}  // namespace emulator
}  // namespace tandem::kernels::cuda
