// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/code_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cpu {
namespace {

constexpr uint16_t kNanF16 = 0x7e00;

// One output's codes, a byte each, and its groups.
struct CodeRow {
  std::vector<uint8_t> codes;  // [groups * 32], zeros at the end; int4: 0 .. 15
  std::vector<uint16_t> scales;
  std::vector<int16_t> zeros;  // int4 with zeros alone
  float row = 0;

  CodeRow(int64_t cols, bool with_zeros)
      : codes(static_cast<size_t>((cols + kCodeGroup - 1) / kCodeGroup) *
              kCodeGroup),
        scales(codes.size() / kCodeGroup),
        zeros(with_zeros ? scales.size() : 0) {}
};

// Greatest magnitude of what is finite.
float Greatest(const float* values, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(values[i]);
    if (magnitude > most && magnitude <= 3.4e38f) most = magnitude;
  }
  return most;
}

void QuantiseGroup(const float* values, int64_t count, DType dtype,
                   float inverse_row, uint16_t* scale, uint8_t* codes) {
  uint32_t amax = 0;
  float most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = MagnitudeBits(values[i]);
    if (magnitude > amax) most = values[i];
    amax = std::max(amax, magnitude);
  }
  const uint8_t zero = dtype == DType::kInt4 ? 8 : 0;
  std::fill(codes, codes + count, zero);
  if (amax >= 0x7f800000u) {
    *scale = kNanF16;
    return;
  }
  const float exact =
      dtype == DType::kInt4 ? most / -8.0f : std::fabs(most) / kLargestInt8;
  *scale = F16FromFloat(exact * inverse_row);
  const float rounded = FloatFromF16(*scale);
  if (rounded == 0) return;
  const float inverse = 1.0f / rounded;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = values[i] * inverse_row * inverse;
    codes[i] = dtype == DType::kInt4
                   ? static_cast<uint8_t>(Int4FromFloat(scaled) + 8)
                   : static_cast<uint8_t>(Int8FromFloat(scaled));
  }
}

void QuantiseRow(const HostTensor& source, DType dtype, int64_t row,
                 std::vector<float>& values, CodeRow& out) {
  for (int64_t col = 0; col < source.cols; ++col) {
    values[static_cast<size_t>(col)] =
        LoadElement(source.data, source.dtype, row * source.cols + col);
  }
  out.row = RowPower(Greatest(values.data(), source.cols),
                     dtype == DType::kInt4 ? 8.0f : kLargestInt8);
  for (size_t group = 0; group < out.scales.size(); ++group) {
    const int64_t at = static_cast<int64_t>(group) * kCodeGroup;
    QuantiseGroup(values.data() + at,
                  std::min<int64_t>(kCodeGroup, source.cols - at), dtype,
                  1.0f / out.row, &out.scales[group],
                  out.codes.data() + static_cast<size_t>(at));
  }
}

// W8A8: the whole row like a vector of a KV cache.
void QuantiseWholeRow(const HostTensor& source, int64_t row,
                      std::vector<float>& values, CodeRow& out) {
  uint32_t key = 0;
  for (int64_t col = 0; col < source.cols; ++col) {
    const float value =
        LoadElement(source.data, source.dtype, row * source.cols + col);
    values[static_cast<size_t>(col)] = value;
    key = std::max(key, MagnitudeKey(value));
  }
  const VectorQuantiser quantiser(DType::kInt8, key);
  out.row = quantiser.scale;
  std::transform(values.begin(), values.end(), out.codes.begin(), quantiser);
}

void TakeRow(const HostCodes& source, int64_t row, CodeRow& out) {
  std::memcpy(out.codes.data(), source.codes + row * source.cols,
              static_cast<size_t>(source.cols));
  const int64_t groups = (source.cols + source.group - 1) / source.group;
  const float* const scales = source.scales + row * groups;
  // One scale is kept as it is; a power of two brings others within f16.
  out.row = groups == 1 ? scales[0] : RowPower(Greatest(scales, groups), 1.0f);
  for (size_t i = 0; i < out.scales.size(); ++i) {
    const int64_t group = static_cast<int64_t>(i) * kCodeGroup / source.group;
    out.scales[i] =
        F16FromFloat(groups == 1 ? 1.0f : scales[group] * (1.0f / out.row));
    if (source.zeros != nullptr) {
      out.zeros[i] = source.zeros[row * groups + group];
    }
  }
}

// Where an input's code lies within its unit's block, and which half.
struct Place {
  int64_t offset;
  bool high;
};
Place PlaceOf(CodeKind kind, int lane, int input) {
  const int group = input / kCodeGroup;
  const int quad = input % kCodeGroup / 4;
  const int64_t byte = int64_t{lane % kUnit} * 4 + input % 4;
  const int64_t begin = CodesBegin(kind) + byte;
  if (IsEightBit(kind)) {
    return {begin + (int64_t{group} * 8 + quad) * 64, false};
  }
  return {begin + (int64_t{group} * 4 + quad % 4) * 64, quad >= 4};
}

