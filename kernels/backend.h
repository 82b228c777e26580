// SPDX-License-Identifier: Apache-2.0
// The one interface of tensor operations. engine/ is written against it and
// knows no device; kernels/cpu/ and kernels/cuda/ implement it.
//
// Memory and time. All pointers in operation arguments are device pointers
// (Buffer::data()); on a GPU the host cannot read them. Operations are put on
// a Queue, run in its order after the call returned, allocate nothing and
// return nothing to the host: results are fetched with CopyToHost and seen
// after a Callback on the same queue ran. Whatever an argument points to
// (device memory, and host memory where an argument says so) must live until
// then.
//
// Numerics (DESIGN.md section 8, rule 7). Activations are of the backend's
// activation_type(): f32 on a CPU, else the type that the device's matrix
// units take; the engine only sizes and passes them on. Each output of a
// product is one chain of fused multiply-adds over its inputs in ascending
// order (of int8, int4 and W8A8 matrices what kernels/quantise.h says), rounded
// to that type; attention sums keys in ascending position, cut
// at absolute multiples of kAttentionSegment and merged in ascending order. No
// result depends on the batch, the chunking, the thread count or the
// instruction set. Denormals are flushed to zero.

#ifndef TANDEM_KERNELS_BACKEND_H_
#define TANDEM_KERNELS_BACKEND_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/route.h"
#include "kernels/types.h"

namespace tandem::kernels {

// Owns device memory; frees it on destruction. REQUIRES then: no queued
// operation uses it any more.
class Buffer {
 public:
  virtual ~Buffer() = default;
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 protected:
  Buffer(std::byte* data, size_t size) : data_(data), size_(size) {}

 private:
  std::byte* const data_;
  const size_t size_;
};

// A weight matrix [rows = outputs, cols = inputs] in the backend's own layout.
class Matrix {
 public:
  virtual ~Matrix() = default;
  int rows() const { return rows_; }
  int cols() const { return cols_; }
  DType dtype() const { return dtype_; }

 protected:
  Matrix(int rows, int cols, DType dtype)
      : rows_(rows), cols_(cols), dtype_(dtype) {}

 private:
  const int rows_;
  const int cols_;
  const DType dtype_;
};

// Device work in order. Methods are called from one thread at a time.
// Different queues run side by side.
class Queue {
 public:
  virtual ~Queue() = default;  // waits for what was put on it

  // Runs `callback` on a thread of the backend when everything put on the
  // queue before has finished. It must not block and may not put work on any
  // queue: it posts to a loop.
  virtual void Callback(absl::AnyInvocable<void()> callback) = 0;

  // Runs `work` likewise, but what is put on the queue behind it starts when it
  // has returned, so that it may fill host memory which a copy then takes. (A
  // Callback is beside the queue: nothing waits for one.)
  virtual void HostWork(absl::AnyInvocable<void()> work) = 0;

  // The work put on this queue from now on starts after everything put on
  // `other` so far, host work too.
  virtual void WaitFor(Queue& other) = 0;

  // Blocks the calling thread. For loading and tests.
  virtual void Synchronize() = 0;
};

// Shape of a paged KV cache. Blocks are numbered 0 .. num_blocks-1; the order
// of bytes within one is the backend's own and never leaves it.
struct KvShape {
  int num_layers = 0;
  int kv_heads = 0;
  int head_dim = 0;     // multiple of 8, at most kMaxHeadDim
  int block_size = 16;  // positions; a multiple of 8
  int num_blocks = 0;
  // On a CPU f32, bf16, fp8, int8 or int4; on a GPU fp8, int8, int4 or the
  // activations'.
  DType dtype = DType::kF32;
  // Of layers with other heads (KvCache::other): other_layers of them lie where
  // one layer does. 0: there are none.
  int other_kv_heads = 0;
  int other_head_dim = 0;
  int other_layers = 0;

