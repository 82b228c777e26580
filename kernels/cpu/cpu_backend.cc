// SPDX-License-Identifier: Apache-2.0
// Puts each operation on its queue and splits it over the team. Products
// (products.h), attention (attention_plan.h), sampling and big element-wise
// operations use the team; handoff operations (gather, scatter, digest:
// cpu_kv_cache.h) stay on their queue's own thread, so that a second queue
// works beside the first.

#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/available_cpus.h"
#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/attention_weights.h"
#include "kernels/cpu/cpu_kv_cache.h"
#include "kernels/cpu/cpu_queue.h"
#include "kernels/cpu/for_rows.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/matrix_packing.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/thread_pool.h"

namespace tandem::kernels {
namespace {

using cpu::CpuExperts;
using cpu::CpuKvCache;
using cpu::CpuQueue;
using cpu::DeviceMemory;
using cpu::ForRows;
using cpu::KernelTable;
using cpu::KvLayout;
using cpu::PackedMatrix;
using cpu::ThreadPool;

constexpr const char* Describe(CpuInputs inputs) {
  switch (inputs) {
    case CpuInputs::kF32:
      return ", ";
    case CpuInputs::kBf16:
      return ", bf16 inputs, ";
    case CpuInputs::kBf16Amx:
      return ", bf16 inputs in groups, ";
  }
  return "";
}

class CpuBuffer final : public Buffer {
 public:
  CpuBuffer(DeviceMemory memory, size_t size)
      : Buffer(memory.data(), size), memory_(std::move(memory)) {}

 private:
  const DeviceMemory memory_;
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& table, int threads,
             std::chrono::nanoseconds spin, cpu::DeviceAllocator* allocator)
      : table_(table), allocator_(allocator), pool_(threads, spin) {}

  std::string description() const override {
    return absl::StrCat("cpu (", std::string(cpu::Name(table_.isa)),
                        Describe(table_.inputs), pool_.threads(),
                        pool_.threads() == 1 ? " thread)" : " threads)");
  }
  std::string numerics() const override {
    switch (table_.inputs) {
      case CpuInputs::kF32:
        return "cpu-3";
      case CpuInputs::kBf16:
        return "cpu-3-bf16";
      case CpuInputs::kBf16Amx:
        return "cpu-3-bf16-amx";
    }
    return "";
  }
  DType activation_type() const override { return DType::kF32; }
  MemoryFigures memory() override { return {}; }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) override {
    absl::StatusOr<DeviceMemory> memory =
        DeviceMemory::Make(*allocator_, bytes);
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<Buffer>(
        std::make_unique<CpuBuffer>(*std::move(memory), bytes));
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) override {
    return Allocate(bytes);
  }
  // What GatedMatMul and Experts need on a queue that is made later; for the
  // rest the team's scratch memory is enough.
  absl::Status Reserve(const WorkLimits& limits) override {
    queue_floats_ =
        size_t(limits.rows) *
        (limits.experts > 0 ? cpu::ExpertFloats(limits.hidden, limits.gated / 2)
                            : limits.gated);
    return absl::OkStatus();
  }
  std::unique_ptr<Queue> NewQueue(std::string_view name) override {
    return std::make_unique<CpuQueue>(name, pool_.spin(), queue_floats_);
  }

  absl::StatusOr<std::unique_ptr<ExpertSet>> GroupExperts(
      const std::vector<Expert>& experts) override {
    return std::unique_ptr<ExpertSet>(std::make_unique<CpuExperts>(experts));
  }

  absl::StatusOr<std::unique_ptr<Matrix>> PackMatrix(const HostTensor& source,
                                                     DType dtype) override {
    return cpu::PackMatrix(pool_, *allocator_, raised(), source, dtype);
  }

  absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(
      const HostCodes& source) override {
    return cpu::PackCodes(pool_, *allocator_, raised(), source);
  }

  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedMatrix(
      const HostTensor& source, DType dtype) override {
    if (source.rows % 2 != 0) return OddRows(source.rows);
    return PackMatrix(source, dtype);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedCodes(
      const HostCodes& source) override {
    if (source.rows % 2 != 0) return OddRows(source.rows);
    return PackCodes(source);
  }

  absl::StatusOr<std::unique_ptr<KvCache>> NewKvCache(
      const KvShape& shape) override {
    return cpu::NewCpuKvCache(*allocator_, shape);
  }

  void CopyToDevice(Queue& queue, void* device, const void* host,
                    size_t bytes) override {
    if (bytes == 0) return;
    Put(queue, [device, host, bytes] { std::memcpy(device, host, bytes); });
  }
  void CopyToHost(Queue& queue, void* host, const void* device,
                  size_t bytes) override {
    if (bytes == 0) return;
    Put(queue, [device, host, bytes] { std::memcpy(host, device, bytes); });
  }

  void Embed(Queue& queue, const Rows& rows, const Matrix& table, float scale,
             const float* positions, void* out) override {
    const PackedMatrix& packed = static_cast<const PackedMatrix&>(table);
    Put(queue, [this, &packed, rows, scale, positions,
                out = static_cast<float*>(out)] {
      const int cols = packed.cols();
      ForRows(pool_, rows.num_rows, cols, [&](int row) {
        const int fed = rows.fed == nullptr ? -1 : rows.fed[row];
        const int token =
            fed < 0 ? rows.token_ids[row] : rows.drawn[fed].token_id;
        float* const to = out + int64_t{row} * cols;
        cpu::UnpackRow(packed, token, to);
        if (scale != 1) table_.scale(cols, scale, 0, to);
        if (positions == nullptr) return;
        const float* const add =
            positions + int64_t{rows.positions[row]} * cols;
        for (int i = 0; i < cols; ++i) to[i] += add[i];
      });
    });
  }

  void RmsNorm(Queue& queue, int num_rows, int dim, float eps, void* x,
               const void* delta, const float* weight, void* out) override {
    Put(queue, [this, num_rows, dim, eps, x = static_cast<float*>(x),
                delta = static_cast<const float*>(delta), weight,
                out = static_cast<float*>(out)] {
      ForRows(pool_, num_rows, dim, [&](int row) {
        const int64_t at = int64_t{row} * dim;
        table_.rms_norm(dim, eps, x + at,
                        delta == nullptr ? nullptr : delta + at, weight,
                        out + at);
      });
    });
  }

  void NormInPlace(Queue& queue, int num_rows, int dim, int64_t stride,
                   float eps, const float* weight, void* x) override {
    Put(queue,
        [this, num_rows, dim, stride, eps, weight, x = static_cast<float*>(x)] {
          ForRows(pool_, num_rows, dim, [&](int row) {
            float* const own = x + row * stride;
            table_.rms_norm(dim, eps, own, nullptr, weight, own);
          });
        });
  }

  void LayerNorm(Queue& queue, int num_rows, int dim, float eps, void* x,
                 const void* delta, const float* weight, const float* bias,
                 void* out) override {
    Put(queue, [this, num_rows, dim, eps, x = static_cast<float*>(x),
                delta = static_cast<const float*>(delta), weight, bias,
                out = static_cast<float*>(out)] {
      ForRows(pool_, num_rows, dim, [&](int row) {
        const int64_t at = int64_t{row} * dim;
        table_.layer_norm(dim, eps, x + at,
                          delta == nullptr ? nullptr : delta + at, weight, bias,
                          out + at);
      });
    });
  }

  void CentreHeads(Queue& queue, int num_rows, int heads, int dim,
                   int64_t stride, float eps, const float* weight,
                   void* x) override {
    Put(queue, [this, num_rows, heads, dim, stride, eps, weight,
                x = static_cast<float*>(x)] {
      ForRows(pool_, num_rows, int64_t{heads} * dim, [&](int row) {
        for (int head = 0; head < heads; ++head) {
          const int64_t first = int64_t{head} * dim;
          float* const own = x + row * stride + first;
          table_.layer_norm(dim, eps, own, nullptr, weight + first, nullptr,
                            own);
        }
      });
    });
  }

  void MatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
              const float* bias, void* out) override {
    const PackedMatrix& packed = static_cast<const PackedMatrix&>(w);
    Put(queue, [this, num_rows, x = static_cast<const float*>(x), &packed, bias,
                out = static_cast<float*>(out)] {
      cpu::RunMatMul(table_, pool_, num_rows, x, packed, bias, out);
    });
  }

