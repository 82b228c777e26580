// SPDX-License-Identifier: Apache-2.0
// The kernels as the host calls them: one launch function per operation of
// kernels/backend.h, and the plain structs that they and the kernels share.
// No CUDA type appears here. The functions exist twice, from the same files
// (kernels/cuda/<operation>.cu): compiled by nvcc for libtandem_cuda.so, and
// as plain C++ over the grid emulator for tests.
//
// Each puts its work on the stream and returns what the launch returned: 0,
// or a cudaError_t. All pointers are device memory unless said otherwise;
// sizes of 0 launch nothing. `activation` is kF32, kBF16 or kF16 and the type
// of every `void*` operand.

#ifndef TANDEM_KERNELS_CUDA_LAUNCH_H_
#define TANDEM_KERNELS_CUDA_LAUNCH_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/packed_weights.h"
#include "kernels/route.h"
#include "kernels/types.h"

namespace tandem::kernels::cuda {

// What a launch function returns for types or shapes that it has no kernel
// for (cudaErrorInvalidValue).
inline constexpr int kInvalidLaunch = 1;

// The shared memory that compute capability 8.0 gives a block, and the most
// that a kernel takes which is not for one generation alone (9.0's and 10.0's
// own take more): a device with less cannot run them all.
inline constexpr int kMostSharedBytes = 163 * 1024;

// Where a launch goes.
struct Stream {
  void* handle = nullptr;  // cudaStream_t, or the emulator's own
  int generation = 0;      // compute capability times ten: 80, 90, 100
  int multiprocessors = 0;
  // The last operation on the stream is one of these launches, so that the
  // next may start before it has ended (device/grid.h). Behind anything else
  // (a copy, zeros, an event waited for or recorded) the stream's own order
  // holds, which the programming guide defines between two kernels only.
  bool after_kernel = false;
};

// A KV cache: [layer][block][K, then V][kv_head][slot][head_dim]; of a
// quantised one (two codes of int4 to a byte) each block's codes are followed
// by their scales, [K, then V][kv_head][slot] f32, of int4 [K, then
// V][kv_head][group][slot] bf16.
struct KvView {
  std::byte* data;
  DType dtype;
  int num_blocks;
  int kv_heads;
  int head_dim;
  int block_size;
  // Where layers have other heads, of which so many lie in the place of one
  // (KvShape::other_layers): that place's elements in a block. 0: own_stride().
  int layers_in_one = 1;
  int64_t place = 0;

