// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/kv_layout.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cpu {
namespace {

// Where a vector is in a block.
struct Place {
  bool value;
  int head;
  int slot;
};

// Its elements, not of int4: even element i at base + i / 2 * step, the odd one
// behind it `next` bytes further.
struct Run {
  int64_t base;
  int64_t step;
  int64_t next;
};

Run RunOf(const KvLayout& layout, const Place& place) {
  const auto at = [&](int dim) {
    return place.value ? layout.V(place.head, place.slot, dim)
                       : layout.K(place.head, place.slot, dim);
  };
  return {at(0), at(2) - at(0), at(1) - at(0)};
}

template <typename Element>
void ReadRun(const std::byte* block, const Run& run, int count, Element* row) {
  const std::byte* source = block + run.base;
  for (int i = 0; i < count; i += 2, source += run.step) {
    row[i] = *reinterpret_cast<const Element*>(source);
    row[i + 1] = *reinterpret_cast<const Element*>(source + run.next);
  }
}

template <typename Element>
void WriteRun(std::byte* block, const Run& run, int count, const Element* row) {
  std::byte* target = block + run.base;
  for (int i = 0; i < count; i += 2, target += run.step) {
    *reinterpret_cast<Element*>(target) = row[i];
    // The count is even.
    // NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Assign)
    *reinterpret_cast<Element*>(target + run.next) = row[i + 1];
  }
}

// Elements of which two stand in one word, as bf16 keys do.
void WriteWords(std::byte* to, int64_t step, int count, const std::byte* from) {
  for (int i = 0; i < count; ++i, to += step, from += 4) {
    std::memcpy(to, from, 4);
  }
}

// int4: a byte of K lies as it is said and sent; of V, 32 dimensions are 16
// bytes with dimension i of them below i + 16.
void ReadPairs(const KvLayout& layout, const std::byte* block,
               const Place& place, std::byte* pairs) {
  const int count = layout.head_dim / 2;
  if (!place.value) {
    const std::byte* const k = block + layout.KHead(place.head) + place.slot;
    for (int i = 0; i < count; ++i) pairs[i] = k[int64_t{i} * layout.slots];
    return;
  }
  const std::byte* const v =
      block + layout.VHead(place.head) + place.slot * layout.v_row_bytes();
  constexpr std::byte kLow{0xf};
  for (int i = 0; i < count; ++i) {
    const int at = i / 16 * 16 + 2 * i % 16;
    const std::byte* const two = v + at;
    pairs[i] = i % 16 < 8 ? (two[0] & kLow) | (two[1] << 4)
                          : (two[0] >> 4) | (two[1] & ~kLow);
  }
}

void WritePairs(const KvLayout& layout, std::byte* block, const Place& place,
                const std::byte* pairs) {
  const int count = layout.head_dim / 2;
  if (!place.value) {
    std::byte* const k = block + layout.KHead(place.head) + place.slot;
    for (int i = 0; i < count; ++i) {
      // NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Assign)
      k[int64_t{i} * layout.slots] = pairs[i];
    }
    return;
  }
  std::byte* const v =
      block + layout.VHead(place.head) + place.slot * layout.v_row_bytes();
  for (int i = 0; i < layout.width / 2; ++i) {
    const int dim = i / 16 * 32 + i % 16;
    v[i] = static_cast<std::byte>(
        (dim < layout.head_dim ? CodeAt(DType::kInt4, pairs, dim) : 0) |
        (dim + 16 < layout.head_dim ? CodeAt(DType::kInt4, pairs, dim + 16) : 0)
            << 4);
  }
}

// A vector apart from any block.
struct Vector {
  alignas(64) std::byte elements[kMaxHeadDim * 4];
  std::byte scales[kMaxHeadDim / kCodeGroup * 2];
};

void Read(const KvLayout& layout, const std::byte* block, const Place& place,
          std::byte* elements, std::byte* scales) {
  const int count = layout.head_dim;
  if (layout.type == DType::kF32) {
    ReadRun(block, RunOf(layout, place), count,
            reinterpret_cast<uint32_t*>(elements));
  } else if (layout.type == DType::kBF16) {
    ReadRun(block, RunOf(layout, place), count,
            reinterpret_cast<uint16_t*>(elements));
  } else if (layout.type == DType::kInt4) {
    ReadPairs(layout, block, place, elements);
  } else {
    ReadRun(block, RunOf(layout, place), count,
            reinterpret_cast<uint8_t*>(elements));
  }
  const int64_t bytes = KvScaleBytes(layout.type);
  for (int group = 0; group < layout.groups; ++group) {
    std::memcpy(
        scales + group * bytes,
        block + layout.Scale(place.value, place.head, place.slot, group),
        static_cast<size_t>(bytes));
  }
}

void Write(const KvLayout& layout, std::byte* block, const Place& place,
           const std::byte* elements, const std::byte* scales) {
  const int count = layout.head_dim;
  if (layout.type == DType::kF32) {
    WriteRun(block, RunOf(layout, place), count,
             reinterpret_cast<const uint32_t*>(elements));
  } else if (layout.type == DType::kBF16) {
    const Run run = RunOf(layout, place);
    if (run.next == 2) {  // both halves of a word
      WriteWords(block + run.base, run.step, count / 2, elements);
    } else {
      WriteRun(block, run, count, reinterpret_cast<const uint16_t*>(elements));
    }
  } else if (layout.type == DType::kInt4) {
    WritePairs(layout, block, place, elements);
  } else {
    WriteRun(block, RunOf(layout, place), count,
             reinterpret_cast<const uint8_t*>(elements));
  }
  const int64_t bytes = KvScaleBytes(layout.type);
  for (int group = 0; group < layout.groups; ++group) {
    std::memcpy(
        block + layout.Scale(place.value, place.head, place.slot, group),
        scales + group * bytes, static_cast<size_t>(bytes));
  }
}

void ToFloats(DType type, const std::byte* elements, const std::byte* scales,
              int count, float* out) {
  if (type == DType::kF32) {
    std::memcpy(out, elements, static_cast<size_t>(count) * 4);
  } else if (type == DType::kInt4) {
    for (int i = 0; i < count; ++i) {
      uint16_t factor;
      std::memcpy(&factor, scales + int64_t{i / kCodeGroup} * 2, 2);
      out[i] = FloatFromCode(type, CodeAt(type, elements, i)) *
               FloatFromBf16(factor);
    }
  } else if (IsQuantised(type)) {
    float factor;
    std::memcpy(&factor, scales, 4);
    for (int i = 0; i < count; ++i) {
      out[i] = FloatFromCode(type, static_cast<uint8_t>(elements[i])) * factor;
    }
  } else {
    for (int i = 0; i < count; ++i) out[i] = LoadElement(elements, type, i);
  }
}

VectorQuantiser QuantiserOf(DType type, const float* in, int count) {
  uint32_t most = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, MagnitudeKey(in[i]));
  return {type, most};
}

