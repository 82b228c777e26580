// SPDX-License-Identifier: Apache-2.0
// Rows of KV between a block and the wire, and the digest of one row
// (kv_digest.h), eight words at a time. Sums modulo 2^64 have no order, so the
// digest equals the definition.
//
// Where neither side converts, f32 and bf16 move as cells of 32 bits, int8 of
// 16: keys are a matrix [cells][slots] here and [rows][cells] on the wire,
// turned in squares of eight; values of bf16 and int8 lie in pairs of
// positions, those of f32 in rows. Anything else goes vector by vector
// (kv_layout.cc). Cells of 32 bits that land in a block are stored past the
// caches, whole lines at a time: they are more than those hold, and a plain
// store would first read what it replaces.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/kv_rows.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/simd-inl.h"
// clang-format on

#include <algorithm>
#include <cstring>

#include "hwy/cache_control.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/kv_digest.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// 8 lanes with both sets.
template <typename Cell>
using CellsOf = hn::CappedTag<Cell, 8>;
using Cells = CellsOf<uint32_t>;
using CellVec = hn::Vec<Cells>;

// columns[j] = from[i * from_stride + j] for rows i < 8.
HWY_INLINE void Turn8(const uint32_t* from, int64_t from_stride,
                      CellVec (&columns)[8]) {
  const Cells d;
  const hn::Repartition<uint64_t, Cells> d64;
  const auto low = [&](CellVec a, CellVec b) HWY_ATTR {
    return hn::BitCast(
        d, hn::InterleaveLower(d64, hn::BitCast(d64, a), hn::BitCast(d64, b)));
  };
  const auto high = [&](CellVec a, CellVec b) HWY_ATTR {
    return hn::BitCast(
        d, hn::InterleaveUpper(d64, hn::BitCast(d64, a), hn::BitCast(d64, b)));
  };
  CellVec four[8];  // [half of the rows][column modulo 4], columns 4 apart
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    CellVec row[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      row[i] = hn::LoadU(d, from + (4 * half + i) * from_stride);
    }
    const CellVec a = hn::InterleaveLower(d, row[0], row[1]);
    const CellVec b = hn::InterleaveLower(d, row[2], row[3]);
    const CellVec e = hn::InterleaveUpper(d, row[0], row[1]);
    const CellVec f = hn::InterleaveUpper(d, row[2], row[3]);
    four[4 * half] = low(a, b);
    four[4 * half + 1] = high(a, b);
    four[4 * half + 2] = low(e, f);
    four[4 * half + 3] = high(e, f);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    columns[i] = hn::ConcatLowerLower(d, four[4 + i], four[i]);
    columns[4 + i] = hn::ConcatUpperUpper(d, four[4 + i], four[i]);
  }
}

HWY_INLINE void Turn8(const uint16_t* from, int64_t from_stride,
                      hn::Vec<CellsOf<uint16_t>> (&columns)[8]) {
  const CellsOf<uint16_t> d;
  const hn::RepartitionToWide<CellsOf<uint16_t>> d32;
  const hn::RepartitionToWide<decltype(d32)> d64;
  // [columns 0 .. 3, 4 .. 7][two rows]
  hn::Vec<decltype(d32)> two[2][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto a = hn::LoadU(d, from + 2 * i * from_stride);
    const auto b = hn::LoadU(d, from + (2 * i + 1) * from_stride);
    two[0][i] = hn::BitCast(d32, hn::InterleaveLower(d, a, b));
    two[1][i] = hn::BitCast(d32, hn::InterleaveUpper(d, a, b));
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const auto& rows = two[half];
    const auto put = [&](int column, auto upper, auto lower) HWY_ATTR {
      const auto a = hn::BitCast(d64, upper);
      const auto b = hn::BitCast(d64, lower);
      columns[column] = hn::BitCast(d, hn::InterleaveLower(d64, a, b));
      columns[column + 1] = hn::BitCast(d, hn::InterleaveUpper(d64, a, b));
    };
    put(4 * half, hn::InterleaveLower(d32, rows[0], rows[1]),
        hn::InterleaveLower(d32, rows[2], rows[3]));
    put(4 * half + 2, hn::InterleaveUpper(d32, rows[0], rows[1]),
        hn::InterleaveUpper(d32, rows[2], rows[3]));
  }
}

