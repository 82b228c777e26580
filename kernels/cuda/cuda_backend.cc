// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "kernels/cuda/cuda_queue.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numerics.h"
#include "kernels/cuda/packed_weights.h"
#include "kernels/experts.h"
#include "kernels/host_codes.h"

namespace tandem::kernels::cuda {
namespace {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxBlockSize = 256;

WeightType WeightTypeOf(DType type) {
  return type == DType::kF32    ? WeightType::kF32
         : type == DType::kFp8  ? WeightType::kE4M3
         : type == DType::kInt8 ? WeightType::kInt8
         : type == DType::kInt4 ? WeightType::kInt4
         : type == DType::kBF16 ? WeightType::kBF16
                                : WeightType::kF16;
}

class CudaMatrix final : public Matrix {
 public:
  CudaMatrix(int rows, int cols, DType dtype, WeightType type, RowOrder order,
             std::unique_ptr<Memory> weights, std::unique_ptr<Memory> scales)
      : Matrix(rows, cols, dtype),
        type_(type),
        order_(order),
        weights_(std::move(weights)),
        scales_(std::move(scales)) {}

  WeightType type() const { return type_; }
  RowOrder order() const { return order_; }
  const std::byte* weights() const { return weights_->data(); }
  const float* scales() const {
    return scales_ == nullptr ? nullptr
                              : reinterpret_cast<const float*>(scales_->data());
  }

 private:
  const WeightType type_;
  const RowOrder order_;
  const std::unique_ptr<Memory> weights_;
  const std::unique_ptr<Memory> scales_;
};

class CudaExperts final : public ExpertSet {
 public:
  CudaExperts(int count, const CudaMatrix& gate_up, const CudaMatrix& down,
              std::unique_ptr<Memory> table)
      : ExpertSet(count),
        gate_up_(gate_up),
        down_(down),
        table_(std::move(table)) {}

  // The first expert's, which all are like.
  const CudaMatrix& gate_up() const { return gate_up_; }
  const CudaMatrix& down() const { return down_; }
  const ExpertMatrix* gate_ups() const {
    return reinterpret_cast<const ExpertMatrix*>(table_->data());
  }
  const ExpertMatrix* downs() const { return gate_ups() + count(); }

 private:
  const CudaMatrix& gate_up_;
  const CudaMatrix& down_;
  const std::unique_ptr<Memory> table_;  // all gate_ups, then all downs
};

bool Alike(const CudaMatrix& a, const CudaMatrix& b) {
  return a.rows() == b.rows() && a.cols() == b.cols() && a.type() == b.type();
}

// What a layer of many experts works in, one part behind the other; of no
// memory, how much that is.
struct ExpertScratch {
  struct Shape {
    int rows, hidden, wide, experts, chosen;
  };

  ExpertScratch(std::byte* memory, const Shape& shape, DType activation)
      : memory_(memory) {
    const int64_t all_places = int64_t{shape.rows} * shape.chosen;
    const int64_t copies =
        MostExpertRows(shape.rows, shape.experts, shape.chosen);
    counts = Take<int32_t>(shape.experts);
    num_tiles = Take<int32_t>(1);
    places = Take<int32_t>(all_places);
    shares = Take<float>(all_places);
    // There are most of the smallest.
    tiles = Take<ExpertTile>(
        MostExpertTiles(shape.rows, shape.experts, shape.chosen, 8));
    const auto width = static_cast<int64_t>(SizeOf(activation));
    x = Take<std::byte>(copies * shape.hidden * width);
    hidden = Take<std::byte>(copies * shape.wide * width);
    y = Take<std::byte>(copies * shape.hidden * width);
  }

  size_t bytes() const { return bytes_; }

  int32_t* counts = nullptr;
  int32_t* num_tiles = nullptr;
  int32_t* places = nullptr;
  float* shares = nullptr;
  ExpertTile* tiles = nullptr;
  void* x = nullptr;
  void* hidden = nullptr;
  void* y = nullptr;

 private:
  template <typename T>
  T* Take(int64_t count) {
    const size_t begin = bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + begin);
  }

  std::byte* const memory_;
  size_t bytes_ = 0;
};

class CudaKvCache final : public KvCache {
 public:
  CudaKvCache(const KvShape& shape, std::unique_ptr<Memory> memory)
      : KvCache(shape), memory_(std::move(memory)) {}

