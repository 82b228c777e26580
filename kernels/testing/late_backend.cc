// SPDX-License-Identifier: Apache-2.0

#include "kernels/testing/late_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "kernels/kv_digest.h"

namespace tandem::kernels::testing {
namespace {

inline constexpr size_t kPage = 4096;

// One reservation, opened and closed as a whole: access is a count of running
// operations.
class HiddenArena final : public cpu::DeviceAllocator {
 public:
  explicit HiddenArena(size_t bytes)
      : size_(bytes / kPage * kPage),
        base_(static_cast<std::byte*>(
            mmap(nullptr, size_, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (base_ == MAP_FAILED) Die("mmap");
    free_[0] = size_;
  }
  ~HiddenArena() override { munmap(base_, size_); }

  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    const size_t need = Rounded(bytes);
    MutexLock lock(&mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < need) continue;
      const size_t offset = it->first;
      const size_t rest = it->second - need;
      free_.erase(it);
      if (rest > 0) free_[offset + need] = rest;
      const size_t used = std::max(used_, offset + need);
      if (running_ > 0 && used > used_) {
        Protect(used_, used - used_, PROT_READ | PROT_WRITE);
      }
      used_ = used;
      return base_ + offset;
    }
    return absl::ResourceExhaustedError(absl::StrCat(
        "late backend: arena of ", size_, " bytes has no room for ", bytes));
  }

  void Free(std::byte* data, size_t bytes) override {
    const size_t need = Rounded(bytes);
    const size_t offset = static_cast<size_t>(data - base_);
    MutexLock lock(&mutex_);
    // The next owner finds zeros.
    if (madvise(data, need, MADV_DONTNEED) != 0) Die("madvise");
    auto it = free_.emplace(offset, need).first;
    if (auto next = std::next(it);
        next != free_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      free_.erase(next);
    }
    if (it != free_.begin()) {
      if (auto previous = std::prev(it);
          previous->first + previous->second == it->first) {
        previous->second += it->second;
        free_.erase(it);
      }
    }
  }

  void Open() {
    MutexLock lock(&mutex_);
    if (running_++ == 0 && used_ > 0) {
      Protect(0, used_, PROT_READ | PROT_WRITE);
    }
  }
  void Close() {
    MutexLock lock(&mutex_);
    if (--running_ == 0 && used_ > 0) Protect(0, used_, PROT_NONE);
  }

 private:
  static size_t Rounded(size_t bytes) {
    return (bytes + kPage - 1) / kPage * kPage;
  }
  [[noreturn]] static void Die(const char* call) {
    std::fprintf(stderr, "late backend: %s: %s\n", call, std::strerror(errno));
    std::abort();
  }
  void Protect(size_t offset, size_t bytes, int access) {
    if (mprotect(base_ + offset, bytes, access) != 0) Die("mprotect");
  }

  const size_t size_;
  std::byte* const base_;
  Mutex mutex_;
  std::map<size_t, size_t> free_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;  // highest end ever given out
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
};

class ScopedOpen {
 public:
  explicit ScopedOpen(HiddenArena* arena) : arena_(arena) { arena_->Open(); }
  ~ScopedOpen() { arena_->Close(); }
  ScopedOpen(const ScopedOpen&) = delete;
  ScopedOpen& operator=(const ScopedOpen&) = delete;

 private:
  HiddenArena* const arena_;
};

// An operation becomes three closures of the inner queue: sleep and open,
// the operation, close.
class LateQueue final : public Queue {
 public:
  LateQueue(std::unique_ptr<Queue> inner, HiddenArena* arena, uint64_t seed,
            int max_delay_microseconds)
      : inner_(std::move(inner)),
        arena_(arena),
        state_(seed),
        max_delay_microseconds_(max_delay_microseconds) {}

  void Callback(absl::AnyInvocable<void()> callback) override {
    inner_->Callback(std::move(callback));
  }
  void HostWork(absl::AnyInvocable<void()> work) override {
    inner_->HostWork(std::move(work));
  }
  void WaitFor(Queue& other) override {
    inner_->WaitFor(static_cast<LateQueue&>(other).inner());
  }
  void Synchronize() override { inner_->Synchronize(); }