// Of eight columns what fills lines of 64 bytes, past the caches; how many rows
// that is.
HWY_INLINE int TurnLines(const uint32_t* from, int64_t from_stride, int rows,
                         uint32_t* to, int64_t to_stride) {
  int row = 0;
  for (; row + 16 <= rows; row += 16) {
    CellVec first[8], second[8];
    Turn8(from + row * from_stride, from_stride, first);
    Turn8(from + (row + 8) * from_stride, from_stride, second);
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      uint32_t* const at = to + c * to_stride + row;
#if HWY_TARGET == HWY_AVX3
      const U32 d16;
      hn::Stream(hn::Combine(d16, second[c], first[c]), d16, at);
#else
      const Cells d;
      hn::Stream(first[c], d, at);
      hn::Stream(second[c], d, at + 8);
#endif
    }
  }
  return row;
}

// to [columns][rows] = from [rows][columns]. With `stream`, lines of 64 bytes
// that are written whole pass the caches; `to` is then in a block, whose rows
// of cells begin at lines.
template <bool stream, typename Cell>
HWY_INLINE void Turn(const Cell* from, int64_t from_stride, int rows,
                     int columns, Cell* to, int64_t to_stride) {
  const CellsOf<Cell> d;
  const int whole_rows = rows / 8 * 8;
  const int whole_columns = columns / 8 * 8;
  for (int j = 0; j < whole_columns; j += 8) {
    int i = 0;
    if constexpr (stream && sizeof(Cell) == 4) {
      if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        i = TurnLines(from + j, from_stride, rows, to + j * to_stride,
                      to_stride);
      }
    }
    for (; i < whole_rows; i += 8) {
      hn::Vec<CellsOf<Cell>> cells[8];
      Turn8(from + i * from_stride + j, from_stride, cells);
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
        hn::StoreU(cells[c], d, to + (j + c) * to_stride + i);
      }
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = i < whole_rows ? whole_columns : 0; j < columns; ++j) {
      to[j * to_stride + i] = from[i * from_stride + j];
    }
  }
}

// `to` is aligned to 32 bytes, `count` a multiple of 8.
HWY_INLINE void StreamCells(const uint32_t* from, int count, uint32_t* to) {
  const Cells d;
  for (int i = 0; i < count; i += 8) {
    hn::Stream(hn::LoadU(d, from + i), d, to + i);
  }
}

// One position's values of a head; `cells` has those of the pair.
template <typename Element>
void OneOfPair(std::byte* cells, bool odd, int count, bool write,
               std::byte* row) {
  auto* const in_block = reinterpret_cast<Element*>(cells) + (odd ? 1 : 0);
  auto* const on_wire = reinterpret_cast<Element*>(row);
  for (int i = 0; i < count; ++i) {
    write ? in_block[2 * i] = on_wire[i] : on_wire[i] = in_block[2 * i];
  }
}

template <typename Half>
HWY_INLINE hn::Vec<Half> LowHalf(Half half, CellVec cells) {
  return hn::TruncateTo(half, cells);
}
template <typename Half>
HWY_INLINE hn::Vec<Half> LowHalf(Half half, hn::Vec<CellsOf<uint16_t>> cells) {
  const CellsOf<uint16_t> d;
  return hn::DemoteTo(
      half, hn::BitCast(CellsOf<int16_t>(), hn::And(cells, hn::Set(d, 0xff))));
}