  // Scales included, but not what a CPU pads blocks by (CpuKvBlockBytes).
  int64_t bytes_per_position() const {
    return int64_t{2} * num_layers *
           std::max(kv_heads * KvVectorBytes(dtype, head_dim),
                    int64_t{other_layers} * other_kv_heads *
                        KvVectorBytes(dtype, other_head_dim));
  }
  // The same memory as layers with other heads see it.
  KvShape Other() const {
    return {.num_layers = num_layers * other_layers,
            .kv_heads = other_kv_heads,
            .head_dim = other_head_dim,
            .block_size = block_size,
            .num_blocks = num_blocks,
            .dtype = dtype};
  }
};

// Rows of a matrix that MatMulHeads takes, of each head.
constexpr int HeadRows(int outputs) { return (outputs + 63) / 64 * 64; }

class KvCache {
 public:
  virtual ~KvCache() = default;
  const KvShape& shape() const { return shape_; }
  // The same memory for layers with other heads, whose layers are numbered
  // shape().other_layers for each of this one. REQUIRES: there are such.
  KvCache& other() const { return *other_; }

 protected:
  explicit KvCache(const KvShape& shape,
                   std::unique_ptr<KvCache> other = nullptr)
      : shape_(shape), other_(std::move(other)) {}

 private:
  const KvShape shape_;
  const std::unique_ptr<KvCache> other_;
};

// What a step's operations know about their rows. The arrays are device
// memory, uploaded once per step; the counts are host values.
struct Rows {
  int num_rows = 0;
  int num_spans = 0;
  const int32_t* token_ids = nullptr;  // [num_rows]
  // [num_rows] or null. Where it is not negative, the row's token is that of
  // drawn[fed[row]], which an operation before wrote, whatever token_ids says.
  const int32_t* fed = nullptr;
  const SampleResult* drawn = nullptr;
  const int32_t* positions = nullptr;  // [num_rows]
  // [num_rows] block * block_size + offset. On a backend that records, a
  // negative one belongs to a row that only fills the step up: it is not
  // appended, no span has it, and what comes out of it is undefined.
  const int32_t* slots = nullptr;
  const RowSpan* spans = nullptr;         // [num_spans], first_row ascending
  const int32_t* block_tables = nullptr;  // concatenated; block ids in order
  // HOST memory, valid until the step's last operation ran: the same spans,
  // from which a backend plans its work.
  const RowSpan* host_spans = nullptr;  // [num_spans]
  // For Record: where it is not 0, work is planned for spans of one row at
  // most, which end at this position at most, whatever host_spans says.
  int max_positions = 0;
};

// Rotary embedding, half-split pairs (i, i + head_dim / 2) as in Hugging Face.
struct RopeTable {
  const float* cos = nullptr;  // [max_positions, pairs]; null: none
  const float* sin = nullptr;  // [max_positions, pairs]
  int pairs = 0;               // the first ones of a head, which turn
  // [max_positions], what queries are multiplied by behind it; null: nothing
  const float* query_scale = nullptr;
};

// RmsNorm of each head of Q and of K.
struct HeadNorms {
  const float* query = nullptr;  // [head_dim]; null: neither is normed
  const float* key = nullptr;    // [head_dim]
  float eps = 0;
  bool rotated = false;  // of what the rotation gives, not of what it takes
  // [head_dim]; of V too. Null: it is not normed. REQUIRES: `query`.
  const float* value = nullptr;
};

// How queries look at keys.
struct AttentionOptions {
  float scale = 1;     // of the products of queries and keys
  float soft_cap = 0;  // > 0: scores s become soft_cap * tanh(s / soft_cap)
  int window = 0;      // positions seen, the row's own included; 0: all
  // [heads], device: the score of one key more, whose value is zero. Null: none
  const float* sinks = nullptr;
};

// The weights of one row, for those who ask to see them.
struct AttentionLook {
  int row = 0;              // of q
  int position = 0;         // the row's
  int64_t block_table = 0;  // its sequence's, an index as RowSpan's
  float factor = 1;         // of the sum over heads
  bool add = false;         // to what `out` holds
  float* states = nullptr;  // [heads, 2], device, overwritten
  float* out = nullptr;     // [position + 1], device
};

// One of many feed-forward layers of which each row takes a few.
struct Expert {
  const Matrix* gate_up = nullptr;  // of PackGatedMatrix
  const Matrix* down = nullptr;
};

// What is added to their products, f32, device; null: nothing.
struct ExpertBiases {
  const float* gate_up = nullptr;  // [experts, rows of gate_up]
  const float* down = nullptr;     // [experts, rows of down]
};

struct ExpertOptions {
  int chosen = 0;       // most that a row has weights for
  bool shared = false;  // `out` holds what all rows take, and weights its own
  ExpertBiases biases = {};
  Activation activation = Activation::kSilu;
};

// Those of a layer. Made by a backend, whose matrices outlive it.
class ExpertSet {
 public:
  virtual ~ExpertSet() = default;
  int count() const { return count_; }

