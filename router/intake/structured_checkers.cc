// SPDX-License-Identifier: Apache-2.0
#include "router/intake/structured_checkers.h"

#include <algorithm>
#include <utility>

#include "common/available_cpus.h"

namespace tandem::router {
namespace {

int ThreadsFor(int cpus) { return std::clamp(cpus / 4 * 2, 2, 4); }

}  // namespace

StructuredCheckers::StructuredCheckers(const ModelText* model,
                                       const StructuredBudget& budget,
                                       Loop* loop)
    : model_(model), budget_(budget), loop_(loop) {
  const int count = ThreadsFor(AvailableCpus());
  for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Run(); });
}

StructuredCheckers::~StructuredCheckers() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void StructuredCheckers::Check(const v1::StructuredOptions& structured,
                               Done done) {
  {
    const MutexLock lock(&mutex_);
    jobs_.push_back({structured, std::move(done)});
  }
  wake_.NotifyOne();
}

void StructuredCheckers::Run() {
  while (true) {
    Job job;
    {
      const MutexLock lock(&mutex_);
      while (jobs_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    absl::Status status = model_->CheckStructured(job.structured, budget_);
    loop_->Post(
        [done = std::move(job.done), status = std::move(status)]() mutable {
          done(std::move(status));
        });
  }
}

}  // namespace tandem::router