// Those of both positions; `count` is a multiple of 8.
template <typename Element>
HWY_INLINE void BothOfPair(std::byte* cells, int count, bool write,
                           std::byte* even_row, std::byte* odd_row) {
  constexpr int kBits = 8 * sizeof(Element);
  const hn::Rebind<Element, Cells> half;
  using Cell = hwy::MakeWide<Element>;
  const CellsOf<Cell> d;
  auto* const in_block = reinterpret_cast<Cell*>(cells);
  auto* const even = reinterpret_cast<Element*>(even_row);
  auto* const odd = reinterpret_cast<Element*>(odd_row);
  for (int i = 0; i < count; i += 8) {
    if (write) {
      const auto low = hn::PromoteTo(d, hn::LoadU(half, even + i));
      const auto high = hn::PromoteTo(d, hn::LoadU(half, odd + i));
      const auto both = hn::Or(low, hn::ShiftLeft<kBits>(high));
      if constexpr (kBits == 16) {
        hn::Stream(both, d, in_block + i);
      } else {
        hn::StoreU(both, d, in_block + i);
      }
    } else {
      const auto both = hn::LoadU(d, in_block + i);
      hn::StoreU(LowHalf(half, both), half, even + i);
      hn::StoreU(LowHalf(half, hn::ShiftRight<kBits>(both)), half, odd + i);
    }
  }
}

template <typename Cell>
void MoveKeys(const KvRowsPiece& p, bool write, int head, std::byte* rows) {
  constexpr int64_t kBytes = sizeof(Cell);
  const KvLayout& layout = *p.layout;
  const int cells =
      static_cast<int>(layout.k_head_bytes / kBytes / layout.slots);
  auto* const block =
      reinterpret_cast<Cell*>(p.block + layout.KHead(head)) + p.slot;
  auto* const wire = reinterpret_cast<Cell*>(rows);
  const int64_t stride = p.row_bytes / kBytes;
  write ? Turn<true>(wire, stride, p.rows, cells, block, layout.slots)
        : Turn<false>(block, layout.slots, cells, p.rows, wire, stride);
}

template <typename Element>
void MovePairsOfValues(const KvRowsPiece& p, bool write, int head,
                       std::byte* rows) {
  const KvLayout& layout = *p.layout;
  std::byte* const block = p.block + layout.VHead(head);
  const int count = layout.head_dim;
  for (int i = 0; i < p.rows;) {
    const int slot = p.slot + i;
    std::byte* const row = rows + i * p.row_bytes;
    std::byte* const cells = block + slot / 2 * (2 * layout.v_row_bytes());
    if (slot % 2 == 0 && i + 1 < p.rows) {
      BothOfPair<Element>(cells, count, write, row, row + p.row_bytes);
      i += 2;
    } else {
      OneOfPair<Element>(cells, slot % 2 != 0, count, write, row);
      ++i;
    }
  }
}

void MoveRowsOfValues(const KvRowsPiece& p, bool write, int head,
                      std::byte* rows) {
  const KvLayout& layout = *p.layout;
  std::byte* at = p.block + layout.VHead(head) + p.slot * layout.v_row_bytes();
  for (int i = 0; i < p.rows; ++i, at += layout.v_row_bytes()) {
    std::byte* const row = rows + i * p.row_bytes;
    if (write) {
      StreamCells(reinterpret_cast<const uint32_t*>(row), layout.head_dim,
                  reinterpret_cast<uint32_t*>(at));
    } else {
      std::memcpy(row, at, static_cast<size_t>(layout.head_dim) * 4);
    }
  }
}

void MoveVectors(const KvRowsPiece& p, bool write, bool value, int head,
                 std::byte* rows) {
  const DType type = p.wire;
  if (type == DType::kF32) {
    value ? MoveRowsOfValues(p, write, head, rows)
          : MoveKeys<uint32_t>(p, write, head, rows);
  } else if (type == DType::kBF16) {
    value ? MovePairsOfValues<uint16_t>(p, write, head, rows)
          : MoveKeys<uint32_t>(p, write, head, rows);
  } else {
    value ? MovePairsOfValues<uint8_t>(p, write, head, rows)
          : MoveKeys<uint16_t>(p, write, head, rows);
  }
}

