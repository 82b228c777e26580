// SPDX-License-Identifier: Apache-2.0
// MXFP4 (Open Compute Project, Microscaling Formats 1.0, sections 5.1 to 5.3):
// 32 neighbours share a power of two, each is an e2m1. NVFP4: 16 share an e4m3,
// and all a float.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "engine/checkpoint/quantisation.h"
#include "kernels/quantise.h"

namespace tandem::engine {
namespace {

constexpr int64_t kGroup = kernels::kCodeGroup;
constexpr int kBlockBytes = kGroup / 2;
constexpr int64_t kSmallGroup = 16;  // NVFP4's

absl::Status Wrong(const Checkpoint& checkpoint, const std::string& name,
                   const std::string& what) {
  const TensorInfo* const tensor = checkpoint.Find(name);
  return absl::InvalidArgumentError(absl::StrCat(
      tensor == nullptr ? checkpoint.main_path() : checkpoint.path(*tensor),
      ": tensor ", Quote(name), " ", what));
}

absl::Status Uneven(const Checkpoint& checkpoint, const std::string& name,
                    int64_t cols, int64_t group) {
  return Wrong(checkpoint, name,
               absl::StrCat("has ", cols, " inputs, no multiple of ", group,
                            ", of which each has a scale"));
}

// Of a tensor of this type and shape.
absl::StatusOr<absl::Span<const std::byte>> BytesOf(
    const Checkpoint& checkpoint, const std::string& name,
    std::string_view dtype, const std::vector<int64_t>& shape) {
  const TensorInfo* const tensor = checkpoint.Find(name);
  if (tensor == nullptr) return Wrong(checkpoint, name, "is missing");
  if (tensor->dtype != dtype || tensor->shape != shape) {
    return Wrong(
        checkpoint, name,
        absl::StrCat("is ", std::string(tensor->dtype), " [",
                     absl::StrJoin(tensor->shape, ", "),
                     "], but config.json asks for ", std::string(dtype), " [",
                     absl::StrJoin(shape, ", "), "]"));
  }
  return checkpoint.bytes(*tensor);
}

// The same of matrix `index` of `shape[0]`.
absl::StatusOr<absl::Span<const std::byte>> BytesOfOne(
    const Checkpoint& checkpoint, const std::string& name, int64_t index,
    const std::vector<int64_t>& shape) {
  const auto all = BytesOf(checkpoint, name, "U8", shape);
  if (!all.ok()) return all.status();
  const size_t each = all->size() / static_cast<size_t>(shape[0]);
  return all->subspan(static_cast<size_t>(index) * each, each);
}

// Without scales. Codes lie two to a byte, low half first.
CodeRows RowsOf(int64_t rows, int64_t cols, int64_t group,
                absl::Span<const std::byte> pairs) {
  CodeRows result;
  result.dtype = kernels::DType::kInt4;
  result.e2m1 = true;
  result.rows = rows;
  result.cols = cols;
  result.group = group;
  result.codes.resize(2 * pairs.size());
  uint8_t* code = result.codes.data();
  for (const std::byte pair : pairs) {
    const auto bits = static_cast<unsigned>(pair);
    *code++ = static_cast<uint8_t>(bits & 0xf);
    *code++ = static_cast<uint8_t>(bits >> 4);
  }
  return result;
}

// Powers of two, of codes that stand for twice their numbers. False if one is
// NaN.
bool ReadPowers(absl::Span<const std::byte> exponents,
                std::vector<float>* scales) {
  scales->reserve(exponents.size());
  for (const std::byte byte : exponents) {
    const int exponent = static_cast<int>(byte);
    if (exponent == 255) return false;
    scales->push_back(std::ldexp(1.0f, exponent - 128));
  }
  return true;
}

// A group of zeros says nothing by its power, which would be far from others.
void DropIdlePowers(CodeRows* codes) {
  const auto group = static_cast<std::ptrdiff_t>(codes->group);
  auto begin = codes->codes.cbegin();
  for (float& scale : codes->scales) {
    const bool idle = std::all_of(begin, begin + group, [](uint8_t code) {
      return kernels::kTwiceE2m1[code] == 0;
    });
    if (idle) scale = 0;
    begin += group;
  }
}

// What the scales of NVFP4's groups are multiplied by: one float.
absl::StatusOr<float> ScaleOfAll(const Checkpoint& checkpoint,
                                 const std::string& name, bool divides) {
  const TensorInfo* const tensor = checkpoint.Find(name);
  const bool bare = tensor != nullptr && tensor->shape.empty();
  const auto bytes =
      BytesOf(checkpoint, name, "F32",
              bare ? std::vector<int64_t>{} : std::vector<int64_t>{1});
  if (!bytes.ok()) return bytes.status();
  float stored;
  memcpy(&stored, bytes->data(), sizeof stored);
  const float scale = divides ? 1 / stored : stored;
  if (!(stored > 0) || !std::isnormal(scale)) {
    return Wrong(checkpoint, name, absl::StrCat("is ", stored, ", no scale"));
  }
  return scale;
}

}  // namespace

bool IsMxfp4(const Checkpoint& checkpoint, const std::string& name) {
  return checkpoint.Find(name + "_blocks") != nullptr;
}

absl::StatusOr<CodeRows> ReadMxfp4(const Checkpoint& checkpoint,
                                   const std::string& name, int64_t count,
                                   int64_t index, int64_t rows, int64_t cols) {
  if (cols % kGroup != 0) {
    return Uneven(checkpoint, name + "_blocks", cols, kGroup);
  }
  const int64_t groups = cols / kGroup;
  const auto blocks = BytesOfOne(checkpoint, name + "_blocks", index,
                                 {count, rows, groups, kBlockBytes});
  if (!blocks.ok()) return blocks.status();
  const auto scales =
      BytesOfOne(checkpoint, name + "_scales", index, {count, rows, groups});
  if (!scales.ok()) return scales.status();
  CodeRows result = RowsOf(rows, cols, kGroup, *blocks);
  if (!ReadPowers(*scales, &result.scales)) {
    return Wrong(checkpoint, name + "_scales", "has a scale that is NaN");
  }
  DropIdlePowers(&result);
  return result;
}

absl::StatusOr<CodeRows> ReadPackedMxfp4(const Checkpoint& checkpoint,
                                         const std::string& name, int64_t rows,
                                         int64_t cols) {
  const std::vector<std::string> names = {name + ".weight_packed",
                                          name + ".weight_scale"};
  if (cols % kGroup != 0) return Uneven(checkpoint, names[0], cols, kGroup);
  const auto pairs = BytesOf(checkpoint, names[0], "U8", {rows, cols / 2});
  if (!pairs.ok()) return pairs.status();
  const auto scales =
      BytesOf(checkpoint, names[1], "U8", {rows, cols / kGroup});
  if (!scales.ok()) return scales.status();
  CodeRows result = RowsOf(rows, cols, kGroup, *pairs);
  result.names = names;
  if (!ReadPowers(*scales, &result.scales)) {
    return Wrong(checkpoint, names[1], "has a scale that is NaN");
  }
  DropIdlePowers(&result);
  return result;
}

absl::StatusOr<CodeRows> ReadNvfp4(const Checkpoint& checkpoint,
                                   const std::string& name, int64_t rows,
                                   int64_t cols) {
  const bool packed = checkpoint.Find(name + ".weight_packed") != nullptr;
  const std::vector<std::string> names = {
      name + (packed ? ".weight_packed" : ".weight"), name + ".weight_scale",
      name + (packed ? ".weight_global_scale" : ".weight_scale_2")};
  if (cols % kSmallGroup != 0) {
    return Uneven(checkpoint, names[0], cols, kSmallGroup);
  }
  const auto pairs = BytesOf(checkpoint, names[0], "U8", {rows, cols / 2});
  if (!pairs.ok()) return pairs.status();
  const auto scales =
      BytesOf(checkpoint, names[1], "F8_E4M3", {rows, cols / kSmallGroup});
  if (!scales.ok()) return scales.status();
  const absl::StatusOr<float> of_all =
      ScaleOfAll(checkpoint, names[2], /*divides=*/packed);
  if (!of_all.ok()) return of_all.status();
  CodeRows result = RowsOf(rows, cols, kSmallGroup, *pairs);
  result.names = names;
  result.scales.reserve(scales->size());
  for (const std::byte scale : *scales) {
    const float value = kernels::FloatFromCode(kernels::DType::kFp8,
                                               static_cast<uint8_t>(scale));
    if (!std::isfinite(value)) {
      return Wrong(checkpoint, names[1], "has a scale that is NaN");
    }
    // Codes stand for twice their numbers.
    result.scales.push_back(value * *of_all / 2);
  }
  return result;
}

bool ScalesAreNear(const CodeRows& codes) {
  // As f16 beside its row's greatest power a scale may be 2^-24 of it.
  constexpr float kLeast = 0x1p-24f;
  const auto groups = static_cast<size_t>(codes.groups());
  for (size_t begin = 0; begin < codes.scales.size(); begin += groups) {
    float least = std::numeric_limits<float>::infinity();
    float most = 0;
    for (size_t i = begin; i < begin + groups; ++i) {
      if (codes.scales[i] == 0) continue;  // zeros stay zeros
      least = std::min(least, codes.scales[i]);
      most = std::max(most, codes.scales[i]);
    }
    if (least < most * kLeast) return false;
  }
  return true;
}

}  // namespace tandem::engine
