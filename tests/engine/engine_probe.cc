// SPDX-License-Identifier: Apache-2.0
// Lets programs in other languages ask the engine: reads lines of
// "STEPS ID ID ..." and answers each with one JSON object, the logits of the
// first and the last position and STEPS greedy ids. For tools/oracle. With
// "cuda" it asks the CUDA backend in f32 (test_device.h).

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"

int main(int argc, char** argv) {
  using namespace tandem::engine;
  const bool cuda = argc == 3 && std::string(argv[2]) == "cuda";
  if (argc != 2 && !cuda) {
    std::fprintf(stderr, "usage: engine_probe MODEL_DIR [cuda] < REQUESTS\n");
    return 2;
  }
  const auto backend =
      cuda ? NewTestDevice(tandem::kernels::DType::kF32) : NewCpu(2);
  RigOptions options;
  if (cuda) {
    options.load.weight_dtype = backend->activation_type();
    options.executor.max_rows = 128;
    options.executor.max_sequences = 4;
    options.executor.num_blocks = 64;
  }
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    int steps = 0;
    words >> steps;
    std::vector<int32_t> ids;
    for (int32_t id; words >> id;) ids.push_back(id);
    Rig rig(argv[1], backend.get(), options);
    const int length = static_cast<int>(ids.size());
    TestSequence sequence = rig.NewSequence(ids, length + steps + 1);
    TestSequence* one = &sequence;
    const StepOutput first = rig.Advance({&one, 1}, 1);
    sequence.computed = 0;
    const StepOutput last = rig.Advance({&one, 1}, length);
    if (!first.status.ok() || !last.status.ok()) {
      std::fprintf(stderr, "%s\n", last.status.ToString().c_str());
      return 1;
    }
    sequence.ids.push_back(last.tokens[0].token_id);
    rig.Greedy({&one, 1}, 512, steps - 1);
    const nlohmann::json answer = {
        {"first", first.logits[0]},
        {"last", last.logits[0]},
        {"greedy", std::vector<int32_t>(sequence.ids.begin() + length,
                                        sequence.ids.end())}};
    std::cout << answer.dump() << std::endl;
  }
  return 0;
}