// Of int8 each vector's scale, behind all elements of a row.
void MoveScales(const KvRowsPiece& p, bool write, std::byte* scales) {
  std::byte* at = scales;
  for (const bool value : {false, true}) {
    for (int head = p.head_begin; head < p.head_end; ++head, at += 4) {
      std::byte* in_block = p.block + p.layout->Scale(value, head, p.slot);
      for (int i = 0; i < p.rows; ++i, in_block += 4) {
        std::byte* const on_wire = at + i * p.row_bytes;
        write ? std::memcpy(in_block, on_wire, 4)
              : std::memcpy(on_wire, in_block, 4);
      }
    }
  }
  const std::byte* const end = p.row + p.row_bytes;
  for (int i = 0; i < p.rows && !write; ++i) {
    std::memset(at + i * p.row_bytes, 0, static_cast<size_t>(end - at));
  }
}

void MoveRows(const KvRowsPiece& p, bool write) {
  const KvLayout& layout = *p.layout;
  if (layout.type != p.wire ||
      (p.wire != DType::kF32 && p.wire != DType::kBF16 &&
       p.wire != DType::kInt8)) {
    for (int i = 0; i < p.rows; ++i) {
      std::byte* const row = p.row + i * p.row_bytes;
      write ? WriteKvRow(layout, p.block, p.slot + i, p.head_begin, p.head_end,
                         p.wire, row)
            : ReadKvRow(layout, p.block, p.slot + i, p.head_begin, p.head_end,
                        p.wire, row);
    }
    return;
  }
  const int64_t vector = KvElementBytes(p.wire, layout.head_dim);
  std::byte* at = p.row;
  for (const bool value : {false, true}) {
    for (int head = p.head_begin; head < p.head_end; ++head, at += vector) {
      MoveVectors(p, write, value, head, at);
    }
  }
  if (p.wire == DType::kInt8) MoveScales(p, write, at);
  if (write) hwy::FlushStream();
}

void ReadKvRows(const KvRowsPiece& p) { MoveRows(p, false); }
void WriteKvRows(const KvRowsPiece& p) { MoveRows(p, true); }

KvDigest DigestWords(const uint32_t* words, int count, const uint32_t* low_keys,
                     const uint32_t* high_keys, uint64_t key, int layer,
                     int position) {
  const hn::CappedTag<uint32_t, 8> du;  // 8 lanes with both sets
  const hn::CappedTag<uint64_t, 4> d64;
  KvDigest digest;
  for (int begin = 0; begin < count; begin += kDigestPieceWords) {
    const int words_here = std::min(kDigestPieceWords, count - begin);
    const uint32_t* const w = words + begin;
    auto low = hn::Zero(d64);
    auto high = hn::Zero(d64);
    int i = 0;
    for (; i + 8 <= words_here; i += 8) {
      const auto data = hn::LoadU(du, w + i);
      const auto a = hn::Add(data, hn::LoadU(du, low_keys + i));
      const auto b = hn::Add(data, hn::LoadU(du, high_keys + i));
      const auto a_odd =
          hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(d64, a)));
      const auto b_odd =
          hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(d64, b)));
      low = hn::Add(low, hn::MulEven(a, a_odd));
      high = hn::Add(high, hn::MulEven(b, b_odd));
    }
    alignas(64) uint64_t lanes[8];
    hn::Store(low, d64, lanes);
    hn::Store(high, d64, lanes + 4);
    uint64_t low_sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
    uint64_t high_sum = lanes[4] + lanes[5] + lanes[6] + lanes[7];
    for (; i + 1 < words_here; i += 2) {
      low_sum += uint64_t{w[i] + low_keys[i]} * (w[i + 1] + low_keys[i + 1]);
      high_sum += uint64_t{w[i] + high_keys[i]} * (w[i + 1] + high_keys[i + 1]);
    }
    const int piece = begin / kDigestPieceWords;
    digest.low += DigestFinish(low_sum, key, layer, position, piece);
    digest.high +=
        DigestFinish(high_sum, DigestHighKey(key), layer, position, piece);
  }
  return digest;
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddKvRows(KernelTable& table) {
  const bool wide = table.isa == Isa::kAvx512;
  table.digest_row = wide ? N_AVX3::DigestWords : N_AVX2::DigestWords;
  table.read_kv_rows = wide ? N_AVX3::ReadKvRows : N_AVX2::ReadKvRows;
  table.write_kv_rows = wide ? N_AVX3::WriteKvRows : N_AVX2::WriteKvRows;
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