  // Elements, of a quantised cache bytes, from one (layer, block, side, head,
  // slot) to the next of each; layers_in_one layers are but own_stride apart.
  TANDEM_HOST_DEVICE int slot_stride() const {
    return dtype == DType::kInt4 ? head_dim / 2 : head_dim;
  }
  TANDEM_HOST_DEVICE int64_t head_stride() const {
    return int64_t{block_size} * slot_stride();
  }
  TANDEM_HOST_DEVICE int64_t side_stride() const {
    return head_stride() * kv_heads;
  }
  TANDEM_HOST_DEVICE int64_t own_stride() const {
    return 2 * side_stride() + int64_t{2} * kv_heads * head_scales();
  }
  TANDEM_HOST_DEVICE int64_t block_stride() const {
    return place > 0 ? place : own_stride();
  }
  TANDEM_HOST_DEVICE int64_t layer_stride() const {
    return block_stride() * num_blocks;
  }
  TANDEM_HOST_DEVICE int64_t LayerOffset(int layer) const {
    return layer / layers_in_one * layer_stride() +
           layer % layers_in_one * own_stride();
  }
  // Of dimension 0 of a position; side 0 is K, 1 is V.
  TANDEM_HOST_DEVICE int64_t Offset(int layer, int block, int side, int head,
                                    int slot) const {
    return LayerOffset(layer) + block * block_stride() + side * side_stride() +
           head * head_stride() + int64_t{slot} * slot_stride();
  }
  // Bytes of one head's scales in a block, and from one group's to the next's.
  TANDEM_HOST_DEVICE int64_t head_scales() const {
    return KvScales(dtype, head_dim) * scale_stride();
  }
  TANDEM_HOST_DEVICE int64_t scale_stride() const {
    return int64_t{block_size} * KvScaleBytes(dtype);
  }
  // Bytes, to the first scale of a quantised cache's vector.
  TANDEM_HOST_DEVICE int64_t ScaleOffset(int layer, int block, int side,
                                         int head, int slot) const {
    return LayerOffset(layer) + block * block_stride() + 2 * side_stride() +
           (int64_t{side} * kv_heads + head) * head_scales() +
           int64_t{slot} * KvScaleBytes(dtype);
  }
};

// out [num_rows, cols] = rows of a packed matrix; see kernels::Rows.
struct EmbedParams {
  const std::byte* weights;  // packed [rows, cols]
  const float* scales;       // [rows], of HasRowScales
  const int32_t* token_ids;  // [num_rows]
  const int32_t* fed;        // [num_rows] or null
  const SampleResult* drawn;
  void* out;
  int num_rows;
  int cols;
  float scale = 1;
  const int32_t* positions = nullptr;  // [num_rows], where something is added
  const float* added = nullptr;        // [positions, cols] or null
};
int LaunchEmbed(const Stream& stream, DType activation, WeightType type,
                const EmbedParams& params);

struct RmsNormParams {
  void* x;              // [num_rows, dim], += delta in place
  const void* delta;    // [num_rows, dim] or null
  const float* weight;  // [dim]; null: out = x
  void* out;            // [num_rows, dim], may be x
  int num_rows;
  int dim;
  float eps;
  int64_t stride = 0;  // from row to row of all three; 0: dim
};
int LaunchRmsNorm(const Stream& stream, DType activation,
                  const RmsNormParams& params);

struct LayerNormParams {
  void* x;              // [num_rows, heads, dim], += delta in place
  const void* delta;    // [num_rows, heads, dim] or null
  const float* weight;  // [heads, dim]
  const float* bias;    // [dim] or null
  void* out;            // [num_rows, heads, dim]
  int num_rows;
  int dim;
  float eps;
  int heads = 1;
  int64_t stride = 0;  // from row to row of all three; 0: dim
};
int LaunchLayerNorm(const Stream& stream, DType activation,
                    const LayerNormParams& params);

// x = (x + delta) * scale, in place.
struct AddAndScaleParams {
  const void* delta;  // [num_rows, dim]
  void* x;            // [num_rows, dim]
  int num_rows;
  int dim;
  float scale;
};
int LaunchAddAndScale(const Stream& stream, DType activation,
                      const AddAndScaleParams& params);

// x = activation(x), or that times `by`, in place.
struct ActivateParams {
  void* x;  // [num_rows, dim]
  int num_rows;
  int dim;
  Activation activation;
  const void* by = nullptr;  // [num_rows, dim], by_stride; or null
  int64_t by_stride = 0;     // elements
};
int LaunchActivate(const Stream& stream, DType activation,
                   const ActivateParams& params);

// Backend::Route.
struct RouteParams {
  const float* logits;  // [num_rows, options.logits()]
  float* weights;       // [num_rows, options.weights()]
  int num_rows;
  RouteOptions options;
};
int LaunchRoute(const Stream& stream, const RouteParams& params);

// logits *= scale; then a soft cap, if it is not 0.
struct ScaleLogitsParams {
  float* logits;  // [count, vocab]
  int count;
  int vocab;
  float scale;
  float soft_cap;
};
int LaunchScaleLogits(const Stream& stream, const ScaleLogitsParams& params);

// out = x [tokens, cols] * w^T (+ bias), rounded to the activation type.
enum class MatMulOutput : uint8_t {
  kPlain,
  kWide,   // as f32 (logits)
  kGated,  // activation(gate) * up, rounded once more, of gated rows
};
struct MatMulParams {
  const std::byte* weights;  // packed [rows, cols]
  const float* scales;       // [rows], of HasRowScales
  const void* x;             // [tokens, cols], stride x_stride elements
  const float* bias;         // [rows] or null; gated: [2 * outputs], halves
  void* out;                 // [tokens, outputs], stride out_stride elements
  int64_t x_stride;
  int64_t out_stride;
  int rows;  // packed
  int cols;
  int tokens;
  int outputs;  // rows; gated: rows = PackedRows(2 * outputs, kGated)
  MatMulOutput output = MatMulOutput::kPlain;
  Activation activation = Activation::kSilu;  // gated

