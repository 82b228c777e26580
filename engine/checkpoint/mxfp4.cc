// SPDX-License-Identifier: Apache-2.0
// MXFP4 (Open Compute Project, Microscaling Formats 1.0, sections 5.1 to 5.3):
// 32 neighbours share a power of two, each is an e2m1.

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "engine/checkpoint/quantisation.h"

namespace tandem::engine {
namespace {

constexpr int64_t kGroup = kernels::kCodeGroup;
constexpr int kBlockBytes = kGroup / 2;

// Of matrix `index` of `shape[0]` in a tensor of bytes of this shape.
absl::StatusOr<absl::Span<const std::byte>> BytesOf(
    const Checkpoint& checkpoint, const std::string& name, int64_t index,
    const std::vector<int64_t>& shape) {
  const TensorInfo* const tensor = checkpoint.Find(name);
  if (tensor == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        checkpoint.main_path(), ": tensor ", Quote(name), " is missing"));
  }
  if (tensor->dtype != "U8" || tensor->shape != shape) {
    return absl::InvalidArgumentError(absl::StrCat(
        checkpoint.path(*tensor), ": tensor ", Quote(name), " is ",
        std::string(tensor->dtype), " [", absl::StrJoin(tensor->shape, ", "),
        "], but config.json asks for U8 [", absl::StrJoin(shape, ", "), "]"));
  }
  const absl::Span<const std::byte> all = checkpoint.bytes(*tensor);
  const size_t each = all.size() / static_cast<size_t>(shape[0]);
  return all.subspan(static_cast<size_t>(index) * each, each);
}

}  // namespace

bool IsMxfp4(const Checkpoint& checkpoint, const std::string& name) {
  return checkpoint.Find(name + "_blocks") != nullptr;
}

absl::StatusOr<CodeRows> ReadMxfp4(const Checkpoint& checkpoint,
                                   const std::string& name, int64_t count,
                                   int64_t index, int64_t rows, int64_t cols) {
  if (cols % kGroup != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        checkpoint.main_path(), ": tensor ", Quote(name + "_blocks"), ": ",
        cols, " inputs are no multiple of 32, as MXFP4 has them"));
  }
  const int64_t groups = cols / kGroup;
  const auto blocks = BytesOf(checkpoint, name + "_blocks", index,
                              {count, rows, groups, kBlockBytes});
  if (!blocks.ok()) return blocks.status();
  const auto scales =
      BytesOf(checkpoint, name + "_scales", index, {count, rows, groups});
  if (!scales.ok()) return scales.status();
  CodeRows result;
  result.dtype = kernels::DType::kInt4;
  result.e2m1 = true;
  result.rows = rows;
  result.cols = cols;
  result.group = kGroup;
  result.codes.resize(2 * blocks->size());
  uint8_t* code = result.codes.data();
  for (const std::byte pair : *blocks) {
    const auto bits = static_cast<unsigned>(pair);
    *code++ = static_cast<uint8_t>(bits & 0xf);
    *code++ = static_cast<uint8_t>(bits >> 4);
  }
  result.scales.reserve(scales->size());
  for (const std::byte scale : *scales) {
    const int exponent = static_cast<int>(scale);
    if (exponent == 255) {
      return absl::InvalidArgumentError(
          absl::StrCat(checkpoint.main_path(), ": tensor ",
                       Quote(name + "_scales"), " has a scale that is NaN"));
    }
    // Codes stand for twice their numbers.
    result.scales.push_back(std::ldexp(1.0f, exponent - 128));
  }
  return result;
}

bool ScalesAreNear(const CodeRows& codes) {
  // As f16 beside its row's greatest power a scale may be 2^-24 of it.
  constexpr float kLeast = 0x1p-24f;
  const auto groups = static_cast<size_t>(codes.groups());
  for (size_t begin = 0; begin < codes.scales.size(); begin += groups) {
    float least = codes.scales[begin];
    float most = least;
    for (size_t i = begin; i < begin + groups; ++i) {
      least = std::min(least, codes.scales[i]);
      most = std::max(most, codes.scales[i]);
    }
    if (least < most * kLeast) return false;
  }
  return true;
}

}  // namespace tandem::engine
