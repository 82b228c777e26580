// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/kv_layout.h"

#include <cstring>

#include "kernels/cpu/convert.h"

namespace tandem::kernels::cpu {
namespace {

// One head's elements on the cache's side lie at `base + i * step`, for even
// i of a bf16 K also one element further for i + 1: `pair` and `step` say so.
struct Run {
  int64_t base;  // byte offset of element 0
  int64_t step;  // bytes from element i to i + 2
  int64_t next;  // bytes from element i (even) to i + 1
};

Run KRun(const KvLayout& layout, int head, int slot) {
  const int64_t base = layout.K(head, slot, 0);
  return {base, layout.K(head, slot, 2) - base, layout.K(head, slot, 1) - base};
}

Run VRun(const KvLayout& layout, int head, int slot) {
  const int64_t base = layout.V(head, slot, 0);
  return {base, layout.V(head, slot, 2) - base, layout.V(head, slot, 1) - base};
}

template <typename From, typename To>
To Convert(From value) {
  if constexpr (std::is_same_v<From, To>) {
    return value;
  } else if constexpr (std::is_same_v<To, uint32_t>) {
    return uint32_t{value} << 16;
  } else {
    return Bf16FromFloat(std::bit_cast<float>(value));
  }
}

// Cached and Wire: uint32_t holds an f32, uint16_t a bf16.
template <typename Cached, typename Wire>
void ReadRun(const std::byte* block, const Run& run, int count, Wire* row) {
  const std::byte* source = block + run.base;
  for (int i = 0; i < count; i += 2, source += run.step) {
    row[i] = Convert<Cached, Wire>(*reinterpret_cast<const Cached*>(source));
    row[i + 1] = Convert<Cached, Wire>(
        *reinterpret_cast<const Cached*>(source + run.next));
  }
}

template <typename Cached, typename Wire>
void WriteRun(std::byte* block, const Run& run, int count, const Wire* row) {
  std::byte* target = block + run.base;
  for (int i = 0; i < count; i += 2, target += run.step) {
    *reinterpret_cast<Cached*>(target) = Convert<Wire, Cached>(row[i]);
    *reinterpret_cast<Cached*>(target + run.next) =
        Convert<Wire, Cached>(row[i + 1]);
  }
}

template <typename Cached, typename Wire>
void ReadRow(const KvLayout& layout, const std::byte* block, int slot,
             int head_begin, int head_end, Wire* row) {
  for (int head = head_begin; head < head_end; ++head) {
    ReadRun<Cached>(block, KRun(layout, head, slot), layout.head_dim, row);
    row += layout.head_dim;
  }
  for (int head = head_begin; head < head_end; ++head) {
    ReadRun<Cached>(block, VRun(layout, head, slot), layout.head_dim, row);
    row += layout.head_dim;
  }
}

template <typename Cached, typename Wire>
void WriteRow(const KvLayout& layout, std::byte* block, int slot,
              int head_begin, int head_end, const Wire* row) {
  for (int head = head_begin; head < head_end; ++head) {
    WriteRun<Cached>(block, KRun(layout, head, slot), layout.head_dim, row);
    row += layout.head_dim;
  }
  for (int head = head_begin; head < head_end; ++head) {
    WriteRun<Cached>(block, VRun(layout, head, slot), layout.head_dim, row);
    row += layout.head_dim;
  }
}

}  // namespace

void ReadKvRow(const KvLayout& layout, const std::byte* block, int slot,
               int head_begin, int head_end, DType wire, std::byte* row) {
  uint32_t* const wide = reinterpret_cast<uint32_t*>(row);
  uint16_t* const narrow = reinterpret_cast<uint16_t*>(row);
  if (layout.type == DType::kF32) {
    if (wire == DType::kF32) {
      ReadRow<uint32_t>(layout, block, slot, head_begin, head_end, wide);
    } else {
      ReadRow<uint32_t>(layout, block, slot, head_begin, head_end, narrow);
    }
  } else if (wire == DType::kF32) {
    ReadRow<uint16_t>(layout, block, slot, head_begin, head_end, wide);
  } else {
    ReadRow<uint16_t>(layout, block, slot, head_begin, head_end, narrow);
  }
}

void WriteKvRow(const KvLayout& layout, std::byte* block, int slot,
                int head_begin, int head_end, DType wire,
                const std::byte* row) {
  const uint32_t* const wide = reinterpret_cast<const uint32_t*>(row);
  const uint16_t* const narrow = reinterpret_cast<const uint16_t*>(row);
  if (layout.type == DType::kF32) {
    if (wire == DType::kF32) {
      WriteRow<uint32_t>(layout, block, slot, head_begin, head_end, wide);
    } else {
      WriteRow<uint32_t>(layout, block, slot, head_begin, head_end, narrow);
    }
  } else if (wire == DType::kF32) {
    WriteRow<uint16_t>(layout, block, slot, head_begin, head_end, wide);
  } else {
    WriteRow<uint16_t>(layout, block, slot, head_begin, head_end, narrow);
  }
}

}  // namespace tandem::kernels::cpu