  TANDEM_HOST_DEVICE bool gated() const {
    return output == MatMulOutput::kGated;
  }
};
int LaunchMatMul(const Stream& stream, DType activation, WeightType type,
                 const MatMulParams& params);

// Backend::MatMulHeads.
struct MatMulHeadsParams {
  const std::byte* weights;  // packed [heads * HeadRows(outputs), cols]
  const void* x;             // [tokens, heads, cols]
  void* out;                 // [tokens, heads, outputs]
  int heads;
  int outputs;  // of a head, a multiple of 8
  int cols;     // likewise
  int tokens;
};
int LaunchMatMulHeads(const Stream& stream, DType activation, WeightType type,
                      const MatMulHeadsParams& params);

// Rows of activations as products with weights of HasIntegerProducts take them,
// columns padded to whole blocks of weights. Tokens and columns that are not
// there are zeros.
//
//   int8, int4  quantised in groups of kCodeGroup inputs: for each kCodeTokens
//               tokens and group a record of [8 tokens][32] codes and [8] f32
//               scales
//   W8A8        each token as a whole: for each kCodeTokens tokens
//               [group][8 tokens][32] codes, then [8] f32 scales
inline constexpr int kCodeTokens = 8;
inline constexpr int kCodeScaleBytes = kCodeTokens * 4;
inline constexpr int kCodeRecordBytes =
    kCodeTokens * kCodeGroup + kCodeScaleBytes;
// Of kCodeTokens tokens as W8A8 takes them.
TANDEM_HOST_DEVICE constexpr int64_t WholeCodeRowsBytes(int cols) {
  return int64_t{WeightBlocks(cols)} * kWeightBlock * kCodeTokens +
         kCodeScaleBytes;
}
// Of either; W8A8, with fewer scales, leaves some of it.
constexpr int64_t CodeRowsBytes(int tokens, int cols) {
  return int64_t{(tokens + kCodeTokens - 1) / kCodeTokens} *
         WeightBlocks(cols) * kGroupsPerBlock * kCodeRecordBytes;
}
struct ExpertMatrix;
struct ExpertTile;
struct QuantiseRowsParams {
  const void* x;   // [tokens, cols], stride x_stride elements
  std::byte* out;  // CodeRowsBytes
  int64_t x_stride;
  int tokens;
  int cols;
  bool whole = false;  // as W8A8 takes them
  // Column i is of input order[i], [cols]; null: i. Not of `whole`.
  const int32_t* order = nullptr;
  // Not null: instead of that, of each tile of copies its expert's.
  const ExpertMatrix* matrices = nullptr;  // [experts]
  const ExpertTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
};
int LaunchQuantiseRows(const Stream& stream, DType activation,
                       const QuantiseRowsParams& params);
// LaunchMatMul with weights of HasIntegerProducts; params.x is what
// LaunchQuantiseRows made of the tokens.
int LaunchMatMulCodes(const Stream& stream, DType activation, WeightType type,
                      const MatMulParams& params);

// ---- Many experts, of which each row takes a few (experts.cuh), with copies
// of rows as kernels/experts.h has them.
TANDEM_HOST_DEVICE constexpr int AlignedExpertRows(int rows) {
  return (rows + 7) / 8 * 8;
}
// Most tiles of `tile_rows` copies of one expert.
constexpr int64_t MostExpertTiles(int num_rows, int experts, int chosen,
                                  int tile_rows) {
  const int64_t places = int64_t{num_rows} * chosen;
  return (places < experts ? places : experts) + places / tile_rows;
}
// Copied rows from `begin` on of one expert, whose last is before `end`.
struct ExpertTile {
  int32_t expert;
  int32_t begin;
  int32_t end;
};
struct ExpertPlanParams {
  const float* weights;  // [num_rows, columns], Backend::Route's
  int32_t* counts;       // [experts]: rows of each
  // Of each row's experts, ascending: where its copy is, and the weight. -1:
  // it has no more.
  int32_t* places;     // [num_rows, chosen]
  float* shares;       // [num_rows, chosen]
  ExpertTile* tiles;   // [MostExpertTiles]
  int32_t* num_tiles;  // of them
  int num_rows;
  int experts;
  int chosen;
  int tile_rows;
  int columns;
};
int LaunchExpertPlan(const Stream& stream, const ExpertPlanParams& params);

// out[places[i]] = x[i / chosen].
struct SpreadRowsParams {
  const void* x;          // [num_rows, dim]
  const int32_t* places;  // [num_rows, chosen]
  void* out;              // [MostExpertRows, dim]
  int num_rows;
  int chosen;
  int dim;
};
int LaunchSpreadRows(const Stream& stream, DType activation,
                     const SpreadRowsParams& params);

// out[r] = the sum of shares[i] * y[places[i]], i of r, rounded at each, from
// zero or from out[r] times its weight, rounded.
struct SumExpertsParams {
  const void* y;  // [MostExpertRows, dim]
  const int32_t* places;
  const float* shares;
  void* out;  // [num_rows, dim]
  int num_rows;
  int chosen;
  int dim;
  const float* weights;  // [num_rows, columns], out's the last; null: from zero
  int columns;
};
int LaunchSumExperts(const Stream& stream, DType activation,
                     const SumExpertsParams& params);

// LaunchMatMul, or with weights of HasIntegerProducts LaunchMatMulCodes, of
// each tile with its expert's matrix.
struct ExpertMatrix {
  const std::byte* weights;
  const float* scales;
  const int32_t* order;  // of inputs, or null
};
struct ExpertProductParams {
  MatMulParams product;          // without weights, scales and bias
  const ExpertMatrix* matrices;  // [experts]
  const ExpertTile* tiles;       // of ExpertTileRows
  const int32_t* num_tiles;
  int most_tiles;
};
int LaunchExpertProduct(const Stream& stream, DType activation, WeightType type,
                        int tile_rows, const ExpertProductParams& params);
// LaunchExpertProduct has tiles of 8, 32 and 128 rows, for f32 models of 8.
// This one has a tile for most experts and not much more than that: an
// expert's matrix is read once for each of its tiles.
constexpr int ExpertTileRows(DType activation, int num_rows, int experts,
                             int chosen) {
  if (activation == DType::kF32 || num_rows <= 8) return 8;
  const int64_t copies = int64_t{num_rows} * chosen;
  return copies <= int64_t{4} * experts    ? 8
         : copies <= int64_t{48} * experts ? 32
                                           : 128;
}

// Backend::GateHalves of what a plain product with a gated matrix gives: its
// packed rows, groups of eight gates and the eight that they open.
struct GateHalvesParams {
  const void* halves;  // [num_rows, PackedRows(2 * dim, kGated)]
  void* out;           // [num_rows, dim]
  int num_rows;
  int dim;
  Activation activation;
};
int LaunchGateHalves(const Stream& stream, DType activation,
                     const GateHalvesParams& params);

// Backend::AddLora. Halves as GateHalvesParams has them.
struct LoraParams {
  const void* x;         // [num_rows, factors.cols]
  const int32_t* slots;  // [num_rows]; negative: none
  LoraFactors factors;
  LoraSum sum;
  int num_rows;
};
int LaunchLora(const Stream& stream, DType activation,
               const LoraParams& params);

// Norms heads of Q and K and rotates them; Q stays, K and V go to the cache.
struct RopeAppendParams {
  const int32_t* positions;  // [num_rows]
  const int32_t* slots;      // [num_rows] block * block_size + offset
  const float* cos;          // [positions, pairs]; null: no rotation
  const float* sin;
  int pairs;  // of a head that turn, the first ones
  void* qkv;  // [num_rows, (heads + 2 kv_heads) * head_dim]
  KvView kv;
  int num_rows;
  int heads;
  int layer;
  const float* query_norm = nullptr;  // [head_dim]; null: no norms
  const float* key_norm = nullptr;    // [head_dim]
  const float* value_norm = nullptr;  // [head_dim]; null: V is not normed
  float norm_eps = 0;
  bool norms_rotated = false;          // as HeadNorms has it
  const float* query_scale = nullptr;  // [positions]; null: none
  // [num_rows, 2 kv_heads * head_dim], K and V; qkv is Q alone then. Null: none
  void* kv_rows = nullptr;
};
// Without KV heads nothing is appended.
int LaunchRopeAppend(const Stream& stream, DType activation,
                     const RopeAppendParams& params);

// What segments of split contexts leave for their merge takes at most this, or
// what one span needs: launches are cut so that it suffices.
inline constexpr size_t kAttentionPartialBytes = size_t{256} << 20;

// Causal attention of each row over positions 0 .. its own.
struct AttentionParams {
  const RowSpan* spans;         // [num_spans]
  const int32_t* block_tables;  // as RowSpan::block_table indexes them
  const void* q;                // [num_rows, heads * head_dim], q_stride
  void* out;                    // [num_rows, heads * head_dim]
  void* scratch;  // AttentionScratchBytes, zeros at first and after each call
  KvView kv;
  int64_t q_stride;  // elements
  float scale;
  int num_rows;
  int num_spans;
  int heads;
  int layer;
  // Bounds that grids are made for; a span may have less, so that a captured
  // launch serves many steps. With max_span_rows 1 all spans are decodes.
  int max_span_rows;
  int max_positions;
  int window = 0;      // positions seen, the row's own included; 0: all
  float soft_cap = 0;  // of scores; 0: none
  const float* sinks = nullptr;  // [heads], Backend::Attention's
  size_t partial_bytes = kAttentionPartialBytes;  // less in tests
};
size_t AttentionScratchBytes(int spans, int heads, int head_dim, int positions);
int LaunchAttention(const Stream& stream, DType activation,
                    const AttentionParams& params);

// Backend::AttentionWeights, of one row.
struct AttentionWeightsParams {
  const int32_t* block_table;  // the sequence's
  const void* q;               // [heads, head_dim], the row's
  float* states;               // [heads, 2], overwritten
  float* out;                  // [position + 1]
  KvView kv;
  float scale;
  float factor;
  int position;
  int heads;
  int layer;
  bool add;
  int window = 0;
  float soft_cap = 0;
  const float* sinks = nullptr;  // [heads]
};
int LaunchAttentionWeights(const Stream& stream, DType activation,
                           const AttentionWeightsParams& params);

// out[i] = x[row_ids[i]], rows of dim elements.
struct GatherRowsParams {
  const int32_t* row_ids;  // [count]
  const void* x;
  void* out;
  int count;
  int dim;
};
int LaunchGatherRows(const Stream& stream, DType activation,
                     const GatherRowsParams& params);

// kernels/sampling.h says what is drawn.
struct SampleKernelParams {
  float* logits;               // [count, vocab]; afterwards as before
  const SampleParams* params;  // [count]
  LogitEdit* edits;            // of all rows; overwritten
  const uint32_t* masks;       // [as params name them, MaskWords(vocab)]
  SampleResult* results;       // [count]
  void* scratch;               // SampleScratchBytes
  int count;
  int vocab;
};
size_t SampleScratchBytes(int count, int vocab);
int LaunchSample(const Stream& stream, const SampleKernelParams& params);

// ---- KV for handoffs. Block tables travel with the launch; the caller cuts
// longer ranges.
inline constexpr int kKvBlocksPerLaunch = 512;

struct KvSliceParams {
  KvView kv;
  // Memory that the device can reach: its own, or registered host memory.
  // [layers][positions] rows (KvRowBytes); that of (layer_begin,
  // position_begin) comes first. Layers are layer_stride bytes
  // apart: a launch may be a part of a longer slice.
  std::byte* staging;
  int64_t layer_stride;
  DType wire;
  uint64_t digest_key;
  KvDigest* digest;  // += that of the slice; null: none wanted
  int position_begin;
  int position_end;
  int layer_begin;
  int layer_end;
  int head_begin;
  int head_end;
  int layer_shift;  // KvRange's
  // blocks[i] holds positions [(first + i) * block_size, ...) where
  // first = position_begin / block_size.
  int32_t blocks[kKvBlocksPerLaunch];
};
// `staging` null: the digest alone.
int LaunchKvGather(const Stream& stream, const KvSliceParams& params);
int LaunchKvScatter(const Stream& stream, const KvSliceParams& params);

struct KvCopyBlockParams {
  KvView kv;
  int num_layers;
  int from_block;
  int to_block;
};
int LaunchKvCopyBlock(const Stream& stream, const KvCopyBlockParams& params);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_LAUNCH_H_
