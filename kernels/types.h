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

// kFp8 (e4m3), kInt8, kInt4 and kW8A8 are codes that mean nothing without a
// scale: one for each vector of a KV cache, of kInt4 for each group of its
// elements; one for each row of a weight matrix in kFp8 and kW8A8, for each
// group of inputs in kInt8 and kInt4. kernels/quantise.h says how they are
// found. Two of kInt4 share a byte. kW8A8 is of weights alone: int8 that meets
// activations with one scale for each token, where kInt8 meets groups.
enum class DType : uint8_t { kF32, kBF16, kF16, kFp8, kInt8, kInt4, kW8A8 };

constexpr bool IsQuantised(DType type) {
  return type == DType::kFp8 || type == DType::kInt8 || type == DType::kInt4 ||
         type == DType::kW8A8;
}
// Of weights: whether products multiply codes with quantised activations, as
// integers.
constexpr bool HasIntegerProducts(DType type) {
  return type == DType::kInt8 || type == DType::kInt4 || type == DType::kW8A8;
}
// Of an element; a code's scale is not in it. Of kInt4 where it has a byte of
// its own: outside of matrices and KV caches.
constexpr size_t SizeOf(DType type) {
  return type == DType::kF32 ? 4 : IsQuantised(type) ? 1 : 2;
}
constexpr std::string_view Name(DType type) {
  switch (type) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kFp8:
      return "fp8";
    case DType::kInt8:
      return "int8";
    case DType::kInt4:
      return "int4";
    case DType::kW8A8:
      break;
  }
  return "w8a8";
}

// Elements that share a scale in vectors of kInt4 and inputs that do in
// matrices of kInt8 and kInt4.
inline constexpr int kCodeGroup = 32;

// Most inputs of a matrix of kW8A8: its sums are 32 bits wide.
inline constexpr int kMaxW8A8Inputs = 1 << 17;

// Of a KV cache: latent attention's 512 numbers and the 64 that turn.
inline constexpr int kMaxHeadDim = 576;

// One vector of a KV cache, K or V of a head at a position: its elements (of
// kInt4 element 2i in the low half of byte i, 2i + 1 in the high one) and, of a
// quantised one, its scales: an f32, or of kInt4 a bf16 for each kCodeGroup
// elements, of which the last may be fewer.
constexpr int64_t KvElementBytes(DType type, int64_t count) {
  return type == DType::kInt4 ? count / 2
                              : count * static_cast<int64_t>(SizeOf(type));
}
constexpr int KvScales(DType type, int head_dim) {
  return type == DType::kInt4 ? (head_dim + kCodeGroup - 1) / kCodeGroup
                              : (IsQuantised(type) ? 1 : 0);
}
constexpr int KvScaleBytes(DType type) {
  return type == DType::kInt4 ? 2 : IsQuantised(type) ? 4 : 0;
}
constexpr int64_t KvVectorBytes(DType type, int head_dim) {
  return KvElementBytes(type, head_dim) +
         int64_t{KvScales(type, head_dim)} * KvScaleBytes(type);
}
// One position of one layer on the wire: K of `heads` heads, then V of them,
// as elements; of a quantised type then their scales in the same order, and
// zeros up to a multiple of 16 bytes (which the others are).
constexpr int64_t KvRowBytes(DType type, int heads, int head_dim) {
  const int64_t bytes = int64_t{2} * heads * KvVectorBytes(type, head_dim);
  return IsQuantised(type) ? (bytes + 15) / 16 * 16 : bytes;
}

// A row-major matrix (or, with rows = 1, a vector) in host memory that the
// caller keeps: typically a mapped checkpoint. May be unaligned.
struct HostTensor {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
};

