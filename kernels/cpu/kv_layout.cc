// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/kv_layout.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cpu {
namespace {

// One vector's elements in a block: even element i at base + i / 2 * step, the
// odd one behind it `next` bytes further.
struct Run {
  int64_t base;
  int64_t step;
  int64_t next;
  int64_t scale;  // of a quantised cache
};

Run RunOf(const KvLayout& layout, bool value, int head, int slot) {
  const auto at = [&](int dim) {
    return value ? layout.V(head, slot, dim) : layout.K(head, slot, dim);
  };
  return {at(0), at(2) - at(0), at(1) - at(0), layout.Scale(value, head, slot)};
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

// A vector apart from any block.
struct Vector {
  alignas(64) std::byte elements[kMaxHeadDim * 4];
  std::byte scale[4];
};

void Read(const KvLayout& layout, const std::byte* block, const Run& run,
          std::byte* elements, std::byte* scale) {
  const int count = layout.head_dim;
  if (layout.type == DType::kF32) {
    ReadRun(block, run, count, reinterpret_cast<uint32_t*>(elements));
  } else if (layout.type == DType::kBF16) {
    ReadRun(block, run, count, reinterpret_cast<uint16_t*>(elements));
  } else {
    ReadRun(block, run, count, reinterpret_cast<uint8_t*>(elements));
    std::memcpy(scale, block + run.scale, 4);
  }
}

void Write(const KvLayout& layout, std::byte* block, const Run& run,
           const std::byte* elements, const std::byte* scale) {
  const int count = layout.head_dim;
  if (layout.type == DType::kF32) {
    WriteRun(block, run, count, reinterpret_cast<const uint32_t*>(elements));
  } else if (layout.type == DType::kBF16) {
    WriteRun(block, run, count, reinterpret_cast<const uint16_t*>(elements));
  } else {
    WriteRun(block, run, count, reinterpret_cast<const uint8_t*>(elements));
    std::memcpy(block + run.scale, scale, 4);
  }
}

void ToFloats(DType type, const std::byte* elements, const std::byte* scale,
              int count, float* out) {
  if (type == DType::kF32) {
    std::memcpy(out, elements, static_cast<size_t>(count) * 4);
  } else if (IsQuantised(type)) {
    float factor;
    std::memcpy(&factor, scale, 4);
    for (int i = 0; i < count; ++i) {
      out[i] = FloatFromCode(type, static_cast<uint8_t>(elements[i])) * factor;
    }
  } else {
    for (int i = 0; i < count; ++i) out[i] = LoadElement(elements, type, i);
  }
}

void FromFloats(DType type, const float* in, int count, std::byte* elements,
                std::byte* scale) {
  if (type == DType::kF32) {
    std::memcpy(elements, in, static_cast<size_t>(count) * 4);
  } else if (IsQuantised(type)) {
    uint32_t amax = 0;
    for (int i = 0; i < count; ++i) amax = std::max(amax, MagnitudeBits(in[i]));
    const VectorQuantiser quantiser(type, amax);
    for (int i = 0; i < count; ++i) {
      elements[i] = static_cast<std::byte>(quantiser(in[i]));
    }
    std::memcpy(scale, &quantiser.scale, 4);
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
  size_t vector_bytes;
  size_t vectors;

  WireRow(Byte* row, DType wire, int heads, int head_dim)
      : elements(row),
        vector_bytes(static_cast<size_t>(head_dim) * SizeOf(wire)),
        vectors(size_t{2} * static_cast<size_t>(heads)) {
    scales = row + vectors * vector_bytes;
  }
};

// run(the vector in the block, its elements on the wire, its scale there).
template <typename Byte, typename Function>
void ForVectors(const KvLayout& layout, int slot, int head_begin, int head_end,
                const WireRow<Byte>& row, const Function& run) {
  Byte* elements = row.elements;
  Byte* scale = row.scales;
  for (const bool value : {false, true}) {
    for (int head = head_begin; head < head_end; ++head) {
      run(RunOf(layout, value, head, slot), elements, scale);
      elements += row.vector_bytes;
      scale += 4;
    }
  }
}

}  // namespace

void ReadKvRow(const KvLayout& layout, const std::byte* block, int slot,
               int head_begin, int head_end, DType wire, std::byte* row) {
  const int heads = head_end - head_begin;
  const WireRow<std::byte> sent(row, wire, heads, layout.head_dim);
  ForVectors(layout, slot, head_begin, head_end, sent,
             [&](const Run& run, std::byte* elements, std::byte* scale) {
               if (layout.type == wire) {
                 Read(layout, block, run, elements, scale);
                 return;
               }
               Vector cached;
               Read(layout, block, run, cached.elements, cached.scale);
               alignas(64) float values[kMaxHeadDim];
               ToFloats(layout.type, cached.elements, cached.scale,
                        layout.head_dim, values);
               FromFloats(wire, values, layout.head_dim, elements, scale);
             });
  if (IsQuantised(wire)) {
    std::fill(sent.scales + 4 * sent.vectors,
              row + KvRowBytes(wire, heads, layout.head_dim), std::byte{0});
  }
}

void WriteKvRow(const KvLayout& layout, std::byte* block, int slot,
                int head_begin, int head_end, DType wire,
                const std::byte* row) {
  const WireRow<const std::byte> sent(row, wire, head_end - head_begin,
                                      layout.head_dim);
  ForVectors(
      layout, slot, head_begin, head_end, sent,
      [&](const Run& run, const std::byte* elements, const std::byte* scale) {
        if (layout.type == wire) {
          Write(layout, block, run, elements, scale);
          return;
        }
        alignas(64) float values[kMaxHeadDim];
        ToFloats(wire, elements, scale, layout.head_dim, values);
        Vector cached;
        FromFloats(layout.type, values, layout.head_dim, cached.elements,
                   cached.scale);
        Write(layout, block, run, cached.elements, cached.scale);
      });
}

void WriteKvVector(const KvLayout& layout, std::byte* block, bool value,
                   int head, int slot, const float* from) {
  Vector cached;
  FromFloats(layout.type, from, layout.head_dim, cached.elements, cached.scale);
  Write(layout, block, RunOf(layout, value, head, slot), cached.elements,
        cached.scale);
}

}  // namespace tandem::kernels::cpu
