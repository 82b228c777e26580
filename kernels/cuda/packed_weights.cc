// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/packed_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>

#include "kernels/quantise.h"

namespace tandem::kernels::cuda {
namespace {

uint16_t ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float FromF16(uint16_t bits) {
  const int biased = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  const float magnitude =
      biased == 0x1f ? (fraction == 0 ? HUGE_VALF : std::nanf(""))
      : biased == 0
          ? std::ldexp(static_cast<float>(fraction), -24)
          : std::ldexp(static_cast<float>(fraction | 0x400), biased - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t ToF16(float value) {
  const uint16_t sign =
      static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude == 0.0f) return sign;
  // In units of the last place, which are exact in f32.
  const int power = std::max(std::ilogb(magnitude), -14);
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - power)));
  // A carry into the exponent falls out of the addition.
  return static_cast<uint16_t>(sign | (((power + 14) << 10) + units));
}

float Widened(const std::byte* at, DType type) {
  if (type == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return type == DType::kBF16
             ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
             : FromF16(bits);
}

// One row as f32 [cols], zeros up to a whole block.
void WidenRow(const HostTensor& source, int64_t row, std::vector<float>& out) {
  const int64_t size = static_cast<int64_t>(SizeOf(source.dtype));
  const std::byte* const from = source.data + row * source.cols * size;
  if (source.dtype == DType::kF32) {
    std::memcpy(out.data(), from, static_cast<size_t>(source.cols) * 4);
    return;
  }
  for (int64_t c = 0; c < source.cols; ++c) {
    out[static_cast<size_t>(c)] = Widened(from + c * size, source.dtype);
  }
}

// 16 bytes at a time: those of a row in a block of 16-bit weights.
void PackChunks(const uint16_t* row, int cols, int r, std::byte* to) {
  const int whole = cols / 8;
  for (int i = 0; i < whole; ++i) {
    std::memcpy(to + PackedOffset(r, i * 8, cols, WeightType::kBF16),
                row + ptrdiff_t{8} * i, 16);
  }
  for (int i = whole; i < WeightBlocks(cols) * 8; ++i) {
    uint16_t chunk[8] = {};
    for (int c = i * 8; c < cols; ++c) chunk[c % 8] = row[c];
    std::memcpy(to + PackedOffset(r, i * 8, cols, WeightType::kBF16), chunk,
                16);
  }
}

// The codes of the group that begins at `col`; of int4 the low halves.
template <typename Code>
void PutGroup(WeightType type, int r, int col, int cols, const Code* codes,
              std::byte* to) {
  for (int i = 0; i < kCodeGroup; ++i) {
    const auto code = static_cast<std::byte>(codes[i]);
    std::byte& at = to[PackedOffset(r, col + i, cols, type)];
    if (!IsFourBit(type)) {
      at = code;
    } else if (i % 8 < 4) {
      at = code & std::byte{0xf};
    } else {
      at |= code << 4;
    }
  }
}

void PutE4M3(int r, int cols, const uint16_t* codes, std::byte* to) {
  for (int c = 0; c < WeightBlocks(cols) * kWeightBlock; c += 2) {
    std::byte* const pair = to + PackedOffset(r, c, cols, WeightType::kE4M3);
    pair[0] = static_cast<std::byte>(codes[c]);
    pair[1] = static_cast<std::byte>(codes[c + 1]);
  }
}

// A row of codes with one scale.
void PutRow(WeightType type, int r, int cols, const uint16_t* codes,
            std::byte* to) {
  if (type == WeightType::kE4M3) {
    PutE4M3(r, cols, codes, to);
    return;
  }
  for (int c = 0; c < WeightBlocks(cols) * kWeightBlock; c += kCodeGroup) {
    PutGroup(type, r, c, cols, codes + c, to);
  }
}

// Rows of one thread's work, and what it needs for them.
class RowPacker {
 public:
  RowPacker(const HostTensor& source, WeightType type)
      : source_(source),
        type_(type),
        cols_(static_cast<int>(source.cols)),
        wide_(static_cast<size_t>(WeightBlocks(cols_)) * kWeightBlock),
        narrow_(wide_.size()) {}

  // Source row `from` (or zeros, -1) as row r of the blocks at `to`. Returns
  // its scale.
  float Pack(int64_t from, int r, std::byte* to) {
    const bool narrow = type_ == WeightType::kBF16 || type_ == WeightType::kF16;
    const bool same =
        (type_ == WeightType::kBF16 && source_.dtype == DType::kBF16) ||
        (type_ == WeightType::kF16 && source_.dtype == DType::kF16);
    if (from >= 0 && same) {
      const std::byte* const row = source_.data + from * source_.cols * 2;
      if (reinterpret_cast<uintptr_t>(row) % 2 == 0) {
        PackChunks(reinterpret_cast<const uint16_t*>(row), cols_, r, to);
      } else {
        std::memcpy(narrow_.data(), row, static_cast<size_t>(cols_) * 2);
        PackChunks(narrow_.data(), cols_, r, to);
      }
      return 1.0f;
    }
    if (from < 0) {
      std::fill(wide_.begin(), wide_.end(), 0.0f);
    } else {
      WidenRow(source_, from, wide_);
    }
    if (narrow) {
      for (size_t c = 0; c < wide_.size(); ++c) {
        narrow_[c] =
            type_ == WeightType::kBF16 ? ToBf16(wide_[c]) : ToF16(wide_[c]);
      }
      PackChunks(narrow_.data(), cols_, r, to);
      return 1.0f;
    }
    if (type_ == WeightType::kF32) {
      for (size_t c = 0; c < wide_.size(); ++c) {
        std::memcpy(to + (c * kWeightBlock + static_cast<size_t>(r)) * 4,
                    &wide_[c], 4);
      }
      return 1.0f;
    }
    if (IsGrouped(type_)) return PackGroups(r, to);
    uint32_t most = 0;
    for (const float value : wide_) {
      most = std::max(most, MagnitudeKey(value));
    }
    const VectorQuantiser quantiser(
        type_ == WeightType::kW8A8 ? DType::kInt8 : DType::kFp8, most);
    for (size_t c = 0; c < wide_.size(); ++c) narrow_[c] = quantiser(wide_[c]);
    PutRow(type_, r, cols_, narrow_.data(), to);
    return quantiser.scale;
  }

 private:
  // wide_ as int8 or int4.
  float PackGroups(int r, std::byte* to) {
    const bool int4 = type_ == WeightType::kInt4;
    float greatest = 0;
    for (const float value : wide_) {
      if (std::isfinite(value)) greatest = std::max(greatest, std::fabs(value));
    }
    const float row = RowPower(greatest, int4 ? 8.0f : kLargestInt8);
    for (size_t begin = 0; begin < wide_.size(); begin += kCodeGroup) {
      const uint16_t scale = QuantiseGroup(begin, 1.0f / row, int4);
      const int col = static_cast<int>(begin);
      std::memcpy(to + PackedScale(r, col, cols_, type_), &scale, 2);
      PutGroup(type_, r, col, cols_, &narrow_[begin], to);
    }
    return row;
  }

  // Codes into narrow_. Returns the scale.
  uint16_t QuantiseGroup(size_t begin, float inverse_row, bool int4) {
    const float* const values = &wide_[begin];
    uint16_t* const codes = &narrow_[begin];
    std::fill(codes, codes + kCodeGroup, 0);
    float most = 0;  // the first of the greatest
    for (int i = 0; i < kCodeGroup; ++i) {
      if (!std::isfinite(values[i])) return ToF16(std::nanf(""));
      if (std::fabs(values[i]) > std::fabs(most)) most = values[i];
    }
    const uint16_t scale = ToF16(
        (int4 ? most / -8.0f : std::fabs(most) / kLargestInt8) * inverse_row);
    const float rounded = FromF16(scale);
    if (rounded == 0) return scale;
    for (int i = 0; i < kCodeGroup; ++i) {
      const float scaled = values[i] * inverse_row * (1.0f / rounded);
      codes[i] = static_cast<uint8_t>(int4 ? Int4FromFloat(scaled)
                                           : Int8FromFloat(scaled));
    }
    return scale;
  }

  const HostTensor& source_;
  const WeightType type_;
  const int cols_;
  std::vector<float> wide_;
  std::vector<uint16_t> narrow_;
};

// RowPacker of what was quantised before.
class CodePacker {
 public:
  CodePacker(const HostCodes& source, WeightType type)
      : source_(source),
        type_(type),
        cols_(static_cast<int>(source.cols)),
        codes_(static_cast<size_t>(WeightBlocks(cols_)) * kWeightBlock) {}

  float Pack(int64_t from, int r, std::byte* to) {
    std::fill(codes_.begin(), codes_.end(), 0);
    if (from >= 0) {
      const uint8_t* const codes = source_.codes + from * source_.cols;
      // Two's complement but beside zeros.
      const uint8_t minus = type_ == WeightType::kInt4 ? 8 : 0;
      for (int c = 0; c < cols_; ++c) {
        codes_[static_cast<size_t>(c)] =
            type_ == WeightType::kE2m1 && codes[c] == kMinusZeroE2m1
                ? 0
                : static_cast<uint8_t>(codes[c] - minus);
      }
    }
    if (IsGrouped(type_)) return PackGroups(from, r, to);
    PutRow(type_, r, cols_, codes_.data(), to);
    return from < 0 ? 0 : source_.scales[from];
  }

 private:
  float PackGroups(int64_t from, int r, std::byte* to) {
    const int64_t groups = (source_.cols + source_.group - 1) / source_.group;
    const float* const scales =
        from < 0 ? nullptr : source_.scales + from * groups;
    // One scale is kept as it is; a power of two brings others within f16.
    float row = 0;
    if (from >= 0) row = groups == 1 ? scales[0] : PowerOf(scales, groups);
    for (size_t begin = 0; begin < codes_.size(); begin += kCodeGroup) {
      const int col = static_cast<int>(begin);
      const bool there = from >= 0 && col < cols_;
      const int64_t group = col / source_.group;
      const uint16_t scale =
          ToF16(!there        ? 0.0f
                : groups == 1 ? 1.0f
                              : scales[group] * (1.0f / row));
      std::memcpy(to + PackedScale(r, col, cols_, type_), &scale, 2);
      if (type_ == WeightType::kInt4Zeros) {
        to[PackedZero(r, col, cols_)] = static_cast<std::byte>(
            there ? source_.zeros[from * groups + group] : 0);
      }
      PutGroup(type_, r, col, cols_, &codes_[begin], to);
    }
    return row;
  }

  static float PowerOf(const float* scales, int64_t groups) {
    float most = 0;
    for (int64_t i = 0; i < groups; ++i) {
      if (std::isfinite(scales[i])) {
        most = std::max(most, std::fabs(scales[i]));
      }
    }
    return RowPower(most, 1.0f);
  }

  static constexpr uint8_t kMinusZeroE2m1 = 8;

  const HostCodes& source_;
  const WeightType type_;
  const int cols_;
  std::vector<uint16_t> codes_;
};

// Rows [begin, end) of blocks, by all of the machine's processors.
template <typename Packer, typename Source>
void PackBlocks(const Source& source, WeightType type, RowOrder order,
                int begin, int end, std::byte* to, float* scales) {
  const int rows = static_cast<int>(source.rows);
  const int64_t block_bytes =
      PackedBytes(kWeightBlock, static_cast<int>(source.cols), type);
  const auto pack = [&](int first, int last) {
    Packer packer(source, type);
    for (int block = first; block < last; ++block) {
      for (int r = 0; r < kWeightBlock; ++r) {
        const int row = block * kWeightBlock + r;
        const float scale = packer.Pack(SourceRow(row, rows, order), r,
                                        to + (block - begin) * block_bytes);
        if (HasRowScales(type)) {
          scales[row - begin * kWeightBlock] = scale;
        }
      }
    }
  };
  // A thread is worth starting for so much.
  constexpr int64_t kShareBytes = int64_t{2} << 20;
  const int64_t bytes = (end - begin) * block_bytes;
  const int threads = static_cast<int>(std::clamp<int64_t>(
      bytes / kShareBytes, 1,
      std::min(end - begin,
               static_cast<int>(std::thread::hardware_concurrency()) + 1)));
  const auto share = [&](int i) {
    return begin +
           static_cast<int>(int64_t{end - begin} * i / std::max(threads, 1));
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  for (int i = 1; i < threads; ++i) {
    others.emplace_back(pack, share(i), share(i + 1));
  }
  pack(share(0), share(1));
  for (std::thread& other : others) other.join();
}

template <typename Packer, typename Source>
PackedWeights PackAll(const Source& source, WeightType type, RowOrder order) {
  const int rows = PackedRows(static_cast<int>(source.rows), order);
  const int cols = static_cast<int>(source.cols);
  PackedWeights packed;
  packed.bytes.resize(static_cast<size_t>(PackedBytes(rows, cols, type)));
  if (HasRowScales(type)) {
    packed.scales.resize(static_cast<size_t>(WeightBlocks(rows)) *
                         kWeightBlock);
  }
  PackBlocks<Packer>(source, type, order, 0, WeightBlocks(rows),
                     packed.bytes.data(), packed.scales.data());
  packed.scales.resize(HasRowScales(type) ? static_cast<size_t>(rows) : 0);
  return packed;
}

}  // namespace

void PackRowBlocks(const HostTensor& source, WeightType type, RowOrder order,
                   int begin, int end, std::byte* to, float* scales) {
  PackBlocks<RowPacker>(source, type, order, begin, end, to, scales);
}

void PackRowBlocks(const HostCodes& source, RowOrder order, int begin, int end,
                   std::byte* to, float* scales) {
  PackBlocks<CodePacker>(source, TypeOfCodes(source), order, begin, end, to,
                         scales);
}

PackedWeights PackWeights(const HostTensor& source, WeightType type,
                          RowOrder order) {
  return PackAll<RowPacker>(source, type, order);
}

PackedWeights PackWeights(const HostCodes& source, RowOrder order) {
  return PackAll<CodePacker>(source, TypeOfCodes(source), order);
}

WeightType TypeOfCodes(const HostCodes& source) {
  if (source.dtype == DType::kFp8) return WeightType::kE4M3;
  if (source.dtype == DType::kInt8) return WeightType::kInt8;
  if (source.dtype == DType::kW8A8) return WeightType::kW8A8;
  if (source.e2m1) return WeightType::kE2m1;
  return source.zeros == nullptr ? WeightType::kInt4 : WeightType::kInt4Zeros;
}

float UnpackWeight(const PackedWeights& packed, int row, int col, int cols,
                   WeightType type) {
  const std::byte* const at =
      packed.bytes.data() + PackedOffset(row, col, cols, type);
  if (type == WeightType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  if (type == WeightType::kE4M3 || type == WeightType::kW8A8) {
    return FloatFromCode(type == WeightType::kE4M3 ? DType::kFp8 : DType::kInt8,
                         static_cast<uint8_t>(*at)) *
           packed.scales[static_cast<size_t>(row)];
  }
  uint16_t bits;
  if (IsGrouped(type)) {
    std::memcpy(&bits, packed.bytes.data() + PackedScale(row, col, cols, type),
                2);
    const bool high = IsFourBit(type) && col % 8 >= 4;
    const auto nibble = static_cast<uint8_t>(high ? *at >> 4 : *at);
    const float code =
        type == WeightType::kE2m1 ? static_cast<float>(kTwiceE2m1[nibble & 0xf])
        : type == WeightType::kInt4Zeros
            ? static_cast<float>(
                  (nibble & 0xf) -
                  std::to_integer<int>(packed.bytes[static_cast<size_t>(
                      PackedZero(row, col, cols))]))
            : FloatFromCode(IsFourBit(type) ? DType::kInt4 : DType::kInt8,
                            nibble);
    return code * FromF16(bits) * packed.scales[static_cast<size_t>(row)];
  }
  std::memcpy(&bits, at, 2);
  return type == WeightType::kBF16
             ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
             : FromF16(bits);
}

}  // namespace tandem::kernels::cuda
