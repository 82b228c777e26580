// SPDX-License-Identifier: Apache-2.0
// Plain data that host and device code share: element types and host tensors,
// what checkpoints hold and what backends take; and what operations of
// backend.h read and write in device memory. Includes nothing that a device
// compiler would have to skip.

#ifndef TANDEM_KERNELS_TYPES_H_
#define TANDEM_KERNELS_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem::kernels {

enum class DType : uint8_t { kF32, kBF16, kF16 };

constexpr size_t SizeOf(DType type) { return type == DType::kF32 ? 4 : 2; }
constexpr std::string_view Name(DType type) {
  return type == DType::kF32 ? "f32" : type == DType::kBF16 ? "bf16" : "f16";
}

// A row-major matrix (or, with rows = 1, a vector) in host memory that the
// caller keeps: typically a mapped checkpoint. May be unaligned.
struct HostTensor {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
};

// Keys are cut here: a segment's partial softmax is finished before the next
// one's is merged in. Part of the numerics fingerprint.
inline constexpr int kAttentionSegment = 512;

// Most alternatives that Sample reports per row.
inline constexpr int kMaxTopLogprobs = 20;

// One sequence's rows within a step: consecutive positions.
struct RowSpan {
  int32_t first_row;  // in the step's row arrays
  int32_t num_rows;
  int32_t first_position;  // of first_row; the rest ascend by one
  int32_t block_table;     // offset of its block table in Rows::block_tables
};

// A 128-bit digest of KV bytes that adds up: the digest of a range is the sum
// (each half modulo 2^64) over its (layer, position) rows, so slices may be
// digested in any order. kernels/kv_digest.h has the definition.
struct KvDigest {
  uint64_t low = 0;
  uint64_t high = 0;

  KvDigest& operator+=(const KvDigest& other) {
    low += other.low;
    high += other.high;
    return *this;
  }
  bool operator==(const KvDigest&) const = default;
};

// How one row's next token is chosen. Device memory, one per sampled row.
struct SampleParams {
  float temperature = 0;  // 0: greedy, ties to the lowest id
  float top_p = 1;
  float min_p = 0;
  int32_t top_k = 0;  // 0: all
  uint64_t seed = 0;
  uint32_t sequence_index = 0;
  int32_t position = 0;   // of the token to be drawn
  int32_t logprobs = -1;  // -1: none; n: that of the chosen one and n others
  int32_t min_tokens_left = 0;  // > 0: banned_ids may not be drawn
};

// What Sample writes per row.
struct SampleResult {
  int32_t token_id;
  float logprob;  // natural log, before temperature and filters
  int32_t rank;   // 1 is the most probable
  int32_t num_top;
  int32_t top_ids[kMaxTopLogprobs];
  float top_logprobs[kMaxTopLogprobs];
};

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_TYPES_H_
