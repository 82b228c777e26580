// SPDX-License-Identifier: Apache-2.0
// An Executor that passes everything on and observes each step: its duration,
// its rows by phase, and its work, counted.

#ifndef TANDEM_WORKER_MEASURED_EXECUTOR_H_
#define TANDEM_WORKER_MEASURED_EXECUTOR_H_

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "common/flight_recorder.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "engine/executor.h"
#include "engine/work.h"

namespace tandem::worker {

// Counted and not measured: engine/work.h says what each is.
class WorkMetrics {
 public:
  explicit WorkMetrics(Metrics* metrics)
      : kv_rows_(metrics->AddCounter("tandem_kv_rows_computed_total",
                                     "K/V rows computed, all layers and KV "
                                     "heads")),
        attended_(metrics->AddCounter("tandem_positions_attended_total",
                                      "Positions that drawn tokens looked at, "
                                      "all layers and heads")),
        weights_(metrics->AddCounter("tandem_read_bytes_total",
                                     "Bytes that steps read",
                                     {{"of", "weights"}})),
        kv_(metrics->AddCounter("tandem_read_bytes_total",
                                "Bytes that steps read", {{"of", "kv"}})),
        kv_written_(metrics->AddCounter("tandem_kv_written_bytes_total",
                                        "Bytes of K and V written by steps")),
        matrix_(metrics->AddCounter("tandem_flops_total",
                                    "Floating-point operations of steps",
                                    {{"of", "matrices"}})),
        attention_(metrics->AddCounter("tandem_flops_total",
                                       "Floating-point operations of steps",
                                       {{"of", "attention"}})) {}

  void Add(const engine::Work& work) {
    kv_rows_.Add(static_cast<double>(work.kv_rows));
    attended_.Add(static_cast<double>(work.positions_attended));
    weights_.Add(static_cast<double>(work.weight_bytes));
    kv_.Add(static_cast<double>(work.kv_bytes_read));
    kv_written_.Add(static_cast<double>(work.kv_bytes_written));
    matrix_.Add(static_cast<double>(work.matrix_flops));
    attention_.Add(static_cast<double>(work.attention_flops));
  }

 private:
  Counter& kv_rows_;
  Counter& attended_;
  Counter& weights_;
  Counter& kv_;
  Counter& kv_written_;
  Counter& matrix_;
  Counter& attention_;
};

class MeasuredExecutor final : public engine::Executor {
 public:
  // `phase`: of all steps, where it is not null; else what they hold says it.
  MeasuredExecutor(engine::Executor* inner, Loop* loop, Metrics* metrics,
                   const engine::WorkShape& shape, const char* phase = nullptr)
      : inner_(inner),
        loop_(loop),
        duration_(metrics->AddHistograms("tandem_step_duration_seconds",
                                         "One forward pass of a batch",
                                         kStageTimeBuckets, "phase", 3)),
        tokens_(metrics->AddHistograms("tandem_step_batch_tokens",
                                       "Positions computed per step",
                                       TokenCountBuckets(8192), "phase", 3)),
        shape_(shape),
        phase_(phase),
        work_(metrics) {}

  void Submit(const engine::Step* step,
              engine::StepListener* listener) override {
    auto observer = std::make_unique<Observer>(this, listener);
    Observer* const raw = observer.get();
    raw->begun = loop_->Now();
    bool prefill = false, decode = false;
    for (const engine::StepEntry& entry : step->entries) {
      raw->rows += static_cast<int>(entry.tokens.size());
      const auto draws = static_cast<int64_t>(entry.draws.size());
      raw->drawn += draws;
      const auto rows = static_cast<int64_t>(entry.tokens.size());
      raw->work += shape_.EntryWork(entry.position, rows, draws);
      // Guesses that are verified are rows too, and each is drawn behind.
      (rows > std::max<int64_t>(draws, 1) ? prefill : decode) = true;
    }
    raw->work.weight_bytes = shape_.StepWeightBytes(raw->rows, raw->drawn);
    raw->phase = phase_ != nullptr ? phase_
                 : !prefill        ? "decode"
                 : !decode         ? "prefill"
                                   : "mixed";
    flight::Record(
        flight::Event::kStep,
        {.m = static_cast<int64_t>(step->entries.size()), .n = raw->rows});
    in_flight_.emplace(step->id, std::move(observer));
    inner_->Submit(step, raw);
  }
  void Gather(const engine::KvPart& part, kernels::DType wire,
              uint64_t digest_key, std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    inner_->Gather(part, wire, digest_key, staging, std::move(done));
  }
  void Scatter(const engine::KvPart& part, kernels::DType wire,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override {
    inner_->Scatter(part, wire, staging, std::move(done));
  }
  void Digest(const engine::KvPart& part, kernels::DType wire,
              uint64_t digest_key,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    inner_->Digest(part, wire, digest_key, std::move(done));
  }
  const kernels::KvShape& kv_shape() const override {
    return inner_->kv_shape();
  }

 private:
  struct Observer final : engine::StepListener {
    Observer(MeasuredExecutor* o, engine::StepListener* l)
        : owner(o), listener(l) {}
    void OnLayersDone(uint64_t step_id, int layers_done) override {
      listener->OnLayersDone(step_id, layers_done);
    }
    void OnStepDone(uint64_t step_id,
                    absl::StatusOr<engine::StepResult> result) override {
      const absl::Duration took = owner->loop_->Now() - begun;
      owner->duration_[phase].Observe(absl::ToDoubleSeconds(took));
      owner->tokens_[phase].Observe(rows);
      flight::Record(flight::Event::kStepDone,
                     {.m = absl::ToInt64Microseconds(took)});
      if (result.ok()) owner->work_.Add(work);
      const auto self = owner->in_flight_.extract(step_id);
      listener->OnStepDone(step_id, std::move(result));
    }

    MeasuredExecutor* const owner;
    engine::StepListener* const listener;
    absl::Time begun;
    int rows = 0;
    int64_t drawn = 0;
    engine::Work work;
    const char* phase = "";
  };

  engine::Executor* const inner_;
  Loop* const loop_;
  HistogramSet& duration_;
  HistogramSet& tokens_;
  const engine::WorkShape shape_;
  const char* const phase_;
  WorkMetrics work_;
  std::map<uint64_t, std::unique_ptr<Observer>> in_flight_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_MEASURED_EXECUTOR_H_