  void MatMulHeads(Queue& queue, int num_rows, int heads, int outputs,
                   const void* x, const Matrix& w, void* out) override {
    const PackedMatrix& packed = static_cast<const PackedMatrix&>(w);
    Put(queue,
        [this, num_rows, heads, outputs, x = static_cast<const float*>(x),
         &packed, out = static_cast<float*>(out)] {
          cpu::RunMatMulHeads(table_, pool_, num_rows, heads, outputs, x,
                              packed, out);
        });
  }

  void Logits(Queue& queue, int num_rows, const void* x, const Matrix& head,
              const float* bias, float* out) override {
    MatMul(queue, num_rows, x, head, bias, out);
  }

  void ScaleLogits(Queue& queue, int count, int vocab, float scale,
                   float soft_cap, float* logits) override {
    Put(queue, [=, this] {
      ForRows(pool_, count, vocab, [&](int row) {
        table_.scale(vocab, scale, soft_cap, logits + int64_t{row} * vocab);
      });
    });
  }

  void RopeAppend(Queue& queue, const Rows& rows, int heads,
                  const RopeTable& rope, const HeadNorms& norms, void* qkv,
                  void* kv_rows, KvCache& cache, int layer) override {
    const CpuKvCache& kv = static_cast<const CpuKvCache&>(cache);
    Put(queue,
        [this, count = rows.num_rows, positions = rows.positions,
         slots = rows.slots, heads, rope, norms, q = static_cast<float*>(qkv),
         own = static_cast<float*>(kv_rows), &kv, layer] {
          const KvLayout& layout = kv.layout();
          const int64_t query = int64_t{heads} * layout.head_dim;
          const int64_t keys = int64_t{2} * layout.kv_heads * layout.head_dim;
          const int64_t q_stride = own == nullptr ? query + keys : query;
          const int64_t kv_stride = own == nullptr ? query + keys : keys;
          float* const k = own == nullptr ? q + query : own;
          // Keys go to a line for every two dimensions: as long as twice the
          // row.
          ForRows(pool_, count, 2 * (query + keys), [&](int row) {
            const int slot = slots[row];
            const int64_t angle = int64_t{positions[row]} * rope.pairs;
            table_.rope_append(
                {.query = q + row * q_stride,
                 .kv = k + row * kv_stride,
                 .heads = heads,
                 .kv_heads = layout.kv_heads,
                 .head_dim = layout.head_dim,
                 .pairs = rope.pairs,
                 .cos = rope.cos == nullptr ? nullptr : rope.cos + angle,
                 .sin = rope.cos == nullptr ? nullptr : rope.sin + angle,
                 .query_scale = rope.query_scale == nullptr
                                    ? 1.0f
                                    : rope.query_scale[positions[row]],
                 .norms = norms,
                 .layout = &layout,
                 .block = kv.Block(layer, slot / layout.block_size),
                 .slot = slot % layout.block_size});
          });
        });
  }