// Of output `lane`, for the inputs from 64 * block on.
std::byte* BlockOf(std::byte* panel, CodeKind kind, int lane, int64_t block) {
  return panel + (2 * block + lane / kUnit) * CodeUnitBytes(kind);
}

void PutRow(const CodeRow& row, CodeKind kind, int lane, std::byte* panel) {
  const auto cols = static_cast<int>(row.codes.size());
  const auto code = [&](int col) {
    return row.codes[static_cast<size_t>(col)];
  };
  const uint8_t raised = IsRaised(kind) ? 128 : 0;
  for (int begin = 0; begin < cols; begin += kCodeGroup) {
    std::byte* const unit = BlockOf(panel, kind, lane, begin / kCodeInputs);
    // Four neighbours lie together, beside those 16 on in the high halves.
    const int end = begin + (IsEightBit(kind) ? kCodeGroup : kCodeGroup / 2);
    for (int quad = begin; quad < end; quad += 4) {
      std::byte* const to =
          unit + PlaceOf(kind, lane, quad % kCodeInputs).offset;
      for (int i = 0; i < 4; ++i) {
        const int low = code(quad + i);
        to[i] = static_cast<std::byte>(
            IsEightBit(kind) ? low ^ raised
                             : low | code(quad + i + kCodeGroup / 2) << 4);
      }
    }
  }
  if (IsW8A8(kind)) return;
  for (size_t group = 0; group < row.scales.size(); ++group) {
    std::byte* const unit =
        BlockOf(panel, kind, lane, static_cast<int64_t>(group) / 2);
    const size_t index = group % 2 * kUnit + static_cast<size_t>(lane % kUnit);
    reinterpret_cast<uint16_t*>(unit)[index] = row.scales[group];
    if (kind == CodeKind::kInt4Zeros) {
      reinterpret_cast<int16_t*>(unit + 64)[index] = row.zeros[group];
    }
  }
}

template <typename Fill>
void PackRows(int64_t rows, int64_t cols, CodeKind kind, int panel,
              std::byte* target, float* powers, const Fill& fill) {
  const int64_t begin = int64_t{panel} * kPanel;
  const int lanes = static_cast<int>(std::min<int64_t>(kPanel, rows - begin));
  std::memset(
      target, 0,
      static_cast<size_t>(CodePanelBytes(static_cast<int>(cols), kind)));
  CodeRow row(cols, kind == CodeKind::kInt4Zeros);
  for (int lane = 0; lane < lanes; ++lane) {
    fill(begin + lane, row);
    powers[begin + lane] = row.row;
    PutRow(row, kind, lane, target);
  }
}

}  // namespace

void PackCodePanel(const HostTensor& source, CodeKind kind, int panel,
                   std::byte* target, float* rows) {
  const DType dtype = IsEightBit(kind) ? DType::kInt8 : DType::kInt4;
  std::vector<float> values(static_cast<size_t>(source.cols));
  PackRows(source.rows, source.cols, kind, panel, target, rows,
           [&](int64_t index, CodeRow& row) {
             if (IsW8A8(kind)) {
               QuantiseWholeRow(source, index, values, row);
             } else {
               QuantiseRow(source, dtype, index, values, row);
             }
           });
}

void PackCodePanel(const HostCodes& source, CodeKind kind, int panel,
                   std::byte* target, float* rows) {
  PackRows(source.rows, source.cols, kind, panel, target, rows,
           [&](int64_t index, CodeRow& row) { TakeRow(source, index, row); });
}

void UnpackCodeRow(const std::byte* panel, CodeKind kind, int lane, int cols,
                   float* out) {
  for (int col = 0; col < cols; ++col) {
    const std::byte* const unit =
        panel + (2 * (col / kCodeInputs) + lane / kUnit) * CodeUnitBytes(kind);
    const int input = col % kCodeInputs;
    const Place place = PlaceOf(kind, lane, input);
    const auto byte = std::to_integer<uint8_t>(unit[place.offset]);
    const int index = input / kCodeGroup * kUnit + lane % kUnit;
    int code = byte < 128 ? byte : byte - 256;
    if (IsRaised(kind)) {
      code = byte - 128;
    } else if (!IsEightBit(kind)) {
      const int nibble = place.high ? byte >> 4 : byte & 0xf;
      code = kind == CodeKind::kE2m1 ? kTwiceE2m1[nibble]
             : kind == CodeKind::kInt4
                 ? nibble - 8
                 : nibble - reinterpret_cast<const int16_t*>(unit + 64)[index];
    }
    const float scale =
        IsW8A8(kind)
            ? 1.0f
            : FloatFromF16(reinterpret_cast<const uint16_t*>(unit)[index]);
    out[col] = static_cast<float>(code) * scale;
  }
}

}  // namespace tandem::kernels::cpu