void FromFloats(DType type, const float* in, int count, std::byte* elements,
                std::byte* scales) {
  if (type == DType::kF32) {
    std::memcpy(elements, in, static_cast<size_t>(count) * 4);
  } else if (type == DType::kInt4) {
    for (int begin = 0; begin < count; begin += kCodeGroup) {
      const int end = std::min(begin + kCodeGroup, count);
      const VectorQuantiser quantiser =
          QuantiserOf(type, in + begin, end - begin);
      for (int i = begin; i < end; i += 2) {
        elements[i / 2] = static_cast<std::byte>(quantiser(in[i]) |
                                                 quantiser(in[i + 1]) << 4);
      }
      const uint16_t scale = Bf16FromFloat(quantiser.scale);
      std::memcpy(scales + int64_t{begin / kCodeGroup} * 2, &scale, 2);
    }
  } else if (IsQuantised(type)) {
    const VectorQuantiser quantiser = QuantiserOf(type, in, count);
    for (int i = 0; i < count; ++i) {
      elements[i] = static_cast<std::byte>(quantiser(in[i]));
    }
    std::memcpy(scales, &quantiser.scale, 4);
  } else {
    uint16_t* const out = reinterpret_cast<uint16_t*>(elements);
    for (int i = 0; i < count; ++i) {
      out[i] =
          type == DType::kBF16 ? Bf16FromFloat(in[i]) : F16FromFloat(in[i]);
    }
  }
}

// Where a row on the wire has its vectors: K of all heads, then V.
template <typename Byte>
struct WireRow {
  Byte* elements;
  Byte* scales;
  int64_t vector_bytes;  // elements
  int64_t scale_bytes;   // of a vector
  int64_t vectors;

  WireRow(Byte* row, DType wire, int heads, int head_dim)
      : elements(row),
        vector_bytes(KvElementBytes(wire, head_dim)),
        scale_bytes(int64_t{KvScales(wire, head_dim)} * KvScaleBytes(wire)),
        vectors(int64_t{2} * heads) {
    scales = row + vectors * vector_bytes;
  }
};

// run(the vector in the block, its elements on the wire, its scales there).
template <typename Byte, typename Function>
void ForVectors(int slot, int head_begin, int head_end,
                const WireRow<Byte>& row, const Function& run) {
  Byte* elements = row.elements;
  Byte* scales = row.scales;
  for (const bool value : {false, true}) {
    for (int head = head_begin; head < head_end; ++head) {
      run(Place{value, head, slot}, elements, scales);
      elements += row.vector_bytes;
      scales += row.scale_bytes;
    }
  }
}

}  // namespace

void ReadKvRow(const KvLayout& layout, const std::byte* block, int slot,
               int head_begin, int head_end, DType wire, std::byte* row) {
  const int heads = head_end - head_begin;
  const WireRow<std::byte> sent(row, wire, heads, layout.head_dim);
  ForVectors(slot, head_begin, head_end, sent,
             [&](const Place& place, std::byte* elements, std::byte* scales) {
               if (layout.type == wire) {
                 Read(layout, block, place, elements, scales);
                 return;
               }
               Vector cached;
               Read(layout, block, place, cached.elements, cached.scales);
               alignas(64) float values[kMaxHeadDim];
               ToFloats(layout.type, cached.elements, cached.scales,
                        layout.head_dim, values);
               FromFloats(wire, values, layout.head_dim, elements, scales);
             });
  if (IsQuantised(wire)) {
    std::fill(sent.scales + sent.scale_bytes * sent.vectors,
              row + KvRowBytes(wire, heads, layout.head_dim), std::byte{0});
  }
}

void WriteKvRow(const KvLayout& layout, std::byte* block, int slot,
                int head_begin, int head_end, DType wire,
                const std::byte* row) {
  const WireRow<const std::byte> sent(row, wire, head_end - head_begin,
                                      layout.head_dim);
  ForVectors(slot, head_begin, head_end, sent,
             [&](const Place& place, const std::byte* elements,
                 const std::byte* scales) {
               if (layout.type == wire) {
                 Write(layout, block, place, elements, scales);
                 return;
               }
               alignas(64) float values[kMaxHeadDim];
               ToFloats(wire, elements, scales, layout.head_dim, values);
               Vector cached;
               FromFloats(layout.type, values, layout.head_dim, cached.elements,
                          cached.scales);
               Write(layout, block, place, cached.elements, cached.scales);
             });
}

}  // namespace tandem::kernels::cpu