  KvView view() const {
    return {memory_->data(),  shape().dtype,    shape().num_blocks,
            shape().kv_heads, shape().head_dim, shape().block_size};
  }

 private:
  const std::unique_ptr<Memory> memory_;
};

absl::Status CheckShape(const KvShape& shape, DType activation) {
  if (shape.num_layers < 1 || shape.kv_heads < 1 || shape.num_blocks < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KV cache of ", shape.num_layers, " layers, ", shape.kv_heads,
        " heads, ", shape.num_blocks, " blocks: each must be at least 1"));
  }
  if (shape.head_dim < 8 || shape.head_dim > kMaxHeadDim ||
      shape.head_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", shape.head_dim,
                     ", expected a multiple of 8 from 8 to ", kMaxHeadDim));
  }
  if (shape.block_size < 8 || shape.block_size > kMaxBlockSize ||
      shape.block_size % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_size is ", shape.block_size,
                     ", expected a multiple of 8 from 8 to ", kMaxBlockSize));
  }
  if (activation != DType::kF32 && shape.dtype != activation &&
      !IsQuantised(shape.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV cache type is ", std::string(Name(shape.dtype)),
                     ", expected fp8, int8, int4 or the activations' ",
                     std::string(Name(activation)), " on a GPU"));
  }
  return absl::OkStatus();
}

// One launch's part of a slice, and what the whole slice measures.
struct Slice {
  KvSliceParams params;
  int64_t row_bytes = 0;  // of one position of one layer
  int64_t bytes = 0;
};

