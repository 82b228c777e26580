// SPDX-License-Identifier: Apache-2.0
// Where an element of the KV cache lies. Memory is [layer][block]; one block's
// part of one layer is all K, then all V:
//
//   f32   K [kv_heads][head_dim][slots]           V [kv_heads][size][width]
//   bf16  K [kv_heads][head_dim / 2][slots][2]    V [kv_heads][size /
//   2][width][2]
//
// with slots = block size and width = head_dim, each rounded up to 16. So
// scores have 16 positions, and weighted sums 16 dimensions, side by side in
// the lanes, and a bf16 pair is two steps of one chain: both products of
// attention run the matrix product's inner loop.

#ifndef TANDEM_KERNELS_CPU_KV_LAYOUT_H_
#define TANDEM_KERNELS_CPU_KV_LAYOUT_H_

#include <cstddef>
#include <cstdint>

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
        width((shape.head_dim + 15) / 16 * 16) {
    const int64_t element = static_cast<int64_t>(SizeOf(type));
    k_head_bytes = int64_t{head_dim} * slots * element;
    v_head_bytes = int64_t{block_size} * width * element;
    v_begin = kv_heads * k_head_bytes;
    block_bytes = kv_heads * (k_head_bytes + v_head_bytes);
    layer_bytes = block_bytes * shape.num_blocks;
  }

  // Byte offsets within one block's part of a layer.
  int64_t KHead(int head) const { return head * k_head_bytes; }
  int64_t VHead(int head) const { return v_begin + head * v_head_bytes; }
  // Of one element; `slot` is the position within the block.
  int64_t K(int head, int slot, int dim) const {
    return KHead(head) + (type == DType::kF32
                              ? (int64_t{dim} * slots + slot) * 4
                              : (int64_t{dim / 2} * slots + slot) * 4 +
                                    int64_t{2} * (dim % 2));
  }
  int64_t V(int head, int slot, int dim) const {
    return VHead(head) + (type == DType::kF32
                              ? (int64_t{slot} * width + dim) * 4
                              : (int64_t{slot / 2} * width + dim) * 4 +
                                    int64_t{2} * (slot % 2));
  }

  DType type = DType::kF32;
  int kv_heads = 0;
  int head_dim = 0;
  int block_size = 0;
  int slots = 0;
  int width = 0;
  int64_t k_head_bytes = 0;
  int64_t v_head_bytes = 0;
  int64_t v_begin = 0;
  int64_t block_bytes = 0;
  int64_t layer_bytes = 0;
};

class CpuKvCache final : public KvCache {
 public:
  CpuKvCache(const KvShape& shape, DeviceMemory memory)
      : KvCache(shape), layout_(shape), memory_(std::move(memory)) {}

  const KvLayout& layout() const { return layout_; }
  std::byte* Layer(int layer) const {
    return memory_.data() + layer * layout_.layer_bytes;
  }
  std::byte* Block(int layer, int block) const {
    return Layer(layer) + block * layout_.block_bytes;
  }

 private:
  const KvLayout layout_;
  const DeviceMemory memory_;
};

// Copies one position's K and V of heads [head_begin, head_end) between a
// block and a row of wire elements (all K, then all V), converting where the
// types differ.
void ReadKvRow(const KvLayout& layout, const std::byte* block, int slot,
               int head_begin, int head_end, DType wire, std::byte* row);
void WriteKvRow(const KvLayout& layout, std::byte* block, int slot,
                int head_begin, int head_end, DType wire, const std::byte* row);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_KV_LAYOUT_H_
