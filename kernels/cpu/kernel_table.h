// SPDX-License-Identifier: Apache-2.0
// The arithmetic, one table of functions per instruction set. Functions here
// run on one thread, allocate nothing and decide nothing about threads;
// cpu_backend.cc, products.cc and attention_plan.cc choose and split.
//
// What Highway cannot express (integer dot products with VNNI and AMX) is
// assembly in a kernel that is otherwise the same; MakeKernelTable asks the CPU
// which one the table gets.

#ifndef TANDEM_KERNELS_CPU_KERNEL_TABLE_H_
#define TANDEM_KERNELS_CPU_KERNEL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/code_matrix.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/kv_layout.h"

namespace tandem::kernels::cpu {

enum class Isa { kAvx2, kAvx512 };

constexpr std::string_view Name(Isa isa) {
  return isa == Isa::kAvx2 ? "avx2" : "avx512";
}

// How integer dot products are computed.
enum class Dot { kMultiplyAdd, kVnni, kAmx };

// How this CPU's memory is read: so many panels of a matrix are fetched side by
// side; to the first-level cache, or (`far`) to the second one. Intel's memory
// gives its bandwidth to several streams. On Zen 5 one, in the order of memory,
// takes 0.85 of the time of four at 4 to 16 rows, and Zen 4's first-level cache
// waits for so few lines that decode attention takes 1.5 times as long if they
// are fetched there.
struct Fetching {
  int streams;
  bool far;
};
inline constexpr int kMaxStreams = 4;
inline constexpr Fetching kIntelFetching = {kMaxStreams, false};
inline constexpr Fetching kAmdFetching = {1, true};

// A piece of out [rows, n] = x [rows, k] * w^T + bias: outputs of panels
// [panel_begin, panel_end) for rows [row_begin, row_end).
struct MatMulPiece {
  const float* x;       // [rows, k], x_stride apart
  const std::byte* w;   // packed_matrix.h
  const float* scales;  // [n] or null: what finished chains are multiplied by
  const float* bias;    // [n] or null; added last
  float* out;           // [rows, n], out_stride apart
  int64_t x_stride;     // floats
  int64_t out_stride;
  int k;
  int n;
  DType type;
  int panel_begin;
  int panel_end;
  int row_begin;
  int row_end;
  Fetching fetching;
  std::byte* scratch;  // kMatMulScratchBytes, 64-byte aligned
  // Of integer products alone (code_matrix.h), instead of x.
  CodeKind kind;
  const RowPiece* codes;  // [RowPieces(k)][rows]
  int rows;               // of `codes`
};
inline constexpr size_t kMatMulScratchBytes = size_t{4} << 20;

// Running softmax of one query: weights relative to exp(maximum), their sum,
// and (elsewhere) the weighted sum of V. Segments are merged in order.
struct SoftmaxState {
  float maximum;
  float sum;
};

// Queries of one KV head of one sequence: `rows` consecutive rows times
// `group` query heads that share it; query i = row i / group, head i % group.
inline constexpr int kMaxQueries = 36;
inline constexpr int kMaxBlockSize = 256;

struct AttentionPiece {
  const float* q;    // first row's first head
  int64_t q_stride;  // floats from row to row
  int rows;
  int group;           // rows * group <= kMaxQueries
  int first_position;  // of the first row
  int kv_head;
  float scale;
  float soft_cap;
  int window;          // positions seen; at most 2^30
  const float* sinks;  // [group]; null: none
  const KvLayout* layout;
  const std::byte* layer;      // of the cache
  const int32_t* block_table;  // of the sequence
  int segment_begin;
  int segment_end;
  // Either the finished sums of every query go to `out` ...
  float* out;  // first row's first head
  int64_t out_stride;
  // ... or each segment's own go here: [segments][rows * group] states and
  // [segments][rows * group][width] sums.
  SoftmaxState* partial_states;
  float* partial_sums;
  bool far;            // Fetching's
  std::byte* scratch;  // kAttentionScratchBytes
};
inline constexpr size_t kAttentionScratchBytes = size_t{512} << 10;

// The first key that a query at `position` sees.
constexpr int FirstKey(int position, int window) {
  return position < window ? 0 : position - window + 1;
}

// What MergeSegments folds: one query's partials, `stride` queries apart.
struct MergePiece {
  const SoftmaxState* states;
  const float* sums;
  int segments;
  int stride;
  int head_dim;
  int width;
  const float* sink;  // null: none
  float* out;         // [head_dim]
};

struct SamplePiece {
  float* logits;  // [vocab]; afterwards as before
  int vocab;
  const SampleParams* params;
  const LogitEdit* edits;  // of all rows
  const uint32_t* masks;   // likewise
  SampleResult* result;
  std::byte* scratch;  // kSampleScratchBytes
};
inline constexpr int kMaxVocab = 1 << 20;
inline constexpr size_t kSampleScratchBytes =
    size_t{kMaxVocab} * 16 + (size_t{1} << 20);

struct RopePiece {
  float* query;  // of one row
  float* kv;     // K, then V
  int heads;
  int kv_heads;
  int head_dim;
  int pairs;         // that turn
  const float* cos;  // [pairs]; null: no rotation
  const float* sin;
  float query_scale;
  HeadNorms norms;
  const KvLayout* layout;
  std::byte* block;
  int slot;
};

// Rows of KV on the wire, and where their positions lie: side by side in one
// block.
struct KvRowsPiece {
  const KvLayout* layout;
  std::byte* block;
  int slot;  // of the first row
  int rows;
  int head_begin;
  int head_end;
  DType wire;
  std::byte* row;  // [rows][row_bytes]
  int64_t row_bytes;
};

struct KernelTable {
  Isa isa;
  Dot dot;
  Fetching fetching;
  CpuInputs inputs;
  bool pairs;  // whether kBf16 takes them by vdpbf16ps
  void (*matmul)(const MatMulPiece& piece);
  void (*matmul_codes)(const MatMulPiece& piece);
  // codes[i * stride], i < RowPieces(k) = one row, quantised.
  void (*quantise_row)(const float* x, int k, RowPiece* codes, int64_t stride);
  // The same for W8A8.
  void (*quantise_whole_row)(const float* x, int k, RowPiece* codes,
                             int64_t stride);
  void (*attention)(const AttentionPiece& piece);
  void (*attention_int8)(const AttentionPiece& piece);  // of such a cache
  void (*merge_segments)(const MergePiece& piece);
  void (*sample)(const SamplePiece& piece);
  void (*rope_append)(const RopePiece& piece);
  // One row of each.
  void (*rms_norm)(int dim, float eps, float* x, const float* delta,
                   const float* weight, float* out);
  void (*layer_norm)(int dim, float eps, float* x, const float* delta,
                     const float* weight, const float* bias, float* out);
  void (*gate)(Activation activation, int dim, const float* gate,
               const float* up, float* out);
  void (*activate)(Activation activation, int dim, float* x);
  // x = activation(x) * by.
  void (*activate_times)(Activation activation, int dim, const float* by,
                         float* x);
  // One row of Backend::Route.
  void (*route)(const RouteOptions& options, const float* logits,
                float* weights);
  // out += weight * x.
  void (*add_weighted)(int dim, float weight, const float* x, float* out);
  // One row of Backend::AddLora: h [rank] of x [cols], and out [rows] += of h.
  void (*lora_shrink)(int cols, int rank, const float* a, const float* x,
                      float* h);
  void (*lora_expand)(int rank, int rows, const float* b, const float* h,
                      float scale, float* out);
  // soft_cap 0: none.
  void (*scale)(int dim, float scale, float soft_cap, float* x);
  void (*add_and_scale)(int dim, float scale, const float* delta, float* x);
  // out[i] = exp(x[i]) as attention and sampling compute it. For tests.
  void (*exp)(int count, const float* x, float* out);
  // Block to wire, and back.
  void (*read_kv_rows)(const KvRowsPiece& piece);
  void (*write_kv_rows)(const KvRowsPiece& piece);
  // kv_digest.h's sum over one row's words.
  KvDigest (*digest_row)(const uint32_t* words, int count,
                         const uint32_t* low_keys, const uint32_t* high_keys,
                         uint64_t key, int layer, int position);
};

// By name: avx2, avx512, avx512vnni, avx512bf16 or amx, each of which includes
// those before it; "auto" takes the best one. FAILED_PRECONDITION where this
// CPU lacks it.
absl::StatusOr<KernelTable> MakeKernelTable(std::string_view instruction_set,
                                            CpuInputs inputs = CpuInputs::kF32);

// Filled in by one file each.
void AddMatMul(KernelTable& table);
void AddMatMulCodes(KernelTable& table);
void AddAttention(KernelTable& table);
void AddAttentionInt8(KernelTable& table);
void AddSample(KernelTable& table);
void AddElementwise(KernelTable& table);
void AddKvRows(KernelTable& table);
void AddLoraRows(KernelTable& table);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_KERNEL_TABLE_H_
