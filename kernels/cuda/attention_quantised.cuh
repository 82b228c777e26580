// SPDX-License-Identifier: Apache-2.0
// The stream of keys and values out of a quantised cache: what KeyStream is
// to one of the activation type, with the same chunks for the attention
// kernels. Codes and scales come as they lie, asynchronously; a chunk whose
// turn it is becomes code times scale, rounded to the activation type, in
// memory of its own. A slot has room for codes of a byte; those of int4 take
// half of it, and their scales begin there. Of strips, rows of codes are cut
// out at multiples of 16 bytes and so may begin up to 15 bytes in.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_QUANTISED_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_QUANTISED_CUH_

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/device/vectors.h"

namespace tandem::kernels::cuda {

template <typename T, int D, int kSlots, int kThreads>
struct QuantisedKeyStream {
  static constexpr int kColumns = kStripColumns<D>;
  static constexpr bool kCut = kStrips<D> > 1;
  static constexpr int kCodeBytes = kChunkKeys * (kColumns + (kCut ? 16 : 0));
  static constexpr int kSlotBytes = kCodeBytes + kChunkKeys * 4;
  static constexpr int kChunkBytes = kChunkKeys * kColumns * 2;
  static constexpr int kBytes = kSlots * kSlotBytes + kChunkBytes;

  const AttentionKernelParams& p;
  const int32_t* table;
  int kv_head;
  int begin;  // keys outside [begin, end) read as zeros
  int end;
  int tile;  // of the next chunk to copy
  int end_tile;
  // Then the slots: [64 keys][head_dim] codes, [groups][64] scales.
  std::byte* chunk;
  int part = 0;                     // of the tile: 0 .. kChunksPerTile - 1
  int strip = 0;                    // of the part
  int slot = 0;                     // where it goes
  int taken = 0;                    // slot of the next chunk to use
  int key = tile * kAttentionTile;  // first one of that
  int taken_part = 0;
  int taken_strip = 0;

  TANDEM_DEVICE void Start(Grid& g) {
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) CopyNext(g);
  }

  TANDEM_DEVICE void CopyNext(Grid& g) {
    if (tile < end_tile) {
      const int key0 =
          tile * kAttentionTile + part % (kChunksPerTile / 2) * kChunkKeys;
      const bool keys = part < kChunksPerTile / 2;
      std::byte* const to = Slot(slot);
      const std::byte* const codes =
          static_cast<const std::byte*>(keys ? p.k : p.v) +
          kv_head * p.head_stride;
      if constexpr (kCut) {
        CopyStrip(g, to, codes, key0);
      } else {
        // A block's codes lie without gaps, rows of 8 or 24 codes too: pieces
        // are cut from all of them, and none leaves eight keys, nor a block.
        for (int i = g.thread(); i < kChunkKeys * p.slot_stride / 16;
             i += kThreads) {
          const int row = i * 16 / p.slot_stride;
          const int last = (i * 16 + 15) / p.slot_stride;
          Copy16(g, to + i * 16, codes, key0 + row, key0 + last, p.slot_stride,
                 i * 16 - row * p.slot_stride);
        }
      }
      const std::byte* const scales =
          static_cast<const std::byte*>(keys ? p.k_scales : p.v_scales) +
          kv_head * p.head_scales;
      // Pieces of 16 bytes: of 4 keys, of int4 of 8, and never of two groups.
      const int bytes = KvScaleBytes(p.kv);
      const int pieces = kChunkKeys * bytes / 16;
      const int first_group =
          p.kv == DType::kInt4 ? strip * (kColumns / kCodeGroup) : 0;
      const int groups =
          KvScales(p.kv, Smaller(p.head_dim - strip * kColumns, kColumns));
      for (int i = g.thread(); i < pieces * groups; i += kThreads) {
        const int group = first_group + i / pieces;
        const int row = key0 + i % pieces * (16 / bytes);
        Copy16(g, to + ScalesBegin() + i * 16, scales + group * p.scale_stride,
               row, row + 16 / bytes - 1, bytes, 0);
      }
      if (!kCut || ++strip == StripsOf<D>(p)) {
        strip = 0;
        if (++part == kChunksPerTile) {
          part = 0;
          ++tile;
        }
      }
      slot = slot == kSlots - 1 ? 0 : slot + 1;
    }
    CopyAsyncCommit(g);
  }

