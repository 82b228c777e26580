// SPDX-License-Identifier: Apache-2.0
// Threads that compile what requests ask their output to match, to see whether
// it can be. Not more than half of the cores: a source takes one for as long as
// it is being compiled.

#ifndef TANDEM_ROUTER_INTAKE_STRUCTURED_CHECKERS_H_
#define TANDEM_ROUTER_INTAKE_STRUCTURED_CHECKERS_H_

#include <deque>
#include <thread>
#include <vector>

#include "common/loop.h"
#include "common/mutex.h"
#include "router/intake/model_text.h"
#include "router/intake/structured_gate.h"

namespace tandem::router {

class StructuredCheckers final : public StructuredChecker {
 public:
  // Both outlive this. With it go checks that wait; one that runs is awaited,
  // for no longer than its budget.
  StructuredCheckers(const ModelText* model, const StructuredBudget& budget,
                     Loop* loop);
  ~StructuredCheckers() override;

  // Even, so that a tenant may have half of them.
  int threads() const { return static_cast<int>(threads_.size()); }

  bool Known(const v1::StructuredOptions& structured) const override {
    return model_->KnowsStructured(structured);
  }
  void Check(const v1::StructuredOptions& structured, Done done) override;

 private:
  struct Job {
    v1::StructuredOptions structured;
    Done done;
  };

  void Run();

  const ModelText* const model_;
  const StructuredBudget budget_;
  Loop* const loop_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);  // the gate bounds them
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_INTAKE_STRUCTURED_CHECKERS_H_