 protected:
  explicit ExpertSet(int count) : count_(count) {}

 private:
  const int count_;
};

// Part of one sequence's KV: what a gather reads and a scatter writes.
struct KvRange {
  // HOST memory, valid until the operation ran. block_table[i] holds
  // positions [i * block_size, (i + 1) * block_size).
  const int32_t* block_table = nullptr;
  int position_begin = 0;
  int position_end = 0;
  int layer_begin = 0;
  int layer_end = 0;
  int head_begin = 0;
  int head_end = 0;
  int layer_shift = 0;  // digests call a layer by its number plus this

  int64_t elements(int head_dim) const {
    return int64_t{2} * (layer_end - layer_begin) *
           (position_end - position_begin) * (head_end - head_begin) * head_dim;
  }
  // On the wire.
  int64_t bytes(DType wire, int head_dim) const {
    return int64_t{layer_end - layer_begin} * (position_end - position_begin) *
           KvRowBytes(wire, head_end - head_begin, head_dim);
  }
};

// A device's memory. Zeros: as much as the host has, and not counted.
struct MemoryFigures {
  size_t total_bytes = 0;
  size_t free_bytes = 0;
  size_t used_bytes = 0;  // by this backend
};

// The largest operations that a user of a backend will ask for.
struct WorkLimits {
  int rows = 0;       // of a step
  int spans = 0;      // sequences in a step
  int sampled = 0;    // rows that are sampled in a step
  int positions = 0;  // of a sequence
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  int gated = 0;  // rows of the widest matrix of PackGatedMatrix
  int hidden = 0;
  int experts = 0;
  int experts_per_row = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // "cpu (avx512, 2 threads)": for people.
  virtual std::string description() const = 0;
  // What the bits of results depend on, for the fingerprint: "cpu-3".
  virtual std::string numerics() const = 0;
  // Of every `void*` operand below.
  virtual DType activation_type() const = 0;
  virtual MemoryFigures memory() = 0;

  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) = 0;
  // Host memory, zeroed, from and to which copies run without the caller.
  // Copies of other host memory may block until they ran.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(
      size_t bytes) = 0;
  // Pins host memory of the caller's (whole pages), so that KvGather and
  // KvScatter reach it as they reach AllocateHost's. Without it they work by
  // way of a copy that may block the caller. Undone before it is unmapped, and
  // when no operation uses it any more.
  virtual absl::Status RegisterHost(std::byte* data, size_t bytes) {
    return absl::OkStatus();  // whatever the host reaches
  }
  virtual void UnregisterHost(std::byte* data) {}
  // Takes the memory that operations within `limits` need beside their
  // arguments. Without it, or beyond, an operation may wait for the device
  // and allocate.
  virtual absl::Status Reserve(const WorkLimits& limits) = 0;
  virtual std::unique_ptr<Queue> NewQueue(std::string_view name) = 0;

  // Converts a checkpoint matrix into the backend's layout. `dtype` is how it
  // is kept: on a CPU kF32 or kBF16 (f16 sources widen to f32), on a GPU the
  // activations'; on both kFp8 and kW8A8, with a scale for each row, and kInt8
  // and kInt4, with one for each group (kernels/quantise.h). Blocks the caller,
  // and waits for operations that are running on all threads.
  virtual absl::StatusOr<std::unique_ptr<Matrix>> PackMatrix(
      const HostTensor& source, DType dtype) = 0;
  // The same for GatedMatMul: the first half of the rows are gates, the
  // second what they open. No other operation takes such a matrix.
  virtual absl::StatusOr<std::unique_ptr<Matrix>> PackGatedMatrix(
      const HostTensor& source, DType dtype) = 0;
  // The same of what was quantised before. Codes and zeros are kept as they
  // are, scales of one for a row exactly, those of groups as f16 times a power
  // of two for each row. The caller gives numbers that are finite or NaN.
  virtual absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(
      const HostCodes& source) = 0;
  virtual absl::StatusOr<std::unique_ptr<Matrix>> PackGatedCodes(
      const HostCodes& source) = 0;
  // What Experts takes, of at least one expert. Their shapes are equal; on a
  // GPU so must their formats be.
  virtual absl::StatusOr<std::unique_ptr<ExpertSet>> GroupExperts(
      const std::vector<Expert>& experts) = 0;
  // Zeroed.
  virtual absl::StatusOr<std::unique_ptr<KvCache>> NewKvCache(
      const KvShape& shape) = 0;

  // ---- Copies. `host` must live until the copy ran.
  virtual void CopyToDevice(Queue& queue, void* device, const void* host,
                            size_t bytes) = 0;
  virtual void CopyToHost(Queue& queue, void* host, const void* device,
                          size_t bytes) = 0;

  // ---- Operations that come again and again.

  // Runs what `record` puts on the queue, and keeps it under `key` to be put
  // there again in one go. It may put transformer operations alone, and what
  // their arguments point to must live as long as the queue. Takes long, and
  // memory. Calls `record` several times.
  // Errors: UNIMPLEMENTED where nothing is won by it: `record` is not called;
  // INTERNAL if the device could not.
  virtual absl::Status Record(Queue& /*queue*/, uint64_t /*key*/,
                              absl::FunctionRef<void()> /*record*/) {
    return absl::UnimplementedError("operations are not recorded");
  }
  // Puts on the queue what Record kept under `key`, with the same addresses and
  // counts; what is at the addresses may have changed. False, and nothing is
  // put there, if nothing is kept.
  virtual bool Replay(Queue& /*queue*/, uint64_t /*key*/) { return false; }

  // ---- The transformer. Activations (void*) are row-major, rows contiguous;
  // weights of norms, biases, rope tables and logits are f32 everywhere.

  // out [num_rows, table.cols()] = table rows at the rows' tokens, times
  // `scale`; where `positions` [max_positions, table.cols()] is not null, plus
  // its rows at rows.positions.
  virtual void Embed(Queue& queue, const Rows& rows, const Matrix& table,
                     float scale, const float* positions, void* out) = 0;

  // out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight; all [num_rows, dim].
  // With `delta`, first x += delta (the residual), in place. Without `weight`,
  // out = x.
  virtual void RmsNorm(Queue& queue, int num_rows, int dim, float eps, void* x,
                       const void* delta, const float* weight, void* out) = 0;

  // x[i] = (x[i] + delta[i]) * scale, each rounded; both [num_rows, dim].
  virtual void AddAndScale(Queue& queue, int num_rows, int dim, float scale,
                           const void* delta, void* x) = 0;

  // RmsNorm of x in place, whose rows of `dim` lie `stride` elements apart.
  // REQUIRES: both are multiples of 8.
  virtual void NormInPlace(Queue& queue, int num_rows, int dim, int64_t stride,
                           float eps, const float* weight, void* x) = 0;

  // out[r] = (x[r] - mean) / sqrt(mean((x[r] - mean)^2) + eps) * weight + bias,
  // with `delta` as RmsNorm has it; `bias` [dim].
  virtual void LayerNorm(Queue& queue, int num_rows, int dim, float eps,
                         void* x, const void* delta, const float* weight,
                         const float* bias, void* out) = 0;

  // The same of each head of x in place, without a bias: rows of `heads` times
  // `dim` lie `stride` elements apart; `weight` [heads, dim].
  virtual void CentreHeads(Queue& queue, int num_rows, int heads, int dim,
                           int64_t stride, float eps, const float* weight,
                           void* x) = 0;

  // out [num_rows, w.rows()] = x [num_rows, w.cols()] * w^T + bias.
  // `bias` [w.rows()] may be null; it is added after the chain, and after the
  // row's scale of a quantised matrix, which multiplies the finished chain.
  virtual void MatMul(Queue& queue, int num_rows, const void* x,
                      const Matrix& w, const float* bias, void* out) = 0;

  // Of each head by a matrix of its own: out [num_rows, heads, outputs] = x
  // [num_rows, heads, w.cols()] times w [heads, HeadRows(outputs), w.cols()]
  // transposed, of which a head's last rows may be anything. REQUIRES: w is
  // neither quantised nor gated; w.cols() is a multiple of 8.
  virtual void MatMulHeads(Queue& queue, int num_rows, int heads, int outputs,
                           const void* x, const Matrix& w, void* out) = 0;

  // MatMul widened to f32.
  virtual void Logits(Queue& queue, int num_rows, const void* x,
                      const Matrix& head, const float* bias, float* out) = 0;

  // logits[i] = soft_cap * tanh(logits[i] * scale / soft_cap), in place;
  // without a cap (0) logits[i] * scale. logits [count, vocab].
  virtual void ScaleLogits(Queue& queue, int count, int vocab, float scale,
                           float soft_cap, float* logits) = 0;

  // qkv [num_rows, (heads + 2 kv_heads) * head_dim], Q then K then V; or Q
  // alone where K and V are in `kv` [num_rows, 2 kv_heads * head_dim]. Norms
  // the heads of Q and K, or of V too, where `norms` are and rotates them where
  // there is a rope, in the order that `norms` say, each rounded; then scales Q
  // where the rope does, rounded. Q is written in place, K and V to the cache's
  // `layer` at rows.slots, rounded to the activation type and then to the
  // cache's, or quantised vector by vector (kernels/quantise.h).
  virtual void RopeAppend(Queue& queue, const Rows& rows, int heads,
                          const RopeTable& rope, const HeadNorms& norms,
                          void* qkv, void* kv, KvCache& cache, int layer) = 0;

  // The same of rows of queries alone, [num_rows, heads * head_dim], whose keys
  // and values are those that another layer left in the cache.
  virtual void RopeQueries(Queue& queue, const Rows& rows, int heads,
                           int head_dim, const RopeTable& rope,
                           const HeadNorms& norms, void* q) = 0;

  // Causal attention of every row over positions 0 .. its own, or the last of
  // them that a window leaves, read from the cache; of a quantised one, code
  // times scale, rounded to the activation type, but of an int8 one on CPUs
  // integers (kernels/quantise.h). q as RopeAppend left it (rows of qkv, stride
  // q_stride elements); out [num_rows, heads * head_dim].
  virtual void Attention(Queue& queue, const Rows& rows, int heads,
                         const AttentionOptions& options, const void* q,
                         int64_t q_stride, const KvCache& cache, int layer,
                         void* out) = 0;

  // look.out[j] (+)= look.factor times the sum over heads, ascending, of how
  // much the row looks at position j: the softmax of its scores, as Attention
  // has them, a sink's too; 0 where a window hides j. It reads the keys again,
  // in f32: the weights are Attention's but for roundings.
  virtual void AttentionWeights(Queue& queue, const Rows& rows, int heads,
                                const AttentionOptions& options, const void* q,
                                int64_t q_stride, const KvCache& cache,
                                int layer, const AttentionLook& look) = 0;

  // out [num_rows, w.rows() / 2] = activation(gate) * up of the halves of what
  // MatMul gives for `w`, of PackGatedMatrix, and `bias` [w.rows()] or null.
  virtual void GatedMatMul(Queue& queue, int num_rows, const void* x,
                           const Matrix& w, const float* bias,
                           Activation activation, void* out) = 0;

  // GatedMatMul without bias, in two steps: the halves rounded to the
  // activation type, in the backend's own order, into room for num_rows *
  // (w.rows() + 14) elements; then what it makes of them, `dim` outputs a row.
  virtual void MatMulHalves(Queue& queue, int num_rows, const void* x,
                            const Matrix& w, void* halves) = 0;
  virtual void GateHalves(Queue& queue, int num_rows, int dim,
                          Activation activation, const void* halves,
                          void* out) = 0;

  // Adds to each row r what the adapter in slots[r] makes of x[r]; none where
  // that is negative. x [num_rows, factors.cols]; slots [num_rows], device.
  //   h[j] = the sum of A[j, k] x[r, k]: a chain of fused multiply-adds over
  //          each kLoraSegment inputs, the chains added up in ascending order
  //          from 0, rounded to the activation type
  //   out += scale * (the chain of B[o, j] h[j] over ascending j): one fused
  //          multiply-add, rounded to the activation type
  virtual void AddLora(Queue& queue, int num_rows, const void* x,
                       const int32_t* slots, const LoraFactors& factors,
                       const LoraSum& sum) = 0;

  // x[i] = activation(x[i]), in place; x [num_rows, dim].
  virtual void Activate(Queue& queue, int num_rows, int dim,
                        Activation activation, void* x) = 0;

  // x[i] = activation(x[i]) * by[i], rounded once; rows of `by` lie by_stride
  // elements apart.
  virtual void ActivateTimes(Queue& queue, int num_rows, int dim,
                             Activation activation, const void* by,
                             int64_t by_stride, void* x) = 0;

  // weights[r] [options.weights()] = the scores of logits[r]
  // [options.logits()] at the `chosen` largest (ties: the lowest id), divided
  // by their sum if `normalise`, times the scale and the expert's own; zeros
  // elsewhere; then the weight of what is shared.
  virtual void Route(Queue& queue, int num_rows, const RouteOptions& options,
                     const float* logits, float* weights) = 0;

  // out[r] = the sum over experts e with weights[r, e] != 0, ascending, of
  // that weight times what e makes of x[r]: a chain of fused multiply-adds,
  // rounded to the activation type at each. It starts from zero or, where
  // something is shared, from its weight times out[r], rounded. weights: as
  // Route gave them.
  virtual void Experts(Queue& queue, int num_rows, const void* x,
                       const float* weights, const ExpertSet& experts,
                       const ExpertOptions& options, void* out) = 0;

  // out[i] = x[row_ids[i]], rows of dim elements; row_ids [count], device.
  virtual void GatherRows(Queue& queue, int count, int dim,
                          const int32_t* row_ids, const void* x, void* out) = 0;

  // Draws one token per row of logits [count, vocab]: rows with edits change
  // while it runs, afterwards all is as before. params, results [count]; edits
  // as params name them, null if none does, undefined afterwards; masks
  // [as params name them, MaskWords(vocab)], null if none does. All device
  // memory. kernels/sampling.h says exactly what is drawn. vocab is at most
  // 2^20.
  virtual void Sample(Queue& queue, int count, int vocab, float* logits,
                      const SampleParams* params, LogitEdit* edits,
                      const uint32_t* masks, SampleResult* results) = 0;

  // ---- KV for handoffs. On the wire a slice is, for each layer, for each
  // position: K of the heads in range, then V of them, as `wire` elements and
  // scales (KvRowBytes). Where the cache's type differs, elements become f32
  // (code times scale) and are then rounded or quantised.
  // `staging` is memory of a handoff slab; the digest is of the wire bytes,
  // keyed, and written to `digest` (HOST memory) by the time a later
  // Callback runs.
  virtual void KvGather(Queue& queue, const KvCache& cache,
                        const KvRange& range, DType wire, uint64_t digest_key,
                        std::byte* staging, KvDigest* digest) = 0;
  virtual void KvScatter(Queue& queue, KvCache& cache, const KvRange& range,
                         DType wire, const std::byte* staging) = 0;
  // The digest that KvGather of this range would give.
  virtual void KvDigestOf(Queue& queue, const KvCache& cache,
                          const KvRange& range, DType wire, uint64_t digest_key,
                          KvDigest* digest) = 0;
  // Copies whole blocks (copy-on-write of forks), all layers.
  virtual void KvCopyBlock(Queue& queue, KvCache& cache, int from_block,
                           int to_block) = 0;
};

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_BACKEND_H_