  void RopeQueries(Queue& queue, const Rows& rows, int heads, int head_dim,
                   const RopeTable& rope, const HeadNorms& norms,
                   void* q) override {
    Put(queue, [this, count = rows.num_rows, positions = rows.positions, heads,
                head_dim, rope, norms, q = static_cast<float*>(q)] {
      const int64_t query = int64_t{heads} * head_dim;
      ForRows(pool_, count, query, [&](int row) {
        const int64_t angle = int64_t{positions[row]} * rope.pairs;
        table_.rope_append(
            {.query = q + row * query,
             .kv = nullptr,
             .heads = heads,
             .kv_heads = 0,
             .head_dim = head_dim,
             .pairs = rope.pairs,
             .cos = rope.cos == nullptr ? nullptr : rope.cos + angle,
             .sin = rope.cos == nullptr ? nullptr : rope.sin + angle,
             .query_scale = rope.query_scale == nullptr
                                ? 1.0f
                                : rope.query_scale[positions[row]],
             .norms = norms,
             .layout = nullptr,
             .block = nullptr,
             .slot = 0});
      });
    });
  }

  void Attention(Queue& queue, const Rows& rows, int heads,
                 const AttentionOptions& options, const void* q,
                 int64_t q_stride, const KvCache& cache, int layer,
                 void* out) override {
    const cpu::AttentionStep step{
        rows,     heads,
        options,  static_cast<const float*>(q),
        q_stride, &static_cast<const CpuKvCache&>(cache),
        layer,    static_cast<float*>(out)};
    Put(queue, [this, step] {
      ThreadPool::Team team(&pool_);
      cpu::RunAttention(table_, team, step);
    });
  }

  void AttentionWeights(Queue& queue, const Rows& rows, int heads,
                        const AttentionOptions& options, const void* q,
                        int64_t q_stride, const KvCache& cache, int layer,
                        const AttentionLook& look) override {
    const cpu::AttentionWeightsStep step{
        rows.block_tables + look.block_table,
        heads,
        options,
        static_cast<const float*>(q) + look.row * q_stride,
        &static_cast<const CpuKvCache&>(cache),
        layer,
        look};
    Put(queue, [this, step] {
      ThreadPool::Team team(&pool_);
      cpu::RunAttentionWeights(table_, team, step);
    });
  }