Slice SliceOf(const KvView& kv, const KvRange& range, DType wire,
              uint64_t digest_key) {
  Slice slice{};
  slice.row_bytes =
      KvRowBytes(wire, range.head_end - range.head_begin, kv.head_dim);
  const int64_t layer_bytes =
      slice.row_bytes * (range.position_end - range.position_begin);
  slice.bytes = layer_bytes * (range.layer_end - range.layer_begin);
  KvSliceParams& p = slice.params;
  p.kv = kv;
  p.layer_stride = layer_bytes;
  p.wire = wire;
  p.digest_key = digest_key;
  p.layer_begin = range.layer_begin;
  p.layer_end = range.layer_end;
  p.head_begin = range.head_begin;
  p.head_end = range.head_end;
  return slice;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaOptions& options, std::unique_ptr<Device> device)
      : device_(std::move(device)), activation_(options.activation) {}

  std::string description() const override { return device_->facts().name; }
  std::string numerics() const override {
    return absl::StrCat("cuda-", kNumericsVersion, "-sm",
                        device_->facts().generation, "-",
                        std::string(Name(activation_)));
  }
  DType activation_type() const override { return activation_; }
  MemoryFigures memory() override {
    return {device_->facts().total_bytes, device_->FreeBytes(),
            device_->UsedBytes()};
  }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) override {
    return Memory::OnDevice(*device_, bytes);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) override {
    return Memory::OnHost(*device_, bytes);
  }

  absl::Status RegisterHost(std::byte* data, size_t bytes) override {
    return device_->RegisterHost(data, bytes);
  }
  void UnregisterHost(std::byte* data) override {
    device_->UnregisterHost(data);
  }

  absl::Status Reserve(const WorkLimits& limits) override {
    MutexLock lock(&mutex_);
    const std::pair<CudaQueue::Scratch, size_t> parts[] = {
        {CudaQueue::kAttention,
         AttentionScratchBytes(limits.spans, limits.heads, limits.head_dim,
                               limits.positions)},
        {CudaQueue::kSampling,
         SampleScratchBytes(limits.sampled, limits.vocab)},
        {CudaQueue::kCodes,
         static_cast<size_t>(CodeRowsBytes(
             limits.experts > 0
                 ? static_cast<int>(MostExpertRows(limits.rows, limits.experts,
                                                   limits.experts_per_row))
                 : limits.rows,
             most_code_inputs_))},
        {CudaQueue::kExperts, ExpertBytes(limits)}};
    for (const auto& [which, bytes] : parts) {
      if (bytes == 0) continue;
      if (reserved_[which] != nullptr && reserved_[which]->size() >= bytes) {
        continue;
      }
      absl::StatusOr<std::unique_ptr<Memory>> memory =
          Memory::OnDevice(*device_, bytes);
      if (!memory.ok()) return memory.status();
      reserved_[which] = *std::move(memory);
    }
    return absl::OkStatus();
  }

  std::unique_ptr<Queue> NewQueue(std::string_view name) override {
    // Transfers are short, and a peer waits for them.
    return std::make_unique<CudaQueue>(*device_, name == "transfer");
  }

  absl::StatusOr<std::unique_ptr<ExpertSet>> GroupExperts(
      const std::vector<Expert>& experts) override {
    const auto of = [](const Matrix* matrix) -> const CudaMatrix& {
      return static_cast<const CudaMatrix&>(*matrix);
    };
    const CudaMatrix& gate_up = of(experts[0].gate_up);
    const CudaMatrix& down = of(experts[0].down);
    std::vector<ExpertMatrix> table(2 * experts.size());
    for (size_t e = 0; e < experts.size(); ++e) {
      const CudaMatrix& own_gate_up = of(experts[e].gate_up);
      const CudaMatrix& own_down = of(experts[e].down);
      if (!Alike(own_gate_up, gate_up) || !Alike(own_down, down)) {
        return absl::InvalidArgumentError(
            absl::StrCat("expert ", e,
                         " is kept in other shapes or formats "
                         "than expert 0: on a GPU all must be alike"));
      }
      table[e] = {own_gate_up.weights(), own_gate_up.scales()};
      table[experts.size() + e] = {own_down.weights(), own_down.scales()};
    }
    absl::StatusOr<std::unique_ptr<Memory>> memory =
        Uploaded(table.data(), table.size() * sizeof(ExpertMatrix));
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<ExpertSet>(std::make_unique<CudaExperts>(
        static_cast<int>(experts.size()), gate_up, down, *std::move(memory)));
  }

  absl::StatusOr<std::unique_ptr<Matrix>> PackMatrix(const HostTensor& source,
                                                     DType dtype) override {
    return Pack(source, dtype, RowOrder::kPlain);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedMatrix(
      const HostTensor& source, DType dtype) override {
    if (source.rows % 2 != 0) return OddRows(source.rows);
    return Pack(source, dtype, RowOrder::kGated);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(
      const HostCodes& source) override {
    return Pack(source, RowOrder::kPlain);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedCodes(
      const HostCodes& source) override {
    if (source.rows % 2 != 0) return OddRows(source.rows);
    return Pack(source, RowOrder::kGated);
  }

  absl::StatusOr<std::unique_ptr<KvCache>> NewKvCache(
      const KvShape& shape) override {
    if (absl::Status status = CheckShape(shape, activation_); !status.ok()) {
      return status;
    }
    const int64_t bytes =
        shape.bytes_per_position() * shape.block_size * shape.num_blocks;
    absl::StatusOr<std::unique_ptr<Memory>> memory =
        Memory::OnDevice(*device_, static_cast<size_t>(bytes));
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<KvCache>(
        std::make_unique<CudaKvCache>(shape, *std::move(memory)));
  }

  void CopyToDevice(Queue& queue, void* device, const void* host,
                    size_t bytes) override {
    Copy(queue, device, host, bytes);
  }
  void CopyToHost(Queue& queue, void* host, const void* device,
                  size_t bytes) override {
    Copy(queue, host, device, bytes);
  }

  absl::Status Record(Queue& queue, uint64_t key,
                      absl::FunctionRef<void()> record) override {
    return Own(queue).Record(key, record);
  }
  bool Replay(Queue& queue, uint64_t key) override {
    return Own(queue).Replay(key);
  }

  void Embed(Queue& queue, const Rows& rows, const Matrix& table, float scale,
             const float* positions, void* out) override {
    const CudaMatrix& matrix = static_cast<const CudaMatrix&>(table);
    CudaQueue& own = Own(queue);
    own.Check(LaunchEmbed(own.stream(), activation_, matrix.type(),
                          {.weights = matrix.weights(),
                           .scales = matrix.scales(),
                           .token_ids = rows.token_ids,
                           .fed = rows.fed,
                           .drawn = rows.drawn,
                           .out = out,
                           .num_rows = rows.num_rows,
                           .cols = matrix.cols(),
                           .scale = scale,
                           .positions = rows.positions,
                           .added = positions}),
              "embed");
  }

  void RmsNorm(Queue& queue, int num_rows, int dim, float eps, void* x,
               const void* delta, const float* weight, void* out) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchRmsNorm(own.stream(), activation_,
                            {.x = x,
                             .delta = delta,
                             .weight = weight,
                             .out = out,
                             .num_rows = num_rows,
                             .dim = dim,
                             .eps = eps}),
              "norm");
  }

  void LayerNorm(Queue& queue, int num_rows, int dim, float eps, void* x,
                 const void* delta, const float* weight, const float* bias,
                 void* out) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchLayerNorm(own.stream(), activation_,
                              {.x = x,
                               .delta = delta,
                               .weight = weight,
                               .bias = bias,
                               .out = out,
                               .num_rows = num_rows,
                               .dim = dim,
                               .eps = eps}),
              "layer norm");
  }

  void MatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
              const float* bias, void* out) override {
    Multiply(queue, num_rows, x, w, bias, MatMulOutput::kPlain, out);
  }

  void Logits(Queue& queue, int num_rows, const void* x, const Matrix& head,
              float* out) override {
    Multiply(queue, num_rows, x, head, nullptr, MatMulOutput::kWide, out);
  }

  void ScaleLogits(Queue& queue, int count, int vocab, float scale,
                   float soft_cap, float* logits) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchScaleLogits(own.stream(), {.logits = logits,
                                               .count = count,
                                               .vocab = vocab,
                                               .scale = scale,
                                               .soft_cap = soft_cap}),
              "logits' scale");
  }

  void RopeAppend(Queue& queue, const Rows& rows, int heads,
                  const RopeTable& rope, const HeadNorms& norms, void* qkv,
                  KvCache& cache, int layer) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchRopeAppend(own.stream(), activation_,
                               {.positions = rows.positions,
                                .slots = rows.slots,
                                .cos = rope.cos,
                                .sin = rope.sin,
                                .qkv = qkv,
                                .kv = ViewOf(cache),
                                .num_rows = rows.num_rows,
                                .heads = heads,
                                .layer = layer,
                                .query_norm = norms.query,
                                .key_norm = norms.key,
                                .norm_eps = norms.eps}),
              "rope");
  }

  void Attention(Queue& queue, const Rows& rows, int heads,
                 const AttentionOptions& options, const void* q,
                 int64_t q_stride, const KvCache& cache, int layer,
                 void* out) override {
    CudaQueue& own = Own(queue);
    const KvView kv = ViewOf(cache);
    int span_rows = rows.max_positions > 0 ? 1 : 0;
    int positions = rows.max_positions;
    for (int i = 0; i < rows.num_spans && rows.max_positions == 0; ++i) {
      const RowSpan& span = rows.host_spans[i];
      span_rows = std::max(span_rows, span.num_rows);
      positions = std::max(positions, span.first_position + span.num_rows);
    }
    std::byte* const scratch = Scratch(
        own, CudaQueue::kAttention,
        AttentionScratchBytes(rows.num_spans, heads, kv.head_dim, positions));
    own.Check(LaunchAttention(own.stream(), activation_,
                              {.spans = rows.spans,
                               .block_tables = rows.block_tables,
                               .q = q,
                               .out = out,
                               .scratch = scratch,
                               .kv = kv,
                               .q_stride = q_stride,
                               .scale = options.scale,
                               .num_rows = rows.num_rows,
                               .num_spans = rows.num_spans,
                               .heads = heads,
                               .layer = layer,
                               .max_span_rows = span_rows,
                               .max_positions = positions,
                               .window = options.window,
                               .soft_cap = options.soft_cap}),
              "attention");
  }

  void AttentionWeights(Queue& queue, const Rows& rows, int heads,
                        const AttentionOptions& options, const void* q,
                        int64_t q_stride, const KvCache& cache, int layer,
                        const AttentionLook& look) override {
    CudaQueue& own = Own(queue);
    const int64_t begin =
        look.row * q_stride * static_cast<int64_t>(SizeOf(activation_));
    own.Check(LaunchAttentionWeights(
                  own.stream(), activation_,
                  {.block_table = rows.block_tables + look.block_table,
                   .q = static_cast<const std::byte*>(q) + begin,
                   .states = look.states,
                   .out = look.out,
                   .kv = ViewOf(cache),
                   .scale = options.scale,
                   .factor = look.factor,
                   .position = look.position,
                   .heads = heads,
                   .layer = layer,
                   .add = look.add,
                   .window = options.window,
                   .soft_cap = options.soft_cap}),
              "attention weights");
  }

  void GatedMatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
                   const float* bias, Activation activation,
                   void* out) override {
    Multiply(queue, num_rows, x, w, bias, MatMulOutput::kGated, out,
             activation);
  }

  // Halves are the product's own rows as they are packed.
  void MatMulHalves(Queue& queue, int num_rows, const void* x, const Matrix& w,
                    void* halves) override {
    Multiply(queue, num_rows, x, w, nullptr, MatMulOutput::kPlain, halves);
  }

  void GateHalves(Queue& queue, int num_rows, int dim, Activation activation,
                  const void* halves, void* out) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchGateHalves(own.stream(), activation_,
                               {.halves = halves,
                                .out = out,
                                .num_rows = num_rows,
                                .dim = dim,
                                .activation = activation}),
              "gate");
  }

  void AddLora(Queue& queue, int num_rows, const void* x, const int32_t* slots,
               const LoraFactors& factors, const LoraSum& sum) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchLora(own.stream(), activation_,
                         {.x = x,
                          .slots = slots,
                          .factors = factors,
                          .sum = sum,
                          .num_rows = num_rows}),
              "adapters");
  }

  void Activate(Queue& queue, int num_rows, int dim, Activation activation,
                void* x) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchActivate(own.stream(), activation_,
                             {.x = x,
                              .num_rows = num_rows,
                              .dim = dim,
                              .activation = activation}),
              "activation");
  }

  void Route(Queue& queue, int num_rows, int experts, int chosen,
             bool normalise, const float* logits, float* weights) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchRoute(own.stream(), {.logits = logits,
                                         .weights = weights,
                                         .num_rows = num_rows,
                                         .experts = experts,
                                         .chosen = chosen,
                                         .normalise = normalise}),
              "route");
  }

  // Which rows an expert has, the host does not know: launches are made for as
  // many tiles as there can be.
  void Experts(Queue& queue, int num_rows, int chosen, const void* x,
               const float* weights, const ExpertSet& experts,
               Activation activation, void* out) override {
    const auto& set = static_cast<const CudaExperts&>(experts);
    const int count = set.count();
    const int hidden = set.down().rows();
    const int wide = set.down().cols();
    const int tile_rows = ExpertTileRows(activation_, num_rows, count, chosen);
    const ExpertScratch::Shape shape{num_rows, hidden, wide, count, chosen};
    CudaQueue& own = Own(queue);
    const ExpertScratch work(
        Scratch(own, CudaQueue::kExperts,
                ExpertScratch(nullptr, shape, activation_).bytes()),
        shape, activation_);
    own.Check(LaunchExpertPlan(own.stream(), {.weights = weights,
                                              .counts = work.counts,
                                              .places = work.places,
                                              .shares = work.shares,
                                              .tiles = work.tiles,
                                              .num_tiles = work.num_tiles,
                                              .num_rows = num_rows,
                                              .experts = count,
                                              .chosen = chosen,
                                              .tile_rows = tile_rows}),
              "experts' rows");
    own.Check(LaunchSpreadRows(own.stream(), activation_,
                               {.x = x,
                                .places = work.places,
                                .out = work.x,
                                .num_rows = num_rows,
                                .chosen = chosen,
                                .dim = hidden}),
              "copies of rows");
    ExpertProductParams product{.product = {},
                                .matrices = set.gate_ups(),
                                .tiles = work.tiles,
                                .num_tiles = work.num_tiles,
                                .most_tiles = static_cast<int>(MostExpertTiles(
                                    num_rows, count, chosen, tile_rows))};
    const int copies =
        static_cast<int>(MostExpertRows(num_rows, count, chosen));
    product.product = ProductOf(own, copies, work.x, set.gate_up(), nullptr,
                                MatMulOutput::kGated, activation, work.hidden);
    own.Check(LaunchExpertProduct(own.stream(), activation_,
                                  set.gate_up().type(), tile_rows, product),
              "experts' products");
    product.matrices = set.downs();
    product.product = ProductOf(own, copies, work.hidden, set.down(), nullptr,
                                MatMulOutput::kPlain, activation, work.y);
    own.Check(LaunchExpertProduct(own.stream(), activation_, set.down().type(),
                                  tile_rows, product),
              "experts' products");
    own.Check(LaunchSumExperts(own.stream(), activation_,
                               {.y = work.y,
                                .places = work.places,
                                .shares = work.shares,
                                .out = out,
                                .num_rows = num_rows,
                                .chosen = chosen,
                                .dim = hidden}),
              "experts' sums");
  }

  void GatherRows(Queue& queue, int count, int dim, const int32_t* row_ids,
                  const void* x, void* out) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchGatherRows(own.stream(), activation_,
                               {.row_ids = row_ids,
                                .x = x,
                                .out = out,
                                .count = count,
                                .dim = dim}),
              "gather rows");
  }

  void Sample(Queue& queue, int count, int vocab, float* logits,
              const SampleParams* params, LogitEdit* edits,
              const uint32_t* masks, SampleResult* results) override {
    CudaQueue& own = Own(queue);
    std::byte* const scratch =
        Scratch(own, CudaQueue::kSampling, SampleScratchBytes(count, vocab));
    own.Check(LaunchSample(own.stream(), {.logits = logits,
                                          .params = params,
                                          .edits = edits,
                                          .masks = masks,
                                          .results = results,
                                          .scratch = scratch,
                                          .count = count,
                                          .vocab = vocab}),
              "sample");
  }

  void KvGather(Queue& queue, const KvCache& cache, const KvRange& range,
                DType wire, uint64_t digest_key, std::byte* staging,
                KvDigest* digest) override {
    CudaQueue& own = Own(queue);
    Slice slice = SliceOf(ViewOf(cache), range, wire, digest_key);
    KvDigest* const sum = own.NewDigest();
    slice.params.digest = sum;
    std::byte* const target = Reach(own, staging, slice.bytes);
    ForParts(slice, range, target, [&](const KvSliceParams& part) {
      own.Check(LaunchKvGather(own.stream(), part), "KV gather");
    });
    if (target != staging) Copy(queue, staging, target, slice.bytes);
    own.SendDigest(sum, digest);
  }

  void KvScatter(Queue& queue, KvCache& cache, const KvRange& range, DType wire,
                 const std::byte* staging) override {
    CudaQueue& own = Own(queue);
    Slice slice = SliceOf(ViewOf(cache), range, wire, 0);
    std::byte* const source =
        Reach(own, const_cast<std::byte*>(staging), slice.bytes);
    if (source != staging) Copy(queue, source, staging, slice.bytes);
    ForParts(slice, range, source, [&](const KvSliceParams& part) {
      own.Check(LaunchKvScatter(own.stream(), part), "KV scatter");
    });
  }

  void KvDigestOf(Queue& queue, const KvCache& cache, const KvRange& range,
                  DType wire, uint64_t digest_key, KvDigest* digest) override {
    CudaQueue& own = Own(queue);
    Slice slice = SliceOf(ViewOf(cache), range, wire, digest_key);
    KvDigest* const sum = own.NewDigest();
    slice.params.digest = sum;
    ForParts(slice, range, nullptr, [&](const KvSliceParams& part) {
      own.Check(LaunchKvGather(own.stream(), part), "KV digest");
    });
    own.SendDigest(sum, digest);
  }

  void KvCopyBlock(Queue& queue, KvCache& cache, int from_block,
                   int to_block) override {
    CudaQueue& own = Own(queue);
    own.Check(
        LaunchKvCopyBlock(own.stream(), {.kv = ViewOf(cache),
                                         .num_layers = cache.shape().num_layers,
                                         .from_block = from_block,
                                         .to_block = to_block}),
        "KV copy");
  }

 private:
  static CudaQueue& Own(Queue& queue) { return static_cast<CudaQueue&>(queue); }
  static KvView ViewOf(const KvCache& cache) {
    return static_cast<const CudaKvCache&>(cache).view();
  }

  void Copy(Queue& queue, void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    Own(queue).Copy(to, from, bytes);
  }

  size_t ExpertBytes(const WorkLimits& limits) const {
    if (limits.experts == 0) return 0;
    return ExpertScratch(nullptr,
                         {limits.rows, limits.hidden, limits.gated / 2,
                          limits.experts, limits.experts_per_row},
                         activation_)
        .bytes();
  }

  static absl::Status OddRows(int64_t rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gated matrix of ", rows, " rows: must be an even number"));
  }

  // Packs rows [begin, end) of blocks into `to`, and their scales.
  using PackRows =
      absl::FunctionRef<void(int begin, int end, std::byte* to, float* scales)>;

  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const HostTensor& source,
                                               DType dtype, RowOrder order) {
    if (activation_ != DType::kF32 && dtype != activation_ &&
        !IsQuantised(dtype)) {
      return absl::InvalidArgumentError(
          absl::StrCat("matrices are ", std::string(Name(dtype)),
                       ", expected fp8, int8, int4 or the activations' ",
                       std::string(Name(activation_)), " on a GPU"));
    }
    const WeightType type = WeightTypeOf(dtype);
    return Pack(source.data == nullptr ? 0 : source.rows, source.cols, dtype,
                type, order,
                [&](int begin, int end, std::byte* to, float* scales) {
                  PackRowBlocks(source, type, order, begin, end, to, scales);
                });
  }

  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const HostCodes& source,
                                               RowOrder order) {
    if (absl::Status status = CheckCodes(source); !status.ok()) return status;
    return Pack(source.rows, source.cols, source.dtype, TypeOfCodes(source),
                order, [&](int begin, int end, std::byte* to, float* scales) {
                  PackRowBlocks(source, order, begin, end, to, scales);
                });
  }

  absl::StatusOr<std::unique_ptr<Matrix>> Pack(int64_t source_rows,
                                               int64_t source_cols, DType dtype,
                                               WeightType type, RowOrder order,
                                               PackRows pack) {
    constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
    if (source_rows < 1 || source_cols < 1 || source_rows > kMost ||
        source_cols > kMost) {
      return absl::InvalidArgumentError(
          absl::StrCat("matrix of ", source_rows, " rows and ", source_cols,
                       " columns cannot be packed"));
    }
    const int rows = PackedRows(static_cast<int>(source_rows), order);
    const int cols = static_cast<int>(source_cols);
    absl::StatusOr<std::unique_ptr<Memory>> weights = Memory::OnDevice(
        *device_, static_cast<size_t>(PackedBytes(rows, cols, type)));
    if (!weights.ok()) return weights.status();
    std::vector<float> scales(static_cast<size_t>(WeightBlocks(rows)) *
                              kWeightBlock);
    if (absl::Status status =
            PackTo((*weights)->data(), PackedBytes(kWeightBlock, cols, type),
                   WeightBlocks(rows), scales.data(), pack);
        !status.ok()) {
      return status;
    }
    std::unique_ptr<Memory> uploaded;
    if (HasRowScales(type)) {
      absl::StatusOr<std::unique_ptr<Memory>> memory =
          Uploaded(scales.data(), scales.size() * sizeof(float));
      if (!memory.ok()) return memory.status();
      if (IsGrouped(type)) {
        MutexLock lock(&mutex_);
        most_code_inputs_ = std::max(most_code_inputs_, cols);
      }
      uploaded = *std::move(memory);
    }
    return std::unique_ptr<Matrix>(std::make_unique<CudaMatrix>(
        static_cast<int>(source_rows), cols, dtype, type, order,
        *std::move(weights), std::move(uploaded)));
  }

  // Behind the first matrix that was packed.
  absl::StatusOr<std::unique_ptr<Memory>> Uploaded(const void* from,
                                                   size_t bytes) {
    absl::StatusOr<std::unique_ptr<Memory>> memory =
        Memory::OnDevice(*device_, bytes);
    if (!memory.ok()) return memory;
    MutexLock lock(&mutex_);
    Copy(*uploads_, (*memory)->data(), from, bytes);
    uploads_->Synchronize();
    return memory;
  }

  // Packs into pinned memory, one half of it while the other is copied.
  // `block_bytes`: of a row of blocks.
  absl::Status PackTo(std::byte* device, int64_t block_bytes, int blocks,
                      float* scales, PackRows pack) {
    constexpr int64_t kHalfBytes = int64_t{32} << 20;
    const int per_half = static_cast<int>(
        std::clamp<int64_t>(kHalfBytes / block_bytes, 1, blocks));
    MutexLock lock(&mutex_);
    if (uploads_ == nullptr) {
      uploads_ = std::make_unique<CudaQueue>(*device_, false);
    }
    const auto bytes = static_cast<size_t>(2 * (per_half * block_bytes));
    if (packing_ == nullptr || packing_->size() < bytes) {
      packing_ = nullptr;
      absl::StatusOr<std::unique_ptr<Memory>> memory =
          Memory::OnHost(*device_, bytes);
      if (!memory.ok()) return memory.status();
      packing_ = *std::move(memory);
    }
    for (int begin = 0; begin < blocks; begin += per_half) {
      const int end = std::min(blocks, begin + per_half);
      std::byte* const half =
          packing_->data() + begin / per_half % 2 * (per_half * block_bytes);
      pack(begin, end, half, scales + ptrdiff_t{begin} * kWeightBlock);
      uploads_->Synchronize();  // of the other half
      Copy(*uploads_, device + begin * block_bytes, half,
           static_cast<size_t>((end - begin) * block_bytes));
    }
    uploads_->Synchronize();
    return absl::OkStatus();
  }

  void Multiply(Queue& queue, int num_rows, const void* x, const Matrix& w,
                const float* bias, MatMulOutput output, void* out,
                Activation activation = Activation::kSilu) {
    const CudaMatrix& matrix = static_cast<const CudaMatrix&>(w);
    CudaQueue& own = Own(queue);
    const MatMulParams params =
        ProductOf(own, num_rows, x, matrix, bias, output, activation, out);
    const auto launch =
        IsGrouped(matrix.type()) ? LaunchMatMulCodes : LaunchMatMul;
    own.Check(launch(own.stream(), activation_, matrix.type(), params),
              "matrix product");
  }

  // Of x as the matrix's products take it, quantised where they do.
  MatMulParams ProductOf(CudaQueue& own, int num_rows, const void* x,
                         const CudaMatrix& matrix, const float* bias,
                         MatMulOutput output, Activation activation,
                         void* out) {
    const int outputs = output == MatMulOutput::kGated
                            ? matrix.rows() / 2
                            : PackedRows(matrix.rows(), matrix.order());
    if (IsGrouped(matrix.type())) {
      std::byte* const rows =
          Scratch(own, CudaQueue::kCodes,
                  static_cast<size_t>(CodeRowsBytes(num_rows, matrix.cols())));
      own.Check(LaunchQuantiseRows(own.stream(), activation_,
                                   {.x = x,
                                    .out = rows,
                                    .x_stride = matrix.cols(),
                                    .tokens = num_rows,
                                    .cols = matrix.cols()}),
                "quantised rows");
      x = rows;
    }
    return {.weights = matrix.weights(),
            .scales = matrix.scales(),
            .x = x,
            .bias = bias,
            .out = out,
            .x_stride = matrix.cols(),
            .out_stride = outputs,
            .rows = PackedRows(matrix.rows(), matrix.order()),
            .cols = matrix.cols(),
            .tokens = num_rows,
            .outputs = outputs,
            .output = output,
            .activation = activation};
  }

  // The queue's working memory; a queue's first is what was set aside.
  std::byte* Scratch(CudaQueue& queue, CudaQueue::Scratch which, size_t bytes) {
    if (!queue.has(which)) {
      MutexLock lock(&mutex_);
      if (reserved_[which] != nullptr) {
        queue.Adopt(which, std::move(reserved_[which]));
      }
    }
    return queue.scratch(which, bytes);
  }

  // `staging` itself where kernels reach it, else memory of the device's.
  std::byte* Reach(CudaQueue& queue, std::byte* staging, int64_t bytes) {
    if (device_->Reaches(staging)) return staging;
    return queue.scratch(CudaQueue::kStaging, static_cast<size_t>(bytes));
  }

  // Launches whose block tables fit the parameters: cuts at block borders.
  template <typename Launch>
  static void ForParts(Slice& slice, const KvRange& range, std::byte* staging,
                       const Launch& launch) {
    KvSliceParams& p = slice.params;
    const int block_size = p.kv.block_size;
    int begin = range.position_begin;
    while (begin < range.position_end) {
      const int first = begin / block_size;
      const int end = std::min(range.position_end,
                               (first + kKvBlocksPerLaunch) * block_size);
      p.position_begin = begin;
      p.position_end = end;
      p.staging =
          staging == nullptr
              ? nullptr
              : staging + slice.row_bytes * (begin - range.position_begin);
      const int blocks = (end + block_size - 1) / block_size - first;
      std::copy_n(range.block_table + first, blocks, p.blocks);
      launch(p);
      begin = end;
    }
  }

  const std::unique_ptr<Device> device_;  // outlives what is on it
  const DType activation_;
  Mutex mutex_;
  std::unique_ptr<Memory> reserved_[CudaQueue::kScratches] ABSL_GUARDED_BY(
      mutex_);
  int most_code_inputs_ ABSL_GUARDED_BY(mutex_) = 0;  // of IsGrouped matrices
  std::unique_ptr<CudaQueue> uploads_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Memory> packing_ ABSL_GUARDED_BY(mutex_);  // pinned
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> NewCudaBackend(
    const CudaOptions& options, std::unique_ptr<Device> device) {
  return std::unique_ptr<Backend>(
      std::make_unique<CudaBackend>(options, std::move(device)));
}

}  // namespace tandem::kernels::cuda
