// SPDX-License-Identifier: Apache-2.0
// Puts each operation on its queue and splits it over the team. Products,
// attention, sampling and big element-wise operations use the team; handoff
// operations (gather, scatter, digest) stay on their queue's own thread, so
// that a second queue works beside the first.

#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/attention_weights.h"
#include "kernels/cpu/cpu_queue.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/host_codes.h"
#include "kernels/kv_digest.h"

namespace tandem::kernels {
namespace {

using cpu::CpuKvCache;
using cpu::CpuQueue;
using cpu::DeviceMemory;
using cpu::KernelTable;
using cpu::KvLayout;
using cpu::PackedMatrix;
using cpu::ThreadPool;

inline constexpr int kMaxThreads = 256;
// Below this many elements (or products) a fork costs more than it saves.
inline constexpr int64_t kForkElements = 16384;
inline constexpr int64_t kForkProducts = 65536;

class CpuBuffer final : public Buffer {
 public:
  CpuBuffer(DeviceMemory memory, size_t size)
      : Buffer(memory.data(), size), memory_(std::move(memory)) {}

 private:
  const DeviceMemory memory_;
};

class CpuExperts final : public ExpertSet {
 public:
  explicit CpuExperts(const std::vector<Expert>& experts)
      : ExpertSet(static_cast<int>(experts.size())), experts_(experts) {}

  const PackedMatrix& gate_up(int e) const { return Of(At(e).gate_up); }
  const PackedMatrix& down(int e) const { return Of(At(e).down); }
  int dim() const { return down(0).rows(); }
  int wide() const { return down(0).cols(); }

 private:
  const Expert& At(int e) const { return experts_[static_cast<size_t>(e)]; }
  static const PackedMatrix& Of(const Matrix* matrix) {
    return static_cast<const PackedMatrix&>(*matrix);
  }