  void GatedMatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
                   const float* bias, Activation activation,
                   void* out) override {
    const PackedMatrix& packed = static_cast<const PackedMatrix&>(w);
    CpuQueue& own = static_cast<CpuQueue&>(queue);
    Put(queue, [this, &own, num_rows, x = static_cast<const float*>(x), &packed,
                bias, activation, out = static_cast<float*>(out)] {
      cpu::RunGatedMatMul(table_, pool_, num_rows, x, packed, bias, activation,
                          own.Floats(size_t(num_rows) * packed.rows()), out);
    });
  }

  // Here the halves lie one behind the other, as in the matrix.
  void MatMulHalves(Queue& queue, int num_rows, const void* x, const Matrix& w,
                    void* halves) override {
    MatMul(queue, num_rows, x, w, nullptr, halves);
  }

  void GateHalves(Queue& queue, int num_rows, int dim, Activation activation,
                  const void* halves, void* out) override {
    Put(queue, [this, num_rows, dim, activation,
                both = static_cast<const float*>(halves),
                out = static_cast<float*>(out)] {
      cpu::RunGate(table_, pool_, num_rows, dim, activation, both, out);
    });
  }

  void AddLora(Queue& queue, int num_rows, const void* x, const int32_t* slots,
               const LoraFactors& factors, const LoraSum& sum) override {
    Put(queue, [this, num_rows, x = static_cast<const float*>(x), slots,
                f = factors, sum] {
      const int64_t stride =
          sum.halves > 0 ? int64_t{2} * sum.halves : sum.stride;
      ForRows(pool_, num_rows, int64_t{f.max_rank} * (f.cols + f.rows) / 16,
              [&](int row) {
                if (slots[row] < 0) return;
                const int64_t at = slots[row] * f.slot_stride;
                const int rank = f.rank[at];
                if (rank == 0) return;
                float* const h = sum.scratch + int64_t{row} * f.max_rank;
                table_.lora_shrink(f.cols, rank, f.a + at,
                                   x + int64_t{row} * f.cols, h);
                table_.lora_expand(
                    rank, f.rows, f.b + at, h, f.scale[at],
                    static_cast<float*>(sum.out) + row * stride + sum.first);
              });
    });
  }

  void Route(Queue& queue, int num_rows, const RouteOptions& options,
             const float* logits, float* weights) override {
    Put(queue, [=, this] {
      ForRows(pool_, num_rows, int64_t{options.experts} * options.chosen,
              [&](int row) {
                table_.route(options, logits + int64_t{row} * options.logits(),
                             weights + int64_t{row} * options.weights());
              });
    });
  }

  void Experts(Queue& queue, int num_rows, const void* x, const float* weights,
               const ExpertSet& experts, const ExpertOptions& options,
               void* out) override {
    CpuQueue& own = static_cast<CpuQueue&>(queue);
    const cpu::ExpertsStep step{&static_cast<const CpuExperts&>(experts),
                                num_rows,
                                static_cast<const float*>(x),
                                weights,
                                options,
                                static_cast<float*>(out)};
    Put(queue, [this, &own, step] {
      const CpuExperts& set = *step.experts;
      cpu::RunExperts(table_, pool_, step,
                      own.Floats(size_t(step.num_rows) *
                                 cpu::ExpertFloats(set.dim(), set.wide())));
    });
  }

  void AddAndScale(Queue& queue, int num_rows, int dim, float scale,
                   const void* delta, void* x) override {
    Put(queue,
        [this, num_rows, dim, scale, delta = static_cast<const float*>(delta),
         x = static_cast<float*>(x)] {
          ForRows(pool_, num_rows, dim, [&](int row) {
            const int64_t at = int64_t{row} * dim;
            table_.add_and_scale(dim, scale, delta + at, x + at);
          });
        });
  }

  void Activate(Queue& queue, int num_rows, int dim, Activation activation,
                void* x) override {
    Put(queue, [this, num_rows, dim, activation, x = static_cast<float*>(x)] {
      ForRows(pool_, num_rows, dim, [&](int row) {
        table_.activate(activation, dim, x + int64_t{row} * dim);
      });
    });
  }

  void ActivateTimes(Queue& queue, int num_rows, int dim, Activation activation,
                     const void* by, int64_t by_stride, void* x) override {
    Put(queue,
        [this, num_rows, dim, activation, by_stride,
         by = static_cast<const float*>(by), x = static_cast<float*>(x)] {
          ForRows(pool_, num_rows, dim, [&](int row) {
            table_.activate_times(activation, dim, by + row * by_stride,
                                  x + int64_t{row} * dim);
          });
        });
  }

  void GatherRows(Queue& queue, int count, int dim, const int32_t* row_ids,
                  const void* x, void* out) override {
    Put(queue, [count, dim, row_ids, x = static_cast<const float*>(x),
                out = static_cast<float*>(out)] {
      for (int i = 0; i < count; ++i) {
        std::memcpy(out + int64_t{i} * dim, x + int64_t{row_ids[i]} * dim,
                    static_cast<size_t>(dim) * sizeof(float));
      }
    });
  }

  void Sample(Queue& queue, int count, int vocab, float* logits,
              const SampleParams* params, LogitEdit* edits,
              const uint32_t* masks, SampleResult* results) override {
    Put(queue, [=, this] {
      ThreadPool::Team team(&pool_);
      team.ForEach(count, [&](int row, int member) {
        table_.sample({.logits = logits + int64_t{row} * vocab,
                       .vocab = vocab,
                       .params = params + row,
                       .edits = edits,
                       .masks = masks,
                       .result = results + row,
                       .scratch = team.member_scratch(member)});
      });
    });
  }

  void KvGather(Queue& queue, const KvCache& cache, const KvRange& range,
                DType wire, uint64_t digest_key, std::byte* staging,
                KvDigest* digest) override {
    PutRead(queue, cache, range, wire, digest_key, staging, digest);
  }

  void KvScatter(Queue& queue, KvCache& cache, const KvRange& range, DType wire,
                 const std::byte* staging) override {
    const CpuKvCache& kv = static_cast<const CpuKvCache&>(cache);
    Put(queue, [this, &kv, range, wire, staging] {
      cpu::WriteKv(table_, kv, range, wire, staging);
    });
  }

  void KvDigestOf(Queue& queue, const KvCache& cache, const KvRange& range,
                  DType wire, uint64_t digest_key, KvDigest* digest) override {
    PutRead(queue, cache, range, wire, digest_key, nullptr, digest);
  }

  void KvCopyBlock(Queue& queue, KvCache& cache, int from_block,
                   int to_block) override {
    const CpuKvCache& kv = static_cast<const CpuKvCache&>(cache);
    Put(queue, [&kv, from_block, to_block] {
      for (int layer = 0; layer < kv.shape().num_layers; ++layer) {
        std::memcpy(kv.Block(layer, to_block), kv.Block(layer, from_block),
                    static_cast<size_t>(kv.layout().block_bytes));
      }
    });
  }

 private:
  template <typename Closure>
  static void Put(Queue& queue, Closure closure) {
    static_cast<CpuQueue&>(queue).Put(std::move(closure));
  }

  // Whether codes lie as vpdpbusd takes them.
  bool raised() const { return table_.dot == cpu::Dot::kVnni; }

  static absl::Status OddRows(int64_t rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gated matrix of ", rows, " rows: must be an even number"));
  }

  // Gather with `staging`, digest alone without.
  void PutRead(Queue& queue, const KvCache& cache, const KvRange& range,
               DType wire, uint64_t digest_key, std::byte* staging,
               KvDigest* digest) {
    CpuQueue& own = static_cast<CpuQueue&>(queue);
    const CpuKvCache& kv = static_cast<const CpuKvCache&>(cache);
    own.Put([this, &own, &kv, range, wire, digest_key, staging, digest] {
      *digest = cpu::ReadKv(table_, kv, range, wire, digest_key, staging,
                            own.scratch());
    });
  }

  const KernelTable table_;
  cpu::DeviceAllocator* const allocator_;
  ThreadPool pool_;
  size_t queue_floats_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> NewCpuBackend(
    const CpuOptions& options) {
  absl::StatusOr<KernelTable> table =
      cpu::MakeKernelTable(options.instruction_set, options.inputs);
  if (!table.ok()) return table.status();
  if (options.fetching != CpuFetching::kAuto) {
    table->fetching = options.fetching == CpuFetching::kIntel
                          ? cpu::kIntelFetching
                          : cpu::kAmdFetching;
  }
  if (options.threads < 0 || options.threads > kMaxCpuThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads is ", options.threads,
                     ", expected 0 (all CPUs) to ", kMaxCpuThreads));
  }
  if (options.spin_microseconds < 0 || options.spin_microseconds > 1000000) {
    return absl::InvalidArgumentError(absl::StrCat("spin_microseconds is ",
                                                   options.spin_microseconds,
                                                   ", expected 0 to 1000000"));
  }
  const int threads = options.threads > 0
                          ? options.threads
                          : std::min(AvailableCpus(), kMaxCpuThreads);
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(
      *table, threads, std::chrono::microseconds(options.spin_microseconds),
      options.allocator != nullptr ? options.allocator : &cpu::HostMemory()));
}

int64_t CpuKvBlockBytes(const KvShape& shape) {
  return shape.num_layers * cpu::KvLayout(shape).block_bytes;
}

}  // namespace tandem::kernels