  // The next chunk, for all threads, until they ask for another; puts the
  // copy of a later one on its way.
  TANDEM_DEVICE const std::byte* Next(Grid& g) {
    CopyAsyncWait<kSlots - 2>(g);
    g.Barrier();
    CopyNext(g);
    Widen(g, Slot(taken), key + taken_part % (kChunksPerTile / 2) * kChunkKeys);
    taken = taken == kSlots - 1 ? 0 : taken + 1;
    if (!kCut || ++taken_strip == StripsOf<D>(p)) {
      taken_strip = 0;
      if (++taken_part == kChunksPerTile) {
        taken_part = 0;
        key += kAttentionTile;
      }
    }
    g.Barrier();
    return chunk;
  }

 private:
  // Bytes of a row of codes in a slot.
  static constexpr int kInt4RowBytes = kColumns / 2 + (kCut ? 16 : 0);
  TANDEM_DEVICE int RowBytes() const {
    return !kCut                  ? p.slot_stride
           : p.kv == DType::kInt4 ? kInt4RowBytes
                                  : kColumns + 16;
  }

  // In a slot. int4's take 4 bytes for a dimension.
  static constexpr int kInt4CodeBytes = kChunkKeys * kInt4RowBytes;
  static_assert(kSlotBytes - kInt4CodeBytes >= 4 * kColumns);
  TANDEM_DEVICE int ScalesBegin() const {
    return p.kv == DType::kInt4 ? kInt4CodeBytes : kCodeBytes;
  }

  TANDEM_DEVICE std::byte* Slot(int i) const {
    return chunk + kChunkBytes + i * kSlotBytes;
  }

  // 16 bytes that belong to keys [first, last], `offset` behind where the
  // first one's begin; zeros where no row sees one of them.
  TANDEM_DEVICE void Copy16(Grid& g, std::byte* to, const std::byte* side,
                            int first, int last, int key_bytes,
                            int offset) const {
    const bool valid = last >= begin && first < end;
    const std::byte* from = side;
    if (valid) {
      const int block = BlockOf(p, first);
      from += table[block] * p.block_stride +
              int64_t{first - block * p.block_size} * key_bytes + offset;
    }
    CopyAsync16(g, to, from, valid ? 16 : 0);
  }

  // How far behind a multiple of 16 bytes the codes of a chunk's row begin, in
  // the cache as in a slot: strips and eight keys are multiples.
  TANDEM_DEVICE int Behind(int row) const {
    return kCut ? row % 8 * p.slot_stride % 16 : 0;
  }

  // The strip's codes of all keys; none leaves its block.
  TANDEM_DEVICE void CopyStrip(Grid& g, std::byte* to, const std::byte* codes,
                               int key0) const {
    const int bytes = p.kv == DType::kInt4 ? kColumns / 2 : kColumns;
    const int pieces = RowBytes() / 16;
    const int there = Smaller(bytes, p.slot_stride - strip * bytes);
    for (int i = g.thread(); i < kChunkKeys * pieces; i += kThreads) {
      const int row = i / pieces;
      const int from = i % pieces * 16 - Behind(row);
      if (from >= there) continue;
      Copy16(g, to + i * 16, codes, key0 + row, key0 + row, p.slot_stride,
             strip * bytes + from);
    }
  }

  TANDEM_DEVICE void Widen(Grid& g, const std::byte* from, int key0) const {
    constexpr int kPieces = kColumns / 8;
    const bool int4 = p.kv == DType::kInt4;
    const std::byte* const scales = from + ScalesBegin();
    for (int i = g.thread(); i < kChunkKeys * kPieces; i += kThreads) {
      const int row = i / kPieces;
      const int piece = i % kPieces;
      Vector16 wide = {};
      if (key0 + row >= begin && key0 + row < end &&
          taken_strip * kColumns + piece * 8 < p.head_dim) {
        const float scale =
            int4 ? FloatFromBf16Bits(reinterpret_cast<const uint16_t*>(
                       scales)[piece * 8 / kCodeGroup * kChunkKeys + row])
                 : reinterpret_cast<const float*>(scales)[row];
        wide = WidenCodes<T>(p.kv,
                             from + row * RowBytes() + Behind(row) +
                                 (int4 ? piece * 4 : piece * 8),
                             scale);
      }
      Store16(chunk + PieceOffset<kChunkKeys>(row, piece), wide);
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_QUANTISED_CUH_