  const std::vector<Expert> experts_;
};

// Rows [0, count) in even shares, on the whole team if they are big enough.
template <typename Body>
void ForRows(ThreadPool& pool, int count, int64_t elements_per_row,
             const Body& body) {
  if (pool.threads() == 1 || count * elements_per_row < kForkElements) {
    for (int row = 0; row < count; ++row) body(row);
    return;
  }
  ThreadPool::Team team(&pool);
  const int shares = std::min(team.threads() * 4, count);
  team.ForEach(shares, [&](int share, int) {
    const int end = static_cast<int>(int64_t{count} * (share + 1) / shares);
    for (int row = static_cast<int>(int64_t{count} * share / shares); row < end;
         ++row) {
      body(row);
    }
  });
}

// Threads over (outputs, rows) such that the largest share is smallest.
struct Split {
  int outputs;
  int rows;
};

Split SplitMatMul(int threads, int panels, int rows) {
  Split best{1, 1};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int by_rows = 1; by_rows <= threads; ++by_rows) {
    // A share of few rows would read the weights for too little work.
    if (by_rows > 1 && rows / by_rows < 32) break;
    const int by_outputs = std::min(threads / by_rows, panels);
    const int64_t share = int64_t{(panels + by_outputs - 1) / by_outputs} *
                          ((rows + by_rows - 1) / by_rows);
    if (share < least) {
      least = share;
      best = {by_outputs, by_rows};
    }
  }
  return best;
}

absl::Status CheckShape(const KvShape& shape) {
  if (shape.num_layers < 1 || shape.kv_heads < 1 || shape.num_blocks < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KV cache of ", shape.num_layers, " layers, ", shape.kv_heads,
        " heads, ", shape.num_blocks, " blocks: each must be at least 1"));
  }
  if (shape.head_dim < 8 || shape.head_dim > cpu::kMaxHeadDim ||
      shape.head_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", shape.head_dim,
                     ", expected a multiple of 8 from 8 to 256"));
  }
  if (shape.block_size < 8 || shape.block_size > cpu::kMaxBlockSize ||
      shape.block_size % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_size is ", shape.block_size,
                     ", expected a multiple of 8 from 8 to 256"));
  }
  if (shape.dtype == DType::kF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV cache type is ", std::string(Name(shape.dtype)),
                     ", expected f32, bf16, fp8, int8 or int4 on a CPU"));
  }
  if (int64_t{2} * shape.kv_heads * shape.head_dim * 4 >
      static_cast<int64_t>(CpuQueue::kScratchBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV of ", shape.kv_heads, " heads of ", shape.head_dim,
                     " dimensions is larger than 1 MiB a position"));
  }
  return absl::OkStatus();
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& table, int threads,
             std::chrono::nanoseconds spin, cpu::DeviceAllocator* allocator)
      : table_(table), allocator_(allocator), pool_(threads, spin) {}

  std::string description() const override {
    return absl::StrCat("cpu (", std::string(cpu::Name(table_.isa)),
                        table_.rounds_inputs ? ", bf16 inputs, " : ", ",
                        pool_.threads(),
                        pool_.threads() == 1 ? " thread)" : " threads)");
  }
  std::string numerics() const override {
    return table_.rounds_inputs ? "cpu-1-bf16" : "cpu-1";
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
        (limits.experts > 0 ? ExpertFloats(limits.hidden, limits.gated / 2)
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
    if (source.data == nullptr) return BadMatrix(source.rows, source.cols);
    if (dtype == DType::kF16) {
      return absl::InvalidArgumentError(
          absl::StrCat("matrices are kept as f32, bf16, fp8, int8 or int4 on a "
                       "CPU, not ",
                       std::string(Name(dtype))));
    }
    const bool codes = dtype == DType::kInt8 || dtype == DType::kInt4;
    return Pack(
        source.rows, source.cols, dtype,
        dtype == DType::kInt4 ? cpu::CodeKind::kInt4 : cpu::CodeKind::kInt8,
        [&](int panel, std::byte* target, float* scales) {
          if (codes) {
            cpu::PackCodePanel(source, dtype, panel, target, scales);
          } else {
            cpu::PackPanel(source, dtype, panel, target, scales);
          }
        });
  }

  absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(
      const HostCodes& source) override {
    if (absl::Status status = CheckCodes(source); !status.ok()) return status;
    return Pack(source.rows, source.cols, source.dtype,
                source.dtype != DType::kInt4 ? cpu::CodeKind::kInt8
                : source.zeros == nullptr    ? cpu::CodeKind::kInt4
                                             : cpu::CodeKind::kInt4Zeros,
                [&](int panel, std::byte* target, float* scales) {
                  if (source.dtype == DType::kFp8) {
                    cpu::PackFp8Panel(source, panel, target, scales);
                  } else {
                    cpu::PackCodePanel(source, panel, target, scales);
                  }
                });
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
    if (absl::Status status = CheckShape(shape); !status.ok()) return status;
    const KvLayout layout(shape);
    absl::StatusOr<DeviceMemory> memory = DeviceMemory::Make(
        *allocator_,
        static_cast<size_t>(layout.layer_bytes * shape.num_layers));
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<KvCache>(
        std::make_unique<CpuKvCache>(shape, *std::move(memory)));
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

  void MatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
              const float* bias, void* out) override {
    const PackedMatrix& packed = static_cast<const PackedMatrix&>(w);
    Put(queue, [this, num_rows, x = static_cast<const float*>(x), &packed, bias,
                out = static_cast<float*>(out)] {
      RunMatMul(num_rows, x, packed, bias, out);
    });
  }

  void Logits(Queue& queue, int num_rows, const void* x, const Matrix& head,
              float* out) override {
    MatMul(queue, num_rows, x, head, nullptr, out);
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
                  KvCache& cache, int layer) override {
    const CpuKvCache& kv = static_cast<const CpuKvCache&>(cache);
    Put(queue, [this, count = rows.num_rows, positions = rows.positions,
                slots = rows.slots, heads, rope, norms,
                qkv = static_cast<float*>(qkv), &kv, layer] {
      const KvLayout& layout = kv.layout();
      const int half = layout.head_dim / 2;
      const int64_t stride =
          int64_t{heads + 2 * layout.kv_heads} * layout.head_dim;
      ForRows(pool_, count, stride, [&](int row) {
        const int slot = slots[row];
        const int64_t angle = int64_t{positions[row]} * half;
        table_.rope_append(
            {.qkv = qkv + row * stride,
             .heads = heads,
             .kv_heads = layout.kv_heads,
             .head_dim = layout.head_dim,
             .cos = rope.cos == nullptr ? nullptr : rope.cos + angle,
             .sin = rope.cos == nullptr ? nullptr : rope.sin + angle,
             .norms = norms,
             .layout = &layout,
             .block = kv.Block(layer, slot / layout.block_size),
             .slot = slot % layout.block_size});
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
      RunGatedMatMul(num_rows, x, packed, bias, activation,
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
      RunGate(num_rows, dim, activation, both, out);
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

  void Route(Queue& queue, int num_rows, int experts, int chosen,
             bool normalise, const float* logits, float* weights) override {
    Put(queue, [=, this] {
      for (int row = 0; row < num_rows; ++row) {
        const int64_t at = int64_t{row} * experts;
        table_.route(experts, chosen, normalise, logits + at, weights + at);
      }
    });
  }

  // Each expert's rows together.
  void Experts(Queue& queue, int num_rows, int chosen, const void* x,
               const float* weights, const ExpertSet& experts,
               Activation activation, void* out) override {
    CpuQueue& own = static_cast<CpuQueue&>(queue);
    Put(queue, [this, &own, num_rows, x = static_cast<const float*>(x), weights,
                &set = static_cast<const CpuExperts&>(experts), activation,
                out = static_cast<float*>(out)] {
      const int dim = set.dim();
      const int wide = set.wide();
      const auto rows_of = [num_rows](int width) {
        return int64_t{num_rows} * width;
      };
      float* const taken =
          own.Floats(size_t(num_rows) * ExpertFloats(dim, wide));
      float* const both = taken + rows_of(dim);
      float* const hidden = both + rows_of(2 * wide);
      float* const y = hidden + rows_of(wide);
      std::fill_n(out, rows_of(dim), 0.0f);
      for (int e = 0; e < set.count(); ++e) {
        const auto weight = [&](int row) {
          return weights[int64_t{row} * set.count() + e];
        };
        int rows = 0;
        for (int row = 0; row < num_rows; ++row) {
          if (weight(row) == 0) continue;
          std::copy_n(x + int64_t{row} * dim, dim,
                      taken + int64_t{rows++} * dim);
        }
        if (rows == 0) continue;
        RunGatedMatMul(rows, taken, set.gate_up(e), nullptr, activation, both,
                       hidden);
        RunMatMul(rows, hidden, set.down(e), nullptr, y);
        rows = 0;
        for (int row = 0; row < num_rows; ++row) {
          if (weight(row) == 0) continue;
          table_.add_weighted(dim, weight(row), y + int64_t{rows++} * dim,
                              out + int64_t{row} * dim);
        }
      }
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
      auto* row = const_cast<std::byte*>(staging);  // is read alone
      ForKvRows(kv, range, wire, std::numeric_limits<int>::max(),
                [&](int, int, cpu::KvRowsPiece& piece) {
                  piece.row = row;
                  table_.write_kv_rows(piece);
                  row += piece.rows * piece.row_bytes;
                });
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

  // In two passes: the halves are far apart in the packed matrix.
  // `both`: room for [num_rows, w.rows()].
  void RunGatedMatMul(int num_rows, const float* x, const PackedMatrix& w,
                      const float* bias, Activation activation, float* both,
                      float* out) {
    RunMatMul(num_rows, x, w, bias, both);
    RunGate(num_rows, w.rows() / 2, activation, both, out);
  }

  // Of a row: its copy and what its expert makes of it, both halves of the
  // gated product, and what comes of them.
  static constexpr size_t ExpertFloats(int dim, int wide) {
    return size_t{2} * dim + size_t{3} * wide;
  }

  void RunGate(int num_rows, int dim, Activation activation, const float* both,
               float* out) {
    ForRows(pool_, num_rows, dim, [&](int row) {
      const float* const gate = both + int64_t{row} * 2 * dim;
      table_.gate(activation, dim, gate, gate + dim, out + int64_t{row} * dim);
    });
  }

  static absl::Status BadMatrix(int64_t rows, int64_t cols) {
    return absl::InvalidArgumentError(absl::StrCat(
        "matrix of ", rows, " rows and ", cols, " columns cannot be packed"));
  }

  static absl::Status OddRows(int64_t rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gated matrix of ", rows, " rows: must be an even number"));
  }

  // A matrix whose panels pack(panel, target, scales) fills.
  absl::StatusOr<std::unique_ptr<Matrix>> Pack(
      int64_t rows, int64_t cols, DType dtype, cpu::CodeKind kind,
      absl::FunctionRef<void(int, std::byte*, float*)> pack) {
    constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
    if (rows < 1 || cols < 1 || rows > kMost || cols > kMost) {
      return BadMatrix(rows, cols);
    }
    const int panels = PackedMatrix::Panels(static_cast<int>(rows));
    const int64_t panel_bytes =
        dtype == DType::kInt8 || dtype == DType::kInt4
            ? cpu::CodePanelBytes(static_cast<int>(cols), kind)
            : PackedMatrix::PanelBytes(static_cast<int>(cols), dtype);
    absl::StatusOr<DeviceMemory> memory = DeviceMemory::Make(
        *allocator_, static_cast<size_t>(panels * panel_bytes));
    if (!memory.ok()) return memory.status();
    std::byte* const data = memory->data();
    std::vector<float> scales(IsQuantised(dtype) ? static_cast<size_t>(rows)
                                                 : 0);
    {
      ThreadPool::Team team(&pool_);
      team.ForEach(panels, [&](int panel, int) {
        pack(panel, data + panel * panel_bytes, scales.data());
      });
    }
    return std::unique_ptr<Matrix>(std::make_unique<PackedMatrix>(
        static_cast<int>(rows), static_cast<int>(cols), dtype,
        *std::move(memory), std::move(scales), kind));
  }

  static int64_t RowBytes(const KvLayout& layout, const KvRange& range,
                          DType wire) {
    return KvRowBytes(wire, range.head_end - range.head_begin, layout.head_dim);
  }

  void RunMatMul(int num_rows, const float* x, const PackedMatrix& w,
                 const float* bias, float* out) {
    cpu::MatMulPiece piece{};
    piece.x = x;
    piece.w = w.data();
    piece.scales = w.scales();
    piece.bias = bias;
    piece.out = out;
    piece.k = w.cols();
    piece.n = w.rows();
    piece.type = w.dtype();
    piece.streams = table_.streams;
    ThreadPool::Team team(&pool_);
    if (!w.has_codes()) {
      SplitProduct(team, piece, num_rows, table_.matmul);
      return;
    }
    // As many rows at once as the team's scratch memory holds quantised.
    piece.kind = w.kind();
    const int pieces = cpu::RowPieces(piece.k);
    const int most =
        std::max(1, (static_cast<int>(ThreadPool::kTeamScratchBytes /
                                      sizeof(cpu::RowPiece)) -
                     cpu::kRowPiecesRead) /
                        pieces);
    auto* const codes = reinterpret_cast<cpu::RowPiece*>(team.team_scratch());
    piece.codes = codes;
    for (int begin = 0; begin < num_rows; begin += most) {
      piece.rows = std::min(most, num_rows - begin);
      const float* const from = x + int64_t{begin} * piece.k;
      const auto quantise = [&](int row, int) {
        table_.quantise_row(from + int64_t{row} * piece.k, piece.k, codes + row,
                            piece.rows);
      };
      if (int64_t{piece.rows} * piece.k < kForkElements) {
        for (int row = 0; row < piece.rows; ++row) quantise(row, 0);
      } else {
        team.ForEach(piece.rows, quantise);
      }
      piece.out = out + int64_t{begin} * piece.n;
      SplitProduct(team, piece, piece.rows, table_.matmul_codes);
    }
  }

  // Runs `product` over the pieces of `whole` on the team.
  static void SplitProduct(ThreadPool::Team& team,
                           const cpu::MatMulPiece& whole, int num_rows,
                           void (*product)(const cpu::MatMulPiece&)) {
    const int panels = PackedMatrix::Panels(whole.n);
    const int64_t products = int64_t{num_rows} * whole.n * whole.k;
    const Split split = products < kForkProducts
                            ? Split{1, 1}
                            : SplitMatMul(team.threads(), panels, num_rows);
    const auto run = [&](int share, int member) {
      cpu::MatMulPiece mine = whole;
      const int column = share % split.outputs;
      const int row = share / split.outputs;
      const auto cut = [](int count, int part, int parts) {
        return static_cast<int>(int64_t{count} * part / parts);
      };
      mine.panel_begin = cut(panels, column, split.outputs);
      mine.panel_end = cut(panels, column + 1, split.outputs);
      mine.row_begin = cut(num_rows, row, split.rows);
      mine.row_end = cut(num_rows, row + 1, split.rows);
      mine.scratch = team.member_scratch(member);
      product(mine);
    };
    const int shares = split.outputs * split.rows;
    if (shares == 1) {
      run(0, 0);
      return;
    }
    team.Run([&](int member) {
      if (member < shares) run(member, member);
    });
  }

  // run(layer, first position, piece without `row`) over a range's rows in the
  // order of the wire, at most `most` at once.
  template <typename Run>
  static void ForKvRows(const CpuKvCache& kv, const KvRange& range, DType wire,
                        int most, const Run& run) {
    const KvLayout& layout = kv.layout();
    cpu::KvRowsPiece piece{};
    piece.layout = &layout;
    piece.head_begin = range.head_begin;
    piece.head_end = range.head_end;
    piece.wire = wire;
    piece.row_bytes = RowBytes(layout, range, wire);
    for (int layer = range.layer_begin; layer < range.layer_end; ++layer) {
      for (int position = range.position_begin; position < range.position_end;
           position += piece.rows) {
        piece.block =
            kv.Block(layer, range.block_table[position / layout.block_size]);
        piece.slot = position % layout.block_size;
        piece.rows = std::min({most, layout.block_size - piece.slot,
                               range.position_end - position});
        run(layer, position, piece);
      }
    }
  }

  // Gather with `staging`, digest alone without.
  void PutRead(Queue& queue, const KvCache& cache, const KvRange& range,
               DType wire, uint64_t digest_key, std::byte* staging,
               KvDigest* digest) {
    CpuQueue& own = static_cast<CpuQueue&>(queue);
    const CpuKvCache& kv = static_cast<const CpuKvCache&>(cache);
    own.Put([this, &own, &kv, range, wire, digest_key, staging, digest] {
      const DigestKeys keys(digest_key);
      KvDigest sum;
      std::byte* row = staging != nullptr ? staging : own.scratch();
      const int most =
          staging != nullptr
              ? std::numeric_limits<int>::max()
              : static_cast<int>(static_cast<int64_t>(CpuQueue::kScratchBytes) /
                                 RowBytes(kv.layout(), range, wire));
      ForKvRows(kv, range, wire, most,
                [&](int layer, int position, cpu::KvRowsPiece& piece) {
                  piece.row = row;
                  table_.read_kv_rows(piece);
                  for (int i = 0; i < piece.rows; ++i) {
                    sum += table_.digest_row(
                        reinterpret_cast<const uint32_t*>(piece.row +
                                                          i * piece.row_bytes),
                        static_cast<int>(piece.row_bytes / 4), keys.low,
                        keys.high, digest_key, layer, position + i);
                  }
                  if (staging != nullptr) row += piece.rows * piece.row_bytes;
                });
      *digest = sum;
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
  if (options.activation != DType::kF32 && options.activation != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("activations are ", std::string(Name(options.activation)),
                     ", expected f32 or bf16 on a CPU"));
  }
  absl::StatusOr<KernelTable> table = cpu::MakeKernelTable(
      options.instruction_set, options.activation == DType::kBF16);
  if (!table.ok()) return table.status();
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads is ", options.threads,
                     ", expected 0 (all CPUs) to ", kMaxThreads));
  }
  if (options.spin_microseconds < 0 || options.spin_microseconds > 1000000) {
    return absl::InvalidArgumentError(absl::StrCat("spin_microseconds is ",
                                                   options.spin_microseconds,
                                                   ", expected 0 to 1000000"));
  }
  const int threads = options.threads > 0
                          ? options.threads
                          : std::min(cpu::AvailableCpus(), kMaxThreads);
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(
      *table, threads, std::chrono::microseconds(options.spin_microseconds),
      options.allocator != nullptr ? options.allocator : &cpu::HostMemory()));
}

}  // namespace tandem::kernels