  Queue& inner() { return *inner_; }

  template <typename Operation>
  void Run(const Operation& operation) {
    const std::chrono::microseconds delay(NextDelay());
    inner_->Callback([arena = arena_, delay] {
      std::this_thread::sleep_for(delay);
      arena->Open();
    });
    operation(*inner_);
    inner_->Callback([arena = arena_] { arena->Close(); });
  }

 private:
  int64_t NextDelay() {
    state_ += 0x9e3779b97f4a7c15u;
    return static_cast<int64_t>(
        DigestMix(state_) %
        (static_cast<uint64_t>(max_delay_microseconds_) + 1));
  }

  const std::unique_ptr<Queue> inner_;
  HiddenArena* const arena_;
  uint64_t state_;  // of the submitting thread
  const int max_delay_microseconds_;
};

// The inner backend's would be hidden with all its memory.
class HostBuffer final : public Buffer {
 public:
  explicit HostBuffer(size_t bytes) : HostBuffer(bytes, new_bytes(bytes)) {}

 private:
  static std::unique_ptr<std::byte[]> new_bytes(size_t bytes) {
    return std::make_unique<std::byte[]>(bytes);
  }
  HostBuffer(size_t bytes, std::unique_ptr<std::byte[]> memory)
      : Buffer(memory.get(), bytes), memory_(std::move(memory)) {}

  const std::unique_ptr<std::byte[]> memory_;
};

class LateBackend final : public Backend {
 public:
  LateBackend(std::unique_ptr<HiddenArena> arena,
              std::unique_ptr<Backend> inner, const LateOptions& options)
      : arena_(std::move(arena)),
        inner_(std::move(inner)),
        seed_(options.seed),
        max_delay_microseconds_(options.max_delay_microseconds) {}

