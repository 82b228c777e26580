// SPDX-License-Identifier: Apache-2.0
// Puts each operation on its queue as a launch of its kernel, in the order of
// backend.h. What takes more than one launch is elsewhere: products.h, and
// cuda_kv_cache.h for handoffs.

#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_kv_cache.h"
#include "kernels/cuda/cuda_matrix.h"
#include "kernels/cuda/cuda_queue.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numerics.h"
#include "kernels/cuda/products.h"
#include "kernels/cuda/scratch.h"

namespace tandem::kernels::cuda {
namespace {

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaOptions& options, std::unique_ptr<Device> device)
      : device_(std::move(device)),
        activation_(options.activation),
        scratch_(*device_),
        packer_(*device_, options.activation) {}

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
    return scratch_.Reserve(limits, activation_, packer_.most_code_inputs());
  }

  std::unique_ptr<Queue> NewQueue(std::string_view name) override {
    // Transfers are short, and a peer waits for them.
    return std::make_unique<CudaQueue>(*device_, name == "transfer");
  }

  absl::StatusOr<std::unique_ptr<ExpertSet>> GroupExperts(
      const std::vector<Expert>& experts) override {
    return cuda::GroupExperts(experts, packer_);
  }

  absl::StatusOr<std::unique_ptr<Matrix>> PackMatrix(const HostTensor& source,
                                                     DType dtype) override {
    return packer_.Pack(source, dtype, RowOrder::kPlain);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedMatrix(
      const HostTensor& source, DType dtype) override {
    return packer_.Pack(source, dtype, RowOrder::kGated);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(
      const HostCodes& source) override {
    return packer_.Pack(source, RowOrder::kPlain);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedCodes(
      const HostCodes& source) override {
    return packer_.Pack(source, RowOrder::kGated);
  }

  absl::StatusOr<std::unique_ptr<KvCache>> NewKvCache(
      const KvShape& shape) override {
    return NewCudaKvCache(*device_, shape, activation_);
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
    const CudaMatrix& matrix = Own(table);
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

  void NormInPlace(Queue& queue, int num_rows, int dim, int64_t stride,
                   float eps, const float* weight, void* x) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchRmsNorm(own.stream(), activation_,
                            {.x = x,
                             .delta = nullptr,
                             .weight = weight,
                             .out = x,
                             .num_rows = num_rows,
                             .dim = dim,
                             .eps = eps,
                             .stride = stride}),
              "norm in place");
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

  void CentreHeads(Queue& queue, int num_rows, int heads, int dim,
                   int64_t stride, float eps, const float* weight,
                   void* x) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchLayerNorm(own.stream(), activation_,
                              {.x = x,
                               .delta = nullptr,
                               .weight = weight,
                               .bias = nullptr,
                               .out = x,
                               .num_rows = num_rows,
                               .dim = dim,
                               .eps = eps,
                               .heads = heads,
                               .stride = stride}),
              "norm of heads");
  }

  void MatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
              const float* bias, void* out) override {
    Multiply(Own(queue), scratch_, activation_,
             {.matrix = Own(w),
              .num_rows = num_rows,
              .x = x,
              .bias = bias,
              .out = out});
  }

  void MatMulHeads(Queue& queue, int num_rows, int heads, int outputs,
                   const void* x, const Matrix& w, void* out) override {
    CudaQueue& own = Own(queue);
    const CudaMatrix& matrix = Own(w);
    own.Check(LaunchMatMulHeads(own.stream(), activation_, matrix.type(),
                                {.weights = matrix.weights(),
                                 .x = x,
                                 .out = out,
                                 .heads = heads,
                                 .outputs = outputs,
                                 .cols = matrix.cols(),
                                 .tokens = num_rows}),
              "products of heads");
  }

  void Logits(Queue& queue, int num_rows, const void* x, const Matrix& head,
              const float* bias, float* out) override {
    Multiply(Own(queue), scratch_, activation_,
             {.matrix = Own(head),
              .num_rows = num_rows,
              .x = x,
              .bias = bias,
              .output = MatMulOutput::kWide,
              .out = out});
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
                  void* kv, KvCache& cache, int layer) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchRopeAppend(own.stream(), activation_,
                               {.positions = rows.positions,
                                .slots = rows.slots,
                                .cos = rope.cos,
                                .sin = rope.sin,
                                .pairs = rope.pairs,
                                .qkv = qkv,
                                .kv = ViewOf(cache),
                                .num_rows = rows.num_rows,
                                .heads = heads,
                                .layer = layer,
                                .query_norm = norms.query,
                                .key_norm = norms.key,
                                .value_norm = norms.value,
                                .norm_eps = norms.eps,
                                .norms_rotated = norms.rotated,
                                .query_scale = rope.query_scale,
                                .kv_rows = kv}),
              "rope");
  }

  void RopeQueries(Queue& queue, const Rows& rows, int heads, int head_dim,
                   const RopeTable& rope, const HeadNorms& norms,
                   void* q) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchRopeAppend(own.stream(), activation_,
                               {.positions = rows.positions,
                                .slots = rows.slots,
                                .cos = rope.cos,
                                .sin = rope.sin,
                                .pairs = rope.pairs,
                                .qkv = q,
                                .kv = {.data = nullptr,
                                       .dtype = activation_,
                                       .num_blocks = 0,
                                       .kv_heads = 0,
                                       .head_dim = head_dim,
                                       .block_size = 8},
                                .num_rows = rows.num_rows,
                                .heads = heads,
                                .layer = 0,
                                .query_norm = norms.query,
                                .norm_eps = norms.eps,
                                .norms_rotated = norms.rotated,
                                .query_scale = rope.query_scale}),
              "rope of queries");
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
    std::byte* const scratch = scratch_.Take(
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
                               .soft_cap = options.soft_cap,
                               .sinks = options.sinks}),
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
                   .soft_cap = options.soft_cap,
                   .sinks = options.sinks}),
              "attention weights");
  }

  void GatedMatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
                   const float* bias, Activation activation,
                   void* out) override {
    Multiply(Own(queue), scratch_, activation_,
             {.matrix = Own(w),
              .num_rows = num_rows,
              .x = x,
              .bias = bias,
              .output = MatMulOutput::kGated,
              .activation = activation,
              .out = out});
  }

  // Halves are the product's own rows as they are packed.
  void MatMulHalves(Queue& queue, int num_rows, const void* x, const Matrix& w,
                    void* halves) override {
    Multiply(Own(queue), scratch_, activation_,
             {.matrix = Own(w), .num_rows = num_rows, .x = x, .out = halves});
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

  void AddAndScale(Queue& queue, int num_rows, int dim, float scale,
                   const void* delta, void* x) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchAddAndScale(own.stream(), activation_,
                                {.delta = delta,
                                 .x = x,
                                 .num_rows = num_rows,
                                 .dim = dim,
                                 .scale = scale}),
              "scaled sum");
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

  void ActivateTimes(Queue& queue, int num_rows, int dim, Activation activation,
                     const void* by, int64_t by_stride, void* x) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchActivate(own.stream(), activation_,
                             {.x = x,
                              .num_rows = num_rows,
                              .dim = dim,
                              .activation = activation,
                              .by = by,
                              .by_stride = by_stride}),
              "activation");
  }

  void Route(Queue& queue, int num_rows, const RouteOptions& options,
             const float* logits, float* weights) override {
    CudaQueue& own = Own(queue);
    own.Check(LaunchRoute(own.stream(), {.logits = logits,
                                         .weights = weights,
                                         .num_rows = num_rows,
                                         .options = options}),
              "route");
  }

  void Experts(Queue& queue, int num_rows, const void* x, const float* weights,
               const ExpertSet& experts, const ExpertOptions& options,
               void* out) override {
    RunExperts(Own(queue), scratch_, activation_,
               {.experts = static_cast<const CudaExperts&>(experts),
                .num_rows = num_rows,
                .x = x,
                .weights = weights,
                .options = options,
                .out = out});
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
    std::byte* const scratch = scratch_.Take(own, CudaQueue::kSampling,
                                             SampleScratchBytes(count, vocab));
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
    GatherKv(*device_, Own(queue), ViewOf(cache), range, wire, digest_key,
             staging, digest);
  }

  void KvScatter(Queue& queue, KvCache& cache, const KvRange& range, DType wire,
                 const std::byte* staging) override {
    ScatterKv(*device_, Own(queue), ViewOf(cache), range, wire, staging);
  }

  void KvDigestOf(Queue& queue, const KvCache& cache, const KvRange& range,
                  DType wire, uint64_t digest_key, KvDigest* digest) override {
    DigestKv(Own(queue), ViewOf(cache), range, wire, digest_key, digest);
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
  static const CudaMatrix& Own(const Matrix& matrix) {
    return static_cast<const CudaMatrix&>(matrix);
  }
  static KvView ViewOf(const KvCache& cache) {
    return static_cast<const CudaKvCache&>(cache).view();
  }

  void Copy(Queue& queue, void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    Own(queue).Copy(to, from, bytes);
  }

  const std::unique_ptr<Device> device_;  // outlives what is on it
  const DType activation_;
  ReservedScratch scratch_;
  MatrixPacker packer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> NewCudaBackend(
    const CudaOptions& options, std::unique_ptr<Device> device) {
  const DeviceFacts& facts = device->facts();
  if (facts.shared_bytes < kMostSharedBytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        facts.name, " has ", facts.shared_bytes >> 10,
        " KiB of shared memory for a block, expected ", kMostSharedBytes >> 10,
        " or more (A100, H100, H200, B200), which attention needs"));
  }
  return std::unique_ptr<Backend>(
      std::make_unique<CudaBackend>(options, std::move(device)));
}

}  // namespace tandem::kernels::cuda
