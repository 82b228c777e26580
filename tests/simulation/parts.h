// SPDX-License-Identifier: Apache-2.0
// How the cores of a simulated cluster are set up: small pools, small slabs,
// small steps, so that everything that can run short does.

#ifndef TANDEM_TESTS_SIMULATION_PARTS_H_
#define TANDEM_TESTS_SIMULATION_PARTS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/random.h"
#include "decode_worker/core.h"
#include "engine/testing/fake_executor.h"
#include "engine/testing/fake_grammar.h"
#include "prefill_worker/core.h"
#include "router/core/core.h"
#include "router/validate/validate.h"
#include "tandem/v1/registry.pb.h"
#include "worker/grammars.h"

namespace tandem::simulation {

inline constexpr int kMaxModelLen = 256;
inline constexpr int kVocabulary = 500;
inline constexpr int kLeastBlocks = 28;  // of 16, of a decode worker

// `window`: positions that its layers see, but for the first `full_layers`; 0:
// all.
engine::FakeModel Model(int window = 0, int full_layers = 0);
// What sequences of it let go.
engine::KvWindow WindowOf(const engine::FakeModel& model);
// As handoff::WireLayers has them.
std::vector<bool> WindowedLayers(const engine::FakeModel& model);
router::ModelLimits Limits();

v1::WorkerHello MakeHello(const std::string& name, v1::WorkerRole role,
                          const std::string& incarnation,
                          const kernels::KvShape& shape);
decode_worker::DecodeOptions MakeDecodeOptions(const std::string& name,
                                               const std::string& incarnation,
                                               const kernels::KvShape& shape);
prefill_worker::PrefillOptions MakePrefillOptions(
    const std::string& name, const std::string& incarnation,
    const kernels::KvShape& shape);
router::RouterOptions MakeRouterOptions(const std::string& incarnation);

// Of what a request asks for by a number in place of a regex. Compiling takes
// some time, now and then too long; so does following an output.
engine::FakeGrammar GrammarOf(const v1::StructuredParams& params);
class FakeGrammars final : public worker::Grammars {
 public:
  FakeGrammars(Loop* loop, Random* random) : loop_(loop), random_(random) {}
  uint64_t Compile(worker::GrammarOrder order, Done done) override;
  void Cancel(uint64_t number) override;
  int compiling() const { return static_cast<int>(orders_.size()); }

 private:
  Loop* const loop_;
  Random* const random_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::unique_ptr<Timer>> orders_;
};

// A request as a router admits it, and the tokens that must come.
struct Order {
  router::AdmittedRequest admitted;
  std::vector<std::vector<int32_t>> expected;  // of each sequence
  // Of the prompt from position 1 on, if they are asked for.
  std::vector<engine::SampledToken> scores;
};
// `shared` is a prompt that half of the orders begin with.
absl::StatusOr<Order> DrawOrder(const std::vector<int32_t>& shared,
                                Random* random,
                                const engine::FakeModel& model = Model());

}  // namespace tandem::simulation

#endif  // TANDEM_TESTS_SIMULATION_PARTS_H_