  std::string description() const override {
    return absl::StrCat("late ", inner_->description());
  }
  std::string numerics() const override { return inner_->numerics(); }
  DType activation_type() const override { return inner_->activation_type(); }
  MemoryFigures memory() override { return inner_->memory(); }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) override {
    return inner_->Allocate(bytes);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) override {
    return std::unique_ptr<Buffer>(std::make_unique<HostBuffer>(bytes));
  }
  absl::Status Reserve(const WorkLimits& limits) override {
    return inner_->Reserve(limits);
  }
  std::unique_ptr<Queue> NewQueue(std::string_view name) override {
    return std::make_unique<LateQueue>(inner_->NewQueue(name), arena_.get(),
                                       seed_ + queues_.fetch_add(1),
                                       max_delay_microseconds_);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackMatrix(const HostTensor& source,
                                                     DType dtype) override {
    const ScopedOpen open(arena_.get());
    return inner_->PackMatrix(source, dtype);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedMatrix(
      const HostTensor& source, DType dtype) override {
    const ScopedOpen open(arena_.get());
    return inner_->PackGatedMatrix(source, dtype);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(
      const HostCodes& source) override {
    const ScopedOpen open(arena_.get());
    return inner_->PackCodes(source);
  }
  absl::StatusOr<std::unique_ptr<Matrix>> PackGatedCodes(
      const HostCodes& source) override {
    const ScopedOpen open(arena_.get());
    return inner_->PackGatedCodes(source);
  }
  absl::StatusOr<std::unique_ptr<ExpertSet>> GroupExperts(
      const std::vector<Expert>& experts) override {
    return inner_->GroupExperts(experts);
  }
  absl::StatusOr<std::unique_ptr<KvCache>> NewKvCache(
      const KvShape& shape) override {
    const ScopedOpen open(arena_.get());
    return inner_->NewKvCache(shape);
  }

  void CopyToDevice(Queue& queue, void* device, const void* host,
                    size_t bytes) override {
    Run(queue, [&](Queue& inner) {
      inner_->CopyToDevice(inner, device, host, bytes);
    });
  }
  void CopyToHost(Queue& queue, void* host, const void* device,
                  size_t bytes) override {
    Run(queue,
        [&](Queue& inner) { inner_->CopyToHost(inner, host, device, bytes); });
  }
  void Embed(Queue& queue, const Rows& rows, const Matrix& table, float scale,
             const float* positions, void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->Embed(inner, rows, table, scale, positions, out);
    });
  }
  void RmsNorm(Queue& queue, int num_rows, int dim, float eps, void* x,
               const void* delta, const float* weight, void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->RmsNorm(inner, num_rows, dim, eps, x, delta, weight, out);
    });
  }
  void NormInPlace(Queue& queue, int num_rows, int dim, int64_t stride,
                   float eps, const float* weight, void* x) override {
    Run(queue, [&](Queue& inner) {
      inner_->NormInPlace(inner, num_rows, dim, stride, eps, weight, x);
    });
  }
  void LayerNorm(Queue& queue, int num_rows, int dim, float eps, void* x,
                 const void* delta, const float* weight, const float* bias,
                 void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->LayerNorm(inner, num_rows, dim, eps, x, delta, weight, bias, out);
    });
  }
  void CentreHeads(Queue& queue, int num_rows, int heads, int dim,
                   int64_t stride, float eps, const float* weight,
                   void* x) override {
    Run(queue, [&](Queue& inner) {
      inner_->CentreHeads(inner, num_rows, heads, dim, stride, eps, weight, x);
    });
  }
  void MatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
              const float* bias, void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->MatMul(inner, num_rows, x, w, bias, out);
    });
  }
  void MatMulHeads(Queue& queue, int num_rows, int heads, int outputs,
                   const void* x, const Matrix& w, void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->MatMulHeads(inner, num_rows, heads, outputs, x, w, out);
    });
  }
  void Logits(Queue& queue, int num_rows, const void* x, const Matrix& head,
              const float* bias, float* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->Logits(inner, num_rows, x, head, bias, out);
    });
  }
  void ScaleLogits(Queue& queue, int count, int vocab, float scale,
                   float soft_cap, float* logits) override {
    Run(queue, [&](Queue& inner) {
      inner_->ScaleLogits(inner, count, vocab, scale, soft_cap, logits);
    });
  }
  void RopeAppend(Queue& queue, const Rows& rows, int heads,
                  const RopeTable& rope, const HeadNorms& norms, void* qkv,
                  void* kv, KvCache& cache, int layer) override {
    Run(queue, [&](Queue& inner) {
      inner_->RopeAppend(inner, rows, heads, rope, norms, qkv, kv, cache,
                         layer);
    });
  }
  void RopeQueries(Queue& queue, const Rows& rows, int heads, int head_dim,
                   const RopeTable& rope, const HeadNorms& norms,
                   void* q) override {
    Run(queue, [&](Queue& inner) {
      inner_->RopeQueries(inner, rows, heads, head_dim, rope, norms, q);
    });
  }
  void Attention(Queue& queue, const Rows& rows, int heads,
                 const AttentionOptions& options, const void* q,
                 int64_t q_stride, const KvCache& cache, int layer,
                 void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->Attention(inner, rows, heads, options, q, q_stride, cache, layer,
                        out);
    });
  }
  void AttentionWeights(Queue& queue, const Rows& rows, int heads,
                        const AttentionOptions& options, const void* q,
                        int64_t q_stride, const KvCache& cache, int layer,
                        const AttentionLook& look) override {
    Run(queue, [&](Queue& inner) {
      inner_->AttentionWeights(inner, rows, heads, options, q, q_stride, cache,
                               layer, look);
    });
  }
  void GatedMatMul(Queue& queue, int num_rows, const void* x, const Matrix& w,
                   const float* bias, Activation activation,
                   void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->GatedMatMul(inner, num_rows, x, w, bias, activation, out);
    });
  }
  void MatMulHalves(Queue& queue, int num_rows, const void* x, const Matrix& w,
                    void* halves) override {
    Run(queue, [&](Queue& inner) {
      inner_->MatMulHalves(inner, num_rows, x, w, halves);
    });
  }
  void GateHalves(Queue& queue, int num_rows, int dim, Activation activation,
                  const void* halves, void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->GateHalves(inner, num_rows, dim, activation, halves, out);
    });
  }
  void AddLora(Queue& queue, int num_rows, const void* x, const int32_t* slots,
               const LoraFactors& factors, const LoraSum& sum) override {
    Run(queue, [&](Queue& inner) {
      inner_->AddLora(inner, num_rows, x, slots, factors, sum);
    });
  }
  void AddAndScale(Queue& queue, int num_rows, int dim, float scale,
                   const void* delta, void* x) override {
    Run(queue, [&](Queue& inner) {
      inner_->AddAndScale(inner, num_rows, dim, scale, delta, x);
    });
  }
  void Activate(Queue& queue, int num_rows, int dim, Activation activation,
                void* x) override {
    Run(queue, [&](Queue& inner) {
      inner_->Activate(inner, num_rows, dim, activation, x);
    });
  }
  void ActivateTimes(Queue& queue, int num_rows, int dim, Activation activation,
                     const void* by, int64_t by_stride, void* x) override {
    Run(queue, [&](Queue& inner) {
      inner_->ActivateTimes(inner, num_rows, dim, activation, by, by_stride, x);
    });
  }
  void Route(Queue& queue, int num_rows, const RouteOptions& options,
             const float* logits, float* weights) override {
    Run(queue, [&](Queue& inner) {
      inner_->Route(inner, num_rows, options, logits, weights);
    });
  }
  void Experts(Queue& queue, int num_rows, const void* x, const float* weights,
               const ExpertSet& experts, const ExpertOptions& options,
               void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->Experts(inner, num_rows, x, weights, experts, options, out);
    });
  }
  void GatherRows(Queue& queue, int count, int dim, const int32_t* row_ids,
                  const void* x, void* out) override {
    Run(queue, [&](Queue& inner) {
      inner_->GatherRows(inner, count, dim, row_ids, x, out);
    });
  }
  void Sample(Queue& queue, int count, int vocab, float* logits,
              const SampleParams* params, LogitEdit* edits,
              const uint32_t* masks, SampleResult* results) override {
    Run(queue, [&](Queue& inner) {
      inner_->Sample(inner, count, vocab, logits, params, edits, masks,
                     results);
    });
  }
  void KvGather(Queue& queue, const KvCache& cache, const KvRange& range,
                DType wire, uint64_t digest_key, std::byte* staging,
                KvDigest* digest) override {
    Run(queue, [&](Queue& inner) {
      inner_->KvGather(inner, cache, range, wire, digest_key, staging, digest);
    });
  }
  void KvScatter(Queue& queue, KvCache& cache, const KvRange& range, DType wire,
                 const std::byte* staging) override {
    Run(queue, [&](Queue& inner) {
      inner_->KvScatter(inner, cache, range, wire, staging);
    });
  }
  void KvDigestOf(Queue& queue, const KvCache& cache, const KvRange& range,
                  DType wire, uint64_t digest_key, KvDigest* digest) override {
    Run(queue, [&](Queue& inner) {
      inner_->KvDigestOf(inner, cache, range, wire, digest_key, digest);
    });
  }
  void KvCopyBlock(Queue& queue, KvCache& cache, int from_block,
                   int to_block) override {
    Run(queue, [&](Queue& inner) {
      inner_->KvCopyBlock(inner, cache, from_block, to_block);
    });
  }

 private:
  template <typename Operation>
  static void Run(Queue& queue, const Operation& operation) {
    static_cast<LateQueue&>(queue).Run(operation);
  }

  const std::unique_ptr<HiddenArena> arena_;  // outlives what is in it
  const std::unique_ptr<Backend> inner_;
  const uint64_t seed_;
  const int max_delay_microseconds_;
  std::atomic<uint64_t> queues_{0};
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> NewLateBackend(
    const LateOptions& options) {
  auto arena = std::make_unique<HiddenArena>(options.arena_bytes);
  CpuOptions cpu = options.cpu;
  cpu.allocator = arena.get();
  absl::StatusOr<std::unique_ptr<Backend>> inner = NewCpuBackend(cpu);
  if (!inner.ok()) return inner.status();
  return std::unique_ptr<Backend>(std::make_unique<LateBackend>(
      std::move(arena), *std::move(inner), options));
}

}  // namespace tandem::kernels::testing
