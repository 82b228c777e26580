// SPDX-License-Identifier: Apache-2.0
// Requests through the worker's own engine, one after the other, timed and
// counted: with the KV cache, and without it, where each step begins at
// position 0 again. Both ways draw greedily, and must draw the same tokens.

#ifndef TANDEM_CLI_EXPLAIN_TIMING_H_
#define TANDEM_CLI_EXPLAIN_TIMING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "cli/explain/counts.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::engine {
class Model;
}  // namespace tandem::engine
namespace tandem::kernels {
class Backend;
}  // namespace tandem::kernels

namespace tandem::explain {

// Of the steps of one request, in order; the first one is the prefill.
struct Timing {
  Lengths lengths;
  std::vector<double> with_seconds;     // [output]
  std::vector<double> without_seconds;  // [output]
  std::vector<int32_t> tokens;          // [output], the same both ways
  Work with_work = {};                  // as workers count it
  Work without_work = {};

  double with_total() const;
  double without_total() const;
  // Seconds for each prompt token of the first step, with the cache.
  double prefill_per_token() const;
  // The median of the later steps with the cache; 0 if there is none.
  double decode_per_token() const;
};

struct TimingOptions {
  std::string directory;  // with weights
  Formats formats = {};
  int block_size = 16;
  int threads = 0;  // 0: one per CPU
};

// Hears how much of the work is done, 0 to 1.
using TimingProgress = absl::FunctionRef<void(double share)>;

// Holds the model.
class RequestTimer {
 public:
  static absl::StatusOr<std::unique_ptr<RequestTimer>> Load(
      const engine::ModelSpec& spec, const TimingOptions& options);
  ~RequestTimer();
  RequestTimer(const RequestTimer&) = delete;
  RequestTimer& operator=(const RequestTimer&) = delete;

  // Runs the prompt, which is made up, both ways, after a warm-up. `lengths`:
  // at most spec.max_positions together. INTERNAL: the two ways differ in a
  // token.
  absl::StatusOr<Timing> Time(Lengths lengths, TimingProgress progress);

 private:
  RequestTimer(const engine::ModelSpec& spec, const TimingOptions& options);

  const engine::ModelSpec spec_;
  const TimingOptions options_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<engine::Model> model_;
};

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_TIMING_H_
