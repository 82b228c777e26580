// SPDX-License-Identifier: Apache-2.0
// Where an element of the KV cache lies. Memory is [layer][block]; one block's
// part of one layer (of layers with other heads several ones' behind another)
// is all K, then all V, then all scales of K, then of V:
//
//   f32     K [kv_heads][head_dim][slots]
//           V [kv_heads][size][width]
//   bf16    K [kv_heads][head_dim / 2][slots][2]
//           V [kv_heads][size / 2][width][2]
//   int8    as bf16, a byte each
//   fp8     as f32, a byte each
//   int4    K [kv_heads][head_dim / 2][slots], the even dimension in a byte's
//           low half
//           V [kv_heads][size][width / 32][16], the lower dimension there; the
//           other one is 16 further
//   scales  [kv_heads][slots] f32, of codes alone; of int4
//           [kv_heads][groups][slots] bf16
//
// with slots = block size and width = head_dim, each rounded up to 16, width of
// int4 to 32. So scores have 16 positions, and weighted sums 16 dimensions,
// side by side in the lanes, and a pair is two steps of one chain: both
// products of attention run the matrix product's inner loop. No two positions
// share a byte, so that threads may write any two of them.

#ifndef TANDEM_KERNELS_CPU_KV_LAYOUT_H_
#define TANDEM_KERNELS_CPU_KV_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/backend.h"
#include "kernels/cpu/allocator.h"

namespace tandem::kernels::cpu {

struct KvLayout {
  KvLayout() = default;
  explicit KvLayout(const KvShape& shape)
      : type(shape.dtype),
        kv_heads(shape.kv_heads),
        head_dim(shape.head_dim),
        block_size(shape.block_size),
        slots((shape.block_size + 15) / 16 * 16),
        width(shape.dtype == DType::kInt4 ? (shape.head_dim + 31) / 32 * 32
                                          : (shape.head_dim + 15) / 16 * 16),
        groups(KvScales(shape.dtype, shape.head_dim)) {
    pairs = type == DType::kBF16 || type == DType::kInt8;
    cell_bytes = type == DType::kInt8 ? 2 : IsQuantised(type) ? 1 : 4;
    k_head_bytes = KvElementBytes(type, int64_t{head_dim} * slots);
    v_head_bytes = block_size * v_row_bytes();
    v_begin = kv_heads * k_head_bytes;
    scales_begin = kv_heads * (k_head_bytes + v_head_bytes);
    own_bytes = ScaleHead(true, kv_heads);
    block_bytes = own_bytes;
    if (shape.other_layers > 0) {
      block_bytes = std::max(
          own_bytes, shape.other_layers * KvLayout(shape.Other()).own_bytes);
    }
    layer_bytes = block_bytes * shape.num_blocks;
  }

  // Byte offsets within one block's part of a layer.
  int64_t KHead(int head) const { return head * k_head_bytes; }
  int64_t VHead(int head) const { return v_begin + head * v_head_bytes; }
  int64_t ScaleHead(bool value, int head) const {
    return scales_begin + (int64_t{value ? kv_heads : 0} + head) * groups *
                              slots * KvScaleBytes(type);
  }
  // Of a position's V.
  int64_t v_row_bytes() const { return KvElementBytes(type, width); }
  // Of one element, not of int4; `slot` is the position within the block.
  int64_t K(int head, int slot, int dim) const {
    return KHead(head) + Cell(slots, dim, slot);
  }
  int64_t V(int head, int slot, int dim) const {
    return VHead(head) + Cell(width, slot, dim);
  }
  int64_t Scale(bool value, int head, int slot, int group = 0) const {
    return ScaleHead(value, head) +
           (int64_t{group} * slots + slot) * KvScaleBytes(type);
  }

  DType type = DType::kF32;
  int kv_heads = 0;
  int head_dim = 0;
  int block_size = 0;
  int slots = 0;
  int width = 0;
  int groups = 0;      // of a vector, with a scale each
  bool pairs = false;  // two numbers of a chain side by side
  int cell_bytes = 0;  // of a lane: a number, or a pair of bf16 or int8
  int64_t k_head_bytes = 0;
  int64_t v_head_bytes = 0;
  int64_t v_begin = 0;
  int64_t scales_begin = 0;
  int64_t own_bytes = 0;    // of a layer's part of a block
  int64_t block_bytes = 0;  // from one block to the next
  int64_t layer_bytes = 0;

 private:
  // Of step `step` of chain `lane`, of `lanes` side by side.
  int64_t Cell(int lanes, int step, int lane) const {
    if (pairs) {
      return (int64_t{step / 2} * lanes + lane) * cell_bytes +
             int64_t{cell_bytes / 2} * (step % 2);
    }
    return (int64_t{step} * lanes + lane) * cell_bytes;
  }
};

class CpuKvCache final : public KvCache {
 public:
  CpuKvCache(const KvShape& shape, DeviceMemory memory)
      : KvCache(shape, OtherOf(shape, memory.data())),
        layout_(shape),
        memory_(std::move(memory)),
        data_(memory_.data()) {}

  const KvLayout& layout() const { return layout_; }
  std::byte* Layer(int layer) const {
    return data_ + layer / layers_in_one_ * layout_.layer_bytes +
           layer % layers_in_one_ * layout_.own_bytes;
  }
  std::byte* Block(int layer, int block) const {
    return Layer(layer) + block * layout_.block_bytes;
  }

 private:
  // What `whole` has for layers with other heads.
  CpuKvCache(const KvShape& whole, std::byte* data)
      : KvCache(whole.Other()),
        layout_(StridesOf(KvLayout(whole), KvLayout(whole.Other()))),
        data_(data),
        layers_in_one_(whole.other_layers) {}

  static std::unique_ptr<KvCache> OtherOf(const KvShape& shape,
                                          std::byte* data) {
    if (shape.other_layers == 0) return nullptr;
    return std::unique_ptr<KvCache>(new CpuKvCache(shape, data));
  }
  static KvLayout StridesOf(const KvLayout& whole, KvLayout layout) {
    layout.block_bytes = whole.block_bytes;
    layout.layer_bytes = whole.layer_bytes;
    return layout;
  }

  const KvLayout layout_;
  const DeviceMemory memory_;  // of the other: none
  std::byte* const data_;
  const int layers_in_one_ = 1;
};

// Copies one position's K and V of heads [head_begin, head_end) between a
// block and a row on the wire (KvRowBytes), converting where the types differ.
void ReadKvRow(const KvLayout& layout, const std::byte* block, int slot,
               int head_begin, int head_end, DType wire, std::byte* row);
void WriteKvRow(const KvLayout& layout, std::byte* block, int slot,
                int head_begin, int head_end, DType wire, const std::byte* row);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_KV_LAYOUT_H_