// A matrix that was quantised before, in host memory that the caller keeps:
// element (row, col) is (code - zero) * scale.
struct HostCodes {
  // kInt8, kW8A8: two's complement; kInt4: 0 .. 15, one to a byte; kFp8: e4m3.
  DType dtype = DType::kInt8;
  int64_t rows = 0;
  int64_t cols = 0;
  const uint8_t* codes = nullptr;  // [rows, cols]
  // Inputs that share a scale: cols, or (kInt8, kInt4) a multiple of
  // kCodeGroup.
  int64_t group = 0;
  const float* scales = nullptr;   // [rows, ceil(cols / group)]
  const uint8_t* zeros = nullptr;  // as scales, kInt4 alone; null: 8
  // kInt4 without zeros: codes are e2m1 (a sign, two bits of exponent, one of
  // mantissa), and an element is twice that number, times the scale.
  bool e2m1 = false;
  // Of kInt8 and kInt4: [cols], each input once. Column i is of input order[i],
  // so that groups are of neighbours (GPTQ's act-order). Null: of input i; that
  // is what Backend::Embed requires.
  const int32_t* order = nullptr;
};

// Of a feed-forward layer. GELU is its tanh approximation (Hendrycks and
// Gimpel, 2016): x / (1 + exp(-x * (1.5957691 + 0.0713548 * x * x))).
// kClampedSwiGlu, of layers with gates alone, is gpt-oss's: of the gate and of
// what it opens, both cut at kSwiGluLimit, the latter at its negative too,
// gate / (1 + exp(-1.702 * gate)) * (up + 1).
// The last two are of layers without gates alone: x times the normal
// distribution's share below x, and the square of what of x is positive.
enum class Activation : uint8_t {
  kSilu,
  kGeluTanh,
  kClampedSwiGlu,
  kGelu,
  kRelu2
};
inline constexpr float kSwiGluLimit = 7;
inline constexpr float kSwiGluAlpha = 1.702f;

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

// The low-rank factors of one product (LoRA: Hu et al., 2021) of several
// adapters, each in a slot: A [rank, cols] and B [rows, rank], transposed, so
// that threads side by side read side by side. Device memory; what is of slot s
// lies s * slot_stride elements of 4 bytes behind what is of slot 0.
struct LoraFactors {
  const float* a = nullptr;       // [cols, rank]
  const float* b = nullptr;       // [rank, rows]
  const int32_t* rank = nullptr;  // at most max_rank; 0: nothing is added
  const float* scale = nullptr;
  int64_t slot_stride = 0;
  int max_rank = 0;
  int cols = 0;
  int rows = 0;
};

// Where AddLora adds: output o of the factors to element first + o of a row.
struct LoraSum {
  void* out = nullptr;
  int64_t stride = 0;  // elements from row to row
  int first = 0;
  // Not 0: out is what MatMulHalves gives for a matrix of twice as many rows,
  // and `stride` is not looked at.
  int halves = 0;
  float* scratch = nullptr;  // [num_rows, max_rank]
};

// A in AddLora is summed in pieces of so many inputs, cut at absolute multiples
// of it. Part of the numerics.
inline constexpr int kLoraSegment = 256;

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

// What becomes of one id's logit before a token is drawn: see
// kernels/sampling.h.
struct LogitEdit {
  int32_t token_id = 0;
  float bias = 0;        // -inf: the id may not be drawn
  float repetition = 1;  // above 0
  float penalty = 0;
};

// How one row's next token is chosen. Device memory, one per sampled row.
struct SampleParams {
  float temperature = 0;  // 0: greedy, ties to the lowest id
  float top_p = 1;
  float min_p = 0;
  float typical_p = 1;
  int32_t top_k = 0;  // 0: all
  uint64_t seed = 0;
  uint32_t sequence_index = 0;
  int32_t position = 0;   // of the token to be drawn
  int32_t logprobs = -1;  // -1: none; n: that of the chosen one and n others
  // The row's own edits: Sample's edits [first_edit, first_edit + num_edits),
  // of different ids below the vocabulary size.
  int32_t first_edit = 0;
  int32_t num_edits = 0;
  // Not 0: only ids that have an edit may be drawn. Then they must ascend.
  int32_t only_edited = 0;
  // Not negative: nothing is drawn, the token is this one.
  int32_t given = -1;
  // Not 0: nothing is drawn. Log probabilities are those that the edits make of
  // the model's, and the token is the most probable one. logprobs is above 0.
  int32_t edited_logprobs = 0;
  // Not negative: of Sample's masks the one that names the ids that may be
  // drawn: id i by bit i % 32 of word i / 32.
  int32_t mask = -1;
};

// Of one mask.
constexpr int MaskWords(int vocab) { return (vocab + 31) / 32; }

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
